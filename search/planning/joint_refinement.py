"""A closer joint bound: shares of long dimensions are rounded to nodes (`share_nodes.py`), those of short ones lie in
ranges (`share_ranges.py`), and there are more of both where the bound gains by it.

Each round bounds all programs by the nodes and ranges so far and looks at the choices that come out the cheapest. What
these take at a node less than they would at its share is what one beside it can gain. Of what they cut together in one
range, some suit its least and some its most; their seconds at any one share are what dividing it can gain, and it
is divided just so finely that within no part they take much less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hapsynth.instructions.program.sizes import Node
from hapsynth.search.cost.model import Floats
from hapsynth.search.cost.share_range import Range, ShareRange, spread
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.memory_constraints import MemoryConstraints
from hapsynth.search.formulation.share_nodes import ShareNodes
from hapsynth.search.formulation.share_ranges import RangeBuilder, RangeChoices, ShareRanges
from hapsynth.search.planning.cut_in_ranges import InRange, in_ranges, over_even
from hapsynth.search.planning.search_at_ratios import FixedRatioSearch
from hapsynth.search.planning.task import Task
from hapsynth.search.solver import Ints

_ROUNDS = 12
_MOST_STATES = 3_000_000
"""States of a problem: one with more takes minutes."""
_TOLERANCE = 0.02
"""A fraction of what the bound still lacks."""
_SAFETY = 1e-9
_WORTH = 0.02
"""A range is divided only if it, with all equivalent ones, can close this fraction of what the bound still lacks."""
_MOST = 0.2
"""A range is divided only if it can gain this fraction of the most that one of the ranges cut together can."""
_NEAR = 0.5
"""A fraction of the memory limit: a plan that holds less costs no more for lack of memory."""
_CLOSER = 0.25
"""The fraction of a range's possible gain that its parts may still have."""
_PARTS = 8
"""The number of parts into which one round divides a range at most."""
_FEW = 16, 4
"""Dimensions of fewer units, or with fewer units in a device's even share, have ranges, down to single units, and no
nodes."""
_SUITED = 121
"""The number of shares among which the best for each work is sought."""
_HEAVY = 0.05
"""A share is a first node only if works with this fraction of all works' seconds are best there."""
_APART = 0.02
"""The least distance of two first nodes, as a fraction of an even share."""
_POINTS = 33
"""The number of shares of a range at which the seconds of its works are compared."""
_POINTS_OF_TWO = 9
"""The same per share, where two shares vary at once."""


class _Priced(NamedTuple):
    """A Lagrangian bound at a price of memory, and the bytes held there beyond the limits: a subgradient of the
    bound."""

    price: float
    bound: float
    excess: float

    def at(self, price: float) -> float:
        """An upper bound on the bound at another price."""
        return self.bound + self.excess * (price - self.price)


@dataclass
class _MemoryPrice:
    """The multiplier of memory limits, seconds per byte beyond them. The Lagrangian bound is concave in it: where the
    tangents at the nearest prices on both sides meet it may be the greatest (Kelley's cutting planes, 1960).

    Rounded shares keep to a limit on the mean only, so it cannot be a constraint."""

    low: _Priced
    high: _Priced | None = None

    def next(self, enough: float) -> float:
        if self.high is None:
            most = self.low.price + 1.1 * max(enough - self.low.bound, _SAFETY * enough) / self.low.excess
            return most if self.low.price == 0 else min(max(most, 1.2 * self.low.price), 4 * self.low.price)
        margin = 0.1 * (self.high.price - self.low.price)
        return min(max(self._meet(self.high), self.low.price + margin), self.high.price - margin)

    def most(self) -> float:
        """An upper bound on the bound at any price."""
        return np.inf if self.high is None else self.low.at(self._meet(self.high))

    def _meet(self, high: _Priced) -> float:
        """The price where both tangents intersect."""
        return (high.at(0.0) - self.low.at(0.0)) / (self.low.excess - high.excess)

    def learn(self, found: _Priced) -> None:
        if found.excess > 0:
            self.low = found
        else:
            self.high = found


class JointRefinement:
    """The refinement of the joint bound of a search's task, which must be one that it `suits`."""

    @staticmethod
    def suits(task: Task) -> bool:
        """Whether a task has ranges to divide: along one mesh axis, over unlike devices, without a restriction. Plans
        with overlap have other bounds."""
        options, costs = task.options, task.costs
        return len(costs.axes) == 1 and len(costs.kinds) > 1 and options.restriction is None and not options.overlap

    def __init__(self, search: FixedRatioSearch) -> None:
        self.search, self.costs = search, search.task.costs
        self.graph = self.costs.graph
        self._shortest = self._shortest_dims()

    def bound(self, known: float, enough: float) -> float:
        """A lower bound, in seconds, on the programs of any ratios that `share_ranges.py` covers: at least `known`, and
        not tightened beyond `enough`."""
        ranges, clock, limits = ShareRanges(self.costs, {}), self.search.clock, dict(self.search.limits)
        price: _MemoryPrice | None = None
        for _ in range(_ROUNDS):
            choices = self._choices(ranges)
            if clock.late() or clock.interrupted or sum(map(len, choices.choices)) > _MOST_STATES:
                break
            builder = RangeBuilder(choices, self.costs, ranges)
            per_byte = 0.0 if price is None else price.next(enough)
            rounded = bool(ranges.nodes) and not self.costs.memory_budget.exact
            solved = self.search.cheapest(
                builder,
                limits,
                None,
                at_least=True,
                per_byte=per_byte if rounded else None,
                tolerance=max(_TOLERANCE * (1 - known / enough), 1e-6),
                seconds=clock.allotted,
                warm=False,
                # A little more, as the solver states its bounds less what rounding may have added.
                enough=enough * (1 + _SAFETY),
                stage="joint bound",
            )
            known = max(known, solved.lower_bound)
            if known >= enough or solved.assignment is None:
                break
            memory = MemoryConstraints(builder, at_least=True)
            limits = limits or self._exceeded(memory, solved.assignment)
            if rounded and limits:
                found = _Priced(per_byte, solved.lower_bound, _excess(memory, limits, solved.assignment))
                if price is not None:
                    price.learn(found)
                elif found.excess > 0:
                    price = _MemoryPrice(found)
            finer = self._finer(builder, solved.assignment, enough - known)
            if finer is None and (price is None or price.most() < known + _WORTH * (enough - known)):
                break
            ranges = finer or ranges
        return known

    def _exceeded(self, memory: MemoryConstraints, choices: Ints) -> dict[int, float]:
        """The limits, where the best program holds the most, if the choices hold more there."""
        best, limit = self.search.incumbent.best, self.search.limit
        if best is None or best.memory <= _NEAR * limit:
            return {}
        limits = dict.fromkeys(self.search.maker.full_ops(best), limit)
        return limits if _excess(memory, limits, choices) > 0 else {}

    def _choices(self, ranges: ShareRanges) -> RangeChoices:
        known = self.search.choices
        return RangeChoices(self.costs, ranges.count, sparing=known.sparing, owners=known.owners)

    def _shortest_dims(self) -> dict[Node, int]:
        """Root of the dimensions that ops can cut together -> the length of the shortest of them."""
        ranges, found = ShareRanges(self.costs, {}), dict[Node, int]()
        for v in self.graph.values:
            for dim, units in enumerate(v.shape):
                root = ranges.root(v.index, dim)
                found[root] = min(found.get(root, units), units)
        return found

    # Which nodes and ranges

    def _finer(self, builder: RangeBuilder, choices: Ints, lacking: float) -> ShareRanges | None:
        """The ranges with more nodes and finer parts where the bound may gain by it; None if it may nowhere. `lacking`:
        the seconds by which the bound is to rise."""
        ranges, found = builder.ranges, in_ranges(builder, choices)
        first = {} if ranges.nodes else self._first_nodes(found)
        if first:
            return ranges.divided({}, first)
        kinds: dict[tuple[Node, int], object] = {
            (root, way): (way, self._shape(ranges, root), held.kind) for (root, way), held in found.items()
        }
        # Equivalent ranges, as those of equal layers, are divided together.
        alike, worth = Counter(kinds.values()), _WORTH * lacking
        gained: dict[object, tuple[float, ShareNodes | list[ShareRange]]] = {}
        for (root, way), held in found.items():
            kind, nodes = kinds[root, way], ranges.nodes.get(root)
            if kind in gained:
                continue
            if nodes is None:
                gained[kind] = self._parts(ranges.at(root)[way], root, held, worth / alike[kind])
            else:
                gained[kind] = self._beside(ranges, nodes, way, held)
        gains = {at: alike[kind] * gained[kind][0] for at, kind in kinds.items()}
        most: dict[Node, float] = {}
        for (root, _), gain in gains.items():
            most[root] = max(most.get(root, 0.0), gain)
        parts, more = dict[tuple[Node, int], list[ShareRange]](), dict[Node, ShareNodes]()
        for at, gain in gains.items():
            _, finer = gained[kinds[at]]
            if gain < max(worth, _MOST * most[at[0]]):
                continue
            if isinstance(finer, ShareNodes):
                more[at[0]] = more.get(at[0], finer).with_more(finer.shares)
            else:
                parts[at] = finer
        return ranges.divided(parts, more) if parts or more else None

    def _first_nodes(self, found: Mapping[tuple[Node, int], InRange]) -> dict[Node, ShareNodes]:
        """First nodes for dimensions of many units: the shares of slow devices that suit the most of the works."""
        n, fast, works = self.costs.n, self.costs.fastest.tolist(), Counter[Work]()
        for held in found.values():
            works.update(held.works)
        even = (n - sum(fast)) / n
        shares = np.linspace(0.0, even, _SUITED)
        at = [ShareRange((1.0 / n, 1.0), (0.0, 1.0), (1.0 - s, 1.0 - s)) for s in shares.tolist()]
        seconds = self.costs.times_within([(work, within) for work in works for within in at])
        heavy: dict[float, float] = {}
        for runs, mine in zip(works.values(), seconds.reshape(len(works), len(at)), strict=True):
            suited = float(shares[np.argmin(mine)])
            heavy[suited] = heavy.get(suited, 0.0) + runs * float(mine.min())
        chosen = [even]
        total = sum(heavy.values())
        for share, weight in sorted(heavy.items(), key=lambda item: -item[1]):
            if weight >= _HEAVY * total and min(abs(share - x) for x in chosen) >= _APART * even:
                chosen.append(share)
        few, each = _FEW
        many = {root: units for root, units in self._shortest.items() if units >= max(few, each * n)}
        return {root: ShareNodes.near(units, fast, chosen) for root, units in many.items()}

    def _beside(self, ranges: ShareRanges, nodes: ShareNodes, way: int, held: InRange) -> tuple[float, ShareNodes]:
        """(seconds gained, nodes) with more nodes around node `way`, which choices use; 0 gained if no more are
        possible."""
        costs, each = self.costs, np.zeros((0, len(nodes.cells)))
        if held.works:
            each = ranges.least_in_cells(nodes, [*held.works])
        runs, lost = np.array([*held.works.values()]), -held.swapped_s
        seconds = runs @ each
        for other, even_s in held.evenly_s.items():
            seconds += even_s * over_even(costs, nodes.cell_ranges, other, roughly=True)
            lost += even_s * float(over_even(costs, [nodes.point(way)], other)[0])
        lost += float(runs @ (nodes.at(each) - nodes.below(each))[:, way])
        share, gain = nodes.worst(seconds, way)
        more = nodes.with_more([share])
        if gain < _CLOSER * lost or more == nodes:
            more = nodes.with_more(nodes.halfway(way))
        return max(gain, lost) if more != nodes else 0.0, more

    def _parts(self, whole: ShareRange, root: Node, held: InRange, worth: float) -> tuple[float, list[ShareRange]]:
        """(seconds gained, parts) for the works in a range, divided by the largest share or, where rounds are sent, by
        that of slow devices, whichever gains more; (0, []) if less than `worth` seconds could be gained."""
        by_largest = lambda part: whole._replace(largest=part)
        if not held.evenly_s:
            return self._parts_between(whole.largest, by_largest, root, held, worth)
        ways = [(whole.largest, by_largest), (whole.slow, lambda part: whole._replace(slow=part))]
        gain, parts = max((self._parts_between(*way, root, held, worth) for way in ways), key=lambda gained: gained[0])
        if not parts:
            gain, parts = self._around_the_best(whole, root, held)
            parts = parts if gain >= worth else []
        return (gain, parts) if parts else (0.0, [])

    def _around_the_best(self, whole: ShareRange, root: Node, held: InRange) -> tuple[float, list[ShareRange]]:
        """(seconds gained, parts) of a range, one part of which is just the shares at which its works take the least:
        only where both shares are known can rounds be known to send more."""
        units = max(self._shortest[root], 1)
        largest, slow = (_some_units(ends, units, _POINTS_OF_TWO) for ends in (whole.largest, whole.slow))
        points = [ShareRange((x, x), (y, y)) for x in largest for y in slow]
        first, *each = self._seconds(held, [whole, *points], units, whole.largest[0]).tolist()
        at = int(np.argmin(each))
        apart = lambda ends, x: [x + side for side in (-0.5 / units, 0.5 / units) if ends[0] < x + side < ends[1]]
        parts: list[ShareRange] = []
        for within in pairwise([whole.largest[0], *apart(whole.largest, points[at].largest[0]), whole.largest[1]]):
            inside = within[0] <= points[at].largest[0] <= within[1]
            ends = apart(whole.slow, points[at].slow[0]) if inside else []
            slow_parts = pairwise([whole.slow[0], *ends, whole.slow[1]])
            parts += [whole._replace(largest=within, slow=part) for part in slow_parts]
        return (each[at] - first, parts) if len(parts) > 1 else (0.0, [])

    def _shape(self, ranges: ShareRanges, root: Node) -> object:
        """A key that is equal for dimensions of equal length with equal ranges and nodes."""
        return self._shortest[root], ranges.at(root), ranges.nodes.get(root)

    def _parts_between(
        self, ends: Range, part: Callable[[Range], ShareRange], root: Node, held: InRange, worth: float
    ) -> tuple[float, list[ShareRange]]:
        """(seconds gained, parts) of a range that is divided between two ends of one of its shares."""
        (low, high), units = ends, max(self._shortest[root], 1)
        inside = _between(ends, units).tolist()
        if not inside:
            return 0.0, []
        first = part(ends).largest[0]
        seconds = lambda *within: self._seconds(held, [part(x) for x in within], units, first)
        whole = seconds(ends)[0]
        alike = seconds(*((x, x) for x in _some_units(ends, units, _POINTS))).min()
        found: list[float] = []
        if (gain := alike - whole) >= worth:
            left = max(_CLOSER * gain, worth)
            while len(found := _parted(seconds, ends, inside, alike - left)) >= _PARTS:
                left *= 1.5
        if not found and (gain := min(held.moved_s * (high - low), float(whole))) >= worth:
            # What moves to the range from others, or from it, may count as nothing where these lie beside it; at most
            # it could be elsewhere.
            found = [inside[bisect_right(inside, (max(low, inside[0]) * high) ** 0.5) - 1]]
        return (gain, [part(within) for within in pairwise([low, *found, high])]) if found else (0.0, [])

    def _seconds(self, held: InRange, parts: Sequence[ShareRange], units: int, low: float) -> Floats:
        """Lower bounds, in seconds, on the works of a range in each of its `parts` [parts], with shares in whole units.
        `low`: the least that the largest share in the range may be."""
        runs = np.array(list(held.works.values()))
        parts = [part.tightened(self.costs.fastest).in_units(units) for part in parts]
        times = self.costs.times_within([(work, part) for part in parts for work in held.works])
        least = np.array([part.largest[0] for part in parts]) / low
        swapped = [even_s * over_even(self.costs, parts, other) for other, even_s in held.evenly_s.items()]
        return times.reshape(len(parts), -1) @ runs + held.sent_s * least + sum(swapped, np.zeros(len(parts)))


def _excess(memory: MemoryConstraints, limits: Mapping[int, float], choices: Ints) -> float:
    """The total number of bytes that the choices hold beyond the limits."""
    problem = memory.problem(limits)
    used = problem.usage(memory.extended(problem, choices))
    return float(sum(u - r.limit for u, r in zip(used, problem.resources, strict=True)))


def _whole_units(ends: Range, units: int) -> Floats:
    """The shares of whole units, out of `units`, between two ends, rising."""
    low, high = ShareRange(ends).in_units(units).largest
    return np.arange(round(low * units), round(high * units) + 1) / units


def _some_units(ends: Range, units: int, most: int) -> list[float]:
    """At most `most` of `_whole_units`, evenly spaced."""
    every = _whole_units(ends, units)
    return every[spread(len(every), most)].tolist()


def _between(ends: Range, units: int) -> Floats:
    """The shares halfway between two `_whole_units`, at which a range may be divided."""
    return _whole_units(ends, units)[:-1] + 0.5 / units


def _parted(seconds: Callable[[Range], Floats], ends: Range, inside: Sequence[float], least: float) -> list[float]:
    """The inner ends of the fewest parts that each take at least `least` seconds or cannot be divided further."""
    (low, high), found = ends, list[float]()
    begin, first = low, 0
    while seconds((begin, high))[0] < least and first < len(inside):
        # The wider a part is, the lower is its bound.
        few, most = first, len(inside) - 1
        while few < most:
            middle = (few + most + 1) // 2
            enough = seconds((begin, inside[middle]))[0] >= least
            few, most = (middle, most) if enough else (few, middle - 1)
        begin, first = inside[few], few + 1
        found.append(begin)
    return found
