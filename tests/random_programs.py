"""Random valid programs of any graph, and the training step that several tests plan."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hapsynth.graph import Graph
from hapsynth.instructions.collectives import step_between
from hapsynth.instructions.layout import Layout, Placement, R, S
from hapsynth.instructions.program import Compute, Convert, FactorTable, Instruction, Program
from hapsynth.instructions.sizes import Classes, Sizes


class RandomProgram:
    """Draws a valid program: any triple of each op whose operands can be had, converted by any valid steps."""

    def __init__(self, graph: Graph, n: int, rng: random.Random, eager: float = 0.85) -> None:
        self.graph, self.n, self.rng, self.eager = graph, n, rng, eager
        self.table = FactorTable(graph)
        self.held: dict[int, list[Placement]] = {}
        self.instructions: list[Instruction] = []

    def dims(self, value: int) -> list[Placement]:
        v = self.graph.values[value]
        plain = not jax.dtypes.issubdtype(v.dtype, jax.dtypes.extended)
        return [S(d) for d, size in enumerate(v.shape) if size > 1 and plain]

    def draw(self, value: int) -> Placement:
        cuts = self.dims(value)
        return self.rng.choice(cuts) if cuts and self.rng.random() < self.eager else R

    def convert(self, value: int, source: Placement, target: Placement) -> None:
        if target not in self.held[value]:
            self.instructions.append(Convert(value, 0, (source,), (target,)))
            self.held[value].append(target)

    def want(self, value: int, target: Placement) -> None:
        """Make `value | target` available, now and then by a detour."""
        held = self.held[value]
        if target in held:
            return
        sources = [s for s in held if step_between(s, target)]
        if sources and self.rng.random() < 0.7:
            return self.convert(value, self.rng.choice(sources), target)
        source = self.rng.choice(held)
        between = [
            p for p in (R, *self.dims(value)) if p != source and step_between(source, p) and step_between(p, target)
        ]
        if between:
            middle = self.rng.choice(between)
            self.convert(value, source, middle)
            source = middle
        elif not step_between(source, target):
            source = self.rng.choice(sources)
        self.convert(value, source, target)

    def build(self) -> Program:
        graph = self.graph
        inputs: dict[int, Layout] = {}
        for v in graph.sources:
            placement = self.draw(v)
            inputs[v], self.held[v] = (placement,), [placement]
        for op in graph.ops:
            triples = [
                t
                for t in self.table[op.index].triples
                if all(not t.operands[p].is_partial or t.operands[p] in self.held[v] for p, v in op.value_operands)
            ]
            cut = [t for t in triples if t.factor is not None or any(p.is_partial for p in t.operands)]
            triple = self.rng.choice(cut) if cut and self.rng.random() < self.eager else self.rng.choice(triples)
            for position, v in op.value_operands:
                self.want(v, triple.operands[position])
            self.instructions.append(Compute(op.index, (triple,)))
            for result, placement in zip(op.results, triple.results):
                self.held[result] = [placement]
        carried = {o: inputs[graph.inputs[i]][0] for i, o in graph.carry}
        outputs: list[Layout | None] = []
        for position, v in enumerate(graph.outputs):
            if not isinstance(v, int):
                outputs.append(None)
                continue
            whole = [p for p in self.held[v] if not p.is_partial]
            keep = bool(whole) and self.rng.random() < 0.5
            target = carried.get(position, self.rng.choice(whole) if keep else self.draw(v))
            self.want(v, target)
            outputs.append((target,))
        return Program((("hap", self.n),), inputs, tuple(self.instructions), tuple(outputs))

    def sizes(self, program: Program, mode: str) -> Sizes:
        classes = Classes.build(self.graph, program, self.table)
        return Sizes(self.graph, classes, tuple(self.share(c.units, mode) for c in classes.all))

    def share(self, units: int, mode: str) -> tuple[int, ...]:
        if mode == "equal":
            return tuple(units // self.n + (i < units % self.n) for i in range(self.n))
        if mode == "one":
            holder = self.rng.randrange(self.n)
            return tuple(units if i == holder else 0 for i in range(self.n))
        weights = [self.rng.random() + 0.1 for _ in range(self.n)]
        if mode == "zeros":
            weights = [w if i == 1 or self.rng.random() < 0.6 else 0.0 for i, w in enumerate(weights)]
        shares = [0] * self.n
        for unit in self.rng.choices(range(self.n), weights, k=units):
            shares[unit] += 1
        return tuple(shares)


rng = np.random.default_rng(0)
floats = lambda *shape: rng.normal(size=shape).astype(np.float32)


def mlp_step(params: Any, batch: Any) -> Any:
    """Two layers with bias, softmax cross-entropy, gradient, momentum."""

    def loss(p: Any) -> Any:
        h = jnp.tanh(batch["x"] @ p["w1"] + p["b1"])
        logits = h @ p["w2"]
        z = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        return -jnp.mean(jnp.sum(batch["y"] * (z - jnp.log(jnp.exp(z).sum(-1, keepdims=True))), -1))

    value, grads = jax.value_and_grad(loss)(params["p"])
    m = jax.tree.map(lambda m, g: 0.9 * m + g, params["m"], grads)
    return {"p": jax.tree.map(lambda p, m: p - 0.1 * m, params["p"], m), "m": m}, value


def mlp_args() -> Any:
    p = {"w1": floats(6, 10), "b1": floats(10), "w2": floats(10, 7)}
    state = {"p": p, "m": jax.tree.map(lambda x: floats(*x.shape), p)}
    return state, {"x": floats(9, 6), "y": floats(9, 7)}
