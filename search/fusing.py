"""Which values lie in memory: elementwise ops between others form one kernel with them (DESIGN D5)."""

from __future__ import annotations

from hapsynth.graph import Graph
from hapsynth.instructions.rules.registry import is_fusible

_COSTLY = frozenset(
    (
        *("tanh", "exp", "exp2", "expm1", "log", "log1p", "logistic", "div", "sqrt", "rsqrt", "cbrt", "pow", "rem"),
        *("integer_pow", "erf", "erfc", "erf_inv", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh"),
        *("cosh", "asinh", "acosh", "atanh", "lgamma", "digamma", "random_bits"),
    )
)
"""Elementwise ops whose result is kept rather than computed again by each kernel that reads it."""
_SMALL = 8
"""A tensor this many times smaller than what is made of it is as good as none."""


def materialized(graph: Graph) -> list[bool]:
    """Whether a value lies in memory: sources, outputs, and whatever an op that is no part of a fused chain makes or
    takes. What several ops take is stored too, as what autodiff saves for the backward pass is, unless each can make
    it again: out of something small, or cheaply out of one tensor that is stored.

    Chosen by `benchmarks/bench_memory.py`: predicted peak over `memory_analysis()` of XLA's CPU backend.
    """
    stored = [True] * len(graph.values)
    outputs = {v for v in graph.outputs if isinstance(v, int)}.union(graph.ties.values())
    nbytes = lambda v: graph.values[v].nbytes
    for op in graph.ops:
        if not is_fusible(op):
            continue
        for value in op.results:
            takers = {o for o, _ in graph.uses[value]}
            if value in outputs or not all(is_fusible(graph.ops[o]) for o in takers):
                continue
            large = [v for _, v in op.value_operands if nbytes(v) * _SMALL > nbytes(value)]
            again = not large or (op.name not in _COSTLY and len(large) == 1 and stored[large[0]])
            stored[value] = len(takers) > 1 and not again
    return stored
