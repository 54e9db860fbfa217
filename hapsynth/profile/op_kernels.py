"""The kernels that measure how fast a device is.

A kernel repeats one op on its own result, so that nothing can be left out or run side by side; values stay at 1 or 0.
Sizes rise within a family, so that the later ones can be left out where they would take too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hapsynth.cluster.op_classes import POSITION_FLOPS
from hapsynth.graph.trace import trace
from hapsynth.instructions.rules.window import chosen_given
from hapsynth.search.analysis.op_class import amount_of, class_of

_Sizes = tuple[int, ...]
Operand = tuple[tuple[int, ...], float]
"""Shape, and the value of every element."""


@dataclass(frozen=True)
class Kernel:
    """`fn` of `operands` runs `repeats` ops of `amount` FLOPs (`stream`: bytes) each, in `launches` kernels: one of
    each op, as plans count them, and those of the program around them.

    `dtype`: of its operands, or tf32 for products of float32 that are not precise. `op`: of a family that is an op's
    signature, its name for a person. `result`: its shape, where that is not the first operand's. `in_place`: whether
    the result takes the first operand's place, and is the first operand of the next run.
    """

    family: str
    dtype: str
    size: int
    fn: Callable[..., Any]
    operands: tuple[Operand, ...]
    amount: float
    repeats: int
    launches: int
    op: str = ""
    result: tuple[int, ...] | None = None
    in_place: bool = False

    @property
    def key(self) -> str:
        return f"{self.family}/{self.dtype}/{self.size}"

    @property
    def held_as(self) -> str:
        """The dtype of its operands."""
        return "float32" if self.dtype == TF32 else self.dtype

    @property
    def nbytes(self) -> float:
        """Of its operands and result."""
        result = self.operands[0][0] if self.result is None else self.result
        elements = sum(prod(shape) for shape, _ in self.operands) + prod(result)
        return float(elements * jnp.dtype(self.held_as).itemsize)


TF32 = "tf32"
DISPATCH, LAUNCH, STREAM = "dispatch", "launch", "stream"
_CHAIN = 32
_LAYERS = ((256, 64), (1024, 128), *((max(1 << 22 >> k, 8 << k), 1 << k) for k in range(7, 13)))
"""(rows, width). From the third on too much for caches, as what a step multiplies is when it comes to it: from caches
XLA's CPU backend multiplies a fifth faster."""
_IMAGE, _CHANNELS = 28, 64
_TOKENS, _HEAD = 128, 64


def kernels(dtypes: Sequence[str], quick: bool) -> Iterator[Kernel]:
    """All that is measured on each device, families one after another, each from small to large. With tf32 among the
    dtypes, as on accelerators, float32 is of full precision, and `quick` sizes are those that take them long enough to
    be told from the start of a program."""
    few: Callable[[_Sizes, _Sizes], _Sizes] = lambda on_cpu, on_accelerator: (
        on_accelerator if TF32 in dtypes else on_cpu
    )
    yield Kernel(DISPATCH, "float32", 8, lambda x: x + 1, (((8,), 1.0),), 0.0, 1, 1)
    yield _repeated(LAUNCH, "float32", 8, lambda x, w: x @ w, (((8, 8), 1.0), ((8, 8), 1 / 8)), 2 * 8**3, 4 * _CHAIN)
    for size in (1 << 22, 1 << 24) if quick else (1 << 22, 1 << 24, 1 << 26):
        yield _stream(size)
    for dtype in dtypes:
        precision = None
        if TF32 in dtypes:
            precision = {TF32: lax.Precision.DEFAULT, "float32": lax.Precision.HIGHEST}.get(dtype)
        for rows, width in _LAYERS[:3] if quick else _LAYERS:
            yield _layer(dtype, rows, width, precision)
        for batch in few((2, 32), (32, 512)) if quick else (2, 8, 32, 128, 512, 2048):
            yield _batch_matmul(dtype, batch, precision)
        for batch in few((1, 4), (4, 64)) if quick else (1, 4, 16, 64, 256):
            yield _convolution(dtype, batch, precision)
        if dtype == TF32:
            continue
        for batch in few((1, 4), (16, 64)) if quick else (1, 16, 64):
            yield _pooling(dtype, batch)
        for size in few((1 << 17,), (1 << 23,)) if quick else (1 << 14, 1 << 17, 1 << 20, 1 << 23):
            yield _chain("elementwise", dtype, size, lambda x, w: x * w + w, 2 * _CHAIN)
            yield _chain("transcendental", dtype, size, lambda x, w: jnp.tanh(x + w), _CHAIN)
            yield _reduction(dtype, size)


def largest_matmul(ran: Sequence[Kernel]) -> Kernel | None:
    """Of float32, of those that were run."""
    return next((k for k in reversed(ran) if (k.family, k.dtype) == ("matmul", "float32")), None)


def _stream(size: int) -> Kernel:
    """Reads and writes all of an array, again and again in the same memory: a loop, as a chain would be one kernel.

    Of an operand that is to stay as it is, XLA makes a copy first, which takes as long as a pass.
    """

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 8, lambda _, x: x * w, x)

    # The loop's counter is written once before it and once in each pass.
    operands: tuple[Operand, ...] = (((size,), 1.0), ((), 1.0))
    return Kernel(STREAM, "float32", size, fn, operands, 8.0 * size, 8, 2 * 8 + 1, in_place=True)


def _repeated(
    family: str, dtype: str, size: int, op: Callable[..., Any], operands: tuple[Operand, ...], flops: float, times: int
) -> Kernel:
    """x = op(x, ...), a launch each time."""

    def fn(x: jax.Array, *rest: jax.Array) -> jax.Array:
        for _ in range(times):
            x = op(x, *rest)
        return x

    return Kernel(family, dtype, size, fn, operands, float(flops), times, times)


def _layer(dtype: str, rows: int, width: int, precision: lax.Precision | None) -> Kernel:
    """The products of a layer's training step: rows by square weights, and the gradients of both."""

    product = partial(jnp.matmul, precision=precision)

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(2):
            y, of_both = jax.vjp(product, x, w)
            w = of_both(y)[1] * (1 / (rows * width))
            _, of_x = jax.vjp(lambda x, w=w: product(x, w), x)
            (x,) = of_x(y)
        return x

    operands: tuple[Operand, ...] = (((rows, width), 1.0), ((width, width), 1 / width))
    terms = rows * width * width
    # The weights' gradients are scaled, twice.
    return Kernel("matmul", dtype, terms, fn, operands, 2.0 * terms, 6, 6 + 2)


def _batch_matmul(dtype: str, batch: int, precision: lax.Precision | None) -> Kernel:
    """Attention's two products, over batch x heads."""
    dot = lambda x, y, dims: lax.dot_general(x, y, (dims, ((0,), (0,))), precision=precision)

    def fn(x: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(2):
            x = dot(dot(x, k, ((2,), (2,))), v, ((2,), (1,)))
        return x

    shape = (batch, _TOKENS, _HEAD)
    operands: tuple[Operand, ...] = ((shape, 1.0), (shape, 1 / _HEAD), (shape, 1 / _TOKENS))
    return Kernel("batch_matmul", dtype, batch, fn, operands, 2.0 * batch * _TOKENS**2 * _HEAD, 4, 4)


def _convolved(x: jax.Array, w: jax.Array, precision: lax.Precision | None) -> jax.Array:
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims, precision=precision)


def _convolution(dtype: str, batch: int, precision: lax.Precision | None) -> Kernel:
    """3 x 3, as many channels out as in, and the gradients of both operands: that of the kernel is the slowest."""

    weights, images = (3, 3, _CHANNELS, _CHANNELS), (batch, _IMAGE, _IMAGE, _CHANNELS)

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        y, gradients = jax.vjp(partial(_convolved, precision=precision), x, w)
        x, w = gradients(y)
        return x + w[1, 1, 0] * (1e-3 / prod(images[:-1]))

    operands: tuple[Operand, ...] = ((images, 1.0), (weights, 1 / (9 * _CHANNELS)))
    positions = prod(images[:-1])
    # The kernel's gradient has few positions, the others have the images'.
    amount = 2.0 * positions * prod(weights) + POSITION_FLOPS * positions * 2 / 3
    return Kernel("convolution", dtype, batch, fn, operands, amount, 3, 3)


def _pooling(dtype: str, batch: int) -> Kernel:
    """The gradient of a maximum over 3 x 3, at every second position."""
    pooled = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    images, halved = (batch, _IMAGE, _IMAGE, _CHANNELS), (batch, _IMAGE // 2, _IMAGE // 2, _CHANNELS)
    shapes = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in (images, halved))
    traced = trace(lambda x, of: jax.vjp(pooled, x)[1](of)[0], tuple(shapes))
    (op,) = (op for op in traced.graph.ops if class_of(op) == "pooling")
    # As it is lowered, not as XLA has it.
    gradient = lambda x, of: chosen_given(of, x, op.params)
    return _repeated("pooling", dtype, batch, gradient, ((images, 1.0), (halved, 1.0)), amount_of(op), 2)


def _chain(family: str, dtype: str, size: int, op: Callable[..., Any], ops: int) -> Kernel:
    """Elementwise ops that make one kernel, so many that it computes rather than reads."""

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(_CHAIN):
            x = op(x, w)
        return x

    return Kernel(family, dtype, size, fn, (((size,), 0.5), ((), 0.5)), float(size), ops, 1)


def _reduction(dtype: str, size: int) -> Kernel:
    """Sums of rows; each waits for the one before. Of zeros, or XLA would have to keep them from growing."""

    def fn(x: jax.Array, start: jax.Array) -> jax.Array:
        for _ in range(8):
            start = (x + start[:, None]).sum(axis=1)
        return start

    rows = max(size // 1024, 1)
    return Kernel("reduction", dtype, size, fn, (((rows, size // rows), 0.0), ((rows,), 0.0)), float(size), 8, 8)
