"""A program at its sizes as tasks for machines: the compute stream of every device, and the links between devices.

Devices of one kind that hold the same shares of everything are a group: they do the same at the same time. A collective
takes all devices, and the link of its mesh axis, for as long as the cost model says. Axes whose groups lie inside hosts
have a link of their own, all others share the network. A loop or a branch is one task that takes everything: nothing
goes on beside it. Slices of what is there already take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import fsum

import numpy as np

from hapsynth.instructions.program.program import Compute, Instruction, Program, reads, region_of, writes
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.cost.model import CostModel, Floats, Ints
from hapsynth.search.cost.program_cost import conversion_cost, instruction_costs, shares
from hapsynth.search.cost.program_index import ProgramIndex


class Machine(IntEnum):
    """What a task takes while it runs. A `LOCAL` task takes nothing."""

    EVERYTHING = -2
    LOCAL = -1
    COMPUTE = 0
    NETWORK = 1
    INTRA = 2


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """Tasks in an order in which each comes after its makers.

    `seconds`: float64 [tasks, groups], how long a task takes each group of devices; those of a collective are alike.
    `group_of`: int [devices]. `instructions`: per task, the program's by their places; none for an argument that is
    fed.
    """

    machine: tuple[Machine, ...]
    seconds: Floats
    makers: tuple[tuple[int, ...], ...]
    instructions: tuple[tuple[int, ...], ...]
    group_of: Ints

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Per task, those that wait for it."""
        found: list[list[int]] = [[] for _ in self.makers]
        for task, makers in enumerate(self.makers):
            for maker in makers:
                found[maker].append(task)
        return tuple(map(tuple, found))

    @cached_property
    def longest(self) -> list[float]:
        """Seconds of each task in the group that takes longest."""
        return self.seconds.max(axis=1, initial=0.0).tolist()

    @cached_property
    def busy(self) -> dict[Machine, Floats]:
        """Seconds that each machine works, whatever the order: of each group [groups]; what takes everything counts
        for all."""
        machine = np.array(self.machine, dtype=np.int64)
        used = [Machine.COMPUTE, *(m for m in (Machine.NETWORK, Machine.INTRA) if m in self.machine)]
        return {m: self.seconds[(machine == m) | (machine == Machine.EVERYTHING)].sum(axis=0) for m in used}


def tasks_of(program: Program, sizes: Sizes, costs: CostModel) -> TaskGraph:
    """The tasks of a program."""
    return _Builder(program, sizes, costs).graph()


class _Builder:
    def __init__(self, program: Program, sizes: Sizes, costs: CostModel) -> None:
        self.program, self.sizes, self.costs, self.source = program, sizes, costs, costs.graph
        self.index = ProgramIndex.of(program, sizes.classes, costs)
        self.machine: list[Machine] = []
        self.seconds: list[Floats] = []
        self.makers: list[tuple[int, ...]] = []
        self.instructions: list[tuple[int, ...]] = []
        self.made: dict[object, int] = {}

    def graph(self) -> TaskGraph:
        alone = [device for device, known in enumerate(self._groups()) if known == device]
        number = {device: group for group, device in enumerate(alone)}
        group_of = np.array([number[device] for device in self._groups()], dtype=np.int64)
        for value in self.index.feeds:
            self._add(Machine.COMPUTE, self._fed[value][alone], (), ())
            self.made[value, self.program.inputs[value]] = len(self.machine) - 1
        links = _links(self.costs)
        instructions, at = self.program.instructions, 0
        while at < len(instructions):
            if outer := self._outermost(instructions[at]):
                last = at
                while last < len(instructions) and self._outermost(instructions[last]) == outer:
                    last += 1
                everything = np.full(len(alone), fsum(self._together[at:last]))
                self._run(range(at, last), Machine.EVERYTHING, everything)
                at = last
                continue
            i = instructions[at]
            if isinstance(i, Compute):
                uniform = self.costs.uniform_time(i.op) if i.op in self.source.unsure else 0.0
                self._run([at], Machine.COMPUTE, self._loads[self.index.load_of[at]][alone] + uniform)
            else:
                seconds = conversion_cost(self.costs, self.sizes, i)[0]
                machine = links[i.axis] if seconds else Machine.LOCAL
                self._run([at], machine, np.full(len(alone), seconds))
            at += 1
        seconds = np.array(self.seconds).reshape(len(self.machine), len(alone))
        return TaskGraph(tuple(self.machine), seconds, tuple(self.makers), tuple(self.instructions), group_of)

    def _add(self, machine: Machine, seconds: Floats, makers: tuple[int, ...], instructions: tuple[int, ...]) -> None:
        self.machine.append(machine)
        self.seconds.append(seconds)
        self.makers.append(makers)
        self.instructions.append(instructions)

    def _run(self, places: Sequence[int], machine: Machine, seconds: Floats) -> None:
        """A task of some of the program's instructions."""
        task, every = len(self.machine), [self.program.instructions[k] for k in places]
        needs = dict.fromkeys(self.made[p] for i in every for p in reads(self.source, i) if p in self.made)
        self._add(machine, seconds, tuple(needs), tuple(places))
        self.made.update((p, task) for i in every for p in writes(self.source, i))

    def _outermost(self, i: Instruction) -> int:
        """The loop or branch of the whole function in which an instruction stands; 0: in none."""
        around = self.source.around(region_of(self.source, i))
        return around[-2] if len(around) > 1 else 0

    @cached_property
    def _loads(self) -> list[Floats]:
        """Seconds of each load on each device."""
        return [self.costs.device_times(x.work, shares(self.costs, self.sizes, x.nodes)) for x in self.index.loads]

    @cached_property
    def _fed(self) -> dict[int, Floats]:
        of = lambda load: self.costs.device_times(load.work, shares(self.costs, self.sizes, load.nodes))
        return {value: of(load) for value, load in self.index.feeds.items()}

    @cached_property
    def _together(self) -> list[float]:
        """Seconds of each instruction as if all devices waited for the slowest."""
        return [cost.seconds for cost in instruction_costs(self.program, self.sizes, self.costs)]

    def _groups(self) -> list[int]:
        """Of each device the first that takes as long over everything."""
        columns = np.array([*self._loads, *self._fed.values()]).reshape(-1, self.costs.n).T
        first: dict[bytes, int] = {}
        return [first.setdefault(column.tobytes(), device) for device, column in enumerate(columns)]


def _links(costs: CostModel) -> list[Machine]:
    """The link of each mesh axis."""
    hosts = np.array(costs.cluster.hosts).reshape(costs.lengths)
    inside = [bool((hosts == hosts.take([0], axis=a)).all()) for a in range(hosts.ndim)]
    return [Machine.INTRA if i else Machine.NETWORK for i in inside]
