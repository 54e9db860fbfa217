"""A program with a dimension class cut into parts: a tensor whose maker and taker are of unlike ones is reshared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import numpy.typing as npt

from hapsynth.graph.ir import Graph, Operand
from hapsynth.instructions.collectives import Moved
from hapsynth.instructions.factors import Triple, Triples
from hapsynth.instructions.layout import Layout, owner_of
from hapsynth.instructions.program.program import Compute, Convert, Instruction, Program, Property, region_of
from hapsynth.instructions.program.sizes import Classes, Node, Sizes, layout_nodes, tied
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.search.planning.resharding.atoms import ReshardAtoms

Labels = npt.NDArray[np.int64]
_LayoutOf = Callable[[int, Property], Layout]
"""Of a tensor as an instruction, an argument or an output has it, by their numbers in `ReshardAtoms`."""


def relabelled(parts: ReshardAtoms, labels: Labels) -> Program:
    """The program of `parts` with the atoms of each label cut by themselves: int [atoms]. A tensor is reshared right
    before the first instruction that takes it so."""
    ways = _Ways(parts, labels)
    layout_of = lambda k, p: ways.layout(p, ways.label[k]) if k in ways.label else p[1]
    return _rewritten(parts.graph, parts.program, layout_of, ways.reshares())


def merged(graph: Graph, program: Program, sizes: Sizes, table: FactorTable) -> tuple[Program, Sizes]:
    """The program without the reshares between shards that are alike, with its sizes; the ways in which a dimension is
    cut are numbered from 0, an argument's first, those of tied values alike."""
    parent: dict[Node, Node] = {}

    def root(n: Node) -> Node:
        while n in parent:
            n = parent[n]
        return n

    def join(a: Node, b: Node) -> None:
        if root(a) != root(b):
            parent[root(b)] = root(a)

    kept: list[Instruction] = []
    for i in program.instructions:
        if isinstance(i, Convert) and isinstance(moved := i.traffic, Moved):
            old, new = ((i.value, *cut) for cut in (moved.old, moved.new))
            if sizes.lengths(*old) == sizes.lengths(*new):
                join(old, new)
                continue
        kept.append(i)
    for a, b, layout in tied(graph, program):
        for x, y in zip(layout_nodes(a, layout), layout_nodes(b, layout), strict=True):
            join(x, y)
    arguments = {n for property in program.inputs.items() for n in layout_nodes(*property)}
    cut = [n for n in sizes.classes.of if owner_of(n[3]) is None]
    for value, dim, axes, way in cut:
        # A shard that another axis cuts again is the same shard.
        if (major := (value, dim, axes[:-1], way)) in sizes.classes.of:
            join(major, (value, dim, axes, way))
    ways = _numbered(sorted(cut, key=lambda n: (n not in arguments, n[3], n)), root)
    renamed = {n: way for n, way in ways.items() if way != n[3]}
    if len(kept) == len(program.instructions) and not renamed:
        return program, sizes
    before = {(*n[:3], way): n for n, way in ways.items()} | {n: n for n in sizes.classes.of if n not in ways}

    def layout_of(_: int, p: Property) -> Layout:
        new = {n[1]: renamed[n] for n in layout_nodes(*p) if n in renamed}
        return tuple(q._replace(way=new[q.dim]) if q.is_sharded and q.dim in new else q for q in p[1])

    fewer = replace(program, instructions=tuple(kept))
    after = _rewritten(graph, fewer, layout_of, {})
    classes = Classes.build(graph, after, table)
    shares: list[tuple[int, ...]] = []
    for cls in classes.all:
        node = next(m for m in cls.members if m[2] == cls.axes)
        granule = graph.values[node[0]].shape[node[1]] // cls.units
        shares.append(tuple(length // granule for length in sizes.lengths(*before[node])))
    return after, Sizes(graph, classes, tuple(shares))


def _numbered(nodes: Iterable[Node], root: Callable[[Node], Node]) -> dict[Node, int]:
    """A way for every node, the first ones' least: equal where roots are, unlike where a value's dimension has more."""
    found: dict[Node, int] = {}
    together: dict[Node, list[tuple[int, int]]] = {}
    for n in nodes:
        together.setdefault(root(n), []).append(n[:2])
    taken: dict[tuple[int, int], set[int]] = {}
    for r, dims in together.items():
        others = set[int]().union(*(taken.get(d, ()) for d in dims))
        found[r] = next(way for way in count() if way not in others)
        for d in dims:
            taken.setdefault(d, set()).add(found[r])
    return {n: found[root(n)] for n in nodes}


class _Ways:
    """Which way each label cuts each tensor of a class."""

    def __init__(self, parts: ReshardAtoms, labels: Labels) -> None:
        self.parts = parts
        self.label = {k: int(labels[atom]) for k, atom in parts.atom.items()}
        self._ways: dict[tuple[Node, int], int] = {}
        self._used: dict[tuple[int, int], int] = {}
        for value, dim, _, way in parts.sizes.classes.of:
            self._used[value, dim] = max(way, self._used.get((value, dim), 0))
        homes: dict[Node, tuple[int, int]] = {}
        for p, makers in parts.makers.items():
            # An output, which has to lie as what it succeeds does, keeps its way, and so does an argument; else what is
            # made first, where unlike tensors of a value are cut alike along one of the axes.
            ends = [k for k in parts.takers.get(p, []) if k >= parts.ends]
            node, inner = parts.node(p), makers[0] < len(parts.program.instructions)
            assert node is not None
            rank = 0 if ends else 1 + inner
            if node not in homes or rank < homes[node][0]:
                homes[node] = rank, self.label[(ends or makers)[0]]
        self._ways |= {(node, label): node[3] for node, (_, label) in homes.items()}

    def layout(self, p: Property, label: int) -> Layout:
        """A tensor's layout as it is cut for a label."""
        node = self.parts.node(p)
        if node is None:
            return p[1]
        if (node, label) not in self._ways:
            self._used[node[:2]] += 1
            self._ways[node, label] = self._used[node[:2]]
        way = self._ways[node, label]
        return tuple(q._replace(way=way) if q.is_sharded and q.dim == node[1] else q for q in p[1])

    def reshares(self) -> dict[int, list[Convert]]:
        """Instruction -> what is reshared right before it or its loop or branch; at the end what only leaves."""
        parts, instructions = self.parts, self.parts.program.instructions
        block = [parts.graph.around(r)[-2] if (r := region_of(parts.graph, i)) else 0 for i in instructions]
        begins: dict[int, int] = {}
        for k, region in enumerate(block):
            begins.setdefault(region, k)
        found: dict[int, list[Convert]] = {}
        for p, makers in parts.makers.items():
            seen = {self.label[makers[0]]}
            for k in parts.takers.get(p, []):
                if self.label[k] in seen:
                    continue
                seen.add(self.label[k])
                at = min(k, len(instructions))
                at = begins[block[at]] if at < len(instructions) and block[at] else at
                source, target = (self.layout(p, self.label[n]) for n in (makers[0], k))
                found.setdefault(at, []).append(Convert(p[0], parts.axis, source, target))
        return found


def _rewritten(
    graph: Graph, program: Program, layout_of: _LayoutOf, before: Mapping[int, Sequence[Convert]]
) -> Program:
    """The program with other layouts, and conversions `before` some instructions or, by their count, at the end."""
    known: dict[object, Triples] = {}
    made: list[Instruction] = []
    n = len(program.instructions)

    def new(k: int, tensors: Sequence[Operand], old: Callable[[int], Layout]) -> tuple[Layout, ...]:
        return tuple([layout_of(k, (v, old(p))) if isinstance(v, int) else old(p) for p, v in enumerate(tensors)])

    for k, i in enumerate(program.instructions):
        made += before.get(k, ())
        if isinstance(i, Convert):
            made.append(i._replace(source=layout_of(k, (i.value, i.source)), target=layout_of(k, (i.value, i.target))))
            continue
        op = graph.ops[i.op]
        layouts = new(k, op.operands, i.operand_layout), new(k, op.results, i.result_layout)
        key = i.triples, *layouts
        if key not in known:
            placed = lambda side, axis, at=layouts: tuple([layout[axis] for layout in at[side]])
            triples = tuple([Triple(placed(0, a), placed(1, a), t.factor) for a, t in enumerate(i.triples)])
            # As they are where nothing changes: what is known of them is known by their identity.
            known[key] = i.triples if triples == i.triples else triples
        made.append(Compute(i.op, known[key]))
    made += before.get(n, ())
    inputs = {v: layout_of(k, (v, layout)) for k, (v, layout) in enumerate(program.inputs.items(), n)}
    outputs = tuple(
        layout_of(k, (v, layout)) if isinstance(v, int) and layout is not None else layout
        for k, (v, layout) in enumerate(zip(graph.outputs, program.outputs, strict=True), n + len(inputs))
    )
    return replace(program, inputs=inputs, instructions=tuple(made), outputs=outputs)
