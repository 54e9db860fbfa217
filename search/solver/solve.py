"""The solver's entry: reduce, price the resources, search.

Without resources one `PrimalDualSearch` settles it. With them, multipliers come first (`lagrangian.py`); the A* of the
last one then keeps the limits exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hapsynth.search.solver.lagrangian import priced
from hapsynth.search.solver.options import DEFAULT, SolverOptions
from hapsynth.search.solver.primal_dual import PrimalDualSearch, SolveContext
from hapsynth.search.solver.problem import (
    Floats,
    Ints,
    Messages,
    Problem,
    Solution,
    SolverProgress,
    padded_limits,
    validate,
)
from hapsynth.search.solver.reduction import ReducedProblem
from hapsynth.search.solver.symmetry import VariableSymmetry

Assignment = npt.NDArray[np.integer] | Sequence[int]

_LEAST_TOLERANCE = 1e-10


def solve(
    problem: Problem,
    *,
    start: Assignment | Sequence[Assignment] | None = None,
    tolerance: float = 1e-6,
    enough: float = np.inf,
    beneath: float = -np.inf,
    time_budget_s: float | None = None,
    progress: Callable[[SolverProgress], None] | None = None,
    max_nodes: int = 500_000,
    memory_bytes: int = 2**31,
    messages: Messages | None = None,
    options: SolverOptions = DEFAULT,
) -> Solution:
    """The cheapest assignment within the resources' limits, with a proof or, out of time or nodes, a gap.

    start: an assignment or several (int [variables]) to begin from; feasible ones are never made worse.
    tolerance: the relative gap, (cost - lower_bound) / |cost|, at which a solution is called optimal.
    enough: what costs this much or more is of no interest: a bound that reaches it ends the search.
    beneath: an assignment that costs this much or less ends it too.
    time_budget_s: seconds after which the best so far is returned.
    max_nodes: how many search nodes to expand in all, besides the one per variable that leads straight to an end.
    memory_bytes: about what tables and search nodes may take in all; where that is too little the best so far is
    returned with its gap. Ctrl-C returns it too; KeyboardInterrupt is raised if there is none.
    messages: `Solution.messages` of an earlier problem with the same variables and states, from which the dual starts.
    None: from the dual of the quotient problem (alike variables merged), which costs some sweeps; so does an empty
    mapping where variables have more than `options.many_states` states.
    options: limits and tolerances of each step.
    Raises ValueError for a malformed problem or start. Deterministic, unless the time budget ends it.
    """
    validate(problem)
    from_quotient, messages = messages is None, dict(messages or {})
    tolerance = max(tolerance, _LEAST_TOLERANCE)
    run = SolveContext(
        problem,
        tolerance,
        enough,
        beneath,
        time_budget_s,
        progress,
        max_nodes,
        memory_bytes,
        messages,
        from_quotient,
        options,
    )
    search = PrimalDualSearch(run, problem.cost, run.tolerance)
    try:
        _run(search, list(_starts(problem, start)))
    except KeyboardInterrupt:
        if search.best is None:
            raise
        return replace(run.solution(search), interrupted=True)
    return run.solution(search)


def solve_quotient(
    problem: Problem,
    *,
    start: Assignment | None = None,
    max_nodes: int | None = None,
    messages: Messages | None = None,
    options: SolverOptions = DEFAULT,
    **how: Any,
) -> Solution:
    """A cheap assignment, without a bound: the best in which alike variables take the same state, found as if there
    were one of each. As `solve`, which does it where too few are alike or there are limits. max_nodes: None for
    `options.quotient_nodes`, or, where `solve` has no limits to keep, for its own default."""
    nodes = options.quotient_nodes if max_nodes is None else max_nodes
    symmetry = None if problem.resources else VariableSymmetry.of(problem, options)
    if symmetry is None:
        if problem.resources or max_nodes is not None:
            how["max_nodes"] = nodes
        return solve(problem, start=start, messages=messages, options=options, **how)
    begin = None if start is None else symmetry.lower(np.asarray(start, dtype=np.int64))
    messages = messages or {}
    known = symmetry.lower_messages(messages)
    found = solve(symmetry.quotient, start=begin, messages=known, max_nodes=nodes, options=options, **how)
    found = replace(
        found, lower_bound=-np.inf, status="gap", messages=messages | symmetry.lift_messages(found.messages)
    )
    if found.assignment is None:
        return found
    assignment = symmetry.lift(found.assignment)
    return replace(found, assignment=assignment, cost=problem.cost(assignment))


def _run(search: PrimalDualSearch, starts: Sequence[Ints]) -> None:
    problem = search.run.problem
    for x in starts:
        search.offer(x)
        if problem.resources and not search.run.late():
            search.offer(_descended(problem, x, search.run.late, search.run.options.descent_rounds))
    scale = abs(search.cost) if np.isfinite(search.cost) else None
    network = ReducedProblem(problem, scale, search.run.memory_bytes // 4, search.run.options)
    network.reduce(search.run.late)
    multipliers = np.zeros(len(problem.resources))
    if problem.resources and not network.infeasible and not search.run.late():
        multipliers = priced(search, network)
    if not search.proved(-np.inf):
        search.close(network, multipliers)


def _starts(problem: Problem, start: Assignment | Sequence[Assignment] | None) -> Iterator[Ints]:
    if start is None:
        return
    for row in np.atleast_2d(np.asarray(start, dtype=np.int64)):
        if row.size != len(problem.unary):
            raise ValueError(f"start has {row.size} states; the problem has {len(problem.unary)} variables")
        for i, (s, unary) in enumerate(zip(row.tolist(), problem.unary, strict=True)):
            if not 0 <= s < unary.size:
                raise ValueError(f"start takes state {s} of variable {i}, which has {unary.size} states")
        yield row


def _descended(problem: Problem, start: Ints, late: Callable[[], bool], rounds: int) -> Ints:
    """Iterated conditional modes: each variable in turn takes its best state given all others, within the limits."""
    x = start.copy()
    near: list[list[tuple[int, Ints, Floats, Ints]]] = [[] for _ in problem.unary]
    for e in problem.edges:
        near[e.u].append((e.v, e.gu, e.table, e.gv))
        near[e.v].append((e.u, e.gv, e.table.T, e.gu))
    spare = padded_limits(problem) - problem.usage(x)
    for _ in range(rounds):
        changed = False
        for i, unary in enumerate(problem.unary if not late() else ()):
            cost = unary
            for j, own, table, others in near[i]:
                cost = cost + table[own, others[x[j]]]
            now = int(x[i])
            if problem.resources:
                use = np.stack([r.usage[i] - r.usage[i][now] for r in problem.resources])
                cost = np.where(np.all(use <= np.maximum(spare, 0)[:, None], axis=0), cost, np.inf)
            best = int(np.argmin(cost))
            if cost[best] < cost[now]:
                if problem.resources:
                    spare = spare - np.array([r.usage[i][best] - r.usage[i][now] for r in problem.resources])
                x[i], changed = best, True
        if not changed:
            break
    return x
