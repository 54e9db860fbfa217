"""The works and conversions of an assignment, by group of dimensions that ops can cut together and share range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hapsynth.instructions.layout import Layout, cuts_of, owner_of
from hapsynth.instructions.program.sizes import Node
from hapsynth.search.cost.least_rounds import least_rounds, least_rounds_of_each
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import MOVES, PRICES, PriceOfRounds
from hapsynth.search.cost.share_range import ShareRange
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.choice_space import AvailableLayouts, Domain
from hapsynth.search.formulation.share_ranges import ConversionsWithMoves, RangeBuilder, ShareRanges
from hapsynth.search.solver import Ints


@dataclass
class InRange:
    """The works and conversions of a solution in one range. `works`: work -> runs. `swapped_s`: seconds of the
    all-to-alls that may go in rounds; `sent_s`: of other conversions, without those that move rows. `evenly_s`: range
    or node of the other dimension -> seconds of these all-to-alls if all shares were even. `moved_s`: seconds of moving
    all rows of the values that come to this range from another or leave it for one."""

    works: dict[Work, float] = field(default_factory=dict[Work, float])
    sent_s: float = 0.0
    swapped_s: float = 0.0
    evenly_s: dict[ShareRange, float] = field(default_factory=dict[ShareRange, float])
    moved_s: float = 0.0

    @property
    def kind(self) -> object:
        """A key that is equal for ranges with equal works and conversions."""
        evenly = frozenset((other, f"{seconds:.6g}") for other, seconds in self.evenly_s.items())
        sent = (f"{x:.6g}" for x in (self.sent_s, self.swapped_s, self.moved_s))
        return frozenset(self.works.items()), evenly, *sent


def in_ranges(builder: RangeBuilder, choices: Ints) -> dict[tuple[Node, int], InRange]:
    """(root of the dimensions that ops can cut together, number of the range) -> the assignment's works and
    conversions."""
    st, graph, costs, ranges = builder.structure, builder.graph, builder.costs, builder.ranges
    found: dict[tuple[Node, int], InRange] = {}
    states = [(st.choices[k], int(choices[k])) for k in range(len(st.choices))]
    for op in graph.ops:
        domain, state = states[st.op_variable[op.index]]
        place, cuts = int(domain.triple[state]), builder.cuts(op.index)
        for cut in cuts.groups[place]:
            divided, _, way, _ = cuts.all[cut]
            if owner_of(way) is not None:
                continue
            value, dim = next((v, d) for n, d in divided if isinstance(v := (*op.operands, *op.results)[n], int))
            mine = found.setdefault((ranges.root(value, dim), way), InRange())
            work = costs.work(op.index, domain.triples[place])
            mine.works[work] = mine.works.get(work, 0.0) + graph.runs[op.region]
    for made in converted(builder, states):
        nbytes = float(graph.values[made.value].nbytes)
        even_s = made.runs * even_seconds(costs, nbytes, made) if not made.moves else 0.0
        for layout, other in ((made.source, made.target), (made.target, made.source)):
            for at in cuts_at(made.value, layout, ranges):
                mine = found.setdefault(at, InRange())
                if not even_s:
                    mine.sent_s += 0.0 if made.moves else made.seconds
                    continue
                ((dim, _, way),) = cuts_of(other)
                nodes = ranges.nodes_of(made.value, dim)
                within = nodes.point(way) if nodes else ranges.of(made.value, dim, way)
                mine.swapped_s += made.seconds
                mine.evenly_s[within] = mine.evenly_s.get(within, 0.0) + even_s
        for layout in made.moves:
            for at in cuts_at(made.value, layout, ranges):
                found.setdefault(at, InRange()).moved_s += made.runs * MOVES.least(costs.links[0], nbytes, 1.0)
    return found


def cuts_at(value: int, layout: Layout, ranges: ShareRanges) -> list[tuple[Node, int]]:
    """The cuts of a layout, as (root of the dimensions that ops can cut together, number of the range)."""
    return [(ranges.root(value, dim), way) for dim, _, way in cuts_of(layout) if owner_of(way) is None]


class Conversion(NamedTuple):
    """A conversion of a value from one layout to another. `seconds`: of all runs; `moves`: the layouts between which
    rows move on the way, if any do."""

    value: int
    source: Layout
    target: Layout
    runs: float
    seconds: float
    moves: tuple[Layout, ...]


def even_seconds(costs: CostModel, nbytes: float, made: Conversion) -> float:
    """Seconds of an all-to-all with even blocks, if the conversion may be one in rounds; else 0."""
    step = next((step for step in costs.steps(made.source, made.target, 0) if step.in_rounds), None)
    price = step and PRICES[step.name]
    return float(price.evenly(costs.links[0], nbytes, costs.n**2)) if isinstance(price, PriceOfRounds) else 0.0


def over_even(costs: CostModel, each: Sequence[ShareRange], other: ShareRange, *, roughly: bool = False) -> Floats:
    """Lower bound [ranges] on the time of an all-to-all, in rounds or padded, as a multiple of that with even blocks:
    between a dimension with shares in each of the ranges `each`, and one with shares in `other`. `roughly`: only by the
    bound in which the shares of `other` are at their least."""
    n, fast, ones = costs.n, costs.fastest, [1.0] * (costs.n - 1)
    padded = np.array([one.largest[0] * other.largest[0] * n**2 for one in each])
    (sent,) = least_rounds_of_each(each, [other], fast, ones)[1]
    if not roughly:
        sent = np.maximum(sent, [least_rounds(one, other, fast, ones).sent for one in each])
    return np.maximum(np.minimum(padded, sent * n**2 / (n - 1)), 1.0)


def converted(builder: RangeBuilder, states: Sequence[tuple[Domain, int]]) -> Iterator[Conversion]:
    """All conversions of an assignment."""
    st, graph = builder.structure, builder.graph

    def offered(value: int) -> AvailableLayouts:
        domain, state = states[st.value_variable[value]]
        return domain.options[int(domain.option[state])]

    def conversion(value: int, source: int, target: int, runs: float) -> Conversion:
        ways = builder.conversions(value)
        assert isinstance(ways, ConversionsWithMoves)
        at, moves = ways.layouts.layouts, ways.moves_between(source, target) or ()
        spent = runs * float(ways.seconds[source, target])
        return Conversion(value, at[source], at[target], runs, spent, tuple(at[place] for place in moves))

    for value in range(len(graph.values)):
        ways, option = builder.conversions(value), offered(value)
        number = ways.layouts.number
        _, hops = ways.reached(number[option.computed], [number[t] for t in option.targets])
        # Of ranges that stand together the first is the cheapest.
        paid = {ways.layouts.layouts[after][0].dim: (before, after) for before, after, _ in reversed(hops)}
        yield from (conversion(value, *hop, graph.runs[graph.home[value]]) for hop in paid.values())
    for use in st.uses:
        ways, option = builder.conversions(use.value), offered(use.value)
        number = ways.layouts.number
        target = number[use.needs.layouts[use.needs.groups[states[use.variable][1]]]]
        there = [number[layout] for layout in (option.computed, *option.targets)]
        if target not in there:
            nearest = min(there, key=lambda at: ways.seconds[at, target])
            yield conversion(use.value, nearest, target, use.runs)
