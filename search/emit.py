"""An assignment of a formulated problem as a `Program`, in an order with few and large stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from hapsynth.graph import Boundary, Graph
from hapsynth.instructions.factors import Triples
from hapsynth.instructions.fusion import widens as makes_much
from hapsynth.instructions.layout import Layout, R, is_partial
from hapsynth.instructions.program import Compute, Convert, Instruction, Program, reads, region_of
from hapsynth.search.formulate import Formulator, Hop
from hapsynth.search.structure import Availability


class Step(NamedTuple):
    """An instruction and the steps whose results it reads."""

    instruction: Instruction
    needs: tuple[int, ...]


class Emitter:
    """Turns choices into steps. A tensor is known by the step that makes it (-1: an input)."""

    def __init__(self, formulator: Formulator, assignment: Sequence[int]) -> None:
        self.formulator, self.graph = formulator, formulator.graph
        self.structure = formulator.structure
        self.states = [c.state(s) for c, s in zip(self.structure.choices, assignment)]
        self.steps: list[Step] = []
        self.op_steps: dict[int, int] = {}
        self.tensors: dict[int, dict[Layout, int]] = {}
        self.ends: tuple[Layout | None, ...] = ()

    def run(self, axes: tuple[tuple[str, int], ...]) -> Program:
        """The program, in few and large stages."""
        self.build()
        return self.ordered(axes)

    def ordered(self, axes: tuple[tuple[str, int], ...], *, sparing: bool = False) -> Program:
        """What was built as a program, in few and large stages or in the order that spares memory."""
        inputs = {v: self.available(v).computed for v in self.graph.sources}
        order = schedule(self.graph, self.steps, sparing=sparing)
        return Program(axes, inputs, tuple(self.steps[i].instruction for i in order), self.ends)

    def build(self) -> None:
        graph = self.graph
        for value in graph.sources:
            self.make(value, -1)
        for op in graph.ops:
            compute = Compute(op.index, self.triples(op.index))
            needs = [
                self.tensor(value, layout, graph.read_in(op, position))
                for (value, layout), (position, _) in zip(reads(graph, compute), op.value_operands, strict=True)
            ]
            self.add(compute, needs)
            for value in op.results:
                self.make(value, self.op_steps[op.index])
        for op, value in graph.ties.items():
            carried, loop = Compute(op, self.triples(op)).result_layout(0), graph.ops[op].region
            made_by = self.tensor(value, carried, loop)
            if made_by < 0:
                continue
            made_in = region_of(graph, self.steps[made_by].instruction)
            if made_in == graph.home[value]:
                self.tensors[value].setdefault(carried, made_by)
            if loop not in graph.around(made_in):
                # No op of the body reads what comes from around the loop: its first one waits for it.
                at = self.op_steps[op]
                self.steps[at] = self.steps[at]._replace(needs=(*self.steps[at].needs, made_by))
        self.ends = self.outputs()

    def triples(self, op: int) -> Triples:
        triples = self.states[self.structure.op_variable[op]].triples
        assert triples is not None
        return triples

    def available(self, value: int) -> Availability:
        available = self.states[self.structure.value_variable[value]].availability
        assert available is not None
        return available

    def add(self, instruction: Instruction, needs: Iterable[int]) -> int:
        self.steps.append(Step(instruction, tuple([n for n in needs if n >= 0])))
        if isinstance(instruction, Compute):
            self.op_steps[instruction.op] = len(self.steps) - 1
        return len(self.steps) - 1

    def convert(self, value: int, hop: Hop, made_by: int, region: int) -> int:
        source, target, axis = hop
        return self.add(Convert(value, axis, source, target, region), (made_by,))

    def make(self, value: int, step: int) -> None:
        """A value exists: its shared conversions follow."""
        available = self.available(value)
        tensors = self.tensors[value] = {available.computed: step}
        if not available.targets:
            return
        for hop in self.formulator.offer(value, available).hops:
            tensors[hop[1]] = self.convert(value, hop, tensors[hop[0]], self.graph.home[value])

    def tensor(self, value: int, layout: Layout, region: int = 0) -> int:
        """The step that makes a value in a layout for a use in a region; converts where it is not there yet.

        What follows by local steps is made once, where the value lives; for anything else the next use converts again.
        """
        tensors = self.tensors[value]
        if layout in tensors:
            return tensors[layout]
        ways = self.formulator.conversions(value)
        number, free = ways.layouts.number, ways.layouts.free
        near = [t for t in tensors if free[number[t], number[layout]]]
        source = ways.nearest(near or tensors, layout)
        place = self.graph.home[value] if near else self.graph.place_of_conversion(value, region)
        path = ways.path(source, layout)
        assert path is not None, (value, source, layout)
        step = tensors[source]
        for hop in path:
            step = self.convert(value, hop, step, place)
            if near:
                tensors.setdefault(hop[1], step)
        return step

    def outputs(self) -> tuple[Layout | None, ...]:
        graph = self.graph
        due = dict(self.structure.restriction.ends)
        due |= {target: self.available(graph.inputs[source]).computed for source, target in graph.carry}
        found: list[Layout | None] = []
        for position, value in enumerate(graph.outputs):
            if not isinstance(value, int):
                found.append(None)
                continue
            layout = due[position] if position in due else self._plain_output(value)
            made_by = self.tensor(value, layout)
            self.tensors[value].setdefault(layout, made_by)
            found.append(layout)
        return tuple(found)

    def _plain_output(self, value: int) -> Layout:
        """Whole where it is there already, else as it lies; a partial one by its cheapest conversion."""
        tensors = self.tensors[value]
        whole = (R,) * self.structure.axes
        if whole in tensors:
            return whole
        there = sorted(t for t in tensors if not is_partial(t))
        if there:
            return there[0]
        targets = self.formulator.output_layouts(value)
        times = [(min(self.formulator.path_time(value, t, o) for t in tensors), i) for i, o in enumerate(targets)]
        return targets[min(times)[1]]


def schedule(graph: Graph, steps: Sequence[Step], *, sparing: bool = False) -> list[int]:
    """An order of the steps with few, large stages, or that spares memory; those of a region stand together."""
    return _Scheduler(graph, steps, sparing).order(0)


class _Node(NamedTuple):
    """What a region's order deals with: one step, or all steps of a region inside it."""

    steps: tuple[int, ...]
    needs: tuple[int, ...]
    """Other nodes of the same region."""
    collective: bool
    gathers: bool
    reduces: bool
    movable: bool
    """May wait until its first use, where it needs inputs alone."""
    widens: bool
    """Makes much out of little, in whatever kernel reads it: until then, the little is held."""

    @property
    def converts(self) -> bool:
        return self.gathers or self.reduces


class _Scheduler:
    def __init__(self, graph: Graph, steps: Sequence[Step], sparing: bool) -> None:
        self.graph, self.steps, self.sparing = graph, steps, sparing
        self.members: dict[int, list[int]] = {r.index: [] for r in graph.regions}
        self.inside: dict[int, list[int]] = {r.index: [] for r in graph.regions}
        for r in graph.regions[1:]:
            self.inside[r.parent].append(r.index)
        for i, step in enumerate(steps):
            self.members[region_of(graph, step.instruction)].append(i)

    def order(self, region: int) -> list[int]:
        """Steps of a region and those inside it, in order."""
        nodes = self._nodes(region)
        ranked = self._late(nodes) if self.sparing else self._staged(nodes)
        return [s for i in ranked for s in nodes[i].steps]

    def _late(self, nodes: Sequence[_Node]) -> list[int]:
        """Ops in source order, a reduction right after what it reduces, any other conversion right before the first
        that needs it."""
        users: list[list[int]] = [[] for _ in nodes]
        for i, node in enumerate(nodes):
            for n in node.needs:
                users[n].append(i)
        found: dict[int, None] = {}
        for start in [*(i for i, n in enumerate(nodes) if not n.converts), *range(len(nodes))]:
            waiting = [start]
            while waiting:
                i = waiting[-1]
                missing = [n for n in nodes[i].needs if n not in found] if i not in found else []
                if missing:
                    waiting += missing[::-1]
                    continue
                waiting.pop()
                if i not in found:
                    found[i] = None
                    waiting += [u for u in reversed(users[i]) if nodes[u].reduces and u not in found]
        return list(found)

    def _staged(self, nodes: Sequence[_Node]) -> list[int]:
        """Few, large stages.

        The stage of a node is the number of rounds of collectives that must come before it; a region inside counts
        as one. Reductions run as soon as they can, which frees the partial; gathers as late as they can, and so do
        ops that depend on inputs alone, and broadcasts: no stage hands over what another can make out of less.
        """
        n = len(nodes)
        users: list[list[int]] = [[] for _ in range(n)]
        stage = [0] * n
        early = [False] * n
        in_order = self._sorted(nodes)
        for i in in_order:
            node = nodes[i]
            early[i] = node.movable and all(early[j] for j in node.needs)
            for j in node.needs:
                users[j].append(i)
                stage[i] = max(stage[i], stage[j] + (1 if nodes[j].collective and not node.collective else 0))
        for i in reversed(in_order):
            node = nodes[i]
            if users[i] and (early[i] or node.gathers or node.widens):
                stage[i] = max(
                    stage[i],
                    min(stage[j] - (1 if node.collective and not nodes[j].collective else 0) for j in users[i]),
                )
        position = {i: p for p, i in enumerate(in_order)}
        # Of collectives that wait for others of their stage, those that wait for as many run together.
        depth = [0] * n
        for i in in_order:
            before = (j for j in nodes[i].needs if nodes[j].collective and stage[j] == stage[i])
            depth[i] = max((depth[j] + 1 for j in before), default=0)
        return sorted(range(n), key=lambda i: (stage[i], nodes[i].collective, depth[i], position[i]))

    def _nodes(self, region: int) -> list[_Node]:
        groups: list[tuple[int, ...]] = [(i,) for i in self.members[region]]
        groups += [tuple(b) for r in self.inside[region] if (b := self.order(r))]
        groups.sort(key=min)
        of = {s: n for n, group in enumerate(groups) for s in group}
        several = len(self.members) > 1
        nodes: list[_Node] = []
        for n, group in enumerate(groups):
            needs = set(self.steps[n].needs)
            if several:
                needs = {of[j] for s in group for j in self.steps[s].needs if j in of} - {n}
            i = self.steps[group[0]].instruction
            block = region_of(self.graph, i) != region
            collective = block or (isinstance(i, Convert) and i.is_collective)
            converts = not block and isinstance(i, Convert)
            reduces = converts and isinstance(i, Convert) and i.source[i.axis].is_partial
            gathers = converts and not reduces
            enters = isinstance(i, Compute) and isinstance(self.graph.ops[i.op].primitive, Boundary)
            movable = not collective and not enters
            widens = movable and isinstance(i, Compute) and makes_much(self.graph, self.graph.ops[i.op])
            nodes.append(_Node(group, tuple(sorted(needs)), collective, gathers, reduces, movable, widens))
        return nodes

    @staticmethod
    def _sorted(nodes: Sequence[_Node]) -> list[int]:
        """Every node after those that it needs, else as they come: a block may need a step after its own first."""
        if all(node.needs[-1] < i for i, node in enumerate(nodes) if node.needs):
            return list(range(len(nodes)))
        sorter = TopologicalSorter({i: node.needs for i, node in enumerate(nodes)})
        sorter.prepare()
        ready, found = list(sorter.get_ready()), list[int]()
        heapify(ready)
        while ready:
            found.append(heappop(ready))
            sorter.done(found[-1])
            for i in sorter.get_ready():
                heappush(ready, i)
        return found
