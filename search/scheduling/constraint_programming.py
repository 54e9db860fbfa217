"""Orders of few tasks by constraint programming: OR-Tools' CP-SAT begins from a timeline and improves it for as long as
it may, which is counted in steps of its own, so that the same tasks get the same order each time.

It knows no contention: what it finds is simulated, and kept where it is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hapsynth.search.scheduling.tasks import Machine
from hapsynth.search.scheduling.timeline import Timeline, simulate

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver

_MOST_TASKS = 300
"""With more it finds next to nothing in its time."""
_EFFORT = 2.0
"""In CP-SAT's deterministic time, about seconds."""
_TICKS = 100_000
"""The number of units of time into which the present makespan is divided."""


def reproducible_solver(effort: float) -> CpSolver:
    """A CP-SAT solver that finds the same each time. `effort`: in its deterministic time, about seconds."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    # It would leave the process without Python's handler of Ctrl-C.
    solver.parameters.catch_sigint_signal = False
    return solver


def polished(timeline: Timeline) -> Timeline:
    """A timeline of the same tasks, in a better order where one is found."""
    if not 1 < len(timeline.order) <= _MOST_TASKS:
        return timeline
    starts = _improved_starts(timeline)
    if starts is None:
        return timeline
    # No task starts before its makers, which have lower numbers.
    order = sorted(range(len(starts)), key=lambda task: (starts[task], task))
    return min(timeline, simulate(timeline.tasks, order), key=lambda t: t.makespan_s)


def _improved_starts(timeline: Timeline) -> Sequence[int] | None:
    """When each task starts at the earliest on any group, in an order that is at least as good without contention; None
    where there is none."""
    from ortools.sat.python import cp_model

    tasks = timeline.tasks
    groups = range(tasks.seconds.shape[1])
    ticks = np.round(tasks.seconds * (_TICKS / timeline.makespan_s)).astype(int)
    known = simulate(replace(tasks, seconds=ticks, slowdown=None, delay=None), timeline.order).start.astype(int)
    latest = int((known + ticks).max())
    model = cp_model.CpModel()
    variable = lambda: model.new_int_var(0, latest, "")
    # Each group of devices computes at its own times; what takes all devices begins on all at once.
    own = Machine.COMPUTE, Machine.LOCAL
    start = [[variable() for _ in groups] if m in own else [variable()] * len(groups) for m in tasks.machine]
    used: dict[object, list[cp_model.IntervalVar]] = {}
    makespan = variable()
    for task, machine in enumerate(tasks.machine):
        intervals = [model.new_fixed_size_interval_var(s, int(n), "") for s, n in zip(start[task], ticks[task])]
        if machine in (Machine.COMPUTE, Machine.EVERYTHING):
            for group in groups:
                used.setdefault(("stream", group), []).append(intervals[group])
        if machine in (Machine.LINK, Machine.EVERYTHING):
            used.setdefault(Machine.LINK, []).append(intervals[0])
        for group in groups:
            model.add(makespan >= start[task][group] + int(ticks[task, group]))
            for maker in tasks.makers[task]:
                model.add(start[task][group] >= start[maker][group] + int(ticks[maker, group]))
        for group in groups if machine in own else groups[:1]:
            model.add_hint(start[task][group], int(known[task, group]))
    for intervals in used.values():
        model.add_no_overlap(intervals)
    model.add_hint(makespan, latest)
    model.minimize(makespan)
    solver = reproducible_solver(_EFFORT)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return [min(solver.value(s) for s in starts) for starts in start]
