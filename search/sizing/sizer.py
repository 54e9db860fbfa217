"""Shard sizes of one program: a linear program per dimension class and kind of position, then whole units
(decisions.md D4).

Variables: ratio r[c, k] of class c at every position of kind k, its maximum m[c], and a time per distinct op.
    minimize    sum_j count_j t_j + sum_collectives latency + bytes(m) / bandwidth
    subject to  t_j >= overhead_k + flops_j r[c, k] / rate_k
                t_j >= overhead_k + (cut_j r[c, k] + whole_j) / bandwidth_k
                sum_k positions_k r[c, k] = 1,  m[c] >= r[c, k],  bytes alive at a point <= memory
Positions with like devices are interchangeable and the problem is convex, so some optimum gives them equal ratios.
Classes along the same mesh axes are in one linear program; those along others, and whatever is a product (an
all-to-all between two classes, an op cut along two axes), are held at the last sizes. Whole units are then chosen
against the true objective: largest remainders, then moves of one unit, at last of one from or to each of several alike
positions, while the cost falls. `Sizer.bound` says how far off they can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np

from hapsynth.graph.ir import Graph
from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.search.analysis.numbering import Numbering
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.memory.profile import MemoryProfile
from hapsynth.search.sizing.class_costs import ClassCosts
from hapsynth.search.sizing.fixed_ratios import FixedRatios
from hapsynth.search.sizing.leaving_out import FEW, ladder, least_at
from hapsynth.search.sizing.makespan_lp import LINK, MakespanLP
from hapsynth.search.sizing.ratio_lp import RatioLP
from hapsynth.search.sizing.ratios import nested_shares
from hapsynth.search.sizing.relaxation import relaxation_bound
from hapsynth.search.sizing.rounding import best_of, group_moves
from hapsynth.search.sizing.whole_units import ClassUnits
from hapsynth.search.solver import Ints

_LP_ROUNDS = 6
_POLISHED = 3
"""The number of candidate sizes that are polished where there are more than `FEW` kinds."""


@dataclass(frozen=True, eq=False)
class KnownShares:
    """Best shares already found for classes of programs with one cost model: searches meet equal layers again."""

    numbers: dict[object, int] = field(default_factory=dict[object, int])
    """As `ClassCosts.numbers`."""
    shares: dict[object, tuple[int, ...]] = field(default_factory=dict[object, tuple[int, ...]])
    """Key of all that a class's best shares depend on, with start and limits -> the shares."""
    numbering: Numbering = field(default_factory=Numbering)
    """Numbers of share vectors, as those of many devices take long to compare."""


class Sizer:
    """Finds sizes for one program. `fixed_ratios`: ratios that some classes have to have. `left`: the seconds that
    there are; where they have passed, the best sizes so far are good enough. `known`: of other programs as well.
    `under_way`: as of `MemoryProfile`."""

    def __init__(
        self,
        program: Program,
        classes: Classes,
        costs: CostModel,
        fixed_ratios: FixedRatios | None = None,
        left: Callable[[], float] = lambda: np.inf,
        known: KnownShares | None = None,
        under_way: Mapping[int, int] | None = None,
    ) -> None:
        self.program, self.classes, self.costs, self._left = program, classes, costs, left
        self._under_way = under_way or {}
        self.graph: Graph = costs.graph
        self.pinned = (fixed_ratios.shares(classes, costs.speed) if fixed_ratios else {}) | classes.owned
        self.families = sorted({c.axes for c in classes.all}, key=lambda axes: (-len(axes), axes))
        """The mesh axes that classes are cut along; each is one linear program's."""
        self.kinds = {axes: costs.kinds_along(axes) for axes in self.families}
        self._known = known or KnownShares()

    @property
    def limit(self) -> float:
        """Bytes that each device may hold, as counted (`MemoryBudget`)."""
        return self.costs.memory_budget.limit

    @cached_property
    def memory(self) -> MemoryProfile:
        return MemoryProfile(self.program, self.classes, self.costs, self._under_way)

    @cached_property
    def class_costs(self) -> ClassCosts:
        found = ClassCosts(self.program, self.classes, self.costs)
        found.numbers = self._known.numbers
        return found

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

    def best(self, start: Floats) -> Sizes:
        """The cheapest sizes found within `limit`; where none keep it, those that hold the least. Kinds are also left
        out, slowest first, where that pays. `start`: weights of the devices."""
        by_memory = self.costs.memory_budget.proportions
        candidates = [self.fixed(w) for w in (start, np.ones(self.costs.n), by_memory) if w is not None]
        if len(self.pinned) == len(self.classes.all):
            return candidates[0]
        speed = self.costs.speed
        kind_of = self.costs.kind_of
        order = sorted(range(len(self.costs.kinds)), key=lambda k: -speed[kind_of == k].max())
        every = len(order) <= FEW
        ranked = [(*self._merit(s), i) for i, s in enumerate(candidates)]

        def with_fastest(count: int) -> tuple[float, float]:
            if self._left() <= 0:
                return np.inf, np.inf
            active = np.isin(kind_of, order[:count])
            candidates.append(self._optimized(np.where(active, speed, 0.0), active))
            merit = self._merit(candidates[-1])
            ranked.append((*merit, len(candidates) - 1))
            return merit

        if every:
            for count in range(1, len(order) + 1):
                with_fastest(count)
        else:
            least_at(ladder(len(order)), with_fastest)
        # Rounding may part what is alike before it.
        best = [candidates[i] for *_, i in sorted(ranked)[: 1 if every else _POLISHED]]
        return min((self._polished(s) for s in best), key=lambda s: self._merit(s))

    def _merit(self, sizes: Sizes) -> tuple[float, float]:
        """A key to compare sizes by, less being better: bytes beyond `limit` first, then the cost."""
        return self._beyond(sizes), self.variable_cost(sizes)

    def _polished(self, sizes: Sizes) -> Sizes:
        """Improve sizes by moves of whole groups of units too, until the cost no longer falls."""
        for _ in range(_LP_ROUNDS if self._left() > 0 else 0):
            improved = self._improved(sizes.shares, self._beyond(sizes), together=True)
            if improved.shares == sizes.shares:
                break
            sizes = improved
        return sizes

    def _beyond(self, sizes: Sizes) -> float:
        """The bytes that sizes hold on the fullest device, but at least `limit`."""
        return max(self.memory.peak(sizes), self.limit)

    def variable_cost(self, sizes: Sizes) -> float:
        """Seconds of everything that sizes decide; the rest of the program costs the same at all sizes."""
        return self.class_costs.cost(sizes)

    def bound(self, sizes: Sizes) -> float:
        """A lower bound on `variable_cost`, in seconds, over all sizes within `limit`."""
        bound = relaxation_bound(self.class_costs, self.memory, self.kinds, self.pinned, sizes, self.limit, self._left)
        return min(bound, self.variable_cost(sizes))

    def _optimized(self, weights: Floats, active: np.ndarray) -> Sizes:
        """Sizes from the linear programs; memory rows are added at the points where the sizes found are too large."""
        sizes = self.fixed(weights)
        if not self.classes.all:
            return sizes
        if (
            len(self.families) > 1
            or self.class_costs.has_products
            or self.class_costs.has_curves
            or self.class_costs.move_terms
        ):
            # The linear programs depend on these.
            sizes = self._whole_units(self._fractions(sizes))
        points: set[int] = set()
        allowed = self.limit
        for _ in range(_LP_ROUNDS):
            before = self._fractions(sizes)
            solved = dict(before)
            for axes in self.families:
                given = self.class_costs, self.memory, axes, self.kinds[axes], active, sizes, self.pinned
                lp = RatioLP(*given, apart=bool(points))
                if not lp.classes:
                    continue
                fractions = lp.solve(sorted(points), allowed, self._left())
                if fractions is None:
                    return sizes
                solved.update(fractions)
                if len(self.families) > 1 and len(self.costs.kinds) > FEW:
                    sizes = Sizes(self.graph, self.classes, tuple(self._nearest(solved)))
                elif len(self.families) > 1:
                    sizes = self._whole_units(solved)
                    solved.update(self._fractions(sizes, axes))
            sizes = self._whole_units(solved)
            alive = self.memory.at(sizes)
            settled = all(np.allclose(solved[c].max(), before[c].max()) for c in solved)
            if alive.max() > self.limit:
                if int(alive.argmax()) in points:
                    # Rounding to whole units overshot.
                    allowed *= self.limit / float(alive.max())
                points.add(int(alive.argmax()))
            elif settled or not (self.class_costs.has_products or self.class_costs.has_curves):
                break
        return sizes

    def besides(self, sizes: Sizes, busy: Mapping[int, float]) -> dict[int, float]:
        """The part of the `busy` seconds of each kind of device and of the link that does not depend on sizes."""
        kind_of, class_costs = self.costs.kind_of, self.class_costs
        found = dict(busy)
        for term in class_costs.compute_terms:
            table = class_costs.table(term)
            seconds = table.counts @ table.busy(kind_of, [class_costs.fraction(sizes, cut) for cut in term.cuts])
            for kind in range(len(self.costs.kinds)):
                found[kind] -= float(seconds[kind_of == kind].max())
        found[LINK] -= class_costs.sent_seconds(sizes)
        return {resource: max(0.0, seconds) for resource, seconds in found.items()}

    def balanced(self, sizes: Sizes, besides: Mapping[int, float], exposed: float) -> Sizes:
        """Sizes at which the busiest stream and the link have the least to do, in whole units nearest to them; those
        given where no others are found within `limit`. `besides`, `exposed`: as `MakespanLP`."""
        found, points = sizes, set[int]()
        for _ in range(_LP_ROUNDS):
            before = self._fractions(found)
            solved = dict(before)
            for axes in self.families:
                given = self.class_costs, self.memory, axes, self.kinds[axes], np.ones(self.costs.n), found, self.pinned
                lp = MakespanLP(*given, besides=besides, exposed=exposed, apart=bool(points))
                fractions = lp.solve(sorted(points), self.limit, self._left()) if lp.classes else {}
                if fractions is None:
                    return sizes
                solved.update(fractions)
                found = Sizes(self.graph, self.classes, tuple(self._nearest(solved)))
            alive = self.memory.at(found)
            if alive.max() > self.limit:
                if int(alive.argmax()) in points:
                    break
                points.add(int(alive.argmax()))
            elif not (self.class_costs.has_products or self.class_costs.has_curves or len(self.families) > 1) or all(
                np.allclose(solved[c], before[c], atol=1e-3) for c in solved
            ):
                return found
        return found if self.memory.peak(found) <= self.limit else sizes

    def _fractions(self, sizes: Sizes, axes: tuple[int, ...] | None = None) -> dict[int, Floats]:
        """Class -> fraction per position, of those cut along `axes`, or all."""
        return {
            c.index: np.array(sizes.shares[c.index], dtype=np.float64) / max(c.units, 1)
            for c in self.classes.all
            if axes is None or c.axes == axes
        }

    def _whole_units(self, fractions: dict[int, Floats]) -> Sizes:
        """Largest remainders, then single units moved while the cost falls and the memory allows it."""
        return self._improved(self._nearest(fractions), self.limit)

    def _improved(self, shares: Sequence[tuple[int, ...]], limit: float, *, together: bool = False) -> Sizes:
        """Sizes of less cost, each class by itself: first without the memory limit; if the result exceeds it, one class
        after another within what the others leave."""
        known, numbers = self._known.shares, [0] * len(shares)

        def found(c: int, sizes: Sizes, most: tuple[int, ...]) -> tuple[int, ...]:
            key = (self.class_costs.alike(c, numbers), numbers[c], most, together)
            if key not in known:
                better = self._of_class(c, sizes, most, together=together)
                if self._left() <= 0:
                    return better
                known[key] = better
            return known[key]

        for tight in (False, True):
            sizes = Sizes(self.graph, self.classes, tuple(shares))
            numbers = list(map(self._known.numbering.of, shares))
            counted = self.memory.counted(sizes) if tight else np.zeros((1, 1))
            for c, mine in enumerate(shares):
                if c in self.pinned or (self._left() <= 0 and not tight):
                    continue
                better = found(c, sizes, (self.classes.all[c].units,))
                if tight and better != mine:
                    most = self._room(c, sizes, counted, limit)
                    better = better if (np.array(better) <= most).all() else found(c, sizes, most)
                if better != mine:
                    moved = Sizes(self.graph, self.classes, (*sizes.shares[:c], better, *sizes.shares[c + 1 :]))
                    if tight:
                        counted = counted + self.memory.added(sizes, moved, c)
                    sizes = moved
                    numbers[c] = self._known.numbering.of(better)
            if self.memory.peak(sizes) <= limit:
                break
        return sizes

    def _room(self, c: int, sizes: Sizes, counted: Floats, limit: float) -> tuple[int, ...]:
        """The units that each position or, padded, any may have of a class: as many as now, or more where the memory
        allows it. `counted`: as `MemoryProfile.counted`."""
        cls, exact = self.classes.all[c], self.costs.memory_budget.exact
        now = sizes.shares[c] if exact else (max(sizes.shares[c]),)
        if len(cls.axes) > 1:
            return now
        most = self.memory.most(sizes, c, limit, counted)
        if exact:
            place = self.costs.position(cls.axes)
            most = [most[place == p].min() for p in range(len(now))]
        return tuple(max(n, int(m * cls.units + 1e-9)) for n, m in zip(now, most, strict=True))

    def _aligned(self, c: int, shares: Ints, class_units: ClassUnits, most: Ints) -> Iterator[Ints]:
        """Shares in whole tiles for all kinds but one, which takes what is left: single units cannot cross a tile. Of
        many kinds one trial, in which they get tile after tile."""
        units, kind_of = self.classes.all[c].units, self.kinds[self.classes.all[c].axes]
        held = [k for k in range(int(kind_of.max()) + 1) if shares[kind_of == k].any()]
        if len(held) > FEW:
            allotted = class_units.allotted(shares, most)
            if allotted is not None:
                yield allotted
            return
        for tile, rest in product(sorted(self.class_costs.tiles(c)), held):
            others = [k for k in held if k != rest]
            for up in product((0, 1), repeat=len(others)):
                aligned = shares.copy()
                for k, u in zip(others, up, strict=True):
                    aligned[kind_of == k] = (int(shares[kind_of == k].mean()) // tile[k] + u) * tile[k]
                mine = kind_of == rest
                left, count = units - int(aligned[~mine].sum()), int(mine.sum())
                if left >= 0:
                    aligned[mine] = left // count + (np.arange(count) < left % count)
                    yield aligned

    def _of_class(self, c: int, sizes: Sizes, most: tuple[int, ...], *, together: bool) -> tuple[int, ...]:
        """The cheapest of a class's shares and those aligned to tiles, then single units moved between positions while
        the class's true cost falls; no share above `most`, of its position or of all. `together`: units of whole groups
        are moved as well."""
        units = ClassUnits(self.class_costs, c, sizes)
        if not units.decides:
            return sizes.shares[c]
        current = np.array(sizes.shares[c], dtype=np.int64)
        bounded = np.broadcast_to(np.array(most, dtype=np.int64), current.shape)
        many = int(units.kind_of.max()) >= FEW
        if many and not together:
            # Units given back one by one to those that are left out are not worth the time.
            bounded = np.where(current > 0, bounded, 0)
        seconds = lambda held: np.where((held <= bounded).all(axis=-1), units.seconds(held), np.inf)
        best = float(units.seconds(current[None])[0])
        for _ in range(_LP_ROUNDS if many else 1):
            found = best_of(self._aligned(c, current, units, bounded), seconds)
            if not found[0] < best * (1 - 1e-12):
                break
            best, current = found
        units.begin(current)
        # Of many kinds the sizes that are followed up go on.
        for _ in range(4 * FEW if many and not together else 4 * current.size):
            if self._left() <= 0:
                break
            move = units.best_move(bounded)
            if move is not None and move.seconds < best * (1 - 1e-12):
                best = move.seconds
                units.move(move.source, move.target)
                continue
            if not together:
                break
            at_least = units.at_least if units.only_rises else None
            found = best_of(group_moves(units.shares, units.kind_of, seconds, best, at_least), seconds)
            if not found[0] < best * (1 - 1e-12):
                break
            best = found[0]
            units.begin(found[1])
        return tuple(units.shares.tolist())
