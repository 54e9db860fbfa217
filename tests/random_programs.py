"""Random valid programs of any graph, and the training step that several tests plan."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hapsynth.graph import Graph
from hapsynth.instructions.collectives import axis_between
from hapsynth.instructions.factors import Triples, can_be
from hapsynth.instructions.layout import Layout, P, Placement, R, S, is_consistent
from hapsynth.instructions.program import Compute, Convert, FactorTable, Instruction, Program
from hapsynth.instructions.sizes import Classes, Sizes


class RandomProgram:
    """Draws a valid program: any triples of each op whose operands can be had, converted by any valid steps.

    `axes`: those of the mesh, or the length of its only one.
    """

    def __init__(
        self, graph: Graph, axes: int | tuple[tuple[str, int], ...], rng: random.Random, eager: float = 0.85
    ) -> None:
        self.graph, self.rng, self.eager = graph, rng, eager
        self.axes = (("hap", axes),) if isinstance(axes, int) else axes
        self.whole: Layout = (R,) * len(self.axes)
        self.table = FactorTable(graph)
        self.held: dict[int, list[Layout]] = {}
        self.instructions: list[Instruction] = []

    def placements(self, value: int) -> list[Placement]:
        """What conversions can make of a value along one axis."""
        v = self.graph.values[value]
        plain = not jax.dtypes.issubdtype(v.dtype, jax.dtypes.extended)
        cuts = [S(d, k) for d, size in enumerate(v.shape) if size > 1 and plain for k in range(len(self.axes))]
        return [R, *cuts, *([P("sum")] if can_be(P("sum"), v.dtype) else [])]

    def draw(self, value: int) -> Layout:
        """A layout in which a value can be stored."""
        kinds = [p for p in self.placements(value) if p.is_sharded]
        while True:
            drawn = tuple(self.rng.choice(kinds) if kinds and self.rng.random() < self.eager else R for _ in self.axes)
            if is_consistent(drawn):
                return drawn

    def neighbours(self, value: int, layout: Layout) -> list[Layout]:
        found = [(*layout[:a], p, *layout[a + 1 :]) for a in range(len(layout)) for p in self.placements(value)]
        found = [other for other in found if axis_between(layout, other) is not None]
        self.rng.shuffle(found)
        return found

    def path(self, value: int, target: Layout) -> list[Layout] | None:
        """A shortest path of single steps to a layout, from one that is held."""
        held = list(self.held[value])
        self.rng.shuffle(held)
        before: dict[Layout, Layout | None] = dict.fromkeys(held)
        queue = list(before)
        for layout in queue:
            if target in before:
                break
            for other in self.neighbours(value, layout):
                if other not in before:
                    before[other] = layout
                    queue.append(other)
        if target not in before:
            return None
        path = [target]
        while (last := before[path[-1]]) is not None:
            path.append(last)
        return path[::-1]

    def want(self, value: int, target: Layout) -> None:
        """Make `value | target` available, now and then by a detour."""
        if target in self.held[value]:
            return
        stops = [target]
        if self.rng.random() < 0.2:
            stops.insert(0, self.draw(value))
        for stop in stops:
            path = self.path(value, stop)
            assert path is not None
            for source, layout in pairwise(path):
                if layout not in self.held[value]:
                    axis = axis_between(source, layout)
                    assert axis is not None
                    self.instructions.append(Convert(value, axis, source, layout))
                    self.held[value].append(layout)

    def can_have(self, value: int, target: Layout) -> bool:
        """Partial operands must mostly come about by themselves; along each axis one by one."""
        if not any(p.is_partial for p in target) or target in self.held[value]:
            return True
        return self.rng.random() < 0.2 and self.path(value, target) is not None

    def triples(self, op: int) -> Triples:
        known = list(self.table[op].joint(len(self.axes)))
        operands = self.graph.ops[op].value_operands
        self.rng.shuffle(known)
        cuts = lambda ts: sum(t.factor is not None or any(p.is_partial for p in t.operands) for t in ts)
        if self.rng.random() < self.eager:
            known.sort(key=lambda ts: -cuts(ts))
        fits = lambda ts: all(self.can_have(v, tuple(t.operands[p] for t in ts)) for p, v in operands)
        return next(filter(fits, known))

    def build(self) -> Program:
        graph = self.graph
        inputs: dict[int, Layout] = {}
        for v in graph.sources:
            inputs[v] = self.draw(v)
            self.held[v] = [inputs[v]]
        for op in graph.ops:
            compute = Compute(op.index, self.triples(op.index))
            for position, v in op.value_operands:
                self.want(v, compute.operand_layout(position))
            self.instructions.append(compute)
            for position, result in enumerate(op.results):
                self.held[result] = [compute.result_layout(position)]
        carried = {o: inputs[graph.inputs[i]] for i, o in graph.carry}
        outputs: list[Layout | None] = []
        for position, v in enumerate(graph.outputs):
            if not isinstance(v, int):
                outputs.append(None)
                continue
            whole = [layout for layout in self.held[v] if not any(p.is_partial for p in layout)]
            keep = bool(whole) and self.rng.random() < 0.5
            target = carried.get(position, self.rng.choice(whole) if keep else self.draw(v))
            self.want(v, target)
            outputs.append(target)
        return Program(self.axes, inputs, tuple(self.instructions), tuple(outputs))

    def sizes(self, program: Program, mode: str) -> Sizes:
        classes = Classes.build(self.graph, program, self.table)
        shares = (self.share(c.units, classes.positions(c.index), mode) for c in classes.all)
        return Sizes(self.graph, classes, tuple(shares))

    def share(self, units: int, n: int, mode: str) -> tuple[int, ...]:
        if mode == "equal":
            return tuple(units // n + (i < units % n) for i in range(n))
        if mode == "one":
            holder = self.rng.randrange(n)
            return tuple(units if i == holder else 0 for i in range(n))
        weights = [self.rng.random() + 0.1 for _ in range(n)]
        if mode == "zeros":
            weights = [w if i == 1 or self.rng.random() < 0.6 else 0.0 for i, w in enumerate(weights)]
        shares = [0] * n
        for unit in self.rng.choices(range(n), weights, k=units):
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
