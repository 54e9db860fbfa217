"""What several functions are given that is of no use, and what is of use though it looks otherwise."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import graphs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_devices import SPEEDS, first_devices, slow_cluster

import hapsynth
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.several import plans
from hapsynth.several.joint_planner import JointPlanner

CLUSTER = slow_cluster(SPEEDS["3:1"])
W = np.ones((12, 8), np.float32)


class State(NamedTuple):
    w: Any
    we: Any


def train(state: State, x: Any) -> Any:
    return State(state.w + x, state.we * 2), x.sum()


def evaluate(state: State, x: Any) -> jax.Array:
    return (state.w * x).sum()


FUNCTIONS: dict[Any, Any] = {"train": train, "eval": evaluate}
ARGS: dict[Any, Any] = {name: (State(W, W), W) for name in FUNCTIONS}


def planned(functions: Any = FUNCTIONS, args: Any = ARGS, **options: Any) -> hapsynth.Plans:
    return hapsynth.synthesize_several(functions, args, CLUSTER, leave_out=False, **options)


def test_tracing_is_within_the_time_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now, budgets = [0.0], list[float | None]()

    def tracing(state: State, x: Any) -> Any:
        now[0] += 3.0
        return train(state, x)

    def begun(planner: JointPlanner) -> Any:
        budgets.append(planner.options.time_budget_s)
        raise InfeasibleError("only begun", 1.0)

    monkeypatch.setattr(JointPlanner, "run", begun)
    monkeypatch.setattr(plans, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for budget in (None, 10.0, 2.0):
        with pytest.raises(InfeasibleError):
            planned({"train": tracing, "eval": evaluate}, time_budget_s=budget)
    assert budgets == [None, 7.0, 0.05]


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no functions": ({"functions": {}, "args": {}}, ValueError, "the dict of functions is empty; give one, e.g."),
    "a function called 1": (
        {"functions": {**FUNCTIONS, 1: evaluate}, "args": {**ARGS, 1: ARGS["eval"]}},
        TypeError,
        "a function is called 1; give a str as its name",
    ),
    "state in a row": ({"state": {"eval": "[0]"}}, TypeError, "state of 'eval' is '[0]'; give a dict"),
    "state by number": ({"state": {"eval": {0: "[0]"}}}, TypeError, "state of 'eval' is {0: '[0]'}; give a dict from"),
    "expect of all": ({"expect": {"train": 3}}, TypeError, "expect of the function 'train' is 3; give a dict"),
    "example_kwargs in a row": (
        {"example_kwargs": {"eval": ["x"]}},
        TypeError,
        "example_kwargs of the function 'eval' is ['x']; give a dict",
    ),
    "fixed in a row": ({"fixed": ["[0]"]}, TypeError, "fixed is ['[0]']; give a dict"),
    "frequency of yes": ({"frequency": {"eval": True}}, ValueError, "frequency of 'eval' is True; give how often"),
    "frequency of NaN": ({"frequency": {"eval": float("nan")}}, ValueError, "frequency of 'eval' is nan; give how"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    options, kind, text = BAD[case]
    with pytest.raises(kind, match=re.escape(text)):
        planned(**options)


def test_options_of_one_function_are_dicts_too() -> None:
    for option in ("example_kwargs", "expect", "fixed"):
        with pytest.raises(TypeError, match=rf"{option} is \['x'\]; give a dict"):
            hapsynth.synthesize(train, ARGS["train"], CLUSTER, **{option: ["x"]})  # pyright: ignore[reportArgumentType]


def test_only_a_dict_of_functions_is_loaded(tmp_path: Path) -> None:
    planned().save(tmp_path / "plans.json")
    with pytest.raises(TypeError, match=r"functions is <function train .*; give a dict of functions"):
        hapsynth.load_plans(tmp_path / "plans.json", train, ARGS)  # pyright: ignore[reportArgumentType]


def test_a_profile_from_elsewhere_is_warned_of_at_the_users_line(tmp_path: Path) -> None:
    there = replace(CLUSTER, profile={"machines": "another-machine", "jax": jax.__version__})
    mesh = first_devices(4)
    with pytest.warns(hapsynth.ClusterWarning, match="measured on another-machine") as made:
        plans = hapsynth.synthesize_several(FUNCTIONS, ARGS, mesh, cluster=there, leave_out=False)
    plans.save(tmp_path / "plans.json")
    with pytest.warns(hapsynth.ClusterWarning, match="measured on another-machine") as read:
        hapsynth.load_plans(tmp_path / "plans.json", FUNCTIONS, ARGS, mesh)
    assert {w.filename for w in (*made, *read)} == {__file__}


def test_what_calls_consume_and_what_goes_beside_computing(tmp_path: Path) -> None:
    mesh, file = first_devices(4), tmp_path / "plans.json"
    kept = hapsynth.synthesize_several(FUNCTIONS, ARGS, mesh, cluster=CLUSTER, leave_out=False, donate=False)
    kept.save(file)
    with pytest.warns(hapsynth.OverlapWarning, match="one process holds all devices"):
        loaded = hapsynth.load_plans(file, FUNCTIONS, ARGS, mesh, donate=False, overlap=True)
    for each in (kept, loaded):
        state, x = each["train"].shard(*ARGS["train"])
        again = [each["train"](state, x)[1] for _ in range(2)]
        assert again[0] == again[1]


def test_one_function_and_any_number() -> None:
    plans = planned({"train": train}, {"train": ARGS["train"]}, frequency={"train": np.float32(2)})
    assert plans.frequency == {"train": 2.0}
    assert plans.cost == 2 * plans["train"].cost == 2 * plans.alone["train"]


def test_a_name_that_begins_another() -> None:
    """What is said of `[0].w` is not said of `[0].we`."""
    plans = planned(state={"eval": {"[0].w": "[0].we"}})
    assert plans["eval"].traced.graph.kept == (0,)
    assert plans["eval"].layouts["[0].w"] == plans.layouts["[0].we"]


def test_state_in_a_field_of_what_is_returned() -> None:
    class Stepped(NamedTuple):
        loss: Any
        state: Any

    functions = {
        "train": lambda state, x: Stepped(x.sum(), train(state, x)[0]),
        "eval": evaluate,
        "init": lambda x: Stepped(jnp.zeros(()), State(x, x)),
    }
    plans = planned(functions, {**ARGS, "init": (W,)})
    assert plans.layouts.keys() == {"[0].w", "[0].we"}
    assert plans.frequency == {"train": 1.0, "eval": 0.1, "init": 0.0}
    assert [plans["init"].output_layouts[f".state.{name}"] for name in ("w", "we")] == [*plans.layouts.values()]


def mlp_train(w: Any, x: Any) -> Any:
    value, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - g, value


def test_functions_for_which_other_devices_are_looked_at() -> None:
    """Of eight kinds not all sets are."""
    speeds = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    functions = {"train": mlp_train, "eval": lambda w, x: jnp.mean(jnp.tanh(x @ w[:64]) ** 2)}
    args = {"train": (struct(512, 512), struct(8192, 512)), "eval": (struct(512, 512), struct(2**14, 64))}
    unlike = graphs.cluster(speeds, bandwidth=1e9)
    plans = hapsynth.synthesize_several(functions, args, unlike)
    bounds = [hapsynth.synthesize(functions[name], args[name], unlike).result.bounds for name in functions]
    assert bounds[0].keys() != bounds[1].keys()
    assert 0 < plans.lower_bound <= plans.cost


def test_each_device_has_room_of_its_own() -> None:
    """What one function holds where another's momentum lies too is no more than there is on the small device; on the
    large one it may hold more."""

    def train(w: Any, m: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - m - g, m + g, value

    w, small = np.ones((16, 256), np.float32), 1.3e6
    args = {"train": (w, w, np.ones((8, 16), np.float32)), "eval": (w, np.ones((4000, 16), np.float32))}
    functions = {"train": train, "eval": lambda w, x: jnp.tanh(x @ w).sum(1)}
    fast, slow = slow_cluster((3, 1)).devices
    unlike = replace(slow_cluster((3, 1)), devices=(replace(fast, memory=2e7), replace(slow, memory=small)))
    mesh, state = first_devices(2), {"eval": {"[0]": "[0]"}}
    plans = hapsynth.synthesize_several(
        functions, args, mesh, cluster=unlike, form="staged", leave_out=False, state=state
    )
    room = plans["eval"].result.memory_limit_bytes
    first, second = plans["eval"].memory
    assert second <= room[1] < small < first
    np.testing.assert_allclose(plans["eval"](*args["eval"]), functions["eval"](*args["eval"]), rtol=1e-5)
