"""How long devices compute while a collective runs: both at once, in processes that can do both."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import ceil

import numpy as np

from hapsynth import _jax
from hapsynth.profile.job import Job
from hapsynth.profile.sampling import Floats

BESIDE = "beside"
"""The figure: the largest matmul that was measured, while the largest all-reduce of all devices runs."""
_PART = 0.5
"""Of a collective's time, that computing beside it takes alone: it is to end first."""


def can_overlap(job: Job) -> bool:
    """Whether collectives of this job can run beside computing, as in the staged form (`running/form.py`)."""
    return job.agree(not job.lone and job.devices[0].platform == "cpu" and _jax.runs_beside())


def beside(
    job: Job, compute: Callable[[], Floats], send: Callable[[], Floats], alone: Floats, sent_s: float, window_s: float
) -> Callable[[], Floats]:
    """Runs `compute` while `send` runs on another thread: seconds of one `compute` on each local device.

    alone: seconds that `compute` takes each device of the job without, float64 [devices]; sent_s: and `send`.
    window_s: that all should take at least.
    """
    # The same in all processes, which send together; each computes as often as fits beside.
    times = ceil(max(window_s, float(alone.max()) / _PART) / sent_s)
    runs = max(1, int(_PART * times * sent_s / float(alone[job.local].max())))
    thread = ThreadPoolExecutor(1, "hapsynth-collectives")

    def sending() -> None:
        for _ in range(times):
            send()

    def once() -> Floats:
        job.agree(True)
        sent = thread.submit(sending)
        computed = np.mean([compute() for _ in range(runs)], axis=0)
        sent.result()
        return computed

    return once
