"""A lower bound on the cost of a program over all sizes: the linear program over ratios, with valid terms only.

A device without a share does nothing, so of what those with one spend whatever their shares are only the least
device's counts. A product of two largest shares m, n is at least a n + b m - a b, where a and b are their even shares
(McCormick); a measured curve counts with its highest rate; what remains counts with its ideal time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import fsum, prod

import numpy as np
import numpy.typing as npt

from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.cost.model import Floats
from hapsynth.search.cost.program_index import Cut
from hapsynth.search.cost.roofline import Roofline
from hapsynth.search.memory.profile import MemoryProfile, largest_of
from hapsynth.search.sizing.class_costs import ClassCosts, CommTerm, ComputeTerm, RoundsTerm
from hapsynth.search.sizing.ratio_lp import RatioLP


def relaxation_bound(
    class_costs: ClassCosts,
    memory: MemoryProfile,
    kinds: Mapping[tuple[int, ...], npt.NDArray[np.int64]],
    pinned: dict[int, tuple[int, ...]],
    sizes: Sizes,
    limit: float,
    left: Callable[[], float],
) -> float:
    """A lower bound on the seconds that depend on sizes, over all sizes of the classes that are not `pinned`, within
    `limit` bytes per device. `sizes`: some sizes of the program. `kinds`: of the positions along the axes of each
    family of classes. `left`: the seconds available; families not solved by then count 0."""
    # A tensor that two families cut holds a product.
    points = _full_points(memory, sizes, limit) if len(kinds) == 1 else ()
    lps: list[_RelaxedLP] = []
    for axes, kind_of in kinds.items():
        # Along several axes, positions of one kind are no longer alike: it matters with which others they are joined.
        alike = kind_of if len(axes) == 1 else np.arange(kind_of.size)
        lp = _RelaxedLP(
            class_costs, memory, axes, alike, np.ones(class_costs.costs.n), sizes, pinned, apart=bool(points)
        )
        lps += [lp] if lp.classes else []
    covered = {term for lp in lps for term in (*lp.compute_terms, *lp.comm_terms)}
    floor = _UncoveredTerms(class_costs, sizes, pinned)
    found = [lp.least(points, limit, left()) + lp.constant for lp in lps]
    found += [floor.of_compute_term(term) for term in class_costs.compute_terms if term not in covered]
    found += [floor.of_rounds(term) for term in class_costs.rounds]
    rest = (replace(term, seconds=0.0) if term in covered else term for term in class_costs.comm_terms)
    found += [floor.of_comm_term(term) for term in rest]
    return fsum(found)


def _full_points(memory: MemoryProfile, sizes: Sizes, limit: float) -> Sequence[int]:
    """The points at which a program nearly fills the memory, where the limit determines its sizes."""
    alive = memory.at(sizes)
    fullest = np.argsort(-alive, kind="stable")[:_POINTS]
    return [int(p) for p in fullest if alive[p] > 0.9 * limit]


_POINTS = 16


class _RelaxedLP(RatioLP):
    """One family of classes along the same axes."""

    def _counted(self) -> tuple[Sequence[ComputeTerm], Sequence[CommTerm]]:
        free, class_costs = set(self.classes), self.class_costs
        decided = lambda cuts: {c for c, _ in cuts} <= free
        compute_terms = [term for term in class_costs.compute_terms if len(term.cuts) == 1 and decided(term.cuts)]
        comm_terms = [t for t in class_costs.comm_terms if len(t.times) <= 2 and not t.over and decided(t.times)]
        return compute_terms, comm_terms

    def _alike(self, c: int) -> object:
        return super()._alike(c) if self.class_costs.alone(c) else c

    def _add_comm_terms(self) -> None:
        self._add_largest()
        for term in self.comm_terms:
            least = [_even(self.class_costs, cut) for cut in term.times]
            for n, cut in enumerate(term.times):
                self.objective[self._largest(cut)] += term.seconds * prod(least) / least[n]
            self.constant -= (len(least) - 1) * term.seconds * prod(least)

    def _add_boundaries(self) -> None:
        """No term: with equal sizes on both sides nothing moves."""

    def _add_rounds(self) -> None:
        """No term: these are products of two classes' sizes."""

    def _lines(self, roofline: Roofline, k: int, fractions: Sequence[Floats]) -> tuple[Floats, ...]:
        """Of what does not depend on the share the least device's; computing at the highest rate."""
        fixed, compute, cut, whole = roofline.line(self.costs.kind_of, k, fractions, None)
        least = lambda seconds: np.broadcast_to(seconds.min(axis=1, keepdims=True), seconds.shape)
        return least(fixed), compute, cut, least(whole)


class _UncoveredTerms:
    """Lower bounds on the works and collectives that are in no linear program."""

    def __init__(self, class_costs: ClassCosts, sizes: Sizes, pinned: dict[int, tuple[int, ...]]) -> None:
        self.class_costs, self.sizes, self.pinned = class_costs, sizes, pinned

    def of_compute_term(self, term: ComputeTerm) -> float:
        costs = self.class_costs.costs
        if all(c in self.pinned for c, _ in term.cuts):
            shares = [self.class_costs.fraction(self.sizes, cut) for cut in term.cuts]
            return fsum(count * costs.time(work, shares) for work, count in term.counts.items())
        ideal = costs.ideal_times(term.counts)
        return fsum(count * seconds for count, seconds in zip(term.counts.values(), ideal, strict=True))

    def of_comm_term(self, term: CommTerm) -> float:
        return float(term.at(self._least))

    def of_rounds(self, term: RoundsTerm) -> float:
        return term.runs * term.evenly(float(term.held(self._least)))

    def _least(self, cut: Cut) -> float:
        """The least that the largest share of a cut can be."""
        return largest_of(self.sizes, cut) if cut[0] in self.pinned else _even(self.class_costs, cut)


def _even(class_costs: ClassCosts, cut: Cut) -> float:
    """The least that the largest share of a cut can be."""
    c, depth = cut
    return 1.0 / prod(class_costs.classes.lengths[a] for a in class_costs.classes.all[c].axes[:depth])
