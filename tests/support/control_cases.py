"""Functions with loops and branches, small enough to plan and run on host devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hapsynth import Plan
from hapsynth.running.check import relative_error


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def stacked_layers(w: Any, x: Any) -> Any:
    """A training step over scanned layers: the scan that `jax.grad` makes runs in reverse."""

    def loss(w: Any) -> Any:
        def layer(h: Any, wl: Any) -> Any:
            h = jnp.tanh(h @ wl)
            return h, h.sum()

        h, sums = lax.scan(layer, x, w)
        return (h**2).mean() + sums.sum()

    value, g = jax.value_and_grad(loss)(w)
    return w - 0.1 * g, value


def recurrent(p: Any, xs: Any) -> Any:
    """Weights that all steps share: their gradient is carried and grows; every step is rematerialised."""

    def loss(p: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            h = jnp.tanh(x @ p["wx"] + h @ p["wh"])
            return h, h

        return jnp.mean(lax.scan(jax.checkpoint(cell), jnp.zeros((24, 16)), xs)[1] ** 2)

    value, g = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), value


def nested(x: Any, w: Any) -> Any:
    """A scan and a cond in a scan."""

    def body(c: Any, _: Any) -> Any:
        d, s = lax.scan(lambda d, v: (jnp.sin(d) * v, d.sum(0)), c, w)
        d = lax.cond(s.sum() > 0, lambda: d @ jnp.ones((8, 8)), lambda: d)
        return d, s.max()

    return lax.scan(body, x, None, length=2)


def until_small(x: Any) -> Any:
    """A while loop whose test is made of floats summed over all devices."""
    return lax.while_loop(lambda c: jnp.abs(c[1]).sum() > 10, lambda c: (c[0] + 1, c[1] * 0.7), (0, x))


def swapped(a: Any, b: Any) -> Any:
    """Carried values change places, so both must have one layout."""
    return lax.fori_loop(0, 3, lambda i, c: (c[1] * 2, c[0] + 1), (a, b))


def invariant(x: Any) -> Any:
    """A value that is carried but never changed, and one that is stacked without depending on the iteration."""
    return lax.scan(lambda c, y: ((c[0], c[1] + y.sum()), (c[0].sum(0), 7.0)), (x, 0.0), x)


def carries_on_the_outside(x: Any, w: Any) -> Any:
    """The value that two loops, one in the other, carry on was made before both and takes collectives."""
    y = jnp.sort(x.T @ x, 0)

    def body(c: Any, _: Any) -> Any:
        d, s = lax.scan(lambda d, _: (y, d.sum(0)), c, None, length=2)
        return jnp.sort(d + 1, 1), s

    return lax.scan(body, w, None, length=3), lax.scan(lambda c, _: (y, c.sum(1)), w, None, length=2)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "scanned layers": (stacked_layers, (floats(3, 8, 8), floats(240, 8))),
    "recurrent": (recurrent, ({"wx": floats(8, 16), "wh": floats(16, 16)}, floats(6, 24, 8))),
    "nested": (nested, (floats(24, 8), floats(5, 8))),
    "while": (
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2 + c[1].sum(), 0), (0, x, 1))[1],
        (floats(24, 8),),
    ),
    "while of floats": (until_small, (floats(24, 8),)),
    "while that never runs": (
        lambda x: lax.while_loop(lambda c: c[0] < 0, lambda c: (c[0] + 1, c[1] * 2), (0, x)),
        (floats(24, 8),),
    ),
    "while whose test communicates": (
        lambda x: lax.while_loop(lambda c: (c[1] @ c[1].T)[3, 3] < 1e4, lambda c: (c[0] + 1, c[1] * 1.5), (0, x)),
        (floats(24, 8),),
    ),
    "while with a constant test": (lambda x: lax.while_loop(lambda c: False, lambda c: c * 2, x), (floats(24, 8),)),
    "carries on the outside": (carries_on_the_outside, (floats(24, 8), floats(8, 8))),
    "while in a vmap": (
        lambda x: jax.vmap(lambda r: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, r))(x),
        (floats(24, 8),),
    ),
    "cond": (
        lambda x, i: lax.cond(i > 3, lambda y: (y, 0.0), lambda y: (y * 2, y.sum()), x),
        (floats(24, 8), np.int32(2)),
    ),
    "cond of floats": (
        lambda x: lax.cond(x.sum() > 0, lambda y: (y, 0.0), lambda y: (y * 2, y.sum()), x),
        (floats(24, 8),),
    ),
    "switch": (
        lambda x, i: lax.switch(
            i, [lambda y: y @ y.T, lambda y: (y * 2) @ y.T, lambda y: jnp.ones((24, 24)) + y.sum()], x
        ),
        (floats(24, 8), np.int32(2)),
    ),
    "gradient of a cond": (
        lambda w, x, i: jax.grad(lambda w: lax.cond(i > 1, lambda: (x @ w).sum(), lambda: (x @ jnp.sin(w)).mean()))(w),
        (floats(8, 8), floats(24, 8), np.int32(3)),
    ),
    "for": (
        lambda x, n: lax.fori_loop(0, n, lambda i, c: c + x[i], jnp.zeros(8)),
        (floats(24, 8), np.int32(7)),
    ),
    "swapped": (swapped, (floats(24, 8), floats(24, 8, seed=1))),
    "map": (lambda x: lax.map(lambda r: jnp.dot(r, x.T), x), (floats(24, 8),)),
    "map in batches": (lambda x: lax.map(jnp.sin, x, batch_size=7), (floats(24, 8),)),
    "associative scan": (lambda x: lax.associative_scan(jnp.add, x), (floats(24, 8),)),
    "literals": (lambda x: lax.scan(lambda c, y: ((0.0, c[1] + 1), y + c[0]), (1.0, 2.0), x), (floats(24, 8),)),
    "invariant": (invariant, (floats(24, 8),)),
    "no iterations": (
        lambda x: lax.scan(lambda c, y: (c + y.sum(), y * 2), x.sum(), jnp.zeros((0, 24))),
        (floats(24),),
    ),
    "one iteration, in reverse, unrolled": (
        lambda x: lax.scan(lambda c, y: (c + y, c * y), x[0], x[:1], reverse=True, unroll=2),
        (floats(24, 8),),
    ),
    "keys": (
        lambda k, x: lax.scan(lambda c, y: (jax.random.fold_in(c, 1), y * jax.random.uniform(c, (8,))), k, x),
        (jax.random.key(3), floats(24, 8)),
    ),
    "booleans and integers": (
        lambda x: lax.scan(
            lambda c, y: ((c[0] | (y > 0), c[1] + y.astype(int)), c[0]), (x[0] > 9, x[0].astype(int)), x
        ),
        (floats(24, 8),),
    ),
}


def assert_same(plan: Plan, got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """A plan's results are, made whole, the function's: structure, shapes, types and values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype, getattr(a, "weak_type", None)) == (b.shape, b.dtype, getattr(b, "weak_type", None))
        a, b = plan.unshard(a), plan.unshard(b)
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert relative_error(np.asarray(a), np.asarray(b)) <= tolerance
