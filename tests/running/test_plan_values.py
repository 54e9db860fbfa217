"""A plan gives what its function gives, whatever goes in and comes out."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_plans import assert_same, floats, make_plan, mesh_of
from slow_devices import thin_cluster

import hapsynth
from hapsynth.graph.trace import trace
from hapsynth.plan import Form, Plan
from hapsynth.several.shared_state import shared_state


def test_x64() -> None:
    def fn(x: Any, i: Any, n: Any, s: Any) -> Any:
        narrow = x.astype(jnp.float32)
        return x[i] * s + n, i.sum(), jnp.argmax(x, 0), n + 1, narrow * s, narrow @ x.T, i // 2, i.astype(np.int32)

    args = (floats(6, 3).astype(np.float64), np.arange(5) % 3, 4, 0.5)
    with jax.enable_x64(True):
        for seed in range(3):
            plan = make_plan(fn, args, seed=seed)
            assert_same(plan(*plan.shard(*args)), jax.jit(fn)(*args), plan)
            assert plan.check(rtol=1e-12).ok
            with pytest.raises(TypeError, match="float32"):
                plan(args[0].astype(np.float32), *args[1:])
    plan = make_plan(fn, args)
    assert_same(plan(*args), jax.jit(fn)(*args), plan)
    assert plan.lowered.traces == 1


@pytest.mark.parametrize("planned", [False, True])
def test_random_numbers_are_drawn_as_planned(planned: bool) -> None:
    args = (jax.random.key(3), floats(8, 2))
    draw = lambda key, x: x * jax.random.uniform(key, x.shape)
    with jax.threefry_partitionable(planned):
        plan = make_plan(draw, args)
        assert_same(plan(*args), jax.jit(draw)(*args), plan)
    was = "on" if planned else "off"
    with jax.threefry_partitionable(not planned):
        for other in (lambda: plan(*args), plan.lower, lambda: plan.check(*args), plan.to_source):
            with pytest.raises((TypeError, hapsynth.SourceError), match=f"jax_threefry_partitionable {was}, as it was"):
                other()


def test_non_array_leaves_none_and_keywords() -> None:
    def fn(x: Any, options: Any, *, scale: Any, flag: bool) -> Any:
        y = options["act"](x) * scale + (1 if options["name"] == "a" else 2)
        return {"y": y, "none": None, "act": options["act"], "one": 1.0, "flag": flag, "n": y.sum()}

    options = {"act": jnp.tanh, "name": "a", "nothing": None}
    args, kwargs = (floats(5, 3), options), {"scale": 2.0, "flag": True}
    for seed in range(3):
        plan = make_plan(fn, args, kwargs, seed=seed)
        want = jax.jit(
            lambda x, scale, flag: {k: v for k, v in fn(x, options, scale=scale, flag=flag).items() if k != "act"}
        )
        got = plan(*args, **kwargs)
        assert got.pop("act") is jnp.tanh
        assert_same(got, want(args[0], 2.0, True), plan)
        x, opts, by_name = plan.shard(*args, **kwargs)
        got = plan(x, opts, **by_name)
        assert got.pop("act") is jnp.tanh
        assert_same(got, want(args[0], 2.0, True), plan)
        assert plan.lowered.traces == 1
    with pytest.raises(ValueError, match=re.escape("[1]['name'] is 'b', and the plan holds for 'a' only")):
        plan(args[0], {**options, "name": "b"}, **kwargs)
    with pytest.raises(TypeError, match="scale"):
        plan(*args, flag=True)


@jax.tree_util.register_pytree_node_class
class Checked:
    """Looks at its leaf whenever it is put together, as some libraries' loss scales do."""

    def __init__(self, x: Any) -> None:
        if type(x) is not object and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{x} is no float")
        self.x = x

    def tree_flatten(self) -> Any:
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Any) -> Any:
        return cls(*leaves)


def test_containers_that_look_at_their_leaves(tmp_path: Path) -> None:
    state, rows = Checked(floats(6, 3)), floats(5, 6)
    plan = make_plan(lambda state, rows: (Checked(state.x * 2), rows @ state.x), (state, rows))
    assert plan.local_slices(1).path == "[1]"
    with pytest.raises(TypeError, match="argument structure"):
        plan(state.x, rows)
    with pytest.raises(TypeError, match="argument structure"):
        plan.shard_from_process_local_data(state.x, 0)
    plan.save_state(tmp_path / "saved", plan.shard(state))
    restored = plan.restore_state(tmp_path / "saved")
    np.testing.assert_array_equal(plan.unshard(restored).x, state.x)
    assert_same(plan(restored, rows)[1], rows @ state.x, plan)


def test_weak_types_scalars_and_integers() -> None:
    def fn(count: Any, rate: Any, x: Any) -> Any:
        return count + 1, rate * x, count * 2.5, x.astype(jnp.bfloat16) * rate, 3

    args = (2, 0.5, np.float32(4))
    plan = make_plan(fn, args)
    assert_same(plan(*args), jax.jit(fn)(*args), plan)
    count, *_ = plan(*args)
    count, *_ = plan(count, 0.5, 4.0)
    assert int(count) == 4
    plan(np.int32(3), jnp.float32(1), args[2])
    assert plan.lowered.traces == 1


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_a_state_of_weak_types_is_not_copied_by_each_call(form: Form) -> None:
    """It is as calls leave it: strongly typed where something strong is added to it."""

    def fn(state: Any, x: Any) -> Any:
        w, n, half = state
        return (w - x * n, n + 1, half), w

    state, x = (jnp.full((4,), 1.0), 0, jnp.full((4,), 0.5)), floats(4)
    made = make_plan(fn, (state, x), n=2, mode="even")
    plan = Plan(made.traced, made.result, made.cluster, made.mesh, fn, form=form)
    assert_same(plan(state, x), jax.jit(fn)(state, x), plan)
    given = plan.shard(state)
    assert [leaf.weak_type for leaf in given] == [False, True, True]
    for _ in range(2):
        after, _ = plan(given, x)
        assert all(leaf.is_deleted() for leaf in given)
        given = after
    assert plan.lowered.traces <= 1
    # And so it is taken by another function that only reads it.
    traced = {"train": made.traced, "eval": trace(lambda state, x: jnp.sum(sum(state) * x), (state, x))}
    reader = shared_state(traced, {}).roles["eval"].traced
    assert (reader.graph.carry, reader.graph.kept, reader.graph.strong_inputs) == ((), (0, 1, 2, 3), (0,))
    graph = replace(made.traced.graph, carry=(), kept=reader.graph.kept, strong_inputs=reader.graph.strong_inputs)
    plan = Plan(replace(made.traced, graph=graph), made.result, made.cluster, made.mesh, form=form)
    assert [storage.weak_type for storage in plan.lowered.inputs] == [False, True, True, False]


def test_gradients_of_integers() -> None:
    def fn(params: Any, x: Any) -> Any:
        return jax.grad(lambda p: ((x @ p["w"]) * p["n"]).sum(), allow_int=True)(params)

    args = ({"w": floats(6, 3), "n": np.arange(3)}, floats(5, 6))
    plan = make_plan(fn, args)
    got, want = plan(*args), jax.jit(fn)(*args)
    assert_same(got["w"], want["w"], plan)
    assert got["n"].dtype == want["n"].dtype == jax.dtypes.float0
    assert got["n"].shape == want["n"].shape
    assert plan.check(*args).ok
    assert "np.zeros((3,), jax.dtypes.float0)" in plan.to_source()


def test_keys() -> None:
    def fn(key: Any, raw: Any) -> Any:
        new, use = jax.random.split(key)
        return new, jax.random.normal(use, (5,)) + jax.random.uniform(raw, (5,))

    args = (jax.random.key(3), jax.random.PRNGKey(1))
    plan = make_plan(fn, args)
    assert_same(plan(*plan.shard(*args)), jax.jit(fn)(*args), plan)
    assert plan.check().ok
    assert jax.random.key_data(plan.unshard(plan.shard(*args))[0]).tolist() == [0, 3]


def test_outputs_that_are_inputs_and_arguments_used_twice() -> None:
    def fn(a: Any, b: Any, unused: Any) -> Any:
        return a, b, a + b, b

    a = floats(6, 3)
    for seed in range(3):
        plan = make_plan(fn, (a, a, a), seed=seed)
        x = plan.shard(a)
        want = jax.jit(fn)(a, a, a)
        assert_same(plan(x, x, x), want, plan)
        x = plan.shard(a)
        assert_same(plan(a, x, x), want, plan)


def test_closed_over_constants_are_arguments() -> None:
    table = floats(40, 30)
    fn = lambda x: x @ table + jnp.sum(table)
    plan = make_plan(fn, (floats(8, 40),))
    assert_same(plan(floats(8, 40)), jax.jit(fn)(floats(8, 40)), plan)
    assert len(plan.lower().as_text()) < 20000
    assert plan.check().ok


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_a_constant_outlives_the_state_that_it_is(form: Form) -> None:
    """A call that is given what the function closes over as well consumes a copy."""
    w = floats(4)
    planned = partial(hapsynth.synthesize, mesh=mesh_of(2), cluster=thin_cluster((1, 1)), fixed={"[0]": "R"}, form=form)
    state = planned(jnp.sin, (w,)).shard(w)
    fn = lambda w: w - 0.5 * (w - state)
    want = jax.jit(fn)(0 * w)
    plan = planned(fn, (state,))
    once = plan(state)
    assert not state.is_deleted()
    plan(once)
    assert once.is_deleted()
    assert_same(plan(0 * w), want, plan)


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_state_that_is_another_argument_too_and_lies_whole_on_one_device(form: Form) -> None:
    """The shard of the device that has all rows could be the memory of the state, which is consumed."""
    x = floats(8, 2)
    fn = lambda w, x: w + jnp.tanh(x).sum(0, keepdims=True)
    asked: dict[str, Any] = {"fixed": {"[0]": "R", "[1]": "S(0)"}, "ratios": [0, 1], "leave_out": False, "form": form}
    plan = hapsynth.synthesize(fn, (x, x), mesh_of(2), cluster=thin_cluster((1, 1)), **asked)
    state = plan.shard(x)
    assert_same(plan(state, state), jax.jit(fn)(x, x), plan)
    assert state.is_deleted()


@pytest.mark.parametrize(
    "fn", [lambda: 3.0, lambda: (), lambda x: x + 1, lambda x: None], ids=["const", "none", "scalar", "unused"]
)
def test_tiny_functions(fn: Any) -> None:
    args = () if fn.__code__.co_argcount == 0 else (2.0,)
    plan = make_plan(fn, args)
    assert_same(plan(*args), jax.jit(fn)(*args), plan)
