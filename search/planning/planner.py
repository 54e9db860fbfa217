"""The whole search: programs and ratios in turn, memory, and the certificate (decisions.md D3, D4).

For a start ratio, the solver finds the best program and the linear program its best sizes; the search then runs
again at those sizes, and so on until the cost stops falling. The best pair over all starts is kept. The last search
at the kept pair's own sizes gives its lower bound; one more search, with every instruction at its own ideal ratio,
gives the joint bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from hapsynth._gc import gc_paused
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.replicated_ops import named, unpriced
from hapsynth.search.cost.model import Floats
from hapsynth.search.memory.profile import held_by
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.effort import LAST_S, Clock, Effort
from hapsynth.search.planning.ideal_work import IdealWorkBound
from hapsynth.search.planning.infeasibility import shortage
from hapsynth.search.planning.joint_refinement import JointRefinement
from hapsynth.search.planning.makespan import (
    MOST_GAINED,
    MakespanSearch,
    Overlapped,
    Scheduled,
    as_it_is,
    concluded,
    final_makespan_s,
    first_look,
)
from hapsynth.search.planning.resharding import Resharding
from hapsynth.search.planning.search_at_ratios import MANY_AXES_NODES, FirstProgram, FixedRatioSearch
from hapsynth.search.planning.task import Task
from hapsynth.search.result import SETTLED as _SETTLED
from hapsynth.search.result import Result, proven
from hapsynth.search.sizing.ratios import EvenDims, Ratios

_T = TypeVar("_T")

_ROUNDS = 6
_SEARCHING, _SEARCHING_SUMS = 0.7, 0.35
"""The fraction of a time budget for the search over programs and ratios. With overlap: for the programs of the least
sum, from which the search for makespans starts."""
_AMPLE = 0.5
"""A fraction of the memory limit. In XLA's order a program was seen to hold up to 1.2 times as much as in its own."""
_TOLERANCE = 1e-6
_JOINT_TOLERANCE = 1e-4
_SAFETY = 1e-9
_WIDE_TOLERANCE = 5e-5
"""The tolerance with several mesh axes, where the bound's last steps take longest; still half of `SETTLED`."""
ROUGH_TOLERANCE = 2e-3
"""The tolerance with several mesh axes before the last search, whose bound alone is kept. With a looser one the dual of
the next search starts from a worse point: 5e-3 made BERT-base on 2x4 slower."""


class InfeasibleError(ValueError):
    """No program fits the devices' memory. `needs`: the most bytes that the smallest program found holds on a device
    that has too little. `excess`: its largest ratio of bytes held to bytes available on a device; 1 where none was
    found."""

    def __init__(self, text: str, needs: float | None = None, excess: float = 1.0) -> None:
        super().__init__(text)
        self.needs, self.excess = needs, excess


class _OwnRatios(NamedTuple):
    """A program's sizes, and the same as ratios."""

    sizes: Sizes
    ratios: Ratios


class _JointBound(NamedTuple):
    """`sought`: the value beyond which no tighter bound was sought; `limits`: how many memory limits it takes into
    account."""

    bound: float
    sought: float
    limits: int


class Planner:
    """One planning task, in which every device of the cluster takes part. `clock`: its time budget; `effort`: the time
    and nodes used so far; `given_up`: the least cost among programs that do not fit and were not made to fit, as they
    exceeded a cutoff."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.clock = Clock(task.options.time_budget_s)
        self.effort = Effort()
        self.given_up = np.inf
        self._search = FixedRatioSearch(task, self.clock, self.effort)
        self._incumbent = self._search.incumbent
        self._starts = task.starts()
        self._several_axes = len(task.costs.axes) > 1
        rough = ROUGH_TOLERANCE if len(self._starts) > 1 else _WIDE_TOLERANCE
        self._tolerance = rough if self._several_axes else _TOLERANCE
        self._cutoff = np.inf
        """The `cutoff` of the last `explore`: programs that cost this much or more are not wanted."""
        self._first: FirstProgram | None = None
        """The result at the first start's ratios, until `explore` continues from it."""
        self._own: _OwnRatios | None = None
        """The sizes and ratios of the last program at whose own ratios a search ran."""
        self._joint: _JointBound | None = None
        self._makespans: MakespanSearch | None = None
        self._looked: tuple[Scheduled, float] | None = None
        """The best program of `_makespans`, and its final makespan in seconds."""
        self.effort.choices_s = self.clock.elapsed()

    @property
    def cost(self) -> float:
        """The cost of the best program that fits so far; inf where there is none."""
        return self._incumbent.cost

    @property
    def limit(self) -> float:
        """Bytes that a device may hold."""
        return self._incumbent.limit

    @property
    def excess(self) -> float:
        """The largest ratio of bytes held to bytes available on a device, of the smallest program so far; 1 before
        any."""
        least = self._incumbent.least
        return least.memory / self.limit if least else 1.0

    @gc_paused()
    def run(self, cutoff: float = np.inf) -> Result:
        """Plan; raises InfeasibleError when nothing fits. `cutoff`: as of `conclude`.

        Ctrl-C ends the search with the best program so far, or raises KeyboardInterrupt if there is none. Only a joint
        bound is looked for then, so that there is a gap to tell, until Ctrl-C is pressed again.
        """
        if not np.isfinite(self.explore()):
            self.shrink()
        return self.conclude(cutoff)

    def first_cost(self) -> float:
        """The cost of the first program that `explore` will come across, whether it fits or not."""
        if self._first is None:
            self._first = self._search.first_program(self.task.ratios(*self._starts[0]), self._tolerance)
            self._search.note(self._first.candidate, self._first.solved)
        return self._first.candidate.cost if self._first.candidate else np.inf

    def explore(self, cutoff: float = np.inf) -> float:
        """Search from every start: the cost of the best program that fits, inf where there is none.

        What comes out above `cutoff` is not followed up. Ctrl-C as in `run`.
        """
        self._cutoff = cutoff
        # The rest of the time is for bounds and makespans.
        with self.clock.within(_SEARCHING_SUMS if self.task.options.overlap else _SEARCHING):
            self._unless_interrupted(self._explore, None)
        return self.cost

    def explore_makespans(self, known_s: float = np.inf) -> float:
        """Seconds: the makespan of the best program that a first search from the program of the least sum finds. It is
        scheduled as thoroughly as in the end if that may bring it below `known_s` seconds. Without time for the search,
        the makespan of the program of the least sum itself, or that sum where it does not fit beside what is sent; inf
        where there is none."""
        best = self._incumbent.best
        if best is None:
            return np.inf
        self._look_at_makespans(best)
        known = self._makespans and self._makespans.best
        if not known:
            overlapped = self._in_any_case(partial(as_it_is, self._search, best))
            return overlapped.timeline.makespan_s if overlapped else best.cost
        if self._looked is None or self._looked[0] is not known:
            if known.makespan_s > known_s * MOST_GAINED:
                return known.makespan_s
            seconds = partial(final_makespan_s, known, self._search)
            self._looked = known, self._unless_interrupted(seconds, known.makespan_s)
        return self._looked[1]

    def _look_at_makespans(self, best: Candidate) -> None:
        if self._makespans is None and not self.clock.late():
            self._makespans = self._unless_interrupted(
                partial(first_look, self._search, best, self._own_ratios(best.sizes)), None
            )

    def explore_makespans_on(self, near: float, cutoff: float) -> float:
        """Continue `explore_makespans` until a program takes at most `near` seconds, or all are known to take
        `cutoff`."""
        if self._makespans is not None:
            self._unless_interrupted(partial(self._makespans.look_again, near, cutoff), None)
        return self.explore_makespans(near)

    @property
    def makespan_bound(self) -> float:
        """A lower bound on the makespan, in seconds, of all programs with the best one's ratios, as far as known
        yet."""
        return self._makespans.bound if self._makespans else 0.0

    def joint_makespan_bound(self) -> float:
        """A lower bound on the makespan, in seconds, of all programs on these devices at any ratios; Ctrl-C as in
        `run`."""
        task = self.task
        least, parts = self._in_any_case(lambda: IdealWorkBound(task.choices, task.costs).weighted_on(task.cluster))
        # Along several axes conversions go the ways that are the cheapest at the best ratios, which these are not.
        if self._makespans is None or self._several_axes or self.clock.late():
            return least
        return max(least, self._unless_interrupted(partial(self._makespans.joint_bound, parts), 0.0))

    def shrink(self) -> float:
        """Search for a program that fits, where `explore` found none; as `explore`."""
        self._unless_interrupted(self._shrink, None)
        return self.cost

    def bytes_at(self, ops: tuple[int, ...]) -> float:
        """A lower bound on the bytes that every program holds near one of `ops`; 0 without ops or without memory
        limits."""
        return self._search.bytes_at(ops)

    def full_ops(self) -> tuple[int, ...]:
        """Ops at which the smallest program found so far holds the most."""
        return self._search.full_ops()

    def joint_bound(self, enough: float = np.inf) -> float:
        """A lower bound, in seconds, on all programs on these devices at any ratios; not tightened beyond `enough`."""
        limits = len(self._search.limits)
        if self._joint is not None:
            known = self._joint
            if known.bound >= enough or (known.bound < known.sought and limits == known.limits):
                return known.bound
        if self.clock.no_time():
            return 0.0
        before = self.effort.solver_s
        self._search.tell("joint bound", self.cost, -np.inf)
        solved = self._search.cheapest(
            self._search.builder(None),
            self._search.limits,
            self._incumbent.choices,
            at_least=True,
            tolerance=ROUGH_TOLERANCE if self._several_axes else _JOINT_TOLERANCE,
            seconds=lambda: LAST_S if self.clock.interrupted else self.clock.allotted(),
            # Ideal ratios are too far from a program's.
            warm=False,
            # A little more, as the solver states its bounds less what rounding may have added.
            enough=enough * (1 + _SAFETY),
            stage="joint bound",
            despite_interrupt=True,
            max_nodes=MANY_AXES_NODES if self._several_axes else None,
        )
        self.effort.bound_s += self.effort.solver_s - before
        # No bound at all is had where time has run out.
        bound = max(solved.lower_bound, 0.0)
        self._joint = _JointBound(bound, enough, limits)
        return bound

    def joint_bound_below(self, cost: float) -> float:
        """The joint bound, tightened towards `cost`, the plan's, where `joint_gap` was asked for."""
        bound, asked = self.joint_bound(), self.task.options.joint_gap
        enough = cost if asked is None else cost * (1 - asked)
        if asked is None or bound >= enough or not JointRefinement.suits(self.task):
            return bound
        before = self.effort.solver_s
        closer = self._unless_interrupted(lambda: JointRefinement(self._search).bound(bound, enough), bound)
        self.effort.bound_s += self.effort.solver_s - before
        return closer

    def conclude(self, cutoff: float = np.inf) -> Result:
        """The best program so far with its bounds; raises InfeasibleError where there is none, RatioError where it
        cannot be cut as is asked. Ctrl-C as in `run`. `cutoff`: no makespan above it is sought. With overlap it is
        without where no program found fits beside what is sent while devices compute."""
        best = self._incumbent.best
        if best is None:
            raise KeyboardInterrupt if self.clock.interrupted else self._infeasible()
        overlapped = self._overlapped(best, cutoff) if self.task.options.overlap else None
        return overlapped or self._as_sum(self._incumbent.best or best)

    def _as_sum(self, best: Candidate) -> Result:
        """The best program as a sum of its instructions, with its bounds."""
        certified = self._unless_interrupted(partial(self._certify, best), None)
        if certified is None:
            best = self._incumbent.best or best
        best, bound = certified or (best, best.bound)
        best, bound = self._unless_interrupted(partial(self._reshared, best, bound), (best, bound))
        try:
            joint = min(self.joint_bound_below(best.cost), best.cost)
        except KeyboardInterrupt:
            self.clock.interrupted, joint = True, 0.0
        bound = min(max(bound or 0.0, joint), best.cost)
        ratio_bound = self._unless_interrupted(lambda: max(joint, self._search.maker.bound(best)), 0.0)
        found = self._result(best.program, best.sizes, best.cost, bound, joint, self._held(best))
        return replace(found, ratio_bound_s=min(ratio_bound, best.cost))

    def _overlapped(self, best: Candidate, cutoff: float) -> Result | None:
        """The program of the least makespan found, from the best one as a sum of its instructions; None where none fits
        beside what is sent."""
        self._look_at_makespans(best)
        sought = self._concluded(self._makespans, cutoff) if self._makespans else None
        # Where memory is short, what is found may have to wait for its gathers longer than the sum's program does.
        own = self._in_any_case(partial(as_it_is, self._search, best))
        fitting = [each for each in (sought, own) if each is not None]
        found = min(fitting, key=lambda each: each.timeline.makespan_s, default=None)
        if found is None:
            return None
        cost = found.timeline.makespan_s
        joint = min(self.joint_makespan_bound(), cost)
        bound = min(max(found.lower_bound_s, joint), cost)
        return replace(
            self._result(found.program, found.sizes, cost, bound, joint, found.memory_bytes),
            overlap=True,
            exposed_communication_s=found.timeline.exposed_s,
            clocks_s=found.clocks,
        )

    def _result(
        self, program: Program, sizes: Sizes, cost: float, bound: float, joint: float, held: tuple[float, ...]
    ) -> Result:
        """The result for a program, once the checker has passed it. `held`: peak bytes of each device."""
        task, options, effort = self.task, self.task.options, self.effort
        if options.fixed_ratios is not None:
            options.fixed_ratios.check(sizes)
        self._in_any_case(partial(check, task.graph, program, sizes))
        unknown = tuple(unpriced(task.graph))
        return Result(
            program,
            sizes,
            cost,
            bound,
            joint,
            proven(cost, bound, joint, unknown),
            effort.expanded,
            held,
            task.memory_budget.limits,
            tuple(named(task.graph, task.factors)),
            effort.timings_s(),
            sweeps=effort.sweeps,
            states=effort.states,
            interrupted=self.clock.interrupted,
            unpriced_primitives=unknown,
            exact=options.exact,
            lowering=options.lowering,
        )

    def _concluded(self, makespans: MakespanSearch, cutoff: float) -> Overlapped | None:
        """The program of the least makespan; after Ctrl-C the best so far, as nothing new is started then."""
        for _ in range(2):
            try:
                return concluded(makespans, cutoff)
            except KeyboardInterrupt:
                self.clock.interrupted = True
        return None

    def _infeasible(self) -> InfeasibleError:
        least, certain = self._incumbent.least, self._search.certain_bytes()
        late = certain <= self.limit and self.clock.late()
        lacking = shortage(self.task.costs, least, certain, self.task.options, late=late)
        return InfeasibleError(lacking, self._needs(least) if least else None, self.excess)

    def _needs(self, least: Candidate) -> float:
        """As of `InfeasibleError`. Others may hold more, and have the memory."""
        held, limits = least.held(), self.task.memory_budget.limits
        return max((n for n, limit in zip(held, limits, strict=True) if n > limit), default=max(held))

    def _held(self, best: Candidate) -> tuple[float, ...]:
        """Peak bytes of each device, in XLA's order or, where memory is short, in the program's own, to which the
        limits apply."""
        ample = best.memory <= _AMPLE * self.limit
        given = best.program, best.sizes, self.task.costs
        return self._in_any_case(partial(held_by, *given)) if ample else best.held()

    def _explore(self) -> None:
        self._from_all_starts()
        self._search.within_limits(self._from_all_starts)

    def _from_all_starts(self) -> None:
        for k, start in enumerate(self._starts):
            self._alternate(*start, last=k + 1 == len(self._starts))
            if self.clock.late() or (self._incumbent.best is None and self._search.certain_bytes() > self.limit):
                break

    def _shrink(self) -> None:
        """Search at even sizes, as padded shards hold more at all others; exact shards are in proportion to the
        limits."""
        proportions, n = self.task.memory_budget.proportions, self.task.cluster.n
        self._search.shrink(self.task.ratios(np.full(n, 1.0 / n) if proportions is None else proportions))

    def _unless_interrupted(self, search: Callable[[], _T], otherwise: _T) -> _T:
        """The result of `search`, or `otherwise` where Ctrl-C was pressed before or during it. Raises KeyboardInterrupt
        if it is pressed before there is a program."""
        try:
            return otherwise if self.clock.interrupted else search()
        except KeyboardInterrupt:
            if self._incumbent.best is None:
                raise
            self.clock.interrupted = True
            return otherwise

    def _in_any_case(self, step: Callable[[], _T]) -> _T:
        """The result of a short step without which there is no plan: begun anew where Ctrl-C is pressed during it."""
        try:
            return step()
        except KeyboardInterrupt:
            self.clock.interrupted = True
            return step()

    def _own_ratios(self, sizes: Sizes) -> Ratios:
        """A program's own ratios."""
        if self._own is None or self._own.sizes is not sizes:
            self._own = _OwnRatios(sizes, self.task.own_ratios(sizes))
        return self._own.ratios

    def _alternate(self, weights: Floats, evenly: EvenDims, *, last: bool) -> None:
        """Alternate program search and sizing from one start, until the cost stops falling. The `last` start's result
        is likely the one to certify, so its tolerance is tighter."""
        ratios = self.task.ratios(weights, evenly)
        choices = self._incumbent.choices
        reached = np.inf
        # A start that begins above the best of the others is given up at once.
        cutoff = min(self.cost, self._cutoff)
        for _ in range(_ROUNDS):
            known, self._first = self._first, None
            found = self._search.best(
                ratios, choices, self._tolerance, above=reached * (1 - _SETTLED), cutoff=self._cutoff, known=known
            )
            self.given_up = min(self.given_up, found.given_up)
            candidate = found.candidate
            if candidate is None or candidate.cost >= min(reached, cutoff) * (1 - _SETTLED):
                return
            if candidate.bound is not None or candidate.cost >= found.solution.cost * (1 - 10 * _SETTLED):
                # Sizes that gain this little lead to no other program; `_certify` looks once more.
                return
            reached, choices = candidate.cost, candidate.choices
            ratios = self._own_ratios(candidate.sizes)
            if last:
                self._tolerance = min(self._tolerance, _WIDE_TOLERANCE)
            if self.clock.late():
                return

    def _reshared(self, best: Candidate, bound: float | None) -> tuple[Candidate, float | None]:
        """The best program with classes cut at several ratios where that pays, and the bound at its ratios; both
        unchanged where the ratios are fixed."""
        if self.task.options.fixed_ratios is not None or self.clock.late():
            return best, bound
        return Resharding(self._search, self._tolerance).improved(best, bound)

    def _settled(self, best: Candidate, bound: float) -> bool:
        return best.cost - bound <= max(_SETTLED, self._tolerance) * best.cost

    def _certify(self, best: Candidate) -> tuple[Candidate, float | None]:
        """The best pair and the bound at its own sizes. A cheaper pair found on the way becomes the best; its bound is
        None if no time is left to find it."""
        search, incumbent = self._search, self._incumbent
        self._tolerance = min(self._tolerance, _WIDE_TOLERANCE)
        for repeated in range(_ROUNDS):
            if best.bound is not None and best.cost - best.bound <= self._tolerance * best.cost:
                return best, best.bound
            if self.clock.no_time() or (repeated and self.clock.late()):
                return best, best.bound
            known = self._own.ratios if self._own else None
            ratios, found = self._own_ratios(best.sizes), best
            above = best.cost * (1 - _SETTLED / 2)
            for certain in (False, True) if ratios is not known and not self.clock.late() else (True,):
                came = search.best(
                    ratios, best.choices, self._tolerance, certain=certain, above=above, cutoff=self._cutoff
                )
                self.given_up = min(self.given_up, came.given_up)
                # The same program has other choices, or none, once the structure has been replaced.
                found = incumbent.best or best
                if found.cost < above:
                    break
                if certain or search.limits or np.isfinite(came.solution.lower_bound):
                    bound = came.solution.lower_bound
                    if search.limits:
                        bound = search.bounded(search.builder(ratios), found.choices, self._tolerance).lower_bound
                    if self._settled(found, bound) or self.clock.late():
                        return found, bound
                    better, strict = self._strictly(ratios, found)
                    if better is found:
                        return found, max(bound, strict)
                    found = better
            best = found
        return best, 0.0

    def _strictly(self, ratios: Ratios, best: Candidate) -> tuple[Candidate, float]:
        """Where a bound leaves a gap: the bound on just those programs that the best one's sizes allow. A cheaper
        program found becomes the best."""
        search = self._search
        builder = search.builder(ratios.strictly())
        solved, enough = search.bounded(builder, best.choices, self._tolerance), best.cost * (1 - _SETTLED / 2)
        if solved.assignment is not None and solved.cost < enough:
            candidate = search.maker.make(builder, solved)
            if candidate.memory <= self.limit and candidate.cost < enough:
                search.note(candidate, solved)
                return candidate, solved.lower_bound
        return best, solved.lower_bound
