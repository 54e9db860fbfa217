"""What `jax.jit` accepts, a plan accepts, with the same results: on devices of unlike speed, some of them empty."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from awkward_cases import CASES, floats
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from slow_devices import SPEEDS, first_devices, thin_cluster

import hapsynth
from hapsynth.plan import Plan
from hapsynth.running.check import relative_error
from hapsynth.running.sharded_array import ShardedArray


def planned(fn: Callable[..., Any], args: Any, kwargs: Any = None, *, on: str = "3:1", **options: Any) -> Plan:
    speeds = SPEEDS[on]
    mesh = options.pop("mesh", None) or first_devices(len(speeds))
    cluster = options.pop("cluster", None) or thin_cluster(speeds)
    return hapsynth.synthesize(fn, args, mesh, example_kwargs=kwargs, cluster=cluster, leave_out=False, **options)


def assert_same(got: Any, want: Any, plan: Plan, rtol: float = 1e-5) -> None:
    """Same tree, shapes, dtypes, weak types and values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not isinstance(b, (jax.Array, np.ndarray)):
            assert a is b or a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
        a, b = plan.unshard(a), plan.unshard(b)
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert relative_error(np.asarray(a), np.asarray(b)) <= rtol


# Nothing to divide, or nothing that may be.
WHOLE = ("scalars only", "nothing but None", "outputs that are inputs")
# On the cluster with a hopeless device, that one gets an empty shard.
IDLE = ("gather", "gather and its gradient", "argmax", "grouped convolution", "remat", "sort, top-k, cumsum")


def reference(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What `jax.jit` returns; leaves that are no arrays, which it refuses, as the function gives them."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [x for x in leaves if isinstance(x, (np.ndarray, np.generic, jax.Array, int, float, complex))]
    other: dict[int, Any] = {}

    def flat(given: Any) -> Any:
        rest = iter(given)
        full = [next(rest) if any(x is a for a in arrays) else x for x in leaves]
        a, k = jax.tree.unflatten(tree, full)
        out, out_tree = jax.tree.flatten(fn(*a, **k))
        other.update({i: x for i, x in enumerate(out) if isinstance(x, str) or callable(x)})
        other["tree"] = out_tree
        return [None if i in other else x for i, x in enumerate(out)]

    made = jax.jit(flat)(arrays)
    return jax.tree.unflatten(other.pop("tree"), [other.get(i, x) for i, x in enumerate(made)])


@cache
def plan_of(name: str, on: str) -> Plan:
    return planned(*CASES[name], on=on)


@cache
def wanted(name: str) -> Any:
    return reference(*CASES[name])


@pytest.mark.few(13)
@pytest.mark.parametrize("on", ["3:1", "hopeless"])
@pytest.mark.parametrize("name", CASES)
def test_same_as_jit(name: str, on: str) -> None:
    _, args, kwargs = CASES[name]
    plan, want = plan_of(name, on), wanted(name)
    rtol = 2e-2 if name == "bfloat16" else 1e-4 if "algebra" in name else 1e-5
    assert_same(plan(*args, **kwargs), want, plan, rtol)
    assert_same(plan(*args, **kwargs), want, plan, rtol)
    assert plan.lowered.traces == 1
    report = plan.check(*args, rtol=max(rtol, 1e-4), **kwargs)
    assert report.ok, report
    if on == "3:1" and name not in WHOLE:
        assert any(len(set(shares)) > 1 for shares in plan.sizes.shares), plan.sizes.shares
    if name in IDLE and on == "hopeless":
        assert any(shares[1] == 0 and sum(shares) > 1 for shares in plan.sizes.shares), plan.sizes.shares


def normed(x: Any, k: Any) -> Any:
    """Behind the end of a shard, 0 / 0."""
    names = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x / x, k, (1,), "SAME", dimension_numbers=names, feature_group_count=3)


TAKEN = np.arange(26) % 24 - 1
STRICT: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, str]]] = {
    "a number of NumPy's": (lambda p, rate: p - rate * p, (floats(24).astype(jnp.bfloat16), np.float64(0.1)), {}),
    "a number that is put": (lambda x: x * jax.device_put(2.0), (floats(24, 3),), {}),
    "every other row": (lambda u: jnp.zeros((9, 64)).at[::2].add(u), (floats(5, 64),), {"[0]": "S(0)"}),
    "groups of what is no number": (
        normed,
        (np.abs(floats(2, 4, 3)).astype(jnp.bfloat16), floats(3, 1, 3).astype(jnp.bfloat16)),
        {"[0]": "S(2)", "[1]": "S(2)"},
    ),
    "clipped indices": (
        jax.grad(lambda e: jnp.sum(jnp.take(e, TAKEN, 0, mode="clip") ** 2)),
        (floats(24, 8),),
        {"[0]": "S(0)"},
    ),
}


@pytest.mark.parametrize("name", STRICT)
def test_same_as_jit_where_ranks_are_not_promoted(name: str) -> None:
    fn, args, fixed = STRICT[name]
    with jax.numpy_rank_promotion("raise"):
        plan = planned(fn, args, fixed=fixed)
        assert_same(plan(*args), jax.jit(fn)(*args), plan)


def test_a_branch_within_a_branch_is_agreed_on() -> None:
    """By a collective, which those after it wait for."""

    def fn(x: Any, t: Any, n: Any) -> Any:
        inner = lambda v: lax.cond(t > 0.5, jnp.sin, jnp.cos, v)
        return lax.cond(n > 0, inner, lambda v: -v, x), (x * x).sum()

    args, alike = (floats(24, 1), np.float32(0.7), np.int32(1)), thin_cluster((1, 1))
    plan = planned(fn, args, mesh=first_devices(2), cluster=alike, form="fused")
    assert_same(plan(*args), jax.jit(fn)(*args), plan)


def test_many_ops_between_two_collectives() -> None:
    def fn(x: Any) -> Any:
        for _ in range(600):
            x = x * 1.001
        return x / x.sum()

    args = (np.ones(2**16, np.float32),)
    plan = planned(fn, args)
    assert len(set(plan.sizes.shares[0])) > 1
    assert_same(plan(*args), jax.jit(fn)(*args), plan)


def test_what_several_calls_close_over_is_held_once() -> None:
    held = floats(8, 8)
    block = jax.jit(lambda x: jnp.tanh(x @ held))
    plan = planned(jax.grad(lambda x: block(block(x)).sum()), (floats(24, 8),))
    assert len(plan.traced.graph.constants) == 1


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    """Planned without devices, loaded where they are: the same bits."""
    for name in ("keys", "large constants", "keywords"):
        fn, args, kwargs = CASES[name]
        structs, struct_kwargs = jax.eval_shape(lambda *a: a, (args, kwargs))[0]
        abstract = hapsynth.synthesize(fn, structs, thin_cluster(SPEEDS["3:1"]), example_kwargs=struct_kwargs)
        abstract.save(tmp_path / "plan.json")
        here = plan_of(name, "3:1")
        there = hapsynth.load(tmp_path / "plan.json", fn, structs, first_devices(4), example_kwargs=struct_kwargs)
        assert there.sizes.shares == here.sizes.shares
        assert_same(there(*args, **kwargs), here.unshard(here(*args, **kwargs)), there, rtol=0.0)


def test_one_device() -> None:
    for name in ("remat", "argmax", "empty arrays", "keys"):
        fn, args, kwargs = CASES[name]
        plan = planned(fn, args, kwargs, on="one")
        want = wanted(name)  # First, as the call consumes keys that lie where the plan keeps them.
        out = plan(*args, **kwargs)
        assert not any(isinstance(x, ShardedArray) for x in jax.tree.leaves(out))
        assert_same(out, want, plan)
        assert plan.program.collectives() == {}


@pytest.mark.parametrize(
    ("shape", "types", "devices"),
    [
        ((2, 4), (AxisType.Auto, AxisType.Explicit), slice(0, 8)),
        ((2, 4), (AxisType.Explicit, AxisType.Explicit), slice(0, 8)),
        ((8,), (AxisType.Explicit,), slice(0, 8)),
        ((4,), (AxisType.Auto,), slice(4, 8)),
        ((2, 2), (AxisType.Explicit, AxisType.Auto), slice(1, 8, 2)),
    ],
)
def test_meshes(shape: tuple[int, ...], types: tuple[AxisType, ...], devices: slice) -> None:
    chosen = np.array(jax.devices()[devices]).reshape(shape)
    mesh = Mesh(chosen, ("a", "b")[: len(shape)], axis_types=types)
    speeds = [3.0] * (chosen.size // 2) + [1.0] * (chosen.size // 2)
    fn, args, _ = CASES["remat"]
    want = jax.jit(fn)(*args)
    with jax.set_mesh(mesh):
        plan = planned(fn, args, mesh=mesh, cluster=thin_cluster(speeds))
    assert_same(plan(*args), want, plan)
    assert {d for x in jax.tree.leaves(plan(*args)) for d in x.sharding.device_set} <= set(chosen.flat)
    # Whatever the arguments lie on, and whatever mesh is in force.
    other = jax.make_mesh((4, 2), ("u", "v"), axis_types=(AxisType.Explicit,) * 2)
    weights = jax.device_put(args[0], NamedSharding(other, PartitionSpec("v", "u")))
    assert_same(plan(weights, jax.device_put(args[1], jax.devices()[6])), want, plan)
    for ambient in (mesh, other):
        with jax.set_mesh(ambient):
            placed = plan.shard(weights, args[1])
            assert_same(plan(*placed), want, plan)
            assert_same(plan(weights, placed[1]), want, plan)
            assert_same(plan(*plan.shard(*plan.shard(*args))), want, plan)
            assert plan.check(weights, args[1]).ok
    assert plan.lowered.traces == 1


def test_state_goes_round_and_is_consumed() -> None:
    fn, args, _ = CASES["remat"]
    plan = plan_of("remat", "3:1")
    assert plan.traced.graph.carry == ((0, 0), (1, 1), (2, 2))
    state, batch = plan.shard(*args)
    expected = args[0]
    for _ in range(4):
        before = state
        state, loss = plan(state, batch)
        assert all(x.is_deleted() for x in before)
        expected, wanted = jax.jit(fn)(expected, args[1])
    assert_same((state, loss), (expected, wanted), plan)
    assert plan.lowered.traces == 1
    assert not batch.is_deleted()
    state, _ = plan(plan.unshard(state), batch)
    assert not any(x.is_deleted() for x in state)


def test_carry_by_hand() -> None:
    """The batch goes round, the weights stay: nothing that structure alone tells."""
    fn = lambda weights, batch: {"loss": jnp.sum(batch), "next": jnp.tanh(batch @ weights)}
    args = floats(6, 6), floats(26, 6)
    plan = planned(fn, args, carry=[("[1]", "['next']")])
    assert plan.layouts["[1]"] == plan.output_layouts["['next']"] == "S(0)"
    weights, batch = plan.shard(*args)
    out = plan(weights, batch)
    assert batch.is_deleted()
    assert not weights.is_deleted()
    assert_same(plan(weights, out["next"])["loss"], jnp.sum(jnp.tanh(args[1] @ args[0])), plan, 1e-4)
    free = planned(fn, args, carry=[])
    weights, batch = free.shard(*args)
    free(weights, batch)
    assert not batch.is_deleted()


def test_fixed_layouts() -> None:
    fn, args, _ = CASES["remat"]
    free = plan_of("remat", "3:1")
    for layout in ("R", "S(0)", "S(1)"):
        plan = planned(fn, args, fixed={"[0][1]": layout, "[1]": "S(0)"})
        assert plan.layouts["[0][1]"] == plan.output_layouts["[0][1]"] == layout
        assert plan.cost >= free.cost * (1 - 1e-9)
        assert_same(plan(*args), jax.jit(fn)(*args), plan)
    same = planned(fn, args, fixed=free.layouts)
    assert same.layouts == free.layouts
    assert same.cost == pytest.approx(free.cost)


def test_time_budget_and_progress() -> None:
    fn, args, _ = CASES["remat"]
    told: list[Any] = []
    plan = planned(fn, args, time_budget_s=1e-9, progress=told.append)
    assert plan.lower_bound <= plan.cost < np.inf
    assert told
    assert all(p.lower_bound_s <= p.cost_s for p in told)
    assert [p.seconds for p in told] == sorted(p.seconds for p in told)
    assert_same(plan(*args), jax.jit(fn)(*args), plan)


def test_what_has_no_rule_is_replicated_and_named() -> None:
    def report(name: str) -> tuple[str, ...]:
        return plan_of(name, "3:1").result.replicated_primitives

    assert {"random_bits", "random_wrap", "random_split"} & set(report("keys"))
    assert report("remat") == report("loops") == ()
    # One of the calls takes the whole array at once.
    assert report("argmax") == ("argmax",)
