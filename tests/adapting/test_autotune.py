"""Plans of one function, run in turn: the fastest is kept."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import partial
from typing import Any

import graphs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import hapsynth
from hapsynth.cluster.cluster import Cluster
from hapsynth.plan import Plan
from hapsynth.report.json_records import comparison
from hapsynth.search.memory.profile import peak


def step(state: Any, batch: jax.Array, *, rate: jax.Array) -> tuple[Any, jax.Array]:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ w) ** 2)

    value, gradient = jax.value_and_grad(loss)(state["w"])
    return {"w": state["w"] - rate * gradient, "step": state["step"] + 1}, value


STATE = {"w": np.linspace(-1, 1, 64 * 32, dtype=np.float32).reshape(64, 32), "step": np.int32(0)}
BATCH = np.sin(np.arange(48 * 64, dtype=np.float32)).reshape(48, 64)
GIVEN: dict[str, Any] = {"rate": np.float32(0.1)}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), ("d",))


@pytest.fixture(scope="module")
def plan(mesh: Mesh) -> Plan:
    cluster = graphs.cluster([3.0, 3.0, 1.0, 1.0])
    return hapsynth.synthesize(step, (STATE, BATCH), mesh, cluster=cluster, example_kwargs=GIVEN, leave_out=False)


def test_a_plan_with_overlap_is_tried_without(plan: Plan, mesh: Mesh) -> None:
    cluster = graphs.cluster([3.0, 3.0, 1.0, 1.0])
    planned = hapsynth.synthesize(step, (STATE, BATCH), cluster, example_kwargs=GIVEN, leave_out=False, overlap=True)
    with pytest.warns(hapsynth.OverlapWarning, match="one process holds all devices"):
        beside = Plan(planned.traced, planned.result, cluster, mesh, step)
    with pytest.warns(hapsynth.OverlapWarning):
        found = hapsynth.autotune_candidates(beside, within=100.0)
    alone = found["hapsynth without overlap"]
    assert list(found)[:2] == ["hapsynth", "hapsynth without overlap"]
    assert alone.program == beside.program
    assert alone.cost >= beside.cost
    assert not alone.result.overlap
    assert "hapsynth without overlap" not in hapsynth.autotune_candidates(plan, within=100.0)


class Clock:
    """Moves by what the running plan's step takes: the first one of each turn takes long, as compiling does."""

    def __init__(self, seconds: list[float], steps: int) -> None:
        turns = [*seconds, *reversed(seconds)]
        each = itertools.chain.from_iterable([100.0, *[s] * steps] for s in turns)
        # Read as a step begins and, of those that count, as it ends.
        self.reads: list[float] = []
        now = 0.0
        for k, s in enumerate(each):
            self.reads.append(now)
            now += s
            if k % (steps + 1):
                self.reads.append(now)
        self.reads.reverse()

    def __call__(self) -> float:
        return self.reads.pop()


def test_contenders_are_what_people_run_today(plan: Plan) -> None:
    found = hapsynth.autotune_candidates(plan, within=100.0)
    assert next(iter(found)) == "hapsynth"
    assert found["hapsynth"] is plan
    assert {"data_parallel", "data_parallel_speed", "zero3"} <= set(found)
    costs = [p.cost for name, p in found.items() if name != "hapsynth"]
    assert costs == sorted(costs)
    assert set(hapsynth.autotune_candidates(plan, within=0.5)) == {"hapsynth"}
    want = jax.jit(step)(STATE, BATCH, **GIVEN)
    for p in found.values():
        assert p.devices == (0, 1, 2, 3)
        assert p.gap == 1.0 or p is plan
        got = p.unshard(p(STATE, BATCH, **GIVEN))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_what_does_not_fit_takes_no_part(plan: Plan) -> None:
    tight = graphs.cluster([3.0, 3.0, 1.0, 1.0])
    need = {
        name: peak(p.program, p.sizes, p.cost_model())
        for name, p in hapsynth.autotune_candidates(plan, within=100.0).items()
    }
    limit = (min(need.values()) + max(need.values())) / 2
    held = hapsynth.synthesize(
        step, (STATE, BATCH), plan.mesh, cluster=tight, example_kwargs=GIVEN, leave_out=False, memory_limit=limit
    )
    left = set(hapsynth.autotune_candidates(held, within=100.0)) - {"hapsynth"}
    assert left == {name for name, most in need.items() if most <= limit} - {"hapsynth"}
    assert left < set(need)


def test_what_fits_on_exact_shards_alone_takes_part(plan: Plan, mesh: Mesh) -> None:
    """Of a plan of such: here the slow devices have no room for the largest shard."""
    planned = partial(hapsynth.synthesize, step, (STATE, BATCH), example_kwargs=GIVEN, leave_out=False, form="staged")
    name, cluster = "data_parallel_speed", plan.cluster
    held = hapsynth.autotune_candidates(planned(mesh, cluster=cluster), within=100.0)[name].memory
    room = [int(held[0]) * 2] * 2 + [int(held[0] + held[3]) // 2] * 2
    assert held[3] < room[3] < held[0]
    kinds = tuple(replace(kind, memory=most) for kind, most in zip(cluster.devices, room, strict=True))
    tight = planned(mesh, cluster=replace(cluster, devices=kinds))
    found = hapsynth.autotune_candidates(tight, within=100.0)[name]
    assert (found.result.exact, found.memory, found.form) == (True, held, "staged")
    beside = comparison(tight, [name], each=False)[name]
    assert (beside.fits, beside.memory_bytes) == (True, max(held))


@pytest.mark.parametrize(("seconds", "wins"), [([3.0, 2.0, 2.5], 1), ([2.0, 1.99, 3.0], 0), ([1.0, 2.0, 3.0], 0)])
def test_the_least_median_wins_by_a_margin(
    plan: Plan, seconds: list[float], wins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hapsynth.adapting.autotune.perf_counter", Clock(seconds, 2))
    plans = dict(itertools.islice(hapsynth.autotune_candidates(plan, within=100.0).items(), 3))
    before = jax.tree.map(np.copy, STATE)
    found = hapsynth.autotune(plans, STATE, BATCH, steps=2, **GIVEN)
    assert list(found.seconds) == list(plans)
    assert list(found.seconds.values()) == pytest.approx(seconds)
    assert found.name == list(plans)[wins]
    assert found.plan is plans[found.name]
    jax.tree.map(np.testing.assert_array_equal, STATE, before)


def test_devices_that_the_plan_leaves_out(mesh: Mesh) -> None:
    """Without a mesh of all the others leave them out, too."""
    cluster: Cluster = graphs.cluster([3.0, 3.0, 1e-3, 1e-3])
    plan = hapsynth.synthesize(step, (STATE, BATCH), mesh, cluster=cluster, example_kwargs=GIVEN)
    assert len(plan.devices) < 4
    assert {p.devices for p in hapsynth.autotune_candidates(plan, within=1e9).values()} == {plan.devices}
    wide = hapsynth.autotune_candidates(plan, mesh, within=1e9)
    assert {p.devices for name, p in wide.items() if name != "hapsynth"} == {(0, 1, 2, 3)}
    found = hapsynth.autotune({n: wide[n] for n in ("hapsynth", "data_parallel")}, STATE, BATCH, steps=1, **GIVEN)
    assert set(found.seconds) == {"hapsynth", "data_parallel"}
    with pytest.raises(ValueError, match="the mesh has 2 devices, the plan's cluster 4"):
        hapsynth.autotune_candidates(plan, Mesh(np.array(jax.devices()[:2]), ("d",)))


def test_bad_input(plan: Plan) -> None:
    with pytest.raises(ValueError, match="no plan was given"):
        hapsynth.autotune({}, STATE, BATCH, **GIVEN)
    options: tuple[tuple[str, Any], ...] = (("steps", 0), ("steps", 1.5), ("margin", float("nan")), ("margin", "x"))
    for name, value in options:
        with pytest.raises(ValueError, match=f"{name} is {value!r}; give"):
            hapsynth.autotune({"plan": plan}, STATE, BATCH, **{name: value}, **GIVEN)
    for name, call in (("plans['x']", hapsynth.autotune), ("plan", hapsynth.autotune_candidates)):
        given: Any = 3 if name == "plan" else {"plan": plan, "x": 3}
        with pytest.raises(TypeError, match=f"^{re.escape(name)} is a int; give a hapsynth.Plan"):
            call(given)
    with pytest.raises(ValueError, match="within is nan; give"):
        hapsynth.autotune_candidates(plan, within=float("nan"))
    with pytest.raises(RuntimeError, match="no devices to run on"):
        hapsynth.autotune_candidates(Plan(plan.traced, plan.result, plan.cluster))
