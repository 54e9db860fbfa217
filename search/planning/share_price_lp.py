"""Prices on largest shares (`share_prices.py`) by a linear program: what a solution cuts, with every share a variable.

Each op and each value that is held has a share of its own. An op's seconds are convex in it, as far as they count here;
what is held costs its share of the bytes; and the shares of what makes and takes a value lie as far apart as rows are
moved. The multipliers of that, by how an op's share and the others' of a value are tied, are the prices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from hapsynth.instructions.factors import Triple
from hapsynth.instructions.layout import Placement
from hapsynth.instructions.program.sizes import Node
from hapsynth.search.cost.model import Floats
from hapsynth.search.cost.share_range import ShareRange
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.memory_constraints import MemoryConstraints
from hapsynth.search.formulation.share_prices import Place, ShareCurves, SharePrices, seconds_of_moving
from hapsynth.search.formulation.share_ranges import RangeBuilder
from hapsynth.search.solver import Ints, Problem, VariableSymmetry

_POINTS = 24
"""Shares at which an op's seconds are taken, up to where it takes the least."""
_HELD = -2
"""In place of an op: what a value is held at."""
_GB = 1e9


@dataclass
class _Rows:
    """Of a linear program: the least of costs @ x where rows @ x <= limits, lower <= x <= upper."""

    costs: list[float] = field(default_factory=list[float])
    bounds: list[tuple[float | None, float | None]] = field(default_factory=list[tuple[float | None, float | None]])
    limits: list[float] = field(default_factory=list[float])
    entries: list[tuple[int, int, float]] = field(default_factory=list[tuple[int, int, float]])

    def variable(self, cost: float, low: float | None = None, high: float | None = None) -> int:
        self.costs.append(cost)
        self.bounds.append((low, high))
        return len(self.costs) - 1

    def at_most(self, limit: float, *terms: tuple[float, int]) -> int:
        """A row: the sum of factor * variable is at most a limit."""
        row = len(self.limits)
        self.limits.append(limit)
        self.entries += [(row, column, factor) for factor, column in terms]
        return row

    def multipliers(self) -> Floats | None:
        """Of the rows, >= 0; None where no optimum was found."""
        rows, columns, factors = np.array(self.entries).T
        shape = len(self.limits), len(self.costs)
        matrix = coo_array((factors, (rows.astype(int), columns.astype(int))), shape=shape).tocsr()
        found = linprog(self.costs, A_ub=matrix, b_ub=self.limits, bounds=self.bounds, method="highs-ipm")
        return None if found.x is None else -np.asarray(found.ineqlin.marginals)


class SharePriceLP:
    """Of the choices that a problem in ranges came to, within limits of bytes at some ops. `priced`: whether shares of
    a (value, dimension) get prices."""

    def __init__(
        self,
        builder: RangeBuilder,
        choices: Ints,
        limits: Mapping[int, float],
        curves: ShareCurves,
        priced: Callable[[int, int], bool],
    ) -> None:
        self.builder, self.limits, self.curves, self.priced = builder, limits, curves, priced
        self.graph, self.structure, self.costs = builder.graph, builder.structure, builder.costs
        self.memory = MemoryConstraints(builder, at_least=True)
        self.problem: Problem = self.memory.problem(limits)
        self.choices = self.memory.extended(self.problem, choices)
        self._states = [(c, int(s)) for c, s in zip(self.structure.choices, self.choices)]
        self._held = [self.memory.held_at(op) for op in self.memory.limited(limits)]
        self._works = self._cut_works()
        curves.add([work for work, _ in self._works.values()])

    def memory_prices(self) -> Floats | None:
        """Seconds per byte at each limited op, by which these choices keep to the limits [ops]."""
        rows, shares, _ = self._rows(np.zeros(len(self.limits)))
        at: list[int] = []
        used = self.problem.usage(self.choices)
        for resource, most, values in zip(self.problem.resources, used, self._held, strict=True):
            nbytes = {v: float(self.graph.values[v].nbytes) for v in values if v in shares}
            rest = float(most) - sum(n * self._first(v) for v, n in nbytes.items())
            at.append(rows.at_most((resource.limit - rest) / _GB, *((n / _GB, shares[v]) for v, n in nbytes.items())))
        found = rows.multipliers()
        return None if found is None else found[at] / _GB

    def prices(self, per_byte: Sequence[float] | Floats) -> SharePrices | None:
        """At prices per byte at each limited op; None where there is no solution."""
        rows, _, ties = self._rows(per_byte)
        found = rows.multipliers()
        if found is None:
            return None
        asked: dict[tuple[int, int], dict[Place, float]] = {}
        for value, dim, place, more, less in ties:
            mine = asked.setdefault((value, dim), {})
            mine[place] = mine.get(place, 0.0) + float(found[more] - found[less])
        for mine in asked.values():
            mine.pop((_HELD, 0), None)
        return SharePrices.within_reason(self._evened(asked), self._stored(per_byte), self._most(), self._movable)

    def _stored(self, per_byte: Sequence[float] | Floats) -> dict[int, float]:
        """Seconds for all bytes of each value that is held."""
        found: dict[int, float] = {}
        for price, values in zip(per_byte, self._held, strict=True):
            for v in values:
                found[v] = found.get(v, 0.0) + float(price) * float(self.graph.values[v].nbytes)
        return found

    # What is cut

    def _cut_works(self) -> dict[int, tuple[Work, Triple]]:
        """op -> what it does under the choices, where that has a price, and its triple."""
        found: dict[int, tuple[Work, Triple]] = {}
        for op in self.graph.ops:
            domain, state = self._states[self.structure.op_variable[op.index]]
            triples = domain.triples[int(domain.triple[state])]
            if self._priced_cut(op.index, triples[0]) is not None:
                found[op.index] = self.costs.work(op.index, triples), triples[0]
        return found

    def _priced_cut(self, op: int, triple: Triple) -> tuple[int, int] | None:
        """A (value, dimension) that an op cuts, where that has a price."""
        o = self.graph.ops[op]
        tensors = zip((*o.operands, *o.results), (*triple.operands, *triple.results), strict=True)
        return next(((v, p.dim) for v, p in tensors if isinstance(v, int) and self._is_priced(v, p)), None)

    def _is_priced(self, value: int, p: Placement) -> bool:
        return p.is_cut and self.priced(value, p.dim)

    def _smallest(self, value: int) -> Placement:
        """How the smallest tensor of a value lies."""
        domain, state = self._states[self.structure.value_variable[value]]
        option = domain.options[int(domain.option[state])]
        size = lambda t: float(self.memory.tensor_bytes(value, t).max())
        return min((option.computed, *option.targets), key=size)[0]

    def _first(self, value: int) -> float:
        p = self._smallest(value)
        return self.builder.ranges.of(value, p.dim, p.way).largest[0]

    def _tied(self, value: int) -> dict[int, list[tuple[int, Place]]]:
        """By dimension, the ops that take or make a value cut along it: (op, how)."""
        found: dict[int, list[tuple[int, Place]]] = {}

        def add(op: int, place: Place, cut: Callable[[Triple], Placement]) -> None:
            if op in self._works and self._is_priced(value, p := cut(self._works[op][1])):
                found.setdefault(p.dim, []).append((op, place))

        for op, position in self.graph.uses[value]:
            add(op, (op, position), lambda triple, at=position: triple.operands[at])
        if (op := self.graph.producer.get(value)) is not None:
            at = self.graph.ops[op].results.index(value)
            add(op, (-1, value), lambda triple, at=at: triple.results[at])
        return found

    def _movable(self, value: int) -> float:
        """Seconds a step of moving all rows of a value, which may be claimed; what no rows move of may claim all."""
        runs = self.graph.runs
        if self.graph.home[value] > 0 or not self.costs.is_materialized(value):
            return np.inf
        home = runs[self.graph.home[value]]
        read = (self.graph.read_in(self.graph.ops[op], position) for op, position in self.graph.uses[value])
        if any(runs[self.graph.place_of_conversion(value, region)] < home for region in read):
            return 0.0
        return home * seconds_of_moving(self.costs, self.graph, value)

    # The program

    def _rows(
        self, per_byte: Sequence[float] | Floats
    ) -> tuple[_Rows, dict[int, int], list[tuple[int, int, Place, int, int]]]:
        """The program, the variable of each value held, and what ties shares: (value, dimension, whose, the row in
        which it is at most another, the row in which it is at least)."""
        rows, even = _Rows(), 1.0 / self.costs.n
        share: dict[int, int] = {}
        hulls: dict[Work, list[tuple[float, float]]] = {}
        for op, (work, _) in self._works.items():
            share[op] = rows.variable(0.0, even, 1.0)
            seconds = rows.variable(self.graph.runs[self.graph.ops[op].region])
            if work not in hulls:
                hulls[work] = self._hull(work)
            for slope, start in hulls[work]:
                rows.at_most(-start, (slope, share[op]), (-1.0, seconds))
        stored, held = self._stored(per_byte), dict[int, int]()
        ties: list[tuple[int, int, Place, int, int]] = []
        for value in range(len(self.graph.values)):
            tied = self._tied(value)
            if value in stored and self._is_priced(value, p := self._smallest(value)):
                held[value] = rows.variable(stored[value], even, 1.0)
                tied.setdefault(p.dim, []).append((_HELD, (_HELD, 0)))
            movable = self._movable(value)
            for dim, mine in tied.items():
                variables = [(held[value] if op == _HELD else share[op], place) for op, place in mine]
                if len(variables) < 2:
                    continue
                if np.isfinite(movable):
                    most, least = rows.variable(movable), rows.variable(-movable)
                else:
                    most = least = rows.variable(0.0)
                for variable, place in variables:
                    below = rows.at_most(0.0, (1.0, variable), (-1.0, most))
                    above = rows.at_most(0.0, (-1.0, variable), (1.0, least))
                    ties.append((value, dim, place, below, above))
        return rows, held, ties

    def _hull(self, work: Work) -> list[tuple[float, float]]:
        """(slope, start) of lines whose maximum is the convex hull of an op's seconds over its largest share."""
        even, best = 1.0 / self.costs.n, self.curves.best(work)
        shares = np.unique([*np.geomspace(even, max(best, even), _POINTS), *np.geomspace(max(best, even), 1.0, 4)])
        seconds = self.costs.times_within([(work, ShareRange((share, share))) for share in shares.tolist()])
        hull: list[tuple[float, float]] = []
        steeper = lambda a, b, c: (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
        for point in zip(shares.tolist(), seconds.tolist(), strict=True):
            while len(hull) > 1 and steeper(hull[-2], hull[-1], point):
                hull.pop()
            if np.isfinite(point[1]):
                hull.append(point)
        slopes = [((b[1] - a[1]) / (b[0] - a[0]), a) for a, b in pairwise(hull)]
        return [(slope, a[1] - slope * a[0]) for slope, a in slopes]

    def _most(self) -> dict[Node, float]:
        """By what ops can cut together, the largest share at which one of them takes the least."""
        found: dict[Node, float] = {}
        for op, (work, triple) in self._works.items():
            cut = self._priced_cut(op, triple)
            assert cut is not None
            root = self.builder.ranges.root(*cut)
            found[root] = max(found.get(root, 0.0), self.curves.best(work))
        return found

    def _evened(
        self, asked: Mapping[tuple[int, int], Mapping[Place, float]]
    ) -> Mapping[tuple[int, int], Mapping[Place, float]]:
        """What is alike pays alike, the mean of all: of so many layers the program may choose some."""
        symmetry = VariableSymmetry.of(self.problem)
        if symmetry is None:
            return asked
        st, graph = self.structure, self.graph
        colour = symmetry.colours.tolist()
        of_value = lambda v: colour[st.value_variable[v]]
        kind = lambda v, place: (
            (of_value(v), -1) if place[0] < 0 else (of_value(v), colour[st.op_variable[place[0]]], place[1])
        )
        count: dict[object, int] = {}
        total: dict[tuple[object, int], float] = {}
        places: dict[object, list[tuple[int, Place]]] = {}
        every = [(v, (op.index, position)) for op in graph.ops for position, v in op.value_operands]
        every += [(v, (-1, v)) for v in graph.producer]
        for v, place in every:
            count[kind(v, place)] = count.get(kind(v, place), 0) + 1
            places.setdefault(kind(v, place), []).append((v, place))
        for (v, dim), mine in asked.items():
            for place, price in mine.items():
                key = kind(v, place), dim
                total[key] = total.get(key, 0.0) + price
        found: dict[tuple[int, int], dict[Place, float]] = {}
        for (key, dim), price in total.items():
            for v, place in places[key]:
                found.setdefault((v, dim), {})[place] = price / count[key]
        return found
