"""How long devices take over ops, as a roofline: launches, and then computing or moving bytes, whichever takes longer.

    t = launches x overhead + max(FLOPs / rate, bytes / bandwidth)

Evaluation, sizes, bounds and the choice of devices all ask here. Where a profile has measured the op or its class, its
curve over sizes stands in place of FLOPs / rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hapsynth.search.cost.device_speed import DeviceFigures, Floats, Ints, Speeds
from hapsynth.search.cost.work import Work, tiled, within


def busy(launching: float | Floats, computing: float | Floats, moving: float | Floats) -> Floats:
    """Seconds of an op."""
    return launching + np.maximum(computing, moving, dtype=np.float64)


def _column(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)[:, None]


class _Inverse(NamedTuple):
    """What asking for shares needs [works, 1]: which works have no FLOPs, the FLOPs; which have no bytes that a cut
    divides, these bytes, those that none divides; the lanes."""

    idle: npt.NDArray[np.bool_]
    flops: Floats
    uncut: npt.NDArray[np.bool_]
    divided: Floats
    besides: Floats
    lanes: Ints


class Roofline:
    """Works that as many cuts divide, on kinds of devices.

    `scaled`: the seconds of whole works are computed once and divided at each size, as befits works that are looked at
    in many sizes; otherwise FLOPs and bytes are divided first. The two differ by rounding alone.
    """

    def __init__(self, figures: DeviceFigures, works: Sequence[Work], *, scaled: bool = False) -> None:
        self.figures, self.works, self.scaled = figures, works, scaled
        self.lanes = [np.array([[w.lanes[k]] for w in works]) for k in range(len(works[0].lanes) if works else 0)]
        """Per cut, those of each work [works, 1]."""
        self.launching = _column([w.launches for w in works]) * figures.overhead
        """Seconds [works, kinds]."""
        self.flops = _column([w.flops for w in works])
        """[works, 1]."""
        bytes_of = [dict(w.moved) for w in works]
        masks = sorted({mask for held in bytes_of for mask in held})
        self.moved = [(mask, _column([held.get(mask, 0.0) for held in bytes_of])) for mask in masks]
        """Bytes, [works, 1], by which of the cuts divide them."""

    @cached_property
    def _speeds(self) -> list[tuple[Speeds, Ints | slice]]:
        """Which of the works each speed is for."""
        speeds = [self.figures.speeds(w.op_class, w.dtype, ordinary=w.ordinary) for w in self.works]
        unlike = dict.fromkeys(speeds)
        if len(unlike) == 1:
            return [(speeds[0], slice(None))]
        return [(s, np.array([i for i, mine in enumerate(speeds) if mine is s], dtype=np.int64)) for s in unlike]

    @cached_property
    def _whole(self) -> tuple[Floats, list[Floats]]:
        """Seconds of computing, and of moving by mask, whole [works, kinds]."""
        computing = self._by_speed(self.flops, lambda speeds, flops: flops / speeds.rate)
        return computing, [nbytes / self.figures.bandwidth for _, nbytes in self.moved]

    def _by_speed(self, of_works: Floats, seconds: Callable[[Speeds, Floats], Floats]) -> Floats:
        """Something of each work at its own speed [works, kinds]."""
        if len(self._speeds) == 1:
            return seconds(self._speeds[0][0], np.broadcast_to(of_works, self.launching.shape))
        of_works = np.broadcast_to(of_works, self.launching.shape)
        found = np.zeros(self.launching.shape)
        for speeds, rows in self._speeds:
            found[rows] = seconds(speeds, of_works[rows])
        return found

    def seconds(self, kinds: Ints, fractions: Sequence[Floats], *, whole_tiles: bool = True) -> Floats:
        """Of each work on devices of some kinds [works, devices], from each cut's share on each of them: [devices] or
        [works, devices]. A device without a share does nothing. Without `whole_tiles` as if contractions took the less
        time the fewer rows there are, however few."""
        share = self._share(kinds, fractions, whole_tiles)
        computing = self._computing(kinds, share)
        moving = self._moving(kinds, fractions)
        found = busy(self.launching[:, kinds], computing, moving)
        for fraction in fractions:
            found = np.where(fraction > 0, found, 0.0)
        return found

    def loads(self, kinds: Ints, fractions: Sequence[Floats]) -> tuple[Floats, Floats]:
        """What works come to on devices of some kinds: FLOPs in whole tiles, and bytes moved [works, devices]."""
        shape = len(self.works), kinds.size
        flops = np.broadcast_to(self.flops * self._share(kinds, fractions, True), shape)
        return flops, self._bytes(kinds, fractions, [nbytes for _, nbytes in self.moved])

    def _share(self, kinds: Ints, fractions: Sequence[Floats], whole_tiles: bool) -> Floats:
        share, tile = np.ones(()), self.figures.tile_on(kinds)
        for fraction, lanes in zip(fractions, self.lanes, strict=True):
            share = share * (tiled(fraction, lanes, tile) if whole_tiles else fraction)
        return share

    def _computing(self, kinds: Ints, share: Floats) -> Floats:
        shape = len(self.works), kinds.size
        found = self._whole[0][:, kinds] * share if self.scaled else np.zeros(shape)
        if self.scaled and all(speeds.linear for speeds, _ in self._speeds):
            return found
        flops = np.broadcast_to(self.flops * share, shape)
        for speeds, rows in self._speeds:
            if not (self.scaled and speeds.linear):
                found[rows] = speeds.at(kinds).seconds(flops[rows])
        return found

    def _moving(self, kinds: Ints, fractions: Sequence[Floats]) -> Floats:
        if self.scaled:
            return self._bytes(kinds, fractions, [seconds[:, kinds] for seconds in self._whole[1]])
        nbytes = self._bytes(kinds, fractions, [nbytes for _, nbytes in self.moved])
        return nbytes / self.figures.bandwidth[kinds]

    def _bytes(self, kinds: Ints, fractions: Sequence[Floats], whole: Sequence[Floats]) -> Floats:
        """What is left of the bytes, or of their seconds, by mask [works, devices]."""
        found = np.zeros((len(self.works), kinds.size))
        for (mask, _), part in zip(self.moved, whole, strict=True):
            for k in mask:
                part = part * fractions[k]
            found = found + part
        return found

    def within(self, seconds: Floats) -> Floats:
        """The largest share that each kind does in some time [works, kinds], where one cut, or all of them together,
        divide the works; below 0 where it does not even begin. The seconds of an op never fall as its share grows, so
        what is done within them at most is the inverse of a measured curve."""
        known = self._inverse
        budget = seconds[:, None] - self.launching
        reached = self._by_speed(budget, lambda speeds, budget: speeds.flops(budget))
        by_compute = np.where(known.idle, np.inf, reached / known.flops)
        left = budget * self.figures.bandwidth - known.besides
        by_memory = np.where(known.uncut, np.where(left >= 0, np.inf, -np.inf), left / known.divided)
        return np.minimum(within(by_compute, known.lanes, self.figures.tile_on(slice(None))), by_memory)

    @cached_property
    def _inverse(self) -> _Inverse:
        none = np.zeros((len(self.works), 1))
        divided = sum((nbytes for mask, nbytes in self.moved if mask), none)
        besides = sum((nbytes for mask, nbytes in self.moved if not mask), none)
        lanes = self.lanes[0] if len(self.lanes) == 1 else none.astype(np.int64)
        idle, uncut = self.flops == 0, divided == 0
        return _Inverse(idle, np.where(idle, 1.0, self.flops), uncut, np.where(uncut, 1.0, divided), besides, lanes)

    def line(
        self, kinds: Ints, k: int, fractions: Sequence[Floats], held: Floats | None
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """The seconds as they grow with the share of cut `k`, the others at `fractions` [devices]: those of launching,
        of computing and of moving at a share of 1, and of moving what the cut does not divide [works, devices].
        Computing takes what it takes over the share `held`; None for the highest rate that each device reaches."""
        shape = len(self.works), kinds.size
        others = [np.ones(kinds.size) if n == k else fraction for n, fraction in enumerate(fractions)]
        flops = self.flops * np.prod(others, axis=0)
        computing, moving, besides = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for speeds, rows in self._speeds:
            mine = speeds.at(kinds)
            computing[rows] = flops[rows] / mine.most if held is None else mine.seconds(flops[rows] * held) / held
        for mask, nbytes in self.moved:
            for n in mask:
                nbytes = nbytes * others[n]
            (moving if k in mask else besides)[:] += nbytes / self.figures.bandwidth[kinds]
        return self.launching[:, kinds], computing, moving, besides

    def least_alone(self) -> Floats:
        """Seconds that a device of each kind takes at least over whole works [works, kinds]."""
        computing = self._by_speed(self.flops, lambda speeds, flops: flops / speeds.most)
        return busy(self.launching, computing, self._every_byte / self.figures.bandwidth)

    def least_shared(self, count: Floats) -> Floats:
        """Seconds that so many devices of each kind take at least, however they share works [works]."""
        together = lambda of_kinds: (of_kinds * count).sum(axis=-1, keepdims=True)
        rate = self._by_speed(np.zeros((1, 1)), lambda speeds, rows: np.broadcast_to(speeds.most, rows.shape))
        computing = self.flops / together(rate)
        launching = _column([w.launches for w in self.works]) * self.figures.overhead.min()
        return busy(launching, computing, self._every_byte / together(self.figures.bandwidth))[:, 0]

    @property
    def _every_byte(self) -> Floats:
        """[works, 1]"""
        return sum((nbytes for _, nbytes in self.moved), np.zeros((len(self.works), 1)))
