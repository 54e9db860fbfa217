"""The parts of the pairwise solver, each against brute force: reduction, the dual bound, A*, layers, elimination."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from pairwise_problems import TrainingLike, brute_force, knotted_problem, random_problem

from hapsynth.search.solver import Problem, SolverOptions
from hapsynth.search.solver.astar import astar
from hapsynth.search.solver.beam_search import beam_search
from hapsynth.search.solver.branch_and_bound import SolveContext
from hapsynth.search.solver.bucket_elimination import buckets, eliminate
from hapsynth.search.solver.interning import NONE, InternedTables
from hapsynth.search.solver.reduction import ReducedProblem
from hapsynth.search.solver.search_space import build_space, search_order
from hapsynth.search.solver.trws import Dual, stretches

INF = np.inf
SEEDS = range(36)


@pytest.mark.parametrize("rivals", [128, 2])
def test_the_reduced_problem_has_the_same_optimum_and_lifts_to_it(rivals: int):
    """rivals: also fewer than states, so that not all are tried."""
    left_over = 0
    for seed in range(150):
        problem = random_problem(seed, seed % 3) if seed < 100 else knotted_problem(seed, seed % 3)
        expected = brute_force(problem)
        network = ReducedProblem(problem, options=SolverOptions(rivals=rivals))
        network.reduce()
        if network.infeasible:
            assert expected == INF
            continue
        left = network.active()
        left_over += len(left)
        best = INF
        if np.prod([network.count(i) for i in left]) > 600:
            continue
        for x in itertools.product(*(range(network.count(i)) for i in left)):
            full = network.lift(dict(zip(left, x, strict=True)))
            assert reduced_cost(network, dict(zip(left, x, strict=True))) == pytest.approx(problem.cost(full))
            if problem.fits(full):
                best = min(best, problem.cost(full))
        assert best == pytest.approx(expected)
    assert left_over > 100


@pytest.mark.parametrize("looks", [0, 1, 5])
def test_a_reduction_that_is_cut_short_leaves_an_equal_problem(looks: int) -> None:
    cut_short = 0
    for seed in range(40):
        problem = random_problem(seed, seed % 3)
        network, seen = ReducedProblem(problem), itertools.count()
        network.reduce(lambda seen=seen: next(seen) >= looks)
        if network.infeasible:
            assert brute_force(problem) == INF
            continue
        left, best = network.active(), INF
        cut_short += next(seen) > looks
        for x in itertools.product(*(range(network.count(i)) for i in left)):
            full = network.lift(dict(zip(left, x, strict=True)))
            best = min(best, problem.cost(full) if problem.fits(full) else INF)
        assert best == pytest.approx(brute_force(problem))
    assert cut_short > 10


def test_a_state_is_dropped_only_for_one_that_is_never_dearer():
    """Of a variable with usage, for every choice of its neighbours, against all states kept."""
    dropped = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 9))
        unary, usage = rng.integers(0, 4, n).astype(float), rng.integers(0, 2, (1, n)).astype(float)
        tables = [rng.integers(0, 4, (3, 2)).astype(float) for _ in range(2)]
        for table in tables:  # in normal form: each row's least is 0
            table -= table.min(axis=1, keepdims=True)
            table[rng.random((3, 2)) < 0.2] = INF
            table[np.arange(3), rng.integers(0, 2, 3)] = 0.0
        groups = [rng.integers(0, 3, n) for _ in tables]
        store = InternedTables()
        sides = tuple((store.id(g), store.id(t)) for g, t in zip(groups, tables, strict=True))
        mask = store.undominated(store.id(unary), sides, store.id(usage), 128)
        keep = np.ones(n, dtype=bool) if mask == NONE else store.arrays[mask]
        cost = unary[:, None, None] + tables[0][groups[0]][:, :, None] + tables[1][groups[1]][:, None, :]
        for s in np.flatnonzero(~keep):
            dropped += 1
            assert any((cost[t] <= cost[s]).all() and usage[0, t] <= usage[0, s] for t in np.flatnonzero(keep))
    assert dropped > 300


def test_identical_layers_are_worked_on_once():
    few, many = ReducedProblem(TrainingLike(layers=12).problem()), ReducedProblem(TrainingLike(layers=48).problem())
    few.reduce()
    many.reduce()
    assert len(many.active()) > 3 * len(few.active()) > 0
    assert len(many.tables.arrays) < 1.1 * len(few.tables.arrays)


def reduced_cost(network: ReducedProblem, chosen: dict[int, int]) -> float:
    cost = network.offset + sum(float(network.unary(i)[s]) for i, s in chosen.items())
    for i in chosen:
        for j in network.links[i]:
            if i < j:
                own, table, other = network.seen_from(i, j)
                cost += float(table[own[chosen[i]], other[chosen[j]]])
    return cost


def reduced(seed: int, resources: int = 0) -> tuple[Problem, ReducedProblem, list[int]] | None:
    problem = knotted_problem(seed, resources)
    network = ReducedProblem(problem)
    network.reduce()
    order = [] if network.infeasible else search_order(network)
    return (problem, network, order) if order else None


def fixed(problem: Problem, i: int, state: int) -> Problem:
    rows = list(problem.unary)
    rows[i] = np.where(np.arange(rows[i].size) == state, rows[i], INF)
    return replace(problem, unary=tuple(rows))


def test_the_dual_bound_rises_below_the_optimum_and_no_floor_is_above_its_state():
    tried = 0
    for seed in range(40):
        if (case := reduced(seed)) is None:
            continue
        tried += 1
        problem, network, order = case
        optimum, last = brute_force(problem), -INF
        for _ in range(2):  # the second time from the messages that the first left in the network
            dual = Dual(network, {}, order=order)
            for _ in range(10):
                assert last - 1e-12 <= dual.sweep() <= optimum + 1e-12
                last = dual.bound
            dual.store()
        for i, floor in dual.floors().items():
            for s, bound in zip(network.states(i), floor, strict=True):
                assert bound <= brute_force(fixed(problem, i, int(s))) + 1e-12
    assert tried > 20


def test_large_tables_and_stretches_make_no_difference_to_what_a_sweep_may_do():
    tried = 0
    for seed in range(30):
        if (case := reduced(seed)) is None:
            continue
        tried += 1
        problem, network, _ = case
        bounds: list[float] = []
        for large in (10**6, 8, 0):
            dual = Dual(network, {}, options=SolverOptions(large_table=large))
            for _ in range(5):
                dual.sweep()
            bounds.append(dual.bound)
            cost, chosen = dual.decoded()
            if chosen is not None:
                assert cost == pytest.approx(reduced_cost(network, chosen))
                assert cost >= dual.bound - 1e-12
        assert bounds == pytest.approx([bounds[0]] * 3, abs=1e-12)
        for length in (1, 2):
            options = SolverOptions(stretch=length)
            assert sorted(stretches(network, options)) == network.active()
            dual = Dual(network, {}, options=options)
            last = dual.bound
            for _ in range(5):
                assert last - 1e-12 <= dual.sweep() <= brute_force(problem) + 1e-12
                last = dual.bound
    assert tried > 15


def test_no_floor_is_above_its_state_where_costs_are_negative():
    """As they are, less what messages hold, in a network reduced after a first dual: no node's least cost is 0 then."""
    tried = 0
    for seed in range(40):
        problem = knotted_problem(seed)
        rng = np.random.default_rng(seed)
        problem = replace(problem, unary=tuple(row - float(rng.integers(0, 9)) for row in problem.unary))
        network = ReducedProblem(problem)
        network.reduce()
        if network.infeasible or not network.active():
            continue
        tried += 1
        dual = Dual(network, {})
        assert dual.bound <= brute_force(problem) + 1e-12
        dual.sweep()
        for i, floor in dual.floors().items():
            for s, bound in zip(network.states(i), floor, strict=True):
                assert bound <= brute_force(fixed(problem, i, int(s))) + 1e-12
    assert tried > 20


def test_the_heuristic_is_admissible_and_consistent():
    """f never falls along an assignment and is exact at its end, so at every node h <= the true cost to go."""
    tried = 0
    for seed in range(40):
        if (case := reduced(seed)) is None:
            continue
        tried += 1
        _, network, order = case
        dual = Dual(network, {}, order=order)
        for _ in range(seed % 4):
            dual.sweep()
        dual.store()
        space = build_space(network, order, np.zeros(0))
        for x in itertools.product(*(range(network.unary(i).size) for i in order)):
            f, key = space.root, []
            for stage, s in zip(space.stages, x, strict=True):
                step = stage.base[s] + sum(t.cost[t.group_of_class[key[t.slot]], s] for t in stage.touches)
                assert step >= -1e-12
                for t in stage.touches:
                    key[t.slot] = None if t.next_class is None else t.next_class[key[t.slot]]
                key = [key[slot] for slot in stage.kept] + ([stage.state_class[s]] if stage.classes else [])
                f += step
            true = reduced_cost(network, dict(zip(order, x, strict=True)))
            assert f == true == INF or f == pytest.approx(true, abs=1e-9)
    assert tried > 20


@pytest.mark.parametrize("resources", [0, 1, 2])
def test_astar_and_layers_agree_with_brute_force(resources: int):
    """Without the pipeline around them; multipliers, if any, are arbitrary."""
    for seed in SEEDS:
        if (case := reduced(seed, resources)) is None:
            continue
        problem, network, order = case
        multipliers = np.random.default_rng(seed).random(resources)
        space = build_space(network, order, multipliers)
        expected = brute_force(problem)
        for found in (
            astar(space, INF, 10**6, lambda: False),
            beam_search(space, INF, 10**6, lambda: False),
        ):
            assert found.lower_bound == pytest.approx(expected)
            if expected < INF:
                assert found.chosen is not None
                assert problem.cost(network.lift(found.chosen)) == pytest.approx(expected)
        for found in (astar(space, INF, 3, lambda: False), beam_search(space, INF, 2, lambda: False)):
            assert found.lower_bound <= expected + 1e-9


@pytest.mark.parametrize("resources", [0, 1, 2])
def test_elimination_finds_the_least_among_the_likely_states(resources: int):
    """Under any multipliers, against all of them tried."""
    tried = 0
    for seed in SEEDS:
        if (case := reduced(seed, resources)) is None:
            continue
        problem, network, _ = case
        draw = np.random.default_rng(seed)
        multipliers = draw.random(resources)
        likely = {}
        for i in network.active():
            every = np.arange(network.count(i))
            likely[i] = np.sort(draw.choice(every, int(draw.integers(1, every.size + 1)), replace=False))
        least, chosen = eliminate(network, multipliers, buckets(network), likely)
        values = []
        for states in itertools.product(*likely.values()):
            full = network.lift(dict(zip(likely, map(int, states), strict=True)))
            charge = multipliers @ (problem.usage(full) - np.array([r.limit for r in problem.resources]))
            values.append(problem.cost(full) + float(charge))
        tried += len(values) > 1
        assert least == pytest.approx(min(values), rel=1e-6)
        if least < INF:
            full = network.lift(chosen)
            charge = multipliers @ (problem.usage(full) - np.array([r.limit for r in problem.resources]))
            assert problem.cost(full) + float(charge) == pytest.approx(least, rel=1e-6)
            assert all(s in likely[i] for i, s in chosen.items())
    assert tried > 12


def test_a_time_budget_counts_by_the_clock_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks/bench_devices.py --clock cpu` counts CPU seconds; budgets never ended where the clock was taken hold
    of at import."""
    now = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    problem = random_problem(0)
    run = SolveContext(problem, 0.0, np.inf, 2.0, None, 1, 1, {}, tie=False, options=SolverOptions())
    assert not run.late()
    now[0] = 7.0
    assert run.late()
