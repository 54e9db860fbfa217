"""Resources in the bound: multipliers on what is used, and assignments that keep the limits.

Resources enter the bound by Lagrange multipliers mu >= 0: the least of cost + mu . (usage - limits) over all
assignments is a lower bound on the cost within the limits. mu is found by cutting planes (Kelley 1960, drawn
towards the best point so far). The assignments that come up lie on both sides of the limits; the best mixture of
them within the limits is mostly close to the optimum. Two of them differ in patches of variables, such as a layer's,
that no edge joins: each patch can be taken from either, which is a knapsack.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from hapsynth.search.solver.options import DEFAULT, SolverOptions
from hapsynth.search.solver.patches import patches
from hapsynth.search.solver.primal_dual import PrimalDualSearch
from hapsynth.search.solver.problem import Floats, Ints, Messages, Problem, padded_limits
from hapsynth.search.solver.reduction import ReducedProblem
from hapsynth.search.solver.symmetry import VariableSymmetry


def priced(search: PrimalDualSearch, network: ReducedProblem) -> Floats:
    """Multipliers [resources] whose Lagrangian bound is nearly the best; incumbents come up on the way.

    Every assignment x is a cut: the bound at mu is at most cost(x) + mu . (usage(x) - limits). Alike variables are
    taken as one for this (`symmetry.py`): what comes of it is then no bound yet.
    """
    problem, run, options = search.run.problem, search.run, search.run.options
    limits = padded_limits(problem)
    symmetry = VariableSymmetry.of(problem, options)
    relaxed = _NetworkLagrangian(search, network) if symmetry is None else _QuotientLagrangian(search, symmetry)
    seen: list[Ints] = [] if search.best is None else [search.best]
    best, multipliers, trial = -np.inf, np.zeros(limits.size), np.zeros(limits.size)
    for _ in range(options.price_rounds):
        found, bound = relaxed.least(trial, _last(seen, options.mixed))
        if search.proved(bound if symmetry is None else -np.inf) or found is None or run.late() or run.full(network):
            break
        if bound > best:
            best, multipliers = bound, trial
        for other in [*([] if search.best is None else [search.best]), *_last(seen, options.mixed)]:
            if run.late():
                break
            search.offer(patched(problem, found, other, options, run.seconds_left()))
        seen.append(found)
        if symmetry is None and options.mixed:
            _mix(search, network, _last(seen, options.mixed), multipliers)
        run.report("price", search)
        ceiling, trial = _next_prices(problem, limits, seen, multipliers)
        if ceiling - best <= 2 * options.price_tolerance * abs(best):
            break
    return multipliers


def _last(seen: list[Ints], count: int) -> list[Ints]:
    return seen[max(0, len(seen) - count) :]


class _NetworkLagrangian:
    """The Lagrangian of a network."""

    def __init__(self, search: PrimalDualSearch, network: ReducedProblem) -> None:
        self.search, self.network = search, network

    def least(self, multipliers: Floats, starts: Sequence[Ints]) -> tuple[Ints | None, float]:
        """An assignment that nearly has the least, and a bound on it."""
        problem = self.search.run.problem
        limits = padded_limits(problem)

        def lagrangian(x: Ints) -> float:
            return problem.cost(x) + float(multipliers @ (problem.usage(x) - limits))

        options = self.search.run.options
        tolerance = max(self.search.tolerance, options.price_tolerance)
        inner = PrimalDualSearch(self.search.run, lagrangian, tolerance, self.search, limited=False)
        for x in starts:
            inner.offer(x)
        inner.close(self.network.relaxed(multipliers), np.zeros(0), options.searches[:1])
        return inner.best, inner.lower_bound


class _QuotientLagrangian:
    """The Lagrangian with alike variables as one."""

    def __init__(self, search: PrimalDualSearch, symmetry: VariableSymmetry) -> None:
        self.search, self.symmetry = search, symmetry
        self.limits = padded_limits(search.run.problem)
        self.usage = [symmetry.usage(r) for r in search.run.problem.resources]
        self.messages: Messages = {}

    def least(self, multipliers: Floats, starts: Sequence[Ints]) -> tuple[Ints | None, float]:
        """As `_NetworkLagrangian`'s; no bound on what may treat alike variables unlike."""
        quotient, run = self.symmetry.quotient, self.search.run
        priced = [
            u + sum(m * used[k] for m, used in zip(multipliers, self.usage)) for k, u in enumerate(quotient.unary)
        ]
        problem = replace(quotient, unary=tuple(priced), offset=quotient.offset - float(multipliers @ self.limits))
        tolerance = max(self.search.tolerance, run.options.price_tolerance)
        # What it comes to is no cost of the problem's, nor a bound on it: it is told to nobody.
        quiet = replace(run, problem=problem, tolerance=tolerance, enough=np.inf, beneath=-np.inf, progress=None)
        part = replace(quiet, messages=self.messages, from_quotient=False)
        inner = PrimalDualSearch(part, problem.cost, tolerance)
        for x in starts:
            inner.offer(self.symmetry.lower(x))
        inner.close(ReducedProblem(problem, options=run.options), np.zeros(0), run.options.searches[:1])
        run.sweeps, run.expanded = part.sweeps, part.expanded
        if inner.best is None:
            return None, inner.lower_bound
        found = self.symmetry.lift(inner.best)
        self.search.offer(found)
        return found, inner.lower_bound


def _mix(search: PrimalDualSearch, network: ReducedProblem, seen: list[Ints], multipliers: Floats) -> None:
    """Looks for the best assignment within the limits that takes every state from one of those seen."""
    part = network.copy()
    for i in part.active():
        keep = np.isin(part.states(i), [x[i] for x in seen])
        if keep.any():
            part.restrict(i, keep)
    inner = PrimalDualSearch(search.run, search.run.problem.cost, search.tolerance, search)
    inner.best, inner.cost = search.best, search.cost
    inner.close(part, multipliers, search.run.options.searches[:1])


def _next_prices(problem: Problem, limits: Floats, seen: list[Ints], centre: Floats) -> tuple[float, Floats]:
    """(the most that the cuts allow the bound to be, multipliers to try next: half-way there from `centre`)."""
    costs = np.array([problem.cost(x) for x in seen])
    excess = np.array([problem.usage(x) - limits for x in seen])
    unit = np.maximum(np.abs(limits), np.abs(excess).max(axis=0))
    unit[unit == 0] = 1.0
    # Variables: the bound, then mu * unit. A box keeps the first rounds bounded; it follows the centre outwards.
    box = 10 * (np.abs(costs).max() + 1e-300) + 10 * float((centre * unit).max())
    result = linprog(
        np.r_[-1.0, np.zeros(limits.size)],
        A_ub=np.c_[np.ones(costs.size), -excess / unit],
        b_ub=costs,
        bounds=[(None, None), *[(0.0, box)] * limits.size],
        method="highs",
    )
    if result.x is None:
        return -np.inf, centre
    target = np.maximum(result.x[1:], 0.0) / unit
    return float(result.x[0]), target if limits.size == 1 or not centre.any() else (centre + target) / 2


def patched(problem: Problem, one: Ints, other: Ints, options: SolverOptions = DEFAULT, left: float = np.inf) -> Ints:
    """The cheapest assignment within the limits that takes each patch of variables from one of two assignments; `one`,
    where none keeps the limits, or none is found in the `left` seconds."""
    patch, count = patches(problem.ends, one != other)
    if not count:
        return one
    cost, usage = np.zeros(count), np.zeros((len(problem.resources), count))
    for i in np.flatnonzero(patch < count).tolist():
        cost[patch[i]] += problem.unary[i][other[i]] - problem.unary[i][one[i]]
        for k, r in enumerate(problem.resources):
            usage[k, patch[i]] += r.usage[i][other[i]] - r.usage[i][one[i]]
    for e in problem.edges:
        at = min(patch[e.u], patch[e.v])
        if at < count:
            cost[at] += e.table[e.gu[other[e.u]], e.gv[other[e.v]]] - e.table[e.gu[one[e.u]], e.gv[one[e.v]]]
    spare = padded_limits(problem) - problem.usage(one)
    unit = np.abs(usage).max(axis=1)
    unit[unit == 0] = 1.0
    kept = LinearConstraint(usage / unit[:, None], -np.inf, spare / unit)
    scale = float(np.abs(cost).max()) or 1.0
    limits = {"mip_rel_gap": options.patch_gap, "node_limit": options.patch_nodes}
    limits |= {} if np.isinf(left) else {"time_limit": left}
    found = milp(cost / scale, integrality=np.ones(count), bounds=Bounds(0, 1), constraints=kept, options=limits)
    if found.x is None:
        return one
    taken = np.append(np.round(found.x) > 0, False)
    return np.where(taken[patch], other, one)
