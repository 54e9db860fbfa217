"""The scheduling policy of processes that compute and communicate on the same cores."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache

import jax


@cache
def as_batch_work() -> None:
    """Makes all threads of this process, and those that they start, SCHED_BATCH, but those with a policy of their own.

    Nothing where it is the only process, where accelerators do the work, or where there is no such policy.
    """
    if not hasattr(os, "SCHED_BATCH") or jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        # It may have ended, or may not be changed here: then it is as it was.
        with suppress(OSError):
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
