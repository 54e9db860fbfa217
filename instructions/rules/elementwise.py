"""Elementwise primitives: every dimension is a factor shared by all operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hapsynth.instructions.factors import Factors, Local, Triple, is_known
from hapsynth.instructions.layout import P, R
from hapsynth.instructions.rules.registry import Cost, no_flops, register


def pointwise(f: Factors) -> None:
    """Operands have the result's shape, size 1 where they broadcast, or are scalars (clamp's bounds)."""
    dims = f.dims(f.op.result_shapes[0])
    for shape in f.op.shapes:
        f.operands.append(tuple(() if size == 1 else dim for size, dim in zip(shape, dims, strict=bool(shape))))
    f.results += [dims] * len(f.op.results)


_NONLINEAR: dict[Cost, str] = {
    "cheap": """
abs and bessel_i0e bessel_i1e ceil clz eq eq_to floor ge gt igamma igamma_grad_a igammac is_finite le le_to log2 lt
lt_to mulhi ne nextafter not one_minus_square or polygamma polynomial population_count reduce_precision
regularized_incomplete_beta round shift_left shift_right_arithmetic shift_right_logical sign square xor zeta
""",
    "costly": """
digamma integer_pow rem rsqrt sqrt
""",
    "transcendental": """
acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 lgamma log log1p logistic pow
sin sinh tan tanh
""",
}
SAME = ("copy", "layout_constraint", "name", "stop_gradient")
"""The identity, as far as values go."""

for _cost, _names in _NONLINEAR.items():
    register(*_names.split(), fusible=True, cost=_cost)(pointwise)


@register("add", "add_any", "complex", "sub", fusible=True)
def _joint(f: Factors) -> None:
    """Linear in both operands together: partial + partial is partial, partial + replicated is not."""
    pointwise(f)
    f.linear = ((0, 1),)


@register("mul", fusible=True)
def _each(f: Factors) -> None:
    """Linear in each operand while the other is fixed."""
    pointwise(f)
    f.multiplies((0,), (1,))


@register("conj", "imag", "neg", "real", *SAME, fusible=True)
def _first(f: Factors) -> None:
    """The identity, or linear part by part."""
    pointwise(f)
    name = f.op.name
    f.linear = ((0,),)
    if name in SAME:
        f.passes = ((0,),)
    elif name == "neg" and jnp.issubdtype(f.op.dtypes[0], jnp.floating):
        # Not on integers, whose least value is its own negative.
        f.extra += [Triple((P("max"),), (P("min"),)), Triple((P("min"),), (P("max"),))]


@register("div", fusible=True, cost="costly")
def _div(f: Factors) -> None:
    """Linear in the first operand, unless of integers. A partial sum passes where the divisor is known to be no zero:
    0 / 0 is NaN, and a device's part may be zero, or of another sign, where the sum is not."""
    pointwise(f)
    if jnp.issubdtype(f.op.dtypes[1], jnp.inexact):
        tiny = float(jnp.finfo(f.op.dtypes[1]).tiny)
        # What is smaller may be taken for a zero.
        f.linear = ((0,),) if is_known(f.op, 1, lambda x: ~(np.abs(x) < tiny)) else ()


@register("max", "min", fusible=True)
def _extreme(f: Factors) -> None:
    """Monotone in each operand, so an extreme of it passes; of both together, only the op's own kind does."""
    pointwise(f)
    f.passes = ((0,), (1,))
    own = P("max" if f.op.name == "max" else "min")
    if all(isinstance(o, int) for o in f.op.operands):
        f.extra.append(Triple((own, own), (own,)))


@register("clamp", fusible=True)
def _clamp(f: Factors) -> None:
    """Monotone in what is clamped."""
    pointwise(f)
    f.passes = ((1,),)


@register("convert_element_type", fusible=True)
def _convert(f: Factors) -> None:
    """A partial passes where the new type holds every value of the old one: never a narrowing."""
    pointwise(f)
    old, new = f.op.dtypes[0], f.op.result_dtypes[0]
    if old == new or _widens(old, new):
        f.passes = ((0,),)
        # A sum of integers that wraps must wrap in the same type.
        if old == new or jnp.issubdtype(old, jnp.inexact):
            f.linear = ((0,),)


def _widens(old: Any, new: Any) -> bool:
    """Whether every value of the old type is one of the new."""
    if old == np.bool_ or new == np.bool_:
        return False
    if jnp.issubdtype(new, jnp.integer):
        if not jnp.issubdtype(old, jnp.integer):
            return False
        a, b = jnp.iinfo(old), jnp.iinfo(new)
        return b.min <= a.min and a.max <= b.max
    if jnp.issubdtype(old, jnp.complexfloating) and not jnp.issubdtype(new, jnp.complexfloating):
        return False
    b = jnp.finfo(new)
    if jnp.issubdtype(old, jnp.integer):
        return jnp.iinfo(old).bits <= b.nmant
    a = jnp.finfo(old)
    # Not every 8-bit type has an infinity, but all that can overflow into one are wider here.
    return a.nmant <= b.nmant and a.maxexp <= b.maxexp and a.minexp >= b.minexp


@register("select_n", fusible=True)
def _select(f: Factors) -> None:
    """Linear in all cases together once the predicate is known."""
    pointwise(f)
    cases = tuple(range(1, len(f.op.operands)))
    f.linear = (cases,)
    f.passes = (cases,)


def _as_they_are(local: Local, operands: Sequence[Any]) -> list[Any]:
    # A literal is a number.
    return [x if hasattr(x, "shape") else jnp.asarray(x, d) for x, d in zip(operands, local.op.dtypes, strict=True)]


@register("sharding_constraint", "reshard", "device_put", local=_as_they_are, flops=no_flops, fusible=True)
@register("optimization_barrier", flops=no_flops, fusible=True)
def _apart(f: Factors) -> None:
    """The identity on each operand by itself."""
    n = len(f.op.operands)
    f.results += [f.operand(i) for i in range(n)]
    everything = tuple(range(n))
    f.linear = f.passes = (everything,)
    for i in everything if n > 1 else ():
        for kind in ("sum", "max", "min"):
            alone = tuple(P(kind) if j == i else R for j in everything)
            f.extra.append(Triple(alone, alone))
