"""The costs of a `ChoiceSpace` at given ratios, as a `Problem` for the solver.

Values, ops and uses with equal cost inputs have one number (`EquivalenceClasses`), and share their conversions, seconds
and tables: costs differ within a kind by the cut alone, and are equal at ratios that cut equally.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np

from hapsynth.graph.ir import Graph
from hapsynth.instructions.collectives import Collective
from hapsynth.instructions.factors import Factors, Triples
from hapsynth.instructions.layout import Layout, cut_axes, cuts_of, owner_of
from hapsynth.instructions.program.sizes import Node
from hapsynth.instructions.rules.factor_table import cut_nodes
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import Shares
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.choice_space import AvailableLayouts, ChoiceSpace, Interned, RequiredLayouts
from hapsynth.search.formulation.conversions import Conversions
from hapsynth.search.sizing.ratios import Ratios
from hapsynth.search.solver import Edge, Ints, Problem

_T = TypeVar("_T")
Hop = tuple[Layout, Layout, int]
_TimesKey = tuple[int, Interned[Triples], tuple[int, ...]]
NO_SIZES = -1
"""In place of a vector, where an op would cut dimensions alike that are not."""


@dataclass(frozen=True, eq=False)
class ConversionPlan:
    """What an availability comes to at the current ratios: its conversions in order, their seconds, and all tensors
    there are then, the one that was computed first."""

    hops: tuple[Hop, ...]
    seconds: float
    tensors: tuple[Layout, ...]


class ProblemBuilder:
    """The problem of a structure on one cluster at given ratios; `ratios` None gives the joint bound's, with every
    instruction at its own ideal ratio.

    Costs that are determined by equal inputs are computed once, and are the same array in the problem.
    """

    def __init__(self, structure: ChoiceSpace, costs: CostModel, ratios: Ratios | None) -> None:
        self.structure, self.costs, self.ratios = structure, costs, ratios
        self.graph, self.table = structure.graph, structure.table
        # Equality of ops depends on which of them are launched as kernels.
        key = ("kinds", costs.figures.outputs)
        self.kinds = structure.once(key, lambda: EquivalenceClasses(structure, costs))
        self._made: dict[object, Any] = {}
        self._ways: dict[int, Conversions] = {}
        self._times: dict[_TimesKey, Floats] = {}
        self._use_tables: dict[tuple[Conversions, Interned[AvailableLayouts], RequiredLayouts, float], Floats] = {}

    def once(self, key: object, make: Callable[[], _T]) -> _T:
        """The result of `make` for a key, computed once and shared."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @cached_property
    def _roles(self) -> Sequence[int]:
        """Per value, a number; values of one kind with equal numbers are cut equally."""
        return [0] * len(self.graph.values) if self.ratios is None else self.ratios.roles

    def problem(self) -> Problem:
        """Its optimum is the cheapest program, whatever that holds."""
        return self._problem

    @cached_property
    def _problem(self) -> Problem:
        st = self.structure
        edges = [self._link(op, value) for op, value in st.links]
        ways = [self.conversions(v) for v in range(len(self.graph.values))]
        tables: dict[tuple[Conversions, int], Floats] = {}
        for use, (kind, producer, groups) in zip(st.uses, self.kinds.uses, strict=True):
            key = ways[use.value], kind
            table = tables.get(key)
            if table is None:
                table = tables[key] = self._use_table(use.value, st.choices[producer].options, use.needs, use.runs)
            edges.append(Edge(producer, use.variable, groups, use.needs.groups, table))
        return Problem(tuple(self._unary()), tuple(edges))

    # Conversions

    def conversions(self, value: int) -> Conversions:
        """The cheapest ways between the layouts of a value."""
        ways = self._ways.get(value)
        if ways is None:
            key = "ways", self.kinds.values[value], self._roles[value]
            ways = self._ways[value] = self.once(key, lambda: self._made_conversions(value))
        return ways

    def _made_conversions(self, value: int) -> Conversions:
        layouts = self.structure.layouts[value]
        several = self.structure.axes > 1 and self.structure.restriction.convertible is None
        seconds, ends = dict[object, float](), dict[tuple[Layout, int], object]()

        def end(layout: Layout, axis: int) -> object:
            if (layout, axis) not in ends:
                ends[layout, axis] = self._end(value, layout, axis)
            return ends[layout, axis]

        def time(source: Layout, target: Layout, axis: int) -> float:
            if not several:
                return self.step_time(value, source, target, axis)
            key = axis, end(source, axis), end(target, axis)
            if key not in seconds:
                seconds[key] = self.step_time(value, source, target, axis)
            return seconds[key]

        return self.once(("conversions", layouts, self._profile(value)), lambda: Conversions(layouts, time))

    def _end(self, value: int, layout: Layout, axis: int) -> object:
        """A key that determines the costs of steps along an axis to or from a layout; many layouts share one."""
        whole = lambda cut: cut[1] if self.ratios is None else self.ratios.of(value, *cut)
        held = {cut[0]: whole(cut) for cut in cuts_of(layout)}
        along = layout[axis]
        own: tuple[object, ...] = ()
        if along.is_sharded:
            by = cut_axes(layout, along.dim)
            major = whole((along.dim, by[:-1], along.way)) if by[:-1] else None
            own = held[along.dim], major, by[-1] == axis, self.graph.values[value].shape[along.dim]
        return along.kind, along.reduction, own, tuple(sorted(held.values(), key=str))

    def step_time(self, value: int, source: Layout, target: Layout, axis: int) -> float:
        """Seconds of one conversion step at the current ratios, or at the best ones for the joint bound."""
        convertible = self.structure.restriction.convertible
        if convertible is not None and not convertible(value, source[axis], target[axis]):
            return np.inf
        return min(self._step_times(value, source, target, axis))

    def step(self, value: int, source: Layout, target: Layout, axis: int) -> Collective:
        """The cheapest of the steps that do it, and of those that cost the same the first."""
        steps = self.costs.steps(source, target, axis)
        if len(steps) == 1:
            return steps[0]

        def make() -> Collective:
            times = self._step_times(value, source, target, axis)
            return steps[times.index(min(times))]

        return self.once(("step", self.conversions(value), source, target, axis), make)

    def _step_times(self, value: int, source: Layout, target: Layout, axis: int) -> list[float]:
        """Seconds of each step that makes this conversion; infinite for one that is not allowed."""
        shares = Shares(partial(self.largest, value), partial(self._shares_of_all, value))
        cost = lambda step: self.costs.conversion(value, source, target, axis, shares, step)[0]
        return [cost(s) if self._allows(value, s) else np.inf for s in self.costs.steps(source, target, axis)]

    def least_step_time(self, value: int, source: Layout, target: Layout, axis: int) -> float:
        """A lower bound on the seconds that one conversion step adds to a bundle that it is in."""
        number = self.structure.layouts[value].number
        alone = self.conversions(value).single[number[source], number[target]]
        if not np.isfinite(alone):
            return alone
        shares = Shares(partial(self.largest, value), partial(self._shares_of_all, value))
        least = lambda step: self.costs.least_in_bundle(value, source, target, axis, shares, step)
        return min(least(s) for s in self.costs.steps(source, target, axis) if self._allows(value, s))

    def _allows(self, value: int, step: Collective) -> bool:
        """Whether a value may be converted by a step. At the best ratios there is nothing to balance, and even blocks
        take no longer than rounds of any pieces."""
        return not step.recuts and not ((step.balances or step.in_rounds) and self.ratios is None)

    def _shares_of_all(self, value: int, dim: int, axes: tuple[int, ...], way: int) -> Floats:
        """The fraction of a dimension that each position along the axes holds."""
        assert self.ratios is not None
        return self.ratios.vectors[self.ratios.of(value, dim, axes, way)]

    def path_time(self, value: int, source: Layout, target: Layout) -> float:
        """Seconds of the cheapest conversion; infinite where there is none."""
        ways = self.conversions(value)
        return float(ways.seconds[ways.layouts.number[source], ways.layouts.number[target]])

    def largest(self, value: int, dim: int, axes: tuple[int, ...], way: int = 0) -> float:
        """The fraction of a dimension that the largest shard holds."""
        if self.ratios is None:
            return self.costs.evenly(dim, axes, way)
        return self.ratios.largest[self.ratios.of(value, dim, axes, way)]

    def held(self, value: int, dim: int, axes: tuple[int, ...], way: int = 0) -> float | Floats:
        """The fraction of a dimension that each device holds; one number for all, unless it has an owner, if shards are
        padded or the ratios are ideal."""
        if not self.costs.memory_budget.exact:
            return self.largest(value, dim, axes, way)
        if self.ratios is None:
            owner = owner_of(way)
            return self.costs.evenly(dim, axes) if owner is None else (self.costs.position(axes) == owner) * 1.0
        return self.ratios.devices[self.ratios.of(value, dim, axes, way)]

    def _profile(self, value: int) -> object:
        """A key that determines the costs of a value's conversions, and of holding it."""
        ratios, restriction = self.ratios, self.structure.restriction
        cuts = self.structure.layouts[value].cuts
        vectors = () if ratios is None else tuple(ratios.of(value, *cut) for cut in cuts)
        role = None if restriction.convertible is None else restriction.role(value)
        shape = () if ratios is None else self.graph.values[value].shape
        return self.graph.values[value].nbytes, shape, vectors, role, self.costs.conversion_kind(value)

    def offer(self, value: int, availability: AvailableLayouts) -> ConversionPlan:
        """The conversions that an availability stands for."""
        ways = self.conversions(value)

        def make() -> ConversionPlan:
            number, layouts = ways.layouts.number, ways.layouts.layouts
            seconds, steps = ways.reached(number[availability.computed], [number[t] for t in availability.targets])
            hops = tuple((layouts[before], layouts[after], axis) for before, after, axis in steps)
            tensors = (availability.computed, *(after for _, after, _ in hops))
            return ConversionPlan(hops if np.isfinite(seconds) else (), seconds, tensors)

        return self.once(("offer", ways, availability), make)

    # Ops

    def op_times(self, ops: Sequence[int]) -> list[Floats]:
        """Per op, its seconds under each of its triples."""
        keys = [self.times_key(op) for op in ops]
        self._find_times({key: op for key, op in zip(keys, ops, strict=True) if key not in self._times})
        return [self._times[key] for key in keys]

    def times_key(self, op: int) -> _TimesKey:
        """A key that determines an op's seconds: its kind, its triples, and the ratio vectors of the cut dimensions."""
        vectors = self.once(("vectors", self._op_key(op)), lambda: self._vectors(op))
        return self.costs.kind(op), self.structure.triples[op], vectors

    def _op_key(self, op: int) -> tuple[int, ...]:
        """A key that is equal for equal ops that are cut equally."""
        return self.kinds.ops[op], *map(self._roles.__getitem__, self.kinds.tensors[op])

    def _vectors(self, op: int) -> tuple[int, ...]:
        """The vectors of everything that some triples of an op cut."""
        if self.ratios is None:
            return ()
        o, found = self.graph.ops[op], list[int]()
        tensors = (*o.operands, *o.results)
        for places, axes, way, units in self.cuts(op).all:
            nodes: list[Node] = [(v, dim, axes, way) for place, dim in places if isinstance(v := tensors[place], int)]
            at = self.ratios.of(*nodes[-1], units) if self.ratios.allow(nodes, units) else NO_SIZES
            found.append(at)
        return tuple(found)

    def cuts(self, op: int) -> _Cuts:
        factors, triples = self.table[op], self.structure.triples[op]
        return self.structure.once(("cuts", factors, triples), lambda: _Cuts(self.graph, op, factors, triples))

    def _find_times(self, missing: Mapping[_TimesKey, int]) -> None:
        """Compute the missing seconds of all ops at once, as arrays; equal works at equal ratios once."""
        number: dict[tuple[Work, tuple[int, ...]], int] = {}
        places: list[list[int]] = []
        for (_, _, vectors), op in missing.items():
            held = [tuple(vectors[c] for c in cuts) if vectors else () for cuts in self.cuts(op).groups]
            works = [self.costs.work(op, triples) for triples in self.structure.triples[op]]
            places.append([number.setdefault(key, len(number)) for key in zip(works, held, strict=True)])
        seconds = self._seconds_of([*number])
        self._times.update({key: seconds[at] for key, at in zip(missing, places, strict=True)})

    def _seconds_of(self, works: Sequence[tuple[Work, tuple[int, ...]]]) -> Floats:
        """Seconds of works, each at the ratio vectors of its cut dimensions."""
        if self.ratios is None:
            return np.array(self.costs.ideal_times(work for work, _ in works))
        devices = self.ratios.devices
        seconds = self.costs.times([(work, [devices[v] for v in held]) for work, held in works])
        seconds[[NO_SIZES in held for _, held in works]] = np.inf
        return seconds

    def feed_time(self, value: int, layout: Layout) -> float:
        """Seconds to put an argument that is new at every step where it is stored."""
        work = self.costs.feed_work(value, layout)
        if work is None:
            return 0.0
        if self.ratios is None:
            return self.costs.ideal_time(work)
        held = [self.ratios.devices[self.ratios.of(value, *cut)] for cut in cuts_of(layout)]
        return self.costs.time(work, held)

    def output_layouts(self, value: int) -> tuple[Layout, ...]:
        """Where a plain output may end: wherever it can lie that is not partial, whole first."""
        return self.structure.layouts[value].storable

    # The problem's parts

    def _unary(self) -> list[Floats]:
        graph, st = self.graph, self.structure
        unary: list[Floats | None] = [None] * len(st.choices)
        plain = self.plain_outputs()
        # Plain outputs end in ways of their own.
        keys = [(*self._op_key(o), *(v for v in graph.ops[o].results if v in plain)) for o in range(len(graph.ops))]
        first = {key: op.index for key, op in zip(reversed(keys), reversed(graph.ops), strict=True)}
        times = self.op_times(tuple(first.values()))
        alike = {key: self._states_of(op, t, plain) for (key, op), t in zip(first.items(), times, strict=True)}
        for key, variable in zip(keys, st.op_variable, strict=True):
            unary[variable] = alike[key]
        for value, variable in enumerate(st.value_variable):
            if unary[variable] is None:
                kept, options = self._kept(value, plain), st.choices[variable].options
                feeds = [] if value in graph.producer else [self.feed_time(value, a.computed) for a in options]
                unary[variable] = kept + feeds if any(feeds) else kept
        return [u for u in unary if u is not None]

    def _states_of(self, op: int, times: Floats, plain: frozenset[int]) -> Floats:
        """Seconds of each of an op's states, given those under each of its triples."""
        st, o = self.structure, self.graph.ops[op]
        choices, runs, uniform = st.choices[st.op_variable[op]], self.graph.runs[o.region], self.costs.uniform_time(op)
        own = ("unary", choices, self.times_key(op), runs, uniform)
        value = st.made_with(op)
        if value is None:
            return self.once(own, lambda: runs * (times + uniform)[choices.triple])
        make = lambda: runs * (times + uniform)[choices.triple] + self._kept(value, plain)[choices.option]
        return self.once((own, self._kept_key(value, plain)), make)

    def _kept(self, value: int, plain: frozenset[int]) -> Floats:
        """Seconds of each of a value's options: its conversions, and to bring a plain output where it may end."""
        choices = self.structure.choices[self.structure.value_variable[value]]
        key = _, _, _, runs, *ends = self._kept_key(value, plain)

        def make() -> Floats:
            seconds = runs * self.offers(value, choices.options)[0]
            for end in ends:
                seconds = seconds + self._use_table(value, choices.options, end, 1.0).min(axis=1)
            return seconds

        return self.once(key, make)

    def _kept_key(self, value: int, plain: frozenset[int]) -> tuple[Any, ...]:
        """A key that determines `_kept`: the options, the conversions, their runs, and where an output ends."""
        options = self.structure.choices[self.structure.value_variable[value]].options
        ends = self.ends(value) if value in plain else []
        return "kept", options, self.conversions(value), self.graph.runs[self.graph.home[value]], *ends

    def ends(self, value: int) -> list[RequiredLayouts]:
        """Where an output ends: in one of the layouts of each."""
        layouts, graph, fixed = self.structure.layouts[value], self.graph, self.structure.restriction.ends
        asked = dict.fromkeys((fixed[i],) for i, v in enumerate(graph.outputs) if v == value and i in fixed)
        make = lambda among: RequiredLayouts(among, np.zeros(0, dtype=np.int64))
        return [
            self.once(("ends", layouts, among), lambda a=among: make(a))
            for among in asked or (self.output_layouts(value),)
        ]

    def plain_outputs(self) -> frozenset[int]:
        graph, fixed = self.graph, self.structure.restriction.ends
        tied = {graph.outputs[target] for _, target in graph.carry}
        return frozenset(v for i, v in enumerate(graph.outputs) if isinstance(v, int) and (v not in tied or i in fixed))

    def _use_table(
        self, value: int, options: Interned[AvailableLayouts], needs: RequiredLayouts, runs: float
    ) -> Floats:
        """Seconds of the cheapest private conversion from each option to each need."""
        ways = self.conversions(value)
        key = ways, options, needs, runs
        table = self._use_tables.get(key)
        if table is None:
            columns = ways.seconds[:, [ways.layouts.number[n] for n in needs.layouts]]
            first, *others = self.offers(value, options)[1].T
            table = columns[first]
            for tensors in others:
                more = np.flatnonzero(tensors != first)
                table[more] = np.minimum(table[more], columns[tensors[more]])
            self._use_tables[key] = table = table * runs
        return table

    def offers(self, value: int, options: Interned[AvailableLayouts]) -> tuple[Floats, Ints]:
        """As `offer`, of every option: seconds [options], and the numbers of the layouts there are then [options, most
        layouts], the first again where there are fewer."""
        ways, number = self.conversions(value), self.structure.layouts[value].number
        numbered = lambda: [(number[a.computed], [number[t] for t in a.targets]) for a in options]

        def make() -> tuple[Floats, Ints]:
            targets = self.structure.once(("numbered", options, ways.layouts), numbered)
            found = [ways.reached(*numbers) for numbers in targets]
            most = max(len(hops) for _, hops in found)
            rows = [
                [first, *(after for _, after, _ in hops), *[first] * (most - len(hops))]
                for (first, _), (_, hops) in zip(targets, found, strict=True)
            ]
            return np.array([seconds for seconds, _ in found]), np.array(rows)

        return self.once(("offers", ways, options), make)

    def _link(self, op: int, value: int) -> Edge:
        """A result with a variable of its own is made as the op's triples say."""
        st = self.structure
        position = self.graph.ops[op].results.index(value)
        by, made = st.choices[st.op_variable[op]], st.choices[st.value_variable[value]]

        def make() -> tuple[Ints, Ints, Floats]:
            index: dict[Layout, int] = {}
            rows = [index.setdefault(tuple(t.results[position] for t in ts), len(index)) for ts in by.triples]
            columns = [index[a.computed] for a in made.options]
            table = np.where(np.eye(len(index), dtype=bool), 0.0, np.inf)
            return np.array(rows)[by.triple], np.array(columns)[made.option], table

        gu, gv, table = self.once(("link", by, made, position), make)
        return Edge(st.op_variable[op], st.value_variable[value], gu, gv, table)


class _Cuts:
    """The cuts of the triples of equal ops."""

    def __init__(self, graph: Graph, op: int, factors: Factors, every: Sequence[Triples]) -> None:
        self.groups: list[tuple[int, ...]] = []
        """Per triples, the cuts that divide it."""
        self.all: list[tuple[list[tuple[int, int]], tuple[int, ...], int, int]] = []
        """((operand or result, dimension) of all that it divides, axes, way, units) of each. Its ratio is that of the
        last dimension, a result's where there is one."""
        number: dict[tuple[int, tuple[int, ...], int], int] = {}
        dims = [*factors.operands, *factors.results]
        operands = graph.ops[op].operands
        for triples in every:
            mine: list[int] = []
            for factor, nodes in cut_nodes(graph, op, factors, triples):
                key = factor, *nodes[0][2:]
                if key not in number:
                    is_value = lambda n: n >= len(operands) or isinstance(operands[n], int)
                    places = [(n, factors.position(t, factor)) for n, t in enumerate(dims) if is_value(n)]
                    number[key] = len(self.all)
                    divided = [(n, d) for n, d in places if d is not None]
                    self.all.append((divided, *nodes[0][2:], factors.sizes[factor]))
                mine.append(number[key])
            self.groups.append(tuple(mine))


class EquivalenceClasses:
    """The equivalence classes of values, ops and uses of one choice space; they hold for any cost model of its
    graph."""

    def __init__(self, structure: ChoiceSpace, costs: CostModel) -> None:
        graph, restriction = structure.graph, structure.restriction
        role = (lambda value: None) if restriction.convertible is None else restriction.role
        number: dict[object, int] = {}
        self.values = [
            number.setdefault((kind, role(v), costs.conversion_kind(v)), len(number))
            for v, kind in enumerate(structure.value_kinds)
        ]
        """[values]: values with equal numbers have equal conversions."""
        number = {}
        self.ops: list[int] = []
        """[ops]: ops with equal numbers have the same states with equal seconds, and results with equal conversions."""
        self.tensors: list[tuple[int, ...]] = []
        """Per op, its operands and results; those of ops with equal numbers correspond by position."""
        for op in graph.ops:
            choices, runs = structure.choices[structure.op_variable[op.index]], graph.runs[op.region]
            key = costs.kind(op.index), structure.triples[op.index], choices, runs, op.index in graph.unsure
            made = [(self.values[v], graph.runs[graph.home[v]]) for v in op.results]
            self.ops.append(number.setdefault((key, *made), len(number)))
            self.tensors.append((*[v for _, v in op.value_operands], *op.results))
        number = {}
        self.uses: list[tuple[int, int, Ints]] = []
        """Per use, its number, the variable that makes its value and the groups of that one's states: uses of one
        number cost alike where the value is converted alike."""
        for use in structure.uses:
            variable = structure.value_variable[use.value]
            choices = structure.choices[variable]
            kind = number.setdefault((choices.options, use.needs, use.runs), len(number))
            self.uses.append((kind, variable, choices.option))
