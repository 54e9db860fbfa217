"""How long tasks take in a given order, and what stays exposed.

Every device computes its tasks one after another in the order given. A collective starts once all devices have made its
operand and its link is done with the one before it, in the order given: computing does not wait for it but where its
result is used, and takes as much longer meanwhile as the devices' contention says. The time counts from a common start,
all arguments there, to the last result on the last device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add

import numpy as np

from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.scheduling.tasks import LINKS, Machine, TaskGraph, tasks_of


@dataclass(frozen=True, eq=False)
class Timeline:
    """`start`, `end`: seconds of each task in each group of devices, float64 [tasks, groups]."""

    tasks: TaskGraph
    order: tuple[int, ...]
    start: Floats
    end: Floats

    @property
    def makespan_s(self) -> float:
        """Seconds until the last task has ended."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def computed(self) -> Floats:
        """Seconds in which each group of devices computes, with what collectives beside it slow it down."""
        machine, sent_in = self.tasks.machine, self.tasks.sent_in
        ran = [k for k, m in enumerate(machine) if m in (Machine.COMPUTE, Machine.EVERYTHING)]
        sent = sum(sent_in.get(k, 0.0) for k in ran)
        return (self.end[ran] - self.start[ran]).sum(axis=0) - sent

    @cached_property
    def exposed(self) -> Floats:
        """Seconds of each group of devices, until its own last result, in which it computes nothing: it waits for
        collectives, and in them for other devices. So does `RecordedCall.exposed_s` count."""
        return self.end.max(axis=0, initial=0.0) - self.computed

    @property
    def exposed_s(self) -> float:
        """Seconds that are exposed on the group of devices that computes longest."""
        return float(self.exposed[self.computed.argmax()]) if self.end.size else 0.0

    @property
    def communication_s(self) -> float:
        """Seconds in which a collective runs."""
        tasks, found, until = self.tasks, 0.0, 0.0
        sent = [k for k, m in enumerate(tasks.machine) if m in LINKS]
        for start, end in sorted(zip(self.start[sent, 0].tolist(), self.end[sent, 0].tolist())):
            found += max(end - max(start, until), 0.0)
            until = max(until, end)
        return found + sum(tasks.sent_in.values())


def simulate(tasks: TaskGraph, order: Sequence[int]) -> Timeline:
    """The timeline of an order in which each task comes after its makers; ValueError where one does not."""
    return _Simulation(tasks, order).run()


def step_seconds(program: Program, sizes: Sizes, costs: CostModel, *, overlap: bool) -> float:
    """What a step takes: with overlap the makespan of the program in its own order, else the sum over its
    instructions."""
    if not overlap:
        return program_cost(program, sizes, costs)
    tasks = tasks_of(program, sizes, costs)
    return simulate(tasks, range(len(tasks.machine))).makespan_s


class _Simulation:
    """In plain floats: groups are few, and arrays of so few numbers take longer to make than to compute."""

    def __init__(self, tasks: TaskGraph, order: Sequence[int]) -> None:
        self.tasks, self.order = tasks, tuple(order)
        count, groups = tasks.seconds.shape
        if sorted(self.order) != list(range(count)):
            raise ValueError(f"an order of {len(self.order)} tasks, of which there are {count}")
        slowdown = tasks.slowdown
        self.slowdown = None if slowdown is None or (slowdown == 1.0).all() else slowdown.tolist()
        self.seconds: list[list[float]] = tasks.seconds.tolist()
        self.missing = [len(makers) for makers in tasks.makers]
        self.start, self.end = ([[0.0] * groups] * count for _ in range(2))
        self.last: list[float] = [0.0] * count
        """Of each task, when it ends in the last group."""
        self.stream = [0.0] * groups
        self.free = {Machine.NETWORK: 0.0, Machine.INTRA: 0.0}
        takes = lambda link: (t for t in self.order if tasks.machine[t] in (link, Machine.EVERYTHING))
        self.waiting = {link: deque(takes(link)) for link in self.free}
        self.windows: tuple[list[float], list[float]] = [], []
        """When something is sent: starts and ends, in order and apart."""

    def run(self) -> Timeline:
        machine, makers = self.tasks.machine, self.tasks.makers
        for task in [t for t, made_by in enumerate(makers) if not made_by and machine[t] is Machine.LOCAL]:
            self._done(task)
        self._send()
        for task in self.order:
            if machine[task] not in (Machine.COMPUTE, Machine.EVERYTHING):
                continue
            if self.missing[task]:
                raise ValueError(f"task {task} comes before one that it waits for")
            ready = self._ready(task, self.stream)
            computes = machine[task] is Machine.COMPUTE
            if not computes:
                ready = [max([*ready, *self.free.values()])] * len(ready)
            seconds = self.seconds[task]
            self.stream = self._computed(ready, seconds) if computes else list(map(add, ready, seconds))
            self._ran(task, ready, self.stream)
            if not computes:
                self.free = dict.fromkeys(self.free, float(self.last[task]))
                for waiting in self.waiting.values():
                    waiting.popleft()
            self._done(task)
            self._send()
        shape = self.tasks.seconds.shape
        start, end = (np.array(rows, dtype=np.float64).reshape(shape) for rows in (self.start, self.end))
        return Timeline(self.tasks, self.order, start, end)

    def _ready(self, task: int, since: list[float]) -> list[float]:
        """When each group has what a task is made of."""
        for maker in self.tasks.makers[task]:
            since = list(map(max, since, self.end[maker]))
        return since

    def _ran(self, task: int, start: list[float], end: list[float]) -> None:
        self.start[task], self.end[task], self.last[task] = start, end, max(end, default=0.0)

    def _done(self, task: int) -> None:
        """Those that waited for a task alone can go; what takes no time is done at once."""
        finished = [task]
        while finished:
            for user in self.tasks.users[finished.pop()]:
                self.missing[user] -= 1
                if not self.missing[user] and self.tasks.machine[user] is Machine.LOCAL:
                    made = self._ready(user, [0.0] * len(self.stream))
                    self._ran(user, made, made)
                    finished.append(user)

    def _send(self) -> None:
        """Start whatever is next on its link and has its operand."""
        sent = True
        while sent:
            sent = False
            for link, waiting in self.waiting.items():
                while waiting and self.tasks.machine[waiting[0]] is link and not self.missing[waiting[0]]:
                    task, sent = waiting.popleft(), True
                    ready = max((self.last[m] for m in self.tasks.makers[task]), default=0.0)
                    begun = max(ready, self.free[link])
                    until = self.free[link] = begun + self.seconds[task][0]
                    self._ran(task, [begun] * len(self.stream), [until] * len(self.stream))
                    if self.slowdown is not None:
                        self._occupy(begun, until)
                    self._done(task)

    def _occupy(self, start: float, end: float) -> None:
        starts, ends = self.windows
        at = bisect_right(starts, start)
        if at and ends[at - 1] >= start:
            at -= 1
            start, end = starts[at], max(ends[at], end)
        last = at
        while last < len(starts) and starts[last] <= end:
            end, last = max(end, ends[last]), last + 1
        starts[at:last], ends[at:last] = [start], [end]

    def _computed(self, begun: list[float], seconds: list[float]) -> list[float]:
        """When each group has computed so many seconds that are begun then."""
        if self.slowdown is None:
            return list(map(add, begun, seconds))
        starts, ends = self.windows
        found: list[float] = []
        for now, left, slow in zip(begun, seconds, self.slowdown, strict=True):
            at = max(bisect_right(starts, now) - 1, 0)
            while left > 0 and at < len(starts):
                if ends[at] <= now:
                    at += 1
                    continue
                alone = max(starts[at] - now, 0.0)
                if left <= alone:
                    break
                beside = min(left - alone, (ends[at] - max(starts[at], now)) / slow)
                now = max(starts[at], now) + beside * slow
                left -= alone + beside
            found.append(now + left)
        return found
