"""The predicted step of a plan as bars over time: what each device computes, what is sent, and what is held meanwhile.

With overlap that is the plan's timeline. Without, a step is the sum over its instructions: one begins when all devices
have done with the one before it, so a device waits for the slowest, and for all that is sent. A loop is shown once, as
long as all its trips.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hapsynth._quantities import indices
from hapsynth.instructions.program.program import Convert
from hapsynth.running.base import Planned
from hapsynth.search.cost.model import Floats
from hapsynth.search.cost.program_cost import instruction_costs, load_seconds, shares
from hapsynth.search.cost.program_index import ProgramIndex
from hapsynth.search.memory.profile import MemoryProfile
from hapsynth.search.scheduling.tasks import Machine

COMPUTES, SENDS, BOTH = "computes", "sends", "both"
"""What goes on in a bar; `both` in a loop or branch that sends, in which nothing is told apart."""
_SENT = "collectives"


class Bar(NamedTuple):
    """Seconds from `start` to `end` in which instructions run; none of the program's where an argument is fed."""

    start: float
    end: float
    does: str
    instructions: tuple[int, ...]


@dataclass(frozen=True)
class Lane:
    """What some devices that do the same do in order, or all collectives (no devices)."""

    name: str
    devices: tuple[int, ...]
    bars: tuple[Bar, ...]

    @property
    def busy_s(self) -> float:
        return sum(bar.end - bar.start for bar in self.bars)


class Step:
    """The predicted step of a plan.

    `lanes`: of groups of devices that do the same, then of collectives. `begins`: of each instruction, when the first
    device begins it. `seconds`: of each, how long it takes the device that takes longest.
    """

    def __init__(self, plan: Planned) -> None:
        self.plan, self.costs = plan, plan.cost_model()
        group_of = plan.timeline.tasks.group_of
        self.groups = [tuple(np.flatnonzero(group_of == g).tolist()) for g in range(group_of.max(initial=0) + 1)]
        """Positions among the devices that take part."""
        count = len(plan.program.instructions)
        self.begins, self.seconds = [0.0] * count, [0.0] * count
        found = self._overlapped() if plan.result.overlap else self._in_sequence()
        self.lanes = tuple(lane for lane in found if lane.bars or lane.devices)
        self.makespan_s = max((bar.end for lane in self.lanes for bar in lane.bars), default=0.0)

    @property
    def communication_s(self) -> float:
        """Seconds in which something is sent."""
        if self.plan.result.overlap:
            return self.plan.timeline.communication_s
        sent = [bar for lane in self.lanes if not lane.devices for bar in lane.bars if bar.does == SENDS]
        return sum(bar.end - bar.start for bar in sent)

    @property
    def exposed(self) -> tuple[Lane, float]:
        """The devices that compute longest, and the seconds in which they compute nothing."""
        computing = [lane for lane in self.lanes if lane.devices]
        if self.plan.result.overlap:
            # Which knows of loops and branches what is sent in them.
            timeline = self.plan.timeline
            return computing[int(timeline.computed.argmax())], timeline.exposed_s
        busiest = max(computing, key=lambda lane: lane.busy_s)
        return busiest, self.makespan_s - busiest.busy_s

    def _names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for group in self.groups:
            devices = tuple(self.plan.devices[d] for d in group)
            yield f"{indices(devices)} {self.plan.cluster.devices[devices[0]].name}", devices

    def _overlapped(self) -> list[Lane]:
        timeline = self.plan.timeline
        machine, places = timeline.tasks.machine, timeline.tasks.instructions
        for task, of in enumerate(places):
            for k in of:
                self.begins[k] = float(timeline.start[task].min())
                self.seconds[k] = float((timeline.end[task] - timeline.start[task]).max())

        def bars(group: int, on: Machine) -> tuple[Bar, ...]:
            start, end = timeline.start[:, group].tolist(), timeline.end[:, group].tolist()
            ran = [k for k in range(len(places)) if machine[k] in (on, Machine.EVERYTHING) and end[k] > start[k]]
            ran.sort(key=start.__getitem__)
            alone = COMPUTES if on is Machine.COMPUTE else SENDS
            does = lambda k: BOTH if machine[k] is Machine.EVERYTHING else alone
            return tuple(Bar(start[k], end[k], does(k), places[k]) for k in ran)

        lanes = [Lane(name, devices, bars(g, Machine.COMPUTE)) for g, (name, devices) in enumerate(self._names())]
        return [*lanes, Lane(_SENT, (), bars(0, Machine.LINK))] if Machine.LINK in machine else lanes

    def _in_sequence(self) -> list[Lane]:
        plan, costs, first = self.plan, self.costs, [group[0] for group in self.groups]
        index = ProgramIndex.of(plan.program, plan.sizes.classes, costs)
        loads = load_seconds(index, plan.sizes)
        computed: list[list[Bar]] = [[] for _ in first]
        sent: list[Bar] = []
        now = 0.0

        def compute(seconds: Floats, instructions: tuple[int, ...]) -> None:
            for bars, s in zip(computed, seconds[first].tolist(), strict=True):
                if s > 0:
                    bars.append(Bar(now, now + s, COMPUTES, instructions))

        for load in index.feeds.values():
            seconds = costs.device_times(load.work, shares(costs, plan.sizes, load.nodes))
            compute(seconds, ())
            now += costs.time(load.work, shares(costs, plan.sizes, load.nodes))
        each = zip(instruction_costs(plan.program, plan.sizes, costs), index.load_of, index.runs, strict=True)
        for k, (cost, load, runs) in enumerate(each):
            self.begins[k], self.seconds[k] = now, cost.seconds
            i = cost.instruction
            if isinstance(i, Convert) and i.is_collective:
                sent.append(Bar(now, now + cost.seconds, SENDS, (k,)))
            elif isinstance(i, Convert):
                compute(np.full(costs.n, cost.seconds), (k,))
            else:
                seconds = runs * loads[load]
                # What all devices do, to agree on which way control flow goes, besides its own work.
                compute(seconds + max(cost.seconds - float(seconds.max()), 0.0), (k,))
            now += cost.seconds
        lanes = [Lane(name, devices, tuple(computed[g])) for g, (name, devices) in enumerate(self._names())]
        return [*lanes, Lane(_SENT, (), tuple(sent))] if sent else lanes

    @cached_property
    def memory(self) -> tuple[list[float], Floats]:
        """When what each group of devices holds may change, in the program's order: seconds [points], and bytes
        [groups, points]."""
        under_way = self.plan.timeline.under_way if self.plan.scheduled else {}
        profile = MemoryProfile(self.plan.program, self.plan.sizes.classes, self.costs, under_way)
        held = profile.of_devices(self.plan.sizes)
        held = np.broadcast_to(held, (self.costs.n, held.shape[1]))[[group[0] for group in self.groups]]
        # In the order of the program something may begin before what stands in front of it.
        begins = np.maximum.accumulate([0.0, *self.begins, self.makespan_s])
        return np.repeat(begins, profile.phases)[: held.shape[1]].tolist(), held


def merged(bars: Sequence[Bar], shortest_s: float) -> list[Bar]:
    """Bars of which those shorter than `shortest_s` that follow on one another are one."""
    found: list[Bar] = []
    for bar in bars:
        last = found[-1] if found else None
        short = bar.end - bar.start < shortest_s
        if last and short and last.does == bar.does and bar.start - last.end < shortest_s / 2:
            whole = last.end - last.start
            if whole < shortest_s or len(last.instructions) > 1:
                found[-1] = Bar(last.start, bar.end, bar.does, (*last.instructions, *bar.instructions))
                continue
        found.append(bar)
    return found
