"""How long tasks take in a given order, and what stays exposed.

Every device computes its tasks one after another in the order given. A collective starts once all devices have made its
operand and the link is done with the one before it, in the order given: computing does not wait for it but where its
result is used, and takes as much longer meanwhile as the devices' contention says. A collective beside which a
device computes takes longer by that device's contention delay, at each of its exchanges meanwhile. The time counts from
a common start, all arguments there, to the last result on the last device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.scheduling.tasks import Machine, TaskGraph, tasks_of


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
        tasks = self.tasks
        sent = [k for k, m in enumerate(tasks.machine) if m is Machine.LINK]
        return float((self.end[sent] - self.start[sent]).max(axis=1, initial=0.0).sum()) + sum(tasks.sent_in.values())

    @cached_property
    def under_way(self) -> Mapping[int, int]:
        """Of collectives that run beside what follows them, by their places in the program, the last instruction that
        begins before each ends."""
        tasks = self.tasks
        last = np.array([max(places, default=-1) for places in tasks.instructions])
        found: dict[int, int] = {}
        for task, machine in enumerate(tasks.machine):
            if machine is Machine.LINK:
                begun = (self.start < self.end[task]).any(axis=1)
                until = int(last[begun].max())
                found |= {place: until for place in tasks.instructions[task] if until > place}
        return found


def never() -> bool:
    """A `stopped` callback that never stops."""
    return False


def simulate(tasks: TaskGraph, order: Sequence[int]) -> Timeline:
    """The timeline of an order in which each task comes after its makers; ValueError where one does not."""
    order, count = tuple(order), len(tasks.machine)
    if sorted(order) != list(range(count)):
        raise ValueError(f"an order of {len(order)} tasks, of which there are {count}")
    start, end = Simulation.of(tasks).run(order)
    start, end = (np.array(each, dtype=np.float64).reshape(tasks.seconds.shape[::-1]).T.copy() for each in (start, end))
    return Timeline(tasks, order, start, end)


def program_timeline(program: Program, sizes: Sizes, costs: CostModel) -> Timeline:
    """The timeline of a program in its own order."""
    tasks = tasks_of(program, sizes, costs)
    return simulate(tasks, range(len(tasks.machine)))


def step_seconds(program: Program, sizes: Sizes, costs: CostModel, *, overlap: bool) -> float:
    """Seconds of a step: with overlap the makespan of the program in its own order, else the sum over its
    instructions."""
    if not overlap:
        return program_cost(program, sizes, costs)
    return program_timeline(program, sizes, costs).makespan_s


@dataclass(frozen=True, eq=False)
class Simulation:
    """Tasks by their machines. In plain floats: groups are few, and arrays of so few numbers take longer to make than
    to compute. `seconds`: [groups][tasks]; `users`: those that wait for each, one that takes several of its results as
    often as `missing` counts it; `delay`: of each collective, by how much it takes longer where each group computes all
    the while [tasks][groups], () of others; None for none. `wait`: of each group, that of one exchange."""

    machine: Sequence[Machine]
    seconds: Sequence[Sequence[float]]
    users: Sequence[Sequence[int]]
    missing: Sequence[int]
    slowdown: Sequence[float] | None
    delay: Sequence[Sequence[float]] | None
    wait: Sequence[float]

    @classmethod
    def of(cls, tasks: TaskGraph) -> Simulation:
        slowdown = tasks.slowdown
        slower = None if slowdown is None or (slowdown == 1.0).all() else slowdown.tolist()
        delay: list[Sequence[float]] | None = None
        wait = list[float]()
        if tasks.delay is not None:
            wait = tasks.delay.tolist()
            late = lambda task: tasks.late_by(tasks.exchanges.get(task, 1))
            delay = [late(task) if m is Machine.LINK else () for task, m in enumerate(tasks.machine)]
        return cls(
            tasks.machine, tasks.seconds.T.tolist(), tasks.users, [len(m) for m in tasks.makers], slower, delay, wait
        )

    def run(self, order: Sequence[int]) -> tuple[list[list[float]], list[list[float]]]:
        """When each task starts and ends [groups][tasks], in an order that may leave some out."""
        machine, users, missing = self.machine, self.users, list(self.missing)
        count, groups = len(machine), range(len(self.seconds))
        compute, link, everything, local = Machine.COMPUTE, Machine.LINK, Machine.EVERYTHING, Machine.LOCAL
        start, end, since = ([[0.0] * count for _ in groups] for _ in range(3))
        # Of each group its seconds, when its tasks have what they are made of, start and end, and its slowdown.
        columns = [*zip(self.seconds, since, start, end, self.factors, strict=True)]
        pairs = [*zip(since, end, strict=True)]
        stream = [0.0] * len(groups)
        sent = _Sent()
        queue = iter([t for t in order if machine[t] in (link, everything)])
        head, free, held_back = next(queue, None), 0.0, False
        # Seconds that each group computes beside the next on the link, where that has begun and its end is not known.
        beside: list[float] | None = None
        finished = [t for t in order if not missing[t] and machine[t] is local]
        computed = [t for t in order if machine[t] is compute or machine[t] is everything]
        # Before the first is computed, what waits for nothing is sent.
        for task, coming in zip((None, *computed), (*computed, None), strict=True):
            can_send, held_back = held_back or task is None or machine[task] is everything, False
            if task is not None:
                if missing[task]:
                    raise ValueError(f"task {task} comes before one that it waits for")
                at_once = None
                if machine[task] is everything:
                    at_once = max([*stream, free, *(ready[task] for ready in since)])
                for group, (seconds, ready, began, ended, slow) in enumerate(columns):
                    now = stream[group]
                    if ready[task] > now:
                        now = ready[task]
                    if at_once is not None:
                        now = at_once
                    began[task] = now
                    if at_once is not None or sent.until <= now:
                        now += seconds[task]
                    else:
                        now = sent.computed(now, seconds[task], slow)
                    stream[group] = ended[task] = now
                if at_once is not None:
                    head, free = next(queue, None), max(stream)
                finished.append(task)
            while True:
                # Those that waited for a task alone can go; what takes no time is done at once.
                while finished:
                    done = finished.pop()
                    for user in users[done]:
                        for ready, ended in pairs:
                            if ready[user] < ended[done]:
                                ready[user] = ended[done]
                        missing[user] -= 1
                        if not missing[user]:
                            kind = machine[user]
                            if kind is local:
                                for _, ready, began, ended, _ in columns:
                                    began[user] = ended[user] = ready[user]
                                finished.append(user)
                            elif kind is not compute:
                                can_send = True
                if not can_send:
                    break
                can_send = False
                # Whatever is next on the link and has its operand.
                while head is not None and machine[head] is link and not missing[head]:
                    begun = free
                    for ready in since:
                        if ready[head] > begun:
                            begun = ready[head]
                    until = alone = begun + self.seconds[0][head]
                    if self.slowdown is not None and alone > sent.until:
                        sent.occupy(begun, alone)
                    if self.delay is not None:
                        if beside is None:
                            # It is looked at once it may begin, and no group has computed beyond that.
                            beside = [0.0] * len(stream)
                        until = alone + self._late(head, beside)
                        if coming is not None and not missing[coming] and machine[coming] is compute:
                            last = self._add_beside(beside, coming, begun, until, stream, since, sent)
                            until = alone + self._late(head, beside)
                            if last <= until:
                                # What is computed beside it next is known once this has been computed.
                                held_back = True
                                break
                        beside = None
                    free = until
                    for _, _, began, ended, _ in columns:
                        began[head], ended[head] = begun, free
                    finished.append(head)
                    head = next(queue, None)
                    if self.delay is not None and head is not None:
                        # What it makes ready may be computed beside the next.
                        can_send = True
                        break
        return start, end

    @cached_property
    def factors(self) -> Sequence[float]:
        """Per group, the factor by which computing takes longer while a collective runs."""
        return self.slowdown or [1.0] * len(self.seconds)

    def _late(self, task: int, beside: Sequence[float]) -> float:
        """By how much a collective takes longer where each group computes for so long beside it: exchanges after that
        are not late, and the first is however short that was."""
        assert self.delay is not None
        each = zip(self.delay[task], beside, self.wait, strict=True)
        return max([min(late, computed + wait) if computed else 0.0 for late, computed, wait in each])

    def _add_beside(
        self,
        beside: list[float],
        task: int,
        begun: float,
        until: float,
        stream: Sequence[float],
        since: Sequence[Sequence[float]],
        sent: _Sent,
    ) -> float:
        """Adds to `beside` the seconds after `begun` that each group computes of a task begun before `until`. Returns
        when the last group ends it. `stream`: when each group ends what it computes before."""
        last = 0.0
        for group, (ready, seconds, slow) in enumerate(zip(since, self.seconds, self.factors, strict=True)):
            now = max(stream[group], ready[task])
            end = sent.computed(now, seconds[task], slow)
            if now < until:
                beside[group] += max(end - max(now, begun), 0.0)
            last = max(last, end)
        return last


class _Sent:
    """When something is sent: starts and ends, in order and apart. `until`: the last end."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.until = 0.0

    def occupy(self, start: float, end: float) -> None:
        """After all so far."""
        if self.ends and start <= self.until:
            self.ends[-1] = end
        else:
            self.starts.append(start)
            self.ends.append(end)
        self.until = end

    def computed(self, now: float, left: float, slow: float) -> float:
        """When so many seconds are computed that are begun now and take `slow` times as long beside what is sent."""
        starts, ends = self.starts, self.ends
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
        return now + left
