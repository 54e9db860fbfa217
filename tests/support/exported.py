"""A plan as a module, which gives the same bits."""

from __future__ import annotations

import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hapsynth import Plan
from hapsynth.instructions.testing.example_arguments import random_arguments


def module(plan: Plan) -> Any:
    made = types.ModuleType("program")
    sys.modules["program"] = made
    exec(compile(plan.to_source(), "program.py", "exec"), made.__dict__)
    return made


def bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same_bits(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = bits(a), bits(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_exports(plan: Plan, *args: Any) -> str:
    """The module gives the plan's results; its text."""
    args = args or random_arguments(plan.traced)[0]
    made = module(plan)
    mesh = made.make_mesh()
    alone = [made.shard(mesh, *args[:1]), *args[1:]] if len(args) == 1 else made.shard(mesh, *args)
    got = made.unshard(made.make_step(mesh)(*alone))
    given = plan.shard(*args)
    assert_same_bits(got, plan.unshard(plan(*([given] if len(args) == 1 else given))))
    return plan.to_source()
