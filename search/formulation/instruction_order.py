"""The order of a program's instructions: few, large stages, or little memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from graphlib import TopologicalSorter
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from hapsynth.graph.ir import Boundary, Graph
from hapsynth.instructions.program.program import Access, Convert, Instruction, region_of


class Step(NamedTuple):
    """An instruction, the steps whose results it reads, and what it reads and writes."""

    instruction: Instruction
    needs: tuple[int, ...]
    access: Access


def schedule(graph: Graph, steps: Sequence[Step], widening: Sequence[bool], *, sparing: bool = False) -> list[int]:
    """An order of the steps with few, large stages, or that spares memory; those of a region stand together.
    `widening`: as `ChoiceSpace` has it."""
    return _Scheduler(graph, steps, widening, sparing).order(0)


class _Node(NamedTuple):
    """A unit of a region's order: one step, or all steps of a region inside it."""

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
    def __init__(self, graph: Graph, steps: Sequence[Step], widening: Sequence[bool], sparing: bool) -> None:
        self.graph, self.steps, self.widening, self.sparing = graph, steps, widening, sparing
        self.members: dict[int, list[int]] = {r.index: [] for r in graph.regions}
        self.inside: dict[int, list[int]] = {r.index: [] for r in graph.regions}
        for r in graph.regions[1:]:
            self.inside[r.parent].append(r.index)
        if len(self.members) == 1:
            self.members[0] += range(len(steps))
            return
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
        collective = [node.collective for node in nodes]
        for i in in_order:
            node = nodes[i]
            waits, movable, first = collective[i], node.movable, 0
            for j in node.needs:
                users[j].append(i)
                after = stage[j] + 1 if collective[j] and not waits else stage[j]
                if after > first:
                    first = after
                movable = movable and early[j]
            stage[i], early[i] = first, movable
        for i in reversed(in_order):
            if users[i] and (early[i] or nodes[i].gathers or nodes[i].widens):
                before = [stage[j] - (1 if collective[i] and not collective[j] else 0) for j in users[i]]
                stage[i] = max(stage[i], min(before))
        position = [0] * n
        # Of collectives that wait for others of their stage, those that wait for as many run together.
        depth = [0] * n
        for place, i in enumerate(in_order):
            position[i] = place
            for j in nodes[i].needs:
                if collective[j] and stage[j] == stage[i] and depth[j] >= depth[i]:
                    depth[i] = depth[j] + 1
        keys = [*zip(stage, collective, depth, position, strict=True)]
        return sorted(range(n), key=keys.__getitem__)

    def _nodes(self, region: int) -> list[_Node]:
        if len(self.members) == 1:
            return [self._node((n,), set(step.needs)) for n, step in enumerate(self.steps)]
        groups: list[tuple[int, ...]] = [(i,) for i in self.members[region]]
        groups += [tuple(b) for r in self.inside[region] if (b := self.order(r))]
        groups.sort(key=min)
        of = {s: n for n, group in enumerate(groups) for s in group}
        nodes: list[_Node] = []
        for n, group in enumerate(groups):
            needs = {of[j] for s in group for j in self.steps[s].needs if j in of} - {n}
            i = self.steps[group[0]].instruction
            if region_of(self.graph, i) != region:
                nodes.append(_Node(group, tuple(sorted(needs)), True, False, False, False, False))
            else:
                nodes.append(self._node(group, needs))
        return nodes

    def _node(self, group: tuple[int, ...], needs: Collection[int]) -> _Node:
        """Of a step that stands in the region itself."""
        i = self.steps[group[0]].instruction
        ranked = tuple(needs if len(needs) < 2 else sorted(needs))
        if isinstance(i, Convert):
            reduces, collective = i.source[i.axis].is_partial, i.is_collective
            return _Node(group, ranked, collective, not reduces, reduces, not collective, False)
        movable = not isinstance(self.graph.ops[i.op].primitive, Boundary)
        return _Node(group, ranked, False, False, False, movable, movable and self.widening[i.op])

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
