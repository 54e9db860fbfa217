"""Baselines on sets of devices: planned for just these, shown where they are better; and expert parallelism."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax.sharding import Mesh
from slow_devices import slow_cluster
from thoroughness import THOROUGH

import hapsynth
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import Traced, trace
from hapsynth.instructions.layout import R, S
from hapsynth.instructions.program.checker import check
from hapsynth.plan import Plan
from hapsynth.search.cost.program_cost import feed_costs, instruction_costs, program_cost
from hapsynth.search.formulation.choice_space import ChoiceSpace
from hapsynth.search.planning.baseline_subsets import FAST_KIND, BaselinesOnSubsets, label
from hapsynth.search.planning.baselines import NAMES, ONE_DEVICE, Baseline, Baselines
from hapsynth.search.planning.device_subsets import subclusters
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.scheduling.timeline import step_seconds

CLUSTERS = Path(__file__).parents[3] / "examples" / "clusters"
EXPERTS = ("expert_parallel", "expert_parallel_speed", "expert_zero2", "expert_zero2_speed")
SLOW_HALF = slow_cluster((8.0, 8.0, 1.0, 1.0), bandwidth=1e9)
MLP = models.Perceptron(batch=64, width=64, classes=16)
SOME = NAMES if THOROUGH else ("data_parallel", "data_parallel_speed", "tensor_parallel")
"""Each is planned on every set of devices."""
TINY_MOE = replace(models.BERT_MOE, batch=2, seq=8, width=16, heads=2, ff=32, vocab=40)

PERCEPTRON = models.mlp(4, layers=1, config=MLP)


@cache
def perceptron() -> Traced:
    return trace(*PERCEPTRON)


@cache
def offered(overlap: bool) -> dict[str, Baseline]:
    return BaselinesOnSubsets(Task(perceptron().graph, SLOW_HALF), names=SOME).best(overlap=overlap)


def cost(b: Baseline, cluster: Cluster) -> float:
    """By a cost model of its own."""
    alone = cluster if b.devices is None else cluster.subset(b.devices)
    costs = Task(perceptron().graph, alone, PlanningOptions()).costs
    return step_seconds(b.program, b.sizes, costs, overlap=b.overlap)


def layers(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        h = x
        for w, b in params:
            h = jnp.tanh(h @ w + b)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def test_a_plan_with_overlap_is_no_slower_than_data_parallelism() -> None:
    """Whose few large and many small gradients go together: it is the best on the fast half, where a plan that comes
    upon no such program, or schedules it but quickly, takes a twelfth longer."""
    cluster, of = Cluster.load(CLUSTERS / "mixed8_100gbit.toml"), jax.ShapeDtypeStruct
    args = [(of((256, 256), np.float32), of((256,), np.float32))] * 3, of((4096, 256), np.float32)
    traced = trace(layers, args)
    (name, best), *_ = sorted(
        BaselinesOnSubsets(Task(traced.graph, cluster, PlanningOptions(overlap=True)), names=("data_parallel",))
        .best(overlap=True, each=False)
        .items(),
        key=lambda item: item[1].cost_s,
    )
    plan = hapsynth.synthesize(layers, args, cluster, overlap=True)
    assert (best.devices, plan.devices) == ((0, 1, 2, 3),) * 2, name
    assert plan.cost <= best.cost_s * (1 + 1e-9)


@pytest.mark.parametrize("speeds", [(8.0, 8.0, 1.0, 1.0), (1.0,) * 4])
def test_what_people_run_today_are_choices_of_a_plan(speeds: tuple[float, ...]) -> None:
    """Also where what selects elements is computed by one device for all."""

    def chosen(params: Any, x: jax.Array) -> Any:
        new = layers(params, x)
        return new, params[0][0][jnp.argmax(x @ new[0][0], axis=1)]

    args = [(np.zeros((64, 64), np.float32), np.zeros(64, np.float32))] * 2, np.zeros((96, 64), np.float32)
    task = Task(trace(chosen, args, carry=[("[0]", "[0]")]).graph, slow_cluster(speeds, bandwidth=1e9))
    planner = Planner(task)
    planner.explore()
    space, builder = planner._search.choices, planner._search.builder(task.ratios(*task.starts()[0]))
    found = Baselines(task).choices_of(space)
    assert len(found) == 3
    for choices in found:
        candidate = planner._search.maker.chosen(builder, choices)
        check(task.graph, candidate.program, candidate.sizes)
        assert np.isfinite(builder.problem().cost(choices))
    inputs = [planner._search.maker.chosen(builder, choices).program.inputs for choices in found]
    state = [task.graph.inputs[i] for i, _ in task.graph.carry]
    assert all(inputs[0][v] == (R,) for v in state)
    assert any(inputs[2][v] != (R,) for v in state)


@pytest.mark.few(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_set_of_devices_is_planned_for_by_itself(overlap: bool) -> None:
    found = offered(overlap)
    assert list(found)[: len(SOME)] == list(SOME)
    some = {name: b for name, b in found.items() if b.devices is not None}
    assert ONE_DEVICE in some
    assert f"{FAST_KIND}, on 0-1" in some
    for name, b in found.items():
        check(perceptron().graph, b.program, b.sizes)
        n = 4 if b.devices is None else len(b.devices)
        assert [length for _, length in b.program.axes] == [n]
        assert all(len(shares) == n for shares in b.sizes.shares)
        assert b.cost_s == pytest.approx(cost(b, SLOW_HALF), rel=1e-9)
        assert b.overlap is overlap
        plain, on, devices = name.partition(", on ")
        if on and plain != FAST_KIND:
            assert b.cost_s < found[plain].cost_s, "only where it is better"
            assert label(name) == f"{label(plain)}, on {devices}"
    assert sum(name.endswith(", on 0-1") for name in some) > 1, "the slow half is left out"


def test_what_cannot_be_the_best_is_passed_over() -> None:
    """Every set and every baseline on it, each scheduled: what was passed over takes longer than the best."""
    task = Task(perceptron().graph, SLOW_HALF)
    found = offered(True)
    least = min(b.cost_s for b in found.values() if b.fits)
    known = Baselines(task)
    scheduled = {
        (devices, name): known.on(devices).overlapped(b).cost_s
        for devices in subclusters(SLOW_HALF)
        if len(devices) > 1
        for name, b in known.on(devices).all(SOME).items()
        if b.fits
    }
    assert min(scheduled.values()) == pytest.approx(least)
    shown = {(b.devices, name.partition(", on ")[0]) for name, b in found.items() if b.devices is not None}
    assert any(of not in shown for of in scheduled)


def test_one_device_is_the_sum_of_its_ops() -> None:
    b = offered(False)[ONE_DEVICE]
    assert b.devices == (0,)
    assert b.program.collectives() == {}
    costs = Task(perceptron().graph, SLOW_HALF.subset((0,))).costs
    ops = sum(c.seconds for c in instruction_costs(b.program, b.sizes, costs))
    fed = sum(s for _, s in feed_costs(b.program, b.sizes, costs))
    assert b.cost_s == pytest.approx(ops + fed) == pytest.approx(offered(True)[ONE_DEVICE].cost_s)
    assert program_cost(b.program, b.sizes, costs) == b.cost_s


def test_even_devices_are_all_used_where_they_help() -> None:
    """None of the sets is better then, and none is shown."""
    cluster = slow_cluster((1.0, 1.0, 1.0, 1.0), bandwidth=1e12)
    traced = trace(*models.mlp(4, layers=2, config=replace(MLP, batch=4096, width=512)))
    found = BaselinesOnSubsets(Task(traced.graph, cluster), names=["data_parallel", "zero2"]).best()
    assert list(found) == ["data_parallel", "zero2", ONE_DEVICE]


def test_half_precision_is_cut_by_its_own_rate() -> None:
    """In float16 a V100 is 8.9 times as fast as it is in float32, a P100 twice."""
    cluster = Cluster.load(CLUSTERS / "paper64.toml").subset((0, 16))
    at = lambda dtype: (
        Baselines(
            Task(trace(*models.bert(2, layers=1, config=replace(TINY_MOE, experts=0, dtype=dtype))).graph, cluster)
        ).speed
    )
    assert at("float32")[0] / at("float32")[1] == pytest.approx(15.7 / 10.6)
    assert at("float16")[0] / at("float16")[1] > 3 * 15.7 / 10.6


# Experts


@cache
def experts() -> tuple[models.Target, Traced]:
    target = models.bert_moe(4, layers=2, config=TINY_MOE)
    return target, trace(*target)


FAST_TWO = slow_cluster((3.0, 3.0, 1.0, 1.0), bandwidth=1e9)


@cache
def of_experts() -> tuple[Baselines, dict[str, Baseline]]:
    known = Baselines(Task(experts()[1].graph, FAST_TWO))
    return known, known.all()


def test_experts_lie_apart_and_the_rest_as_in_its_system() -> None:
    _, traced = experts()
    known, found = of_experts()
    paths = dict(zip(traced.graph.inputs, traced.in_paths, strict=True))
    assert {paths[v].split("['block1']")[-1] for v in known.expert_dims} == {"['up']", "['down']"}
    assert set(known.expert_dims.values()) == {0}
    assert list(found) == [*NAMES, *EXPERTS]
    for name in EXPERTS:
        b = found[name]
        check(traced.graph, b.program, b.sizes)
        layouts = {v: b.program.inputs[v] for v in known.state}
        assert all(layouts[v] == (S(0),) for v in known.expert_dims)
        rest = {layouts[v] for v in known.state if v not in known.expert_dims}
        assert rest == {(R,)} if "zero2" not in name else (R,) in rest and len(rest) > 1
        assert b.program.collectives()["all_to_all"] >= 4, "there and back, forward and backward"
        (weight, *_) = known.expert_dims
        held = b.sizes.lengths(weight, 0, (0,))
        assert held == ((3, 3, 1, 1) if name.endswith("_speed") else (2, 2, 2, 2))


def test_empty_state_and_typed_keys_are_stored_whole() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        return {**state, "w": state["w"] - 0.1 * gradient, "none": state["none"] * 2}

    state = {"w": np.zeros((64, 64), np.float32), "none": np.zeros(0, np.float32)}
    keys = jax.random.split(jax.random.key(0), 3)
    traced = trace(step, ({**state, "keys": keys}, np.zeros((96, 64), np.float32)))
    task = Task(traced.graph, SLOW_HALF)
    inputs = dict(zip(traced.in_paths, traced.graph.inputs, strict=True))
    stored = Baselines(task).all(["zero3"])["zero3"].program.inputs
    layouts = {path: stored[v] for path, v in inputs.items()}
    assert layouts == {"[0]['keys']": (R,), "[0]['none']": (R,), "[0]['w']": (S(0),), "[1]": (S(0),)}
    on_two = ChoiceSpace(traced.graph, task.factors, axes=2)
    assert on_two.layouts[inputs["[0]['keys']"]].layouts == ((R, R),)


def test_without_experts_there_is_no_expert_parallelism() -> None:
    assert not Baselines(Task(perceptron().graph, SLOW_HALF)).expert_dims
    # Heads are contracted together too, and are no experts.
    dense = trace(*models.bert(4, layers=1, config=replace(TINY_MOE, experts=0)))
    assert not Baselines(Task(dense.graph, SLOW_HALF)).expert_dims


@pytest.mark.few(1)
@pytest.mark.parametrize("name", EXPERTS)
def test_expert_parallelism_computes_the_step(name: str) -> None:
    (fn, _), traced = experts()
    b = of_experts()[1][name]
    mesh = Mesh(np.array(jax.devices()[:4]), ("devices",))
    plan = Plan(traced, b.result([kind.memory for kind in FAST_TWO.devices]), FAST_TWO, mesh, fn)
    plan.check()


def test_a_set_runs_on_its_devices() -> None:
    traced, cluster = perceptron(), slow_cluster((3.0, 3.0, 1.0, 1.0), bandwidth=1e9)
    task = Task(traced.graph, cluster)
    b = Baselines(task).on((0, 1)).all(["zero2"])["zero2"]
    limits = [float(kind.memory) for kind in cluster.devices]
    result = b.result(limits)
    assert result.devices == (0, 1)
    assert result.memory_bytes[2:] == (0.0, 0.0)
    plan = Plan(traced, result, cluster, Mesh(np.array(jax.devices()[:2]), ("devices",)), PERCEPTRON[0])
    plan.check()
