"""The same input gives the same plan file, in processes whose hashes differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PLANNED = """
import json
from dataclasses import replace

import strategies
from random_programs import mlp_step
from slow_devices import slow_cluster

import hapsynth
from hapsynth.plan_file import plan_to_dict

shape = strategies.shape
params = {"w1": shape(60, 100), "b1": shape(100), "w2": shape(100, 70)}
batch = {"x": shape(90, 60), "y": shape(90, 70)}
for axes in ((("hap", 8),), (("a", 2), ("b", 4))):
    cluster = replace(slow_cluster((3.0,) * 4 + (1.0,) * 4), axes=axes)
    plan = hapsynth.synthesize(mlp_step, ({"p": params, "m": params}, batch), cluster)
    file = plan_to_dict(plan.traced, plan.result, plan.cluster)
    assert set(file.pop("timings_s")) >= {"trace_s", "total_s"}
    print(json.dumps(file))
"""


def test_the_hash_seed_changes_nothing() -> None:
    """On one axis and on two."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
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
