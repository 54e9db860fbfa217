"""What ops send after themselves at least, wherever they run: whoever puts one off puts that off too.

The gradients of weights need not wait for one another, nor does the rest of the backward pass for them. So they may run
beside what the pass sends last; but then what they send follows it on the link, and precedes the op that waits
for all of them (`Deferral.join`), such as the norm to which they are clipped. After each of these ops come some that
only depend on it: whatever its layout, on the way through them to where its result is used, or stays, it is converted
at a least cost, the shortest path over layouts and triples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hapsynth.instructions.factors import Triples
from hapsynth.search.analysis.reachability import Mask, Reachability
from hapsynth.search.cost.model import Floats
from hapsynth.search.formulation.choice_space import ChoiceSpace, Interned, Use
from hapsynth.search.formulation.conversions import Conversions
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.solver import Ints

_LEAST_WORK = 1e-3
"""Of all, that of an op worth putting off."""
_LEAST_BESIDE = 2e-2
"""Of all, the work that does not depend on an op worth putting off, nor it on that."""
_NEXT_TO_NONE = 1e-2
"""Of all, work that other ops may wait for too: a chain is not cut there."""


class Deferrable(NamedTuple):
    """An op, and the values that depend on it alone, its own results first; each is of one such op. `use`: the one in
    which it ends, where it has but one and other ops are waited for there: what is sent for it depends on the two."""

    op: int
    values: tuple[int, ...]
    use: Use | None


class Deferral:
    """The deferrable ops of a choice space's graph. `seconds`: of each op, about."""

    def __init__(self, structure: ChoiceSpace, reach: Reachability, in_block: Mask, seconds: Floats) -> None:
        self.structure, self.reach, self.in_block = structure, reach, in_block
        self._work = np.where(in_block, 0.0, seconds)
        self._whole = float(self._work.sum())
        self.is_cut: Mask = reach.before(self._work) > _NEXT_TO_NONE * self._whole
        """bool [ops]: where chains may be cut before what is put off."""

    @cached_property
    def ops(self) -> tuple[Deferrable, ...]:
        beside = self._whole - self.reach.related(self._work) + self._work
        worth = (self._work >= _LEAST_WORK * self._whole) & (beside >= _LEAST_BESIDE * self._whole) & ~self.in_block
        uses: dict[int, list[Use]] = {}
        for use in self.structure.uses:
            uses.setdefault(use.value, []).append(use)
        taken: set[int] = set()
        found: list[Deferrable] = []
        # The last ones first: what depends on two in a row is of the second.
        for op in np.flatnonzero(worth)[::-1].tolist():
            values = self._after(op, taken)
            taken.update(values)
            only = uses.get(values[0], []) if len(values) == 1 else []
            ends = len(only) == 1 and only[0].reader >= 0 and only[0].place == 0
            found.append(Deferrable(op, tuple(values), only[0] if ends else None))
        return tuple(found)

    @cached_property
    def op_indices(self) -> list[int]:
        """The deferrable ops, by their indices."""
        return [d.op for d in self.ops]

    def beside(self, cuts: Sequence[int], related: Mask, *, joined: bool) -> Mask:
        """bool [cuts, deferrable ops]: which ops each of `cuts` leaves unordered, so that they may run before or after
        it; none for an op that can be no cut. `related`, of the same shape: which are its ancestors or descendants.
        `joined`: only those that the join waits for."""
        found = ~related & self.is_cut[cuts][:, None]
        return found & self.before_join[self.op_indices] if joined else found

    @cached_property
    def join(self) -> int | None:
        """The first op that waits for the most deferrable work; None where nothing is deferrable."""
        work = np.zeros_like(self._work)
        work[self.op_indices] = self._work[self.op_indices]
        waiting = np.where(self.in_block, 0.0, self.reach.before(work) - work)
        return int(np.argmax(waiting >= waiting.max() * (1 - 1e-9))) if waiting.any() else None

    @cached_property
    def before_join(self) -> Mask:
        """bool [ops]: those that the join waits for."""
        found = np.zeros_like(self.in_block)
        if self.join is not None:
            found |= self.reach.ancestors(self.join)
            found[self.join] = False
        return found

    def _after(self, op: int, taken: set[int]) -> list[int]:
        """Its results, and those of ops that depend on it and on no other that may be a cut beside it."""
        graph, reach = self.structure.graph, self.reach
        related = reach.ancestors(op) | reach.descendants(op)
        elsewhere = self.is_cut & ~related
        found = [v for v in graph.ops[op].results if v not in taken]
        for value in found:
            for user in dict.fromkeys(user for user, _ in graph.uses[value]):
                results = graph.ops[user].results
                if self.in_block[user] or (elsewhere & reach.ancestors(user)).any():
                    continue
                found += [v for v in results if v not in taken and v not in found]
        return found


class SentAfter:
    """Seconds that deferrable ops send after themselves under the choices of a plain `builder`. `least_ways`: value ->
    the cheapest conversions between its layouts."""

    def __init__(
        self,
        deferral: Deferral,
        builder: ProblemBuilder,
        least_ways: Callable[[int], Conversions],
    ) -> None:
        self.deferral, self.structure = deferral, deferral.structure
        self.builder, self.least_ways = builder, least_ways
        self.ways = [builder.conversions(value) for value in range(len(self.structure.graph.values))]
        self.plain = builder.plain_outputs()
        self._uses: dict[int, list[Use]] = {}
        for use in self.structure.uses:
            if use.place == 0:
                self._uses.setdefault(use.value, []).append(use)

    def seconds(self, deferrable: Deferrable, before: int | None = None) -> Floats:
        """Lower bound on the seconds sent after an op [triples, layouts or 1]: under each of its triples and, where it
        has a `use`, for each layout that this needs. `before`: an op, to count only what must be sent before it; None
        to count all."""
        waited_for = None if before is None else self.deferral.reach.ancestors(before)
        graph, mine, use = self.structure.graph, set(deferrable.values), deferrable.use
        if use is not None:
            number = self.ways[use.value].layouts.number
            made = self._made(use.value, self.structure.triples[deferrable.op], 0)
            return self.least_ways(use.value).seconds[made][:, [number[layout] for layout in use.needs.layouts]]
        from_layouts: dict[int, Floats] = {}
        for value in sorted(mine, key=lambda v: graph.producer[v], reverse=True):
            from_layouts[value] = self._from_layouts(value, mine, from_layouts, waited_for)
        return self._after_op(deferrable.op, from_layouts)[:, None]

    def _from_layouts(self, value: int, mine: set[int], known: dict[int, Floats], waited_for: Mask | None) -> Floats:
        """Lower bound on the seconds sent after a value, per layout in which it is made [layouts]: the maximum over its
        uses and output layouts, or only over its uses by ops of `waited_for`."""
        to = self.least_ways(value).seconds
        number = self.ways[value].layouts.number
        found = np.zeros(len(to))
        for use in self._uses.get(value, ()):
            if waited_for is not None and not (use.reader >= 0 and waited_for[use.reader]):
                continue
            layouts = [number[layout] for layout in use.needs.layouts]
            then = np.zeros(len(layouts))
            if use.reader >= 0 and mine.intersection(self.structure.graph.ops[use.reader].results):
                after = self._after_op(use.reader, known)[self.structure.choices[use.variable].triple]
                then = np.full(len(layouts), np.inf)
                np.minimum.at(then, use.needs.groups, after)
            np.maximum(found, (to[:, layouts] + then).min(axis=1), out=found)
        for end in self.builder.ends(value) if value in self.plain and waited_for is None else ():
            np.maximum(found, to[:, [number[layout] for layout in end.layouts]].min(axis=1), out=found)
        return found

    def _after_op(self, op: int, known: dict[int, Floats]) -> Floats:
        """Lower bound on the seconds sent after an op under each of its triples [triples]: the maximum over results."""
        triples = self.structure.triples[op]
        found = np.zeros(len(triples))
        for position, value in enumerate(self.structure.graph.ops[op].results):
            if value in known:
                np.maximum(found, known[value][self._made(value, triples, position)], out=found)
        return found

    def _made(self, value: int, triples: Interned[Triples], position: int) -> Ints:
        """The layout, by number, in which each triple makes a value."""
        layouts = self.ways[value].layouts
        make = lambda: np.array([layouts.number[tuple(t.results[position] for t in ts)] for ts in triples])
        return self.builder.once(("made", layouts, triples, position), make)
