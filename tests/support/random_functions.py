"""Random whole functions, drawn op by op: of any shapes, with gradients, loops and branches, gathers, convolutions.

Some can be drawn with a share of ops in which NaN and infinity matter (`DELICATE`), on small arrays then, and some with
sums at the end that are fewer to add up when scaled first (`late`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Draw = np.random.Generator
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 24)
SMALL = (1, 2, 3, 4, 5, 6, 7)


class RandomFunction:
    """A function drawn op by op. Drawing again while it is traced gives the same ops, as the generator is seeded."""

    def __init__(self, seed: int, delicate: float = 0.0, late: bool = False) -> None:
        """`delicate` is the share of ops from that table; `late`: whether the last op is that one."""
        self.seed, self.delicate, self.late = seed, delicate, late
        rng = np.random.default_rng([seed, 1])
        shape = lambda rank: tuple(int(rng.choice(SMALL if delicate else SIZES)) for _ in range(rank))
        floats = lambda *s: rng.normal(size=s).astype(np.float32)
        self.params: Any = {
            "w": floats(*shape(2)),
            "b": floats(*shape(1)),
            "t": floats(*shape(3)),
            "s": np.float32(rng.normal()),
        }
        self.data: Any = {
            "x": floats(*shape(int(rng.integers(1, 5)))),
            "i": rng.integers(0, 9, shape(int(rng.integers(1, 3)))).astype(np.int32),
            "m": rng.random(shape(2)) < 0.5,
        }
        self.ops = int(rng.integers(4, 14))
        # One NaN in a loss is a NaN in every gradient, which hides the rest.
        self.graded = rng.random() < (0.2 if delicate else 0.5)

    def __call__(self, params: Any, data: Any) -> Any:
        if not self.graded:
            return self.body(params, data)
        real = lambda p: (x for x in self.body(p, data) if jnp.issubdtype(x.dtype, jnp.floating))
        loss = lambda p: sum((jnp.sum(jnp.sin(x)) for x in real(p)), jnp.float32(0))
        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    def body(self, params: Any, data: Any) -> list[Any]:
        rng = np.random.default_rng([self.seed, 2])
        pool = [*jax.tree.leaves(params), data["x"]]
        others = [data["i"], data["m"]]
        made: list[Any] = []
        for _ in range(self.ops):
            table = DELICATE if self.delicate and rng.random() < self.delicate else OPS
            op = table[int(rng.integers(len(table)))]
            x = pool[int(rng.integers(len(pool)))]
            y = op(rng, jnp.asarray(x), pool, others)
            if y is None or y.size > 20000:
                continue
            (pool if jnp.issubdtype(y.dtype, jnp.floating) else others).append(y)
            made.append(y)
        if self.late:
            made.append(late(rng, jnp.asarray(pick(rng, pool)), pool, others))
        keep = min(len(made), 3)
        return (
            [made[int(i)] for i in rng.choice(len(made), keep, replace=False)] + [made[-1]] if made else [params["b"]]
        )


def pick(rng: Draw, things: Any) -> Any:
    return things[int(rng.integers(len(things)))]


def fit(rng: Draw, x: Any, shape: tuple[int, ...]) -> Any:
    """`x` cut, padded and broadcast to a shape, so that any two values can meet."""
    x = x.reshape(-1)
    n = int(np.prod(shape))
    if n == 0 or x.size == 0:
        return jnp.zeros(shape, x.dtype)
    x = x[:n] if x.size >= n else jnp.tile(x, -(-n // x.size))[:n]
    return x.reshape(shape)


def elementwise(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    f = pick(
        rng, [jnp.tanh, jnp.sin, jax.nn.relu, jax.nn.gelu, jax.nn.sigmoid, jnp.abs, lambda v: jnp.clip(v, -0.5, 0.7)]
    )
    return f(x)


def binary(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    y = pick(rng, pool)
    f = pick(rng, [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum, lambda a, b: a / (1 + b * b)])
    return f(x, y if np.shape(y) in ((), x.shape) else fit(rng, jnp.asarray(y), x.shape))


def row_broadcast(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    if x.ndim == 0:
        return None
    d = int(rng.integers(x.ndim))
    v = fit(rng, jnp.asarray(pick(rng, pool)), (x.shape[d],))
    return x * jnp.expand_dims(v, [a for a in range(x.ndim) if a != d])


def matmul(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    if x.ndim == 0:
        return None
    y = jnp.asarray(pick(rng, pool))
    d = int(rng.integers(x.ndim))
    k = int(pick(rng, SIZES))
    return jnp.tanh(jnp.tensordot(x, fit(rng, y, (x.shape[d], k)), axes=([d], [0])))


def batched_matmul(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    if x.ndim < 2:
        return None
    b, n = x.shape[0], x.shape[-1]
    x = x.reshape(b, -1, n)
    y = fit(rng, jnp.asarray(pick(rng, pool)), (b, n, int(pick(rng, SIZES))))
    return jnp.tanh(jnp.einsum(pick(rng, ["bmn,bnk->bmk", "bmn,bnk->kmb", "bmn,bnk->mk"]), x, y))


def reduce(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    if x.ndim == 0:
        return None
    axes = tuple(int(a) for a in rng.choice(x.ndim, int(rng.integers(1, x.ndim + 1)), replace=False))
    f = pick(rng, [jnp.sum, jnp.mean, jnp.max, jnp.min, jax.nn.logsumexp, jnp.var])
    return f(x, axis=axes, keepdims=bool(rng.integers(2)))


def softmax(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    return None if x.ndim == 0 else pick(rng, [jax.nn.softmax, jax.nn.log_softmax])(x, axis=int(rng.integers(x.ndim)))


def shapes(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    kind = int(rng.integers(8))
    if x.ndim == 0:
        return jnp.broadcast_to(x, (int(pick(rng, SIZES)),))
    if kind == 0:
        return x.reshape(-1)
    if kind == 1:
        return jnp.transpose(x, rng.permutation(x.ndim))
    if kind == 2:
        d = int(rng.integers(x.ndim))
        n = x.shape[d]
        a = pick(rng, [k for k in range(1, n + 1) if n % k == 0])
        return x.reshape(*x.shape[:d], a, n // a, *x.shape[d + 1 :]) if x.ndim < 4 else x
    if kind == 3 and x.ndim > 1:
        d = int(rng.integers(x.ndim - 1))
        return x.reshape(*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :])
    if kind == 4:
        return jnp.flip(x, int(rng.integers(x.ndim)))
    if kind == 5:
        return jnp.roll(x, 1, int(rng.integers(x.ndim)))
    if kind == 6:
        return jnp.repeat(x, 2, int(rng.integers(x.ndim)))
    d = int(rng.integers(x.ndim))
    return lax.slice_in_dim(x, int(rng.integers(x.shape[d])), x.shape[d], axis=d)


def joined(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    if x.ndim == 0:
        return None
    d = int(rng.integers(x.ndim))
    y = fit(rng, jnp.asarray(pick(rng, pool)), x.shape)
    f = pick(rng, [jnp.concatenate, jnp.stack])
    if f is jnp.stack and x.ndim > 3:
        return None
    return f([x, y, x], d)


def padded(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    return None if x.ndim == 0 else jnp.pad(x, [(int(rng.integers(2)), int(rng.integers(2))) for _ in range(x.ndim)])


def chosen(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    mask = pick(rng, others)
    mask = fit(rng, mask if mask.dtype == bool else mask > 3, x.shape)
    return jnp.where(mask, x, pick(rng, [0.0, 1.5, x * 2, fit(rng, jnp.asarray(pick(rng, pool)), x.shape)]))


def running(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    if x.ndim == 0:
        return None
    return pick(rng, [jnp.cumsum, lax.cummax, lambda v, axis: jnp.sort(v, axis)])(x, axis=int(rng.integers(x.ndim)))


def taken(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    if x.ndim == 0:
        return None
    d = int(rng.integers(x.ndim))
    index = jnp.abs(pick(rng, [o for o in others if o.dtype != bool])) % x.shape[d]
    if index.ndim + x.ndim > 5:
        index = index.reshape(-1)[:7]
    if rng.random() < 0.3:
        return jnp.take_along_axis(x, fit(rng, index, (*x.shape[:d], 1, *x.shape[d + 1 :])), d)
    return jnp.take(x, index, axis=d)


def scattered(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    if x.ndim == 0:
        return None
    n = int(pick(rng, SIZES))
    index = fit(rng, jnp.abs(pick(rng, [o for o in others if o.dtype != bool])), (x.shape[0],)) % (n + 1)
    base = jnp.zeros((n, *x.shape[1:]), x.dtype)
    return pick(rng, [base.at[index].add(x), base.at[index].max(x), jax.ops.segment_sum(x, index, n)])


def one_hot(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    index = pick(rng, [o for o in others if o.dtype != bool])
    return jax.nn.one_hot(index.reshape(-1)[:32], int(pick(rng, SIZES))) * (x.sum() if rng.random() < 0.5 else 1.0)


def ordered(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    """Integers and bools."""
    if x.ndim == 0:
        return (x > 0).astype(np.int32)
    d = int(rng.integers(x.ndim))
    i = pick(rng, [o for o in others if o.dtype != bool])
    y = pick(rng, pool)
    return pick(
        rng,
        [
            lambda: jnp.argmax(jnp.asarray(y).reshape(-1, np.shape(y)[-1] if np.ndim(y) else 1), 1),
            lambda: x > 0.25,
            lambda: i * 2 - 1,
            lambda: i.sum(),
            lambda: i.max(-1) if i.ndim else i,
            lambda: jnp.arange(x.shape[d]),
            lambda: lax.top_k(x, 1)[1],
        ],
    )()


def convolved(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    n, c, o = int(pick(rng, (1, 2, 3, 5))), int(pick(rng, (1, 2, 4, 6))), int(pick(rng, (1, 2, 3, 4)))
    grouped = c > 1 and rng.random() < 0.5
    y = pick(rng, pool)
    x = fit(rng, x, (n, 5, 4, c))
    k = fit(rng, jnp.asarray(y), (3, 2, 1 if grouped else c, c * o if grouped else o))
    names = ("NHWC", "HWIO", "NHWC")
    pads = pick(rng, ["SAME", "VALID"])
    y = lax.conv_general_dilated(x, k, (1, 1), pads, dimension_numbers=names, feature_group_count=c if grouped else 1)
    if rng.random() < 0.3:
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    return jnp.tanh(y)


def mapped(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    if x.ndim == 0:
        return None
    y = jnp.asarray(pick(rng, pool)).reshape(-1)[:6]
    f = pick(
        rng, [lambda v: v.sum() * y, lambda v: jnp.outer(y, jnp.sin(v.reshape(-1))), lambda v: y / (1 + v.max() ** 2)]
    )
    return jax.vmap(f, in_axes=int(rng.integers(x.ndim)))(x)


def looped(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    """Loops and branches whose bodies are drawn as well."""
    if x.ndim == 0:
        return None
    i = pick(rng, [o for o in others if o.dtype != bool]).reshape(-1)[0]
    seeds = [int(s) for s in rng.integers(1 << 30, size=3)]
    start = fit(rng, jnp.asarray(pick(rng, pool)), tuple(int(pick(rng, SIZES)) for _ in range(int(rng.integers(1, 3)))))

    def body(seed: int, c: Any, extra: Any) -> Any:
        """The same at every tracing: JAX traces a body more than once."""
        again = np.random.default_rng(seed)
        for _ in range(int(again.integers(1, 4))):
            inner = pick(
                again, [elementwise, binary, matmul, reduce, softmax, joined, taken, shapes, looped, contracted]
            )
            made = inner(again, c, [*pool[:4], *extra], others)
            c = c if made is None or made.size > 3000 else fit(again, made, c.shape).astype(c.dtype)
        return jnp.tanh(c)

    def step(c: Any, v: Any) -> Any:
        new = body(seeds[0], c, [v])
        return new, pick(np.random.default_rng(seeds[1]), [v * new.sum(), new, v, new.mean()])

    kind = int(rng.integers(5))
    if kind < 2 and x.shape[0] > 0:
        final, stacked = lax.scan(step, start, x[:5], reverse=bool(kind))
        return pick(rng, [final, stacked])
    if kind == 2:
        return lax.fori_loop(0, 3, lambda n, c: body(seeds[0], c, [x]) * (n + 1), start)
    if kind == 3:
        # Gradients do not pass a loop whose trips are not known.
        stopped = lax.stop_gradient
        test = lambda c: (c[0] < i % 4) & (jnp.abs(c[1]).sum() < 50)
        return lax.while_loop(test, lambda c: (c[0] + 1, stopped(body(seeds[0], c[1], []))), (0, stopped(start)))[1]
    return lax.switch(i % 3, [lambda c, s=s: body(s, c, [x]) for s in seeds], start)


def wrapped(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    f = lambda v: jnp.tanh(v) * jnp.exp(-v * v)
    custom = jax.custom_vjp(f)
    custom.defvjp(lambda v: (f(v), v), lambda v, g: (g * jnp.cos(v),))
    return pick(rng, [jax.checkpoint(f), jax.jit(f), custom])(x)


def updated(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    """Slices whose place is known at run time only, and updates of single elements."""
    if x.ndim == 0 or x.size == 0:
        return None
    i = pick(rng, [o for o in others if o.dtype != bool]).reshape(-1)
    start = [i[0] % 3 if rng.random() < 0.5 else 0 for _ in x.shape]
    part = tuple(max(1, int(n * pick(rng, (0.5, 1.0)))) for n in x.shape)
    kind = int(rng.integers(4))
    if kind == 0:
        return lax.dynamic_slice(x, start, part)
    if kind == 1:
        return lax.dynamic_update_slice(x, fit(rng, jnp.asarray(pick(rng, pool)), part), start)
    if kind == 2:
        return x.at[i[:1] % x.shape[0]].set(0.5)
    return x.at[..., i[0] % x.shape[-1]].multiply(2.0)


def strided(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    """Windows with strides, holes and padding."""
    x = fit(rng, x, (int(pick(rng, (1, 2, 4))), 9, int(pick(rng, (2, 3)))))
    kind = int(rng.integers(3))
    if kind == 0:
        k = fit(rng, jnp.asarray(pick(rng, pool)), (3, x.shape[2], int(pick(rng, (2, 5)))))
        names = ("NWC", "WIO", "NWC")
        options = {"lhs_dilation": (int(pick(rng, (1, 2))),), "rhs_dilation": (int(pick(rng, (1, 2))),)}
        return lax.conv_general_dilated(x, k, (2,), [(1, 2)], dimension_numbers=names, **options)
    if kind == 1:
        return lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 2, 1), "VALID") / 3
    return x[:, 1::3]


def contracted(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    """A product of three, in any order of the indices."""
    a, b = int(pick(rng, SIZES)), int(pick(rng, SIZES))
    y = jnp.asarray(pick(rng, pool))
    out = "".join(rng.permutation(list(pick(rng, ["ik", "k", "i", "", "ijk"]))))
    return jnp.tanh(jnp.einsum(f"ij,jk,k->{out}", fit(rng, x, (a, b)), fit(rng, y, (b, 5)), fit(rng, y, (5,))))


OPS: tuple[Callable[..., Any], ...] = (
    *(elementwise, binary, row_broadcast, matmul, matmul, batched_matmul, reduce, reduce, softmax, shapes, shapes),
    *(joined, padded, chosen, running, taken, scattered, one_hot, ordered, convolved, mapped, looped, wrapped),
    *(updated, strided, contracted),
)


# ---- ops in which NaN, infinities and zeros matter


def some_axes(rng: Draw, x: Any) -> tuple[int, ...]:
    return tuple(int(a) for a in rng.choice(x.ndim, int(rng.integers(1, x.ndim + 1)), replace=False))


def extremes(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    """The largest and smallest over some dimensions, alone or with later ops."""
    if x.ndim == 0:
        return None
    axes = some_axes(rng, x)
    top, low = lambda v: v.max(axes, keepdims=True), lambda v: v.min(axes, keepdims=True)
    return pick(
        rng,
        [
            top,
            low,
            lambda v: top(v) - low(v),
            lambda v: v / top(jnp.abs(v)),
            lambda v: jnp.round(v / low(v)),
            lambda v: jnp.exp(v - top(v)),
            lambda v: jnp.maximum(v, -top(v)),
            lambda v: top(v.astype(jnp.bfloat16)).astype(jnp.float32),
            lambda v: (v >= top(v)).sum(axes),
            lambda v: jnp.nanmax(v, axes),
            lambda v: jnp.isnan(v).any(axes),
            lambda v: (v > 0).all(axes),
        ],
    )(x)


def placed(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    """Where the largest and smallest are, and the elements there."""
    if x.ndim == 0:
        return None
    d = int(rng.integers(x.ndim))
    f = pick(rng, [jnp.argmax, jnp.argmin])
    there = lambda v: jnp.take_along_axis(v, f(v, d, keepdims=True), d)
    return pick(rng, [lambda v: f(v, d), lambda v: f(v.reshape(-1)), there, lambda v: f(jnp.abs(v), d)])(x)


def in_order(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    """Running, sorted and the largest few."""
    if x.ndim == 0:
        return None
    d = int(rng.integers(x.ndim))
    k = int(rng.integers(1, x.shape[-1] + 1))
    y = fit(rng, jnp.asarray(pick(rng, pool)), x.shape)
    return pick(
        rng,
        [
            lambda: lax.cummax(x, d),
            lambda: lax.cummin(x, d, reverse=True),
            lambda: lax.cumprod(x, d),
            lambda: lax.cumlogsumexp(x, d),
            lambda: jnp.cumsum(x, d),
            lambda: lax.top_k(x, k)[0],
            lambda: lax.top_k(x, k)[1],
            lambda: jnp.sort(x, d),
            lambda: jnp.argsort(x, d),
            lambda: lax.sort((jnp.round(x), y), dimension=d, num_keys=1)[1],
            lambda: lax.sort((jnp.round(x), y), dimension=d, num_keys=2)[1],
            lambda: jnp.median(x, d),
        ],
    )()


def windowed(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    if x.ndim == 0:
        return None
    start, f = pick(rng, [(-np.inf, lax.max), (np.inf, lax.min), (0.0, lax.add)])
    window = tuple(int(rng.integers(1, 1 + min(n, 3))) for n in x.shape)
    steps = tuple(int(rng.integers(1, 3)) for _ in x.shape)
    return lax.reduce_window(x, start, f, window, steps, pick(rng, ["SAME", "VALID"]))


def clamped(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    """Between numbers or arrays. (JAX has no gradient by a bound of fewer dimensions.)"""
    y = jnp.asarray(pick(rng, pool))
    wide = lambda v: fit(rng, v, x.shape)
    return pick(
        rng,
        [
            lambda: lax.clamp(-0.5, x, 0.7),
            lambda: lax.clamp(-1.0, x, lax.stop_gradient(y.max())),
            lambda: lax.clamp(lax.stop_gradient(y.min()), x, lax.stop_gradient(y.sum())),
            lambda: lax.clamp(wide(y), x, wide(y) + 1),
            lambda: jnp.clip(x, wide(y), 1.0),
            lambda: jnp.where(x > wide(y), x, wide(y)),
            lambda: jnp.nan_to_num(x, nan=0.5, posinf=2.0, neginf=-2.0),
            lambda: jnp.where(jnp.isfinite(x), x, wide(y)),
        ],
    )()


def divided(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    """Sums and contractions over dimensions that may be cut, beside a quotient, a product, or another contraction."""
    if x.ndim == 0:
        return None
    axes = some_axes(rng, x)
    total = lambda v: v.sum(axes, keepdims=True)
    y = fit(rng, jnp.asarray(pick(rng, pool)), x.shape)
    ones = fit(rng, others[1], x.shape).astype(x.dtype)
    m = x.reshape(-1, x.shape[-1])
    z = fit(rng, y, (m.shape[1], int(pick(rng, SMALL))))
    k = z.shape[1]
    return pick(
        rng,
        [
            lambda: total(x) / total(y),
            lambda: x / total(x),
            lambda: total(x) * y,
            lambda: total(x) * (1 / y),
            lambda: total(x * ones) / total(ones),
            lambda: total(x) * total(ones),
            lambda: total(x) / x.shape[0],
            lambda: x * lax.rsqrt(total(x * x)),
            lambda: total(x) * jnp.log(ones),
            lambda: -total(x) / jnp.maximum(total(ones), 1.0),
            lambda: (m @ z) / fit(rng, ones, (m.shape[0], 1)),
            lambda: (m @ z) * fit(rng, x, (k,)),
            lambda: (m @ z) @ fit(rng, y, (k, 3)),
            lambda: m.sum(0) @ z,
            lambda: jnp.einsum("ij,jk->k", m, z) / z.sum(0),
            lambda: jax.ops.segment_sum(x, jnp.arange(x.shape[0]) // 2, 3) / fit(rng, y, (3, *x.shape[1:])),
        ],
    )()


def late(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    """Sums over what may be cut, each taken on by linear ops and scaled, one of them by what may be infinite or by a
    zero's inverse; added up at last. Summed over devices late they are one collective, before products one each."""
    x = x.reshape(1) if x.ndim == 0 else x
    axes = tuple(range(x.ndim)) if rng.random() < 0.6 else some_axes(rng, x)
    y = jnp.asarray(pick(rng, pool))
    shape = x.sum(axes).shape
    by = y.reshape(-1)[0] if rng.random() < 0.7 else fit(rng, y, shape)
    zero = jnp.where(jnp.abs(by) > 9, by, 0.0)
    each = lambda v: jnp.broadcast_to(v, shape)
    linear = [lambda v: v, lambda v: -v, lambda v: v * 0.5, lambda v: v / 3, lambda v: v + v]
    tame = [lambda v: v, lambda v: v * jnp.cos(by), lambda v: jnp.where(by > 0, v, 0.0)]
    wild = [
        lambda v: v * by,
        lambda v: v / by,
        lambda v: v / zero,
        lambda v: v * (1 / zero),
        lambda v: v * jnp.log(jnp.abs(zero)),
        lambda v: jnp.tensordot(v, each(1 / zero), v.ndim),
    ]
    terms = int(rng.choice((1, 2, 3), p=(0.2, 0.4, 0.4)))
    one = int(rng.integers(terms))
    total: Any = 0.0
    for n in range(terms):
        part = pick(rng, [jnp.sin, jnp.tanh])(x * (n + 1.5)).sum(axes)
        total = total + pick(rng, wild if n == one else tame)(pick(rng, linear)(part))
    return total


def until(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    """Loops and branches that go by floats, of which some may be NaN. Gradients do not pass them."""
    x = lax.stop_gradient(x)
    y = lax.stop_gradient(jnp.asarray(pick(rng, pool)))
    limit = float(pick(rng, (0.5, 3.0, 20.0)))
    test = pick(
        rng,
        [
            lambda c: c.max() < limit,
            lambda c: c.sum() < limit,
            lambda c: ~(jnp.abs(c).sum() > limit),
            lambda c: (c < limit).all(),
            lambda c: jnp.isfinite(c).any() & (y.sum() < limit),
            lambda c: (jnp.square(c).mean() < limit) | (y.min() > 0),
        ],
    )
    step = pick(rng, [lambda c: c * 2 + 0.5, lambda c: c + jnp.abs(y).max(), lambda c: c / c.max(), jnp.exp])
    kind = int(rng.integers(4))
    if kind == 0:
        return lax.cond(test(x), step, lambda c: c - 1, x)
    count, last = lax.while_loop(lambda c: (c[0] < 4) & test(c[1]), lambda c: (c[0] + 1, step(c[1])), (0, x))
    return count if kind == 1 else last


def touched(rng: Draw, x: Any, pool: Any, others: Any) -> Any:
    """Elementwise ops that make or take numbers that are not finite, and scatters of them."""
    y = fit(rng, jnp.asarray(pick(rng, pool)), x.shape)
    ones = fit(rng, others[1], x.shape)
    index = fit(rng, jnp.abs(others[0]), x.shape[:1] or (1,)) % 3
    base = jnp.ones((3, *x.shape[1:]), x.dtype)
    return pick(
        rng,
        [
            lambda: x / y,
            lambda: x * 0,
            lambda: x - x,
            lambda: jnp.log(x),
            lambda: jnp.sqrt(x),
            lambda: 1 / jax.nn.relu(x),
            lambda: jnp.sign(x),
            lambda: jnp.where(ones, x, 0) * y,
            lambda: x**3,
            lambda: jnp.isnan(x),
            lambda: x == y,
            lambda: base.at[index].max(x) if x.ndim else None,
            lambda: base.at[index].min(x) if x.ndim else None,
            lambda: base.at[index].add(x) if x.ndim else None,
            lambda: jnp.minimum(x, y),
        ],
    )()


DELICATE: tuple[Callable[..., Any], ...] = (
    *(extremes, extremes, placed, in_order, in_order, windowed, clamped, divided, divided, until, touched),
)
