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
SOLVED = """
import hashlib

from hapsynth.search.solver import solve
from pairwise_problems import TrainingLike, grid, knotted_problem, middle_problem

for problem in (TrainingLike(20).problem(), grid(6), knotted_problem(1, 1), middle_problem(2, True)):
    s = solve(problem)
    print(hashlib.sha256(s.assignment.tobytes()).hexdigest(), s.cost.hex(), s.lower_bound.hex(), s.expanded, s.sweeps)
"""


SEVERAL = """

def several():
    state, batch = arguments()
    loss = lambda state, batch: step(state, batch)[1]
    return {"train": step, "eval": loss}, {"train": (state, batch), "eval": (state, batch)}
"""
SEARCHES = """
import sys

from hapsynth.cli.main import main

seed = sys.argv[1]
for target in ("target", "several"):
    asked = ["search", f"model.py:{target}", "--cluster", "mixed.toml", "--plan", f"{target}{seed}.json", "-q"]
    assert main([*asked, "--json", f"record{seed}.json"]) == 0
"""
# What the tests' own process has, and another.
SEEDS = ("own", "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2")


@pytest.mark.usefixtures("all_rounds")
def test_the_hash_seed_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one axis and on two, of solutions of single problems, and of the files that two searches write, in which there
    is no wall-clock time: `--json` has that."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL + SEVERAL)
    Path("mixed.toml").write_text(CLUSTER)
    here = Path(__file__).parent / "support"
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONHASHSEED": SEEDS[1], "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-c", PLANNED + SOLVED + SEARCHES, SEEDS[1]]
    other = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    monkeypatch.setattr(sys, "argv", ["", SEEDS[0]])
    exec(PLANNED + SOLVED + SEARCHES, {})
    own = capsys.readouterr().out
    assert all('"S(0)' in file for file in own.splitlines()[:2]), "something is cut"
    assert own.count("\n") == 2 + 4
    assert own == other
    for target in ("target", "several"):
        first, second = (Path(f"{target}{seed}.json").read_bytes() for seed in SEEDS)
        assert first == second
        assert b'"S(0)' in first
    for seed in SEEDS:
        assert '"total_s": ' in Path(f"record{seed}.json").read_text()
