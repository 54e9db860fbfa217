"""gather and the scatters, with full dimension numbers.

Index batch dimensions go with the result's (or the updates') batch dimensions; a dimension taken whole passes; a
dimension that is indexed one element at a time may be cut: each device serves the indices that fall into its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode as Mode

from hapsynth.graph.ir import Op
from hapsynth.instructions.factors import Cut, Dim, Factors, Local, Reduction
from hapsynth.instructions.layout import reduction_of
from hapsynth.instructions.rules.reduce import extreme
from hapsynth.instructions.rules.registry import apart, bind, clamped, identity, no_flops, register

_INT32 = jnp.iinfo(jnp.int32)
_MODES = (Mode.CLIP, Mode.FILL_OR_DROP, Mode.PROMISE_IN_BOUNDS)
_PART = "part of the dimension is taken, from a start that is known at run time only"
_IN_ANY_ORDER = {"indices_are_sorted": False, "unique_indices": False}
"""Parameters where indices are not those that the function was promised to have."""


# ---- what gather and scatter share


def _index(f: Factors, x: tuple[Dim, ...], operand_batch: Sequence[int], index_batch: Sequence[int]) -> tuple[Dim, ...]:
    """The factors of the index tensor; its last dimension holds the components of one index."""
    named: list[int | None] = [None] * len(f.op.shapes[1])
    for d, i in zip(operand_batch, index_batch):
        named[i] = x[d][0] if x[d] else None
    dims = f.dims(f.op.shapes[1], named)
    f.block([dims[-1]], "the components of one index")
    f.operands.append(dims)
    return dims


def _windows(
    f: Factors, x: Sequence[Dim], index: Sequence[Dim], shape: Sequence[int], places: Sequence[int], alone: set[int]
) -> tuple[Dim, ...]:
    """The factors of what all indices read or write, of a `shape` in which an index's own dimensions are at `places`,
    those of the operand that are not `alone`."""
    window, of = extents(f.op), dict(zip(places, (d for d in range(len(x)) if d not in alone)))
    batch, found = iter(index[:-1]), list[Dim]()
    for place, size in enumerate(shape):
        d = of.get(place)
        if d is None:
            found.append(next(batch))
        elif window[d] == f.op.shapes[0][d]:
            found.append(x[d])
        else:
            found += f.dims((size,))
            f.block(found[-1:], _PART)
    return tuple(found)


def components(op: Op) -> tuple[int, ...]:
    """The operand dimension that each component of an index counts along."""
    dn = op.params["dimension_numbers"]
    return dn.start_index_map if op.name == "gather" else dn.scatter_dims_to_operand_dims


def extents(op: Op) -> tuple[int, ...]:
    """The extent, along each operand dimension, of what one index reads or writes."""
    if op.name == "gather":
        return tuple(op.params["slice_sizes"])
    dn = op.params["dimension_numbers"]
    alone = {*dn.inserted_window_dims, *dn.operand_batching_dims}
    sizes = iter(op.shapes[2][d] for d in dn.update_window_dims)
    return tuple(1 if d in alone else next(sizes) for d in range(len(op.shapes[0])))


def _batching(op: Op) -> tuple[int, ...]:
    return op.params["dimension_numbers"].operand_batching_dims


def _servable(op: Op, d: int) -> bool:
    """Whether the operand may be cut along `d`, each device serving its own part of the indices."""
    size, window = op.shapes[0][d], extents(op)[d]
    indexed = d in components(op) and d not in _batching(op)
    return indexed and window == 1 < size < _INT32.max and op.params["mode"] in _MODES


def _served(local: Local) -> list[tuple[int, int, Cut]]:
    """The operand dimensions along which this device serves a part of the indices: (dimension, component of an index,
    part)."""
    dims = enumerate(local.factors.operands[0])
    cuts = [(d, cut) for d, dim in dims if (cut := local.cut(dim)) is not None and _servable(local.op, d)]
    return [(d, components(local.op).index(d), cut) for d, cut in cuts]


def _as_int32(index: Any) -> Any:
    """Any integers as int32; what does not fit stays out of every range."""
    info = jnp.iinfo(index.dtype)
    if info.max > _INT32.max:
        index = jnp.minimum(index, jnp.asarray(_INT32.max, index.dtype))
    if info.min < _INT32.min:
        index = jnp.maximum(index, jnp.asarray(_INT32.min, index.dtype))
    return index.astype(jnp.int32)


def _with_component(index: Any, column: int, component: Any) -> Any:
    here = np.arange(index.shape[-1]) == column
    return jnp.where(here, component[..., None], index)


# ---- gather


def _local_gather(local: Local) -> dict[str, Any]:
    """A dimension taken whole is taken whole from the shard."""
    full, here = local.op.shapes[0], local.shapes[0]
    sizes = tuple(h if w == n else w for w, n, h in zip(local.op.params["slice_sizes"], full, here))
    return {**local.op.params, "slice_sizes": sizes}


def _gather_on_shard(local: Local, operands: Sequence[Any]) -> list[Any]:
    """Serve the indices in [offset, offset + share); the others yield the partial's identity.

    The device that holds the nearest element serves an index out of range as well: so it is clipped, or filled,
    exactly once.
    """
    op, params, served = local.op, _local_gather(local), _served(local)
    if not served:
        return _gather_at(local, operands[0], operands[1], params)
    x, index = operands[0], _as_int32(operands[1])
    mine = True
    for d, column, cut in served:
        wanted = index[..., column]
        nearest = jnp.clip(wanted, 0, op.shapes[0][d] - 1)
        place = nearest - cut.offset()
        mine &= (place >= 0) & (place < cut.end)
        place = jnp.clip(place, 0, cut.share - 1)
        if params["mode"] == Mode.FILL_OR_DROP:
            place = jnp.where(wanted == nearest, place, cut.share)
        index = _with_component(index, column, place)
    params |= _IN_ANY_ORDER
    (out,) = _gather_at(local, x, index, params)
    mine = jnp.expand_dims(mine, tuple(op.params["dimension_numbers"].offset_dims))
    nothing = jnp.asarray(identity(reduction_of(local.result_layout(0)), out.dtype), out.dtype)
    return [jnp.where(mine, out, nothing)]


def _gather_at(local: Local, x: Any, index: Any, params: dict[str, Any]) -> list[Any]:
    """A single index, of which XLA makes a dynamic slice, is clamped; what is filled is none of it."""
    if prod(index.shape) == index.shape[-1] > 0 and params["mode"] != Mode.FILL_OR_DROP:
        room = [x.shape[d] - params["slice_sizes"][d] for d in components(local.op)]
        index = jnp.concatenate(clamped([index[..., n : n + 1] for n in range(len(room))], room), -1)
    return bind(local.op.primitive, [x, index], params)


@register("gather", params=_local_gather, local=_gather_on_shard, flops=no_flops)
def _gather(f: Factors) -> None:
    """`v d, b 1 -> b d`, with the indexed `v` left to a sum: one device has the element, the others zero."""
    op, dn, window = f.op, f.op.params["dimension_numbers"], extents(f.op)
    x = f.operand(0)
    index = _index(f, x, dn.operand_batching_dims, dn.start_indices_batching_dims)
    alone = {*dn.collapsed_slice_dims, *dn.operand_batching_dims}
    f.results.append(_windows(f, x, index, op.result_shapes[0], dn.offset_dims, alone))
    reduction: Reduction = "max" if np.dtype(op.dtypes[0]) == np.bool_ else "sum"
    for d, dim in enumerate(x):
        if _servable(op, d):
            f.reduce([dim], reduction)
        elif window[d] != op.shapes[0][d] and d not in dn.operand_batching_dims:
            f.block([dim], _PART)
    f.linear = ((0,),) if _fills_alike(op) else ()
    f.passes = ((0,),)


def _fills_alike(op: Op) -> bool:
    """Whether the filling of all devices sums to one filling."""
    fill = op.params["fill_value"]
    if op.params["mode"] in (Mode.CLIP, Mode.PROMISE_IN_BOUNDS):
        return True
    if op.params["mode"] != Mode.FILL_OR_DROP:
        return False
    if fill is None:
        return jnp.issubdtype(op.dtypes[0], jnp.inexact)
    return bool(fill == 0 or fill != fill)


# ---- scatter


def _scatter_on_shard(local: Local, operands: Sequence[Any]) -> list[Any]:
    """Drop the updates that fall outside [offset, offset + share)."""
    op, served = local.op, _served(local)
    if prod(operands[1].shape[:-1]) == 1:
        # XLA makes a dynamic slice and an update of it; what is dropped is not clamped.
        operands = [apart(operands[0]), *operands[1:]]
    if not served:
        # Behind the end of a padded shard indices are 0, as others may be too.
        padded = any(cut.held is not None for cut in local.cuts.values())
        return bind(op.primitive, operands, op.params | _IN_ANY_ORDER if padded else op.params)
    x, index, updates = operands[0], _as_int32(operands[1]), operands[2]
    if op.params["mode"] == Mode.CLIP:
        # Clip where the whole operand would; the shard itself must drop.
        room = [op.shapes[0][c] - extents(op)[c] for c in components(op)]
        index = jnp.clip(index, 0, np.broadcast_to(np.asarray(room, np.int32), index.shape))
    for _, column, cut in served:
        wanted = index[..., column]
        place = wanted - cut.offset()
        mine = (wanted >= 0) & (place >= 0) & (place < cut.end)
        index = _with_component(index, column, jnp.where(mine, place, cut.share))
    params = {**op.params, **_IN_ANY_ORDER, "mode": Mode.FILL_OR_DROP}
    return bind(op.primitive, [x, index, updates], params)


def _scatter_factors(f: Factors, reduction: Reduction) -> None:
    """`v d, b 1, b d -> v d`; with a reduction, a cut `b` accumulates into a partial of that kind."""
    op, dn, window = f.op, f.op.params["dimension_numbers"], extents(f.op)
    x = f.operand(0)
    index = _index(f, x, dn.operand_batching_dims, dn.scatter_indices_batching_dims)
    alone = {*dn.inserted_window_dims, *dn.operand_batching_dims}
    f.operands.append(_windows(f, x, index, op.shapes[2], dn.update_window_dims, alone))
    f.results.append(x)
    for d, dim in enumerate(x):
        if window[d] != op.shapes[0][d] and d not in dn.operand_batching_dims and not _servable(op, d):
            f.block([dim], _PART)
    for i, dim in enumerate(index[:-1]):
        if i in dn.scatter_indices_batching_dims:
            continue
        if not reduction:
            f.block([dim], "updates of one element must meet in one place")
        for factor in dim if reduction else ():
            f.reductions[factor] = reduction
            f.accumulators[factor] = 0


def _update_flops(op: Op) -> float:
    return float(prod(op.shapes[2]))


@register("scatter-add", "scatter-sub", local=_scatter_on_shard, flops=_update_flops)
def _scatter_add(f: Factors) -> None:
    _scatter_factors(f, "sum")
    f.linear = ((0, 2),)


@register("scatter-max", "scatter-min", local=_scatter_on_shard, flops=_update_flops)
def _scatter_extreme(f: Factors) -> None:
    _scatter_factors(f, extreme(f))


@register("scatter-mul", local=_scatter_on_shard, flops=_update_flops)
def _scatter_mul(f: Factors) -> None:
    """Linear in the operand, element by element, once the updates are known."""
    _scatter_factors(f, "")
    f.multiplies((0,))


@register("scatter", local=_scatter_on_shard, flops=no_flops)
def _scatter(f: Factors) -> None:
    """Which of several updates of one element wins may differ between devices: then no partial passes."""
    _scatter_factors(f, "")
    if f.op.params["unique_indices"] and f.op.params["update_jaxpr"] is None:
        f.linear = ((0, 2),)
        f.passes = ((0, 2),)
