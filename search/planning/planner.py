"""The whole search: programs and ratios in turn, memory, and the certificate (DESIGN D3, D4).

For a start ratio, the solver finds the best program and the linear program its best sizes; the search then runs
again at those sizes, and so on until the cost stops falling. The best pair over all starts is kept. The last search
at the kept pair's own sizes gives its lower bound; one more search, with every instruction at its own ideal ratio,
gives the joint bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from hapsynth._gc import gc_paused
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.replicated_ops import named, unpriced
from hapsynth.search.cost.model import Floats
from hapsynth.search.formulation.choice_space import ChoiceSpace
from hapsynth.search.formulation.problem_builder import CheapestOfRatios, ProblemBuilder
from hapsynth.search.formulation.ratio_variants import Ways
from hapsynth.search.memory.profile import held_by
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.infeasibility import shortage
from hapsynth.search.planning.reshard import ReshardInserter, every_ratio
from hapsynth.search.planning.search_at_ratios import WIDE_TOLERANCE, FixedRatioSearch
from hapsynth.search.result import SETTLED as _SETTLED
from hapsynth.search.result import Result, proven
from hapsynth.search.sizing.ratios import NOTHING, EvenDims, Ratios, own_weights

_T = TypeVar("_T")


_ROUNDS = 6
_CUTS = 8
"""Of a value: sets of so many are still shared conversions, each a choice."""
_SEARCHING = 0.7
"""Of a time budget."""
_AMPLE = 0.5
"""Of the room: XLA's order was seen to hold up to 1.2 times what the program's own does."""


class InfeasibleError(ValueError):
    """No program fits the devices' memory. `needs`: bytes per device of the smallest one that was found. `excess`: what
    that holds over what there is, on the device where this is most; 1 where none was found."""

    def __init__(self, text: str, needs: float | None = None, excess: float = 1.0) -> None:
        super().__init__(text)
        self.needs, self.excess = needs, excess


@dataclass
class Planner(FixedRatioSearch):
    """One planning task, in which every device of the cluster takes part: fields as those of `FixedRatioSearch`."""

    @gc_paused()
    def run(self) -> Result:
        """Plan; raises InfeasibleError when nothing fits.

        Ctrl-C ends the search with the best program so far, or raises KeyboardInterrupt if there is none. Only a joint
        bound is looked for then, so that there is a gap to tell, until Ctrl-C is pressed again.
        """
        if not np.isfinite(self.explore()):
            self.shrink()
        return self.conclude()

    def glance(self) -> float:
        """The cost of the first program that `explore` will come across, whether it fits or not."""
        if self._glanced is None:
            builder = self._formulator(self._ratios(*self._starts[0]))
            candidate, solution = self._solve_once(builder, {}, None)
            self._note(candidate, solution)
            self._glanced = builder, candidate, solution
        _, candidate, _ = self._glanced
        return candidate.cost if candidate else np.inf

    @property
    def excess(self) -> float:
        """What the smallest program so far holds over what there is, on the device where this is most; 1 before any."""
        return self._least.memory / self.limit if self._least else 1.0

    def explore(self, bar: float = np.inf) -> float:
        """Search from every start: the cost of the best program that fits, inf where there is none.

        What comes out above `bar` is not followed up. Ctrl-C as in `run`.
        """
        self._bar = bar
        end = self._deadline
        if end is not None:
            # The rest is for the bounds.
            self._deadline = self.began + _SEARCHING * (end - self.began)
        self._unless_interrupted(self._explore, None)
        self._deadline = end
        return self.cost

    def shrink(self) -> float:
        """Search for a program that fits, where `explore` found none; as `explore`."""
        self._unless_interrupted(self._shrink, None)
        return self.cost

    def conclude(self) -> Result:
        """The best program so far with its bounds; raises InfeasibleError where there is none, RatioError where it
        cannot be cut as is asked. Ctrl-C as in `run`."""
        best = self._best
        if best is None:
            certain, pinned = self._certain_bytes(), self.fixed_ratios is not None
            late = certain <= self.limit and self._late() and not self.interrupted
            lacking = shortage(self.costs, self._least, certain, pinned=pinned, late=late)
            needs = max(self._least.held()) if self._least else None
            raise KeyboardInterrupt if self.interrupted else InfeasibleError(lacking, needs, self.excess)
        certified = self._unless_interrupted(partial(self._certify, best), None)
        if certified is None:
            best = self._best or best
        best, bound = certified or (best, best.bound)
        best, bound = self._unless_interrupted(partial(self._reshared, best, bound), (best, bound))
        try:
            joint = min(self.joint_bound(), best.cost)
        except KeyboardInterrupt:
            self.interrupted, joint = True, 0.0
        bound = min(joint if bound is None else bound, best.cost)
        joint = min(joint, bound)
        if self.fixed_ratios is not None:
            self.fixed_ratios.check(best.sizes)
        check(self.graph, best.program, best.sizes)
        unknown = tuple(unpriced(self.graph))
        ratio_bound = 0.0 if self.interrupted else max(joint, self._maker.bound(best))
        return Result(
            best.program,
            best.sizes,
            best.cost,
            bound,
            joint,
            proven(best.cost, bound, joint, unknown),
            self.expanded,
            self._held(best),
            self.limits,
            tuple(named(self.graph, self.table)),
            self.timings_s(),
            sweeps=self.sweeps,
            states=self.states,
            interrupted=self.interrupted,
            ratio_bound_s=min(ratio_bound, best.cost),
            unpriced_primitives=unknown,
            exact=self.exact,
        )

    def _held(self, best: Candidate) -> tuple[float, ...]:
        """Bytes of each device in XLA's order or, where limits bind, in the program's, which they count."""
        return best.held() if best.memory > _AMPLE * self.limit else held_by(best.program, best.sizes, self.costs)

    def timings_s(self) -> dict[str, float]:
        """Seconds spent so far, as in `Result.timings_s`."""
        return {
            "build_s": self._structure_s + self.search_s - self.solver_s,
            "search_s": self.solver_s - self.bound_s,
            "ratio_s": self.ratio_s,
            "bound_s": self.bound_s,
        }

    def _explore(self) -> None:
        for k, start in enumerate(self._starts):
            self._alternate(*start, last=k + 1 == len(self._starts))
            if self._late() or (self._best is None and self._certain_bytes() > self.limit):
                break

    def _unless_interrupted(self, search: Callable[[], _T], otherwise: _T) -> _T:
        """What a search comes to or, where Ctrl-C was pressed before it or in it, what holds without it."""
        try:
            return otherwise if self.interrupted else search()
        except KeyboardInterrupt:
            if self._best is None:
                raise
            self.interrupted = True
            return otherwise

    def ratios_at(self, sizes: Sizes) -> Ratios:
        """A plan's own ratios; what it does not cut is compared at the ratio of its largest class."""
        if self._looked_at is None or self._looked_at[0] is not sizes:
            self._looked_at = sizes, self._ratios(own_weights(self.costs, sizes), NOTHING, sizes)
        return self._looked_at[1]

    def _alternate(self, weights: Floats, evenly: EvenDims, *, last: bool) -> None:
        """Search and sizes in turn from one start, until the cost stops falling. What the `last` start comes to is
        likely what has to be certified."""
        ratios = self._ratios(weights, evenly)
        choices = self._best.choices if self._best else None
        reached = np.inf
        # A start that begins above the best of the others is given up at once.
        bar = min(self.cost, self._bar)
        for _ in range(_ROUNDS):
            candidate, solution = self._search(ratios, choices, above=reached * (1 - _SETTLED))
            if candidate is None or candidate.cost >= min(reached, bar) * (1 - _SETTLED):
                return
            if candidate.bound is not None or candidate.cost >= solution.cost * (1 - 10 * _SETTLED):
                # Sizes that gain this little lead to no other program; `_certify` looks once more.
                return
            reached, choices = candidate.cost, candidate.choices
            ratios = self.ratios_at(candidate.sizes)
            if last:
                self._tolerance = min(self._tolerance, WIDE_TOLERANCE)
            if self._late():
                return

    def _reshared(self, best: Candidate, bound: float | None) -> tuple[Candidate, float | None]:
        """The best program with reshares where they pay, and the bound at the ratios that it then has; as they were
        where none does, or where it was asked how classes are cut."""
        if self.fixed_ratios is not None or self._late():
            return best, bound
        began = time.perf_counter()
        resharer = ReshardInserter(self.costs, self.limit, self._seconds_left)
        found = resharer.improved(best)
        self.ratio_s += time.perf_counter() - began
        if found is best:
            return best, bound
        if len(self.axes) > 1 or self._most_cuts(found) > _CUTS:
            return found, self._free_to_change(best, found)
        return self._in_every_way(found, resharer)

    def _most_cuts(self, best: Candidate) -> int:
        """In how many ways some value may be cut, where every dimension may be at all ratios that a program has."""
        ways = Ways(self.costs, best.sizes)
        return max(sum(ways.count(v, d) for d in known.dims) for v, known in enumerate(self.structure.layouts))

    def _free_to_change(self, before: Candidate, best: Candidate) -> float | None:
        """The bound of programs at the best one's ratios, of which it has several where the one `before` had one, as if
        to change from one to another were free."""
        named = every_ratio(before, best)
        if named is None:
            return None
        weights = own_weights(self.costs, before.sizes)
        every = [Ratios(self.graph, self.table, weights, None, self.costs.lengths, NOTHING, n) for n in named]
        return self._bound_within(CheapestOfRatios(self.structure, self.costs, every), before.choices)

    def _in_every_way(self, best: Candidate, resharer: ReshardInserter) -> tuple[Candidate, float]:
        """The best program whose instructions are each at one of the ratios that the given one has for what they cut,
        reshared where that pays, and the bound of these programs; where others are better at their own sizes, of
        theirs."""
        bound = 0.0
        for rounds_left in reversed(range(_ROUNDS)):
            ways, sparing, known, bound = Ways(self.costs, best.sizes), self.structure.sparing, best, 0.0
            structure = ChoiceSpace(self.graph, self.table, self.restriction, sparing=sparing, ways=ways.count)
            for ratios in (ways.ratios(), ways.ratios().strictly()):
                builder = ProblemBuilder(structure, self.costs, ratios)
                solution = self._bounded(builder, None)
                bound = max(bound, solution.lower_bound)
                if self._settled(best, bound) or self._late():
                    return best, bound
                if rounds_left and solution.assignment is not None:
                    candidate = resharer.tidied(self._maker.make(builder, solution))
                    if candidate and resharer.pays(candidate, best) and self._most_cuts(candidate) <= _CUTS:
                        best = candidate
                        break
            if best is known:
                break
        return best, bound

    def _gains(self, candidate: Candidate, best: Candidate) -> bool:
        return candidate.memory <= self.limit and candidate.cost < best.cost * (1 - _SETTLED / 2)

    def _settled(self, best: Candidate, bound: float) -> bool:
        return best.cost - bound <= max(_SETTLED, self._tolerance) * best.cost

    def _certify(self, best: Candidate) -> tuple[Candidate, float | None]:
        """The bound at the best pair's own sizes; a cheaper pair found on the way becomes the best, and has none where
        it is too late to look for it."""
        self._tolerance = min(self._tolerance, WIDE_TOLERANCE)
        for repeated in range(_ROUNDS):
            if best.bound is not None and best.cost - best.bound <= self._tolerance * best.cost:
                return best, best.bound
            if repeated and self._late():
                return best, best.bound
            known = self._looked_at[1] if self._looked_at else None
            ratios, found = self.ratios_at(best.sizes), best
            for certain in (False, True) if ratios is not known and not self._late() else (True,):
                _, solution = self._search(ratios, best.choices, certain=certain, above=best.cost * (1 - _SETTLED / 2))
                # The same program has other choices, or none, once the structure has been replaced.
                found = self._best or best
                if found.cost < best.cost * (1 - _SETTLED / 2):
                    break
                if certain or self._limits or np.isfinite(solution.lower_bound):
                    bound = solution.lower_bound
                    if self._limits:
                        bound = self._bound_within(self._formulator(ratios), found.choices)
                    if self._settled(found, bound) or self._late():
                        return found, bound
                    better, strict = self._strictly(ratios, found)
                    if better is found:
                        return found, max(bound, strict)
                    found = better
            best = found
        return best, 0.0

    def _strictly(self, ratios: Ratios, best: Candidate) -> tuple[Candidate, float]:
        """Where a bound leaves a gap: that of the programs which the best one's sizes allow. A cheaper one becomes the
        best."""
        builder = self._formulator(ratios.strictly())
        solution = self._bounded(builder, best.choices)
        if solution.assignment is not None and solution.cost < best.cost * (1 - _SETTLED / 2):
            candidate = self._maker.make(builder, solution)
            if self._gains(candidate, best):
                self._note(candidate, solution)
                return candidate, solution.lower_bound
        return best, solution.lower_bound
