"""Idle time on the devices' streams, filled with what is computed later and could be computed there.

List schedules take all devices to compute as long as the slowest, and beside collectives as long as alone: where a
group of devices is done sooner it waits, though something else is ready. Of that as much as fits goes before what it
waits for (insertion in idle time slots, as in HEFT: Topcuoglu et al. 2002), where the makespan is shorter for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile

import numpy as np

from hapsynth.search.cost.model import Floats
from hapsynth.search.scheduling.tasks import Machine
from hapsynth.search.scheduling.timeline import Timeline, never, simulate

_MOST = 8
"""The longest waits; by more the step of BERT is no shorter."""
_SHORTEST = 1e-5
"""The shortest wait that is considered, as a fraction of the makespan."""
_LEAST_GAIN = 1e-6
_TURNS = 40


def filled(timeline: Timeline, stopped: Callable[[], bool] = never) -> Timeline:
    """A timeline with less idle time and a shorter makespan, where one is found before it is `stopped`."""
    for _ in range(_TURNS):
        least = timeline.makespan_s * (1 - _LEAST_GAIN)
        tried = takewhile(lambda _: not stopped(), _fillings(timeline))
        shorter = next((found for found in tried if found.makespan_s < least), None)
        if shorter is None:
            break
        timeline = shorter
    return timeline


def _fillings(timeline: Timeline) -> Iterator[Timeline]:
    """With one of the longest waits filled, in the order of the timeline or with the longest tasks first."""
    tasks, machine = timeline.tasks, timeline.tasks.machine
    stream = [t for t in timeline.order if machine[t] in (Machine.COMPUTE, Machine.EVERYTHING)]
    made = _made(timeline)
    for place, group, since, wait in _waits(timeline, stream):
        ready = [t for t in stream[place + 1 :] if machine[t] is Machine.COMPUTE and made[t] <= since]
        seconds = dict(zip(ready, tasks.seconds[ready, group].tolist(), strict=True))
        for ranked in (ready, sorted(ready, key=lambda t: -seconds[t])):
            left, chosen = wait, set[int]()
            for task in ranked:
                if seconds[task] <= left:
                    left -= seconds[task]
                    chosen.add(task)
            if chosen:
                yield simulate(tasks, _before(timeline.order, stream[place], [t for t in ready if t in chosen]))


def _made(timeline: Timeline) -> list[float]:
    """Per task, the time at which all its inputs are there on all devices."""
    ended = timeline.end.max(axis=1, initial=0.0).tolist()
    return [max((ended[maker] for maker in makers), default=0.0) for makers in timeline.tasks.makers]


def _waits(timeline: Timeline, stream: list[int]) -> list[tuple[int, int, float, float]]:
    """The longest: the place in the stream of the task that waits, the group, since when and how long."""
    start, done = timeline.start[stream], np.zeros_like(timeline.start[stream])
    done[1:] = np.maximum.accumulate(timeline.end[stream], axis=0)[:-1]
    waits: Floats = start - done
    longest = np.argsort(-waits, axis=None, kind="stable")[:_MOST]
    found = zip(*np.unravel_index(longest, waits.shape), strict=True)
    least = _SHORTEST * timeline.makespan_s
    return [(int(n), int(g), float(done[n, g]), float(waits[n, g])) for n, g in found if waits[n, g] > least]


def _before(order: tuple[int, ...], at: int, moved: list[int]) -> list[int]:
    """An order with some tasks right before another."""
    away = set(moved)
    found: list[int] = []
    for task in order:
        if task == at:
            found += moved
        if task not in away:
            found.append(task)
    return found
