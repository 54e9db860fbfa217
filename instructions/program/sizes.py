"""Dimension classes and shard sizes: which dimensions are cut alike, and where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import gcd, prod

import numpy as np

from hapsynth.graph.ir import Graph
from hapsynth.instructions.collectives import Hosts
from hapsynth.instructions.layout import Layout, cuts_of, owner_of
from hapsynth.instructions.program.program import Compute, Program, ProgramError
from hapsynth.instructions.rules.factor_table import FactorTable, Node


class UnionFind:
    """Sets of nodes that are cut alike, each with the greatest number of units that every member can be cut in."""

    def __init__(self) -> None:
        self.parent: dict[Node, Node] = {}
        self.units: dict[Node, int] = {}

    def find(self, node: Node) -> Node:
        root = node
        # What is stored is the same object, whatever equals it was asked for.
        while (above := self.parent[root]) is not root:
            root = above
        while self.parent[node] is not root:
            self.parent[node], node = root, self.parent[node]
        return root

    def root(self, value: int, dim: int) -> Node | None:
        """What stands for a dimension, whatever cuts it, and all that are cut alike; None where none was added."""
        node = (value, dim, (), 0)
        return self.find(node) if node in self.parent else None

    def add(self, node: Node, units: int) -> None:
        if node not in self.parent:
            self.parent[node], self.units[node] = node, units
        else:
            root = self.find(node)
            if self.units[root] != units:
                self.units[root] = gcd(self.units[root], units)

    def join(self, nodes: Iterable[Node], units: int) -> None:
        """Add some nodes of so many units, all in one set."""
        parent, count = self.parent, self.units
        joined: Node | None = None
        for node in nodes:
            if node not in parent:
                root = parent[node] = node
                count[node] = units
            else:
                # Mostly its root is next to it.
                root = parent[node]
                if parent[root] is not root:
                    root = self.find(node)
                if count[root] != units:
                    count[root] = gcd(count[root], units)
            if joined is not None and root is not joined:
                self.union(joined, root)
                root = min(joined, root)
            joined = root

    def union(self, a: Node, b: Node) -> None:
        a, b = self.find(a), self.find(b)
        if a is not b:
            if b < a:
                a, b = b, a
            self.parent[b] = a
            self.units[a] = gcd(self.units[a], self.units[b])


def cut_name(dim: int, way: int) -> str:
    """What comes behind a value's name where one of its dimensions is cut some way."""
    owner = owner_of(way)
    return f".{dim}" + (f"~{way}" if way else "") if owner is None else f" at {owner}"


def node_name(graph: Graph, node: Node, axes: Sequence[tuple[str, int]]) -> str:
    """The name of a dimension that some of the mesh axes cut, as in `Plan.ratios`."""
    value, dim, cut, way = node
    along = "@" + ",".join(axes[a][0] for a in cut) if len(axes) > 1 else ""
    return f"{graph.values[value].name}{cut_name(dim, way)}{along}"


def layout_nodes(value: int, layout: Layout) -> list[Node]:
    """The dimensions of a value that a layout cuts."""
    return [(value, dim, axes, way) for dim, axes, way in cuts_of(layout)]


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
    """All (value, dimension, mesh axes, way) that are cut alike, in `units` equal units.

    `axes`: those that cut it, major to minor. A member that fewer of them cut has the shards of the others joined.
    """

    index: int
    name: str
    axes: tuple[int, ...]
    units: int
    members: tuple[Node, ...]

    @cached_property
    def owner(self) -> int | None:
        """The position along its axis that has all of it; None where there is none."""
        return next((owner for m in self.members if (owner := owner_of(m[3])) is not None), None)


@dataclass(frozen=True, eq=False)
class Classes:
    """The dimension classes of a program on a mesh of `axes` (name, length). `hosts`: as of `Program`."""

    all: tuple[DimensionClass, ...]
    of: Mapping[Node, int]
    axes: tuple[tuple[str, int], ...]
    hosts: tuple[Hosts, ...] = ()

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(length for _, length in self.axes)

    def hosts_along(self, axis: int) -> Hosts:
        """Those that a mesh axis goes over."""
        return self.hosts[axis] if self.hosts else ()

    @cached_property
    def owned(self) -> dict[int, tuple[int, ...]]:
        """Class -> the shares that it has to have, of those that one position owns."""
        return {
            c.index: tuple([c.units if at == owner else 0 for at in range(self.positions(c.index))])
            for c in self.all
            if (owner := c.owner) is not None
        }

    def positions(self, c: int) -> int:
        """How many shards a class has."""
        return self.along(self.all[c].axes)

    def along(self, axes: tuple[int, ...]) -> int:
        """How many positions there are along some axes."""
        return prod(self.lengths[a] for a in axes)

    @staticmethod
    def build(graph: Graph, program: Program, table: FactorTable | None = None) -> Classes:
        """Union over the factors that the program really shards (D4)."""
        table = table or FactorTable(graph)
        sets = UnionFind()
        parent = sets.parent

        def cut(value: int, layout: Layout) -> None:
            for node in layout_nodes(value, layout):
                # It has as many units each time, until it is joined with others.
                if node not in parent:
                    sets.add(node, units(value, node))

        # What one device has is not cut into units.
        units = lambda v, node: 1 if owner_of(node[3]) is not None else graph.values[v].shape[node[1]]

        properties = dict.fromkeys(program.inputs.items())
        for needs, results in program.accesses(graph):
            for held in needs:
                properties[held] = None
            for held in results:
                properties[held] = None
        is_cut = {layout: bool(cuts_of(layout)) for layout in {layout for _, layout in properties}}
        for value, layout in properties:
            if is_cut[layout]:
                cut(value, layout)
        for i in program.instructions:
            if isinstance(i, Compute):
                for size, nodes in table.cut(i.op, i.triples):
                    sets.join(nodes, size)
        for a, b, layout in tied(graph, program):
            cut(a, layout)
            cut(b, layout)
            for node, other in zip(layout_nodes(a, layout), layout_nodes(b, layout), strict=True):
                sets.union(node, other)
        for value, dim, axes, way in list(sets.parent):
            # What one axis cuts, a minor one cuts again: the shards of the first are those of both, joined.
            for k in range(1, len(axes)):
                if (value, dim, axes[:k], way) in sets.parent:
                    sets.union((value, dim, axes, way), (value, dim, axes[:k], way))
        groups: dict[Node, list[Node]] = {}
        for node in sorted(sets.parent):
            groups.setdefault(sets.find(node), []).append(node)
        classes: list[DimensionClass] = []
        of: dict[Node, int] = {}
        for root, members in groups.items():
            value, dim, _, way = members[0]
            axes = max((m[2] for m in members), key=len)
            if any(m[2] != axes[: len(m[2])] for m in members):
                cuts = sorted({m[2] for m in members})
                raise ProgramError(f"{graph.values[value].name}.{dim} is cut alike along the mesh axes {cuts}")
            name = node_name(graph, (value, dim, axes, way), program.axes)
            classes.append(DimensionClass(len(classes), name, axes, sets.units[root], tuple(members)))
            of.update(dict.fromkeys(members, len(classes) - 1))
        return Classes(tuple(classes), of, program.axes, program.hosts)


@dataclass(frozen=True, eq=False)
class Sizes:
    """The units that each position along a class's mesh axes holds: `shares[class][position]`, positions row-major in
    the class's axes."""

    graph: Graph
    classes: Classes
    shares: tuple[tuple[int, ...], ...]
    _known: dict[Node, tuple[int, ...]] = field(default_factory=dict)

    def check(self, axes: Sequence[tuple[str, int]]) -> None:
        """ProgramError unless every class is cut completely, in as many shares as its mesh axes are long."""
        if len(self.shares) != len(self.classes.all):
            raise ProgramError(f"{len(self.shares)} lists of sizes for {len(self.classes.all)} dimension classes")
        for cls, shares in zip(self.classes.all, self.shares):
            positions = prod(axes[a][1] for a in cls.axes)
            if len(shares) != positions or min(shares) < 0 or sum(shares) != cls.units:
                raise ProgramError(
                    f"class {cls.name} has {cls.units} units for {positions} devices; its sizes are {list(shares)}"
                )
            owners = {owner for m in cls.members if (owner := owner_of(m[3])) is not None}
            if any(shares[owner] != cls.units for owner in owners):
                raise ProgramError(f"class {cls.name} is owned by {sorted(owners)}, and its sizes are {list(shares)}")

    def units(self, value: int, dim: int, axes: tuple[int, ...], way: int = 0) -> tuple[int, tuple[int, ...]]:
        """(elements per unit, shares) of a dimension that is cut along mesh axes, positions row-major."""
        c = self.classes.of[(value, dim, axes, way)]
        shares = self.shares[c]
        inner = prod(self.classes.lengths[a] for a in self.classes.all[c].axes[len(axes) :])
        if inner > 1:
            shares = tuple(sum(shares[i : i + inner]) for i in range(0, len(shares), inner))
        return self.graph.values[value].shape[dim] // self.classes.all[c].units, shares

    def lengths(self, value: int, dim: int, axes: tuple[int, ...], way: int = 0) -> tuple[int, ...]:
        """Elements of the dimension on each position along the axes."""
        node = (value, dim, axes, way)
        if node not in self._known:
            granule, shares = self.units(value, dim, axes, way)
            self._known[node] = tuple(granule * s for s in shares)
        return self._known[node]

    def rows(self, value: int, dim: int, axes: tuple[int, ...], way: int = 0) -> tuple[tuple[int, ...], ...]:
        """As `lengths`, of those along the minor axis, for each position along the major ones."""
        n, lengths = self.classes.lengths[axes[-1]], self.lengths(value, dim, axes, way)
        return tuple(lengths[i : i + n] for i in range(0, len(lengths), n))

    def starts(self, value: int, dim: int, axes: tuple[int, ...], way: int = 0) -> tuple[int, ...]:
        """First element of each position's shard."""
        lengths = self.lengths(value, dim, axes, way)
        return tuple(accumulate(lengths[:-1], initial=0))

    def position(self, axes: tuple[int, ...], coords: Sequence[int]) -> int:
        """Which of the positions along some axes the device at `coords` of the mesh has."""
        at = 0
        for axis in axes:
            at = at * self.classes.lengths[axis] + coords[axis]
        return at

    def of_devices(self, c: int) -> tuple[int, ...]:
        """The units of a class that each device holds, devices row-major in the mesh."""
        axes = self.classes.all[c].axes
        return tuple(self.shares[c][self.position(axes, coords)] for coords in np.ndindex(*self.classes.lengths))

    def local_shape(self, value: int, layout: Layout, coords: Sequence[int]) -> tuple[int, ...]:
        """The exact shape of a value on the device at `coords` of the mesh."""
        shape = list(self.graph.values[value].shape)
        for _, dim, axes, way in layout_nodes(value, layout):
            shape[dim] = self.lengths(value, dim, axes, way)[self.position(axes, coords)]
        return tuple(shape)

    def padded_shape(self, value: int, layout: Layout) -> tuple[int, ...]:
        """The shape of the largest shard: what every device stores and sends."""
        shape = list(self.graph.values[value].shape)
        for node in layout_nodes(value, layout):
            shape[node[1]] = max(self.lengths(*node))
        return tuple(shape)

    def is_even(self, value: int, layout: Layout) -> bool:
        """Whether every device's shard has the same shape."""
        return all(len(set(self.lengths(*node))) == 1 for node in layout_nodes(value, layout))
