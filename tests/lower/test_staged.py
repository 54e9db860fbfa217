"""The staged form: local stages on exact shapes and collective stages between them, the same values as the switch form.

Each process compiles its own stages; here groups of one process's devices that are alike stand for processes.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import CASES, assert_same, floats
from example_models import TINY, example, start
from jax import lax
from lowered_programs import assert_close, chain
from random_programs import RandomProgram
from slow_devices import SPEEDS, first_devices, thin_cluster
from unflatten import unflattened

import hapsynth
from hapsynth.graph.trace import trace
from hapsynth.instructions.layout import S
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Convert, Program
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.lower import Shards, Staged, UnsupportedError
from hapsynth.lower._host_schedule import CollectiveStage, HostCond, HostLoop, LocalStage
from hapsynth.lower._interpreter import Interpreter
from hapsynth.plan import Form, Plan
from hapsynth.running.form import chosen_form


def in_form(plan: Plan, form: Form) -> Plan:
    """The same plan in a form."""
    return Plan(plan.traced, plan.result, plan.cluster, plan.mesh, plan.fn, form=form)


def planned(fn: Any, args: Any, on: str, **options: Any) -> Plan:
    speeds = SPEEDS[on]
    cluster = thin_cluster(speeds)
    options = {"form": "staged", **options}
    return hapsynth.synthesize(fn, args, first_devices(len(speeds)), cluster=cluster, leave_out=False, **options)


def without_rows(plan: Plan) -> Plan:
    """The plan with the second device's shard of everything given to the first."""
    shares = tuple((s[0] + s[1], 0, *s[2:]) for s in plan.sizes.shares)
    result = replace(plan.result, sizes=Sizes(plan.traced.graph, plan.sizes.classes, shares))
    return Plan(plan.traced, result, plan.cluster, plan.mesh, plan.fn)


@pytest.mark.parametrize("name", ["nested", "while", "keys", "invariant"])
def test_loops_and_branches_are_run_by_the_host(name: str) -> None:
    fn, args = CASES[name]
    plan = planned(fn, args, "two")
    for _ in range(2):
        assert_same(plan, plan(*args), jax.jit(fn)(*args))
    assert plan.lowered.traces == 1
    assert isinstance(plan.lowered, Staged)
    kinds = {type(item) for item in plan.lowered.items}
    # Bodies without collectives stay in a stage.
    assert kinds == {LocalStage} if name == "keys" else HostLoop in kinds


# On equal devices all are of one shape, for which one example is enough.
@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "on"), [("mlp", "equal"), *((name, "3:1") for name in TINY)])
def test_examples_train_as_in_switch_form(name: str, on: str) -> None:
    module = example(name)
    config = module.Config(**TINY[name] | ({"layers": 1} if name == "transformer" else {}))
    fn, _ = module.target_for(config)
    state, batch = start(module, config)
    staged = planned(fn, (state, batch), on)
    switch = in_form(staged, "switch")
    assert len(staged.lowered.groups) == len(set(zip(*staged.sizes.shares, strict=True)))
    want, want_loss = jax.jit(fn)(*jax.jit(fn)(state, batch)[:1], batch)
    for plan in (staged, switch):
        kept, given = plan.shard(state, batch)
        for _ in range(2):
            kept, loss = plan(kept, given)
        assert_same(plan, (kept, loss), (want, want_loss), 2e-4)
        assert plan.lowered.traces == 1


def step(w: Any, x: Any) -> Any:
    """The gradient is partial, and the state cut."""
    return w - 0.1 * x.T @ jnp.tanh(x @ w), (x**2).sum()


STEP = floats(20, 12), floats(48, 20)


@cache
def cut_step(on: str) -> Plan:
    return planned(step, STEP, on, fixed={"[0]": "S(0)", "[1]": "S(0)"})


def test_shards_are_stored_at_their_exact_size() -> None:
    plan = cut_step("3:1")
    w, x = plan.shard(*STEP)
    for value, whole in zip((w, x), STEP):
        assert isinstance(value.data, Shards)
        assert [a.shape for a in value.data.arrays] == list(value.shard_shapes)
        assert [a.devices() for a in value.data.arrays] == [{d} for d in plan.mesh.devices.flat]
        # All bytes together are the value's, none of padding; the switch form stores more.
        assert value.data.nbytes == whole.nbytes
        assert in_form(plan, "switch").shard(*STEP)[0].data.nbytes > STEP[0].nbytes
    made, _ = plan(w, x)
    assert made.data.nbytes == STEP[0].nbytes


def test_carried_state_is_consumed_and_nothing_else() -> None:
    plan = cut_step("3:1")
    w, x = plan.shard(*STEP)
    made, _ = plan(w, x)
    assert w.is_deleted()
    assert not x.is_deleted()
    with pytest.raises(RuntimeError, match="a plan consumes carried state"):
        plan(w, x)
    again, _ = plan(made, x)
    once = step(*STEP)[0]
    np.testing.assert_allclose(plan.unshard(again), step(once, STEP[1])[0], rtol=1e-5, atol=1e-5)
    doubled = plan.map(lambda a: 2 * a, again)
    np.testing.assert_array_equal(plan.unshard(doubled), 2 * plan.unshard(again))
    assert plan.check(*STEP).ok
    assert plan.lowered.traces == 1


def test_values_of_less_than_a_byte() -> None:
    """They are right, or the error says what to do (JAX 0.10.2)."""
    q, x = np.arange(-8, 8).astype(jnp.int4).reshape(4, 4), np.ones((8, 4), np.float32)
    plan = planned(lambda q, x: x @ q.astype(jnp.float32), (q, x), "two")
    for each in (plan, in_form(plan, "switch")):
        refused = each is plan and jax.__version_info__ < (0, 11)
        said = "JAX .* can't pass int4 to .* as int8 .* form='switch'"
        with pytest.raises(UnsupportedError, match=said) if refused else nullcontext():
            np.testing.assert_array_equal(each.unshard(each(*each.shard(q, x))), x @ q.astype(np.float32))


@pytest.mark.parametrize("form", ["staged", "switch"])
def test_plans_are_compiled_where_jax_compiles_no_functions(form: Any) -> None:
    plan = in_form(cut_step("3:1"), form)
    with jax.disable_jit():
        made, _ = plan(*plan.shard(*STEP))
        np.testing.assert_allclose(plan.unshard(made), step(*STEP)[0], rtol=1e-5, atol=1e-5)


def test_what_lies_in_the_other_form_is_taken() -> None:
    plan = cut_step("3:1")
    switch = in_form(plan, "switch")
    for one, other in ((plan, switch), (switch, plan)):
        w, x = one.shard(*STEP)
        assert_same(other, [other.unshard(a) for a in other(w, x)], [np.asarray(a) for a in step(*STEP)])
        assert not w.is_deleted()


def test_state_is_adopted_from_the_other_form() -> None:
    plan = cut_step("3:1")
    switch = in_form(plan, "switch")
    for one, other in ((plan, switch), (switch, plan)):
        w, _ = one.shard(*STEP)
        moved = other.adopt(w, one)
        # What is freed is not the memory of what was made of it.
        assert (w.is_deleted(), moved.is_deleted()) == (True, False)
        np.testing.assert_array_equal(other.unshard(moved), STEP[0])


def test_a_mesh_of_two_axes() -> None:
    """The shards of one axis cut again by a second one; devices that are alike are one group."""
    flat = cut_step("3:1")
    program, sizes = unflattened(flat.traced.graph, flat.program, flat.sizes, 2)
    check(flat.traced.graph, program, sizes)
    result = replace(flat.result, program=program, sizes=sizes)
    plan = Plan(flat.traced, result, flat.cluster, flat.mesh, flat.fn, form="staged")
    assert [group.positions for group in plan.lowered.groups] == [((0, 0), (0, 1)), ((1, 0), (1, 1))]
    w, x = plan.shard(*STEP)
    assert [a.shape for a in w.data.arrays] == list(w.shard_shapes)
    made, loss = plan(w, x)
    assert (w.is_deleted(), x.is_deleted()) == (True, False)
    assert_same(plan, [plan.unshard(made), plan.unshard(loss)], [np.asarray(a) for a in step(*STEP)])
    assert_same(plan, plan.unshard(in_form(plan, "switch").adopt(made, plan)), np.asarray(step(*STEP)[0]))


def test_a_random_program_of_two_axes() -> None:
    """All four devices unlike, some with nothing."""
    args = (floats(8, 5), floats(5, 3))
    traced = trace(chain, args)
    maker = RandomProgram(traced.graph, (("a", 2), ("b", 2)), random.Random(1))
    program = maker.build()
    sizes = maker.sizes(program, "zeros")
    check(traced.graph, program, sizes)
    staged = Staged(traced.graph, program, sizes, first_devices(4))
    made = staged([s.put(x, copy=True) for s, x in zip(staged.inputs, args, strict=True)])
    assert_close([s.fetch(x) for s, x in zip(staged.outputs, made, strict=True) if s], jax.jit(chain)(*args))


def test_a_scan_without_iterations_that_the_host_runs() -> None:
    fn, args = CASES["no iterations"]
    traced = trace(fn, args)
    maker = RandomProgram(traced.graph, 4, random.Random(0))
    program = maker.build()
    sizes = maker.sizes(program, "skewed")
    staged = Staged(traced.graph, program, sizes, first_devices(4))
    assert any(isinstance(item, HostLoop) for item in staged.items)
    made = staged([s.put(x, copy=True) for s, x in zip(staged.inputs, args, strict=True)])
    got = [x if s is None else s.fetch(x) for s, x in zip(staged.outputs, made, strict=True)]
    assert_close(got, jax.jit(fn)(*args))


def pairs(x: Any) -> Any:
    """Sums that are equal, and no function of the loop, where there are no rows."""
    c = lax.fori_loop(0, 3, lambda i, c: c + (x * c).sum() * 0.1, 1.0)
    return x.sum(), (x * x).sum(), c


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_a_shard_without_rows_after_a_reduce_scatter(form: Form) -> None:
    plan = in_form(without_rows(cut_step("3:1")), form)
    assert plan.program.collectives()["reduce_scatter"] == 1
    w, x = plan.shard(*STEP)
    assert w.sizes[1] == 0
    assert_same(plan, [plan.unshard(a) for a in plan(w, x)], [np.asarray(a) for a in step(*STEP)])


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_reductions_to_which_one_device_adds_a_constant(form: Form) -> None:
    x = floats(24, 8)
    plan = planned(pairs, (x,), "two", fixed={"[0]": "S(0)"})
    # Without rows its sums are zero: a constant, the same for both reductions, and in every iteration.
    assert plan.program.collectives()["all_reduce"] >= 2
    plan = in_form(without_rows(plan), form)
    assert plan.shard(x).sizes[1] == 0
    assert_same(plan, plan(x), jax.jit(pairs)(x))


def until(x: Any) -> Any:
    """Doubles until a float reaches a number that it meets exactly on one device, and just misses on the others."""
    steps, y = lax.while_loop(lambda c: c[1].mean() < 4.0, lambda c: (c[0] + 1, c[1] * 2), (0, x))
    return steps, lax.cond(y.mean() < 4.0, lambda: y.sum(0), lambda: y.max(0))


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_a_float_that_decides_and_differs_by_one_ulp(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Interpreter._compute

    def rounding(self: Interpreter, i: Any, env: Any, here: Any) -> list[Any]:
        made = compute(self, i, env, here)
        # The mean of the while loop or the cond: rounded down on every device but the first.
        if self.graph.ops[i.op].name == "div" and made[0].shape == ():
            made[0] = jnp.where(here.index[0] == 0, made[0], jnp.nextafter(made[0], jnp.float32(0)))
        return made

    monkeypatch.setattr(Interpreter, "_compute", rounding)
    x = np.ones((24, 8), np.float32)
    plan = planned(until, (x,), "two", form=form)
    steps, y = plan(x)
    # All go on while any does.
    assert int(steps) == 3
    np.testing.assert_array_equal(plan.unshard(y), np.full(8, 8.0))


def test_neighbouring_collectives_are_one_stage() -> None:
    plan = planned(lambda x: (x.sum(), (x * x).sum(), x.max()), (floats(24, 8),), "two", fixed={"[0]": "S(0)"})
    stages = [item for item in plan.lowered.items if isinstance(item, CollectiveStage)]
    assert plan.program.collectives() == {"all_reduce": 3}
    assert [len(s.steps) for s in stages] == [3]
    # Both sums go as one.
    assert plan.lower().as_text().count("all_reduce") == 2
    assert plan.lower().compile().as_text().count(" all-reduce(") == 2


def test_what_arrives_is_as_it_is_used() -> None:
    """A device's part of what goes over the wire is the tensor itself, so that it need not be copied; a number has a
    dimension."""
    plan = planned(lambda x: (x * 2, x.sum(0), x.max()), (floats(24, 8),), "two", fixed={"[0]": "S(0)"})
    staged = plan.lowered
    (stage,) = (item for item in staged.items if isinstance(item, CollectiveStage))
    shapes = {wire.steps[0].step: staged.arrived(wire).shape for wire in staged.sent(stage.steps)}
    assert shapes == {"reduce_scatter": (4,), "all_reduce": (1,)}


def test_shards_without_elements_have_their_own_shapes() -> None:
    """Of devices that run as a group, for which JAX joins them."""
    x = np.arange(96, dtype=np.float32).reshape(12, 8)
    graph = replace(trace(lambda x: x, (x,)).graph, carry=())
    program = Program((("d", 4),), {0: (S(0),)}, (Convert(0, 0, (S(0),), (S(1),)),), ((S(1),),))
    sizes = Sizes(graph, Classes.build(graph, program), ((0, 0, 11, 1), (0, 0, 7, 1)))
    check(graph, program, sizes)
    staged = Staged(graph, program, sizes, first_devices(4), donate=False)
    (made,) = staged([staged.inputs[0].put(x, copy=True)])
    assert [part.shape for part in made.arrays] == [(12, 0), (12, 0), (12, 7), (12, 1)]
    assert staged.outputs[0] is not None
    np.testing.assert_array_equal(staged.outputs[0].fetch(made), x)


def test_the_form_and_its_reason() -> None:
    plan = cut_step("3:1")
    assert (plan.form, in_form(plan, "auto").form) == ("staged", "switch")
    assert "asked" in plan.form_reason
    assert "one process" in in_form(plan, "auto").form_reason
    with pytest.raises(ValueError, match="'auto', 'switch', 'staged' or 'fused'"):
        in_form(plan, "whole")  # type: ignore[arg-type]


def test_the_form_where_one_of_several_processes_holds_unlike_shares() -> None:
    """Stages, but where a loop would start them in every trip."""
    among: Any = SimpleNamespace(is_multi_process=True, devices=np.array(jax.devices()[:4]))
    chosen = lambda plan: chosen_form(plan.traced.graph, plan.result, among, "")
    assert chosen(cut_step("3:1"))[0] == "staged"

    def looping(w: Any, x: Any) -> Any:
        return lax.scan(lambda h, _: (jnp.tanh(x @ (w.T @ h)), None), x[:, 0], None, length=3)[0]

    args, fixed = (floats(24, 24), floats(24, 24)), {"[0]": "S(1)", "[1]": "S(0)"}
    plan = planned(looping, args, "3:1", fixed=fixed)
    assert any(isinstance(i, Convert) and i.is_collective and i.region for i in plan.program.instructions)
    form, why = chosen(plan)
    assert form == "switch"
    assert "loop" in why


def test_branches_with_collectives_are_picked_by_the_host() -> None:
    fn, (x, _) = CASES["switch"]
    plan = planned(fn, (x, np.int32(2)), "two")
    assert any(isinstance(item, HostCond) for item in plan.lowered.items)
    for i in (-1, 1, 2, 7):
        assert_same(plan, plan(x, np.int32(i)), jax.jit(fn)(x, np.int32(i)))
