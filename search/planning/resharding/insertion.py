"""Whether a dimension class changes its ratio along the program (decisions.md D4).

A layer bound by memory bandwidth next to one bound by compute suits other sizes on devices whose two ratios differ. For
each class the ratios that suit its ops are set against each other, two at a time: which instructions should take which,
where every tensor between them has to be reshared, is a minimum cut. The linear program then sizes the parts, with what
moves between them linear in the difference (`sizing/ratio_lp.py`); reshares between parts that it leaves alike are
dropped. What comes out cheaper at whole units, by the cost of all instructions, is kept, and its parts are looked at
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Program, ProgramError
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import MOVES
from hapsynth.search.cost.program_cost import by_cheapest_steps, program_cost
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.resharding.atoms import ReshardAtoms
from hapsynth.search.planning.resharding.rewrite import Labels, merged, relabelled
from hapsynth.search.result import SETTLED
from hapsynth.search.sizing.ratios import own_weights, round_shares
from hapsynth.search.sizing.sizer import Sizer
from hapsynth.search.solver.min_cut import cheapest_labels

_GAIN = 1e-3
"""Of the cost: what gains less is not worth a program with more in it."""
_MEASURED_GAIN = 0.05
"""The same where devices were measured. What a reshare gains is how unlike two curves are on two devices, four
measurements' worth of errors: at 4 % of a step, a Transformer with experts ran 6 % slower than without."""
_ROUNDS = 4
_RATIOS = 3
"""How many ratios are tried besides the one that a class has."""
_ALIKE = 1 / 64
"""Of a dimension: ratios that differ by less at every position are one."""


@dataclass(frozen=True, eq=False)
class ReshardInserter:
    """Looks for reshares that pay. `left`: seconds that there are for it."""

    costs: CostModel
    left: Callable[[], float] = lambda: np.inf

    def improved(self, candidate: Candidate) -> Candidate:
        """The candidate with some classes cut into parts; itself where none pays."""
        best = candidate
        for _ in range(_ROUNDS):
            found = self._cut(best) if self.left() > 0 else None
            if found is None:
                break
            best = found
        return best

    def tidied(self, candidate: Candidate) -> Candidate | None:
        """The same without reshares between parts that are alike; None where it is no program, or holds too much."""
        try:
            check(self.costs.graph, candidate.program)
        except ProgramError:
            return None
        return self._merged(candidate.program, candidate.sizes)

    def pays(self, candidate: Candidate, best: Candidate) -> bool:
        """Whether one of two programs with reshares is to be taken instead of the other."""
        return candidate.cost < best.cost * (1 - (_MEASURED_GAIN if self._measured else SETTLED / 2))

    @property
    def _measured(self) -> bool:
        return any(kind.measured for kind in self.costs.cluster.kinds)

    def _cut(self, best: Candidate) -> Candidate | None:
        """Cheaper by one class that is cut in two or more; None where there is none."""
        least_gain = (_MEASURED_GAIN if self._measured else _GAIN) * best.cost
        classes = best.sizer.classes.all
        for c, losses in sorted(self._losses(best), key=lambda entry: -sum(loss for loss, _ in entry[1])):
            if sum(loss for loss, _ in losses) < least_gain or self.left() <= 0:
                break
            ratios = [best.sizes.shares[c], *self._suited(losses, classes[c].units)]
            parts = ReshardAtoms(best.program, best.sizes, self.costs, c)
            labels = self._labels(parts, list(dict.fromkeys(ratios)), least_gain)
            found = None if labels is None else self._sized(parts, labels)
            if found is not None and found.cost < best.cost - least_gain:
                return found
        return None

    def _losses(self, best: Candidate) -> Iterator[tuple[int, list[tuple[float, Floats]]]]:
        """Classes that one axis cuts and nobody owns, over unlike devices; of each work of theirs, the seconds that it
        would save at the ratio that suits it, and this. Of classes that are alike, the first."""
        class_costs, classes = best.sizer.class_costs, best.sizer.classes
        alike = {
            (class_costs.alike(c.index, best.sizes.shares), best.sizes.shares[c.index]): c for c in classes.all[::-1]
        }
        for cls in alike.values():
            if cls.owner is not None or not cls.units or any(len(m[2]) > 1 for m in cls.members):
                continue
            if not best.sizer.kinds[cls.axes].any():
                continue
            cost = self.costs
            place = cost.position(cls.axes)
            members = [np.flatnonzero(place == p) for p in range(int(place.max()) + 1)]
            held: list[list[Floats]] = []
            suited: list[list[Floats]] = []
            ratios: list[Floats] = []
            works = [(work, term) for term in class_costs.by_class[cls.index].compute_terms for work in term.counts]
            for work, term in works:
                shares = [class_costs.fraction(best.sizes, cut) for cut in term.cuts]
                k = next(k for k, cut in enumerate(term.cuts) if cut[0] == cls.index)
                own = np.where(shares[k] > 0, shares[k], 1.0 / len(members))
                busy = cost.device_times(work, [*shares[:k], own, *shares[k + 1 :]]) - cost.overhead * work.launches
                speed = own / np.maximum(busy, 1e-300)
                ratio = np.array([speed[on].min() for on in members])
                ratios.append(ratio / ratio.sum())
                held.append(shares)
                suited.append([*shares[:k], ratios[-1][place], *shares[k + 1 :]])
            of = [work for work, _ in works]
            saved = cost.times(list(zip(of, held))) - cost.times(list(zip(of, suited)))
            counts = np.array([term.counts[work] for work, term in works])
            found = zip((saved * counts).tolist(), ratios, strict=True)
            yield cls.index, [(loss, ratio) for loss, ratio in found if loss > 0]

    def _suited(self, losses: list[tuple[float, Floats]], units: int) -> list[tuple[int, ...]]:
        """The ratios that suit the works that lose most, as whole units."""
        groups: list[list[tuple[float, Floats]]] = []
        for loss, ratio in sorted(losses, key=lambda entry: -entry[0]):
            near = (g for g in groups if np.abs(g[0][1] - ratio).max() < _ALIKE)
            mine = next(near, None)
            if mine is None:
                groups.append([(loss, ratio)])
            else:
                mine.append((loss, ratio))
        groups.sort(key=lambda g: -sum(loss for loss, _ in g))
        return [round_shares(g[0][1], units) for g in groups[:_RATIOS]]

    def _labels(self, parts: ReshardAtoms, ratios: list[tuple[int, ...]], least_gain: float) -> Labels | None:
        """Which atoms should take which of two of the ratios, the first of which all have now; None where that would
        not gain enough."""
        seconds = [parts.seconds(units) for units in ratios]
        best, found = float(seconds[0].sum()) - least_gain, None
        nbytes = np.array([flow.nbytes for flow in parts.flows])
        for a, b in combinations(range(len(ratios)), 2):
            if np.minimum(seconds[a], seconds[b]).sum() >= best:
                continue
            across = (
                self._across(parts, nbytes, ratios[a], ratios[b]),
                self._across(parts, nbytes, ratios[b], ratios[a]),
            )
            labels = cheapest_labels(seconds[a], seconds[b], parts.flows, across)
            cost = float(np.where(labels == 0, seconds[a], seconds[b]).sum())
            for flow, up, down in zip(parts.flows, *across, strict=True):
                if any(labels[t] != labels[flow.maker] for t in flow.takers):
                    cost += float(down if labels[flow.maker] else up)
            if cost < best and labels.any() and not labels.all():
                best, found = cost, labels
        return found

    def _across(self, parts: ReshardAtoms, nbytes: Floats, old: tuple[int, ...], new: tuple[int, ...]) -> Floats:
        """Seconds to reshare each flow's tensor."""
        whole = max(sum(old), 1)
        link = self.costs.links[parts.axis]
        cuts = np.array(old) / whole, np.array(new) / whole
        latency, moving = MOVES.between(link, *cuts, nbytes)
        return latency + moving

    def _sized(self, parts: ReshardAtoms, labels: Labels) -> Candidate | None:
        """The program with parts at their best sizes; None where it holds too much, or cannot be cut so: tensors of one
        value that are both stored, cut alike along one of two axes."""
        graph, table = self.costs.graph, self.costs.table
        program = relabelled(parts, labels)
        try:
            check(graph, program)
        except ProgramError:
            return None
        sizer = Sizer(program, Classes.build(graph, program, table), self.costs, left=self.left)
        sizes = sizer.best(own_weights(self.costs, parts.sizes))
        return self._merged(program, sizes)

    def _merged(self, program: Program, sizes: Sizes) -> Candidate | None:
        """A program without reshares between parts that are alike; None where it holds too much."""
        program, sizes = merged(self.costs.graph, program, sizes, self.costs.table)
        program = by_cheapest_steps(program, sizes, self.costs)
        sizer = Sizer(program, sizes.classes, self.costs, left=self.left)
        memory = sizer.memory.peak(sizes)
        if memory > sizer.limit:
            return None
        return Candidate(sizer, sizes, program_cost(program, sizes, self.costs), memory, None, None)
