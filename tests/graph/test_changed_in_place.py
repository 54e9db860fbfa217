"""What a function changes in place in an object that it was given, and does not return, would be lost: that raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hapsynth.graph.trace import TraceError, trace

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


@jax.tree_util.register_dataclass
@dataclass
class Model:
    w: Any
    count: Any


MODEL = Model(jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))


def test_what_is_not_returned_is_named() -> None:
    def step(model: Model, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda m: ((x @ m.w) ** 2).mean(), allow_int=True)(model)
        model.w = model.w - grads.w
        model.count = model.count + 1
        return loss

    with pytest.raises(TraceError, match=r"changes \[0\].w and 1 more in place and does not return .*flax_nnx.py"):
        trace(step, (MODEL, X))


def returned(model: Model, x: Any) -> Any:
    model.w = model.w * 2
    return model, (x @ model.w).sum()


def returned_in_another_form(model: Model, x: Any) -> Any:
    model.count = model.count + 1
    return {"count": model.count.astype(jnp.float32)}, x


def used_for_what_is_returned(model: Model, x: Any) -> Any:
    model.w = jnp.tanh(model.w)
    return (x @ model.w).sum()


def put_back(model: Model, x: Any) -> Any:
    w = model.w
    model.w = w * 2
    model.w = w
    return (x @ w).sum()


def a_dict(model: dict[str, Any], x: Any) -> Any:
    """A function's own affair: dicts that it was given are copies."""
    model["unused"] = x.sum()
    model["w"] = model["w"] * 2
    return x


@pytest.mark.parametrize("step", [returned, returned_in_another_form, used_for_what_is_returned, put_back])
def test_what_is_not_lost_may_change(step: Any) -> None:
    assert trace(step, (MODEL, X)).graph.ops or step is put_back


def test_dicts_may_change() -> None:
    trace(a_dict, ({"w": X}, X))


def test_modules_of_nnx() -> None:
    """As they are written for `nnx.jit`, with the decorator and without."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    optax = pytest.importorskip("optax", reason="optax is not installed")

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    def functional(state: Any, x: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss = step(model, optimizer, x)
        return nnx.state((model, optimizer)), loss

    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    for lost in (step, nnx.jit(step)):
        with pytest.raises(TraceError, match=r"changes \[.*in place and does not return .*nnx.split"):
            trace(lost, (model, optimizer, X))
    # To look at a model changes nothing of it.
    trace(lambda model, x: model(x), (model, X))
    assert len(trace(functional, (state, X)).graph.carry) == len(jax.tree.leaves(state))
