"""Moves of whole units between devices, from which the rounding of ratios chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from hapsynth.search.cost.model import Floats
from hapsynth.search.solver import Ints

_PARTS = 8
"""In how many parts the units of a group are moved at most."""


_SecondsOf = Callable[[Ints], Floats]
"""Of shares [trials, positions], each trial's."""


def best_of(moves: Iterable[Ints], seconds: _SecondsOf) -> tuple[float, Ints]:
    """The cheapest shares, the first of equals, and their seconds; inf where there are none."""
    trials = list(moves)
    if not trials:
        return np.inf, np.zeros(0, np.int64)
    found = seconds(np.stack(trials))
    at = int(np.argmin(found))
    return float(found[at]), trials[at]


def _groups(shares: Ints, kind_of: Ints) -> list[tuple[int, int, Ints]]:
    """Positions of one kind with equal shares are interchangeable: (kind, share, these), by the first of them."""
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
    """One unit from, or to, every position of a group: where several are the slowest, one alone changes nothing. The
    rest of the units go where they cost the least, some at a time.

    `at_least`: seconds that are taken at least where every one of some positions gets a unit from others, where a unit
    more nowhere costs less. Moves that then cannot cost less than `below` are left out.
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
            """Of each kind, the positions that are next, as long as none of its have changed."""
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
