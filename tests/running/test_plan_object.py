"""Plans and sharded arrays under what Python and JAX do to any object: trace, copy, pickle, ask for attributes."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from slow_devices import SPEEDS, first_devices, slow_cluster

import hapsynth
from hapsynth.plan import Form, Plan
from hapsynth.running.sharded_array import ShardedArray

X = np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)
W = X[:8]
CLUSTER = slow_cluster(SPEEDS["3:1"])


def planned(mesh: Any, cluster: Any = CLUSTER, form: Form = "auto") -> Plan:
    return hapsynth.synthesize(lambda x, w: (x @ w, x.sum()), (X, W), mesh, cluster=cluster, form=form, leave_out=False)


@pytest.fixture(scope="module", params=["switch", "staged"])
def plan(request: pytest.FixtureRequest) -> Plan:
    made = planned(first_devices(4), form=request.param)
    made(X, W)
    return made


@pytest.fixture(scope="module")
def without_devices() -> Plan:
    return planned(CLUSTER, None)


INSIDE: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "jit": lambda f: jax.jit(f)(1.0),
    "grad": lambda f: jax.grad(f)(1.0),
    "vmap": lambda f: jax.vmap(f)(np.ones(3, np.float32)),
    "eval_shape": lambda f: jax.eval_shape(f, 1.0),
}


@pytest.mark.parametrize("by", INSIDE)
def test_inside_a_trace(plan: Plan, by: str) -> None:
    """With arguments of its own, which are not traced."""
    placed = plan.shard(X, W)
    for call in (lambda: plan(X, W)[1], lambda: plan(*placed)[1]):
        with pytest.raises(TypeError, match="cannot be called inside jit, grad or vmap; put the"):
            INSIDE[by](lambda y, call=call: (call(), y)[1])
    assert np.allclose(plan.unshard(plan(*placed)[0]), X @ W, atol=1e-5)


def test_an_op_that_cannot_run_is_not_blamed_for_a_trace() -> None:
    made = planned(first_devices(4))
    with pytest.raises(TypeError, match="cannot be called inside jit"):
        jax.jit(lambda y: made(X, W)[1] + y)(1.0)
    assert np.allclose(made.unshard(made(X, W)[0]), X @ W, atol=1e-5)


def test_a_plan_is_not_pickled(plan: Plan, without_devices: Plan) -> None:
    for some in (plan, without_devices, {"a": plan}):
        with pytest.raises(TypeError, match=r"plan\.save\(path\).*hapsynth\.load\(path, fn, example_args, mesh\)"):
            pickle.dumps(some)


def test_copies_of_a_plan_are_itself(plan: Plan, without_devices: Plan) -> None:
    for some in (plan, without_devices):
        assert copy.copy(some) is some
        assert copy.deepcopy([some])[0] is some


def test_a_sharded_array_is_not_pickled(plan: Plan) -> None:
    state = plan.shard(X)
    assert isinstance(state, ShardedArray)
    with pytest.raises(TypeError, match=r"plan\.save_state\(path, state\).*plan\.unshard\(x\)"):
        pickle.dumps({"state": state})


def test_copies_of_a_sharded_array_share_nothing(plan: Plan) -> None:
    for copied in (copy.copy, lambda x: copy.deepcopy({"a": [x]})["a"][0]):
        state = plan.shard(X)
        made = copied(state)
        assert isinstance(made, ShardedArray)
        assert made.storage is state.storage
        state.delete()
        assert np.array_equal(plan.unshard(made), X)
        assert np.allclose(plan.unshard(plan(made, W)[0]), X @ W, atol=1e-5)
    with pytest.raises(RuntimeError, match="has been deleted"):
        copy.deepcopy(state)


def test_attributes_that_a_plan_cannot_have(plan: Plan, without_devices: Plan) -> None:
    for name in ("in_shardings", "out_shardings"):
        assert not hasattr(plan, name)
        with pytest.raises(ValueError, match="a NamedSharding has shards alike only"):
            getattr(plan, name)
    for name in ("in_shardings", "out_shardings", "lowered"):
        assert not hasattr(without_devices, name)
        with pytest.raises(RuntimeError, match="without its devices"):
            getattr(without_devices, name)
    for some in (plan, without_devices):
        assert dict(inspect.getmembers(some))["cost"] == some.cost
