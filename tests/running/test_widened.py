"""The widened function is the function of wider arguments, but for ops that depend on a float's width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hapsynth import _jax
from hapsynth.running.widened import Widening

rng = np.random.default_rng(0)
X, W = rng.normal(size=(8, 6)).astype(np.float32), rng.normal(size=(6, 5)).astype(np.float32)
ROWS = np.array([1, 1, 3], np.int32)


def widened(fn: Callable[..., Any], *args: Any) -> tuple[list[np.ndarray], Widening]:
    widening = Widening(_jax.make_jaxpr(lambda *xs: jax.tree.leaves(fn(*xs)), *args)[0])
    with jax.enable_x64(True):
        return [np.asarray(x) for x in jax.jit(widening)(*args)], widening


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -0.5, 0.5) * jnp.cos(x),))

SAME: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": lambda x, w: jnp.einsum("ij,jk->ki", x, w, preferred_element_type=x.dtype),
    "softmax": lambda x, w: jax.grad(lambda w: jax.nn.logsumexp(jax.nn.softmax(jax.nn.gelu(x @ w))))(w),
    "remat": lambda x, w: jax.grad(lambda w: jax.checkpoint(lambda w: jnp.tanh(x @ w) ** 2)(w).sum())(w),
    "custom_vjp": lambda x, w: jax.grad(lambda w: clipped(x @ w).sum())(w),
    "scan": lambda x, w: lax.scan(lambda c, a: (jnp.cos(c @ w) @ w.T + a, c.sum()), x[0], x, reverse=True),
    "while": lambda x, w: lax.while_loop(lambda s: s[1] < 5, lambda s: (s[0] * 1.5 + w.sum(), s[1] + 1), (x, 0)),
    "vmapped_while": lambda x, w: jax.vmap(
        lambda a: lax.while_loop(lambda s: jnp.sum(s) < 9, lambda s: 1.5 * s + 0.125, a)
    )(jnp.abs(x)),
    "cond": lambda x, w: lax.cond(x[0, 0] > w[0, 0], lambda: x[0] * 3, lambda: x[1] / 3),
    "scatter": lambda x, w: (
        w.at[ROWS].add(x[:3, :5]),
        w.at[ROWS].set(1 / w[0]),
        w.at[ROWS].mul(w[:3]),
        w.at[ROWS].max(w[:3]),
        w.at[ROWS].apply(jnp.abs),
    ),
    "reduce": lambda x, w: lax.reduce(x, np.array(0, x.dtype), lambda a, b: a + b, (0,)),
    "windows": lambda x, w: jax.grad(
        lambda x: (lax.reduce_window(x, -np.inf, lax.max, (2, 2), (2, 2), "VALID") ** 2).sum()
    )(x),
    "order": lambda x, w: (jnp.sort(x, 0), jnp.argmax(x, 1), lax.top_k(x, 2), jnp.cumsum(x, 0), jnp.median(x)),
    "linalg": lambda x, w: (jnp.linalg.solve(x.T @ x, w), jnp.linalg.svd(x, compute_uv=False)),
    "convolution": lambda x, w: lax.conv_general_dilated(x[None, None], w[None, None, :3, :3], (1, 1), "SAME"),
    "fft": lambda x, w: jnp.abs(jnp.fft.rfft(x)),
}


@pytest.mark.few(9)
@pytest.mark.parametrize("name", SAME)
def test_it_is_the_function_of_wide_arguments(name: str) -> None:
    fn = SAME[name]
    got, widening = widened(fn, X, W)
    with jax.enable_x64(True):
        want = jax.tree.leaves(jax.jit(fn)(X.astype(np.float64), W.astype(np.float64)))
    for a, b in zip(got, want, strict=True):
        # The constants of the narrow function are of its own digits.
        np.testing.assert_allclose(a, np.asarray(b), rtol=2e-7 if name == "softmax" else 1e-12)
    assert widening.kept == ({"scatter"} if name == "scatter" else set())


def test_casts_round_nothing_but_overflow() -> None:
    narrow = lambda x: ((x / 3).astype(jnp.bfloat16) * 3 - x.astype(jnp.bfloat16)).astype(jnp.float16)
    (got,), widening = widened(narrow, X)
    assert np.abs(got).max() < 1e-12
    assert widening.epsilon == 2**-7
    (got,), _ = widened(lambda x: (x.astype(jnp.float16) * 2).astype(jnp.float32), np.float32([3e4, 4e4, -7e4]))
    np.testing.assert_array_equal(got, [60000, np.inf, -np.inf])


def test_what_depends_on_the_width_stays() -> None:
    eight_bits = lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    np.testing.assert_array_equal(widened(eight_bits, X)[0][0], np.asarray(eight_bits(jnp.asarray(X))))
    bits = lambda x: (lax.bitcast_convert_type(x, np.int32), jnp.nextafter(x, 9.0))
    for a, b in zip(widened(bits, X)[0], bits(jnp.asarray(X)), strict=True):
        np.testing.assert_array_equal(a, b)
    drawn = lambda key: jax.random.normal(key, (9,))
    (got,), _ = widened(drawn, jax.random.key(0))
    np.testing.assert_allclose(got, drawn(jax.random.key(0)), rtol=1e-5)


def test_what_cannot_be_widened_is_named() -> None:
    called = lambda x: jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(X.shape, np.float32), x / 3)
    (got,), widening = widened(called, X)
    assert widening.kept == {"pure_callback"}
    np.testing.assert_allclose(got, X * (2 / 3), rtol=1e-6)
