"""The types of weighted pairwise problems: cost, usage, and errors that name what is wrong."""

from dataclasses import replace

import numpy as np
import pytest

from hapsynth.search.solver import Edge, Problem, Resource, solve, validate

INF = np.inf
EDGE = Edge(0, 1, np.array([0, 1, 1]), np.array([0, 1]), np.array([[0.0, 5.0], [INF, 1.0]]))
PROBLEM = Problem(
    (np.array([3.0, 1.0, 2.0]), np.array([0.5, INF])),
    (EDGE,),
    (Resource((np.array([0.0, 2.0, 2.0]), np.array([1.0, 0.0])), 2.5, "bytes"),),
    offset=10.0,
)


def test_cost_and_usage_of_an_assignment():
    assert PROBLEM.cost([0, 0]) == 13.5
    assert PROBLEM.cost(np.array([1, 0])) == INF
    assert PROBLEM.usage([1, 0]).tolist() == [3.0]
    assert PROBLEM.fits([0, 0])
    assert not PROBLEM.fits([1, 0])
    validate(PROBLEM)
    assert solve(PROBLEM).assignment.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (replace(PROBLEM, unary=(np.zeros(0), np.zeros(2))), r"variable 0: unary has shape \(0,\)"),
        (replace(PROBLEM, unary=(np.zeros(3), np.zeros(2, np.float32))), "variable 1: unary is float32"),
        (replace(PROBLEM, unary=(np.zeros(3), np.array([0.0, np.nan]))), "variable 1: unary holds nan"),
        (replace(PROBLEM, offset=INF), "offset is inf"),
        (replace(PROBLEM, edges=(EDGE._replace(v=2),)), r"edge 0 \(0, 2\): variable 2 does not exist"),
        (replace(PROBLEM, edges=(EDGE._replace(v=0),)), "both ends are variable 0"),
        (replace(PROBLEM, edges=(EDGE._replace(table=np.zeros((1, 2))),)), "gu holds groups 0..1"),
        (replace(PROBLEM, edges=(EDGE._replace(table=np.zeros(2)),)), r"table is float64 of shape \(2,\)"),
        (replace(PROBLEM, edges=(EDGE._replace(table=-np.ones((2, 2))),)), "table holds nan or a negative cost"),
        (replace(PROBLEM, edges=(EDGE._replace(gv=np.array([0, 1, 1])),)), r"gv has shape \(3,\)"),
        (replace(PROBLEM, edges=(EDGE._replace(gv=np.array([0.0, 1.0])),)), "gv is float64"),
        (replace(PROBLEM, resources=(Resource((np.zeros(3),), 1.0, "bytes"),)), "'bytes': usage for 1 variables"),
        (replace(PROBLEM, resources=(Resource((np.zeros(3), np.zeros(3)), 1.0, "b"),)), r"'b': usage of variable 1"),
        (
            replace(PROBLEM, resources=(Resource((np.zeros(3), np.array([0, INF])), 1.0, "b"),)),
            "usage of variable 1 is not finite",
        ),
        (replace(PROBLEM, resources=(Resource((np.zeros(3), np.zeros(2)), np.nan, "b"),)), "limit is nan"),
    ],
)
def test_malformed_problems_are_refused(problem: Problem, message: str):
    with pytest.raises(ValueError, match=message):
        solve(problem)


@pytest.mark.parametrize(
    ("start", "message"),
    [([0], "start has 1 states; the problem has 2"), ([0, 2], "start takes state 2 of variable 1, which has 2")],
)
def test_malformed_starts_are_refused(start: list[int], message: str):
    with pytest.raises(ValueError, match=message):
        solve(PROBLEM, start=start)
