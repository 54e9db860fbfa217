"""The staged form with overlap: collectives on a thread of their own, the same values as one after another."""

from __future__ import annotations

import random
import re
import threading
import time
import weakref
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import CASES
from example_models import TINY, example, start
from jax.sharding import Mesh
from lowered_programs import CASES as PROGRAMS
from lowered_programs import MODES, SEEDS, assert_close
from random_programs import RandomProgram, floats
from slow_devices import SPEEDS, first_devices, thin_cluster
from thoroughness import THOROUGH

import hapsynth
from hapsynth import _jax
from hapsynth.graph.ir import Literal
from hapsynth.graph.trace import trace
from hapsynth.instructions.layout import R, S
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Compute, Convert, Instruction, Program
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.lower import Staged
from hapsynth.lower._collective_thread import OverlappedCall, Transfer
from hapsynth.lower._host_schedule import CollectiveStage, HostLoop, LocalStage
from hapsynth.lower._staged_form import Run
from hapsynth.running.form import Form, no_overlap
from hapsynth.search.memory.profile import MemoryProfile


def overlapping(plan: hapsynth.Plan) -> Staged:
    graph, program, sizes = plan.traced.graph, plan.program, plan.sizes
    return Staged(graph, program, sizes, plan.mesh, overlap=True)


def results(staged: Staged, leaves: Any) -> list[Any]:
    stored = [s.put(x, copy=True) for s, x in zip(staged.inputs, leaves, strict=True)]
    return [x if s is None else s.fetch(x) for s, x in zip(staged.outputs, staged(stored), strict=True)]


def planned(fn: Any, args: Any, on: str, **options: Any) -> hapsynth.Plan:
    cluster = thin_cluster(SPEEDS[on])
    return hapsynth.synthesize(
        fn, args, first_devices(cluster.n), cluster=cluster, leave_out=False, form="staged", **options
    )


def layers(ws: Any, x: Any) -> Any:
    """Two layers; the gradients of both are partial sums, in whole numbers."""
    forward = lambda ws: (((x @ ws[0]) @ ws[1]) ** 2).sum()
    return [w - g for w, g in zip(ws, jax.grad(forward)(ws), strict=True)], forward(ws)


LAYERS = [np.eye(8, dtype=np.float32), np.ones((8, 8), np.float32)], np.arange(96, dtype=np.float32).reshape(12, 8)


def data_parallel() -> hapsynth.Plan:
    return planned(layers, LAYERS, "two", fixed={"[0][0]": "R", "[0][1]": "R", "[1]": "S(0)"})


# On equal devices all are of one shape, for which one example is enough; larger ones in stages are test_staged.py's.
EXAMPLES = [("mlp", "equal"), *((name, "3:1") for name in TINY)] if THOROUGH else [("mlp", "3:1")]


@pytest.mark.parametrize(("name", "on"), EXAMPLES)
def test_examples(name: str, on: str) -> None:
    module = example(name)
    config = module.Config(**TINY[name] | ({"layers": 1} if name == "transformer" else {}))
    fn, _ = module.target_for(config)
    args = start(module, config)
    plan = planned(fn, args, on)
    assert_close(results(overlapping(plan), jax.tree.leaves(args)), jax.jit(fn)(*args))


ON_TWO = (("a", 2), ("b", 2))
# A larger step's programs are of hundreds of stages, each of which compiles for each shape.
DRAWN = [("chain", axes, mode) for axes in (4, ON_TWO) for mode in MODES]
DRAWN += [("layers", 4, "skewed"), ("layers", ON_TWO, "zeros")]


def assert_right_at_random(fn: Any, args: Any, axes: Any, mode: str, seed: int, devices: int) -> None:
    """A random program of a function computes with overlap what `jax.jit` does; of one mode in its own order."""
    traced = trace(fn, args)
    maker = RandomProgram(traced.graph, axes, random.Random(seed))
    program = maker.build()
    sizes = maker.sizes(program, mode)
    check(traced.graph, program, sizes)
    spare_bytes = 0 if mode == "zeros" else inf
    staged = Staged(traced.graph, program, sizes, first_devices(devices), overlap=True, spare_bytes=spare_bytes)
    assert_close(results(staged, jax.tree.leaves(args)), jax.jit(fn)(*args))


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "axes", "mode"), DRAWN)
def test_random_programs(name: str, axes: Any, mode: str) -> None:
    fn, args = (layers, LAYERS) if name == "layers" else (PROGRAMS[name][0], PROGRAMS[name][1]())
    for seed in SEEDS:
        assert_right_at_random(fn, args, axes, mode, seed, devices=4)


# In their bodies what collectives bring is computed with and sent again.
IN_LOOPS = ["scanned layers", "nested", "while whose test communicates", "carries on the outside"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", IN_LOOPS)
def test_random_programs_with_loops(name: str) -> None:
    for seed in SEEDS:
        assert_right_at_random(*CASES[name], 3, "skewed", seed + 1, devices=3)


@pytest.mark.parametrize("name", ["nested", "while", "invariant", "swapped", "literals"])
def test_loops_are_barriers(name: str) -> None:
    fn, args = CASES[name]
    plan = planned(fn, args, "two")
    staged = overlapping(plan)
    assert any(isinstance(item, HostLoop) for item in staged.items) or name in ("swapped", "literals")
    assert_close(results(staged, jax.tree.leaves(args)), jax.jit(fn)(*args))
    under_way = set[int]()
    for item in staged.items:
        if isinstance(item, CollectiveStage):
            under_way.add(id(item))
        elif isinstance(item, LocalStage):
            under_way -= set(map(id, item.arrives))
        else:
            assert not under_way
    assert not under_way


def test_where_nothing_can_overlap_it_is_said() -> None:
    plan = data_parallel()
    again = lambda form: hapsynth.Plan(
        plan.traced, plan.result, plan.cluster, plan.mesh, plan.fn, form=form, overlap=True
    )
    why = "one process holds all devices"
    for form in ("staged", "switch"):
        with pytest.warns(hapsynth.OverlapWarning, match=f"{why}.*runs without"):
            other = again(form)
        assert not other.overlap
        assert why in other.overlap_reason
        assert other.program == plan.program
        assert_close(jax.tree.leaves(other.unshard(other(*LAYERS))), jax.jit(layers)(*LAYERS))
    without = hapsynth.Plan(plan.traced, plan.result, plan.cluster, overlap=True)
    assert (without.overlap, without.overlap_reason) == (False, "the plan was made without its devices")


@pytest.mark.parametrize("exact", [False, True])
def test_a_plan_made_without_overlap_says_what_it_holds_with(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is held beside what is computed meanwhile; where a device has no room for it, nothing is."""
    plan = data_parallel()
    monkeypatch.setattr("hapsynth.running.base.no_overlap", lambda *_, **__: "")
    result = replace(plan.result, exact=exact)
    again = lambda result: hapsynth.Plan(
        plan.traced, result, plan.cluster, plan.mesh, plan.fn, form="staged", overlap=True
    )
    other = again(result)
    costs, under_way = other.cost_model(), other.timeline.under_way
    assert other.overlap
    assert under_way
    want = MemoryProfile(other.program, plan.sizes.classes, costs, under_way).peaks(plan.sizes)
    assert other.memory == want
    assert max(other.held_bytes) > max(plan.held_bytes)
    short = replace(result, memory_limit_bytes=tuple(b - 1 for b in other.held_bytes))
    with pytest.warns(hapsynth.OverlapWarning, match="on device 0, which has .*: it runs without"):
        without = again(short)
    assert not without.overlap
    assert (without.program, without.memory) == (plan.program, plan.memory)


EVEN, UNEVEN, UNLIKE = (1, 1, 1), (1, 1, 2), (1, 2, 2)


@pytest.mark.parametrize(
    ("platform", "form", "shares", "why"),
    [
        ("cuda", "auto", UNEVEN, ""),
        ("cuda", "fused", UNEVEN, ""),
        ("cuda", "switch", EVEN, ""),
        ("cuda", "switch", UNEVEN, "computing in conditionals, which run alone: give form='fused'"),
        (
            "cuda",
            "switch",
            UNLIKE,
            "run alone: process 0 holds devices of unlike shares.* start a process for each device",
        ),
        ("cuda", "staged", EVEN, "within one program alone: give form='fused'"),
        ("cuda", "staged", UNLIKE, "alone: process 0 holds devices of unlike shares.* start a process for each device"),
        ("tpu", "auto", UNEVEN, "on CPUs and GPUs, and these devices are tpu"),
        ("cpu", "auto", UNEVEN, ""),
        ("cpu", "fused", UNEVEN, ""),
        ("cpu", "staged", UNEVEN, ""),
        ("cpu", "switch", EVEN, ""),
        ("cpu", "switch", UNEVEN, "computing in conditionals, which run alone: give form='fused'"),
    ],
)
def test_in_which_form_collectives_run_beside_computing(
    platform: str, form: Form, shares: tuple[int, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mesh of several processes."""
    monkeypatch.setenv("NPROC", "2")
    devices = np.array([SimpleNamespace(platform=platform, process_index=p) for p in (0, 0, 1)], dtype=object)
    mesh = cast("Mesh", SimpleNamespace(devices=devices, is_multi_process=True))
    classes = SimpleNamespace(all=[SimpleNamespace(axes=(0,))], lengths=(3,))
    found = no_overlap(form, mesh, cast("Sizes", SimpleNamespace(classes=classes, shares=[shares])))
    assert re.search(why, found) if why else not found


@pytest.mark.parametrize(
    ("dispatches", "threads", "beside"), [(True, "1", False), (True, "2", True), (False, "1", True)]
)
def test_one_thread_of_xla_is_too_few(
    dispatches: bool, threads: str, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPROC", threads)
    monkeypatch.setattr(jax, "local_device_count", lambda *_: 1)
    monkeypatch.setattr(jax.config, "read", lambda _: dispatches)
    found = _jax.runs_beside()
    monkeypatch.undo()
    assert found == beside


def test_an_error_of_a_collective_is_raised_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = overlapping(data_parallel())
    leaves = jax.tree.leaves(LAYERS)
    want = results(staged, leaves)
    first, *others = (item for item in staged.items if isinstance(item, CollectiveStage))
    assert others
    ran: list[str] = []

    def fails(*_: Any) -> Any:
        ran.append(threading.current_thread().name)
        raise ValueError("a lost connection")

    noted = lambda run: lambda *operands: ran.append("another") or run(*operands)
    compiled = {**staged.compiled, first: [fails], **{item: [noted(staged.compiled[item][0])] for item in others}}
    monkeypatch.setattr(staged, "compiled", compiled)
    with pytest.raises(ValueError, match="a lost connection"):
        results(staged, leaves)
    # None of the others starts after it.
    assert ran == ["hapsynth-collectives"]
    monkeypatch.undo()
    assert_close(results(staged, leaves), want)


def test_an_error_in_a_stage_is_raised_when_the_collective_under_way_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = overlapping(data_parallel())
    leaves = jax.tree.leaves(LAYERS)
    want = results(staged, leaves)
    local, serve, running, ended = Run.local, Transfer.serve, threading.Event(), list[bool]()

    def fails(self: Run, stage: LocalStage) -> None:
        if self.under_way:
            running.wait()
            raise ValueError("a bad stage")
        local(self, stage)

    def slowly(self: Transfer) -> None:
        running.set()
        time.sleep(0.2)
        serve(self)

    monkeypatch.setattr(Run, "local", fails)
    monkeypatch.setattr(Transfer, "serve", slowly)
    ends = Transfer.ends
    monkeypatch.setattr(Transfer, "ends", lambda self: (ends(self), ended.append(self._done.is_set()))[0])
    with pytest.raises(ValueError, match="a bad stage"):
        results(staged, leaves)
    assert ended
    assert all(ended)
    monkeypatch.undo()
    assert_close(results(staged, leaves), want)


def by_rows(fn: Any, args: Any, **options: Any) -> Staged:
    """Of arrays of six rows, of which each of two devices has three. All arguments but the last are gathered before
    each op that takes them, and partial results are reduced."""
    graph = trace(fn, args, carry=[]).graph
    table, weights, held = FactorTable(graph), {*graph.inputs[:-1]}, dict.fromkeys(graph.inputs, S(0))
    instructions: list[Instruction] = []
    for op in graph.ops:
        for _, v in op.value_operands:
            if v in weights:
                instructions.append(Convert(v, 0, (S(0),), (R,)))
        taken = tuple(R if isinstance(o, Literal) or o in weights else held[o] for o in op.operands)
        triple = next(t for t in table[op.index].triples if t.operands == taken)
        instructions.append(Compute(op.index, (triple,)))
        held.update(zip(op.results, triple.results, strict=True))
    (out,) = graph.outputs
    assert isinstance(out, int)
    if held[out].is_partial:
        instructions.append(Convert(out, 0, (held[out],), (R,)))
        held[out] = R
    program = Program((("hap", 2),), dict.fromkeys(graph.inputs, (S(0),)), (*instructions,), ((held[out],),))
    classes = Classes.build(graph, program, table)
    sizes = Sizes(graph, classes, ((3, 3),) * len(classes.all))
    check(graph, program, sizes)
    return Staged(graph, program, sizes, first_devices(2), overlap=True, **options)


def under_way(staged: Staged) -> list[int]:
    """How many collectives are when each local stage begins."""
    found, now = list[int](), dict[CollectiveStage, None]()
    for item in staged.items:
        if isinstance(item, CollectiveStage):
            now[item] = None
        elif isinstance(item, LocalStage):
            found.append(len(now))
            for stage in item.arrives:
                now.pop(stage)
    assert not now
    return found


def test_where_memory_is_short_collectives_start_where_the_program_has_them() -> None:
    fn = lambda u, v, w, x: ((x @ u) @ v) @ w
    args = [floats(6, 6) for _ in range(4)]
    early, within = (by_rows(fn, args, spare_bytes=nbytes) for nbytes in (1 << 20, 64))
    assert max(under_way(early)) == 3
    assert max(under_way(within)) == 1
    assert_close(results(within, args), [fn(*args)])


@pytest.mark.parametrize("fn", [lambda w, x: (x @ w) @ w, lambda w, x: (x @ w.T) @ w.T], ids=["product", "transposed"])
def test_what_is_gathered_again_was_taken_before(fn: Any) -> None:
    args = [floats(6, 6), floats(6, 6)]
    staged = by_rows(fn, args)
    assert max(under_way(staged)) == 1
    assert_close(results(staged, args), [fn(*args)])


def test_much_may_wait_for_one_collective() -> None:
    def fn(w: Any, x: Any) -> Any:
        x = x @ w
        for _ in range(1000):
            x = jnp.sin(x)
        return x.sum()

    staged = by_rows(fn, [floats(6, 6), floats(6, 6)])
    assert under_way(staged) == [0, 1, 1]


def test_what_was_handed_over_is_freed_at_once() -> None:
    call = OverlappedCall()
    first, last = (call.start(tuple, ()) for _ in range(2))
    # By then the thread has dropped the first.
    last.wait()
    held = weakref.ref(first)
    del first, last, call
    assert held() is None


def test_a_gradient_is_sent_before_the_next_is_computed() -> None:
    staged = overlapping(data_parallel())
    sent = [n for n, item in enumerate(staged.items) if isinstance(item, CollectiveStage)]
    arrives = [n for n, item in enumerate(staged.items) if isinstance(item, LocalStage) and item.arrives]
    assert len(sent) >= 2
    # Something is computed between the start of the first and where it is needed.
    first = staged.items[sent[0]]
    needed = next(n for n in arrives if first in staged.items[n].arrives)
    assert any(isinstance(item, LocalStage) and item.steps for item in staged.items[sent[0] + 1 : needed])
