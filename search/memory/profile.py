"""The predicted peak of memory along a program, per device, as the form that it runs in allocates it (decisions.md D2).

Switch form: sharded tensors count at the size of the largest shard, as one HLO serves all devices and stores shards
padded. Staged form: every device stores its own shards at exact size, and what collectives send and give, which is
padded, besides (`collective_buffers.py`). An input that is carried lives until its last use and its output takes its
place (donation); other inputs and constants live through the whole step. Fused chains hold no memory inside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from hapsynth.cluster.memory_budget import MemoryBudget
from hapsynth.graph.ir import Graph
from hapsynth.instructions.collectives import EVEN
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program.program import Program, Property
from hapsynth.instructions.program.sizes import Classes, Node, Sizes
from hapsynth.instructions.staging.moved_rows import moved, rounds
from hapsynth.search.analysis.fusion import FusionPlan
from hapsynth.search.analysis.lifetimes import Tensor
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import Even
from hapsynth.search.cost.program_cost import padded_bytes
from hapsynth.search.cost.program_index import Cut, ProgramIndex
from hapsynth.search.memory.collective_buffers import PHASES, Buffer, collective_buffers
from hapsynth.search.memory.merged_contractions import merge_contractions
from hapsynth.search.memory.xla_kernels import XlaKernels
from hapsynth.search.memory.xla_schedule import Library, XlaSchedule

SMALL = 1 << 20
"""Bytes of a program for GPUs beside all tensors: padding of each buffer to 256, counters, indices of switches."""
_GAPS = 0.01
"""Of all bytes: what XLA leaves free between buffers of unlike sizes and lives."""


class Reshared(NamedTuple):
    """The rows of a dimension that change owner between two cuts, as a part of all of them."""

    old: Cut | Even
    new: Cut | Even

    @property
    def classes(self) -> set[int]:
        return {cut[0] for cut in self if not isinstance(cut, Even)}


class Pieces(NamedTuple):
    """The largest piece of each round in which what one cut holds comes to be cut by another, as a part of all. `n`: of
    the axis that both are along."""

    old: Cut
    new: Cut
    n: int

    @property
    def classes(self) -> set[int]:
        return {self.old[0], self.new[0]}


Change = Reshared | Pieces
Held = tuple[Cut, bool]
"""(cut, whether its largest share counts on all devices)"""


_Some = np.ndarray | slice
_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """What a program holds at each point, at any sizes, as the memory budget counts it.

    The points of instruction i are `phases` * (i + 1) and the next few; those of -1 are before the first.
    `under_way`: of collectives that run beside what follows them, the last instruction that begins before each ends.
    """

    program: Program
    classes: Classes
    costs: CostModel
    under_way: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def graph(self) -> Graph:
        return self.costs.graph

    @property
    def memory_budget(self) -> MemoryBudget:
        return self.costs.memory_budget

    @property
    def phases(self) -> int:
        """Points of an instruction: what collectives send is told apart from what they give where it is counted."""
        return PHASES if self.memory_budget.exact else 1

    @cached_property
    def index(self) -> ProgramIndex:
        return ProgramIndex.of(self.program, self.classes, self.costs)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that lie in memory."""
        return self.index.tensors

    @cached_property
    def buffers(self) -> list[Buffer]:
        """The tensors and what collectives take besides, with their lives in points."""
        values, phases, padded = self.graph.values, self.phases, not self.memory_budget.exact
        own = [
            Buffer(
                float(values[value].nbytes),
                self.index.nodes(value, layout),
                padded,
                phases * (start + 1),
                phases * (stop + 2),
            )
            for value, layout, start, stop in self.tensors
        ]
        if not self.memory_budget.exact:
            return [self._until_sent(b, t) for b, t in zip(own, self.tensors, strict=True)]
        spans, sent = collective_buffers(
            self.graph, self.program, self.tensors, self.costs.lowering.bundled_bytes, self.under_way
        )
        return [b._replace(start=start, stop=stop) for b, (start, stop) in zip(own, spans, strict=True)] + sent

    def _until_sent(self, buffer: Buffer, tensor: Tensor) -> Buffer:
        """What a collective sends is there until it ends, whatever else reads it meanwhile."""
        mine = (tensor.value, tensor.layout)
        sent = (i for i in self._sending.get(mine, ()) if tensor.start < i <= tensor.stop)
        last = max((self.under_way[i] for i in sent), default=tensor.stop)
        return buffer._replace(stop=max(buffer.stop, self.phases * (last + 2)))

    @cached_property
    def _sending(self) -> Mapping[Property, Sequence[int]]:
        """The collectives under way that take each tensor."""
        found: dict[Property, list[int]] = {}
        for i in self.under_way:
            for need in self.index.accesses[i][0]:
                found.setdefault(need, []).append(i)
        return found

    @cached_property
    def _whole_bytes(self) -> Floats:
        return np.array([b.nbytes for b in self.buffers])

    @cached_property
    def _lives(self) -> tuple[np.ndarray, np.ndarray]:
        starts, stops = [b.start for b in self.buffers], [b.stop for b in self.buffers]
        return np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)

    @cached_property
    def _cuts(self) -> dict[Held | Change, np.ndarray]:
        """The buffers that are cut so."""
        cut: dict[Held | Change, list[int]] = {}
        for n, b in enumerate(self.buffers):
            for node in b.nodes:
                cut.setdefault((self.index.cut(node), b.padded), []).append(n)
            if b.moved:
                cut.setdefault(self._change(*b.moved), []).append(n)
        return {c: np.array(members) for c, members in cut.items()}

    def _change(self, old: Node, new: Node) -> Change:
        if old[1] == new[1]:
            return Reshared(self._end(old), self._end(new))
        return Pieces(self.index.cut(old), self.index.cut(new), self.classes.lengths[old[2][-1]])

    def _end(self, node: Node) -> Cut | Even:
        value, dim, axes, way = node
        if way == EVEN:
            return Even.of(self.graph.values[value].shape[dim], self.classes.along(axes))
        return self.index.cut(node)

    @cached_property
    def _ways(self) -> list[Held | Change]:
        return list(self._cuts)

    @cached_property
    def _cuts_of_buffers(self) -> np.ndarray:
        """int [most cuts, buffers]: by place in `_cuts`, after its end where there are fewer."""
        cuts: list[list[int]] = [[] for _ in self.buffers]
        for k, members in enumerate(self._cuts.values()):
            for n in members.tolist():
                cuts[n].append(k)
        most = max(map(len, cuts), default=0)
        rows = [mine + [len(self._cuts)] * (most - len(mine)) for mine in cuts]
        return np.array(rows, dtype=np.int64).reshape(len(rows), most).T

    @cached_property
    def _shares(self) -> dict[tuple[Held, int], tuple[tuple[int, ...], float | Floats]]:
        return {}

    def _share(self, sizes: Sizes, held: Held | Change) -> float | Floats:
        """What a cut leaves of a tensor, on each device or, padded, on all alike."""
        if isinstance(held, Change):
            return self._moved(sizes, held)
        cut, padded = held
        # By identity, as hashing the shares of many devices costs more than all else; the entry keeps them from being
        # another's.
        shares = sizes.shares[cut[0]]
        key = held, id(shares)
        if key not in self._shares:
            self._shares[key] = shares, largest_of(sizes, cut) if padded else self._own(sizes, cut)
        return self._shares[key][1]

    @staticmethod
    def _moved(sizes: Sizes, change: Change) -> float:
        if isinstance(change, Pieces):
            return float(rounds(joined_shares(sizes, change.old), joined_shares(sizes, change.new), change.n).sum())
        old, new = (cut.shares if isinstance(cut, Even) else joined_shares(sizes, cut) for cut in change)
        return float(moved(old, new)[0].sum())

    def alive(self, nbytes: Floats, some: _Some = _ALL, points: np.ndarray | None = None) -> Floats:
        """Bytes alive at each point, or at some, given those of all buffers or of some: [rows, points] of [rows,
        buffers]."""
        if points is not None:
            first, end = (lives[some] for lives in self._lives)
            return nbytes @ ((first <= points[:, None]) & (points[:, None] < end)).T
        change = np.zeros((self.phases * (len(self.program.instructions) + 2) + 1, len(nbytes)))
        starts, stops = self._lives
        np.add.at(change, starts[some], nbytes.T)
        np.subtract.at(change, stops[some], nbytes.T)
        return np.cumsum(change, axis=0)[:-1].T

    def bytes_of(self, sizes: Sizes, without: Iterable[Held] = (), some: _Some = _ALL) -> Floats:
        """Bytes of each buffer, or of some, on each device or, padded, on all alike, as if some cuts were none: [rows,
        buffers]."""
        nbytes = np.tile(self._whole_bytes[some], (self.memory_budget.weights.size, 1))
        cuts_of = self._cuts_of_buffers[:, some]
        shares = np.ones((len(nbytes), len(self._cuts) + 1))
        there = np.zeros(len(self._cuts) + 1, dtype=bool)
        there[cuts_of] = True
        for k in np.flatnonzero(there[:-1]).tolist():
            if isinstance(way := self._ways[k], Change) or way not in without:
                shares[:, k] = self._share(sizes, way)
        for cuts in cuts_of:
            nbytes *= shares[:, cuts]
        return nbytes

    def counted(self, sizes: Sizes) -> Floats:
        """What counts at each point: [rows, points], a row for each device or, padded, one."""
        return self.memory_budget.weights[:, None] * self.of_devices(sizes)

    def added(self, before: Sizes, after: Sizes, c: int) -> Floats:
        """What counts more at other sizes of one class: as `counted`."""
        cut = [
            members
            for held, members in self._cuts.items()
            if (c in held.classes if isinstance(held, Change) else held[0][0] == c)
        ]
        some = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *cut]))
        nbytes = self.bytes_of(after, some=some) - self.bytes_of(before, some=some)
        return self.memory_budget.weights[:, None] * self.alive(nbytes, some)

    def _own(self, sizes: Sizes, cut: Cut) -> Floats:
        """The fraction of a class's shards along the first of its axes that each device has."""
        return joined_shares(sizes, cut)[self.costs.position(self.classes.all[cut[0]].axes[: cut[1]])]

    def at(self, sizes: Sizes) -> Floats:
        """What is counted at each point of the device that comes nearest to its limit: float64 [points]."""
        return self.counted(sizes).max(axis=0)

    def of_devices(self, sizes: Sizes) -> Floats:
        """Bytes of each device or, padded, of all alike at each point: float64 [rows, points]."""
        return self.alive(self.bytes_of(sizes))

    def by_cut(
        self, sizes: Sizes, cuts: Collection[Cut], counted: Floats | None = None, points: np.ndarray | None = None
    ) -> tuple[Floats, dict[Held, Floats]]:
        """Splits the counted bytes at each point (or at `points`) into those that do not depend on `cuts` and, per cut,
        those that it divides, as if its share were 1; everything else is at `sizes`. [rows, points], a row per device
        or, padded, one.

        No tensor may be divided by two of `cuts`, except what an all-to-all sends: it counts with the second at even
        shares, a lower bound. Rows that move between cuts are not proportional to a share and count as 0. `counted`:
        the total at these points, if known.
        """
        some = [held for c in cuts for padded in (False, True) if (held := (c, padded)) in self._cuts]
        free = {c for c, _ in cuts}
        moving = [m for held, m in self._cuts.items() if isinstance(held, Change) and held.classes & free]
        every = [np.zeros(0, dtype=np.int64), *moving, *(self._cuts[held] for held in some)]
        touched = np.unique(np.concatenate(every))
        nbytes = self.bytes_of(sizes, some, touched)
        nbytes[:, np.isin(touched, np.concatenate(every[: 1 + len(moving)]))] = 0.0
        owned = np.zeros(touched.size, dtype=bool)
        mine: dict[Held, np.ndarray] = {}
        for held in some:
            (c, depth), _ = held
            times = np.bincount(np.searchsorted(touched, self._cuts[held]), minlength=owned.size)
            mine[held] = np.flatnonzero((times > 0) & ~owned)
            times[mine[held]] -= 1
            nbytes /= float(prod(self.classes.lengths[a] for a in self.classes.all[c].axes[:depth])) ** times
            owned[mine[held]] = True
        weights = self.memory_budget.weights[:, None]
        divided: dict[Held, Floats] = {}
        for held, members in mine.items():
            divided[held] = weights * self.alive(nbytes[:, members], touched[members], points)
        if counted is None:
            rest = self.bytes_of(sizes)
            rest[:, touched] = 0.0
            return weights * self.alive(rest, points=points), divided
        return counted - weights * self.alive(self.bytes_of(sizes, some=touched), touched, points), divided

    def most(self, sizes: Sizes, c: int, limit: float, counted: Floats | None = None) -> Floats:
        """The fraction of a class that one axis cuts which each device or, padded, any may hold, everything else at
        `sizes`: [rows]. `counted`: at these, where that is known."""
        whole, divided = self.by_cut(sizes, [(c, 1)], counted)
        own, padded = (divided.get(((c, 1), p), np.zeros_like(whole)) for p in (False, True))
        nbytes, largest = padded, np.inf
        if self.memory_budget.exact and padded.any():
            largest = largest_of(sizes, (c, 1))
            whole = whole + largest * padded
        nbytes = own if self.memory_budget.exact else padded
        share = np.where(nbytes > 0, (limit - whole) / np.maximum(nbytes, 1.0), 1.0).min(axis=1)
        return np.minimum(share, largest)

    def peak(self, sizes: Sizes) -> float:
        """What is counted at the fullest point of the device that comes nearest to its limit."""
        return float(self.at(sizes).max())

    def peaks(self, sizes: Sizes) -> tuple[float, ...]:
        """Bytes of each device at its fullest point."""
        return tuple(np.broadcast_to(self.of_devices(sizes).max(axis=1), self.costs.n).tolist())


def joined_shares(sizes: Sizes, cut: Cut) -> Floats:
    """The fraction of a class's shards at each position along the first of its axes."""
    c, depth = cut
    cls = sizes.classes.all[c]
    shares = np.array(sizes.shares[c], dtype=np.float64).reshape([sizes.classes.lengths[a] for a in cls.axes])
    return shares.sum(axis=tuple(range(depth, shares.ndim))).ravel() / max(cls.units, 1)


def largest_of(sizes: Sizes, cut: Cut) -> float:
    """The largest fraction of a class's shards along the first of its axes."""
    c, depth = cut
    cls = sizes.classes.all[c]
    if depth == len(cls.axes):
        return max(sizes.shares[c]) / max(cls.units, 1)
    return float(joined_shares(sizes, cut).max())


def held_by(program: Program, sizes: Sizes, costs: CostModel) -> tuple[float, ...]:
    """Bytes of each device at the fullest point of a program, in the switch form in XLA's order. What is within limits
    is told by `MemoryProfile`, in the program's order."""
    if _is_in_own_order(costs):
        return MemoryProfile(program, sizes.classes, costs).peaks(sizes)
    return (_scheduled(program, sizes, costs).peak(),) * costs.n


def held_pinned(
    program: Program, sizes: Sizes, costs: CostModel, device: int, library: Library, *, scheduled: bool = False
) -> float:
    """Bytes of a device, by its place, at the fullest point of one program whose collectives are pinned, as those for
    GPUs are (`lower/_pinned.py`): of its own shards where the budget is exact, else of padded ones. The more of two
    orders, XLA's by depth and the one in which collectives come as early as they can; with loops or branches in the
    program's order. `library`: of the card's contractions and convolutions. `scheduled`: its collectives are in
    bundles of a schedule."""
    if len(costs.graph.regions) > 1:
        profile = MemoryProfile(program, sizes.classes, costs)
        return (1 + _GAPS) * profile.peaks(sizes)[device] + library.workspace + SMALL
    at = tuple(map(int, np.unravel_index(device, [n for _, n in program.axes])))

    def nbytes(value: int, layout: Layout) -> float:
        if not costs.memory_budget.exact:
            return padded_bytes(sizes, value, layout)
        whole = sizes.graph.values[value]
        return whole.nbytes * prod(sizes.local_shape(value, layout, at)) / max(prod(whole.shape), 1)

    one = not costs.memory_budget.exact
    fusing = FusionPlan.of(costs.graph, on_gpu=True, triton=not library.apart)
    kernels = XlaKernels(
        costs.graph,
        program,
        sizes,
        fusing,
        nbytes,
        costs.lowering,
        switches=one,
        near=False,
        planned=scheduled,
        cuts_parts=True,
        positions_last=library.positions_last,
    )
    if not one:
        merge_contractions(kernels)
    orders = (XlaSchedule(kernels, pinned=True, library=library), XlaSchedule(kernels, early=True, library=library))
    return (1 + _GAPS) * max(order.peak() for order in orders) + SMALL


def held_at_peak(program: Program, sizes: Sizes, costs: CostModel) -> list[tuple[int, float]]:
    """What the switch form holds at that point: values (-1: what several collectives send or get as one), and the bytes
    of each."""
    if not _is_in_own_order(costs):
        scheduled = _scheduled(program, sizes, costs)
        return [(t.value, scheduled.nbytes(t)) for t in scheduled.held]
    profile = MemoryProfile(program, sizes.classes, costs)
    fullest = int(profile.at(sizes).argmax())
    held = [t for t, b in zip(profile.tensors, profile.buffers) if b.start <= fullest < b.stop]
    return [(t.value, padded_bytes(sizes, t.value, t.layout)) for t in held]


def _is_in_own_order(costs: CostModel) -> bool:
    return costs.memory_budget.exact or len(costs.graph.regions) > 1


def _scheduled(program: Program, sizes: Sizes, costs: CostModel) -> XlaSchedule:
    nbytes = lambda value, layout: padded_bytes(sizes, value, layout)
    return XlaSchedule(XlaKernels(costs.graph, program, sizes, costs.fusing, nbytes, costs.lowering))


def peak(program: Program, sizes: Sizes, costs: CostModel) -> float:
    """What is counted at the fullest point of a program of the device that comes nearest to its limit."""
    return MemoryProfile(program, sizes.classes, costs).peak(sizes)
