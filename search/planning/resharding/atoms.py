"""A dimension class as atoms that may be cut in shards of unlike sizes (decisions.md D4).

What a class cuts is divided into atoms: an instruction, a stored argument, an output. Atoms that cannot be cut apart
are one: those that a fused chain joins, as what it makes is nowhere in memory to be sent, what is carried from a step
to the next, and all of a loop or branch. Between the others flow tensors: where the maker of one is cut otherwise than
a taker, it is reshared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod

import numpy as np

from hapsynth.instructions.program.program import Convert, Program, Property, region_of
from hapsynth.instructions.program.sizes import Node, Sizes, tied
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.program_cost import conversion_cost, largest_share, shares
from hapsynth.search.cost.program_index import Load, ProgramIndex
from hapsynth.search.solver.min_cut import Hyperedge


class ReshardAtoms:
    """The atoms of class `c` of a program at some sizes, along the one mesh axis that cuts it."""

    def __init__(self, program: Program, sizes: Sizes, costs: CostModel, c: int) -> None:
        self.program, self.sizes, self.costs, self.c = program, sizes, costs, c
        self.graph, (self.axis,) = costs.graph, sizes.classes.all[c].axes
        self._nodes: dict[Property, Node | None] = {}
        self.makers: dict[Property, list[int]] = {}
        """Of every tensor that the class cuts, the instructions that make it, or the argument that it is."""
        self.takers: dict[Property, list[int]] = {}
        """The instructions that take it, and the outputs that it is."""
        n, graph = len(program.instructions), self.graph
        self.ends = n + len(program.inputs)
        """Instructions are known by their numbers, arguments by those after these, outputs from here on."""
        self._parent = list(range(self.ends + len(graph.outputs)))
        known = self._nodes
        self.index = ProgramIndex.of(program, sizes.classes, costs)
        for k, (needs, results) in enumerate(self.index.accesses):
            for found, properties in ((self.takers, needs), (self.makers, results)):
                for p in properties:
                    if (known[p] if p in known else self.node(p)) is not None:
                        found.setdefault(p, []).append(k)
        for k, p in enumerate(program.inputs.items(), n):
            if self.node(p) is not None:
                self.makers.setdefault(p, []).append(k)
        for k, (value, layout) in enumerate(zip(graph.outputs, program.outputs, strict=True), self.ends):
            if isinstance(value, int) and layout is not None and self.node((value, layout)) is not None:
                self.takers.setdefault((value, layout), []).append(k)
        self._join()
        keys = sorted({k for found in (self.makers, self.takers) for mine in found.values() for k in mine})
        number: dict[int, int] = {}
        self.atom = {k: number.setdefault(self._root(k), len(number)) for k in keys}
        """Instruction, argument or output -> atom."""
        self.count = len(number)

    def node(self, p: Property) -> Node | None:
        """How the class cuts a tensor; None where it does not."""
        if p not in self._nodes:
            of = self.sizes.classes.of
            self._nodes[p] = next((n for n in self.index.nodes(*p) if of[n] == self.c), None)
        return self._nodes[p]

    def _root(self, k: int) -> int:
        while self._parent[k] != k:
            self._parent[k] = self._parent[self._parent[k]]
            k = self._parent[k]
        return k

    def _unite(self, keys: Sequence[int]) -> None:
        for k in keys[1:]:
            self._parent[self._root(k)] = self._root(keys[0])

    def _join(self) -> None:
        n, graph, program = len(self.program.instructions), self.graph, self.program
        blocks: dict[int, list[int]] = {}
        for p, makers in self.makers.items():
            takers = self.takers.get(p, [])
            self._unite(makers)
            ends = [k for k in takers if k >= self.ends]
            self._unite(ends + [k for k in makers if n <= k] if ends else [])
            if not self.costs.is_materialized(p[0]):
                self._unite([*makers, *takers])
            for k in (*makers, *takers):
                if k < n and (region := region_of(graph, program.instructions[k])):
                    blocks.setdefault(graph.around(region)[-2], []).append(k)
        for members in blocks.values():
            self._unite(members)
        for a, b, layout in tied(graph, program):
            if (a, layout) in self.makers and (b, layout) in self.takers:
                ends = [k for k in self.takers[(b, layout)] if k >= self.ends]
                self._unite(self.makers[(a, layout)] + ends)

    @cached_property
    def flows(self) -> list[Hyperedge]:
        """Between atoms."""
        found: list[Hyperedge] = []
        for p, makers in self.makers.items():
            maker = self.atom[makers[0]]
            takers = dict.fromkeys(self.atom[k] for k in self.takers.get(p, []) if self.atom[k] != maker)
            if takers:
                around = (n for n in self.index.nodes(*p) if n != self.node(p))
                share = prod(largest_share(self.sizes, *n) for n in around)
                found.append(Hyperedge(maker, tuple(takers), self.graph.values[p[0]].nbytes * share))
        return found

    def seconds(self, units: tuple[int, ...]) -> Floats:
        """What each atom takes where the class has these units per position: float64 [atoms]."""
        shares_of = self.sizes.shares
        at = Sizes(self.graph, self.sizes.classes, (*shares_of[: self.c], units, *shares_of[self.c + 1 :]))
        works, sent, members = self._loads
        times = self.costs.times([(load.work, shares(self.costs, at, load.nodes)) for load in works])
        every = np.array([*times, *(conversion_cost(self.costs, at, i)[0] for i in sent)])
        found = np.zeros(self.count)
        if members:
            atoms, runs, places = zip(*members, strict=True)
            np.add.at(found, list(atoms), np.array(runs) * every[list(places)])
        return found

    @cached_property
    def _loads(self) -> tuple[list[Load], list[Convert], list[tuple[int, float, int]]]:
        """Unlike works, unlike conversions, and (atom, runs, place among both) of all."""
        graph, instructions = self.graph, self.program.instructions
        of, n, inputs = self.sizes.classes.of, len(instructions), list(self.program.inputs)
        works: dict[object, Load] = {}
        sent: dict[object, Convert] = {}
        members: list[tuple[int, float, object]] = []
        for k, atom in self.atom.items():
            if k >= self.ends:
                continue
            i = instructions[k] if k < n else None
            if isinstance(i, Convert):
                if i.is_collective:
                    cut = [of[node] for p in (i.source, i.target) for node in self.index.nodes(i.value, p)]
                    key: object = (graph.values[i.value].nbytes, i.source, i.target, i.by, *cut)
                    sent.setdefault(key, i)
                    members.append((atom, graph.runs[i.region], key))
                continue
            if i is None:
                load, runs, key = self.index.feeds.get(inputs[k - n]), 1.0, ("fed", k)
            else:
                place = self.index.load_of[k]
                load, runs, key = self.index.loads[place], self.index.runs[k], ("load", place)
            if load is not None:
                works.setdefault(key, load)
                members.append((atom, runs, key))
        number = {key: place for place, key in enumerate((*works, *sent))}
        return list(works.values()), list(sent.values()), [(a, runs, number[key]) for a, runs, key in members]
