"""Floats as integers of the same order, so that a largest or smallest is that of JAX where one of them is NaN.

JAX's max and min are NaN where an operand is. Collectives lose it: XLA's CPU backend compares, and NaN is never the
larger (JAX 0.10.2 to 0.12); NCCL takes `fmaxf` and `fminf`, which return the operand that is a number
(`FuncMinMax` in its `src/device/reduce_kernel.h`). As integers NaN is beyond all numbers, and one collective of as many
bytes does: it is -0 < 0 besides, as in JAX.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def to_ordered(x: jax.Array, reduction: str) -> jax.Array:
    """Signed integers whose "max" or "min" is that of the floats: all NaNs the last of them, whatever their sign."""
    x = _wide(x)
    word = np.dtype(f"int{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, word)
    last = jnp.iinfo(word)
    keys = jnp.where(bits < 0, bits ^ np.asarray(last.max, word), bits)
    return jnp.where(jnp.isnan(x), np.asarray(last.max if reduction == "max" else last.min, word), keys)


def from_ordered(keys: jax.Array, dtype: np.dtype) -> jax.Array:
    """The inverse: the last of the integers have the bits of NaNs."""
    most = np.asarray(jnp.iinfo(keys.dtype).max, keys.dtype)
    wide = _wide(jnp.zeros((), dtype)).dtype
    return lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ most, keys), wide).astype(dtype)


def _wide(x: jax.Array) -> jax.Array:
    """Floats of 8 bits and less as bfloat16, which has their values: their formats differ in which bits are NaN."""
    return x.astype(jnp.bfloat16) if jnp.finfo(x.dtype).bits < 16 else x
