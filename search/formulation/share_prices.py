"""Prices on the largest shares of what is cut: bounds on programs of all ratios that know that what is cut together is
cut alike, closer than by ranges alone (`share_ranges.py`).

Within a range an op takes what it does at its own best share there and a tensor is held at the least one, though both
are cut at one share; and rows may go over to the next range for almost nothing, again and again. So shares get prices,
the multipliers of their being equal (Lagrangian decomposition: Guignard and Kim, 1987). The op that makes a tensor and
those that take it pay, or are paid, in proportion to their largest share of a dimension. What they pay in all is paid
out of what holding the tensor costs, at a price per byte, so

    sum of price * share over its ops <= bytes * price per byte * share held + seconds that rows move between the shares

as long as all prices of a tensor sum to what is paid out, and those of no part of its ops to more seconds than moving
all rows takes. Each op then takes the least of its seconds *and* what it pays over the shares of its range. The rest is
in the options and uses of values: that which is not cut along the dimension, or comes in other ways than by moves, is
taken at the share of its range that bounds the least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from hapsynth.graph.ir import Graph
from hapsynth.instructions.factors import Triples
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program.sizes import Node
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import MOVES
from hapsynth.search.cost.share_range import Range, ShareRange
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.choice_space import AvailableLayouts, Interned, Use
from hapsynth.search.formulation.share_ranges import ConversionsWithMoves, RangeBuilder, RangeChoices, ShareRanges
from hapsynth.search.solver import Edge, Problem

_STEP = 1.005
"""Between the shares at which an op's seconds are known: their ratio."""
_NOTHING = 1e-15
"""Seconds: of a price that is rounding."""
_LEVEL = 1 + 1e-6
"""Of the least seconds of an op: as good."""

Place = tuple[int, int]
"""(op, position of an operand), or (-1, value) for the op that makes it."""


@dataclass(frozen=True)
class DimensionPrices:
    """Of one dimension of a value, seconds a step for all of it in place of a share. `ops`: paid by each op that takes
    or makes it; `held`: paid out of what it is held at, the sum of these."""

    ops: Mapping[Place, float]
    held: float

    @cached_property
    def claimed(self) -> float:
        """The most seconds that they claim of moving all rows once."""
        prices = [*self.ops.values(), -self.held]
        return max(sum(p for p in prices if p > 0), -sum(p for p in prices if p < 0))

    def scaled(self, by: float) -> DimensionPrices:
        return DimensionPrices({place: by * price for place, price in self.ops.items()}, by * self.held)


@dataclass(frozen=True, eq=False)
class SharePrices:
    """By value and dimension. `stored`: seconds for all bytes of a value that is held where memory is limited; `most`:
    by what ops can cut together, the largest share up to which prices rise, beyond which no op gains."""

    of: Mapping[int, Mapping[int, DimensionPrices]]
    stored: Mapping[int, float]
    most: Mapping[Node, float]

    @staticmethod
    def within_reason(
        asked: Mapping[tuple[int, int], Mapping[Place, float]],
        stored: Mapping[int, float],
        most: Mapping[Node, float],
        movable: Callable[[int], float],
    ) -> SharePrices:
        """The nearest to what is `asked` of the ops of each (value, dimension) that hold: what they pay more or less
        than may be paid out, the one that pays the most pays otherwise. `movable`: seconds of moving all rows of a
        value, all that they may claim."""
        found: dict[int, dict[int, DimensionPrices]] = {}
        for (value, dim), places in asked.items():
            prices = {place: price for place, price in places.items() if abs(price) > _NOTHING}
            if not prices:
                continue
            total = sum(prices.values())
            held = min(max(total, 0.0), stored.get(value, 0.0))
            prices[max(prices, key=lambda place, prices=prices: abs(prices[place]))] += held - total
            mine = DimensionPrices(prices, held)
            if mine.claimed > (limit := movable(value)):
                mine = mine.scaled(limit / mine.claimed)
            found.setdefault(value, {})[dim] = mine
        return SharePrices(found, stored, most)


def seconds_of_moving(costs: CostModel, graph: Graph, value: int) -> float:
    """Per run, all rows of a value, but for the latency."""
    nbytes = float(graph.values[value].nbytes)
    return MOVES.least(costs.links[0], nbytes, 1.0) - MOVES.least(costs.links[0], nbytes, 0.0)


class ShareCurves:
    """Seconds of works by their largest share."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        count = int(np.ceil(np.log(costs.n) / np.log(_STEP)))
        self.ends: Floats = np.minimum(np.geomspace(1.0 / costs.n, 1.0, count + 1), 1.0)
        """Shares, rising from even ones to all."""
        self._seconds: dict[Work, Floats] = {}

    def add(self, works: Sequence[Work]) -> None:
        """Find those of all at once."""
        missing = [work for work in dict.fromkeys(works) if work not in self._seconds]
        parts = list(pairwise(self.ends.tolist()))
        seconds = self.costs.times_within([(work, ShareRange(part)) for work in missing for part in parts])
        self._seconds.update(zip(missing, seconds.reshape(len(missing), len(parts)), strict=True))

    def seconds(self, work: Work) -> Floats:
        """The least between each two of the shares."""
        return self._seconds[work]

    def best(self, work: Work) -> float:
        """The share up to which a work takes less."""
        seconds = self._seconds[work]
        return float(self.ends[1 + int(np.argmax(seconds <= _LEVEL * seconds.min()))])

    def least_paid(self, work: Work, within: Range, price: float, most: float) -> float:
        """The least of a work's seconds and what it pays, over the shares of a range; beyond `most` it pays no more."""
        (low, high), ends, seconds = within, self.ends, self._seconds[work]
        first = min(max(int(np.searchsorted(ends, low, side="right")) - 1, 0), seconds.size - 1)
        last = max(int(np.searchsorted(ends, high, side="left")), first + 1)
        at = np.maximum(ends[first:last], low) if price > 0 else np.minimum(ends[first + 1 : last + 1], high)
        return float((seconds[first:last] + price * (np.minimum(at, most) - ends[0])).min())


class PricedRangeBuilder(RangeBuilder):
    """A `RangeBuilder` in which shares have prices."""

    def __init__(
        self, structure: RangeChoices, costs: CostModel, ranges: ShareRanges, prices: SharePrices, curves: ShareCurves
    ) -> None:
        super().__init__(structure, costs, ranges)
        self.prices, self.curves = prices, curves
        self._even = 1.0 / costs.n
        self._paid: dict[Place, dict[int, float]] = {}
        for dims in prices.of.values():
            for dim, mine in dims.items():
                for place, price in mine.ops.items():
                    self._paid.setdefault(place, {})[dim] = price
        places = ((op.index, position) for op in self.graph.ops for position, _ in op.value_operands)
        self._place = {id(use): place for use, place in zip(structure.uses, places, strict=False)}
        """Of the uses of ops, which come before all others."""
        self._payers: dict[object, int] = {}
        self._payments: dict[tuple[float, ...], int] = {}

    # What is alike

    @cached_property
    def _roles(self) -> Sequence[int]:
        number: dict[object, int] = {}
        return [number.setdefault((role, self._terms(v)), len(number)) for v, role in enumerate(super()._roles)]

    def _profile(self, value: int) -> object:
        return super()._profile(value), self._terms(value)

    def _terms(self, value: int) -> object:
        """All that prices say of a value but what each of its takers pays."""
        mine = self.prices.of.get(value)
        if not mine:
            return None
        made = self._paid.get((-1, value), {})
        dims = tuple((dim, p.held, p.claimed, made.get(dim, 0.0)) for dim, p in sorted(mine.items()))
        return dims, self.prices.stored.get(value, 0.0)

    def _op_key(self, op: int) -> tuple[int, ...]:
        o = self.graph.ops[op]
        places = [*((op, position) for position in range(len(o.operands))), *((-1, value) for value in o.results)]
        paid = tuple(tuple(sorted(self._paid.get(place, {}).items())) for place in places)
        return *super()._op_key(op), self._payers.setdefault(paid, len(self._payers))

    def _use_key(self, use: Use) -> object:
        return tuple(sorted(self._prices_of(use).items()))

    def _prices_of(self, use: Use) -> Mapping[int, float]:
        place = self._place.get(id(use))
        return self._paid.get(place, {}) if place else {}

    # Shares

    def _most(self, value: int, dim: int) -> float:
        return self.prices.most.get(self.ranges.root(value, dim), 1.0)

    def _range(self, value: int, layout: Layout) -> Range:
        """What a layout's largest share may be, as prices count it: above even ones, up to the most."""
        (p,), most = layout, self._most(value, layout[0].dim)
        low, high = self.ranges.of(value, p.dim, p.way).largest
        return min(low, most) - self._even, min(high, most) - self._even

    # Ops

    def times_key(self, op: int) -> tuple[int, Interned[Triples], tuple[int, ...]]:
        kind, triples, vectors = super().times_key(op)
        paid = self.once(("payments", self._op_key(op)), lambda: self._payments_of(op))
        return kind, triples, (*vectors, self._payments.setdefault(paid, len(self._payments)))

    def _payments_of(self, op: int) -> tuple[float, ...]:
        """What an op pays under each of its triples, per run."""
        o, found = self.graph.ops[op], list[float]()
        runs = self.graph.runs[o.region]
        for (triple,) in self.structure.triples[op]:
            taken = (((op, position), p) for position, p in enumerate(triple.operands))
            made = (((-1, value), p) for value, p in zip(o.results, triple.results, strict=True))
            paid = (self._paid.get(place, {}).get(p.dim, 0.0) for place, p in (*taken, *made) if p.is_cut)
            found.append(sum(paid) / runs)
        return tuple(found)

    def _find_times(self, missing: Mapping[tuple[int, Interned[Triples], tuple[int, ...]], int]) -> None:
        without = lambda key: (*key[:2], key[2][:-1])
        super()._find_times({without(key): op for key, op in missing.items()})
        ranges, payments = [*self._number], [*self._payments]
        asked: dict[tuple[Work, Range, float, float], list[tuple[Floats, int]]] = {}
        for key, op in missing.items():
            self._times[key] = times = self._times[without(key)].copy()
            for at, price in enumerate(payments[key[2][-1]]):
                if price and np.isfinite(times[at]):
                    (cut,) = self.cuts(op).groups[at]
                    work = self.costs.work(op, self.structure.triples[op][at])
                    terms = work, ranges[key[2][cut]].largest, price, self._most_of(op, at)
                    asked.setdefault(terms, []).append((times, at))
        self.curves.add([work for work, *_ in asked])
        for (work, within, price, most), places in asked.items():
            seconds = self.curves.least_paid(work, within, price, most)
            least = min(price * (min(end, most) - self._even) for end in within)
            for times, at in places:
                times[at] = max(seconds, times[at] + least)

    def _most_of(self, op: int, at: int) -> float:
        """Up to which share the prices of what an op cuts rise, under one of its triples."""
        o, (triple,) = self.graph.ops[op], self.structure.triples[op][at]
        tensors = zip((*o.operands, *o.results), (*triple.operands, *triple.results), strict=True)
        return next(self._most(v, p.dim) for v, p in tensors if isinstance(v, int) and p.is_cut)

    # Values

    def _move(self, value: int, dim: int, part: float) -> float:
        """Less what prices claim of it."""
        mine = self.prices.of.get(value, {}).get(dim)
        seconds = super()._move(value, dim, part)
        if mine is None:
            return seconds
        return seconds - max(part, 0.0) * mine.claimed / self.graph.runs[self.graph.home[value]]

    def _kept(self, value: int, plain: frozenset[int]) -> Floats:
        kept = super()._kept(value, plain)
        if value not in self.prices.of:
            return kept
        options = self.structure.choices[self.structure.value_variable[value]].options
        make = lambda: kept + np.array([self._paid_out(value, option) for option in options])
        return self.once(("paid out", self._kept_key(value, plain)), make)

    def _paid_out(self, value: int, option: AvailableLayouts) -> float:
        """Seconds that an option counts more or less for the prices, at the shares that bound the least."""
        tensors, whole, found = (option.computed, *option.targets), self.prices.stored.get(value, 0.0), 0.0
        held = [whole * (self.largest(value, t[0].dim, (), t[0].way) if t[0].is_cut else 1.0) for t in tensors]
        paid = held.copy()
        for dim, mine in self.prices.of[value].items():
            cut = _in_shares(option, dim)
            if not cut:
                continue
            low, high = min(self._range(value, t) for t in cut)
            # Held as another tensor, it knows nothing of this dimension's share.
            paid = [seconds - mine.held * (low if t in cut else high) for seconds, t in zip(paid, tensors, strict=True)]
            if not _is_cut_along(option.computed, dim):
                makes = mine.ops.get((-1, value), 0.0)
                found += makes * (low if makes > 0 else high)
            if len(cut) == 2:
                found += self._unclaimed(value, option, cut, mine)
        return found + min(paid) - min(held)

    def _unclaimed(self, value: int, option: AvailableLayouts, cut: Sequence[Layout], mine: DimensionPrices) -> float:
        """Seconds that prices claim of moves between two shares, less where the second may come in another way."""
        ways, runs = self.conversions(value), self.graph.runs[self.graph.home[value]]
        assert isinstance(ways, ConversionsWithMoves)
        first, second = (ways.layouts.number[t] for t in cut)
        otherwise = float(ways.seconds_with_steps[first, second])
        ends = [end for t in cut for end in self._range(value, t)]
        more = runs * max(0.0, otherwise - self.offer(value, option).seconds) if np.isfinite(otherwise) else np.inf
        return min(0.0, more - mine.claimed * (max(ends) - min(ends)))

    def _table(self, use: Use, options: Interned[AvailableLayouts]) -> Floats:
        table, prices = super()._table(use, options), self._prices_of(use)
        if not prices:
            return table
        table, value = table.copy(), use.value
        ways = self.conversions(value)
        assert isinstance(ways, ConversionsWithMoves)
        number = [ways.layouts.number[need] for need in use.needs.layouts]
        _, there = self.offers(value, options)
        # Of each option and need, seconds of the cheapest way that is not moves alone.
        otherwise = use.runs * ways.seconds_with_steps[there][:, :, number].min(axis=1)
        apart = np.zeros(table.shape)
        for dim, price in prices.items():
            along = np.array([_is_cut_along(need, dim) for need in use.needs.layouts])
            needed = np.array([self._range(value, n) for n in use.needs.layouts if _is_cut_along(n, dim)]).reshape(
                -1, 2
            )
            # What an op pays for its own share, where nothing is known of what it comes from.
            lost = -price * needed[:, 1 if price > 0 else 0]
            for i, option in enumerate(options):
                cut = _in_shares(option, dim)
                if not cut:
                    table[i, along] += lost
                    continue
                low, high = min(self._range(value, t) for t in cut)
                own = price * (low if price > 0 else high)
                apart[i, ~along] += own
                moved = ways.moved[[ways.layouts.number[t] for t in cut]][:, number].min(axis=0)[along]
                table[i, along] = np.minimum(use.runs * moved, otherwise[i, along] + own + lost)
        table += apart
        return table

    @cached_property
    def _problem(self) -> Problem:
        found = super()._problem
        edges, offset, known = list[Edge](), found.offset, dict[int, tuple[Floats, float]]()
        for edge in found.edges:
            # Tables hold no negative costs.
            if id(edge.table) not in known:
                least = min(float(edge.table.min(initial=0.0)), 0.0)
                known[id(edge.table)] = (edge.table - least if least else edge.table), least
            table, least = known[id(edge.table)]
            edges.append(edge._replace(table=table))
            offset += least
        return replace(found, edges=tuple(edges), offset=offset)


def _is_cut_along(layout: Layout, dim: int) -> bool:
    (p,) = layout
    return p.is_cut and p.dim == dim


def _in_shares(option: AvailableLayouts, dim: int) -> list[Layout]:
    """The tensors cut along a dimension, which come from one another by moves; none where several stand together of
    which any may be all there is."""
    cut = [t for t in (option.computed, *option.targets) if _is_cut_along(t, dim)]
    return cut if len(cut) == 1 or (len(cut) == 2 and cut[0] == option.computed) else []
