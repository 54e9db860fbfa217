"""The search's benchmark: its rows, each made by a process of its own, hold what was planned, and the MILP agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import run_script


def run(*options: str) -> int:
    return run_script("search", *options)


def test_rows_and_the_milp_beside(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert run("--only", "mlp", "--clusters", "mixed8", "--layers", "", "--milp", "300", "--json", str(file)) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    (row,) = report["table"]
    assert report["machine"].keys() >= {"python", "jax", "scipy", "cores"}
    assert (row["model"], row["cluster"], row["devices"]) == ("mlp", "mixed8", 8)
    assert row["milp"]["status"] == "optimal"
    # The optimum at the plan's ratios lies between the plan's bound and its cost.
    assert row["lower_bound_s"] * (1 - 1e-6) <= row["milp"]["cost_s"] <= row["cost_s"] * (1 + 1e-6)
    assert row["rss_bytes"] > 50 << 20
    assert 0 < row["trace_s"] < row["total_s"]


@pytest.mark.few(0)
def test_growth_with_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert run("--only", "", "--layers", "1,2", "--milp", "0", "--json", str(file)) == 0
    one, two = json.loads(file.read_text())["growth"]
    assert (one["layers"], two["layers"]) == (1, 2)
    assert one["ops"] < two["ops"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" on ")[0] for line in lines[1:3]] == ["bert 1", "bert 2"]
    assert lines[3].startswith("after tracing: time(2) / time(1) = ")


@pytest.mark.slow
def test_what_does_not_fit_is_a_row_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    # Of one kind: what a plan without limits leaves out keeps its memory.
    options = ("--only", "mlp", "--clusters", "even64", "--layers", "", "--milp", "0", "--memory", "1e-3")
    assert run(*options, "--json", str(file)) == 0
    (row,) = json.loads(file.read_text())["table"]
    assert row["status"] == "infeasible"
    assert "no program fits" in row["error"]
    assert capsys.readouterr().out.rstrip().endswith("infeasible")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--only", "bert,gpt9"), "'gpt9' is none of mlp, vgg19"),
        (("--clusters", "mixed9"), "'mixed9' is none of mixed8"),
        (("--layers", "2,x"), "--layers 2,x: give whole numbers"),
        (("--memory", "much"), "--memory much: give devices"),
    ],
)
def test_bad_options_are_named(options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*options) == 2
    assert message in capsys.readouterr().err
