"""Quantities as a person reads them. Importing this starts nothing: messages of a running job are made with it too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby


def seconds(value: float) -> str:
    """`17.475 ms`: four significant digits or so, in the unit that fits."""
    if not math.isfinite(value):
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale or unit == "us":
            return f"{value / scale:.3f} {unit}"
    raise AssertionError


def nbytes(value: float) -> str:
    """`1.5 MiB`: whole bytes below one KiB, then one decimal."""
    if abs(value) < 1024:
        return f"{value:.0f} B"
    for unit, exponent in (("KiB", 10), ("MiB", 20), ("GiB", 30)):
        if abs(value) < 2.0 ** (exponent + 10) or unit == "GiB":
            return f"{value / 2.0**exponent:.1f} {unit}"
    raise AssertionError


def si(value: float, unit: str) -> str:
    """`1.074 GFLOP`: four significant digits, in the decimal multiple of the unit that fits."""
    power = next((p for p in (15, 12, 9, 6, 3) if abs(value) >= 10.0**p), 0)
    return f"{value / 10**power:.4g} {'kMGTP'[power // 3 - 1] if power else ''}{unit}"


def percent(fraction: float) -> str:
    """`4.56 %`; a gap that is zero but for rounding is `0.00 %`."""
    return f"{100 * fraction + 0.0:.2f} %" if abs(fraction) >= 5e-5 else "0.00 %"


def is_known(bound_s: float, cost_s: float) -> bool:
    """Whether there is a lower bound on a cost, and so a gap: none is held as 0."""
    return bound_s > 0 or not cost_s


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def counted(counts: dict[str, int]) -> str:
    """`all_gather x3, all_reduce x6`, or `none`."""
    return ", ".join(f"{name} x{count}" for name, count in counts.items()) or "none"


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return float(value) if math.isfinite(value) else None


def indices(devices: Sequence[int]) -> str:
    """`0-3, 6`: rising numbers, runs of them as one."""
    runs = [[d for _, d in run] for _, run in groupby(enumerate(devices), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
