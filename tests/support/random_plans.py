"""Plans of random programs, for tests of properties that all plans have."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from random_programs import RandomProgram

from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import trace
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.plan import Plan
from hapsynth.search.result import Result

N = 4


def mesh_of(n: int = N, axes: tuple[int, ...] | None = None, types: tuple[AxisType, ...] | None = None) -> Mesh:
    shape = axes or (n,)
    names = tuple("xyz"[: len(shape)])
    return Mesh(np.array(jax.devices()[:n]).reshape(shape), names, axis_types=types or (AxisType.Auto,) * len(shape))


def make_plan(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    mesh: Mesh | None = None,
    n: int = N,
    mode: str = "skewed",
    seed: int = 0,
    eager: float = 0.85,
    with_mesh: bool = True,
    lowering: LoweringOptions = DEFAULT,
) -> Plan:
    """A plan of a random program: nothing here depends on how good it is."""
    mesh = mesh or mesh_of(n)
    traced = trace(fn, args, kwargs)
    maker = RandomProgram(traced.graph, n, random.Random(seed), eager)
    program = maker.build()
    sizes = maker.sizes(program, mode)
    check(traced.graph, program, sizes)
    limits, timings = (float("inf"),) * n, {"total_s": 1.0}
    result = Result(program, sizes, 2.0, 1.5, 1.0, "gap", 7, (1e6,) * n, limits, ("weird",), timings, lowering=lowering)
    return Plan(traced, result, Cluster.from_mesh(mesh), mesh if with_mesh else None, fn)


def assert_same(got: Any, want: Any, plan: Plan) -> None:
    """Same tree, shapes, dtypes, weak types and values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        if not isinstance(b, (jax.Array, np.ndarray)):
            assert a is b or a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.asarray(plan.unshard(a)), np.asarray(b), rtol=1e-5, atol=1e-5)


floats = lambda *shape: np.random.default_rng(0).normal(size=shape).astype(np.float32)


def step(state: Any, batch: Any) -> Any:
    """Linear regression with momentum: every leaf of the state changes."""
    loss = lambda w: jnp.mean((batch @ w["w"] - w["b"]) ** 2)
    value, grads = jax.value_and_grad(loss)(state["p"])
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    return {"p": jax.tree.map(lambda p, m: p - 0.1 * m, state["p"], m), "m": m}, value


def step_args() -> Any:
    p = {"w": floats(6, 5), "b": floats(5)}
    return {"p": p, "m": jax.tree.map(np.zeros_like, p)}, floats(7, 6)
