"""Small uneven tensors that are gathered, or summed up, on all devices, each of which then takes its own part.

An all-to-all of unlike parts is a kernel per device and more to lay the parts out and join them, and XLA's CPU compiler
takes as long for each as for any other. Where no network lies between, sending so little to all costs nothing.
"""

from __future__ import annotations

from math import prod

from hapsynth._jax import is_extended, itemsize
from hapsynth.graph.ir import Graph
from hapsynth.instructions.layout import R
from hapsynth.instructions.program.program import Convert, Instruction, Program, Property, reads, region_of, writes
from hapsynth.instructions.program.sizes import Sizes


def gathered(graph: Graph, program: Program, sizes: Sizes, most: int) -> list[Instruction]:
    """The program's instructions, where collectives between unlike shares, of up to `most` bytes on all devices
    together, leave the whole, and a slice of it follows. Slices wait for the next local instruction, so that
    collectives still follow one another."""
    found: list[Instruction] = []
    waiting: list[Convert] = []
    whole: set[tuple[int, Property]] = set()
    region = 0

    def flush() -> None:
        found.extend(waiting)
        waiting.clear()

    for i in program.instructions:
        at = region_of(graph, i)
        needs = {p for s in waiting for p in writes(graph, s)}
        if at != region or not (isinstance(i, Convert) and i.is_collective) or not needs.isdisjoint(reads(graph, i)):
            flush()
        region = at
        if not (isinstance(i, Convert) and _is_small(graph, program, sizes, i, most)):
            found.append(i)
            continue
        middle = (R,)
        if (at, (i.value, middle)) not in whole:
            whole.add((at, (i.value, middle)))
            found.append(i._replace(target=middle, by="", bundle=0))
        waiting.append(i._replace(source=middle, by="", bundle=0))
    flush()
    return found


def _is_small(graph: Graph, program: Program, sizes: Sizes, i: Convert, most: int) -> bool:
    if len(program.axes) != 1 or is_extended(graph.values[i.value].dtype):
        return False
    if not (i.is_collective and i.target[i.axis].is_sharded):
        return False
    if sizes.is_even(i.value, i.source) and sizes.is_even(i.value, i.target):
        return False
    n = 1 if i.source[i.axis].is_partial else program.axes[i.axis][1]
    return n * prod(sizes.padded_shape(i.value, i.source)) * itemsize(graph.values[i.value].dtype) <= most
