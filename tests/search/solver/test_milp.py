"""The oracle itself, against every assignment there is."""

import itertools

import numpy as np
import pytest
from milp import optimum

from hapsynth.search.solver import Edge, Problem, Resource

INF = np.inf


def problem(seed: int, scale: float, resources: int) -> Problem:
    """Up to six variables; equal rows in tables, states that differ in nothing but cost, forbidden pairs."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, int(rng.integers(1, 7))).tolist()
    forbid = lambda values: np.where(rng.random(values.shape) < 0.12, INF, values)
    edges: list[Edge] = []
    for u, v in itertools.combinations(range(len(sizes)), 2):
        table = forbid(rng.integers(0, 3, (3, 3)) * scale)
        table[2] = table[rng.integers(3)]
        edges.append(Edge(u, v, rng.integers(0, 3, sizes[u]), rng.integers(0, 3, sizes[v]), table))
    unary = tuple(forbid(rng.integers(0, 9, s) * scale) for s in sizes)
    limited: list[Resource] = []
    for _ in range(resources):
        usage = tuple(rng.integers(0, 9, s) * 1e9 for s in sizes)
        limited.append(Resource(usage, float(rng.integers(3, 6) * len(sizes)) * 1e9, "bytes"))
    kept = edges if len(sizes) < 4 else [e for e in edges if rng.random() < 0.7]
    return Problem(unary, tuple(kept), tuple(limited), offset=scale)


def assignments(p: Problem):
    return itertools.product(*(range(row.size) for row in p.unary))


@pytest.mark.parametrize("resources", [0, 1, 2])
@pytest.mark.parametrize("scale", [1e-7, 1.0])
def test_is_the_least_of_all_assignments(resources: int, scale: float) -> None:
    infeasible = 0
    for seed in range(25):
        p = problem(seed, scale, resources)
        least = min(p.cost(x) if p.fits(x) else INF for x in assignments(p))
        found = optimum(p)
        infeasible += least == INF
        if least == INF:
            assert (found.status, found.assignment, found.lower_bound) == ("infeasible", None, INF)
            continue
        assert found.status == "optimal"
        assert found.assignment is not None
        assert p.fits(found.assignment)
        assert p.cost(found.assignment) == found.cost == pytest.approx(least, rel=1e-9)
        assert found.lower_bound == pytest.approx(least, rel=1e-6)
    assert 0 < infeasible < 20


def test_out_of_time_leaves_a_valid_bound() -> None:
    rng = np.random.default_rng(0)
    n, k = 40, 6
    tables = {pair: rng.random((k, k)) for pair in itertools.combinations(range(n), 2)}
    hard = Problem(
        tuple(rng.random(k) for _ in range(n)),
        tuple(Edge(u, v, np.arange(k), np.arange(k), table) for (u, v), table in tables.items()),
    )
    found = optimum(hard, time_limit_s=2.0)
    assert found.status == "gap"
    assert found.lower_bound < found.cost
    any_cost = hard.cost(rng.integers(0, k, n))
    assert found.lower_bound <= any_cost


def test_nothing_to_choose() -> None:
    assert optimum(Problem((), (), offset=2.0)).cost == 2.0
    assert optimum(Problem((np.array([2.0, INF, 1.0]),), ())).assignment.tolist() == [2]
    assert optimum(Problem((np.array([INF, INF]),), ())).status == "infeasible"
