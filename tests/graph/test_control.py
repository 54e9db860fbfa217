"""Loops and branches: planned once per body, the same results as `jax.jit`, costs by how often they run."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import CASES, assert_same, floats, stacked_layers
from jax import lax
from slow_devices import SPEEDS, first_devices, thin_cluster

import hapsynth
from hapsynth.graph.trace import trace
from hapsynth.graph.trip_counts import with_counts
from hapsynth.instructions.layout import P, R, S
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Compute, Convert, Program, ProgramError, nested, region_of
from hapsynth.instructions.staging.stages import Cond, Loop
from hapsynth.plan import Plan
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.program_cost import instruction_costs, largest_share


def planned(fn: Any, args: Any, on: str = "3:1", bandwidth: float = 1e12) -> Plan:
    speeds = SPEEDS[on]
    cluster = thin_cluster(speeds, bandwidth=bandwidth)
    return hapsynth.synthesize(fn, args, first_devices(len(speeds)), cluster=cluster, leave_out=False)


@cache
def plan_of(name: str, on: str) -> Plan:
    return planned(*CASES[name], on)


@pytest.mark.few(11)
@pytest.mark.parametrize("on", ["3:1", "hopeless"])
@pytest.mark.parametrize("name", CASES)
def test_same_as_jit(name: str, on: str) -> None:
    fn, args = CASES[name]
    plan = plan_of(name, on)
    assert_same(plan, plan(*args), jax.jit(fn)(*args))
    plan(*args)
    assert plan.lowered.traces == 1
    assert plan.check(*args).ok
    assert not plan.result.replicated_primitives or name in ("keys", "while whose test communicates")


def uneven(plan: Plan) -> bool:
    return any(len(set(shares)) > 1 for shares in plan.sizes.shares)


@pytest.mark.parametrize("name", ["scanned layers", "recurrent", "nested", "while", "cond", "switch"])
def test_work_inside_is_divided(name: str) -> None:
    plan = plan_of(name, "3:1")
    assert uneven(plan)
    graph = plan.traced.graph
    inside = [
        i
        for i in plan.program.instructions
        if isinstance(i, Compute) and region_of(graph, i) and i.triples[0].factor is not None
    ]
    assert inside


def test_a_body_is_planned_once() -> None:
    """More layers are more runs of the same body, not more ops; the time grows with them."""
    ops: set[int] = set()
    costs: list[float] = []
    for layers in (2, 8, 32):
        args = (jax.ShapeDtypeStruct((layers, 64, 64), "float32"), jax.ShapeDtypeStruct((240, 64), "float32"))
        plan = hapsynth.synthesize(stacked_layers, args, thin_cluster(SPEEDS["3:1"]))
        ops.add(len(plan.traced.graph.ops))
        costs.append(plan.cost)
    assert len(ops) == 1
    assert 3.5 < (costs[2] - costs[0]) / (costs[1] - costs[0]) < 6.5  # 30 layers more to 6


def test_shared_gradients_are_reduced_once() -> None:
    """The gradient of weights that every step uses is carried as a partial sum, and summed after the loop."""
    batch = 960
    args = ({"wx": floats(8, 16), "wh": floats(16, 16)}, floats(6, batch, 8))

    def loss_step(p: Any, xs: Any) -> Any:
        def loss(p: Any) -> Any:
            def cell(h: Any, x: Any) -> Any:
                h = jnp.tanh(x @ p["wx"] + h @ p["wh"])
                return h, h

            return jnp.mean(lax.scan(cell, jnp.zeros((batch, 16)), xs)[1] ** 2)

        return jax.grad(loss)(p)

    plan = planned(loss_step, args, bandwidth=1e8)
    graph = plan.traced.graph
    reduced = [i for i in plan.program.instructions if isinstance(i, Convert) and i.is_collective]
    assert reduced
    assert all(i.region == 0 for i in reduced), plan.program.text(graph)
    assert any(
        i.result_layout(0)[0].is_partial
        for i in plan.program.instructions
        if isinstance(i, Compute) and graph.ops[i.op].name == "loop_carry"
    )


def test_instructions_cost_as_often_as_they_run() -> None:
    plan = plan_of("scanned layers", "3:1")
    graph = plan.traced.graph
    model = CostModel(graph, plan.cluster, plan.lowered.table)
    for cost in instruction_costs(plan.program, plan.sizes, model):
        i = cost.instruction
        if isinstance(i, Convert):
            largest = lambda *cut, v=i.value: largest_share(plan.sizes, v, *cut)
            once, _ = model.conversion(i.value, i.source, i.target, i.axis, largest)
            assert cost.seconds == pytest.approx(graph.runs[i.region] * once)
    assert set(graph.runs) == {1.0, 3.0}


def test_a_rare_branch_costs_little() -> None:
    """What only one branch needs is converted in it."""

    def fn(i: Any, w: Any, x: Any) -> Any:
        return lax.cond(i > 0, lambda: (x @ w).sum(), lambda: x.sum())

    graph = trace(fn, (np.int32(1), floats(64, 64), floats(240, 64))).graph
    assert [r.kind for r in graph.regions] == ["program", "cond", "branch", "branch"]
    assert graph.runs == (1.0, 1.0, 0.5, 0.5)
    outer, inner = graph.inputs[1], 3
    assert graph.place_of_conversion(outer, inner) == inner
    scanned = trace(stacked_layers, (floats(3, 8, 8), floats(240, 8))).graph
    assert scanned.place_of_conversion(scanned.inputs[1], 1) == 0


def test_frequencies_are_the_users_to_give(tmp_path: Any) -> None:
    """Gradient accumulation: the optimizer's branch and its communication are paid one time in eight."""

    def step(state: Any, x: Any) -> Any:
        w, acc, n = state
        g = acc + jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
        clipped = lambda: (w - 0.1 * g / jnp.sqrt((g**2).sum()), jnp.zeros_like(g), 0)
        return jax.lax.cond(n == 7, clipped, lambda: (w, g, n + 1))

    args = ((floats(64, 64), floats(64, 64), np.int32(0)), floats(240, 64))
    line = f"test_control.py:{step.__code__.co_firstlineno + 4}"
    rare, often = (
        hapsynth.synthesize(step, args, first_devices(4), cluster=thin_cluster(SPEEDS["3:1"], 1e8), expect={line: f})
        for f in (0.125, 1.0)
    )
    assert rare.traced.graph.runs[1:] == (1.0, 0.875, 0.125)
    assert rare.cost < often.cost
    assert rare.check(*args).ok
    rare.save(tmp_path / "plan.json")
    again = hapsynth.load(tmp_path / "plan.json", step, args, first_devices(4))
    assert again.traced.graph.runs == rare.traced.graph.runs
    loop = CASES["while"]
    long = hapsynth.synthesize(*loop, thin_cluster(SPEEDS["3:1"]), expect={"control_cases.py": 1000})
    assert long.cost > 50 * hapsynth.synthesize(*loop, thin_cluster(SPEEDS["3:1"]), expect={"control_cases.py": 1}).cost
    for expect, why in (
        ({"train.py:3": 0.5}, r"names 'train.py:3'; where .*: cond \(test_control.py:\d+\)"),
        ({line: [0.5]}, "sum to 1"),
        ({line: 1.5}, "sum to 1"),
        ({line: "often"}, "sum to 1"),
    ):
        with pytest.raises(ValueError, match=why):
            hapsynth.synthesize(step, args, thin_cluster(SPEEDS["3:1"]), expect=expect)
    with pytest.raises(ValueError, match="give its trips"):
        hapsynth.synthesize(*loop, thin_cluster(SPEEDS["3:1"]), expect={"control_cases.py": (1, 2)})


def test_decisions_of_floats_are_made_uniform() -> None:
    """Devices that round apart must not part ways: a float's test is reduced, an integer's is not."""
    for name, sure in (("while", True), ("while of floats", False), ("cond", True), ("cond of floats", False)):
        plan = plan_of(name, "3:1")
        assert (not plan.traced.graph.unsure) == sure
        text = plan.lower().as_text()
        reduced = re.findall(r"stablehlo\.all_reduce.*?\n.*?\n.*?maximum", text)
        assert bool(reduced) == (not sure), name


def test_what_integers_decide_around_a_decision_of_floats_is_not_agreed_on() -> None:
    def fn(x: Any, n: Any) -> Any:
        inner = lambda v: lax.cond(v.sum() > 0, jnp.sin, jnp.cos, v)
        x = lax.cond(n > 0, inner, jnp.tanh, x)
        x = lax.fori_loop(0, n, lambda i, v: inner(v), x)
        return lax.scan(lambda v, _: (inner(v), None), x, length=2)[0]

    args = np.ones(4, np.float32), 2
    plan = planned(fn, args, "two")
    around = [step for step in plan.lowered.steps if isinstance(step, Cond | Loop)]
    within = [step for s in around for part in (s.branches if isinstance(s, Cond) else [s.body]) for step in part]
    assert [step.unsure for step in around] == [False] * 3
    assert [step.unsure for step in within if isinstance(step, Cond)] == [True] * 3


def test_programs_survive_their_file(tmp_path: Any) -> None:
    for name in ("scanned layers", "nested", "while", "switch"):
        fn, args = CASES[name]
        plan = plan_of(name, "3:1")
        plan.save(tmp_path / "plan.json")
        again = hapsynth.load(tmp_path / "plan.json", fn, args, first_devices(4))
        assert again.program.text(again.traced.graph) == plan.program.text(plan.traced.graph)
        for a, b in zip(jax.tree.leaves(again(*args)), jax.tree.leaves(plan(*args)), strict=True):
            np.testing.assert_array_equal(again.unshard(a), plan.unshard(b))


def broken(plan: Plan, instructions: list[Any]) -> str:
    graph, program = plan.traced.graph, plan.program
    with pytest.raises(ProgramError) as error:
        check(graph, Program(program.axes, program.inputs, tuple(instructions), program.outputs))
    return str(error.value)


def test_the_checker_knows_regions() -> None:
    plan = plan_of("scanned layers", "3:1")
    graph, steps = plan.traced.graph, list(plan.program.instructions)
    assert "does not hold" in broken(plan, [i for i in steps if not isinstance(i, Convert)])
    # A body that does not carry on what it must.
    carry = next(n for n, i in enumerate(steps) if isinstance(i, Compute) and i.op in graph.ties)
    i = steps[carry]
    assert isinstance(i, Compute)
    other = next(t for t in plan.lowered.table[i.op].triples if t.operands == (R,))
    assert broken(plan, [*steps[:carry], Compute(i.op, (other,)), *steps[carry + 1 :]])
    # A collective moved out of the loop converts what exists only inside.
    inner = next(n for n, i in enumerate(steps) if isinstance(i, Convert) and i.region)
    moved = steps[inner]
    assert isinstance(moved, Convert)
    outside = moved._replace(region=0)
    assert broken(plan, [outside, *steps[:inner], *steps[inner + 1 :]])
    # A region in two pieces.
    last = max(n for n, i in enumerate(steps) if region_of(graph, i) == 1)
    assert "together" in broken(plan, [*steps[:last], *steps[last + 1 :], steps[last]])
    assert "no region" in broken(plan, [moved._replace(region=9), *steps])


def test_what_a_loop_leaves_is_known_only_after_it() -> None:
    def fn(x: Any) -> Any:
        return lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0] + 1

    plan = planned(fn, (floats(24, 8),))
    graph, steps = plan.traced.graph, list(plan.program.instructions)
    final = next(op for op in graph.ops if op.name == "add")
    n = next(n for n, i in enumerate(steps) if isinstance(i, Compute) and i.op == final.index)
    assert "does not hold" in broken(plan, [steps[n], *steps[:n], *steps[n + 1 :]])


def test_a_branch_does_not_lend_to_the_other() -> None:
    def fn(i: Any, x: Any) -> Any:
        return lax.cond(i > 0, lambda: jnp.sin(x).sum(), lambda: jnp.cos(x).sum())

    plan = planned(fn, (np.int32(1), floats(24, 8)))
    graph, steps = plan.traced.graph, list(plan.program.instructions)
    block = nested(graph, steps)
    assert {i.region for i in block.items if hasattr(i, "region")} == {1}
    sines = [i for i in steps if isinstance(i, Compute) and graph.ops[i.op].name == "sin"]
    assert len(sines) == 1
    assert broken(plan, [i for i in steps if i not in sines])


def test_a_while_loop_needs_its_test() -> None:
    plan = plan_of("while", "3:1")
    graph, steps = plan.traced.graph, list(plan.program.instructions)
    left = [i for i in steps if not (isinstance(i, Compute) and graph.ops[i.op].name == "loop_test")]
    assert "no test" in broken(plan, left)


def test_a_test_finds_only_what_is_carried() -> None:
    """It runs before the body: what the body makes of what is carried is not there."""
    plan = plan_of("while whose test communicates", "3:1")
    graph, steps = plan.traced.graph, list(plan.program.instructions)
    test = graph.test(1)
    inner = [n for n, i in enumerate(steps) if isinstance(i, Convert) and i.region == test]
    assert inner
    moved = steps[inner[0]]
    assert isinstance(moved, Convert)
    first = min(n for n, i in enumerate(steps) if region_of(graph, i) == test)
    rest = [i for n, i in enumerate(steps) if n != inner[0]]
    assert broken(plan, [*rest[:first], moved._replace(region=1), *rest[first:]])
    # Nor is a conversion in the body of what lives around it.
    outside = trace(lambda x: lax.while_loop(lambda c: c < x.sum(), lambda c: c + x[0, 0], 0.0), (floats(24, 8),)).graph
    rare = with_counts(outside, [1.0, 0.5, 1.0])
    assert rare.place_of_conversion(rare.inputs[0], rare.test(1)) == rare.test(1)
    assert outside.place_of_conversion(outside.inputs[0], outside.test(1)) == 0


def test_nothing_is_converted_between_branches() -> None:
    plan = plan_of("cond", "3:1")
    graph, steps = plan.traced.graph, list(plan.program.instructions)
    first = next(n for n, i in enumerate(steps) if region_of(graph, i))
    layout = plan.program.inputs[0]
    other = R if layout[0].is_sharded else S(0)
    between = Convert(0, 0, layout, (other,), 1)
    assert "none of its branches" in broken(plan, [*steps[:first], between, *steps[first:]])


def test_booleans_are_no_sums() -> None:
    plan = planned(lambda p, x: lax.cond(p, lambda: x, lambda: x * 2), (np.bool_(True), floats(24, 8)))
    assert "cannot be P(sum)" in broken(plan, [Convert(0, 0, (R,), (P("sum"),)), *plan.program.instructions])


def test_scanned_dimensions_stay_whole() -> None:
    graph = trace(stacked_layers, (floats(3, 8, 8), floats(240, 8))).graph
    table = plan_of("scanned layers", "3:1").lowered.table
    parts = [op for op in graph.ops if op.name == "scan_slice" and len(op.shapes[0]) == 3]
    assert parts
    for op in parts:
        assert S(0) not in {t.operands[0] for t in table[op.index].triples}
        assert {t.results[0] for t in table[op.index].triples if t.operands[0] == S(1)} == {S(0)}


def test_a_program_says_where_it_loops() -> None:
    plan = plan_of("nested", "3:1")
    text = plan.program.text(plan.traced.graph)
    assert re.search(r"^  scan \(control_cases.py:\d+\), 2 times:$", text, re.M)
    assert re.search(r"^    scan \(control_cases.py:\d+\), 5 times:$", text, re.M)
    assert re.search(r"^ +branch, 0.5 of the time:$", text, re.M)
    reverse = plan_of("scanned layers", "3:1")
    assert ", in reverse:" in reverse.program.text(reverse.traced.graph)


def test_dead_loops_and_carries_are_dropped() -> None:
    def fn(x: Any) -> Any:
        (a, _b, _c), ys = lax.scan(
            lambda c, y: ((c[0] + y, c[1] * 2, c[2] + c[1]), (y, jnp.sin(y))), (x[0], x[0], x[0]), x
        )
        lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))
        return a, ys[0]

    graph = trace(fn, (floats(24, 8),)).graph
    assert [op.name for op in graph.ops if op.region] == ["loop_carry", "scan_slice", "add"]
    assert len(graph.regions) == 2


def test_memory_of_a_chain_right_after_a_loop() -> None:
    """What the loop leaves is read by the very next instruction, in a chain that is stored later."""

    def fn(x: Any, w: Any) -> Any:
        h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)
        return jnp.abs(h) * 2

    plan = planned(fn, (floats(24, 8), floats(8, 8)))
    items = plan.program.instructions
    after = max(n for n, i in enumerate(items) if region_of(plan.traced.graph, i)) + 1
    assert isinstance(items[after], Compute)
    assert min(plan.memory) > 0


def test_memory_counts_what_a_loop_holds() -> None:
    """Stacked residuals lie in memory from one scan to the other."""
    args = lambda n: (jax.ShapeDtypeStruct((n, 64, 64), "float32"), jax.ShapeDtypeStruct((960, 64), "float32"))
    peaks = [max(hapsynth.synthesize(stacked_layers, args(n), replace(thin_cluster((1.0,)))).memory) for n in (4, 8)]
    residuals = 4 * 2 * 960 * 64 * 4
    assert peaks[1] - peaks[0] >= residuals


@pytest.mark.parametrize("on", ["equal", "3:1"])
def test_remat_is_rematerialised(on: str) -> None:
    """A body under `jax.checkpoint` computes its activations again in the compiled plan, and holds less."""

    def step_of(remat: bool) -> Any:
        layer = lambda h, wl: jnp.tanh(jnp.tanh(h @ wl) @ wl)
        layer = jax.checkpoint(layer) if remat else layer

        def step(w: Any, x: Any) -> Any:
            loss = lambda w: (lax.scan(lambda h, wl: (layer(h, wl), None), x, w)[0] ** 2).mean()
            value, g = jax.value_and_grad(loss)(w)
            return w - 0.1 * g, value

        return step

    args = (jax.ShapeDtypeStruct((4, 64, 64), "float32"), jax.ShapeDtypeStruct((2400, 64), "float32"))
    plain, remat = (planned(step_of(r), args, on) for r in (False, True))
    counts: list[int] = []
    held: list[int] = []
    for plan in (plain, remat):
        compiled = plan.lower().compile()
        counts.append(len(re.findall(r"\btanh\(", compiled.as_text())))
        held.append(compiled.memory_analysis().temp_size_in_bytes)
        assert 0.5 < held[-1] / max(plan.memory) < 2
    assert counts[1] == 2 * counts[0]
    assert held[1] < 0.7 * held[0]
    assert max(remat.memory) < 0.7 * max(plain.memory)
