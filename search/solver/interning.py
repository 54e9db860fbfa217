"""Arrays by number, and what the reductions do to them, each thing done once.

Identical layers have identical costs, so every vector, grouping and table is kept once under a number (its id), and
every operation remembers its results by the ids of its operands: most steps of a reduction are a look-up.

groups: int64 [states], a state's row in a table: float64 [groups, width], >= 0 or inf. Stored arrays are never written.
"""

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np

from hapsynth.search.solver.options import DEFAULT
from hapsynth.search.solver.problem import Floats, Ints

Id = int
P = ParamSpec("P")
T = TypeVar("T")
NONE: Id = -1
"""No array: nothing to add, a table of zeros, a mask that keeps everything."""
_LARGE = 4096
"""Bytes: larger arrays are found by a hash of their content, so that the content is kept once."""
Side = tuple[Id, Id]
"""One end of a link: (groups of a variable's states, table with a row for each)."""


class Link(NamedTuple):
    """The edge between two variables as one of them sees it: cost table[own[x], other[y]]."""

    own: Id
    table: Id
    other: Id


class NormalForm(NamedTuple):
    """An edge with every group used, rows and columns that differ, and minimum 0 in each finite row and column.

    cost_own, cost_other: float64 [states], what this moved into the unary costs. link: as the first end sees it, None
    if it costs nothing; mirror: as the other end does.
    """

    cost_own: Id
    cost_other: Id
    link: Link | None
    mirror: Link | None


class Memoized(Generic[P, T]):
    """A method whose results are remembered by its arguments for as long as its instance lives."""

    def __init__(self, method: Callable[Concatenate[Any, P], T]):
        self.method = method

    def __get__(self, owner: object, kind: type) -> Callable[P, T]:
        # The memo lies in the instance's own dictionary and is found there from now on; it does not keep it alive.
        found = cache(partial(self.method, weakref.proxy(owner)))
        owner.__dict__[self.method.__name__] = found
        return cast(Callable[P, T], found)


class InternedTables:
    """The arrays of one reduction and their operations; arguments and results are ids. `compared_entries`: of tables
    that take more subtractions only the rows asked for are compared."""

    def __init__(self, compared_entries: int = DEFAULT.compared_entries) -> None:
        self._compared_entries = compared_entries
        self.arrays: list[np.ndarray] = []
        self.nbytes = 0
        self._ids: dict[tuple[str, tuple[int, ...], bytes | int], tuple[Id, ...]] = {}
        """By dtype, shape and content or, of large ones, the content's hash."""

    def id(self, array: np.ndarray) -> Id:
        content = array.tobytes()
        large = len(content) > _LARGE
        key = (array.dtype.char, array.shape, hash(content) if large else content)
        alike = self._ids.get(key, ())
        for found in alike:
            if not large or np.array_equal(self.arrays[found], array):
                return found
        found = len(self.arrays)
        self._ids[key] = (*alike, found)
        self.arrays.append(np.ascontiguousarray(array))
        self.nbytes += array.nbytes
        return found

    @Memoized
    def sum(self, first: Id, second: Id) -> Id:
        return self.id(self.arrays[first] + self.arrays[second])

    @Memoized
    def taken(self, array: Id, keep: Id) -> Id:
        """Without the states (last axis) where the mask `keep` is false."""
        return self.id(self.arrays[array][..., self.arrays[keep]])

    @Memoized
    def shifted(self, unary: Id) -> tuple[Id, float]:
        """The costs beyond the least, and that."""
        least = self.arrays[unary].min()
        return self.id(self.arrays[unary] - least), float(least)

    @Memoized
    def finite(self, unary: Id) -> Id:
        return self.mask(np.isfinite(self.arrays[unary]))

    def mask(self, keep: np.ndarray) -> Id:
        return NONE if np.count_nonzero(keep) == keep.size else self.id(keep)

    @Memoized
    def normal_form(self, link: Link) -> NormalForm:
        table = self.arrays[link.table]
        used_u, gu = self.used(link.own, table.shape[0])
        used_v, gv = self.used(link.other, table.shape[1])
        if used_u is not None:
            table = table[used_u]
        if used_v is not None:
            table = table[:, used_v]
        cost_u = cost_v = NONE
        # The functions that numpy's methods call in the end: most tables are small.
        rows = np.minimum.reduce(table, axis=1)
        if np.count_nonzero(rows):
            cost_u = self.id(rows[gu])
            table = table - np.where(np.isfinite(rows), rows, 0.0)[:, None]
        columns = np.minimum.reduce(table, axis=0)
        if np.count_nonzero(columns):
            cost_v = self.id(columns[gv])
            table = table - np.where(np.isfinite(columns), columns, 0.0)
        if not np.count_nonzero(table):
            return NormalForm(cost_u, cost_v, None, None)
        gu, table = without_twins(gu, table)
        gv, table_t = without_twins(gv, table.T)
        own, other = self.id(gu), self.id(gv)
        return NormalForm(cost_u, cost_v, Link(own, self.id(table_t.T), other), Link(other, self.id(table_t), own))

    @Memoized
    def used(self, groups: Id, count: int) -> tuple[Ints | None, Ints]:
        """(which of `count` groups there are, None if all, each state's place among them)"""
        which, place = used_groups(self.arrays[groups], count)
        return (None if isinstance(which, slice) else which), place

    @Memoized
    def restricted(self, link: Link, keep: Id) -> NormalForm:
        """The normal form of what is left when the link's own variable keeps the states of a mask."""
        return self.normal_form(link._replace(own=self.taken(link.own, keep)))

    @Memoized
    def merged(self, first: Link, second: Link) -> NormalForm:
        """Two edges between the same variables as one."""
        (gu, t, gv), (hu, s, hv) = ([self.arrays[k] for k in link] for link in (first, second))
        gu, first_u, second_u = paired(gu, hu)
        gv, first_v, second_v = paired(gv, hv)
        table = t[first_u[:, None], first_v[None, :]] + s[second_u[:, None], second_v[None, :]]
        return self.normal_form(Link(self.id(gu), self.id(table), self.id(gv)))

    @Memoized
    def least(self, unary: Id, link: Link) -> Id:
        """min over a variable's states of its cost and the link's, for each state of the neighbour."""
        own, table, other = (self.arrays[k] for k in link)
        by_group = least_by_group(own, self.arrays[unary], table.shape[0])
        return self.id(np.min(by_group[:, None] + table, axis=0)[other])

    @Memoized
    def joined(self, unary: Id, first: Link, second: Link) -> Link:
        """min over states of the unary cost and both links': the link between the neighbours that is left."""
        (g1, t1), (g2, t2) = ((self.arrays[link.own], self.arrays[link.table]) for link in (first, second))
        return Link(first.other, self.id(_joined(self.arrays[unary], (g1, t1), (g2, t2))), second.other)

    @Memoized
    def undominated(self, unary: Id, sides: tuple[Side, ...], usage: Id, rivals: int) -> Id:
        """Mask without the states s for which some kept t has, whatever happens, cost(t) <= cost(s).

        Goldstein's test: unary_s - unary_t + sum_e min_y (table_e[s, y] - table_e[t, y]) >= 0, and t uses no
        more of any resource (usage: [resources, states]). States in the same group of every link are told apart by
        cost and usage alone, which takes O(states log states) and goes first; the others are tried only against
        the `rivals` cheapest.
        """
        costs, use = self.arrays[unary], self.arrays[usage]
        keep = cheapest_of_each([self.arrays[own] for own, _ in sides] + list(use), costs)
        left = np.flatnonzero(keep)
        if left.size > 1:
            keep[left] = self._undominated(
                costs[left], [(self.arrays[own][left], table) for own, table in sides], use[:, left], rivals
            )
        return self.mask(keep)

    def _undominated(self, costs: Floats, sides: list[tuple[Ints, Id]], usage: Floats, most_rivals: int) -> np.ndarray:
        """A state that beats another comes before it by (cost, cost of links, usage), as a row's least entry is 0, or
        is its equal. The test is transitive (the least of a sum is no less than the sum of the leasts): a state may go
        if any before it beats it, itself dropped or not."""
        of_links = np.zeros(costs.size)
        for own, table in sides:
            of_links += self.row_sums(table)[own]
        order = np.lexsort((usage.sum(axis=0), of_links, costs))
        rivals, others = order[:most_rivals], order[1:]
        margin = costs[others, None] - costs[rivals]
        for own, table in sides:
            margin += self._differences(table, own[others], own[rivals])
        beaten = margin >= 0
        # Only by those before.
        beaten &= np.arange(1, order.size)[:, None] > np.arange(rivals.size)
        for use in usage:
            beaten &= use[others, None] >= use[rivals]
        keep = np.ones(costs.size, dtype=bool)
        keep[others[beaten.any(axis=1)]] = False
        return keep

    def _differences(self, table: Id, rows: Ints, others: Ints) -> Floats:
        """`least_difference` of each row with each of the others."""
        entries = self.arrays[table]
        if entries.shape[0] * entries.size <= self._compared_entries:
            return self.differences(table)[rows[:, None], others]
        these, row = used_groups(rows, entries.shape[0])
        those, other = used_groups(others, entries.shape[0])
        return np.take(least_difference(entries[these], entries[those])[:, other], row, axis=0)

    @Memoized
    def differences(self, table: Id) -> Floats:
        """`least_difference` of each row of a table with each."""
        return least_difference(self.arrays[table], self.arrays[table])

    @Memoized
    def row_sums(self, table: Id) -> Floats:
        """Finite also where a row is not."""
        return np.minimum(self.arrays[table], 1e200).sum(axis=1)

    @Memoized
    def cheapest(self, unary: Id, given: tuple[tuple[Id, Id, int], ...]) -> int:
        """The cheapest state when each link's neighbour is in the group given: (own groups, table, column)."""
        cost = self.arrays[unary]
        for own, table, column in given:
            cost = cost + self.arrays[table][self.arrays[own], column]
        return int(np.argmin(cost))

    @Memoized
    def first_like(self, groups: tuple[Id, ...], states: Id) -> list[int]:
        """Of each of some states (`NONE`: of all) the first that no grouping tells apart from it."""
        key = np.stack(
            [self.arrays[own] if states == NONE else self.arrays[own][self.arrays[states]] for own in groups]
        )
        seen: dict[tuple[int, ...], int] = {}
        return [seen.setdefault(tuple(column), s) for s, column in enumerate(key.T.tolist())]

    @Memoized
    def group_of_number(self, states: Id, groups: Id) -> dict[int, int]:
        return dict(zip(self.arrays[states].tolist(), self.arrays[groups].tolist(), strict=True))

    @Memoized
    def numbers(self, states: Id) -> list[int]:
        return self.arrays[states].tolist()

    @Memoized
    def by_group(self, groups: Id) -> tuple[Ints, Ints, Ints]:
        """(states sorted by group, where each group starts, the sorted states' groups)."""
        own = self.arrays[groups]
        order = np.argsort(own, kind="stable")
        ordered = own[order]
        return order, np.searchsorted(ordered, np.arange(int(ordered[-1]) + 1)), ordered

    @Memoized
    def cells(self, table: Id) -> tuple[Floats, Ints, Ints]:
        """A table's entries row by row, the column of each, and where each row starts."""
        rows, width = self.arrays[table].shape
        return self.arrays[table].ravel(), np.tile(np.arange(width), rows), width * np.arange(rows)

    @Memoized
    def columns(self, table: Id) -> Floats:
        """A table column by column: float64 [width, groups]."""
        return np.ascontiguousarray(self.arrays[table].T)


def _joined(unary: Floats, first: tuple[Ints, Floats], second: tuple[Ints, Floats]) -> Floats:
    g1, t1 = first
    g2, t2 = second
    pair = g1 * t2.shape[0] + g2
    order = np.lexsort((unary, pair))
    ordered = pair[order]
    cheapest = np.ones(order.size, dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=cheapest[1:])
    order = order[cheapest]
    chunk = max(1, 1_000_000 // (t1.shape[1] * t2.shape[1]))
    out: Floats | None = None
    for at in range(0, order.size, chunk):
        some = order[at : at + chunk]
        left = unary[some, None] + t1[g1[some]]
        least = np.min(left[:, :, None] + t2[g2[some], None, :], axis=0)
        out = least if out is None else np.minimum(out, least)
    assert out is not None
    return out


def used_groups(groups: Ints, count: int) -> tuple[Ints | slice, Ints]:
    """(which of `count` groups there are, each state's place among them)"""
    used = np.zeros(count, dtype=bool)
    used[groups] = True
    if np.count_nonzero(used) == count:
        return slice(None), groups
    return np.flatnonzero(used), (np.cumsum(used) - 1)[groups]


def without_twins(groups: Ints, table: Floats) -> tuple[Ints, Floats]:
    if len(table) == 1:
        return groups, table
    seen: dict[bytes, int] = {}
    rows, step = table.tobytes(), table.shape[1] * table.itemsize
    number = [seen.setdefault(rows[at : at + step], len(seen)) for at in range(0, len(rows), step)]
    if len(seen) == len(number):
        return groups, table
    first = np.unique(number, return_index=True)[1]
    return np.array(number)[groups], table[first]


def paired(first: Ints, second: Ints) -> tuple[Ints, Ints, Ints]:
    """Groups that tell apart what either grouping does, and which old group each lies in."""
    key = first * (int(second.max()) + 1) + second
    _, index, groups = np.unique(key, return_index=True, return_inverse=True)
    return groups, first[index], second[index]


def cheapest_of_each(signature: list[np.ndarray], unary: Floats) -> np.ndarray:
    """bool [states]: the cheapest, first of equals, among the states that no array of the signature tells apart."""
    keep = np.zeros(unary.size, dtype=bool)
    if not signature:
        keep[np.argmin(unary)] = True
        return keep
    order = np.lexsort((unary, *signature))
    new = np.zeros(unary.size - 1, dtype=bool)
    for column in signature:
        ordered = column[order]
        new |= ordered[1:] != ordered[:-1]
    keep[order[np.concatenate([[True], new])]] = True
    return keep


def least_by_group(groups: Ints, values: Floats, count: int) -> Floats:
    least = np.full(count, np.inf)
    np.minimum.at(least, groups, values)
    return least


def least_difference(table: Floats, others: Floats) -> Floats:
    """[s, t]: the least of table[s, y] - others[t, y] over y where table[s, y] is finite; -inf where t forbids one."""
    out = np.empty((table.shape[0], others.shape[0]))
    finite = bool(np.isfinite(table).all() and np.isfinite(others).all())
    chunk = max(1, 200_000 // max(1, others.size))
    # Copied column by column: walked through in the order in which they lie these take half as long.
    columns, against = np.ascontiguousarray(table.T)[:, :, None], np.ascontiguousarray(others.T)[:, None, :]
    for at in range(0, table.shape[0], chunk):
        some = columns[:, at : at + chunk]
        if finite:
            np.minimum.reduce(some - against, axis=0, out=out[at : at + chunk])
            continue
        with np.errstate(invalid="ignore"):
            # fmin passes over nan: where both forbid y it decides nothing.
            least = np.fmin.reduce(some - against, axis=0)
        out[at : at + chunk] = np.where(np.isnan(least), np.inf, least)
    return out
