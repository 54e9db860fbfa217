"""Rule cases of linear algebra, transforms, grouped rows, and of ops that only wrap or mark a value."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from rule_case import case, distinct, f32, floats, i32, ints, u32

from hapsynth import _jax

# ---- linear algebra and transforms


def definite(*shape: int) -> np.ndarray:
    """Well-conditioned symmetric matrices with distinct eigenvalues, no two alike."""
    a = floats(*shape)
    return a + a.swapaxes(-1, -2) + np.diag(np.arange(2, 2 + 2 * shape[-1], 2)).astype(f32)


linalg = lax.linalg
case("cholesky", jax.grad(lambda a: (linalg.cholesky(a) ** 2).sum()), definite(3, 3, 3))
case("cholesky_update", linalg.cholesky_update, np.linalg.cholesky(definite(3, 3)).T.copy(), floats(3))
case("lu", jax.grad(lambda a: (linalg.lu(a)[0] ** 2).sum()), definite(3, 3, 3))
case(
    "lu_pivots_to_permutation", lambda p: linalg.lu_pivots_to_permutation(p, 4), np.array([[0, 2], [3, 1], [2, 2]], i32)
)
case("qr", jax.grad(lambda a: (linalg.qr(a, full_matrices=False)[1] ** 2).sum()), definite(3, 3, 3)[..., :2])
case("qr pivoting", lambda a: linalg.qr(a, pivoting=True), definite(3, 2, 2))
case("qr raw", lambda a: jnp.linalg.qr(a, mode="raw"), definite(3, 3, 3)[..., :2])
case("householder_product", linalg.householder_product, floats(3, 3, 2), floats(3, 2))
case("ormqr", linalg.ormqr, floats(3, 3, 2), floats(3, 2), ints(3, 3, 4))
case("ormqr right", functools.partial(linalg.ormqr, left=False), floats(3, 3, 2), floats(3, 2), ints(3, 4, 3))
case("eig", linalg.eig, definite(3, 2, 2))
case("eigh", jax.grad(lambda a: (jnp.linalg.eigh(a)[1][..., 0] ** 4).sum()), definite(3, 3, 3))
case("svd", jax.grad(lambda a: jnp.linalg.svd(a, full_matrices=False)[1].sum()), definite(3, 3, 3)[..., :2])
case("svd values", lambda a: jnp.linalg.svd(a, compute_uv=False), definite(3, 2, 2))
case("schur", linalg.schur, definite(3, 2, 2))
case("hessenberg", linalg.hessenberg, definite(3, 3, 3))
case("tridiagonal", linalg.tridiagonal, definite(3, 3, 3))
case("tridiagonal_solve", linalg.tridiagonal_solve, ints(2, 3), ints(2, 3, low=9, high=12), ints(2, 3), ints(2, 3, 4))
case(
    "tridiagonal_solve grad",
    jax.grad(lambda d, b: (linalg.tridiagonal_solve(d - 9, d, d - 10, b) ** 2).sum(), (0, 1)),
    ints(2, 3, low=9, high=12),
    ints(2, 3, 3),
)
for side, shape in (("left", (3, 2, 4)), ("right", (3, 4, 2))):
    case(
        f"triangular_solve {side}",
        functools.partial(linalg.triangular_solve, left_side=side == "left", lower=True),
        definite(3, 2, 2),
        ints(*shape),
    )
case("solve", jax.grad(lambda a, b: (jnp.linalg.solve(a, b) ** 2).sum(), (0, 1)), definite(3, 3, 3), ints(3, 3, 2))
case("inverse", jax.vmap(lambda a: jnp.linalg.inv(a) * jnp.linalg.det(a)), definite(3, 3, 3))
for alpha, beta in ((1.0, 0.0), (2.0, 1.0), (1.0, 2.0)):
    case(
        f"symmetric_product {beta}",
        lambda a, c, alpha=alpha, beta=beta: linalg.symmetric_product(
            a, c + c.swapaxes(-1, -2), alpha=alpha, beta=beta, symmetrize_output=True
        ),
        ints(2, 3, 4),
        ints(2, 3, 3),
    )
case("fft", lambda x: jnp.fft.fft(x), (1 + 2j) * ints(3, 4).astype(np.complex64))
case("rfft grad", jax.grad(lambda x: jnp.abs(jnp.fft.rfft(x)).sum()), floats(3, 5))
case("irfft2", lambda x: jnp.fft.irfft2(x), (2 - 1j) * ints(3, 2, 3).astype(np.complex64))

# ---- rows in groups

SIZES = np.array([2, 0, 3], i32)
case("ragged_dot", lax.ragged_dot, ints(6, 4), ints(3, 4, 2), SIZES)
case("ragged_dot of unsigned sizes", lax.ragged_dot, ints(6, 4), ints(3, 4, 2), SIZES.astype(u32))
case(
    "ragged_dot grad",
    jax.grad(lambda x, w, s: (lax.ragged_dot(x, w, s) ** 2).sum(), (0, 1)),
    ints(5, 3),
    ints(3, 3, 2),
    SIZES,
)
case(
    "ragged_dot batched",
    jax.grad(lambda x, w, s: (jax.vmap(lax.ragged_dot)(x, w, s) ** 2).sum(), (0, 1)),
    ints(2, 4, 2),
    ints(2, 3, 2, 3),
    np.array([[1, 1, 1], [0, 4, 0]], i32),
)
case(
    "ragged batch",
    lambda x, y, s: lax.ragged_dot_general(
        x, y, s, lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [0], [])
    ),
    ints(4, 2, 3),
    ints(4, 3, 2),
    np.array([1, 2], i32),
)
f8, e8 = jnp.float8_e4m3fn.dtype, jnp.float8_e8m0fnu.dtype
for name, columns in (("", 2), (" of one block", 1)):
    case(
        f"scaled_dot{name}",
        lambda x, y, s, t: lax.scaled_dot(x, y, lhs_scale=s, rhs_scale=t, preferred_element_type=f32),
        ints(2, 3, 64, dtype=f8),
        ints(2, 64, 4, dtype=f8),
        np.ones((2, 3, 2)).astype(e8),
        np.full((2, columns, 4), 2.0).astype(e8),
    )
for k, left, right in ((96, 3, 2), (8, 1, 1), (9, 1, 1)):
    case(
        f"scaled_dot of {k} terms with {left} and {right} scales",
        lambda x, y, s, t: lax.scaled_dot(x, y, lhs_scale=s, rhs_scale=t, preferred_element_type=f32),
        ints(1, 4, k, dtype=f8),
        ints(1, k, 8, dtype=f8),
        np.full((1, 4, left), 2.0).astype(e8),
        np.full((1, right, 8), 0.5).astype(e8),
    )
SCALES = np.array([0.5, 2, 2.0**-127, 4]).astype(e8)
case("scatter_max of scales", lambda s, t: s.at[np.array([2, 0, 1, 0])].max(t), SCALES, SCALES[::-1].copy())


def resharded(x: Any) -> Any:
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Explicit,))
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


NEWER = ("scaled_matmul_wrapper",) if jax.__version_info__ < (0, 11) else ()
"""Primitives that JAX runs on GPUs only before 0.11."""
if not NEWER:
    case(
        "scaled_matmul",
        lambda x, y, s, t: jax.nn.scaled_matmul(x, y, s, t, preferred_element_type=f32),
        ints(2, 3, 64, dtype=f8),
        ints(2, 4, 64, dtype=f8),
        np.ones((2, 3, 2)).astype(e8),
        np.full((2, 4, 2), 2.0).astype(e8),
    )

# ---- calls, and ops that every device runs whole

case("composite", lambda x: lax.composite(lambda y: y * 2, "my.double")(x), ints(4))
case(
    "custom_root",
    lambda x: jax.lax.custom_root(
        lambda y: 2 * y - x, x, lambda g, y: y - g(y) / 2, lambda g, y: jax.tree.map(lambda z: z / 2, y)
    ),
    ints(4),
)
case("name", lambda x: checkpoint_name(x, "kept"), ints(4))
case("empty", lambda: lax.empty((4, 3), f32))
case("empty scalar", lambda: jex.primitives.empty2_p.bind(dtype=np.dtype(f32), memory_space=jax.memory.Space.Device))
case("platform_index", lambda x: lax.platform_dependent(x, cpu=lambda x: x + 1, default=lambda x: x), ints(4))
case("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (4, 3)), np.arange(4, dtype=u32))
case("layout_constraint", lambda x: with_layout_constraint(x, Layout((1, 0))), ints(4, 3))
case("reshard", resharded, ints(4))


def chosen(x: Any, source: Any) -> Any:
    """The greatest of each window, to which a source is added from a start of 1."""
    numbers = jax.ShapeDtypeStruct((), f32)
    select, add = (jax.make_jaxpr(fn)(numbers, numbers) for fn in (lax.ge, lax.add))
    (select, select_consts), (add, add_consts) = map(_jax.open_jaxpr, (select, add))
    return lax.select_and_scatter_p.bind(
        x,
        source,
        np.float32(1),
        select_jaxpr=select,
        select_consts=tuple(select_consts),
        scatter_jaxpr=add,
        scatter_consts=tuple(add_consts),
        window_dimensions=(1, 2, 1),
        window_strides=(1, 2, 1),
        padding=((0, 0),) * 3,
    )


case("select_and_scatter", chosen, distinct(3, 4, 2), ints(3, 2, 2))
