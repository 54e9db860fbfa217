"""The memory benchmark, run as a script: its figures add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_memory.py"


@pytest.mark.optimized
def test_figures_add_up(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--clusters", "mixed8", "--tensors", "2", "--json", str(file), "mlp"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (row,) = json.loads(file.read_text())
    assert (row["model"], row["cluster"]) == ("mlp", "mixed8")
    assert sum(size for _, size in row["predicted_tensors"]) == pytest.approx(row["predicted"])
    assert sum(size for _, size in row["xla_tensors"]) == pytest.approx(row["live"])
    # Donated state takes its results' place, so hardly anything is made beside arguments and temporaries.
    assert row["xla"] == pytest.approx(row["arguments"] + row["temporary"], rel=0.02)
    assert row["arguments"] < row["live"] <= row["xla"]
    assert [line.strip() for line in done.stdout.splitlines()[2:]].count("XLA:") == 1
