"""Rule cases of elementwise ops, shapes, slices, reductions and orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rule_case import bf16, bools, case, distinct, f16, f32, floats, i8, i32, ints, u8

# ---- elementwise: tried generically, from this table

UNARY = """
abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1
floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh
"""
BINARY = "add sub mul div max min atan2 eq ge gt le lt ne nextafter pow rem"
SPECIAL = ["igamma", "igammac", "igamma_grad_a", "zeta", "polygamma"]
NEWER = ("log2", "one_minus_square", "polynomial")
"""Registered primitives that JAX has from 0.12 on."""
BITWISE = ["bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right_arithmetic", "shift_right_logical"]


def each(names: list[str], **fixed: Any) -> Callable[..., Any]:
    return lambda *args: [getattr(lax, name)(*args, **fixed) for name in names]


case("unary", each([n for n in UNARY.split() if n != "acosh"]), floats(2))
case("acosh", lax.acosh, floats(4, low=1.1, high=2))
case("binary", each(BINARY.split()), ints(3, low=1), ints(3, low=1))
case("special", each(SPECIAL), floats(2, low=1.5, high=3), floats(2, low=0.5, high=2))
case("bitwise", each(BITWISE), ints(4, 3, dtype=i32, low=0), ints(4, 3, dtype=i32, low=0))
case("total order", lambda x, y: [p.bind(x, y) for p in (lax.eq_to_p, lax.le_to_p, lax.lt_to_p)], ints(4), ints(4))
if hasattr(lax, "log2"):
    case("log2", lambda x: (lax.log2(x), lax.one_minus_square(x)), floats(4, 3))
if hasattr(lax, "polynomial"):
    case("polynomial", lambda x: lax.polynomial(x, (1.0, 2.0)), floats(4, 3))
case("regularized_incomplete_beta", lax.betainc, floats(2), floats(2), floats(2))
case("integer_pow", lambda x: lax.integer_pow(x, 3), ints(4, 3))
case("show", lambda x, y: (jax.debug.print("{}", y), jax.debug.callback(lambda v: None, y), x)[-1], ints(4, 3), ints(2))
case("not", lax.bitwise_not, ints(4, dtype=i32))
case("not bool", lax.bitwise_not, bools(4))
case("clz", lambda x: (lax.clz(x), lax.population_count(x)), ints(4, dtype=i32, low=0))
case("reduce_precision", lambda x: lax.reduce_precision(x, 5, 4), floats(4, 3))
case("add broadcast", lambda x, y: lax.add_p.bind(x, y), ints(4, 1), ints(4, 3))
case("mul broadcast", lambda x, y: lax.mul_p.bind(x, y), ints(1, 3), ints(4, 1))
case("sub literal", lambda x: x - 2.0, ints(4))
case("add zero literal", lambda x: lax.add(x, 0.0), ints(4))
case("neg int", lax.neg, ints(4, dtype=i8))
case("add u8 wraps", lax.add, ints(4, dtype=u8, high=250), ints(4, dtype=u8, high=250))
case("div int", lax.div, ints(4, dtype=i32, low=1), ints(4, dtype=i32, low=1))
case("mul int", lax.mul, ints(4, dtype=i32), ints(4, dtype=i32))
case("mul literal", lambda x: x * 2.5, ints(4, 3))
case("mul inf literal", lambda x: x * np.inf, ints(4, 3))
case("div literal", lambda x: (x / 4.0, x / np.inf), ints(4, 3))
case("div zero literal", lambda x: x / 0.0, ints(4, 3, low=1))
case("div tiny literal", lambda x: x / 1e-39, ints(4, 3))
case("mul bf16", lax.mul, ints(4, dtype=bf16), ints(4, dtype=bf16))
case("max literal", lambda x: lax.max(x, 1.0), ints(4, 3))
case("min literal", lambda x: lax.min(x, 1), ints(4, 3, dtype=i32))
case("max bool", lax.max, bools(4), bools(4))
case("clamp scalar bounds", lambda x: lax.clamp(-1.0, x, 2.0), ints(4, 3))
case("clamp", lax.clamp, ints(4, 3, low=-3, high=0), ints(4, 3), ints(4, 3, low=0))
case("select_n", lax.select, bools(4, 3), ints(4, 3), ints(4, 3))
case("select_n scalar predicate", lax.select, np.bool_(True), ints(4, 3), ints(4, 3))
case("select_n of three", lax.select_n, ints(4, dtype=i32, low=0, high=3), ints(4), ints(4), ints(4))
case("select_n bool", lax.select, bools(4), bools(4), bools(4))
case("relu", jax.grad(lambda x: jax.nn.relu(x).sum()), ints(4, 3))
case("where zero", lambda p, x: jnp.where(p, x, 0.0), bools(4, 3), ints(4, 3))
case("complex", lambda x, y: lax.complex(x, y), ints(4), ints(4))
case(
    "complex parts",
    lambda z: (lax.real(z), lax.imag(z), lax.conj(z), lax.neg(z)),
    (1 + 2j) * ints(4).astype(np.complex64),
)
case("copy", lambda x: (jnp.copy(x), lax.optimization_barrier(x), lax.stop_gradient(x)), ints(4))
case("barrier of two", lambda x, y: lax.optimization_barrier((x, y)), ints(4, 3), ints(2, dtype=i32))
case("barrier of a number", lambda x: lax.optimization_barrier((x, 2.0)), ints(4))
case("device_put", lambda x: jax.device_put(x), ints(4))
case("device_put of a number", lambda x: x * jax.device_put(2.0), ints(4))
case("add_any", jax.grad(lambda x: (x * x + jnp.sin(x)).sum()), ints(4))
case("sort by two keys", lambda x, y: lax.sort((x, y), num_keys=2), ints(4), ints(4))
for old, new in (
    (f32, bf16),
    (bf16, f32),
    (f16, f32),
    (f16, bf16),
    (i8, i32),
    (i32, i8),
    (u8, i8),
    (i32, f32),
    (f32, i32),
):
    case(f"convert {np.dtype(old)} {np.dtype(new)}", lambda x, new=new: x.astype(new), ints(4, dtype=old))
case("convert bool", lambda x: (x.astype(f32), x.astype(i32)), bools(4))
case("convert to bool", lambda x: x.astype(bool), ints(4))
case("convert float8", lambda x: x.astype(jnp.float8_e4m3fn).astype(f32), ints(4))
case("convert complex", lambda x: lax.convert_element_type(x, np.complex64), ints(4))

# ---- shape

case("broadcast", lambda x: jnp.broadcast_to(x, (4, 3)), ints(3))
case("broadcast new and expanded", lambda x: lax.broadcast_in_dim(x, (2, 4, 3), (0, 2)), ints(1, 3))
case("broadcast zeros", lambda: jnp.zeros((4, 3)))
case("broadcast ones", lambda: jnp.ones((4, 3), i32))
case("broadcast false", lambda: jnp.zeros((4,), bool))
case("broadcast scalar", lambda x: jnp.full((4,), x), np.float32(3))
case("reshape merge", lambda x: x.reshape(12, 2), ints(4, 3, 2))
case("reshape split", lambda x: x.reshape(4, 3, 2), ints(12, 2))
case("reshape merge and split", lambda x: x.reshape(3, 2, 1, 2, 5), ints(6, 2, 5))
case("reshape to scalar-like", lambda x: x.reshape(1, 4, 1), ints(4))
case("reshape gcd", lambda x: x.reshape(4, 6), ints(6, 4))
case("reshape gcd then whole", lambda x: x.reshape(6, 6, 3), ints(4, 9, 3))
case("reshape shifted", lambda x: x.reshape(4, 6), ints(12, 2))
case("reshape coprime", lambda x: x.reshape(2, 3, 5), ints(3, 2, 5))
case("reshape coprime long", lambda x: x.reshape(5, 2, 3), ints(3, 2, 5))
case("reshape permuted", lambda x: lax.reshape(x, (8, 3), dimensions=(2, 0, 1)), ints(2, 3, 4))
case("reshape permuted grad", jax.grad(lambda x: (lax.reshape(x, (8, 3), (2, 0, 1)) ** 2).sum()), ints(2, 3, 4))
case("reshape bool", lambda x: x.reshape(4), bools(2, 2))
case("reshape empty", lambda x: x.reshape(0, 2), ints(4, 0))
case("heads", lambda x: x.reshape(2, 3, 4, 2).transpose(0, 2, 1, 3).reshape(8, 3, 2), ints(2, 3, 8))
case("squeeze", lambda x: jnp.squeeze(x, (0, -1)), ints(1, 4, 1, 3, 1))
case("expand_dims", lambda x: jnp.expand_dims(x, (0, 2)), ints(4, 3))
case("transpose", lambda x: x.transpose(2, 0, 1), ints(4, 3, 4))
for dtype in (i32, f32, bf16, u8):
    case(f"iota {np.dtype(dtype)}", lambda dtype=dtype: lax.broadcasted_iota(dtype, (4, 3), 0))
case("iota other", lambda: lax.broadcasted_iota(i32, (4, 3), 1))
case("iota long u8", lambda: lax.iota(u8, 300))
case("iota complex", lambda: lax.iota(np.complex64, 4))
case("one_hot", lambda i: jax.nn.one_hot(i, 5), ints(4, dtype=i32))
case("tril", lambda x: jnp.tril(x), ints(4, 4))
case("bitcast", lambda x: lax.bitcast_convert_type(x, i32), ints(4, 3))
case("bitcast same", lambda x: lax.bitcast_convert_type_p.bind(x, new_dtype=np.dtype(f32)), ints(4))
case("bitcast narrower", lambda x: lax.bitcast_convert_type(x, u8), ints(4))
case("bitcast wider", lambda x: lax.bitcast_convert_type(x, f32), ints(4, 4, dtype=u8, low=0))

# ---- slices


def constrained(x: Any) -> Any:
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    return lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


case("slice", lambda x: x[:, 1:3], ints(4, 4))
case("slice strided", lambda x: lax.slice(x, (0, 0), (4, 4), (1, 2)), ints(4, 4))
case("slice strided one", lambda x: lax.slice(x, (0, 3, 0), (4, 4, 2), (1, 1, 1)), ints(4, 4, 2))
case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (0, i, 0), (4, 2, 3)), ints(4, 4, 3), np.int32(3))
case("dynamic_slice clamped whole", lambda x, i: lax.dynamic_slice(x, (i, i), (4, 2)), ints(4, 4), np.int32(9))
case(
    "dynamic_update_slice",
    lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)),
    ints(4, 4), ints(4, 2), np.int32(1),
)  # fmt: skip
case("dynamic_slice grad", jax.grad(lambda x: lax.dynamic_slice(x, (0, 1), (4, 2)).sum()), ints(4, 4))
case("concatenate", lambda x, y: jnp.concatenate([x, y, x], 1), ints(4, 3), ints(4, 1))
case("concatenate int", lambda x, y: jnp.concatenate([x, y]), ints(2, 3, dtype=i32), ints(4, 3, dtype=i32))
case("concatenate bool", lambda x, y: jnp.concatenate([x, y], 1), bools(4, 1), bools(4, 2))
case("unstack", lambda x: jnp.unstack(x, axis=1), ints(4, 2))
case("tile", lambda x: jnp.tile(x, (1, 2)), ints(4, 3))
case("tile one", lambda x: jnp.tile(x, (3, 1)), ints(1, 3))
case("mulhi", lambda x, y: lax.mulhi(x, y), ints(4, dtype=i32), ints(4, dtype=i32))
case("sharding_constraint", constrained, ints(4))
case("stack", lambda x, y: jnp.stack([x, y], 1), ints(4), ints(4))
case("split", lambda x: lax.split(x, (1, 3), 1), ints(4, 4))
case("split grad", jax.grad(lambda x: (lax.split(x, (1, 3), 1)[1] ** 2).sum()), ints(4, 4))
case("pad zero", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 1))), ints(4, 3))
case("pad one", lambda x: lax.pad(x, 1.0, ((0, 0, 0), (1, 0, 0))), ints(4, 3))
case("pad value", lambda x, v: lax.pad(x, v, ((0, 0, 0), (-1, 1, 0))), ints(4, 3), np.float32(2))
case("rev", lambda x: lax.rev(x, (1,)), ints(4, 3))
case("roll", lambda x: jnp.roll(x, 1, 0), ints(4, 3))

# ---- reductions and orders

for name in ["sum", "max", "min", "prod"]:
    for dtype in (f32, i32) if name != "sum" else (f32, i32, u8, bf16):
        case(
            f"reduce_{name} {np.dtype(dtype)}",
            lambda x, name=name: getattr(lax, f"reduce_{name}")(x, (1,)),
            ints(4, 3, dtype=dtype),
        )
case("reduce_sum all", lambda x: lax.reduce_sum(x, (0, 2)), ints(4, 3, 2))
case("reduce_sum complex", lambda x: lax.reduce_sum(x, (0,)), (1 + 2j) * ints(4).astype(np.complex64))
case("reduce_max all", lambda x: lax.reduce_max(x, (0, 1)), ints(4, 3))
case("reduce_max bool", lambda x: lax.reduce_max(x, (0,)), bools(4, 3))
case("reduce bool", lambda x: (lax.reduce_and(x, (1,)), lax.reduce_or(x, (1,)), lax.reduce_xor(x, (1,))), bools(4, 3))
case(
    "reduce bits",
    lambda x: (lax.reduce_and(x, (1,)), lax.reduce_or(x, (1,)), lax.reduce_xor(x, (1,))),
    ints(4, 3, dtype=i32),
)
case("argmax", lambda x: (lax.argmax(x, 1, i32), lax.argmin(x, 0, i32)), ints(4, 3))
case("argmax u8", lambda x: lax.argmax(x, 1, u8), ints(4, 3, dtype=i32))
case(
    "reduce two",
    lambda x, y: lax.reduce((x, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)),
    ints(4, 3),
    ints(4, 3),
)
case("cumsum", lambda x: (lax.cumsum(x, 1), lax.cumsum(x, 1, reverse=True)), ints(4, 3))
case("cumsum int", lambda x: lax.cumsum(x, 0), ints(4, 3, dtype=i8, low=20, high=90))
case(
    "cumulative", lambda x: (lax.cumprod(x, 1), lax.cummax(x, 1), lax.cummin(x, 1), lax.cumlogsumexp(x, 1)), ints(4, 3)
)
case("cummax grad", jax.grad(lambda x: (lax.cummax(x, 1) * x).sum()), distinct(4, 3))
case("sort", lambda x: lax.sort(x, dimension=0), ints(4, 3))
case("sort two", lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), distinct(4, 3), ints(4, 3, dtype=i32))
case("argsort", lambda x: jnp.argsort(x, 1), ints(4, 3))
case("top_k", lambda x: lax.top_k(x, 2), distinct(4, 3))
case("top_k middle", lambda x: lax.top_k(x, 1, axis=1), distinct(4, 3, 2))
case("approx_max_k", lambda x: lax.approx_max_k(x, 2, reduction_dimension=0), distinct(3, 4))
case("softmax", jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum()), ints(4, 3))
case("logsumexp", jax.grad(lambda x: jax.nn.logsumexp(x, 1).sum()), ints(4, 3))
case("var", jax.grad(lambda x: jnp.var(x, 0).sum()), ints(4, 3))
