"""The predicted peak of memory along a program, per device, as the switch form allocates it (DESIGN D2).

Sharded tensors count at the size of the largest shard: one HLO serves all devices and stores shards padded. An input
that is carried lives until its last use and its output takes its place (donation); other inputs and constants live
through the whole step. Fused chains hold no memory inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hapsynth.graph import LOOP_CARRY, SCAN_STACK, Boundary, Graph
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program import Compute, Program, Property, reads, region_of, writes
from hapsynth.instructions.sizes import Classes, Sizes, layout_nodes
from hapsynth.search.costs import CostModel, Floats, held_fraction
from hapsynth.search.evaluate import largest_share

Cut = tuple[int, int]
"""(dimension class, how many of its axes, major first)"""


class Tensor(NamedTuple):
    """One tensor of a program: `value | layout`, alive from instruction `start` to `stop`, both included."""

    value: int
    layout: Layout
    start: int
    stop: int


Access = tuple[tuple[Property, ...], tuple[Property, ...]]
"""What an instruction reads and what it writes."""


def lifetimes(graph: Graph, program: Program, accesses: Sequence[Access]) -> list[Tensor]:
    """Every tensor with its life; -1 is before the first instruction, len(instructions) after the last."""
    end = len(program.instructions)
    donated = {graph.inputs[source] for source, _ in graph.carry}
    born: dict[Property, int] = dict.fromkeys(program.inputs.items(), -1)
    last: dict[Property, int] = {p: (-1 if p[0] in donated else end) for p in born}
    done: list[Tensor] = []
    spans = _spans(graph, program)
    region = dict.fromkeys(born, 0)

    def read(need: Property, at: int, place: int) -> None:
        """A value from around a loop or branch is held until that ends."""
        around = graph.around(place)
        depth = around.index(region[need]) if region[need] in around else 0
        last[need] = max(last[need], spans[around[depth - 1]][1] if depth else at)

    for i, (instruction, (needs, results)) in enumerate(zip(program.instructions, accesses, strict=True)):
        place = region_of(graph, instruction)
        for need in needs:
            if spans:
                read(need, i, place)
            elif last[need] < i:
                last[need] = i
        for made in results:
            if made in born:
                done.append(Tensor(*made, born[made], last[made]))
            born[made], last[made] = i, i
            region[made] = graph.home[made[0]] if isinstance(instruction, Compute) else place
        if isinstance(instruction, Compute) and isinstance(graph.ops[instruction.op].primitive, Boundary):
            _boundary(graph, instruction, spans, born, last)
    for instruction in program.instructions if graph.ties else ():
        if isinstance(instruction, Compute) and instruction.op in graph.ties:
            carried_on = (graph.ties[instruction.op], instruction.result_layout(0))
            last[carried_on] = max(last[carried_on], spans[graph.ops[instruction.op].region][1])
    for value, layout in zip(graph.outputs, program.outputs, strict=True):
        if isinstance(value, int) and layout is not None:
            last[(value, layout)] = end
    return done + [Tensor(*p, start, last[p]) for p, start in born.items()]


def _spans(graph: Graph, program: Program) -> dict[int, tuple[int, int]]:
    """Region -> its first and last instruction."""
    found: dict[int, tuple[int, int]] = {}
    for i, instruction in enumerate(program.instructions if len(graph.regions) > 1 else ()):
        for r in graph.around(region_of(graph, instruction)):
            found[r] = (found.get(r, (i, i))[0], i)
    return found


def _boundary(
    graph: Graph,
    instruction: Compute,
    spans: dict[int, tuple[int, int]],
    born: dict[Property, int],
    last: dict[Property, int],
) -> None:
    """What a loop carries is held throughout, and its final value takes its place; what it stacks is there from the
    beginning."""
    op = graph.ops[instruction.op]
    start, stop = spans[op.region]
    if op.primitive == LOOP_CARRY:
        carried, final, *_ = writes(graph, instruction)
        last[carried] = stop
        born[final] = last[final] = stop + 1
    elif op.primitive == SCAN_STACK:
        (stacked,) = writes(graph, instruction)
        born[stacked], last[stacked] = start, stop


def stored_tensors(tensors: Sequence[Tensor], accesses: Sequence[Access], costs: CostModel) -> list[Tensor]:
    """The tensors that lie in memory. What a fused chain reads lives until the chain runs, in whatever op stores its
    end."""
    made: dict[Property, list[int]] = {}
    for n, t in sorted(enumerate(tensors), key=lambda t: t[1].start):
        made.setdefault((t.value, t.layout), []).append(n)
    stop = [t.stop for t in tensors]
    # What a loop leaves is born at the instruction after it.
    before = lambda need, i: [n for n in made[need] if tensors[n].start <= i][-1]
    for i in range(len(accesses) - 1, -1, -1):
        needs, results = accesses[i]
        if not results or any(costs.is_materialized(v) for v, _ in results):
            continue
        last = max(stop[n] for r in results for n in made[r] if tensors[n].start >= i)
        for need in needs:
            n = before(need, i)
            stop[n] = max(stop[n], last)
    return [t._replace(stop=s) for t, s in zip(tensors, stop, strict=True) if costs.is_materialized(t.value)]


def padded_bytes(sizes: Sizes, value: int, layout: Layout) -> float:
    """Bytes of a tensor on one device, at the largest shard."""
    return sizes.graph.values[value].nbytes * held_fraction(layout, lambda *cut: largest_share(sizes, value, *cut))


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """What a program holds at each point, at any sizes. Point i + 1 is during instruction i; 0 is before the first."""

    graph: Graph
    program: Program
    classes: Classes
    costs: CostModel

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors that lie in memory."""
        accesses = [(reads(self.graph, i), writes(self.graph, i)) for i in self.program.instructions]
        return stored_tensors(lifetimes(self.graph, self.program, accesses), accesses, self.costs)

    @cached_property
    def _whole_bytes(self) -> Floats:
        return np.array([float(self.graph.values[t.value].nbytes) for t in self.tensors])

    @cached_property
    def _lives(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([t.start + 1 for t in self.tensors]), np.array([t.stop + 2 for t in self.tensors])

    @cached_property
    def _cuts(self) -> dict[Cut, np.ndarray]:
        """(class, how many of its axes) -> the tensors that are cut so."""
        cut: dict[Cut, list[int]] = {}
        for n, t in enumerate(self.tensors):
            for node in layout_nodes(t.value, t.layout):
                cut.setdefault((self.classes.of[node], len(node[2])), []).append(n)
        return {c: np.array(members) for c, members in cut.items()}

    def alive(self, nbytes: Floats) -> Floats:
        """Bytes alive at each point, given each tensor's."""
        change = np.zeros(len(self.program.instructions) + 3)
        starts, stops = self._lives
        np.add.at(change, starts, nbytes)
        np.subtract.at(change, stops, nbytes)
        return np.cumsum(change)[:-1]

    def _bytes(self, sizes: Sizes, without: Iterable[Cut] = ()) -> Floats:
        """Bytes of each tensor's largest shard, as if some cuts were none."""
        nbytes = self._whole_bytes.copy()
        for cut, members in self._cuts.items():
            if cut not in without:
                nbytes[members] *= largest_of(sizes, cut)
        return nbytes

    def at(self, sizes: Sizes) -> Floats:
        """Bytes of one device at each point: float64 [instructions + 2]."""
        return self.alive(self._bytes(sizes))

    def by_cut(self, sizes: Sizes, cuts: Iterable[Cut]) -> tuple[Floats, dict[Cut, Floats]]:
        """Bytes at each point of what none of `cuts` divides [points], and what each of them divides, whole [points],
        everything else at `sizes`. No tensor may have two of them."""
        some = [c for c in cuts if c in self._cuts]
        nbytes = self._bytes(sizes, some)
        divided: dict[Cut, Floats] = {}
        for c in some:
            mine = np.zeros_like(nbytes)
            members = self._cuts[c]
            mine[members] = nbytes[members]
            divided[c] = self.alive(mine)
        for c in some:
            nbytes[self._cuts[c]] = 0.0
        return self.alive(nbytes), divided

    def peak(self, sizes: Sizes) -> float:
        """Bytes of one device at the fullest point."""
        return float(self.at(sizes).max())


def largest_of(sizes: Sizes, cut: Cut) -> float:
    """The largest fraction of a class's shards along the first of its axes."""
    c, depth = cut
    cls = sizes.classes.all[c]
    if depth == len(cls.axes):
        return max(sizes.shares[c]) / max(cls.units, 1)
    shares = np.array(sizes.shares[c]).reshape([sizes.classes.lengths[a] for a in cls.axes])
    return float(shares.sum(axis=tuple(range(depth, shares.ndim))).max()) / max(cls.units, 1)


def peak(program: Program, sizes: Sizes, costs: CostModel) -> float:
    """Bytes of one device at the fullest point of a program."""
    return MemoryProfile(costs.graph, program, sizes.classes, costs).peak(sizes)
