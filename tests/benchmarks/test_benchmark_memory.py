"""The memory benchmark, run as a script: its figures add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts import run_script


@pytest.mark.optimized
def test_figures_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert run_script("bench_memory", "--clusters", "mixed8", "--tensors", "2", "--json", str(file), "mlp") == 0
    (row,) = json.loads(file.read_text())
    assert (row["model"], row["cluster"]) == ("mlp", "mixed8")
    assert sum(size for _, size in row["predicted_tensors"]) == pytest.approx(row["predicted"])
    assert sum(size for _, size in row["xla_tensors"]) == pytest.approx(row["live"])
    # Donated state takes its results' place, so hardly anything is made beside arguments and temporaries.
    assert row["xla"] == pytest.approx(row["arguments"] + row["temporary"], rel=0.02)
    assert row["arguments"] < row["live"] <= row["xla"]
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[2:]].count("XLA:") == 1
