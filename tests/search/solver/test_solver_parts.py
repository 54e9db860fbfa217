"""The parts of the pairwise solver, each against brute force: reduction, the dual bound, A*, elimination."""

import itertools
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pairwise_problems import TrainingLike, brute_force, knotted_problem, middle_problem, random_problem

from hapsynth.search.solver import Problem, SolverOptions, interning, lagrangian, solve
from hapsynth.search.solver.astar import astar
from hapsynth.search.solver.bucket_elimination import bucket_space, buckets
from hapsynth.search.solver.interning import NONE, InternedTables
from hapsynth.search.solver.local_polytope import relax
from hapsynth.search.solver.primal_dual import SolveContext
from hapsynth.search.solver.reduction import ReducedProblem
from hapsynth.search.solver.search_space import Space, dual_space
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


def test_large_arrays_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interning, "hash", lambda content: 0, raising=False)
    store = InternedTables()
    arrays = [np.full(1000, float(k)) for k in range(3)]
    assert [store.id(a) for a in (*arrays, *arrays)] == [0, 1, 2] * 2
    assert store.nbytes == 3 * 8000


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
    order = [] if network.infeasible else [scope[-1] for scope in reversed(buckets(network).scopes)]
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


@pytest.mark.parametrize("resources", [0, 1])
def test_the_linear_relaxation_is_the_best_that_messages_can_do(resources: int):
    tried = better = 0
    for seed in range(40):
        if (case := reduced(seed, resources)) is None:
            continue
        tried += 1
        _, network, _ = case
        extra = {i: 0.3 * network.usage(i).sum(axis=0) for i in network.active()} if resources else {}
        swept = Dual(network, extra)
        for _ in range(200):
            swept.sweep()
        assert relax(network, extra)
        relaxed = Dual(network, extra)
        assert relaxed.bound >= swept.bound - 1e-9
        better += relaxed.bound > swept.bound + 1e-6
        lowest = relaxed.bound
        for _ in range(20):
            relaxed.sweep()
        assert relaxed.bound == pytest.approx(lowest, abs=1e-9)
        optimum = min(
            reduced_cost(network, dict(zip(network.active(), states, strict=True)))
            + sum(float(extra[i][s]) for i, s in zip(network.active(), states, strict=True) if extra)
            for states in itertools.product(*(range(network.count(i)) for i in network.active()))
        )
        assert lowest <= optimum + 1e-9
    assert tried > 20
    assert better > 2


def test_large_tables_and_stretches_make_no_difference_to_what_a_sweep_may_do():
    tried = 0
    for seed in range(30):
        if (case := reduced(seed)) is None:
            continue
        tried += 1
        problem, network, _ = case
        bounds: list[float] = []
        for large in (10**6, 8, 0):
            network.options = SolverOptions(large_table=large)
            dual = Dual(network, {})
            for _ in range(5):
                dual.sweep()
            bounds.append(dual.bound)
            cost, chosen = dual.decoded()
            if chosen is not None:
                assert cost == pytest.approx(reduced_cost(network, chosen))
                assert cost >= dual.bound - 1e-12
        assert bounds == pytest.approx([bounds[0]] * 3, abs=1e-12)
        for length in (1, 2):
            network.options = SolverOptions(stretch=length)
            assert sorted(stretches(network, network.options)) == network.active()
            dual = Dual(network, {})
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


def swept(network: ReducedProblem, order: list[int], multipliers: np.ndarray, sweeps: int = 1) -> Space:
    """The space of a dual's messages."""
    extra = {i: multipliers @ network.usage(i) for i in order}
    dual = Dual(network, extra, -float(multipliers @ network.limits), order=order)
    for _ in range(sweeps):
        dual.sweep()
    dual.store()
    return dual_space(network, dual, multipliers)


def by_buckets(network: ReducedProblem, multipliers: np.ndarray, most: float = INF) -> Space:
    every = {i: np.arange(network.count(i)) for i in network.active()}
    return bucket_space(network, multipliers, buckets(network), every, most)


def values(space: Space, states: tuple[int, ...]) -> list[float]:
    """f after each choice of a path."""
    f, key, found = space.root, (), list[float]()
    for depth, s in zip(space.depths, states, strict=True):
        step = float(depth.added(key)[s]) if f < INF else INF
        assert step >= -1e-12
        key = depth.frontier.rest(key)
        if depth.frontier.enters is not None:
            key = (*key, depth.frontier.enters[s])
        f += step
        found.append(f)
    return found


def test_the_heuristic_is_admissible_and_consistent():
    """f never falls along an assignment and is exact at its end, so at every node h <= the true cost to go; with an
    elimination's tables it is the least of all assignments that begin so."""
    tried = 0
    for seed in SEEDS:
        if (case := reduced(seed)) is None:
            continue
        _, network, order = case
        if math.prod(network.count(i) for i in order) > 1000:
            continue
        tried += 1
        none = np.zeros(0)
        for space in (swept(network, order, none, seed % 4), by_buckets(network, none, 40), by_buckets(network, none)):
            first = [depth.variable for depth in space.depths]
            least: dict[tuple[int, ...], float] = {}
            paths: dict[tuple[int, ...], list[float]] = {}
            for x in itertools.product(*(range(network.count(i)) for i in first)):
                true = reduced_cost(network, dict(zip(first, x, strict=True)))
                paths[x] = values(space, x)
                assert paths[x][-1] == true == INF or paths[x][-1] == pytest.approx(true, abs=1e-9)
                for k in range(1, len(x) + 1):
                    least[x[:k]] = min(least.get(x[:k], INF), true)
            assert space.root <= min(least.values()) + 1e-9
        assert space.root == pytest.approx(min(least.values()))
        for x, found in paths.items():
            assert found == pytest.approx([least[x[: k + 1]] for k in range(len(x))])
    assert tried > 5


@pytest.mark.parametrize("resources", [0, 1, 2])
def test_astar_agrees_with_brute_force(resources: int):
    """Without the pipeline around it, by either heuristic; multipliers, if any, are arbitrary."""
    never = lambda: False
    for seed in SEEDS:
        if (case := reduced(seed, resources)) is None:
            continue
        problem, network, order = case
        multipliers = np.random.default_rng(seed).random(resources)
        expected = brute_force(problem)
        for space in (swept(network, order, multipliers), *(by_buckets(network, multipliers, n) for n in (1, 40, INF))):
            for slack in (0.0, 0.5):
                found = astar(space, INF, 10**6, never, slack)
                assert found.lower_bound <= expected + 1e-9
                assert astar(space, INF, 3, never, slack).lower_bound <= expected + 1e-9
                full = astar(space, INF, 10**6, never, slack, most_kept=3)
                assert full.lower_bound <= expected + 1e-9
                assert full.expanded <= len(space.depths)
                if expected == INF:
                    assert found.chosen is None
                    assert found.lower_bound == INF
                    continue
                assert found.chosen is not None
                cost = problem.cost(network.lift(found.chosen))
                assert expected - 1e-9 <= cost <= min(expected, found.lower_bound) + slack + 1e-9
            assert expected == INF or astar(space, expected * (1 - 1e-9), 10**6, never).chosen is None


def test_where_the_heuristic_is_exact_a_node_per_variable_is_expanded():
    """All the work is in the tables; within a slack an almost exact one does as well."""
    tried = 0
    for seed in SEEDS:
        if (case := reduced(seed)) is None or (expected := brute_force(case[0])) == INF:
            continue
        problem, network, order = case
        found = astar(by_buckets(network, np.zeros(0)), INF, 10**6, lambda: False)
        assert found.expanded == len(order)
        assert problem.cost(network.lift(found.chosen or {})) == pytest.approx(expected)
        near = swept(network, order, np.zeros(0), 20)
        strict, wide = (astar(near, INF, 10**6, lambda: False, slack) for slack in (0.0, 10 * abs(expected)))
        assert len(order) <= wide.expanded <= strict.expanded
        # Where no pair is forbidden no choice leads nowhere.
        assert wide.expanded == len(order) or seed % 3
        tried += strict.expanded > len(order)
    assert tried > 6


@pytest.mark.parametrize("resources", [0, 1, 2])
def test_elimination_finds_the_least_among_the_likely_states(resources: int):
    """Under any multipliers, against all of them tried: the root is what is least, limits kept or not."""
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
        space = bucket_space(network, multipliers, buckets(network), likely)
        charged, within = [INF], [INF]
        for states in itertools.product(*likely.values()):
            full = network.lift(dict(zip(likely, map(int, states), strict=True)))
            charge = multipliers @ (problem.usage(full) - np.array([r.limit for r in problem.resources]))
            charged.append(problem.cost(full) + float(charge))
            within.append(problem.cost(full) if problem.fits(full) else INF)
        tried += len(charged) > 2
        assert space.root == pytest.approx(min(charged), rel=1e-6)
        chosen = astar(space, INF, 10**6, lambda: False).chosen
        assert (chosen is None) == (min(within) == INF)
        if chosen is not None:
            assert problem.cost(network.lift(chosen)) == pytest.approx(min(within), rel=1e-6)
            assert all(s in likely[i] for i, s in chosen.items())
    assert tried > 12


def test_patches_take_no_longer_than_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each knapsack of a round of prices has what is left, and none is begun after that."""
    given: list[float] = []
    now, whole = [0.0], lagrangian.milp

    def milp(*args: Any, options: dict[str, float], **named: Any) -> Any:
        given.append(options.get("time_limit", INF))
        now[0] += 3.0
        return whole(*args, options=options, **named)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(lagrangian, "milp", milp)
    problem = middle_problem(2, True)
    for budget, limits in ((None, [INF] * 3), (7.0, [7.0, 4.0, 1.0])):
        given.clear()
        now[0] = 0.0
        solve(problem, time_budget_s=budget)
        assert given[:3] == limits
        assert budget is None or len(given) == 3


def test_none_of_the_assignments_seen_are_mixed_where_none_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no assignments all were taken."""
    mixed: list[Any] = []
    monkeypatch.setattr(lagrangian, "_mix", lambda *args: mixed.append(args))
    monkeypatch.setattr(lagrangian, "patched", lambda _, one, other, *__: mixed.append(other) or one)
    problem = middle_problem(2, True)
    rounds = SolverOptions(price_rounds=4)
    solve(problem, options=rounds)
    assert len(mixed) > 4
    mixed.clear()
    solve(problem, options=replace(rounds, mixed=0))
    # The best one alone.
    assert len(mixed) <= 4


def test_a_time_budget_counts_by_the_clock_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks/bench_devices.py --clock cpu` counts CPU seconds; budgets never ended where the clock was taken hold
    of at import."""
    now = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    problem = random_problem(0)
    run = SolveContext(problem, 0.0, np.inf, -np.inf, 2.0, None, 1, 1, {}, from_quotient=False, options=SolverOptions())
    assert not run.late()
    now[0] = 7.0
    assert run.late()
