"""How long the kernels and collectives of a compiled program take, as XLA's latency-hiding scheduler reads it.

By itself the scheduler takes all collectives to last alike, and a kernel by its kind: it ends a transfer of half a
millisecond after five kernels of some microseconds. A profile by name, which is meant to be measured, tells it better
(`ProfiledInstructionsProto`, as text); here it says what the plan goes by, but of transfers that are not worth hiding,
which it says take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from hapsynth.cluster.device_kinds import DeviceKind
from hapsynth.hlo.collectives import collectives_of, trips_of
from hapsynth.hlo.replay import RUN_OTHERS, Price, kernel_seconds, steps_of
from hapsynth.hlo.text import Module, parse

_UNITS = 1e8
"""To a second. The profile counts microseconds, but for what it does not name the scheduler takes numbers of its own,
5,000 for a collective, 1,000 for a loop's fusion, 1 for the rest and between two kernels: 50 us, 10 us, 10 ns. XLA does
not name all of Triton's kernels the same when it compiles a program again."""
_LEAST_HIDDEN = 0.25
"""Of the time-weighted median of the kernels' durations. Beside a shorter transfer a whole kernel would be put, and the
next transfer would wait for the rest of it."""


class _Timed(NamedTuple):
    """`runs`: what it is: a collective, a kernel, or a loop, branch or call, whose seconds are of all that it runs."""

    name: str
    seconds: float
    runs: Literal["collective", "kernel", "others"]


def latency_profile(text: str, kind: DeviceKind, price: Price) -> bytes:
    """Of a program (`compiled.as_text()`) on a device of a kind; empty where it has no collectives.

    Raises HloError for another text.
    """
    if not collectives_of(text):
        return b""
    module = parse(text)
    timed, _ = _timed(module, module.entry, kind, price)
    shortest = _LEAST_HIDDEN * _time_weighted_median([one.seconds for one in timed if one.runs == "kernel"])
    told = {one.name: 0.0 if one.runs == "collective" and one.seconds < shortest else one.seconds for one in timed}
    return "".join(f'costs {{ name: "{name}" cost_us: {_UNITS * s:.3f} }}\n' for name, s in told.items()).encode()


def _timed(module: Module, computation: str, kind: DeviceKind, price: Price) -> tuple[list[_Timed], float]:
    """Each instruction that takes time, also in loops and branches, and the seconds of all, one after the other. A loop
    of unknown trips counts once; of branches the longest does."""
    found, total = list[_Timed](), 0.0
    for i, start, work in steps_of(module, computation):
        if start is not None:
            one = _Timed(i.name, price(start), "collective")
        elif work is not None:
            one = _Timed(i.name, kernel_seconds(work, kind), "kernel")
        elif i.opcode in RUN_OTHERS:
            each = [_timed(module, name, kind, price) for name in i.computations()]
            for inner, _ in each:
                found += inner
            if i.opcode == "async-start":
                # On a stream of its own.
                continue
            known = trips_of(i)
            longest = max((seconds for _, seconds in each), default=0.0)
            one = _Timed(i.name, longest * (1 if known is None else known), "others")
        else:
            continue
        found.append(one)
        total += one.seconds
    return found, total


def _time_weighted_median(seconds: Sequence[float]) -> float:
    """Half of all the time is in what takes at most as long; 0 of nothing."""
    ordered = np.sort(seconds)
    until = np.cumsum(ordered)
    return float(ordered[np.searchsorted(until, until[-1] / 2)]) if ordered.size else 0.0
