"""Alike variables as one: an assignment, never a bound, and messages that any dual may begin from."""

import itertools
import time
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from milp import optimum
from pairwise_problems import TrainingLike, brute_force, knotted_problem, middle_problem, random_problem

from hapsynth.search.solver import Edge, Problem, Resource, SolverOptions, SolverProgress
from hapsynth.search.solver.reduction import ReducedProblem
from hapsynth.search.solver.solve import solve, solve_quotient
from hapsynth.search.solver.symmetry import VariableSymmetry, spread_messages
from hapsynth.search.solver.trws import Dual

_Array = TypeVar("_Array", bound=npt.NDArray[np.generic])


def shared(problem: Problem) -> Problem:
    """The same problem, in which equal arrays are one, as the planner makes them."""
    known: dict[object, Any] = {}

    def one(array: _Array) -> _Array:
        return known.setdefault((array.dtype.char, array.shape, array.tobytes()), array)

    edges = tuple(Edge(e.u, e.v, one(e.gu), one(e.gv), one(e.table)) for e in problem.edges)
    return replace(problem, unary=tuple(one(row) for row in problem.unary), edges=edges)


def ring(size: int, alike: float, unlike: float) -> Problem:
    """Variables of two states in a circle, each pair of neighbours at these costs."""
    unary, groups = np.zeros(2), np.arange(2)
    table = np.array([[alike, unlike], [unlike, alike]])
    return Problem((unary,) * size, tuple(Edge(i, (i + 1) % size, groups, groups, table) for i in range(size)))


def test_an_assignment_of_the_quotient_costs_what_it_does_in_the_whole_problem():
    problem = shared(TrainingLike(layers=24).problem())
    symmetry = VariableSymmetry.of(problem)
    assert symmetry is not None
    assert len(symmetry.quotient.unary) < len(problem.unary) / 5
    rng = np.random.default_rng(0)
    finite = 0
    for _ in range(50):
        few = np.array([rng.integers(row.size) for row in symmetry.quotient.unary])
        whole = symmetry.lift(few)
        assert symmetry.quotient.cost(few) == pytest.approx(problem.cost(whole))
        assert (symmetry.lower(whole) == few).all()
        finite += np.isfinite(problem.cost(whole))
    best = solve(problem).assignment
    assert best is not None
    assert symmetry.quotient.cost(symmetry.lower(best)) == pytest.approx(
        problem.cost(symmetry.lift(symmetry.lower(best)))
    )


@pytest.mark.parametrize("layers", [6, 24])
def test_to_treat_alike_layers_alike_costs_little_more(layers: int):
    problem = shared(TrainingLike(layers).problem())
    quotient = solve_quotient(problem)
    whole = solve(problem)
    assert whole.lower_bound <= quotient.cost <= whole.cost * 1.01
    assert quotient.assignment is not None
    assert problem.cost(quotient.assignment) == quotient.cost
    assert (quotient.lower_bound, quotient.status) == (-np.inf, "gap")


def test_an_optimum_that_treats_alike_variables_unlike_is_found_by_the_whole_search_alone():
    problem = ring(12, alike=1.0, unlike=0.5)
    quotient = solve_quotient(problem)
    assert quotient.cost == pytest.approx(12.0)
    assert quotient.lower_bound == -np.inf
    found = solve(problem, start=quotient.assignment)
    assert (found.cost, found.status) == (pytest.approx(6.0), "optimal")


@pytest.mark.parametrize("room", [0.65, 0.8])
def test_within_limits_alike_layers_are_priced_as_one_and_treated_unlike_where_that_is_best(
    room: float, monkeypatch: pytest.MonkeyPatch
):
    free = shared(TrainingLike(layers=6).problem())
    rng = np.random.default_rng(6)
    used = {id(row): rng.random(row.size) for row in free.unary}
    # Equal for those who are alike, but not the same arrays.
    usage = tuple(used[id(row)].copy() for row in free.unary)
    small = tuple(np.where(np.isfinite(u), r, np.inf) for u, r in zip(free.unary, usage, strict=True))
    least, cheapest = solve(replace(free, unary=small)).cost, solve(free)
    assert cheapest.assignment is not None
    most = sum(float(row[s]) for row, s in zip(usage, cheapest.assignment, strict=True))
    limited = replace(free, resources=(Resource(usage, least + room * (most - least), "all"),))
    symmetry = VariableSymmetry.of(limited)
    assert symmetry is not None
    told: list[SolverProgress] = []
    found = solve(limited, progress=told.append)
    assert all(p.lower_bound <= found.cost * (1 + 1e-9) and p.cost >= found.cost for p in told)
    assert (found.status, found.cost) == ("optimal", pytest.approx(optimum(limited).cost, rel=1e-5))
    assert found.cost > cheapest.cost
    assert found.assignment is not None
    if room == 0.65:
        assert (symmetry.lift(symmetry.lower(found.assignment)) != found.assignment).any()
    near = solve_quotient(limited)
    assert near.assignment is not None
    assert limited.fits(near.assignment)
    assert found.lower_bound <= near.cost <= 1.1 * found.cost
    if room == 0.8:
        return
    # A price at which alike variables cost less is no assignment within the limits.
    same = solve(limited, beneath=0.1 * cheapest.cost + 0.9 * found.cost)
    assert (same.lower_bound, same.sweeps, same.expanded) == (found.lower_bound, found.sweeps, found.expanded)
    # A round of prices has the time that is left, not all of it.
    now = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    assert solve(limited, time_budget_s=1300.0).status == "gap"
    assert next(now) < 1320


def test_where_little_is_alike_or_limits_tell_variables_apart_the_whole_is_searched():
    for problem in (random_problem(3), random_problem(3, resources=1)):
        assert VariableSymmetry.of(problem) is None
        found = solve_quotient(problem)
        assert found.status in ("optimal", "infeasible")
        assert found.cost == pytest.approx(brute_force(problem))


def test_spread_messages_are_a_reparametrisation_and_bring_the_bound_near():
    problem = shared(TrainingLike(layers=24).problem())
    optimum = solve(problem).cost
    plain, begun = ReducedProblem(problem), ReducedProblem(problem)
    plain.reduce()
    begun.reduce()
    assert spread_messages(begun, np.zeros(0))
    bounds: list[float] = []
    for network in (plain, begun):
        dual = Dual(network, {})
        for _ in range(3):
            dual.sweep()
        bounds.append(dual.bound)
        assert dual.bound <= optimum * (1 + 1e-9)
    assert bounds[1] >= bounds[0]


def test_the_quotient_never_proves_too_much():
    """What begins from ties is right also where they mislead: some rows of random problems, several times over."""
    for seed in range(60):
        one = knotted_problem(seed) if seed % 2 else random_problem(seed)
        count = len(one.unary)
        edges = [Edge(e.u + k * count, e.v + k * count, e.gu, e.gv, e.table) for k in range(3) for e in one.edges]
        # The copies are joined, so that they are no separate problems.
        n = one.unary[0].size
        groups, table = np.arange(n), np.random.default_rng(seed).random((n, n))
        edges += [Edge(k * count, (k + 1) * count, groups, groups, table) for k in range(2)]
        problem = Problem(one.unary * 3, tuple(edges))
        network = ReducedProblem(problem)
        whole = solve(problem, messages={}, tolerance=1e-9)
        from_quotient = solve(problem, messages=None, tolerance=1e-9)
        assert from_quotient.cost == pytest.approx(whole.cost)
        assert from_quotient.status == whole.status
        if np.isfinite(whole.cost) and spread_messages(network, np.zeros(0)):
            network.reduce()
            if not network.infeasible and network.active():
                assert Dual(network, {}).sweep() <= whole.cost + 1e-9 * abs(whole.cost)


def test_as_many_nodes_are_expanded_as_are_asked_for():
    options, limited = SolverOptions(elimination_cells=0), middle_problem(2, True)
    few, most = (solve_quotient(limited, options=options, **nodes).expanded for nodes in ({"max_nodes": 0}, {}))
    assert few < most / 4
    alike = shared(TrainingLike(layers=12).problem())
    assert VariableSymmetry.of(alike) is not None
    assert np.isfinite(solve_quotient(alike, max_nodes=0, options=options).cost)


def test_messages_are_kept_by_first_members():
    problem = shared(TrainingLike(layers=12).problem())
    first = solve_quotient(problem)
    messages = first.messages
    symmetry = VariableSymmetry.of(problem)
    assert messages
    assert symmetry is not None
    firsts = set(np.unique(symmetry.colours, return_index=True)[1].tolist())
    assert {i for pair in messages for i in pair} <= firsts
    again = solve_quotient(problem, messages=messages)
    assert again.cost == first.cost
    assert again.sweeps <= first.sweeps
