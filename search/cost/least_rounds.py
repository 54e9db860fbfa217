"""The least that an all-to-all in rounds sends where of shares only ranges are known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from hapsynth.search.cost.device_speed import Floats, Ints
from hapsynth.search.cost.share_range import Mask, ShareRange, spread

_NOTHING = 1e-9
"""Pieces that are a smaller fraction of a tensor are rounding errors."""
_SOLVED = 6
"""The number of ranges of one dimension for which the linear program is solved at most."""
_ROWS = 2048
"""Rows of linear programs that are solved as one: with more the solver takes longer for each."""


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
    ways = (
        least_rounds_of_each([one], [other], fast, weights, backward=back)
        for one, other, back in ((old, new, False), (new, old, True))
    )
    number, sent = map(np.max, zip(*ways, strict=True))
    return LeastRounds(int(number), float(sent))


def least_rounds_of_each(
    varied: Sequence[ShareRange],
    others: Sequence[ShareRange],
    fast: Mask,
    weights: Sequence[float],
    *,
    backward: bool = False,
) -> tuple[Ints, Floats]:
    """As `least_rounds`, of each of some ranges of one dimension, whose shares alone are variables, beside each of some
    of the other: numbers of rounds, and what is sent [others, ranges]. `backward`: where the other dimension is the one
    whose shards are sent."""
    # The solver's tolerances are absolute ones.
    most = max(weights)
    scaled = tuple(w / most for w in weights)
    number, sent = _found(tuple(varied), tuple(others), tuple(fast.tolist()), scaled, backward)
    return number, most * sent


@lru_cache(maxsize=1 << 14)
def _found(
    varied: tuple[ShareRange, ...],
    others: tuple[ShareRange, ...],
    fast: tuple[bool, ...],
    weights: tuple[float, ...],
    backward: bool,
) -> tuple[Ints, Floats]:
    mask, n = np.array(fast), len(fast)
    places, by = np.arange(n), np.arange(1, n)[:, None]
    turned = (places - by if backward else places + by) % n
    factors = [other.bounds(mask)[0][turned] for other in others]
    least, most, together, (low, high) = _bounds(varied, fast)
    # A round sends something if someone who has a share sends of it; and someone has one.
    some = [(f > _NOTHING).all(axis=1) | (least[:, None] * f > _NOTHING).any(axis=2) for f in factors]
    sent = np.zeros((len(others), len(varied)))
    pairs = [(k, i) for k, f in enumerate(factors) if (f > _NOTHING).any() for i in spread(len(varied), _SOLVED)]
    at_once = max(1, _ROWS // turned.size)
    for begin in range(0, len(pairs), at_once):
        of, at = np.array(pairs[begin : begin + at_once]).T
        each = np.stack([factors[k] for k in of])
        for k, slopes in zip(of, _slopes((least[at], most[at]), (mask, together[at]), each, weights), strict=True):
            sent[k] = np.maximum(sent[k], _least(slopes, (least, most), (mask, together)))
    # Who has the largest share of one sends, or gets, all of that but what the other leaves it.
    first, last = np.array([other.largest for other in others]).T[:, :, None]
    part = np.maximum(first * (1.0 - high), low * (1.0 - last))
    number = np.maximum(np.array(some).sum(axis=2), part > _NOTHING)
    return number, np.maximum(sent, part * min(weights))


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
    those within these bounds [cases, n], of which some sum to what is from the first to the second [cases, 2]: [cases,
    n]. `others`: [cases, rounds, n], of each round what each position's share is multiplied by.

    All cases are one block-diagonal linear program: most of what the solver takes for one case it takes to begin."""
    cases, rounds, n = others.shape
    (least, most), (some, ends) = shares, together
    pieces, height, width = rounds * n, rounds * n + 2, n + rounds
    # Of a case, by row: each piece less the largest of its round is none, and what the fast ones have in all.
    positions = np.arange(n)
    rows = np.concatenate([np.tile(np.arange(pieces), 2), np.full(n, pieces), np.full(n, pieces + 1)])
    columns = np.concatenate([np.tile(positions, rounds), n + np.repeat(np.arange(rounds), n), positions, positions])
    same = np.broadcast_to(np.concatenate([-np.ones(pieces), some, -1.0 * some]), (cases, pieces + 2 * n))
    parts = np.concatenate([others.reshape(cases, pieces), same], axis=1)
    limits = np.concatenate([np.zeros((cases, pieces)), ends[:, 1:], -ends[:, :1]], axis=1)
    case = np.arange(cases)[:, None]
    at = (rows + height * case).ravel(), (columns + width * case).ravel()
    every = (np.repeat(case, n, axis=1).ravel(), (positions + width * case).ravel())
    bounds = np.zeros((cases, width, 2))
    bounds[:, :n, 0], bounds[:, :n, 1], bounds[:, n:, 1] = least, most, 1.0
    found = linprog(
        np.tile(np.concatenate([np.zeros(n), weights]), cases),
        A_ub=coo_array((parts.ravel(), at), shape=(cases * height, cases * width)),
        b_ub=limits.ravel(),
        A_eq=coo_array((np.ones(cases * n), every), shape=(cases, cases * width)),
        b_eq=np.ones(cases),
        bounds=bounds.reshape(-1, 2),
        method="highs",
    )
    if found.x is None:
        # One case without a solution leaves all without.
        if cases == 1:
            return np.zeros((1, n))
        alone = [slice(k, k + 1) for k in range(cases)]
        return np.concatenate([_slopes((least[k], most[k]), (some, ends[k]), others[k], weights) for k in alone])
    # Whatever the multipliers are, a mean over positions is no more than the largest: so no tolerance of the solver
    # counts.
    marginals = found.ineqlin.marginals.reshape(cases, height)[:, :pieces]
    means = np.maximum(-marginals.reshape(cases, rounds, n), 0.0)
    total = np.maximum(means.sum(axis=2), _NOTHING)
    return (means * (np.array(weights) / np.maximum(total, weights))[:, :, None] * others).sum(axis=1)


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
