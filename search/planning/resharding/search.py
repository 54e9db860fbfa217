"""A search's best program where its dimension classes may be cut at several ratios, and the bound at these.

Reshares that pay by themselves are inserted (`insertion.py`). Along one mesh axis, programs whose instructions are each
at one of the ratios that come of it are then searched and bounded too; along two, the bound is that of changing from
one ratio to another for nothing.
"""

from __future__ import annotations

import time
from itertools import product

import numpy as np

from hapsynth.instructions.program.sizes import Node, Sizes
from hapsynth.search.cost.model import Floats
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.resharding.insertion import ReshardInserter
from hapsynth.search.planning.resharding.ratio_variants import CheapestOfRatios, RatioVariants
from hapsynth.search.planning.search_at_ratios import FixedRatioSearch
from hapsynth.search.result import SETTLED
from hapsynth.search.sizing.ratios import NOTHING, Ratios, own_weights

_COMBINATIONS = 8
"""Of ratios of all classes, at which a bound is still sought."""
_CUTS = 8
"""Of a value: sets of so many are still shared conversions, each a choice."""
_CHANGES = 6
"""How often programs are compared at the ratios of a better one."""


def resharded(
    search: FixedRatioSearch, best: Candidate, bound: float | None, tolerance: float
) -> tuple[Candidate, float | None]:
    """A search's best program with reshares where they pay, and the bound at the ratios that it then has; as they were
    where none does."""
    return Resharding(search, tolerance).improved(best, bound)


class Resharding:
    """`resharded` of one search."""

    def __init__(self, search: FixedRatioSearch, tolerance: float) -> None:
        self.search, self.task, self.tolerance = search, search.task, tolerance
        self.inserter = ReshardInserter(self.task.costs, search.limit, search.clock.left)

    def improved(self, best: Candidate, bound: float | None) -> tuple[Candidate, float | None]:
        """As `resharded` gives it."""
        began = time.perf_counter()
        found = self.inserter.improved(best)
        self.search.effort.ratio_s += time.perf_counter() - began
        if found is best:
            return best, bound
        if len(self.task.costs.axes) > 1 or self._most_cuts(found) > _CUTS:
            return found, self._free_to_change(best, found)
        return self._in_every_way(found)

    def _most_cuts(self, best: Candidate) -> int:
        """In how many ways some value may be cut, where every dimension may be at all ratios that a program has."""
        ways, layouts = RatioVariants(self.task.costs, best.sizes), self.search.choices.layouts
        return max(sum(ways.count(v, d) for d in known.dims) for v, known in enumerate(layouts))

    def _free_to_change(self, before: Candidate, best: Candidate) -> float | None:
        """The bound of programs at the best one's ratios, of which it has several where the one `before` had one, as if
        to change from one to another were free."""
        named = every_ratio(before, best)
        if named is None:
            return None
        costs, task = self.task.costs, self.task
        weights = own_weights(costs, before.sizes)
        every = [Ratios(task.graph, task.factors, weights, None, costs.lengths, NOTHING, n) for n in named]
        builder = CheapestOfRatios(self.search.choices, costs, every)
        return self.search.bounded(builder, before.choices, self.tolerance).lower_bound

    def _in_every_way(self, best: Candidate) -> tuple[Candidate, float]:
        """The best program whose instructions are each at one of the ratios that the given one has for what they cut,
        reshared where that pays, and the bound of these programs; where others are better at their own sizes, of
        theirs."""
        bound, search = 0.0, self.search
        for rounds_left in reversed(range(_CHANGES)):
            ways, known, bound = RatioVariants(self.task.costs, best.sizes), best, 0.0
            known_choices = search.choices
            choices = ways.choices(
                self.task.options.restriction, sparing=known_choices.sparing, owners=known_choices.owners
            )
            for ratios in (ways.ratios(), ways.ratios().strictly()):
                builder = ways.builder(choices, ratios)
                solution = search.bounded(builder, None, self.tolerance).solution
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


def every_ratio(before: Candidate, after: Candidate) -> list[dict[Node, Floats]] | None:
    """The ratios at which a candidate's program could be whose classes are those of `before`, where `after` has these
    in parts: each time one of each class's, as dimension -> fraction per position, those of the largest classes last.
    None where they are too many."""
    sizes, of = before.sizes, before.sizes.classes.of
    ratios: dict[int, dict[bytes, Floats]] = {c.index: {} for c in sizes.classes.all if c.owner is None}
    for cls, shares in zip(after.sizes.classes.all, after.sizes.shares, strict=True):
        if cls.owner is not None:
            continue
        vector = np.array(shares, dtype=np.float64) / max(cls.units, 1)
        for c in {of[value, dim, axes, 0] for value, dim, axes, _ in cls.members}:
            ratios[c].setdefault(vector.tobytes(), vector)
    if np.prod([len(found) for found in ratios.values()]) > _COMBINATIONS:
        return None
    weight = lambda c: sum(sizes.graph.values[v].nbytes for v in {v for v, *_ in sizes.classes.all[c].members})
    order = sorted(ratios, key=weight)
    return [
        {
            node: _joined(sizes, node, vector)
            for c, vector in zip(order, chosen, strict=True)
            for node in sizes.classes.all[c].members
        }
        for chosen in product(*(ratios[c].values() for c in order))
    ]


def _joined(sizes: Sizes, node: Node, vector: Floats) -> Floats:
    """A class's fractions per position along the axes of one of its members."""
    count = int(np.prod([sizes.classes.lengths[a] for a in node[2]]))
    return vector.reshape(count, -1).sum(axis=1)
