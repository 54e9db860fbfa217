"""Functions and arguments that `jax.jit` accepts and a planner may stumble over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

rng = np.random.default_rng(0)
floats = lambda *shape: rng.normal(size=shape).astype(np.float32)


class Point(NamedTuple):
    x: Any
    y: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["inner", "total"], meta_fields=["name"])
@dataclass
class Box:
    inner: Any
    total: Any
    name: str


@jax.custom_jvp
def halved(x: Any) -> Any:
    """Its derivative is not the one that JAX would find."""
    return x / 2


halved.defjvp(lambda primals, tangents: (halved(*primals), 7 * tangents[0]))


@jax.custom_vjp
def squared(x: Any) -> Any:
    return x * x


squared.defvjp(lambda x: (x * x, x), lambda x, g: (5 * x * g,))


def remat_loss(params: Any, x: Any) -> Any:
    layer = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))

    def loss(p: Any) -> Any:
        h = x
        for w in p:
            h = layer(h, w)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def grouped(x: Any, k: Any) -> Any:
    """Each group of channels by itself, and its gradient, a convolution of groups of the batch."""

    def loss(k: Any) -> Any:
        names = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=names, feature_group_count=3)
        return jnp.sum(y**2)

    return jax.value_and_grad(loss)(k)


def custom(x: Any, w: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(halved(x @ w)) + jnp.sum(squared(x * w[0])))(w)


def loops(x: Any, w: Any) -> Any:
    final, trail = lax.scan(lambda c, row: (jnp.tanh(c + row @ w), c.sum()), jnp.zeros(w.shape[1]), x)
    n, _ = lax.while_loop(lambda s: s[1] < 50.0, lambda s: (s[0] + 1, s[1] * 2), (0, 1.0 + jnp.abs(x).sum() * 0))
    return final, trail, n, lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), lax.map(lambda row: row * 2, x)


def loops_gradient(x: Any, w: Any) -> Any:
    def loss(w: Any) -> Any:
        return lax.scan(lambda c, row: (jnp.tanh(c + row @ w), None), jnp.zeros(w.shape[1]), x)[0].sum()

    return jax.value_and_grad(loss)(w)


def random_numbers(key: Any, raw: Any, x: Any) -> Any:
    new, use = jax.random.split(key)
    keep = jax.random.bernoulli(use, 0.5, x.shape)
    noise = jax.random.normal(raw, x.shape)
    return new, jax.random.key_data(key), jax.random.split(raw, 3), jnp.where(keep, x, 0) + noise


TABLE = np.linspace(-1, 1, 300 * 40).reshape(300, 40).astype(np.float32)
SAME = floats(24, 6)

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "gather": (lambda t, i: (t[i], jnp.take_along_axis(t, i[:, None], 1)), (floats(24, 24), np.arange(24)[::-1]), {}),
    "gather and its gradient": (jax.grad(lambda t, i: jnp.sum(t[i] ** 2)), (floats(29, 8), np.arange(40) % 29), {}),
    "argmax": (lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0), x.argmax()), (floats(27, 9),), {}),
    "grouped convolution": (grouped, (floats(13, 5, 5, 6), floats(3, 3, 2, 9)), {}),
    "sort, top-k, cumsum": (lambda x: (jnp.sort(x, 1), lax.top_k(x, 2), jnp.cumsum(x, 1)), (floats(25, 6),), {}),
    "fewer rows than devices": (lambda x, w: jnp.tanh(x @ w), (floats(3, 40), floats(40, 2)), {}),
    "scalars only": (lambda x, y: (x * y + 1, jnp.sin(x)), (np.float32(2), np.float32(3)), {}),
    "zero-dimensional state": (lambda s, x: (s * 0.9 + x.sum(), x * s), (np.float32(2), floats(30)), {}),
    "integers and bools": (
        lambda i, b: (i.sum(0), (i > 2) & b, jnp.where(b, i, -i), b.any(), b.all(1), i.max(), i // 3, ~b, i % 5),
        (rng.integers(-9, 9, (31, 5), np.int32), rng.random((31, 5)) < 0.5),
        {},
    ),
    "small integers": (
        lambda a, b: (a + a, b.sum(), a @ a.T),
        (floats(20, 4).astype(np.int8), np.arange(200, dtype=np.uint8)),
        {},
    ),
    "outputs that are inputs": (lambda a, b: (b, a, a, {"both": (a, b)}), (floats(24, 3), floats(24, 3)), {}),
    "an output twice": (lambda x: (lambda y: (y, y, [y.T]))(jnp.sin(x)), (floats(25, 3),), {}),
    "swapped state": (lambda s: {"a": s["b"] * 2, "b": s["a"]}, ({"a": floats(21, 4), "b": floats(21, 4)},), {}),
    "unused arguments": (lambda a, b, c: b.sum(), (floats(5), floats(26, 4), {"w": floats(3, 3)}), {}),
    "one array, two arguments": (lambda a, b: (a * 2 + b, a @ b.T), (SAME, SAME), {}),
    "one value, two operands": (lambda a: (a @ a.T, a * a, a + a, jnp.concatenate([a, a])), (floats(22, 5),), {}),
    "large constants": (lambda x: x @ TABLE + jnp.asarray(TABLE).sum(0), (floats(23, 300),), {}),
    "None and functions": (
        lambda x, o: {"y": o["f"](x) + (1 if o["none"] is None else 2), "none": None, "f": o["f"], "s": "text"},
        (floats(24, 4), {"f": jnp.tanh, "none": None, "name": "n"}),
        {},
    ),
    "keywords": (lambda x, *, scale, shift: x * scale + shift, (floats(24, 4),), {"shift": floats(4), "scale": 2.0}),
    "weak types": (lambda n, r, z, x: (n + 1, r * x, z * 2, x + n, r), (2, 0.5, 1j, floats(24, 3)), {}),
    "keys": (random_numbers, (jax.random.key(3), jax.random.PRNGKey(5), floats(25, 4)), {}),
    "loops": (loops, (floats(24, 6), floats(6, 6)), {}),
    "gradient of a loop": (loops_gradient, (floats(24, 6), floats(6, 6)), {}),
    "remat": (remat_loss, ([floats(8, 8) for _ in range(3)], floats(33, 8)), {}),
    "custom derivatives": (custom, (floats(26, 5), floats(5, 5)), {}),
    "nested outputs": (
        lambda x: {"p": Point(x + 1, [x.sum(), None]), "box": Box((x * 2, {}), jnp.mean(x), "name"), "empty": ()},
        (floats(24, 5),),
        {},
    ),
    "nested arguments": (
        lambda p, box: (Point(p.x * 2, p.y), Box(box.inner + 1, box.total, box.name)),
        (Point(floats(24), floats(3)), Box(floats(24, 2), np.float32(3), "name")),
        {},
    ),
    "bfloat16": (
        lambda x, w: (x @ w, jnp.sum(x.astype(jnp.float32), 0), x.max(1)),
        (floats(24, 8).astype(jnp.bfloat16), floats(8, 8).astype(jnp.bfloat16)),
        {},
    ),
    "complex": (lambda x: (jnp.abs(x), x @ x.conj().T, x.real.sum(0)), ((floats(24, 3) + 1j * floats(24, 3)),), {}),
    "empty arrays": (
        lambda x, y: (
            x * 2,
            x.sum(0),
            x @ y,
            jnp.concatenate([y, y], 1),
            y.sum(),
            x.reshape(3, 0),
            x.max(0, initial=-1),
        ),
        (np.zeros((0, 3), np.float32), floats(3, 26)),
        {},
    ),
    "an empty contraction": (lambda x: (x @ x.T, x.sum(1), jnp.tanh(x)), (np.zeros((24, 0), np.float32),), {}),
    "nothing but None": (lambda x: None, (floats(24),), {}),
    "literals": (lambda x: (1, 2.5, True, np.float32(3), jnp.zeros((24, 2)), jnp.arange(25), 1j, x), (floats(24),), {}),
    "constants": (lambda: (TABLE, jnp.ones(24) * 2, 3.0), (), {}),
    "fft and linear algebra": (
        lambda x: (jnp.fft.rfft(x).real, jnp.linalg.inv(x @ x.T + 9 * jnp.eye(24)), jnp.linalg.qr(x)[1]),
        (floats(24, 8),),
        {},
    ),
    "vmap of a vmap": (
        jax.vmap(jax.vmap(lambda a, b: jnp.outer(a, b).sum(0), (0, None)), (0, 0)),
        (floats(26, 3, 4), floats(26, 5)),
        {},
    ),
    "hessian": (jax.hessian(lambda x: jnp.sum(jnp.sin(x) * x[::-1])), (floats(24),), {}),
}
