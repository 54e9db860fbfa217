"""The pairwise solver against brute force, a MILP, and its own lemmas."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from milp import optimum
from pairwise_problems import TrainingLike, brute_force, grid, knotted_problem, middle_problem, random_problem

from hapsynth.search import _hunt, _reduce, _trws
from hapsynth.search._astar import astar
from hapsynth.search._eliminate import buckets, eliminate
from hapsynth.search._layers import layered
from hapsynth.search._order import search_order
from hapsynth.search._reduce import Network
from hapsynth.search._space import build_space
from hapsynth.search._tables import NONE, Tables
from hapsynth.search._trws import Dual, stretches
from hapsynth.search.problem import Edge, Messages, Problem, Progress, Solution, solve

INF = np.inf
SEEDS = range(36)


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


@pytest.mark.parametrize("cells", [_hunt._CELLS, 60, 0], ids=["eliminated", "in part", "searched"])
@pytest.mark.parametrize("resources", [0, 1, 2])
def test_equals_brute_force(resources: int, cells: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_hunt, "_CELLS", cells)
    searched = 0
    for seed in SEEDS:
        for problem in (random_problem(seed, resources=resources), knotted_problem(seed, resources)):
            solution = solve(problem, tolerance=1e-9)
            assert_solved(problem, solution, brute_force(problem))
            searched += solution.expanded > 0
    assert searched > 12 or cells


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


@pytest.mark.parametrize("rivals", [128, 2])
def test_the_reduced_problem_has_the_same_optimum_and_lifts_to_it(rivals: int, monkeypatch: pytest.MonkeyPatch):
    """rivals: also fewer than states, so that not all are tried."""
    monkeypatch.setattr(_reduce, "_RIVALS", rivals)
    left_over = 0
    for seed in range(150):
        problem = random_problem(seed, seed % 3) if seed < 100 else knotted_problem(seed, seed % 3)
        expected = brute_force(problem)
        network = Network(problem)
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
        store = Tables()
        sides = tuple((store.id(g), store.id(t)) for g, t in zip(groups, tables, strict=True))
        mask = store.undominated(store.id(unary), sides, store.id(usage), 128)
        keep = np.ones(n, dtype=bool) if mask == NONE else store.arrays[mask]
        cost = unary[:, None, None] + tables[0][groups[0]][:, :, None] + tables[1][groups[1]][:, None, :]
        for s in np.flatnonzero(~keep):
            dropped += 1
            assert any((cost[t] <= cost[s]).all() and usage[0, t] <= usage[0, s] for t in np.flatnonzero(keep))
    assert dropped > 300


def test_identical_layers_are_worked_on_once():
    few, many = Network(TrainingLike(layers=12).problem()), Network(TrainingLike(layers=48).problem())
    few.reduce()
    many.reduce()
    assert len(many.active()) > 3 * len(few.active()) > 0
    assert len(many.tables.arrays) < 1.1 * len(few.tables.arrays)


def reduced_cost(network: Network, chosen: dict[int, int]) -> float:
    cost = network.offset + sum(float(network.unary(i)[s]) for i, s in chosen.items())
    for i in chosen:
        for j in network.links[i]:
            if i < j:
                own, table, other = network.seen_from(i, j)
                cost += float(table[own[chosen[i]], other[chosen[j]]])
    return cost


def reduced(seed: int, resources: int = 0) -> tuple[Problem, Network, list[int]] | None:
    problem = knotted_problem(seed, resources)
    network = Network(problem)
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


def test_large_tables_and_stretches_make_no_difference_to_what_a_sweep_may_do(monkeypatch: pytest.MonkeyPatch):
    tried = 0
    for seed in range(30):
        if (case := reduced(seed)) is None:
            continue
        tried += 1
        problem, network, _ = case
        bounds: list[float] = []
        for large in (10**6, 8, 0):
            monkeypatch.setattr(_trws, "_LARGE", large)
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
            monkeypatch.setattr(_trws, "_STRETCH", length)
            assert sorted(stretches(network)) == network.active()
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
        network = Network(problem)
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
            layered(space, INF, 10**6, lambda: False),
        ):
            assert found.lower_bound == pytest.approx(expected)
            if expected < INF:
                assert found.chosen is not None
                assert problem.cost(network.lift(found.chosen)) == pytest.approx(expected)
        for found in (astar(space, INF, 3, lambda: False), layered(space, INF, 2, lambda: False)):
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


def test_a_graph_too_wide_to_eliminate_is_searched():
    """Twelve variables that all depend on each other: their table would have 4^12 entries, more than there is room."""
    draw = np.random.default_rng(0)
    each, count = np.arange(4), 12
    pairs = itertools.combinations(range(count), 2)
    edges = tuple(Edge(i, j, each, each, draw.random((4, 4))) for i, j in pairs)
    problem = Problem(tuple(draw.random(4) for _ in range(count)), edges)
    network = Network(problem)
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
    seen: list[Progress] = []
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
def test_from_whatever_messages_it_begins_the_optimum_is_the_same(resources: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_reduce, "_TABLE_LIMIT", 4)
    taken = 0
    for seed in SEEDS:
        problem = knotted_problem(seed, resources)
        draw = np.random.default_rng(seed)
        sizes = [row.size for row in problem.unary]
        messages: Messages = {}
        for i, j in itertools.permutations(range(len(sizes)), 2):
            drawn = draw.normal(scale=5.0, size=sizes[i] + (draw.random() < 0.1))
            messages[i, j] = np.where(draw.random(drawn.size) < 0.3, np.nan, drawn)
        before = dict(messages)
        assert_solved(problem, solve(problem, tolerance=1e-9, messages=messages), brute_force(problem))
        taken += any(messages[key] is not before[key] for key in before)
    assert taken > 12


def test_a_search_that_begins_from_a_similar_ones_messages_needs_fewer_sweeps():
    problem = TrainingLike(layers=60).problem()
    messages: Messages = {}
    solve(problem, messages=messages)
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


def test_out_of_memory_it_returns_the_best_so_far_and_a_valid_bound(monkeypatch: pytest.MonkeyPatch):
    problem = grid()
    exact = solve(problem)
    assert exact.status == "optimal"
    for states in (30, 3):  # with 3 the search is tried among the best states alone
        monkeypatch.setattr(_hunt, "_THIN", states)
        for memory in (1000, 20_000, 100_000):
            cut = solve(problem, memory_bytes=memory)
            assert cut.status == "gap" or cut.cost == pytest.approx(exact.cost)
            assert cut.lower_bound <= exact.cost <= cut.cost < INF
    assert solve(problem, memory_bytes=1000).status == "gap"


def test_ctrl_c_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch):
    problem, start = grid(), np.zeros(64, dtype=int)
    exact = solve(problem)
    monkeypatch.setattr(_hunt, "_CELLS", 0)
    for stop in (1, 3):
        seen: list[Progress] = []

        def interrupted(progress: Progress, stop: int = stop, seen: list[Progress] = seen) -> None:
            seen.append(progress)
            if len(seen) == stop:
                raise KeyboardInterrupt

        cut = solve(problem, start=start, progress=interrupted)
        assert len(seen) == stop
        assert cut.interrupted
        assert not exact.interrupted
        assert cut.status == "gap"
        assert cut.lower_bound <= exact.cost <= cut.cost == seen[-1].cost <= problem.cost(start)
        assert seen[-1].gap == pytest.approx((cut.cost - cut.lower_bound) / cut.cost)

    def pressed(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Network, "reduce", pressed)
    assert solve(problem, start=start).cost == problem.cost(start)
    with pytest.raises(KeyboardInterrupt):
        solve(problem)


_DIGEST = """
import hashlib
from hapsynth.search.problem import solve
from pairwise_problems import TrainingLike, grid, knotted_problem, middle_problem
for problem in (TrainingLike(20).problem(), grid(6), knotted_problem(1, 1), middle_problem(2, True)):
    s = solve(problem)
    print(hashlib.sha256(s.assignment.tobytes()).hexdigest(), s.cost.hex(), s.lower_bound.hex(), s.expanded, s.sweeps)
"""


def test_the_hash_seed_changes_nothing():
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    found = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1")
    }  # fmt: skip
    assert len(found) == 1
    assert len(found.pop().split()) == 20
