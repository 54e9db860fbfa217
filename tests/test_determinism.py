"""The same input gives the same plan file, in processes whose hashes differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cli_model import CLUSTER, MODEL

PLANNED = """
import json
from dataclasses import replace

import strategies
from random_programs import mlp_step
from slow_devices import slow_cluster

import hapsynth
from hapsynth.running.plan_file import plan_to_dict

shape = strategies.shape
params = {"w1": shape(60, 100), "b1": shape(100), "w2": shape(100, 70)}
batch = {"x": shape(90, 60), "y": shape(90, 70)}
for axes in ((("hap", 8),), (("a", 2), ("b", 4))):
    cluster = replace(slow_cluster((3.0,) * 4 + (1.0,) * 4), axes=axes)
    plan = hapsynth.synthesize(mlp_step, ({"p": params, "m": params}, batch), cluster)
    file = plan_to_dict(plan.traced, plan.result, plan.cluster)
    print(json.dumps(file))
"""


def test_the_hash_seed_changes_nothing() -> None:
    """On one axis and on two."""
    here = Path(__file__).parent / "support"
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    first, second = (
        subprocess.run(
            [sys.executable, "-c", PLANNED],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    )
    assert all('"S(0)' in file for file in first.splitlines()), "something is cut"
    assert first.count("\n") == 2
    assert first == second


SEVERAL = """

def several():
    state, batch = arguments()
    loss = lambda state, batch: step(state, batch)[1]
    return {"train": step, "eval": loss}, {"train": (state, batch), "eval": (state, batch)}
"""


def test_two_searches_write_the_same_file(tmp_path: Path) -> None:
    """No wall-clock time is in it: `--json` has these."""
    (tmp_path / "model.py").write_text(MODEL + SEVERAL)
    (tmp_path / "mixed.toml").write_text(CLUSTER)
    root = Path(__file__).parent.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    for seed in ("1", "2"):
        for target in ("target", "several"):
            asked = ["search", f"model.py:{target}", "--cluster", "mixed.toml", "--plan", f"{target}{seed}.json"]
            subprocess.run(
                [sys.executable, "-m", "hapsynth", *asked, "--json", f"record{seed}.json"],
                cwd=tmp_path,
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
                capture_output=True,
                check=True,
            )
    for target in ("target", "several"):
        first, second = ((tmp_path / f"{target}{seed}.json").read_bytes() for seed in ("1", "2"))
        assert first == second
        assert b'"S(0)' in first
    for seed in ("1", "2"):
        assert '"total_s": ' in (tmp_path / f"record{seed}.json").read_text()
