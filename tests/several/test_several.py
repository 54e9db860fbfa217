"""Several functions planned for one state: none of it moves between them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from slow_devices import SPEEDS, first_devices, slow_cluster, thin_cluster

import hapsynth
from hapsynth import Plans
from hapsynth.graph.trace import TraceError, trace
from hapsynth.plan import Plan
from hapsynth.running import base
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.sizing.fixed_ratios import RatioError
from hapsynth.several.shared_state import shared_state

WIDTHS = (12, 40, 6)
ROWS = 28


def predict(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"]


def evaluate(state: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((predict(state["params"], x) - 1) ** 2)


def train(state: Any, x: jax.Array) -> Any:
    """Momentum, and a count."""
    value, grads = jax.value_and_grad(lambda p: evaluate({"params": p}, x))(state["params"])
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], m)
    return {"params": params, "m": m, "n": state["n"] + 1}, value


def init(key: jax.Array, widths: tuple[int, ...] = WIDTHS) -> Any:
    a, b = jax.random.split(key)
    params = {
        "in": jax.random.normal(a, widths[:2]) / 4,
        "bias": jnp.zeros(widths[1]),
        "out": jax.random.normal(b, widths[1:]) / 4,
    }
    return {"params": params, "m": jax.tree.map(jnp.zeros_like, params), "n": jnp.zeros((), jnp.int32)}


KEY = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
STATE = jax.eval_shape(init, KEY)
X = np.random.default_rng(0).normal(size=(ROWS, WIDTHS[0])).astype(np.float32)
FUNCTIONS: dict[str, Callable[..., Any]] = {"train": train, "eval": evaluate, "init": init}
ARGS: dict[str, tuple[Any, ...]] = {"train": (STATE, X), "eval": (STATE, X), "init": (KEY,)}


def planned(functions: Any = FUNCTIONS, args: Any = ARGS, mesh: Any = None, **options: Any) -> Plans:
    options = {"leave_out": False, "cluster": None if mesh else slow_cluster(SPEEDS["3:1"]), **options}
    return hapsynth.synthesize_several(functions, args, mesh or first_devices(4), **options)


def stored(plan: Plan, tree: Any) -> list[Any]:
    """Every array of the state as it lies, where a plan takes it as it lies; ValueError where it does not."""
    return [x for *_, x in plan.arguments.held(plan.lowered, tree, 0)]  # pyright: ignore[reportPrivateUsage]


CUT = {f"[0]['{part}']['{name}']": "S(0)" for part in ("params", "m") for name in ("in", "bias", "out")}
"""Every large array, unevenly: nothing depends on what a search would find."""


@pytest.mark.parametrize(("form", "fixed"), [("switch", CUT), ("staged", None)])
def test_state_goes_from_plan_to_plan_as_it_lies(form: str, fixed: Any, tmp_path: Path) -> None:
    plans = planned(form=form, fixed=fixed, cluster=thin_cluster(SPEEDS["3:1"]))
    if fixed:
        assert {k: plans.layouts[k] for k in CUT} == CUT
        assert any(len(set(shares)) > 1 for shares in plans["init"].sizes.shares)
        assert not plans["train"].lowered.inputs[0].is_even
    state, plain = plans["init"](jax.random.key(3)), jax.jit(init)(jax.random.key(3))
    follow = lambda: jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), plans["train"].unshard(state), plain
    )
    follow()
    state = plans["init"](jax.random.key(3))  # anew: JAX 0.11 deletes no donated array that was looked at
    for name in ("train", "train", "train", "eval", "train"):
        before = stored(plans["train"], state)
        assert [id(x) for x in stored(plans["eval"], state)] == [id(x) for x in before]
        if name == "eval":
            np.testing.assert_allclose(plans["eval"](state, X), jax.jit(evaluate)(plain, X), rtol=1e-5)
            assert not any(x.is_deleted() for x in before)
        else:
            state, value = plans["train"](state, X)
            plain, want = jax.jit(train)(plain, X)
            np.testing.assert_allclose(value, want, rtol=1e-5)
            assert all(x.is_deleted() for x in before)
    follow()
    plans["train"].save_state(tmp_path / "state", state)
    again = plans["eval"].restore_state(tmp_path / "state")
    stored(plans["train"], again)
    state = again
    follow()


@pytest.mark.parametrize("even", [True, False])
def test_forms_differ_where_the_state_lies_alike_in_them(
    even: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = base.chosen_form

    def exact_where_it_trains(graph: Any, *args: Any, **options: Any) -> Any:
        return (
            ("staged", "of its own") if len(graph.outputs) > len(graph.inputs) - 1 else chosen(graph, *args, **options)
        )

    monkeypatch.setattr(base, "chosen_form", exact_where_it_trains)
    functions, args = {"train": train, "eval": evaluate}, {n: ARGS[n] for n in ("train", "eval")}
    plans = planned(functions, args, fixed=CUT, cluster=thin_cluster((1.0,) * 4 if even else SPEEDS["3:1"]))
    plans.save(tmp_path / "plans.json")
    for each in (plans, hapsynth.load_plans(tmp_path / "plans.json", functions, args, first_devices(4))):
        assert {n: p.form for n, p in each.items()} == {"train": "staged", "eval": "switch" if even else "staged"}
        assert each["train"].form_reason == "of its own"
        why = "all shards are alike" if even else "'train' stores the state that they share at exact size: of its own"
        assert each["eval"].form_reason.startswith(why)
        copy = each["eval"].with_result(each["eval"].result, each["eval"].cluster)
        assert copy.form_reason == each["eval"].form_reason
        state = each["train"].shard(init(jax.random.key(3)), X)[0]
        assert stored(each["eval"], state)


LAYERS, WIDE = 6, 128


def deep(w: Any, x: Any) -> jax.Array:
    for name in sorted(w):
        x = jnp.tanh(x @ w[name])
    return jnp.mean((x - 1) ** 2)


def deep_train(state: Any, x: Any) -> Any:
    value, g = jax.value_and_grad(deep)(state["w"], x)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], g)
    v = jax.tree.map(lambda v, g: 0.9 * v + g * g, state["v"], g)
    w = jax.tree.map(lambda w, m, v: w - 0.01 * m / (jnp.sqrt(v) + 1e-3), state["w"], m, v)
    return {"w": w, "m": m, "v": v}, value


def deep_init(key: jax.Array) -> Any:
    keys = enumerate(jax.random.split(key, LAYERS))
    w = {f"w{i}": jax.random.normal(k, (WIDE, WIDE)) / 12 for i, k in keys}
    return {"w": w, "m": jax.tree.map(jnp.zeros_like, w), "v": jax.tree.map(jnp.zeros_like, w)}


def test_a_state_that_no_device_can_hold(tmp_path: Path) -> None:
    state = jax.eval_shape(deep_init, KEY)
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    x = np.ones((32, WIDE), np.float32)
    plans = planned(
        {"train": deep_train, "eval": lambda s, x: deep(s["w"], x), "init": deep_init},
        {"train": (state, x), "eval": (state, x), "init": (KEY,)},
        cluster=slow_cluster(SPEEDS["equal"]),
        memory_limit=0.7 * whole,
    )
    assert all(max(plan.memory) <= 0.7 * whole for plan in plans.values())
    used = plans["init"].lower().compile().memory_analysis()
    peak = used.output_size_in_bytes + used.temp_size_in_bytes + used.argument_size_in_bytes
    assert peak < 1.2 * whole / 4
    made, plain = plans["init"](jax.random.key(0)), deep_init(jax.random.key(0))
    held = [sum(a.addressable_shards[d].data.nbytes for a in stored(plans["train"], made)) for d in range(4)]
    assert held == [whole / 4] * 4
    made, value = plans["train"](made, x)
    plain, want = deep_train(plain, x)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    plans["train"].save_state(tmp_path / "state", made)
    np.testing.assert_allclose(plans["eval"](made, x), deep(plain["w"], x), rtol=1e-5)
    again = plans["eval"].restore_state(tmp_path / "state")
    np.testing.assert_array_equal(plans["train"].unshard(again)["v"]["w3"], plans["train"].unshard(made)["v"]["w3"])


# ---- what is state, without devices

CLUSTER = slow_cluster(SPEEDS["3:1"])
W = np.ones((12, 8), np.float32)


def flat_train(w: Any, m: Any, x: Any) -> Any:
    value, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w["a"]) ** 2))(w)
    m = {"a": m["a"] + g["a"], "n": m["n"] + 1}
    return {"a": w["a"] - m["a"]}, m, value


FLAT = {
    "train": ({"a": W}, {"a": W, "n": np.float32(0)}, W.T),
    "eval": (W.T, {"a": W}),
    "init": (np.float32(1),),
}
FLAT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "train": flat_train,
    "eval": lambda x, w: (x @ w["a"]).sum(),
    "init": lambda c: ({"a": jnp.full((12, 8), c)}, {"a": jnp.zeros((12, 8)), "n": c}),
}


def test_state_in_several_arguments_and_a_function_that_reads_some() -> None:
    plans = planned(FLAT_FUNCTIONS, FLAT, CLUSTER)
    assert plans.frequency == {"train": 1.0, "eval": 0.1, "init": 0.0}
    assert plans.layouts.keys() == {"[0]['a']", "[1]['a']", "[1]['n']"}
    assert plans["eval"].layouts["[1]['a']"] == plans.layouts["[0]['a']"]
    assert [plans["init"].output_layouts[f"[{i}]['a']"] for i in (0, 1)] == [
        plans.layouts[f"[{i}]['a']"] for i in (0, 1)
    ]
    assert plans.cost == plans["train"].cost + 0.1 * plans["eval"].cost
    assert 0 < plans.lower_bound <= plans.cost
    # The momentum lies in memory too while `eval` runs, and leaves it too little.
    least = max(max(plans[name].memory) for name in plans) + 1
    with pytest.raises(hapsynth.InfeasibleError, match="'eval'"):
        planned(
            FLAT_FUNCTIONS, {**FLAT, "eval": (np.ones((4000, 12), np.float32), {"a": W})}, CLUSTER, memory_limit=least
        )


def test_two_axes() -> None:
    cluster = replace(slow_cluster((3, 1, 3, 1)), axes=(("x", 2), ("y", 2)))
    twice = {"[0]['a']": "S(1),S(0)", "[1]['a']": "S(0),S(0)/1"}
    mesh = Mesh(first_devices(4).devices.reshape(2, 2), ("x", "y"))
    plans = planned(FLAT_FUNCTIONS, FLAT, mesh, cluster=cluster, fixed=twice, frequency={"eval": 0})
    assert plans.layouts == {**twice, "[1]['n']": "R,R"}
    # So small that `tanh` is not nearly one, whose derivative has few digits.
    w, m = plans["init"](0.05)
    want = FLAT_FUNCTIONS["init"](0.05)
    for _ in range(2):
        np.testing.assert_allclose(plans["eval"](W.T, w), FLAT_FUNCTIONS["eval"](W.T, want[0]), rtol=1e-5)
        w, m, value = plans["train"](w, m, W.T)
        *want, loss = flat_train(*want, W.T)
        np.testing.assert_allclose(value, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), plans["train"].unshard((w, m)), tuple(want))


def test_what_is_called_most_decides() -> None:
    only_eval = planned(FLAT_FUNCTIONS, FLAT, CLUSTER, frequency={"train": 0.0, "eval": 2.0})
    assert only_eval.alone.keys() == {"eval"}
    assert only_eval.cost == 2 * only_eval["eval"].cost == 2 * only_eval.alone["eval"]


def test_ratios() -> None:
    """By hand: of one function, whose state the others then have so, and of all."""
    fixed = {"[0]['a']": "S(0)"}
    of_one = planned(
        FLAT_FUNCTIONS, FLAT, CLUSTER, fixed=fixed, ratios={"eval": {"[1]['a'].0": (0.0, 0.5, 0.25, 0.25)}}
    )
    for name, path in (("train", "[0]['a']"), ("eval", "[1]['a']")):
        plan = of_one[name]
        value = plan.traced.graph.inputs[plan.traced.in_paths.index(path)]
        assert plan.sizes.lengths(value, 0, (0,)) == (0, 6, 3, 3)
    of_all = planned(FLAT_FUNCTIONS, FLAT, CLUSTER, fixed=fixed, ratios=(0.5, 0.0, 0.5, 0.0))
    assert {shares for plan in of_all.values() for shares in plan.ratios.values()} == {(0.5, 0.0, 0.5, 0.0)}


def test_state_may_be_said() -> None:
    functions = {"train": train, "eval": predict, "init": lambda k: (0, init(k))}
    args = {**ARGS, "eval": (STATE["params"], X)}
    said = {"eval": {"[0]": "[0]['params']"}, "init": {"return[1]": "[0]"}}
    plans = planned(functions, args, CLUSTER, state=said, fixed=CUT)
    assert plans["eval"].layouts["[0]['out']"] == plans["init"].output_layouts["[1]['params']['out']"] == "S(0)"
    shards = [
        plans[n].sizes.lengths(v, 0, (0,))
        for n, v in (("train", "[0]['params']['in']"), ("eval", "[0]['in']"))
        for v in [plans[n].traced.graph.inputs[plans[n].traced.in_paths.index(v)]]
    ]
    assert shards[0] == shards[1]


def test_larger_units_and_one_value_for_two_arrays() -> None:
    """`eval` takes rows by fours, and is not to cut them where they lie otherwise; `init` makes one value for both."""

    def step(state: Any, x: Any) -> Any:
        return {"a": state["a"] * 2 + x.sum(), "b": state["b"] + 1}

    def heads(state: Any, x: Any) -> Any:
        return jnp.einsum("hdk,hd->hk", state["a"].reshape(4, 4, 8), x) + state["b"].sum()

    def both(x: Any) -> Any:
        zero = jnp.full((16, 8), x)
        return {"a": zero, "b": zero}

    rows = np.ones((16, 8), np.float32)
    state = {"a": rows, "b": rows}
    plans = planned(
        {"step": step, "heads": heads, "both": both},
        {"step": (state, rows), "heads": (state, np.ones((4, 4), np.float32)), "both": (np.float32(3),)},
        fixed={"[0]['a']": "S(0)", "[0]['b']": "R"},
        cluster=thin_cluster(SPEEDS["3:1"], bandwidth=1e9),
    )
    made = plans["both"](3.0)
    assert len({len(x) for x in [stored(plans[n], made) for n in ("step", "heads")]}) == 1
    lengths = plans["step"].lowered.inputs[0].cuts[0][1]
    assert any(n % 4 for n in lengths)
    assert plans["heads"].lowered.inputs[0].cuts[0][1] == lengths
    read = plans["heads"].unshard(plans["heads"](made, np.ones((4, 4), np.float32)))
    np.testing.assert_array_equal(read, np.full((4, 8), 396.0))
    np.testing.assert_array_equal(plans["step"].unshard(made)["b"], 3 * rows)


def test_plans_in_a_file(tmp_path: Path) -> None:
    plans = planned(FLAT_FUNCTIONS, FLAT, CLUSTER)
    plans.save(tmp_path / "plans.json")
    again = hapsynth.load_plans(tmp_path / "plans.json", FLAT_FUNCTIONS, FLAT)
    assert [again.cost, again.lower_bound, again.gap] == [plans.cost, plans.lower_bound, plans.gap]
    assert [again.frequency, again.alone, again.layouts] == [plans.frequency, plans.alone, plans.layouts]
    for name, plan in plans.items():
        assert again[name].traced.graph.kept == plan.traced.graph.kept
        # What is kept is not fed.
        assert program_cost(again[name].program, again[name].sizes, again[name].cost_model()) == plan.cost
    with pytest.raises(hapsynth.PlanError, match="holds several plans: load_plans reads it"):
        hapsynth.load(tmp_path / "plans.json", flat_train, FLAT["train"])
    with pytest.raises(hapsynth.PlanError, match="holds plans of train, eval, init, and not of train"):
        hapsynth.load_plans(tmp_path / "plans.json", {"train": flat_train}, FLAT)
    with pytest.raises(TypeError, match="example_args of 'train' is a ndarray; give a tuple"):
        hapsynth.load_plans(tmp_path / "plans.json", FLAT_FUNCTIONS, {**FLAT, "train": X})
    with pytest.raises(hapsynth.PlanError, match="'train': this plan is of another function"):
        hapsynth.load_plans(tmp_path / "plans.json", {**FLAT_FUNCTIONS, "train": lambda w, m, x: (w, m)}, FLAT)


@pytest.mark.parametrize("weights", [{"in": (12, 40), "out": (40, 12)}, {"in": (12, 12)}])
def test_a_batch_like_a_result_is_not_the_state(weights: dict[str, tuple[int, int]]) -> None:
    def reconstruct(w: Any, x: jax.Array) -> jax.Array:
        return x @ w["in"] @ w["out"] if "out" in w else x @ w["in"]

    def learn(w: Any, x: jax.Array) -> Any:
        value, g = jax.value_and_grad(lambda w: jnp.mean((reconstruct(w, x) - x) ** 2))(w)
        return jax.tree.map(jnp.subtract, w, g), value

    args = {k: jax.ShapeDtypeStruct(shape, np.float32) for k, shape in weights.items()}, X[:8]
    traced = {"reconstruct": trace(reconstruct, args), "learn": trace(learn, args)}
    shared = shared_state(traced, {})
    assert [leaf.path for leaf in shared.leaves] == [f"[0]['{k}']" for k in weights]
    assert list(shared.roles) == list(traced)
    assert shared.roles["reconstruct"].traced.graph.kept == tuple(range(len(weights)))


def test_the_state_is_one_that_all_have() -> None:
    """Not that of which one alone carries more arrays; nor one array that all have, where one carries more."""
    params, cache = {"in": W, "out": W.T}, [W] * 4
    update = lambda p, x: ({k: p[k] - jnp.sum(x) for k in p}, jnp.sum(x @ p["in"]))
    generate = lambda p, cache: (jnp.sum(p["in"]), [c + p["out"].T for c in cache])
    traced = {"generate": trace(generate, (params, cache)), "train": trace(update, (params, X))}
    shared = shared_state(traced, {})
    assert shared.named_after == "train"
    assert [leaf.path for leaf in shared.leaves] == ["[0]['in']", "[0]['out']"]
    assert len(shared.roles["generate"].traced.graph.carry) == len(cache)
    wrong = {"in": W, "out": W}
    traced["generate"] = trace(lambda p, x: x @ p["in"] @ p["out"].T, (wrong, X))
    with pytest.raises(TraceError, match=r"'generate' takes at .* is not that of 'train'"):
        shared_state(traced, {})


def prefill(prompt: jax.Array) -> Any:
    return {"cache": prompt, "token": jnp.argmax(prompt.sum(1))}


def decode(state: Any, table: jax.Array) -> Any:
    """It reads, and branches, by a token that only `prefill` chooses."""
    row = lax.cond(state["token"] > 2, jnp.sin, jnp.cos, table[state["token"]])
    return {**state, "cache": state["cache"] + row}, row


def test_what_another_function_made_of_floats(tmp_path: Path) -> None:
    functions, prompt = {"decode": decode, "prefill": prefill}, jnp.ones((8, 4))
    args = {"decode": (jax.eval_shape(prefill, prompt), prompt), "prefill": (prompt,)}
    plans = planned(functions, args)
    graph = plans["prefill"].traced.graph
    assert "argmax" in {graph.ops[op].name for op in graph.selections}
    plans.save(tmp_path / "plans.json")
    for each in (plans, hapsynth.load_plans(tmp_path / "plans.json", functions, args)):
        assert each["decode"].traced.graph.unsure
    assert not hapsynth.synthesize(decode, args["decode"], plans["decode"].cluster).traced.graph.unsure


# ---- bad input

UNLIKE = {"train": {"[0]['a'].0": (0.25,) * 4}, "eval": {"[1]['a'].0": (0.5, 0.5, 0.0, 0.0)}}
OTHER = jax.eval_shape(lambda k: init(k, (12, 40, 7)), KEY)
LESS = {"params": {k: v for k, v in STATE["params"].items() if k != "bias"}}
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "eval of another shape": (
        {"args": {**ARGS, "eval": (OTHER, X)}},
        TraceError,
        "the state that 'eval' takes at [0] is not that of 'train': the first leaf that differs is ['m']['out'], "
        "float32[40, 6] in 'train' and float32[40, 7] in 'eval'; give it that state",
    ),
    "eval of another tree": (
        {"args": {**ARGS, "eval": (LESS, X)}, "functions": {**FUNCTIONS, "eval": lambda s, x: x.sum()}},
        TraceError,
        "the first leaf that differs is ['m']['bias'], float32[40] in 'train' and missing in 'eval'",
    ),
    "init of another shape": (
        {"functions": {**FUNCTIONS, "init": lambda k: init(k, (12, 39, 6))}},
        TraceError,
        "the state that 'init' returns at its top is not that of 'train'",
    ),
    "no state": (
        {"functions": {**FUNCTIONS, "eval": jnp.sum}, "args": {**ARGS, "eval": (X,)}},
        TraceError,
        "'eval' neither takes nor returns the state of 'train', which begins with [0]['m']['bias'] of float32[40]: "
        "give it that state, or say what it has of it, e.g. state={'eval': {'[0]': '[0]'}}, or what the state is, e.g. "
        "carry={'train': [('[0]', '[0]')]}, or carry={'train': []} where it is another's",
    ),
    "nothing carried": (
        {"functions": {"eval": evaluate, "init": init}, "args": {k: ARGS[k] for k in ("eval", "init")}},
        TraceError,
        "none of the functions eval, init returns an argument's successor",
    ),
    "said wrongly": (
        {"state": {"eval": {"[0]": "[0]['nothing']"}}},
        TraceError,
        "but the state has no \"[0]['nothing']",
    ),
    "said of no argument": ({"state": {"eval": {"[7]": "[0]"}}}, TraceError, "state names '[7]' of 'eval', which has"),
    "fixed names nothing": ({"fixed": {"[1]": "R"}}, ValueError, "fixed names state array '[1]', but the state arrays"),
    "fixed can't be": (
        {"fixed": {"[0]['n']": "S(0)"}},
        ValueError,
        "fixed asks for 'S(0)' of [0]['n'], whose shape is ()",
    ),
    "frequency below 0": ({"frequency": {"eval": -1}}, ValueError, "frequency of 'eval' is -1; give how often"),
    "frequency of nothing": (
        {"frequency": {"evil": 1}},
        ValueError,
        "frequency names 'evil', but the functions are 'train', 'eval', 'init'; did you mean 'eval'?",
    ),
    "nothing called": ({"frequency": {"train": 0, "eval": 0}}, ValueError, "frequency is 0 of all functions"),
    "no arguments": ({"args": {"train": (STATE, X)}}, ValueError, "example_args has none for 'eval', 'init'"),
    "arguments in a row": (
        {"args": (STATE, X)},
        TypeError,
        "example_args is a tuple; for several functions give a dict",
    ),
    "ratios of too few": ({"ratios": (0.25,) * 3}, RatioError, "'train': ratios holds 3 fractions; give 4"),
    "ratios of nothing": (
        {"ratios": {"evil": (0.25,) * 4}},
        ValueError,
        "ratios names 'evil', but the functions are",
    ),
    "unlike ratios of the state": (
        {"functions": FLAT_FUNCTIONS, "args": FLAT, "fixed": {"[0]['a']": "S(0)"}, "ratios": UNLIKE},
        RatioError,
        "which another function has by others: give those of one of them",
    ),
    "a granule": (
        {"ratios": {"train": (0.33, 0.33, 0.33, 0.01)}, "fixed": CUT},
        RatioError,
        "'train': ratios (0.33, 0.33, 0.33, 0.01) break the granule of",
    ),
    "no function": ({"functions": {**FUNCTIONS, "eval": 3}}, TypeError, "the function 'eval' is 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    options, kind, text = BAD[case]
    with pytest.raises(kind, match=re.escape(text)):
        planned(mesh=CLUSTER, **options)


def test_each_is_named_to_who_asks_the_other() -> None:
    functions: Any = FUNCTIONS
    with pytest.raises(TypeError, match=r"fn is a dict; .* hapsynth\.synthesize_several"):
        hapsynth.synthesize(functions, ARGS, CLUSTER)  # pyright: ignore[reportArgumentType]
    one: Any = train
    with pytest.raises(TypeError, match=r"functions is <function train .* planned by hapsynth.synthesize$"):
        hapsynth.synthesize_several(one, ARGS, CLUSTER)
