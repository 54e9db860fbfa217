"""The factors of every op of a graph; equal ops share them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hapsynth.graph.ir import Graph, Literal, Op
from hapsynth.instructions.factors import Factors
from hapsynth.instructions.rules import factors_of


class FactorTable:
    """The factors of every op of a graph, made once; ops that are alike share them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._known: dict[int, Factors] = {}
        self._alike: dict[object, Factors] = {}

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
