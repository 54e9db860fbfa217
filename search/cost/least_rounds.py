"""The least that an all-to-all in rounds sends where of shares only ranges are known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from hapsynth.search.cost.device_speed import Floats
from hapsynth.search.cost.share_range import Mask, ShareRange

_NOTHING = 1e-9
"""The fraction of a tensor that is rounding, and no piece."""


class LeastRounds(NamedTuple):
    """`number`: of rounds that send something; `sent`: their largest pieces by what each weighs, in all."""

    number: int
    sent: float


def least_rounds(old: ShareRange, new: ShareRange, fast: Mask, weights: Sequence[float]) -> LeastRounds:
    """Of the rounds between two dimensions with shares in these ranges: in round k position i sends a piece of its
    share of the one times the share of i + k of the other (`moved_rows.rounds`). `weights`: of rounds 1 to n - 1.

    The shares of one of the two are taken at the least that each can be, those of the other are the variables of a
    linear program; and then the other way around. And whoever has the largest share of one sends, or gets, all of it
    but what its share of the other leaves it.
    """
    # The solver's tolerances are absolute ones.
    most = max(weights)
    found = _found(old, new, tuple(fast.tolist()), tuple(w / most for w in weights))
    return found._replace(sent=most * found.sent)


@lru_cache(maxsize=1 << 16)
def _found(old: ShareRange, new: ShareRange, fast: tuple[bool, ...], weights: tuple[float, ...]) -> LeastRounds:
    here, there = old.bounds(np.array(fast)), new.bounds(np.array(fast))
    n = len(fast)
    places, by = np.arange(n), np.arange(1, n)[:, None]
    number = int(np.count_nonzero((here[0] * there[0][(places + by) % n]).max(axis=1) > _NOTHING))
    sent = [_sent(here, there[0][(places + by) % n], weights), _sent(there, here[0][(places - by) % n], weights)]
    # Who has the largest share of one sends, or gets, all of that but what the other leaves it.
    (low, high), (least, most) = old.largest, new.largest
    part = max(least * (1.0 - high), low * (1.0 - most))
    return LeastRounds(max(number, int(part > _NOTHING)), max(*sent, part * min(weights)))


def _sent(shares: tuple[Floats, Floats], others: Floats, weights: tuple[float, ...]) -> float:
    """`others`: [rounds, n], of each round what each position's share is multiplied by."""
    if not others.any():
        return 0.0
    rounds, n = others.shape
    rows = np.arange(others.size)
    columns = np.concatenate([np.tile(np.arange(n), rounds), n + np.repeat(np.arange(rounds), n)])
    parts = np.concatenate([others.ravel(), -np.ones(rows.size)])
    bounds = np.concatenate([np.stack(shares, 1), np.tile([0.0, 1.0], (rounds, 1))])
    found = linprog(
        np.concatenate([np.zeros(n), weights]),
        A_ub=coo_array((parts, (np.tile(rows, 2), columns)), shape=(rows.size, n + rounds)).tocsr(),
        b_ub=np.zeros(rows.size),
        A_eq=np.concatenate([np.ones(n), np.zeros(rounds)])[None],
        b_eq=[1.0],
        bounds=bounds,
        method="highs",
    )
    if found.x is None:
        return 0.0
    # Whatever the multipliers are, a mean over positions is no more than the largest: so no tolerance of the solver
    # counts.
    means = np.maximum(-found.ineqlin.marginals.reshape(rounds, n), 0.0)
    total = np.maximum(means.sum(axis=1), _NOTHING)
    return _least((means * (np.array(weights) / np.maximum(total, weights))[:, None] * others).sum(axis=0), *shares)


def _least(slopes: Floats, least: Floats, most: Floats) -> float:
    """The least sum of slope times share, of shares that sum to one."""
    rising = np.argsort(slopes, kind="stable")
    room = (most - least)[rising]
    more = np.clip(max(1.0 - least.sum(), 0.0) - (np.cumsum(room) - room), 0.0, room)
    return float(slopes @ least + slopes[rising] @ more)
