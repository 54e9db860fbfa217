"""The tasks that each device waits for."""

from __future__ import annotations

import numpy as np

from hapsynth.search.cost.model import Floats
from hapsynth.search.scheduling.tasks import Machine
from hapsynth.search.scheduling.timeline import Timeline


def waits(timeline: Timeline) -> dict[int, Floats]:
    """Task -> the seconds that each group of devices waits for it alone: collectives and, for those that they send,
    loops and branches. Of a group these add up to what is exposed on it."""
    tasks, start, end = timeline.tasks, timeline.start, timeline.end
    groups = range(end.shape[1])
    found: dict[int, Floats] = {}

    def add(task: int, group: int, seconds: float) -> None:
        if seconds > 0:
            found.setdefault(task, np.zeros(len(groups)))[group] += seconds

    def last(among: tuple[int, ...] | list[int], group: int) -> int:
        """The task that ends last; for slices, the task that makes their operand."""
        at = max(among, key=lambda task: end[task, group])
        while tasks.machine[at] is Machine.LOCAL and tasks.makers[at]:
            at = max(tasks.makers[at], key=lambda task: end[task, group])
        return at

    for group in groups:
        until = 0.0
        for task in timeline.order:
            if tasks.machine[task] not in (Machine.COMPUTE, Machine.EVERYTHING):
                continue
            if start[task, group] > until:
                # A loop or branch begins when all is done: it is what it waits for, where nothing else is there last.
                makers = [m for m in tasks.makers[task] if end[last((m,), group), group] >= start[task, group]]
                add(last(makers, group) if makers else task, group, start[task, group] - until)
            until = end[task, group]
            add(task, group, tasks.sent_in.get(task, 0.0))
        add(last(timeline.order, group) if timeline.order else 0, group, end[:, group].max(initial=0.0) - until)
    return found
