"""The evaluation by prediction, on models small enough to plan at once: every system is there, and none is better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models import ConvNet, Perceptron, mlp, vgg19
from scripts import run_script
from slow_devices import slow_cluster
from systems.hap import Hap
from systems.strategy import strategy

from hapsynth.api import synthesize
from hapsynth.graph.trace import trace
from hapsynth.instructions.layout import R, S
from hapsynth.search.planning.baselines import NAMES, Baselines
from hapsynth.search.planning.task import Task

CLUSTER = slow_cluster((3.0, 3.0, 1.0, 1.0), bandwidth=1e9)


def test_hap_cuts_the_batch_and_output_dimensions_only() -> None:
    """Dense layers of many weights and few rows are cut by output; no weight by what it contracts."""
    config = ConvNet(batch=2, size=16, stages=((1, 16), (1, 32)), hidden=1024, classes=64)
    fn, args = vgg19(4, config=config)
    traced = trace(fn, args)
    task = Task(traced.graph, CLUSTER)
    known = Baselines(task)
    found = Hap(known).baseline()
    held = {path: found.program.inputs[v] for path, v in zip(traced.in_paths, traced.graph.inputs, strict=True)}
    kernels = {path: layout for path, layout in held.items() if "kernel" in path}
    assert {layout for path, layout in kernels.items() if "dense" in path} <= {(R,), (S(1),)}
    assert {layout for path, layout in kernels.items() if "conv" in path} <= {(R,), (S(3),)}
    assert (S(1),) in kernels.values()
    # Optimizer state lies like its parameter.
    for path, layout in held.items():
        if ".mu" in path:
            assert layout == held[path.replace(".mu", ".nu")]


def test_strategy_in_words() -> None:
    fn, args = mlp(4, layers=2, config=Perceptron(batch=256, width=64, classes=16))
    plan = synthesize(fn, args, CLUSTER)
    task = Task(plan.traced.graph, CLUSTER)
    known = Baselines(task)
    parallel = known.all(["data_parallel_speed"])["data_parallel_speed"]
    found = strategy(known, parallel.program, parallel.sizes)
    assert found.work == {"batch": pytest.approx(1.0)}
    assert (found.state, found.without) == (0.0, ())
    assert list(found.shares.values()) == ["384", "128"]
    assert str(found).startswith("contractions 100.00 % by batch; state 0.00 % cut; batch 384 on each of 0-1 x3.0")
    whole = known.all(["tensor_parallel"])["tensor_parallel"]
    assert "by a weight dimension of" in str(strategy(known, whole.program, whole.sizes))
    assert plan.cost <= parallel.cost_s * (1 + 1e-9)


def test_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    options = ("--only", "mlp", "--cluster", "poplar_b", "--layers", "1", "--markdown", "--json", str(file))
    assert run_script("evaluation", *options, "--joint-gap", "0.02") == 0
    (row,) = json.loads(file.read_text())
    whole = {name for name, s in row["systems"].items() if s["devices"] is None}
    assert whole == {*NAMES, "hap"}
    assert "one device" in row["systems"]
    for name, s in row["systems"].items():
        plain, on, _ = name.partition(", on ")
        assert bool(on) == (s["devices"] is not None) or name == "one device"
        assert not on or plain == "fast kind" or s["cost_s"] < row["systems"][plain]["cost_s"]
    assert row["worse_than"] == []
    fitting = [s["cost_s"] for s in row["systems"].values() if s["fits"]]
    assert row["systems"][row["best"]]["cost_s"] == min(fitting) >= row["cost_s"]
    assert row["even"] >= row["one_ratio"]
    assert 0 <= row["joint_gap"] <= 0.02
    assert capsys.readouterr().out.splitlines()[2].startswith("| poplar_b | mlp 1 | ")


# A row's sums are above, the baselines' makespans in tests/search/planning/test_baseline_subsets.py.
@pytest.mark.few(0)
def test_a_row_of_makespans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    options = ("--only", "mlp", "--cluster", "poplar_b", "--layers", "1", "--markdown", "--json", str(file))
    assert run_script("evaluation", "--overlap", *options) == 0
    (row,) = json.loads(file.read_text())
    assert row["worse_than"] == []
    costs = {name: s["cost_s"] for name, s in row["systems"].items() if s["fits"]}
    whole = {name for name in costs if row["systems"][name]["devices"] is None}
    assert whole == {*NAMES, "hap"}
    # The search leaves 0.2 % undecided.
    assert costs[row["best"]] == min(costs.values()) >= row["cost_s"] * (1 - 2e-3)
    assert costs[row["best_everywhere"]] == min(costs[name] for name in whole)
    assert row["of_the_sum"]["makespan_s"] <= row["of_the_sum"]["cost_s"] * (1 + 1e-9)
    assert row["cost_s"] <= row["of_the_sum"]["makespan_s"] * (1 + 1e-9)
    assert capsys.readouterr().out.splitlines()[2].startswith("| poplar_b | mlp 1 | ")
    # Baselines alone, beside a plan that took twice as long.
    assert run_script("evaluation", "--overlap", "--plan-ms", str(2e3 * row["cost_s"]), *options) == 1
    (alone,) = json.loads(file.read_text())
    assert (alone["best"], alone["systems"]) == (row["best"], row["systems"])
    assert row["best"] in alone["worse_than"]
    over = f"| {costs[row['best']] / row['cost_s'] / 2:.3f}x |"
    assert over in capsys.readouterr().out.splitlines()[2]


@pytest.mark.few(0)
def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even devices are an eighth of a host or whole ones, and the unlike ones a quarter fast."""
    from scaling import cluster

    assert [k.name for k in cluster("unlike", 16).devices] == ["V100-16GB"] * 4 + ["P100-16GB"] * 12
    even = cluster("even", 64)
    assert (even.n, len(even.kinds), len(set(even.hosts))) == (64, 1, 8)
    file = tmp_path / "rows.json"
    # Rows of makespans are in the test above; here they take four times as long.
    options = ("--only", "mlp", "--devices", "8", "--sum", "--budget", "20")
    assert run_script("scaling", *options, "--json", str(file)) == 0
    rows = json.loads(file.read_text())
    assert [(row["series"], row["devices"]) for row in rows] == [("unlike", 8), ("even", 8)]
    for row in rows:
        # Beyond linear by no more than the update of all parameters, which each device does alone.
        assert 0 < row["speed_up"] < 1.2 * row["linear"]
        assert row["speed_up"] == pytest.approx(8 * row["alone_s"][0] / row["cost_s"])
    assert rows[1]["linear"] == pytest.approx(8)
    assert capsys.readouterr().out.startswith("series  devices  model")


def test_bad_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for option, message in (
        (["--only", "gpt9"], "'gpt9' is none of"),
        (["--cluster", "x"], "'x' is none of"),
        (["--overlap", "--plan-ms", "1"], "give --overlap, one --cluster and one model with --only"),
    ):
        assert run_script("evaluation", *option) == 2
        assert message in capsys.readouterr().err
