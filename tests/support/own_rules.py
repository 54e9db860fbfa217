"""Ops that need a rule of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir

from hapsynth.graph.trace import trace
from hapsynth.instructions.rules import factors_of


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def triples(fn: Callable[..., Any], *args: Any) -> set[str]:
    (op,) = trace(fn, args).graph.ops
    return set(map(str, factors_of(op).triples[1:]))


def square_sum(x: Any, name: str = "square_sum") -> Any:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.sum(x_ref[...] ** 2, axis=0)

    out = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    return pl.pallas_call(kernel, out_shape=out, interpret=True, name=name)(x)


def primitive(name: str, fn: Callable[..., Any], **params: Any) -> Callable[..., Any]:
    """A primitive of the user's own with one result."""

    def shaped(*operands: Any, **params: Any) -> Any:
        out = jax.eval_shape(lambda *xs: fn(*xs, **params), *operands)
        return jax.core.ShapedArray(out.shape, out.dtype)

    p = Primitive(name)
    p.def_impl(fn)
    p.def_abstract_eval(shaped)
    mlir.register_lowering(p, mlir.lower_fun(fn, multiple_results=False))
    return lambda *xs: p.bind(*xs, **params)
