"""Rearrangements: broadcast, reshape, squeeze, transpose, iota and bitcasts."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hapsynth.graph.ir import Literal
from hapsynth.instructions.factors import Factors, Local, Triple
from hapsynth.instructions.layout import P, R
from hapsynth.instructions.rules.registry import bind, no_flops, register


def reorders(f: Factors, *group: int) -> None:
    """The op only moves elements: whatever is partial in the whole group of operands stays so."""
    f.linear = (group or (0,),)
    f.passes = (group or (0,),)


def _local_shape(local: Local) -> dict[str, Any]:
    return {**local.op.params, "shape": local.result_shapes[0]}


@register("broadcast_in_dim", params=_local_shape, flops=no_flops, fusible=True)
def _broadcast_in_dim(f: Factors) -> None:
    """`i, j -> i k j`; a new dimension has a factor that only the result has."""
    x = f.operand(0)
    shape = f.op.result_shapes[0]
    named: list[int | None] = [None] * len(shape)
    for dim, place in zip(x, f.op.params["broadcast_dimensions"]):
        named[place] = dim[0] if dim else None
    f.results.append(f.dims(shape, named))
    reorders(f)
    source = f.op.operands[0]
    if isinstance(source, Literal) and source.is_zero:
        # Zeros are a partial sum of themselves: gradients are accumulated into such a tensor.
        f.extra.append(Triple((R,), (P("sum"),)))


def _local_reshape(local: Local) -> dict[str, Any]:
    return {**local.op.params, "new_sizes": local.result_shapes[0]}


@register("reshape", params=_local_reshape, flops=no_flops, fusible=True)
def _reshape(f: Factors) -> None:
    """`(i j) k -> i (j k)`: the common refinement of both shapes, major to minor.

    Where the sizes do not divide, their greatest common divisor is the major factor and the rest is blocked.
    The operand is read in the order `dimensions`, if that is given.
    """
    shape, new = f.op.shapes[0], f.op.result_shapes[0]
    if 0 in shape:
        f.block(f.operand(0), "empty")
        f.results.append(f.dims(new))
        f.block(f.results[0], "empty")
        return
    order: Sequence[int] = f.op.params["dimensions"] or range(len(shape))
    x, y = _Refinement(f, [shape[d] for d in order]), _Refinement(f, new)
    while x.rest > 1 or y.rest > 1:
        if (common := gcd(x.rest, y.rest)) > 1:
            factor = f.new(common)
            x.take(factor)
            y.take(factor)
        else:
            _skip(x, y)
    f.operands.append(tuple(dim for _, dim in sorted(zip(order, x.dims))))
    f.results.append(y.dims)
    reorders(f)


class _Refinement:
    """A shape read major to minor; `rest` is what is left of the current dimension, 1 at the end."""

    def __init__(self, f: Factors, shape: Sequence[int]) -> None:
        self.f, self.shape = f, shape
        self.found: list[list[int]] = [[] for _ in shape]
        self.d, self.rest = -1, 1
        self.advance()

    def advance(self) -> None:
        while self.rest == 1 and self.d + 1 < len(self.shape):
            self.d += 1
            self.rest = self.shape[self.d]

    def take(self, factor: int) -> None:
        self.found[self.d].append(factor)
        self.rest //= self.f.sizes[factor]
        self.advance()

    def skip(self) -> int:
        """The rest of the dimension becomes a factor of its own that needs replication."""
        size = self.rest
        factor = self.f.new(size)
        self.f.blocked[factor] = "the reshape cuts across it"
        self.take(factor)
        return size

    @property
    def dims(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self.found))


def _skip(x: _Refinement, y: _Refinement) -> None:
    """Pass over a stretch that has no common refinement, up to where both shapes meet again."""
    left, right = x.skip(), y.skip()
    while left != right:
        if left < right:
            left *= x.skip()
        else:
            right *= y.skip()


def _local_tile(local: Local) -> dict[str, Any]:
    """A device that has some of the repetitions repeats that often."""
    reps, dims = local.op.params["reps"], local.factors.results[0]
    cuts = [local.cut(dim) if r > 1 else None for r, dim in zip(reps, dims)]
    return {**local.op.params, "reps": tuple(r if cut is None else cut.share for r, cut in zip(reps, cuts))}


@register("tile", params=_local_tile, flops=no_flops, fusible=True)
def _tile(f: Factors) -> None:
    """`i -> (r i)`: the repetitions are a factor that only the result has."""
    x = f.operand(0)
    repeats = f.dims(f.op.params["reps"])
    f.results.append(tuple((*r, *dim) for r, dim in zip(repeats, x, strict=True)))
    reorders(f)


@register("squeeze", flops=no_flops, fusible=True)
def _squeeze(f: Factors) -> None:
    x = f.operand(0)
    gone = {d % len(x) for d in f.op.params["dimensions"]}
    f.results.append(tuple(dim for d, dim in enumerate(x) if d not in gone))
    reorders(f)


@register("transpose", flops=no_flops, fusible=True)
def _transpose(f: Factors) -> None:
    x = f.operand(0)
    f.results.append(tuple(x[d] for d in f.op.params["permutation"]))
    reorders(f)


def _iota_on_shard(local: Local, operands: Sequence[Any]) -> list[Any]:
    """Counting along a cut dimension starts at this device's offset."""
    params = _local_shape(local)
    dimension = params["dimension"]
    cut = local.cut(local.factors.results[0][dimension])
    if cut is None:
        return bind(local.op.primitive, operands, params)
    counts = jax.lax.broadcasted_iota(jnp.int32, params["shape"], dimension)
    return [(counts + cut.offset()).astype(params["dtype"])]


@register("iota", params=_local_shape, local=_iota_on_shard, flops=no_flops, fusible=True)
def _iota(f: Factors) -> None:
    f.results.append(f.dims(f.op.result_shapes[0]))


@register("empty", params=_local_shape, flops=no_flops, fusible=True)
def _empty(f: Factors) -> None:
    """What it holds is left open, so any shard of it will do."""
    f.results.append(f.dims(f.op.result_shapes[0]))


@register("bitcast_convert_type", flops=no_flops, fusible=True)
def _bitcast(f: Factors) -> None:
    """Between widths, the wider type's bytes are a minor dimension of the narrower."""
    x = f.operand(0)
    shape = f.op.result_shapes[0]
    shared = min(len(x), len(shape))
    named = [dim[0] if dim else None for dim in x[:shared]]
    result = f.dims(shape, [*named, *[None] * (len(shape) - shared)])
    f.results.append(result)
    f.block((*x[shared:], *result[shared:]), "the parts of one element")
    if f.op.dtypes[0] == f.op.result_dtypes[0] and np.dtype(f.op.dtypes[0]) != np.bool_:
        reorders(f)
