"""A program at its sizes as tasks for machines: the compute stream of every device, and the link between devices.

Devices of one kind that hold the same shares of everything are a group: they do the same at the same time. A collective
takes all devices, and the link, for as long as the cost model says; those of a bundle are one, of one latency. There is
one link, whatever the mesh axes are: processes run one collective after another, all in the same order, on GPUs
(`lower/_pinned.py`) and on CPUs (`lower/_collective_thread.py`). A loop or a branch is one task that takes everything:
nothing goes on beside it. Slices of what is there already take no time. An op whose result one other op alone reads,
and which lies nowhere in memory, is one task with that: XLA makes one kernel of both.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property, reduce
from heapq import heappop, heappush
from math import fsum
from typing import NamedTuple

import numpy as np

from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program.bundles import bundles_of, family
from hapsynth.instructions.program.program import Block, Compute, Convert, Program, Property, nested
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.staging import gloo
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.search.cost.device_speed import Floats, Ints
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.network import AxisLink
from hapsynth.search.cost.program_cost import Cost, instruction_costs, load_seconds, shares, shares_of
from hapsynth.search.cost.program_index import ProgramIndex


class Machine(IntEnum):
    """The machine that a task occupies while it runs. A `LOCAL` task occupies none."""

    EVERYTHING = -2
    LOCAL = -1
    COMPUTE = 0
    LINK = 1


_FEW = 300
"""Tasks that are scheduled each by itself."""
_LARGEST_PART = 2e-3
"""The largest fraction of a step that one task computes after tasks are contracted."""


class Transfer(NamedTuple):
    """What a collective, or a bundle of them, sends.

    `family`: what it has in common with those that it can go with. `made`: the values and layouts that it makes; a
    bundle makes each of them once. `nbytes`: that each device sends; `wire_bytes`: that one group does over its slowest
    link. `turned_s`: as `network.Sent` has it. `alone`: whether it is too large to go with others.
    """

    family: Hashable
    made: frozenset[tuple[int, Layout]]
    link: AxisLink
    step: str
    nbytes: float
    wire_bytes: float
    turned_s: float
    alone: bool = False

    @property
    def seconds(self) -> float:
        return float(self.link.seconds(self.step, self.wire_bytes)) + self.turned_s

    def exchanges(self, options: LoweringOptions) -> int:
        """Those that wait for one another where gloo sends it."""
        return gloo.exchanges(self.step, self.nbytes, self.link.n, self.link.hosts, options)

    @property
    def latency_s(self) -> float:
        """Seconds that it takes however little it sends."""
        return float(self.link.seconds(self.step, 0.0))

    def takes(self, other: Transfer, most: float) -> bool:
        """Whether both can go as one of so many bytes at most. What is gathered twice, dropped between, one bundle
        cannot gather twice."""
        return (
            self.family == other.family
            and not (self.alone or other.alone)
            and self.nbytes + other.nbytes <= most
            and self.made.isdisjoint(other.made)
        )

    def beside(self, other: Transfer) -> Transfer:
        """The transfer of both as one bundle."""
        return self._replace(
            made=self.made | other.made,
            nbytes=self.nbytes + other.nbytes,
            wire_bytes=self.wire_bytes + other.wire_bytes,
            turned_s=self.turned_s + other.turned_s,
        )


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """Tasks in an order in which each comes after its makers.

    `seconds`: float64 [tasks, groups], how long a task takes each group of devices; those of a collective are alike.
    `group_of`: int [devices]. `instructions`: per task, the program's by their places; none for an argument that is
    fed. `slowdown`: float64 [groups], how many times as long computing takes each while something is sent; None for
    as long as alone. `delay`: float64 [groups], seconds by which an exchange takes longer beside computing of each;
    None for none. `exchanges`: of a collective, how many wait for one another, where gloo's may be delayed. `sent_in`:
    of a loop or branch, its seconds in which it sends. `transfers`: of each collective that could go with others.
    `lowering`: says which may, and what gloo is given. `unbundled`: the same tasks before collectives
    were joined; None where none are.
    """

    machine: tuple[Machine, ...]
    seconds: Floats
    makers: tuple[tuple[int, ...], ...]
    """Of each task those that it comes after: what made what it reads, and what reads or made what it makes again."""
    instructions: tuple[tuple[int, ...], ...]
    group_of: Ints
    slowdown: Floats | None = None
    delay: Floats | None = None
    exchanges: Mapping[int, int] = field(default_factory=dict[int, int])
    sent_in: Mapping[int, float] = field(default_factory=dict[int, float])
    transfers: Mapping[int, Transfer] = field(default_factory=dict[int, Transfer])
    lowering: LoweringOptions = DEFAULT
    unbundled: TaskGraph | None = None

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Per task, the tasks that wait for it."""
        found: list[list[int]] = [[] for _ in self.makers]
        for task, makers in enumerate(self.makers):
            for maker in makers:
                found[maker].append(task)
        return tuple(map(tuple, found))

    def late_by(self, exchanges: int) -> list[float]:
        """Seconds by which a collective of so many exchanges takes longer beside computing of each group: before each
        all wait for a thread that waits for a core."""
        assert self.delay is not None
        return (exchanges * self.delay).tolist()

    @cached_property
    def longest(self) -> list[float]:
        """Seconds of each task in the group that takes longest."""
        return self.seconds.max(axis=1, initial=0.0).tolist()

    @cached_property
    def released(self) -> list[float]:
        """Per task, a lower bound on its start in any order, in seconds."""
        found, longest = [0.0] * len(self.machine), self.longest
        for task, makers in enumerate(self.makers):
            found[task] = max((found[maker] + longest[maker] for maker in makers), default=0.0)
        return found

    def joined(self, order: Sequence[int], bundles: Iterable[Sequence[int]]) -> TaskGraph | None:
        """The same with the tasks of each bundle, all collectives or all computed, as one, numbered in an order that is
        nearest to the one given; None where some would wait for themselves. Each bundle is in the given order."""
        count = len(self.machine)
        first, place = list(range(count)), [0] * count
        for at, task in enumerate(order):
            place[task] = at
        members: dict[int, list[int]] = {}
        for bundle in bundles:
            for task in bundle:
                first[task] = bundle[0]
            members[bundle[0]] = sorted(bundle, key=place.__getitem__)
        inside = {task for bundle in members.values() for task in bundle}
        makers: list[Iterable[int]] = [*self.makers]
        for task in {user for one in inside for user in self.users[one]} - inside:
            makers[task] = dict.fromkeys([first[m] for m in self.makers[task]])
        for one, bundle in members.items():
            needed = dict.fromkeys([first[m] for task in bundle for m in self.makers[task]])
            if self.machine[one] is not Machine.LINK:
                needed.pop(one, None)
            makers[one] = needed
        users: list[list[int]] = [[] for _ in range(count)]
        missing = [0] * count
        for task in order:
            if first[task] == task:
                for maker in makers[task]:
                    users[maker].append(task)
                    missing[task] += 1
        found = nearest_order([task for task in order if first[task] == task], users, missing)
        if found is None:
            return None
        number = [0] * count
        for at, one in enumerate(found):
            number[one] = at
        seconds = self.seconds[found]
        instructions = [self.instructions[one] for one in found]
        transfers = {number[one]: self.transfers[one] for one in found if one in self.transfers}
        exchanges = {number[one]: self.exchanges[one] for one in found if one in self.exchanges}
        for one, bundle in members.items():
            at = number[one]
            instructions[at] = tuple([k for task in bundle for k in self.instructions[task]])
            if at in transfers:
                transfers[at] = reduce(Transfer.beside, [self.transfers[task] for task in bundle])
            if len(bundle) > 1:
                seconds[at] = transfers[at].seconds if at in transfers else self.seconds[bundle].sum(axis=0)
                if at in transfers and self.delay is not None:
                    exchanges[at] = transfers[at].exchanges(self.lowering)
        return replace(
            self,
            machine=tuple([self.machine[one] for one in found]),
            seconds=seconds,
            makers=tuple([tuple([number[m] for m in makers[one]]) for one in found]),
            instructions=tuple(instructions),
            exchanges=exchanges,
            sent_in={number[task]: sent for task, sent in self.sent_in.items()},
            transfers=transfers,
            unbundled=self._unbundled(members.values()),
        )

    def _unbundled(self, joined: Iterable[Sequence[int]]) -> TaskGraph | None:
        """The graph that `joined` keeps as `unbundled`."""
        sent = any(len(tasks) > 1 and self.machine[tasks[0]] is Machine.LINK for tasks in joined)
        return self if sent and self.unbundled is None else self.unbundled

    def bundled(self, bundles: Iterable[Sequence[int]]) -> TaskGraph:
        """The same with bundles of collectives, of instructions by their places, that do not depend on one another."""
        if not (bundles := [*bundles]):
            return self
        task_of = {places[0]: task for task, places in enumerate(self.instructions) if places}
        found = self.joined(range(len(self.machine)), [[task_of[at] for at in places] for places in bundles])
        assert found is not None, "nothing lies between the collectives of a bundle"
        return found

    def contracted(self, *, few: int = _FEW, largest_part: float = _LARGEST_PART) -> TaskGraph:
        """The same with what is computed after the same collectives and before the same ones in few tasks: not in one,
        as what a collective makes ready need not wait for all of it. A task takes at most `largest_part` of all
        seconds; `few` tasks stay as they are."""
        count, computed = len(self.machine), (Machine.COMPUTE, Machine.LOCAL)
        if count <= few:
            return self
        bit = {task: 1 << n for n, task in enumerate(t for t in range(count) if self.machine[t] not in computed)}
        before, after = [0] * count, [0] * count
        for found, near, tasks in ((before, self.makers, range(count)), (after, self.users, reversed(range(count)))):
            for task in tasks:
                for other in near[task]:
                    found[task] |= found[other] | bit.get(other, 0)
        blocks: dict[tuple[int, int], list[int]] = {}
        for task in range(count):
            if task not in bit:
                blocks.setdefault((before[task], after[task]), []).append(task)
        most = largest_part * sum(self.longest)
        parts: list[list[int]] = []
        for block in blocks.values():
            held = np.inf
            for task in block:
                held += self.longest[task]
                if held > most:
                    parts.append([])
                    held = self.longest[task]
                parts[-1].append(task)
        for part in parts:
            # The first says what all of them take.
            part.sort(key=lambda task: -self.machine[task])
        found = self.joined(range(count), parts)
        assert found is not None, "nothing lies between the tasks of a part"
        return found


def nearest_order(order: Sequence[int], users: Sequence[Sequence[int]], missing: Sequence[int]) -> list[int] | None:
    """Tasks with each after those that it waits for, in the order that is nearest to the one given; None where some
    would wait for themselves. `users`, `missing`: of each task, those that wait for it and for how many it does."""
    place, missing = [-1] * len(missing), [*missing]
    for at, task in enumerate(order):
        place[task] = at
    found: list[int] = []
    late: list[int] = []
    for at, task in enumerate(order):
        if missing[task]:
            continue
        late.append(at)
        while late:
            one = order[heappop(late)]
            found.append(one)
            for user in users[one]:
                missing[user] -= 1
                # What comes after this place is yet to come.
                if not missing[user] and place[user] < at:
                    heappush(late, place[user])
    return found if len(found) == len(order) else None


def tasks_of(program: Program, sizes: Sizes, costs: CostModel, *, dominated: bool = True) -> TaskGraph:
    """The tasks of a program. Without `dominated` devices, those that take no longer over any task than another device
    of their kind are in its group: no makespan depends on them."""
    return _Builder(program, sizes, costs).graph(dominated)


class _Builder:
    def __init__(self, program: Program, sizes: Sizes, costs: CostModel) -> None:
        self.program, self.sizes, self.costs = program, sizes, costs
        self.index = ProgramIndex.of(program, sizes.classes, costs)
        self.accesses = self.index.accesses
        self.loads = load_seconds(self.index, sizes)
        self.fed = {
            value: costs.device_times(load.work, shares(costs, sizes, load.nodes))
            for value, load in self.index.feeds.items()
        }
        self.machine: list[Machine] = []
        self.seconds: list[list[float]] = []
        self.makers: list[tuple[int, ...]] = []
        self.instructions: list[tuple[int, ...]] = []
        self.transfers: dict[int, Transfer] = {}
        self.made: dict[Property, int] = {}
        self.readers: dict[Property, list[int]] = {}
        """Of each property as it was made last."""
        self.renewed: set[tuple[int, int]] = set()
        """A reader of a property, or what made it where nothing reads it, and the task that makes it again: a ZeRO-3
        gather before the backward pass. In a program's order a read is of what was made last."""
        self.sent_in: dict[int, float] = {}
        self.exchanges: dict[int, int] = {}

    def graph(self, dominated: bool) -> TaskGraph:
        leader = self._leaders(dominated)
        alone, group_of = np.unique(leader, return_inverse=True)
        computing = [seconds[alone].tolist() for seconds in self.loads]
        for value, seconds in self.fed.items():
            self.made[value, self.program.inputs[value]] = self._add(Machine.COMPUTE, seconds[alone].tolist(), (), ())
        at, source, load_of = 0, self.costs.graph, self.index.load_of
        instructions = self.program.instructions
        for item in instructions if len(source.regions) == 1 else nested(source, instructions).items:
            if isinstance(item, Block):
                places = range(at, at + sum(1 for _ in item.flat()))
                inside = self._together[places.start : places.stop]
                machine, seconds = Machine.EVERYTHING, [fsum(cost.seconds for cost in inside)] * alone.size
                self.sent_in[len(self.machine)] = fsum(c.seconds for c in inside if isinstance(c.instruction, Convert))
            else:
                places = (at,)
                if isinstance(item, Compute):
                    machine, seconds = Machine.COMPUTE, computing[load_of[at]]
                    if item.op in source.unsure:
                        uniform = self.costs.uniform_time(item.op)
                        seconds = [s + uniform for s in seconds]
                else:
                    sent = self._sent(item)
                    machine, seconds = Machine.LINK if sent else Machine.LOCAL, [sent] * alone.size
            self._run(places, machine, seconds)
            at += len(places)
        seconds = np.array(self.seconds).reshape(len(self.machine), alone.size)
        graph = tuple(self.machine), seconds, tuple(self.makers), tuple(self.instructions), group_of
        found = TaskGraph(
            *graph,
            self.costs.slowdown[alone],
            self.costs.delay[alone] if self.costs.delay.any() else None,
            self.exchanges,
            self.sent_in,
            self.transfers,
            self.costs.lowering,
        )
        bundles = bundles_of(self.program.instructions).values()
        kernels = found.joined(range(len(self.machine)), self._kernels(found))
        assert kernels is not None, "nothing lies between the ops of a kernel"
        return kernels.bundled(bundles)

    def _kernels(self, tasks: TaskGraph) -> Iterator[list[int]]:
        """Tasks that are one kernel, with slices between them, the one that ends it first."""
        machine, users = tasks.machine, tasks.users
        end: dict[int, int] = {}
        for task in reversed(self._inside_kernels()):
            inside, at = list[int](), task
            while len(takers := self._takers(at, users)) == 1 and (at == task or machine[at] is Machine.LOCAL):
                inside.append(at)
                (at,) = takers
            last = end.get(at, at)
            # What makes again what the kernel reads comes after it.
            after = all(user > last for one in inside for user in users[one] if (one, user) in self.renewed)
            if machine[at] is Machine.COMPUTE and after:
                end.update(dict.fromkeys(inside, last))
        members: dict[int, list[int]] = {}
        for task in sorted(end):
            members.setdefault(end[task], [end[task]]).append(task)
        return iter(members.values())

    def _takers(self, task: int, users: Sequence[Sequence[int]]) -> list[int]:
        """The tasks that read what one makes."""
        return [user for user in users[task] if (task, user) not in self.renewed]

    def _inside_kernels(self) -> list[int]:
        """Tasks that are an op of which nothing lies in memory, rising."""
        stored = self.costs.is_materialized
        computed = [t for t, m in enumerate(self.machine) if m is Machine.COMPUTE and self.instructions[t]]
        written = [self.accesses[self.instructions[task][0]][1] for task in computed]
        return [t for t, made in zip(computed, written, strict=True) if not any(stored(v) for v, _ in made)]

    def _sent(self, i: Convert) -> float:
        """Seconds of a conversion in no loop or branch on the link."""
        held, link = shares_of(self.sizes, i.value), self.costs.links[i.axis]
        sent = self.costs.sent_alone(i.value, i.source, i.target, i.axis, held, i.collective)
        if not sent.seconds:
            return 0.0
        kind, task = family(i, self.costs.graph.values[i.value].dtype), len(self.machine)
        if kind is not None:
            nbytes = self.costs.bytes_sent(i.value, i.source, i.target, i.axis, held.largest, i.collective)
            made = frozenset({(i.value, i.target)})
            alone = nbytes > self.costs.most_bundled(i.collective, i.axis)
            transfer = Transfer(kind, made, link, i.step, nbytes, sent.wire_bytes, sent.turned_s, alone)
            self.transfers[task] = transfer
        if self.costs.delay.any():
            self.exchanges[task] = (
                self.costs.exchanges(i.value, i.source, i.target, i.axis, held, i.collective)
                if kind is None
                else self.transfers[task].exchanges(self.costs.lowering)
            )
        return sent.seconds

    def _add(
        self, machine: Machine, seconds: list[float], makers: tuple[int, ...], instructions: tuple[int, ...]
    ) -> int:
        """A task; its number."""
        self.machine.append(machine)
        self.seconds.append(seconds)
        self.makers.append(makers)
        self.instructions.append(instructions)
        return len(self.machine) - 1

    def _run(self, places: Sequence[int], machine: Machine, seconds: list[float]) -> None:
        """A task of some of the program's instructions."""
        accesses, made = self.accesses, self.made
        needs: dict[int, None] = {}
        for k in places:
            for held in accesses[k][0]:
                maker = made.get(held)
                if maker is not None:
                    needs[maker] = None
        if self.costs.graph.ties:
            needs.update(dict.fromkeys([made[p] for p in self._carried_on(places) if p in made]))
        task = len(self.machine)
        for k in places:
            for held in accesses[k][1]:
                unread = [made[held]] if held in made else []
                for before in self.readers.pop(held, unread):
                    if before not in needs:
                        self.renewed.add((before, task))
                        needs[before] = None
        self._add(machine, seconds, tuple(needs), tuple(places))
        for k in places:
            for held in accesses[k][1]:
                made[held] = task
        for held in {held for k in places for held in accesses[k][0]}:
            self.readers.setdefault(held, []).append(task)

    def _carried_on(self, places: Sequence[int]) -> Iterator[Property]:
        """The properties that loops carry to the next iteration: no instruction reads them there, and they may have
        been made before the loop."""
        graph = self.costs.graph
        for i in (self.program.instructions[k] for k in places):
            if isinstance(i, Compute) and i.op in graph.ties:
                yield graph.ties[i.op], i.result_layout(0)

    @cached_property
    def _together(self) -> list[Cost]:
        """The cost of each instruction if all devices wait for the slowest."""
        return list(instruction_costs(self.program, self.sizes, self.costs))

    def _leaders(self, dominated: bool) -> list[int]:
        """Per device, the first device of its kind with equal seconds in everything; without `dominated` devices, one
        that dominates it and is not dominated itself."""
        columns = np.array([*self.loads, *self.fed.values(), self.costs.slowdown, self.costs.kind_of]).T
        first: dict[bytes, int] = {}
        found = [first.setdefault(column.tobytes(), device) for device, column in enumerate(columns)]
        if dominated:
            return found
        leaders, kind_of = [*first.values()], self.costs.kind_of
        over = {
            one: [two for two in leaders if kind_of[one] == kind_of[two] and (columns[one] <= columns[two]).all()]
            for one in leaders
        }
        last = {one: next(two for two in over[one] if over[two] == [two]) for one in leaders}
        return [last[one] for one in found]
