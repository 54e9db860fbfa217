"""Profiles whose programs run and whose times are a model's: the same on a busy machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hapsynth.profile import contention, run
from hapsynth.profile.collectives import BASE, INSIDE, Exchange
from hapsynth.profile.job import Job
from hapsynth.profile.op_kernels import DISPATCH, LAUNCH, STREAM, Kernel

RATE, BANDWIDTH, OVERHEAD, START = 5e10, 8e9, 2e-6, 1e-4
BETA, LATENCY = 1e-9, 3e-5
ITSELF = 3.0
"""How much longer an op of a function takes than its class says."""


def kernel_seconds(kernel: Kernel, speed: Any = 1.0) -> Any:
    """On a device that computes and reads at `speed`."""
    rate = BANDWIDTH if kernel.family == STREAM else RATE
    work = 0.0 if kernel.family in (DISPATCH, LAUNCH) else kernel.amount * kernel.repeats / rate
    work *= ITSELF if kernel.op else 1.0
    return START + OVERHEAD * kernel.launches + work / speed


def exchange_seconds(e: Exchange) -> float:
    wire = 4 * e.words * (1 if e.step == "reshare" else (e.n - 1))
    wire *= {"all_reduce": 2 / e.n, "all_to_all": 1 / e.n}.get(e.step, 1.0)
    messages = {"all_reduce": 2 * e.n - 1, INSIDE: 1, "reshare": 1}.get(e.step, e.n)
    return START + (0.0 if e.step == BASE else e.repeats * (messages * LATENCY + wire * BETA))


def install(patch: Callable[[Any, str, Any], None], speeds: Sequence[float] = (1.0,)) -> None:
    """`patch`: setattr, or pytest's. `speeds`: of each process's devices."""
    runs, sends, samples = Job.runner, run.runner, run.sampled

    def modelled(once: Callable[[], Any], seconds: float) -> Callable[[], Any]:
        def both() -> Any:
            took = once()
            assert np.all(took > 0)
            return np.full(took.shape, seconds)

        return both

    def runner(job: Job, kernel: Kernel, only: Sequence[int] | None = None) -> Any:
        return modelled(runs(job, kernel, only), kernel_seconds(kernel, speeds[jax.process_index()]))

    patch(Job, "runner", runner)
    patch(run, "runner", lambda job, e: modelled(sends(job, e), exchange_seconds(e)))
    # Collectives are done when computing is.
    patch(contention, "perf_counter", lambda: 0.0)
    # Modelled times say nothing of how often a program can run within some time.
    patch(run, "sampled", lambda once, least, tolerance, *_: samples(once, least, tolerance, 0.0))
