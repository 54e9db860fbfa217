"""The predicted peak of memory along a program, per device, as the switch form allocates it (DESIGN D2).

Sharded tensors count at the size of the largest shard: one HLO serves all devices and stores shards padded. An input
that is carried lives until its last use and its output takes its place (donation); other inputs and constants live
through the whole step. Fused chains hold no memory inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hapsynth.graph import Graph
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program import Program, Property, reads, writes
from hapsynth.instructions.sizes import Sizes
from hapsynth.search.costs import CostModel, Floats


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of a program: `value | layout`, alive from instruction `start` to `stop`, both included."""

    value: int
    layout: Layout
    start: int
    stop: int


def lifetimes(graph: Graph, program: Program) -> list[Tensor]:
    """Every tensor with its life; -1 is before the first instruction, len(instructions) after the last."""
    end = len(program.instructions)
    donated = {graph.inputs[source] for source, _ in graph.carry}
    born: dict[Property, int] = dict.fromkeys(program.inputs.items(), -1)
    last: dict[Property, int] = {p: (-1 if p[0] in donated else end) for p in born}
    done: list[Tensor] = []
    for i, instruction in enumerate(program.instructions):
        for need in reads(graph, instruction):
            last[need] = max(last[need], i)
        for made in writes(graph, instruction):
            if made in born:
                done.append(Tensor(*made, born[made], last[made]))
            born[made], last[made] = i, i
    for value, layout in zip(graph.outputs, program.outputs, strict=True):
        if isinstance(value, int) and layout is not None:
            last[(value, layout)] = end
    return done + [Tensor(*p, start, last[p]) for p, start in born.items()]


def padded_bytes(graph: Graph, sizes: Sizes, value: int, layout: Layout) -> float:
    """Bytes of a tensor on one device, at the largest shard."""
    whole = graph.values[value].nbytes
    for axis, placement in enumerate(layout):
        if placement.is_sharded:
            lengths = sizes.lengths(value, placement.dim, axis)
            whole *= max(lengths) / max(1, sum(lengths))
    return float(whole)


def profile(graph: Graph, program: Program, sizes: Sizes, costs: CostModel) -> Floats:
    """Bytes alive during each instruction (index 0 is before the first): float64 [instructions + 2]."""
    change = np.zeros(len(program.instructions) + 3)
    for t in lifetimes(graph, program):
        if not costs.is_materialized(t.value):
            continue
        nbytes = padded_bytes(graph, sizes, t.value, t.layout)
        change[t.start + 1] += nbytes
        change[t.stop + 2] -= nbytes
    return np.cumsum(change)[:-1]


def live_at(graph: Graph, program: Program, costs: CostModel, point: int) -> frozenset[int]:
    """The values that hold memory during instruction `point - 1` of the profile."""
    return frozenset(
        t.value
        for t in lifetimes(graph, program)
        if t.start + 1 <= point <= t.stop + 1 and costs.is_materialized(t.value)
    )


def peak(graph: Graph, program: Program, sizes: Sizes, costs: CostModel) -> tuple[float, int]:
    """(bytes, point of the profile) at the peak."""
    bytes_at = profile(graph, program, sizes, costs)
    point = int(np.argmax(bytes_at))
    return float(bytes_at[point]), point
