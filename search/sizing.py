"""Shard sizes of one program: a linear program per dimension class and kind of position, then whole units (DESIGN D4).

Variables: ratio r[c, k] of class c at every position of kind k, its maximum m[c], and a time per distinct op.
    minimize    sum_j count_j t_j + sum_collectives latency + bytes(m) / bandwidth
    subject to  t_j >= overhead_k + flops_j r[c, k] / rate_k
                t_j >= overhead_k + (cut_j r[c, k] + whole_j) / bandwidth_k
                sum_k positions_k r[c, k] = 1,  m[c] >= r[c, k],  bytes alive at a point <= memory
Positions with like devices are interchangeable and the problem is convex, so some optimum gives them equal ratios.
Classes along the same mesh axes are in one linear program; those along others, and whatever is a product (an
all-to-all between two classes, an op cut along two axes), are held at the last sizes. Whole units are then chosen
against the true objective: largest remainders, then moves of one unit while the cost falls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from hapsynth.graph import Graph
from hapsynth.instructions.program import Program
from hapsynth.instructions.sizes import Classes, Sizes
from hapsynth.search._ratio_lp import RatioLP
from hapsynth.search.costs import TILE, CostModel, Floats
from hapsynth.search.loads import Loads
from hapsynth.search.memory import MemoryProfile
from hapsynth.search.pins import Pins
from hapsynth.search.ratios import nested_shares

_LP_ROUNDS = 6


class Sizer:
    """Finds sizes for one program. `pins`: ratios that some classes have to have."""

    def __init__(self, program: Program, classes: Classes, costs: CostModel, pins: Pins | None = None) -> None:
        self.program, self.classes, self.costs = program, classes, costs
        self.graph: Graph = costs.graph
        self.memory = MemoryProfile(self.graph, program, classes, costs)
        self.loads = Loads(program, classes, costs)
        self.pinned = pins.shares(classes) if pins else {}
        self.families = sorted({c.axes for c in classes.all}, key=lambda axes: (-len(axes), axes))
        """The mesh axes that classes are cut along; each is one linear program's."""
        self.kinds = {axes: _position_kinds(costs, axes) for axes in self.families}

    def fixed(self, weights: Floats) -> Sizes:
        """Every class in proportion to the devices' weights, in whole units nearest to them."""
        along = {axes: np.bincount(self.costs.position(axes), weights).astype(np.float64) for axes in self.families}
        return Sizes(self.graph, self.classes, tuple(self._nearest({c.index: along[c.axes] for c in self.classes.all})))

    def _nearest(self, fractions: Mapping[int, Floats]) -> list[tuple[int, ...]]:
        """Per class, whole units in proportion to its fractions or weights per position."""
        lengths = self.classes.lengths
        known: dict[object, tuple[int, ...]] = {}
        found: list[tuple[int, ...]] = []
        for c in self.classes.all:
            if c.index in self.pinned:
                found.append(self.pinned[c.index])
                continue
            key = (c.axes, c.units, fractions[c.index].tobytes())
            if key not in known:
                known[key] = nested_shares(fractions[c.index].reshape([lengths[a] for a in c.axes]), c.units)
            found.append(known[key])
        return found

    def best(self, start: Floats, *, limit: float = np.inf) -> Sizes:
        """The cheapest sizes found. Kinds are also left out, slowest first, where that pays.

        `start`: weights of the devices. `limit`: bytes per device; where none keep it, those that hold the least are
        returned.
        """
        candidates = [self.fixed(start), self.fixed(np.ones(self.costs.n))]
        if len(self.pinned) == len(self.classes.all):
            return candidates[0]
        speed = self.costs.rate("float32")
        kinds = list(dict.fromkeys(self.costs.cluster.devices))
        kind_of = np.array([kinds.index(d) for d in self.costs.cluster.devices])
        order = sorted(range(len(kinds)), key=lambda k: -speed[kind_of == k].max())
        for count in range(1, len(order) + 1):
            active = np.isin(kind_of, order[:count])
            candidates.append(self._optimized(np.where(active, speed, 0.0), active, limit))
        ranked = [(max(self.memory.peak(s), limit), self.variable_cost(s), i) for i, s in enumerate(candidates)]
        return candidates[min(ranked)[2]]

    def variable_cost(self, sizes: Sizes) -> float:
        """Seconds of everything that sizes decide; the rest of the program costs the same at all sizes."""
        return self.loads.cost(sizes)

    def _optimized(self, weights: Floats, active: np.ndarray, limit: float) -> Sizes:
        """Sizes from the linear programs; memory rows are added at the points where the sizes found are too large."""
        sizes = self.fixed(weights)
        if not self.classes.all:
            return sizes
        sizes = self._whole_units(self._fractions(sizes), sizes, limit)
        points: set[int] = set()
        allowed = limit
        for _ in range(_LP_ROUNDS):
            before = self._fractions(sizes)
            solved = dict(before)
            for axes in self.families:
                lp = RatioLP(self.loads, self.memory, axes, self.kinds[axes], active, sizes, self.pinned)
                if not lp.classes:
                    continue
                fractions = lp.solve(sorted(points), allowed)
                if fractions is None:
                    return sizes
                solved.update(fractions)
                if len(self.families) > 1:
                    sizes = self._whole_units(solved, sizes, limit)
                    solved.update(self._fractions(sizes, axes))
            sizes = self._whole_units(solved, sizes, limit)
            alive = self.memory.at(sizes)
            settled = all(np.allclose(solved[c].max(), before[c].max()) for c in solved)
            if alive.max() > limit:
                if int(alive.argmax()) in points:
                    # Rounding to whole units overshot.
                    allowed *= limit / float(alive.max())
                points.add(int(alive.argmax()))
            elif settled or not (self.loads.has_products or self.loads.has_curves):
                break
        return sizes

    def _fractions(self, sizes: Sizes, axes: tuple[int, ...] | None = None) -> dict[int, Floats]:
        """Class -> fraction per position, of those cut along `axes`, or all."""
        return {
            c.index: np.array(sizes.shares[c.index], dtype=np.float64) / max(c.units, 1)
            for c in self.classes.all
            if axes is None or c.axes == axes
        }

    def _whole_units(self, fractions: dict[int, Floats], at: Sizes, limit: float) -> Sizes:
        """Largest remainders, then single units moved while the cost falls and the memory allows it."""
        shares = self._nearest(fractions)
        rounded = Sizes(self.graph, self.classes, tuple(shares))
        known: dict[object, tuple[int, ...]] = {}
        for c, alike in enumerate(self.loads.alike):
            if c in self.pinned:
                continue
            key = (alike, shares[c])
            if key not in known:
                known[key] = self._improved(c, shares)
            shares[c] = known[key]
        improved = Sizes(self.graph, self.classes, tuple(shares))
        return improved if np.isinf(limit) or self.memory.peak(improved) <= limit else rounded

    def _aligned(self, c: int, shares: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        """Shares in whole tiles for all kinds but one, which takes what is left: single units cannot cross a tile."""
        units, kind_of = self.classes.all[c].units, self.kinds[self.classes.all[c].axes]
        held = [k for k in range(int(kind_of.max()) + 1) if shares[kind_of == k].any()]
        lanes = self.loads.lanes(c)
        tiles = {TILE * units // n for n in lanes if n >= TILE and TILE * units % n == 0}
        for tile, rest in product(sorted(tiles - {1}), held):
            others = [k for k in held if k != rest]
            for up in product((0, 1), repeat=len(others)) if len(others) < 6 else ():
                aligned = shares.copy()
                for k, u in zip(others, up, strict=True):
                    aligned[kind_of == k] = (int(shares[kind_of == k].mean()) // tile + u) * tile
                mine = kind_of == rest
                left, count = units - int(aligned[~mine].sum()), int(mine.sum())
                if left >= 0:
                    aligned[mine] = left // count + (np.arange(count) < left % count)
                    yield aligned

    def _improved(self, c: int, shares: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The cheapest of the rounded shares and those aligned to tiles, then single units moved between positions
        while the class's true cost falls."""
        cls = self.classes.all[c]
        cost = self.loads.of_class(c, Sizes(self.graph, self.classes, tuple(shares)))
        if cost is None:
            return shares[c]
        kind_of = self.kinds[cls.axes]
        current = np.array(shares[c], dtype=np.int64)
        best = cost(current / cls.units)
        for aligned in self._aligned(c, current):
            if (aligned_cost := cost(aligned / cls.units)) < best * (1 - 1e-12):
                best, current = aligned_cost, aligned.copy()
        for _ in range(4 * current.size):
            # Positions of one kind with equal shares are interchangeable: one of each is enough.
            groups: dict[tuple[int, int], int] = {}
            for i, s in enumerate(current.tolist()):
                groups.setdefault((int(kind_of[i]), s), i)
            moves: list[tuple[float, int, int]] = []
            for (_, held), source in groups.items():
                for target in groups.values():
                    if held == 0 or source == target:
                        continue
                    current[source] -= 1
                    current[target] += 1
                    moves.append((cost(current / cls.units), source, target))
                    current[source] += 1
                    current[target] -= 1
            if not moves or min(moves)[0] >= best * (1 - 1e-12):
                break
            best, source, target = min(moves)
            current[source] -= 1
            current[target] += 1
        return tuple(int(s) for s in current)


def _position_kinds(costs: CostModel, axes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """int [positions]: positions with the same kinds of devices, in the same order, have the same number."""
    place = costs.position(axes)
    rows = [tuple(costs.cluster.devices[d] for d in np.flatnonzero(place == p)) for p in range(int(place.max()) + 1)]
    number: dict[object, int] = {}
    return np.array([number.setdefault(row, len(number)) for row in rows], dtype=np.int64)
