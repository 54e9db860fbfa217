"""The user's named scopes and source lines are in the metadata of what XLA compiled, in every form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_devices import slow_cluster

import hapsynth
from hapsynth.graph.trace import trace
from hapsynth.lower import Fused

HERE = Path(__file__).name
W, X = {"up": np.ones((16, 32), np.float32), "down": np.ones((32, 16), np.float32)}, np.ones((64, 16), np.float32)


@jax.jit
def inside(x: Any, w: Any) -> Any:
    with jax.named_scope("deep"):
        return jnp.tanh(x @ w)


def step(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        with jax.named_scope("my_mlp"):
            y = inside(x, w["up"]) @ w["down"]
        return (y**2).mean()

    value, grads = jax.value_and_grad(loss)(w)
    with jax.named_scope("my_update"):
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


@pytest.fixture(scope="module")
def plan() -> hapsynth.Plan:
    """One that cuts the batch unevenly, and so reduces gradients."""
    cluster = slow_cluster((3.0, 1.0))
    mesh = jax.make_mesh((2,), ("hap",), devices=jax.devices()[:2])
    return hapsynth.synthesize(step, (W, X), mesh, cluster=cluster, fixed={"[1]": "S(0)"}, leave_out=False)


def names(text: str) -> set[str]:
    return set(re.findall(r'op_name="([^"]*)"', text))


def test_scopes_of_calls_and_transformations_are_kept() -> None:
    scopes = {(op.name, op.scope) for op in trace(step, (W, X)).graph.ops}
    assert ("tanh", "jvp(my_mlp)/deep") in scopes or ("tanh", "jvp(my_mlp)/jvp(deep)") in scopes
    assert any(name == "dot_general" and scope.startswith("transpose(jvp(my_mlp))") for name, scope in scopes)
    assert ("sub", "my_update") in scopes


def texts(plan: hapsynth.Plan, form: str) -> list[str]:
    """What XLA compiled, in a form."""
    assert plan.mesh is not None
    match form:
        case "switch":
            return [plan.lower().compile().as_text()]
        case "fused":
            asked = plan.traced.graph, plan.program, plan.sizes, plan.mesh
            each = [Fused(*asked, options=plan.result.lowering, own=((i,),)) for i in range(2)]
            return [lowered.lower().compile().as_text() for lowered in each]
        case _:
            plan = hapsynth.Plan(plan.traced, plan.result, plan.cluster, plan.mesh, plan.fn, form="staged")
            return [c.as_text() for stages in plan.lowered.compiled.values() for c in stages]


@pytest.mark.parametrize("form", ["switch", "staged", "fused"])
def test_they_are_in_what_is_compiled(plan: hapsynth.Plan, form: str) -> None:
    compiled = texts(plan, form)
    found = {name for text in compiled for name in names(text)}
    assert any(re.search(r"jvp\(my_mlp\).*/hap/dot_general_\d+", name) for name in found), found
    assert any(re.search(r"transpose\(jvp\(my_mlp\)\).*/hap/dot_general_\d+", name) for name in found), found
    assert any(re.search(r"my_update/hap/sub_\d+", name) for name in found), found
    # What reduces a gradient is named after the op that made it, or, in a program of its own, after what it does.
    assert any(re.search(r"hap/(reduce_scatter|all_reduce)", name) for name in found), found
    assert any(HERE in text for text in compiled)
