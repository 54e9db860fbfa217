"""Programs whose gathers start later, so that what they gather is held for a shorter time."""

from __future__ import annotations

from dataclasses import replace

from hapsynth.graph.ir import Graph
from hapsynth.instructions.program.program import Convert, Program, Property, reads, region_of, writes


def later(graph: Graph, program: Program, ahead: int) -> Program:
    """The same program with each gather by itself, at most so many instructions before its first use, or before the
    loop or branch that it is used in."""
    instructions, count = list(program.instructions), len(program.instructions)
    first_use, begins, maker = [count] * count, list(range(count)), dict[Property, int]()
    for at, i in enumerate(instructions):
        if at and region_of(graph, i) > 0 and region_of(graph, instructions[at - 1]) > 0:
            begins[at] = begins[at - 1]
        for needed in reads(graph, i):
            if needed in maker:
                first_use[maker[needed]] = min(first_use[maker[needed]], begins[at])
        maker.update((made, at) for made in writes(graph, i))
    key = [float(at) for at in range(count)]
    for at, i in enumerate(instructions):
        if isinstance(i, Convert) and not i.region and i.collective.joins and not i.collective.splits:
            instructions[at] = i._replace(bundle=0)
            due = first_use[at] - ahead
            key[at] = begins[due] - 0.5 if at < due < count else key[at]
    order = sorted(range(count), key=lambda at: (key[at], at))
    return replace(program, instructions=tuple(instructions[at] for at in order))
