"""What every model is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

Model: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A step, and its arguments as ShapeDtypeStructs."""


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int32)


def abstract(fn: Callable[..., Any], *args: Any) -> Any:
    """What `fn` returns, as ShapeDtypeStructs: nothing is computed."""
    return jax.eval_shape(fn, *args)


def key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))
