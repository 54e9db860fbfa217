"""A closer joint bound: the ranges in which the largest shares lie are divided where the bound gains by it.

Each round bounds all programs by the ranges so far (`share_ranges.py`) and looks at the choices that come out the
cheapest. Of what these cut together in one range, some suit its least and some its most; their seconds at any one share
are what dividing the range can gain, and it is divided just so finely that within no part they take much less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hapsynth.instructions.layout import cuts_of, owner_of
from hapsynth.instructions.program.sizes import Node
from hapsynth.search.cost.model import Floats
from hapsynth.search.cost.share_range import Range, ShareRange
from hapsynth.search.formulation.memory_constraints import MemoryConstraints
from hapsynth.search.formulation.share_prices import PricedRangeBuilder, ShareCurves
from hapsynth.search.formulation.share_ranges import (
    RangeBuilder,
    RangeChoices,
    ShareRanges,
)
from hapsynth.search.planning.cut_in_ranges import InRange, in_ranges, over_even
from hapsynth.search.planning.search_at_ratios import FixedRatioSearch
from hapsynth.search.planning.share_price_lp import SharePriceLP
from hapsynth.search.planning.task import Task
from hapsynth.search.solver import Ints, Problem

_ROUNDS = 8
_MOST_STATES = 3_000_000
"""Of a problem: more take minutes."""
_TOLERANCE = 0.02
"""Of what the bound still lacks."""
_SAFETY = 1e-9
_WORTH = 0.02
"""Of what the bound still lacks: ranges that can gain less, with all that are alike, are left as they are."""
_MOST = 0.2
"""Of what the ranges that can gain the most can gain, with all that are alike: of what is cut together, or of all where
memory is short, as states are dear there. Others are left as they are."""
_PROGRESS = 0.1
"""Of what the bound still lacks where memory is short: a round that gains less is fruitless."""
_FRUITLESS = 1
"""Rounds in a row, once a price of memory is known to be too high; one more is the last."""
_DEARER = 4.0
"""The price of memory that is tried next, over one that is too low, until one is too high."""
_NEAR = 0.5
"""Of the room: a plan that holds less is not dearer for want of memory."""
_CLOSER = 0.25
"""What is left of what a range can gain once it is divided."""
_PARTS = 8
"""Of a range, in one round."""
_STEP = 1.01
"""Between two shares at which ranges are divided, unless there are few: their ratio."""
_FEW = 64
"""Units of a dimension: of so few each share is told from the next."""
_LEAST = 0.25
"""Of an even share: smaller ones are not told apart."""
_POINTS = 33
"""Shares at which what cuts a range is compared."""


@dataclass
class _MemoryPrices:
    """Seconds per byte at each limited op, between `low`, at which more is held than the limits are, and `high`, at
    which less is: None as long as no such are known. `per_byte`: to be tried next."""

    low: Floats
    per_byte: Floats
    high: Floats | None = None

    @staticmethod
    def begin(low: Floats, fixed: Floats | None) -> _MemoryPrices:
        """`low`: where nothing ties shares to one another; `fixed`: by which fixed choices keep to the limits, mostly
        too high."""
        guess = low if fixed is None else (low + fixed) / 2
        return _MemoryPrices(low, guess if (guess > low).all() else _DEARER * low)

    def learn(self, problem: Problem, choices: Ints) -> bool:
        """From the choices that came out the cheapest at `per_byte`; whether these are low."""
        used = problem.usage(choices)
        owed = sum(p * (u - r.limit) for p, u, r in zip(self.per_byte, used, problem.resources, strict=True))
        if owed > 0:
            self.low = self.per_byte
        else:
            self.high = self.per_byte
        self.per_byte = _DEARER * self.low if self.high is None else (self.low + self.high) / 2
        return owed > 0


class JointRefinement:
    """Of the task of a search, one that it `suits`."""

    @staticmethod
    def suits(task: Task) -> bool:
        """Whether there are ranges to divide: along one mesh axis, over unlike devices, where nothing says how values
        lie. With overlap bounds are others'."""
        options, costs = task.options, task.costs
        return len(costs.axes) == 1 and len(costs.kinds) > 1 and options.restriction is None and not options.overlap

    def __init__(self, search: FixedRatioSearch) -> None:
        self.search, self.costs = search, search.task.costs
        self.graph = self.costs.graph
        self._undivided = ShareRanges(self.costs, {})
        self._shortest = self._shortest_dims()
        self._curves = ShareCurves(self.costs)

    def bound(self, known: float, enough: float) -> float:
        """Seconds that no program goes below, at any ratios, of those that `share_ranges.py` bounds: `known` ones or
        more, sought until `enough`."""
        ranges, clock = self._undivided, self.search.clock
        limits, lacked, fruitless = dict(self.search.limits), np.inf, 0
        memory_prices: _MemoryPrices | None = None
        tied: SharePriceLP | None = None
        may_price, unpriced = not self.costs.room.exact, known
        for _ in range(_ROUNDS):
            choices = self._choices(ranges)
            if clock.late() or clock.interrupted or sum(map(len, choices.choices)) > _MOST_STATES:
                break
            builder = RangeBuilder(choices, self.costs, ranges)
            how: dict[str, Any] = {
                "tolerance": max(_TOLERANCE * (1 - known / enough), 1e-6),
                "seconds": clock.allotted,
                "warm": False,
                # A little more, as the solver states its bounds less what rounding may have added.
                "enough": enough * (1 + _SAFETY),
                "stage": "joint bound",
            }
            per_byte = None if memory_prices is None else memory_prices.per_byte
            prices = None if tied is None or per_byte is None else tied.prices(per_byte)
            if prices is None or per_byte is None:
                solved = self.search.cheapest(builder, limits, None, at_least=True, **how)
            else:
                builder = PricedRangeBuilder(choices, self.costs, ranges, prices, self._curves)
                solved = self.search.at_price(builder, limits, per_byte, **how)
                if solved.lower_bound <= unpriced:
                    # That shares are not tied is not what the bound lacks.
                    memory_prices, tied, may_price = None, None, False
                    continue
                unpriced = -np.inf
            known = max(known, solved.lower_bound)
            if known >= enough or solved.choices is None:
                break
            memory, lacking = MemoryConstraints(builder, at_least=True), enough - known
            if not limits and (found := self._exceeded(memory, solved.choices)):
                limits = found
                continue
            short, dear = prices is not None or (solved.solution.prices.any() and not self.costs.room.exact), False
            if short and may_price:
                tied = SharePriceLP(builder, solved.choices, limits, self._curves, self._is_fine)
            if short:
                fruitless = 0 if lacking < lacked * (1 - _PROGRESS) else fruitless + 1
                lacked = lacking
                if prices is not None and memory_prices is not None and tied is not None:
                    dear = not memory_prices.learn(tied.problem, tied.choices)
                    fruitless = 0 if memory_prices.high is None else fruitless
                if fruitless > (_FRUITLESS if prices is not None else 0):
                    break
            if tied is not None and memory_prices is None:
                unpriced, fixed = known, tied.memory_prices()
                memory_prices = _MemoryPrices.begin(solved.solution.prices, fixed)
            if dear:
                # That says little of what ranges lack.
                continue
            ops = memory.limited(limits)
            finer = self._divided_within_memory(memory, solved.choices, ops, lacking) if short else None
            finer = finer or self._divided(builder, solved.choices, lacking)
            if finer is None and not short:
                break
            ranges = finer or ranges
        return known

    def _is_fine(self, value: int, dim: int) -> bool:
        """Whether a dimension's largest share may be nearly any; of few each is a range of its own."""
        return self._shortest[self._undivided.root(value, dim)] > _FEW

    def _exceeded(self, memory: MemoryConstraints, choices: Ints) -> dict[int, float]:
        """The limits, where the best program holds the most, if the choices hold more there."""
        best, limit = self.search.incumbent.best, self.search.limit
        if best is None or best.memory <= _NEAR * limit:
            return {}
        limits = dict.fromkeys(self.search.maker.full_ops(best), limit)
        problem = memory.problem(limits)
        return {} if problem.fits(memory.extended(problem, choices)) else limits

    def _choices(self, ranges: ShareRanges) -> RangeChoices:
        known = self.search.choices
        return RangeChoices(self.costs, ranges.count, sparing=known.sparing, owners=known.owners)

    def _shortest_dims(self) -> dict[Node, int]:
        """Of what ops can cut together, the length of the shortest dimension."""
        found: dict[Node, int] = {}
        for v in self.graph.values:
            for dim, units in enumerate(v.shape):
                root = self._undivided.root(v.index, dim)
                found[root] = min(found.get(root, units), units)
        return found

    def _divided(self, builder: RangeBuilder, choices: Ints, lacking: float) -> ShareRanges | None:
        """Finer ranges where the choices may gain by it, if there are any, the bound being `lacking` seconds."""
        found = in_ranges(builder, choices)
        kind_of = lambda root, way, held: (way, self._shape(builder.ranges, root), held.kind)
        kinds: dict[tuple[Node, int], object] = {at: kind_of(*at, held) for at, held in found.items()}
        # Of those that are alike, as layers' are, all can be divided.
        alike, worth = Counter(kinds.values()), _WORTH * lacking
        parts: dict[object, tuple[float, list[ShareRange]]] = {}
        for (root, way), held in found.items():
            if (kind := kinds[root, way]) not in parts:
                parts[kind] = self._parts(builder.ranges.at(root)[way], root, held, worth / alike[kind])
        gains = {at: alike[kind] * parts[kind][0] if parts[kind][1] else 0.0 for at, kind in kinds.items()}
        most: dict[Node, float] = {}
        for (root, _), gain in gains.items():
            most[root] = max(most.get(root, 0.0), gain)
        some = {at: parts[kinds[at]][1] for at, gain in gains.items() if gain >= max(worth, _MOST * most[at[0]])}
        return _with(builder.ranges, some)

    def _parts(self, whole: ShareRange, root: Node, held: InRange, worth: float) -> tuple[float, list[ShareRange]]:
        """(seconds gained, parts) of a range for what lies in it, by the largest share or, where rounds are sent, by
        that of slow devices, whichever gains more; no parts where less than `worth` seconds could be gained."""
        ways = [(whole.largest, lambda part: whole._replace(largest=part))]
        if held.swapped_s:
            ways.append((whole.slow, lambda part: whole._replace(slow=part)))
        found = [self._parts_between(ends, part, root, held, worth) for ends, part in ways]
        return max(found, key=lambda gained: (bool(gained[1]), gained[0]))

    def _divided_within_memory(
        self, memory: MemoryConstraints, choices: Ints, ops: Iterable[int], lacking: float
    ) -> ShareRanges | None:
        """As `_divided`, where the bound is short of memory at some ops: what is held there counts at a range's first
        share, while works take what they do at its best. It is divided until they do not take much less there."""
        builder = memory.builder
        assert isinstance(builder, RangeBuilder)
        ranges, works = builder.ranges, dict[Node, InRange]()
        layouts = [found for op in ops for found in memory.smallest_at(op, choices)]
        cut = {ranges.root(v, dim) for v, layout in layouts for dim, _, way in cuts_of(layout) if owner_of(way) is None}
        for (root, _), held in in_ranges(builder, choices).items():
            if root in cut:
                mine = works.setdefault(root, InRange()).works
                for work, runs in held.works.items():
                    mine[work] = mine.get(work, 0.0) + runs
        kinds: dict[Node, object] = {root: (self._shape(ranges, root), held.kind) for root, held in works.items()}
        alike, first = Counter(kinds.values()), {kind: root for root, kind in kinds.items()}
        gains: dict[tuple[object, int], float] = {}
        for kind, root in first.items():
            for way, whole in enumerate(ranges.at(root)):
                low = whole.largest[0]
                at_first, at_best = self._seconds(works[root], [whole._replace(largest=(low, low)), whole], low)
                gains[kind, way] = float(at_first - at_best)
        most = max((alike[kind] * gain for (kind, _), gain in gains.items()), default=0.0)
        worth, parts = max(_WORTH * lacking, _MOST * most), dict[tuple[object, int], list[ShareRange]]()
        for (kind, way), gain in gains.items():
            root, least = first[kind], worth / alike[kind]
            if gain >= least:
                left = max(_CLOSER * gain, least)
                whole, possible = ranges.at(root)[way], self._possible(root)
                while len(more := self._stepped(works[root], whole, possible, left)) >= _PARTS:
                    left *= 1.5
                parts[kind, way] = [whole._replace(largest=part) for part in pairwise(_with_ends(whole.largest, more))]
        return _with(
            ranges,
            {(root, way): mine for root, of in kinds.items() for (kind, way), mine in parts.items() if kind == of},
        )

    def _stepped(self, held: InRange, whole: ShareRange, possible: Floats, most: float) -> list[float]:
        """The fewest ends of parts at whose first share all takes at most so many seconds more than in the part."""
        (low, high), found = whole.largest, list[float]()
        inside = possible[(possible > low) & (possible < high)].tolist()
        begin, first = low, 0
        while first < len(inside):
            parts = lambda end, begin=begin: [whole._replace(largest=(begin, x)) for x in (begin, end)]
            spread = lambda end, parts=parts: -np.diff(self._seconds(held, parts(end), low))[0]
            if spread(high) <= most:
                break
            first = max(bisect_right(inside, most, first, key=spread), first + 1)
            begin = inside[first - 1]
            found.append(begin)
        return found

    def _shape(self, ranges: ShareRanges, root: Node) -> object:
        """Equal for what can be cut and is divided alike."""
        return self._shortest[root], ranges.at(root)

    def _possible(self, root: Node) -> Floats:
        """Shares at which a dimension's ranges may be divided, rising."""
        units = max(self._shortest[root], 1)
        if units <= _FEW:
            return (np.arange(units) + 0.5) / units
        n, steps = self.costs.n, lambda ratio: int(np.log(ratio) / np.log(_STEP))
        return _STEP ** np.arange(-steps(1 / _LEAST), steps(n)) / n

    def _parts_between(
        self, ends: Range, part: Callable[[Range], ShareRange], root: Node, held: InRange, worth: float
    ) -> tuple[float, list[ShareRange]]:
        """(seconds gained, parts) of a range that is divided at shares between two ends."""
        (low, high), possible = ends, self._possible(root)
        inside = possible[(possible > low) & (possible < high)].tolist()
        if not inside:
            return 0.0, []
        first = part(ends).largest[0]
        seconds = lambda *within: self._seconds(held, [part(x) for x in within], first)
        points = np.unique(np.quantile([low, *inside, high], np.linspace(0, 1, _POINTS)))
        whole = seconds(ends)[0]
        alike = seconds(*((p, p) for p in points.tolist())).min()
        found: list[float] = []
        if (gain := alike - whole) >= worth:
            left = max(_CLOSER * gain, worth)
            while len(found := _parted(seconds, ends, inside, alike - left)) >= _PARTS:
                left *= 1.5
        if not found and (gain := min(held.moved_s * (high - low), float(whole))) >= worth:
            # What moves to the range from others, or from it, may count as nothing where these lie beside it; at most
            # it could be elsewhere.
            found = [inside[bisect_right(inside, (max(low, inside[0]) * high) ** 0.5) - 1]]
        return gain, [part(within) for within in pairwise(_with_ends(ends, found))] if found else []

    def _seconds(self, held: InRange, parts: Sequence[ShareRange], low: float) -> Floats:
        """What lies in a range whose largest share is `low` or more takes where it lies in each of some parts of it."""
        runs = np.array(list(held.works.values()))
        times = self.costs.times_within([(work, part) for part in parts for work in held.works])
        parts = [part.tightened(self.costs.fastest) for part in parts]
        least = np.array([part.largest[0] for part in parts]) / low
        # Of two dimensions that are cut alike.
        swapped = np.array(
            [held.swapped_s * over_even(self.costs, part, part) if held.swapped_s else 0.0 for part in parts]
        )
        return times.reshape(len(parts), -1) @ runs + held.sent_s * least + swapped


def _parted(seconds: Callable[[Range], Floats], ends: Range, inside: Sequence[float], least: float) -> list[float]:
    """The fewest ends of parts in which all takes `least` seconds, but for parts that cannot be divided."""
    (low, high), found = ends, list[float]()
    begin, first = low, 0
    while seconds((begin, high))[0] < least and first < len(inside):
        # The more there is in a part, the less it takes.
        few, most = first, len(inside) - 1
        while few < most:
            middle = (few + most + 1) // 2
            enough = seconds((begin, inside[middle]))[0] >= least
            few, most = (middle, most) if enough else (few, middle - 1)
        begin, first = inside[few], few + 1
        found.append(begin)
    return found


def _with_ends(ends: Range, inside: Sequence[float]) -> list[float]:
    return [ends[0], *inside, ends[1]]


def _with(ranges: ShareRanges, parts: Mapping[tuple[Node, int], Sequence[ShareRange]]) -> ShareRanges | None:
    """Ranges with parts in place of those that have some, if there are any."""
    some = {at: mine for at, mine in parts.items() if mine}
    return ranges.divided(some) if some else None
