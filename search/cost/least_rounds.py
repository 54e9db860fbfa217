"""The least that an all-to-all in rounds sends where of shares only ranges are known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, vstack

from hapsynth.search.cost.device_speed import Floats
from hapsynth.search.cost.share_range import Mask, ShareRange, spread

_NOTHING = 1e-9
"""The fraction of a tensor that is rounding, and no piece."""
_SOLVED = 6
"""Of many ranges of one dimension, for how many at most the linear program is solved."""


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
    (to,), (back,) = (
        least_rounds_of_each([one], other, fast, weights, backward=back)
        for one, other, back in ((old, new, False), (new, old, True))
    )
    return LeastRounds(max(to.number, back.number), max(to.sent, back.sent))


def least_rounds_of_each(
    varied: Sequence[ShareRange], other: ShareRange, fast: Mask, weights: Sequence[float], *, backward: bool = False
) -> list[LeastRounds]:
    """As `least_rounds`, of each of some ranges of one dimension, whose shares alone are variables. `backward`: where
    the other dimension is the one whose shards are sent."""
    # The solver's tolerances are absolute ones.
    most = max(weights)
    found = _found(tuple(varied), other, tuple(fast.tolist()), tuple(w / most for w in weights), backward)
    return [LeastRounds(number, most * sent) for number, sent in found]


@lru_cache(maxsize=1 << 16)
def _found(
    varied: tuple[ShareRange, ...],
    other: ShareRange,
    fast: tuple[bool, ...],
    weights: tuple[float, ...],
    backward: bool,
) -> list[LeastRounds]:
    mask, n = np.array(fast), len(fast)
    places, by = np.arange(n), np.arange(1, n)[:, None]
    others = other.bounds(mask)[0][(places - by if backward else places + by) % n]
    least, most, together, (low, high) = _bounds(varied, fast)
    # A round sends something if someone who has a share sends of it; and someone has one.
    some = (others[None] > _NOTHING).all(axis=2) | (least[:, None] * others > _NOTHING).any(axis=2)
    sent = np.zeros(len(varied))
    if (others > _NOTHING).any():
        for i in spread(len(varied), _SOLVED):
            slopes = _slopes((least[i], most[i]), (mask, together[i]), others, weights)
            sent = np.maximum(sent, _least(slopes, (least, most), (mask, together)))
    # Who has the largest share of one sends, or gets, all of that but what the other leaves it.
    first, last = other.largest
    part = np.maximum(first * (1.0 - high), low * (1.0 - last))
    number = np.maximum(some.sum(axis=1), part > _NOTHING)
    return list(map(LeastRounds, number.tolist(), np.maximum(sent, part * min(weights)).tolist()))


@lru_cache(maxsize=1 << 10)
def _bounds(varied: tuple[ShareRange, ...], fast: tuple[bool, ...]) -> tuple[Floats, Floats, Floats, Floats]:
    """Of ranges: the least and the most that each position has [ranges, n], what fast ones have in all [ranges, 2], and
    the largest shares [2, ranges]."""
    least, most = (np.stack(ends) for ends in zip(*(mine.bounds(np.array(fast)) for mine in varied), strict=True))
    return least, most, np.array([mine.fast for mine in varied]), np.array([mine.largest for mine in varied]).T


def _slopes(
    shares: tuple[Floats, Floats], together: tuple[Mask, Floats], others: Floats, weights: tuple[float, ...]
) -> Floats:
    """By position, what is sent in all at least for each of its share, whatever the shares are, by the multipliers of
    those within these bounds, of which some sum to what is from the first to the second. `others`: [rounds, n], of each
    round what each position's share is multiplied by."""
    rounds, n = others.shape
    rows = np.arange(others.size)
    columns = np.concatenate([np.tile(np.arange(n), rounds), n + np.repeat(np.arange(rounds), n)])
    parts = np.concatenate([others.ravel(), -np.ones(rows.size)])
    bounds = np.concatenate([np.stack(shares, 1), np.tile([0.0, 1.0], (rounds, 1))])
    some = np.concatenate([together[0], np.zeros(rounds)]).astype(np.float64)[None]
    few, many = together[1]
    sent = coo_array((parts, (np.tile(rows, 2), columns)), shape=(rows.size, n + rounds))
    found = linprog(
        np.concatenate([np.zeros(n), weights]),
        A_ub=vstack([sent, coo_array(np.concatenate([some, -some]))]).tocsr(),
        b_ub=np.concatenate([np.zeros(rows.size), [many, -few]]),
        A_eq=np.concatenate([np.ones(n), np.zeros(rounds)])[None],
        b_eq=[1.0],
        bounds=bounds,
        method="highs",
    )
    if found.x is None:
        return np.zeros(n)
    # Whatever the multipliers are, a mean over positions is no more than the largest: so no tolerance of the solver
    # counts.
    means = np.maximum(-found.ineqlin.marginals[: rows.size].reshape(rounds, n), 0.0)
    total = np.maximum(means.sum(axis=1), _NOTHING)
    return (means * (np.array(weights) / np.maximum(total, weights))[:, None] * others).sum(axis=0)


def _least(slopes: Floats, shares: tuple[Floats, Floats], together: tuple[Mask, Floats]) -> Floats:
    """The least sum of slope times share, of shares that sum to one, between bounds [ranges, n], of which some sum to
    what is from the first to the second [ranges, 2]: [ranges]."""
    (found, most), (fast, ends) = shares, together
    rising = np.argsort(slopes, kind="stable")
    for some, least in ((fast, ends[:, 0]), (~fast, 1.0 - ends[:, 1]), (fast | ~fast, 1.0)):
        places = rising[some[rising]]
        room = (most - found)[:, places]
        left = np.maximum(least - found[:, some].sum(axis=1), 0.0)[:, None]
        more = np.zeros(found.shape)
        more[:, places] = np.clip(left - (np.cumsum(room, axis=1) - room), 0.0, room)
        found = found + more
    return found @ slopes
