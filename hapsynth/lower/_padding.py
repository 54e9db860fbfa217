"""Shards at the shape that they are stored or sent with, zeros behind them, and at their own."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def pad_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Zeros after the end of each dimension; `x` itself where it already has the shape."""
    if x.shape == tuple(shape):
        return x
    return jnp.pad(x, [(0, large - small) for small, large in zip(x.shape, shape, strict=True)])


def cut_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The first elements of each dimension; `x` itself where it already has the shape."""
    return x if x.shape == tuple(shape) else lax.slice(x, (0,) * x.ndim, shape)


def with_length(x: jax.Array, dim: int, length: int) -> tuple[int, ...]:
    """The shape with another length of one dimension."""
    return tuple(length if i == dim else n for i, n in enumerate(x.shape))
