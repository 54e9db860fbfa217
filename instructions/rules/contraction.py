"""Contractions: dot_general and convolution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import Any

import numpy as np
from jax import lax

from hapsynth.graph.ir import Op
from hapsynth.instructions.factors import Dim, Factors, Local
from hapsynth.instructions.rules.registry import bind, register

CONTRACTIONS = ("dot_general", "conv_general_dilated")


def is_precise(op: Op) -> bool:
    """Whether a contraction of float32 is of full precision, for which XLA takes no TF32 units. It sums narrower dtypes
    on tensor cores whatever the precision (`GetBlasComputationType`)."""
    if op.name not in CONTRACTIONS or str(op.dtypes[0]) not in ("float32", "complex64"):
        return False
    asked = op.params.get("precision")
    if isinstance(asked, tuple):
        return lax.Precision.HIGHEST in asked
    return asked in (lax.Precision.HIGHEST, lax.DotAlgorithmPreset.F32_F32_F32)


def _flops_of_product(op: Op) -> float:
    """A complex product is four real ones, and as many sums."""
    return 8.0 if np.issubdtype(op.dtypes[0], np.complexfloating) else 2.0


def _dot_flops(op: Op) -> float:
    (contract, _), _ = op.params["dimension_numbers"]
    return _flops_of_product(op) * prod(op.result_shapes[0]) * prod(op.shapes[0][d] for d in contract)


def _dot_on_shard(local: Local, operands: Sequence[Any]) -> list[Any]:
    params = local.op.params
    if local.platform == "cpu":
        operands, params = _one_term(operands, params)
    return bind(local.op.primitive, operands, params)


def _one_term(operands: Sequence[Any], params: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Neighbouring dimensions that are contracted together, as one. XLA's CPU compiler copies an operand transposed
    where there are several: the gradient of weights under sequences takes two to four times as long (JAX 0.10.2)."""
    contracted, batch = params["dimension_numbers"]
    (left, right), count = contracted, len(contracted[0])
    runs = lambda dims: tuple(dims) == tuple(range(dims[0], dims[0] + count))
    if count < 2 or not (runs(left) and runs(right)):
        return operands, params
    joined = [
        lax.reshape(x, (*x.shape[: dims[0]], prod(x.shape[d] for d in dims), *x.shape[dims[0] + count :]))
        for x, dims in zip(operands, contracted)
    ]
    kept = [tuple(d - (count - 1) * (d > dims[0]) for d in mine) for dims, mine in zip(contracted, batch)]
    return joined, {**params, "dimension_numbers": (((left[0],), (right[0],)), tuple(kept))}


@register("dot_general", local=_dot_on_shard, flops=_dot_flops)
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
    f.multiplies((0,), (1,))


def _taps(op: Op, axis: int) -> int:
    """Pairs of an output and a kernel position, along one spatial axis, that meet an element of the input."""
    p, dn = op.params, op.params["dimension_numbers"]
    size, kernel = op.shapes[0][dn.lhs_spec[2 + axis]], op.shapes[1][dn.rhs_spec[2 + axis]]
    outputs = op.result_shapes[0][dn.out_spec[2 + axis]]
    if outputs * kernel > 10**7:
        return outputs * kernel
    starts = np.arange(outputs) * p["window_strides"][axis] - p["padding"][axis][0]
    at = starts[:, None] + np.arange(kernel) * p["rhs_dilation"][axis]
    holes = p["lhs_dilation"][axis]
    return int(np.sum((at >= 0) & (at <= (size - 1) * holes) & (at % holes == 0)))


def _conv_flops(op: Op) -> float:
    """A product and a sum per tap: padding and the holes of a dilated input cost nothing."""
    dn = op.params["dimension_numbers"]
    features = op.shapes[1][dn.rhs_spec[1]] * prod(op.result_shapes[0][d] for d in dn.out_spec[:2])
    return _flops_of_product(op) * features * prod(_taps(op, axis) for axis in range(len(dn.out_spec) - 2))


def _conv_on_shard(local: Local, operands: Sequence[Any]) -> list[Any]:
    """A device that has some of the groups convolves with that many."""
    params = dict(local.op.params)
    lhs, dn = local.factors.operands[0], params["dimension_numbers"]
    for count, dim in (("feature_group_count", lhs[dn.lhs_spec[1]]), ("batch_group_count", lhs[dn.lhs_spec[0]])):
        cut = local.cut(dim)
        if params[count] > 1 and cut is not None:
            params[count] = cut.share
    if local.platform == "cpu":
        return [_channels_last(local.op.primitive, operands, params)]
    return bind(local.op.primitive, operands, params)


def _channels_last(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """A convolution of `n x c` and `w i o`, the one form that XLA's CPU compiler is fast at. It brings others into that
    form itself, but not in branches and loops: gradients take 4 and 12 times as long there (JAX 0.10.2)."""
    dn = params["dimension_numbers"]
    (n, c, *x), (o, i, *w), out = dn.lhs_spec, dn.rhs_spec, dn.out_spec
    last = len(x) + 1
    image, kernel = (0, last, *range(1, last)), (last, last - 1, *range(last - 1))
    numbers = lax.ConvDimensionNumbers(image, kernel, image)
    moved = [lax.transpose(operands[0], (n, *x, c)), lax.transpose(operands[1], (*w, i, o))]
    (made,) = bind(primitive, moved, {**params, "dimension_numbers": numbers})
    return lax.transpose(made, [image[out.index(d)] for d in range(len(out))])


@register("conv_general_dilated", local=_conv_on_shard, flops=_conv_flops)
def _conv_general_dilated(f: Factors) -> None:
    """`n c x, o c w -> n o y`; groups of features: `n (g c) x, (g o) c w -> n (g o) y`; of the batch: `(g n) c x`.

    Spatial dimensions need replication: their halos are not exchanged.
    """
    op, p = f.op, f.op.params
    dn, groups, batches = p["dimension_numbers"], p["feature_group_count"], p["batch_group_count"]
    (n, c), (o, i), (out_n, out_o) = dn.lhs_spec[:2], dn.rhs_spec[:2], dn.out_spec[:2]
    dim = lambda size: (f.new(size),) if size > 1 else ()
    group = dim(groups * batches)  # at most one of both is more than 1
    batch, channels = dim(op.result_shapes[0][out_n]), dim(op.shapes[1][i])
    outputs = dim(op.shapes[1][o] // (groups * batches))

    def tensor(shape: tuple[int, ...], named: dict[int, Dim]) -> tuple[Dim, ...]:
        dims = tuple(named[d] if d in named else dim(size) for d, size in enumerate(shape))
        f.block((x for d, x in enumerate(dims) if d not in named), "the kernel reaches over neighbours")
        return dims

    lhs = {n: (*(group if batches > 1 else ()), *batch), c: (*(group if groups > 1 else ()), *channels)}
    f.operands.append(tensor(op.shapes[0], lhs))
    f.operands.append(tensor(op.shapes[1], {o: (*group, *outputs), i: channels}))
    f.results.append(tensor(op.result_shapes[0], {out_n: batch, out_o: (*group, *outputs)}))
    f.reduce([channels], "sum")
    f.multiplies((0,), (1,))
    if group:
        f.finite_only = (
            "backends compute groups as one convolution with zeros between them, and 0 x NaN is NaN in others"
        )


def _scaled_numbers(op: Op) -> Any:
    """Those of `jax.nn.scaled_matmul` are fixed: `b m k, b n k -> b m n`."""
    return op.params.get("dimension_numbers", (((2,), (2,)), ((0,), (0,))))


def _scaled_flops(op: Op) -> float:
    (contract, _), _ = _scaled_numbers(op)
    return 2.0 * prod(op.result_shapes[0]) * prod(op.shapes[0][d] for d in contract)


@register("scaled_dot", "scaled_matmul_wrapper", flops=_scaled_flops)
def _scaled_dot(f: Factors) -> None:
    """`batch m (s k), batch (s k) n -> batch m n` with scales `batch m s` and `batch s n`, one per block of `k`."""
    op = f.op
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = _scaled_numbers(op)
    lhs: list[Dim] = list(f.dims(op.shapes[0]))
    rhs: list[Dim] = list(f.dims(op.shapes[1]))
    scales = list(lhs), list(rhs)
    for left, right in zip(lhs_batch, rhs_batch):
        rhs[right] = scales[1][right] = lhs[left]
    for left, right in zip(lhs_contract, rhs_contract):
        size, blocks = op.shapes[0][left], (op.shapes[2][left], op.shapes[3][right])
        # A single scale serves the whole dimension; of two that differ, the common blocks are cut. None is a single
        # element, for which JAX takes no scale.
        common = gcd(*(b if b > 1 else size // 2 if size % 2 == 0 else 1 for b in blocks))
        major, minor = f.dims((common,)), f.dims((size // common,))
        lhs[left] = rhs[right] = (*major[0], *minor[0])
        f.reduce(major, "sum")
        for tensor, d, count in zip(scales, (left, right), blocks):
            inside = f.dims((count // common,))[0] if count > 1 else ()
            tensor[d] = (*major[0], *inside) if count > 1 else ()
            f.block((inside,), "inside a block that has one scale")
        f.block(minor, "inside a block that has one scale")
    f.operands += [tuple(lhs), tuple(rhs), *map(tuple, scales)]
    free_left = [dim for d, dim in enumerate(lhs) if d not in (*lhs_contract, *lhs_batch)]
    free_right = [dim for d, dim in enumerate(rhs) if d not in (*rhs_contract, *rhs_batch)]
    f.results.append((*(lhs[d] for d in lhs_batch), *free_left, *free_right))
    f.multiplies((0,), (1,))
