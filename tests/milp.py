"""An oracle for the solver: the same `Problem` as a mixed-integer linear program, solved by HiGHS."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from hapsynth.search.problem import Problem


def milp_bounds(problem: Problem, seconds: float = np.inf) -> tuple[float, float]:
    """(no assignment within the limits costs less, the best found), both inf if there is none.

    The compact local-polytope form: a 0/1 variable per state, a flow per pair of groups of an edge. HiGHS stops at a
    relative gap of 1e-9, or after `seconds`.
    """
    start = np.cumsum([0, *(row.size for row in problem.unary)])
    costs = [*problem.unary, *(e.table.ravel() for e in problem.edges)]
    cost = np.concatenate([np.zeros(0), *costs])
    rows = [np.repeat(np.arange(len(problem.unary)), np.diff(start))]
    columns = [np.arange(start[-1])]
    values = [np.ones(start[-1])]
    line, flow = len(problem.unary), int(start[-1])
    for e in problem.edges:
        pair = np.indices(e.table.shape).reshape(2, -1)
        for end, groups, own, count in ((e.u, e.gu, pair[0], e.table.shape[0]), (e.v, e.gv, pair[1], e.table.shape[1])):
            # The flows from a group are as many as the states chosen in it: 1 or 0.
            rows += [line + own, line + groups]
            columns += [flow + np.arange(own.size), start[end] + np.arange(groups.size)]
            values += [np.ones(own.size), -np.ones(groups.size)]
            line += count
        flow += e.table.size
    right = np.zeros(line)
    right[: len(problem.unary)] = 1.0
    entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
    constraints = [LinearConstraint(coo_array(entries, shape=(line, flow)).tocsr(), right, right)]
    for r in problem.resources:
        usage = np.concatenate([*r.usage, np.zeros(flow - int(start[-1]))])
        constraints.append(LinearConstraint(usage[None, :], -np.inf, r.limit))
    result = milp(
        np.nan_to_num(cost, posinf=0.0),
        integrality=np.arange(flow) < start[-1],
        bounds=Bounds(np.zeros(flow), np.where(np.isinf(cost), 0.0, 1.0)),
        constraints=constraints,
        options={"mip_rel_gap": 1e-9, "time_limit": seconds},
    )
    if result.status == 2:
        return np.inf, np.inf
    best = np.inf if result.x is None else problem.offset + float(result.fun)
    bound = -np.inf if result.mip_dual_bound is None else problem.offset + float(result.mip_dual_bound)
    return bound, best
