"""A memory limit beyond what a device has: the lesser of both holds, and that is said."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from slow_devices import slow_cluster

import hapsynth
from hapsynth.cli.main import main
from hapsynth.cluster.cluster import Cluster, ClusterWarning

W, X = np.ones((64, 48), np.float32), np.ones((96, 64), np.float32)


def unlike(*memories: int) -> Cluster:
    """One device of each memory, in bytes."""
    made = slow_cluster([1.0 + n for n in range(len(memories))])
    kinds = (replace(k, memory=memory) for k, memory in zip(made.devices, memories, strict=True))
    return replace(made, devices=tuple(kinds))


def step(state: Any, batch: Any) -> Any:
    return state * (batch @ state).sum(), (batch @ state).mean()


def test_the_lesser_of_both_holds() -> None:
    with pytest.warns(ClusterWarning, match=r"memory_limit is 4 MB, and 1 of 2 devices have less \(x1\.0: 1 MB\)"):
        plan = hapsynth.synthesize(step, (W, X), unlike(10**6, 8 * 10**6), memory_limit=4e6)
    assert plan.result.memory_limit_bytes == (1e6, 4e6)
    with pytest.warns(ClusterWarning, match=r"2 of 2 devices have less \(x1\.0: 1 MB, x2\.0: 2 MB\)"):
        plan = hapsynth.synthesize(step, (W, X), unlike(10**6, 2 * 10**6), memory_limit=4e6)
    assert plan.result.memory_limit_bytes == (1e6, 2e6)
    same = hapsynth.synthesize(step, (W, X), unlike(10**6, 2 * 10**6), memory_limit=1e6)
    assert same.result.memory_limit_bytes == (1e6, 1e6)


def test_a_limit_does_not_make_room() -> None:
    least = W.nbytes // 8
    with (
        pytest.warns(ClusterWarning, match="memory_limit is"),
        pytest.raises(hapsynth.InfeasibleError, match=r"device 0 \(x1\.0\) has 0.001465 MiB"),
    ):
        hapsynth.synthesize(step, (W, X), unlike(least, least), memory_limit=4e6)


def test_several_functions() -> None:
    functions = {"step": step, "mean": lambda state: state.mean()}
    with pytest.warns(ClusterWarning, match="memory_limit is 4 MB") as warned:
        plans = hapsynth.synthesize_several(
            functions, {"step": (W, X), "mean": (W,)}, unlike(10**6, 8 * 10**6), memory_limit=4e6
        )
    assert len(warned) == 1
    assert {p.result.memory_limit_bytes for p in plans.values()} == {(1e6, 4e6)}


def test_on_the_command_line(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["search", "model.py", "--cluster", "mixed.toml"]
    assert main([*asked, "--memory-limit", "12 GB", "--json", "out.json"]) == 0
    said = capsys.readouterr()
    told = "memory_limit is 12 GB, and 4 of 8 devices have less (P4-8GB: 8 GB): these keep to what they have"
    assert said.err.startswith(f"hapsynth search: warning: {told}")
    assert said.err.count("\n") == 1
    assert json.loads((files / "out.json").read_text())["memory_limit_bytes"] == [12e9] * 4 + [8e9] * 4
    assert main([*asked, "--memory-limit", "8 GB"]) == 0
    assert capsys.readouterr().err == ""


DEVICES = "of the 4 V100-16GB, the 4 P4-8GB"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("cluster", "limit", "change"),
    [
        ("mixed.toml", "1 MiB", r"with a memory limit of \d+ KiB"),
        ("small.toml", "1 MiB", rf"with a memory limit of \d+ KiB, and as much on each {DEVICES}"),
        ("small.toml", "4 GiB", rf"with \d+ KiB on each {DEVICES}"),
    ],
    ids=["the limit", "both", "their own"],
)
def test_remedies_raise_what_is_too_low(
    cluster: str, limit: str, change: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit, the devices' own memory, or both."""
    text = (files / "mixed.toml").read_text()
    for kind in ("V100-16GB", "P4-8GB"):
        text += f'[kinds.{kind}]\nflops = {{ float32 = "5 TFLOP/s" }}\nbandwidth = "192 GB/s"\nmemory = "1 MiB"\n'
    (files / "small.toml").write_text(text)
    asked = ["--memory-limit", limit, "--advise", "--json", "out.json"]
    assert main(["search", "model.py", "--cluster", cluster, *asked]) == 1
    assert capsys.readouterr().err.count("warning") == (limit == "4 GiB")
    found = json.loads((files / "out.json").read_text())
    assert any(re.fullmatch(change, r["change"]) and r["cost_s"] for r in found["remedies"]), found["remedies"]


def test_an_infinite_limit_is_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClusterWarning)
        plan = hapsynth.synthesize(step, (W, X), unlike(10**6, 10**6), memory_limit=float("inf"))
    assert plan.memory_limit == 1e6


def test_a_mesh_of_its_own_devices() -> None:
    """The nominal memory of what `jax` tells is a limit too."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    has = Cluster.from_mesh(mesh).devices[0].memory
    with pytest.warns(ClusterWarning, match="2 of 2 devices have less"):
        plan = hapsynth.synthesize(step, (W, X), mesh, memory_limit=2 * has)
    assert plan.memory_limit == has
