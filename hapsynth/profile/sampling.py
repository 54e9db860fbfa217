"""Measuring one figure: again and again until it is stable."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

_ROUND = 5
_MOST = 200


def sampled(
    once: Callable[[], Floats],
    agree: Callable[[bool], bool],
    tolerance: float,
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Floats, Floats]:
    """(seconds, spread) of each device, one sample of all per call of `once`.

    The seconds are the lower quartile: whatever else runs on a machine only adds to a time. The spread is how far the
    median lies above the lowest decile, in parts of that. Rounds go on until every spread is at most `tolerance` or
    `limit_s` seconds have passed. `agree(x)`: whether x holds in all processes, which must sample equally often.
    """
    samples: list[Floats] = []
    began = clock()
    while True:
        samples += [once() for _ in range(_ROUND)]
        low, quartile, median = np.quantile(np.array(samples), [0.1, 0.25, 0.5], axis=0)
        spread = (median - low) / np.maximum(quartile, 1e-12)
        over = clock() - began > limit_s or len(samples) >= _MOST
        if agree(over or bool((spread <= tolerance).all())):
            return quartile, spread
