"""What reports say of a plan with overlap: its timeline, what is exposed, and what that rests on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from random_programs import mlp_args, mlp_step
from slow_devices import slow_cluster

import hapsynth
from hapsynth._quantities import seconds
from hapsynth.cli.main import main
from hapsynth.instructions.layout import R
from hapsynth.plan import Plan
from hapsynth.report.comparison import print_comparison
from hapsynth.report.cost_breakdown import cost_lines, cost_record, print_costs
from hapsynth.report.explain import Explainer
from hapsynth.report.json_records import OURS, Entry, costs_of, search_record
from hapsynth.report.summary import print_certificate, print_summary
from hapsynth.report.tables import console
from hapsynth.report.timeline import print_timeline
from hapsynth.search.cost.program_cost import feed_costs
from hapsynth.search.scheduling.tasks import Machine
from hapsynth.search.scheduling.waits import waits
from hapsynth.view.record import figures
from hapsynth.view.step import Step
from hapsynth.whatif.alternatives import Alternative

MODEL = """
import jax, jax.numpy as jnp

def target():
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return (lambda x, w: jnp.tanh(x @ w).sum()), (struct(64, 32), struct(32, 64))
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    cluster = slow_cluster((3.0, 1.0), bandwidth=1e8)
    fast, slow = cluster.devices
    cluster = replace(cluster, devices=(replace(fast, contention=1.25, contention_delay=1e-3), slow))
    plan = hapsynth.synthesize(mlp_step, mlp_args(), cluster, overlap=True, leave_out=False)
    assert {Machine.COMPUTE, Machine.LINK} <= {*plan.timeline.tasks.machine}
    return plan


def test_waits_are_what_is_exposed(plan: Plan) -> None:
    timeline = plan.timeline
    assert timeline.makespan_s == plan.cost
    assert sum(waits(timeline).values()) == pytest.approx(timeline.exposed)
    assert all(timeline.tasks.machine[task] is not Machine.COMPUTE for task in waits(timeline))
    assert plan.exposed[int(np.argmax(timeline.computed[timeline.tasks.group_of]))] == timeline.exposed_s
    assert timeline.exposed_s == plan.result.exposed_communication_s


def test_the_record_has_what_overlaps(plan: Plan) -> None:
    record = search_record(plan)
    assert record["overlap"] is True
    assert record["exposed_communication_s"] == plan.result.exposed_communication_s > 0
    assert record["communication_s"] == pytest.approx(record["clocks"]["collectives"])
    assert set(record["clocks"]) == {*(f"compute {kind.name}" for kind in plan.cluster.kinds), "collectives"}
    json.dumps(record)


def test_reports_say_what_is_hidden(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(console(), plan, costs_of(plan))
    said = re.search(r"communication +([\d.]+ .?s), .* \(([\d.]+) %\) of it hidden", capsys.readouterr().out)
    assert said is not None
    hidden = 1 - plan.result.exposed_communication_s / plan.timeline.communication_s
    assert float(said[2]) == pytest.approx(100 * max(hidden, 0.0), abs=0.01)
    print_timeline(console(), plan, 3)
    text = capsys.readouterr().out
    for device, kind in enumerate(plan.cluster.devices):
        bar = re.search(rf"^{device} {kind.name} +([#.]+)", text, re.M)
        assert bar is not None
        # The bar and the figures tell the same.
        computed = plan.timeline.computed[plan.timeline.tasks.group_of[device]]
        assert bar[1].count("#") / 72 == pytest.approx(computed / plan.cost, abs=0.15)
    assert re.search(r"^collectives +[= ]*=", text, re.M)
    fast, slow = plan.cluster.kinds
    (line,) = [line for line in text.splitlines() if line.startswith(f"contention     {fast.name}:")]
    assert line.endswith(
        "1.25x as long beside a collective (as its description says), of which each exchange takes 1.000 ms longer then"
    )
    assert f"{slow.name}: computing takes 1x as long beside a collective (a default: not measured)" in text


def test_reports_say_whether_baselines_overlap(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """A gain over baselines whose collectives wait is not one over the same with overlap."""
    summed = hapsynth.synthesize(mlp_step, mlp_args(), plan.cluster, leave_out=False)
    for judged, suffix, said in ((plan, "", "with overlap"), (summed, ", without overlap", "without overlap")):
        entry = lambda times, cost=judged.cost: Entry(times * cost, 1e6, True, {}, (0, 1))
        entries = {OURS: entry(1.0), "zero3_speed": entry(1.5)}
        print_summary(console(), judged, costs_of(judged), entries)
        assert f"1.50x over the best baseline (ZeRO-3, by speed{suffix})\n" in capsys.readouterr().out
        print_comparison(console(), judged, entries)
        assert f"plan and baselines {said}: " in capsys.readouterr().out


def test_explanations_are_of_sums_and_say_so(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """Other programs are compared by the sum over their instructions, so this one is too; it is not its step time."""
    value, lines = plan.traced.graph.inputs[0], cost_lines(plan)
    total = cost_record(plan, lines)["sum_s"]
    assert total > plan.cost == cost_record(plan, lines)["cost_s"]
    fed_s = [s for _, s in feed_costs(plan.program, plan.sizes, plan.cost_model())]
    answers = SimpleNamespace(costs=costs_of(plan), layouts=plan.program.inputs, others=lambda _: [(R,)])
    answers.best_with = lambda _, layout: Alternative(layout, 2 * total, None, proved=True)
    Explainer(console(), plan, cast(Any, answers), fed_s, 3, lambda _: None).one(value)
    said = capsys.readouterr().out
    assert "shard sizes, one instruction after another" in said
    assert re.search(rf"\(the plan\) +{seconds(total)} ", said)
    assert re.search(rf"^R +{seconds(2 * total)} +\+{seconds(total)} +\+100.00 %", said, re.M)
    print_costs(console(), plan, lines, 1)
    assert f"in all         {seconds(total)}, one instruction after another" in capsys.readouterr().out


def test_at_other_sizes_exposed_is_as_simulated_and_nothing_is_proved(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    state, batch = mlp_args()
    other = plan.for_shapes(state, {name: np.tile(x, (2, 1)) for name, x in batch.items()})
    assert other.result.exposed_communication_s == other.timeline.exposed_s > 0
    print_certificate(console(), other)
    text = capsys.readouterr().out
    assert all(f"{bound}    none known" in text for bound in ("lower bound", "size bound ", "joint bound"))
    assert "status         no bound: sized anew without a search" in text
    assert "gap" not in text
    assert "busy" not in text
    ((_, gap, about),) = [row for row in figures(other, Step(other)) if row[0] == "gap"]
    assert (gap, about) == ("none known", "to the lower bound at these shard sizes; none known at any")


def test_a_plan_without_devices_or_in_one_program_records_nothing(plan: Plan) -> None:
    with pytest.raises(RuntimeError, match="made for the cluster"):
        plan.recorded(*mlp_args())


def test_the_command_line_says_where_nothing_overlaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    slow_cluster((3.0, 1.0), bandwidth=1e9).save(tmp_path / "c.toml")
    argv = ["search", str(tmp_path / "model.py"), "--cluster", str(tmp_path / "c.toml"), "--json", "-"]
    assert main([*argv, "--overlap", "--form", "switch"]) == 0
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert (record["overlap"], record["clocks"], record["exposed_communication_s"]) == (False, {}, None)
    assert said.err.startswith("hapsynth search: warning: overlap is asked for, and the plan runs as one program")
    assert len(said.err.splitlines()) == 1
