"""Contractions whose rows belong to groups: ragged_dot_general in its three modes.

The group sizes are known on every device at run time, so a device that has some of the rows, or some of the groups,
works out how many of its rows each group has.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from hapsynth.graph.ir import Op
from hapsynth.instructions.factors import Cut, Dim, Factors, Local
from hapsynth.instructions.rules.registry import bind, register


def _numbers(op: Op) -> tuple[Any, Any, Any, Any, int, int | None]:
    """Contracting and batch dimensions of both sides, the ragged one of the left, the groups' of the right."""
    dn = op.params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dn.dot_dimension_numbers
    group = dn.rhs_group_dimensions[0] if dn.rhs_group_dimensions else None
    return lhs_contract, rhs_contract, lhs_batch, rhs_batch, dn.lhs_ragged_dimensions[0], group


def _flops(op: Op) -> float:
    """Every row meets the matrix of its own group only."""
    _, rhs_contract, _, rhs_batch, _, group = _numbers(op)
    free = [n for d, n in enumerate(op.shapes[1]) if d not in (*rhs_contract, *rhs_batch, group)]
    return 2.0 * prod(op.shapes[0]) * prod(free)


def _rows_of_groups(rows: Cut, sizes: Any) -> Any:
    """How many of this device's rows each group has."""
    ends = jnp.cumsum(sizes, -1, dtype=sizes.dtype)
    first = rows.offset().astype(sizes.dtype)
    return jnp.clip(ends - first, 0, rows.share) - jnp.clip(ends - sizes - first, 0, rows.share)


def _on_shard(local: Local, operands: Sequence[Any]) -> list[Any]:
    op, f = local.op, local.factors
    lhs_contract, rhs_contract, lhs_batch, _, ragged, group = _numbers(op)
    lhs, rhs, sizes = operands
    # Differences of small or unsigned sizes would wrap.
    sizes = sizes.astype(jnp.int64 if sizes.dtype.itemsize == 8 else jnp.int32)
    if (rows := local.cut(f.operands[0][ragged])) is not None:
        sizes = _rows_of_groups(rows, sizes)
    if (groups := local.cut(_groups(f))) is None:
        return bind(op.primitive, [lhs, rhs, sizes], op.params)
    # Of this device's rows, those of its own groups are brought to the front.
    before = jnp.where(jnp.arange(sizes.shape[0], dtype=jnp.int32) < groups.offset(), sizes, 0).sum()
    sizes = lax.dynamic_slice_in_dim(sizes, groups.offset(), groups.share)
    lhs = jnp.roll(lhs, -before, ragged)
    if group is None:
        rhs = jnp.roll(rhs, -before, rhs_contract[lhs_contract.index(ragged)])
        return bind(op.primitive, [lhs, rhs, sizes], op.params)
    (out,) = bind(op.primitive, [lhs, rhs, sizes], op.params)
    free = [d for d in range(lhs.ndim) if d not in (*lhs_contract, *lhs_batch)]
    place = len(lhs_batch) + free.index(ragged)
    mine = lax.broadcasted_iota(sizes.dtype, out.shape, place) < sizes.sum(dtype=sizes.dtype)
    return [jnp.roll(jnp.where(mine, out, 0), before, place)]


def _groups(f: Factors) -> Dim:
    """The dimension of the groups themselves: of the right operand, or else of the result."""
    lhs_contract, _, _, _, ragged, group = _numbers(f.op)
    if group is not None:
        return f.operands[1][group]
    return f.results[0][0] if ragged in lhs_contract else ()


@register("ragged_dot_general", local=_on_shard, flops=_flops)
def _ragged_dot_general(f: Factors) -> None:
    """`(g) k, g k n -> (g) n`, where `(g)` are rows in groups; `m (g), (g) n -> g m n`; `(g) m k, (g) k n -> (g) m n`.

    Each device has some of the rows, or in the first two forms some of the groups: then their rows are zero elsewhere.
    """
    op = f.op
    lhs_contract, rhs_contract, lhs_batch, rhs_batch, ragged, group = _numbers(op)
    lhs = f.operand(0)
    shared: list[int | None] = [None] * len(op.shapes[1])
    for left, right in zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch)):
        shared[right] = lhs[left][0] if lhs[left] else None
    rhs = f.dims(op.shapes[1], shared)
    f.operands.append(rhs)
    free_left = [d for d in range(len(lhs)) if d not in (*lhs_contract, *lhs_batch)]
    free_right = [rhs[d] for d in range(len(rhs)) if d not in (*rhs_contract, *rhs_batch, group)]
    # The sizes may differ along what is outside the ragged dimension among the dimensions of its own sort.
    outer: tuple[Dim, ...] = ()
    if len(op.shapes[2]) > 1:
        sort = next(s for s in (lhs_contract, lhs_batch, free_left) if ragged in s)
        before = [*(lhs_batch if sort is not lhs_batch else ()), *sort[: tuple(sort).index(ragged)]]
        outer = tuple(lhs[d] for d in before)
    counts = f.dims(op.shapes[2][-1:])
    f.block(counts, "every device needs the sizes of all groups")
    f.operands.append((*outer, *counts))
    result = (*(lhs[d] for d in lhs_batch), *(lhs[d] for d in free_left), *free_right)
    groups = f.dims(op.result_shapes[0][:1]) if ragged in lhs_contract else ()
    f.results.append((*groups, *result))
    f.reduce((lhs[d] for d in lhs_contract), "sum")
    if group is not None:
        f.reduce([rhs[group]], "sum")
    if outer:
        f.block((*groups, *([rhs[group]] if group is not None else [])), "each batch has its own first rows of a group")
    f.multiplies((0,), (1,))
    f.finite_only = "backends compute groups as one product with zeros between them, and 0 x NaN is NaN in other groups"
