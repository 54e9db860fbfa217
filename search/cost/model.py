"""What instructions cost: measured or tabled devices and links (decisions.md D5).

The cost of a program is the sum over its instructions of the time of the slowest device (HAP, EuroSys'24,
section 4.3): by its roofline (`roofline.py`) for an op, and latency + bytes / bandwidth of the axis's link for a
collective, on its padded size. Where a profile has measured the collective along the axis, its curve over sizes stands
in place of that line.

Every time is in seconds, every size in bytes. A `fractions` vector holds each device's share of a cut dimension, in
mesh order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from copy import copy
from functools import cached_property, reduce
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.device_kinds import DeviceKind
from hapsynth.cluster.memory_budget import MemoryBudget
from hapsynth.graph.ir import Boundary, Graph, Op, Operand
from hapsynth.instructions.collectives import Collective, Hosts, step_between, steps_between
from hapsynth.instructions.factors import Triples
from hapsynth.instructions.layout import Layout, cut_dims, cuts_of, owner_of
from hapsynth.instructions.program.sizes import Node
from hapsynth.instructions.rules.contraction import CONTRACTIONS, is_precise
from hapsynth.instructions.rules.factor_table import FactorTable, cut_nodes
from hapsynth.instructions.rules.registry import flops_of, is_fusible
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.search.analysis.buffer_aliasing import UPDATES
from hapsynth.search.analysis.fusion import FusionPlan, launches, materialized, turned
from hapsynth.search.analysis.liveness import Liveness
from hapsynth.search.analysis.numbering import Numbering
from hapsynth.search.analysis.op_class import amount_of, class_of
from hapsynth.search.analysis.op_signature import signature_of
from hapsynth.search.analysis.optimizer_update import GradientBucketing
from hapsynth.search.cost.device_speed import DeviceFigures, Floats, Ints, Speeds
from hapsynth.search.cost.network import PRICES, Largest, Sent, Shares, axis_links, devices_of, mesh_axes
from hapsynth.search.cost.roofline import Roofline
from hapsynth.search.cost.share_range import Mask, ShareRange
from hapsynth.search.cost.work import Work, lanes_of

_SLICES = frozenset(("slice", "dynamic_slice", "gather"))
_NEARLY = 1e-9
"""The tolerance for rounding errors in sums of shares."""
_LINE = 64.0
"""Bytes of one memory access: a cache line."""


class CutWork(NamedTuple):
    """A work, its number (equal works have one), and one dimension of each factor that is cut, in the order of its
    `lanes`."""

    work: Work
    number: int
    nodes: tuple[Node, ...]


class CostModel:
    """Costs of one graph's instructions on one cluster, over the mesh `axes`: (name, size), those of the cluster.

    `memory_budget`: what its devices may hold; by default their memory, of padded shards. `lowering`: as the programs
    will be lowered, which decides what goes together and what that takes of memory. `offered`: the names of the steps
    that programs may take beside the usual ones; None: all.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        table: FactorTable,
        axes: Sequence[tuple[str, int]] | None = None,
        memory_budget: MemoryBudget | None = None,
        lowering: LoweringOptions = DEFAULT,
        offered: Collection[str] | None = None,
    ) -> None:
        self.graph, self.table, self.lowering, self._offered = graph, table, lowering, offered
        self._fed = frozenset(graph.inputs) - graph.state
        # By how many results a kernel may write: whether each op is launched, and the kinds of ops.
        self._launched_by: dict[int, tuple[Sequence[bool], dict[int, int]]] = {}
        self._works: dict[tuple[int, int], Work] = {}
        self._amounts: dict[int, float] = {}
        self._triples, self._work_numbers = Numbering(), Numbering()
        self._kind_number: dict[object, int] = {}
        self._materialized, self._turned = materialized(graph), turned(graph)
        self.bucketing = GradientBucketing(graph, lowering)
        """Which conversions share a latency."""
        self._measured = frozenset(s for kind in cluster.kinds for s in kind.ops)
        self._classes: dict[int, str] = {}
        self._place(cluster, axes or mesh_axes(cluster), memory_budget or MemoryBudget.of(cluster))

    def _place(self, cluster: Cluster, axes: Sequence[tuple[str, int]], memory_budget: MemoryBudget) -> None:
        self.cluster, self.n, self.axes = cluster, cluster.n, tuple(axes)
        self.lengths = tuple(size for _, size in self.axes)
        number: dict[DeviceKind, int] = {}
        kind_of = [number.setdefault(kind, len(number)) for kind in cluster.devices]
        self.kinds = tuple(number)
        """The distinct kinds of devices, as they come in mesh order."""
        self.kind_of = np.array(kind_of, dtype=np.int64)
        """int [devices]: of each its kind."""
        self.figures = DeviceFigures(self.kinds)
        outputs = self.figures.outputs
        if outputs not in self._launched_by:
            self._launched_by[outputs] = launches(self.graph, self._materialized, outputs), {}
        self._launched, self._kinds = self._launched_by[outputs]
        self.overhead, self.bandwidth = self.figures.overhead[self.kind_of], self.figures.bandwidth[self.kind_of]
        self.slowdown = np.array([kind.slowdown for kind in self.kinds])[self.kind_of]
        """float64 [devices]: how many times as long computing takes each while a collective runs."""
        self.delay = np.array([kind.contention_delay for kind in self.kinds])[self.kind_of]
        """float64 [devices]: seconds by which an exchange of a collective takes longer beside computing of each."""
        self.memory_budget = memory_budget
        self.links = axis_links(cluster, self.axes)
        self._speeds: dict[tuple[str, str, bool], Speeds] = {}
        self._kinds_along: dict[tuple[int, ...], Ints] = {}
        self._ideal: dict[Work, float] = {}
        self._cut_works: dict[tuple[int, int], tuple[Triples, CutWork]] = {}
        self._places: dict[tuple[int, ...], np.ndarray] = {}
        # Of the cluster before, where this is a copy.
        self.__dict__.pop("fastest", None)

    def on(
        self, cluster: Cluster, memory_budget: MemoryBudget | None = None, axes: Sequence[tuple[str, int]] | None = None
    ) -> CostModel:
        """The model of the same graph on another cluster, which shares what no device decides."""
        other = copy(self)
        other._place(cluster, axes or mesh_axes(cluster), memory_budget or MemoryBudget.of(cluster))
        return other

    def rate(self, dtype: str) -> Floats:
        """FLOP/s of each device for a dtype."""
        return self.speeds("", dtype).rate

    @cached_property
    def _contracted(self) -> Mapping[tuple[str, bool], float]:
        """FLOPs of the graph's contractions by dtype, and by whether they are of full precision."""
        flops = dict[tuple[str, bool], float]()
        for op in self.graph.ops:
            if op.name in CONTRACTIONS:
                key = str(op.dtypes[0]), is_precise(op)
                flops[key] = flops.get(key, 0.0) + self.graph.runs[op.region] * flops_of(op)
        return flops

    def speed_of(self, kind: DeviceKind) -> float:
        """FLOP/s of a kind over the graph's contractions, each at its own dtype's rate; its rate of float32 where there
        are none."""
        flops = {key: count for key, count in self._contracted.items() if count}
        rate = lambda key: kind.rate(key[0], ordinary=key[1])
        if len(flops) < 2:
            return rate(next(iter(flops), ("float32", False)))
        return sum(flops.values()) / sum(count / rate(key) for key, count in flops.items())

    @property
    def speed(self) -> Floats:
        """[devices]: `speed_of` each."""
        return np.array([self.speed_of(kind) for kind in self.kinds])[self.kind_of]

    @cached_property
    def fastest(self) -> Mask:
        """Which devices are of the kind with the greatest rate, the first such."""
        return self.kind_of == self.kind_of[int(np.argmax(self.speed))]

    def speeds(self, op_class: str, dtype: str, *, ordinary: bool = False) -> Speeds:
        """How long each device takes over the flops of ops of a class and dtype."""
        key = op_class, dtype, ordinary
        if key not in self._speeds:
            self._speeds[key] = self.figures.speeds(op_class, dtype, ordinary=ordinary).at(self.kind_of)
        return self._speeds[key]

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

    @property
    def agreed_axes(self) -> frozenset[int]:
        """The mesh axes along which kinds of devices differ, so that they are to agree on what elements are selected by
        floats; none where nothing is."""
        unlike = (a for a in range(len(self.axes)) if self.kinds_along((a,)).any())
        return frozenset(unlike if self.graph.selections else ())

    def tiles_along(self, axes: tuple[int, ...]) -> Ints:
        """int [kinds of positions along some axes]: of the devices at one, the widest tile."""
        kinds = self.kinds_along(axes)
        found = np.zeros(int(kinds.max()) + 1, dtype=np.int64)
        np.maximum.at(found, kinds[self.position(axes)], self.figures.tile[self.kind_of])
        return found

    def work(self, op_index: int, triples: Triples) -> Work:
        """What an op costs under its triples before any ratio."""
        key = (self.kind(op_index), self._triples.of(triples))
        known = self._works.get(key)
        if known is None:
            known = self._works[key] = self._work(op_index, triples)
        return known

    def cut_work(self, op_index: int, triples: Triples) -> CutWork:
        """What an op costs under its triples, and what they cut."""
        # By identity, as in `Factors.cuts`.
        key = op_index, id(triples)
        found = self._cut_works.get(key)
        if found is None:
            work = self.work(op_index, triples)
            nodes = tuple([nodes[0] for _, nodes in self.table.cut(op_index, triples) if nodes])
            found = self._cut_works[key] = triples, CutWork(work, self._work_numbers.of(work), nodes)
        return found[1]

    def kind(self, op_index: int) -> int:
        """Ops of one kind cost the same under the same triples."""
        if op_index not in self._kinds:
            op, at = self.graph.ops[op_index], self._materialized
            operands = tuple(at[o] if isinstance(o, int) else None for o in op.operands)
            key = (
                self.table[op_index],
                op.primitive,
                operands,
                tuple(at[v] for v in op.results),
                self._turns(op),
                self._launched[op_index],
                is_precise(op),
                self._updates_in_place(op),
            )
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
        owned = any(map(factors.is_whole, triples))
        if isinstance(op.primitive, Boundary):
            return Work(0.0, tuple(sorted(moved.items())), 0, "float32", (0,) * len(cut), axes)
        dtype = str(op.dtypes[0] if op.dtypes else op.result_dtypes[0])
        lanes = tuple(lanes_of(op.name, factors, f) for f, _ in cut)
        amount, op_class = self._amount(op_index), self._op_class(op_index)
        ordinary = op.name not in CONTRACTIONS or is_precise(op)
        return Work(amount, tuple(sorted(moved.items())), launches, dtype, lanes, axes, op_class, owned, ordinary)

    def _amount(self, op_index: int) -> float:
        kind = self.kind(op_index)
        if kind not in self._amounts:
            self._amounts[kind] = amount_of(self.graph.ops[op_index])
        return self._amounts[kind]

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
        if op.name in _SLICES:
            # No more is read of an operand than there is in the result.
            part = first, nbytes(op.results[0])
            read = [part if i == 0 and part[1] < size else (i, size) for i, size in read]
        elif self._updates_in_place(op):
            update, passes = (1, 1) if op.name == "dynamic_update_slice" else (2, 2)
            # It may be a literal.
            part = nbytes(op.results[0]) * prod(op.shapes[update]) / max(prod(op.result_shapes[0]), 1)
            read, written = [(i, size) for i, size in read if i != 0], [(update, passes * part)]
        return [*read, *written], int(self._launched[op.index])

    def _updates_in_place(self, op: Op) -> bool:
        """Whether an op writes into what nothing else needs, so that XLA copies nothing of it."""
        graph = self.graph
        updated = op.operands[0] if op.name.replace("-", "_") in UPDATES else None
        if not isinstance(updated, int) or len(op.results) != 1 or updated in self._lasting:
            return False
        lies = self._materialized[updated] and self._materialized[op.results[0]]
        # What is from outside a loop's body is there again in its next iteration.
        return lies and len(graph.uses[updated]) == 1 and graph.home[updated] == op.region

    @cached_property
    def _lasting(self) -> Set[Operand]:
        """Values that are needed once all ops that read them have: constants, inputs that are not donated, results of
        the function and of an iteration."""
        graph = self.graph
        donated = {graph.inputs[source] for source, _ in graph.carry}
        return {*graph.constants, *graph.outputs, *graph.ties.values(), *({*graph.inputs} - donated)}

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
        (flops,), (moved,) = Roofline(self.figures, [work]).loads(self.kind_of, fractions)
        held = np.ones(self.n)
        for fraction in fractions:
            held = held * fraction
        return flops, moved, held > 0

    def device_times(self, work: Work, fractions: Sequence[Floats]) -> Floats:
        """Seconds of each device, given each one's share of every cut factor; one without a share does nothing."""
        return Roofline(self.figures, [work]).seconds(self.kind_of, fractions)[0]

    def time(self, work: Work, fractions: Sequence[Floats]) -> float:
        return float(self.device_times(work, fractions).max())

    def times(self, works: Sequence[tuple[Work, Sequence[Floats]]]) -> Floats:
        """`time` of many works, each with its fractions: float64 [works]."""
        return self._device_times(works)[2].max(axis=1, initial=0.0)

    def times_on(self, devices: Ints, works: Sequence[tuple[Work, Sequence[Floats]]]) -> Floats:
        """Seconds of many works, each with its fractions, on some devices and, last, on the slowest of all: float64
        [works, devices + 1]."""
        _, place, seconds = self._device_times(works)
        return np.column_stack([seconds[:, place[devices]], seconds.max(axis=1, initial=0.0)])

    def each_device_times(self, works: Sequence[tuple[Work, Sequence[Floats]]]) -> Floats:
        """`device_times` of many works, each with its fractions: float64 [works, devices]."""
        _, place, seconds = self._device_times(works)
        return seconds[:, place]

    def _device_times(self, works: Sequence[tuple[Work, Sequence[Floats]]]) -> tuple[Ints, Ints, Floats]:
        """As `alike_devices`, of devices that are alike in all, and what each first one takes over works [works,
        firsts]. Works that are alike in form are one array."""
        vectors = [[f.tobytes() for f in fractions] for _, fractions in works]
        unlike = {key: f for keys, (_, mine) in zip(vectors, works, strict=True) for key, f in zip(keys, mine)}
        some, place = alike_devices(self.kind_of, list(unlike.values()))
        kinds, held = self.kind_of[some], {key: f[some] for key, f in unlike.items()}
        found = np.zeros((len(works), some.size))
        alike: dict[object, list[int]] = {}
        for i, (work, _) in enumerate(works):
            alike.setdefault(work.form, []).append(i)
        for rows in alike.values():
            mine = [works[i][0] for i in rows]
            fractions = [np.array([held[vectors[i][k]] for i in rows]) for k in range(len(mine[0].lanes))]
            found[rows] = Roofline(self.figures, mine).seconds(kinds, fractions)
        return some, place, found

    def feed_work(self, value: int, layout: Layout) -> Work | None:
        """What it takes to put an argument that is new at every step into the devices' memory; None for a value that
        stays there (carried state, constants)."""
        if value not in self._fed:
            return None
        cuts = len(cut_dims(layout))
        axes = tuple(a for a, p in enumerate(layout) if p.is_sharded)
        moved = ((tuple(range(cuts)), float(self.graph.values[value].nbytes)),)
        owned = any(p.owner is not None for p in layout)
        return Work(0.0, moved, 0, "float32", (0,) * cuts, axes, owned=owned)

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

    def times_within(self, works: Sequence[tuple[Work, ShareRange]]) -> Floats:
        """The least time of each work over all ratios at which its shares lie in a range, inf where none can: float64
        [works]. Along one mesh axis, and of what has no owner or is not divided as `ideal_time`."""
        found = np.zeros(len(works))
        alike: dict[object, list[int]] = {}
        for i, (work, _) in enumerate(works):
            alike.setdefault((work.form, work.axes), []).append(i)
        for rows in alike.values():
            mine = [works[i][0] for i in rows]
            if not mine[0].divided or mine[0].owned:
                found[rows] = self.ideal_times(mine)
                continue
            ranges = np.array([works[i][1] for i in rows])
            ranges[:, 1, 1] = np.minimum(ranges[:, 1, 1], ranges[:, 0, 1])
            fast = np.count_nonzero(self.fastest)
            most = np.stack([ranges[:, 0, 1] * fast, ranges[:, 1, 1] * (self.n - fast)], axis=1)
            some = (ranges[:, :, 0] <= ranges[:, :, 1]).all(axis=1) & (most.sum(axis=1) >= 1.0 - _NEARLY)
            some &= (most[:, 0] >= ranges[:, 2, 0] - _NEARLY) & (most[:, 1] >= 1.0 - ranges[:, 2, 1] - _NEARLY)
            ranges[~some] = ((1.0, 1.0), (1.0, 1.0), (0.0, 1.0))
            found[rows] = np.where(some, self._ideal_times(mine, ranges), np.inf)
        return found

    def least_weighted(self, works: Sequence[Work], weights: Floats) -> Floats:
        """The least weighted sum of the seconds of all kinds over all ratios, a kind's being the mean over its devices:
        float64 [works]. `weights`: float64 [kinds].

        A device takes at least its share of the seconds of a whole work, so what is cut weighs no less than all of it
        on the kind on which it weighs the least; what is not, all devices do.
        """
        found = np.zeros(len(works))
        count = np.bincount(self.kind_of, minlength=len(self.kinds))
        alike: dict[object, list[int]] = {}
        for i, work in enumerate(works):
            alike.setdefault(work.form, []).append(i)
        for mine in alike.values():
            weighted = Roofline(self.figures, [works[i] for i in mine]).least_alone() * weights
            cut = works[mine[0]].divided
            found[mine] = (weighted / count).min(axis=1) if cut else weighted.sum(axis=1)
        return found

    def _ideal_times(self, works: Sequence[Work], ranges: Floats | None = None) -> Floats:
        """Of works of one form, cut along the same axes: float64 [works]. `ranges`: of each a `ShareRange`, of works
        that one cut divides [works, 3, 2].

        At time t a device can take a share of at most r = min over its compute and memory budget, and the devices at
        one position along the cut axes take the same, so the least t is where the positions' shares sum to 1. A
        device that takes part pays its overhead and its whole bytes. Its computing time never falls as its share
        grows. What has an owner, one position does all of: the one that takes the least over it.
        """
        form, figures = works[0], self.figures
        # Positions with the same kinds of devices have the same shares, and devices of a kind at one the same budget.
        kind_of, every = self.kinds_along(form.axes), np.arange(len(self.kinds))
        _, some, counts = np.unique(kind_of, return_index=True, return_counts=True)
        there = self.kind_of[np.argsort(self.position(form.axes), kind="stable")].reshape(kind_of.size, -1)[some]
        at = [np.unique(kinds) for kinds in there]
        columns, first = np.concatenate(at), np.cumsum([0, *[kinds.size for kinds in at[:-1]]])
        roofline = Roofline(figures, works)
        most = np.ones((len(works), 1))
        fast = np.ones(some.size, dtype=bool)
        if ranges is not None:
            # Along the only axis positions are devices.
            fast = kind_of[some] == kind_of[np.argmax(self.fastest)]
            most = np.where(fast, ranges[:, 0, 1:], ranges[:, 1, 1:])

        def enough(t: Floats) -> npt.NDArray[np.bool_]:
            """Whether all of it is done within some seconds."""
            share = np.minimum.reduceat(roofline.within(t)[:, columns], first, axis=1)
            shares = np.clip(share, 0.0, most) * counts
            if ranges is None:
                return shares.sum(axis=1) >= 1.0
            # As many shares as there are positions may come to it just about.
            few, many = ranges[:, 2].T
            by_fast, by_slow = shares[:, fast].sum(axis=1), shares[:, ~fast].sum(axis=1)
            together = by_fast + by_slow >= 1.0 - _NEARLY
            return together & (by_fast >= few - _NEARLY) & (by_slow >= 1.0 - many - _NEARLY)

        def busy(share: Floats) -> Floats:
            """Of positions, where each has a share [works, 1] of every cut."""
            every_share = np.broadcast_to(share, (len(works), every.size))
            seconds = roofline.seconds(every, [every_share] * len(form.lanes))
            return np.maximum.reduceat(seconds[:, columns], first, axis=1)

        low, high = np.zeros(len(works)), busy(most[:, :1]).min(axis=1)
        if form.owned and len(form.lanes) == 1:
            return high
        if ranges is not None:
            # One alone may not have all of it.
            high = busy(ranges[:, 0, 1:]).max(axis=1)
        alone, short = high, ~enough(high)
        for _ in range(60):
            middle = 0.5 * (low + high)
            done = enough(middle)
            low, high = np.where(done, low, middle), np.where(done, middle, high)
        found = np.where(short, alone, low)
        if ranges is None:
            return found
        found = np.maximum(found, busy(ranges[:, 0, :1]).min(axis=1))
        slow = busy(ranges[:, 1, :1])[:, ~fast].min(axis=1, initial=np.inf)
        return np.where(ranges[:, 1, 0] > 0, np.maximum(found, slow), found)

    @property
    def hosts(self) -> tuple[Hosts, ...]:
        """Those that each axis goes over; () where none goes over several."""
        found = tuple(link.hosts for link in self.links)
        return found if any(found) else ()

    def steps(self, source: Layout, target: Layout, axis: int) -> tuple[Collective, ...]:
        """Every single step that turns one layout into another along an axis, the usual one first."""
        every = steps_between(source[axis], target[axis])
        return tuple([step for step in every if step is every[0] or self.offers(step, axis)])

    def offers(self, step: Collective, axis: int) -> bool:
        """Whether programs may take a step along an axis where it is not the usual one. One in rounds not along several
        axes: of so many more layouts the search then finds no good one in time (`docs/design/search.md`)."""
        if step.in_rounds and len(self.axes) > 1:
            return False
        return (self._offered is None or step.name in self._offered) and self.links[axis].offers(step)

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

        `step`: by default the usual one. Of one that sends no `Block` the shares of all positions must be known.
        """
        step = step or step_between(source[axis], target[axis])
        assert step is not None, (source, target)
        sent = self.sent(value, source, target, axis, shares, step)
        return sent.seconds, sent.wire_bytes

    def sent(
        self, value: int, source: Layout, target: Layout, axis: int, shares: Shares | Largest, step: Collective
    ) -> Sent:
        """What a step sends, and how long that takes: of those that go together its part of the latency."""
        found = self.sent_alone(value, source, target, axis, shares, step)
        return found._replace(latency_s=self.bucketing.part(value, step, self.links[axis].n) * found.latency_s)

    def sent_alone(
        self, value: int, source: Layout, target: Layout, axis: int, shares: Shares | Largest, step: Collective
    ) -> Sent:
        """What a step sends, and how long that takes where it goes with no other."""
        link, nbytes = self.links[axis], float(self.graph.values[value].nbytes)
        if not step.communicates or link.n == 1 or nbytes == 0:
            return Sent()
        held, parts = self._held(value, shares, step), step.sends(source, target, axis)
        found = reduce(Sent.then, (PRICES[name].sent(link, name, nbytes, sent, held) for name, sent in parts))
        turning = self.turning(value, source, axis)
        return found._replace(turned_s=turning * held_fraction(target, held.largest) if turning else 0.0)

    def exchanges(self, value: int, source: Layout, target: Layout, axis: int, shares: Shares, step: Collective) -> int:
        """Those that wait for one another where gloo runs a step that sends something, which goes with no other."""
        link, nbytes = self.links[axis], float(self.graph.values[value].nbytes)
        held, parts = self._held(value, shares, step), step.sends(source, target, axis)
        return sum(PRICES[name].exchanges(link, name, nbytes, sent, held, self.lowering) for name, sent in parts)

    def _held(self, value: int, shares: Shares | Largest, step: Collective) -> Shares:
        held = shares if isinstance(shares, Shares) else Shares(shares)
        return held.evened(self.graph.values[value].shape, self.lengths) if step.balances else held

    def bytes_sent(
        self, value: int, source: Layout, target: Layout, axis: int, largest: Largest, step: Collective
    ) -> float:
        """What each device sends in a step that may go with others, padding included."""
        assert step.bundled
        wired = step.wired(source, target, axis, self.links[axis].n)
        nbytes = self.graph.values[value].nbytes
        return sum(each.sent * nbytes * prod(largest(*cut) for cut in each.cuts) for each in wired)

    def most_bundled(self, step: Collective, axis: int) -> float:
        """Bytes that each device sends in a collective up to which it may go with others: those of the thresholds, or
        as many as are copied into a bundle and out of it in less time than its latency, up to half a bundle."""
        # What is copied is read and written.
        copied_per_s = float(self.bandwidth.min(initial=np.inf)) / 4
        in_a_latency = float(self.links[axis].seconds(step.name, 0.0)) * copied_per_s
        return max(self.lowering.bundled_bytes, min(in_a_latency, self.lowering.bundle_bytes / 2))

    def least_in_bundle(
        self, value: int, source: Layout, target: Layout, axis: int, shares: Shares, step: Collective
    ) -> float:
        """Seconds that a step adds at least to those that it goes with: its bytes at the least that a byte takes in any
        bundle; alone where it goes with none."""
        sent = self.sent_alone(value, source, target, axis, shares, step)
        if not (step.communicates and step.bundled and sent.seconds):
            return sent.seconds
        nbytes = self.bytes_sent(value, source, target, axis, shares.largest, step)
        if not 0 < nbytes <= self.most_bundled(step, axis):
            return sent.seconds
        most = sent.wire_bytes * max(1.0, self.lowering.bundle_bytes / nbytes)
        return sent.wire_bytes * self.links[axis].least_per_byte(step.name, most) + sent.turned_s

    def turning(self, value: int, source: Layout, axis: int) -> float:
        """Seconds that a collective of a whole value costs what reads it afterwards: partial sums that are transposed
        then rather than where they are made. Across the order in which they lie every element is a line of memory."""
        if value not in self._turned or not source[axis].is_partial:
            return 0.0
        return float((self.graph.values[value].size * _LINE / self.figures.bandwidth).max())

    def conversion_kind(self, value: int) -> Hashable:
        """Values of one kind, and as large, are converted at the same cost."""
        return value in self.bucketing.values, self.graph.values[value].size if value in self._turned else 0

    def evenly(self, dim: int, axes: tuple[int, ...], way: int = 0) -> float:
        """The least that the largest shard can be: an owner's is all."""
        return 1.0 / prod(self.lengths[a] for a in axes) if owner_of(way) is None else 1.0


def distinct(kinds: Ints, vectors: Sequence[npt.NDArray[np.generic]]) -> Ints:
    """The first device of each set of devices that are of one kind and have equal entries in all `vectors`
    [devices]."""
    return alike_devices(kinds, vectors)[0]


def alike_devices(kinds: Ints, vectors: Sequence[npt.NDArray[np.generic]]) -> tuple[Ints, Ints]:
    """`distinct`, rising, [sets]; and the index of each device's set in it [devices]."""
    _, first, code = np.unique(kinds, return_index=True, return_inverse=True)
    for vector in vectors:
        if first.size == kinds.size:
            break
        values, which = np.unique(vector, return_inverse=True)
        _, first, code = np.unique(code * values.size + which, return_index=True, return_inverse=True)
    rising = np.argsort(first)
    return first[rising], np.argsort(rising)[code]


_Held = TypeVar("_Held", bound=float | Floats)


def held_fraction(layout: Layout, held: Callable[[int, tuple[int, ...], int], _Held]) -> _Held | float:
    """The fraction of a value that the largest shard holds, or each device's."""
    return prod(held(*cut) for cut in cuts_of(layout))
