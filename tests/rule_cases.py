"""What the rules are tried on: functions of small arrays, traced to ops; every registered primitive must occur."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.lax import GatherScatterMode as Mode

from hapsynth.graph import Boundary, Graph, Literal, Op
from hapsynth.instructions.rules.registry import bind
from hapsynth.trace import trace


@dataclass(frozen=True)
class Case:
    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]

    @functools.cached_property
    def graph(self) -> Graph:
        return trace(self.fn, self.args).graph

    def ops(self) -> list[tuple[Op, list[Any]]]:
        """Every op with its operands' values, but for boundaries of regions and what lies behind them
        (`control_cases.py` has those)."""
        graph = self.graph
        known = {*graph.inputs, *graph.constants}
        tried: list[Op] = []
        for op in graph.ops:
            if not isinstance(op.primitive, Boundary) and all(
                isinstance(o, Literal) or o in known for o in op.operands
            ):
                tried.append(op)
                known.update(op.results)

        def run(inputs: Any) -> list[list[Any]]:
            env: dict[int, Any] = dict(zip(graph.inputs, inputs)) | dict(graph.constants)
            found: list[list[Any]] = []
            for op in tried:
                read = [jnp.asarray(o.value, o.dtype) if isinstance(o, Literal) else env[o] for o in op.operands]
                found.append(read)
                env.update(zip(op.results, bind(op.primitive, read, op.params)))
            return found

        if all(o in graph.inputs or isinstance(o, Literal) for op in tried for o in op.operands):
            env = dict(zip(graph.inputs, self.args))
            return [(op, [o.value if isinstance(o, Literal) else env[o] for o in op.operands]) for op in tried]
        return list(zip(tried, jax.device_get(jax.jit(run)(self.args))))


CASES: list[Case] = []


def case(name: str, fn: Callable[..., Any], *args: Any) -> None:
    CASES.append(Case(name, fn, args))


def ints(*shape: int, dtype: Any = np.float32, low: int = -4, high: int = 5) -> np.ndarray:
    """Small integers, no two cases alike: sums of them are exact in every type."""
    if np.dtype(dtype).kind == "u":
        low = max(low, 0)
    rng = np.random.default_rng([len(CASES), *shape])
    return rng.integers(low, high, shape).astype(dtype)


def floats(*shape: int, low: float = 0.1, high: float = 0.9, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([len(CASES), *shape]).uniform(low, high, shape).astype(dtype)


def distinct(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng([len(CASES), *shape])
    return rng.permutation(int(np.prod(shape))).reshape(shape).astype(dtype)


def bools(*shape: int) -> np.ndarray:
    return ints(*shape) > 0


bf16 = jnp.bfloat16.dtype
i8, i32, u8, u32, f32, f16 = np.int8, np.int32, np.uint8, np.uint32, np.float32, np.float16

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
case("device_put", lambda x: jax.device_put(x), ints(4))
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

# ---- gather and scatter

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


# ---- random numbers and typed keys


def typed(fn: Callable[..., Any], impl: str = "threefry2x32") -> Callable[..., Any]:
    """`fn` of typed keys as a function of their words."""
    return lambda words, *args: fn(jax.random.wrap_key_data(words, impl=impl), *args)


def words(*shape: int) -> np.ndarray:
    return np.random.default_rng([len(CASES), *shape]).integers(0, 1 << 32, shape, dtype=u32)


def key_arrays(keys: Any, i: Any) -> Any:
    joined = jnp.concatenate([keys, keys[1:3]])
    picked = jnp.where(i > 1, keys, keys[::-1])
    square = keys.reshape(2, 2).T
    part = lax.dynamic_slice(keys, (i[0],), (2,))
    return joined, picked, square, part, keys[i], jnp.broadcast_to(keys, (3, 4)), keys.at[1].set(keys[0]), keys[None]


for dtype in (u8, np.uint16, u32):
    case(f"bits {np.dtype(dtype)}", typed(lambda k, d=dtype: jax.random.bits(k, (3, 1, 2, 4), d)), words(2))
case("bits of one element", typed(lambda k: (jax.random.bits(k), jax.random.bits(k, (1, 4)))), words(2))
case("bits of a batch", typed(jax.vmap(lambda k: jax.random.bits(k, (3, 2), u8))), words(4, 2))
case("bits of two batches", typed(jax.vmap(jax.vmap(lambda k: jax.random.bits(k, (5,))))), words(3, 2, 2))
case("bits of raw keys", lambda k: jax.random.bits(jax.random.split(k, 3)[1], (4,)), words(2))
case("bits rbg", typed(jax.vmap(lambda k: jax.random.bits(k, (4,))), "rbg"), words(2, 4))
case("threefry2x32", lambda k, l, x, y: threefry2x32_p.bind(k, l, x, y), *[words(4, 3)] * 4)
case("threefry2x32 one key", lambda k, x: threefry2x32_p.bind(k[0], k[1], x, x), words(2), words(4, 3))
case(
    "keys",
    typed(lambda k, n: (jax.vmap(jax.random.split)(k), jax.vmap(jax.random.fold_in)(k, n), jax.random.clone(k))),
    words(4, 2),
    ints(4, dtype=i32, low=0),
)
case("keys from seeds", jax.vmap(lambda seed: jax.random.key_data(jax.random.key(seed))), ints(4, dtype=i32, low=0))
case("key arrays", typed(key_arrays), words(4, 2), np.array([1, 0, 3, 2], i32))
case("gamma", typed(jax.grad(lambda k, a: jax.random.gamma(k, a, (4,)).sum(), 1)), words(2), np.float32(2))
case("gamma of a batch", typed(jax.vmap(jax.random.gamma)), words(4, 2), floats(4, 3))
case("loggamma of rbg", typed(jax.vmap(jax.random.loggamma), "rbg"), words(3, 4), floats(3))
case(
    "pure_callback",
    lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"),
    floats(4, 3),
)


def primitives() -> dict[str, int]:
    """How many ops of each primitive the cases hold."""
    counts: dict[str, int] = {}
    for c in CASES:
        for op in c.graph.ops:
            counts[op.name] = counts.get(op.name, 0) + 1
    return counts
