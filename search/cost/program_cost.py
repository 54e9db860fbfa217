"""The cost of a program at integer sizes: what the search minimizes, from the program itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import fsum
from typing import NamedTuple

import numpy as np

from hapsynth.graph.ir import Graph
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program.program import Compute, Convert, Instruction, Program, Property
from hapsynth.instructions.program.sizes import Node, Sizes
from hapsynth.search.cost.model import CostModel, Floats, held_fraction
from hapsynth.search.cost.network import Shares
from hapsynth.search.cost.program_index import Load, ProgramIndex, cut_nodes_of


class Cost(NamedTuple):
    """One instruction, all its runs in a step: seconds, and for a collective its bytes over the slowest link."""

    instruction: Instruction
    seconds: float
    wire_bytes: float


def largest_share(sizes: Sizes, value: int, dim: int, axes: tuple[int, ...], way: int = 0) -> float:
    """The fraction of a dimension that the largest shard holds; of an empty one 0."""
    lengths = sizes.lengths(value, dim, axes, way)
    return max(lengths) / max(sum(lengths), 1)


def padded_bytes(sizes: Sizes, value: int, layout: Layout) -> float:
    """Bytes of a tensor on one device, at the largest shard."""
    return sizes.graph.values[value].nbytes * held_fraction(layout, lambda *cut: largest_share(sizes, value, *cut))


def shares(costs: CostModel, sizes: Sizes, nodes: Sequence[Node]) -> list[Floats]:
    """Each device's share of some dimensions."""
    found: list[Floats] = []
    for node in nodes:
        units = np.array(sizes.units(*node)[1], dtype=np.float64)
        found.append((units / max(units.sum(), 1.0))[costs.position(node[2])])
    return found


def device_seconds(costs: CostModel, sizes: Sizes, instruction: Compute) -> Floats:
    """What each device takes over an op, one run: float64 [devices]."""
    work = costs.work(instruction.op, instruction.triples)
    return costs.device_times(work, shares(costs, sizes, cut_nodes_of(costs, instruction)))


def load_seconds(index: ProgramIndex, sizes: Sizes) -> list[Floats]:
    """What each device takes over each of a program's loads, one run: float64 [devices]."""
    costs, of_class = index.costs, dict[object, list[Floats]]()

    def held(load: Load) -> list[Floats]:
        alike = tuple((sizes.classes.of[node], node[2]) for node in load.nodes)
        if alike not in of_class:
            of_class[alike] = shares(costs, sizes, load.nodes)
        return of_class[alike]

    return list(costs.each_device_times([(load.work, held(load)) for load in index.loads]))


def conversion_cost(costs: CostModel, sizes: Sizes, i: Convert) -> tuple[float, float]:
    """(seconds, bytes over the slowest link) of one run of a conversion."""
    return costs.conversion(i.value, i.source, i.target, i.axis, shares_of(sizes, i.value), i.collective)


def shares_of(sizes: Sizes, value: int) -> Shares:
    """How the dimensions of a value are cut."""

    def each(dim: int, axes: tuple[int, ...], way: int) -> Floats:
        lengths = np.array(sizes.lengths(value, dim, axes, way), dtype=np.float64)
        return lengths / max(lengths.sum(), 1.0)

    return Shares(lambda *cut: largest_share(sizes, value, *cut), each)


def instruction_costs(program: Program, sizes: Sizes, costs: CostModel) -> Iterator[Cost]:
    """The cost of every instruction, in order."""
    index, unsure = ProgramIndex.of(program, sizes.classes, costs), costs.graph.unsure
    known: dict[object, float] = {}
    number: dict[object, int] = {}
    alike = [
        number.setdefault((c.axes, held), len(number)) for c, held in zip(sizes.classes.all, sizes.shares, strict=True)
    ]

    def time(load: Load) -> float:
        # Nodes that as many axes cut, of classes that are cut alike, have the same shares.
        key = (load.work, *[(alike[c], depth) for c, depth in load.cuts])
        if key not in known:
            known[key] = costs.time(load.work, shares(costs, sizes, load.nodes))
        return known[key]

    times = list(map(time, index.loads))
    for i, load, runs in zip(program.instructions, index.load_of, index.runs, strict=True):
        if isinstance(i, Convert):
            seconds, wire = conversion_cost(costs, sizes, i)
            yield Cost(i, runs * seconds, runs * wire)
        else:
            yield Cost(i, runs * (times[load] + (costs.uniform_time(i.op) if i.op in unsure else 0.0)), 0.0)


def by_cheapest_steps(program: Program, sizes: Sizes, costs: CostModel, *, bundled: bool = False) -> Program:
    """The program with each conversion by the step that costs the least at these sizes, the first of those that cost
    the same; itself where they are those that it has. `bundled`: by the one that adds the least to those that it can go
    with, so that alike conversions take the same one and do go together."""

    def cost(i: Convert) -> float:
        if bundled:
            return costs.least_in_bundle(i.value, i.source, i.target, i.axis, shares_of(sizes, i.value), i.collective)
        return conversion_cost(costs, sizes, i)[0]

    def cheapest(i: Convert) -> Convert:
        steps = costs.steps(i.source, i.target, i.axis)
        return i if steps == (i.collective,) else min((i.with_step(step) for step in steps), key=cost)

    instructions = tuple([cheapest(i) if isinstance(i, Convert) else i for i in program.instructions])
    return (
        program
        if instructions == program.instructions
        else replace(program, instructions=instructions, hosts=costs.hosts)
    )


def without_unread(program: Program, graph: Graph) -> Program:
    """The program without conversions that are made again before anything reads them, as those of uses that gather
    anew each (ZeRO-3) where the order has them side by side; itself where there are none."""
    around = {*graph.ties.values()}
    waiting: dict[Property, tuple[int, int]] = {}
    unread: set[int] = set()
    for at, (instruction, (needs, results)) in enumerate(zip(program.instructions, program.accesses(graph))):
        for held in needs:
            waiting.pop(held, None)
        # What goes around a loop is read by its next iteration.
        if isinstance(instruction, Convert) and instruction.value not in around:
            (made,), region = results, instruction.region
            before, there = waiting.get(made, (at, region))
            # What a branch or a loop makes again, others may read as it was.
            if before < at and there == region == graph.home[instruction.value]:
                unread.add(before)
            waiting[made] = at, region
    kept = tuple([i for at, i in enumerate(program.instructions) if at not in unread])
    return replace(program, instructions=kept) if unread else program


def in_fewest_collectives(program: Program, costs: CostModel) -> Program:
    """The program without conversions that nothing reads, and with every two collectives of a value in a row as one,
    where there is one and nothing else reads what is between: an all-reduce for a reduce-scatter and an all-gather;
    itself where there are none. By itself the one may take longer, and among others like it less: they go together."""
    program = without_unread(program, costs.graph)
    graph, around = costs.graph, {*costs.graph.ties.values()}
    readers: dict[Property, list[int]] = {}
    for at, (needs, _) in enumerate(program.accesses(graph)):
        for held in needs:
            readers.setdefault(held, []).append(at)
    ends = {*zip(graph.outputs, program.outputs, strict=True)}
    instructions: list[Instruction | None] = [*program.instructions]
    for at in range(len(instructions)):
        first = instructions[at]
        if not isinstance(first, Convert) or first.value in around or (first.value, first.target) in ends:
            continue
        nexts = readers.get((first.value, first.target), [])
        second = instructions[nexts[0]] if len(nexts) == 1 else None
        if (
            isinstance(second, Convert)
            and (second.axis, second.region) == (first.axis, first.region)
            and first.is_collective
            and second.is_collective
            and costs.steps(first.source, second.target, first.axis)
        ):
            instructions[at] = Convert(first.value, first.axis, first.source, second.target, first.region)
            instructions[nexts[0]] = None
    kept = tuple(i for i in instructions if i is not None)
    return program if len(kept) == len(instructions) else replace(program, instructions=kept, hosts=costs.hosts)


def feed_costs(program: Program, sizes: Sizes, costs: CostModel) -> Iterator[tuple[int, float]]:
    """(argument, seconds) to put each argument that is new at every step into the devices' memory."""
    for value, load in ProgramIndex.of(program, sizes.classes, costs).feeds.items():
        yield value, costs.time(load.work, shares(costs, sizes, load.nodes))


def program_cost(program: Program, sizes: Sizes, costs: CostModel) -> float:
    """Seconds per step: the sum over instructions and fed arguments of the slowest device's time."""
    # `sum` rounds otherwise from Python 3.12 on.
    ran = fsum(c.seconds for c in instruction_costs(program, sizes, costs))
    return ran + fsum(seconds for _, seconds in feed_costs(program, sizes, costs))
