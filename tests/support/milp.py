"""An oracle for the solver: the same `Problem` as a mixed-integer linear program for HiGHS.

One 0/1 variable per state; per edge one flow for each pair of groups whose cost is finite, whose sums over a row or a
column are what the ends choose there. Its linear relaxation is the local polytope, the tightest that pairwise tables
give. Nothing of the solver is used but its types.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from hapsynth.search.solver import Edge, Ints, Problem, Solution

Floats = npt.NDArray[np.float64]

_OPTIMAL, _LIMIT, _INFEASIBLE = 0, 1, 2  # what scipy's `status` says
_TYPICAL = 1e5
"""Costs are scaled so that their least sum is about this: HiGHS has an absolute gap of 1e-6."""


def optimum(problem: Problem, time_limit_s: float | None = None, tolerance: float = 1e-9) -> Solution:
    """The cheapest assignment within the limits; with a time limit, the best known and a bound (-inf if none is yet).

    `tolerance`: the relative gap at which HiGHS stops. `expanded` counts its branch-and-bound nodes.
    """
    if not problem.unary:
        return Solution(np.zeros(0, np.int64), problem.offset, problem.offset, 0, 0, "optimal")
    small = _Merged(problem)
    program = _Program(small)
    result = program.run(time_limit_s, tolerance)
    assignment = None
    if result.x is not None:
        chosen = np.split(result.x[: program.states], small.first[1:-1])
        assignment = np.array([kept[int(np.argmax(x))] for kept, x in zip(small.kept, chosen, strict=True)])
    cost = np.inf if assignment is None else problem.cost(assignment)
    if result.status == _INFEASIBLE:
        return Solution(None, np.inf, np.inf, 0, 0, "infeasible")
    bound = -np.inf if result.mip_dual_bound is None else problem.offset + result.mip_dual_bound / program.scale
    if result.status not in (_OPTIMAL, _LIMIT):
        raise RuntimeError(f"HiGHS ended with status {result.status}: {result.message}")
    status = "optimal" if result.status == _OPTIMAL else "gap"
    return Solution(assignment, cost, min(bound, cost), int(result.mip_node_count or 0), 0, status)


@dataclass
class _Merged:
    """A problem with equal rows and columns of its tables as one, and of the states that no table and no resource
    tells apart only the cheapest."""

    problem: Problem
    edges: list[Edge] = field(init=False)
    kept: list[Ints] = field(init=False)
    """Per variable, the states that are left."""
    first: Ints = field(init=False)
    """Per variable, the column of its first state; at the end, the number of columns."""

    def __post_init__(self) -> None:
        self.edges = [_merged(e) for e in self.problem.edges]
        keys: list[list[Floats]] = [[] for _ in self.problem.unary]
        for e in self.edges:
            keys[e.u].append(e.gu.astype(np.float64))
            keys[e.v].append(e.gv.astype(np.float64))
        for resource in self.problem.resources:
            for i, usage in enumerate(resource.usage):
                keys[i].append(usage)
        self.kept = [_cheapest(row, key) for row, key in zip(self.problem.unary, keys, strict=True)]
        self.first = np.cumsum([0, *(k.size for k in self.kept)])


def _merged(edge: Edge) -> Edge:
    table, rows = np.unique(edge.table, axis=0, return_inverse=True)
    table, columns = np.unique(table, axis=1, return_inverse=True)
    return Edge(edge.u, edge.v, rows.ravel()[edge.gu], columns.ravel()[edge.gv], table)


def _cheapest(unary: Floats, keys: list[Floats]) -> Ints:
    """The cheapest state of each combination of keys; all of a variable that has no state at a finite cost."""
    if not keys:
        return np.array([int(np.argmin(unary))])
    order = np.lexsort(unary[None, :])
    _, index = np.unique(np.stack(keys, axis=1)[order], axis=0, return_index=True)
    found = np.sort(order[index])
    return found[np.isfinite(unary[found])] if np.isfinite(unary).any() else found


class _Program:
    """The matrices: states first, then flows, edge by edge."""

    def __init__(self, small: _Merged) -> None:
        problem, self.states = small.problem, int(small.first[-1])
        # (row, column, value) of the equations, in pieces.
        pieces: list[tuple[Ints, Ints, Floats]] = []
        variable = np.repeat(np.arange(len(small.kept)), np.diff(small.first))
        pieces.append((variable, np.arange(self.states), np.ones(self.states)))
        costs = [problem.unary[i][kept] for i, kept in enumerate(small.kept)]
        rows, columns = len(small.kept), self.states
        for e in small.edges:
            flows = np.argwhere(np.isfinite(e.table))
            costs.append(e.table[tuple(flows.T)])
            numbers = columns + np.arange(len(flows))
            columns += len(flows)
            for side, (end, groups) in enumerate(((e.u, e.gu), (e.v, e.gv))):
                pieces.append((rows + flows[:, side], numbers, np.ones(len(flows))))
                mine = groups[small.kept[end]]
                pieces.append((rows + mine, small.first[end] + np.arange(mine.size), -np.ones(mine.size)))
                rows += e.table.shape[side]
        at, column, value = (np.concatenate(part) for part in zip(*pieces, strict=True))
        right = np.where(np.arange(rows) < len(small.kept), 1.0, 0.0)
        shape = (rows, columns)
        self.constraints = [LinearConstraint(coo_array((value, (at, column)), shape=shape).tocsc(), right, right)]
        for r in problem.resources:
            usage = np.concatenate([row[kept] for row, kept in zip(r.usage, small.kept, strict=True)])
            unit = max(1.0, float(np.abs(usage).max()))
            matrix = coo_array((usage / unit, (np.zeros(self.states, np.int64), np.arange(self.states))), (1, columns))
            self.constraints.append(LinearConstraint(matrix.tocsc(), -np.inf, r.limit / unit))
        cost = np.concatenate(costs)
        least = sum(float(np.abs(row[np.isfinite(row)]).min(initial=np.inf)) for row in costs if np.isfinite(row).any())
        self.scale = _TYPICAL / least if least > 0 else 1.0
        self.upper = np.isfinite(cost).astype(np.float64)
        self.cost = np.where(np.isfinite(cost), cost, 0.0) * self.scale

    def run(self, time_limit_s: float | None, tolerance: float) -> OptimizeResult:
        limit = {} if time_limit_s is None else {"time_limit": time_limit_s}
        return milp(
            self.cost,
            integrality=np.arange(self.cost.size) < self.states,
            bounds=Bounds(np.zeros_like(self.cost), self.upper),
            constraints=self.constraints,
            options={"mip_rel_gap": tolerance, **limit},
        )
