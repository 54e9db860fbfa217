"""The layouts that a value may take on the way to where it is used, and the cheapest conversions between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cached_property
from itertools import combinations, product

import numpy as np

from hapsynth.instructions.collectives import axis_between, steps_between
from hapsynth.instructions.layout import (
    Layout,
    O,
    P,
    Placement,
    R,
    Reduction,
    S,
    is_consistent,
    is_partial,
    minors,
    orders,
)
from hapsynth.search.cost.model import Floats

Hop = tuple[int, int, int]
"""(layout before, layout after, mesh axis) of a single step; layouts by number."""
_AT_ONCE = 64
"""The number of target layouts for which paths are sought at once."""


class LayoutSet:
    """All layouts over a number of mesh axes that cut no dimensions but `dims`, each in so many `ways` (one by
    default), combine by `reductions`, and lie on no position alone but on `owners`."""

    def __init__(
        self,
        axes: int,
        dims: Sequence[int],
        reductions: Sequence[Reduction],
        ways: Sequence[int] | None = None,
        owners: Sequence[int] = (),
    ) -> None:
        self.dims = tuple(dims)
        every = [(d, way) for d, count in zip(self.dims, ways or [1] * len(self.dims)) for way in range(count)]
        self.shards = tuple(S(d)._replace(way=way) if way else S(d) for d, way in every)
        """The placements in which one axis cuts a value."""
        self.owned = tuple(map(O, owners))
        """The placements in which one position owns a value."""
        placements: list[Placement] = [R, *self.shards, *self.owned, *(P(r) for r in reductions)]
        self.layouts: tuple[Layout, ...] = tuple(
            layout for chosen in product(placements, repeat=axes) for layout in _orders(chosen) if is_consistent(layout)
        )
        self.number = {layout: i for i, layout in enumerate(self.layouts)}
        self.storable = tuple(layout for layout in self.layouts if not is_partial(layout))
        """The layouts in which inputs and outputs may be stored: those that are not partial."""
        self.cuts: tuple[tuple[int, tuple[int, ...], int], ...] = tuple(
            (d, by, way)
            for d, way in every
            for k in range(1, axes + 1)
            for some in combinations(range(axes), k)
            for by in orders(some, axes)
        )
        """Every (dimension, axes that cut it, major to minor, way)."""

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """Every single step between two of the layouts."""
        found: list[Hop] = []
        along = [tuple(dict.fromkeys(layout[a] for layout in self.layouts)) for a in range(len(self.layouts[0]))]
        for i, source in enumerate(self.layouts):
            others = ((*source[:a], p, *source[a + 1 :]) for a, every in enumerate(along) for p in every)
            near = sorted(self.number[t] for t in others if t in self.number)
            axes = ((j, axis_between(source, self.layouts[j])) for j in near)
            found += [(i, j, axis) for j, axis in axes if axis is not None]
        return tuple(found)

    @cached_property
    def free(self) -> np.ndarray:
        """bool [layouts, layouts]: whether one follows from another by local steps alone."""
        reach = np.eye(len(self.layouts), dtype=bool)
        for i, j, axis in self.hops:
            steps = steps_between(self.layouts[i][axis], self.layouts[j][axis])
            reach[i, j] = any(not step.communicates for step in steps)
        for k in range(len(self.layouts)):
            reach |= reach[:, k, None] & reach[None, k, :]
        return reach

    @cached_property
    def _placements(self) -> tuple[np.ndarray, np.ndarray]:
        """Kinds and dimensions of placements, each [layouts, axes]."""
        kinds = np.array([[p.kind for p in layout] for layout in self.layouts])
        return kinds, np.array([[p.dim for p in layout] for layout in self.layouts])

    def worth_sharing(self, made: Layout) -> np.ndarray:
        """bool [layouts]: whether a value made so may be brought to each for all its uses at once, along more than two
        axes.

        Partial sums are summed, each whole or cut on the way, all along one dimension. What axes cut stays so or is
        gathered, or one of them comes to cut another dimension, beside one sum. A slice is everybody's own.
        """
        kinds, dims = self._placements
        kind, dim = kinds[self.number[made]], dims[self.number[made]]
        changed = (kinds != kind) | (dims != dim)
        moved = changed & (kind == "S") & (kinds == "S")
        beside = changed & ~moved
        scattered = changed & (kind == "P") & (kinds == "S")
        last = np.max(dims, axis=1, where=scattered, initial=-1)[:, None]
        sliced = (changed & (kind == "R")).any(axis=1)
        along_several = (scattered & (dims != last)).any(axis=1)
        beside_one_sum = (beside.sum(axis=1) <= 1) & ~(beside & (kind != "P")).any(axis=1)
        moves = moved.sum(axis=1)
        return ~sliced & ~along_several & ((moves == 0) | ((moves == 1) & beside_one_sum))


class Conversions:
    """The cheapest ways between the layouts of a set at given costs of the single steps.

    `seconds`: float64 [layouts, layouts], inf where there is no way.
    """

    def __init__(self, layouts: LayoutSet, time: Callable[[Layout, Layout, int], float]) -> None:
        self.layouts = layouts
        n = len(layouts.layouts)
        self.single: dict[tuple[int, int], float] = {}
        """(layout before, layout after) -> seconds of the one step between them."""
        self._axis: dict[tuple[int, int], int] = {}
        for i, j, axis in layouts.hops:
            self.single[i, j] = time(layouts.layouts[i], layouts.layouts[j], axis)
            self._axis[i, j] = axis
        self.seconds: Floats = np.where(np.eye(n, dtype=bool), 0.0, np.inf)
        self.steps = np.where(np.eye(n, dtype=bool), 0, n)
        self._next = np.full((n, n), -1)
        for first in range(0, n if layouts.hops else 0, _AT_ONCE):
            self._find(slice(first, first + _AT_ONCE))

    def _find(self, some: slice) -> None:
        """The ways to some layouts: of equally long ones the one of fewest steps, of those the first (Bellman and
        Ford; no way has many steps)."""
        before, after = np.array(list(self.single)).T
        alone = np.array(list(self.single.values()))[:, None]
        starts = np.flatnonzero(np.diff(before, prepend=-1))
        from_, count = before[starts], np.diff(np.append(starts, before.size))
        least = lambda entries: np.minimum.reduceat(entries, starts, axis=0)
        spread = lambda rows: np.repeat(rows, count, axis=0)
        seconds, steps, n = self.seconds[:, some], self.steps[:, some], len(self.seconds)
        off_diagonal = ~np.eye(n, dtype=bool)[from_, some]
        while True:
            through, hops = alone + seconds[after], 1 + steps[after]
            best = least(through)
            fewest = least(np.where(through == spread(best), hops, n))
            known, taken = seconds[from_], steps[from_]
            # The count of steps may rise too: where a cost is zero, or lost in rounding, the rest of the way may change
            # and the seconds stay.
            better = off_diagonal & np.isfinite(best) & ((best < known) | ((best == known) & (fewest != taken)))
            if not better.any():
                break
            seconds[from_], steps[from_] = np.where(better, best, known), np.where(better, fewest, taken)
        shortest = (through == spread(known)) & (hops == spread(taken)) & np.isfinite(through)
        nearest = least(np.where(shortest, after[:, None], n))
        self._next[from_, some] = np.where(nearest < n, nearest, -1)

    def path(self, source: Layout, target: Layout) -> list[tuple[Layout, Layout, int]] | None:
        """The single steps of the cheapest way, each with its mesh axis; None where there is no way."""
        number, layouts = self.layouts.number, self.layouts.layouts
        at, end = number[source], number[target]
        if not np.isfinite(self.seconds[at, end]):
            return None
        found: list[tuple[Layout, Layout, int]] = []
        while at != end:
            after = int(self._next[at, end])
            found.append((layouts[at], layouts[after], self._axis[at, after]))
            at = after
        return found

    def repriced(self, time: Callable[[Layout, Layout, int], float]) -> Conversions:
        """The same ways, which need not be the cheapest ones, at other costs of the single steps."""
        layouts, rows, found = self.layouts.layouts, self._rows, copy(self)
        found.single = {(a, b): time(layouts[a], layouts[b], self._axis[a, b]) for a, b in self.single}
        found.seconds = np.where(np.isfinite(self.seconds), 0.0, np.inf)
        for i, j in np.argwhere(np.isfinite(self.seconds)).tolist():
            at = i
            while at != j:
                after = rows[2][at][j]
                found.seconds[i, j] += found.single[at, after]
                at = after
        return found

    def axis(self, before: int, after: int) -> int:
        """The axis of the step between two layouts."""
        return self._axis[before, after]

    def reached(self, source: int, targets: Sequence[int]) -> tuple[float, list[Hop]]:
        """Seconds to bring what lies in one layout to others too, each the cheapest way from what there is then, and
        the steps that make a layout which there is not yet. Infinite where there is no way."""
        seconds, _, after = self._rows
        there, total, hops = [source], 0.0, list[Hop]()
        for target in targets:
            if target in there:
                continue
            at = self._nearest(there, target)
            if seconds[at][target] == np.inf:
                return np.inf, hops
            while at != target:
                before, at = at, after[at][target]
                if at not in there:
                    total += seconds[before][at]
                    there.append(at)
                    hops.append((before, at, self._axis[before, at]))
        return total, hops

    @cached_property
    def _rows(self) -> tuple[list[list[float]], list[list[int]], list[list[int]]]:
        """The tables as lists, which are faster to read entry by entry."""
        return self.seconds.tolist(), self.steps.tolist(), self._next.tolist()

    def nearest(self, sources: Iterable[Layout], target: Layout) -> Layout:
        """The source layout from which `target` is reached at the least cost, then in the fewest steps."""
        number = self.layouts.number
        return self.layouts.layouts[self._nearest([number[s] for s in sources], number[target])]

    def _nearest(self, sources: Sequence[int], target: int) -> int:
        if len(sources) == 1:
            return sources[0]
        seconds, steps, _ = self._rows
        return min(sources, key=lambda s: (seconds[s][target], steps[s][target], self.layouts.layouts[s]))


def _orders(layout: Layout) -> Iterable[Layout]:
    """A layout of major cuts, with the axes of each dimension in each of their `orders`."""
    axes_of: dict[int, list[int]] = {}
    for axis, p in enumerate(layout):
        if p.is_sharded:
            axes_of.setdefault(p.dim, []).append(axis)
    for minor in minors(axes_of.values(), len(layout)):
        yield tuple(p._replace(minor=minor[a]) if minor.get(a) else p for a, p in enumerate(layout))
