"""Collectives on stored shards: padded to the largest on the wire, cut to the exact pieces on arrival.

Sizes are static and the same in every device's program, so nothing is masked: a dimension that is whole on a device is
laid out as one block per position by static slices, and blocks that arrive are joined the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hapsynth.graph import Graph
from hapsynth.instructions.program import Convert
from hapsynth.instructions.sizes import Sizes


def pad_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Zeros after the end of each dimension; `x` itself where it already has the shape."""
    if x.shape == tuple(shape):
        return x
    return jnp.pad(x, [(0, large - small) for small, large in zip(x.shape, shape, strict=True)])


def cut_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The first elements of each dimension; `x` itself where it already has the shape."""
    return x if x.shape == tuple(shape) else lax.slice(x, (0,) * x.ndim, shape)


def to_blocks(x: jax.Array, dim: int, lengths: Sequence[int]) -> jax.Array:
    """A whole dimension as consecutive blocks, each padded to the largest length."""
    largest = max(lengths)
    if set(lengths) == {largest}:
        return x
    blocks: list[jax.Array] = []
    start = 0
    for length in lengths:
        shape = [*x.shape[:dim], largest, *x.shape[dim + 1 :]]
        blocks.append(pad_to(lax.slice_in_dim(x, start, start + length, axis=dim), shape))
        start += length
    return lax.concatenate(blocks, dim)


def from_blocks(x: jax.Array, dim: int, lengths: Sequence[int]) -> jax.Array:
    """The inverse of `to_blocks`: the exact pieces of the padded blocks, joined. Neighbours without padding are one."""
    largest = max(lengths)
    runs: list[tuple[int, int]] = []
    for position, length in enumerate(lengths):
        start = position * largest
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + length)
        elif length:
            runs.append((start, start + length))
    pieces = [lax.slice_in_dim(x, start, end, axis=dim) for start, end in runs]
    return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, dim)


def communicate(graph: Graph, sizes: Sizes, axes: Sequence[tuple[str, int]], step: Convert, x: jax.Array) -> jax.Array:
    """Emit one collective on a value's stored shard; the result is stored under the target layout."""
    name, axis = axes[step.axis][0], step.axis
    source, target = step.source[axis], step.target[axis]
    if prod(graph.values[step.value].shape) == 0:
        return jnp.zeros(sizes.padded_shape(step.value, step.target), x.dtype)
    lengths = lambda dim: sizes.lengths(step.value, dim, (axis,))
    # A dimension of an even cut is laid out as it is; both helpers leave it alone then.
    match step.step:
        case "all_reduce":
            return _REDUCE[source.reduction](x, name)
        case "reduce_scatter":
            blocks = to_blocks(x, target.dim, lengths(target.dim))
            return lax.psum_scatter(blocks, name, scatter_dimension=target.dim, tiled=True)
        case "all_gather":
            blocks = lax.all_gather(x, name, axis=source.dim, tiled=True)
            return from_blocks(blocks, source.dim, lengths(source.dim))
        case "all_to_all":
            blocks = to_blocks(x, target.dim, lengths(target.dim))
            # XLA splits the operand again and takes the blocks' producers as they are; where their memory layouts
            # differ its verifier then refuses the program ("operands with different shapes", JAX 0.10.2, CPU).
            blocks = lax.optimization_barrier(blocks)
            blocks = lax.all_to_all(blocks, name, split_axis=target.dim, concat_axis=source.dim, tiled=True)
            return from_blocks(blocks, source.dim, lengths(source.dim))
        case "slice" | "partial":
            raise AssertionError(f"{step.step} communicates nothing")


_REDUCE: dict[str, Any] = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
