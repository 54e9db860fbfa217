"""Which rows of a dimension move where, when contiguous shards of some lengths become shards of others; and how large
the pieces are that shards of one dimension are cut into along another.

A row goes straight to its new owner: one permute for every distance at which some row moves, padded to the longest
piece at that distance. No row that keeps its owner is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Move(NamedTuple):
    """What devices give the one that is `distance` places further on: of each, `rows` of its old shard from `start`
    on; 0 rows where there is nothing. `longest`: the most that some device gives."""

    distance: int
    start: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.rows)


def moves(old: Sequence[int], new: Sequence[int]) -> list[Move]:
    """From shards of `old` lengths to `new` ones, distances falling: so what a device gets of lower rows comes first.

    Distance 0 is what devices keep, and always there; of the others those at which something moves. ValueError where
    the shards are not as many, or do not hold as much.
    """
    if len(old) != len(new) or sum(old) != sum(new):
        raise ValueError(f"shards of {list(old)} rows do not become shards of {list(new)}")
    n = len(old)
    before, after = [0, *accumulate(old)], [0, *accumulate(new)]
    found: list[Move] = []
    for distance in range(n - 1, -n, -1):
        start, rows = [0] * n, [0] * n
        for i in range(max(0, -distance), min(n, n - distance)):
            first = max(before[i], after[i + distance])
            rows[i] = max(0, min(before[i + 1], after[i + distance + 1]) - first)
            start[i] = first - before[i] if rows[i] else 0
        if distance == 0 or any(rows):
            found.append(Move(distance, tuple(start), tuple(rows)))
    return found


def even_rows(rows: int, n: int) -> tuple[int, ...]:
    """Shards of a dimension that are as even as can be, the larger ones first."""
    return tuple(rows // n + (i < rows % n) for i in range(n))


def moved(old: Floats, new: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Between shards of these fractions [..., positions]: the longest piece at each distance, 1 - positions to
    positions - 1 but 0 [..., distances], and which positions have some rows for which [..., positions, positions]."""
    before, after = (np.concatenate([np.zeros((*x.shape[:-1], 1)), np.cumsum(x, axis=-1)], axis=-1) for x in (old, new))
    low = np.maximum(before[..., :-1, None], after[..., None, :-1])
    high = np.minimum(before[..., 1:, None], after[..., None, 1:])
    rows = np.where(high - low > _NOTHING, high - low, 0.0)
    n = rows.shape[-1]
    # One element more in a row of memory, and what is as far from its owner stands in one column: d + n - 1.
    wide = np.concatenate([rows[..., ::-1], np.zeros_like(rows)], axis=-1)
    skewed = wide.reshape(*rows.shape[:-2], -1)[..., : n * (2 * n - 1)].reshape(*rows.shape[:-1], 2 * n - 1)
    longest = skewed.max(axis=-2)[..., ::-1]
    return np.concatenate([longest[..., : n - 1], longest[..., n:]], axis=-1), rows > 0


def rounds(old: Floats, new: Floats, n: int) -> Floats:
    """The largest piece of each round [..., n] in which shards of `old` fractions of one dimension become shards of
    `new` ones of another [..., positions]: in round k every device's for the one k places further on, around the `n` of
    an axis; its own in round 0. Positions row-major, that axis the minor one: rounds are the same along all others."""
    held, wanted = (x.reshape(*x.shape[:-1], -1, n).max(axis=-2) for x in (old, new))
    to = (np.arange(n)[:, None] + np.arange(n)) % n
    return (held[..., None, :] * wanted[..., to]).max(axis=-1)


_NOTHING = 1e-9
"""The fraction of a dimension that is rounding, and no row."""
