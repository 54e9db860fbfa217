"""The tasks that make a timeline as long as it is."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from hapsynth.search.scheduling.tasks import Machine
from hapsynth.search.scheduling.timeline import Timeline

_AT_ONCE_S = 1e-12


class PathStep(NamedTuple):
    """A task, and the group of devices on which the path goes through it."""

    task: int
    group: int


def critical_path(timeline: Timeline) -> list[PathStep]:
    """The last task to end and before each the one for which it waited: one that it takes something from, or else the
    one before it on its machine."""
    tasks, start, end = timeline.tasks, timeline.start, timeline.end
    if not end.size:
        return []
    groups = range(end.shape[1])
    before = _before(timeline)
    at = PathStep(*divmod(int(end.argmax()), end.shape[1]))
    path = [at]
    while start[at] > 0:
        everywhere = tasks.machine[at.task] is not Machine.COMPUTE and tasks.machine[at.task] is not Machine.LOCAL
        # Tasks that ended when this one began.
        ended = [
            PathStep(other, group)
            for other in (*tasks.makers[at.task], *before[at.task])
            for group in (groups if everywhere else (at.group,))
            if end[other, group] >= start[at] - _AT_ONCE_S
        ]
        if not ended:
            break
        at = ended[0]
        path.append(at)
    return path[::-1]


def _before(timeline: Timeline) -> list[list[int]]:
    """Per task, its predecessors on the machines that it occupies."""
    machine = timeline.tasks.machine
    found: list[list[int]] = [[] for _ in machine]
    for on in (Machine.COMPUTE, Machine.LINK):
        queue = [t for t in timeline.order if machine[t] in (on, Machine.EVERYTHING)]
        for first, second in pairwise(queue):
            found[second].append(first)
    return found
