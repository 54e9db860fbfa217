"""What collectives take in the staged form beside the tensors that they bring from one layout to another.

The local stage before them writes what is sent, padded to the largest shard on every device; the collective stage turns
it into what is received, which the local stage after them cuts to size. So a collective has three points: its source
and what is sent; what is sent and what is received; what is received and its target. Collectives that follow one
another and do not depend on one another are one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hapsynth.graph.ir import Graph
from hapsynth.instructions.collectives import EVEN
from hapsynth.instructions.layout import cuts_of
from hapsynth.instructions.program.program import Convert, Program, reads, writes
from hapsynth.instructions.program.sizes import Node
from hapsynth.search.analysis.lifetimes import Tensor
from hapsynth.search.cost.network import even_fractions

PHASES = 3
"""Points of an instruction."""


class Buffer(NamedTuple):
    """Something in memory from point `start` until before `stop`: `nbytes`, divided as `nodes` are cut. `padded`: to
    the largest shard, on every device. `moved`: of a dimension that is cut as the first, and then as the second, the
    rows that change owner, the longest piece at each distance; one cut may be `EVEN`. Of two dimensions: the pieces
    that are exchanged, the largest of each round."""

    nbytes: float
    nodes: tuple[Node, ...]
    padded: bool
    start: int
    stop: int
    moved: tuple[Node, Node] | None = None


def collective_buffers(
    graph: Graph, program: Program, tensors: Sequence[Tensor], bundled_bytes: int, under_way: Mapping[int, int]
) -> tuple[list[tuple[int, int]], list[Buffer]]:
    """The lives of the tensors in points, (start, stop), and what is sent and received besides. `bundled_bytes`: as
    `LoweringOptions` has them; `under_way`: as of `MemoryProfile`."""
    as_it_is = lambda step: _is_sent_as_it_is(graph, step, bundled_bytes)
    stages: dict[int, tuple[int, int]] = {}
    found: list[Buffer] = []
    for first, last in _stages(graph, program):
        for i in range(first, last + 1):
            stages[i] = first, last
            end = PHASES * (max(last, under_way.get(i, last)) + 2) - 1
            found += _sent(graph, program, i, as_it_is, PHASES * (first + 1), end, runs_on=i in under_way)
    spans: list[tuple[int, int]] = []
    for t in tensors:
        start, stop = PHASES * (t.start + 1), PHASES * (t.stop + 2)
        if t.start in stages and (t.value, t.layout) in writes(graph, program.instructions[t.start]):
            start = PHASES * (max(stages[t.start][1], under_way.get(t.start, -1)) + 2) - 1
        if t.stop in stages and t.start < stages[t.stop][0]:
            i = program.instructions[t.stop]
            if isinstance(i, Convert) and (t.value, t.layout) in reads(graph, i):
                stop = PHASES * (stages[t.stop][0] + 1) + (0 if as_it_is(i) and t.start >= 0 else 1)
        spans.append((start, max(stop, start + 1)))
    return spans, found


def _stages(graph: Graph, program: Program) -> Iterator[tuple[int, int]]:
    """The first and the last instruction of each run of collectives; a bundle is one of its own."""
    first, bundle, made = -1, 0, set[object]()
    for i, step in enumerate((*program.instructions, None)):
        sent = step if isinstance(step, Convert) and step.is_collective else None
        sent = sent if sent and graph.values[sent.value].nbytes > 0 else None
        joins = sent is not None and made.isdisjoint(((sent.value, sent.source), (sent.value, sent.target)))
        if first >= 0 and not (joins and sent is not None and sent.bundle == bundle):
            yield first, i - 1
            first = -1
        if sent is not None:
            if first < 0:
                first, bundle, made = i, sent.bundle, set[object]()
            made.add((sent.value, sent.target))


def _is_sent_as_it_is(graph: Graph, step: Convert, bundled_bytes: int) -> bool:
    """Whether what is sent needs no room of its own where its source ends: it is whole on every device, and too large
    to go with others."""
    large = graph.values[step.value].nbytes > bundled_bytes
    return large and step.collective.in_place and not cuts_of(step.source)


def _sent(
    graph: Graph, program: Program, i: int, as_it_is: Callable[[Convert], bool], start: int, end: int, *, runs_on: bool
) -> Iterator[Buffer]:
    """What a collective sends from point `start` on and what it gives, which is there at point `end` too. `runs_on`: it
    ends then, and sends until then."""
    step = program.instructions[i]
    assert isinstance(step, Convert)
    nbytes, n = float(graph.values[step.value].nbytes), program.axes[step.axis][1]
    collective = step.collective
    for wired in collective.wired(step.source, step.target, step.axis, n):
        whole, nodes = nbytes, list[Node]()
        for dim, axes, way in wired.cuts:
            if way == EVEN:
                whole *= float(even_fractions(graph.values[step.value].shape[dim], n)[0])
            else:
                nodes.append((step.value, dim, axes, way))
        old, new = wired.moved or (None, None)
        moved = ((step.value, *old), (step.value, *new)) if old and new else None
        made = Buffer(whole, tuple(nodes), True, start, end + 1, moved)
        if collective.in_place:
            # A whole target is what it gives.
            yield made._replace(stop=end) if as_it_is(step) else made
            continue
        if wired.sent:
            yield made._replace(nbytes=wired.sent * whole, stop=end if runs_on else start + 2)
        if wired.given:
            yield made._replace(nbytes=wired.given * whole, start=start + 1)
