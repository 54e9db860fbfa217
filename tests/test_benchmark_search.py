"""The search's benchmark, run as a script: its rows hold what was planned, and the MILP agrees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "search.py"


def run(*options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options], check=check, capture_output=True, text=True)


def test_rows_and_the_milp_beside(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    run("--only", "mlp", "--clusters", "mixed8", "--layers", "", "--milp", "300", "--json", str(file))
    report: dict[str, Any] = json.loads(file.read_text())
    (row,) = report["table"]
    assert report["machine"].keys() >= {"python", "jax", "scipy", "cores"}
    assert (row["model"], row["cluster"], row["devices"]) == ("mlp", "mixed8", 8)
    assert row["milp"]["status"] == "optimal"
    # The optimum at the plan's ratios lies between the plan's bound and its cost.
    assert row["lower_bound_s"] * (1 - 1e-6) <= row["milp"]["cost_s"] <= row["cost_s"] * (1 + 1e-6)
    assert row["rss_bytes"] > 50 << 20
    assert 0 < row["trace_s"] < row["total_s"]


def test_growth_with_layers(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = run("--only", "", "--layers", "1,2", "--milp", "0", "--json", str(file))
    one, two = json.loads(file.read_text())["growth"]
    assert (one["layers"], two["layers"]) == (1, 2)
    assert one["ops"] < two["ops"]
    lines = done.stdout.splitlines()
    assert [line.split(" on ")[0] for line in lines[1:3]] == ["bert 1", "bert 2"]
    assert lines[3].startswith("after tracing: time(2) / time(1) = ")


@pytest.mark.slow
def test_what_does_not_fit_is_a_row_too(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ("--only", "mlp", "--clusters", "mixed8", "--layers", "", "--milp", "0", "--memory", "1e-3")
    done = run(*options, "--json", str(file))
    (row,) = json.loads(file.read_text())["table"]
    assert row["status"] == "infeasible"
    assert "no program fits" in row["error"]
    assert done.stdout.rstrip().endswith("infeasible")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--only", "bert,gpt9"), "'gpt9' is none of mlp, vgg19"),
        (("--clusters", "mixed9"), "'mixed9' is none of mixed8"),
        (("--layers", "2,x"), "--layers 2,x: give whole numbers"),
        (("--memory", "much"), "--memory much: give devices"),
    ],
)
def test_bad_options_are_named(options: tuple[str, ...], message: str) -> None:
    done = run(*options, check=False)
    assert done.returncode == 2
    assert message in done.stderr
