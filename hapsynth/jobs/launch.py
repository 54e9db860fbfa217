"""`hapsynth launch`: starts the processes of a job on this host, and ends them all when one fails."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hapsynth._nvidia import visible_gpus
from hapsynth._xla_flags import AUTOTUNING
from hapsynth.jobs.supervisor import Reaper, Supervisor
from hapsynth.rendezvous.address import COORDINATOR, RENDEZVOUS, JobError, free_ports, parse_address
from hapsynth.rendezvous.server import named
from hapsynth.rendezvous.wire import printable

_POLL_S, _READ_S = 0.05, 0.5
_KEPT, _SHOWN, _LAST = 500, 60, 8
"""Lines of each process that are kept; of the one that failed, those that are shown again: of its last traceback, else
the last."""
DEVICE_IDS = "JAX_LOCAL_DEVICE_IDS"
"""Which of the visible GPUs JAX takes, by their numbers from 0."""
FAILED = 1
"""Exit status where a job is over though no process failed here: one was stopped, lost, or is on another host."""
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
    tell_s: float = 3.0
    """For the others to say themselves, by the rendezvous, who failed."""
    grace_s: float = 5.0
    """From SIGTERM, which JAX catches, to SIGKILL."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "processes", self.processes or self.here)
        if not 0 <= self.rank <= self.processes - self.here:
            last = self.rank + self.here - 1
            raise JobError(
                f"processes {self.rank} to {last} are to run here, and the job has 0 to {self.processes - 1}: "
                "--process is the first one here, -n how many there are here, --processes how many in all"
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
        gpus = visible_gpus()
        shares = _gpu_shares(gpus, self.here)
        return [
            {
                **meet,
                # How many there are and which this is JAX reads from Open MPI's variables, of no name of its own.
                "OMPI_MCA_orte_hnp_uri": "hapsynth-launch",
                "OMPI_COMM_WORLD_SIZE": str(self.processes),
                "OMPI_COMM_WORLD_RANK": str(self.rank + i),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(i),
                "PYTHONUNBUFFERED": "1",
                **({DEVICE_IDS: shares[i]} if shares else {}),
                **(_unshared() if gpus else {}),
            }
            for i in range(self.here)
        ]


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `hapsynth launch` started this process: `jax.distributed.initialize()` needs no arguments then."""
    return environment.get("OMPI_MCA_orte_hnp_uri") == "hapsynth-launch"


def launch(plan: Launch, command: Sequence[str]) -> int:
    """Run `command` in each process, their output line by line after `[number]`, and wait for all.

    Returns 0, or the exit status of the first that failed (128 + the signal that ended it). When one fails, is stopped
    or is lost the others are ended, on all hosts, and standard error says which it was; SIGINT, SIGTERM and SIGHUP are
    passed on to all, and what does not end then is killed. So it is when this process itself is killed.
    """
    with ExitStack() as stack:
        received = stack.enter_context(_signals())
        environments = plan.environments()
        meet = {name: environments[0][name] for name in (COORDINATOR, RENDEZVOUS) if name in environments[0]}
        supervisor = Supervisor(plan.rank, plan.here, plan.processes, meet, local=not plan.coordinator)
        stack.enter_context(supervisor)
        running = _Running(plan, received, supervisor)
        stack.callback(running.close)
        for i, environment in enumerate(environments):
            running.start(plan.rank + i, command, {**os.environ, **environment, **supervisor.environment})
        return running.wait()


class _Process:
    """One process of the job, as its launcher sees it."""

    def __init__(self, rank: int, popen: subprocess.Popen[str]) -> None:
        self.rank, self.popen, self.pid = rank, popen, popen.pid
        self.name = named(rank, socket.gethostname(), popen.pid)
        self.last: deque[str] = deque(maxlen=_KEPT)
        self.readers: list[threading.Thread] = []
        self.stopped = False
        self.ended = False
        self.refused = False
        """It, or what it started, is another user's, as under sudo, who alone may signal it."""

    @property
    def code(self) -> int | None:
        return self.popen.returncode

    @property
    def how(self) -> str:
        """It ended, as a person says it, of which error and where."""
        if self.code is None:
            return f"{self.name} still runs: this user may not signal it"
        code = self.code
        if code >= 0:
            return f"{self.name} ended with exit code {code}{self._error() if code else ''}"
        return f"{self.name} was killed by signal {-code} ({_signal(-code)})"

    def last_words(self) -> tuple[str, list[str]]:
        """What is shown of its output, and those lines: its last traceback with what follows, or its last lines."""
        lines = self._traceback()
        if not lines:
            return "its last lines", list(self.last)[-_LAST:]
        # Its end says what and where.
        return "its traceback", lines if len(lines) <= _SHOWN else [lines[0], "  ...", *lines[2 - _SHOWN :]]

    def _traceback(self) -> list[str]:
        """Its last one, and what follows; none where it printed none."""
        lines = list(self.last)
        at = max((i for i, line in enumerate(lines) if line.startswith("Traceback (most")), default=len(lines))
        return lines[at:]

    def _error(self) -> str:
        """Of its last traceback the error, and the line of its own code."""
        lines = self._traceback()[1:]
        error = next((line for line in lines if line and not line[0].isspace()), "")
        places = [found for line in lines if (found := re.match(r'  File "(.+)", line (\d+)', line))]
        own = [p for p in places if not re.search(r"<frozen |/site-packages/|/lib/python\d", p[1])] or places
        at = f" ({Path(own[-1][1]).name}:{own[-1][2]})" if own else ""
        return f", {printable(error, 200)}{at}" if error else ""

    @property
    def why(self) -> str:
        """How it failed, and the way out."""
        code = self.code or 0
        # A shell gives 128 and the signal that ended what it ran.
        number = -code if code < 0 else code - 128 if 128 < code <= 128 + signal.NSIG else 0
        return f"{self.how}: {_way_out(number)}" if code else self.how


class _Running:
    """The processes of this host, each with what it started in a process group of its own."""

    def __init__(self, plan: Launch, received: list[int], supervisor: Supervisor) -> None:
        self._plan = plan
        self.processes: list[_Process] = []
        self._received, self._supervisor = received, supervisor
        self._began = time.monotonic()
        self._first: _Process | None = None
        self._reaper = Reaper(f"the launcher on {socket.gethostname()} (pid {os.getpid()})", plan.grace_s)

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            popen = subprocess.Popen(
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
        process = _Process(rank, popen)
        self._reaper.started(process.pid, process.name)
        self.processes.append(process)
        for source, target in ((popen.stdout, sys.stdout), (popen.stderr, sys.stderr)):
            arguments = (f"[{rank}] ", source, target, process.last)
            reader = threading.Thread(target=_label, args=arguments, daemon=True)
            reader.start()
            process.readers.append(reader)

    def wait(self) -> int:
        """Until all have ended, or the job is over, or a signal has come, and what still ran has been ended; the exit
        status."""
        while not self._received and not self._supervisor.over and self._look() and self._first is None:
            time.sleep(_POLL_S)
        if not self._received and not self._supervisor.over and self._first is None:
            self._supervisor.leave()
            self._supervisor.wait_for_others(lambda: bool(self._received))
        # A signal may have come, or the job have become over elsewhere, meanwhile.
        if self._received:
            why = f"{_signal(self._received[0])} came to the launcher on {socket.gethostname()} (pid {os.getpid()})"
            # Before any process ends of it, which would be taken for the fault.
            self._supervisor.say({"interrupted": why})
            self._supervisor.flush()
            self.end()
            self._supervisor.leave()
            again = "a person or a batch system sent it; start the job again to go on from its last checkpoint"
            self._summarize(f"interrupted: {why}: {again}")
            signals = len(self._received)
            self._supervisor.wait_for_others(lambda: len(self._received) > signals)
            return 128 + self._received[0]
        if self._supervisor.over or self._first is not None:
            return self._fail()
        # What they left running, which may hold their output open.
        self._send(signal.SIGKILL)
        self._show_rest()
        return 0

    def _fail(self) -> int:
        # For the others to say themselves who failed, as the rendezvous tells them.
        until = time.monotonic() + self._plan.tell_s
        # One that is stopped says nothing.
        while self._look() and time.monotonic() < until and not self._received:
            if all(p.ended or p.stopped for p in self.processes):
                break
            time.sleep(_POLL_S)
        self.end()
        # The fault may be another host's.
        while not self._supervisor.over and time.monotonic() < until:
            time.sleep(_POLL_S)
        first = self._first
        self._summarize(self._supervisor.over or (first.why if first is not None else "it was over elsewhere"))
        self._supervisor.leave()
        self._supervisor.wait_for_others(lambda: bool(self._received))
        return _status(first.code or 0) if first is not None else FAILED

    def _look(self) -> bool:
        """See who has ended, been stopped, gone on; whether any still runs."""
        new: list[_Process] = []
        for process in self.processes:
            if process.ended:
                continue
            if process.popen.poll() is None:
                self._look_at(process)
                continue
            process.ended = True
            self._reaper.ended(process.pid)
            new.append(process)
        # Of several at once that which a signal ended: others may have failed for want of it.
        for process in sorted(new, key=lambda p: ((p.code or 0) >= 0, p.rank)):
            failed = bool(process.code)
            for reader in process.readers if failed else ():
                # Its last words; what it started may keep its output open.
                reader.join(_READ_S)
            if failed and self._first is None and not self._supervisor.over:
                self._first = process
            self._supervisor.say({"ended": process.rank, "how": process.why, "failed": failed})
        return not all(process.ended for process in self.processes)

    def _look_at(self, process: _Process) -> None:
        if not hasattr(os, "waitid"):
            return
        with suppress(ChildProcessError):
            found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            if found is None:
                return
            process.stopped = found.si_code == os.CLD_STOPPED
            name = "stopped" if process.stopped else "continued"
            self._supervisor.say({name: process.rank, "who": process.name})

    def end(self) -> None:
        """Leave nothing behind: a signal to what still runs, SIGKILL to what does not heed it, or at a second one."""
        self._send(self._received[0] if self._received else signal.SIGTERM)
        until, signals = time.monotonic() + self._plan.grace_s, len(self._received)
        while self._look() and time.monotonic() < until and len(self._received) <= signals:
            time.sleep(_POLL_S)
        # Also where the process itself has ended: it may have left some of its own.
        self._send(signal.SIGKILL)
        for process in self.processes:
            if not process.refused:
                process.popen.wait()
        self._look()
        self._show_rest()

    def _show_rest(self) -> None:
        """What was printed until the end; what they started may keep their output open."""
        until = time.monotonic() + self._plan.grace_s
        for reader in (reader for process in self.processes for reader in process.readers):
            reader.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """In whatever way `wait` ended."""
        if not all(p.ended or p.refused for p in self.processes):
            self.end()
        self._send(signal.SIGKILL)
        for process in (p for p in self.processes if p.refused):
            with suppress(OSError, ValueError):
                text = f"{process.name}, or what it started, may still run: end it as the user who owns it"
                print(f"hapsynth launch: {text}", file=sys.stderr, flush=True)
        self._reaper.close()

    def _send(self, number: int) -> None:
        """A signal to all."""
        for process in self.processes:
            process.refused = False
            try:
                os.killpg(process.pid, number)
                # One that is stopped takes nothing but SIGKILL.
                os.killpg(process.pid, signal.SIGCONT)
            except ProcessLookupError:
                continue
            except PermissionError:
                process.refused = True

    def _summarize(self, why: str) -> None:
        lines = [f"the job is over after {time.monotonic() - self._began:.1f} s: {why}"]
        lines += [f"  {process.how}" for process in self.processes]
        shown = next((p for p in self.processes if f"{p.name} " in f"{why} "), self._first)
        if shown is not None and shown.last:
            what, last = shown.last_words()
            lines.append(f"root cause: process {shown.rank}, {what}:")
            lines += [f"  {printable(line, 300)}" for line in last]
        with suppress(OSError, ValueError):
            for line in lines:
                print(f"hapsynth launch: {line}", file=sys.stderr)
            sys.stderr.flush()


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


_CRASHES = [getattr(signal, n) for n in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE") if hasattr(signal, n)]


def _way_out(number: int) -> str:
    """Of a process that a signal ended; 0 for one that ended by itself."""
    if number == signal.SIGKILL:
        return (
            "a person did it, or the system for want of memory, as its log (dmesg) says: give that host more memory, "
            "or synthesize with a lower memory_limit, and start the job again"
        )
    if number in _CRASHES:
        return (
            "native code crashed, and what it printed last says why; PYTHONFAULTHANDLER=1 shows where: mend that and "
            "start the job again"
        )
    if number:
        return "a person or a batch system did it, whose log says why: start the job again"
    return "what it printed last says why: mend that and start the job again"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "of no name"


def _label(label: str, source: IO[str], target: IO[str], last: deque[str]) -> None:
    encoding = getattr(target, "encoding", None) or "utf-8"
    with source:
        for line in source:
            last.append(line.rstrip("\n"))
            # Where nobody reads it, or the disk is full: what the process prints is still taken from it.
            with suppress(OSError, ValueError):
                target.write((label + line.rstrip("\n") + "\n").encode(encoding, "backslashreplace").decode(encoding))
                target.flush()


@contextmanager
def _signals() -> Generator[list[int]]:
    """The signals that came, instead of their effect."""
    received: list[int] = []
    before: dict[int, Any] = {}
    try:
        for number in _SIGNALS:
            # What nohup has it ignore stays so; a shell in which nobody types has what runs behind it ignore SIGINT.
            if number != getattr(signal, "SIGHUP", None) or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda n, _: received.append(n))
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _unshared() -> dict[str, str]:
    """XLA_FLAGS by which programs of the user's own compile among GPUs of several kinds, too (`_xla_flags.UNSHARED`);
    those of a file, and what the user says of it, stay."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if AUTOTUNING in flags or (flags and not flags.startswith("-")):
        return {}
    return {"XLA_FLAGS": f"{flags} --{AUTOTUNING}=false".strip()}


def _gpu_shares(gpus: int, processes: int) -> list[str]:
    """Which of the GPUs here each process takes, of those that JAX_LOCAL_DEVICE_IDS lists if it is set; nothing where
    there are none, or one process takes what the user says.

    JAX would give one to each process of a job like Open MPI's, also where there are more.
    """
    listed = os.environ.get(DEVICE_IDS, "").strip()
    if not gpus or (listed and processes == 1):
        return []
    ids = [part.strip() for part in listed.split(",")] if listed else [*map(str, range(gpus))]
    if len({*ids}) < len(ids):
        raise JobError(f"{DEVICE_IDS} is {listed!r}, and processes would share a GPU: list each once, or unset it")
    if len(ids) % processes:
        what = f"the {len(ids)} GPUs of {DEVICE_IDS}={listed}" if listed else f"{gpus} GPUs"
        raise JobError(
            f"{what} can't be shared evenly by {processes} processes: choose some with CUDA_VISIBLE_DEVICES, or "
            f"start processes one by one with --process, each with its own {DEVICE_IDS}"
        )
    each = len(ids) // processes
    return [",".join(ids[i * each : (i + 1) * each]) for i in range(processes)]
