"""The pairwise solver against brute force and a MILP, and where it is cut off."""

import heapq
import itertools
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from milp import optimum
from pairwise_problems import TrainingLike, brute_force, grid, knotted_problem, middle_problem, random_problem
from thoroughness import THOROUGH

from hapsynth.search.solver import Edge, Messages, Problem, Solution, SolverOptions, SolverProgress, astar, solve
from hapsynth.search.solver.bucket_elimination import buckets
from hapsynth.search.solver.reduction import ReducedProblem

INF = np.inf
SEEDS = range(36 if THOROUGH else 12)


def assert_solved(problem: Problem, solution: Solution, expected: float, slack: float = 1e-8) -> None:
    assert solution.status == ("infeasible" if expected == INF else "optimal")
    assert solution.lower_bound <= expected + 1e-13 * abs(expected)
    if expected == INF:
        assert solution.assignment is None
        return
    assert solution.cost == pytest.approx(expected, rel=slack, abs=1e-9)
    assert solution.assignment is not None
    assert problem.cost(solution.assignment) == solution.cost
    assert problem.fits(solution.assignment)


@pytest.mark.few(6)
@pytest.mark.parametrize("cells", [SolverOptions.elimination_cells, 60, 0], ids=["eliminated", "in part", "searched"])
@pytest.mark.parametrize("resources", [0, 1, 2])
def test_equals_brute_force(resources: int, cells: float):
    options = SolverOptions(elimination_cells=cells, loose=0.0)
    searched = 0
    for seed in SEEDS:
        for problem in (random_problem(seed, resources=resources), knotted_problem(seed, resources)):
            solution = solve(problem, tolerance=1e-9, options=options)
            assert_solved(problem, solution, brute_force(problem))
            searched += solution.expanded > 0
    assert searched > len(SEEDS) // 3 or cells


@settings(max_examples=60)
@given(st.data())
def test_equals_brute_force_on_drawn_problems(data: st.DataObject):
    cost = st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.5, 1e-6, 0.1, INF])
    draw = data.draw
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))

    def costs(count: int):
        return np.array(draw(st.lists(cost, min_size=count, max_size=count)))

    def groups(size: int, count: int):
        return np.array(draw(st.lists(st.integers(0, count - 1), min_size=size, max_size=size)))

    edges: list[Edge] = []
    pairs = list(itertools.permutations(range(len(sizes)), 2))
    for u, v in draw(st.lists(st.sampled_from(pairs), max_size=8)) if pairs else []:
        g, h = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        table = costs(g * h).reshape(g, h)
        edges.append(Edge(u, v, groups(sizes[u], g), groups(sizes[v], h), table))
    problem = Problem(tuple(costs(s) for s in sizes), tuple(edges))
    assert_solved(problem, solve(problem, tolerance=1e-9), brute_force(problem))


def test_nothing_to_choose():
    assert solve(Problem((), (), offset=2.0)).cost == 2.0
    alone = Problem((np.array([2.0, 1.0, 1.0]),), ())
    assert solve(alone).assignment.tolist() == [1]


def test_starts_are_never_made_worse_and_infeasible_ones_do_no_harm():
    for seed in SEEDS:
        problem = knotted_problem(seed, resources=seed % 3)
        rng = np.random.default_rng(seed)
        starts = [np.array([rng.integers(row.size) for row in problem.unary]) for _ in range(3)]
        assert_solved(problem, solve(problem, start=starts, tolerance=1e-9), brute_force(problem))
        feasible = [problem.cost(x) for x in starts if problem.fits(x)]
        cut = solve(problem, start=starts, time_budget_s=0.0, max_nodes=0)
        assert cut.cost <= min(feasible, default=INF)


def test_a_graph_too_wide_to_eliminate_is_searched():
    """Twelve variables that all depend on each other: their table would have 4^12 entries, more than there is room."""
    draw = np.random.default_rng(0)
    each, count = np.arange(4), 12
    pairs = itertools.combinations(range(count), 2)
    edges = tuple(Edge(i, j, each, each, draw.random((4, 4))) for i, j in pairs)
    problem = Problem(tuple(draw.random(4) for _ in range(count)), edges)
    network = ReducedProblem(problem)
    assert buckets(network).cells(network.count) == sum(4.0**k for k in range(1, count + 1))
    small = solve(problem, memory_bytes=2**24)
    assert small.expanded > 0
    assert small.cost == solve(problem).cost


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_milp_on_middle_graphs(seed: int, limited: bool):
    problem = middle_problem(seed, limited)
    assert_solved(problem, solve(problem, tolerance=1e-7), optimum(problem).cost, slack=1e-6)


def test_a_training_like_graph_of_600_variables_is_solved_to_optimality():
    problem = TrainingLike(layers=60).problem()
    assert 580 <= len(problem.unary) <= 680
    seen: list[SolverProgress] = []
    solution = solve(problem, progress=seen.append)
    assert solution.status == "optimal"
    assert solution.assignment is not None
    assert problem.cost(solution.assignment) == solution.cost
    bounds = [p.lower_bound for p in seen]
    assert bounds == sorted(bounds)
    again = solve(problem)
    assert again.assignment.tobytes() == solution.assignment.tobytes()
    assert (again.cost, again.lower_bound, again.expanded, again.sweeps) == (
        solution.cost, solution.lower_bound, solution.expanded, solution.sweeps,
    )  # fmt: skip


@pytest.mark.parametrize("resources", [0, 1])
def test_from_whatever_messages_it_begins_the_optimum_is_the_same(resources: int):
    options = SolverOptions(joined_entries=4)
    taken = 0
    for seed in SEEDS:
        problem = knotted_problem(seed, resources)
        draw = np.random.default_rng(seed)
        sizes = [row.size for row in problem.unary]
        messages: Messages = {}
        for i, j in itertools.permutations(range(len(sizes)), 2):
            drawn = draw.normal(scale=5.0, size=sizes[i] + (draw.random() < 0.1))
            messages[i, j] = np.where(draw.random(drawn.size) < 0.3, np.nan, drawn)
        solution = solve(problem, tolerance=1e-9, messages=messages, options=options)
        assert_solved(problem, solution, brute_force(problem))
        taken += any(solution.messages[key] is not given for key, given in messages.items())
    assert taken > len(SEEDS) // 3


def test_a_search_that_begins_from_a_similar_ones_messages_needs_fewer_sweeps():
    problem = TrainingLike(layers=60).problem()
    messages = solve(problem, messages={}).messages
    assert messages
    draw = np.random.default_rng(0)
    similar = replace(problem, unary=tuple(row * draw.uniform(0.99, 1.01, row.size) for row in problem.unary))
    cold, warm = solve(similar), solve(similar, messages=messages)
    assert warm.status == "optimal"
    assert warm.cost == pytest.approx(cold.cost, rel=2e-6)
    assert warm.sweeps < cold.sweeps


def test_out_of_nodes_it_returns_the_best_so_far_and_a_valid_bound():
    problem = grid()
    exact = solve(problem)
    assert exact.status == "optimal"
    cut = solve(problem, max_nodes=100)
    assert cut.lower_bound <= exact.cost <= cut.cost < INF
    late = solve(problem, time_budget_s=0.0, start=np.zeros(64, dtype=int))
    assert late.status == "gap"
    assert late.lower_bound <= exact.cost <= late.cost <= problem.cost(np.zeros(64, dtype=int))


def test_out_of_memory_it_returns_the_best_so_far_and_a_valid_bound():
    problem = grid()
    exact = solve(problem)
    assert exact.status == "optimal"
    for memory in (1000, 20_000, 100_000):
        cut = solve(problem, memory_bytes=memory)
        assert cut.status == "gap" or cut.cost == pytest.approx(exact.cost)
        assert cut.lower_bound <= exact.cost <= cut.cost < INF
    assert solve(problem, memory_bytes=1000).status == "gap"


def test_a_search_keeps_no_more_nodes_than_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is expanded adds others: there were three times as many."""
    kept: list[int] = []

    def push(heap: list[Any], entry: Any) -> None:
        kept.append(entry[-1])
        heapq.heappush(heap, entry)

    monkeypatch.setattr(astar, "heapq", SimpleNamespace(heappush=push, heappop=heapq.heappop))
    assert solve(grid(), memory_bytes=10**6).status == "gap"
    assert 490 < max(kept) < 510


def test_tables_take_no_more_memory_than_they_may() -> None:
    """Each pair of these variables has 160,000 pairs of states, and nothing is reduced: 19 MB for them all."""
    draw, count = np.random.default_rng(0), 6
    group = lambda: draw.integers(0, 40, 400)
    edges = [Edge(i, j, group(), group(), draw.random((40, 40))) for i, j in itertools.combinations(range(count), 2)]
    problem = Problem(tuple(np.zeros(400) for _ in range(count)), tuple(edges))
    tracemalloc.start()
    try:
        cut = solve(problem, memory_bytes=2**21, max_nodes=100)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**24
    assert cut.status == "gap"
    assert 0 < cut.lower_bound < cut.cost < INF


def test_ctrl_c_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch):
    problem, start = grid(), np.zeros(64, dtype=int)
    exact = solve(problem)
    options = SolverOptions(elimination_cells=0)
    for stop in (1, 3):
        seen: list[SolverProgress] = []

        def interrupted(progress: SolverProgress, stop: int = stop, seen: list[SolverProgress] = seen) -> None:
            seen.append(progress)
            if len(seen) == stop:
                raise KeyboardInterrupt

        cut = solve(problem, start=start, progress=interrupted, options=options)
        assert len(seen) == stop
        assert cut.interrupted
        assert not exact.interrupted
        assert cut.status == "gap"
        assert cut.lower_bound <= exact.cost <= cut.cost == seen[-1].cost <= problem.cost(start)
        assert seen[-1].lower_bound == pytest.approx(cut.lower_bound)

    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ReducedProblem, "reduce", pressed)
    assert solve(problem, start=start).cost == problem.cost(start)
    with pytest.raises(KeyboardInterrupt):
        solve(problem)


def test_what_costs_little_enough_ends_a_search() -> None:
    """With a bound that holds all the same; where nothing costs so little it goes on to the optimum."""
    early = 0
    for seed in SEEDS:
        problem = knotted_problem(seed)
        least = brute_force(problem)
        if least == INF:
            continue
        assert_solved(problem, solve(problem, tolerance=1e-9, beneath=least - 1e-3), least)
        found = solve(problem, tolerance=1e-9, beneath=1.5 * least)
        assert problem.cost(found.assignment) == found.cost <= 1.5 * least
        assert found.lower_bound <= least + 1e-13 * abs(least)
        early += found.status == "gap"
    assert early
