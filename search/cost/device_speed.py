"""What kinds of devices can do, and how long they compute: by the class of op, its dtype and its size where a profile
has measured that."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hapsynth.cluster.device_kinds import DeviceKind

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]


class Speeds:
    """The devices' times for ops of one class and dtype, or of one signature: by a measured curve, or flops / rate
    where there is none. `ordinary`: at the rate of the ordinary cores."""

    def __init__(self, devices: Sequence[DeviceKind], op_class: str, dtype: str, *, ordinary: bool) -> None:
        self.rate = np.array([kind.rate(dtype, ordinary=ordinary) for kind in devices])
        curve = lambda kind: kind.curve(op_class, dtype, ordinary=ordinary) if op_class else None
        curves = {kind: curve(kind) for kind in dict.fromkeys(devices)}
        self._curves = [
            (np.array([d == kind for d in devices]), curve) for kind, curve in curves.items() if curve is not None
        ]

    def at(self, devices: npt.NDArray[np.int64]) -> Speeds:
        """Those of some of the devices, or of some again and again."""
        found = copy(self)
        found.rate = self.rate[devices]
        found._curves = [(there, curve) for mine, curve in self._curves if (there := mine[devices]).any()]
        return found

    @property
    def linear(self) -> bool:
        """Whether times are in proportion to the flops."""
        return not self._curves

    @property
    def most(self) -> Floats:
        """The highest FLOP/s that each device reaches at any size."""
        found = self.rate.copy()
        for mine, curve in self._curves:
            found[mine] = max(amount / seconds for amount, seconds in curve.points)
        return found

    def seconds(self, flops: Floats) -> Floats:
        """flops: [..., devices]; the same shape. Never falls as the flops grow."""
        found = flops / self.rate
        for mine, curve in self._curves:
            found[..., mine] = curve.seconds(flops[..., mine])
        return found

    def flops(self, seconds: Floats) -> Floats:
        """The most that each device does within its seconds: float64 [..., devices], as these."""
        found = seconds * self.rate
        for mine, curve in self._curves:
            found[..., mine] = curve.amount(seconds[..., mine])
        return found


class DeviceFigures:
    """What kinds of devices can do: arrays [kinds]."""

    def __init__(self, kinds: Sequence[DeviceKind]) -> None:
        self.kinds = tuple(kinds)
        self.overhead = np.array([k.overhead for k in kinds])
        self.bandwidth = np.array([k.bandwidth for k in kinds])
        self.tile = np.array([k.granularity.tile for k in kinds])
        """Rows, columns or terms that a contraction works on at once."""
        self.outputs = min((k.granularity.outputs for k in kinds), default=1)
        """Results that a kernel may write on all of them."""
        self._speeds: dict[tuple[str, str, bool], Speeds] = {}

    def speeds(self, op_class: str, dtype: str, *, ordinary: bool = False) -> Speeds:
        """How long each kind takes over the flops of ops of a class and dtype."""
        key = op_class, dtype, ordinary
        if key not in self._speeds:
            self._speeds[key] = Speeds(self.kinds, op_class, dtype, ordinary=ordinary)
        return self._speeds[key]

    def tile_on(self, kinds: npt.NDArray[np.int64] | slice) -> int | npt.NDArray[np.int64]:
        """Of devices of some kinds, or one for all."""
        return int(self.tile[0]) if self._one_tile else self.tile[kinds]

    @cached_property
    def _one_tile(self) -> bool:
        return len(set(self.tile.tolist())) == 1
