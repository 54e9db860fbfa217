"""Bounds on programs of all ratios that have each dimension in a range of them: the joint bound's, but closer.

At its own best ratio each instruction takes less than any program can have it: a contraction suits shares by speed, an
elementwise op beside it shares by bandwidth, a collective even ones, and all cut one dimension. So the shares of a
dimension are divided into ranges (`ShareRange`), each a way in which it may be cut (`ChoicesInWays`). Within a range an
op takes what it takes at the best shares there, a collective what it takes at the range's least; from one range to
another rows have to move, as many as lie between the two at least.

What is bounded are programs whose values each lie, for all their uses together, in at most two ranges of the dimension
in which they are made and one of one other, or in any of several others (which bounds less, of fewer states); for a use
by itself they come to lie in any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, combinations, groupby, permutations, product

import numpy as np

from hapsynth.instructions.collectives import STEPS, Balanced
from hapsynth.instructions.factors import Triples
from hapsynth.instructions.layout import Layout, cuts_of, owner_of
from hapsynth.instructions.program.sizes import Node
from hapsynth.search.analysis.dimension_groups import kinship
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import MOVES, PRICES, PriceOfRounds, Shares, even_fractions
from hapsynth.search.cost.share_range import ShareRange
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.choice_space import AvailableLayouts, Interned
from hapsynth.search.formulation.conversions import Conversions, Hop, LayoutSet
from hapsynth.search.formulation.ways import BuilderOfWays, ChoicesInWays


class ShareRanges:
    """How the shares along one mesh axis are divided. `ranges`: of what ops can cut together (`kinship`), by its root;
    of all else there is one."""

    def __init__(self, costs: CostModel, ranges: Mapping[Node, tuple[ShareRange, ...]]) -> None:
        assert len(costs.axes) == 1
        self.costs, self.ranges = costs, ranges
        self._whole = (ShareRange((1.0 / costs.n, 1.0)),)
        self._kin = kinship(costs.graph, costs.table)

    def root(self, value: int, dim: int) -> Node:
        """What stands for all that ops can cut together with a dimension."""
        node = (value, dim, (), 0)
        return self._kin.find(node) if node in self._kin.parent else node

    def at(self, root: Node) -> tuple[ShareRange, ...]:
        """All ranges of what is cut together, whatever is cut."""
        return self.ranges.get(root, self._whole)

    def count(self, value: int, dim: int) -> int:
        """In how many ranges a dimension's shares may lie."""
        return len(self.at(self.root(value, dim)))

    def of(self, value: int, dim: int, way: int, units: int | None = None) -> ShareRange:
        """What the shares of a dimension cut in `units` (its length by default) may be, in whole units."""
        if owner_of(way) is not None:
            return ShareRange((1.0, 1.0))
        mine = self.at(self.root(value, dim))[way]
        return mine.in_units(units or self.costs.graph.values[value].shape[dim])

    def divided(self, parts: Mapping[tuple[Node, int], Sequence[ShareRange]]) -> ShareRanges:
        """With parts in place of some ranges, by what is cut together and their numbers."""
        found = dict(self.ranges)
        for root in {root for root, _ in parts}:
            every = (parts.get((root, way), (mine,)) for way, mine in enumerate(self.at(root)))
            found[root] = tuple(part.tightened(self.costs.fastest) for part in chain.from_iterable(every))
        return ShareRanges(self.costs, found)


class RangeChoices(ChoicesInWays):
    """What may be chosen where every dimension may be in each of its ranges."""

    def _sets_of_cuts(self, known: LayoutSet, computed: Layout) -> Iterable[AvailableLayouts]:
        """Another range of the dimension in which it is made, and one of another dimension, or several dimensions in
        any of their ranges."""
        (made,) = computed
        ranges: dict[int, list[Layout]] = {}
        for shard in known.shards:
            ranges.setdefault(shard.dim, []).append((shard,))
        again = [(layout,) for layout in ranges.pop(made.dim, []) if layout != computed] if made.is_sharded else []
        others: list[tuple[Layout, ...]] = [(layout,) for every in ranges.values() for layout in every]
        for count in range(2, len(ranges) + 1):
            others += [tuple(layout for d in dims for layout in ranges[d]) for dims in combinations(ranges, count)]
        for mine, more in product([(), *again], [(), *others]):
            if mine or more:
                yield AvailableLayouts(computed, (*mine, *more))


class RangeBuilder(BuilderOfWays):
    """The problem of `RangeChoices`: of the programs that are bounded none costs less than its optimum, at any
    ratios."""

    def __init__(self, structure: RangeChoices, costs: CostModel, ranges: ShareRanges) -> None:
        super().__init__(structure, costs, None)
        self.ranges = ranges
        self._number: dict[ShareRange, int] = {}

    @cached_property
    def _roles(self) -> Sequence[int]:
        number: dict[object, int] = {}
        at = lambda v, dim: self.ranges.at(self.ranges.root(v, dim))
        every = [tuple(at(v.index, dim) for dim in range(len(v.shape))) for v in self.graph.values]
        return [number.setdefault(role, len(number)) for role in zip(super()._roles, every, strict=True)]

    def _profile(self, value: int) -> object:
        cuts = self.structure.layouts[value].cuts
        ranges = tuple(self.ranges.of(value, dim, way) for dim, _, way in cuts)
        return super()._profile(value), self.graph.values[value].shape, ranges

    def largest(self, value: int, dim: int, axes: tuple[int, ...], way: int = 0) -> float:
        return self.ranges.of(value, dim, way).largest[0]

    # Conversions

    def _made_conversions(self, value: int) -> Conversions:
        layouts = self.structure.layouts[value]
        time = lambda source, target, axis: self.step_time(value, source, target, axis)

        def make() -> Conversions:
            moves = {} if self.whole[value] else self._moves(value, layouts)
            return ConversionsWithMoves(layouts, time, moves)

        return self.once(("conversions", layouts, self._profile(value)), make)

    def _moves(self, value: int, layouts: LayoutSet) -> dict[tuple[int, int], float]:
        """Seconds, at least, from one range of a dimension to another."""
        found: dict[tuple[int, int], float] = {}
        for i, j, _ in layouts.hops:
            (p,), (q,) = layouts.layouts[i], layouts.layouts[j]
            if p.is_cut and q.is_cut and p.dim == q.dim:
                old, new = self.ranges.of(value, p.dim, p.way), self.ranges.of(value, q.dim, q.way)
                apart = max(max(a[0] - b[1], b[0] - a[1]) for a, b in zip(old, new, strict=True))
                found[i, j] = self._move(value, p.dim, apart)
        return found

    def _move(self, value: int, dim: int, part: float) -> float:
        """Seconds, at least, to bring a value to another share of a dimension, where these are `part` apart."""
        return self._least_moved(value, part)

    def _least_moved(self, value: int, part: float) -> float:
        return MOVES.least(self.costs.links[0], float(self.graph.values[value].nbytes), max(part, 0.0))

    def _step_times(self, value: int, source: Layout, target: Layout, axis: int) -> list[float]:
        """Of each step, at the least that the largest shares may be. What changes a range is counted apart."""
        every = [(dim, way) for layout in (source, target) for dim, _, way in cuts_of(layout)]
        steps = self.costs.steps(source, target, axis)
        ends = [self.ranges.of(value, *cut) for cut in every]
        if any(least > most for end in ends for least, most in end):
            return [np.inf] * len(steps)
        shares = Shares(lambda *cut: self.largest(value, *cut))
        cost = lambda step, shares: self.costs.conversion(value, source, target, axis, shares, step)[0]
        found: list[float] = []
        for step in steps:
            if isinstance(step, Balanced):
                ((dim, way),) = every
                even = float(even_fractions(self.graph.values[value].shape[dim], self.costs.n)[0])
                moved = self.largest(value, dim, (), way) - even
                between = self._least_moved(value, moved) if moved > 0 else 0.0
                found.append(cost(STEPS[step.even], Shares(lambda *_, even=even: even)) + between)
            elif isinstance(price := PRICES.get(step.name), PriceOfRounds):
                nbytes = float(self.graph.values[value].nbytes)
                found.append(price.least(self.costs.links[0], nbytes, ends[0], ends[1], self.costs.fastest))
            else:
                found.append(np.inf if step.recuts else cost(step, shares))
        return found

    # Ops

    def times_key(self, op: int) -> tuple[int, Interned[Triples], tuple[int, ...]]:
        vectors = self.once(("vectors", self._op_key(op)), lambda: self._vectors(op))
        return self.costs.kind(op), self.structure.triples[op], vectors

    def _vectors(self, op: int) -> tuple[int, ...]:
        """The numbers of the ranges of everything that some triples of an op cut."""
        o, found = self.graph.ops[op], list[int]()
        tensors = (*o.operands, *o.results)
        for places, _, way, units in self.cuts(op).all:
            value, dim = next((v, d) for place, d in places if isinstance(v := tensors[place], int))
            found.append(self._number.setdefault(self.ranges.of(value, dim, way, units), len(self._number)))
        return tuple(found)

    def _find_times(self, missing: Mapping[tuple[int, Interned[Triples], tuple[int, ...]], int]) -> None:
        number: dict[tuple[Work, tuple[int, ...]], int] = {}
        places: list[list[int]] = []
        for (_, _, vectors), op in missing.items():
            held = [tuple(vectors[c] for c in cuts) for cuts in self.cuts(op).groups]
            works = [self.costs.work(op, triples) for triples in self.structure.triples[op]]
            places.append([number.setdefault(key, len(number)) for key in zip(works, held, strict=True)])
        ranges = [*self._number]
        whole = ShareRange((1.0, 1.0))
        seconds = self.costs.times_within([(work, ranges[held[0]] if held else whole) for work, held in number])
        self._times.update({key: seconds[at] for key, at in zip(missing, places, strict=True)})


class ConversionsWithMoves(Conversions):
    """Conversions in which rows may move between two ranges, once between any two other steps: as often in a row would
    be as far in small pieces, of which each may be nothing. `moves`: seconds, by layouts."""

    def __init__(
        self,
        layouts: LayoutSet,
        time: Callable[[Layout, Layout, int], float],
        moves: Mapping[tuple[int, int], float],
    ) -> None:
        super().__init__(layouts, time)
        n = len(layouts.layouts)
        self.steps_alone = self.seconds
        """Seconds of the ways without moves."""
        self.moved: Floats = np.where(np.eye(n, dtype=bool), 0.0, np.inf)
        for at, seconds in moves.items():
            self.moved[at] = seconds
        if not moves:
            return
        changing = self._changing
        then = _through(self.moved, self.steps_alone)
        found = _through(self.steps_alone, then)
        while not np.array_equal(more := np.minimum(found, _through(_through(found, changing), then)), found):
            found = more
        self.seconds = found

    @property
    def _changing(self) -> Floats:
        return np.where(np.eye(len(self.steps_alone), dtype=bool), np.inf, self.steps_alone)

    @cached_property
    def seconds_with_steps(self) -> Floats:
        """Seconds of the cheapest ways that are not moves alone."""
        return _through(_through(self.seconds, self._changing), self.seconds)

    def reached(self, source: int, targets: Sequence[int]) -> tuple[float, list[Hop]]:
        """As of all conversions, but that of a dimension's ranges that stand together only the cheapest is paid, and
        targets are made in whichever order is the best: what lies on a way is not there then, as it may be a target."""
        layouts = self.layouts.layouts
        together = [[*every] for _, every in groupby(targets, lambda target: layouts[target][0].dim)]
        return min(self._made_in_order(source, order) for order in permutations(together))

    def _made_in_order(self, source: int, groups: Sequence[Sequence[int]]) -> tuple[float, list[Hop]]:
        seconds, _, _ = self._rows
        there, total, hops = [source], 0.0, list[Hop]()
        for group in groups:
            ways = sorted(min((seconds[at][target], at, target) for at in there) for target in group)
            total += ways[0][0]
            there += [target for *_, target in ways]
            hops += [(at, target, 0) for _, at, target in ways]
        return total, hops

    def moves_between(self, source: int, target: int) -> tuple[int, int] | None:
        """The layouts between which rows move on the way from one to another, if they do."""
        if self.seconds[source, target] >= self.steps_alone[source, target]:
            return None
        through = self.steps_alone[source][:, None] + self.moved + self.steps_alone[:, target]
        i, j = divmod(int(np.argmin(through)), len(through))
        return (i, j) if i != j else None


def _through(first: Floats, then: Floats) -> Floats:
    """The least seconds of one way and then another: [n, n], of [n, n] each."""
    return np.stack([(row[:, None] + then).min(axis=0) for row in first])
