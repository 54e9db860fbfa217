"""A search's best program where its dimension classes may be cut at several ratios, and the bound at these.

Reshares that pay by themselves are inserted (`insertion.py`). Along one mesh axis, programs whose instructions are each
at one of the ratios that come of it are then searched and bounded too; along several, or where a value may be cut in
too many ways, the joint bound is all that is known of them.
"""

from __future__ import annotations

import time

from hapsynth.search.formulation.ways import ChoicesInWays
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.resharding.insertion import ReshardInserter
from hapsynth.search.planning.resharding.ratio_variants import RatioVariants, VariantBuilder
from hapsynth.search.planning.search_at_ratios import FixedRatioSearch
from hapsynth.search.result import SETTLED

_CUTS = 8
"""Of a value: sets of so many are still shared conversions, each a choice."""
_CHANGES = 6
"""How often programs are compared at the ratios of a better one."""


class Resharding:
    """What reshares bring to a search, within its time and `tolerance`."""

    def __init__(self, search: FixedRatioSearch, tolerance: float) -> None:
        self.search, self.task, self.tolerance = search, search.task, tolerance
        self.inserter = ReshardInserter(self.task.costs, search.clock.left)

    def improved(self, best: Candidate, bound: float | None) -> tuple[Candidate, float | None]:
        """The search's best program with reshares where they pay, and the bound at the ratios that it then has, None
        where that is not sought; as they were where none does."""
        began = time.perf_counter()
        found = self.inserter.improved(best)
        self.search.effort.ratio_s += time.perf_counter() - began
        if found is best:
            return best, bound
        if len(self.task.costs.axes) > 1 or self._most_cuts(found) > _CUTS:
            return found, None
        return self._in_every_way(found)

    def _most_cuts(self, best: Candidate) -> int:
        """In how many ways some value may be cut, where every dimension may be at all ratios that a program has."""
        ways, layouts = RatioVariants(self.task.costs, best.sizes), self.search.choices.layouts
        return max(sum(ways.count(v, d) for d in known.dims) for v, known in enumerate(layouts))

    def _in_every_way(self, best: Candidate) -> tuple[Candidate, float]:
        """The best program whose instructions are each at one of the ratios that the given one has for what they cut,
        reshared where that pays, and the bound of these programs; where others are better at their own sizes, of
        theirs."""
        bound, search, costs = 0.0, self.search, self.task.costs
        for rounds_left in reversed(range(_CHANGES)):
            ways, known, bound = RatioVariants(costs, best.sizes), best, 0.0
            known_choices = search.choices
            choices = ChoicesInWays(
                costs,
                ways.count,
                self.task.options.restriction,
                sparing=known_choices.sparing,
                owners=known_choices.owners,
            )
            for ratios in (ways.ratios(), ways.ratios().strictly()):
                builder = VariantBuilder(choices, costs, ratios)
                solution = search.bounded(builder, None, self.tolerance)
                bound = max(bound, solution.lower_bound)
                if best.cost - bound <= max(SETTLED, self.tolerance) * best.cost or search.clock.late():
                    return best, bound
                if rounds_left and solution.assignment is not None:
                    candidate = self.inserter.tidied(search.maker.make(builder, solution))
                    if candidate and self.inserter.pays(candidate, best) and self._most_cuts(candidate) <= _CUTS:
                        best = candidate
                        break
            if best is known:
                break
        return best, bound
