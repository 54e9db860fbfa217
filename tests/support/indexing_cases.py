"""Rule cases of gather and scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode as Mode
from rule_case import bf16, case, i8, i32, ints, u8, u32

MODES = (Mode.PROMISE_IN_BOUNDS, Mode.CLIP, Mode.FILL_OR_DROP)
ROWS = np.array([[0, 3, 4], [2, -1, 7]], i32)
"""Indices into four rows: in range, repeated at the edge, and out of range on both sides."""
EMBED = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
UNEMBED = lax.ScatterDimensionNumbers(
    update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)


def gather(mode: Any, dn: Any = EMBED, sizes: Any = (1, 3), **kw: Any) -> Callable[..., Any]:
    return lambda x, i: lax.gather(x, i, dn, sizes, mode=mode, **kw)


def scatter(kind: str, mode: Any, dn: Any = UNEMBED, **kw: Any) -> Callable[..., Any]:
    fn = getattr(lax, f"scatter_{kind}" if kind else "scatter")
    return lambda x, i, u: fn(x, i, u, dn, mode=mode, **kw)


for mode in MODES:
    case(f"embedding {mode.name}", gather(mode), ints(4, 3), ROWS[..., None])
    case(f"scatter-add {mode.name}", scatter("add", mode), ints(4, 3), ROWS[..., None], ints(2, 3, 3))
    case(f"scatter {mode.name}", scatter("", mode), ints(4, 3), np.array([[[3], [9]], [[0], [-2]]], i32), ints(2, 2, 3))
for name, kw in {"fill 7": {"fill_value": 7}, "fill 0": {"fill_value": 0}, "fill nan": {"fill_value": np.nan}}.items():
    case(f"gather {name}", gather(Mode.FILL_OR_DROP, **kw), ints(4, 3), ROWS[..., None])
for dtype in (i32, u8, bf16, np.bool_, np.complex64):
    case(f"gather of {np.dtype(dtype)}", gather(Mode.FILL_OR_DROP), ints(4, 3).astype(dtype), ROWS[..., None])
for dtype in (u8, i8, u32):
    index = np.array([[[0], [3], [100]], [[1], [2], [4]]], dtype)
    case(f"gather by {np.dtype(dtype)}", gather(Mode.FILL_OR_DROP), ints(4, 3), index)
    case(f"scatter by {np.dtype(dtype)}", scatter("add", Mode.FILL_OR_DROP), ints(4, 3), index, ints(2, 3, 3))
case("gather by u8 of many", gather(Mode.CLIP), ints(300, 3), np.array([[[255], [3], [100]]], u8))

POINTS = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(1, 0))
UNPOINTS = lax.ScatterDimensionNumbers(
    update_window_dims=(), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(1, 0)
)
PAIRS = np.array([[0, 0], [2, 3], [3, 3], [5, 1], [1, -2], [-1, 9]], i32)
KEPT = lax.GatherDimensionNumbers(offset_dims=(0, 2), collapsed_slice_dims=(), start_index_map=(0,))
UNKEPT = lax.ScatterDimensionNumbers(
    update_window_dims=(0, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
)
WHOLE = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
UNWHOLE = lax.ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
)
for mode in MODES:
    case(f"gather points {mode.name}", gather(mode, POINTS, (1, 1)), ints(4, 3), PAIRS)
    case(f"scatter points {mode.name}", scatter("add", mode, UNPOINTS), ints(4, 3), PAIRS, ints(6))
    case(f"gather kept {mode.name}", gather(mode, KEPT, (1, 3)), ints(4, 3), np.array([[3], [0], [8]], i32))
    case(f"gather window {mode.name}", gather(mode, KEPT, (2, 3)), ints(4, 3), np.array([[3], [0], [8]], i32))
    case(
        f"scatter kept {mode.name}",
        scatter("add", mode, UNKEPT),
        ints(4, 3),
        np.array([[3], [0], [8]], i32),
        ints(1, 3, 3),
    )
    case(
        f"scatter window {mode.name}",
        scatter("add", mode, UNKEPT),
        ints(4, 3),
        np.array([[3], [0], [8]], i32),
        ints(2, 3, 3),
    )
    # The whole second dimension is taken from a start that may lie outside.
    case(f"gather whole {mode.name}", gather(mode, WHOLE, (1, 3)), ints(4, 3), np.array([[3, 0], [0, 1], [5, 0]], i32))
    case(
        f"scatter whole {mode.name}",
        scatter("add", mode, UNWHOLE),
        ints(4, 3),
        np.array([[3, 0], [0, 1], [5, 0]], i32),
        ints(3, 3),
    )
for kind in ("sub", "mul", "min", "max"):
    case(f"scatter-{kind}", scatter(kind, Mode.FILL_OR_DROP), ints(4, 3), ROWS[..., None], ints(2, 3, 3))
case("scatter-max int", scatter("max", Mode.CLIP), ints(4, 3, dtype=i32), ROWS[..., None], ints(2, 3, 3, dtype=i32))
case(
    "scatter unique",
    scatter("", Mode.FILL_OR_DROP, unique_indices=True),
    ints(4, 3),
    np.array([[[3], [9]], [[0], [1]]], i32),
    ints(2, 2, 3),
)
case("scatter apply", lambda x: x.at[np.array([1, 3])].apply(jnp.square), ints(4, 3))
case("scatter apply unique", lambda x: x.at[np.array([1, 3])].apply(jnp.square, unique_indices=True), ints(4, 3))
case("take_along_axis", lambda x, i: jnp.take_along_axis(x, i, 1), ints(4, 3), ints(4, 1, dtype=i32, low=0, high=4))
case(
    "take_along_axis grad",
    jax.grad(lambda x, i: (jnp.take_along_axis(x, i, 1) ** 2).sum()),
    ints(4, 3),
    ints(4, 2, dtype=i32, low=0, high=3),
)
case(
    "take_along_axis many",
    lambda x, i: jnp.take_along_axis(x, i, 1),
    ints(2, 4, 3),
    ints(2, 3, 3, dtype=i32, low=0, high=4),
)
case("embedding grad", jax.grad(lambda e, i: (e[i] ** 2).sum()), ints(4, 3), np.array([0, 3, 3, 1, -1], i32))
case("indexed set", lambda x, u: x.at[1].set(u), ints(4, 3), ints(3))
case("indexed add column", lambda x, u: x.at[:, 1].add(u), ints(4, 3), ints(4))
case(
    "cross entropy",
    jax.grad(lambda x, i: -jnp.take_along_axis(jax.nn.log_softmax(x), i[:, None], 1).mean()),
    ints(4, 5),
    np.array([0, 4, 2, 1], i32),
)
case("vmapped index", jax.vmap(lambda x, i: x[i]), ints(4, 3), np.array([0, 2, 1, 5], i32))
case(
    "vmapped dynamic_slice",
    jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (2,))),
    ints(4, 3),
    np.array([0, 2, 1, 5], i32),
)
