"""Several functions with one state whose collectives go beside what is computed."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from slow_devices import first_devices, slow_cluster
from test_several import KEY, LAYERS, WIDE, deep, deep_init, deep_train

import hapsynth
from hapsynth import Plans
from hapsynth.search.planning.makespan import TOLERANCE
from hapsynth.search.scheduling.timeline import step_seconds

ROWS = 64
FUNCTIONS = {"train": deep_train, "eval": lambda s, x: deep(s["w"], x), "init": deep_init}
STATE = jax.eval_shape(deep_init, KEY)
X = np.random.default_rng(0).normal(size=(ROWS, WIDE)).astype(np.float32)
ARGS = {"train": (STATE, X), "eval": (STATE, X), "init": (KEY,)}
CLUSTER = slow_cluster((3.0, 3.0, 1.0, 1.0), bandwidth=3e8)


@pytest.fixture(scope="module")
def plans() -> Plans:
    return hapsynth.synthesize_several(FUNCTIONS, ARGS, CLUSTER, overlap=True, leave_out=False)


def test_each_costs_its_makespan(plans: Plans) -> None:
    for plan in plans.values():
        assert plan.result.overlap
        want = step_seconds(plan.program, plan.sizes, plan.cost_model(), overlap=True)
        assert plan.cost == pytest.approx(want, rel=1e-9)
        assert plan.result.lower_bound_s <= plan.cost
    # What each takes alone is the best that was found: the search leaves as much undecided.
    alone = sum(plans.frequency[name] * seconds for name, seconds in plans.alone.items())
    assert alone <= plans.cost * (1 + TOLERANCE)
    assert 0 < plans.lower_bound <= plans.cost


def test_it_takes_less_than_without(plans: Plans) -> None:
    without = hapsynth.synthesize_several(FUNCTIONS, ARGS, CLUSTER, leave_out=False)
    assert plans.cost < 0.95 * without.cost
    beside = {n: step_seconds(p.program, p.sizes, p.cost_model(), overlap=True) for n, p in without.items()}
    assert plans.cost <= sum(plans.frequency[n] * seconds for n, seconds in beside.items())


def test_the_state_goes_from_one_to_another(plans: Plans, tmp_path: Path) -> None:
    assert len(plans.layouts) == 3 * LAYERS
    train, evaluated = plans["train"].layouts, plans["eval"].layouts
    for n in range(LAYERS):
        assert train[f"[0]['w']['w{n}']"] == evaluated[f"[0]['w']['w{n}']"]
    plans.save(tmp_path / "plans.json")
    with pytest.warns(hapsynth.OverlapWarning, match="one process holds all devices"):
        here = hapsynth.load_plans(tmp_path / "plans.json", FUNCTIONS, ARGS, first_devices(4))
    assert (here.cost, here.lower_bound) == pytest.approx((plans.cost, plans.lower_bound))
    state, plain = here["init"](jax.random.key(3)), jax.jit(deep_init)(jax.random.key(3))
    for _ in range(2):
        np.testing.assert_allclose(here["eval"](state, X), jax.jit(FUNCTIONS["eval"])(plain, X), rtol=1e-5)
        (state, value), (plain, want) = here["train"](state, X), jax.jit(deep_train)(plain, X)
        np.testing.assert_allclose(value, want, rtol=1e-5)
