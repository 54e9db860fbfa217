"""Primal-dual search: raise the dual bound, drop states by reduced cost, run A*, repeat.

A* goes by the dual's cost to go as soon as an assignment read off the dual meets the bound; by the exact one of a
bucket elimination among as many of the states of least floor as there is room for; and where all that is left is too
wide for that, by mini-buckets.

Lemma (what dropping costs). Let T = incumbent - tolerance / 2 * |incumbent|, or what is `enough` if that is less. Only
states whose floor (see `trws.py`) is >= T and search nodes with f >= T are dropped, so every assignment lost costs at
least T; T only falls as incumbents improve. The optimum is therefore at least min(T, bound of what is left), at every
moment.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Literal

import numpy as np

from hapsynth.search.solver.astar import astar
from hapsynth.search.solver.bucket_elimination import EliminationOrder, bucket_space, buckets
from hapsynth.search.solver.local_polytope import cells, relax
from hapsynth.search.solver.options import SolverOptions
from hapsynth.search.solver.problem import Floats, Ints, Messages, Problem, Solution, SolverProgress
from hapsynth.search.solver.reduction import ReducedProblem
from hapsynth.search.solver.search_space import Space, dual_space
from hapsynth.search.solver.symmetry import spread_messages
from hapsynth.search.solver.trws import Dual
from hapsynth.search.solver.warm_start import recall, remember

_FLOAT_SAFETY = 1e-12  # relative; the dual and the searches add a few thousand terms in float64
_NODE_BYTES = 500  # of one in A*'s lists
_CELL_BYTES = 20  # of one in an elimination's tables, with what it is made of
_ENTRY_BYTES = 8


@dataclass
class SolveContext:
    """What one call of `solve` shares: its limits and its counts."""

    problem: Problem
    tolerance: float
    enough: float
    beneath: float
    time_budget_s: float | None
    progress: Callable[[SolverProgress], None] | None
    max_nodes: int
    memory_bytes: int
    messages: Messages
    from_quotient: bool
    """Begin from alike variables as one."""
    options: SolverOptions
    # By the clock as it then is: a benchmark may count CPU seconds.
    began: float = field(default_factory=lambda: time.monotonic())
    found: bool = False
    """What costs `beneath` or less."""
    expanded: int = 0
    sweeps: int = 0

    def seconds_left(self) -> float:
        """inf without a budget."""
        return math.inf if self.time_budget_s is None else self.time_budget_s - (time.monotonic() - self.began)

    def late(self) -> bool:
        """Out of time, or done: with an assignment that costs no more than was asked for."""
        return self.found or self.seconds_left() <= 0

    def full(self, network: ReducedProblem) -> bool:
        """Whether the tables of a network and of its copies, which share them, take all the memory that there is."""
        return network.tables.nbytes > self.memory_bytes

    def report(self, stage: str, search: "PrimalDualSearch") -> None:
        if self.progress is not None:
            while search.main is not None:
                search = search.main
            self.progress(SolverProgress(stage, search.cost, search.lower_bound, self.expanded))

    def solution(self, search: "PrimalDualSearch") -> Solution:
        cost, bound = search.cost, search.lower_bound
        if np.isfinite(bound):
            bound -= _FLOAT_SAFETY * max(abs(bound), abs(cost) if np.isfinite(cost) else 0.0)
        bound = min(bound, cost)
        if search.best is None:
            status = "infeasible" if bound == np.inf else "gap"
        else:
            status = "optimal" if cost - bound <= self.tolerance * abs(cost) + 1e-300 else "gap"
        return Solution(search.best, cost, bound, self.expanded, self.sweeps, status, messages=self.messages)


def _dual(network: ReducedProblem, multipliers: Floats) -> Dual:
    return Dual(network, _charges(network, multipliers), -float(multipliers @ network.limits))


def _charges(network: ReducedProblem, multipliers: Floats) -> dict[int, Floats]:
    return {i: multipliers @ network.usage(i) for i in network.active()} if multipliers.any() else {}


def _counts(floors: dict[int, Floats], highest: float) -> Callable[[int], int]:
    """How many states of a variable have floors up to `highest`: one at least."""
    known = {i: max(1, int(np.count_nonzero(row <= highest))) for i, row in floors.items()}
    return known.__getitem__


def _pairs(network: ReducedProblem) -> float:
    """The number of pairs of states that neighbours may take."""
    count = network.count
    return math.fsum(float(count(i)) * count(j) for i in network.active() for j in network.links[i] if i < j)


def _most(count: int, possible: Callable[[int], bool]) -> int:
    """The greatest k <= count that is possible, where less always is if more is; 0 if none."""
    return bisect_left(range(count), True, key=lambda k: not possible(k + 1))


_Reached = Literal["proof", "states to drop", "end"]


class PrimalDualSearch:
    """The search for the least `value` among assignments within the limits: incumbent and lower bound.

    The main search's value is the problem's cost. Pricing opens inner searches, whose value is the Lagrangian and which
    know no limits; they offer what they find to the `main` search too.
    """

    def __init__(
        self,
        run: SolveContext,
        value: Callable[[Ints], float],
        tolerance: float,
        main: "PrimalDualSearch | None" = None,
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

    def offer(self, assignment: Ints, value: float | None = None) -> bool:
        """Takes the assignment if it keeps the limits and is better; says whether. `value`: as `_value_within`, where
        that is known."""
        if self.main is not None:
            self.main.offer(assignment)
        cost = self._value_within(assignment) if value is None else value
        if cost < self.cost:
            self.best, self.cost = assignment, cost
            self.run.found |= self.main is None and cost <= self.run.beneath
            return True
        return False

    def _value_within(self, assignment: Ints) -> float:
        """inf where the assignment breaks a limit."""
        return self.value(assignment) if not self.limited or self.run.problem.fits(assignment) else np.inf

    @property
    def _room(self) -> float:
        """Table entries that an exact elimination may take."""
        return min(self.run.options.elimination_cells, self.run.memory_bytes / 4 / _CELL_BYTES)

    def threshold(self) -> float:
        known = self.cost - self.tolerance / 2 * abs(self.cost) if self.best is not None else np.inf
        return min(known, self.run.enough)

    def proved(self, bound: float) -> bool:
        """Notes that all assignments not yet excluded cost at least `bound`; says whether that settles it."""
        self.lower_bound = max(self.lower_bound, float(min(bound, self.threshold())))
        return self.lower_bound >= self.threshold()

    def close(
        self,
        network: ReducedProblem,
        multipliers: Floats,
        searches: tuple[int, ...] | None = None,
    ) -> None:
        """Searches `network` until the bound meets the incumbent, or nothing more is allowed."""
        options = self.run.options
        searches = options.searches if searches is None else searches
        level, relaxed = 0, False
        recalled = self.main is not None
        sizes = [row.size for row in self.run.problem.unary]
        while level < len(searches):
            network.reduce(self.run.late)
            if network.infeasible:
                self.proved(np.inf)
                return
            if self.run.late():
                return
            active = network.active()
            if not active:
                self.offer(network.lift({}))
                # With nothing left the multipliers charge nothing: the limits were kept by the reductions.
                self.proved(network.offset)
                return
            if not recalled:
                # With few states some sweeps of the whole network cost less than its quotient's.
                from_quotient = self.run.from_quotient or (
                    not self.run.messages and network.size() > options.many_states * len(active)
                )
                if not (from_quotient and spread_messages(network, multipliers)):
                    recall(self.run.messages, network, sizes)
                recalled = True
            dual = _dual(network, multipliers)
            before, size, cost = self.lower_bound, network.size(), self.cost
            order = cache(partial(buckets, network))
            reached = self._dual_ascent(network, dual, multipliers, order)
            dual.store()
            if self.main is None:
                remember(self.run.messages, network, sizes)
            if reached == "proof" or self.run.late():
                return
            if reached == "states to drop":
                self._prune(network, dual)
                continue
            eliminated = self._likely(network, dual, multipliers, order())
            if eliminated and self.proved(-np.inf):
                return
            self._prune(network, dual)
            network.reduce(self.run.late)
            if self.run.late():
                return
            if network.infeasible or network.size() < options.shrunk * size or self.cost < cost:
                continue
            rise, gap = self.lower_bound - before, self.cost - before
            if eliminated and not network.limits.size and rise > options.worthwhile * gap:
                continue
            if not relaxed and self._is_loose(network):
                relaxed = True
                if relax(network, _charges(network, multipliers), self.run.seconds_left()):
                    continue
            if self.run.full(network) or self._searched(network, multipliers, searches[level]):
                return
            if self.run.late() or self.run.expanded >= self.run.max_nodes:
                return
            gap = self.cost - before
            helped = (
                network.size() < 0.97 * size
                or self.cost < cost
                or (np.isfinite(gap) and self.lower_bound - before > options.worthwhile * gap)
            )
            level += not helped

    def _is_loose(self, network: ReducedProblem) -> bool:
        """Whether the bound is so far below what is sought that a linear program pays, and there is room for one."""
        options, threshold = self.run.options, self.threshold()
        if not self.lower_bound < threshold - options.loose * abs(threshold) < np.inf:
            return False
        return network.size() <= options.relaxed_cells and cells(network) <= options.relaxed_cells

    def _searched(self, network: ReducedProblem, multipliers: Floats, nodes: int) -> bool:
        """Searches the network once, by a cost to go as exact as there is room for; says whether that settles it. It is
        not searched where there is no room for the pairs of states of neighbours."""
        if _pairs(network) > self.run.memory_bytes / 4 / _ENTRY_BYTES:
            return False
        order = buckets(network)
        every = {i: np.arange(network.count(i)) for i in network.active()}
        most = math.inf if order.cells(network.count) <= self._room else self._room / len(every)
        space = bucket_space(network, multipliers, order, every, most)
        return self.proved(self._astar(network, space, self.threshold(), nodes))

    def _astar(self, network: ReducedProblem, space: Space, threshold: float, nodes: int, slack: float = 0.0) -> float:
        """Offers what A* finds below a threshold; returns what any assignment of the space below it costs at least."""
        left, kept = min(nodes, self.run.max_nodes - self.run.expanded), self.run.memory_bytes / 4 / _NODE_BYTES
        # A walk straight to the end is always allowed.
        found = astar(space, threshold, max(left, len(space.depths)), self.run.late, slack, kept)
        self.run.expanded += found.expanded
        if found.chosen is not None:
            self.offer(network.lift(found.chosen))
        self.run.report("astar", self)
        return found.lower_bound

    def _dual_ascent(
        self,
        network: ReducedProblem,
        dual: Dual,
        multipliers: Floats,
        order: Callable[[], EliminationOrder],
    ) -> _Reached:
        """Sweeps until the bound meets the incumbent or has nearly stopped rising, or there is something better to do.

        A loose bound costs the searches more than sweeps cost, the more so the more variables there are. Where there
        are many states sweeps end once half of them can go, or A* is to look for an assignment among few states.
        """
        options = self.run.options
        many = dual.theta.size > options.many_states * len(dual.nodes)
        before = dual.bound
        tried = np.inf
        while True:
            for _ in range(options.sweeps):
                dual.sweep()
                self.run.sweeps += 1
                if self.run.late():
                    break
            bound = dual.bound * (1 - _FLOAT_SAFETY * np.sign(dual.bound))
            cost, chosen = dual.decoded()
            if chosen is not None and cost < tried:
                tried = cost
                assignment = network.lift(chosen)
                value = self._value_within(assignment)
                slack = self.tolerance / 2 * abs(value)
                if value < self.cost and value - slack <= bound:
                    # So close to the bound the heuristic leads straight to it, and proves it.
                    dual.store()
                    space = dual_space(network, dual, multipliers)
                    nodes = options.dive_nodes * len(dual.nodes)
                    self.proved(self._astar(network, space, value + 2 * slack, nodes, slack))
                self.offer(assignment, value)
            proved = self.proved(bound)
            self.run.report("dual", self)
            if proved or self.run.late() or dual.sweeps >= min(max(30, len(dual.nodes)), options.most_sweeps):
                return "proof" if proved else "end"
            if dual.sweeps % (2 * options.sweeps) == 0:
                if order().cells(_counts(dual.floors(), self.threshold())) <= self._room:
                    return "end"
                if dual.theta.size > options.droppable and np.mean(dual.floor >= self.threshold()) > 1 - options.shrunk:
                    return "states to drop"
                if many and dual.sweeps >= options.first_sweeps and dual.bound < (1 - options.close) * self.cost:
                    return "end"
                left = min(self.threshold() - dual.bound, abs(dual.bound))
                if dual.bound - before <= min(0.02 * left, options.stalled * abs(dual.bound)):
                    return "end"
                before = dual.bound

    def _likely(self, network: ReducedProblem, dual: Dual, multipliers: Floats, order: EliminationOrder) -> bool:
        """A* by the exact cost to go among the states of least floor, as many as there is room for; says if there was.

        Whatever takes a state that was left out costs at least the least floor of those.
        """
        floors = {i: floor * (1 - _FLOAT_SAFETY * np.sign(floor)) for i, floor in dual.floors().items()}
        ranked = {i: np.sort(floor) for i, floor in floors.items()}
        every = np.unique(np.concatenate(list(ranked.values())))
        every = every[every < self.threshold()]
        kept = _most(every.size, lambda k: order.cells(_counts(ranked, float(every[k - 1]))) <= self._room)
        if not kept:
            return False
        highest = float(every[kept - 1])
        likely = {i: np.flatnonzero(f <= max(highest, float(ranked[i][0]))) for i, f in floors.items()}
        space = bucket_space(network, multipliers, order, likely)
        least = self._astar(network, space, self.cost, self.run.options.dive_nodes * len(likely))
        self.proved(min(least, float(every[kept]) if kept < every.size else np.inf))
        return True

    def _prune(self, network: ReducedProblem, dual: Dual) -> None:
        threshold = self.threshold()
        if threshold == np.inf:
            return
        # Alike variables keep what any of them keeps: so they stay alike, and are reduced once.
        together: dict[object, tuple[list[int], Floats]] = {}
        for i, floor in dual.floors().items():
            alike = network.kind(i), tuple(sorted(network.links[i].values()))
            members, least = together.setdefault(alike, ([], floor.copy()))
            members.append(i)
            np.minimum(least, floor, out=least)
        for members, least in together.values():
            keep = least * (1 - _FLOAT_SAFETY * np.sign(least)) < threshold
            for i in members:
                network.restrict(i, keep)
