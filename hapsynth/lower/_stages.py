"""A program as stages and collectives: which local instructions need a switch, and what enters and leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hapsynth.graph import Graph
from hapsynth.instructions.factors import Factors
from hapsynth.instructions.program import Compute, Convert, Instruction, Program, Property, reads, writes
from hapsynth.instructions.rules.registry import is_fusible
from hapsynth.instructions.sizes import Sizes

# Made anew in every branch rather than passed into it: they cost nothing there and fuse with what reads them.
CHEAP = ("broadcast_in_dim", "iota", "convert_element_type", "reshape", "squeeze", "expand_dims", "transpose")


@dataclass(frozen=True, eq=False)
class Stage:
    """A run of local instructions between collectives.

    `before` and `after` are alike on all devices and run as they are; `switch` holds what is uneven and what lies
    between. `reads` enter the switch and `writes` leave it, stored. Device i (row-major in the mesh) takes branch
    `branch_of[i]`; `members[b]` are the devices of branch b, one branch per distinct tuple of shares.
    """

    before: tuple[Instruction, ...]
    switch: tuple[Instruction, ...] = ()
    after: tuple[Instruction, ...] = ()
    reads: tuple[Property, ...] = ()
    writes: tuple[Property, ...] = ()
    branch_of: tuple[int, ...] = ()
    members: tuple[tuple[int, ...], ...] = ()


def split(graph: Graph, program: Program, sizes: Sizes) -> list[Stage | Convert]:
    """The program's stages and the collectives between them, in its order, without what nothing needs."""
    runs: list[list[Instruction] | Convert] = []
    for i in _live(graph, program):
        if isinstance(i, Convert) and i.is_collective:
            runs.append(i)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(i)
        else:
            runs.append([i])
    needed = _outputs(graph, program)
    steps: list[Stage | Convert] = []
    for run in reversed(runs):
        if isinstance(run, Convert):
            steps.append(run)
            needed.update(reads(graph, run))
        else:
            steps.append(_stage(graph, program, sizes, run, needed))
            needed.update(p for i in run for p in reads(graph, i))
    return steps[::-1]


def _outputs(graph: Graph, program: Program) -> set[Property]:
    return {(v, layout) for v, layout in zip(graph.outputs, program.outputs) if isinstance(v, int) and layout}


def _live(graph: Graph, program: Program) -> list[Instruction]:
    """The instructions that make something new which an output needs; a collective may make it again."""
    held: set[Property] = set(program.inputs.items())
    first: list[Instruction] = []
    for i in program.instructions:
        made = writes(graph, i)
        if not held.issuperset(made) or (isinstance(i, Convert) and i.is_collective):
            first.append(i)
            held.update(made)
    needed = _outputs(graph, program)
    live: list[Instruction] = []
    for i in reversed(first):
        if not needed.isdisjoint(writes(graph, i)):
            live.append(i)
            needed.update(reads(graph, i))
    return live[::-1]


def _stage(graph: Graph, program: Program, sizes: Sizes, run: Sequence[Instruction], needed: set[Property]) -> Stage:
    ins = [reads(graph, i) for i in run]
    outs = [writes(graph, i) for i in run]
    uneven = [not all(sizes.is_even(*p) for p in (*a, *b)) for a, b in zip(ins, outs)]
    if not any(uneven):
        return Stage(tuple(run))
    producer: dict[Property, int] = {}
    uses: list[set[int]] = [set() for _ in run]
    below, above = list(uneven), list(uneven)
    for n in range(len(run)):
        for p in ins[n]:
            if p in producer:
                uses[producer[p]].add(n)
                below[n] = below[n] or below[producer[p]]
        for p in outs[n]:
            producer.setdefault(p, n)
    for n in reversed(range(len(run))):
        above[n] = above[n] or any(above[u] for u in uses[n])
    inside = [u or (b and a) for u, b, a in zip(uneven, below, above)]
    for n in reversed(range(len(run))):
        if not inside[n] and not below[n] and uses[n] and _is_cheap(graph, run[n]) and needed.isdisjoint(outs[n]):
            inside[n] = all(inside[u] for u in uses[n])
    numbers = range(len(run))
    pick = lambda keep: tuple(run[n] for n in numbers if keep(n))
    switch = pick(lambda n: inside[n])
    after = pick(lambda n: below[n] and not inside[n])
    made: dict[Property, None] = {}
    read: dict[Property, None] = {}
    for n in numbers:
        if inside[n]:
            read.update((p, None) for p in ins[n] if p not in made)
            made.update((p, None) for p in outs[n])
    wanted = needed.union(*(reads(graph, i) for i in after))
    branch_of, members = _branches(graph, program, sizes, switch)
    return Stage(
        before=pick(lambda n: not below[n] and not inside[n]),
        switch=switch,
        after=after,
        reads=tuple(read),
        writes=tuple(p for p in made if p in wanted),
        branch_of=branch_of,
        members=members,
    )


def _is_cheap(graph: Graph, i: Instruction) -> bool:
    return isinstance(i, Compute) and (is_fusible(graph.ops[i.op]) or graph.ops[i.op].name in CHEAP)


def _branches(
    graph: Graph, program: Program, sizes: Sizes, switch: Sequence[Instruction]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The devices, grouped by their shares of every class that the instructions cut."""
    used = {
        sizes.classes.of[(value, p.dim, axis)]
        for i in switch
        for value, layout in (*reads(graph, i), *writes(graph, i))
        for axis, p in enumerate(layout)
        if p.is_sharded
    }
    groups: dict[tuple[int, ...], list[int]] = {}
    lengths = [size for _, size in program.axes]
    for device, coords in enumerate(np.ndindex(*lengths)):
        key = tuple(sizes.shares[c][coords[sizes.classes.all[c].axis]] for c in sorted(used))
        groups.setdefault(key, []).append(device)
    branch_of = {device: b for b, devices in enumerate(groups.values()) for device in devices}
    return tuple(branch_of[d] for d in range(len(branch_of))), tuple(map(tuple, groups.values()))


def factor_shares(
    sizes: Sizes, factors: Factors, factor: int, node: tuple[int, int, int]
) -> tuple[list[int], list[int]]:
    """(lengths, starts) of each position's share of a factor, in units of the factor; `node` is any that it cuts."""
    c = sizes.classes.of[node]
    scale = factors.sizes[factor] // sizes.classes.all[c].units
    return [scale * s for s in sizes.shares[c]], [scale * s for s in sizes.offsets[c]]
