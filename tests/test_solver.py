"""The pairwise solver against brute force, a MILP, and its own lemmas."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from milp import milp_bounds

from hapsynth.search._astar import astar
from hapsynth.search._layers import layered
from hapsynth.search._order import search_order
from hapsynth.search._reduce import Network
from hapsynth.search._space import build_space
from hapsynth.search._trws import Dual
from hapsynth.search.problem import Edge, Problem, Progress, Resource, Solution, solve

INF = np.inf
SEEDS = range(36)


def random_problem(seed: int, resources: int = 0) -> Problem:
    """Small states and costs, both directions of edges (so multi-edges), ties, inf, isolated variables."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 8))
    forbidden = float(rng.choice([0.0, 0.15, 0.4]))
    density = rng.random() * 1.5
    sizes = [int(s) for s in rng.integers(1, 5, n)]

    def costs(shape):
        values = rng.integers(0, 6, shape).astype(float) if seed % 2 else rng.random(shape)
        return np.where(rng.random(shape) < forbidden, INF, values)

    unary = tuple(np.where(rng.random(s) < 0.8, np.nan_to_num(costs(s), posinf=9.0), costs(s)) for s in sizes)
    edges: list[Edge] = []
    for u, v in itertools.permutations(range(n), 2):
        if rng.random() < density / 2:
            g, h = (int(k) for k in rng.integers(1, 4, 2))
            edges.append(Edge(u, v, rng.integers(0, g, sizes[u]), rng.integers(0, h, sizes[v]), costs((g, h))))
    limited: list[Resource] = []
    for r in range(resources):
        usage = tuple(rng.integers(0, 5, s) * float(rng.random() < 0.8) for s in sizes)
        low, high = sum(u.min() for u in usage), sum(u.max() for u in usage)
        limit = np.floor(low + rng.random() * 0.6 * (high - low)) - float(rng.random() < 0.1)
        limited.append(Resource(usage, float(limit), f"r{r}"))
    return Problem(unary, tuple(edges), tuple(limited), offset=float(rng.integers(-2, 3)))


def knotted_problem(seed: int, resources: int = 0) -> Problem:
    """Five or six variables, nearly all pairs linked by rough tables: the reductions leave most of it standing."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(5, 7))
    sizes = [int(s) for s in rng.integers(3, 5, n)]
    edges: list[Edge] = []
    for u, v in itertools.combinations(range(n), 2):
        table = rng.integers(0, 9, (4, 4)).astype(float) if seed % 2 else rng.random((4, 4)) * 9
        table[rng.random((4, 4)) < (0.2 if seed % 3 else 0.0)] = INF
        edges.append(Edge(u, v, rng.permutation(4)[: sizes[u]], rng.permutation(4)[: sizes[v]], table))
    limited: list[Resource] = []
    for r in range(resources):
        usage = tuple(rng.integers(0, 9, s).astype(float) for s in sizes)
        limited.append(Resource(usage, float(rng.integers(2 * n, 4 * n)), f"r{r}"))
    return Problem(tuple(rng.random(s) for s in sizes), tuple(edges), tuple(limited), offset=1.0)


def brute_force(problem: Problem) -> float:
    if not problem.unary:
        return problem.offset
    x = np.indices([row.size for row in problem.unary]).reshape(len(problem.unary), -1)
    cost = problem.offset + sum(row[s] for row, s in zip(problem.unary, x, strict=True))
    for e in problem.edges:
        cost = cost + e.table[e.gu[x[e.u]], e.gv[x[e.v]]]
    for r in problem.resources:
        used = sum(row[s] for row, s in zip(r.usage, x, strict=True))
        cost = np.where(used <= r.limit, cost, INF)
    return float(cost.min())


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


@pytest.mark.parametrize("resources", [0, 1, 2])
def test_equals_brute_force(resources: int):
    searched = 0
    for seed in SEEDS:
        for problem in (random_problem(seed, resources=resources), knotted_problem(seed, resources)):
            solution = solve(problem, tolerance=1e-9)
            assert_solved(problem, solution, brute_force(problem))
            searched += solution.expanded > 0
    assert searched > 12


@settings(max_examples=60, deadline=None, derandomize=True)
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


def test_the_reduced_problem_has_the_same_optimum_and_lifts_to_it():
    for seed in SEEDS:
        problem = random_problem(seed, resources=seed % 3)
        expected = brute_force(problem)
        network = Network(problem)
        network.reduce()
        if network.infeasible:
            assert expected == INF
            continue
        left = network.active()
        best = INF
        for x in itertools.product(*(range(network.unary(i).size) for i in left)):
            full = network.lift(dict(zip(left, x, strict=True)))
            assert reduced_cost(network, dict(zip(left, x, strict=True))) == pytest.approx(problem.cost(full))
            if problem.fits(full):
                best = min(best, problem.cost(full))
        assert best == pytest.approx(expected)


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


def middle_problem(seed: int, limited: bool) -> Problem:
    rng = np.random.default_rng(seed)
    n = 50
    sizes = [int(s) for s in rng.integers(2, 8, n)]
    pairs = [(k, k + d) for k in range(n) for d in (1, 2, 7) if k + d < n and (d == 1 or rng.random() < 0.5)]
    edges: list[Edge] = []
    for u, v in pairs:
        table = np.where(rng.random((3, 4)) < 0.15, INF, np.round(rng.random((3, 4)), 1))
        edges.append(Edge(u, v, rng.integers(0, 3, sizes[u]), rng.integers(0, 4, sizes[v]), table))
    unary = tuple(np.round(rng.random(s), 1) for s in sizes)
    if not limited:
        return Problem(unary, tuple(edges))
    usage = tuple(np.round((1.1 - row) * 4 + rng.random(row.size)) for row in unary)
    return Problem(unary, tuple(edges), (Resource(usage, float(sum(u.mean() for u in usage)) * 0.9, "bytes"),))


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_milp_on_middle_graphs(seed: int, limited: bool):
    problem = middle_problem(seed, limited)
    assert_solved(problem, solve(problem, tolerance=1e-7), milp_bounds(problem)[1], slack=1e-6)


LAYOUTS = ("R", "S0", "S1")
SOURCES = {"R": 5e-6, "S0": 0.0, "S1": 0.0}


class TrainingLike:
    """Ops with sharding rules on one axis of 8 devices. A state is (rule, layouts made available); edges are 0/inf:
    the layout a rule needs must be available. Forward, backward with skips, and an optimizer tied to its state."""

    def __init__(self, layers: int):
        self.unary: list[np.ndarray] = []
        self.edges: list[Edge] = []
        self.states: list[list[tuple[tuple[str, ...], str, tuple[str, ...]]]] = []
        x, tape = self.source(16e6), []
        for k in range(layers):
            w = self.source(4e6 * (1 + k % 3))
            h = self.matmul(x, w, 16e6, 2e-3)
            y = self.pointwise([h], 16e6)
            tape.append((x, h, w))
            x = self.pointwise([y, x], 16e6, linear=True)
        g = self.pointwise([x], 16e6)
        for x, h, w in reversed(tape):
            dh = self.pointwise([g, h], 16e6)
            size = 4e6
            dw = self.matmul(x, dh, size, 2e-3)
            g = self.pointwise([self.matmul(dh, w, 16e6, 2e-3), g], 16e6, linear=True)
            m = self.source(size)
            m2 = self.pointwise([m, dw], size)
            self.tie(m2, m)
            self.tie(self.pointwise([w, m2], size), w)

    def problem(self) -> Problem:
        return Problem(tuple(self.unary), tuple(self.edges))

    def source(self, size: float) -> int:
        return self.op([((), layout, cost) for layout, cost in SOURCES.items()], [], size)

    def matmul(self, a: int, b: int, size: float, seconds: float) -> int:
        shares = [("R", "R", "R", 1), ("S0", "R", "S0", 8), ("R", "S1", "S1", 8), ("S1", "S0", "P", 8)]
        return self.op([((x, y), out, seconds / n) for x, y, out, n in shares], [a, b], size)

    def pointwise(self, ins: list[int], size: float, linear: bool = False) -> int:
        rules = [((layout,) * len(ins), layout, size / 1e12 / (1 if layout == "R" else 8)) for layout in LAYOUTS]
        if linear:
            rules.append((("P",) * len(ins), "P", size / 1e12))
        return self.op(rules, ins, size)

    def op(self, rules: list[tuple[tuple[str, ...], str, float]], ins: list[int], size: float) -> int:
        i = len(self.unary)
        costs: list[float] = []
        states: list[tuple[tuple[str, ...], str, tuple[str, ...]]] = []
        for needs, out, seconds in rules:
            others = [layout for layout in LAYOUTS if layout != out]
            for extra in itertools.chain.from_iterable(itertools.combinations(others, k) for k in range(4)):
                states.append((needs, out, tuple(sorted((out, *extra)))))
                costs.append(seconds + sum(self.conversion(out, to, size) for to in extra))
        self.unary.append(np.array(costs))
        self.states.append(states)
        for slot, j in enumerate(ins):
            self.link(j, i, [state[0][slot] for state in states])
        return i

    def conversion(self, out: str, to: str, size: float) -> float:
        if out == "R":
            return 5e-6
        return 2e-5 + size / 4e10 * {"R": 1.75 if out == "P" else 0.9}.get(to, 0.9 if out == "P" else 0.12)

    def tie(self, out: int, source: int) -> None:
        self.link(out, source, [state[1] for state in self.states[source]])

    def link(self, producer: int, consumer: int, needs: list[str]) -> None:
        available = [state[2] for state in self.states[producer]]
        rows, columns = sorted(set(available)), sorted(set(needs))
        table = np.array([[0.0 if need in row else INF for need in columns] for row in rows])
        gu = np.array([rows.index(a) for a in available])
        self.edges.append(Edge(producer, consumer, gu, np.array([columns.index(n) for n in needs]), table))


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


def test_out_of_nodes_it_returns_the_best_so_far_and_a_valid_bound():
    rng = np.random.default_rng(0)
    grid = [(k, k + d) for k in range(64) for d in (1, 8) if k + d < 64 and (d == 8 or k % 8 < 7)]
    table = lambda: rng.integers(0, 9, (4, 4)).astype(float)
    edges = tuple(Edge(u, v, np.arange(4), np.arange(4), table()) for u, v in grid)
    problem = Problem(tuple(rng.random(4) for _ in range(64)), edges)
    exact = solve(problem)
    assert exact.status == "optimal"
    cut = solve(problem, max_nodes=100)
    assert cut.lower_bound <= exact.cost <= cut.cost < INF
    late = solve(problem, time_budget_s=0.0, start=np.zeros(64, dtype=int))
    assert late.status == "gap"
    assert late.lower_bound <= exact.cost <= late.cost <= problem.cost(np.zeros(64, dtype=int))
