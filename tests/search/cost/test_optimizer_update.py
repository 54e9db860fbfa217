"""What of a training step goes together, and what its collectives' latencies then come to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graphs import cluster
from lowering_options import ALONE

import hapsynth
from hapsynth.cluster.cluster import Cluster, Link
from hapsynth.graph.ir import Graph, Op
from hapsynth.graph.trace import trace
from hapsynth.instructions.collectives import STEPS
from hapsynth.instructions.layout import P, R, S
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.staging.options import DEFAULT
from hapsynth.report.cost_breakdown import Sending, cost_lines, print_costs
from hapsynth.report.tables import console
from hapsynth.search.analysis.optimizer_update import GradientBucketing, update_groups, updates
from hapsynth.search.cost.model import CostModel


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(weights, x):
    grads = jax.grad(lambda ws: sum(jnp.sum(jnp.tanh(x @ w)) for w in ws))(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads)]


def graph(*widths: int) -> Graph:
    return trace(step, ([struct(64, n) for n in widths], struct(256, 64))).graph


def test_gradients_and_new_state_are_updates() -> None:
    g = graph(32, 16)
    found = updates(g)
    assert not found & set(g.inputs)
    assert {g.outputs[t] for _, t in g.carry} <= found
    made = {g.ops[g.producer[v]].name for v in found}
    assert {"sub", "mul"} <= made
    # The gradient itself, or what turns it around.
    assert made & {"dot_general", "transpose"}
    assert all(g.values[v].shape in ((64, 32), (64, 16)) for v in found)


def test_each_parameter_is_brought_forward_by_itself() -> None:
    g = graph(32, 16)
    one, two = update_groups(g, updates(g))
    assert {g.values[v].shape for v in one.gradients} == {g.values[v].shape for v in one.parameters}
    assert {v for group in (one, two) for v in group.parameters} == {g.inputs[source] for source, _ in g.carry}
    assert {g.ops[op].name for op in one.ops} == {"mul", "sub"}
    assert set(one.ops).isdisjoint(two.ops)


def test_what_brings_a_parameter_forward_has_its_norm_and_its_cast() -> None:
    """The model reads the cast; what sums squares is as good on one device."""

    def mixed(state, x):
        w, m = state
        grad = jax.grad(lambda v: jnp.square(x @ v).sum())(w.astype(jnp.bfloat16)).astype(jnp.float32)
        m = 0.9 * m + grad / jnp.sqrt(jnp.square(grad).sum())
        return w - 0.1 * m, m

    state = struct(64, 32), struct(64, 32)
    g = trace(mixed, (state, jax.ShapeDtypeStruct((256, 64), jnp.bfloat16))).graph
    (group,) = update_groups(g, updates(g))
    assert {g.ops[op].name for op in group.ops} >= {"convert_element_type", "square", "reduce_sum", "sub"}
    (cast,) = group.parameters
    assert g.values[cast].dtype == jnp.bfloat16
    (gradient,) = group.gradients
    assert g.values[gradient].dtype == jnp.bfloat16


def test_a_gradient_is_summed_as_it_is_used() -> None:
    """JAX transposes the product that a weight's gradient is. Sent before that, all that reads it goes across the order
    in which it lies; too large to go together with others it would cost the same otherwise."""
    g = graph(4 * DEFAULT.bundled_bytes // (64 * 4))
    (product,) = (
        op.results[0] for op in g.ops if op.name == "dot_general" and g.uses[op.results[0]] and turned_by(g, op)
    )
    costs = CostModel(g, cluster([1.0, 1.0]), FactorTable(g))
    (gradient,) = turned_by(g, g.ops[g.producer[product]])
    seconds = [costs.conversion(v, (P("sum"),), (R,), 0, costs.evenly)[0] for v in (product, gradient)]
    nbytes = g.values[product].nbytes
    assert seconds[0] - seconds[1] == pytest.approx(16 * nbytes / costs.bandwidth[0])
    scattered = [costs.conversion(v, (P("sum"),), (S(0),), 0, costs.evenly)[0] for v in (product, gradient)]
    assert scattered[0] - scattered[1] == pytest.approx(8 * nbytes / costs.bandwidth[0])
    # What is gathered lies as it is wanted.
    gathered = [costs.conversion(v, (S(0),), (R,), 0, costs.evenly)[0] for v in (product, gradient)]
    assert gathered[0] == gathered[1]


def test_what_is_turned_afterwards_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all partial sums, so that no program goes without; uneven, so that the linear program counts it too."""
    monkeypatch.setattr("hapsynth.search.cost.model.turned", lambda graph: frozenset(range(len(graph.values))))
    where = Cluster("two", cluster([3.0, 1.0]).devices, (0, 1), Link(1e9, 1e-5))
    plan = hapsynth.synthesize(step, ([struct(64, 64)] * 4, struct(1 << 16, 64)), where, leave_out=False)
    sending = [line for line in cost_lines(plan) if isinstance(line, Sending)]
    assert any(line.turned_s > 0 for line in sending)
    assert all(line.s_per_byte == pytest.approx(1e-9) for line in sending)
    assert sum(line.seconds for line in cost_lines(plan)) == pytest.approx(plan.cost)
    print_costs(console(), plan, cost_lines(plan), top=100)
    text = capsys.readouterr().out
    assert text.count("transposing") == 1
    assert text.count("to transpose afterwards") == sum(line.turned_s > 0 for line in sending)


def turned_by(g: Graph, op: Op) -> list[int]:
    """What transposes make of an op's result."""
    return [g.ops[o].results[0] for o, _ in g.uses[op.results[0]] if g.ops[o].name == "transpose"]


def test_the_parts_of_a_latency_add_up_to_one() -> None:
    g = graph(32, 16, 8)
    bucketing = GradientBucketing(g, DEFAULT)
    assert bucketing.part(g.inputs[0], STEPS["all_reduce"], 4) == pytest.approx(1 / 3)
    assert bucketing.part(g.inputs[-1], STEPS["all_reduce"], 4) == 1.0, "the batch is no state"
    # Too large to be summed with others, small enough to be gathered with them.
    large = graph(32, 2 * DEFAULT.bundled_bytes // (64 * 4))
    parts = [
        GradientBucketing(large, DEFAULT).part(large.inputs[1], STEPS[kind], 4) for kind in ("all_reduce", "all_gather")
    ]
    assert parts == [1.0, 0.5]
    # As many bundles as they fill.
    many = graph(*[DEFAULT.bundled_bytes // (64 * 4)] * 20)
    assert GradientBucketing(many, DEFAULT).part(many.inputs[0], STEPS["all_reduce"], 4) == pytest.approx(2 / 20)


def test_conversions_cost_their_part() -> None:
    g = graph(32, 16)
    costs = CostModel(g, cluster([1.0] * 4, bandwidth=1e9, latency=1e-3), FactorTable(g))
    evenly = lambda dim, axes: 0.25
    grad, batch = g.outputs[0], g.inputs[-1]
    alone, wire = costs.conversion(batch, (P("sum"),), (R,), 0, evenly)
    # A tree: 1 + 2 x 2 messages, and twice the bytes in place of 3/2.
    assert alone == pytest.approx(5e-3 + wire * 4 / 3 * 1e-9)
    part, wire = costs.conversion(grad, (P("sum"),), (R,), 0, evenly)
    assert part == pytest.approx(2.5e-3 + wire * 4 / 3 * 1e-9)
    each = CostModel(g, costs.cluster, costs.table, lowering=ALONE)
    assert each.conversion(grad, (P("sum"),), (R,), 0, evenly)[0] == pytest.approx(5e-3 + wire * 4 / 3 * 1e-9)
    assert costs.conversion(grad, (R,), (S(0),), 0, evenly) == (0.0, 0.0)


def test_latency_does_not_keep_small_weights_from_data_parallelism() -> None:
    """A dozen weights whose gradients go as one: a latency in all, not one each. The lines of the report add up."""
    args = [struct(64, 64)] * 12, struct(1 << 16, 64)
    slow = Cluster("slow", cluster([1.0] * 4).devices, (0, 1, 2, 3), Link(1e9, 4e-5))
    plan = hapsynth.synthesize(step, args, slow)
    lines = cost_lines(plan)
    sending = [line for line in lines if isinstance(line, Sending)]
    assert len(sending) >= 12
    messages = {"all_reduce": 5, "reduce_scatter": 4, "all_gather": 4}
    once = sum(messages[step] for step in {line.step for line in sending})
    assert sum(line.latency_s for line in sending) == pytest.approx(4e-5 * once)
    assert sum(line.seconds for line in lines) == pytest.approx(plan.cost)
    assert np.isclose(plan.gap, 0, atol=1e-4)
    assert plan.joint_lower_bound <= plan.cost
