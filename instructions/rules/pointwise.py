"""Elementwise primitives: every dimension is a factor shared by all operands."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from hapsynth import _jax
from hapsynth.instructions.factors import Factors
from hapsynth.instructions.rules.registry import register


def _pointwise(f: Factors) -> None:
    """Operands have the result's shape, size 1 where they broadcast, or are scalars (clamp's bounds)."""
    dims = f.dims(f.op.result_shapes[0])
    for shape in f.op.shapes:
        f.operands.append(tuple(() if size == 1 else dim for size, dim in zip(shape, dims, strict=bool(shape))))
    f.results += [dims] * len(f.op.results)


NONLINEAR = (
    "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz conj cos cosh digamma "
    "eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite "
    "le le_to lgamma log log1p logistic lt lt_to max min ne nextafter not or polygamma population_count pow "
    "random_gamma_grad real regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square tan tanh xor zeta"
).split()
JOINT = ("add", "add_any", "sub")
EACH = ("mul",)
FIRST = ("neg", "div", "copy", "copy_p", "stop_gradient", "reduce_precision", "optimization_barrier")

register(*NONLINEAR, fusible=True)(_pointwise)


@register(*JOINT, fusible=True)
def _joint(f: Factors) -> None:
    """Linear in both operands together: partial + partial is partial, partial + replicated is not."""
    _pointwise(f)
    f.linear = ((0, 1),)


@register(*EACH, fusible=True)
def _each(f: Factors) -> None:
    """Linear in each operand while the other is fixed."""
    _pointwise(f)
    f.linear = ((0,), (1,))


@register(*FIRST, fusible=True)
def _first(f: Factors) -> None:
    """Linear in the first operand; integer division is not."""
    _pointwise(f)
    name, dtype = f.op.name, f.op.dtypes[0]
    if name == "reduce_precision" or (name == "div" and not jnp.issubdtype(dtype, jnp.inexact)):
        return
    f.linear = ((0,),)
    if name not in ("neg", "div"):
        f.passes = ((0,),)


@register("convert_element_type", fusible=True)
def _convert(f: Factors) -> None:
    """A partial sum passes where the new type holds every value of the old one: never a narrowing."""
    _pointwise(f)
    old, new = f.op.dtypes[0], f.op.result_dtypes[0]
    if _jax.is_extended(old) or _jax.is_extended(new):
        return
    if jnp.promote_types(old, new) == new and np.dtype(old) != np.bool_:
        # A sum of integers that wraps must wrap in the same type.
        if jnp.issubdtype(old, jnp.inexact) or old == new:
            f.linear = ((0,),)
        f.passes = ((0,),)


@register("select_n", fusible=True)
def _select(f: Factors) -> None:
    """Linear in all cases together once the predicate is known."""
    _pointwise(f)
    cases = tuple(range(1, len(f.op.operands)))
    f.linear = (cases,)
    f.passes = (cases,)
