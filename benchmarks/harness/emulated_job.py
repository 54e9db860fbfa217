"""Benchmarks on an emulated cluster: how one is started, and the processes that run there."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import emulated
import jax
import numpy as np
from emulated import EmulatedCluster, Machine, MissingError, SpecError
from jax.sharding import Mesh

import hapsynth
import hapsynth.jobs
from hapsynth.profile.job import Job
from hapsynth.profile.run import Options, profile


def add_options(command: argparse.ArgumentParser, keep: str, timeout_s: float, each: str) -> None:
    """The options of all such benchmarks. `keep`: the meaning of that option; `each`: of how much the timeout is."""
    command.add_argument("--keep", metavar="DIR", type=Path, help=keep)
    of = f"seconds {each} (default: {timeout_s:g})"
    command.add_argument("--timeout", type=float, default=timeout_s, help=of)
    # For `Worker`.
    command.add_argument("--join", type=Path, help=argparse.SUPPRESS)


def in_folder(name: str, keep: Path | None, measure: Callable[[Path], int]) -> int:
    """The exit status of a benchmark, which is given a folder to `keep`, or one that goes with it, however it ends."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = keep or Path(tempfile.mkdtemp(prefix=name))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return measure(folder)
    except (MissingError, SpecError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    finally:
        if keep is None:
            shutil.rmtree(folder)


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """Of the processes of a benchmark: the benchmarks' modules, the CPU and two threads of XLA's each, of which one may
    wait for a collective, and `own` variables."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "NPROC": "2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, **own}


def run(
    machines: Sequence[Machine],
    folder: Path,
    command: Sequence[str],
    env: Mapping[str, str],
    timeout_s: float,
    show: Callable[[str, str], None] | None = None,
) -> list[int]:
    """Runs a command, which may start a `Worker` of the folder, on each machine of a cluster; the exit codes."""
    for file in folder.glob("met*"):
        file.unlink()
    with EmulatedCluster(machines) as cluster:
        return cluster.run(command, env, timeout_s, show)


def check(codes: Sequence[int], what: str) -> None:
    """SystemExit where a process failed."""
    if any(codes):
        raise SystemExit(f"{what} ended with {list(codes)}")


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


class Worker:
    """One process of the emulated cluster. Work that takes long on one of them only is waited for at files in the
    folder that `--join` names: collectives give up after half a minute."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, options.join
        with emulated.unlimited():
            jax.distributed.initialize()
            self.index, self.count = jax.process_index(), jax.process_count()
            hapsynth.jobs.connect()
            self.job = Job()
            self.mesh = Mesh(np.array(self.job.devices), ("d",))
            self.meet()
        self.job.agree(True)

    _met = 0

    def meet(self) -> None:
        """Wait for all processes, however long it takes."""
        self._met += 1
        (self.folder / f"met{self._met}.{self.index}").touch()
        while not all((self.folder / f"met{self._met}.{i}").exists() for i in range(self.count)):
            time.sleep(0.02)

    def tell(self, text: str) -> None:
        if self.job.first:
            print(text, flush=True)

    def profiled(self) -> hapsynth.Cluster:
        """As it is measured here, or was when the folder was kept."""
        self.tell("profiling")
        file = self.folder / "cluster.toml"
        profiled_before = file.exists()
        self.meet()
        if profiled_before:
            return hapsynth.Cluster.load(file)
        options = Options(limit_s=0.2, window_s=0.2, longest_s=1.0)
        cluster = profile(self.job, options, None, force=True, note=self.tell)
        if self.job.first:
            cluster.save(file)
        self.meet()
        return hapsynth.Cluster.load(file)
