"""What evaluation, sizes, memory and rewriting ask of a program, found once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program.program import Access, Compute, Convert, Program, Property
from hapsynth.instructions.program.sizes import Classes, Node, layout_nodes
from hapsynth.search.analysis.lifetimes import Tensor, lifetimes, stored_tensors
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.work import Work

Cut = tuple[int, int]
"""(dimension class, how many of its axes, major first)"""


class Load(NamedTuple):
    """A work, and one dimension of each factor that is cut, in the order of its `lanes`."""

    work: Work
    nodes: tuple[Node, ...]
    cuts: tuple[Cut, ...]


class ProgramIndex:
    """A program's works, accesses and lifetimes, by the dimension classes that cut them.

    `ProgramIndex.of` gives the same one to all who ask for a program's while somebody holds it.
    """

    def __init__(self, program: Program, classes: Classes, costs: CostModel) -> None:
        self.program, self.classes, self.costs, self.graph = program, classes, costs, costs.graph
        self._nodes: dict[Property, tuple[Node, ...]] = {}

    @staticmethod
    def of(program: Program, classes: Classes, costs: CostModel) -> ProgramIndex:
        known = _INDICES.setdefault(costs, WeakValueDictionary())
        found = known.get(program)
        if found is None or found.classes is not classes:
            found = known[program] = ProgramIndex(program, classes, costs)
        return found

    def cut(self, node: Node) -> Cut:
        return self.classes.of[node], len(node[2])

    def nodes(self, value: int, layout: Layout) -> tuple[Node, ...]:
        """The dimensions of a tensor that its layout cuts."""
        found = self._nodes.get((value, layout))
        if found is None:
            found = self._nodes[value, layout] = tuple(layout_nodes(value, layout))
        return found

    @property
    def accesses(self) -> Sequence[Access]:
        """What each instruction reads and writes."""
        return self.program.accesses(self.graph)

    @cached_property
    def runs(self) -> list[float]:
        """How often each instruction runs in a step."""
        graph = self.graph
        return [
            graph.runs[i.region if isinstance(i, Convert) else graph.ops[i.op].region]
            for i in self.program.instructions
        ]

    @property
    def loads(self) -> list[Load]:
        """What instructions compute; those that differ in nothing that costs are one."""
        return self._loads[0]

    @property
    def load_of(self) -> list[int]:
        """Of each instruction its place in `loads`; -1 for a conversion."""
        return self._loads[1]

    @cached_property
    def _loads(self) -> tuple[list[Load], list[int]]:
        costs, number, of = self.costs, dict[tuple[int, tuple[Cut, ...]], int](), self.classes.of
        loads: list[Load] = []
        places: list[int] = []
        for i in self.program.instructions:
            if isinstance(i, Convert):
                places.append(-1)
                continue
            work, numbered, nodes = costs.cut_work(i.op, i.triples)
            cuts = tuple([(of[node], len(node[2])) for node in nodes])
            place = number.setdefault((numbered, cuts), len(loads))
            if place == len(loads):
                loads.append(Load(work, nodes, cuts))
            places.append(place)
        return loads, places

    @cached_property
    def feeds(self) -> dict[int, Load]:
        """The arguments that are new at every step, and what it takes to put each into the devices' memory."""
        found: dict[int, Load] = {}
        for value, layout in self.program.inputs.items():
            work = self.costs.feed_work(value, layout)
            if work is not None:
                nodes = self.nodes(value, layout)
                found[value] = Load(work, nodes, tuple(map(self.cut, nodes)))
        return found

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors that lie in memory, with their lives."""
        return stored_tensors(lifetimes(self.graph, self.program), self.accesses, self.costs.is_materialized)

    @cached_property
    def makers(self) -> list[tuple[int, ...]]:
        """Of each instruction, those that made what it reads, the last before it of each."""
        made: dict[Property, int] = {}
        found: list[tuple[int, ...]] = []
        for k, (needs, results) in enumerate(self.accesses):
            found.append(tuple(dict.fromkeys(made[p] for p in needs if p in made)))
            made.update(dict.fromkeys(results, k))
        return found


_INDICES: WeakKeyDictionary[CostModel, WeakValueDictionary[Program, ProgramIndex]] = WeakKeyDictionary()


def cut_nodes_of(costs: CostModel, instruction: Compute) -> list[Node]:
    """One dimension of each factor that an op's triples cut, in the order of its work's `lanes`."""
    return list(costs.cut_work(instruction.op, instruction.triples).nodes)
