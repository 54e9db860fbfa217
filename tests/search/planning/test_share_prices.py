"""Prices on largest shares: whatever they are, no program at any ratios is below the bound; those of the linear program
raise it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from graphs import cluster, random_graph
from resharing import cluster as new_and_old
from test_joint_refinement import (
    ARGS,
    TASKS,
    _TwoRatios,
    deep,
    model,
    named,
    random_ranges,
    ranges_around,
    short_of_memory,
    shortest,
    way_of,
)
from test_search import brute_force

from hapsynth.cluster.memory_budget import MemoryBudget
from hapsynth.graph.trace import trace
from hapsynth.instructions.layout import Layout, R
from hapsynth.instructions.program.sizes import Node
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.search.analysis.liveness import LiveSet
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.formulation.choice_space import ChoiceSpace
from hapsynth.search.formulation.memory_constraints import MemoryConstraints
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.formulation.share_prices import (
    Place,
    PricedRangeBuilder,
    ShareCurves,
    SharePrices,
    seconds_of_moving,
)
from hapsynth.search.formulation.share_ranges import RangeBuilder, RangeChoices, ShareRanges
from hapsynth.search.formulation.ways import ChoicesInWays
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.share_price_lp import SharePriceLP
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.sizing.ratios import Ratios
from hapsynth.search.solver import Edge, Ints, Problem, solve


def movable(costs: CostModel, value: int) -> float:
    inside = costs.graph.home[value] > 0 or not costs.is_materialized(value)
    return np.inf if inside else seconds_of_moving(costs, costs.graph, value)


def random_prices(
    costs: CostModel, rng: np.random.Generator, scale: float, stored: Mapping[int, float] | None = None
) -> SharePrices:
    """Of half of all that takes or makes a value, as high as may be or far below; on every second kind of dimension up
    to a share."""
    graph, asked = costs.graph, dict[tuple[int, int], dict[Place, float]]()
    for v in graph.values:
        places: list[Place] = [*graph.uses[v.index]]
        if v.index in graph.producer:
            places.append((-1, v.index))
        most = min(movable(costs, v.index), scale) * 10 ** rng.uniform(-2, 1)
        for dim in range(len(v.shape)):
            asked[v.index, dim] = {p: most * rng.normal() for p in places if rng.random() < 0.5}
    upper: dict[Node, float] = {root: rng.uniform(1 / costs.n, 1) for root in shortest(costs) if rng.random() < 0.5}
    return SharePrices.within_reason(asked, stored or {}, upper, lambda v: movable(costs, v))


def priced(ranges: ShareRanges, prices: SharePrices, **how: Any) -> PricedRangeBuilder:
    costs = ranges.costs
    return PricedRangeBuilder(RangeChoices(costs, ranges.count, **how), costs, ranges, prices, ShareCurves(costs))


@pytest.mark.parametrize("seed", range(8))
def test_no_program_at_any_ratios_is_below_the_bound(seed: int) -> None:
    """All sequences of instructions, at a grid of ratios."""
    graph = random_graph(300 + seed, ops=4).graph
    speeds = [[2.0, 1.0], [3.0, 1.0, 1.0]][seed % 2]
    costs = model(graph, cluster(speeds, bandwidth=[1e9, 1e10, 1e11][seed % 3]))
    structure, rng = ChoiceSpace(graph, costs.table), np.random.default_rng(seed)
    scale = solve(ProblemBuilder(structure, costs, None).problem()).cost
    for first in np.linspace(0, 1, 9):
        weights = np.array([first, *[(1 - first) / (len(speeds) - 1)] * (len(speeds) - 1)])
        least = brute_force(ProblemBuilder(structure, costs, named(costs, weights)))
        for ranges in (ranges_around(costs, weights), random_ranges(costs, rng), ShareRanges(costs, {})):
            bound = solve(priced(ranges, random_prices(costs, rng, scale)).problem()).lower_bound
            assert bound <= least * (1 + 1e-9)


@pytest.mark.parametrize("bandwidth", ["100 MB/s", "20 GB/s"])
@pytest.mark.parametrize("name", ["deep", "again", "pooled"])
def test_no_program_that_moves_rows_is_below_it_at_a_price_of_memory(name: str, bandwidth: str) -> None:
    """The best program whose instructions are each at one of two ratios, with what it holds at some op."""
    fn, args = TASKS[name]
    graph, rng = trace(fn, args).graph, np.random.default_rng(len(name))
    costs = model(graph, new_and_old(bandwidth))
    spent = 0
    for fast in ((5.0, 5.0), (10.0, 1.0), (4.0, 1.0), *rng.uniform(0.5, 9, (3, 2)).tolist()):
        two = [np.array([f, f, 1, 1]) / (2 * f + 2) for f in fast]
        choices = ChoicesInWays(costs, lambda value, dim: 2, sparing=True)
        memory = MemoryConstraints(_TwoRatios(choices, costs, named(costs, *two)), at_least=True)
        op = memory.fullest_near(int(rng.integers(len(graph.ops))))
        free = solve(memory.problem({}), start=np.array(choices.replicated())).cost
        per_byte = free / (sum(v.nbytes for v in graph.values)) * 10 ** rng.uniform(-1, 1)
        problem = memory.priced({op: 0.0}, [per_byte])
        best = solve(problem, start=memory.extended(problem, np.array(choices.replicated())), tolerance=1e-4)
        for ranges in (ranges_around(costs, *two), random_ranges(costs, rng)):
            plain = RangeBuilder(RangeChoices(costs, ranges.count, sparing=True), costs, ranges)
            if MemoryConstraints(plain, at_least=True).fullest_near(op) != memory.fullest_near(op):
                continue
            held = MemoryConstraints(plain, at_least=True).held_at(memory.fullest_near(op))
            stored = {v: per_byte * float(graph.values[v].nbytes) for v in held}
            prices = random_prices(costs, rng, free, stored)
            spent += sum(p.held > 0 for dims in prices.of.values() for p in dims.values())
            here = MemoryConstraints(priced(ranges, prices, sparing=True), at_least=True)
            bound = solve(here.priced({op: 0.0}, [per_byte]), tolerance=1e-4).lower_bound
            assert bound <= best.cost * (1 + 1e-9)
    assert spent > 0


def test_what_is_asked_comes_within_reason() -> None:
    """More than holding a value costs is not paid out, and more than moving all rows takes is not claimed."""
    asked = {(0, 0): {(1, 0): 3.0, (2, 0): -1.0}, (0, 1): {(1, 0): 1.0}, (1, 0): {(3, 0): 8.0, (-1, 1): -8.0}}
    found = SharePrices.within_reason(asked, {0: 1.5}, {}, lambda value: 4.0)
    assert found.of[0][0].ops == {(1, 0): 2.5, (2, 0): -1.0}
    assert (found.of[0][0].held, found.of[0][0].claimed) == (1.5, 2.5)
    assert found.of[0][1].held == 1.0
    assert found.of[1][0].ops == {(3, 0): 4.0, (-1, 1): -4.0}
    assert all(p.held == pytest.approx(sum(p.ops.values())) for dims in found.of.values() for p in dims.values())


def test_prices_of_the_linear_program_raise_the_bound() -> None:
    """At every price of memory, in ranges that are not divided."""
    graph, devices = short_of_memory(width=1024, rows=4096), cluster([3.0, 1.0], bandwidth=3e10)
    costs = CostModel(graph, devices, FactorTable(graph), room=MemoryBudget((1e12, 1e12), exact=False))
    ranges = ShareRanges(costs, {})
    plain = RangeBuilder(RangeChoices(costs, ranges.count, sparing=True), costs, ranges)
    memory = MemoryConstraints(plain, at_least=True)
    op = max(range(len(graph.ops)), key=memory.least_at)
    free = solve(memory.problem({}))
    assert free.assignment is not None
    counted = memory.problem({op: 0.0})
    limit = 0.75 * float(counted.usage(memory.extended(counted, free.assignment))[0])
    curves = ShareCurves(costs)
    gained: list[float] = []
    for share in (0.1, 0.3, 1.0):
        per_byte = [share * free.cost / limit]
        found = solve(memory.priced({op: limit}, per_byte))
        assert found.assignment is not None
        tied = SharePriceLP(plain, found.assignment, {op: limit}, curves, lambda value, dim: True)
        prices = tied.prices(per_byte)
        assert prices is not None
        here = MemoryConstraints(priced(ranges, prices, sparing=True), at_least=True)
        bound = solve(here.priced({op: limit}, per_byte)).lower_bound
        gained.append((bound - found.lower_bound) / free.cost)
    assert min(gained) > -1e-6
    assert max(gained) > 0.02


def test_a_gap_is_brought_down_where_memory_is_short() -> None:
    graph, devices = trace(deep, ARGS).graph, new_and_old("20 GB/s")
    limit = 0.7 * max(Planner(Task(graph, devices)).run().memory_bytes)
    plain = Planner(Task(graph, devices, PlanningOptions(memory_limit=limit))).run()
    closer = Planner(Task(graph, devices, PlanningOptions(memory_limit=limit, joint_gap=0.6))).run()
    assert closer.cost_s == plain.cost_s
    assert closer.joint_gap <= 0.6 < 0.7 < plain.joint_gap


@pytest.mark.parametrize("seed", range(16))
def test_no_choices_cost_more_than_at_ratios_in_their_ranges(seed: int) -> None:
    """Those of all choices at two ratios, with what is held at some op at its price, that cost the least more than the
    same in the ranges that the ratios lie in."""
    graph, rng = random_graph(500 + seed, ops=4).graph, np.random.default_rng(seed)
    devices = new_and_old(["10 MB/s", "100 MB/s", "2 GB/s"][seed % 3])
    costs, held_ones = model(graph, devices), 0
    for _ in range(3):
        two = [np.array([f, f, 1, 1]) / (2 * f + 2) for f in rng.uniform(0.2, 9, 2)]
        ratios = named(costs, *two)
        there = _TwoRatios(ChoicesInWays(costs, lambda value, dim: 2, sparing=True), costs, ratios)
        known = MemoryConstraints(there, at_least=True)
        holding = [op for op in range(len(graph.ops) + 1) if known.held_at(op)]
        op = int(rng.choice(holding))
        free = solve(known.problem({}), tolerance=0.01).cost
        for ranges in (ranges_around(costs, *two), random_ranges(costs, rng), ShareRanges(costs, {})):
            plain = RangeBuilder(RangeChoices(costs, ranges.count, sparing=True), costs, ranges)
            held = MemoryConstraints(plain, at_least=True).held_at(op)
            held_ones += len(held)
            per_byte = [free / sum(v.nbytes for v in graph.values) * 10 ** rng.uniform(-1, 1)]
            stored = {v: per_byte[0] * float(graph.values[v].nbytes) for v in held}
            here = priced(ranges, random_prices(costs, rng, free, stored), sparing=True)
            mine, theirs = (_ByChoice(b, op, held, b is there).priced({op: 0.0}, per_byte) for b in (here, there))
            states = [_states_within(there, plain, ratios, k) for k in range(len(theirs.unary))]
            assert _least_difference(theirs, mine, states) >= -1e-9 * free
    assert held_ones > 0


class _ByChoice(MemoryConstraints):
    """Counts some values at an op alone, each as its smallest tensor. `named`: of those that a choice names, and not of
    those on the way to them: where such a one is held, there is a choice that names it."""

    def __init__(self, builder: ProblemBuilder, op: int, values: list[int], named: bool) -> None:
        super().__init__(builder, at_least=True)
        self._op, self._values, self._named = op, values, named

    def limited(self, limits: Mapping[int, float]) -> Mapping[int, float]:
        return limits

    def _found_at(self, alive: LiveSet, added: int) -> Iterator[tuple[int, Floats, list[Edge]]]:
        assert alive.op == self._op
        st = self.structure
        for value in self._values:
            variable = st.value_variable[value]
            held = self._held(value, False)
            if self._named:
                tensors = ((a.computed, *a.targets) for a in st.choices[variable].options)
                held = np.stack(
                    [np.min([self.tensor_bytes(value, t) for t in some], axis=0) for some in tensors], axis=1
                )
            yield variable, held[:, st.choices[variable].option], []


def _least_difference(more: Problem, less: Problem, states: list[Ints]) -> float:
    """The least that an assignment costs more than another problem's, which takes `states` [states] of each of its
    variables in place of each; -1 where there is none."""
    minus = lambda a, b: np.where(np.isfinite(a), a - np.where(np.isfinite(b), b, 0.0), np.inf)
    unary = [
        np.where(s < 0, np.inf, minus(u, v[np.maximum(s, 0)]))
        for u, v, s in zip(more.unary, less.unary, states, strict=True)
    ]
    edges, offset = list[Edge](), more.offset - less.offset
    for e, f in zip(more.edges, less.edges, strict=True):
        assert (e.u, e.v) == (f.u, f.v)
        at = np.ix_(f.gu[states[e.u]], f.gv[states[e.v]])
        table = minus(e.table[np.ix_(e.gu, e.gv)], f.table[at])
        least = float(table[np.isfinite(table)].min(initial=0.0))
        offset += least
        edges.append(Edge(e.u, e.v, np.arange(e.gu.size), np.arange(e.gv.size), table - least))
    found = solve(Problem(tuple(unary), tuple(edges), (), offset), tolerance=1e-3, max_nodes=5000)
    return found.cost if found.assignment is not None else np.inf


def _states_within(there: ProblemBuilder, here: RangeBuilder, ratios: Ratios, variable: int) -> Ints:
    """Of each state of a variable, its number in the ranges in which its shares lie; -1 where it is none of those that
    are bounded."""
    graph, ranges, a, b = there.graph, here.ranges, there.structure, here.structure

    def moved(value: int, layout: Layout) -> Layout:
        (p,) = layout
        if not p.is_sharded:
            return layout
        return (p._replace(way=way_of(ranges, value, p.dim, ratios.vectors[ratios.of(value, p.dim, (0,), p.way)])),)

    key = lambda triples, option: (triples, None if option is None else (option[0], frozenset(option[1])))
    number = {
        key(s.triples, s.availability and (s.availability.computed, s.availability.targets)): k
        for k, s in enumerate(b.choices[variable].states)
    }
    found: list[int] = []
    for state in a.choices[variable].states:
        triples = option = None
        if state.triples is not None:
            o, (t,) = graph.ops[a.op_variable.index(variable)], state.triples
            tensors = zip((*o.operands, *o.results), (*t.operands, *t.results), strict=True)
            cut = next(((v, p) for v, p in tensors if p.is_sharded and isinstance(v, int)), None)
            triples = (t.along(moved(cut[0], (cut[1],))[0].way if cut else 0),)
        if state.availability is not None:
            value = a.value_variable.index(variable)
            made = moved(value, state.availability.computed)
            # What is made on the way is there too.
            targets = {moved(value, t) for t in there.offer(value, state.availability).tensors} - {made}
            others = {t for t in targets if t[0].is_sharded and t[0].dim != made[0].dim}
            if len({t[0].dim for t in others}) > 1:
                others = {(s,) for s in b.layouts[value].shards if any(s.dim == t[0].dim for t in others)}
            if (R,) in targets:
                # All else is a slice of that.
                targets = others = {(R,)}
            option = made, {t for t in targets if not t[0].is_sharded or t[0].dim == made[0].dim} | others
        found.append(number.get(key(triples, option), -1))
    return np.array(found)
