"""What instructions cost: measured or tabled devices and links (DESIGN D5).

The cost of a program is the sum over its instructions of the time of the slowest device (HAP, EuroSys'24,
section 4.3): t = max_i [overhead_i + max(flops_i / rate_i, bytes_i / bandwidth_i)] for an op, and
latency + bytes / bandwidth of the slowest link for a collective, on its padded size.

Every time is in seconds, every size in bytes. A `fractions` vector holds each device's share of a cut dimension, in
mesh order; it sums to 1.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hapsynth.cluster import Cluster
from hapsynth.graph import Boundary, Graph, Op
from hapsynth.instructions.collectives import Step, is_collective
from hapsynth.instructions.factors import Factors, Triple
from hapsynth.instructions.layout import Placement
from hapsynth.instructions.program import FactorTable
from hapsynth.instructions.rules.registry import flops_of, is_fusible

Floats: TypeAlias = npt.NDArray[np.float64]


class Work(NamedTuple):
    """What an op does under one triple.

    `cut_bytes` and `flops` are divided among the devices when `divided`; `whole_bytes` every device moves itself.
    `lanes`: how many rows, columns or terms of a contraction the cut factor is one of, 0 where that does not matter.
    """

    flops: float
    cut_bytes: float
    whole_bytes: float
    launches: int
    dtype: str
    divided: bool
    lanes: int


TILE = 16
"""Rows, columns or terms that a contraction works on at once: thinner shards take as long.

Measured on one XLA CPU device (a convolution cut to 4, 8 and 16 output channels takes 9.7, 2.7 and 1.3 x its share,
a matmul cut to 4 and 16 columns 3.3 and 0.9 x); tensor cores' smallest tiles are 8 and 16 wide.
"""


def tiled(fractions: Floats, lanes: int) -> Floats:
    """The fractions of a contraction's work that devices really do: whole tiles."""
    if lanes == 0:
        return fractions
    tile = min(TILE, lanes)
    return np.maximum(fractions, np.ceil(fractions * lanes / tile - 1e-9) * tile / lanes)


def lanes_of(name: str, factors: Factors, factor: int) -> int:
    """Over how many rows, columns or terms of a contraction a factor and its like extend; 0 for batch factors."""
    if name not in ("dot_general", "conv_general_dilated"):
        return 0
    tensors = [*factors.operands, *factors.results]
    held = [{f for dim in dims for f in dim} for dims in tensors]
    where = lambda f: tuple(f in h for h in held)
    mine = where(factor)
    if all(mine):
        return 0
    # A convolution's positions extend the rows (result only) and the terms (kernel only).
    alike = {mine, (False, False, True) if mine == (True, False, True) else mine}
    alike.add((False, True, False) if mine == (True, True, False) else mine)
    return prod(size for f, size in enumerate(factors.sizes) if where(f) in alike)


class CostModel:
    """Costs of one graph's instructions on one cluster, along one mesh axis over all devices."""

    def __init__(self, graph: Graph, cluster: Cluster, table: FactorTable) -> None:
        self.graph, self.cluster, self.table = graph, cluster, table
        self.n = cluster.n
        self.overhead = np.array([k.overhead for k in cluster.devices])
        self.bandwidth = np.array([k.bandwidth for k in cluster.devices])
        self.memory = np.array([float(k.memory) for k in cluster.devices])
        self._rates: dict[str, Floats] = {}
        link = cluster.slowest_link()
        self.latency, self.beta = link.latency, 1.0 / link.bandwidth
        per_host = max(Counter(cluster.hosts).values())
        self._crossing = per_host * (self.n - per_host) if per_host < self.n else self.n - 1
        self._fed = frozenset(graph.inputs) - {graph.inputs[source] for source, _ in graph.carry}
        self._works: dict[tuple[int, Triple], Work] = {}
        self._materialized = _materialized(graph)

    def rate(self, dtype: str) -> Floats:
        """FLOP/s of each device for a dtype."""
        if dtype not in self._rates:
            self._rates[dtype] = np.array([k.rate(dtype) for k in self.cluster.devices])
        return self._rates[dtype]

    def work(self, op_index: int, triple: Triple) -> Work:
        """What a triple of an op costs before any ratio."""
        key = (op_index, triple)
        if key not in self._works:
            self._works[key] = self._work(op_index, triple)
        return self._works[key]

    def _work(self, op_index: int, triple: Triple) -> Work:
        """Elementwise ops between others form one kernel with them: only what is materialized moves (D5)."""
        op = self.graph.ops[op_index]
        if isinstance(op.primitive, Boundary):
            return self._boundary_work(op, triple)
        fusible = is_fusible(op)
        cut = whole = 0.0
        for position, value in op.value_operands:
            if not fusible or self._materialized[value]:
                nbytes = self.graph.values[value].nbytes
                if triple.operands[position].is_sharded:
                    cut += nbytes
                else:
                    whole += nbytes
        stored = False
        for placement, value in zip(triple.results, op.results, strict=True):
            if self._materialized[value]:
                stored = True
                nbytes = self.graph.values[value].nbytes
                if placement.is_sharded:
                    cut += nbytes
                else:
                    whole += nbytes
        launches = 1 if stored or not fusible else 0
        dtype = str(op.dtypes[0] if op.dtypes else op.result_dtypes[0])
        lanes = 0 if triple.factor is None else lanes_of(op.name, self.table[op_index], triple.factor)
        return Work(flops_of(op), cut, whole, launches, dtype, triple.factor is not None, lanes)

    def _boundary_work(self, op: Op, triple: Triple) -> Work:
        """A scan reads and writes one iteration's part at a time; what is carried stays where it is."""
        moved = {"scan_slice": op.results, "scan_stack": op.operands}.get(op.name, ())
        nbytes = float(sum(self.graph.values[v].nbytes for v in moved if isinstance(v, int)))
        cut = triple.factor is not None
        return Work(0.0, nbytes if cut else 0.0, 0.0 if cut else nbytes, 0, "float32", cut, 0)

    def uniform_time(self, op_index: int) -> float:
        """Seconds to make a decision the same on all devices, where it was made of numbers that unlike devices round
        differently."""
        return self.convert_time("all_reduce", 4.0) if op_index in self.graph.unsure else 0.0

    def is_materialized(self, value: int) -> bool:
        """Whether a value lies in memory rather than inside a fused chain."""
        return self._materialized[value]

    def device_times(self, work: Work, fractions: Floats | None) -> Floats:
        """Seconds of each device; a device without a share does nothing."""
        rate = self.rate(work.dtype)
        if not work.divided or fractions is None:
            compute, moved = work.flops / rate, (work.cut_bytes + work.whole_bytes) / self.bandwidth
            return self.overhead * work.launches + np.maximum(compute, moved)
        moved = (work.cut_bytes * fractions + work.whole_bytes) / self.bandwidth
        busy = self.overhead * work.launches + np.maximum(work.flops * tiled(fractions, work.lanes) / rate, moved)
        return np.where(fractions > 0, busy, 0.0)

    def time(self, work: Work, fractions: Floats | None) -> float:
        return float(self.device_times(work, fractions).max())

    def feed_work(self, value: int, placement: Placement) -> Work | None:
        """What it takes to put an argument that is new at every step into the devices' memory; None for a value that
        stays there (carried state, constants)."""
        if value not in self._fed:
            return None
        nbytes, cut = float(self.graph.values[value].nbytes), placement.is_sharded
        return Work(0.0, nbytes if cut else 0.0, 0.0 if cut else nbytes, 0, "float32", cut, 0)

    def ideal_time(self, work: Work) -> float:
        """The least time over all ratios: no program at any ratio runs this op faster.

        At time t device i can take a share of at most r_i(t) = min over its compute and memory budget, so the
        least t is where the shares sum to 1. A device that takes part pays its overhead and its whole bytes.
        """
        if not work.divided:
            return self.time(work, None)
        rate = self.rate(work.dtype)
        fixed = self.overhead * work.launches

        def covered(t: float) -> float:
            budget = t - fixed
            by_compute = budget * rate / work.flops if work.flops else np.full(self.n, np.inf)
            if work.lanes:
                tile = min(TILE, work.lanes)
                by_compute = np.floor(by_compute * work.lanes / tile + 1e-6) * tile / work.lanes
            left = budget * self.bandwidth - work.whole_bytes
            by_memory = left / work.cut_bytes if work.cut_bytes else np.where(left >= 0, np.inf, -np.inf)
            return float(np.clip(np.minimum(by_compute, by_memory), 0.0, 1.0).sum())

        low, high = 0.0, float(self.device_times(work, np.ones(self.n)).min())
        if covered(high) < 1.0:
            return high
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if covered(middle) >= 1.0 else (middle, high)
        return low

    def wire_bytes(self, step: Step, nbytes: float, largest: float = 0.0, largest_target: float = 0.0) -> float:
        """Bytes over the slowest link of one conversion, padding included.

        `largest`: the largest fraction of the dimension that a reduce-scatter makes or an all-gather or all-to-all
        starts from; `largest_target`: of the one that an all-to-all makes. Rings for the first three; in an
        all-to-all the devices of a host share its link.
        """
        n = self.n
        match step:
            case "slice" | "partial":
                return 0.0
            case "all_reduce":
                return 2.0 * (n - 1) / n * nbytes
            case "reduce_scatter" | "all_gather":
                return (n - 1) * largest * nbytes
            case "all_to_all":
                return self._crossing * largest * largest_target * nbytes

    def convert_time(self, step: Step, nbytes: float, largest: float = 0.0, largest_target: float = 0.0) -> float:
        """Seconds of one conversion; an empty or a lone device's one is free."""
        if not is_collective(step) or self.n == 1 or nbytes == 0:
            return 0.0
        return self.latency + self.wire_bytes(step, nbytes, largest, largest_target) * self.beta

    def ideal_convert_time(self, step: Step, nbytes: float) -> float:
        """The least over all ratios: even shares have the least padding."""
        return self.convert_time(step, nbytes, 1.0 / self.n, 1.0 / self.n)


def _materialized(graph: Graph) -> list[bool]:
    """Whether a value lies in memory: sources, outputs, and whatever an op that is no part of a fused chain
    makes or takes."""
    stored = [True] * len(graph.values)
    outputs = {v for v in graph.outputs if isinstance(v, int)}.union(graph.ties.values())
    for op in graph.ops:
        if not is_fusible(op):
            continue
        for value in op.results:
            takers = (graph.ops[o] for o, _ in graph.uses[value])
            stored[value] = value in outputs or not all(is_fusible(t) for t in takers)
    return stored
