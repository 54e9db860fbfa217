"""Ratio vectors: which fraction of a dimension each device holds, while programs are still being compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hapsynth.graph import Graph, Operand
from hapsynth.instructions.program import FactorTable
from hapsynth.instructions.sizes import Classes, Node, Sizes, UnionFind, cut_nodes
from hapsynth.search.costs import Floats


def round_shares(fractions: Floats, units: int) -> tuple[int, ...]:
    """Whole units nearest to the fractions (largest remainder), summing to `units`; ties go to the first device."""
    exact = fractions * units
    shares = np.floor(exact + 1e-9).astype(int)
    order = np.argsort(-(exact - shares), kind="stable")
    shares[order[: units - int(shares.sum())]] += 1
    return tuple(int(s) for s in shares)


class Ratios:
    """A fraction vector for every (value, dimension) of a graph, one mesh axis.

    Dimensions that the current plan cuts have that plan's exact sizes. Every other dimension gets `default`, rounded
    to what its length allows, or the ratio of a dimension that some op cuts alike, where the plan cuts one.
    """

    def __init__(self, graph: Graph, table: FactorTable, default: Floats, sizes: Sizes | None = None) -> None:
        self.graph, self.default = graph, default
        self.vectors: list[Floats] = []
        self.largest: list[float] = []
        self._index: dict[bytes, int] = {}
        self._rounded: dict[tuple[int, int], int] = {}
        self._exact: dict[Node, int] = {}
        self._kin: dict[Node, int] = {}
        self._kinship = kinship(graph, table) if sizes is not None else UnionFind()
        if sizes is not None:
            self._adopt(sizes)

    def _adopt(self, sizes: Sizes) -> None:
        weight: dict[Node, int] = {}
        for cls, shares in zip(sizes.classes.all, sizes.shares, strict=True):
            vector = self._intern(np.array(shares, dtype=np.float64) / cls.units)
            nbytes = sum(self.graph.values[v].nbytes for v, _, _ in cls.members)
            for node in cls.members:
                self._exact[node] = vector
                if node in self._kinship.parent:
                    root = self._kinship.find(node)
                    if weight.get(root, -1) < nbytes:
                        weight[root] = nbytes
                        self._kin[root] = vector

    def sizes_of(self, classes: Classes) -> Sizes | None:
        """The sizes that a program has at these ratios, where each of its classes is cut in one way."""
        shares: list[tuple[int, ...]] = []
        for cls in classes.all:
            value, dim, _ = cls.members[0]
            exact = self.vectors[self.of(value, dim, cls.units)] * cls.units
            if not np.allclose(exact, np.round(exact)):
                return None
            shares.append(tuple(int(s) for s in np.round(exact)))
        return Sizes(self.graph, classes, tuple(shares))

    def _intern(self, vector: Floats) -> int:
        key = vector.tobytes()
        if key not in self._index:
            self._index[key] = len(self.vectors)
            self.vectors.append(vector)
            self.largest.append(float(vector.max()))
        return self._index[key]

    def of(self, value: int, dim: int, units: int | None = None) -> int:
        """The index of the vector for a dimension cut in `units` (its length by default)."""
        node = (value, dim, (0,))
        if node in self._exact:
            return self._exact[node]
        base = -1
        if node in self._kinship.parent:
            base = self._kin.get(self._kinship.find(node), -1)
        units = units or self.graph.values[value].shape[dim]
        if (base, units) not in self._rounded:
            fractions = self.default if base < 0 else self.vectors[base]
            self._rounded[(base, units)] = self._intern(np.array(round_shares(fractions, units)) / units)
        return self._rounded[(base, units)]


def kinship(graph: Graph, table: FactorTable) -> UnionFind:
    """The sets of dimensions that some op of the graph could cut together."""
    sets = UnionFind()
    for op in graph.ops:
        factors = table[op.index]
        for triple in factors.triples:
            for _, nodes in cut_nodes(graph, op.index, factors, (triple,)):
                for node in nodes:
                    sets.add(node, graph.values[node[0]].shape[node[1]])
                    sets.union(nodes[0], node)
    pairs: list[tuple[int, Operand]] = [(graph.inputs[source], graph.outputs[target]) for source, target in graph.carry]
    pairs += [(graph.ops[op].results[0], value) for op, value in graph.ties.items()]
    for a, b in pairs:
        if isinstance(b, int):
            for dim, size in enumerate(graph.values[a].shape):
                sets.add((a, dim, (0,)), size)
                sets.add((b, dim, (0,)), size)
                sets.union((a, dim, (0,)), (b, dim, (0,)))
    return sets


def proportional(speeds: Sequence[float] | Floats) -> Floats:
    """Fractions by speed."""
    vector = np.asarray(speeds, dtype=np.float64)
    return vector / vector.sum()


def named_ratios(sizes: Sizes) -> Mapping[str, tuple[float, ...]]:
    """Class name -> fraction of each device."""
    return {c.name: tuple(s / c.units for s in shares) for c, shares in zip(sizes.classes.all, sizes.shares)}
