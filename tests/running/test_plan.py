"""A plan is called like the function it was made of, moves values, and checks itself."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from lowering_options import ALONE
from random_plans import N, assert_same, floats, make_plan, mesh_of, step, step_args
from random_programs import mlp_args, mlp_step
from slow_devices import thin_cluster

import hapsynth
from hapsynth.graph.trace import trace
from hapsynth.instructions.testing.example_arguments import random_arguments
from hapsynth.lower import _staged_form
from hapsynth.plan import Plan
from hapsynth.running.sharded_array import ShardedArray


@pytest.fixture(scope="module")
def made() -> Plan:
    return make_plan(step, step_args())


@pytest.fixture
def plan(made: Plan) -> Iterator[Plan]:
    """Made and compiled once; its function is the test's to change."""
    yield made
    made.fn = step


def test_a_loop_follows_the_function_and_is_traced_once() -> None:
    args = mlp_args()
    plan = make_plan(mlp_step, args, seed=4)
    state, batch = plan.shard(*args)
    assert any(isinstance(x, ShardedArray) for x in jax.tree.leaves((state, batch)))
    expected, fn = args[0], jax.jit(mlp_step)
    for _ in range(3):
        state, loss = plan(state, batch)
        expected, loss_expected = fn(expected, args[1])
        np.testing.assert_allclose(loss, loss_expected, rtol=3e-5)  # a sum that cancels
    assert_same(state, expected, plan)
    assert plan.lowered.traces == 1


def test_arguments_of_every_kind_are_not_traced_again(plan: Plan) -> None:
    state, batch = step_args()
    want = jax.jit(step)(state, batch)
    assert_same(plan(state, batch), want, plan)
    assert_same(plan(jax.tree.map(jnp.asarray, state), batch), want, plan)
    explicit = mesh_of(8, (2, 4), (AxisType.Explicit, AxisType.Auto))
    there = jax.device_put(batch, NamedSharding(explicit, PartitionSpec(None, "x")))
    assert_same(plan(*plan.shard(state, there)), want, plan)
    assert_same(plan(state, there), want, plan)
    with jax.set_mesh(explicit):
        assert_same(plan(state, there), want, plan)
    other = make_plan(step, (state, batch), seed=3)
    assert_same(plan(*other.shard(state, batch)), want, plan)
    assert plan.lowered.traces == 1


def test_paths_are_not_made_anew_for_what_is_right(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    args = step_args()
    plan(*args)
    # Once for each leaf they would take the square of the leaves.
    monkeypatch.setattr("hapsynth.running.arguments.tree_flatten_with_path", None)
    plan(*args)


def test_donation_frees_the_state_and_leaves_what_was_given(plan: Plan) -> None:
    given = jax.tree.map(jnp.asarray, step_args())
    state, batch = plan.shard(*given)
    plan(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves((given, batch)))
    with pytest.raises(RuntimeError, match=re.escape("[0]['m']['b']") + ".*deleted.*donated"):
        plan(state, batch)
    # What was given plainly is copied, never consumed.
    plan(*given)
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))
    numbers = step_args()
    plan(*numbers)
    for x, y in zip(jax.tree.leaves(numbers), jax.tree.leaves(step_args())):
        np.testing.assert_array_equal(x, y)
    # Sharding what is sharded copies too.
    state, batch = plan.shard(*given)
    again = plan.shard(state)
    plan(again, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_a_refused_call_consumes_nothing(plan: Plan) -> None:
    state, batch = plan.shard(*step_args())
    with pytest.raises(ValueError, match="shape"):
        plan(state, floats(3, 6))
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, batch)))
    plan(state, batch)


def test_an_error_of_the_run_names_what_it_consumed(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    state, batch = plan.shard(*step_args())

    def fails(*stored: jax.Array) -> Any:
        stored[0].delete()
        raise RuntimeError("out of memory")

    monkeypatch.setitem(plan.lowered.__dict__, "function", fails)
    ended: list[tuple[Any, bool]] = []
    monkeypatch.setattr("hapsynth.plan.after_call", lambda *said: ended.append(said))
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        plan(state, batch)
    assert ended == [(plan, False)]
    assert "are lost: [0]['m']['b']" in caught.value.__notes__[0]


def test_what_lies_right_is_passed_as_it_is() -> None:
    plan = make_plan(step, step_args(), mode="equal", eager=0.5)
    placed = plan.shard(*step_args())
    leaves = jax.tree.leaves(placed)
    stored = plan.arguments.place(plan.lowered, leaves)
    for x, leaf in zip(stored, leaves):
        assert x is leaf or x is leaf.data
    made = jax.tree.leaves(plan(*placed)[0])
    for x, y in zip(plan.arguments.place(plan.lowered, [*made, leaves[-1]]), made):
        assert x is y or x is y.data


def test_random_arguments_index_whole_tables() -> None:
    def fn(table: Any, tokens: Any, count: Any) -> Any:
        return table[tokens.reshape(-1)].sum() + jnp.take_along_axis(table, tokens, 1) + count

    (_, tokens, count), _ = random_arguments(trace(fn, (floats(400, 50), np.zeros((400, 1), np.int32), 1)))
    assert 40 < tokens.max() < 50
    assert count in (0, 1)


def test_without_donation_nothing_is_consumed() -> None:
    plan = hapsynth.synthesize(step, step_args(), mesh_of(), donate=False)
    state, batch = plan.shard(*step_args())
    plan(state, batch)
    plan(state, batch)


def test_shard_takes_the_first_arguments(plan: Plan) -> None:
    state, batch = step_args()
    placed = plan.shard(state)
    assert isinstance(placed, dict)
    assert_same(plan.unshard(placed), state, plan)
    with pytest.raises(TypeError, match=re.escape("[0]['m']['b']")):
        plan.shard({"p": state["p"], "m": {"w": floats(6, 5)}})
    with pytest.raises(ValueError, match=re.escape("[1]")):
        plan.shard(state, floats(2, 2))
    with pytest.raises(TypeError, match="2 positional arguments and was given 3"):
        plan.shard(state, batch, batch)


def test_unshard_and_map(plan: Plan) -> None:
    state, _ = step_args()
    placed = plan.shard(state)
    doubled = plan.map(lambda x: x * 2, placed)
    assert [type(x) for x in jax.tree.leaves(doubled)] == [type(x) for x in jax.tree.leaves(placed)]
    for got, want in zip(jax.tree.leaves(plan.unshard(doubled)), jax.tree.leaves(state)):
        assert isinstance(got, np.ndarray)
        np.testing.assert_allclose(got, 2 * want)
    half = plan.map(lambda x: x.astype(jnp.bfloat16), placed)
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}
    assert_same(plan.map(lambda x: np.float64(1) * np.asarray(x), placed), state, plan)
    cleared = plan.map(lambda x: x.at[0].set(0.0), placed)
    assert_same(cleared, jax.tree.map(lambda x: jnp.asarray(x).at[0].set(0.0), state), plan)
    uneven = next(x for x in jax.tree.leaves(placed) if isinstance(x, ShardedArray))
    with pytest.raises(ValueError, match="must keep the shape"):
        plan.map(lambda x: x[:1], uneven)
    assert plan.unshard({"a": 1, "b": None, "c": "text"}) == {"a": 1, "b": None, "c": "text"}


BAD: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "too few": (lambda s, b: ((s,), {}), TypeError, "2 positional arguments and was given 1"),
    "by keyword": (lambda s, b: ((s,), {"batch": b}), TypeError, "batch by name"),
    "missing leaf": (lambda s, b: (({"p": s["p"], "m": {"w": b}}, b), {}), TypeError, "[0]['m']['b']"),
    "extra leaf": (lambda s, b: (({**s, "more": b}, b), {}), TypeError, "[0]['more']"),
    "other container": (lambda s, b: (({**s, "m": None}, b), {}), TypeError, "[0]['m']['b']"),
    "shape": (
        lambda s, b: ((s, floats(2, 6)), {}),
        ValueError,
        "argument [1] has shape (2, 6), and the plan is for (7, 6)",
    ),
    "dtype": (lambda s, b: ((s, b.astype(np.int32)), {}), TypeError, "argument [1] is int32[7, 6]"),
    "not an array": (lambda s, b: ((s, "batch"), {}), TypeError, "argument [1] is 'batch'"),
    "a type": (lambda s, b: ((s, np.float32), {}), TypeError, "argument [1] is <class 'numpy.float32'>"),
    "struct": (
        lambda s, b: ((s, jax.ShapeDtypeStruct((7, 6), np.float32)), {}),
        TypeError,
        "argument [1] is ShapeDtype",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_name_the_path(plan: Plan, name: str) -> None:
    make, error, text = BAD[name]
    args, kwargs = make(*step_args())
    with pytest.raises(error, match=re.escape(text)):
        plan(*args, **kwargs)


def test_a_plan_inside_jit_says_so(plan: Plan) -> None:
    state, _ = step_args()
    with pytest.raises(TypeError, match="cannot be called inside jit"):
        jax.jit(lambda b: plan(state, b))(floats(7, 6))


@pytest.mark.parametrize("n", [1, 3, 8])
def test_device_counts(n: int) -> None:
    args = step_args()
    plan = make_plan(step, args, n=n, mode="zeros" if n > 1 else "equal")
    assert_same(plan(*plan.shard(*args)), jax.jit(step)(*args), plan)
    if n == 1:
        assert not any(isinstance(x, ShardedArray) for x in jax.tree.leaves(plan.shard(*args)))


def test_an_even_plan_has_no_switch_and_no_padding() -> None:
    """XLA pads what is joined to bundles, so nothing is; what rounds join is left out."""
    args = ({"w": floats(8, 4), "b": floats(4)}, floats(12, 8))
    fn = lambda w, x: jax.tree.map(lambda p, g: p - g, w, jax.grad(lambda w: jnp.sum((x @ w["w"] + w["b"]) ** 2))(w))
    for seed in range(4):
        plan = make_plan(fn, args, mode="equal", seed=seed, eager=1.0, lowering=ALONE)
        text = plan.lower(*args).compile().as_text()
        found = [line for line in text.splitlines() if re.search(r" (conditional|pad)\(", line)]
        assert not [line for line in found if "hap/pairwise_all_to_all_" not in line]
        assert_same(plan(*args), jax.jit(fn)(*args), plan)
        assert not any(isinstance(x, ShardedArray) for x in jax.tree.leaves(plan.shard(*args)))


def test_instructions_are_named_in_the_hlo(plan: Plan) -> None:
    text = plan.lower().compile().as_text()
    assert "hap/dot_general_" in text


def test_check_finds_what_is_wrong(plan: Plan) -> None:
    report = plan.check(*step_args())
    assert report.ok
    assert 0 < report.max_relative_error <= 1e-4
    assert [path for path, _ in report.leaves] == list(plan.traced.out_paths)
    assert "check passed: 5 output leaves" in str(report)
    assert plan.check().ok
    assert plan.check(*plan.shard(*step_args())).ok
    plan.fn = lambda s, b: (jax.tree.map(lambda x: x * 1.01, step(s, b)[0]), step(s, b)[1])
    report = plan.check(*step_args())
    assert not report.ok
    assert {path for path, _ in report.worst} == {p for p in plan.traced.out_paths if p.startswith("[0]")}
    assert "FAILED" in str(report)


def test_what_was_planned_can_be_read(plan: Plan) -> None:
    assert (plan.cost, plan.lower_bound, plan.joint_lower_bound) == (2.0, 1.5, 1.0)
    assert (plan.gap, plan.joint_gap) == (0.25, 0.5)
    assert plan.memory == (1e6,) * N
    assert list(plan.layouts) == ["[0]['m']['b']", "[0]['m']['w']", "[0]['p']['b']", "[0]['p']['w']", "[1]"]
    for fractions in plan.ratios.values():
        assert sum(fractions) == pytest.approx(1)
    assert plan.sizes is plan.result.sizes
    assert plan.program is plan.result.program
    assert "ops on" in repr(plan)


def test_a_call_is_recorded_in_the_form_that_it_comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what the first call finds changes it."""
    (w, x), alike = (floats(8, 64), floats(64, 8)), thin_cluster((1, 1, 1, 1))
    fn = lambda w, x: w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    plan = hapsynth.synthesize(fn, (w, x), mesh_of(4), cluster=alike, leave_out=False)
    monkeypatch.setattr("hapsynth.plan.before_call", lambda plan, stored, donate: plan.run_staged("it has to"))
    assert plan.form == "switch"
    made, recorded = plan.recorded(w, x)
    assert plan.form == "staged"
    assert recorded.collectives
    np.testing.assert_allclose(plan.unshard(made), fn(w, x), rtol=1e-4)


def test_a_call_beside_one_that_is_recorded_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = hapsynth.synthesize(step, step_args(), mesh_of(), form="staged")
    begun, others = list[Any](), list[Any]()
    recorder = _staged_form.Recorder
    monkeypatch.setattr(_staged_form, "Recorder", lambda: begun.append(1) or recorder())

    def another_thread(plan: Plan, stored: Any, donate: bool) -> None:
        if not others:
            others.append(1)
            thread = threading.Thread(target=plan, args=step_args())
            thread.start()
            thread.join()

    monkeypatch.setattr("hapsynth.plan.before_call", another_thread)
    plan.recorded(*step_args())
    assert len(begun) == len(others) == 1
