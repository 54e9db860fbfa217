"""The dimensions that ops can only cut together, and those that carried state decides."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from hapsynth.graph.ir import Graph, Operand
from hapsynth.instructions.program.sizes import Node, UnionFind
from hapsynth.instructions.rules.factor_table import FactorTable


def kinship(graph: Graph, table: FactorTable) -> UnionFind:
    """The sets of dimensions, as nodes (value, dimension, (), 0), that some op of the graph could cut together."""
    if table not in _KINSHIPS:
        _KINSHIPS[table] = _united(graph, table)
    return _KINSHIPS[table]


_KINSHIPS: WeakKeyDictionary[FactorTable, UnionFind] = WeakKeyDictionary()


def _united(graph: Graph, table: FactorTable) -> UnionFind:
    sets = UnionFind()
    for op in graph.ops:
        tensors = (*op.operands, *op.results)
        for places in table[op.index].together:
            nodes: list[Node] = [(v, dim, (), 0) for place, dim in places if isinstance(v := tensors[place], int)]
            for node in nodes:
                if node not in sets.parent:
                    sets.add(node, graph.values[node[0]].shape[node[1]])
                if node is not nodes[0]:
                    sets.union(nodes[0], node)
    pairs: list[tuple[int, Operand]] = [(graph.inputs[source], graph.outputs[target]) for source, target in graph.carry]
    pairs += [(graph.ops[op].results[0], value) for op, value in graph.ties.items()]
    for a, b in pairs:
        if isinstance(b, int):
            for dim, size in enumerate(graph.values[a].shape):
                sets.add((a, dim, (), 0), size)
                sets.add((b, dim, (), 0), size)
                sets.union((a, dim, (), 0), (b, dim, (), 0))
    return sets


def of_state(graph: Graph, kin: UnionFind) -> frozenset[tuple[int, int]]:
    """Every (value, dimension) that some op could cut together with a dimension of the state."""
    roots = {kin.find(node) for node in list(kin.parent) if node[0] in graph.state}
    return frozenset((value, dim) for value, dim, *_ in list(kin.parent) if kin.find((value, dim, (), 0)) in roots)
