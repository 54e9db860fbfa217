"""Rule cases of random numbers and typed keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p
from rule_case import CASES, case, floats, i32, ints, u8, u32


def typed(fn: Callable[..., Any], impl: str = "threefry2x32") -> Callable[..., Any]:
    """`fn` of typed keys as a function of their words."""
    return lambda words, *args: fn(jax.random.wrap_key_data(words, impl=impl), *args)


def words(*shape: int) -> np.ndarray:
    return np.random.default_rng([len(CASES), *shape]).integers(0, 1 << 32, shape, dtype=u32)


def key_arrays(keys: Any, i: Any) -> Any:
    joined = jnp.concatenate([keys, keys[1:3]])
    picked = jnp.where(i > 1, keys, keys[::-1])
    square = keys.reshape(2, 2).T
    part = lax.dynamic_slice(keys, (i[0],), (2,))
    return joined, picked, square, part, keys[i], jnp.broadcast_to(keys, (3, 4)), keys.at[1].set(keys[0]), keys[None]


for dtype in (u8, np.uint16, u32):
    case(f"bits {np.dtype(dtype)}", typed(lambda k, d=dtype: jax.random.bits(k, (3, 1, 2, 4), d)), words(2))
case("bits of one element", typed(lambda k: (jax.random.bits(k), jax.random.bits(k, (1, 4)))), words(2))
case("bits of a batch", typed(jax.vmap(lambda k: jax.random.bits(k, (3, 2), u8))), words(4, 2))
case("bits of two batches", typed(jax.vmap(jax.vmap(lambda k: jax.random.bits(k, (5,))))), words(3, 2, 2))
case("bits of raw keys", lambda k: jax.random.bits(jax.random.split(k, 3)[1], (4,)), words(2))
case("bits rbg", typed(jax.vmap(lambda k: jax.random.bits(k, (4,))), "rbg"), words(2, 4))
case("threefry2x32", lambda k, l, x, y: threefry2x32_p.bind(k, l, x, y), *[words(4, 3)] * 4)
case("threefry2x32 one key", lambda k, x: threefry2x32_p.bind(k[0], k[1], x, x), words(2), words(4, 3))
case(
    "keys",
    typed(lambda k, n: (jax.vmap(jax.random.split)(k), jax.vmap(jax.random.fold_in)(k, n), jax.random.clone(k))),
    words(4, 2),
    ints(4, dtype=i32, low=0),
)
case("keys from seeds", jax.vmap(lambda seed: jax.random.key_data(jax.random.key(seed))), ints(4, dtype=i32, low=0))
case("key arrays", typed(key_arrays), words(4, 2), np.array([1, 0, 3, 2], i32))
case("gamma", typed(jax.grad(lambda k, a: jax.random.gamma(k, a, (4,)).sum(), 1)), words(2), np.float32(2))
case("gamma of a batch", typed(jax.vmap(jax.random.gamma)), words(4, 2), floats(4, 3))
case("loggamma of rbg", typed(jax.vmap(jax.random.loggamma), "rbg"), words(3, 4), floats(3))
case(
    "pure_callback",
    lambda x: jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"),
    floats(4, 3),
)
