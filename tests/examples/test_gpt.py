"""A GPT in flax nnx as plain JAX has it, and the same on unlike devices: lines, losses, checkpoints of orbax."""

from __future__ import annotations

import difflib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from thoroughness import THOROUGH

import hapsynth

ROOT = Path(__file__).parents[2]
GPT = ROOT / "examples" / "gpt"
UNLIKE = (ROOT / "examples" / "gallery" / "unlike8.toml").read_text()


def difference() -> str:
    """What the script for unlike devices changes, but for what it says of itself."""
    plain, uneven = ((GPT / name).read_text().partition("import argparse")[2] for name in ("plain.py", "uneven.py"))
    lines = difflib.unified_diff(plain.splitlines(), uneven.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def test_the_page_lists_the_lines() -> None:
    assert f"```diff\n{difference()}\n```" in (ROOT / "docs" / "gallery.md").read_text()


def cluster(tmp_path: Path, fast: int, slow: int) -> Path:
    """The gallery's devices in other numbers."""
    kinds, devices = UNLIKE.split("[[devices]]", 1)
    fast_ones, slow_ones = (
        f'[[devices]]\nkind = "{kind}"\ncount = {n}\n' for kind, n in (("fast", fast), ("slow", slow))
    )
    assert devices.count("count = 4") == 2
    (file := tmp_path / f"{fast}_{slow}.toml").write_text(kinds + fast_ones + slow_ones)
    return file


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss (\S+)", text)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")
def test_it_trains_on_unlike_devices_and_in_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each goes on from the checkpoint of the one before, and all follow one device. Three devices, and with
    HAPSYNTH_THOROUGH=1 eight before them, whose planning takes most of the time."""
    for module in ("flax", "optax", "orbax.checkpoint"):
        pytest.importorskip(module, reason=f"{module} is not installed")

    def run(name: str, *options: object) -> dict[int, float]:
        monkeypatch.setattr("sys.argv", [name, "--layers", "1", *map(str, options)])
        left = runpy.run_path(str(GPT / name), run_name="__main__")
        uneven.append(sum(isinstance(leaf, hapsynth.ShardedArray) for leaf in jax.tree.leaves(left["state"])))
        return losses(capsys.readouterr().out)

    uneven: list[int] = []
    folder = tmp_path / "state"
    steps, first = (9, (4, 4)) if THOROUGH else (6, (2, 1))
    alone = run("plain.py", "--steps", steps, "--folder", tmp_path / "plain")
    found = run("uneven.py", "--steps", 3, "--folder", folder, "--cluster", cluster(tmp_path, *first))
    job = [sys.executable, "-m", "hapsynth", "launch", "-n", "2", str(GPT / "uneven.py"), "--distributed"]
    options = ["--layers", "1", "--steps", "6", "--folder", str(folder), "--cluster", str(cluster(tmp_path, 1, 1))]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([*job, *options], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found |= losses(done.stdout)
    if THOROUGH:
        found |= run("uneven.py", "--steps", steps, "--folder", folder, "--cluster", cluster(tmp_path, 2, 1))
    assert list(found) == list(alone) == list(range(steps))
    for step, loss in found.items():
        assert loss == pytest.approx(alone[step], rel=1e-6), (step, found, alone)
    assert alone[steps - 1] < alone[0]
    # What orbax saved lay in shards of unlike length.
    assert uneven[0] == 0
    assert min(uneven[1:]) > 20
