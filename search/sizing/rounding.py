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


def _groups(shares: Ints, kind_of: Ints) -> dict[tuple[int, int], list[int]]:
    """Positions of one kind with equal shares are interchangeable: (kind, share) -> these."""
    found: dict[tuple[int, int], list[int]] = {}
    for i, s in enumerate(shares.tolist()):
        found.setdefault((int(kind_of[i]), s), []).append(i)
    return found


def group_moves(shares: Ints, kind_of: Ints, seconds: _SecondsOf) -> Iterator[Ints]:
    """One unit from, or to, every position of a group: where several are the slowest, one alone changes nothing. The
    rest of the units go where they cost the least, some at a time."""
    for (_, held), members in _groups(shares, kind_of).items():
        if len(members) == 1:
            # A single move.
            continue
        outside = np.ones(shares.size, dtype=bool)
        outside[members] = False
        for sign in (1, -1) if held else (-1,):
            moved = shares.copy()
            moved[members] -= sign
            left = len(members)
            while left:
                trials: list[Ints] = []
                for k in range(int(kind_of.max()) + 1):
                    others = np.flatnonzero((kind_of == k) & ((sign > 0) | (moved > 0)) & outside)
                    others = others[np.argsort(sign * moved[others], kind="stable")]
                    trials.append(moved.copy())
                    trials[-1][others[: min(left, -(-len(members) // _PARTS))]] += sign
                trials = [t for t in trials if (t != moved).any() and t.min() >= 0]
                if not trials:
                    break
                _, trial = best_of(trials, seconds)
                left -= int(np.abs(trial - moved).sum())
                moved = trial
            if not left:
                yield moved
