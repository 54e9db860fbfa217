"""One program at several shapes: short batches, sequences of other lengths, and one state that stays where it is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from slow_devices import SPEEDS, first_devices, thin_cluster

import hapsynth
from hapsynth import Plan, ShapeError

CARRIED = {"[0]['up']": "S(1)", "[0]['down']": "R", "[0]['momentum']": "S(1)"}


def planned(fn: Callable[..., Any], args: Any, on: str = "3:1", **options: Any) -> Plan:
    cluster, mesh = thin_cluster(SPEEDS[on]), first_devices(len(SPEEDS[on]))
    return hapsynth.synthesize(fn, args, mesh, cluster=cluster, leave_out=False, **options)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def step(state: Any, batch: Any) -> Any:
    def loss(up: Any, down: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ up) @ down - batch["y"]) ** 2)

    value, (g, h) = jax.value_and_grad(loss, (0, 1))(state["up"], state["down"])
    momentum = 0.9 * state["momentum"] + g
    return {"up": state["up"] - 0.1 * momentum, "down": state["down"] - 0.1 * h, "momentum": momentum}, value


def initial() -> Any:
    return {"up": floats(16, 48) / 4, "down": floats(48, 8) / 7, "momentum": np.zeros((16, 48), np.float32)}


def batch(rows: int, seed: int = 0) -> Any:
    return {"x": floats(rows, 16, seed=seed), "y": floats(rows, 8, seed=seed)}


def test_a_short_last_batch() -> None:
    """Two epochs follow one device, and the state, unevenly sharded, is what each call finds and consumes."""
    plan = planned(step, (initial(), batch(240)), fixed=CARRIED)
    short = plan.for_shapes(initial(), batch(70))
    assert short.program is plan.program
    assert (short.lower_bound, short.joint_lower_bound) == (0, 0)
    assert 0 < short.cost < plan.cost
    state, want, one_device = plan.shard(initial()), initial(), jax.jit(step)
    assert len(set(state["up"].sizes)) > 1
    for epoch in range(2):
        for now, rows in ((plan, 240), (plan, 240), (short, 70)):
            given, data = state, batch(rows, epoch)
            moved = now.adopt(given, plan)
            assert all(moved[name].data is given[name].data for name in ("up", "momentum"))
            state, loss = now(given, data)
            assert all(x.is_deleted() for x in given.values())
            want, expected = one_device(want, data)
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, x in plan.unshard(state).items():
        np.testing.assert_allclose(x, want[name], rtol=1e-4, atol=1e-6)
    assert plan.for_shapes(initial(), batch(240)) is plan


def test_the_state_stays_where_it_lies_though_another_form_would_do() -> None:
    """Padded shards have no room at the one number of rows, and would at the other."""
    exact = planned(step, (initial(), batch(240)), fixed=CARRIED, form="staged")
    few = exact.for_shapes(initial(), batch(70))
    used, largest, fewest = exact.cluster, max(exact.memory), max(few.memory)
    assert min(few.memory) < fewest < min(exact.memory) < largest, (exact.memory, few.memory)

    def auto(plan: Plan, limits: tuple[float, ...]) -> Plan:
        result = replace(plan.result, memory_limit_bytes=limits)
        return Plan(plan.traced, result, used, plan.mesh, plan.fn)

    plan = auto(exact, exact.memory)
    assert (plan.form, auto(few, exact.memory).form) == ("staged", "switch")
    short = plan.for_shapes(initial(), batch(70))
    state = plan.shard(initial())
    assert short.form == "staged"
    assert all(short.adopt(state, plan)[name].data is state[name].data for name in ("up", "momentum"))
    with pytest.raises(ShapeError, match=r"stay .* stores them, padded, and padded shards would need .*: synthesize"):
        auto(few, exact.memory).for_shapes(initial(), batch(240))


def test_the_batch_is_sized_for_its_own_work() -> None:
    """Three in four rows for the fast devices, at each number of rows."""
    plan = planned(step, (initial(), batch(960)))
    for rows in (640, 200):
        short = plan.for_shapes(initial(), jax.eval_shape(lambda rows=rows: jax.tree.map(jnp.asarray, batch(rows))))
        lengths = short.shard(initial(), batch(rows))[1]["x"].sizes
        assert sum(lengths) == rows
        assert lengths[0] == pytest.approx(3 * lengths[2], abs=8)
        assert short.layouts == plan.layouts


def recurrent(w: Any, xs: Any) -> Any:
    h, out = lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h.sum()), jnp.zeros(xs.shape[1:]), xs)
    return w - 0.1 * (h.T @ h), out


def test_buckets_of_sequence_lengths() -> None:
    plan = planned(recurrent, (floats(8, 8), floats(12, 48, 8)), carry=[("[0]", "[0]")])
    buckets = plan.bucketed(*(plan.for_shapes(floats(8, 8), floats(n, 48, 8)) for n in (6, 24)))
    assert [p.traced.graph.regions[1].count for p in buckets.plans.values()] == [12, 6, 24]
    assert buckets.plan_for(floats(8, 8), floats(6, 48, 8)).cost < plan.cost
    w, want = floats(8, 8), floats(8, 8)
    for n in (24, 6, 12):
        xs = floats(n, 48, 8)
        w, out = buckets(w, xs)
        want, expected = jax.jit(recurrent)(want, xs)
        np.testing.assert_allclose(plan.unshard(out), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(plan.unshard(w), want, rtol=1e-4, atol=1e-4)
    known = "; ".join(rf"\[1\]: \[{n}, 48, 8\]" for n in (12, 6, 24))
    there_are = rf"no bucket is for \[1\]: \[7, 48, 8\]; there are {known}\."
    with pytest.raises(ShapeError, match=there_are):
        buckets(w, floats(7, 48, 8))
    with pytest.raises(ShapeError, match=r"no bucket is for \[0\]: \[4, 4\]; there are \[0\]: \[8, 8\]\."):
        buckets(floats(4, 4), floats(6, 48, 8))
    with pytest.raises(TypeError, match="1 positional argument"):
        buckets(w)


def test_buckets_of_arguments_by_name() -> None:
    plan = planned(lambda w, *, x: (x @ w).sum(), (floats(8, 8),), example_kwargs={"x": floats(48, 8)})
    buckets = plan.bucketed(plan.for_shapes(floats(8, 8), x=floats(6, 8)))
    for rows in (6, 48):
        np.testing.assert_allclose(
            buckets(floats(8, 8), x=floats(rows, 8)), (floats(rows, 8) @ floats(8, 8)).sum(), 1e-4
        )
    with pytest.raises(ShapeError, match="1 positional argument and x by name and was given"):
        plan.for_shapes(floats(8, 8), floats(6, 8))
    with pytest.raises(ShapeError, match="plan 1 is of another function"):
        plan.bucketed(planned(jnp.sin, (floats(8),)))
    alike = planned(lambda w, *, x: (x @ w).max(), (floats(8, 8),), example_kwargs={"x": floats(6, 8)})
    with pytest.raises(ShapeError, match="plan 1 is of another function"):
        plan.bucketed(alike)
    with pytest.raises(ShapeError, match="plan 1 is for the same shapes as one before it"):
        plan.bucketed(plan)
    examples: Any = [(floats(8, 8), floats(6, 8))]
    with pytest.raises(TypeError, match="a bucket is a list; give a hapsynth"):
        plan.bucketed(examples)


def test_a_constant_lies_on_the_devices_once() -> None:
    """Whatever plans and programs close over it, and as long as one of them does."""
    table, rows = jnp.asarray(floats(48, 16)), np.asarray(floats(16))
    fn = lambda w, x: (w + x.sum() * table, rows * 2)
    plan = planned(fn, (floats(48, 16), floats(240)), form="staged", fixed={"[0]": "S(0)"})
    short = plan.for_shapes(floats(48, 16), floats(70))
    again = plan.with_result(plan.result, plan.cluster)
    lowered = [plan.lowered, plan.lowered_for(False), short.lowered, again.lowered]
    placed = [{id(each) for each in one.placed_constants} for one in lowered]
    # NumPy arrays may have been written to since the other was traced.
    assert (len(placed[0]), len(set.intersection(*placed))) == (2, 1)
    assert placed[0] == placed[1] == placed[3]
    held = [weakref.ref(each) for each in plan.lowered.placed_constants]
    del plan, again, lowered
    gc.collect()
    assert [each() is not None for each in held].count(True) == 1
    del short
    gc.collect()
    assert not any(each() for each in held)


def test_on_two_axes() -> None:
    cluster = replace(thin_cluster((3.0,) * 4 + (1.0,) * 4), axes=(("data", 2), ("model", 4)))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    plan = hapsynth.synthesize(step, (initial(), batch(960)), mesh, cluster=cluster, leave_out=False)
    short = plan.for_shapes(initial(), batch(133))
    state, loss = short(plan.shard(initial()), batch(133))
    want, expected = jax.jit(step)(initial(), batch(133))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    got, want = plan.unshard(plan(state, batch(960))[0]), jax.jit(step)(want, batch(960))[0]
    np.testing.assert_allclose(got["up"], want["up"], rtol=1e-4, atol=1e-6)


def test_more_than_sizes_is_refused() -> None:
    def fn(x: Any) -> Any:
        return jnp.sin(x) @ x.T if x.shape[0] > 50 else jnp.cos(x) @ x.T

    plan = planned(fn, (floats(64, 16),))
    with pytest.raises(
        ShapeError, match=r"cos of \[48, 16\] \(test_shapes.py:\d+\), where the plan has sin of \[64, 16\]"
    ):
        plan.for_shapes(floats(48, 16))
    with pytest.raises(
        ShapeError, match=r"argument \[0\] is in0:i32\[64, 16\], and the plan is for in0:f32\[64, 16\]: only sizes may"
    ):
        plan.for_shapes(np.ones((64, 16), np.int32))
    with pytest.raises(ShapeError, match=r"takes 1 positional arguments? and was given 2"):
        plan.for_shapes(floats(64, 16), floats(2))
    steps = planned(step, (initial(), batch(240)))
    with pytest.raises(ShapeError, match=r"cannot be divided as it is in the plan"):
        steps.for_shapes(initial(), batch(1))
    without = Plan(steps.traced, steps.result, steps.cluster)
    with pytest.raises(RuntimeError, match="does not hold its function"):
        without.for_shapes(initial(), batch(70))


def test_what_does_not_fit_is_refused() -> None:
    plan = planned(step, (initial(), batch(240)), memory_limit=200_000)
    with pytest.raises(ShapeError, match=r"the program needs .* on a device that has 195.3 KiB: synthesize for these"):
        plan.for_shapes(initial(), batch(24000))
