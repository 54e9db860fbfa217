"""Bounds on programs of all ratios that have each dimension in a range of them, or rounded to nodes: the joint bound's,
but closer.

At its own best ratio each instruction takes less than any program can have it: a contraction suits shares by speed, an
elementwise op beside it shares by bandwidth, a collective even ones, and all cut one dimension. So the shares of a
dimension are told apart, by ranges (`ShareRange`) or nodes (`share_nodes.py`), each a way in which it may be cut
(`ChoicesInWays`). Within a range an op takes what it takes at the best shares there, a collective what it takes at the
range's least; from one range to another rows have to move, as many as lie between the two at least.

What is bounded are programs whose values each lie, for all their uses together, in at most two ranges, or at two
shares, of the dimension in which they are made and one of one other, or in any of several others (which bounds less, of
fewer states); for a use by itself they come to lie in any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, combinations, groupby, product

import numpy as np

from hapsynth.instructions.collectives import STEPS, Balanced
from hapsynth.instructions.layout import Layout, cuts_of, owner_of
from hapsynth.instructions.program.sizes import Node
from hapsynth.search.analysis.dimension_groups import kinship
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import MOVES, PRICES, PriceOfRounds, Shares, even_fractions
from hapsynth.search.cost.share_range import ShareRange
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.choice_space import AvailableLayouts, cuts_together
from hapsynth.search.formulation.conversions import Conversions, Hop, LayoutSet
from hapsynth.search.formulation.share_nodes import ShareNodes
from hapsynth.search.formulation.ways import BuilderOfWays, ChoicesInWays

_CELLS_OF_TWO = 48
"""Of each of two dimensions between which rounds go."""


class ShareRanges:
    """How the shares along one mesh axis are told apart: of what ops can cut together (`kinship`), by its root, in
    `ranges`, or by `nodes` to which they are rounded; of all else there is one range."""

    def __init__(
        self,
        costs: CostModel,
        ranges: Mapping[Node, tuple[ShareRange, ...]],
        nodes: Mapping[Node, ShareNodes] | None = None,
        known: dict[tuple[Work, int], Floats] | None = None,
    ) -> None:
        assert len(costs.axes) == 1
        self.costs, self.ranges, self.nodes = costs, ranges, nodes or {}
        self._at_nodes = {root: mine.ranges() for root, mine in self.nodes.items()}
        self._known = {} if known is None else known
        self._whole = (ShareRange((1.0 / costs.n, 1.0)),)
        self._kin = kinship(costs.graph, costs.table)

    def root(self, value: int, dim: int) -> Node:
        """What stands for all that ops can cut together with a dimension."""
        return self._kin.root(value, dim) or (value, dim, (), 0)

    def at(self, root: Node) -> tuple[ShareRange, ...]:
        """All ranges of what is cut together, or what nodes stand for by themselves, whatever is cut."""
        return self._at_nodes.get(root) or self.ranges.get(root, self._whole)

    def nodes_of(self, value: int, dim: int, way: int = 0) -> ShareNodes | None:
        """Those to which a dimension's shares are rounded, unless they lie in ranges, or a device owns it whole."""
        return None if owner_of(way) is not None else self.nodes.get(self.root(value, dim))

    def count(self, value: int, dim: int) -> int:
        """In how many ranges a dimension's shares may lie."""
        return len(self.at(self.root(value, dim)))

    def of(self, value: int, dim: int, way: int, units: int | None = None) -> ShareRange:
        """What the shares of a dimension cut in `units` (its length by default) may be, in whole units, or what a node
        stands for by itself."""
        if owner_of(way) is not None:
            return ShareRange((1.0, 1.0))
        root = self.root(value, dim)
        mine = self.at(root)[way]
        return mine if root in self.nodes else mine.in_units(units or self.costs.graph.values[value].shape[dim])

    def beside(self, value: int, dim: int, way: int) -> ShareRange:
        """As `of`, or all shares that may be rounded to a node."""
        nodes = self.nodes_of(value, dim, way)
        return self.of(value, dim, way) if nodes is None else nodes.beside(way)

    def seconds_at(self, works: Sequence[tuple[Work, ShareNodes]]) -> list[Floats]:
        """What works may count at nodes: of each [nodes]."""
        by_nodes: dict[ShareNodes, list[Work]] = {}
        for work, nodes in dict.fromkeys(works):
            by_nodes.setdefault(nodes, []).append(work)
        found: dict[tuple[Work, ShareNodes], Floats] = {}
        for nodes, some in by_nodes.items():
            below = nodes.below(self.least_in_cells(nodes, some))
            found.update(zip(((work, nodes) for work in some), below, strict=True))
        return [found[at] for at in works]

    def least_in_cells(self, nodes: ShareNodes, works: Sequence[Work]) -> Floats:
        """Seconds of works at least within each cell [works, cells]."""
        cells, units = nodes.cell_ranges, nodes.units
        missing = [work for work in dict.fromkeys(works) if (work, units) not in self._known]
        least = self.costs.times_within([(work, cell) for work in missing for cell in cells])
        self._known.update(zip(((w, units) for w in missing), least.reshape(len(missing), len(cells)), strict=True))
        return np.array([self._known[work, units] for work in works]).reshape(len(works), len(cells))

    def divided(
        self,
        parts: Mapping[tuple[Node, int], Sequence[ShareRange]],
        nodes: Mapping[Node, ShareNodes] | None = None,
    ) -> ShareRanges:
        """With parts in place of some ranges, by what is cut together and their numbers, and some other nodes."""
        found = dict(self.ranges)
        for root in {root for root, _ in parts}:
            every = (parts.get((root, way), (mine,)) for way, mine in enumerate(self.at(root)))
            found[root] = tuple(part.tightened(self.costs.fastest) for part in chain.from_iterable(every))
        return ShareRanges(self.costs, found, {**self.nodes, **(nodes or {})}, self._known)


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
        for count in range(2, cuts_together(len(ranges)) + 1):
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
        self._number: dict[tuple[ShareRange, ShareNodes | None, int], int] = {}

    @cached_property
    def _roles(self) -> Sequence[int]:
        number: dict[object, int] = {}
        at = lambda v, dim: (self.ranges.at(self.ranges.root(v, dim)), self.ranges.nodes_of(v, dim))
        every = [tuple(at(v.index, dim) for dim in range(len(v.shape))) for v in self.graph.values]
        return [number.setdefault(role, len(number)) for role in zip(super()._roles, every, strict=True)]

    def _profile(self, value: int) -> object:
        cuts = self.structure.layouts[value].cuts
        ranges = tuple((self.ranges.of(value, dim, way), self.ranges.nodes_of(value, dim)) for dim, _, way in cuts)
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
        """(source, target layout) -> a lower bound on the seconds from one range of a dimension to another."""
        found, nbytes = dict[tuple[int, int], float](), float(self.graph.values[value].nbytes)
        # The share of all fast devices together changes by the third gap, and that of the slow ones likewise: in the
        # smaller group some device gains, or loses, at least an even part of it.
        fast = int(np.count_nonzero(self.costs.fastest))
        group = min(fast, self.costs.n - fast) or 1
        for i, j, _ in layouts.hops:
            (p,), (q,) = layouts.layouts[i], layouts.layouts[j]
            if p.is_cut and q.is_cut and p.dim == q.dim:
                old, new = self.ranges.of(value, p.dim, p.way), self.ranges.of(value, q.dim, q.way)
                gaps = [max(a[0] - b[1], b[0] - a[1]) for a, b in zip(old, new, strict=True)]
                apart = max(*gaps[:2], gaps[2] / group)
                found[i, j] = MOVES.least(self.costs.links[0], nbytes, max(apart, 0.0))
        return found

    def _least_evened(self, value: int, dim: int, way: int, even: float) -> float:
        """A lower bound on the seconds to move rows from a dimension's shares to even ones, or back. At nodes it may be
        negative, as an even share may be no whole number of rows."""
        link, nbytes = self.costs.links[0], float(self.graph.values[value].nbytes)
        found = MOVES.least(link, nbytes, self.largest(value, dim, (), way) - even)
        # Unless all shares that may be rounded there move rows, there may be no message.
        moves = self.ranges.beside(value, dim, way).largest[0] > even
        return found if moves else found - MOVES.least(link, nbytes, 0.0)

    def _step_times(self, value: int, source: Layout, target: Layout, axis: int) -> list[float]:
        """A lower bound on the seconds of each step, over the shares in the ranges. Moves between ranges are not
        counted here."""
        every = [(dim, way) for layout in (source, target) for dim, _, way in cuts_of(layout)]
        steps = self.costs.steps(source, target, axis)
        ends = [self.ranges.of(value, *cut) for cut in every]
        if any(least > most for end in ends for least, most in end):
            return [np.inf] * len(steps)
        shares = Shares(lambda dim, axes, way: self._largest_sent(value, dim, way, [dim for dim, _ in every]))
        cost = lambda step, shares: self.costs.conversion(value, source, target, axis, shares, step)[0]
        found: list[float] = []
        for step in steps:
            if isinstance(step, Balanced):
                ((dim, way),) = every
                even = float(even_fractions(self.graph.values[value].shape[dim], self.costs.n)[0])
                evenly = cost(STEPS[step.even], Shares(lambda *_, even=even: even))
                found.append(evenly + self._least_evened(value, dim, way, even))
            elif isinstance(price := PRICES.get(step.name), PriceOfRounds):
                found.append(self._least_of_rounds(value, price, every))
            else:
                found.append(np.inf if step.recuts else cost(step, shares))
        return found

    def _largest_sent(self, value: int, dim: int, way: int, dims: Sequence[int]) -> float:
        """The largest share of a dimension in the cost of collectives on a value that is cut along all of `dims`. Where
        the cost is not linear in it between nodes: the least share that may be rounded to the node."""
        roots = {self.ranges.root(value, d) for d in dims}
        if len(roots) == len(dims) and not self.costs.links[0].curves:
            return self.largest(value, dim, (), way)
        return self.ranges.beside(value, dim, way).largest[0]

    def _least_of_rounds(self, value: int, price: PriceOfRounds, cuts: Sequence[tuple[int, int]]) -> float:
        """Seconds of an all-to-all in rounds from the first of two cuts to the second."""
        nbytes = float(self.graph.values[value].nbytes)
        every = [self.ranges.nodes_of(value, *cut) for cut in cuts]
        within = [self.ranges.beside(value, *cut) for cut in cuts]
        if not any(every) or len({self.ranges.root(value, dim) for dim, _ in cuts}) == 1:
            # Of one root the same threshold rounds both.
            return price.least(self.costs.links[0], nbytes, within[0], within[1], self.costs.fastest)
        sides = [nodes or at for nodes, at in zip(every, within, strict=True)]
        found = self.once(("rounds", nbytes, *sides), lambda: self._rounds_at(price, nbytes, *sides))
        old, new = (way if nodes else 0 for (_, way), nodes in zip(cuts, every, strict=True))
        return float(found[old, new])

    def _rounds_at(
        self, price: PriceOfRounds, nbytes: float, old: ShareNodes | ShareRange, new: ShareNodes | ShareRange
    ) -> Floats:
        """Seconds at least between all nodes of two dimensions, or those of one and a range of the other [nodes or 1,
        nodes or 1]. Both are rounded by thresholds of their own: first the one, wherever the other is, then that."""
        link, fast = self.costs.links[0], self.costs.fastest
        if isinstance(old, ShareNodes) and isinstance(new, ShareNodes):
            old, new = (replace(nodes, finest=_CELLS_OF_TWO) for nodes in (old, new))
        rows, columns = ((side,) if isinstance(side, ShareRange) else side.cell_ranges for side in (old, new))
        found = np.zeros((len(rows), len(columns)))
        if isinstance(old, ShareNodes):
            found = np.maximum(found, price.least_of_each(link, nbytes, rows, columns, fast, backward=False).T)
        if isinstance(new, ShareNodes):
            found = np.maximum(found, price.least_of_each(link, nbytes, columns, rows, fast, backward=True))
        if isinstance(old, ShareNodes):
            found = old.below(found.T).T
        return new.below(found) if isinstance(new, ShareNodes) else found

    # Ops

    def _vectors(self, op: int) -> tuple[int, ...]:
        """The numbers of the ranges, or nodes, of everything that some triples of an op cut."""
        o, found = self.graph.ops[op], list[int]()
        tensors = (*o.operands, *o.results)
        for places, _, way, units in self.cuts(op).all:
            value, dim = next((v, d) for place, d in places if isinstance(v := tensors[place], int))
            nodes = self.ranges.nodes_of(value, dim, way)
            key = self.ranges.of(value, dim, way, units), nodes, way if nodes else 0
            found.append(self._number.setdefault(key, len(self._number)))
        return tuple(found)

    def _seconds_of(self, works: Sequence[tuple[Work, tuple[int, ...]]]) -> Floats:
        every = [*self._number]
        anywhere = ShareRange((1.0, 1.0)), None, 0
        at = [(work, every[held[0]] if held else anywhere) for work, held in works]
        seconds, inside = np.zeros(len(at)), [i for i, (_, (_, nodes, _)) in enumerate(at) if nodes is None]
        seconds[inside] = self.costs.times_within([(at[i][0], at[i][1][0]) for i in inside])
        rounded = [(i, work, nodes, way) for i, (work, (_, nodes, way)) in enumerate(at) if nodes is not None]
        found = self.ranges.seconds_at([(work, nodes) for _, work, nodes, _ in rounded])
        for (i, _, _, way), mine in zip(rounded, found, strict=True):
            seconds[i] = mine[way]
        return seconds


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

    def reached(self, source: int, targets: Sequence[int]) -> tuple[float, list[Hop]]:
        """As of all conversions, but that of a dimension's ranges that stand together only the cheapest is paid, and
        targets are made in whichever order is the best: what lies on a way is not there then, as it may be a target."""
        layouts = self.layouts.layouts
        together = [[*every] for _, every in groupby(targets, lambda target: layouts[target][0].dim)]
        made: dict[int, tuple[float, list[Hop]]] = {0: (0.0, [])}
        for groups in range(1, 1 << len(together)):
            last = [k for k in range(len(together)) if groups >> k & 1]
            made[groups] = min(self._made_after(source, *made[groups ^ 1 << k], together[k]) for k in last)
        return made[(1 << len(together)) - 1]

    def _made_after(self, source: int, total: float, hops: list[Hop], group: Sequence[int]) -> tuple[float, list[Hop]]:
        seconds, _, _ = self._rows
        there = [source, *(target for _, target, _ in hops)]
        ways = sorted(min((seconds[at][target], at, target) for at in there) for target in group)
        return total + ways[0][0], [*hops, *((at, target, 0) for _, at, target in ways)]

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
