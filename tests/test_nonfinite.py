"""NaN and infinities: a plan gives what the function gives, whoever holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from slow_devices import SPEEDS, first_devices, slow_cluster, thin_cluster
from two_processes import run_two

import hapsynth
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.lower import _gloo
from hapsynth.lower._ordered_floats import from_ordered, to_ordered
from hapsynth.plan import Plan

NAN, INF = np.nan, np.inf

SPECIAL = [1.5, -2.0, 0.0, -0.0, INF, -INF, NAN, -NAN]

# ---- floats as integers of the same order

FORMATS = [
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"),
]


@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("name", FORMATS)
def test_integers_are_ordered_as_the_floats(name: str, reduction: str) -> None:
    """All bits that there are, of wide floats as many at random."""
    dtype = jnp.dtype(name)
    words = np.dtype(f"uint{8 * dtype.itemsize}")
    bits = np.arange(1 << 8 * min(dtype.itemsize, 2)).astype(words)
    if dtype.itemsize > 2:
        top = np.iinfo(words).max
        bits = np.random.default_rng(0).integers(0, top, 1 << 16, words)
        bits[-9:] = [top >> 1, top, 0, top // 2 + 1, *(np.asarray(v, dtype).view(words) for v in SPECIAL[:5])]
    x = bits.view(dtype)
    with np.errstate(invalid="ignore"):
        values = x.astype(np.float64)
    with jax.enable_x64(dtype.itemsize == 8):
        keys = np.asarray(jax.jit(lambda x: to_ordered(x, reduction))(x))
        made = np.asarray(jax.jit(lambda k: from_ordered(k, dtype))(keys))
    numbers, order = ~np.isnan(values), np.argsort(keys, kind="stable")
    ranked = values[order]
    assert (np.diff(ranked[~np.isnan(ranked)]) >= 0).all()
    # NaN wins, whatever its sign and bits.
    last = int(keys.max() if reduction == "max" else keys.min())
    assert numbers.all() or (keys[~numbers] == last).all()
    assert not (keys[numbers] == last).any() or numbers.all()
    assert made.dtype == dtype
    np.testing.assert_array_equal(made.view(words)[numbers], bits[numbers])
    with np.errstate(invalid="ignore"):
        assert np.isnan(made.astype(np.float64)[~numbers]).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_an_all_reduce_is_nan_where_a_device_has_nan(reduction: str, dtype: str) -> None:
    """Every pair of special values, in both orders, gathered or not."""
    pairs = np.array([(a, b) for a in SPECIAL for b in SPECIAL]).astype(dtype).T
    for options in (DEFAULT, LoweringOptions(gloo_gathered_bytes=0)):
        run = jax.shard_map(
            lambda x, options=options: _gloo.all_reduce(x, "d", reduction, options),
            mesh=first_devices(2),
            in_specs=PartitionSpec("d"),
            out_specs=PartitionSpec("d"),
            check_vma=False,
        )
        got = np.asarray(jax.jit(run)(pairs))
        want = np.asarray((jnp.max if reduction == "max" else jnp.min)(pairs, 0))
        for row in got:
            np.testing.assert_array_equal(row.astype(np.float32), want.astype(np.float32))
            np.testing.assert_array_equal(np.signbit(row)[row == 0], np.signbit(want)[want == 0])


def test_integers_are_reduced_as_they_are() -> None:
    struct = jax.ShapeDtypeStruct((2, 3), np.int32)
    run = lambda x: _gloo.all_reduce(x, "d", "max", None)
    spec = PartitionSpec("d")
    mapped = jax.shard_map(run, mesh=first_devices(2), in_specs=spec, out_specs=spec, check_vma=False)
    names = [e.primitive.name for e in jax.make_jaxpr(mapped)(struct).eqns[0].params["jaxpr"].eqns]
    assert names == ["pmax"]


# ---- plans


def planned(fn: Callable[..., Any], args: Sequence[Any], form: Any, on: str = "3:1", **options: Any) -> Plan:
    mesh, cluster = first_devices(len(SPEEDS[on])), options.pop("cluster", None) or slow_cluster(SPEEDS[on])
    return hapsynth.synthesize(fn, args, mesh, cluster=cluster, leave_out=False, form=form, **options)


def assert_as_jax(plan: Plan, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    got, want = plan.unshard(plan(*args)), jax.jit(fn)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-5)


def pooled(x: jax.Array, op: Any, start: float) -> jax.Array:
    return lax.reduce_window(x, start, op, (1, 2), (1, 2), "VALID").max(0)


EXTREMES: dict[str, Callable[[jax.Array], Any]] = {
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(0),
    "max of all": lambda x: x.max(),
    "max of bfloat16": lambda x: x.astype(jnp.bfloat16).max(0).astype(jnp.float32),
    "min of float16": lambda x: x.astype(jnp.float16).min().astype(jnp.float32),
    "amax of a scale": lambda x: jnp.round(x / jnp.abs(x).max()),
    "a guard": lambda x: jnp.isnan(x.max()),
    "relu of max": lambda x: jnp.maximum(x.max(0), 0.0),
    "negated": lambda x: -(-x).max(0),
    "clamp": lambda x: jnp.clip(x, -3.0, 3.0).max(0),
    "clamp of max": lambda x: jnp.clip(x.max(0), -3.0, 3.0),
    "clamp by max": lambda x: jnp.clip(x, -x.max(), x.max()).sum(0),
    "argmax": lambda x: (x.argmax(0), x.argmin(0)),
    "argmax of maxima": lambda x: x.max(0).argmax(),
    "cummax": lambda x: (lax.cummax(x, 0)[-1], lax.cummin(x, 1).max(0)),
    "cummax of max": lambda x: lax.cummax(x.max(0)),
    "reduce_window": lambda x: (pooled(x, lax.max, -INF), pooled(x, lax.min, INF)),
    "top_k": lambda x: (lax.top_k(x.T, 3), lax.top_k(x.max(0), 2)),
    "sort": lambda x: (jnp.sort(x, 0), jnp.sort(x.max(0))),
    "softmax": lambda x: jax.nn.softmax(x, 0).sum(0),
    "scatter max": lambda x: jnp.full((4, 8), -9.0).at[jnp.arange(24) % 4].max(x),
    "while": lambda x: lax.while_loop(lambda c: (c[0] < 5) & (c[1].max() < 50), lambda c: (c[0] + 1, 2 * c[1]), (0, x)),
    "cond": lambda x: lax.cond(x.max() > 0, lambda: x.sum(), lambda: x.min()),
    "any and all": lambda x: ((x > 0).any(0), (x > -5).all()),
    "integers": lambda x: jnp.where(jnp.isnan(x), 0, x).astype(jnp.int32).max(0),
}


def holed(where: int | None, value: float) -> np.ndarray:
    x = np.random.default_rng(1).integers(-4, 5, (24, 8)).astype(np.float32)
    if where is not None:
        x[where, 3] = value
    return x


@pytest.mark.few(12)
@pytest.mark.parametrize(("name", "form"), [*product(EXTREMES, ["switch", "staged"])])
def test_extremes_over_a_cut_dimension(name: str, form: str) -> None:
    """NaN with the first device and with the last, negative NaN (what x86 makes of 0/0), infinities."""
    fn = EXTREMES[name]
    plan = planned(fn, [holed(None, 0)], form, cluster=thin_cluster(SPEEDS["3:1"]), fixed={"[0]": "S(0)"})
    assert any(len(set(s)) > 1 for s in plan.sizes.shares)
    assert plan.program.collectives()
    for value in (NAN, -NAN, INF, -INF):
        for where in (0, 12, 23):
            assert_as_jax(plan, fn, [holed(where, value)])


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_an_empty_shard_is_no_nan(form: str) -> None:
    """All -inf, and a device with nothing: the identity, and NaN only where there is one."""
    fn = lambda x: (x.max(0), (-x).min(0))
    plan = planned(fn, [holed(None, 0)], form, on="hopeless")
    assert any(0 in s for s in plan.sizes.shares)
    for x in (np.full((24, 8), -INF, np.float32), holed(23, NAN), holed(0, -INF)):
        assert_as_jax(plan, fn, [x])


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_a_large_shard_keeps_nan(form: str) -> None:
    """XLA's CPU backend loses it in a reduction of so many elements, in `jit` too; not in one that leaves a partial."""
    fn = lambda x: (x.max(), x.min())
    plan = planned(fn, [np.zeros((20_000, 3), np.float32)], form)
    assert plan.program.collectives() == {"all_reduce": 2}
    for where in (0, 9_000, 19_999):
        x = np.ones((20_000, 3), np.float32)
        x[where, 1] = NAN
        assert np.isnan(plan.unshard(plan(x))).all()


PROCESSES = """
    import sys
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec
    import hapsynth
    from hapsynth.instructions.staging.options import DEFAULT
    from hapsynth.lower import _gloo
    from hapsynth.lower import host_array
    from slow_devices import slow_cluster

    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    mesh = Mesh(np.array(jax.devices()), ("hap",))
    assert _gloo.joins(mesh)
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))
    special = [1.5, -2.0, 0.0, np.inf, -np.inf, np.nan, -np.nan]
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.float8_e4m3fn):
        once = np.array([(a, b) for a in special for b in special], dtype).T
        for times in (1, DEFAULT.gloo_gathered_bytes // once.nbytes + 1):
            pairs = np.tile(once, times)
            assert (pairs.nbytes > DEFAULT.gloo_gathered_bytes) == (times > 1)
            split = jax.sharding.NamedSharding(mesh, PartitionSpec("hap"))
            x = jax.make_array_from_callback(pairs.shape, split, lambda index: pairs[index])
            for reduction, pair in (("max", np.maximum), ("min", np.minimum)):
                run = lambda x: _gloo.all_reduce(x, "hap", reduction, DEFAULT)
                mapped = jax.shard_map(run, mesh=mesh, in_specs=split.spec, out_specs=split.spec, check_vma=False)
                same(host_array(jax.jit(mapped)(x)), [pair(*pairs.astype(np.float64))] * 2)

    fn = lambda x: (x.max(), jnp.isnan(x.min()), jnp.round(x / jnp.abs(x).max()).sum(0))
    x = np.arange(70 * 9.0).reshape(70, 9)
    for form in ("switch", "staged"):
        plan = hapsynth.synthesize(fn, (x,), mesh, cluster=slow_cluster((1.0, 2.0)), leave_out=False, form=form)
        assert plan.program.collectives()["all_reduce"] > 1 and plan.form == form
        for row in (0, 69, None):
            y = x.copy()
            if row is not None:
                y[row, 4] = np.nan
            jax.tree.map(same, plan.unshard(plan(y)), jax.jit(fn)(y))

    # Of the last row one process has the result.
    apart = hapsynth.synthesize(jnp.tanh, (x,), mesh, cluster=slow_cluster((1.0, 2.0)), fixed={"[0]": "S(0)"})
    assert apart.output_layouts == {"": "S(0)"}, apart.output_layouts
    x[69, 4] = np.nan
    with jax.debug_nans(True):
        try:
            apart(x)
        except FloatingPointError:
            print("as JAX")
"""


def test_extremes_between_processes() -> None:
    """By gloo, small enough to be gathered and not."""
    assert all("as JAX" in said for said in run_two(PROCESSES, lambda address, i: [address, str(i)]))


# ---- partial sums


def summed(x: jax.Array) -> jax.Array:
    return jnp.tanh(x).sum()


PRODUCTS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "quotients": lambda x, s: summed(x) / s + jnp.sin(x).sum() / s,
    "products": lambda x, s: summed(x) * s + jnp.tanh(jnp.tanh(x)).sum() * s,
    "a product of a vector": lambda x, s: x.sum(0) * jnp.full(8, s) + jnp.tanh(x).sum(0) * s,
    "a contraction": lambda x, s: (x.T @ x + jnp.tanh(x).T @ x) @ jnp.full((8, 3), s),
    "a mean": lambda x, s: x.mean() * s,
    "a gradient, scaled": lambda x, s: jax.grad(lambda w: jnp.tanh(x @ w).sum() * s)(jnp.ones((8, 3))) / s,
}


@pytest.mark.few(5)
@pytest.mark.parametrize("form", ["switch", "staged"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_sum_by_zero_or_infinity(name: str, form: Any) -> None:
    """Where a device's part is zero, or of another sign than the sum."""
    fn = PRODUCTS[name]
    x = np.abs(np.random.default_rng(0).integers(1, 9, (4000, 8))).astype(np.float32) / 8
    mixed, zero = x.copy(), x.copy()
    mixed[-600:] *= -1
    zero[-1200:] = 0
    mesh = first_devices(3)
    for cluster in (slow_cluster((3.0, 2.0, 1.0)), slow_cluster((3.0, 2.0, 1.0), bandwidth=1e8)):
        plan = hapsynth.synthesize(fn, (x, np.float32(1)), mesh, cluster=cluster, leave_out=False, form=form)
        assert plan.program.collectives()
        assert any(len(set(s)) > 1 for s in plan.sizes.shares)
        for given in (x, mixed, zero):
            for s in (0.0, -0.0, INF, -INF, NAN, 2.0):
                assert_as_jax(plan, fn, (given, np.float32(s)))


def test_a_sum_passes_what_is_known_to_be_finite() -> None:
    """A mean's count, and a scale that is written down: one all-reduce, of what is left."""
    fn = lambda x: (x.sum(1) / 4096.0).sum() * 0.5 / x.size + (-x).sum() * 3.0
    x = np.ones((4000, 8), np.float32)
    cluster = slow_cluster((3.0, 2.0, 1.0), bandwidth=1e6)
    plan = hapsynth.synthesize(fn, (x,), first_devices(3), cluster=cluster, leave_out=False)
    assert plan.program.collectives() == {"all_reduce": 1}


# ---- jax_debug_nans


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w), (x @ w).sum()


W, X = np.ones((6, 5), np.float32), np.ones((13, 6), np.float32)


# Each form looks by itself, and each of the two options is looked for in both.
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("form", "value", "looking"),
    [
        ("switch", INF, jax.debug_infs),
        ("staged", INF, jax.debug_infs),
        ("switch", NAN, jax.debug_nans),
        ("staged", NAN, jax.debug_nans),
    ],
)
def test_what_is_looked_for_is_raised_as_jit_raises_it(form: str, value: float, looking: Any) -> None:
    bad = X.copy()
    bad[0, 0] = value
    plan = planned(step, (W, X), form)
    state = plan.shard(W)
    with looking(True):
        with pytest.raises(FloatingPointError, match="invalid value"):
            jax.block_until_ready(jax.jit(step)(W, bad))
        with pytest.raises(FloatingPointError, match="invalid value") as raised:
            plan(state, bad)
        assert any("the plan's result[" in note for note in raised.value.__notes__)
        # Nothing was consumed, and what has nothing of the sort goes on.
        state, loss = plan(state, X)
        assert float(loss) == 13 * 6 * 5
    state, loss = plan(state, bad)
    assert not np.isfinite(float(loss))


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_only_results_are_looked_at(form: str) -> None:
    """NaN on the way, in an argument and between stages, is no error to `jit` either."""
    fn = lambda x: jnp.where(jnp.isnan(x.max(0)), 1.0, jnp.nan_to_num(x).sum(0))
    x = holed(5, NAN)
    plan = planned(fn, (x,), form)
    with jax.debug_nans(True):
        got = plan(plan.shard(x))
        np.testing.assert_allclose(plan.unshard(got), jax.jit(fn)(x))


def test_a_plan_without_its_function_says_where() -> None:
    plan = planned(step, (W, X), "switch")
    plan.fn = None
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"the plan's result\[0\].*debug_nans"):
        plan(W, np.full_like(X, NAN))
