"""Interleaved timing: the functions that are compared run in turn, so that the machine's drift meets all of them."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hapsynth.profile.job import Job
from hapsynth.profile.sampling import Floats

Interval = tuple[float, float]
COVERS = 0.95
"""The least probability with which an interval holds the median."""
KEEPS_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""Of a process's environment: memory stays with it, as with GPUs' allocators. glibc gives large arrays back as soon as
they are freed (of arenas other than the first whatever it is told), and each step touches them anew, for a fifth of it.
"""


def interleaved(steps: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` per name, after `warmup` uncounted ones; every call is waited for."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for r in range(warmup + rounds):
        order = list(steps)[:: 1 if r % 2 else -1]
        for name in order:
            began = time.perf_counter()
            jax.block_until_ready(steps[name]())
            if r >= warmup:
                times[name].append(time.perf_counter() - began)
    return times


def together(job: Job, steps: Sequence[Callable[[], Any]], rounds: int, seed: int) -> Floats:
    """Seconds of rounds over all steps, in random order, that all processes of a job begin together and that end with
    the last one's results [steps, rounds]."""
    order, times = random.Random(seed), np.zeros((len(steps), rounds))
    for r in range(rounds):
        for i in order.sample(range(len(steps)), len(steps)):
            job.agree(True)
            began = time.perf_counter()
            steps[i]()
            times[i, r] = time.perf_counter() - began
    return job.gather(times.reshape(1, -1)).max(axis=0).reshape(times.shape)


def gain(base: Sequence[float], other: Sequence[float]) -> tuple[float, Interval | None]:
    """How many times as fast `other` is as `base`: the median of the ratios of like rounds, and its interval."""
    ratios = np.array(base) / np.array(other)
    return float(np.median(ratios)), median_interval(ratios.tolist())


def median_interval(samples: Sequence[float]) -> Interval | None:
    """The narrowest pair of order statistics, equally far from both ends, that holds the median with at least 95 %,
    whatever the distribution; None of fewer than 6 samples, whose least and most hold it with less."""
    ordered, n = sorted(samples), len(samples)
    # The median is below the k-th of the samples where fewer than k of them are below it.
    k, below = 0, 1
    while 2 * below / 2**n <= 1 - COVERS:
        k += 1
        below += math.comb(n, k)
    return (ordered[k - 1], ordered[n - k]) if k else None


def interval_text(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f} .. {interval[1]:.2f}"


class Stepper:
    """Feeds a step its own state, as a training loop does."""

    def __init__(self, call: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any) -> None:
        self.call, self.state, self.batch = call, state, batch

    def __call__(self) -> tuple[Any, Any]:
        self.state, loss = self.call(self.state, self.batch)
        return self.state, loss


def burst(step: Callable[[], Any], count: int) -> Callable[[], Any]:
    """`count` calls, none of which is waited for before the next: the time to start them is hidden."""

    def run() -> Any:
        results = None
        for _ in range(count):
            results = step()
        return results

    return run


def report(title: str, times: Mapping[str, list[float]], base: str) -> dict[str, float]:
    """Print medians and ratios to `base`; the medians."""
    medians = {name: statistics.median(t) for name, t in times.items()}
    print(title)
    for name, t in times.items():
        ratios = sorted(a / b for a, b in zip(t, times[base], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(
            f"  {name:<28}{medians[name] * 1e3:9.2f} ms   x {medians[name] / medians[base]:.3f} of {base}"
            f"   (round by round, middle half {low:.3f} .. {high:.3f})"
        )
    return medians
