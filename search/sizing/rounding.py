"""Moves of whole units between devices, from which the rounding of ratios chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from hapsynth.search.cost.model import Floats
from hapsynth.search.solver import Ints

_PARTS = 8
"""The largest number of parts in which the units of a group are moved."""


_SecondsOf = Callable[[Ints], Floats]
"""Shares [trials, positions] -> seconds [trials]."""


def best_of(moves: Iterable[Ints], seconds: _SecondsOf) -> tuple[float, Ints]:
    """The cheapest shares, the first of equals, and their seconds; inf where there are none."""
    trials = list(moves)
    if not trials:
        return np.inf, np.zeros(0, np.int64)
    found = seconds(np.stack(trials))
    at = int(np.argmin(found))
    return float(found[at]), trials[at]


def _groups(shares: Ints, kind_of: Ints) -> list[tuple[int, int, Ints]]:
    """Groups of interchangeable positions, of one kind and with equal shares, ordered by first position: (kind, share,
    positions)."""
    key = kind_of * (int(shares.max(initial=0)) + 1) + shares
    _, first, counts = np.unique(key, return_index=True, return_counts=True)
    members = np.split(np.argsort(key, kind="stable"), np.cumsum(counts)[:-1])
    return [(int(kind_of[first[g]]), int(shares[first[g]]), members[g]) for g in np.argsort(first).tolist()]


def group_moves(
    shares: Ints,
    kind_of: Ints,
    seconds: _SecondsOf,
    below: float = np.inf,
    at_least: Callable[[Ints], float] | None = None,
) -> Iterator[Ints]:
    """Shares [positions] after one unit moves from, or to, every position of a group: where several are the slowest, a
    single move changes nothing. The units go to, or come from, where that costs the least, some at a time.

    `at_least(positions)`: a lower bound on the seconds after each of these has gained a unit; valid where the cost is
    non-decreasing in the units. Moves that it shows to cost `below` or more are left out.
    """
    of_kinds = [np.flatnonzero(kind_of == k) for k in range(int(kind_of.max()) + 1)]
    for kind, held, places in _groups(shares, kind_of):
        if places.size == 1:
            # A single move.
            continue
        others_of = [np.setdiff1d(some, places) if k == kind else some for k, some in enumerate(of_kinds)]
        for sign in (1, -1) if held else (-1,):
            if sign < 0 and at_least is not None and at_least(places) >= below:
                continue
            moved = shares.copy()
            moved[places] -= sign
            # Units that are taken and given to none yet.
            if sign > 0 and at_least is not None and seconds(moved[None])[0] >= below:
                continue
            left, step = places.size, -(-places.size // _PARTS)
            first: dict[int, Ints] = {}
            """Kind -> its next positions, as long as none of its positions has changed."""
            while left:
                trials: list[Ints] = []
                for k, others in enumerate(others_of):
                    if k not in first:
                        some = others if sign > 0 else others[moved[others] > 0]
                        first[k] = some[np.argsort(sign * moved[some], kind="stable")[:step]]
                    if first[k].size:
                        trials.append(moved.copy())
                        trials[-1][first[k][:left]] += sign
                if not trials:
                    break
                cost, trial = best_of(trials, seconds)
                if sign > 0 and at_least is not None and cost >= below:
                    break
                changed = np.flatnonzero(trial != moved)
                left -= changed.size
                first.pop(int(kind_of[changed[0]]))
                moved = trial
            if not left:
                yield moved
