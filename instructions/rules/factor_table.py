"""The factors of every op of a graph; equal ops share them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from hapsynth.graph.ir import Graph, Literal, Op
from hapsynth.instructions.factors import Factors, Triples
from hapsynth.instructions.rules import factors_of

Node = tuple[int, int, tuple[int, ...], int]
"""(value, dimension, the mesh axes that cut it, major to minor, which way they cut it: `Placement.way`)"""
Cut = tuple[tuple[int, tuple[Node, ...]], ...]
"""Of every factor that an op's triples cut: its size, and the dimensions that it cuts, operands first."""


def cut_nodes(graph: Graph, op: int, factors: Factors, triples: Triples) -> Iterator[tuple[int, list[Node]]]:
    """(factor, the dimensions that it cuts, operands first) for every factor that the triples of an op cut."""
    tensors = (*graph.ops[op].operands, *graph.ops[op].results)
    for factor, axes, places, ways in factors.cuts(triples):
        held = zip(places, ways, strict=True)
        yield factor, [(v, dim, axes, way) for (place, dim), way in held if isinstance(v := tensors[place], int)]


class FactorTable:
    """The factors of every op of a graph, made once; ops that are alike share them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._known: dict[int, Factors] = {}
        self._alike: dict[object, Factors] = {}
        self._cut: dict[tuple[int, int], tuple[Triples, Cut]] = {}

    def __getitem__(self, op: int) -> Factors:
        found = self._known.get(op)
        if found is None:
            key = signature(self.graph.ops[op])
            found = None if key is None else self._alike.get(key)
            if found is None:
                found = factors_of(self.graph.ops[op])
                if key is not None:
                    self._alike[key] = found
            self._known[op] = found
        return found

    def cut(self, op: int, triples: Triples) -> Cut:
        """What the triples of an op cut; found once for each."""
        # By identity, as in `Factors.cuts`.
        key = op, id(triples)
        found = self._cut.get(key)
        if found is None:
            factors = self[op]
            cut = cut_nodes(self.graph, op, factors, triples)
            found = self._cut[key] = triples, tuple([(factors.sizes[f], tuple(nodes)) for f, nodes in cut])
        return found[1]


@cache
def _name(dtype: Any) -> str:
    return str(dtype)


def signature(op: Op) -> object | None:
    """What the factors of an op depend on, to be compared; None where something of it cannot be."""
    literals = tuple(
        (i, o.shape, o.value.tobytes() if isinstance(o.value, np.ndarray) else o.value)
        for i, o in enumerate(op.operands)
        if isinstance(o, Literal)
    )
    key = (
        op.primitive,
        op.shapes,
        tuple(map(_name, op.dtypes)),
        op.result_shapes,
        tuple(map(_name, op.result_dtypes)),
        tuple(op.params.items()),
        literals,
        tuple(op.operands.index(o) for o in op.operands if isinstance(o, int)),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key
