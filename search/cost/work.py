"""What an op does, before any device: its work under its triples, which contractions do in whole tiles."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from hapsynth.instructions.factors import Factors
from hapsynth.instructions.rules.contraction import CONTRACTIONS
from hapsynth.search.cost.device_speed import Floats


class Work(NamedTuple):
    """What an op does under its triples.

    `flops`: see `op_class.amount_of`; they are divided by every factor that is cut. `moved`: bytes, and which of the
    cut factors divide them, summed over tensors; () for what every device moves itself. `lanes`, per cut factor: how
    many rows, columns or terms of a contraction it is one of, 0 where that does not matter. `axes`: those that some
    factor is cut along. `op_class`: what a profile counts the op to; its signature where some device was measured at
    just it. `owned`: whether what is cut is all of it, so that one position has everything. `ordinary`: whether the
    ordinary cores do it (`DeviceKind.rate`).
    """

    flops: float
    moved: tuple[tuple[tuple[int, ...], float], ...]
    launches: int
    dtype: str
    lanes: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    op_class: str = ""
    owned: bool = False
    ordinary: bool = False

    @property
    def divided(self) -> bool:
        return bool(self.lanes)

    @property
    def form(self) -> object:
        """What works have in common whose times are one array."""
        divided = tuple(divided for divided, _ in self.moved)
        return len(self.lanes), divided, self.dtype, self.op_class, self.owned, self.ordinary


def tiled(fractions: Floats, lanes: int | np.ndarray, tile: int | np.ndarray) -> Floats:
    """The fractions of a contraction's work that devices really do: whole tiles. `lanes`, and the devices' `tile`, may
    be arrays that go with the fractions."""
    if isinstance(lanes, int) and lanes == 0:
        return fractions
    some = np.maximum(lanes, 1)
    tile = np.minimum(tile, some)
    whole = np.maximum(fractions, np.ceil(fractions * some / tile - 1e-9) * tile / some)
    return np.where(lanes == 0, fractions, whole)


def within(fractions: Floats, lanes: np.ndarray, tile: int | np.ndarray) -> Floats:
    """The largest fractions whose whole tiles are no more work than these: the inverse of `tiled`."""
    some = np.maximum(lanes, 1)
    tile = np.minimum(tile, some)
    return np.where(lanes == 0, fractions, np.floor(fractions * some / tile + 1e-6) * tile / some)


def lanes_of(name: str, factors: Factors, factor: int) -> int:
    """Over how many rows, columns or terms of a contraction a factor and its like extend; 0 for batch factors."""
    if name not in CONTRACTIONS:
        return 0
    tensors = [*factors.operands, *factors.results]
    held = [{f for dim in dims for f in dim} for dims in tensors]
    where = lambda f: tuple(f in h for h in held)
    mine = where(factor)
    if all(mine):
        return 0
    # A convolution's positions extend the rows (result only) and the terms (kernel only).
    alike = {mine, (False, False, True) if mine == (True, False, True) else mine}
    alike.add((False, True, False) if mine == (True, True, False) else mine)
    return prod(size for f, size in enumerate(factors.sizes) if where(f) in alike)
