"""Parts and joins: slice, dynamic slices and updates, concatenate, split, pad, rev.

A dimension that is taken whole passes; one that is cut, joined or shifted needs replication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from hapsynth.instructions.factors import Dim, Factors, Local
from hapsynth.instructions.rules.registry import bind, clamped, no_flops, register
from hapsynth.instructions.rules.reshaping import reorders


def passing(
    f: Factors, dims: tuple[Dim, ...], shape: Sequence[int], whole: Sequence[bool], why: str
) -> tuple[Dim, ...]:
    """The dimensions of another tensor that shares the `whole` ones with `dims`; the others are blocked in both."""
    named = [dim[0] if dim and w else None for dim, w in zip(dims, whole, strict=True)]
    other = f.dims(shape, named)
    f.block((dim for dim, w in zip((*dims, *other), (*whole, *whole)) if not w), why)
    return other


def _local_slice(local: Local) -> dict[str, Any]:
    params, full, here = local.op.params, local.op.shapes[0], local.shapes[0]
    limits = tuple(h if limit == n else limit for limit, n, h in zip(params["limit_indices"], full, here))
    return {**params, "limit_indices": limits}


@register("slice", params=_local_slice, flops=no_flops, fusible=True)
def _slice(f: Factors) -> None:
    x = f.operand(0)
    shape = f.op.result_shapes[0]
    strides = f.op.params["strides"] or (1,) * len(x)
    whole = [n == m and step == 1 for n, m, step in zip(f.op.shapes[0], shape, strides)]
    f.results.append(passing(f, x, shape, whole, "sliced"))
    reorders(f)


def _clamped(local: Local, starts: Sequence[Any], window: Sequence[int]) -> list[Any]:
    dtypes = local.op.dtypes[len(local.op.dtypes) - len(starts) :]
    room = [n - m for n, m in zip(local.shapes[0], window, strict=True)]
    return clamped([jnp.asarray(start, dtype) for start, dtype in zip(starts, dtypes, strict=True)], room)


def _slice_on_shard(local: Local, operands: Sequence[Any]) -> list[Any]:
    x, *starts = operands
    window = local.result_shapes[0]
    return bind(local.op.primitive, [x, *_clamped(local, starts, window)], {**local.op.params, "slice_sizes": window})


def _update_on_shard(local: Local, operands: Sequence[Any]) -> list[Any]:
    x, update, *starts = operands
    return bind(local.op.primitive, [x, update, *_clamped(local, starts, local.shapes[1])], local.op.params)


@register("dynamic_slice", local=_slice_on_shard, flops=no_flops, fusible=True)
def _dynamic_slice(f: Factors) -> None:
    x = f.operand(0)
    for start in range(1, len(f.op.operands)):
        f.operand(start)
    shape = f.op.result_shapes[0]
    whole = [n == m for n, m in zip(f.op.shapes[0], shape)]
    f.results.append(passing(f, x, shape, whole, "sliced"))
    reorders(f)


@register("dynamic_update_slice", local=_update_on_shard, flops=no_flops, fusible=True)
def _dynamic_update_slice(f: Factors) -> None:
    x = f.operand(0)
    shape = f.op.shapes[1]
    whole = [n == m for n, m in zip(f.op.shapes[0], shape)]
    f.operands.append(passing(f, x, shape, whole, "updated in part"))
    for start in range(2, len(f.op.operands)):
        f.operand(start)
    f.results.append(x)
    reorders(f, 0, 1)


@register("concatenate", flops=no_flops, fusible=True)
def _concatenate(f: Factors) -> None:
    axis = f.op.params["dimension"]
    result = f.dims(f.op.result_shapes[0])
    whole = [d != axis for d in range(len(result))]
    for shape in f.op.shapes:
        f.operands.append(passing(f, result, shape, whole, "concatenated"))
    f.results.append(result)
    reorders(f, *range(len(f.op.operands)))


@register("stack", flops=no_flops, fusible=True)
def _stack(f: Factors) -> None:
    axis = f.op.params["axis"]
    x = f.operand(0)
    f.operands += [x] * (len(f.op.operands) - 1)
    new = f.dims((len(f.op.operands),))
    f.block(new, "stacked")
    f.results.append((*x[:axis], *new, *x[axis:]))
    reorders(f, *range(len(f.op.operands)))


@register("unstack", flops=no_flops, fusible=True)
def _unstack(f: Factors) -> None:
    axis = f.op.params["axis"]
    x = f.operand(0)
    f.block([x[axis]], "unstacked")
    f.results += [(*x[:axis], *x[axis + 1 :])] * len(f.op.results)
    reorders(f)


@register("split", flops=no_flops, fusible=True)
def _split(f: Factors) -> None:
    axis = f.op.params["axis"]
    x = f.operand(0)
    whole = [d != axis for d in range(len(x))]
    for shape in f.op.result_shapes:
        f.results.append(passing(f, x, shape, whole, "split"))
    reorders(f)


@register("pad", flops=no_flops, fusible=True)
def _pad(f: Factors) -> None:
    """Partial in the operand and the padding value together; a literal zero is a partial sum of itself."""
    x = f.operand(0)
    f.operand(1)
    whole = [tuple(c) == (0, 0, 0) for c in f.op.params["padding_config"]]
    f.results.append(passing(f, x, f.op.result_shapes[0], whole, "padded"))
    reorders(f, 0, 1)


@register("rev", flops=no_flops, fusible=True)
def _rev(f: Factors) -> None:
    x = f.operand(0)
    f.block((x[d] for d in f.op.params["dimensions"]), "reversed")
    f.results.append(x)
    reorders(f)
