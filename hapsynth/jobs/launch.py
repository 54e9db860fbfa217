"""`hapsynth launch`: starts the processes of a job on this host, and ends them all when one fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hapsynth.jobs._address import COORDINATOR, RENDEZVOUS, JobError, free_ports, parse_address

_TELL_S = 3.0
"""For the others to say themselves, by the rendezvous, who failed."""
_GRACE_S = 5.0
"""From SIGTERM, which JAX catches, to SIGKILL."""
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@dataclass(frozen=True)
class Launch:
    """`here`: processes of this host, whose numbers begin at `rank`; `processes`: of the whole job.

    `coordinator`: HOST:PORT where process 0 will listen; '' for free ports of this host, if all processes are here.
    Raises JobError where these do not fit together.
    """

    here: int = 1
    processes: int = 0
    rank: int = 0
    coordinator: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "processes", self.processes or self.here)
        if not 0 <= self.rank <= self.processes - self.here:
            last = self.rank + self.here - 1
            raise JobError(
                f"processes {self.rank} to {last} are to run here, and the job has 0 to {self.processes - 1}: --rank "
                "is the first one here, -n how many there are here, --processes how many in all"
            )
        if not self.coordinator and self.here < self.processes:
            raise JobError("a job on several hosts needs --coordinator HOST:PORT, HOST being that of process 0")
        if self.coordinator:
            parse_address(self.coordinator, "--coordinator")

    def environments(self) -> list[dict[str, str]]:
        """What `jax.distributed.initialize()` and the rendezvous read, for each process of this host."""
        meet: dict[str, str] = {COORDINATOR: self.coordinator}
        if not self.coordinator:
            coordinator, rendezvous = free_ports(2)
            meet = {COORDINATOR: f"localhost:{coordinator}", RENDEZVOUS: f"localhost:{rendezvous}"}
        shares = _gpu_shares(self.here)
        return [
            {
                **meet,
                # How many there are and which this is JAX reads from Open MPI's variables, of no name of its own.
                "OMPI_MCA_orte_hnp_uri": "hapsynth-launch",
                "OMPI_COMM_WORLD_SIZE": str(self.processes),
                "OMPI_COMM_WORLD_RANK": str(self.rank + i),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(i),
                "PYTHONUNBUFFERED": "1",
                **({"JAX_LOCAL_DEVICE_IDS": shares[i]} if shares else {}),
            }
            for i in range(self.here)
        ]


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `hapsynth launch` started this process: `jax.distributed.initialize()` needs no arguments then."""
    return environment.get("OMPI_MCA_orte_hnp_uri") == "hapsynth-launch"


def launch(plan: Launch, command: Sequence[str]) -> int:
    """Run `command` in each process, their output line by line after `[number]`, and wait for all.

    Returns 0, or the exit status of the first that failed (128 + the signal that ended it). When one fails the others
    are ended; SIGINT, SIGTERM and SIGHUP are passed on to all, and what does not end then is killed.
    """
    with ExitStack() as stack:
        running = _Running(stack.enter_context(_signals()))
        stack.callback(running.end)
        for i, environment in enumerate(plan.environments()):
            running.start(plan.rank + i, command, {**os.environ, **environment})
        return running.wait()


class _Running:
    """The processes of this host, each with what it started in a process group of its own."""

    def __init__(self, received: list[int]) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self._received = received
        self._readers: list[threading.Thread] = []

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise JobError(
                f"{command[0]} can't be started: {error.strerror}; give SCRIPT.py, -m MODULE or a program on the PATH"
            ) from None
        self.processes.append(process)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            reader = threading.Thread(target=_label, args=(f"[{rank}] ", source, target), daemon=True)
            reader.start()
            self._readers.append(reader)

    def wait(self) -> int:
        """Until all have ended, or one has failed, or a signal has come; the exit status."""
        status, deadline = 0, float("inf")
        while any(p.poll() is None for p in self.processes):
            if self._received:
                return 128 + self._received[0]
            failed = [p.returncode for p in self.processes if p.returncode]
            if failed and not status:
                status, deadline = _status(failed[0]), time.monotonic() + _TELL_S
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return status or next((_status(p.returncode) for p in self.processes if p.returncode), 0)

    def end(self) -> None:
        """Leave nothing behind: a signal to what still runs, SIGKILL to what does not heed it, or at a second one."""
        first = self._received[0] if self._received else signal.SIGTERM
        self._send(first)
        until, signals = time.monotonic() + _GRACE_S, len(self._received)
        while any(p.poll() is None for p in self.processes):
            if time.monotonic() > until or len(self._received) > signals:
                break
            time.sleep(0.05)
        # Also where the process itself has ended: it may have left some of its own.
        self._send(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for reader in self._readers:
            reader.join(_GRACE_S)

    def _send(self, number: int) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
                # One that is stopped takes nothing but SIGKILL.
                os.killpg(process.pid, signal.SIGCONT)


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


def _label(label: str, source: IO[str], target: IO[str]) -> None:
    with source, suppress(OSError, ValueError):
        for line in source:
            target.write(label + line.rstrip("\n") + "\n")
            target.flush()


@contextmanager
def _signals() -> Generator[list[int]]:
    """The signals that came, instead of their effect."""
    received: list[int] = []
    before: dict[int, Any] = {}
    try:
        for number in _SIGNALS:
            before[number] = signal.signal(number, lambda n, _: received.append(n))
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _gpu_shares(processes: int) -> list[str]:
    """Which of the NVIDIA GPUs here each process takes; nothing where there are none or the user says it.

    JAX would give one to each process of a job like Open MPI's, also where there are more.
    """
    if os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    nodes = [f for f in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", f.name)]
    gpus = len(nodes) if visible is None else len([part for part in visible.split(",") if part.strip()])
    if gpus % processes:
        raise JobError(
            f"{gpus} GPUs can't be shared evenly by {processes} processes: choose some with CUDA_VISIBLE_DEVICES, or "
            "start processes one by one with --rank, each with its own JAX_LOCAL_DEVICE_IDS"
        )
    each = gpus // processes
    return [",".join(str(i * each + j) for j in range(each)) for i in range(processes)] if gpus else []
