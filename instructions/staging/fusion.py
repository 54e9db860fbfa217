"""The cheap part of XLA's rules for fusing: what elementwise kernels make again rather than read."""

from __future__ import annotations

from hapsynth.graph.ir import Graph, Op
from hapsynth.instructions.rules.registry import is_costly, is_fusible

SMALL = 8
"""A tensor this many times smaller than what is made of it is as good as none."""
_MADE = ("broadcast_in_dim", "iota")


def large_operands(graph: Graph, op: Op, value: int) -> list[int]:
    """The operands that are no broadcasts and not much smaller than the result."""
    maker = lambda v: graph.ops[graph.producer[v]].name if v in graph.producer else ""
    found = dict.fromkeys(v for _, v in op.value_operands if maker(v) not in _MADE)
    return [v for v in found if graph.values[v].nbytes * SMALL > graph.values[value].nbytes]


def made_again(graph: Graph, op: Op, value: int) -> bool:
    """Whether each kernel that reads the result of a fusible op makes it itself: it is cheap and made of one operand,
    or of no more than it is itself."""
    large = large_operands(graph, op, value)
    if not large:
        return True
    taken = sum(graph.values[v].nbytes for v in {v for _, v in op.value_operands})
    return not is_costly(op) and (len(large) == 1 or taken <= graph.values[value].nbytes)


def widens(graph: Graph, op: Op) -> bool:
    """Whether an op that may be part of a kernel makes much out of little: a broadcast, an iota."""
    nbytes = lambda v: graph.values[v].nbytes
    taken = sum(nbytes(v) for _, v in op.value_operands)
    return all(nbytes(v) > taken * SMALL for v in op.results) and is_fusible(op)
