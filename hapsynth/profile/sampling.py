"""Measuring one figure: again and again until it is stable."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

_ROUND = 3
_MOST_CALLS, _MOST_SAMPLES = 20_000, 100


def sampled(
    once: Callable[[], Floats],
    least: Callable[[float], float],
    tolerance: float,
    limit_s: float,
    window_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Floats, Floats]:
    """(seconds, spread) of each device; every call of `once` runs all of them once.

    A sample is the mean over `window_s` seconds of calls: a process that is held to a part of a core runs at full
    speed, then not at all. The seconds are the lower quartile of the samples: whatever else runs on a machine only adds
    to a time. The spread is how far the median lies above the lowest decile, in parts of that. Rounds go on until
    every spread is at most `tolerance` or `limit_s` seconds have passed. `least(x)`: the least x of all processes,
    which must make equally many calls.
    """
    calls = 1
    if window_s > 0:
        each = float(np.mean([once() for _ in range(_ROUND)], axis=0).max())
        calls = int(least(min(max(window_s / max(each, 1e-9), 1.0), _MOST_CALLS)))
    samples: list[Floats] = []
    began = clock()
    while True:
        samples += [np.mean([once() for _ in range(calls)], axis=0) for _ in range(_ROUND)]
        low, quartile, median = np.quantile(np.array(samples), [0.1, 0.25, 0.5], axis=0)
        spread = (median - low) / np.maximum(quartile, 1e-12)
        over = clock() - began > limit_s or len(samples) >= _MOST_SAMPLES
        if least(float(over or bool((spread <= tolerance).all()))) > 0:
            return quartile, spread
