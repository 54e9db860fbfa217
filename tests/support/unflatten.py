"""A program of one mesh axis as one of two, each cut a cut of the first axis's shards by the second."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hapsynth.graph.ir import Graph
from hapsynth.instructions.layout import Layout, Placement, R, S
from hapsynth.instructions.program.program import Compute, Convert, Instruction, Program
from hapsynth.instructions.program.sizes import Classes, Sizes


def unflattened(graph: Graph, program: Program, sizes: Sizes, inner: int) -> tuple[Program, Sizes]:
    """The same shards on the same devices, the mesh read as rows of `inner` devices."""
    ((_, n),) = program.axes
    instructions = tuple(step for i in program.instructions for step in _steps(i))
    wide = Program(
        (("outer", n // inner), ("inner", inner)),
        {v: _both(layout[0]) for v, layout in program.inputs.items()},
        instructions,
        tuple(None if layout is None else _both(layout[0]) for layout in program.outputs),
    )
    classes = Classes.build(graph, wide)
    flat = [sizes.classes.of[(value, dim, (0,), 0)] for value, dim, *_ in (c.members[0] for c in classes.all)]
    assert [sizes.classes.all[c].units for c in flat] == [c.units for c in classes.all]
    return wide, Sizes(graph, classes, tuple(sizes.shares[c] for c in flat))


def _both(p: Placement) -> Layout:
    return p, S(p.dim, 1) if p.is_sharded else p


def _steps(i: Instruction) -> Iterator[Instruction]:
    if isinstance(i, Compute):
        yield Compute(i.op, (i.triples[0], i.triples[0].at(1)))
        return
    p, q = i.source[0], i.target[0]
    # A dimension is left from its minor axis and cut from its major one.
    path = [_both(p), (p, R), (q, R), _both(q)] if p.is_sharded else [_both(p), (q, _both(p)[1]), _both(q)]
    for source, target in pairwise(dict.fromkeys(path)):
        yield Convert(i.value, int(source[0] == target[0]), source, target, i.region)
