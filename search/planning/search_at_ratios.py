"""The search for the best program that fits at given ratios, and its bounds; a planning task runs it many times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hapsynth.search.cost.model import Floats
from hapsynth.search.formulation.memory_constraints import MemoryConstraints
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.planning.candidate import Candidate, CandidateBuilder, Incumbent, bound_at
from hapsynth.search.planning.effort import Clock, Effort
from hapsynth.search.planning.master_problem import limiting_weights
from hapsynth.search.planning.task import Task
from hapsynth.search.result import Progress
from hapsynth.search.sizing.ratios import Ratios
from hapsynth.search.solver import Edge, Ints, Messages, Problem, Solution, solve, solve_quotient

_MEMORY_ROUNDS = 8
_SHRINK_ROUNDS = 6
_LIMITED_NODES = 10_000
"""Nodes of a search within memory limits. Where prices leave a gap, ten times as many did not narrow it."""
MANY_AXES_NODES = 2000
"""Nodes of a search along three axes or more, and of a joint bound along several, as nodes have many states there. Ten
times as many did not raise the bound of a mixture of experts on 2x2x2 in a minute; all before had taken 8 s."""
_SHARE = 0.25
"""The fraction of the remaining time budget that one search may take."""
_SHRINK_TOLERANCE = 1e-3
_COSTLY = 1.02
"""Where the sizes at which a program fits cost more than this times those assumed for it, programs are sought that fit
at the sizes assumed."""
_TIE = 1e-6
"""Of a second, in the units of what is held: what programs that hold the same are told apart by."""


class FirstProgram(NamedTuple):
    """The first program that comes up at a builder's ratios, whether it fits or not."""

    builder: ProblemBuilder
    candidate: Candidate | None
    solved: Solution


class Found(NamedTuple):
    """The result of a search at some ratios. `candidate`: the best program that fits; `solution`: of the last problem;
    `given_up`: the cost of a program that does not fit and was not made to, inf if there is none."""

    candidate: Candidate | None
    solution: Solution
    given_up: float = np.inf


class FixedRatioSearch:
    """Finds programs of a task at given ratios, within its time. `choices`: the choice space; `incumbent`: the best
    program so far; `limits`: ops at which some program held too much -> the bytes available."""

    def __init__(self, task: Task, clock: Clock, effort: Effort) -> None:
        self.task, self.clock, self.effort = task, clock, effort
        self.choices = task.choices
        self.maker = CandidateBuilder(task.costs, task.options.fixed_ratios, clock.left)
        self.incumbent = Incumbent(task.memory_budget.limit)
        self.limits: dict[int, float] = {}
        self._resized: tuple[float, Candidate] | None = None
        """Of the programs that fit only at other sizes than assumed: the least cost at the assumed sizes, in seconds,
        and the program that has it."""
        self._builder: ProblemBuilder | None = None
        """The last builder. Ratios are searched twice where a plan is certified; without ratios there is one search for
        the bytes that all programs hold, and one for their costs."""
        self._quotient_messages: Messages = {}
        """The messages of the last search in which equivalent variables were one."""

    @property
    def limit(self) -> float:
        """Bytes that a device may hold."""
        return self.incumbent.limit

    def builder(self, ratios: Ratios | None) -> ProblemBuilder:
        """The builder of problems at some ratios; None: with every instruction at its own best ratios."""
        known = self._builder
        if known is None or known.ratios is not ratios or known.structure is not self.choices:
            known = self._builder = ProblemBuilder(self.choices, self.task.costs, ratios)
        return known

    # One additive problem

    def solve(
        self,
        problem: Problem,
        *,
        tolerance: float,
        seconds: float | None,
        start: Ints | None = None,
        warm: bool = True,
        messages: Messages | None = None,
        max_nodes: int | None = None,
        quotient: bool = False,
        enough: float = np.inf,
        beneath: float = -np.inf,
        stage: str | None = None,
        despite_interrupt: bool = False,
    ) -> Solution:
        """Solve one additive problem. It ends at the first of: a relative gap of `tolerance` or less; a lower bound of
        `enough` or more; an assignment that costs `beneath` or less; `seconds`; `max_nodes`.

        `start`: the initial assignment. `warm`: the dual starts from `messages`, by default those of the best program's
        search. `quotient`: solve the quotient problem, which is fast and gives no bound. `stage`: report progress under
        this name, with the incumbent's cost, for problems whose costs are no program's. KeyboardInterrupt where Ctrl-C
        was pressed before, unless `despite_interrupt`.
        """
        if self.clock.interrupted and not despite_interrupt:
            raise KeyboardInterrupt
        began = time.perf_counter()
        messages = self.incumbent.messages if messages is None else messages
        cost = lambda inner: inner.cost if stage is None else self.incumbent.cost
        tell = lambda inner: self.tell(stage or inner.stage, cost(inner), inner.lower_bound, inner.expanded)
        limited: dict[str, Any] = {"max_nodes": _LIMITED_NODES} if problem.resources and not quotient else {}
        if self.choices.axes > 2 and not quotient:
            limited = {"max_nodes": MANY_AXES_NODES}
        if max_nodes is not None:
            limited = {"max_nodes": max_nodes}
        solution = (solve_quotient if quotient else solve)(
            problem,
            start=start,
            messages=self._quotient_messages if quotient else messages if warm else None,
            tolerance=tolerance,
            enough=enough,
            beneath=beneath,
            time_budget_s=seconds,
            progress=tell,
            options=self.task.options.solver,
            **limited,
        )
        if quotient:
            self._quotient_messages = solution.messages
            # What it comes to is noted with those of all variables.
            solution = replace(solution, messages=messages)
        self.clock.interrupted |= solution.interrupted
        effort = self.effort
        effort.solver_s += time.perf_counter() - began
        effort.expanded += solution.expanded
        effort.sweeps += solution.sweeps
        effort.states = max(effort.states, sum(u.size for u in problem.unary))
        return solution

    def cheapest(
        self,
        builder: ProblemBuilder,
        limits: Mapping[int, float],
        begin: Ints | None,
        *,
        at_least: bool,
        tolerance: float,
        seconds: Callable[[], float | None],
        per_byte: float | None = None,
        **how: Any,
    ) -> Solution:
        """The cheapest program as a builder has its costs, within `limits` of bytes at some ops, which are counted
        `at_least` or as is likely (`MemoryConstraints`).

        `begin`: choices to begin from; None: everything replicated. `seconds`: that solving may take, once the problem
        is built. `per_byte`: what each byte beyond a limit costs, in place of limits; the search begins from nothing
        then. `how`: as in `solve`.
        """
        began = time.perf_counter()
        constraints = MemoryConstraints(builder, at_least=at_least)
        problem = constraints.problem(limits) if per_byte is None else constraints.priced(limits, per_byte)
        self.clock.built(began)
        start: Ints | None = None
        if per_byte is None:
            start = constraints.extended(problem, np.array(builder.structure.replicated()) if begin is None else begin)
        else:
            how["max_nodes"] = _LIMITED_NODES
        solved = self.solve(problem, start=start, tolerance=tolerance, seconds=seconds(), **how)
        self.effort.problems_s += time.perf_counter() - began
        return solved

    def bounded(self, builder: ProblemBuilder, begin: Ints | None, tolerance: float) -> Solution:
        """The cheapest program that fits as a builder has its costs, and the least that any costs. `begin`: choices of
        the search's own."""
        own = builder.structure is self.choices
        begin = begin if own else None
        # Messages are of the states of the search's own choices.
        return self.cheapest(
            builder, self.limits, begin, at_least=True, tolerance=tolerance, seconds=self.clock.allotted, warm=own
        )

    # The best program that fits

    def first_program(self, ratios: Ratios, tolerance: float) -> FirstProgram:
        """The first program that `best` finds at some ratios."""
        builder = self.builder(ratios)
        return FirstProgram(builder, *self._candidate(builder, {}, None, tolerance))

    def best(
        self,
        ratios: Ratios,
        begin: Ints | None,
        tolerance: float,
        *,
        certain: bool = False,
        above: float = np.inf,
        cutoff: float = np.inf,
        known: FirstProgram | None = None,
    ) -> Found:
        """The best program at the given ratios, sized, that fits; the bound knows the limits only where it had no need
        of them. Unless `certain` there may be better ones, and no bound (`solve_quotient`).

        A program that costs `above` or more at these ratios is not sized: the best so far stands for it. A program that
        does not fit is not made to if it costs `cutoff` or more or, unless `certain`, more than the best so far.
        `known`: the result of `first_program`, if it was called.

        Memory is limited at the ops where programs were found too large. What the problem counts there may be short of
        what a program then holds: the op's limit is tightened by the difference.
        """
        cutoff = cutoff if certain else min(cutoff, self.incumbent.cost)
        while True:
            limits = dict(self.limits)
            if known is not None:
                builder, candidate, solved = known
            else:
                builder = self.builder(ratios)
                candidate, solved = self._candidate(builder, limits, begin, tolerance, certain=certain, above=above)
            if candidate is not None and candidate.memory > self.limit and candidate.cost >= cutoff:
                # Making it fit could only raise its cost.
                return Found(None, solved, candidate.cost)
            if candidate is None or candidate.memory <= self.limit or self.choices.sparing:
                least = self._resized[0] if self._resized else np.inf
                if candidate is not None and candidate.over is not None and solved.cost < least:
                    self._resized = solved.cost, candidate
                break
            self.note(candidate, solved)
            self.limits.update(dict.fromkeys(self.maker.full_ops(candidate), self.limit))
            if self.clock.late():
                return Found(None, solved)
            self._spare()
            known = begin = None
        first = candidate, solved
        candidate, solved = self._fitting(builder, first, limits, tolerance, certain=certain, at_least=False)
        if not (self._fits(candidate) or self.incumbent.best or self.clock.late()):
            # None in source order. But programs are not kept to that: an update may run before other gradients.
            limits = dict(self.limits)
            candidate, solved = self._fitting(builder, None, limits, tolerance, certain=certain, at_least=True)
        return Found(candidate if self._fits(candidate) else None, solved)

    def _fits(self, candidate: Candidate | None) -> bool:
        return candidate is not None and candidate.memory <= self.limit

    def _fitting(
        self,
        builder: ProblemBuilder,
        first: tuple[Candidate | None, Solution] | None,
        limits: dict[int, float],
        tolerance: float,
        *,
        certain: bool,
        at_least: bool,
    ) -> tuple[Candidate | None, Solution]:
        """A program that fits, found by tightening limits where one does not; else the last program, or none. `first`:
        the result within `limits`, if known. `at_least`: how bytes are counted, as in `MemoryConstraints`."""
        search = partial(self._candidate, builder, tolerance=tolerance, certain=certain, at_least=at_least)
        # Limits within which a program was found, which holds too much, and limits within which there is none.
        loose, tight = dict[int, float](), dict[int, float]()
        between = lambda: {op: (loose.get(op, self.limit) + none) / 2 for op, none in tight.items()}
        begin: Ints | None = None
        candidate, solved = first or search(limits, begin)
        for left in reversed(range(_MEMORY_ROUNDS + 1)):
            self.note(candidate, solved)
            # Sizes that fit where those assumed did not are good enough: the next search is at those.
            if not left or self.clock.late() or self._fits(candidate):
                break
            if candidate is not None:
                begin = candidate.choices
                loose, limits = limits, self._tightened(builder, limits, candidate, at_least)
            elif limits == self.limits:
                break
            else:
                tight = limits
            if limits == tight:
                # Tightened by more than there is to save.
                limits = between()
            candidate, solved = search(limits, begin)
        return candidate, solved

    def note(self, candidate: Candidate | None, solved: Solution) -> None:
        """Offer a program to the incumbent, with the solution that it is from."""
        if candidate is not None:
            self.incumbent.offer(candidate, solved.messages)
            self.tell("search", candidate.cost, solved.lower_bound)

    def tell(self, stage: str, cost: float, bound: float, expanded: int = 0) -> None:
        """Report progress. `expanded`: nodes of the current search so far."""
        if self.task.options.progress is not None:
            best = min(cost, self.incumbent.cost)
            nodes = self.effort.expanded + expanded
            self.task.options.progress(Progress(stage, self.clock.elapsed(), best, min(bound, best), nodes))

    def _candidate(
        self,
        builder: ProblemBuilder,
        limits: Mapping[int, float],
        begin: Ints | None,
        tolerance: float,
        *,
        certain: bool = False,
        above: float = np.inf,
        at_least: bool = False,
    ) -> tuple[Candidate | None, Solution]:
        """The best program within the counted limits, and the solution that it is from."""
        solved = self.cheapest(
            builder, limits, begin, at_least=at_least, tolerance=tolerance, seconds=self._share, quotient=not certain
        )
        best = self.incumbent.best
        if solved.assignment is None:
            return None, solved
        known = best is not None and best.choices is not None and np.array_equal(best.choices, solved.assignment)
        if best is not None and not limits and (known or solved.cost >= above):
            # Its sizes are the best already; where they are those of this search its bound holds for them.
            return replace(best, bound=best.bound or bound_at(best.cost, solved)), solved
        began = time.perf_counter()
        candidate = self.maker.make(builder, solved)
        if limits:
            # What it counts is likely, not sure.
            candidate = replace(candidate, bound=None)
        self.effort.ratio_s += time.perf_counter() - began
        return candidate, solved

    def _share(self) -> float | None:
        """Seconds for one search; until there is a program that fits, enough is left to try from elsewhere."""
        return self.clock.share(_SHARE if self.incumbent.best is None else 1.0)

    # Memory

    def _spare(self) -> None:
        """Use the choice space in which the layout that a value is held in is a choice too."""
        began = time.perf_counter()
        self.choices = self.task.choice_space(sparing=True)
        self.effort.choices_s += time.perf_counter() - began
        self.incumbent.forget_choices()

    def within_limits(self, explore: Callable[[], None]) -> None:
        """Explore once more with memory limited where a program held too much at the sizes assumed for it, if those at
        which it fits cost. Where no better program comes up, the search goes on as if it had not been done."""
        resized, self._resized = self._resized, None
        incumbent = self.incumbent
        if not resized or self.choices.sparing or self.clock.late() or incumbent.cost <= resized[0] * _COSTLY:
            return
        before = self.choices, self.limits, self._quotient_messages, incumbent.best, incumbent.messages
        self.limits = dict.fromkeys(self.maker.full_ops(resized[1]), self.limit)
        self._spare()
        cost = incumbent.cost
        try:
            explore()
        finally:
            if incumbent.cost >= cost:
                self.choices, self.limits, self._quotient_messages, incumbent.best, incumbent.messages = before

    def _tightened(
        self, builder: ProblemBuilder, limits: dict[int, float], candidate: Candidate, at_least: bool
    ) -> dict[int, float]:
        """The limits with one at each op where a program holds too much; a limit that was there already is lowered by
        the bytes that the program holds there and the problem does not count."""
        full = self.maker.full_ops(candidate)
        constraints = MemoryConstraints(builder, at_least=at_least)
        assert candidate.choices is not None
        found = dict(limits)
        for op, held in full.items():
            problem = constraints.problem({op: np.inf})
            counted = float(problem.usage(constraints.extended(problem, candidate.choices)).max())
            missed = max(0.0, held - counted) if op in limits else 0.0
            found[op] = min(found.get(op, np.inf), self.limit - missed)
        self.limits.update(dict.fromkeys(full, self.limit))
        return found

    def shrink(self, ratios: Ratios) -> None:
        """Look for the program that holds the least at some ratios, until one fits.

        With weights w >= 0 over ops, of sum 1, the least sum of w . bytes over all choices is never above the least
        peak of all. The weights of the next round are drawn to those that are the worst for the programs seen so far
        (fictitious play); each round's program also shows further ops at which much is held.
        """
        if self.clock.late():
            return
        builder = ProblemBuilder(self.choices, self.task.costs, ratios)
        constraints = MemoryConstraints(builder, at_least=False)
        seen: list[Ints] = []
        # Then it is only told what the smallest found needs.
        hopeless = self.certain_bytes() > self.limit
        for _ in range(_SHRINK_ROUNDS):
            problem = constraints.problem(self.limits)
            count = len(problem.resources)
            # Half of the weight is spread: what is seen of the ops where nothing binds yet.
            weights = np.full(count, 1.0 / max(count, 1))
            if seen and count:
                held = np.array([problem.usage(constraints.extended(problem, x)) for x in seen])
                weights = (weights + limiting_weights(held, [0.0] * count)[0]) / 2
            lightest = _lightest(problem, weights)
            solved = self.solve(lightest, tolerance=_SHRINK_TOLERANCE, seconds=self.clock.allotted())
            if solved.assignment is None:
                return
            candidate = replace(self.maker.make(builder, solved, as_assumed=hopeless), bound=None)
            self.note(candidate, solved)
            known = len(self.limits)
            self.limits.update(dict.fromkeys(self.maker.full_ops(candidate), self.limit))
            choices = solved.assignment[: len(self.choices.choices)]
            repeated = any(np.array_equal(x, choices) for x in seen)
            if candidate.memory <= self.limit or self.clock.late():
                return
            if repeated and len(self.limits) == known:
                if constraints.at_least:
                    return
                # In source order no other holds less.
                constraints, seen = MemoryConstraints(builder, at_least=True), []
            seen.append(choices)

    def certain_bytes(self) -> float:
        """A lower bound on the bytes that every program holds, at any sizes and in any order."""
        return self.bytes_at(tuple(self.limits))

    def bytes_at(self, ops: Sequence[int]) -> float:
        """A lower bound on the bytes that every program on these devices holds near one of `ops`, at any sizes and in
        any order; 0 without ops."""
        if ops and self.clock.late():
            return 0.0
        constraints = MemoryConstraints(self.builder(None), at_least=True)
        return max((constraints.least_at(constraints.fullest_near(op)) for op in ops), default=0.0)

    def full_ops(self) -> tuple[int, ...]:
        """Ops at which the smallest program found so far holds the most."""
        least = self.incumbent.least
        return tuple(self.maker.full_ops(least)) if least else ()


def _lightest(problem: Problem, weights: Floats) -> Problem:
    """The problem of the least weighted bytes over a problem's resources, in units of their limits. Ties are broken by
    seconds, which leaves no bound on bytes."""
    unary: list[Floats] = []
    for i, seconds in enumerate(problem.unary):
        held = sum(w / r.limit * r.usage[i] for w, r in zip(weights, problem.resources, strict=True))
        unary.append(held + np.where(np.isfinite(seconds), _TIE * np.minimum(seconds, 1e300), np.inf))
    known: dict[int, Floats] = {}
    edges: list[Edge] = []
    for e, (_, _, table) in zip(problem.edges, problem.shared.edges, strict=True):
        if table not in known:
            known[table] = np.where(np.isfinite(e.table), _TIE * np.minimum(e.table, 1e300), np.inf)
        edges.append(e._replace(table=known[table]))
    return Problem(tuple(unary), tuple(edges))
