"""The same input gives the same plan file, in processes whose hashes differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
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


SEVERAL = """

def several():
    state, batch = arguments()
    loss = lambda state, batch: step(state, batch)[1]
    return {"train": step, "eval": loss}, {"train": (state, batch), "eval": (state, batch)}
"""
# Both in one process for each seed: to import JAX takes longer than to plan.
SEARCHES = """
import sys

from hapsynth.cli.main import main

seed = sys.argv[1]
for target in ("target", "several"):
    asked = ["search", f"model.py:{target}", "--cluster", "mixed.toml", "--plan", f"{target}{seed}.json", "-q"]
    assert main([*asked, "--json", f"record{seed}.json"]) == 0
"""
SEEDS = ("1", "2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what both programs made under each seed."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "model.py").write_text(MODEL + SEVERAL)
    (folder / "mixed.toml").write_text(CLUSTER)
    here = Path(__file__).parent / "support"
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    for seed in SEEDS:
        found = subprocess.run(
            [sys.executable, "-c", PLANNED + SEARCHES, seed],
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        )
        (folder / f"planned{seed}").write_text(found.stdout)
    return folder


def test_the_hash_seed_changes_nothing(made: Path) -> None:
    """On one axis and on two."""
    first, second = ((made / f"planned{seed}").read_text() for seed in SEEDS)
    assert all('"S(0)' in file for file in first.splitlines()), "something is cut"
    assert first.count("\n") == 2
    assert first == second


def test_two_searches_write_the_same_file(made: Path) -> None:
    """No wall-clock time is in it: `--json` has these."""
    for target in ("target", "several"):
        first, second = ((made / f"{target}{seed}.json").read_bytes() for seed in SEEDS)
        assert first == second
        assert b'"S(0)' in first
    for seed in SEEDS:
        assert '"total_s": ' in (made / f"record{seed}.json").read_text()
