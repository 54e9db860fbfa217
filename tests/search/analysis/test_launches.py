"""What ends a kernel, where one may write several results and where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import trace
from hapsynth.search.analysis.fusion import launches, materialized

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
SEVERAL = 96


def launched(fn: Callable[..., Any], *args: Any, outputs: int = SEVERAL) -> list[str]:
    """The names of the ops that end a kernel."""
    graph = graph_of(fn, *args)
    return [op.name for op, each in zip(graph.ops, launches(graph, materialized(graph), outputs), strict=True) if each]


def graph_of(fn: Callable[..., Any], *args: Any) -> Graph:
    return trace(fn, args, {}).graph


@pytest.mark.parametrize(("outputs", "kernels"), [(1, 3), (2, 2), (3, 1), (SEVERAL, 1)])
def test_an_update_of_a_parameter(outputs: int, kernels: int) -> None:
    """Two moments and the parameter."""

    def adam(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g * g
        return p - m / (jnp.sqrt(v) + 1e-8), m, v

    assert len(launched(adam, X, X, X, X, outputs=outputs)) == kernels


def test_a_chain_is_part_of_the_reduction_that_reads_it() -> None:
    fn = lambda x: (jnp.tanh(x) * x).sum()
    assert len(launched(fn, X, outputs=1)) == 2
    assert launched(fn, X) == ["reduce_sum"]


def test_what_leads_there_by_another_way_is_apart() -> None:
    """The sum needs the product, which needs the first: written with the sum, it would wait for itself."""

    def residual(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.tanh(x)
        return y + y @ w

    w = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    assert launched(residual, X, w) == ["tanh", "dot_general", "add"]


def test_another_size_is_another_kernel() -> None:
    """Slices of a result that is stored."""
    assert launched(lambda x: (y := jnp.tanh(x), y[:8] * 2.0), X) == ["tanh", "mul"]


def test_a_step_with_adam() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        params, opt = state
        gradients = jax.grad(lambda p: (jnp.tanh(x @ p["a"]) @ p["b"]).mean())(params)
        updates, opt = optax.adam(1e-3).update(gradients, opt)
        return optax.apply_updates(params, updates), opt

    params = {name: jax.ShapeDtypeStruct((32, 32), jnp.float32) for name in "ab"}
    state = params, jax.eval_shape(optax.adam(1e-3).init, params)
    graph = graph_of(step, state, X)
    apart, together = (sum(launches(graph, materialized(graph), n)) for n in (1, SEVERAL))
    # Of each parameter two results less.
    assert together <= apart - 4
