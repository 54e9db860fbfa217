"""Example calls of JAX's public functions, on abstract values: what `reach.py` traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Example:
    """`body(function, *arrays)`."""

    body: Callable[..., Any]
    arrays: tuple[Any, ...]

    def of(self, fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return lambda *arrays: self.body(fn, *arrays), self.arrays


def on(body: Callable[..., Any], *arrays: Any) -> tuple[Example, ...]:
    return (Example(body, arrays),)


def plain(*args: Any) -> Example:
    """The function on these arguments; what has no dtype is given as it is."""

    def body(fn: Callable[..., Any], *arrays: Any) -> Any:
        rest = iter(arrays)
        return fn(*(next(rest) if hasattr(a, "dtype") else a for a in args))

    return Example(body, tuple(a for a in args if hasattr(a, "dtype")))


def _array(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


_i32, _c64, _u32 = np.int32, np.complex64, np.uint32
_s, _v, _x, _t, _q = _array(), _array(4), _array(4, 4), _array(2, 4, 4), _array(2, 4, 4, 2)
_n, _i, _I = _array(dtype=_i32), _array(4, dtype=_i32), _array(4, 4, dtype=_i32)
_b, _B, _c = _array(4, dtype=bool), _array(4, 4, dtype=bool), _array(4, 4, dtype=_c64)
_key = jax.ShapeDtypeStruct((), jax.eval_shape(lambda: jax.random.key(0)).dtype)
_raw = _array(2, dtype=_u32)
_everywhere = NamedSharding(AbstractMesh((1,), ("a",), axis_types=(AxisType.Auto,)), PartitionSpec())

GENERIC = tuple(
    plain(*args)
    for args in (
        (_x,), (_x, _x), (_x, _x, _x), (_x,) * 4, (_v,), (_v, _v), (_v, _v, _v), (_t,), (_t, _t), (_q,), (_s, _s, _s),
        (_I,), (_I, _I), (_i,), (_i, _i), (_array(4, dtype=np.uint8),), (_B,), (_B, _B), (_B, _x, _x), (_c,), (_c, _c),
        (_n, _s), (_x, _n), (_x, _i), (_x, 1), (_x, 0, 1), (_x, (0,)), (_x, (4, 4)),
        (4,), (4, _x), ((4, 4),), ((4, 4), 1.0),
    )
)  # fmt: skip
KEYED = tuple(
    plain(*args)
    for args in (
        (_key,), (_key, _v), (_key, _v, _v), (_key, _x), (_key, _v, _x), (_key, _s), (_key, _s, _v), (_key, _s, _s, _s),
        (_key, 2), (_key, 2, _v), (_key, 3, (4,)), (_key, 1.0, 3, (4,)), (_key, _n, _n), (_key, (4,), 0, 9),
        (_key, (4,), np.float32), (_raw,), (0,),
    )
)  # fmt: skip
"""For jax.random."""

_SHAPES = "works on shapes and dtypes alone"
_HOST = "reads or writes on the host"
_VALUES = "the shape of its result depends on values: JAX does not trace it"
_MESH = "a collective: it runs only inside shard_map, which the trace refuses"
_WITHOUT = {
    _SHAPES: """
        lax.axis_size lax.broadcast_shapes lax.conv_dimension_numbers lax.conv_general_permutations
        lax.conv_general_shape_tuple lax.conv_shape_tuple lax.conv_transpose_shape_tuple lax.dtype lax.padtype_to_pads
        lax.reduce_window_shape_tuple nn.get_scaled_dot_general_config numpy.broadcast_shapes numpy.can_cast
        numpy.einsum_path numpy.finfo numpy.get_printoptions numpy.iinfo numpy.iscomplexobj numpy.isdtype
        numpy.isrealobj numpy.isscalar numpy.issubdtype numpy.iterable numpy.ndim numpy.printoptions
        numpy.promote_types numpy.result_type numpy.set_printoptions numpy.shape numpy.size random.key_dtype
        """,
    _HOST: """
        numpy.array2string numpy.array_repr numpy.array_str numpy.from_dlpack numpy.frombuffer numpy.fromfile
        numpy.fromiter numpy.fromstring numpy.load numpy.save numpy.savez random.key_impl
        """,
    _VALUES: "numpy.trim_zeros",
    _MESH: """
        lax.pbroadcast lax.pcast lax.preduced lax.precv lax.psend lax.psum_scatter_start lax.pvary lax.ragged_all_to_all
        """,
}
NO_OPS = {name: why for why, names in _WITHOUT.items() for name in names.split()}
"""Functions that have no call to trace, and why."""


def _mapped(*rest: Any, **named: Any) -> tuple[Example, ...]:
    """A collective over a named axis that vmap makes."""
    return on(lambda f, x: jax.vmap(lambda y: f(y, *rest, **named), axis_name="i", axis_size=4)(x), _x)


_window: dict[str, Any] = {"window_strides": (1,), "padding": "SAME"}
_scatter = lax.ScatterDimensionNumbers((1,), (0,), (0,))
_scattered = (
    Example(lambda f, x, i, u: f(x, i, u, _scatter), (_x, _array(3, 1, dtype=_i32), _array(3, 4))),
    Example(lambda f, x, i, u: f(x, i, u, _scatter, unique_indices=True), (_x, _array(3, 1, dtype=_i32), _array(3, 4))),
)
_signal, _kernel = _array(2, 3, 8), _array(4, 3, 3)
_dims = (((1,), (0,)), ((), ()))
_ragged = lax.RaggedDotDimensionNumbers(_dims, [0], [0])
_f8, _e8 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
_reduce = tuple(Example(lambda f, x: f(x, axes=(0,)), (a,)) for a in (_x, _I, _B, _c))
_sets = on(lambda f, a, b: f(a, b, size=3), _i, _i)
_unique = on(lambda f, a: f(a, size=3), _i)

CALLS: dict[str, tuple[Example, ...]] = {
    "lax.after_all": on(lambda f: f(lax.create_token())),
    "lax.all_gather": _mapped("i"),
    "lax.all_to_all": _mapped("i", 0, 0),
    "lax.axis_index": on(lambda f, x: jax.vmap(lambda y: y + f("i"), axis_name="i")(x), _x),
    "lax.pmean": _mapped("i"),
    "lax.psum": _mapped("i"),
    "lax.pmax": _mapped("i"),
    "lax.pmin": _mapped("i"),
    "lax.ppermute": _mapped("i", [(0, 1), (1, 2), (2, 3), (3, 0)]),
    "lax.pshuffle": _mapped("i", [1, 0, 3, 2]),
    "lax.psum_scatter": _mapped("i"),
    "lax.pswapaxes": _mapped("i", 0),
    "lax.argmax": on(lambda f, x: f(x, 0, np.int32), _x),
    "lax.argmin": on(lambda f, x: f(x, 0, np.int32), _x),
    "lax.associative_scan": on(lambda f, x: f(jnp.add, x), _x),
    "lax.bitcast_convert_type": (
        *on(lambda f, x: f(x, np.int32), _x),
        *on(lambda f, x: f(x, np.uint8), _x),
    ),
    "lax.broadcast_in_dim": on(lambda f, x: f(x, (2, 4), (1,)), _v),
    "lax.broadcasted_iota": on(lambda f: f(np.int32, (4, 4), 1)),
    "lax.composite": on(lambda f, x: f(lambda y: y * 2, "my.double")(x), _x),
    "lax.concatenate": on(lambda f, x, y: f([x, y], 0), _x, _x),
    "lax.cond": on(lambda f, p, x: f(p, jnp.sin, jnp.cos, x), _array(dtype=bool), _x),
    "lax.conv": on(lambda f, x, k: f(x, k, (1,), "SAME"), _signal, _kernel),
    "lax.conv_general_dilated": (
        *on(lambda f, x, k: f(x, k, **_window), _signal, _kernel),
        *on(lambda f, x, k: f(x, k, **_window, feature_group_count=3), _signal, _array(6, 1, 3)),
        *on(lambda f, x, k: f(x, k, **_window, batch_group_count=2), _signal, _kernel),
    ),
    "lax.conv_general_dilated_local": on(lambda f, x, k: f(x, k, (1,), "VALID", (3,)), _signal, _array(4, 9, 6)),
    "lax.conv_general_dilated_patches": on(lambda f, x: f(x, (3,), (1,), "SAME"), _signal),
    "lax.conv_transpose": on(lambda f, x, k: f(x, k, (2,), "SAME"), _array(2, 8, 3), _array(3, 3, 4)),
    "lax.conv_with_general_padding": on(lambda f, x, k: f(x, k, (1,), [(1, 1)], None, None), _signal, _kernel),
    "lax.convert_element_type": tuple(
        Example(lambda f, x, d=d: f(x, d), (a,)) for a in (_x, _I, _B) for d in (np.float16, _f8, np.int8, _c64)
    ),
    "lax.custom_linear_solve": on(lambda f, b: f(lambda x: 2 * x, b, lambda _, y: y / 2, lambda _, y: y / 2), _v),
    "lax.custom_root": on(lambda f, x: f(lambda y: y * y - 2, x, lambda g, y: y - g(y), lambda g, y: y / g(1.0)), _s),
    "lax.dot_general": (
        *on(lambda f, x, y: f(x, y, _dims), _x, _x),
        *on(
            lambda f, x, y: f(x, y, _dims, preferred_element_type=np.int32),
            _array(4, 4, dtype=np.int8),
            _array(4, 4, dtype=np.int8),
        ),
    ),
    "lax.dynamic_slice": on(lambda f, x, i: f(x, (i, i), (2, 2)), _x, _n),
    "lax.dynamic_update_index_in_dim": on(lambda f, x, u, i: f(x, u, i, 0), _x, _v, _n),
    "lax.dynamic_update_slice": on(lambda f, x, u, i: f(x, u, (i, i)), _x, _array(2, 2), _n),
    "lax.dynamic_update_slice_in_dim": on(lambda f, x, u, i: f(x, u, i, 0), _x, _array(2, 4), _n),
    "lax.dynamic_slice_in_dim": on(lambda f, x, i: f(x, i, 2), _x, _n),
    "lax.empty": on(lambda f: f((4,), np.float32)),
    "lax.fft": tuple(
        Example(lambda f, x, k=k: f(x, k, (4,)), (a,))
        for k, a in ((lax.FftType.FFT, _c), (lax.FftType.RFFT, _x), (lax.FftType.IRFFT, _array(4, 3, dtype=_c64)))
    ),
    "lax.fori_loop": on(lambda f, x: f(0, 3, lambda _, y: jnp.sin(y), x), _x),
    "lax.full": on(lambda f, s: f((4,), s), _s),
    "lax.gather": on(
        lambda f, x, i: f(x, i, lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 4)), _x, _array(3, 1, dtype=_i32)
    ),
    "lax.index_take": on(lambda f, x, i: f(x, (i,), (0,)), _x, _i),
    "lax.iota": on(lambda f: f(np.float32, 4)),
    "lax.map": (*on(lambda f, x: f(jnp.sin, x), _x), *on(lambda f, x: f(jnp.sin, x, batch_size=2), _x)),
    "lax.pad": on(lambda f, x: f(x, 0.0, ((1, 1, 0), (0, 0, 1))), _x),
    "lax.platform_dependent": on(lambda f, x: f(x, cpu=jnp.sin, default=jnp.cos), _x),
    "lax.ragged_dot": on(lambda f, x, w, n: f(x, w, n), _array(6, 4), _array(3, 4, 2), _array(3, dtype=_i32)),
    "lax.ragged_dot_general": on(
        lambda f, x, w, n: f(x, w, n, lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])),
        _array(6, 4),
        _array(3, 4, 2),
        _array(3, dtype=_i32),
    ),
    "lax.reduce": (
        *on(lambda f, x: f(x, 0.0, lax.add, (0,)), _x),
        *on(lambda f, x: f(x, 0.0, lambda a, b: a + b * a, (0,)), _x),
    ),
    **{f"lax.reduce_{kind}": _reduce for kind in ("and", "or", "xor", "sum", "prod", "max", "min")},
    "lax.reduce_precision": on(lambda f, x: f(x, 5, 4), _x),
    "lax.reduce_window": tuple(
        Example(lambda f, x, o=o, z=z: f(x, z, o, (2, 2), (1, 1), "SAME"), (_x,))
        for o, z in ((lax.add, 0.0), (lax.max, -np.inf), (lax.min, np.inf), (lax.mul, 1.0))
    ),
    "lax.rng_bit_generator": on(lambda f, k: f(k, (4,)), _array(4, dtype=_u32)),
    "lax.rng_uniform": on(lambda f: f(0.0, 1.0, (4,))),
    "lax.scaled_dot": (
        *on(
            lambda f, x, y, s, t: f(x, y, lhs_scale=s, rhs_scale=t),
            _array(2, 4, 64, dtype=_f8),
            _array(2, 64, 4, dtype=_f8),
            _array(2, 4, 2, dtype=_e8),
            _array(2, 2, 4, dtype=_e8),
        ),
    ),
    "lax.scan": on(lambda f, c, x: f(lambda a, y: (a + y, a * y), c, x), _v, _x),
    **{f"lax.scatter{kind}": _scattered for kind in ("", "_add", "_sub", "_mul", "_min", "_max")},
    "lax.scatter_apply": on(
        lambda f, x, i: f(x, i, jnp.sin, _scatter, update_shape=(3, 4)), _x, _array(3, 1, dtype=_i32)
    ),
    "lax.select": on(lambda f, p, x, y: f(p, x, y), _B, _x, _x),
    "lax.slice": on(lambda f, x: f(x, (0, 1), (4, 3)), _x),
    "lax.slice_in_dim": on(lambda f, x: f(x, 0, 2), _x),
    "lax.sort": (*on(lambda f, x: f(x), _x), *on(lambda f, x, y: f((x, y), num_keys=2), _x, _I)),
    "lax.split": on(lambda f, x: f(x, (1, 3)), _x),
    "lax.squeeze": on(lambda f, x: f(x, (0,)), _array(1, 4)),
    "lax.switch": on(lambda f, i, x: f(i, [jnp.sin, jnp.cos, jnp.tan], x), _n, _x),
    "lax.transpose": on(lambda f, x: f(x, (1, 0)), _x),
    "lax.while_loop": on(lambda f, x: f(lambda y: y.sum() < 9, lambda y: y * 2, x), _v),
    "lax.with_sharding_constraint": on(lambda f, x: f(x, _everywhere), _x),
    "lax.approx_max_k": on(lambda f, x: f(x, 2), _x),
    "lax.approx_min_k": on(lambda f, x: f(x, 2), _x),
    "lax.dce_sink": on(lambda f, x: (f(x), x)[1], _x),
    **{
        f"lax.linalg.{name}": on(lambda f, a: f(a), _t)
        for name in ("eig", "qr", "svd", "schur", "hessenberg", "tridiagonal")
    },
    "lax.linalg.qr": (*on(lambda f, a: f(a, full_matrices=False), _t), *on(lambda f, a: f(a, pivoting=True), _t)),
    "lax.linalg.cholesky_update": on(lambda f, r, w: f(r, w), _x, _v),
    "lax.linalg.householder_product": on(lambda f, a, t: f(a, t), _t, _array(2, 4)),
    "lax.linalg.lu_pivots_to_permutation": on(lambda f, p: f(p, 4), _array(2, 3, dtype=_i32)),
    "lax.linalg.ormqr": on(lambda f, a, t, c: f(a, t, c), _t, _array(2, 4), _t),
    "lax.linalg.symmetric_product": on(lambda f, a, c: f(a, c), _t, _t),
    "lax.linalg.triangular_solve": on(lambda f, a, b: f(a, b), _t, _t),
    "lax.linalg.tridiagonal_solve": on(lambda f, d, b: f(d, d, d, b), _array(2, 4), _t),
    "numpy.linalg.qr": (*on(lambda f, a: f(a), _t), *on(lambda f, a: f(a, mode="raw"), _t)),
    "numpy.apply_along_axis": on(lambda f, x: f(jnp.sum, 0, x), _x),
    "numpy.apply_over_axes": on(lambda f, x: f(jnp.sum, x, (0,)), _x),
    "numpy.argwhere": _unique,
    "numpy.astype": on(lambda f, x: f(x, np.int32), _x),
    "numpy.bincount": on(lambda f, x: f(x, length=4), _i),
    "numpy.choose": on(lambda f, i, x: f(i, [x, x], mode="clip"), _i, _v),
    "numpy.compress": on(lambda f, b, x: f(b, x, size=2), _b, _v),
    "numpy.cross": on(lambda f, x, y: f(x, y), _array(4, 3), _array(4, 3)),
    "numpy.dsplit": on(lambda f, x: f(x, 2), _t),
    "numpy.extract": on(lambda f, b, x: f(b, x, size=2), _b, _v),
    "numpy.fill_diagonal": on(lambda f, x: f(x, 1.0, inplace=False), _x),
    "numpy.flatnonzero": _unique,
    "numpy.fromfunction": on(lambda f: f(lambda i, j: i + j, (4, 4))),
    "numpy.frompyfunc": on(lambda f, x: f(lambda a, b: a * b + a, 2, 1, identity=0).reduce(x), _v),
    "numpy.intersect1d": _sets,
    "numpy.mask_indices": on(lambda f: f(4, jnp.triu, size=10)),
    "numpy.nonzero": _unique,
    "numpy.permute_dims": on(lambda f, x: f(x, (1, 0)), _x),
    "numpy.place": on(lambda f, x, m, v: f(x, m, v, inplace=False), _v, _b, _v),
    "numpy.polyfit": on(lambda f, x, y: f(x, y, 2), _v, _v),
    "numpy.put": on(lambda f, x, i, v: f(x, i, v, inplace=False), _v, _i, _v),
    "numpy.put_along_axis": on(lambda f, x, i, v: f(x, i, v, 0, inplace=False), _x, _I, _x),
    "numpy.ravel_multi_index": on(lambda f, i: f((i, i), (4, 4), mode="clip"), _i),
    "numpy.setdiff1d": _sets,
    "numpy.setxor1d": _sets,
    "numpy.union1d": _sets,
    "numpy.unique": (*_unique, *on(lambda f, a: f(a, True, True, True, size=3), _i)),
    "numpy.unique_all": _unique,
    "numpy.unique_counts": _unique,
    "numpy.unique_inverse": _unique,
    "numpy.unique_values": _unique,
    "numpy.unpackbits": on(lambda f, x: f(x), _array(4, dtype=np.uint8)),
    "numpy.vectorize": on(lambda f, x: f(lambda a: a * 2)(x), _x),
    "numpy.einsum": on(lambda f, x, y: f("bij,bjk->bik", x, y), _t, _t),
    "numpy.piecewise": on(lambda f, x: f(x, [x > 0], [1.0, jnp.sin]), _v),
    "numpy.select": on(lambda f, x: f([x > 0, x < 1], [x, x * 2]), _v),
    "numpy.linalg.cross": on(lambda f, x, y: f(x, y), _array(4, 3), _array(4, 3)),
    "nn.scaled_dot_general": on(
        lambda f, x, y: f(x, y, (((2,), (2,)), ((0,), (0,)))), _array(2, 4, 64), _array(2, 4, 64)
    ),
    "nn.scaled_matmul": on(
        lambda f, x, y, s, t: f(x, y, s, t),
        _array(2, 4, 64, dtype=_f8),
        _array(2, 4, 64, dtype=_f8),
        _array(2, 4, 2, dtype=_e8),
        _array(2, 4, 2, dtype=_e8),
    ),
    "nn.dot_product_attention": on(lambda f, q: f(q, q, q, is_causal=True), _q),
    "random.fold_in": on(lambda f, k, n: f(k, n), _key, _n),
    "random.ball": on(lambda f, k: f(k, 3), _key),
    "random.generalized_normal": on(lambda f, k: f(k, 2.0, (4,)), _key),
    "random.multinomial": on(lambda f, k, p: f(k, 5.0, p), _key, _v),
    "random.multivariate_normal": on(lambda f, k, m, c: f(k, m, c), _key, _v, _x),
    "random.orthogonal": on(lambda f, k: f(k, 3), _key),
    "random.randint": on(lambda f, k: f(k, (4,), 0, 9), _key),
    "random.triangular": on(lambda f, k: f(k, 0.0, 0.5, 1.0, (4,)), _key),
    "random.wrap_key_data": on(lambda f, k: f(k), _raw),
    "random.clone": on(lambda f, k: f(k), _key),
    "scipy.special.bessel_jn": on(lambda f, x: f(x, v=3), _v),
    "scipy.special.sph_harm_y": on(lambda f, n, m, t: f(n, m, t, t, n_max=3), _i, _i, _v),
    "scipy.special.lpmn": on(lambda f, x: f(2, 2, x), _v),
    "scipy.special.lpmn_values": on(lambda f, x: f(2, 2, x, True), _v),
}
"""Calls of the functions that none of the generic ones fits, or not all of what they do."""
