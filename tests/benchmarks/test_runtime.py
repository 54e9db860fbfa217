"""What the measured comparison compares: the same step, whoever runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import models
import numpy as np
import pytest
import runtime
from assignments import layers
from harness.command import write_json
from harness.emulated_job import read_json
from jax.sharding import Mesh
from systems import planned, stepped

import hapsynth
from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.device_kinds import DeviceKind
from hapsynth.cluster.links import Link
from hapsynth.graph.trace import trace

TINY = models.Perceptron(batch=8, width=16, classes=4)
EVEN = {"model": "mlp", "cluster": "2", "system": "even", "times_s": [1.0] * 8, "median_s": 1.0, "spread": 0.1}
EVEN |= {"predicted_s": 0.9, "ideal_s": 0.8, "by_quota_s": 0.7, "off": 1e-6, "processes": [0, 1]}
EVEN |= {"over": {"system": "even", "ratio": 1.0, "interval": [1.0, 1.0]}}


def _arguments(fn: Any, shapes: Any) -> stepped.Arguments:
    return stepped.begun(fn, trace(fn, shapes))


def _lines(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The words of each printed line by its first."""
    return {words[0]: words for words in map(str.split, capsys.readouterr().out.splitlines()) if words}


def _after(system: stepped.System, arguments: stepped.Arguments, steps: int = 3) -> tuple[list[float], Any]:
    system.place(arguments)
    return [system.step() for _ in range(steps)], system.values()


@pytest.mark.parametrize("name", ["even", "jit_cut_state", "by_speed"])
def test_peers_make_the_step_of_one_device(name: str) -> None:
    fn, shapes = models.mlp(2, layers=1, config=TINY)
    arguments = _arguments(fn, shapes)
    # Of one process: by speed it has all rows.
    mesh = Mesh(np.array(jax.devices()[: 1 if name == "by_speed" else 2]), ("d",))
    if name == "by_speed":
        system: stepped.System = stepped.BySpeed(fn, mesh, [16])
    else:
        system = stepped.Jitted(fn, mesh, arguments, cut_state=name == "jit_cut_state")
    losses, values = _after(system, arguments)
    wanted, state = _after(stepped.Alone(fn), arguments)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert stepped.differences(values, state) < stepped.AGREE
    # Not hidden by what the state began with: other data is told apart.
    x = {**arguments[1], "x": np.array(arguments[1]["x"])}
    x["x"][0] *= 1.5
    _, other = _after(stepped.Alone(fn), (arguments[0], x))
    assert stepped.differences(other, state) > 100 * stepped.AGREE


def test_jit_with_the_state_cut_holds_a_part() -> None:
    fn, shapes = models.mlp(2, layers=1, config=TINY)
    arguments = _arguments(fn, shapes)
    system = stepped.Jitted(fn, Mesh(np.array(jax.devices()[:2]), ("d",)), arguments, cut_state=True)
    system.place(arguments)
    system.step()
    held = [x.addressable_shards[0].data.size / x.size for x in jax.tree.leaves(system.state) if x.ndim]
    assert set(held) == {0.5}


def test_rows_go_by_speed() -> None:
    assert stepped.rows_by_speed(10, [3.0, 1.0]) == [8, 2]
    assert stepped.rows_by_speed(10, [1.0, 1.0, 1.0]) == [4, 3, 3]
    assert stepped.rows_by_speed(3, [1.0, 1e-9]) == [3, 0]


@pytest.mark.parametrize("name", runtime.MODELS)
def test_all_clusters_run_the_same_model(name: str) -> None:
    shapes = [runtime.MODELS[name](n)[1] for n in (2, 4)]
    assert shapes[0] == shapes[1]


def test_the_report_refuses_values_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    plan = {**EVEN, "system": "plan"}
    assert runtime.report([EVEN | {"predicted_at_speed_s": 1.5}])
    assert _lines(capsys)["even"][-8:-2] == ["0.900", "s", "0.90", "1.500", "s", "1.50"]
    assert not runtime.report([EVEN, {**plan, "off": 1e-3}])
    assert "VALUES DIFFER" in capsys.readouterr().out


def test_models_measured_before_a_process_failed_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = {k: EVEN[k] for k in ("cluster", "system", "predicted_s", "ideal_s", "by_quota_s")} | {"model": "lm"}

    def run(machines: Any, folder: Path, *rest: Any) -> list[int]:
        write_json(folder / "rows.json", [EVEN, ahead])
        return [0, -9]

    monkeypatch.setattr(runtime, "run", run)
    found = tmp_path / "runtime.json"
    monkeypatch.setattr("sys.argv", ["runtime.py", "--cluster", "2,even4", "--systems", "even", "--json", str(found)])
    with pytest.raises(SystemExit, match=r"the processes on 2 ended with \[0, -9\]"):
        runtime.measure(runtime.arguments(), tmp_path)
    assert read_json(found) == [EVEN, ahead]
    said = capsys.readouterr().out
    assert "mlp on 2" in said
    assert "lm on 2" not in said


def test_a_plan_that_leaves_the_first_process_out_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """That process compares values, and has none of such a plan."""
    plan = {k: v for k, v in EVEN.items() if k != "off"} | {"system": "plan"}
    assert runtime.report([EVEN, plan])
    lines = _lines(capsys)
    assert (lines["even"][-1], lines["plan"][-1]) == ("1.0e-06", "-")


def test_all_are_compared_with_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Also a peer on the fast processes alone; the best is named, with where it ran."""
    plan = {**EVEN, "system": "overlap", "times_s": [9.0, 9.0, *[0.5] * 6], "median_s": 0.5}
    times = [9.0, 9.0, 0.75, 0.75, 0.6, 0.75, 0.75, 1.0]
    fast = {**EVEN, "cluster": "2", "system": "by_speed_fast", "times_s": times, "median_s": 0.75, "processes": [0]}
    rows = [dict(EVEN), plan, fast]
    runtime.compare(rows)
    assert fast["over"] == {"system": "overlap", "ratio": 1.5, "interval": (1.2, 2.0)}
    assert rows[0]["over"] == {"system": "overlap", "ratio": 2.0, "interval": (2.0, 2.0)}
    assert runtime.report(rows)
    said = capsys.readouterr().out
    assert "1.50  1.20 .. 2.00" in said
    best = (
        "mlp on 2: by_speed_fast on 0 of 2 processes, 0.750 s, 1.50 times the seconds of overlap (95 %: 1.20 .. 2.00)"
    )
    assert said.splitlines()[-1] == best
    # Of 5 rounds nothing is certain enough.
    runtime.compare([plan | {"times_s": [0.5] * 7}, short := fast | {"times_s": times[:7]}])
    assert short["over"] == {"system": "overlap", "ratio": 1.5, "interval": None}


def test_systems_on_the_fast_kind_are_left_out_where_there_is_one_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [runtime.fastest(where) for where in ("2", "4-1gbit", "even4")] == [(0,), (0, 1), (0, 1, 2, 3)]
    commands: list[Any] = []
    monkeypatch.setattr(runtime, "run", lambda machines, folder, command, *rest: commands.append(command) or [0])
    for systems, given in (
        ("even,by_speed_fast", ["even,by_speed_fast", "even"]),
        ("by_speed_fast", ["by_speed_fast"]),
    ):
        options = ["--cluster", "2,even4", "--systems", systems, "--json", str(tmp_path / "out.json")]
        monkeypatch.setattr("sys.argv", ["runtime.py", *options])
        commands.clear()
        runtime.measure(runtime.arguments(), tmp_path)
        assert [command[-3] for command in commands] == given
        assert "even4: by_speed_fast left out, as all processes are of one kind" in capsys.readouterr().out


def test_plans_are_watched_and_others_are_not() -> None:
    watched = ("plan", "overlap", "switch", "staged", "fused", "overlap_staged", "overlap_fused", "serial")
    systems = dict.fromkeys((*runtime.SYSTEMS, *runtime.BY_HAND, *watched, *runtime.NAMES))
    assert {name for name in systems if runtime._is_watched(name)} == {*watched}


def test_by_speed_is_predicted_at_the_rows_that_it_runs() -> None:
    fast, slow = (DeviceKind(name, {"float32": rate}, 1e12, 1 << 30) for name, rate in (("fast", 3e9), ("slow", 1e9)))
    fn, shapes = models.mlp(2, layers=1, config=TINY)
    cluster = Cluster("two", (fast, slow), (0, 1), Link(1e9, 1e-6))
    plan = planned.chosen(["by_speed"], fn, shapes, trace(fn, shapes), cluster)["by_speed"]
    assert planned.at_rows(plan, [12, 4]) == pytest.approx(plan.cost)
    assert planned.at_rows(plan, [8, 8]) > plan.cost
    alone = planned.alone_seconds(fn, shapes, trace(fn, shapes), cluster)
    assert alone[0] < alone[1]
    # Where the slow one turns out half as fast.
    slowed = planned.seconds_at_speeds(plan, np.array([1.0, 2.0]))
    assert slowed > plan.cost
    assert planned.at_rows(plan, [12, 4], np.array([1.0, 2.0])) == pytest.approx(slowed)


def test_the_program_of_a_plan_with_overlap_runs_without() -> None:
    kind = DeviceKind("slow", {"float32": 1e9}, 1e9, 1 << 30)
    cluster = Cluster("two", (kind,) * 2, (0, 1), Link(1e7, 1e-6))
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, np.float32)
    shapes = {"a": shape(64, 96), "b": shape(96, 64)}, shape(960, 64)
    plan = hapsynth.synthesize(layers, shapes, cluster, overlap=True)
    alone = plan.without_overlap()
    assert (plan.result.overlap, alone.result.overlap) == (True, False)
    assert (alone.program, alone.sizes) == (plan.program, plan.sizes)
    assert alone.cost > plan.cost
