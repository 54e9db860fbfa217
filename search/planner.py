"""The whole search: programs and ratios in turn, memory, and the certificate (DESIGN D3, D4).

For a start ratio, the solver finds the best program and the linear program its best sizes; the search then runs
again at those sizes, and so on until the cost stops falling. The best pair over all starts is kept. The last search
at the kept pair's own sizes gives its lower bound; one more search, with every instruction at its own ideal ratio,
gives the joint bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hapsynth.cluster import Cluster
from hapsynth.graph import Graph
from hapsynth.instructions.checker import check
from hapsynth.instructions.program import FactorTable
from hapsynth.instructions.sizes import Sizes
from hapsynth.instructions.uncovered import named
from hapsynth.search.candidate import Candidate, Maker, own_weights
from hapsynth.search.costs import CostModel, Floats
from hapsynth.search.formulate import Formulator
from hapsynth.search.limits import Limits
from hapsynth.search.problem import Ints, Problem, Solution, solve
from hapsynth.search.problem import Progress as SolverProgress
from hapsynth.search.ratios import Ratios, kinship, of_state, proportional
from hapsynth.search.result import Progress, Result, Status
from hapsynth.search.shortage import certain_bytes, weighed, worst_weights
from hapsynth.search.structure import Restriction, Structure

_T = TypeVar("_T")

Evenly = Set[tuple[int, int]]
_NOTHING: Evenly = frozenset()

_ROUNDS = 6
_MEMORY_ROUNDS = 8
_SHRINK_ROUNDS = 6
_SHARES = 4
_SEARCHING = 0.7
"""Of a time budget."""
_LAST_S = 1.0
"""Seconds for the bound that is still sought after Ctrl-C."""
_TOLERANCE = 1e-6
_WIDE_TOLERANCE = 5e-5
"""With several mesh axes, where the last steps of the bound take longest; still half of what counts as settled."""
_ROUGH_TOLERANCE = 2e-3
"""With several mesh axes, before the sizes are found: the last search is the one that has to prove something."""
_SETTLED = 1e-4
"""A cost that falls by less than this fraction has stopped falling; it is also the gap that counts as optimal."""


class InfeasibleError(ValueError):
    """No program fits the devices' memory."""


@dataclass
class Planner:
    """One planning task. `memory_limit`: bytes per device, None for what the devices have."""

    graph: Graph
    cluster: Cluster
    memory_limit: float | None = None
    time_budget_s: float | None = None
    restriction: Restriction | None = None
    progress: Callable[[Progress], None] | None = None
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

    def __post_init__(self) -> None:
        self._began = time.perf_counter()
        self.table = FactorTable(self.graph)
        self.costs = CostModel(self.graph, self.cluster, self.table)
        self.axes = self.costs.axes
        self._tolerance = _TOLERANCE if len(self.axes) == 1 else _ROUGH_TOLERANCE
        self.structure = Structure(self.graph, self.table, self.restriction, len(self.axes))
        # The switch form stores every shard padded, so the smallest device's memory is everyone's limit.
        self.limit = float(self.costs.memory.min()) if self.memory_limit is None else self.memory_limit
        self._maker = Maker(self.costs, self.limit)
        self._structure_s = time.perf_counter() - self._began
        self._deadline = None if self.time_budget_s is None else self._began + self.time_budget_s
        self._best: Candidate | None = None
        self._least: Candidate | None = None
        self._interrupted = False
        self._limits: dict[int, float] = {}
        """Ops at which some program was too large -> the bytes there are."""

    def run(self) -> Result:
        """Plan; raises InfeasibleError when nothing fits.

        Ctrl-C ends the search with the best program so far, or raises KeyboardInterrupt if there is none. Only a joint
        bound is looked for then, so that there is a gap to tell, until Ctrl-C is pressed again.
        """
        end = self._deadline
        if end is not None:
            # The rest is for the bounds.
            self._deadline = self._began + _SEARCHING * (end - self._began)
        self._unless_interrupted(self._explore, None)
        self._deadline = end
        best = self._best
        if best is None:
            raise KeyboardInterrupt if self._interrupted else InfeasibleError(self._shortage())
        certified = self._unless_interrupted(partial(self._certify, best), None)
        if certified is None:
            best = self._best or best
        best, bound = certified or (best, best.bound)
        before = self.solver_s
        try:
            joint = self._joint_bound(best, bound)
        except KeyboardInterrupt:
            self._interrupted, joint = True, 0.0
        bound = joint if bound is None else bound
        bound_s = self.solver_s - before
        check(self.graph, best.program, best.sizes)
        gap = (best.cost - bound) / best.cost if best.cost else 0.0
        joint_gap = (best.cost - joint) / best.cost if best.cost else 0.0
        status: Status = "gap"
        if gap <= _SETTLED:
            status = "optimal" if joint_gap <= _SETTLED else "optimal_at_ratios"
        return Result(
            best.program,
            best.sizes,
            best.cost,
            min(bound, best.cost),
            min(joint, bound, best.cost),
            status,
            self.expanded,
            (best.memory,) * self.cluster.n,
            tuple(float(m) if self.memory_limit is None else self.limit for m in self.costs.memory),
            tuple(named(self.graph, self.table)),
            {
                "build_s": self._structure_s + self.search_s - self.solver_s,
                "search_s": self.solver_s - bound_s,
                "ratio_s": self.ratio_s,
                "bound_s": bound_s,
            },
            sweeps=self.sweeps,
            states=self.states,
            interrupted=self._interrupted,
        )

    def _explore(self) -> None:
        starts = self._starts()
        for k, (weights, evenly) in enumerate(starts):
            self._alternate(weights, evenly, last=k + 1 == len(starts))
            if self._late() or (self._best is None and self._certain_bytes() > self.limit):
                break
        if self._best is None:
            self._shrink()

    def _unless_interrupted(self, search: Callable[[], _T], otherwise: _T) -> _T:
        """What a search comes to or, where Ctrl-C was pressed before it or in it, what holds without it."""
        try:
            return otherwise if self._interrupted else search()
        except KeyboardInterrupt:
            if self._best is None:
                raise
            self._interrupted = True
            return otherwise

    def _starts(self) -> list[tuple[Floats, Evenly]]:
        """Weights of the devices to begin from, and what is cut evenly all the same: by speed; by speed but for the
        state, which is communicated at the size of its largest shard; even; by speed without the slower kinds."""
        speed = self.costs.rate("float32")
        kinds = sorted(set(speed.tolist()), reverse=True)
        starts: list[tuple[Floats, Evenly]] = [(proportional(speed), _NOTHING)]
        if len(kinds) > 1:
            if self.graph.carry:
                starts.append((proportional(speed), of_state(self.graph, kinship(self.graph, self.table))))
            starts.append((np.full(self.cluster.n, 1.0 / self.cluster.n), _NOTHING))
            starts += [(proportional(np.where(speed >= k, speed, 0.0)), _NOTHING) for k in kinds[:-1]]
        return starts

    def _ratios(self, weights: Floats, sizes: Sizes | None = None, evenly: Evenly = _NOTHING) -> Ratios:
        return Ratios(self.graph, self.table, weights, sizes, self.costs.lengths, evenly)

    def ratios_at(self, sizes: Sizes) -> Ratios:
        """A plan's own ratios; what it does not cut is compared at the ratio of its largest class."""
        return self._ratios(own_weights(self.costs, sizes), sizes)

    def _alternate(self, weights: Floats, evenly: Evenly, *, last: bool) -> None:
        """Search and sizes in turn from one start, until the cost stops falling. What the `last` start comes to is
        likely what has to be certified."""
        ratios = self._ratios(weights, None, evenly)
        choices: Ints | None = None
        reached = np.inf
        # A start that begins above the best of the others is given up at once.
        bar = self._best.cost if self._best else np.inf
        for _ in range(_ROUNDS):
            candidate, solution = self._search(ratios, choices)
            if candidate is None or candidate.cost >= min(reached, bar) * (1 - _SETTLED):
                return
            if candidate.bound is not None or candidate.cost >= solution.cost * (1 - 10 * _SETTLED):
                # Sizes that gain this little lead to no other program; `_certify` looks once more.
                return
            reached, choices = candidate.cost, candidate.choices
            ratios = self._ratios(weights, candidate.sizes, evenly)
            if last:
                self._tolerance = min(self._tolerance, _WIDE_TOLERANCE)
            if self._late():
                return

    def _certify(self, best: Candidate) -> tuple[Candidate, float]:
        """The bound at the best pair's own sizes; a cheaper pair found on the way becomes the best."""
        self._tolerance = min(self._tolerance, _WIDE_TOLERANCE)
        for _ in range(_ROUNDS):
            if best.bound is not None and best.cost - best.bound <= self._tolerance * best.cost:
                return best, best.bound
            ratios = self.ratios_at(best.sizes)
            _, solution = self._search(ratios, best.choices)
            # The same program has other choices, or none, once the structure has been replaced.
            found = self._best or best
            if found.cost >= best.cost * (1 - _SETTLED / 2):
                return found, self._bound_within(ratios, found.choices) if self._limits else solution.lower_bound
            best = found
        return best, 0.0

    def _joint_bound(self, best: Candidate, at_ratios: float | None) -> float:
        began = time.perf_counter()
        self._tell("joint bound", best.cost, -np.inf)
        problem = Limits(Formulator(self.structure, self.costs, None), at_least=True).problem(self._limits)
        left = _LAST_S if self._interrupted else self._left()
        tell = lambda inner: self._tell("joint bound", best.cost, inner.lower_bound, inner.expanded)
        solution = self._solve(problem, anyway=True, tolerance=1e-4, time_budget_s=left, progress=tell)
        self.search_s += time.perf_counter() - began
        return solution.lower_bound if at_ratios is None else min(solution.lower_bound, at_ratios)

    def _solve(self, problem: Problem, *, anyway: bool = False, **options: Any) -> Solution:
        """`solve`, counted, and not begun any more once Ctrl-C was pressed, unless `anyway`."""
        if self._interrupted and not anyway:
            raise KeyboardInterrupt
        began = time.perf_counter()
        solution = solve(problem, **options)
        self._interrupted |= solution.interrupted
        self.solver_s += time.perf_counter() - began
        self.expanded += solution.expanded
        self.sweeps += solution.sweeps
        self.states = max(self.states, sum(u.size for u in problem.unary))
        return solution

    def _search(self, ratios: Ratios, choices: Ints | None) -> tuple[Candidate | None, Solution]:
        """The best program at the given ratios, sized, that fits; the bound of the solution knows the limits only
        where it had no need of them.

        Memory is limited at the ops where programs were found too large. What the problem counts there may be short of
        what a program then holds: the op's limit is tightened by the difference.
        """
        formulator = Formulator(self.structure, self.costs, ratios)
        limits = dict(self._limits)
        candidate, solution = self._solve_once(formulator, limits, choices)
        if candidate is not None and candidate.memory > self.limit and not self.structure.sparing:
            self._note(candidate, solution)
            self._limits.update(dict.fromkeys(self._maker.full_ops(candidate), self.limit))
            self._spare()
            return self._search(ratios, None)
        found: list[Candidate] = []
        for _ in range(_MEMORY_ROUNDS):
            if candidate is not None:
                self._note(candidate, solution)
                found.append(candidate)
                # Sizes that fit where those assumed did not are good enough: the next search is at those.
                if self._late() or candidate.memory <= self.limit:
                    break
                limits = self._tightened(formulator, limits, candidate)
            elif not found or limits == self._limits or self._late():
                break
            else:
                # Tightened by more than there is to save: half of it.
                limits = {op: (limits[op] + self._limits[op]) / 2 for op in limits}
            candidate, solution = self._solve_once(formulator, limits, found[-1].choices)
        self._note(candidate, solution)
        return candidate if candidate is not None and candidate.memory <= self.limit else None, solution

    def _spare(self) -> None:
        """From now on what values are held as is a choice."""
        self.structure = Structure(self.graph, self.table, self.restriction, len(self.axes), sparing=True)
        self._best = replace(self._best, choices=None) if self._best else None

    def _tightened(self, formulator: Formulator, limits: dict[int, float], candidate: Candidate) -> dict[int, float]:
        """Limits at the ops where a program holds too much; where there was one already, less by what the program holds
        there and the problem does not count."""
        full = self._maker.full_ops(candidate)
        likely = Limits(formulator, at_least=False)
        problem = likely.problem(dict.fromkeys(full, np.inf))
        assert candidate.choices is not None
        usage = problem.usage(likely.extended(problem, candidate.choices))
        found = dict(limits)
        for (op, held), counted in zip(full.items(), usage, strict=True):
            missed = max(0.0, held - float(counted)) if op in limits else 0.0
            found[op] = min(found.get(op, np.inf), self.limit - missed)
        self._limits.update(dict.fromkeys(full, self.limit))
        return found

    def _solve_once(
        self, formulator: Formulator, limits: Mapping[int, float], choices: Ints | None
    ) -> tuple[Candidate | None, Solution]:
        began = time.perf_counter()
        likely = Limits(formulator, at_least=False)
        problem = likely.problem(limits)
        start = likely.extended(problem, self._begin(choices))
        solution = self._solve(
            problem, start=start, tolerance=self._tolerance, time_budget_s=self._share(), progress=self._relay
        )
        self.search_s += time.perf_counter() - began
        if solution.assignment is None:
            return None, solution
        began = time.perf_counter()
        candidate = self._maker.make(formulator, solution)
        if limits:
            # What it counts is likely, not sure.
            candidate = replace(candidate, bound=None)
        self.ratio_s += time.perf_counter() - began
        return candidate, solution

    def _bound_within(self, ratios: Ratios, choices: Ints | None) -> float:
        """The least that any program costs that fits, at the given ratios."""
        began = time.perf_counter()
        certain = Limits(Formulator(self.structure, self.costs, ratios), at_least=True)
        problem = certain.problem(self._limits)
        start = certain.extended(problem, self._begin(choices))
        solution = self._solve(
            problem, start=start, tolerance=self._tolerance, time_budget_s=self._left(), progress=self._relay
        )
        self.search_s += time.perf_counter() - began
        return solution.lower_bound

    def _begin(self, choices: Ints | None) -> Ints:
        return np.array(self.structure.replicated()) if choices is None else choices

    def _shrink(self) -> None:
        """Looks for the program that holds the least, at even sizes: padded shards hold more at all others."""
        even = self._ratios(np.full(self.cluster.n, 1.0 / self.cluster.n))
        likely = Limits(Formulator(self.structure, self.costs, even), at_least=False)
        seen: list[Ints] = []
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
            candidate = replace(self._maker.make(likely.formulator, solution), bound=None)
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
        certain = Limits(Formulator(self.structure, self.costs, None), at_least=True)
        return certain_bytes(certain, tuple(self._limits))

    def _note(self, candidate: Candidate | None, solution: Solution) -> None:
        if candidate is None:
            return
        if self._least is None or candidate.memory < self._least.memory:
            self._least = candidate
        best = self._best
        if candidate.memory <= self.limit and (
            best is None
            or candidate.cost < best.cost * (1 - 1e-12)
            or (best.bound is None and candidate.bound is not None and candidate.cost <= best.cost * (1 + 1e-12))
        ):
            self._best = candidate
        self._tell("search", candidate.cost, solution.lower_bound)

    def _shortage(self) -> str:
        least = self._least
        device = int(np.argmin(self.costs.memory))
        name = self.cluster.devices[device].name
        mib = lambda nbytes: f"{nbytes / 2**20:.4g} MiB"
        found = "no program keeps to the layouts that are fixed"
        if least is not None:
            found = f"the smallest program found needs {mib(least.memory)}, {mib(least.memory - self.limit)} too much"
            found += f" (every program needs {mib(min(self._certain_bytes(), least.memory))} or more)"
        return (
            f"no program fits: device {device} ({name}) has {mib(self.limit)} and {found}; a device with that much "
            "memory, more devices, or a smaller batch would fit"
        )

    def _left(self) -> float | None:
        return None if self._deadline is None else max(0.05, self._deadline - time.perf_counter())

    def _share(self) -> float | None:
        """Seconds for one search; until there is a program that fits, enough is left to try from elsewhere."""
        left = self._left()
        return left if left is None or self._best is not None else left / _SHARES

    def _late(self) -> bool:
        return self._interrupted or (self._deadline is not None and time.perf_counter() >= self._deadline)

    def _relay(self, inner: SolverProgress) -> None:
        self._tell(inner.stage, inner.cost, inner.lower_bound, inner.expanded)

    def _tell(self, stage: str, cost: float, bound: float, expanded: int = 0) -> None:
        """`expanded`: nodes of the search at hand."""
        if self.progress is not None:
            best = min(cost, self._best.cost if self._best else np.inf)
            seconds = time.perf_counter() - self._began
            self.progress(Progress(stage, seconds, best, min(bound, best), self.expanded + expanded))
