"""A program as stages and collectives: which local instructions need a switch, and what enters and leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TypeGuard

import numpy as np

from hapsynth.graph.ir import COND_JOIN, LOOP_CARRY, LOOP_TEST, SCAN_SLICE, SCAN_STACK, Boundary, Graph, Literal, Region
from hapsynth.instructions.factors import Factors
from hapsynth.instructions.program.program import (
    Block,
    Compute,
    Convert,
    Instruction,
    Program,
    Property,
    nested,
    reads,
    writes,
)
from hapsynth.instructions.program.sizes import Node, Sizes, layout_nodes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.rules.registry import is_fusible
from hapsynth.instructions.staging.gathered import gathered
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.instructions.staging.padded import padded
from hapsynth.instructions.staging.rematerialize import needed_of, producers, remade


@dataclass(frozen=True, eq=False)
class Stage:
    """A run of local instructions between collectives.

    `before` and `after` are alike on all devices, on padded shards where these are not; `switch` holds what is uneven
    otherwise and what lies between. `reads` enter the switch and `writes` leave it, stored. Device i (row-major in the
    mesh) takes branch `branch_of[i]`; `members[b]` are the devices of branch b, one branch per distinct tuple of
    shares.
    """

    before: tuple[Instruction, ...]
    switch: tuple[Instruction, ...] = ()
    after: tuple[Instruction, ...] = ()
    reads: tuple[Property, ...] = ()
    writes: tuple[Property, ...] = ()
    branch_of: tuple[int, ...] = ()
    members: tuple[tuple[int, ...], ...] = ()

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """All of them, in an order in which they can run."""
        return (*self.before, *self.switch, *self.after)


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan or while loop. `initial`: what each carried value starts from, a literal or a property; `carried`: as the
    body finds it; `onward`: what the next iteration finds; `final`: what is left. A scan has `parts` of its `whole`
    inputs and stacks `pieces` to `stacked`; a while loop goes on while `goes_on`, which `test` computes of what is
    carried, `tested` there."""

    region: Region
    initial: tuple[Property | Literal, ...]
    carried: tuple[Property, ...]
    onward: tuple[Property, ...]
    final: tuple[Property, ...]
    whole: tuple[Property, ...]
    parts: tuple[Property, ...]
    pieces: tuple[Property, ...]
    stacked: tuple[Property, ...]
    body: tuple[Step, ...]
    test: tuple[Step, ...] = ()
    tested: tuple[Property, ...] = ()
    goes_on: Property | None = None
    unsure: bool = False


@dataclass(frozen=True, eq=False)
class Cond:
    """Branches, of which `number` picks one. `given[b]` is what branch b makes, `results` what that then is."""

    number: Property | Literal
    branches: tuple[tuple[Step, ...], ...]
    given: tuple[tuple[Property, ...], ...]
    results: tuple[Property, ...]
    unsure: bool = False


Step = Stage | Convert | Loop | Cond


def split(
    graph: Graph,
    program: Program,
    sizes: Sizes,
    options: LoweringOptions,
    *,
    switches: bool = False,
    near: bool = False,
) -> list[Step]:
    """The program's stages and what lies between them, in its order, without what nothing needs.

    With `switches`, as one program for all devices: a stage makes again what is cheap rather than takes it from an
    earlier one, and what is small is no part of its switch but computed on padded shards. `near`: no network lies
    between the devices, and small tensors are gathered.
    """
    outputs = {(v, layout) for v, layout in zip(graph.outputs, program.outputs) if isinstance(v, int) and layout}
    most = options.gathered_bytes
    instructions = gathered(graph, program, sizes, most) if switches and near else program.instructions
    block = _live(graph, nested(graph, instructions), set(program.inputs.items()), outputs)
    return _Splitter(graph, program, sizes, options, switches).steps(block, outputs)


def _end_needs(graph: Graph, block: Block) -> set[Property]:
    """What must hold at the end of a region for what leaves it or goes on to the next iteration."""
    needed: set[Property] = set()
    for i in block.items:
        if isinstance(i, Compute):
            primitive = graph.ops[i.op].primitive
            if primitive == LOOP_CARRY:
                needed.add((graph.ties[i.op], i.result_layout(0)))
            elif primitive in (SCAN_STACK, LOOP_TEST, COND_JOIN):
                needed.update(reads(graph, i))
    return needed


def _reads_within(graph: Graph, block: Block) -> set[Property]:
    """What a region, with those inside it, may read from around it."""
    found = {p for i in block.flat() for p in reads(graph, i)} | _end_needs(graph, block)
    for i in block.items:
        if isinstance(i, Block):
            found |= _reads_within(graph, i)
    return found


def _live(graph: Graph, block: Block, held: set[Property], needed: set[Property]) -> Block:
    """The instructions that make something new which is needed; a collective may make it again."""
    around, held = held, set(held)
    first: list[Instruction | Block] = []
    for i in block.items:
        if isinstance(i, Block):
            # What the joins of a cond read, its branches must make.
            joined = _end_needs(graph, block) if graph.regions[i.region].kind == "branch" else set[Property]()
            # A test finds nothing that its loop's body makes.
            at_hand = around if graph.regions[i.region].kind == "test" else held
            inner = _live(graph, i, at_hand, _end_needs(graph, i) | joined)
            first.append(inner)
            held.update(p for j in inner.items if _is_boundary(j, graph) for p in writes(graph, j))
            continue
        made = writes(graph, i)
        if not held.issuperset(made) or _is_boundary(i, graph) or (isinstance(i, Convert) and i.is_collective):
            first.append(i)
            held.update(made)
    needed = needed | _end_needs(graph, block)
    live: list[Instruction | Block] = []
    for i in reversed(first):
        if isinstance(i, Block):
            live.append(i)
            needed |= _reads_within(graph, i)
        elif _is_boundary(i, graph) or not needed.isdisjoint(writes(graph, i)):
            live.append(i)
            needed.update(reads(graph, i))
    return Block(block.region, tuple(live[::-1]))


def _is_boundary(i: Instruction | Block, graph: Graph) -> TypeGuard[Compute]:
    return isinstance(i, Compute) and isinstance(graph.ops[i.op].primitive, Boundary)


class _Splitter:
    def __init__(self, graph: Graph, program: Program, sizes: Sizes, options: LoweringOptions, switches: bool) -> None:
        self.graph, self.program, self.sizes = graph, program, sizes
        self.options, self.switches = options, switches
        self.table = FactorTable(graph)

    def steps(self, block: Block, needed: set[Property]) -> list[Step]:
        """A region's steps; `needed` of what it makes is read after it."""
        graph = self.graph
        runs: list[list[Instruction] | Convert | Block] = []
        for i in block.items:
            if _is_boundary(i, graph):
                continue
            if isinstance(i, Block) or (isinstance(i, Convert) and i.is_collective):
                runs.append(i)
            elif runs and isinstance(runs[-1], list):
                runs[-1].append(i)
            else:
                runs.append([i])
        needed = needed | _end_needs(graph, block)
        made = cache(lambda: producers(graph, [run if isinstance(run, list) else () for run in runs]))
        steps: list[Step] = []
        for n, run in reversed([*enumerate(runs)]):
            if isinstance(run, Convert):
                steps.append(run)
                needed.update(reads(graph, run))
            elif isinstance(run, Block):
                if graph.regions[run.region].kind not in ("test", "branch"):
                    steps.append(self.region(run))
                needed |= _reads_within(graph, run)
            else:
                if self.switches:
                    run = remade(graph, self.sizes, made, needed_of(graph, run, needed), n, needed)
                alike = [False] * len(run)
                if self.switches:
                    alike = padded(graph, self.sizes, self.table, run, self.options)
                steps.append(_stage(graph, self.program, self.sizes, run, needed, alike))
                needed.update(p for i in run for p in reads(graph, i))
        return steps[::-1]

    def operand(self, i: Compute, position: int = 0) -> Property:
        value = self.graph.ops[i.op].operands[position]
        assert isinstance(value, int), f"operand {position} of {i} is a literal"
        return value, i.operand_layout(position)

    def result(self, i: Compute, position: int = 0) -> Property:
        return self.graph.ops[i.op].results[position], i.result_layout(position)

    def initial(self, i: Compute) -> Property | Literal:
        value = self.graph.ops[i.op].operands[0]
        return value if isinstance(value, Literal) else self.operand(i)

    def region(self, block: Block) -> Loop | Cond:
        graph = self.graph
        edge = [i for i in block.items if _is_boundary(i, graph)]
        tests = [i for i in block.items if isinstance(i, Block) and graph.regions[i.region].kind == "test"]
        asks = [i for b in tests for i in b.items if _is_boundary(i, graph)]
        unsure = any(i.op in graph.unsure for i in (*edge, *asks))
        if graph.regions[block.region].kind == "cond":
            return self.cond(block, edge, unsure)
        carries, slices, stacks = (
            [i for i in edge if graph.ops[i.op].primitive == p] for p in (LOOP_CARRY, SCAN_SLICE, SCAN_STACK)
        )
        source, result = self.operand, self.result
        return Loop(
            region=graph.regions[block.region],
            initial=tuple(self.initial(i) for i in carries),
            carried=tuple(result(i) for i in carries),
            onward=tuple((graph.ties[i.op], i.result_layout(0)) for i in carries),
            final=tuple(result(i, 1) for i in carries),
            whole=tuple(source(i) for i in slices),
            parts=tuple(result(i) for i in slices),
            pieces=tuple(source(i) for i in stacks),
            stacked=tuple(result(i) for i in stacks),
            body=tuple(self.steps(block, set())),
            test=tuple(s for b in tests for s in self.steps(b, set())),
            tested=tuple(result(i, 2) for i in carries) if tests else (),
            goes_on=source(asks[0]) if asks else None,
            unsure=unsure,
        )

    def cond(self, block: Block, joins: Sequence[Compute], unsure: bool) -> Cond:
        graph = self.graph
        number = graph.ops[joins[0].op].operands[0]
        branches = graph.branches(block.region)
        given = [tuple(self.operand(i, n + 1) for i in joins) for n in range(len(branches))]
        return Cond(
            number=number if isinstance(number, Literal) else self.operand(joins[0]),
            branches=tuple(tuple(self.steps(block.inner(r), set(g))) for r, g in zip(branches, given, strict=True)),
            given=tuple(given),
            results=tuple(self.result(i) for i in joins),
            unsure=unsure,
        )


def _stage(
    graph: Graph,
    program: Program,
    sizes: Sizes,
    run: Sequence[Instruction],
    needed: set[Property],
    alike: Sequence[bool],
) -> Stage:
    """`alike`: what all devices compute on padded shards."""
    ins = [reads(graph, i) for i in run]
    outs = [writes(graph, i) for i in run]
    uneven = [not (same or all(sizes.is_even(*p) for p in (*a, *b))) for a, b, same in zip(ins, outs, alike)]
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
    return isinstance(i, Compute) and is_fusible(graph.ops[i.op])


def _branches(
    graph: Graph, program: Program, sizes: Sizes, switch: Sequence[Instruction]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The devices, grouped by their shares of every class that the instructions cut."""
    used = {
        (sizes.classes.of[node], node[2]): node
        for i in switch
        for value, layout in (*reads(graph, i), *writes(graph, i))
        for node in layout_nodes(value, layout)
    }
    cuts = [(axes, sizes.units(*node)[1]) for (_, axes), node in sorted(used.items())]
    groups: dict[tuple[int, ...], list[int]] = {}
    lengths = [size for _, size in program.axes]
    for device, coords in enumerate(np.ndindex(*lengths)):
        key = tuple(shares[sizes.position(axes, coords)] for axes, shares in cuts)
        groups.setdefault(key, []).append(device)
    branch_of = {device: b for b, devices in enumerate(groups.values()) for device in devices}
    return tuple(branch_of[d] for d in range(len(branch_of))), tuple(map(tuple, groups.values()))


def factor_shares(sizes: Sizes, factors: Factors, factor: int, node: Node) -> tuple[list[int], list[int]]:
    """(lengths, starts) of each position's share of a factor, in units of the factor; `node` is any that it cuts."""
    _, shares = sizes.units(*node)
    scale = factors.sizes[factor] // sum(shares)
    return [scale * s for s in shares], [scale * s for s in accumulate(shares[:-1], initial=0)]
