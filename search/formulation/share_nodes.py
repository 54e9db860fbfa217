"""Shares rounded at random to a few nodes, by which programs of all ratios are bounded though only the nodes are looked
at.

Along a dimension of many rows the share s that slow devices have in all (`ShareRange.fast` is what that leaves) may be
nearly anything. Between two nodes s is rounded up or down by one random threshold for all that ops can cut together, so
that s is the mean of what it becomes (randomized rounding: Raghavan and Thompson, 1987). Then

- whatever is linear in s between nodes, as the bytes of a collective, or held, or moved between two shares, is on the
  mean no more than it was; and between shares that the rounding makes alike there is no message;
- an op takes on the mean no more than it did if its seconds at the nodes are such that straight lines between them
  nowhere exceed its least time (`below`).

So a program, rounded, costs on the mean no more than it did, and some program at the nodes no more than the mean: none
costs less than the cheapest at the nodes. What ops cut together stays cut alike, and to come from one share to
another little by little is no cheaper than at once, which ranges do not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from hapsynth.search.cost.device_speed import Floats
from hapsynth.search.cost.share_range import Range, ShareRange

_CELLS = 2048
"""Of the shares up to an even one: of so many whole rows each has a cell of its own."""
_SAFETY = 1 - 1e-9
"""Of what stands at a node: what rounding may have added is less."""
_ROUNDING = 1e-9
"""Shares that lie no farther apart are one."""
_LOWER = 0.01
"""How far below the least of all a node may stand, as a fraction."""


@dataclass(frozen=True)
class ShareNodes:
    """Of a dimension of so many `units`. `fast`: which devices are. `shares`: of slow devices in all, rising, up to an
    even one. The first stands for all smaller ones, too, and the last for all greater ones. `finest`: how many
    `cells` there are at most."""

    units: int
    fast: tuple[bool, ...]
    shares: tuple[float, ...]
    finest: int = _CELLS

    @staticmethod
    def near(units: int, fast: Iterable[bool], shares: Iterable[float]) -> ShareNodes:
        """At an even share, and as near as may be to others."""
        fast = tuple(fast)
        even = (len(fast) - sum(fast)) / len(fast)
        ends = ShareNodes(units, fast, (even,))._ends
        nearest = {float(ends[np.argmin(np.abs(ends - share))]) for share in shares}
        return ShareNodes(units, fast, (*sorted(x for x in nearest if x < even - _ROUNDING), even))

    def with_more(self, shares: Iterable[float]) -> ShareNodes:
        """With more nodes, as near as may be to some shares."""
        return ShareNodes.near(self.units, self.fast, (*self.shares, *shares))

    @property
    def even(self) -> float:
        return self.shares[-1]

    def ranges(self) -> tuple[ShareRange, ...]:
        """Of shares that each node stands for by itself."""
        last = len(self.shares) - 1
        within = ((0.0 if k == 0 else s, 1.0 if k == last else s) for k, s in enumerate(self.shares))
        return tuple(self._range(slow) for slow in within)

    def point(self, k: int) -> ShareRange:
        """A node's own share."""
        return self._range((self.shares[k], self.shares[k]))

    def beside(self, k: int) -> ShareRange:
        """All shares that may be rounded to a node."""
        low = 0.0 if k == 0 else self.shares[k - 1]
        return self._range((low, self.shares[k + 1] if k + 1 < len(self.shares) else 1.0))

    def _range(self, slow: Range) -> ShareRange:
        whole = 1.0 / len(self.fast), 1.0
        return ShareRange(whole, (0.0, 1.0), (1.0 - slow[1], 1.0 - slow[0])).tightened(np.array(self.fast))

    # Cells

    @cached_property
    def _most(self) -> int:
        """Units of slow devices in all, up to an even share."""
        return self.units * (len(self.fast) - sum(self.fast)) // len(self.fast)

    @property
    def _each(self) -> bool:
        """Whether each whole number of units is a cell."""
        return self._most <= self.finest

    @cached_property
    def _ends(self) -> Floats:
        """Shares up to an even one at which, or between which, cells lie, rising."""
        if self._each:
            return np.arange(self._most + 1) / max(self.units, 1)
        return np.union1d(np.linspace(0.0, self.even, self.finest + 1), self.shares)

    @cached_property
    def cells(self) -> tuple[Range, ...]:
        """The shares that slow devices may have in all, in order; the last cell is all beyond an even one. The same
        whatever the nodes are."""
        ends = self._ends.tolist()
        inside = zip(ends, ends, strict=True) if self._each else pairwise(ends)
        return (*inside, (self.even, 1.0))

    @cached_property
    def cell_ranges(self) -> tuple[ShareRange, ...]:
        """As `cells`, in whole units."""
        return tuple(self._range(slow).in_units(self.units) for slow in self.cells)

    # Functions

    def at(self, seconds: Floats) -> Floats:
        """Values at the nodes [rows, nodes] of functions whose lower bounds per cell are `seconds` [rows, cells]: the
        minimum over the cells that contain a node."""
        low, high = np.array(self.cells).T
        found: list[Floats] = []
        for share in self.shares:
            mine = (low <= share + _ROUNDING) & (high >= share - _ROUNDING)
            mine[-1] &= not mine[:-1].any()
            found.append(seconds[:, mine].min(axis=1))
        return np.stack(found, axis=1)

    def above(self, seconds: Floats) -> Floats:
        """As `at`, but the first and the last node also cover all cells before and after them."""
        most, (low, high) = self.at(seconds), np.array(self.cells).T
        most[:, 0] = np.minimum(most[:, 0], seconds[:, low <= self.shares[0] + _ROUNDING].min(axis=1))
        most[:, -1] = np.minimum(most[:, -1], seconds[:, high >= self.shares[-1] - _ROUNDING].min(axis=1))
        return most

    def between(self, seconds: Floats) -> list[tuple[Floats, Floats]]:
        """For each pair of neighbouring nodes, the bounds in the cells between them: relative positions in [0, 1]
        [places], and seconds [rows, places]."""
        found: list[tuple[Floats, Floats]] = []
        ends = np.array(self.cells[:-1])
        for first, last in pairwise(self.shares):
            mine = (ends[:, 1] >= first - _ROUNDING) & (ends[:, 0] <= last + _ROUNDING)
            along = np.clip((ends[mine] - first) / (last - first), 0.0, 1.0)
            values = seconds[:, :-1][:, mine]
            found.append((along[:, 0], values) if self._each else (along.ravel(), np.repeat(values, 2, axis=1)))
        return found

    def worst(self, seconds: Floats, k: int) -> tuple[float, float]:
        """(share, seconds) of the cell, around node `k`, where a function [cells] lies furthest below its linear
        interpolation between the nodes, and by how much."""
        middle = np.array(self.cells[:-1]).mean(axis=1)
        line = np.interp(middle, self.shares, self.at(seconds[None])[0])
        first, last = self.shares[max(k - 1, 0)], self.shares[min(k + 1, len(self.shares) - 1)]
        mine = ((middle >= first) | (k == 0)) & (middle <= last)
        less = np.where(mine, line - seconds[:-1], -np.inf)
        at = int(np.argmax(less))
        return float(middle[at]), float(less[at])

    def halfway(self, k: int) -> list[float]:
        """The shares halfway between node `k` and its neighbours; for the first node also 0."""
        first = [0.0] if k == 0 else []
        return [*first, *(sum(pair) / 2 for pair in pairwise(self.shares[max(k - 1, 0) : k + 2]))]

    def below(self, seconds: Floats) -> Floats:
        """Values at the nodes [rows, nodes] whose linear interpolation nowhere exceeds functions with the lower bounds
        `seconds` [rows, cells].

        Both ends of a line are lowered by as much as the line is too high; where that leaves less than a function's
        minimum, its nodes start from the minimum instead. Then each node is raised as far as possible, the one of the
        least value first, as programs will be there."""
        most, between = self.above(seconds), self.between(seconds)
        least = seconds.min(axis=1, keepdims=True)
        over = np.zeros((len(most), len(between) + 2))
        for k, (along, values) in enumerate(between):
            line = most[:, k : k + 1] * (1 - along) + most[:, k + 1 : k + 2] * along
            over[:, k + 1] = (line - values).max(axis=1, initial=0.0)
        found = self._raised(most - np.maximum(over[:, :-1], over[:, 1:]), most, between)
        low = (found < least * (1 - _LOWER)).any(axis=1)
        if low.any():
            start, some = np.repeat(least[low], found.shape[1], axis=1), [(t, values[low]) for t, values in between]
            found[low] = self._raised(start, most[low], some)
        return found * _SAFETY

    def _raised(self, found: Floats, most: Floats, between: Sequence[tuple[Floats, Floats]]) -> Floats:
        """`found` with each node raised in turn as far as `most` and the cells allow."""
        found, order = found.copy(), np.argsort(most, axis=1, kind="stable")
        for rank, k in np.ndindex(order.shape[1], order.shape[1]):
            rows = np.flatnonzero(order[:, rank] == k)
            room = most[rows, k]
            for place, other in ((k - 1, k - 1), (k, k + 1)):
                if rows.size and 0 <= place < len(between):
                    along, values = between[place]
                    near = along if other < k else 1 - along
                    some = near > _ROUNDING
                    rest = values[np.ix_(rows, some)] - found[rows, other][:, None] * (1 - near[some])
                    room = np.minimum(room, (rest / near[some]).min(axis=1, initial=np.inf))
            found[rows, k] = room
        return found
