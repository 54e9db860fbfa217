"""Orders in which a program holds less."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from example_models import example
from sized_steps import three_layers
from slow_devices import SPEEDS, thin_cluster

import hapsynth
from hapsynth.cluster.memory_budget import MemoryBudget
from hapsynth.graph.trace import trace
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Compute, Convert, Program
from hapsynth.search.analysis.lifetimes import Tensor
from hapsynth.search.memory.profile import MemoryProfile, peak
from hapsynth.search.planning.baselines import Baseline, Baselines
from hapsynth.search.planning.memory_bound_schedules import schedules_holding_less
from hapsynth.search.planning.task import Task
from hapsynth.search.scheduling.timeline import Timeline, program_timeline, simulate, step_seconds


def forward(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in ws:
        x = jax.numpy.tanh(x @ w)
    return x


def planned(**options: Any) -> hapsynth.Plan:
    """Weights of falling size, stored cut and used whole: gathers, which nothing keeps from starting at once."""
    widths = (256, 256, 128, 128, 64, 64, 32)
    args = [np.zeros(shape, np.float32) for shape in pairwise(widths)], np.zeros((512, 256), np.float32)
    fixed = {f"[0][{k}]": "S(0)" for k in range(6)} | {"[1]": "S(0)"}
    cluster = thin_cluster(SPEEDS["two"], bandwidth=1e8)
    return hapsynth.synthesize(forward, args, cluster, leave_out=False, fixed=fixed, **options)


def ops(program: Program) -> list[int]:
    return sorted(i.op for i in program.instructions if isinstance(i, Compute))


def seconds(plan: hapsynth.Plan) -> float:
    """With overlap, in a plan's own order."""
    return step_seconds(plan.program, plan.sizes, plan.cost_model(), overlap=True)


def test_less_is_held_the_more_tensors_stay_in_order() -> None:
    plan = planned(memory_limit=3 << 19)
    costs, held = plan.cost_model(), list[float]()
    for program in schedules_holding_less(plan.program, plan.sizes, costs):
        check(plan.traced.graph, program, plan.sizes)
        assert ops(program) == ops(plan.program)
        held.append(peak(program, plan.sizes, costs))
    assert held == sorted(held, reverse=True)
    assert held[0] > held[-1] == peak(plan.program, plan.sizes, costs)


def test_what_is_sent_is_held_until_it_has_arrived() -> None:
    """Sums of gradients that go beside the rest of the backward pass; where they do not fit so, they wait."""

    def step(ws: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        loss = lambda ws: (forward(ws, x) ** 2).mean()
        return [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws), strict=True)]

    floats = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    cluster = thin_cluster(SPEEDS["equal"], bandwidth=1e8)
    options = {"leave_out": False, "carry": [("[0]", "")], "fixed": {"[1]": "S(0)"}, "overlap": True}
    later = 0
    for limit in (4.2e6, 4e6):
        plan = hapsynth.synthesize(
            step, ([floats(512, 512)] * 4, floats(256, 512)), cluster, memory_limit=limit, **options
        )
        costs = plan.cost_model()
        held = MemoryProfile(plan.program, plan.sizes.classes, costs, plan.timeline.under_way)
        assert held.peaks(plan.sizes) == plan.memory
        assert max(plan.memory) <= limit
        later += max(plan.memory) > peak(plan.program, plan.sizes, costs)
    assert later


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_under_way_is_counted_once_and_until_it_ends(exact: bool) -> None:
    """Whatever else reads what is sent; what arrives is in the buffer that was given until then."""
    plan = planned()
    program, sizes, costs = plan.program, plan.sizes, plan.cost_model()
    room = MemoryBudget.of(costs.cluster, exact=exact)
    costs = costs.on(costs.cluster, room)
    gathers = [i for i, step in enumerate(program.instructions) if isinstance(step, Convert) and step.is_collective]
    first, last = gathers[0], len(program.instructions) - 1
    apart = MemoryProfile(program, sizes.classes, costs)
    beside = MemoryProfile(program, sizes.classes, costs, {first: last})
    (sent,), (given,) = apart.index.accesses[first]
    step = program.instructions[first]
    for n, tensor in enumerate(beside.tensors):
        mine, alone = beside.buffers[n], apart.buffers[n]
        if (tensor.value, tensor.layout) == given:
            assert mine.start == (alone.start if not exact else beside.phases * (last + 2) - 1)
        else:
            assert (mine.start, mine.stop) == (alone.start, alone.stop)
    assert isinstance(step, Convert)
    # An argument stays anyway; of what is made the last reader may be before the collective's end.
    made = Tensor(*sent, first - 1, first + 1)
    buffer = apart.buffers[0]._replace(stop=apart.phases * (first + 3))
    assert beside._until_sent(buffer, made).stop == beside.phases * (last + 2)
    assert apart._until_sent(buffer, made) == buffer


def test_no_order_is_sought_once_time_has_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each order takes is much: none is begun, and of the one that is under way no other is tried."""
    plan = planned(memory_limit=3 << 19)
    costs, made = plan.cost_model(), list[int]()
    whole = simulate

    def counted(*args: Any) -> Timeline:
        made.append(1)
        return whole(*args)

    monkeypatch.setattr("hapsynth.search.scheduling.list_schedule.simulate", counted)
    looks: list[int] = []
    for stops_at in (0, 5, 10_000):
        made.clear()
        left = [stops_at]

        def stopped(left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] < 0

        found = list(schedules_holding_less(plan.program, plan.sizes, costs, stopped))
        assert bool(found) == bool(stops_at)
        looks.append(len(made))
    assert looks[0] == 0 < looks[1] < looks[2] / 4, looks


def test_gathers_wait_where_memory_is_short() -> None:
    plan = planned(overlap=True)
    limit = int(0.9 * plan.memory[0])
    limited = planned(overlap=True, memory_limit=limit)
    assert max(limited.memory) <= limit
    assert limited.memory[0] == peak(limited.program, limited.sizes, limited.cost_model())
    assert plan.cost <= limited.cost <= seconds(planned(memory_limit=limit))


def test_a_baseline_fits_beside_what_its_collectives_hold_meanwhile() -> None:
    """An order that fits but for what is gathered while devices compute was said to fit."""
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    weights = {"a": struct(256, 256), "b": struct(256, 256), "c": struct(256, 7)}
    task = Task(trace(three_layers, (weights, struct(64, 256))).graph, thin_cluster(SPEEDS["two"], bandwidth=1e8))

    def zero3(limit: float | None = None) -> tuple[Baseline, float]:
        """With overlap, and the bytes that it holds."""
        baselines = Baselines(task.on(task.cluster, memory_limit=limit, exact=True))
        found = baselines.overlapped(baselines.all(["zero3"])["zero3"])
        under_way = program_timeline(found.program, found.sizes, found.costs).under_way
        return found, MemoryProfile(found.program, found.sizes.classes, found.costs, under_way).peak(found.sizes)

    _, most = zero3()
    for part in (0.94, 0.9):
        found, held = zero3(part * most)
        assert found.fits
        assert held <= part * most


@pytest.mark.few(0)
def test_a_training_step_within_nine_tenths_of_the_memory() -> None:
    """Of that which the sum's program holds. It takes less than that one in its own order."""
    fn, args = example("cnn").target()
    cluster = hapsynth.Cluster.load(Path(__file__).parents[3] / "examples/clusters/poplar_b.toml")
    synthesize = partial(hapsynth.synthesize, fn, args, cluster, leave_out=False)
    as_a_sum = synthesize()
    limit = int(0.9 * max(as_a_sum.memory))
    limited = synthesize(overlap=True, memory_limit=limit)
    assert max(limited.memory) <= limit
    assert limited.cost < 0.98 * seconds(as_a_sum)
