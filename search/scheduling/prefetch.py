"""Programs whose gathers start some time before their use: what they gather is held meanwhile."""

from __future__ import annotations

from dataclasses import replace

from hapsynth.graph.ir import Graph
from hapsynth.instructions.program.program import Convert, Program, Property, reads, region_of, writes


def prefetched(graph: Graph, program: Program, ahead: int) -> Program:
    """The same program with each gather by itself, as far as what it gathers is there so many instructions before its
    first use, or before the loop or branch that it is used in."""
    instructions, count = list(program.instructions), len(program.instructions)
    inside = [region_of(graph, i) > 0 for i in instructions]
    begins, ends = list(range(count)), list(range(count))
    for at in range(1, count):
        begins[at] = begins[at - 1] if inside[at - 1] and inside[at] else at
    for at in reversed(range(count - 1)):
        ends[at] = ends[at + 1] if inside[at] and inside[at + 1] else at
    first_use, made_at, maker = [count] * count, [-1] * count, dict[Property, int]()
    for at, i in enumerate(instructions):
        for needed in reads(graph, i):
            if needed in maker:
                first_use[maker[needed]] = min(first_use[maker[needed]], begins[at])
                made_at[at] = max(made_at[at], ends[maker[needed]])
        maker.update((made, at) for made in writes(graph, i))
    key = [float(at) for at in range(count)]
    for at, i in enumerate(instructions):
        if isinstance(i, Convert) and not i.region and i.collective.joins and not i.collective.splits:
            instructions[at] = i._replace(bundle=0)
            if first_use[at] < count:
                # After what makes its operand, itself a gather or not.
                earliest = key[made_at[at]] + 0.25 if made_at[at] >= 0 else -1.0
                due = first_use[at] - ahead
                key[at] = max(begins[due] - 0.5 if due >= 0 else -1.0, earliest)
    order = sorted(range(count), key=lambda at: (key[at], at))
    return replace(program, instructions=tuple(instructions[at] for at in order))
