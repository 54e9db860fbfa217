"""Second runs of ops where nothing else fits: the same function, held less, at least cost by a minimum cut."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from seeds import each_of
from slow_devices import first_devices, slow_cluster
from wide_activations import ARGS, F32, LAYERS, ROWS, WIDTH, step
from zoo import language

import hapsynth
from hapsynth.graph.ir import Graph, Rematerialized
from hapsynth.graph.rematerialize import blocks, recomputed
from hapsynth.graph.trace import trace
from hapsynth.report.comparison import print_comparison
from hapsynth.report.json_records import OURS, Entry
from hapsynth.report.tables import console
from hapsynth.running.plan_file import PlanError
from hapsynth.search.analysis.fusion import materialized
from hapsynth.search.analysis.liveness import Liveness
from hapsynth.search.cost.model import Floats
from hapsynth.search.planning.device_subsets import ClusterPlanner
from hapsynth.search.planning.rematerialization import _Problem as Problem
from hapsynth.search.planning.rematerialization import choices, held_at, planned_to_fit, seconds_of
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.result import Result


def arrays() -> tuple[list[jax.Array], jax.Array]:
    rng = np.random.default_rng(0)
    some = lambda *shape: jnp.asarray(rng.normal(size=shape) / 8, F32)
    return [some(WIDTH, WIDTH) for _ in range(LAYERS)], some(ROWS, WIDTH)


def graph_of(fn: Any, *args: Any) -> Graph:
    return trace(fn, args).graph


def planned(fraction: float, **options: Any) -> hapsynth.Plan:
    """The step on two alike devices with a fraction of the memory that they would take; `free`: what that is."""
    cluster = slow_cluster([1.0, 1.0])
    free = hapsynth.synthesize(step, ARGS, cluster)
    limit = fraction * max(free.memory)
    return hapsynth.synthesize(step, ARGS, first_devices(2), cluster=cluster, memory_limit=limit, **options)


def test_without_it_nothing_fits_and_the_message_names_it() -> None:
    with pytest.raises(hapsynth.InfeasibleError, match=r"a smaller batch would fit; recompute=True"):
        planned(0.85)


def test_without_a_time_budget_no_clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a job, which plan each for itself, find the same."""
    budgets: list[float | None] = []
    run = ClusterPlanner.run

    def noted(self: ClusterPlanner) -> Any:
        budgets.append(self.task.options.time_budget_s)
        return run(self)

    monkeypatch.setattr(ClusterPlanner, "run", noted)
    monkeypatch.setattr("hapsynth.search.planning.rematerialization._NEXT_TO_NOTHING", 0.0)
    planned(0.85, recompute=True)
    assert len(budgets) > 2
    assert {*budgets} == {None}


@pytest.mark.parametrize("last", [False, True], ids=["at another choice", "at the graph itself"])
def test_a_plan_that_ctrl_c_ended_says_so(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was kept in the cache as if nothing cheaper had been left to look for."""
    graph, cluster = graph_of(step, *ARGS), slow_cluster([1.0, 1.0])
    limit = 0.85 * max(ClusterPlanner(Task(graph, cluster)).run().memory_bytes)
    run, made = ClusterPlanner.run, list[Result]()

    def pressed(self: ClusterPlanner) -> Result:
        if made and (self.task.graph.again is None) == last:
            raise KeyboardInterrupt
        made.append(run(self))
        return made[-1] if last else replace(made[-1], status="gap")

    twice = lambda *args: [choice for choice in choices(*args) for _ in range(2)]
    monkeypatch.setattr(ClusterPlanner, "run", pressed)
    monkeypatch.setattr("hapsynth.search.planning.rematerialization.choices", twice)
    monkeypatch.setattr("hapsynth.search.planning.rematerialization._NEXT_TO_NOTHING", 0.0)
    of = lambda graph, budget: Task(graph, cluster, PlanningOptions(limit, budget))
    graph, found = planned_to_fit(graph, of, None)
    assert graph.again is not None
    assert found.interrupted
    assert not made[0].interrupted


def test_a_function_without_ops_has_nothing_to_run_again() -> None:
    with pytest.raises(hapsynth.InfeasibleError, match="no program fits"):
        hapsynth.synthesize(lambda x: x, ARGS[1:], slow_cluster([1.0, 1.0]), memory_limit=16, recompute=True)


def test_with_it_a_plan_fits_and_computes_the_same() -> None:
    plan = planned(0.85, recompute=True)
    assert plan.traced.graph.again is not None
    assert max(plan.memory) <= plan.memory_limit
    params, x = arrays()
    wanted = jax.jit(step)(params, x)
    got = plan(*plan.shard(params, x))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(plan.unshard(got)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_xla_holds_less_too() -> None:
    """By its own account, in both forms of one device's program: nothing is merged with the first run."""
    graph = graph_of(step, *ARGS)
    found = choices(graph, seconds_of(Task(graph, slow_cluster([1.0]))))
    least = min(found, key=lambda c: c.nbytes)

    def peak(graph: Graph) -> float:
        def run(*leaves: jax.Array) -> list[Any]:
            env: dict[int, Any] = dict(zip(graph.inputs, leaves, strict=True))
            for op in graph.ops:
                read = [env[o] if isinstance(o, int) else o.value for o in op.operands]
                made = op.primitive.bind(*read, **op.params)
                env.update(zip(op.results, made if op.primitive.multiple_results else [made], strict=True))
            return [env[o] for o in graph.outputs if isinstance(o, int)]

        structs = [jax.ShapeDtypeStruct(graph.values[v].shape, graph.values[v].dtype) for v in graph.inputs]
        used = jax.jit(run).lower(*structs).compile().memory_analysis()
        assert used is not None
        return float(used.temp_size_in_bytes)

    assert least.nbytes < 0.8 * held_at(graph).max()
    assert peak(least.graph) < 0.9 * peak(graph)


def test_it_is_saved_and_read(tmp_path: Path) -> None:
    plan = planned(0.85, recompute=True)
    plan.save(tmp_path / "plan.json")
    read = hapsynth.load(tmp_path / "plan.json", step, ARGS)
    assert read.traced.graph.again == plan.traced.graph.again
    assert read.traced.graph.fingerprint == plan.traced.graph.fingerprint
    text = (tmp_path / "plan.json").read_text(encoding="utf-8")
    (tmp_path / "edited.json").write_text(text.replace('"again": {', '"again": {"was": 1,').replace('"at":', '"no":'))
    with pytest.raises(PlanError, match=r"edited\.json: was edited"):
        hapsynth.load(tmp_path / "edited.json", step, ARGS)


def test_compare_says_that_baselines_recompute_too(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(0.85, recompute=True)
    print_comparison(console(), plan, {OURS: Entry(plan.cost, 1.0, True, {}, (0, 1))})
    again = plan.traced.graph.again
    assert again is not None
    said = f"{len(again.ops)} ops run twice, so that less is held between: chosen for the plan"
    assert f"{said}, and the same in baselines\n" in capsys.readouterr().out


def test_a_plan_file_of_another_function_says_so(tmp_path: Path) -> None:
    planned(0.85, recompute=True).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="this plan is of another function: op"):
        hapsynth.load(tmp_path / "plan.json", lambda params, x: (params, x.sum()), ARGS)


def test_a_plan_with_second_runs_takes_other_shapes() -> None:
    plan = planned(0.85, recompute=True)
    params, x = arrays()
    half = x[: ROWS // 2]
    short = plan.for_shapes(params, half)
    assert short.traced.graph.again == plan.traced.graph.again
    got = short(*short.shard(params, half))
    np.testing.assert_allclose(short.unshard(got)[1], jax.jit(step)(params, half)[1], rtol=1e-5)


def test_what_fits_is_planned_as_without_it() -> None:
    with_it, without = planned(1.0, recompute=True), planned(1.0)
    assert with_it.traced.graph.again is None
    assert with_it.cost == without.cost


# ---- the graph


def test_the_first_run_stays_for_what_is_early() -> None:
    graph = graph_of(step, *ARGS)
    tanh = [op.index for op in graph.ops if op.name == "tanh"]
    at = len(graph.ops) // 2
    again = Rematerialized(at, tuple(o for o in tanh if o <= at))
    twice = recomputed(graph, again)
    names = lambda g: sorted(op.name for op in g.ops)
    added = list(names(twice))
    for name in names(graph):
        added.remove(name)
    assert set(added) == {"tanh", "optimization_barrier"}
    assert [v.index for v in twice.values] == list(range(len(twice.values)))
    assert [op.index for op in twice.ops] == list(range(len(twice.ops)))
    made = set(twice.sources)
    for op in twice.ops:
        assert made.issuperset(v for _, v in op.value_operands), f"{op} runs before its operands"
        made.update(op.results)


def test_loops_are_blocks_and_do_not_run_again() -> None:
    def scanned(ws: jax.Array, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w), None

        return (jax.lax.scan(body, jnp.sin(x), ws)[0] ** 2).sum()

    shapes = jax.ShapeDtypeStruct((3, WIDTH, WIDTH), F32), jax.ShapeDtypeStruct((ROWS, WIDTH), F32)
    graph = graph_of(jax.grad(scanned, argnums=(0, 1)), *shapes)
    whole = [b for b in blocks(graph) if len(b) > 1]
    assert len(whole) == 2
    assert [o for b in blocks(graph) for o in b] == list(range(len(graph.ops)))
    inside = next(op.index for op in graph.ops if op.region)
    with pytest.raises(ValueError, match=f"op {inside} cannot run again"):
        recomputed(graph, Rematerialized(len(graph.ops) - 1, (inside,)))
    for choice in choices(graph, seconds_of(Task(graph, slow_cluster([1.0])))):
        assert choice.graph.again is not None
        assert all(graph.ops[o].region == 0 for o in choice.graph.again.ops)


def test_an_op_after_the_point_is_refused() -> None:
    graph = graph_of(step, *ARGS)
    with pytest.raises(ValueError, match="op 5 cannot run again after op 3"):
        recomputed(graph, Rematerialized(3, (5,)))


# ---- the choice


def cheapest_by_trying(graph: Graph, at: int, seconds: Floats, price: float) -> float:
    """Of all sets of ops that may run again: seconds of what is needed, and of the bytes held for it."""
    late = {v for op in graph.ops[at + 1 :] for _, v in op.value_operands}
    late.update(v for v in graph.outputs if isinstance(v, int))
    best = np.inf
    for chosen in itertools.product((False, True), repeat=at + 1):
        kept = set[int]()
        runs = set[int]()
        todo = [v for v in late if v in graph.producer and graph.producer[v] <= at]
        while todo:
            v = todo.pop()
            o = graph.producer.get(v)
            if o is None:
                continue
            if not chosen[o]:
                kept.add(v)
            elif o not in runs:
                runs.add(o)
                todo += [u for _, u in graph.ops[o].value_operands]
        cost = sum(seconds[o] for o in runs) + price * sum(graph.values[v].nbytes for v in kept)
        best = min(best, cost)
    return best


@each_of(range(30))
def test_a_minimum_cut_is_the_cheapest_choice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    width = lambda: int(rng.integers(1, 9))
    shapes = [jax.ShapeDtypeStruct((width(),), F32) for _ in range(2)]
    plan = [(int(rng.integers(100)), int(rng.integers(100)), width()) for _ in range(12)]

    def fn(*xs: jax.Array) -> list[jax.Array]:
        made = list(xs)
        for a, b, n in plan:
            x, y = made[a % len(made)], made[b % len(made)]
            made.append(jnp.broadcast_to((jnp.sin(x).sum() * jnp.cos(y).sum()), (n,)))
        return made[-4:]

    graph = graph_of(fn, *shapes)
    at = min(10, len(graph.ops) - 2)
    seconds = rng.integers(1, 20, len(graph.ops)).astype(float)
    for price in (0.1, 1.0, 5.0):
        ops = Problem(graph, at, seconds).cheapest(price)
        assert cost_of(graph, at, seconds, price, set(ops)) == pytest.approx(
            cheapest_by_trying(graph, at, seconds, price), rel=1e-6
        )


def cost_of(graph: Graph, at: int, seconds: Floats, price: float, runs: set[int]) -> float:
    late = {v for op in graph.ops[at + 1 :] for _, v in op.value_operands}
    late.update(v for v in graph.outputs if isinstance(v, int))
    late.update(v for o in runs for _, v in graph.ops[o].value_operands)
    kept = [v for v in late if v in graph.producer and graph.producer[v] <= at and graph.producer[v] not in runs]
    return sum(seconds[o] for o in runs) + price * sum(graph.values[v].nbytes for v in kept)


def test_choices_hold_less_and_less_and_compute_more_and_more() -> None:
    fn, args = language.gpt()
    graph = graph_of(fn, *args)
    found = choices(graph, seconds_of(Task(graph, slow_cluster([1.0]))))
    assert len(found) > 3
    for one, other in itertools.pairwise(found):
        assert one.seconds <= other.seconds
        assert one.nbytes > other.nbytes
    assert found[0].nbytes < held_at(graph).max()


def test_second_runs_are_priced_as_the_plan_prices_ops() -> None:
    """In the narrow type, at the rate of that, and with what starting an op takes."""
    one = slow_cluster([1.0])
    kind = replace(one.devices[0], flops={"float32": 1e9, "bfloat16": 8e9}, overhead=1e-4)
    fn = lambda x, w: jnp.tanh(x @ w)
    wide = jax.ShapeDtypeStruct((ROWS, ROWS), F32)
    seconds: list[float] = []
    for dtype in (F32, jnp.bfloat16):
        task = Task(graph_of(fn, *[wide.update(dtype=dtype)] * 2), replace(one, devices=(kind,)))
        seconds.append(seconds_of(task)[0])
    assert seconds[0] == pytest.approx(1e-4 + 2 * ROWS**3 / 1e9)
    assert seconds[1] == pytest.approx(1e-4 + 2 * ROWS**3 / 8e9)


def test_what_holds_the_least_is_planned_for_though_the_first_program_held_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that shards more may hold less of it."""
    monkeypatch.setattr(ClusterPlanner, "first_excess", lambda self: 100.0)
    assert planned(0.85, recompute=True).traced.graph.again is not None


def test_a_budget_that_is_spent_starts_no_further_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan that fits stands, and neither another choice nor the graph itself is planned for."""
    graph, planned = graph_of(step, *ARGS), list[Graph]()
    cluster = slow_cluster([1.0, 1.0])
    limit = 0.85 * max(ClusterPlanner(Task(graph, cluster)).run().memory_bytes)
    monkeypatch.setattr("hapsynth.search.planning.rematerialization._NEXT_TO_NOTHING", 0.0)
    run, no_time = ClusterPlanner.run, ClusterPlanner.no_time

    def noted(self: ClusterPlanner) -> Any:
        planned.append(self.task.graph)
        return replace(run(self), status="gap")

    monkeypatch.setattr(ClusterPlanner, "run", noted)
    monkeypatch.setattr(ClusterPlanner, "no_time", lambda self: bool(planned) or no_time(self))
    task = lambda graph, budget: Task(graph, cluster, PlanningOptions(memory_limit=limit, time_budget_s=budget))
    found, _ = planned_to_fit(graph, task, 600.0)
    assert planned == [found]
    assert found.again is not None


def test_bytes_alive_are_those_of_each_op() -> None:
    graph = graph_of(step, *ARGS)
    held = held_at(graph)
    lives = Liveness(graph, materialized(graph))
    for op in graph.ops[:: max(1, len(graph.ops) // 20)]:
        alive = lives.at(op.index)
        values = {*alive.live_through, *alive.read, *alive.made}
        assert held[op.index] == sum(graph.values[v].nbytes for v in values)
