"""What instructions cost: measured or tabled devices and links (DESIGN D5).

The cost of a program is the sum over its instructions of the time of the slowest device (HAP, EuroSys'24,
section 4.3): t = max_i [overhead_i + max(flops_i / rate_i, bytes_i / bandwidth_i)] for an op, and
latency + bytes / bandwidth of the axis's link for a collective, on its padded size. Where a profile has measured the op
or its class, or the collective along the axis, its curve over sizes stands in place of flops / rate, or of that line.

Every time is in seconds, every size in bytes. A `fractions` vector holds each device's share of a cut dimension, in
mesh order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from functools import cached_property
from math import prod
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.memory_budget import MemoryBudget
from hapsynth.graph.ir import Boundary, Graph, Op
from hapsynth.instructions.collectives import Collective, step_between
from hapsynth.instructions.factors import Triples
from hapsynth.instructions.layout import Layout, cut_dims, cuts_of
from hapsynth.instructions.program.sizes import cut_nodes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.rules.registry import is_fusible
from hapsynth.search.analysis.fusion import FusionPlan, materialized, turned
from hapsynth.search.analysis.liveness import Liveness
from hapsynth.search.analysis.op_class import amount_of, class_of
from hapsynth.search.analysis.op_signature import signature_of
from hapsynth.search.analysis.optimizer_update import Together
from hapsynth.search.cost.device_speed import Floats, Speeds
from hapsynth.search.cost.network import PRICES, Largest, Sent, Shares, axis_links, devices_of, mesh_axes
from hapsynth.search.cost.work import Work, lanes_of, tiled, within

Ints: TypeAlias = npt.NDArray[np.int64]

_LINE = 64.0
"""Bytes that a memory gives at once."""


def _column(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)[:, None]


class CostModel:
    """Costs of one graph's instructions on one cluster, over the mesh `axes`: (name, size), those of the cluster.

    `room`: what its devices may hold; by default their memory, of padded shards.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        table: FactorTable,
        axes: Sequence[tuple[str, int]] | None = None,
        room: MemoryBudget | None = None,
    ) -> None:
        self.graph, self.table = graph, table
        self._fed = frozenset(graph.inputs) - graph.state
        self._works: dict[tuple[int, int], tuple[Triples, Work]] = {}
        self._kinds: dict[int, int] = {}
        self._kind_number: dict[object, int] = {}
        self._materialized, self._turned = materialized(graph), turned(graph)
        self.together = Together(graph)
        """Which conversions share a latency."""
        self._measured = frozenset(s for kind in cluster.kinds for s in kind.ops)
        self._classes: dict[int, str] = {}
        self._place(cluster, axes or mesh_axes(cluster), room or MemoryBudget.of(cluster))

    def _place(self, cluster: Cluster, axes: Sequence[tuple[str, int]], room: MemoryBudget) -> None:
        self.cluster, self.n, self.axes = cluster, cluster.n, tuple(axes)
        self.lengths = tuple(size for _, size in self.axes)
        number: dict[object, int] = {}
        # Devices of a kind mostly are one object, and comparing these is slow.
        unlike = {id(kind): kind for kind in cluster.devices}
        known = {key: number.setdefault(kind, len(number)) for key, kind in unlike.items()}
        self.kinds = tuple(dict.fromkeys(unlike.values()))
        """The distinct kinds of devices, as they come in mesh order."""
        self.kind_of = np.array([known[id(d)] for d in cluster.devices], dtype=np.int64)
        """int [devices]: of each its kind."""
        self._overhead = np.array([k.overhead for k in self.kinds])
        self._bandwidth = np.array([k.bandwidth for k in self.kinds])
        self.overhead, self.bandwidth = self._overhead[self.kind_of], self._bandwidth[self.kind_of]
        self.room = room
        self.links = axis_links(cluster, self.axes)
        self._speeds: dict[tuple[str, str], Speeds] = {}
        self._speeds_of_kinds: dict[tuple[str, str], Speeds] = {}
        self._kinds_along: dict[tuple[int, ...], Ints] = {}
        self._ideal: dict[Work, float] = {}
        self._places: dict[tuple[int, ...], np.ndarray] = {}

    def on(self, cluster: Cluster, room: MemoryBudget | None = None) -> CostModel:
        """The model of the same graph on another cluster, which shares what no device decides."""
        other = copy(self)
        other._place(cluster, mesh_axes(cluster), room or MemoryBudget.of(cluster))
        return other

    def rate(self, dtype: str) -> Floats:
        """FLOP/s of each device for a dtype."""
        return self.speeds("", dtype).rate

    def speeds(self, op_class: str, dtype: str) -> Speeds:
        """How long each device takes over the flops of ops of a class and dtype."""
        key = op_class, dtype
        if key not in self._speeds:
            self._speeds[key] = self.speeds_of_kinds(op_class, dtype).at(self.kind_of)
        return self._speeds[key]

    def speeds_of_kinds(self, op_class: str, dtype: str) -> Speeds:
        """How long each kind of device takes over the flops of ops of a class and dtype."""
        key = op_class, dtype
        if key not in self._speeds_of_kinds:
            self._speeds_of_kinds[key] = Speeds(self.kinds, op_class, dtype)
        return self._speeds_of_kinds[key]

    def position(self, axes: tuple[int, ...]) -> np.ndarray:
        """int [devices]: each device's position along some axes, row-major."""
        if axes not in self._places:
            self._places[axes] = devices_of(self.lengths, axes)
        return self._places[axes]

    def kinds_along(self, axes: tuple[int, ...]) -> Ints:
        """int [positions along some axes]: positions with the same kinds of devices, in the same order, have the same
        number."""
        if axes not in self._kinds_along:
            there = self.kind_of[np.argsort(self.position(axes), kind="stable")]
            number: dict[bytes, int] = {}
            rows = there.reshape(prod(self.lengths[a] for a in axes), -1)
            self._kinds_along[axes] = np.array([number.setdefault(row.tobytes(), len(number)) for row in rows])
        return self._kinds_along[axes]

    def work(self, op_index: int, triples: Triples) -> Work:
        """What an op costs under its triples before any ratio."""
        # By identity, as hashing triples costs more than all else; the entry keeps them from being another's.
        key = (self.kind(op_index), id(triples))
        known = self._works.get(key)
        if known is None:
            known = self._works[key] = (triples, self._work(op_index, triples))
        return known[1]

    def kind(self, op_index: int) -> int:
        """Ops of one kind cost the same under the same triples."""
        if op_index not in self._kinds:
            op, at = self.graph.ops[op_index], self._materialized
            operands = tuple(at[o] if isinstance(o, int) else None for o in op.operands)
            key = (id(self.table[op_index]), op.primitive, operands, tuple(at[v] for v in op.results), self._turns(op))
            self._kinds[op_index] = self._kind_number.setdefault(key, len(self._kind_number))
        return self._kinds[op_index]

    def _work(self, op_index: int, triples: Triples) -> Work:
        """Elementwise ops between others form one kernel with them: only what is materialized moves (D5)."""
        op, factors = self.graph.ops[op_index], self.table[op_index]
        cut = list(cut_nodes(self.graph, op_index, factors, triples))
        axes = tuple(sorted(a for a, t in enumerate(triples) if t.factor is not None))
        tensors, launches = self._tensors(op)
        dims = [*factors.operands, *factors.results]
        moved: dict[tuple[int, ...], float] = {}
        for place, nbytes in tensors:
            # What a scan moves is one iteration's part, so the place may be a result's that has fewer dimensions.
            divided = tuple(k for k, (f, _) in enumerate(cut) if factors.position(dims[place], f) is not None)
            moved[divided] = moved.get(divided, 0.0) + nbytes
        if isinstance(op.primitive, Boundary):
            return Work(0.0, tuple(sorted(moved.items())), 0, "float32", (0,) * len(cut), axes)
        dtype = str(op.dtypes[0] if op.dtypes else op.result_dtypes[0])
        lanes = tuple(lanes_of(op.name, factors, f) for f, _ in cut)
        op_class = self._op_class(op_index)
        return Work(amount_of(op), tuple(sorted(moved.items())), launches, dtype, lanes, axes, op_class)

    def _op_class(self, op_index: int) -> str:
        op, kind = self.graph.ops[op_index], self.kind(op_index)
        if kind not in self._classes:
            mine = signature_of(op) if self._measured else ""
            self._classes[kind] = mine if mine in self._measured else class_of(op)
        return self._classes[kind]

    def _tensors(self, op: Op) -> tuple[list[tuple[int, float]], int]:
        """(operand or result, bytes) of the tensors that an op reads from memory or writes there; its launches."""
        nbytes = lambda v: float(self.graph.values[v].nbytes)
        if isinstance(op.primitive, Boundary):
            # A scan reads and writes one iteration's part at a time; what is carried stays where it is.
            if op.name == "scan_slice":
                return [(len(op.operands), nbytes(op.results[0]))], 0
            return [(i, nbytes(v)) for i, v in op.value_operands if op.name == "scan_stack"], 0
        if self._turns(op):
            # Made so by the contraction; what a collective between the two costs is the collective's (`turning`).
            return [], 0
        fusible = is_fusible(op)
        read = [(i, nbytes(v)) for i, v in op.value_operands if not fusible or self._materialized[v]]
        first = len(op.operands)
        written = [(first + i, nbytes(v)) for i, v in enumerate(op.results) if self._materialized[v]]
        return [*read, *written], 1 if written or not fusible else 0

    def _turns(self, op: Op) -> bool:
        """Whether an op is a transpose that the contraction before it does."""
        return op.name == "transpose" and op.operands[0] in self._turned

    def uniform_time(self, op_index: int) -> float:
        """Seconds to make a decision the same on all devices, where it was made of numbers that unlike devices round
        differently."""
        if op_index not in self.graph.unsure:
            return 0.0
        word = lambda link: link.seconds("all_reduce", link.wire_bytes("all_reduce", 4.0))
        return sum(word(link) for link in self.links if link.n > 1)

    @cached_property
    def liveness(self) -> Liveness:
        """What is alive at each op."""
        return Liveness(self.graph, self._materialized)

    @cached_property
    def fusing(self) -> FusionPlan:
        """XLA's kernels."""
        return FusionPlan.of(self.graph)

    def is_materialized(self, value: int) -> bool:
        """Whether a value lies in memory rather than inside a fused chain."""
        return self._materialized[value]

    def loads(self, work: Work, fractions: Sequence[Floats]) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
        """What an op comes to on each device, given each one's share of every cut factor: FLOPs in whole tiles, bytes
        moved, and whether the device does anything."""
        share, held = np.ones(self.n), np.ones(self.n)
        for fraction, lanes in zip(fractions, work.lanes, strict=True):
            share = share * tiled(fraction, lanes)
            held = held * fraction
        moved = np.zeros(self.n)
        for divided, nbytes in work.moved:
            part = np.full(self.n, nbytes)
            for k in divided:
                part = part * fractions[k]
            moved += part
        return work.flops * share, moved, held > 0

    def device_times(self, work: Work, fractions: Sequence[Floats]) -> Floats:
        """Seconds of each device, given each one's share of every cut factor; one without a share does nothing."""
        flops, moved, takes_part = self.loads(work, fractions)
        computing = self.speeds(work.op_class, work.dtype).seconds(flops)
        busy = self.overhead * work.launches + np.maximum(computing, moved / self.bandwidth)
        return np.where(takes_part, busy, 0.0)

    def time(self, work: Work, fractions: Sequence[Floats]) -> float:
        return float(self.device_times(work, fractions).max())

    def times(self, works: Sequence[tuple[Work, Sequence[Floats]]]) -> Floats:
        """`time` of many works, each with its fractions: float64 [works]. What is alike in form is one array, and of
        devices that are alike in all one is looked at."""
        found = np.zeros(len(works))
        vectors = {id(f): f for _, fractions in works for f in fractions}
        some = distinct(self.kind_of, list(vectors.values()))
        kinds, held = self.kind_of[some], {key: f[some] for key, f in vectors.items()}
        alike: dict[object, list[int]] = {}
        for i, (work, _) in enumerate(works):
            alike.setdefault(work.form, []).append(i)
        for rows in alike.values():
            mine = [works[i][0] for i in rows]
            fractions = [np.array([held[id(works[i][1][k])] for i in rows]) for k in range(len(mine[0].lanes))]
            found[rows] = self._times_on(kinds, mine, fractions).max(axis=1)
        return found

    def _times_on(self, kinds: Ints, works: Sequence[Work], fractions: Sequence[Floats]) -> Floats:
        """`device_times` of works of one form on devices of some kinds: float64 [works, devices], as are the fractions
        of each cut factor."""
        form, shape = works[0], (len(works), kinds.size)
        share, held = np.ones(shape), np.ones(shape)
        for k, fraction in enumerate(fractions):
            share = share * tiled(fraction, np.array([[work.lanes[k]] for work in works]))
            held = held * fraction
        moved = np.zeros(shape)
        for m, (divided, _) in enumerate(form.moved):
            part = np.broadcast_to(_column([work.moved[m][1] for work in works]), shape)
            for k in divided:
                part = part * fractions[k]
            moved += part
        speeds = self.speeds_of_kinds(form.op_class, form.dtype).at(kinds)
        computing = speeds.seconds(_column([work.flops for work in works]) * share)
        busy = self._overhead[kinds] * _column([work.launches for work in works]) + np.maximum(
            computing, moved / self._bandwidth[kinds]
        )
        return np.where(held > 0, busy, 0.0)

    def feed_work(self, value: int, layout: Layout) -> Work | None:
        """What it takes to put an argument that is new at every step into the devices' memory; None for a value that
        stays there (carried state, constants)."""
        if value not in self._fed:
            return None
        cuts = len(cut_dims(layout))
        axes = tuple(a for a, p in enumerate(layout) if p.is_sharded)
        moved = ((tuple(range(cuts)), float(self.graph.values[value].nbytes)),)
        return Work(0.0, moved, 0, "float32", (0,) * cuts, axes)

    def ideal_time(self, work: Work) -> float:
        """The least time over all ratios: no program at any ratio runs this op faster."""
        return self.ideal_times((work,))[0]

    def ideal_times(self, works: Iterable[Work]) -> list[float]:
        """`ideal_time` of many works."""
        works, alike = tuple(works), dict[object, list[Work]]()
        for work in dict.fromkeys(works):
            if work not in self._ideal:
                alike.setdefault((work.form, work.axes), []).append(work)
        for mine in alike.values():
            found = self._ideal_times(mine) if mine[0].divided else self.times([(work, ()) for work in mine])
            self._ideal.update(zip(mine, found.tolist(), strict=True))
        return [self._ideal[work] for work in works]

    def _ideal_times(self, works: Sequence[Work]) -> Floats:
        """Of works of one form, cut along the same axes: float64 [works].

        At time t a device can take a share of at most r = min over its compute and memory budget, and the devices at
        one position along the cut axes take the same, so the least t is where the positions' shares sum to 1. A
        device that takes part pays its overhead and its whole bytes. Its computing time never falls as its share
        grows, so what it does within t at most is the inverse of a measured curve.
        """
        form = works[0]
        # Positions with the same kinds of devices have the same shares, and devices of a kind at one the same budget.
        kind_of, every = self.kinds_along(form.axes), np.arange(len(self.kinds))
        _, some, counts = np.unique(kind_of, return_index=True, return_counts=True)
        there = self.kind_of[np.argsort(self.position(form.axes), kind="stable")].reshape(kind_of.size, -1)[some]
        at = [np.unique(kinds) for kinds in there]
        columns, first = np.concatenate(at), np.cumsum([0, *[kinds.size for kinds in at[:-1]]])
        speeds = self.speeds_of_kinds(form.op_class, form.dtype)
        fixed = self._overhead * _column([w.launches for w in works])
        cut = _column([sum(nbytes for divided, nbytes in w.moved if divided) for w in works])
        whole = _column([sum(nbytes for divided, nbytes in w.moved if not divided) for w in works])
        flops = _column([w.flops for w in works])
        lanes = _column([w.lanes[0] if len(w.lanes) == 1 else 0 for w in works])

        def covered(t: Floats) -> Floats:
            budget = t[:, None] - fixed
            by_compute = np.where(flops == 0, np.inf, speeds.flops(budget) / np.where(flops == 0, 1.0, flops))
            left = budget * self._bandwidth - whole
            uncut = np.where(left >= 0, np.inf, -np.inf)
            by_memory = np.where(cut == 0, uncut, left / np.where(cut == 0, 1.0, cut))
            share = np.minimum(within(by_compute, lanes), by_memory)
            return np.clip(np.minimum.reduceat(share[:, columns], first, axis=1), 0.0, 1.0) @ counts.astype(np.float64)

        busy = self._times_on(every, works, [np.ones((len(works), every.size))] * len(form.lanes))
        low, high = np.zeros(len(works)), np.maximum.reduceat(busy[:, columns], first, axis=1).min(axis=1)
        alone, short = high, covered(high) < 1.0
        for _ in range(60):
            middle = 0.5 * (low + high)
            enough = covered(middle) >= 1.0
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return np.where(short, alone, low)

    def conversion(
        self,
        value: int,
        source: Layout,
        target: Layout,
        axis: int,
        shares: Shares | Largest,
        step: Collective | None = None,
    ) -> tuple[float, float]:
        """(seconds, bytes over the slowest link) of one step along an axis; an empty or a lone device's one is free.

        `step`: by default the usual one. Of one that reshares the shares of all positions must be known.
        """
        step = step or step_between(source[axis], target[axis])
        assert step is not None, (source, target)
        sent = self.sent(value, source, target, axis, shares, step)
        return sent.seconds, sent.wire_bytes

    def sent(
        self, value: int, source: Layout, target: Layout, axis: int, shares: Shares | Largest, step: Collective
    ) -> Sent:
        """What a step sends, and how long that takes: of those that go together its part of the latency."""
        link, nbytes = self.links[axis], float(self.graph.values[value].nbytes)
        if not step.communicates or link.n == 1 or nbytes == 0:
            return Sent()
        held = shares if isinstance(shares, Shares) else Shares(shares)
        found = PRICES[step.name].sent(link, step.name, nbytes, step.traffic(source, target, axis), held)
        latency = self.together.part(value, step, link.n) * found.latency_s
        turning = self.turning(value, source, axis)
        turned = turning * held_fraction(target, held.largest) if turning else 0.0
        return found._replace(latency_s=latency, turned_s=turned)

    def turning(self, value: int, source: Layout, axis: int) -> float:
        """Seconds that a collective of a whole value costs what reads it afterwards: partial sums that are transposed
        then rather than where they are made. Across the order in which they lie every element is a line of memory."""
        if value not in self._turned or not source[axis].is_partial:
            return 0.0
        return self.graph.values[value].size * _LINE / float(self.bandwidth.min())

    def conversion_kind(self, value: int) -> Hashable:
        """Values of one kind, and as large, are converted at the same cost."""
        return value in self.together.values, value in self._turned

    def evenly(self, dim: int, axes: tuple[int, ...], way: int = 0) -> float:
        """The least that the largest shard can be."""
        return 1.0 / prod(self.lengths[a] for a in axes)


def distinct(kinds: Ints, vectors: Sequence[npt.NDArray[np.generic]]) -> Ints:
    """The first of the devices that are of one kind, and have the same in all vectors [devices], of each such set."""
    _, first, code = np.unique(kinds, return_index=True, return_inverse=True)
    for vector in vectors:
        if first.size == kinds.size:
            break
        values, which = np.unique(vector, return_inverse=True)
        _, first, code = np.unique(code * values.size + which, return_index=True, return_inverse=True)
    return np.sort(first)


_Held = TypeVar("_Held", bound=float | Floats)


def held_fraction(layout: Layout, held: Callable[[int, tuple[int, ...], int], _Held]) -> _Held | float:
    """The fraction of a value that the largest shard holds, or each device's."""
    return prod(held(*cut) for cut in cuts_of(layout))
