"""Random valid programs of any graph, and the training step that several tests plan."""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hapsynth.graph.ir import COND_JOIN, LOOP_CARRY, SCAN_SLICE, SCAN_STACK, Graph, Op
from hapsynth.instructions.collectives import Hosts, axis_between, steps_between
from hapsynth.instructions.factors import Triples, can_be
from hapsynth.instructions.layout import Layout, O, P, Placement, R, S, cuts_of, is_consistent, orders
from hapsynth.instructions.program.program import Compute, Convert, Instruction, Program
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.instructions.rules.factor_table import FactorTable

EDGES = (LOOP_CARRY, SCAN_SLICE, COND_JOIN)


def nests(layout: Layout) -> bool:
    """Whether the axes that cut each dimension do so in one of their `orders`."""
    return all(by in orders(tuple(sorted(by)), len(layout)) for _, by, _ in cuts_of(layout))


class RandomProgram:
    """Draws a valid program: any triples of each op whose operands can be had, converted by any valid steps.

    `axes`: those of the mesh, or the length of its only one. Which part of the ops are `eager` to be cut, and which to
    make or take on partial results (`late`). `owned`: values and ops may have owners, by far the most of those that
    can. make or take on partial results (`late`). `hosts`: as of `Program`; without any nothing goes over hosts.
    """

    def __init__(
        self,
        graph: Graph,
        axes: int | tuple[tuple[str, int], ...],
        rng: random.Random,
        eager: float = 0.85,
        late: float = 0.0,
        owned: bool = False,
        hosts: tuple[Hosts, ...] = (),
    ) -> None:
        self.graph, self.rng, self.eager, self.late = graph, rng, eager, late
        self.owned = owned
        self.axes = (("hap", axes),) if isinstance(axes, int) else axes
        self.hosts = hosts
        self.whole: Layout = (R,) * len(self.axes)
        self.table = FactorTable(graph)
        self.held: dict[int, list[tuple[Layout, int]]] = {}
        """Value -> its layouts, each with the region in which it was made."""
        self.chosen: dict[int, Compute] = {}
        self.instructions: list[Instruction] = []

    def placements(self, value: int) -> list[Placement]:
        """The placements that conversions can give a value along one axis."""
        v = self.graph.values[value]
        plain = not jax.dtypes.issubdtype(v.dtype, jax.dtypes.extended)
        cuts = [S(d, k) for d, size in enumerate(v.shape) if size > 1 and plain for k in range(len(self.axes))]
        owners = min(n for _, n in self.axes) if self.owned and v.shape and plain else 0
        return [R, *cuts, *map(O, range(owners)), *([P("sum")] if can_be(P("sum"), v.dtype) else [])]

    def draw(self, value: int) -> Layout:
        """A layout in which a value can be stored."""
        kinds = [p for p in self.placements(value) if p.is_sharded]
        while True:
            drawn = tuple(self.rng.choice(kinds) if kinds and self.rng.random() < self.eager else R for _ in self.axes)
            if is_consistent(drawn) and nests(drawn):
                return drawn

    def neighbours(self, value: int, layout: Layout) -> list[Layout]:
        found = [(*layout[:a], p, *layout[a + 1 :]) for a in range(len(layout)) for p in self.placements(value)]
        found = [other for other in found if axis_between(layout, other) is not None and nests(other)]
        self.rng.shuffle(found)
        return found

    def available(self, value: int, region: int) -> list[Layout]:
        """The layouts that a region finds: its own and those around it; a test finds nothing of its loop's body."""
        regions = self.graph.regions
        around = self.graph.around(region)
        bodies = {regions[r].parent for r in around if regions[r].kind == "test"}
        return [layout for layout, r in self.held[value] if r in around and r not in bodies]

    def path(self, value: int, target: Layout, region: int) -> list[Layout] | None:
        """A shortest path of single steps to a layout, from one that is held."""
        held = self.available(value, region)
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

    def want(self, value: int, target: Layout, region: int = 0) -> None:
        """Make `value | target` available, now and then by a detour."""
        if target in self.available(value, region):
            return
        stops = [target]
        if self.rng.random() < 0.2:
            stops.insert(0, self.draw(value))
        for stop in stops:
            path = self.path(value, stop, region)
            assert path is not None
            for source, layout in pairwise(path):
                if layout not in self.available(value, region):
                    axis = axis_between(source, layout)
                    assert axis is not None
                    there = self.hosts[axis] if self.hosts else ()
                    steps = [step for step in steps_between(source[axis], layout[axis]) if step.goes_over(there)]
                    # Those that do the same, in turn.
                    step = steps[len(self.instructions) % len(steps)]
                    self.instructions.append(Convert(value, axis, source, layout, region).with_step(step))
                    self.held[value].append((layout, region))

    def can_have(self, value: int, target: Layout, region: int) -> bool:
        """Partial operands must mostly come about by themselves; along each axis one by one."""
        if not any(p.is_partial for p in target) or target in self.available(value, region):
            return True
        return self.rng.random() < 0.2 and self.path(value, target, region) is not None

    def choose(self, op: Op) -> Compute:
        """Any triples whose operands can be had; none that are partial where they are not made yet."""
        factors = self.table[op.index]
        known = list(factors.joint(len(self.axes), self.owned))
        owner = self.rng.randrange(min(n for _, n in self.axes)) if self.owned else 0
        self.rng.shuffle(known)
        cuts = lambda ts: sum(t.factor is not None or any(p.is_partial for p in t.operands) for t in ts)
        if self.rng.random() < self.eager:
            known.sort(key=lambda ts: -cuts(ts))
        if self.late and self.rng.random() < self.late:
            known.sort(key=lambda ts: -sum(p.is_partial for t in ts for p in (*t.operands, *t.results)))

        def fits(ts: Triples) -> bool:
            if op.primitive in EDGES:
                return not any(p.is_partial for t in ts for p in t.operands)
            return all(self.can_have(v, tuple(t.operands[p] for t in ts), op.region) for p, v in op.value_operands)

        asked = (factors.owned_by(ts, owner) for ts in known) if self.owned else iter(known)
        return Compute(op.index, next(filter(fits, asked)))

    def read(self, compute: Compute, regions: Collection[int]) -> None:
        """Have the operands that are read in some regions."""
        op = self.graph.ops[compute.op]
        for position, v in op.value_operands:
            if (region := self.graph.read_in(op, position)) in regions:
                self.want(v, compute.operand_layout(position), region)

    def edge(self, region: int, *primitives: Any) -> list[Op]:
        return [op for op in self.graph.ops if op.region == region and op.primitive in primitives]

    def open(self, region: int) -> None:
        """Values that enter a loop, and that decide a cond, must be there before."""
        for op in self.edge(region, *EDGES):
            self.chosen[op.index] = self.choose(op)
            self.read(self.chosen[op.index], [self.graph.regions[region].parent])

    def close(self, region: int) -> None:
        """Values that a loop carries on, and that a cond joins, must be there at the end."""
        for op in self.edge(region, LOOP_CARRY):
            self.want(self.graph.ties[op.index], self.chosen[op.index].result_layout(0), region)
        for op in self.edge(self.graph.regions[region].parent, COND_JOIN) if region else ():
            self.read(self.chosen[op.index], [region])

    def lands_in(self, op: Op, position: int) -> int:
        """The region in which a result can be read."""
        out = self.graph.regions[op.region].parent
        if op.primitive is LOOP_CARRY and position == 2:
            return self.graph.test(op.region)
        leaves = op.primitive in (SCAN_STACK, COND_JOIN) or (op.primitive is LOOP_CARRY and position == 1)
        return out if leaves else op.region

    def build(self) -> Program:
        graph = self.graph
        inputs: dict[int, Layout] = {}
        for v in graph.sources:
            inputs[v] = self.draw(v)
            self.held[v] = [(inputs[v], 0)]
        opened = [0]
        for op in graph.ops:
            around = graph.around(op.region)
            while opened[-1] not in around:
                self.close(opened.pop())
            for region in reversed(around[: around.index(opened[-1])]):
                opened.append(region)
                self.open(region)
            compute = self.chosen[op.index] if op.index in self.chosen else self.choose(op)
            self.read(compute, range(len(graph.regions)))
            self.instructions.append(compute)
            for position, result in enumerate(op.results):
                self.held[result] = [(compute.result_layout(position), self.lands_in(op, position))]
        while len(opened) > 1:
            self.close(opened.pop())
        carried = {o: inputs[graph.inputs[i]] for i, o in graph.carry}
        outputs: list[Layout | None] = []
        for position, v in enumerate(graph.outputs):
            if not isinstance(v, int):
                outputs.append(None)
                continue
            whole = [layout for layout in self.available(v, 0) if not any(p.is_partial for p in layout)]
            keep = bool(whole) and self.rng.random() < 0.5
            target = carried.get(position, self.rng.choice(whole) if keep else self.draw(v))
            self.want(v, target)
            outputs.append(target)
        return Program(self.axes, inputs, tuple(self.instructions), tuple(outputs), self.hosts)

    def sizes(self, program: Program, mode: str) -> Sizes:
        classes = Classes.build(self.graph, program, self.table)
        owned, of = classes.owned, classes.positions
        shares = (owned.get(c.index) or self.share(c.units, of(c.index), mode) for c in classes.all)
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
    """The same at every call, whatever other tests have drawn."""
    own = np.random.default_rng(1)
    floats = lambda *shape: own.normal(size=shape).astype(np.float32)
    p = {"w1": floats(6, 10), "b1": floats(10), "w2": floats(10, 7)}
    state = {"p": p, "m": jax.tree.map(lambda x: floats(*x.shape), p)}
    return state, {"x": floats(9, 6), "y": floats(9, 7)}
