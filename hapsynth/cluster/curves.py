"""Times by amount of work or of bytes: measured, as a profile keeps them (`Curve`), and modelled (`Lines`)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from hapsynth.cluster import _units

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Seconds by amount (FLOPs of an op, bytes on a wire): straight lines between measured points.

    `points`: (amount, seconds), both rising. Before the first point and after the last time is in proportion to the
    amount; a first point at amount 0 is a latency.

    A time that never falls as the amount grows has an inverse, on which the lower bounds rest.
    Raises ValueError for points that don't rise.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple((float(a), float(t)) for a, t in self.points))
        if not self.points:
            raise ValueError("has no point; measure at least one")
        for amount, seconds in self.points:
            _units.check(amount, zero=True)
            _units.check(seconds)
        if self.points[-1][0] == 0:
            raise ValueError("says nothing but a latency; add a point of a larger amount")
        for (a, s), (b, t) in zip(self.points, self.points[1:], strict=False):
            if not (a < b and s < t):
                raise ValueError(f"goes from {s:g} s at {a:g} to {t:g} s at {b:g}; amounts and times must both rise")

    @cached_property
    def _amounts(self) -> _Floats:
        return np.array([0.0, *(a for a, _ in self.points if a)])

    @cached_property
    def _seconds(self) -> _Floats:
        first, _ = self.points[0]
        return np.array([t for _, t in self.points] if first == 0 else [0.0, *(t for _, t in self.points)])

    def seconds(self, amount: _Floats | float) -> _Floats:
        """Of any array of amounts."""
        (last, end), x = self.points[-1], np.asarray(amount, dtype=np.float64)
        return np.where(x > last, x * (end / last), np.interp(x, self._amounts, self._seconds))

    def slope(self, amount: float) -> float:
        """Seconds per unit of amount, from a given amount on."""
        i = int(np.searchsorted(self._amounts, amount, side="right"))
        if i == len(self._amounts):
            return self.points[-1][1] / self.points[-1][0]
        return float((self._seconds[i] - self._seconds[i - 1]) / (self._amounts[i] - self._amounts[i - 1]))

    def amount(self, seconds: _Floats | float) -> _Floats:
        """The most that is done within some seconds: 0 within less than the latency."""
        (last, end), t = self.points[-1], np.asarray(seconds, dtype=np.float64)
        return np.where(t > end, t * (last / end), np.interp(t, self._seconds, self._amounts, left=0.0))

    def scaled(self, speed: float) -> "Curve":
        """The same, `speed` times as fast."""
        return replace(self, points=tuple((a, t / speed) for a, t in self.points))

    def wider(self, factor: float) -> "Curve":
        """The same latency, and `factor` times the amount in the time beyond it."""
        return replace(self, points=tuple((a * factor, t) for a, t in self.points))


@dataclass(frozen=True)
class Lines:
    """Seconds by amount: the least of some straight lines, each of which is it somewhere or might be.

    `lines`: (seconds at amount 0, seconds per unit); the first rise, the second fall.
    """

    lines: tuple[tuple[float, float], ...]

    @staticmethod
    def least(lines: Iterable[tuple[float, float]]) -> "Lines":
        """Of any lines: without those that others are nowhere above."""
        kept: list[tuple[float, float]] = []
        for start, slope in sorted(lines):
            if not kept or slope < kept[-1][1]:
                kept.append((start, slope))
        return Lines(tuple(kept))

    def seconds(self, amount: _Floats | float) -> _Floats | float:
        """Of any array of amounts."""
        (start, slope), *others = self.lines
        found = start + slope * amount
        for start, slope in others:
            found = np.minimum(found, start + slope * amount)
        return found

    def slope(self, amount: float) -> float:
        """Seconds per unit of amount, from a given amount on."""
        return min((start + slope * amount, slope) for start, slope in self.lines)[1]

    def parted(self) -> "tuple[float, Lines | None]":
        """As a straight line through 0, of the least slope, and what comes on top of it; None where that is the same
        for all amounts."""
        least = self.lines[-1][1]
        return least, Lines(tuple((s, k - least) for s, k in self.lines)) if len(self.lines) > 1 else None


def read_curve(data: object, units: Mapping[str, Decimal]) -> Curve:
    """The curve of a list of ["<amount> <unit>", "<time> <unit>"]. Raises ValueError.

    A number may follow in each, which is not used: older profiles have the spread of the samples there.
    """
    example = f'write a list of points, like [["1 {list(units)[1]}", "20 us"]]'
    if not isinstance(data, list) or not data:
        raise ValueError(f"is not a curve; {example}")
    points: list[tuple[float, float]] = []
    for point in cast(list[object], data):
        match point:
            case [amount, seconds] | [amount, seconds, int() | float()]:
                points.append((_units.parse(amount, units, zero=True), _units.parse(seconds, _units.TIME)))
            case _:
                raise ValueError(f"has the point {point!r}; {example}")
    return Curve(tuple(points))


def write_curve(curve: Curve, units: Mapping[str, Decimal]) -> list[list[object]]:
    """The list that `read_curve` reads back as an equal curve."""
    text: Callable[[float, Mapping[str, Decimal]], object] = _units.format
    return [[text(a, units), text(t, _units.TIME)] for a, t in curve.points]
