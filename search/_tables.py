"""Groupings of states and the tables over them: what the reductions do to one edge or one variable's states.

groups: int64 [states], a state's row in a table: float64 [groups, width], >= 0 or inf.
"""

from dataclasses import dataclass

import numpy as np

from hapsynth.search._pairwise import Floats, Ints


@dataclass(frozen=True, slots=True)
class NormalForm:
    """An edge with every group used, rows and columns that differ, and minimum 0 in each finite row and column.

    cost_u, cost_v: float64 [states], what this moved into the unary costs; None for nothing. table: None if all 0.
    """

    cost_u: Floats | None
    cost_v: Floats | None
    gu: Ints
    gv: Ints
    table: Floats | None


class Tables:
    """The costly operations, each done once for equal arguments: layers repeat, so most calls have been seen.

    Results are shared between callers; nobody may write to them.
    """

    def __init__(self) -> None:
        self._forms: dict[tuple[object, ...], NormalForm] = {}
        self._differences: dict[tuple[object, ...], Floats] = {}
        self._undominated: dict[tuple[object, ...], np.ndarray] = {}
        self._joined: dict[tuple[object, ...], Floats] = {}

    def normal_form(self, gu: Ints, gv: Ints, table: Floats) -> NormalForm:
        key = (gu.tobytes(), gv.tobytes(), table.shape, table.tobytes())
        found = self._forms.get(key)
        if found is None:
            found = self._forms[key] = _normal_form(gu, gv, table)
        return found

    def joined(self, unary: Floats, first: tuple[Ints, Floats], second: tuple[Ints, Floats]) -> Floats:
        """min over states of unary + first's table + second's: float64 [width of first, width of second]."""
        key = (unary.tobytes(), *_content(*first), *_content(*second))
        found = self._joined.get(key)
        if found is None:
            found = self._joined[key] = _joined(unary, first, second)
        return found

    def undominated(self, unary: Floats, sides: list[tuple[Ints, Floats]], usage: Floats, rivals: int) -> np.ndarray:
        """bool [states]: without the states s for which some kept t has, whatever happens, cost(t) <= cost(s).

        Goldstein's test: unary_s - unary_t + sum_e min_y (table_e[s, y] - table_e[t, y]) >= 0, and t uses no
        more of any resource (usage: [resources, states]). States are tried only against the `rivals` cheapest.
        """
        shifted = unary - unary.min()
        key = (rivals, shifted.tobytes(), usage.tobytes(), *(part for side in sides for part in _content(*side)))
        found = self._undominated.get(key)
        if found is None:
            differences = [(own, self._difference(table)) for own, table in sides]
            found = self._undominated[key] = _undominated(shifted, differences, usage, rivals)
        return found

    def _difference(self, table: Floats) -> Floats:
        key = (table.shape, table.tobytes())
        found = self._differences.get(key)
        if found is None:
            found = self._differences[key] = least_difference(table)
        return found


def _content(groups: Ints, table: Floats) -> tuple[object, ...]:
    return groups.tobytes(), table.shape, table.tobytes()


def _normal_form(gu: Ints, gv: Ints, table: Floats) -> NormalForm:
    gu, table = without_unused(gu, table)
    gv, table_t = without_unused(gv, table.T)
    table = table_t.T
    cost_u = cost_v = None
    rows = table.min(axis=1)
    if rows.any():
        cost_u = rows[gu]
        table = table - np.where(np.isfinite(rows), rows, 0.0)[:, None]
    columns = table.min(axis=0)
    if columns.any():
        cost_v = columns[gv]
        table = table - np.where(np.isfinite(columns), columns, 0.0)
    if not table.any():
        return NormalForm(cost_u, cost_v, gu, gv, None)
    gu, table = without_twins(gu, table)
    gv, table_t = without_twins(gv, table.T)
    return NormalForm(cost_u, cost_v, gu, gv, np.ascontiguousarray(table_t.T))


def _joined(unary: Floats, first: tuple[Ints, Floats], second: tuple[Ints, Floats]) -> Floats:
    g1, t1 = first
    g2, t2 = second
    pair = g1 * t2.shape[0] + g2
    order = np.lexsort((unary, pair))
    order = order[np.flatnonzero(np.diff(pair[order], prepend=-1))]
    chunk = max(1, 1_000_000 // (t1.shape[1] * t2.shape[1]))
    out: Floats | None = None
    for at in range(0, order.size, chunk):
        some = order[at : at + chunk]
        left = unary[some, None] + t1[g1[some]]
        least = np.min(left[:, :, None] + t2[g2[some], None, :], axis=0)
        out = least if out is None else np.minimum(out, least)
    assert out is not None
    return out


def _undominated(unary: Floats, differences: list[tuple[Ints, Floats]], usage: Floats, most_rivals: int) -> np.ndarray:
    by_cost = np.argsort(unary, kind="stable")
    rivals = by_cost[:most_rivals]
    margin = unary[:, None] - unary[rivals]
    for own, difference in differences:
        margin += difference[own[:, None], own[rivals]]
    better = margin >= 0
    for row in usage:
        better &= row[:, None] >= row[rivals]
    better[rivals, np.arange(rivals.size)] = False
    suspects = set(np.flatnonzero(better.any(axis=1)).tolist())
    keep = np.ones(unary.size, dtype=bool)
    # The dearest first, so that of equals the first state stays. One at a time, against states still kept: exact.
    for s in (s for s in by_cost[::-1].tolist() if s in suspects):
        keep[s] = not (better[s] & keep[rivals]).any()
    return keep


def groups_lost(groups: Ints, count: int) -> bool:
    return not np.bincount(groups, minlength=count).all()


def without_unused(groups: Ints, table: Floats) -> tuple[Ints, Floats]:
    used = np.bincount(groups, minlength=table.shape[0]) > 0
    if used.all():
        return groups, table
    return (np.cumsum(used) - 1)[groups], table[used]


def without_twins(groups: Ints, table: Floats) -> tuple[Ints, Floats]:
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


def cheapest_of_each(signature: list[Ints], unary: Floats) -> np.ndarray:
    """bool [states]: the cheapest, first of equals, among those in the same group of every link."""
    keep = np.zeros(unary.size, dtype=bool)
    if not signature:
        keep[np.argmin(unary)] = True
        return keep
    order = np.lexsort((unary, *signature))
    columns = np.stack(signature)[:, order]
    new = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
    keep[order[np.concatenate([[True], new])]] = True
    return keep


def least_difference(table: Floats) -> Floats:
    """[s, t]: the least of table[s, y] - table[t, y] over y where table[s, y] is finite; -inf where t forbids one."""
    finite = np.isfinite(table)
    possible = finite.astype(np.float64)
    out = np.where(possible @ (1.0 - possible).T > 0, -np.inf, 0.0)
    if not table[finite].any():
        return out
    first, second = np.nonzero(out == 0.0)
    chunk = max(1, 1_000_000 // table.shape[1])
    for at in range(0, first.size, chunk):
        s, t = first[at : at + chunk], second[at : at + chunk]
        with np.errstate(invalid="ignore"):
            difference = table[s] - table[t]
        out[s, t] = np.min(difference, axis=1, where=finite[s], initial=np.inf)
    return out
