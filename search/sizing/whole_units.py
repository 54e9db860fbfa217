"""The cost of the whole units of one dimension class, with everything else fixed.

A position's times depend on its kind and how many units it holds, so they are computed once for each such pair, however
many positions have it; a sum of largest times then is a matter of looking up. A unit that is moved lowers the cost only
where it is taken from the one position that is the slowest at something, or has the largest share: of single moves only
these are tried, against every position that may get it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.cost.model import CostModel, Floats, distinct
from hapsynth.search.cost.network import Even
from hapsynth.search.cost.program_index import Cut
from hapsynth.search.memory.profile import joined_shares, largest_of
from hapsynth.search.sizing.class_costs import ClassCosts, WorkTable
from hapsynth.search.solver import Ints

_AHEAD = 2
"""Times are computed for this many units more and less than asked for, too."""
_SOURCES = 16
"""Up to this many positions, all are tried as the source of a unit if taking one from any may help."""
_ENTRIES = 4_000_000
"""The largest number of entries of an array of trials."""


class Move(NamedTuple):
    """A move of one unit, and the seconds of the class after it."""

    seconds: float
    source: int
    target: int


class ClassUnits:
    """The cost that a class's units decide. `shares`: those that single moves begin from."""

    def __init__(self, class_costs: ClassCosts, c: int, sizes: Sizes) -> None:
        self.class_costs, self.c, self.sizes = class_costs, c, sizes
        self.cls = class_costs.classes.all[c]
        compute_terms, self._comm_terms, self._move_terms = class_costs.by_class[c]
        self.kind_of = class_costs.costs.kinds_along(self.cls.axes)
        self._layers: dict[int, _Layer] = {}
        self._terms: list[tuple[int, slice, Floats]] = []
        """Per table: the depth of the cut, its rows in that layer, and their runs."""
        for term in compute_terms:
            (k,) = [k for k, cut in enumerate(term.cuts) if cut[0] == c]
            depth = term.cuts[k][1]
            if depth not in self._layers:
                self._layers[depth] = _Layer(class_costs.costs, self.cls.axes[:depth], self.cls.units)
            layer = self._layers[depth]
            others = [None if cut[0] == c else cut for cut in term.cuts]
            layer.fractions.update({cut: class_costs.fraction(sizes, cut) for cut in others if cut is not None})
            table = class_costs.table(term)
            self._terms.append((depth, layer.add(table, others), table.counts))
        cuts = [cut for term in self._comm_terms for cut in term.cuts]
        cuts += [cut for term in self._move_terms for cut in term.over]
        self._fixed = {cut: largest_of(sizes, cut) for cut in cuts if cut[0] != c}
        self._depths = sorted({depth for other, depth in cuts if other == c})
        """Depths at which the largest joined share counts."""
        # Over a largest share collectives grow as it falls, and what moves may be less wherever a unit goes.
        over = [cut[0] for term in self._comm_terms for cut in term.over]
        self._any_helps = c in over or bool(self._move_terms)
        self._sent: dict[tuple[int, ...], Floats] = {}
        self.shares = np.zeros(0, dtype=np.int64)
        self.evaluated = 0
        """The number of shares and moves evaluated so far."""

    @property
    def decides(self) -> bool:
        """Whether the class has any cost."""
        return bool(self._terms or self._comm_terms or self._move_terms)

    def seconds(self, trials: Ints) -> Floats:
        """Seconds of each trial [trials], for shares [trials, positions]."""
        self.evaluated += len(trials)
        most = max([layer.terms for layer in self._layers.values()], default=1) * trials.shape[1]
        step = max(1, _ENTRIES // max(most, 1))
        return np.concatenate([self._seconds(trials[i : i + step]) for i in range(0, len(trials), step)])

    def _seconds(self, trials: Ints) -> Floats:
        # In the middle of a move positions along the minor axes may hold more than all units together.
        joined = lambda d: np.minimum(self._joined(trials, d), self.cls.units)
        found = {d: layer.largest(joined(d)) for d, layer in self._layers.items()}
        largest = [joined(d).max(axis=1) for d in self._depths]
        return self._summed(len(trials), found, largest, trials)

    def _summed(
        self, count: int, terms: dict[int, Floats], largest: Sequence[Ints], trials: Ints | None = None
    ) -> Floats:
        """Seconds of some trials from the largest time of each term [trials, terms] by depth, and the largest joined
        share of each depth that counts. `trials`: the shares, where some are moved between classes."""
        seconds = np.zeros(count)
        for depth, rows, counts in self._terms:
            seconds += (terms[depth][:, rows] * counts).sum(axis=-1)
        if self._comm_terms:
            seconds = self._with_comm_terms(seconds, largest)
        for b in self._move_terms:
            assert trials is not None
            of_depth = dict(zip(self._depths, largest, strict=True))
            largest_share = lambda cut, of_depth=of_depth: (
                of_depth[cut[1]] / self.cls.units if cut[0] == self.c else np.full(count, self._fixed[cut])
            )
            seconds += b.at(self._shards(b.old, trials), self._shards(b.new, trials), largest_share)
        return seconds

    def _with_comm_terms(self, seconds: Floats, largest: Sequence[Ints]) -> Floats:
        """Adds the seconds of collectives, computed once per distinct largest shares, of which there are few."""
        code = np.zeros(len(seconds), dtype=np.int64)
        for joined in largest:
            code = code * (self.cls.units + 1) + joined
        _, first, which = np.unique(code, return_index=True, return_inverse=True)
        sent = [self._sent_at(tuple(int(joined[i]) for joined in largest)) for i in first.tolist()]
        for each in np.array(sent)[which].T:
            seconds = seconds + each
        return seconds

    def _sent_at(self, largest: tuple[int, ...]) -> Floats:
        """Seconds of each communication term [terms]."""
        if largest not in self._sent:
            share = {(self.c, d): held / self.cls.units for d, held in zip(self._depths, largest, strict=True)}
            share.update(self._fixed)
            self._sent[largest] = np.array([float(term.at(share.__getitem__)) for term in self._comm_terms])
        return self._sent[largest]

    def _joined(self, shares: Ints, depth: int) -> Ints:
        """Per position along the first axes [..., positions]: those of minor axes joined."""
        if depth == len(self.cls.axes):
            return shares
        return shares.reshape(*shares.shape[:-1], self.class_costs.classes.along(self.cls.axes[:depth]), -1).sum(
            axis=-1
        )

    def _shards(self, cut: Cut | Even, trials: Ints) -> Floats:
        if isinstance(cut, Even):
            return np.broadcast_to(cut.shares, (len(trials), cut.positions))
        if cut[0] == self.c:
            return self._joined(trials, cut[1]) / self.cls.units
        held = joined_shares(self.sizes, cut)
        return np.broadcast_to(held, (len(trials), held.size))

    def allotted(self, shares: Ints, most: Ints) -> Ints | None:
        """Units given one by one to the position where the slowest of its works then is the least over what it takes at
        `shares` on the slowest position, were there no tiles: what rounding to tiles costs is spread. None where the
        class is not cut along all its axes at once."""
        depth = len(self.cls.axes)
        layer = self._layers.get(depth)
        if layer is None:
            return None
        tiles = self.class_costs.costs.figures.tile.tolist()
        window = max(
            [t * self.cls.units // n for n in self.class_costs.lanes(self.c) for t in tiles if n >= t], default=1
        )
        low, high = np.maximum(shares - window, 0), np.minimum(shares + window, most)
        high = np.where(shares > 0, high, 0)
        wanted = self.cls.units - int(low.sum())
        places = np.repeat(np.arange(shares.size), np.maximum(high - low, 0))
        if places.size < wanted or (low > high).any():
            return None
        first = np.cumsum(np.maximum(high - low, 0)) - np.maximum(high - low, 0)
        held = low[places] + 1 + np.arange(places.size) - first[places]
        due = layer.exactly(shares).max(axis=0)
        over = (layer.at(places, held) / np.where(due > 0, due, np.inf)).max(axis=1)
        if depth in self._depths:
            over = np.maximum(over, held / shares.max())
        chosen = np.argsort(over, kind="stable")[:wanted]
        return low + np.bincount(places[chosen], minlength=shares.size)

    # Single moves

    def begin(self, shares: Ints) -> None:
        """Single moves are from these shares on."""
        self.shares = shares.copy()
        for depth, layer in self._layers.items():
            layer.begin(self._joined(shares, depth))

    def move(self, source: int, target: int) -> None:
        """Move one unit."""
        self.shares[source] -= 1
        self.shares[target] += 1
        for depth, layer in self._layers.items():
            inner = self._inner(depth)
            if source // inner != target // inner:
                layer.change(source // inner, -1)
                layer.change(target // inner, 1)

    def best_move(self, most: Ints) -> Move | None:
        """The cheapest of the single moves that may lower the cost, the first of equals; None where there is none. No
        share may be above `most`, of its position or of all. Of positions that are alike the first is tried."""
        shares = self.shares
        most = np.broadcast_to(most, shares.shape)
        above = np.flatnonzero(shares > most)
        if above.size > 1 or (shares[above] - 1 > most[above]).any():
            return None
        firsts = self._firsts()
        tops = {d: layer.top for d, layer in self._layers.items()}
        largest = {d: _Top.of(self._joined(shares, d)[:, None]) for d in self._depths}
        held = firsts[shares[firsts] > 0]
        slowest = self._slowest(held, tops, largest)
        sources = held[slowest]
        if self._any_helps:
            sources = held if len(held) <= _SOURCES else np.union1d(sources, self._rest(held[~slowest]))
        if above.size:
            sources = sources[np.isin(sources, above)]
        targets = firsts[shares[firsts] < most[firsts]]
        best: Move | None = None
        for source in sources.tolist():
            others = targets[targets != source]
            if not others.size:
                continue
            seconds = self._after(source, others, tops, largest)
            self.evaluated += others.size
            at = int(np.argmin(seconds))
            if best is None or seconds[at] < best.seconds:
                best = Move(float(seconds[at]), source, int(others[at]))
        return best

    @property
    def only_rises(self) -> bool:
        """Whether the cost is non-decreasing in every position's units."""
        return not self._any_helps

    def at_least(self, positions: Ints) -> float:
        """A lower bound on the seconds after each of `positions`, which are equivalent, has gained a unit from others;
        at most as many other positions have lost one."""
        count, first = positions.size, positions[:1]
        terms: dict[int, Floats] = {}
        for depth, layer in self._layers.items():
            least = layer.largest_but(count)
            terms[depth] = (np.maximum(least, layer.more(first)[0]) if self._inner(depth) == 1 else least)[None]
        held: list[Ints] = []
        for depth in self._depths:
            joined = self._joined(self.shares, depth)
            least = int(np.sort(joined)[-count - 1]) if count < joined.size else 0
            held.append(np.array([max(least, int(joined[first[0]]) + 1) if self._inner(depth) == 1 else least]))
        return float(self._summed(1, terms, held)[0])

    def _firsts(self) -> Ints:
        """The first of each set of positions of one kind with equal shares, which are interchangeable."""
        if int(self.kind_of.max()) + 1 == self.shares.size:
            return np.arange(self.shares.size)
        _, first = np.unique(self.kind_of * (self.cls.units + 1) + self.shares, return_index=True)
        return np.sort(first)

    def _slowest(self, positions: Ints, tops: dict[int, _Top], largest: dict[int, _Top]) -> npt.NDArray[np.bool_]:
        """bool [positions]: those that alone are the slowest at some term or have the largest share. If that is true
        only of several positions joined in one, the first of these."""
        found = np.zeros(positions.size, dtype=bool)
        joined: list[Ints] = []
        for depth, top in (*tops.items(), *largest.items()):
            inner, alone = self._inner(depth), top.alone
            if inner == 1:
                found |= np.isin(positions, alone)
            else:
                joined += [np.flatnonzero(positions // inner == p) for p in alone.tolist()]
        for among in joined:
            rest = among[~found[among]]
            found[rest[:1]] = True
        return found

    def _rest(self, positions: Ints) -> Ints:
        """The first position of each joined set, or of all if none are joined: a unit may as well be taken from it as
        from the others."""
        inner = max([self._inner(depth) for depth in (*self._layers, *self._depths)], default=1)
        places = positions // inner if inner > 1 else np.zeros_like(positions)
        return positions[np.unique(places, return_index=True)[1]]

    def _after(self, source: int, targets: Ints, tops: dict[int, _Top], largest: dict[int, _Top]) -> Floats:
        """Seconds after a unit has moved from `source` to each of `targets` [targets]."""
        terms: dict[int, Floats] = {}
        for depth, layer in self._layers.items():
            inner, top = self._inner(depth), tops[depth]
            to = targets // inner
            left = np.maximum(top.without(source // inner), layer.less(source // inner))
            terms[depth] = np.maximum(left, layer.more(to))
            if inner > 1:
                terms[depth][to == source // inner] = top.first
        held: list[Ints] = []
        for depth in self._depths:
            inner, top, joined = self._inner(depth), largest[depth], self._joined(self.shares, depth)
            to = targets // inner
            left = np.maximum(top.without(source // inner), joined[source // inner] - 1)
            held.append(np.where(to == source // inner, top.first, np.maximum(left, joined[to] + 1)).astype(np.int64))
        trials = None
        if self._move_terms:
            trials = np.tile(self.shares, (targets.size, 1))
            trials[:, source] -= 1
            trials[np.arange(targets.size), targets] += 1
        return self._summed(targets.size, terms, held, trials)

    def _inner(self, depth: int) -> int:
        """The number of positions that are joined in one at a depth."""
        return self.shares.size // self.class_costs.classes.along(self.cls.axes[:depth])


class _Top(NamedTuple):
    """Per term [terms]: the largest value over positions, the second largest (equal in a tie), and the position of the
    largest."""

    first: np.ndarray
    second: np.ndarray
    where: Ints

    @staticmethod
    def of(terms: np.ndarray, positions: Ints | None = None, counts: Ints | None = None) -> _Top:
        """terms: [positions, terms]. Or of some positions, each standing for as many as `counts` says."""
        at, every = terms.argmax(axis=0), np.arange(terms.shape[1])
        first = terms[at, every]
        rest = terms.astype(np.float64)
        rest[at, every] = -np.inf
        second = rest.max(axis=0)
        if positions is None or counts is None:
            return _Top(first, second, at)
        return _Top(first, np.where(counts[at] > 1, first, second), positions[at])

    @property
    def alone(self) -> Ints:
        """Positions that have the largest of some term alone."""
        return np.unique(self.where[self.first > self.second])

    def without(self, position: int) -> np.ndarray:
        """The largest of each term over all other positions."""
        return np.where(self.where == position, self.second, self.first)


class _Layer:
    """The works that a class divides along the first of its axes: their times at each position."""

    def __init__(self, costs: CostModel, axes: tuple[int, ...], units: int) -> None:
        self.costs, self.units = costs, units
        self.kind_of = costs.kinds_along(axes)
        count = int(self.kind_of.max()) + 1
        _, first = np.unique(self.kind_of, return_index=True)
        self._devices = np.argsort(costs.position(axes), kind="stable").reshape(self.kind_of.size, -1)[first]
        """int [kinds of positions, devices at one]"""
        self._tables: list[tuple[WorkTable, list[Cut | None]]] = []
        self.fractions: dict[Cut, Floats] = {}
        """Cut of another class that also divides these works -> each device's share [devices]."""
        self._row: dict[int, int] = {}
        """Key of a kind of position and share -> the row of its times."""
        self._times = np.zeros((4 * count, 0))
        self._now = self._more = self._less = np.zeros(0, dtype=np.int64)
        self._shares = np.zeros(0, dtype=np.int64)

    @property
    def terms(self) -> int:
        return sum(table.counts.size for table, _ in self._tables)

    def add(self, table: WorkTable, others: list[Cut | None]) -> slice:
        """One more table; the rows that are its. `others`: its cuts, None for that of the class itself."""
        before = self.terms
        self._tables.append((table, others))
        return slice(before, self.terms)

    def largest(self, shares: Ints) -> Floats:
        """The largest time of each term [trials, terms], of shares [trials, positions]."""
        key = self.kind_of * (self.units + 1) + shares
        # Most positions hold the same in all trials.
        same = (key == key[0]).all(axis=0)
        known, which = np.unique(key[:, ~same], return_inverse=True)
        rest, rows = self._rows(np.unique(key[0, same])), self._rows(known)
        alike = self._times[rest].max(axis=0, initial=-np.inf)
        if not known.size:
            return np.repeat(alike[None], len(shares), axis=0)
        times = self._times[rows]
        there = np.zeros((len(shares), known.size), dtype=bool)
        there[np.arange(len(shares))[:, None], which.reshape(len(shares), -1)] = True
        return np.stack([np.maximum(alike, times[some].max(axis=0)) for some in there])

    def at(self, positions: Ints, shares: Ints) -> Floats:
        """Times of some positions with some shares [positions, terms]."""
        return self._found(self.kind_of[positions], shares)

    def exactly(self, shares: Ints) -> Floats:
        """Times [positions, terms] as if there were no tiles."""
        return self._found(self.kind_of, shares, whole_tiles=False)

    def begin(self, shares: Ints) -> None:
        """Reset to `shares` [positions]."""
        self._shares = shares.copy()
        key = self.kind_of * (self.units + 1) + shares
        keys, which = np.unique(key, return_inverse=True)
        least, most = keys % (self.units + 1) == 0, keys % (self.units + 1) == self.units
        # What cannot be less, or more, is never asked for.
        self._now, self._less, self._more = (
            self._rows(k)[which] for k in (keys, np.where(least, keys, keys - 1), np.where(most, keys, keys + 1))
        )

    def change(self, position: int, by: int) -> None:
        """Change the share of one position by `by` units, 1 or -1."""
        self._shares[position] += by
        held = int(self._shares[position])
        key = int(self.kind_of[position]) * (self.units + 1) + held
        keys = np.array([key - (held > 0), key, key + (held < self.units)])
        self._less[position], self._now[position], self._more[position] = self._rows(keys)

    @property
    def top(self) -> _Top:
        """The slowest positions."""
        rows, first, counts = np.unique(self._now, return_index=True, return_counts=True)
        return _Top.of(self._times[rows], first, counts)

    def largest_but(self, count: int) -> Floats:
        """The largest time of each term where the slowest `count` positions are none [terms]."""
        rows, counts = np.unique(self._now, return_counts=True)
        times = self._times[rows]
        order = np.argsort(-times, axis=0, kind="stable")
        beyond = np.cumsum(counts[order], axis=0) > count
        at = np.take_along_axis(order, beyond.argmax(axis=0)[None], axis=0)
        return np.where(beyond.any(axis=0), np.take_along_axis(times, at, axis=0)[0], 0.0)

    def less(self, position: int) -> Floats:
        """Times with one unit less [terms]."""
        return self._times[self._less[position]]

    def more(self, positions: Ints) -> Floats:
        """Times with one unit more [positions, terms]."""
        return self._times[self._more[positions]]

    def _rows(self, keys: Ints) -> Ints:
        """Where the times of some kinds of positions with some shares are, computed where they are not known."""
        known = self._row
        missing = [key for key in keys.tolist() if key not in known]
        if missing:
            self._compute(missing)
        return np.array([known[key] for key in keys.tolist()], dtype=np.int64)

    def _compute(self, missing: Sequence[int]) -> None:
        kinds, shares = np.divmod(np.array(missing), self.units + 1)
        around = [(kinds, shares + more) for more in range(-_AHEAD, _AHEAD + 1)]
        wanted = {
            k * (self.units + 1) + s: None
            for some, held in around
            for k, s in zip(some.tolist(), held.tolist(), strict=True)
            if 0 <= s <= self.units
        }
        keys = np.array([key for key in wanted if key not in self._row])
        kinds, shares = np.divmod(keys, self.units + 1)
        start, times = len(self._row), self._found(kinds, shares)
        if self._times.shape[1] != self.terms:
            self._times = np.zeros((len(self._times), self.terms))
        while start + len(times) > len(self._times):
            self._times = np.concatenate([self._times, np.zeros_like(self._times)])
        self._times[start : start + len(times)] = times
        self._row.update(zip(keys.tolist(), range(start, start + len(times)), strict=True))

    def _found(self, kinds: Ints, shares: Ints, *, whole_tiles: bool = True) -> Floats:
        """Times [positions, terms] of positions of some kinds with some shares."""
        devices = self._unlike[kinds]
        held, every = np.repeat(shares, devices.shape[1]) / self.units, devices.ravel()
        found: list[Floats] = []
        for table, others in self._tables:
            fractions = [held if other is None else self.fractions[other][every] for other in others]
            busy = table.busy(self.costs.kind_of[every], fractions, whole_tiles=whole_tiles)
            found.append(busy.reshape(len(busy), *devices.shape).max(axis=2).T)
        return np.concatenate(found, axis=1)

    @cached_property
    def _unlike(self) -> Ints:
        """int [kinds of positions, devices]: for each kind, one of each set of equal devices at a position, which are
        of one kind and have equal other shares; repeated to fill the row."""
        if self._devices.shape[1] == 1 or len(self.costs.kinds) == self.costs.n:
            return self._devices
        others = self.fractions.values()
        found = [row[distinct(self.costs.kind_of[row], [other[row] for other in others])] for row in self._devices]
        most = max(len(row) for row in found)
        return np.stack([np.resize(row, most) for row in found])
