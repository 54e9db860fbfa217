"""The best program at given ratios that fits, and bounds: what a planning task does again and again, and what it has
spent on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.memory_budget import MemoryBudget
from hapsynth.graph.ir import Graph
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.formulation.choice_space import ChoiceSpace, Restriction
from hapsynth.search.formulation.memory_constraints import MemoryConstraints
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.planning.candidate import SAME, Candidate, CandidateBuilder, bound_at
from hapsynth.search.planning.infeasibility import certain_bytes, weighed, worst_weights
from hapsynth.search.result import Progress
from hapsynth.search.sizing.fixed_ratios import FixedRatios
from hapsynth.search.sizing.ratios import NOTHING, EvenDims, Ratios, starts
from hapsynth.search.solver import Ints, Messages, Problem, Solution, solve, solve_quotient
from hapsynth.search.solver import Progress as SolverProgress

_MEMORY_ROUNDS = 8
_SHRINK_ROUNDS = 6
_LIMITED_NODES = 100_000
"""Of a search within memory limits: where prices leave a gap, ten times as many narrowed it by nothing."""
_SHARES = 4
"""Of what is left of a time budget, one is for a search."""
_LAST_S = 1.0
"""Seconds for the bound that is still sought after Ctrl-C."""
_LEAST_S = 0.05
"""Seconds of whatever is begun at all."""
_TOLERANCE = 1e-6
_JOINT_TOLERANCE = 1e-4
_SAFETY = 1e-9
WIDE_TOLERANCE = 5e-5
"""With several mesh axes, where the last steps of the bound take longest; still half of what counts as settled."""
ROUGH_TOLERANCE = 2e-3
"""With several mesh axes, before the last search, which is the one that has to prove something. With a looser one the
next search's dual begins from less: 5e-3 made BERT-base on 2x4 slower."""


@dataclass
class FixedRatioSearch:
    """Finds programs for one graph on one cluster, in which every device takes part.

    `memory_limit`: bytes per device (`MemoryBudget.of`), None for what they have. `base`: a finder of the same graph on
    other devices, whose tables this one shares. `fixed_ratios`: ratios that are asked for. `exact`: how shards are
    stored (`MemoryBudget`).
    """

    graph: Graph
    cluster: Cluster
    memory_limit: float | None = None
    time_budget_s: float | None = None
    restriction: Restriction | None = None
    progress: Callable[[Progress], None] | None = None
    base: FixedRatioSearch | None = None
    fixed_ratios: FixedRatios | None = None
    exact: bool = False
    table: FactorTable = field(init=False)
    costs: CostModel = field(init=False)
    expanded: int = field(init=False, default=0)
    sweeps: int = field(init=False, default=0)
    states: int = field(init=False, default=0)
    """Of the largest problem."""
    search_s: float = field(init=False, default=0.0)
    """Seconds in which problems were built and solved, of which `solver_s` in the solver."""
    solver_s: float = field(init=False, default=0.0)
    ratio_s: float = field(init=False, default=0.0)
    bound_s: float = field(init=False, default=0.0)
    """Of `solver_s`, for the joint bound."""
    interrupted: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        base = self.base
        self.table = base.table if base else FactorTable(self.graph)
        room = MemoryBudget.of(self.cluster, self.memory_limit, exact=self.exact)
        costs = base.costs.on(self.cluster, room) if base else None
        self.costs = costs or CostModel(self.graph, self.cluster, self.table, room=room)
        self.axes = self.costs.axes
        self._starts = starts(self.costs)
        if self.fixed_ratios is not None and self.fixed_ratios.weights is not None:
            self._starts = [(self.fixed_ratios.weights, NOTHING)]
        rough = ROUGH_TOLERANCE if len(self._starts) > 1 else WIDE_TOLERANCE
        self._tolerance = _TOLERANCE if len(self.axes) == 1 else rough
        if base is not None and len(base.axes) == len(self.axes) and base.restriction is self.restriction:
            self._unsparing = base._unsparing
        else:
            self._unsparing = ChoiceSpace(self.graph, self.table, self.restriction, len(self.axes))
        self.structure = self._unsparing
        self.limit = room.limit
        self._maker = CandidateBuilder(self.costs, self.fixed_ratios, self._seconds_left)
        self._structure_s = time.perf_counter() - self.began
        self._deadline = None if self.time_budget_s is None else self.began + self.time_budget_s
        self._best: Candidate | None = None
        self._least: Candidate | None = None
        self._bar = np.inf
        self._looked_at: tuple[Sizes, Ratios] | None = None
        """The sizes of the program at whose own ratios was searched last, and these."""
        self._formulated: ProblemBuilder | None = None
        """The last one: the same ratios are searched twice where a plan is certified, and without any it is asked first
        what all programs hold, then what they cost."""
        self._glanced: tuple[ProblemBuilder, Candidate | None, Solution] | None = None
        self.given_up = np.inf
        """The least cost of what does not fit and was not followed up, as it exceeded a bar."""
        self._problem_s = 0.0
        """Seconds that the slowest problem so far took to build: none is begun in less."""
        self._joint: tuple[float, float, int] | None = None
        """The joint bound, the most that was sought, and within how many limits."""
        self._messages: Messages = {}
        """Of the last search's dual."""
        self._tied_messages: Messages = {}
        """Of the last search with alike variables as one."""
        self._best_messages: Messages = {}
        """Of the search that came to the best program: from them the next one's dual begins."""
        self._limits: dict[int, float] = {}
        """Ops at which some program was too large -> the bytes there are."""

    @property
    def cost(self) -> float:
        """Of the best program that fits so far; inf where there is none."""
        return self._best.cost if self._best else np.inf

    @property
    def limits(self) -> tuple[float, ...]:
        """Bytes that each device may hold."""
        return self.costs.room.limits

    def _ratios(self, weights: Floats, evenly: EvenDims = NOTHING, sizes: Sizes | None = None) -> Ratios:
        named = None
        if self.fixed_ratios is not None:
            named = self.fixed_ratios.named
            if self.fixed_ratios.weights is not None:
                weights, evenly = self.fixed_ratios.weights, NOTHING
        return Ratios(self.graph, self.table, weights, sizes, self.costs.lengths, evenly, named)

    def joint_bound(self, enough: float = np.inf) -> float:
        """Seconds that no program on these devices goes below at any ratios; nothing beyond `enough` is sought."""
        if self._joint is not None:
            bound, sought, limits = self._joint
            if bound >= enough or (bound < sought and limits == len(self._limits)):
                return bound
        if self._deadline is not None and self._seconds_left() <= self._problem_s:
            return 0.0
        began, before = time.perf_counter(), self.solver_s
        self._tell("joint bound", self.cost, -np.inf)
        certain = MemoryConstraints(self._formulator(None), at_least=True)
        problem = certain.problem(self._limits)
        self._built(began)
        start = certain.extended(problem, self._begin(self._best.choices if self._best else None))
        left = _LAST_S if self.interrupted else self._left()
        tolerance = _JOINT_TOLERANCE if len(self.axes) == 1 else ROUGH_TOLERANCE
        tell = lambda inner: self._tell("joint bound", self.cost, inner.lower_bound, inner.expanded)
        solution = self._solve(
            problem,
            anyway=True,
            # Ideal ratios are too far from a program's.
            cold=True,
            start=start,
            tolerance=tolerance,
            # A little more, as the solver states its bounds less what rounding may have added.
            enough=enough * (1 + _SAFETY),
            time_budget_s=left,
            progress=tell,
        )
        self.search_s += time.perf_counter() - began
        self.bound_s += self.solver_s - before
        # No bound at all is had where time has run out.
        bound = max(solution.lower_bound, 0.0)
        self._joint = bound, enough, len(self._limits)
        return bound

    def _built(self, began: float) -> None:
        """Note how long it has taken to build a problem."""
        self._problem_s = max(self._problem_s, time.perf_counter() - began)

    def _solve(
        self, problem: Problem, *, tied: bool = False, anyway: bool = False, cold: bool = False, **options: Any
    ) -> Solution:
        """`solve` or `solve_quotient`, counted, and not begun any more once Ctrl-C was pressed, unless `anyway`. It
        begins from the messages of the best program's search, or of the last tied one, unless `cold`."""
        if self.interrupted and not anyway:
            raise KeyboardInterrupt
        began = time.perf_counter()
        self._messages = {} if cold else dict(self._best_messages)
        messages = self._tied_messages if tied else None if cold else self._messages
        if problem.resources and not tied:
            options.setdefault("max_nodes", _LIMITED_NODES)
        solution = (solve_quotient if tied else solve)(problem, messages=messages, **options)
        self.interrupted |= solution.interrupted
        self.solver_s += time.perf_counter() - began
        self.expanded += solution.expanded
        self.sweeps += solution.sweeps
        self.states = max(self.states, sum(u.size for u in problem.unary))
        return solution

    def _search(
        self, ratios: Ratios, choices: Ints | None, *, certain: bool = False, above: float = np.inf
    ) -> tuple[Candidate | None, Solution]:
        """The best program at the given ratios, sized, that fits; the bound of the solution knows the limits only
        where it had no need of them. Unless `certain` there may be better ones, and no bound (`solve_quotient`).
        What costs `above` or more at these ratios is not sized: the best so far stands for it.

        Memory is limited at the ops where programs were found too large. What the problem counts there may be short of
        what a program then holds: the op's limit is tightened by the difference.
        """
        limits = dict(self._limits)
        if self._glanced is not None:
            (builder, candidate, solution), self._glanced = self._glanced, None
        else:
            builder = self._formulator(ratios)
            candidate, solution = self._solve_once(builder, limits, choices, certain=certain, above=above)
        bar = self._bar if certain else min(self._bar, self.cost)
        if candidate is not None and candidate.memory > self.limit and candidate.cost >= bar:
            # To fit would only make it dearer.
            self.given_up = min(self.given_up, candidate.cost)
            return None, solution
        if candidate is not None and candidate.memory > self.limit and not self.structure.sparing:
            self._note(candidate, solution)
            self._limits.update(dict.fromkeys(self._maker.full_ops(candidate), self.limit))
            if self._late():
                return None, solution
            self._spare()
            return self._search(ratios, None, certain=certain, above=above)
        found: list[Candidate] = []
        for _ in range(_MEMORY_ROUNDS):
            if candidate is not None:
                self._note(candidate, solution)
                found.append(candidate)
                # Sizes that fit where those assumed did not are good enough: the next search is at those.
                if self._late() or candidate.memory <= self.limit:
                    break
                limits = self._tightened(builder, limits, candidate)
            elif not found or limits == self._limits or self._late():
                break
            else:
                # Tightened by more than there is to save: half of it.
                limits = {op: (limits[op] + self._limits[op]) / 2 for op in limits}
            candidate, solution = self._solve_once(builder, limits, found[-1].choices, certain=certain)
        self._note(candidate, solution)
        return candidate if candidate is not None and candidate.memory <= self.limit else None, solution

    def _formulator(self, ratios: Ratios | None) -> ProblemBuilder:
        known = self._formulated
        if known is None or known.ratios is not ratios or known.structure is not self.structure:
            known = self._formulated = ProblemBuilder(self.structure, self.costs, ratios)
        return known

    def _spare(self) -> None:
        """From now on what values are held as is a choice."""
        began = time.perf_counter()
        self.structure = ChoiceSpace(self.graph, self.table, self.restriction, len(self.axes), sparing=True)
        self._structure_s += time.perf_counter() - began
        self._best = replace(self._best, choices=None) if self._best else None
        self._best_messages = {}

    def _tightened(self, builder: ProblemBuilder, limits: dict[int, float], candidate: Candidate) -> dict[int, float]:
        """Limits at the ops where a program holds too much; where there was one already, less by what the program holds
        there and the problem does not count."""
        full = self._maker.full_ops(candidate)
        likely = MemoryConstraints(builder, at_least=False)
        problem = likely.problem(dict.fromkeys(full, np.inf))
        assert candidate.choices is not None
        usage = problem.usage(likely.extended(problem, candidate.choices)).reshape(len(full), -1).max(axis=1)
        found = dict(limits)
        for (op, held), counted in zip(full.items(), usage, strict=True):
            missed = max(0.0, held - float(counted)) if op in limits else 0.0
            found[op] = min(found.get(op, np.inf), self.limit - missed)
        self._limits.update(dict.fromkeys(full, self.limit))
        return found

    def _solve_once(
        self,
        builder: ProblemBuilder,
        limits: Mapping[int, float],
        choices: Ints | None,
        *,
        certain: bool = False,
        above: float = np.inf,
    ) -> tuple[Candidate | None, Solution]:
        began = time.perf_counter()
        likely = MemoryConstraints(builder, at_least=False)
        problem = likely.problem(limits)
        self._built(began)
        start = likely.extended(problem, self._begin(choices))
        solution = self._solve(
            problem,
            tied=not certain,
            start=start,
            tolerance=self._tolerance,
            time_budget_s=self._share(),
            progress=self._relay,
        )
        self.search_s += time.perf_counter() - began
        best, found = self._best, solution.assignment
        if found is None:
            return None, solution
        known = best is not None and best.choices is not None and np.array_equal(best.choices, found)
        if best is not None and not limits and (known or solution.cost >= above):
            # Its sizes are the best already; where they are those of this search its bound holds for them.
            return replace(best, bound=best.bound or bound_at(best.cost, solution)), solution
        began = time.perf_counter()
        candidate = self._maker.make(builder, solution)
        if limits:
            # What it counts is likely, not sure.
            candidate = replace(candidate, bound=None)
        self.ratio_s += time.perf_counter() - began
        return candidate, solution

    def _bound_within(self, builder: ProblemBuilder, choices: Ints | None) -> float:
        """The least that any program costs that fits, as it is formulated."""
        return self._bounded(builder, choices).lower_bound

    def _bounded(self, builder: ProblemBuilder, choices: Ints | None) -> Solution:
        """The cheapest program that fits, as it is formulated, and the least that any costs."""
        began = time.perf_counter()
        certain = MemoryConstraints(builder, at_least=True)
        problem = certain.problem(self._limits)
        self._built(began)
        own = builder.structure is self.structure
        begin = self._begin(choices) if own else np.array(builder.structure.replicated())
        solution = self._solve(
            problem,
            # Messages are of the structure's states.
            cold=not own,
            start=certain.extended(problem, begin),
            tolerance=self._tolerance,
            time_budget_s=self._left(),
            progress=self._relay,
        )
        self.search_s += time.perf_counter() - began
        return solution

    def _begin(self, choices: Ints | None) -> Ints:
        return np.array(self.structure.replicated()) if choices is None else choices

    def _shrink(self) -> None:
        """Looks for the program that holds the least, at even sizes: padded shards hold more at all others. Exact ones
        are cut as unlike limits are."""
        if self._late():
            return
        room = self.costs.room.proportions
        even = self._ratios(np.full(self.cluster.n, 1.0 / self.cluster.n) if room is None else room)
        likely = MemoryConstraints(ProblemBuilder(self.structure, self.costs, even), at_least=False)
        seen: list[Ints] = []
        # Then it is only told what the smallest found needs.
        hopeless = self._certain_bytes() > self.limit
        for _ in range(_SHRINK_ROUNDS):
            problem = likely.problem(self._limits)
            count = len(problem.resources)
            # Half of the weight is spread: what is seen of the ops where nothing binds yet.
            weights = np.full(count, 1.0 / max(count, 1))
            if seen and count:
                weights = (weights + worst_weights([problem.usage(likely.extended(problem, x)) for x in seen])) / 2
            solution = self._solve(
                weighed(problem, weights, ties=True), tolerance=1e-3, time_budget_s=self._left(), progress=self._relay
            )
            if solution.assignment is None:
                return
            candidate = replace(self._maker.make(likely.builder, solution, as_assumed=hopeless), bound=None)
            self._note(candidate, solution)
            known = len(self._limits)
            self._limits.update(dict.fromkeys(self._maker.full_ops(candidate), self.limit))
            choices = solution.assignment[: len(self.structure.choices)]
            repeated = any(np.array_equal(x, choices) for x in seen)
            if candidate.memory <= self.limit or self._late() or (repeated and len(self._limits) == known):
                return
            seen.append(choices)

    def _certain_bytes(self) -> float:
        """What every program holds at least, at any sizes and in any order, as far as is known."""
        return self.bytes_at(tuple(self._limits))

    def bytes_at(self, ops: Sequence[int]) -> float:
        """What every program on these devices holds at least near some of the given ops, at any sizes and in any
        order; 0 where there are none, or no limits."""
        if np.isinf(self.limit) or (ops and self._late()):
            return 0.0
        return certain_bytes(MemoryConstraints(self._formulator(None), at_least=True), ops)

    def full_ops(self) -> tuple[int, ...]:
        """Ops at which the smallest program found so far holds the most."""
        return tuple(self._maker.full_ops(self._least)) if self._least else ()

    def _note(self, candidate: Candidate | None, solution: Solution) -> None:
        if candidate is None:
            return
        if self._least is None or candidate.memory < self._least.memory:
            self._least = candidate
        best = self._best
        least_gain = 1e-12 if best is None or best.bound is None or candidate.bound is not None else SAME
        if candidate.memory <= self.limit and (
            best is None
            or candidate.cost < best.cost * (1 - least_gain)
            or (best.bound is None and candidate.bound is not None and candidate.cost <= best.cost * (1 + 1e-12))
        ):
            self._best, self._best_messages = candidate, self._messages
        self._tell("search", candidate.cost, solution.lower_bound)

    def allow(self, seconds: float) -> None:
        """From now on, if there is a time budget at all."""
        if self._deadline is not None:
            self._deadline = time.perf_counter() + max(_LEAST_S, seconds)

    def _left(self) -> float | None:
        return None if self._deadline is None else max(_LEAST_S, self._deadline - time.perf_counter())

    def _seconds_left(self) -> float:
        """Of the time budget; inf without one."""
        return np.inf if self._deadline is None else self._deadline - time.perf_counter()

    def _share(self) -> float | None:
        """Seconds for one search; until there is a program that fits, enough is left to try from elsewhere."""
        left = self._left()
        return left if left is None or self._best is not None else left / _SHARES

    def _late(self) -> bool:
        """Whether nothing more is to be begun."""
        return self.interrupted or (self._deadline is not None and self._seconds_left() <= self._problem_s)

    def _relay(self, inner: SolverProgress) -> None:
        self._tell(inner.stage, inner.cost, inner.lower_bound, inner.expanded)

    def _tell(self, stage: str, cost: float, bound: float, expanded: int = 0) -> None:
        """`expanded`: nodes of the search at hand."""
        if self.progress is not None:
            best = min(cost, self._best.cost if self._best else np.inf)
            seconds = time.perf_counter() - self.began
            self.progress(Progress(stage, seconds, best, min(bound, best), self.expanded + expanded))
