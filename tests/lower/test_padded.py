"""Small stages on padded shards: what lies behind a shard's own end reaches no result, and no switch is compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import Mesh
from lowered_programs import mesh_of
from random_programs import floats
from slow_devices import first_devices, slow_cluster
from thoroughness import THOROUGH
from two_axes import sized

import hapsynth
from hapsynth.graph.trace import Traced, trace
from hapsynth.instructions.layout import P, R, S
from hapsynth.instructions.program.program import Compute, Convert, Program
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.staging.options import DEFAULT
from hapsynth.instructions.staging.stages import Stage
from hapsynth.lower import Lowered

SPEEDS = (7.0, 1.0, 3.0, 2.0)


def singular(x: Any, w: Any, i: Any) -> Any:
    """Zeros, as padding is at first, are what every op here is infinite or no number at."""
    x = jnp.asarray(x)
    y = 1 / x
    z = jnp.log(x) @ w
    table = y.at[i].add(jnp.log(x[i]))
    return (
        *((x / x).sum(0), y.max(0), (-y).min(0), jnp.log(x).T @ y, z),
        *((1 / x > 1e30).any(0), (y < 1e30).all(0), table.sum(0), y[i], jnp.sort(y, 1), y.argmax(1)),
        jax.nn.softmax(jnp.log(x), 0),
    )


def args(rows: int) -> Any:
    rng = np.random.default_rng(0)
    x = rng.uniform(0.5, 2, (rows, 6)).astype(np.float32)
    return x, rng.normal(size=(6, 5)).astype(np.float32), rng.integers(0, rows, (9,), np.int32)


def summed_columns(traced: Traced, x: int, z: int) -> Program:
    """One over `x`, its rows cut along the first axis and its columns along the second, along which it is summed."""
    table = FactorTable(traced.graph)
    along = lambda op, operand, result: next(
        t for t in table[op].triples if (t.operands[-1], t.results[0]) == (operand, result)
    )
    invert = along(0, S(0), S(0)), along(0, S(1), S(1))
    total = along(1, S(0), S(0)), along(1, S(1), P("sum"))
    steps = (Compute(0, invert), Compute(1, total), Convert(z, 1, (S(0), P("sum")), (S(0), R)))
    return Program((("a", 2), ("b", 2)), {x: (S(0), S(1))}, steps, ((S(0), R),))


def planned(rows: int) -> tuple[hapsynth.Plan, Any]:
    given = args(rows)
    plan = hapsynth.synthesize(singular, given, first_devices(4), cluster=slow_cluster(SPEEDS), leave_out=False)
    assert any(len(set(shares)) > 1 for shares in plan.sizes.shares)
    return plan, given


def switches(plan: hapsynth.Plan) -> int:
    assert isinstance(plan.lowered, Lowered)
    return sum(isinstance(step, Stage) and bool(step.switch) for step in plan.lowered.steps)


@pytest.mark.parametrize("rows", [13, 5])
def test_what_lies_behind_reaches_no_result(rows: int) -> None:
    plan, given = planned(rows)
    assert switches(plan) == 0
    stored = plan(*plan.shard(*given))
    for got, want in zip(plan.unshard(stored), singular(*given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_no_number_is_left_in_outputs_that_has_none() -> None:
    """As `jax_debug_nans` looks at all of an array."""
    plan, given = planned(13)
    form = plan.lowered
    with jax.set_mesh(form.mesh):
        stored = form([s.put(x, copy=True) for s, x in zip(form.inputs, given, strict=True)])
    assert any(s is not None and not s.is_even for s in form.outputs)
    for x in stored:
        assert np.isfinite(np.asarray(x)).all()


def test_no_number_is_left_behind_what_another_axis_has_summed() -> None:
    """Rows cut unevenly along one mesh axis, what is summed along the other: one over the padding is infinite."""
    traced = trace(lambda x: (1 / x).sum(1), (floats(5, 4),))
    (x,) = traced.graph.inputs
    (z,) = traced.graph.ops[1].results
    program = summed_columns(traced, x, z)
    sizes = sized(traced, program, (4, 1), (2, 2))
    form = Lowered(traced.graph, program, sizes, mesh_of(4))
    (storage,), (output,) = form.inputs, form.outputs
    assert output is not None
    assert not output.is_even
    given = np.arange(1.0, 21.0, dtype=np.float32).reshape(5, 4)
    (stored,) = form.lower().compile()(storage.put(given, copy=True), *form.placed_constants)
    np.testing.assert_allclose(output.fetch(stored), (1 / given).sum(1), rtol=1e-6)
    assert np.isfinite(np.asarray(stored)).all()


def test_large_stages_switch() -> None:
    """Exact shapes are for what takes time."""
    rows = DEFAULT.small_stage_elements
    plan = hapsynth.synthesize(
        lambda x: jnp.tanh(x) * 2,
        (jax.ShapeDtypeStruct((rows, 4), np.float32),),
        first_devices(4),
        cluster=slow_cluster(SPEEDS),
        leave_out=False,
    )
    assert switches(plan) == 1
    assert "stablehlo.case" in plan.lower().as_text()


@pytest.mark.parametrize(("rows", "expected"), [(1000, 0), (4000, 1)])
def test_stages_of_many_small_ops(rows: int, expected: int) -> None:
    """What each op takes counts beside how many are compiled in every branch: 300 on 3,200 elements, or on 13,000."""

    def fn(x: Any) -> Any:
        for _ in range(150):
            x = jnp.tanh(x) * 1.5
        return x

    x = np.random.default_rng(0).normal(size=(rows, 6)).astype(np.float32)
    plan = hapsynth.synthesize(fn, (x,), first_devices(4), cluster=slow_cluster(SPEEDS), leave_out=False)
    assert 300 * max(plan.sizes.shares[0]) * 6 > DEFAULT.small_stage_elements
    assert switches(plan) == expected
    np.testing.assert_allclose(plan.unshard(plan(plan.shard(x))), fn(x), rtol=1e-5, atol=1e-6)


@settings(max_examples=5 if THOROUGH else 2)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=2), st.integers(1, 40))
def test_two_axes(speeds: list[int], rows: int) -> None:
    devices = [2.0**s for s in (*speeds, 0, 2)]
    cluster = replace(slow_cluster(devices), axes=(("a", 2), ("b", 2)))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    given = args(rows)
    plan = hapsynth.synthesize(singular, given, mesh, cluster=cluster, leave_out=False)
    for got, want in zip(plan.unshard(plan(*plan.shard(*given))), singular(*given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
