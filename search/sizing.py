"""Shard sizes of one program: a linear program per dimension class and device kind, then whole units (DESIGN D4).

Variables: ratio r[c, k] of class c on every device of kind k, its maximum m[c], and a time per distinct op.
    minimize    sum_j count_j t_j + sum_collectives latency + bytes(m) / bandwidth
    subject to  t_j >= overhead_k + flops_j r[c, k] / rate_k
                t_j >= overhead_k + (cut_j r[c, k] + whole_j) / bandwidth_k
                sum_k devices_k r[c, k] = 1,  m[c] >= r[c, k],  bytes alive at a point <= memory
Devices of one kind are interchangeable and the problem is convex, so some optimum gives them equal ratios. An
all-to-all between two classes is bilinear in their maxima; it is linearized at the last sizes. Whole units are then
chosen against the true objective: largest remainders, then moves of one unit while the cost falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_array

from hapsynth.graph import Graph
from hapsynth.instructions.program import Convert, Program
from hapsynth.instructions.sizes import Classes, Sizes
from hapsynth.search.costs import TILE, CostModel, Floats, Work, tiled
from hapsynth.search.evaluate import class_of_triple
from hapsynth.search.memory import MemoryProfile
from hapsynth.search.ratios import round_shares

_LP_ROUNDS = 6


@dataclass(frozen=True, eq=False)
class ClassLoad:
    """What one class's ratio decides: distinct works with their counts, and seconds per unit of its maximum."""

    works: tuple[tuple[Work, float], ...]
    wire: float
    pairs: tuple[tuple[int, float], ...]
    """(other class, seconds) of all-to-alls: seconds x own maximum x the other's."""


class Sizer:
    """Finds sizes for one program; `active` names the device kinds that may hold anything."""

    def __init__(self, program: Program, classes: Classes, costs: CostModel) -> None:
        self.program, self.classes, self.costs = program, classes, costs
        self.graph: Graph = costs.graph
        self.kinds = list(dict.fromkeys(costs.cluster.devices))
        self.kind_of = np.array([self.kinds.index(d) for d in costs.cluster.devices])
        self.loads = self._loads()
        self.tables = [_WorkTable(load, costs) for load in self.loads]
        self.memory = MemoryProfile(self.graph, program, classes, costs)

    def _loads(self) -> list[ClassLoad]:
        n = len(self.classes.all)
        works: list[dict[Work, float]] = [{} for _ in range(n)]
        wire = [0.0] * n
        pairs: list[dict[int, float]] = [{} for _ in range(n)]
        add: Callable[[dict[Any, float], Any, float], None] = lambda d, key, x: d.update({key: d.get(key, 0.0) + x})
        empty = Sizes(self.graph, self.classes, ())
        for value, (placement,) in self.program.inputs.items():
            work = self.costs.feed_work(value, placement)
            if work is not None and placement.is_sharded:
                add(works[self.classes.of[(value, placement.dim, (0,))]], work, 1.0)
        for i in self.program.instructions:
            if not isinstance(i, Convert):
                c = class_of_triple(self.costs, empty, i)
                if c is not None:
                    add(works[c], self.costs.work(i.op, i.triples[0]), self.graph.runs[self.graph.ops[i.op].region])
                continue
            runs = self.graph.runs[i.region]
            nbytes = self.graph.values[i.value].nbytes
            cut = [self.classes.of[(i.value, p.dim, (0,))] for p in (i.source[0], i.target[0]) if p.is_sharded]
            if i.step in ("all_gather", "reduce_scatter"):
                wire[cut[0]] += runs * self.costs.wire_bytes(i.step, nbytes, 1.0) * self.costs.beta
            elif i.step == "all_to_all":
                seconds = runs * self.costs.wire_bytes(i.step, nbytes, 1.0, 1.0) * self.costs.beta
                add(pairs[cut[0]], cut[1], seconds)
                add(pairs[cut[1]], cut[0], seconds)
        return [
            ClassLoad(tuple(w.items()), seconds, tuple(sorted(p.items())))
            for w, seconds, p in zip(works, wire, pairs, strict=True)
        ]

    def fixed(self, fractions: Floats) -> Sizes:
        """Every class at the same fractions, in whole units nearest to them."""
        return Sizes(self.graph, self.classes, tuple(round_shares(fractions, c.units) for c in self.classes.all))

    def best(self, start: Floats, *, limit: float = np.inf) -> Sizes:
        """The cheapest sizes found. Kinds are also left out, slowest first, where that pays.

        `limit`: bytes per device; sizes that break it are returned only when nothing keeps it.
        """
        candidates = [self.fixed(start), self.fixed(np.full(self.costs.n, 1.0 / self.costs.n))]
        speed = self.costs.rate("float32")
        order = sorted(range(len(self.kinds)), key=lambda k: -speed[self.kind_of == k].max())
        for count in range(1, len(order) + 1):
            active = np.isin(self.kind_of, order[:count])
            candidates.append(self._optimized(np.where(active, speed, 0.0) / speed[active].sum(), active, limit))
        ranked = [(self.memory.peak(s) > limit, self.variable_cost(s), i) for i, s in enumerate(candidates)]
        return candidates[min(ranked)[2]]

    def variable_cost(self, sizes: Sizes) -> float:
        """Seconds of everything that sizes decide; the rest of the program costs the same at all sizes."""
        largest = [max(s) / c.units for s, c in zip(sizes.shares, self.classes.all, strict=True)]
        total = 0.0
        for c, (load, table) in enumerate(zip(self.loads, self.tables, strict=True)):
            # Every pair is listed at both of its classes.
            wire = load.wire + sum(seconds * largest[o] / 2 for o, seconds in load.pairs)
            total += table.cost(np.array(sizes.shares[c]) / self.classes.all[c].units, wire)
        return total

    def _optimized(self, start: Floats, active: np.ndarray, limit: float) -> Sizes:
        """Sizes from the LP; memory rows are added at the points where the sizes found turn out too large."""
        if not self.classes.all:
            return Sizes(self.graph, self.classes, ())
        maxima = np.full(len(self.classes.all), start.max())
        points: set[int] = set()
        allowed = limit
        sizes = self._whole_units(np.tile(start, (len(self.classes.all), 1)), limit)
        for _ in range(_LP_ROUNDS):
            fractions = self._linear_program(active, maxima, points, allowed)
            if fractions is None:
                break
            sizes = self._whole_units(fractions, limit)
            alive = self.memory.at(sizes)
            if alive.max() <= limit and np.allclose(fractions.max(axis=1), maxima):
                return sizes
            if alive.max() > limit:
                if int(alive.argmax()) in points:
                    # Rounding to whole units overshot.
                    allowed *= limit / float(alive.max())
                points.add(int(alive.argmax()))
            elif not any(load.pairs for load in self.loads):
                return sizes
            maxima = fractions.max(axis=1)
        return sizes

    def _whole_units(self, fractions: Floats, limit: float) -> Sizes:
        """Largest remainders, then single units moved while the cost falls and the memory allows it."""
        shares = [round_shares(f, c.units) for f, c in zip(fractions, self.classes.all, strict=True)]
        rounded = Sizes(self.graph, self.classes, tuple(shares))
        for c in range(len(shares)):
            shares[c] = self._improved(c, shares)
        improved = Sizes(self.graph, self.classes, tuple(shares))
        return improved if np.isinf(limit) or self.memory.peak(improved) <= limit else rounded

    def _linear_program(self, active: np.ndarray, maxima: Floats, points: set[int], limit: float) -> Floats | None:
        """Fractions [classes, devices] from the LP, or None where it has no solution."""
        kinds = [k for k in range(len(self.kinds)) if active[self.kind_of == k].any()]
        first = [int(np.flatnonzero(self.kind_of == k)[0]) for k in kinds]
        counts = [int((self.kind_of == k).sum()) for k in kinds]
        classes, nk = len(self.classes.all), len(kinds)
        columns = classes * nk + classes
        rows = _Rows()
        objective: list[float] = [0.0] * columns
        for c, load in enumerate(self.loads):
            m = classes * nk + c
            objective[m] += load.wire + sum(seconds * maxima[o] for o, seconds in load.pairs)
            for j in range(nk):
                rows.add({c * nk + j: 1.0, m: -1.0}, 0.0)
            for work, count in load.works:
                t = len(objective)
                objective.append(float(count))
                rate = self.costs.rate(work.dtype)
                for j, device in enumerate(first):
                    fixed = self.costs.overhead[device] * work.launches
                    bandwidth = self.costs.bandwidth[device]
                    rows.add({c * nk + j: work.flops / rate[device], t: -1.0}, -fixed)
                    rows.add({c * nk + j: work.cut_bytes / bandwidth, t: -1.0}, -fixed - work.whole_bytes / bandwidth)
        whole, per_class = self.memory.by_class() if points else (np.zeros(0), np.zeros((0, 0)))
        for p in sorted(points):
            held = {classes * nk + c: float(per_class[c, p]) for c in range(classes)}
            rows.add(held, limit - float(whole[p]))
        equal = _Rows()
        for c in range(classes):
            equal.add({c * nk + j: float(counts[j]) for j in range(nk)}, 1.0)
        size = len(objective)
        found = linprog(
            np.array(objective),
            A_ub=rows.matrix(size),
            b_ub=np.array(rows.bounds),
            A_eq=equal.matrix(size),
            b_eq=np.array(equal.bounds),
            bounds=[(0.0, None)] * size,
            method="highs",
        )
        if found.x is None:
            return None
        ratio = found.x[: classes * nk].reshape(classes, nk)
        fractions = np.zeros((classes, self.costs.n))
        for j, k in enumerate(kinds):
            fractions[:, self.kind_of == k] = ratio[:, j : j + 1]
        return fractions / fractions.sum(axis=1, keepdims=True)

    def _aligned(self, load: ClassLoad, units: int, shares: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        """Shares in whole tiles for all kinds but one, which takes what is left: single units cannot cross a tile."""
        held = [k for k in range(len(self.kinds)) if shares[self.kind_of == k].any()]
        tiles = {TILE * units // w.lanes for w, _ in load.works if w.lanes >= TILE and TILE * units % w.lanes == 0}
        for tile, rest in product(sorted(tiles - {1}), held):
            others = [k for k in held if k != rest]
            for up in product((0, 1), repeat=len(others)) if len(others) < 6 else ():
                aligned = shares.copy()
                for k, u in zip(others, up, strict=True):
                    aligned[self.kind_of == k] = (int(shares[self.kind_of == k].mean()) // tile + u) * tile
                mine = self.kind_of == rest
                left, count = units - int(aligned[~mine].sum()), int(mine.sum())
                if left >= 0:
                    aligned[mine] = left // count + (np.arange(count) < left % count)
                    yield aligned

    def _improved(self, c: int, shares: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The cheapest of the rounded shares and those aligned to tiles, then single units moved between devices
        while the class's true cost falls."""
        load, units = self.loads[c], self.classes.all[c].units
        if not load.works and not load.wire and not load.pairs:
            return shares[c]
        wire = load.wire + sum(s * max(shares[o]) / self.classes.all[o].units for o, s in load.pairs)
        table = self.tables[c]
        current = np.array(shares[c], dtype=np.int64)
        best = table.cost(current / units, wire)
        for aligned in self._aligned(load, units, current):
            if (cost := table.cost(aligned / units, wire)) < best * (1 - 1e-12):
                best, current = cost, aligned.copy()
        for _ in range(4 * self.costs.n):
            # Devices of one kind with equal shares are interchangeable: one of each is enough.
            groups: dict[tuple[int, int], int] = {}
            for i, s in enumerate(current):
                groups.setdefault((int(self.kind_of[i]), int(s)), i)
            moves: list[tuple[float, int, int]] = []
            for (_, held), source in groups.items():
                for target in groups.values():
                    if held == 0 or source == target:
                        continue
                    current[source] -= 1
                    current[target] += 1
                    moves.append((table.cost(current / units, wire), source, target))
                    current[source] += 1
                    current[target] -= 1
            if not moves or min(moves)[0] >= best * (1 - 1e-12):
                break
            best, source, target = min(moves)
            current[source] -= 1
            current[target] += 1
        return tuple(int(s) for s in current)


class _WorkTable:
    """The works of one class as arrays: the class's cost at any fractions, vectorized."""

    def __init__(self, load: ClassLoad, costs: CostModel) -> None:
        column = lambda values: np.array(list(values), dtype=np.float64)[:, None]
        works = [w for w, _ in load.works]
        self.counts = np.array([count for _, count in load.works], dtype=np.float64)
        rates = np.array([costs.rate(w.dtype) for w in works]).reshape(len(works), costs.n)
        self.compute = column(w.flops for w in works) / rates
        self.cut = column(w.cut_bytes for w in works) / costs.bandwidth
        self.whole = column(w.whole_bytes for w in works) / costs.bandwidth
        self.lanes = [w.lanes for w in works]
        self.fixed = column(w.launches for w in works) * costs.overhead

    def cost(self, fractions: Floats, wire: float) -> float:
        done = np.array([tiled(fractions, lanes) for lanes in self.lanes]).reshape(len(self.lanes), len(fractions))
        busy = self.fixed + np.maximum(self.compute * done, self.cut * fractions + self.whole)
        return float(self.counts @ np.where(fractions > 0, busy, 0.0).max(axis=1, initial=0.0) + wire * fractions.max())


class _Rows:
    """Sparse rows `coefficients . x <= bound`, or `=`."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.bounds: list[float] = []

    def add(self, coefficients: dict[int, float], bound: float) -> None:
        self.entries += [(len(self.bounds), column, value) for column, value in coefficients.items()]
        self.bounds.append(bound)

    def matrix(self, columns: int) -> coo_array:
        rows, cols, values = zip(*self.entries, strict=True)
        return coo_array((values, (rows, cols)), shape=(len(self.bounds), columns))
