"""The solver's pipeline: reduce, raise the dual bound, search, drop states by reduced cost, repeat, prove.

Lemma (what dropping costs). Let T = incumbent - tolerance / 2 * |incumbent|. Only states whose floor (see
`_trws.py`) is >= T and search nodes with f >= T are dropped, so every assignment lost costs at least T; T only
falls as incumbents improve. The optimum is therefore at least min(T, bound of what is left), at every moment.

Resources enter the bound by Lagrange multipliers mu >= 0: the least of cost + mu . (usage - limits) over all
assignments is a lower bound on the cost within the limits. mu is found by cutting planes (Kelley 1960, drawn
towards the best point so far); the searches then keep the limits exactly.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from hapsynth.search._astar import astar
from hapsynth.search._layers import layered
from hapsynth.search._order import search_order
from hapsynth.search._pairwise import Floats, Ints, Problem, Progress, Solution, padded_limits, validate
from hapsynth.search._reduce import Network
from hapsynth.search._space import Found, Space, build_space
from hapsynth.search._trws import Dual

Assignment = npt.NDArray[np.integer] | Sequence[int]

_STALLED = 5e-4  # relative rise of the bound in ten sweeps
_FLOAT_SAFETY = 1e-12  # relative; the dual and the searches add a few thousand terms in float64
_LEAST_TOLERANCE = 1e-10
# (kind, width or nodes): tried in turn, the next when one no longer helps.
_SEARCHES = (("layers", 64), ("astar", 2000), ("layers", 1000), ("layers", 10_000), ("astar", 10**9))
_SWEEPS = 5  # between two attempts to decode an assignment
_SHRUNK = 0.9  # where dropping states leaves less than this of them, the bound is raised again before a search
_DIVE_NODES = 3  # per variable; A* gets so many before each layered search
_PRICE_ROUNDS = 16
_MIXED = 4
_PRICE_TOLERANCE = 1e-4  # relative, of each round's bound


def solve(
    problem: Problem,
    *,
    start: Assignment | Sequence[Assignment] | None = None,
    tolerance: float = 1e-6,
    time_budget_s: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    max_nodes: int = 500_000,
) -> Solution:
    """The cheapest assignment within the resources' limits, with a proof or, out of time or nodes, a gap.

    start: an assignment or several (int [variables]) to begin from; feasible ones are never made worse.
    tolerance: the relative gap, (cost - lower_bound) / |cost|, at which a solution is called optimal.
    time_budget_s: seconds after which the best so far is returned (reductions are not interrupted).
    max_nodes: how many search nodes to expand in all.
    Raises ValueError for a malformed problem or start. Deterministic, unless the time budget ends it.
    """
    validate(problem)
    run = _Run(problem, max(tolerance, _LEAST_TOLERANCE), time_budget_s, progress, max_nodes)
    hunt = _Hunt(run, problem.cost, run.tolerance)
    for x in _starts(problem, start):
        hunt.offer(x)
        if problem.resources:
            hunt.offer(_descended(problem, x))
    network = Network(problem, abs(hunt.cost) if np.isfinite(hunt.cost) else None)
    network.reduce()
    multipliers = np.zeros(len(problem.resources))
    if problem.resources and not network.infeasible:
        multipliers = _priced(hunt, network)
    if not hunt.proved(-np.inf):
        hunt.close(network, multipliers)
    return run.solution(hunt)


@dataclass
class _Run:
    """What one call of `solve` shares: its limits and its counts."""

    problem: Problem
    tolerance: float
    time_budget_s: float | None
    progress: Callable[[Progress], None] | None
    max_nodes: int
    began: float = field(default_factory=time.monotonic)
    expanded: int = 0
    sweeps: int = 0

    def late(self) -> bool:
        return self.time_budget_s is not None and time.monotonic() - self.began >= self.time_budget_s

    def report(self, stage: str, hunt: "_Hunt", network: Network) -> None:
        if self.progress is not None:
            hunt = hunt.main or hunt
            seconds = time.monotonic() - self.began
            size = (len(network.active()), network.size())
            self.progress(Progress(stage, seconds, hunt.cost, hunt.lower_bound, *size, self.sweeps, self.expanded))

    def solution(self, hunt: "_Hunt") -> Solution:
        cost, bound = hunt.cost, hunt.lower_bound
        if np.isfinite(bound):
            bound -= _FLOAT_SAFETY * max(abs(bound), abs(cost) if np.isfinite(cost) else 0.0)
        bound = min(bound, cost)
        if hunt.best is None:
            status = "infeasible" if bound == np.inf else "gap"
        else:
            status = "optimal" if cost - bound <= self.tolerance * abs(cost) + 1e-300 else "gap"
        return Solution(hunt.best, cost, bound, self.expanded, self.sweeps, status)


class _Hunt:
    """The search for the least `value` among assignments within the limits: incumbent and lower bound.

    The main hunt's value is the problem's cost. Pricing opens hunts whose value is the Lagrangian and which know
    no limits; whatever they come across is offered to the `main` hunt too.
    """

    def __init__(
        self,
        run: _Run,
        value: Callable[[Ints], float],
        tolerance: float,
        main: "_Hunt | None" = None,
        limited: bool = True,
    ):
        self.run = run
        self.limited = limited
        self.value = value
        self.tolerance = tolerance
        self.main = main
        self.best: Ints | None = None
        self.cost = np.inf
        self.lower_bound = -np.inf

    def offer(self, assignment: Ints) -> bool:
        """Takes the assignment if it keeps the limits and is better; says whether."""
        if self.main is not None:
            self.main.offer(assignment)
        if self.limited and not self.run.problem.fits(assignment):
            return False
        cost = self.value(assignment)
        if cost < self.cost:
            self.best, self.cost = assignment, cost
            return True
        return False

    def threshold(self) -> float:
        return self.cost - self.tolerance / 2 * abs(self.cost) if self.best is not None else np.inf

    def proved(self, bound: float) -> bool:
        """Notes that all assignments not yet excluded cost at least `bound`; says whether that settles it."""
        self.lower_bound = max(self.lower_bound, float(min(bound, self.threshold())))
        return self.lower_bound >= self.threshold()

    def close(self, network: Network, multipliers: Floats, searches: tuple[tuple[str, int], ...] = _SEARCHES) -> None:
        """Searches `network` until the bound meets the incumbent, or nothing more is allowed."""
        level = 0
        while level < len(searches):
            network.reduce()
            if network.infeasible:
                self.proved(np.inf)
                return
            active = network.active()
            if not active:
                self.offer(network.lift({}))
                # With nothing left the multipliers charge nothing: the limits were kept by the reductions.
                self.proved(network.offset)
                return
            extra = {i: multipliers @ network.usage(i) for i in active} if multipliers.any() else {}
            dual = Dual(network, extra, -float(multipliers @ network.limits))
            before, size, cost = self.lower_bound, network.size(), self.cost
            if self._climb(network, dual):
                return
            if self.run.late():
                return
            dual.store()
            self._prune(network, dual)
            network.reduce()
            if network.infeasible or network.size() < _SHRUNK * size:
                continue
            order = search_order(network)
            space = build_space(network, order, multipliers)
            # Where the bound is tight A* walks straight to the optimum, in a fraction of the time of a beam.
            dive = (("astar", _DIVE_NODES * len(order)),) if searches[level][0] == "layers" else ()
            for kind, size_limit in (*dive, searches[level]):
                found = self._search(space, kind, size_limit)
                if found.chosen is not None:
                    self.offer(network.lift(found.chosen))
                proved = self.proved(found.lower_bound)
                self.run.report(kind, self, network)
                if proved:
                    return
            if self.run.late() or self.run.expanded >= self.run.max_nodes:
                return
            gap = self.cost - before
            helped = (
                network.size() < 0.97 * size
                or self.cost < cost
                or (np.isfinite(gap) and self.lower_bound - before > 0.1 * gap)
            )
            level += not helped

    def _climb(self, network: Network, dual: Dual) -> bool:
        """Sweeps until the bound meets the incumbent or has nearly stopped rising; says whether that settles it.

        A loose bound costs the searches more than sweeps cost, the more so the more variables there are.
        """
        before = dual.bound
        tried = np.inf
        while True:
            for _ in range(_SWEEPS):
                dual.sweep()
                self.run.sweeps += 1
                if self.run.late():
                    break
            bound = dual.bound * (1 - _FLOAT_SAFETY * np.sign(dual.bound))
            cost, chosen = dual.decoded()
            if chosen is not None and cost < tried:
                tried = cost
                self.offer(network.lift(chosen))
            proved = self.proved(bound)
            self.run.report("dual", self, network)
            if proved or self.run.late() or dual.sweeps >= min(max(30, len(dual.nodes)), 300):
                return proved
            if dual.sweeps % (2 * _SWEEPS) == 0:
                left = min(self.threshold() - dual.bound, abs(dual.bound))
                if dual.bound - before <= min(0.02 * left, _STALLED * abs(dual.bound)):
                    return False
                before = dual.bound

    def _search(self, space: Space, kind: str, size: int) -> Found:
        left = self.run.max_nodes - self.run.expanded
        if kind == "astar":
            found = astar(space, self.threshold(), min(size, left), self.run.late)
        else:
            width = min(size, max(16, left // len(space.stages)))
            found = layered(space, self.threshold(), width, self.run.late)
        self.run.expanded += found.expanded
        return found

    def _prune(self, network: Network, dual: Dual) -> None:
        threshold = self.threshold()
        if self.best is None:
            return
        for i, floor in dual.floors().items():
            keep = floor * (1 - _FLOAT_SAFETY * np.sign(floor)) < threshold
            if not keep.all():
                network.restrict(i, keep)


def _priced(hunt: _Hunt, network: Network) -> Floats:
    """Multipliers [resources] whose Lagrangian bound is nearly the best; incumbents come up on the way.

    Every assignment x is a cut: the bound at mu is at most cost(x) + mu . (usage(x) - limits).
    """
    problem, run = hunt.run.problem, hunt.run
    limits = padded_limits(problem)
    seen: list[Ints] = [] if hunt.best is None else [hunt.best]
    best, multipliers, trial = -np.inf, np.zeros(limits.size), np.zeros(limits.size)
    for _ in range(_PRICE_ROUNDS):
        priced = trial.copy()

        def lagrangian(x: Ints, mu: Floats = priced) -> float:
            return problem.cost(x) + float(mu @ (problem.usage(x) - limits))

        inner = _Hunt(run, lagrangian, max(hunt.tolerance, _PRICE_TOLERANCE), hunt, limited=False)
        for x in seen[-4:]:
            inner.offer(x)
        inner.close(network.relaxed(priced), np.zeros(0), _SEARCHES[:2])
        if hunt.proved(inner.lower_bound) or inner.best is None or run.late():
            break
        if inner.lower_bound > best:
            best, multipliers = inner.lower_bound, priced
        seen.append(inner.best)
        _mix(hunt, network, seen[-_MIXED:], multipliers)
        run.report("price", hunt, network)
        ceiling, trial = _next_prices(problem, limits, seen, multipliers)
        if ceiling - best <= 2 * _PRICE_TOLERANCE * abs(best):
            break
    return multipliers


def _mix(hunt: _Hunt, network: Network, seen: list[Ints], multipliers: Floats) -> None:
    """Looks for the best assignment within the limits that takes every state from one of those seen."""
    part = network.copy()
    for i in part.active():
        keep = np.isin(part.states(i), [x[i] for x in seen])
        if keep.any():
            part.restrict(i, keep)
    inner = _Hunt(hunt.run, hunt.run.problem.cost, hunt.tolerance, hunt)
    inner.best, inner.cost = hunt.best, hunt.cost
    inner.close(part, multipliers, _SEARCHES[:1])


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


def _starts(problem: Problem, start: Assignment | Sequence[Assignment] | None) -> Iterator[Ints]:
    if start is None:
        return
    rows = np.asarray(start, dtype=np.int64)
    for row in rows.reshape(-1, rows.shape[-1]) if rows.size else rows.reshape(-1, 0):
        if row.size != len(problem.unary):
            raise ValueError(f"start has {row.size} states; the problem has {len(problem.unary)} variables")
        for i, (s, unary) in enumerate(zip(row.tolist(), problem.unary, strict=True)):
            if not 0 <= s < unary.size:
                raise ValueError(f"start takes state {s} of variable {i}, which has {unary.size} states")
        yield row


def _descended(problem: Problem, start: Ints, rounds: int = 10) -> Ints:
    """Iterated conditional modes: each variable in turn takes its best state given all others, within the limits."""
    x = start.copy()
    near: list[list[tuple[int, Ints, Floats, Ints]]] = [[] for _ in problem.unary]
    for e in problem.edges:
        near[e.u].append((e.v, e.gu, e.table, e.gv))
        near[e.v].append((e.u, e.gv, e.table.T, e.gu))
    spare = padded_limits(problem) - problem.usage(x)
    for _ in range(rounds):
        changed = False
        for i, unary in enumerate(problem.unary):
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
