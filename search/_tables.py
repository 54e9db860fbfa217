"""Groupings of states and the tables over them: what the reductions do to one edge or one variable's states.

groups: int64 [states], a state's row in a table: float64 [groups, width], >= 0 or inf.
"""

import numpy as np

from hapsynth.search._pairwise import Floats, Ints


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
