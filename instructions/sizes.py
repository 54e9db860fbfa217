"""Dimension classes and shard sizes: which dimensions are cut alike, and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from hapsynth.graph import Graph
from hapsynth.instructions.factors import Factors, Triple
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program import Compute, FactorTable, Program, ProgramError, reads, writes

Node = tuple[int, int, int]
"""(value, dimension, mesh axis)"""


class UnionFind:
    """Sets of nodes that are cut alike, each with the greatest number of units that every member can be cut in."""

    def __init__(self) -> None:
        self.parent: dict[Node, Node] = {}
        self.units: dict[Node, int] = {}

    def find(self, node: Node) -> Node:
        root = node
        while self.parent[root] != root:
            root = self.parent[root]
        while self.parent[node] != root:
            self.parent[node], node = root, self.parent[node]
        return root

    def add(self, node: Node, units: int) -> None:
        if node not in self.parent:
            self.parent[node], self.units[node] = node, units
        else:
            root = self.find(node)
            self.units[root] = gcd(self.units[root], units)

    def union(self, a: Node, b: Node) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            a, b = min(a, b), max(a, b)
            self.parent[b] = a
            self.units[a] = gcd(self.units[a], self.units[b])


def cut_nodes(graph: Graph, op: int, factors: Factors, triple: Triple, axis: int) -> Iterator[Node]:
    """The (value, dimension) pairs that a triple's factor cuts, operands first."""
    if triple.factor is None:
        return
    for operand, dims in zip(graph.ops[op].operands, factors.operands, strict=True):
        if isinstance(operand, int) and (p := factors.position(dims, triple.factor)) is not None:
            yield (operand, p, axis)
    for result, dims in zip(graph.ops[op].results, factors.results, strict=True):
        if (p := factors.position(dims, triple.factor)) is not None:
            yield (result, p, axis)


def tied(graph: Graph, program: Program) -> Iterator[tuple[int, int, Layout]]:
    """Pairs of values that lie alike: carried state and its successor, what a loop carries and what it carries on."""
    for source, target in graph.carry:
        a, b = graph.inputs[source], graph.outputs[target]
        if isinstance(b, int):
            yield a, b, program.inputs[a]
    for i in program.instructions if graph.ties else ():
        if isinstance(i, Compute) and i.op in graph.ties:
            yield graph.ops[i.op].results[0], graph.ties[i.op], i.result_layout(0)


@dataclass(frozen=True, eq=False)
class DimensionClass:
    """All (value, dimension, mesh axis) that are cut the same way, in `units` equal units."""

    index: int
    name: str
    axis: int
    units: int
    members: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Classes:
    """The dimension classes of a program."""

    all: tuple[DimensionClass, ...]
    of: Mapping[Node, int]

    @staticmethod
    def build(graph: Graph, program: Program, table: FactorTable | None = None) -> Classes:
        """Union over the factors that the program really shards (D4)."""
        table = table or FactorTable(graph)
        sets = UnionFind()

        def cut(value: int, layout: Layout) -> None:
            for axis, placement in enumerate(layout):
                if placement.is_sharded:
                    sets.add((value, placement.dim, axis), graph.values[value].shape[placement.dim])

        for value, layout in program.inputs.items():
            cut(value, layout)
        for i in program.instructions:
            for value, layout in (*reads(graph, i), *writes(graph, i)):
                cut(value, layout)
            if isinstance(i, Compute):
                for axis, triple in enumerate(i.triples):
                    if triple.factor is None:
                        continue
                    first = None
                    for node in cut_nodes(graph, i.op, table[i.op], triple, axis):
                        sets.add(node, table[i.op].sizes[triple.factor])
                        first = first or node
                        sets.union(first, node)
        for a, b, layout in tied(graph, program):
            for axis, placement in enumerate(layout):
                if placement.is_sharded:
                    nodes = (a, placement.dim, axis), (b, placement.dim, axis)
                    for node in nodes:
                        sets.add(node, graph.values[node[0]].shape[placement.dim])
                    sets.union(*nodes)
        groups: dict[Node, list[Node]] = {}
        for node in sorted(sets.parent):
            groups.setdefault(sets.find(node), []).append(node)
        classes: list[DimensionClass] = []
        of: dict[Node, int] = {}
        for root, members in groups.items():
            value, dim, axis = members[0]
            name = f"{graph.values[value].name}.{dim}"
            classes.append(DimensionClass(len(classes), name, axis, sets.units[root], tuple(members)))
            of.update(dict.fromkeys(members, len(classes) - 1))
        return Classes(tuple(classes), of)


@dataclass(frozen=True, eq=False)
class Sizes:
    """The units that each position along a class's mesh axis holds: `shares[class][position]`."""

    graph: Graph
    classes: Classes
    shares: tuple[tuple[int, ...], ...]

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """First unit of each position."""
        return tuple(tuple(sum(s[:i]) for i in range(len(s))) for s in self.shares)

    def check(self, axes: Sequence[tuple[str, int]]) -> None:
        """ProgramError unless every class is cut completely, in as many shares as its mesh axis is long."""
        if len(self.shares) != len(self.classes.all):
            raise ProgramError(f"{len(self.shares)} lists of sizes for {len(self.classes.all)} dimension classes")
        for cls, shares in zip(self.classes.all, self.shares):
            if len(shares) != axes[cls.axis][1] or min(shares) < 0 or sum(shares) != cls.units:
                devices = axes[cls.axis][1]
                raise ProgramError(
                    f"class {cls.name} has {cls.units} units for {devices} devices; its sizes are {list(shares)}"
                )

    def units(self, value: int, dim: int, axis: int) -> tuple[int, tuple[int, ...]]:
        """(elements per unit, shares) of a dimension that is cut along a mesh axis."""
        c = self.classes.of[(value, dim, axis)]
        return self.graph.values[value].shape[dim] // self.classes.all[c].units, self.shares[c]

    def lengths(self, value: int, dim: int, axis: int) -> tuple[int, ...]:
        """Elements of the dimension on each position along the axis."""
        granule, shares = self.units(value, dim, axis)
        return tuple(granule * s for s in shares)

    def starts(self, value: int, dim: int, axis: int) -> tuple[int, ...]:
        """First element of each position's shard."""
        granule, _ = self.units(value, dim, axis)
        c = self.classes.of[(value, dim, axis)]
        return tuple(granule * s for s in self.offsets[c])

    def local_shape(self, value: int, layout: Layout, coords: Sequence[int]) -> tuple[int, ...]:
        """The exact shape of a value on the device at `coords` of the mesh."""
        shape = list(self.graph.values[value].shape)
        for axis, placement in enumerate(layout):
            if placement.is_sharded:
                shape[placement.dim] = self.lengths(value, placement.dim, axis)[coords[axis]]
        return tuple(shape)

    def padded_shape(self, value: int, layout: Layout) -> tuple[int, ...]:
        """The shape of the largest shard: what every device stores and sends."""
        shape = list(self.graph.values[value].shape)
        for axis, placement in enumerate(layout):
            if placement.is_sharded:
                shape[placement.dim] = max(self.lengths(value, placement.dim, axis))
        return tuple(shape)

    def is_even(self, value: int, layout: Layout) -> bool:
        """Whether every device's shard has the same shape."""
        return all(len(set(self.lengths(value, p.dim, a))) == 1 for a, p in enumerate(layout) if p.is_sharded)
