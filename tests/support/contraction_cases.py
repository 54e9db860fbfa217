"""Rule cases of contractions and windows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rule_case import bf16, case, distinct, f32, i8, i32, ints

# ---- contractions

case("dot", lambda x, y: x @ y, ints(4, 3), ints(3, 2))
case("dot grad", jax.grad(lambda x, y: ((x @ y) ** 2).sum(), (0, 1)), ints(4, 3), ints(3, 2))
case("dot of sequences", jax.grad(lambda x, y: ((x @ y) ** 2).sum(), (0, 1)), ints(2, 3, 4), ints(4, 2))
case(
    "dot of neighbours",
    lambda x, y: lax.dot_general(x, y, (((2, 3), (1, 2)), ((0,), (3,)))),
    ints(2, 3, 2, 3),
    ints(2, 2, 3, 2),
)
case("dot int", lambda x, y: lax.dot(x, y, preferred_element_type=i32), ints(4, 3, dtype=i8), ints(3, 2, dtype=i8))
case("dot bf16", lambda x, y: lax.dot(x, y, preferred_element_type=f32), ints(4, 3, dtype=bf16), ints(3, 2, dtype=bf16))
case(
    "dot one",
    lambda x, y: lax.dot_general(x, y, (((1, 0), (1, 0)), ((), ()))),
    ints(1, 3, 4),
    ints(3, 1, 2).swapaxes(0, 1).reshape(1, 3, 2),
)
case("einsum", lambda x, y: jnp.einsum("bihd,bjhd->bhij", x, y), ints(2, 3, 4, 2), ints(2, 3, 4, 2))
case("outer", lambda x, y: jnp.outer(x, y), ints(4), ints(3))
case("vector dot", lambda x, y: x @ y, ints(4), ints(4))


def conv(
    x: Any, k: Any, strides: Any = (1,), padding: Any = "SAME", spec: Any = ("NWC", "WIO", "NWC"), **kw: Any
) -> Any:
    return lax.conv_general_dilated(x, k, strides, padding, dimension_numbers=spec, **kw)


def gradient(fn: Callable[..., Any], **kw: Any) -> Callable[..., Any]:
    return jax.grad(lambda x, k: (fn(x, k, **kw) ** 2).sum(), (0, 1))


two_d: dict[str, Any] = {"spec": ("NHWC", "HWIO", "NHWC"), "strides": (2, 1)}
case("conv", conv, ints(4, 5, 2), ints(3, 2, 3))
case("conv 2d grad", gradient(conv, **two_d), ints(2, 4, 3, 2), ints(3, 2, 2, 3))
case(
    "conv NCHW",
    functools.partial(conv, spec=("NCHW", "OIHW", "NCHW"), strides=(1, 1)),
    ints(2, 3, 3, 3),
    ints(4, 3, 2, 2),
)
case("conv groups grad", gradient(conv, feature_group_count=3), ints(2, 4, 6), ints(3, 2, 6))
case("conv depthwise grad", gradient(conv, feature_group_count=3), ints(2, 4, 3), ints(3, 1, 3))
case("conv depthwise wide", functools.partial(conv, feature_group_count=2), ints(2, 4, 2), ints(3, 1, 6))
case("conv batch groups", functools.partial(conv, batch_group_count=2), ints(6, 4, 3), ints(3, 3, 4))
case(
    "conv dilated",
    functools.partial(conv, padding=((2, 3),), lhs_dilation=(2,), rhs_dilation=(2,)),
    ints(2, 4, 2),
    ints(3, 2, 2),
)
case("conv 1x1", functools.partial(conv, padding="VALID"), ints(2, 4, 3), ints(1, 3, 2))
case(
    "conv bf16",
    functools.partial(conv, preferred_element_type=f32),
    ints(2, 4, 3, dtype=bf16),
    ints(3, 3, 2, dtype=bf16),
)
case("conv int", conv, ints(2, 4, 3, dtype=i32), ints(3, 3, 2, dtype=i32))
case("conv transpose", lambda x, k: lax.conv_transpose(x, k, (2,), "SAME"), ints(2, 4, 3), ints(3, 3, 2))

# ---- windows


def pool(
    x: Any, init: Any, op: Any, window: Any = (1, 2, 1), strides: Any = (1, 2, 1), padding: Any = "VALID", **kw: Any
) -> Any:
    return lax.reduce_window(x, init, op, window, strides, padding, **kw)


case("max pool grad", jax.grad(lambda x: (pool(x, -jnp.inf, lax.max) ** 2).sum()), distinct(3, 4, 2))
case(
    "max pool tangent",
    lambda x, t: jax.jvp(lambda x: pool(x, -jnp.inf, lax.max), (x,), (t,)),
    distinct(3, 4, 2),
    ints(3, 4, 2),
)
case("min pool grad", jax.grad(lambda x: (pool(x, jnp.inf, lax.min) ** 2).sum()), distinct(3, 4, 2))
case(
    "average pool grad",
    jax.grad(lambda x: (pool(x, 0.0, lax.add, strides=(1, 1, 1), padding="SAME") ** 2).sum()),
    ints(3, 4, 2),
)
case(
    "sum pool dilated",
    lambda x: pool(x, 0, lax.add, base_dilation=(1, 2, 1), window_dilation=(1, 2, 2)),
    ints(3, 4, 2, dtype=i32),
)
case("product pool", lambda x: pool(x, 1.0, lax.mul), ints(3, 4, 2))
case(
    "pool of two",
    lambda x, y: pool((x, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1])),
    ints(3, 4, 2),
    ints(3, 4, 2),
)
case("max pool all", lambda x: pool(x, -jnp.inf, lax.max, window=(1, 4, 1)), distinct(3, 4, 2))
case("max pool padded batch", lambda x: pool(x, -jnp.inf, lax.max, padding=((1, 0), (0, 0), (0, 0))), distinct(3, 4, 2))
