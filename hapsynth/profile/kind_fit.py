"""From raw times to device kinds: which devices are alike, and how fast each kind is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log

import numpy as np
from scipy.optimize import isotonic_regression

from hapsynth.cluster.curves import Curve
from hapsynth.cluster.device_kinds import DeviceKind, MeasuredOp
from hapsynth.cluster.op_classes import OP_CLASSES
from hapsynth.profile.op_kernels import DISPATCH, LAUNCH, STREAM, Kernel
from hapsynth.profile.sampling import Floats

ALIKE = 0.10
"""Devices of one name whose speeds differ by less, or by less than their figures spread, and whose memory does, are of
one kind."""

Times = Mapping[str, tuple[float, float]]
"""Figure -> (seconds, spread)."""


def groups(names: Sequence[str], seconds: Floats, spread: float = 0.0) -> list[list[int]]:
    """Devices in groups of one kind each, the fastest group of a name first.

    names: what JAX calls each device. seconds: [devices, figures]; a device's speed is the geometric mean over the
    figures that all have. spread: what these typically vary by.
    """
    everywhere = np.isfinite(seconds).all(axis=0) & (seconds > 0).all(axis=0)
    slowness = np.log(seconds[:, everywhere]).mean(axis=1) if everywhere.any() else np.zeros(len(names))
    groups: list[list[int]] = []
    for name in dict.fromkeys(names):
        members = sorted((i for i, other in enumerate(names) if other == name), key=lambda i: slowness[i])
        first: list[int] = []
        for i in members:
            if not first or slowness[i] - slowness[first[0]] > log(1 + ALIKE + spread):
                first = []
                groups.append(first)
            first.append(i)
    return groups


def by_memory(devices: Sequence[int], memory: Sequence[int]) -> list[list[int]]:
    """Devices of like speed in groups of like memory, the group with the most first. memory: bytes of every device,
    below 0 where not known."""
    groups: list[list[int]] = []
    for i in sorted(devices, key=lambda i: -memory[i]):
        if not groups or max(memory[i], 0) * (1 + ALIKE) < memory[groups[-1][0]]:
            groups.append([])
        groups[-1].append(i)
    return groups


def typical(rows: Sequence[Times]) -> dict[str, tuple[float, float]]:
    """The median of like devices, with the largest spread."""
    shared = [key for key in rows[0] if all(key in row for row in rows)]
    return {k: (float(np.median([r[k][0] for r in rows])), max(r[k][1] for r in rows)) for k in shared}


class KindFit:
    """Rates, bandwidth and overhead from the times of a kind's figures. `kernels`: those that were run, by key."""

    def __init__(self, kernels: Sequence[Kernel], times: Times) -> None:
        self.kernels = [k for k in kernels if k.key in times]
        self.times = times
        self.dispatch, self._dispatch_spread = next(
            (times[k.key] for k in self.kernels if k.family == DISPATCH), (0.0, 0.0)
        )
        launch = next((k for k in self.kernels if k.family == LAUNCH), None)
        self.overhead = 0.0 if launch is None else max(self.net(launch), 0.0)
        """Seconds of one more op in a program."""

    def net(self, kernel: Kernel) -> float:
        """Seconds of one op, without the dispatch, which has a launch in it; of computing kernels without the other
        launches either."""
        seconds = self.times[kernel.key][0] - self.dispatch
        if kernel.family == LAUNCH:
            return seconds / (kernel.launches - 1)
        return (seconds - self.overhead * (kernel.launches - 1)) / kernel.repeats

    def noise(self, kernel: Kernel) -> float:
        """By how many seconds of an op `net` varies: it is the difference of two figures."""
        whole, spread = self.times[kernel.key]
        return (spread * whole + self._dispatch_spread * self.dispatch) / kernel.repeats

    def measurable(self, family: str, dtype: str) -> list[Kernel]:
        """In order of size. A time that is no longer than it varies by says nothing."""
        alike = [k for k in self.kernels if (k.family, k.dtype) == (family, dtype)]
        return [k for k in alike if self.net(k) > self.noise(k)]

    def curve(self, family: str, dtype: str) -> Curve | None:
        """Seconds of one op by its amount; None where nothing took measurably long."""
        return smooth([(k.amount, self.net(k)) for k in self.measurable(family, dtype)])

    def ops(self) -> dict[str, MeasuredOp]:
        """The ops that were measured by themselves."""
        ops = dict.fromkeys((k.family, k.dtype, k.op) for k in self.kernels if k.op)
        curves = [(family, op, self.curve(family, dtype)) for family, dtype, op in ops]
        return {signature: MeasuredOp(op, curve) for signature, op, curve in curves if curve}

    def kind(self, name: str, dtypes: Sequence[str], memory: int, source: str) -> DeviceKind | None:
        """None where the bandwidth or the rate of float32 matmuls came out as none at all."""
        curves = {c: {d: found for d in dtypes if (found := self.curve(c, d))} for c in OP_CLASSES}
        measured = {c: by_dtype for c, by_dtype in curves.items() if by_dtype}
        flops = {d: rounded(max(a / t for a, t in curve.points)) for d, curve in measured.get("matmul", {}).items()}
        bandwidth = self.bandwidth
        if "float32" not in flops or bandwidth is None:
            return None
        overhead, bandwidth = rounded(self.overhead), rounded(bandwidth)
        kind = DeviceKind(name, flops, bandwidth, memory, overhead, 1.0)
        return replace(kind, measured=measured, ops=self.ops(), source=source)

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of the largest array that was streamed."""
        streams = self.measurable(STREAM, "float32")
        return streams[-1].amount / self.net(streams[-1]) if streams else None


def typical_kind(kernels: Sequence[Kernel], figures: Mapping[str, Floats]) -> DeviceKind | None:
    """The median device; None where there is no telling its rates. figures: seconds and spread, [devices, 2] each."""
    rows = np.stack([figures[k.key] for k in kernels], axis=1)
    times = [{k.key: (float(t), float(s)) for k, (t, s) in zip(kernels, row, strict=True)} for row in rows]
    dtypes = list(dict.fromkeys(k.dtype for k in kernels))
    return KindFit(kernels, typical(times)).kind("typical", dtypes, 1, "")


def smooth(points: Sequence[tuple[float, float]]) -> Curve | None:
    """The curve of (amount, seconds), times made to rise where they don't; None without points."""
    if not points:
        return None
    times = np.exp(isotonic_regression(np.log([t for _, t in points])).x)
    rising: list[float] = []
    for t in times.tolist():
        rising.append(max(t, rising[-1] * 1.001) if rising else t)
    return Curve(tuple((a, rounded(t)) for (a, _), t in zip(points, rising, strict=True)))


def rounded(figure: float) -> float:
    """To six digits: more than any of them is good for."""
    return float(f"{figure:.6g}")
