"""DistributedDataParallel beside the other systems: the same step in PyTorch, and what is said where there is none."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import models
import numpy as np
import pytest
import runtime
from systems import ddp, stepped

from hapsynth.graph.trace import trace
from hapsynth.rendezvous.address import free_ports

TORCH = os.environ.get(ddp.VARIABLE, "")
LM = replace(runtime.SMALL, batch=4, seq=8, width=16, heads=2, ff=32, vocab=40)
CNN = models.ConvNet(4, 8, ((1, 4), (2, 8)), hidden=16, classes=4, activation=jax.nn.silu, pooled=models.mean_pooled)
TINY: dict[str, Callable[[], models.Target]] = {
    "mlp": lambda: models.mlp(1, layers=2, config=models.Perceptron(8, 16, 4, jax.nn.silu)),
    "lm": lambda: models.language_model(1, 2, LM),
    "cnn": lambda: models.vgg19(1, config=CNN),
    # Two experts of four are asked for by each token, and some queues overflow.
    "moe": lambda: models.language_model(1, 2, replace(LM, experts=4)),
}


@pytest.fixture
def fake(tmp_path: Path) -> Callable[[str], str]:
    """An interpreter that runs a line of shell."""

    def make(line: str) -> str:
        file = tmp_path / "python"
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)
        return str(file)

    return make


def test_a_missing_torch_is_told(fake: Callable[[str], str], tmp_path: Path) -> None:
    how = "pip install torch"
    with pytest.raises(ddp.TorchError, match=f"none is named.*{how}"):
        ddp.version("")
    with pytest.raises(ddp.TorchError, match=f"does not run.*{how}"):
        ddp.version(str(tmp_path / "nowhere"))
    with pytest.raises(ddp.TorchError, match=f"No module named 'torch'.*{how}"):
        ddp.version(fake("echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1"))
    assert ddp.version(fake("echo 2.0")) == "2.0"


def _asked(monkeypatch: pytest.MonkeyPatch, *options: str) -> argparse.Namespace:
    monkeypatch.setattr("sys.argv", ["runtime.py", *options])
    return runtime.arguments()


def test_ddp_is_measured_where_there_is_torch(
    fake: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ddp.VARIABLE, raising=False)
    assert "ddp" not in _asked(monkeypatch).systems
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ddp is left out: ")
    for options in (["--systems", "even,ddp"], ["--systems", "ddp_fast"], ["--torch", "/nowhere/python"]):
        with pytest.raises(SystemExit):
            _asked(monkeypatch, *options)
        assert "pip install torch" in capsys.readouterr().err
    # Not asked for, not looked for.
    assert _asked(monkeypatch, "--systems", "even").systems == ["even"]
    assert capsys.readouterr().out == ""
    monkeypatch.setenv(ddp.VARIABLE, fake("echo 2.0"))
    assert _asked(monkeypatch).systems == [*runtime.SYSTEMS, *runtime.DDP]


def test_the_report_has_a_row_without_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"model": "mlp", "cluster": "2", "spread": 0.1, "ideal_s": 0.8, "by_quota_s": 0.7, "off": 1e-6}
    even = {**row, "system": "even", "predicted_s": 0.9, "times_s": [1.0] * 8, "median_s": 1.0, "processes": [0]}
    torch = {**row, "system": "ddp", "predicted_s": None, "times_s": [2.0] * 8, "median_s": 2.0}
    runtime.compare([even, torch])
    assert runtime.report([even, torch])
    (line,) = (words for words in map(str.split, capsys.readouterr().out.splitlines()) if words[:1] == ["ddp"])
    assert line == ["ddp", "2.000", "s", "10%", "2.00", "2.00", "..", "2.00", "-", "-", "-", "-", "0.40", "1.0e-06"]


@pytest.mark.skipif(not TORCH, reason=f"{ddp.VARIABLE} names no interpreter with PyTorch")
@pytest.mark.parametrize("rows", [[4], None, [3, 1]], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_torch_makes_the_step_of_jax(name: str, rows: list[int] | None) -> None:
    assert ddp.version(TORCH)
    fn, shapes = TINY[name]()
    arguments = stepped.begun(fn, trace(fn, shapes))
    (port,) = free_ports(1)
    processes = len(rows or [2, 2])
    of_batch = rows and [row * len(jax.tree.leaves(arguments[1])[0]) // 4 for row in rows]
    systems = [ddp.Ddp(TORCH, rank, processes, f"localhost:{port}", of_batch) for rank in range(processes)]
    try:
        with ThreadPoolExecutor(processes) as pool:
            # Placed anew, nothing of the step before is left.
            for _ in range(2):
                list(pool.map(lambda s: s.place(arguments), systems))
                if of_batch:
                    assert len(set(pool.map(lambda s: s.tune(), systems))) == 1
                losses = [list(pool.map(lambda s: s.step(), systems)) for _ in range(3)]
        state = systems[0].values()
        assert all(s.values() is None for s in systems[1:])
    finally:
        for system in systems:
            system.close()
    alone = stepped.Alone(fn)
    alone.place(arguments)
    np.testing.assert_allclose(losses, [[alone.step()] * processes for _ in range(3)], rtol=1e-5)
    assert jax.tree.structure(state) == jax.tree.structure(arguments[0])
    assert stepped.differences(state, alone.values()) < stepped.AGREE
