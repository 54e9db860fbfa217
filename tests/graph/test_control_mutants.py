"""Programs with loops and branches that no search made: each is refused by the checker, or computes what it should.

A walk from a planned program: every step changes it a little, and is taken where the checker accepts the result. Where
the walk ends is lowered at drawn shares, many of them zero, and run.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import CASES
from slow_devices import SPEEDS, first_devices, thin_cluster

import hapsynth
from hapsynth.graph.ir import Graph
from hapsynth.instructions.collectives import step_between
from hapsynth.instructions.factors import Triple
from hapsynth.instructions.layout import P, Placement, R, S
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import (
    Compute,
    Convert,
    Instruction,
    Program,
    ProgramError,
    reads,
    region_of,
    writes,
)
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.lower import Lowered
from hapsynth.running.check import relative_error

STEPS = 200
DEVICES = 4


class Walk:
    def __init__(self, graph: Graph, program: Program, seed: int) -> None:
        self.graph, self.program, self.table = graph, program, FactorTable(graph)
        self.rng = np.random.default_rng(seed)
        self.taken = 0

    def pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def run(self, steps: int) -> Program:
        moves = (self.drop, self.move, self.again, self.retriple, self.place, self.insert, self.store, self.swap_layout)
        for _ in range(steps):
            changed: Program = self.program
            move = self.pick(moves)
            for _ in range(int(self.rng.integers(1, 4))):
                changed = move(changed)
                move = self.pick(moves) if self.rng.random() < 0.5 else move
            try:
                check(self.graph, changed)
            except ProgramError:
                continue
            if changed.instructions != self.program.instructions or changed.inputs != self.program.inputs:
                self.taken += 1
            self.program = changed
        return self.program

    def given(self, program: Program, instructions: list[Instruction]) -> Program:
        return Program(program.axes, program.inputs, tuple(instructions), program.outputs)

    def drop(self, program: Program) -> Program:
        steps = list(program.instructions)
        del steps[int(self.rng.integers(len(steps)))]
        return self.given(program, steps)

    def move(self, program: Program) -> Program:
        steps = list(program.instructions)
        step = steps.pop(int(self.rng.integers(len(steps))))
        steps.insert(int(self.rng.integers(len(steps) + 1)), step)
        return self.given(program, steps)

    def again(self, program: Program) -> Program:
        """An instruction once more, perhaps by another triple or in another region."""
        steps = list(program.instructions)
        at = int(self.rng.integers(len(steps)))
        step = steps[at]
        if isinstance(step, Compute):
            step = Compute(step.op, (self.pick(self.table[step.op].triples),))
        else:
            step = step._replace(region=int(self.rng.integers(len(self.graph.regions))))
        steps.insert(at + int(self.rng.integers(2)), step)
        return self.given(program, steps)

    def retriple(self, program: Program) -> Program:
        """Another triple, with the conversions that it needs where they can be made."""
        steps = list(program.instructions)
        at = int(self.rng.integers(len(steps)))
        old = steps[at]
        if not isinstance(old, Compute):
            return program
        new = Compute(old.op, (self.pick(self.table[old.op].triples),))
        after = [
            Convert(v, 0, b, a, region_of(self.graph, new))
            for (v, a), (_, b) in zip(writes(self.graph, old), writes(self.graph, new))
            if step_between(b[0], a[0])
        ]
        before = [
            Convert(v, 0, a, b, region_of(self.graph, new))
            for (v, a), (_, b) in zip(reads(self.graph, old), reads(self.graph, new))
            if step_between(a[0], b[0])
        ]
        steps[at : at + 1] = [*before, new, *after]
        return self.given(program, steps)

    def place(self, program: Program) -> Program:
        steps = list(program.instructions)
        at = int(self.rng.integers(len(steps)))
        if isinstance(step := steps[at], Convert):
            steps[at] = step._replace(region=int(self.rng.integers(len(self.graph.regions))))
        return self.given(program, steps)

    def insert(self, program: Program) -> Program:
        """A conversion of something that holds somewhere."""
        steps = list(program.instructions)
        at = int(self.rng.integers(len(steps)))
        known = [*reads(self.graph, steps[at]), *writes(self.graph, steps[at])]
        if not known:
            return program
        value, layout = self.pick(known)
        target = self.placement(value)
        if step_between(layout[0], target) is None:
            return program
        region = self.pick([region_of(self.graph, steps[at]), int(self.rng.integers(len(self.graph.regions)))])
        steps.insert(at + int(self.rng.integers(2)), Convert(value, 0, layout, (target,), region))
        return self.given(program, steps)

    def store(self, program: Program) -> Program:
        """An input stored otherwise, and brought to where it was."""
        value = self.pick(list(program.inputs))
        old, new = program.inputs[value], (self.placement(value),)
        if new[0].is_partial or step_between(new[0], old[0]) is None:
            return program
        steps = [Convert(value, 0, new, old), *program.instructions]
        return Program(program.axes, {**program.inputs, value: new}, tuple(steps), program.outputs)

    def swap_layout(self, program: Program) -> Program:
        """One value differently laid out wherever it occurs, by whatever triples have it so."""
        value = int(self.rng.integers(len(self.graph.values)))
        new = self.placement(value)
        steps = list(program.instructions)
        for at, i in enumerate(steps):
            op = self.graph.ops[i.op] if isinstance(i, Compute) else None
            here = [n for n, v in enumerate((*op.operands, *op.results)) if v == value] if op else []
            if isinstance(i, Compute) and here:
                old = i.triples[0]
                fits = [t for t in self.table[i.op].triples if all(_placements(t)[n] == new for n in here)]
                if not fits:
                    return program
                alike = [sum(a == b for a, b in zip(_placements(t), _placements(old))) for t in fits]
                steps[at] = Compute(i.op, (fits[int(np.argmax(alike))],))
        return self.given(program, steps)

    def placement(self, value: int) -> Placement:
        rank = len(self.graph.values[value].shape)
        return self.pick([R, P("sum"), P("max"), *(S(d) for d in range(rank))])


def _placements(t: Triple) -> tuple[Placement, ...]:
    return (*t.operands, *t.results)


def drawn_sizes(graph: Graph, program: Program, rng: np.random.Generator) -> Sizes:
    classes = Classes.build(graph, program)
    shares: list[tuple[int, ...]] = []
    for c in classes.all:
        weights = rng.dirichlet(np.full(DEVICES, 0.5)) * (rng.random(DEVICES) < 0.7)
        weights[int(rng.integers(DEVICES))] += 0.1
        cuts = np.rint(np.cumsum(weights / weights.sum()) * c.units).astype(int)
        shares.append(tuple(int(n) for n in np.diff(cuts, prepend=0)))
    sizes = Sizes(graph, classes, tuple(shares))
    sizes.check(program.axes)
    return sizes


def run_walk(name: str, seed: int, steps: int = STEPS) -> Walk:
    fn, args = CASES[name]
    plan = hapsynth.synthesize(fn, args, first_devices(DEVICES), cluster=thin_cluster(SPEEDS["3:1"]), leave_out=False)
    graph = plan.traced.graph
    walk = Walk(graph, plan.program, seed)
    program = walk.run(steps)
    sizes = drawn_sizes(graph, program, walk.rng)
    check(graph, program, sizes)
    lowered = Lowered(graph, program, sizes, first_devices(DEVICES), donate=False)
    leaves = jax.tree.leaves(args)
    got = lowered([s.put(x, copy=True) for s, x in zip(lowered.inputs, leaves, strict=True)])
    want = jax.tree.leaves(jax.jit(fn)(*args))
    for a, b, storage in zip(got, want, lowered.outputs, strict=True):
        if storage is not None:
            a = storage.fetch(a)
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert relative_error(np.asarray(a), np.asarray(b)) <= 1e-5, program.text(graph)
    return walk


@pytest.mark.few(9)
@pytest.mark.parametrize("name", CASES)
def test_what_the_checker_accepts_computes_what_it_should(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What mutates may join the classes that a reshare lies between.
    improved = "hapsynth.search.planning.resharding.insertion.ReshardInserter.improved"
    monkeypatch.setattr(improved, lambda self, candidate: candidate)
    assert run_walk(name, seed=0).taken > 10
