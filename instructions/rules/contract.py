"""Contractions: dot_general and convolution."""

from __future__ import annotations

from math import prod

from hapsynth.graph import Op
from hapsynth.instructions.factors import Factors
from hapsynth.instructions.rules.registry import register


def _dot_flops(op: Op) -> float:
    (contract, _), _ = op.params["dimension_numbers"]
    return 2.0 * prod(op.result_shapes[0]) * prod(op.shapes[0][d] for d in contract)


@register("dot_general", flops=_dot_flops)
def _dot_general(f: Factors) -> None:
    """`batch m k, batch k n -> batch m n`; a contracted factor leaves a partial sum."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = f.op.params["dimension_numbers"]
    lhs = f.operand(0)
    shared: list[int | None] = [None] * len(f.op.shapes[1])
    for left, right in zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch)):
        shared[right] = lhs[left][0] if lhs[left] else None
    rhs = f.dims(f.op.shapes[1], shared)
    f.operands.append(rhs)
    free_left = [lhs[d] for d in range(len(lhs)) if d not in (*lhs_contract, *lhs_batch)]
    free_right = [rhs[d] for d in range(len(rhs)) if d not in (*rhs_contract, *rhs_batch)]
    f.results.append((*(lhs[d] for d in lhs_batch), *free_left, *free_right))
    f.reduce((lhs[d] for d in lhs_contract), "sum")
    f.linear = ((0,), (1,))
