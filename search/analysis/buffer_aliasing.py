"""Results that XLA writes over an operand: what an elementwise kernel reads for the last time, in the result's shape,
and what a scatter or an update adds to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hapsynth.graph.ir import Graph, Op, Operand
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.rules.registry import is_fusible

_MOVES = ("transpose", "tile", "rev", "select_and_scatter_add")
UPDATES = (
    "dynamic_update_slice",
    "scatter",
    "scatter_add",
    "scatter_mul",
    "scatter_min",
    "scatter_max",
    "scatter_sub",
)
"""Ops that write an update into their first operand, by their names with underscores."""


def overwritten(graph: Graph, stored: Sequence[bool]) -> list[tuple[int, ...]]:
    """Per op, the stored values in whose place its stored result may be written: those that reach it by elementwise
    ops alone, in its shape and type (`HloDataflowAnalysis::CanShareOperandBufferWithUser`)."""
    found: list[tuple[int, ...]] = []
    # An argument's place is kept for what the step leaves of it.
    kept = {graph.inputs[source]: graph.outputs[target] for source, target in graph.carry}
    for op in graph.ops:
        if len(op.results) != 1 or not stored[op.results[0]]:
            found.append(())
        elif op.name.replace("-", "_") in UPDATES:
            first = op.operands[0]
            found.append((first,) if isinstance(first, int) and stored[first] else ())
        else:
            found.append(_elementwise_leaves(graph, stored, kept, op) if is_fusible(op) else ())
    return found


def _elementwise_leaves(graph: Graph, stored: Sequence[bool], kept: Mapping[int, Operand], op: Op) -> tuple[int, ...]:
    """The stored values of a result's shape and type that the fused chain which ends in it reads nowhere else but at
    the result's own position. `kept`: carried argument -> what the step leaves of it."""
    shape, dtype = op.result_shapes[0], op.result_dtypes[0]
    own: dict[int, bool] = {}
    waiting = [(op, True)]
    while waiting:
        at, along = waiting.pop()
        along = along and at.name not in _MOVES
        for position, v in at.value_operands:
            same = along and at.shapes[position] == shape
            if v in own and (same or not own[v]):
                continue
            own[v] = same
            if not stored[v]:
                waiting.append((graph.ops[graph.producer[v]], same))
    there = lambda v: v in graph.producer or kept.get(v) == op.results[0]
    return tuple(v for v, same in own.items() if same and stored[v] and graph.values[v].dtype == dtype and there(v))


def cut_of(layout: Layout) -> tuple[int | None, ...]:
    """The dimension that each axis cuts: what makes two tensors of one shape alike in size."""
    return tuple(None if p.is_partial else p.dim for p in layout)
