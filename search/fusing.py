"""Which values lie in memory: elementwise ops between others form one kernel with them (DESIGN D5).

Twice: `materialized` says what is moved, which step times count, and `stored` what is held.
"""

from __future__ import annotations

from hapsynth.graph import Graph, Op
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


def widening(graph: Graph, op: Op) -> bool:
    """Whether an op that may be part of a chain makes much out of little: a broadcast, an iota."""
    nbytes = lambda v: graph.values[v].nbytes
    taken = sum(nbytes(v) for _, v in op.value_operands)
    return is_fusible(op) and all(nbytes(v) > taken * _SMALL for v in op.results)


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


_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor")
_MADE = ("broadcast_in_dim", "iota")


def stored(graph: Graph) -> list[bool]:
    """Whether a value is held in memory, as XLA fuses (`InstructionFusion`): an elementwise op is part of the kernel
    that reads it, a reduction too, where that is one; of several kernels each makes it again, if it is cheap and made
    of one operand, or of less than it is itself.
    """
    found = [True] * len(graph.values)
    outputs = {v for v in graph.outputs if isinstance(v, int)}.union(graph.ties.values())
    # The kernels that an op is part of: one, or two of several.
    kernels: list[frozenset[int]] = [frozenset((op.index,)) for op in graph.ops]
    for op in reversed(graph.ops):
        if not is_fusible(op):
            continue
        for value in op.results:
            takers = {o for o, _ in graph.uses[value]}
            fused = all(is_fusible(graph.ops[o]) or graph.ops[o].name in _REDUCTIONS for o in takers)
            if value in outputs or not fused:
                continue
            reach = frozenset[int]().union(*(kernels[o] for o in takers))
            found[value] = len(reach) > 1 and not _made_again(graph, op, value)
            if len(op.results) == 1 and not found[value]:
                kernels[op.index] = frozenset(sorted(reach)[:2])
    return found


def _made_again(graph: Graph, op: Op, value: int) -> bool:
    """Whether each kernel that reads a value makes it itself."""
    operands = {v for _, v in op.value_operands}
    maker = lambda v: graph.ops[graph.producer[v]].name if v in graph.producer else ""
    whole = [graph.values[v].nbytes for v in operands if maker(v) not in _MADE]
    large = [n for n in whole if n * _SMALL > graph.values[value].nbytes]
    return not large or (op.name not in _COSTLY and (len(large) == 1 or sum(whole) <= graph.values[value].nbytes))
