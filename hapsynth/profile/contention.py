"""How much of the time of a collective is lost for computing, and how much longer a small one takes: both at once, in
processes that can do both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from time import perf_counter

import numpy as np

from hapsynth import _jax
from hapsynth.profile.collectives import Exchange
from hapsynth.profile.job import Job
from hapsynth.profile.sampling import Floats

BESIDE = "beside"
"""The figure: the largest matmul that was measured, beside the largest all-reduce of all devices."""
_DELAYED = "delayed/"
_SMALL = 1 << 16
"""Bytes of a collective that takes little but the wait of its threads for a core."""
_PART = 0.5
"""Of the time that is computed alone, that the collectives beside it take alone: they are to end first."""
_MOST_LOST = 0.9
"""Of a collective's time: as much as this is lost where both need the whole of a core."""


def can_overlap(job: Job) -> bool:
    """Whether collectives of this job can run beside computing, as in the staged form (`running/form.py`)."""
    return job.agree(not job.lone and job.devices[0].platform == "cpu" and _jax.runs_beside())


def delayed_by(group: Sequence[int]) -> str:
    """The figure: a small all-gather of all devices, beside the largest matmul on some devices."""
    return f"{_DELAYED}{group[0]}"


def of_contention(key: str) -> bool:
    """Whether a figure is of computing and a collective at once."""
    return key == BESIDE or key.startswith(_DELAYED)


def small_gather(job: Job, sent: Iterable[Exchange]) -> Exchange | None:
    """The largest one of all devices that is small; None where none was measured. Most collectives are one exchange, as
    it is."""
    small = [e for e in sent if e.step == "all_gather" and e.n == job.n and e.nbytes <= _SMALL]
    return small[-1] if small else None


def delayed(
    job: Job, compute: Callable[[], Floats] | None, send: Callable[[], Floats], times: int
) -> Callable[[], Floats]:
    """Runs `send` so many times on another thread while each process that has something to `compute` does: seconds that
    one takes, of each local device."""
    thread = ThreadPoolExecutor(1, "hapsynth-collectives")

    def once() -> Floats:
        job.agree(True)
        sent = thread.submit(lambda: np.mean([send() for _ in range(times)], axis=0))
        while compute is not None and not sent.done():
            compute()
        return sent.result()

    return once


def beside(
    job: Job, compute: Callable[[], Floats], send: Callable[[], Floats], alone: Floats, sent_s: float, window_s: float
) -> Callable[[], Floats]:
    """Runs `compute` by itself, then while `send` runs on another thread: seconds that one takes on each local device
    while a collective runs, were that to take no longer than alone.

    What both take together beyond computing by itself right before is lost to the collectives: slower computing, and
    slower sending, which lets computing be slow for longer. alone: seconds that `compute` takes each device of the job
    without, float64 [devices]; sent_s: and `send`. window_s: that all should take at least.
    """
    own = alone[job.local]
    # The same in all processes, which send together; each computes for longer than that.
    times = max(1, round(window_s / sent_s))
    runs = ceil(times * sent_s / _PART / float(own.min()))
    thread = ThreadPoolExecutor(1, "hapsynth-collectives")

    def sending() -> None:
        for _ in range(times):
            send()

    def computed() -> Floats:
        return np.sum([compute() for _ in range(runs)], axis=0)

    def once() -> Floats:
        # Anew each time: a machine is faster at times, by more than what collectives take.
        job.agree(True)
        by_itself = computed()
        job.agree(True)
        sent = thread.submit(sending)
        together = computed()
        began = perf_counter()
        sent.result()
        together += perf_counter() - began
        lost = np.clip((together - by_itself) / (times * sent_s), 0.0, _MOST_LOST)
        return own / (1 - lost)

    return once
