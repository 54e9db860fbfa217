"""Reductions: a reduced dimension leaves a partial where a collective can finish it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from hapsynth.instructions.factors import Factors, Local, Triple
from hapsynth.instructions.layout import P, Reduction, is_partial
from hapsynth.instructions.rules.registry import bind, register


def _reduced(f: Factors, kind: Reduction, why: str = "") -> None:
    """`i j -> i`, with `j` left to `kind`, or blocked where there is none."""
    x = f.operand(0)
    axes = {d % len(x) for d in f.op.params["axes"]}
    f.results.append(tuple(dim for d, dim in enumerate(x) if d not in axes))
    if kind:
        f.reduce((x[d] for d in axes), kind)
    else:
        f.block((x[d] for d in axes), why)


def keeps(f: Factors, kind: Reduction) -> None:
    """A partial of this kind, and only this, passes through the first operand."""
    f.extra.append(Triple((P(kind),), (P(kind),)))


def extreme(f: Factors) -> Reduction:
    """That an op is named after, as `reduce_max` and `cummin` are."""
    return "max" if f.op.name.endswith("max") else "min"


@register("reduce_sum")
def _reduce_sum(f: Factors) -> None:
    _reduced(f, "sum")
    f.linear = ((0,),)


def _with_nan(local: Local, operands: Sequence[Any]) -> list[Any]:
    """A device's part of an extreme: NaN where there is one. XLA's CPU backend loses NaN in reductions of about 4,096
    elements and more (JAX 0.10.2 to 0.12, in `jit` too). To look for it takes two to three times as long, so that what
    is reduced whole is left as it is."""
    made = bind(local.op.primitive, operands, local.op.params)
    floats = jnp.issubdtype(local.op.dtypes[0], jnp.floating)
    if local.platform == "cpu" and floats and is_partial(local.result_layout(0)):
        lost = lax.reduce_or(jnp.isnan(operands[0]), local.op.params["axes"])
        made = [jnp.where(lost, jnp.asarray(jnp.nan, x.dtype), x) for x in made]
    return made


@register("reduce_max", "reduce_min", local=_with_nan)
def _reduce_extreme(f: Factors) -> None:
    _reduced(f, extreme(f))
    keeps(f, extreme(f))


@register("reduce_prod")
def _reduce_prod(f: Factors) -> None:
    _reduced(f, "", "there is no partial product")


@register("reduce_and", "reduce_or")
def _reduce_logical(f: Factors) -> None:
    """On booleans `and` is the minimum and `or` the maximum; on integers they are bitwise."""
    kind = "min" if f.op.name == "reduce_and" else "max"
    logical = np.dtype(f.op.dtypes[0]) == np.bool_
    _reduced(f, kind if logical else "", "there is no bitwise partial")
    if logical:
        keeps(f, kind)


@register("reduce_xor")
def _reduce_xor(f: Factors) -> None:
    _reduced(f, "", "there is no bitwise partial")


@register("argmax", "argmin")
def _arg(f: Factors) -> None:
    _reduced(f, "", "the position of the extreme needs the whole dimension")


@register("reduce")
def _reduce(f: Factors) -> None:
    """The user's own reduction of several operands together, each with its initial value."""
    n = len(f.op.operands) // 2
    x = f.operand(0)
    f.operands += [x] * (n - 1)
    for initial in range(n, 2 * n):
        f.operand(initial)
    axes = {d % len(x) for d in f.op.params["dimensions"]}
    f.block((x[d] for d in axes), "nothing is known of the reduction")
    f.results += [tuple(dim for d, dim in enumerate(x) if d not in axes)] * n
