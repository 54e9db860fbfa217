"""A closer joint bound: the ranges in which the largest shares lie are divided where the bound gains by it.

Each round bounds all programs by the ranges so far (`share_ranges.py`) and looks at the choices that come out the
cheapest. Of what these cut together in one range, some suit its least and some its most; their seconds at any one share
are what dividing the range can gain, and it is divided just so finely that within no part they take much less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hapsynth.instructions.layout import Layout, cuts_of, owner_of
from hapsynth.instructions.program.sizes import Node
from hapsynth.search.cost.model import CostModel, Floats, Range
from hapsynth.search.cost.network import MOVES, PRICES, PriceOfRounds
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.choice_space import AvailableLayouts, Domain
from hapsynth.search.formulation.memory_constraints import MemoryConstraints
from hapsynth.search.formulation.share_prices import PricedRangeBuilder, ShareCurves
from hapsynth.search.formulation.share_ranges import (
    ConversionsWithMoves,
    RangeBuilder,
    RangeChoices,
    ShareRanges,
)
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
"""Where memory is short: of what the ranges that can gain the most can gain, with all that are alike. States are dear
there."""
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
"""Between two largest shares at which ranges are divided, unless there are few: their ratio."""
_FEW = 64
"""Units of a dimension: of so few each largest share is told from the next."""
_POINTS = 33
"""Shares at which what cuts a range is compared."""


@dataclass
class _InRange:
    """What a solution cuts in one range. `works`: runs of each; `sent_s`: seconds of its conversions but all-to-alls,
    `swapped_s` of these, `evenly_s` of as many of even blocks, where they may go in rounds; `moved_s`: those that
    moving all rows would take of what comes to the range from another, or from it to another."""

    works: dict[Work, float] = field(default_factory=dict[Work, float])
    sent_s: float = 0.0
    swapped_s: float = 0.0
    evenly_s: float = 0.0
    moved_s: float = 0.0

    @property
    def kind(self) -> object:
        """Equal for what is alike."""
        sent = (f"{x:.6g}" for x in (self.sent_s, self.swapped_s, self.evenly_s, self.moved_s))
        return frozenset(self.works.items()), *sent


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
        found = _in_ranges(builder, choices)
        kind_of = lambda root, way, held: (way, self._shape(builder.ranges, root), held.kind)
        kinds: dict[tuple[Node, int], object] = {at: kind_of(*at, held) for at, held in found.items()}
        # Of those that are alike, as layers' are, all can be divided.
        alike, worth = Counter(kinds.values()), _WORTH * lacking
        ends: dict[object, list[float]] = {}
        for (root, way), held in found.items():
            if (kind := kinds[root, way]) not in ends:
                within = builder.ranges.between(root, way)
                ends[kind] = self._ends_within(within, self._possible(root), held, worth / alike[kind])
        return self._with(builder.ranges, ((root, ends[kind]) for (root, _), kind in kinds.items()))

    def _divided_within_memory(
        self, memory: MemoryConstraints, choices: Ints, ops: Iterable[int], lacking: float
    ) -> ShareRanges | None:
        """As `_divided`, where the bound is short of memory at some ops: what is held there counts at a range's first
        share, while works take what they do at its best. It is divided until they do not take much less there."""
        builder = memory.builder
        assert isinstance(builder, RangeBuilder)
        ranges, works = builder.ranges, dict[Node, _InRange]()
        layouts = [found for op in ops for found in memory.smallest_at(op, choices)]
        cut = {ranges.root(v, dim) for v, layout in layouts for dim, _, way in cuts_of(layout) if owner_of(way) is None}
        for (root, _), held in _in_ranges(builder, choices).items():
            if root in cut:
                mine = works.setdefault(root, _InRange()).works
                for work, runs in held.works.items():
                    mine[work] = mine.get(work, 0.0) + runs
        kinds: dict[Node, object] = {root: (self._shape(ranges, root), held.kind) for root, held in works.items()}
        alike, first = Counter(kinds.values()), {kind: root for root, kind in kinds.items()}
        gains: dict[tuple[object, int], float] = {}
        for kind, root in first.items():
            for way in range(len(ranges.ends.get(root, ())) + 1):
                low, high = ranges.between(root, way)
                at_first, at_best = self._seconds(works[root], [(low, low), (low, high)], low)
                gains[kind, way] = float(at_first - at_best)
        most = max((alike[kind] * gain for (kind, _), gain in gains.items()), default=0.0)
        worth, ends = max(_WORTH * lacking, _MOST * most), dict[object, list[float]]()
        for (kind, way), gain in gains.items():
            root, least = first[kind], worth / alike[kind]
            if gain >= least:
                left = max(_CLOSER * gain, least)
                within, possible = ranges.between(root, way), self._possible(root)
                while len(more := self._stepped(works[root], within, possible, left)) >= _PARTS:
                    left *= 1.5
                ends.setdefault(kind, []).extend(more)
        return self._with(ranges, ((root, ends.get(kind, [])) for root, kind in kinds.items()))

    def _stepped(self, held: _InRange, within: Range, possible: Floats, most: float) -> list[float]:
        """The fewest ends of parts at whose first share all takes at most so many seconds more than in the part."""
        (low, high), found = within, list[float]()
        inside = possible[(possible > low) & (possible < high)].tolist()
        begin, first = low, 0
        while first < len(inside):
            spread = lambda end, begin=begin: -np.diff(self._seconds(held, [(begin, begin), (begin, end)], low))[0]
            if spread(high) <= most:
                break
            first = max(bisect_right(inside, most, first, key=spread), first + 1)
            begin = inside[first - 1]
            found.append(begin)
        return found

    def _with(self, ranges: ShareRanges, more: Iterable[tuple[Node, Sequence[float]]]) -> ShareRanges | None:
        """Ranges with more ends, if there are any."""
        ends, found = {root: set(inner) for root, inner in ranges.ends.items()}, False
        for root, some in more:
            ends.setdefault(root, set()).update(some)
            found |= bool(some)
        return ShareRanges(self.costs, {root: tuple(sorted(inner)) for root, inner in ends.items()}) if found else None

    def _shape(self, ranges: ShareRanges, root: Node) -> object:
        """Equal for what can be cut and is divided alike."""
        return self._shortest[root], ranges.ends.get(root, ())

    def _possible(self, root: Node) -> Floats:
        """Largest shares at which a dimension's range may be divided, rising."""
        n, units = self.costs.n, max(self._shortest[root], 1)
        least = 1.0 / n
        if units <= _FEW:
            halves = (np.arange(units) + 0.5) / units
            return halves[(halves > -(-units // n) / units) & (halves < 1)]
        return np.array([least * _STEP**k for k in range(1, int(np.log(n) / np.log(_STEP)))])

    def _ends_within(self, within: Range, possible: Floats, held: _InRange, worth: float) -> list[float]:
        """Where a range is divided for what lies in it; nowhere where less than `worth` seconds could be gained."""
        low, high = within
        inside = possible[(possible > low) & (possible < high)].tolist()
        if not inside:
            return []
        points = np.unique(np.quantile([low, *inside, high], np.linspace(0, 1, _POINTS)))
        whole = self._seconds(held, [within], low)[0]
        alike = self._seconds(held, [(p, p) for p in points.tolist()], low).min()
        found: list[float] = []
        if (gain := alike - whole) >= worth:
            left = max(_CLOSER * gain, worth)
            while len(found := self._parted(held, within, inside, alike - left)) >= _PARTS:
                left *= 1.5
        if not found and held.moved_s * (high - low) >= worth:
            # What moves to the range from others, or from it, may count as nothing where these lie beside it.
            found = [inside[bisect_right(inside, (low * high) ** 0.5) - 1]]
        return found

    def _parted(self, held: _InRange, within: Range, inside: Sequence[float], least: float) -> list[float]:
        """The fewest ends of parts in which all takes `least` seconds, but for parts that cannot be divided."""
        (low, high), found = within, list[float]()
        begin, first = low, 0
        while self._seconds(held, [(begin, high)], low)[0] < least and first < len(inside):
            # The more there is in a part, the less it takes.
            few, most = first, len(inside) - 1
            while few < most:
                middle = (few + most + 1) // 2
                enough = self._seconds(held, [(begin, inside[middle])], low)[0] >= least
                few, most = (middle, most) if enough else (few, middle - 1)
            begin, first = inside[few], few + 1
            found.append(begin)
        return found

    def _seconds(self, held: _InRange, ranges: Sequence[Range], low: float) -> Floats:
        """What lies in a range from `low` on takes where it lies in each of some parts of it."""
        runs = np.array(list(held.works.values()))
        times = self.costs.times_within([(work, part) for part in ranges for work in held.works])
        least, most = np.array(ranges).T
        n = self.costs.n
        # Of two dimensions that are cut alike.
        rounds = np.maximum(np.maximum(least, 1 / n) * (1 - most) * n**2 / max(n - 1, 1), 1.0)
        swapped = np.minimum(held.swapped_s * least / low, held.evenly_s * rounds)
        return times.reshape(len(ranges), -1) @ runs + held.sent_s * least / low + swapped


def _in_ranges(builder: RangeBuilder, choices: Ints) -> dict[tuple[Node, int], _InRange]:
    """What an assignment cuts, by what ops can cut together and in which of its ranges."""
    st, graph, costs, ranges = builder.structure, builder.graph, builder.costs, builder.ranges
    found: dict[tuple[Node, int], _InRange] = {}
    states = [(st.choices[k], int(choices[k])) for k in range(len(st.choices))]
    for op in graph.ops:
        domain, state = states[st.op_variable[op.index]]
        place, cuts = int(domain.triple[state]), builder.cuts(op.index)
        for cut in cuts.groups[place]:
            divided, _, way, _ = cuts.all[cut]
            if owner_of(way) is not None:
                continue
            value, dim = next((v, d) for n, d in divided if isinstance(v := (*op.operands, *op.results)[n], int))
            mine = found.setdefault((ranges.root(value, dim), way), _InRange())
            work = costs.work(op.index, domain.triples[place])
            mine.works[work] = mine.works.get(work, 0.0) + graph.runs[op.region]
    for value, source, target, runs in _converted(builder, states):
        ways = builder.conversions(value)
        assert isinstance(ways, ConversionsWithMoves)
        layouts = ways.layouts.layouts
        cuts_at = lambda place, v=value, layouts=layouts: [
            found.setdefault((ranges.root(v, dim), way), _InRange())
            for dim, _, way in cuts_of(layouts[place])
            if owner_of(way) is None
        ]
        moves = ways.moves_between(source, target)
        ends, spent = [layouts[place] for place in (source, target)], runs * float(ways.seconds[source, target])
        evenly = 0.0 if moves else runs * _evenly(costs, float(graph.values[value].nbytes), *ends)
        for place in (source, target):
            for mine in cuts_at(place):
                mine.sent_s += 0.0 if moves or evenly else spent
                mine.swapped_s += spent if evenly else 0.0
                mine.evenly_s += evenly
        for place in moves or ():
            for mine in cuts_at(place):
                mine.moved_s += runs * MOVES.least(costs.links[0], float(graph.values[value].nbytes), 1.0)
    return found


def _evenly(costs: CostModel, nbytes: float, source: Layout, target: Layout) -> float:
    """Seconds of an all-to-all of even blocks where one may go in rounds; 0 of all else."""
    step = next((step for step in costs.steps(source, target, 0) if step.in_rounds), None)
    price = step and PRICES[step.name]
    return float(price.evenly(costs.links[0], nbytes, costs.n**2)) if isinstance(price, PriceOfRounds) else 0.0


def _converted(builder: RangeBuilder, states: Sequence[tuple[Domain, int]]) -> Iterator[tuple[int, int, int, float]]:
    """(value, layout before, layout after, runs) of all conversions of an assignment, layouts by number."""
    st, graph = builder.structure, builder.graph

    def offered(value: int) -> AvailableLayouts:
        domain, state = states[st.value_variable[value]]
        return domain.options[int(domain.option[state])]

    for value in range(len(graph.values)):
        ways, option = builder.conversions(value), offered(value)
        number = ways.layouts.number
        _, hops = ways.reached(number[option.computed], [number[t] for t in option.targets])
        # Of ranges that stand together the first is the cheapest.
        paid = {ways.layouts.layouts[after][0].dim: (before, after) for before, after, _ in reversed(hops)}
        yield from ((value, before, after, graph.runs[graph.home[value]]) for before, after in paid.values())
    for use in st.uses:
        ways, option = builder.conversions(use.value), offered(use.value)
        number = ways.layouts.number
        target = number[use.needs.layouts[use.needs.groups[states[use.variable][1]]]]
        there = [number[layout] for layout in (option.computed, *option.targets)]
        if target not in there:
            yield use.value, min(there, key=lambda at: ways.seconds[at, target]), target, use.runs
