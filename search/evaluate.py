"""The cost of a program at integer sizes: what the search minimizes, from the program itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hapsynth.instructions.program import Compute, Convert, Instruction, Program
from hapsynth.instructions.sizes import Sizes, cut_nodes
from hapsynth.search.costs import CostModel


@dataclass(frozen=True, slots=True)
class Cost:
    """One instruction, all its runs in a step: seconds, and for a collective its bytes over the slowest link."""

    instruction: Instruction
    seconds: float
    wire_bytes: float


def largest_share(sizes: Sizes, value: int, dim: int, axis: int) -> float:
    """The fraction of a dimension that the largest shard holds."""
    lengths = sizes.lengths(value, dim, (axis,))
    return max(lengths) / sum(lengths)


def class_of_triple(costs: CostModel, sizes: Sizes, instruction: Compute) -> int | None:
    """The dimension class that an op's factor cuts."""
    triple = instruction.triples[0]
    if triple.factor is None:
        return None
    for _, nodes in cut_nodes(costs.graph, instruction.op, costs.table[instruction.op], (triple,)):
        return sizes.classes.of[nodes[0]]
    return None


def instruction_costs(program: Program, sizes: Sizes, costs: CostModel) -> Iterator[Cost]:
    """The cost of every instruction, in order."""
    fractions = [np.array(s, dtype=np.float64) / c.units for c, s in zip(sizes.classes.all, sizes.shares, strict=True)]
    for i in program.instructions:
        if isinstance(i, Convert):
            nbytes = costs.graph.values[i.value].nbytes
            cut = [largest_share(sizes, i.value, p.dim, 0) for p in (i.source[0], i.target[0]) if p.is_sharded]
            runs, wire = costs.graph.runs[i.region], costs.wire_bytes(i.step, nbytes, *cut)
            yield Cost(i, runs * costs.convert_time(i.step, nbytes, *cut), runs * wire)
        else:
            c = class_of_triple(costs, sizes, i)
            work, runs = costs.work(i.op, i.triples[0]), costs.graph.runs[costs.graph.ops[i.op].region]
            seconds = costs.time(work, None if c is None else fractions[c]) + costs.uniform_time(i.op)
            yield Cost(i, runs * seconds, 0.0)


def feed_costs(program: Program, sizes: Sizes, costs: CostModel) -> Iterator[tuple[int, float]]:
    """(argument, seconds) to put each argument that is new at every step into the devices' memory."""
    for value, (placement,) in program.inputs.items():
        work = costs.feed_work(value, placement)
        if work is not None:
            c = sizes.classes.of[(value, placement.dim, (0,))] if placement.is_sharded else None
            shares = None if c is None else np.array(sizes.shares[c]) / sizes.classes.all[c].units
            yield value, costs.time(work, shares)


def program_cost(program: Program, sizes: Sizes, costs: CostModel) -> float:
    """Seconds per step: the sum over instructions and fed arguments of the slowest device's time."""
    ran = sum(c.seconds for c in instruction_costs(program, sizes, costs))
    return ran + sum(seconds for _, seconds in feed_costs(program, sizes, costs))
