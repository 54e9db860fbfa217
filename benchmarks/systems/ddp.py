"""PyTorch's DistributedDataParallel as a system of `runtime.py`: processes of another interpreter, which has PyTorch.

PyTorch and JAX do not live in one process. So each process of the comparison starts one of PyTorch's
(`ddp_process.py`), which inherits its machine: quota, core, network, host name and settings of malloc. It sleeps at its
standard input until it is asked for a step, and who asks sleeps until it answers: both take their turns in the same
rounds.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, GetAttrKey

from systems.stepped import Arguments

VARIABLE = "HAPSYNTH_TORCH"
GET = (
    "python -m venv torchenv; torchenv/bin/pip install numpy; torchenv/bin/pip install torch --index-url "
    f"https://download.pytorch.org/whl/cpu; then --torch torchenv/bin/python, or {VARIABLE}"
)
_PORTS = 12400
_LOOKS = "import numpy, torch; assert torch.distributed.is_gloo_available(), 'no gloo'; print(torch.__version__)"


class TorchError(RuntimeError):
    """There is no PyTorch; the message says how to get it."""


def version(python: str) -> str:
    """Of PyTorch, with gloo and numpy, in an interpreter. Raises TorchError."""
    if not python:
        raise TorchError(f"ddp needs an interpreter with PyTorch, and none is named; {GET}")
    try:
        done = subprocess.run([python, "-I", "-c", _LOOKS], capture_output=True, text=True, check=False)
    except OSError as error:
        raise TorchError(f"ddp needs an interpreter with PyTorch, and {python} does not run: {error}; {GET}") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise TorchError(f"ddp needs PyTorch with gloo, and numpy, and {python} says {why!r}; {GET}")
    return done.stdout.strip()


class Ddp:
    """One process of DDP, asked by a process of the comparison; a `stepped.System`.

    `store`: host and port where the first process listens. `rows`: of the batch, for each process; None cuts it evenly.
    `place` starts it, and waits for the others.
    """

    def __init__(self, python: str, rank: int, world: int, store: str, rows: Sequence[int] | None = None) -> None:
        self.python, self.rank, self.world, self.store, self.rows = python, rank, world, store, rows
        self.process: subprocess.Popen[str] | None = None
        self.state: Any = None

    @staticmethod
    def on_cluster(python: str, rank: int, world: int, number: int, rows: Sequence[int] | None = None) -> Ddp:
        """Of an emulated cluster, on the first of its processes. `number`: one per job of the cluster, for a port of
        its own."""
        host = os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[0]
        return Ddp(python, rank, world, f"{host}:{_PORTS + number}", rows)

    def _start(self) -> subprocess.Popen[str]:
        inside = "EMULATED_CPU" in os.environ
        own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0" if inside else "lo"}
        # Warns that emulated machines' addresses have no names in the DNS.
        own["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        command = [self.python, "-I", str(Path(__file__).with_name("ddp_process.py")), "--rank", str(self.rank)]
        command += ["--world", str(self.world), "--store", self.store]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **own}
        )

    def _ask(self, *words: str) -> str:
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(*words, file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"process {self.rank} of ddp ended with {process.wait()} when asked to {words[0]}")
        return answer

    def place(self, arguments: Arguments) -> None:
        self.state, batch = arguments
        total = jax.tree.leaves(batch)[0].shape[0]
        if self.rows is None and total % self.world:
            raise ValueError(f"{total} rows can't be cut evenly for {self.world} processes")
        rows = self.rows or [total // self.world] * self.world
        begin = sum(rows[: self.rank])
        here = slice(begin, begin + rows[self.rank])
        self.process = self.process or self._start()
        with tempfile.TemporaryDirectory(prefix="ddp") as folder:
            file = f"{folder}/given.npz"
            named = {f"batch.{name}": x[here] for name, x in batch.items()}
            np.savez(file, **_named(self.state), **named, share=np.float64(rows[self.rank] / total))
            self._ask("place", file)

    def tune(self) -> int:
        """Takes the size of buckets of gradients that is the fastest in some steps of all processes, and returns it in
        MB; what was placed is as before them. Called by all."""
        return int(self._ask("tune"))

    def step(self) -> float:
        return float(self._ask("step"))

    def values(self) -> Any:
        """Of the first process: all have the same."""
        if self.rank:
            return None
        with tempfile.TemporaryDirectory(prefix="ddp") as folder:
            self._ask("values", f"{folder}/values.npz")
            with np.load(f"{folder}/values.npz") as opened:
                arrays = dict(opened)
        return jax.tree_util.tree_map_with_path(lambda path, _: arrays[_name(path)], self.state)

    def close(self) -> None:
        if self.process is not None:
            with self.process:
                self.process.kill()
            self.process = None


def _name(path: Any) -> str:
    """Of an array of the state: `params.dense0.kernel`, `mu.dense0.kernel`, `count`."""
    kind = next((key.name for key in path if isinstance(key, GetAttrKey)), "params")
    return ".".join([kind, *(str(key.key) for key in path[1:] if isinstance(key, DictKey))])


def _named(state: Any) -> Mapping[str, np.ndarray]:
    named = [(_name(path), np.asarray(x)) for path, x in jax.tree_util.tree_leaves_with_path(state)]
    assert len(dict(named)) == len(named)
    return dict(named)
