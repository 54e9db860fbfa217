"""Running one triple on simulated devices: what a rule claims, tried out.

The full operands are split as the triple's precondition says, every device runs the op on its own exact shards, and
the results, combined as the postcondition says, must equal the plain op's. The tests try every triple of every
registered primitive this way; a user's own rule can be tried the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np

from hapsynth.graph import Literal, Op
from hapsynth.instructions.factors import Dim, Factors, Local, Triple
from hapsynth.instructions.layout import Placement
from hapsynth.instructions.rules.registry import bind, execute, identity

Array = Any


class Unsound(AssertionError):
    """A triple whose postcondition does not follow from its precondition."""


def share_patterns(size: int) -> tuple[tuple[int, ...], ...]:
    """Ways to deal `size` units: equal with more devices than units, skewed with an idle device, all on one."""
    return ((*([1] * size), 0), (size - 1, 0, 1), (0, size))


def split(rng: np.random.Generator, full: Array, placement: Placement, lengths: Sequence[int]) -> list[np.ndarray]:
    """What each device holds of a value: its slice, everything, or a random share of the combination."""
    x, n = np.asarray(full), len(lengths)
    if placement.is_sharded:
        ends = list(accumulate(lengths))
        return [np.take(x, np.arange(e - k, e), axis=placement.dim) for e, k in zip(ends, lengths)]
    if not placement.is_partial:
        return [x] * n
    if placement.reduction == "sum":
        # Small integers, so that float sums are exact wherever the value is.
        parts = [rng.integers(0, 4, x.shape).astype(x.dtype) for _ in range(n - 1)]
        with np.errstate(all="ignore"):
            rest = x - sum(parts[1:], start=parts[0]) if parts else x
        parts.append(rest.astype(x.dtype))
        order = rng.permutation(n)
        return [parts[i] for i in order]
    holder = rng.integers(0, n, x.shape)
    return [np.where(holder == i, x, _beyond(rng, x, placement.reduction)).astype(x.dtype) for i in range(n)]


def _beyond(rng: np.random.Generator, x: np.ndarray, reduction: str) -> np.ndarray:
    """Values that lose against `x`: sometimes by a little, sometimes the identity."""
    least = np.asarray(identity(reduction, x.dtype)).astype(x.dtype)
    if x.dtype == np.bool_:
        return np.full(x.shape, least)
    step = rng.integers(0, 4, x.shape).astype(x.dtype)
    if reduction == "max":
        near = np.where(x >= least + step, x - step, least) if np.issubdtype(x.dtype, np.integer) else x - step
    else:
        near = np.where(x <= least - step, x + step, least) if np.issubdtype(x.dtype, np.integer) else x + step
    return np.where(rng.random(x.shape) < 0.2, least, near)


def combine(parts: Sequence[Array], placement: Placement) -> np.ndarray:
    """The value that the devices' tensors stand for."""
    arrays = [np.asarray(p) for p in parts]
    if placement.is_sharded:
        return np.concatenate(arrays, axis=placement.dim)
    if not placement.is_partial:
        for other in arrays[1:]:
            if not np.array_equal(other, arrays[0], equal_nan=other.dtype.kind not in "biu"):
                raise Unsound("a replicated result differs between devices")
        return arrays[0]
    out = arrays[0]
    for other in arrays[1:]:
        match placement.reduction:
            case "max":
                out = np.maximum(out, other)
            case "min":
                out = np.minimum(out, other)
            case _:
                out = (out + other).astype(out.dtype)
    return out


def _lengths(f: Factors, dims: Sequence[Dim], placement: Placement, shares: Sequence[int]) -> list[int]:
    if not placement.is_sharded:
        return [-1] * len(shares)
    return [s * f.granule(dims[placement.dim]) for s in shares]


def _shape(shape: tuple[int, ...], placement: Placement, length: int) -> tuple[int, ...]:
    return tuple(length if placement.is_sharded and d == placement.dim else n for d, n in enumerate(shape))


def plain(op: Op, operands: Sequence[Array]) -> list[np.ndarray]:
    """The op itself, on one device."""
    return [np.asarray(r) for r in bind(op.primitive, list(map(jnp.asarray, operands)), op.params)]


def check_triple(
    op: Op,
    f: Factors,
    triple: Triple,
    shares: Sequence[int],
    operands: Sequence[Array],
    *,
    expected: Sequence[np.ndarray] | None = None,
    seed: int = 0,
) -> None:
    """Run one triple on `len(shares)` devices; Unsound says what does not hold.

    `shares` are in units of the triple's factor and add up to its size; where no factor is divided only their number
    counts. `operands` are the full values.
    """
    rng = np.random.default_rng(seed)
    cuts = [_lengths(f, dims, p, shares) for dims, p in zip(f.operands, triple.operands)]
    made = [_lengths(f, dims, p, shares) for dims, p in zip(f.results, triple.results)]
    held = [
        [x] * len(shares) if isinstance(o, Literal) else split(rng, x, p, cut)
        for o, x, p, cut in zip(op.operands, operands, triple.operands, cuts)
    ]
    results: list[list[Any]] = []
    for i, share in enumerate(shares):
        offset = sum(shares[:i])
        local = Local(
            op,
            f,
            triple,
            tuple(_shape(s, p, cut[i]) for s, p, cut in zip(op.shapes, triple.operands, cuts)),
            tuple(_shape(s, p, cut[i]) for s, p, cut in zip(op.result_shapes, triple.results, made)),
            share,
            lambda offset=offset: jnp.int32(offset),
            lambda i=i: jnp.int32(i),
        )
        out = execute(local, [jnp.asarray(h[i]) for h in held])
        for x, shape, dtype in zip(out, local.result_shapes, op.result_dtypes):
            if x.shape != shape or x.dtype != dtype:
                raise Unsound(f"{op.name} {triple}: device {i} made {x.dtype}{x.shape}, not {dtype}{shape}")
        results.append(out)
    for r, (placement, want) in enumerate(zip(triple.results, expected or plain(op, operands))):
        got = combine([out[r] for out in results], placement)
        if problem := _difference(got, want):
            raise Unsound(f"{op.name} {triple} with shares {tuple(shares)}, {f}: result {r} {problem}")


def _difference(got: np.ndarray, want: np.ndarray) -> str:
    """Why two arrays are not the same value, up to rounding; empty where they are."""
    if got.shape != want.shape:
        return f"has shape {got.shape}, not {want.shape}"
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        return "" if np.array_equal(got, want) else f"is\n{got}\nnot\n{want}"
    wide = np.complex128 if np.issubdtype(want.dtype, np.complexfloating) else np.float64
    a, b = got.astype(wide), want.astype(wide)
    finite = np.abs(b[np.isfinite(b)])
    eps = float(jnp.finfo(want.dtype).eps)
    close = np.isclose(a, b, rtol=64 * eps, atol=64 * eps * max(1.0, finite.max(initial=0.0)), equal_nan=True)
    return "" if close.all() else f"is\n{got}\nnot\n{want}"
