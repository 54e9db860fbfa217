"""Copies are compared, and sizes follow measured speeds."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graphs import cluster
from random_plans import mesh_of
from storages import storages

import hapsynth
from hapsynth.adapting.monitor import Monitor
from hapsynth.adapting.probe import Probe
from hapsynth.adapting.rebalance import busy_seconds, propose, slowdowns
from hapsynth.adapting.resize import best_sizes, resized
from hapsynth.instructions.layout import R, S
from hapsynth.lower._compute_timer import ComputeTimer
from hapsynth.lower._isolated import IsolatedRun
from hapsynth.plan import Plan
from hapsynth.running.drift import leaf_drift, resynced
from hapsynth.running.sharded_array import ShardedArray
from hapsynth.search.memory.profile import MemoryProfile

COLLECTIVE = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"

# ---- a plan whose devices change their speed


def step(state: Any, x: Any) -> Any:
    """Its memory for only a part of the model holds the state cut, its compute wants the rows cut."""
    loss = lambda w: jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"]) ** 2
    value, grads = jax.value_and_grad(loss)(state["w"])
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    return {"w": jax.tree.map(lambda w, m: w - 0.1 * m, state["w"], m), "m": m, "count": state["count"] + 1}, value


def step_args() -> Any:
    draw = np.random.default_rng(0)
    w = {name: draw.normal(size=(96, 96)).astype(np.float32) / 10 for name in "ab"}
    m = jax.tree.map(np.zeros_like, w)
    return {"w": w, "m": m, "count": np.int32(0)}, draw.normal(size=(960, 96)).astype(np.float32)


SPEED = 1e-4
"""So slow that even this is worth dividing."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    args = step_args()
    fixed = {"[0]['m']['a']": "S(0)", "[0]['w']['b']": "S(1)", "[1]": "S(0)"}
    described = cluster([SPEED] * 4, bandwidth=1e9)
    return hapsynth.synthesize(step, args, mesh_of(), cluster=described, fixed=fixed)


def test_a_device_slowed_to_half(plan: Plan) -> None:
    predicted = busy_seconds(plan)
    half = propose(plan, np.array([1.0, 1.0, 1.0, 2.0]))
    # Work 7/8 as fast as before at best, and half as fast without new sizes.
    assert half.before_s > 1.6 * plan.cost
    assert 1.3 < half.gain < 7 / 4
    new = half.plan
    assert new.cost == half.after_s
    assert new.program is plan.program
    assert (new.result.status, new.lower_bound) == ("gap", 0.0)
    rows = new.sizes.of_devices(plan.sizes.classes.of[plan.traced.graph.inputs[-1], 0, (0,), 0])
    assert rows[0] == rows[1] == rows[2]
    assert rows[3] < 0.6 * rows[0]
    # What the new plan predicts of its devices is even again.
    assert busy_seconds(new) == pytest.approx(np.full(4, busy_seconds(new).mean()), rel=0.1)
    measured = predicted * [1.0, 1.0, 1.0, 2.0]
    assert plan.rebalance(measured.tolist()).sizes.shares == new.sizes.shares
    assert slowdowns(plan, measured.tolist()) == pytest.approx([1, 1, 1, 2])
    # It recovers.
    again = new.rebalance((busy_seconds(new) * [1, 1, 1, 0.5]).tolist())
    assert again.sizes.shares == plan.sizes.shares
    assert again.cost == pytest.approx(plan.cost, rel=1e-6)


def test_a_plan_that_leaves_a_device_out() -> None:
    described = cluster([SPEED, SPEED, SPEED / 1e4, SPEED], bandwidth=1e9)
    plan = hapsynth.synthesize(step, step_args(), mesh_of(), cluster=described)
    assert plan.devices == (0, 1, 3)
    new = plan.rebalance((busy_seconds(plan) * [1, 1, 2]).tolist())
    assert new is not plan
    assert new.devices == plan.devices
    assert [d.name for d in new.cluster.devices] == ["x0.0001 at speed 1"] * 2 + ["x1e-08", "x0.0001 at speed 0.5"]
    assert new.memory[2] == 0
    assert hapsynth.Cluster.from_dict(new.cluster.to_dict()) == new.cluster
    state, x = step_args()
    got, _ = new(new.shard(state), x)
    want, _ = jax.jit(step)(state, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), new.unshard(got), want)


def test_sizes_are_limited_by_what_the_plan_holds_with_overlap() -> None:
    """What is under way counts when sizes are sought as when the plan says what it holds."""
    described = cluster([SPEED] * 3 + [SPEED / 2], bandwidth=1e7)
    plan = hapsynth.synthesize(step, step_args(), described, overlap=True, form="staged", leave_out=False)
    assert plan.timeline.under_way
    costs = plan.cost_model(plan.used)
    sizes, peak = best_sizes(plan, costs)
    without = MemoryProfile(plan.program, sizes.classes, costs).peak(sizes)
    assert peak == max(resized(plan, sizes, costs, plan.cluster).memory) > without


def test_the_scaled_model_predicts_what_was_measured(plan: Plan) -> None:
    slowdown = np.array([1.5, 1.0, 3.0, 2.0])
    new = propose(plan, slowdown).plan
    old_sizes = plan.with_result(plan.result, new.cluster)
    assert busy_seconds(old_sizes) == pytest.approx(busy_seconds(plan) * slowdown)


@pytest.mark.parametrize("seed", range(2))
def test_noise_moves_nothing(plan: Plan, seed: int) -> None:
    noise = 1 + 0.03 * np.random.default_rng(seed).normal(size=4).clip(-1.5, 1.5)
    assert plan.rebalance((busy_seconds(plan) * noise).tolist()) is plan
    # That all are slower than the description says is no reason either.
    assert plan.rebalance((busy_seconds(plan) * 3 * noise).tolist()) is plan


def test_a_threshold_above_the_gain(plan: Plan) -> None:
    measured = (busy_seconds(plan) * [1, 1, 1, 2]).tolist()
    assert plan.rebalance(measured, threshold=0.6) is plan
    with pytest.raises(ValueError, match="threshold is 5"):
        plan.rebalance(measured, threshold=5)


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ([1.0, 2.0], "2 measured times were given for 4 devices"),
        ([1.0, 2.0, float("nan"), 1.0], "measured time 2 is nan"),
        ([1.0, 2.0, 0.0, 1.0], "measured time 2 is 0.0"),
    ],
)
def test_times_of_no_use(plan: Plan, times: list[float], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        plan.rebalance(times)


def test_training_goes_on_with_the_same_state(plan: Plan) -> None:
    state, x = step_args()
    want, fn = state, jax.jit(step)
    for _ in range(4):
        want, _ = fn(want, x)
    state, batch = plan.shard(state, x)
    state, _ = plan(state, batch)
    state, _ = plan(state, batch)
    held = plan.unshard(state)
    old = jax.tree.leaves(state)
    new = propose(plan, np.array([1.0, 2.0, 1.0, 1.0])).plan
    state = new.adopt(state, plan)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), new.unshard(state), held)
    moved = [x.is_deleted() for x in old]
    kept = [a is b for a, b in zip(old, jax.tree.leaves(state))]
    assert any(moved)
    assert any(kept)
    assert [not k for k in kept] == moved
    assert any(isinstance(x, ShardedArray) for x in jax.tree.leaves(state))
    for _ in range(2):
        state, _ = new(state, new.shard_from_callback(lambda path, s: x[s], 1))
    got = new.unshard(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
    assert new.lowered.traces == 1


def test_adopting_what_lies_elsewhere(plan: Plan) -> None:
    state, _ = step_args()
    given = jax.tree.map(jnp.asarray, state)
    new = propose(plan, np.array([1.0, 2.0, 1.0, 1.0])).plan
    for old in (plan, new):
        got = new.unshard(new.adopt(given, old))
        jax.tree.map(np.testing.assert_array_equal, got, state)
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))
    with pytest.raises(TypeError, match="is not in the plan"):
        new.adopt({**given, "more": 1}, plan)
    with pytest.raises(TypeError, match=r"old_plan is a int; give a hapsynth.Plan"):
        new.adopt(given, 3)  # pyright: ignore[reportArgumentType]


# ---- drift


def apart(x: jax.Array, change: Any) -> jax.Array:
    """A replicated array whose copy on the last device is changed."""
    pieces = [np.asarray(s.data) for s in x.addressable_shards]
    pieces[-1] = change(pieces[-1].copy())
    devices = [s.device for s in x.addressable_shards]
    arrays = [jax.device_put(p, d) for p, d in zip(pieces, devices)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, arrays)


@pytest.fixture
def replicated(plan: Plan) -> Any:
    layouts = {path for path, layout in plan.layouts.items() if layout == "R"}
    assert {"[0]['count']", "[0]['w']['a']"} <= layouts
    return plan.shard(step_args()[0])


def test_equal_copies_do_not_drift(plan: Plan, replicated: Any) -> None:
    report = plan.drift(replicated)
    assert report.equal
    assert {leaf.path for leaf in report.leaves} == {p for p, lay in plan.layouts.items() if lay == "R" and p != "[1]"}
    assert "are equal" in str(report)


def test_drift_is_measured_and_mended(plan: Plan, replicated: Any) -> None:
    def nudge(w: np.ndarray) -> np.ndarray:
        w[3, 4] += 0.25
        return w

    first = np.asarray(replicated["w"]["a"])
    replicated["w"]["a"] = apart(replicated["w"]["a"], nudge)
    replicated["count"] = apart(replicated["count"], lambda c: c + 2)
    report = {leaf.path: leaf for leaf in plan.drift(replicated).leaves}
    leaf = report["[0]['w']['a']"]
    assert leaf.max_abs == pytest.approx(0.25, rel=1e-5)
    assert leaf.max_rel == pytest.approx(0.25 / np.abs(first).max(), rel=1e-5)
    assert not leaf.equal
    assert report["[0]['count']"][1:] == (2.0, float("inf"), False)
    assert "[0]['w']['a']: 0.25, relative" in str(plan.drift(replicated))
    mended = plan.resync(replicated)
    assert plan.drift(mended).equal
    for shard in mended["w"]["a"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), first)
    # Nothing else is touched.
    assert mended["m"]["a"] is replicated["m"]["a"]


def test_drift_is_mended_wherever_the_state_is() -> None:
    """Behind another argument, and behind a leaf that is no array."""

    def step(batch: Any, state: Any) -> Any:
        new = {k: x if k == "kind" else x + batch["x"].sum() * batch["y"].sum() for k, x in state.items()}
        return new, new["v"].sum()

    batch = {"x": np.ones((8, 4), np.float32), "y": np.ones(8, np.float32)}
    state = {"kind": "sgd", "v": np.arange(4, dtype=np.float32), "w": np.ones(4, np.float32)}
    fixed = {"[1]['v']": "R", "[1]['w']": "R"}
    clus = cluster([SPEED] * 4)
    plan = hapsynth.synthesize(step, (batch, state), mesh_of(), cluster=clus, fixed=fixed, leave_out=False)
    _, kept = plan.shard(batch, state)
    kept["w"] = apart(kept["w"], lambda w: w + 1)
    assert [leaf.path for leaf in plan.drift(kept, 1).leaves if not leaf.equal] == ["[1]['w']"]
    mended = plan.resync(kept, 1)
    assert plan.drift(mended, 1).equal
    assert mended["kind"] == "sgd"
    for name in ("v", "w"):
        assert all((np.asarray(s.data) == state[name]).all() for s in mended[name].addressable_shards)
    (shard, *_) = plan.resync(kept["w"], "[1]['w']").addressable_shards
    np.testing.assert_array_equal(shard.data, state["w"])


@pytest.mark.parametrize(
    ("dtype", "value", "other", "distance"),
    [
        ("float32", 0.0, -0.0, 0.0),
        ("float32", 1.0, np.nan, np.inf),
        ("float32", np.inf, 1.0, np.inf),
        ("bfloat16", 1.0, 1.5, 0.5),
        ("complex64", 1 + 1j, 1 - 1j, 2.0),
        ("bool", False, True, 1.0),
        ("int32", 2**30, 2**30 + 1, 1.0),
        ("uint8", 3, 250, 247.0),
        ("int4", -8, 7, 15.0),
        ("uint2", 3, 1, 2.0),
        ("float4_e2m1fn", -0.5, 6.0, 6.5),
    ],
)
def test_drift_of_every_dtype(dtype: str, value: Any, other: Any, distance: float) -> None:
    storage = storages((4,), (R,), {}, {}, dtype, (3,))[0]
    stored = storage.put(np.full(3, value, storage.dtype), copy=True)
    assert leaf_drift("x", storage, stored).equal
    change = lambda x: np.array([value, other, value], storage.dtype)
    found = leaf_drift("x", storage, apart(stored, change))
    assert (found.max_abs, found.equal) == (distance, False)
    again = resynced(storage, apart(stored, change))
    assert {np.asarray(s.data).tobytes() for s in again.addressable_shards} == {np.asarray(stored).tobytes()}


def test_what_is_beyond_a_shard_is_not_compared() -> None:
    """Cut along one axis and replicated along the other."""
    storage = storages((2, 2), (R, S(0)), {0: ((1,), (3, 1))}, {}, "float32", (4,))[0]
    stored = storage.put(np.arange(4, dtype=np.float32), copy=True)
    last = lambda at: lambda x: np.where(np.arange(3) == at, 7, x).astype(np.float32)
    assert leaf_drift("x", storage, apart(stored, last(2))).equal
    assert leaf_drift("x", storage, apart(stored, last(0))).max_abs == 4.0


def test_an_argument_is_adopted_from_another_function() -> None:
    scaled = lambda rate, w: w * rate
    both = lambda x, w: (x["a"].sum() + x["b"].sum()) * w
    w, options = np.arange(8, dtype=np.float32), {"cluster": cluster([3 * SPEED, SPEED]), "leave_out": False}
    mesh = mesh_of(2)
    old = hapsynth.synthesize(scaled, (np.float32(2), w), mesh, fixed={"[1]": "S(0)"}, **options)
    x = {"a": np.ones((), np.float32), "b": np.ones(3, np.float32)}
    new = hapsynth.synthesize(both, (x, w), mesh, fixed={"[1]": "R"}, **options)
    _, kept = old.shard(np.float32(2), w)
    moved = new.adopt(kept, old, 1)
    np.testing.assert_array_equal(new.unshard(moved), w)
    # It went from where the old plan had it.
    assert kept.is_deleted()
    back = old.adopt(moved, new, 1)
    np.testing.assert_array_equal(old.unshard(back), w)


def test_drift_of_keys() -> None:
    fn = lambda key: (jax.random.split(key)[0], jax.random.normal(key))
    plan = hapsynth.synthesize(fn, (jax.random.key(1),), mesh_of(), cluster=cluster([SPEED] * 4), leave_out=False)
    key = plan.shard(jax.random.key(1))
    assert plan.drift(key).equal
    assert jax.random.key_data(plan.resync(key)).tolist() == [0, 1]


def test_drift_of_state_of_which_a_leaf_becomes_a_constant() -> None:
    """Of a weak type, and the argument's is not."""
    fn = lambda state, x: ({"w": state["w"] - x.sum(), "n": 0}, x.sum())
    state, x = {"w": np.ones(8, np.float32), "n": np.int32(3)}, np.ones(8, np.float32)
    plan = hapsynth.synthesize(fn, (state, x), mesh_of(2), cluster=cluster([SPEED] * 2), leave_out=False)
    given = plan.shard(state)
    made, _ = plan(given, x)
    assert given["w"].is_deleted()
    assert plan.drift(made).equal
    assert plan.resync(made)["n"] == 0


def test_drift_wants_what_the_plan_keeps(plan: Plan) -> None:
    with pytest.raises(ValueError, match="does not lie as the plan keeps it"):
        plan.drift(step_args()[0])


# ---- monitor


def test_a_monitor_proposes_when_a_device_stays_slow(plan: Plan) -> None:
    predicted = float(busy_seconds(plan).max())
    monitor = Monitor(plan, every=2, window=3)
    # One process: its times are of all devices, which slow alike, so nothing is to be gained.
    assert monitor.predicted_at_speed_s == plan.cost
    assert [monitor.step(seconds=predicted * 5) for _ in range(8)] == [None] * 8
    assert monitor.plan is plan
    # What a step takes then is told all the same.
    slowed = propose(plan, np.full(4, 5.0)).before_s
    assert monitor.predicted_at_speed_s == pytest.approx(slowed)
    assert monitor.scalars["hapsynth/predicted_step_at_speed_s"] == monitor.predicted_at_speed_s > plan.cost


def test_a_monitor_stops_training_for_a_fiftieth_of_the_time(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    every = Monitor(plan, probe_s=0.5).every
    assert 0.5 / (every * plan.cost) == pytest.approx(0.02, rel=0.01)
    # A step of seconds, or one that is measured as it passes.
    assert Monitor(plan, probe_s=plan.cost).every == 100
    assert plan.mesh is not None
    timer = ComputeTimer(plan.mesh)
    timer.possible = True
    monkeypatch.setattr(Monitor, "_meetings", timer)
    assert Monitor(plan).every == 100


def test_a_monitor_takes_the_median_of_its_window(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every device were a process: what is gathered is each one's own."""
    slow = [1.0, 1.0, 1.0, 2.0]
    monkeypatch.setattr("hapsynth.adapting.monitor.gathered", lambda mesh, mine: np.outer(slow, mine))
    predicted = float(busy_seconds(plan).max())
    monitor = Monitor(plan, every=2, window=3)
    assert monitor.scalars == {"hapsynth/predicted_step_s": plan.cost}
    said = [monitor.step(seconds=predicted * t) for t in (1, 1, 1.2, 1.2, 1)]
    assert monitor.scalars["hapsynth/slowdown"] == pytest.approx(1.2)
    said.append(monitor.step(seconds=predicted))
    assert said[:5] == [None] * 5
    assert said[5] is not None
    assert said[5].slowdown == pytest.approx(slow)
    assert said[5].gain > 1.3
    # It goes on with the plan that it proposed, on which nothing was measured yet.
    assert monitor.plan is said[5].plan
    assert monitor.predicted_at_speed_s == said[5].after_s
    assert monitor.scalars == {"hapsynth/predicted_step_s": monitor.plan.cost}
    assert [monitor.step(seconds=predicted) for _ in range(5)] == [None] * 5


def test_a_monitor_measures_itself_where_no_call_was_measured(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a first call that changed the plan's form: its timer is new, and was asked for nothing."""
    assert plan.mesh is not None
    timer = ComputeTimer(plan.mesh)
    timer.possible = True
    monkeypatch.setattr(Monitor, "_meetings", timer)
    monitor = Monitor(plan, every=1, window=1)
    timer.measured = False
    monitor.step()
    assert monitor.scalars["hapsynth/slowdown"] > 0


def test_a_monitor_waits_until_its_window_agrees(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device that slows to half, or of noise: one measurement of the three is enough to know better."""
    last = iter([1.0, 2.0, 1.0, 2.0, 2.0, 2.0])
    # Each measurement of the last device, in order.
    seen: list[float] = []

    def gathered(mesh: object, mine: np.ndarray) -> np.ndarray:
        return np.array([mine, mine, mine, seen[-3:]])

    monkeypatch.setattr("hapsynth.adapting.monitor.gathered", gathered)
    predicted = float(busy_seconds(plan).max())
    monitor = Monitor(plan, every=1, window=3)
    said = []
    for slowdown in last:
        seen.append(slowdown)
        said.append(monitor.step(seconds=predicted))
    assert said[:5] == [None] * 5
    assert said[5] is not None
    assert said[5].slowdown == pytest.approx([1.0, 1.0, 1.0, 2.0])


def test_a_probe_runs_what_each_device_computes(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """On operands of its own, in the shapes of its own shards, to results of such."""
    new = propose(plan, np.array([1.0, 1.0, 1.0, 2.0])).plan
    ticks = iter(np.arange(0.0, 100.0, 0.25))
    monkeypatch.setattr("hapsynth.adapting.probe.perf_counter", lambda: float(next(ticks)))
    probe = Probe(new)
    # The clock only moves when it is read: as the first round begins, and before every further one.
    assert probe.slowdown(0.9) * probe.predicted_s == pytest.approx(1.0 / 3)
    assert probe.predicted_s == pytest.approx(busy_seconds(new).max())
    # Those that are alike run together.
    devices = [d for _, operands in probe._runs for d in operands()[0].devices()]
    assert set(devices) == set(new.mesh.devices.flat)
    assert len(probe._runs) < len(devices) == 4
    place = dict(zip(new.mesh.devices.flat, np.ndindex(new.mesh.devices.shape)))
    for run, operands in probe._runs:
        values = operands()
        taken, made = (*new.lowered.inputs, *new.lowered.constants), new.lowered.outputs
        for x, storage in zip((*values, *run(*values)), (*taken, *made), strict=True):
            shards = [(s.data.shape, place[s.device]) for s in x.addressable_shards]
            assert all(shape == storage.shard_shape(at) for shape, at in shards)
        # Nothing is sent.
        assert not re.search(COLLECTIVE, run.as_text())
    assert re.search(COLLECTIVE, new.lower().compile().as_text())


@pytest.mark.parametrize(
    ("platform", "predicted_s", "ahead"), [("cpu", 1e-3, 1), ("gpu", 1e-3, 20), ("gpu", 1e-6, 100), ("gpu", 1.0, 1)]
)
def test_accelerators_are_given_several_runs_before_they_are_waited_for(
    platform: str, predicted_s: float, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait adds what starting the next run takes, which would look like a slow device."""
    runs, waits = itertools.count(), itertools.count()
    probe = Probe.__new__(Probe)
    device = SimpleNamespace(platform=platform)
    probe.plan = SimpleNamespace(mesh=SimpleNamespace(local_devices=[device]))  # type: ignore[assignment]
    probe._runs, probe.predicted_s = [(lambda: next(runs), list)], predicted_s
    monkeypatch.setattr("jax.block_until_ready", lambda x: next(waits))
    # Before it, and around each round.
    ticks = itertools.count()
    monkeypatch.setattr("hapsynth.adapting.probe.perf_counter", lambda: float(next(ticks)))
    slowdown = probe.slowdown(2.5)
    assert (next(runs), next(waits)) == (1 + 2 * ahead, 3)
    assert slowdown == pytest.approx(3 / (2 * ahead) / predicted_s)


@pytest.mark.parametrize("why", ["no room", "no memory left", "new state beside the old", "a while loop"])
def test_a_probe_of_the_heaviest_op_alone(plan: Plan, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its own shape."""
    new = propose(plan, np.array([1.0, 1.0, 1.0, 2.0])).plan
    if why == "no room":
        # Of what it holds, once more.
        kinds = [replace(k, memory=int(1.9 * m)) for k, m in zip(new.cluster.devices, new.result.memory_bytes)]
        monkeypatch.setattr(new, "cluster", replace(new.cluster, devices=tuple(kinds)))
    elif why == "no memory left":
        # Of CPU devices, which share it.
        left = 4 * int(max(new.result.memory_bytes)) - 1
        monkeypatch.setattr("hapsynth.adapting.probe.free", lambda device: left)
    elif why == "new state beside the old":
        # More than the plan, whose calls write one over the other, was taken to hold.
        held = IsolatedRun(None, list, tuple(new.mesh.devices.flat), 1 << 60)
        monkeypatch.setattr("hapsynth.adapting.probe.isolated_runs", lambda *_, **__: [held])
    else:
        monkeypatch.setattr("hapsynth.adapting.probe.waits", lambda graph: True)
    probe = Probe(new)
    rows = {max(v.shape[0] for v in operands()) for _, operands in probe._runs}
    shares = new.sizes.of_devices(new.sizes.classes.of[new.traced.graph.inputs[-1], 0, (0,), 0])
    assert rows == set(shares)
    assert len({v.device for _, operands in probe._runs for v in operands()}) == 4
    assert probe.slowdown(0.01) > 0
    costs = new.cost_model()
    assert 0 < probe.predicted_s < busy_seconds(new, costs).max()


def test_what_a_probe_makes_of_its_own_numbers_is_nobodys_nan() -> None:
    x, fn = np.zeros((4, 2), np.float32), lambda x: (x - 1) / (x - 1)
    described = cluster([SPEED] * 4, bandwidth=1e9)
    probe = Probe(hapsynth.synthesize(fn, (x,), mesh_of(), cluster=described, fixed={"[0]": "S(0)"}))
    with jax.debug_nans(True):
        assert probe.slowdown(0.0) > 0


def test_options_of_no_use(plan: Plan) -> None:
    wrong: list[dict[str, Any]] = [{"every": 0}, {"window": 0}, {"probe_s": 0.0}, {"threshold": 1.5}]
    for options in (*wrong, {"every": 2.5}, {"every": "a"}, {"window": True}, {"probe_s": "1 s"}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} is .*; give"):
            Monitor(plan, **options)
    no_seconds: list[Any] = [-1, "x", [1], True, float("nan")]
    for seconds in no_seconds:
        with pytest.raises(ValueError, match=r"seconds is .*; give the positive seconds"):
            Monitor(plan).step(seconds=seconds)
    several: Any = {"train": plan}
    with pytest.raises(TypeError, match=r"watches one plan, and this is dict; .* such as plans\['train'\]"):
        Monitor(several)
    undeployed = Plan(plan.traced, plan.result, plan.cluster)
    with pytest.raises(RuntimeError, match="no devices to watch"):
        Monitor(undeployed)
