"""`EmulatedCluster`: makes the groups and the network, runs processes in them, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from emulated import cgroup, network
from emulated.cgroup import Hierarchies
from emulated.spec import Machine, cores_of
from hapsynth.jobs.launch import Launch

PREFIX = "hape"
PORT = 12355
_PACE = "import time\nwhile True: time.sleep({:g})"
"""A thread of the group that wakes again and again. Linux stops a group that has used up its quota when something in
it wakes or at a tick of the scheduler, of 4 ms: with 1 ms of each 5 a process ran 3 ms and then, and with it the thread
that sends for it, stood still for 13 to 24. So it runs 1 and stands still for 4."""
_ENTER = """
for folder in $FOLDERS; do echo $$ > "$folder/cgroup.procs" || exit 125; done
unset FOLDERS
[ -z "$PACE" ] || "$PYTHON" -ISc "$PACE" </dev/null >/dev/null 2>&1 &
unset PACE PYTHON
space="/run/netns/$1" name="$2" hosts="$3"
shift 3
exec nsenter --net="$space" unshare --uts --mount sh -c '
    mount --bind "$2" /etc/hosts && echo "$1" > /proc/sys/kernel/hostname || exit 125
    shift 2
    exec "$@"' sh "$name" "$hosts" "$@"
"""


class MissingError(RuntimeError):
    """Something that it needs is not on this machine; the message names it."""


class EmulatedCluster:
    """Machines of unlike speed, links and memory, on this one; a context manager.

        with EmulatedCluster(machines("1.0:0.3", rate="1Gbit")) as cluster:
            codes = cluster.run(["python", "train.py"])

    Every process (with its children) is in control groups of its own, every machine's in a network namespace and under
    a host name, which all machines resolve to its address there. On leaving, and when this process ends in whatever
    way, all that runs in it is killed and all of it taken away; so is, on entering, what an earlier run left.
    Raises MissingError without root, tools, controllers or queues.
    """

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines = list(machines)
        self.members = [machine for machine in self.machines for _ in range(machine.processes)]
        """The machine of each process."""
        self.name = f"{PREFIX}{os.getpid()}"
        self._lock = -1
        self._reaper: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def coordinator(self) -> str:
        """HOST:PORT of the first machine, where the first process of a job may listen."""
        return f"{self.machines[0].name}:{PORT}"

    def __enter__(self) -> EmulatedCluster:
        if lacking := network.missing():
            raise MissingError(f"an emulated cluster needs {', '.join(lacking)}")
        remove_leftovers()
        try:
            folder, hidden = _folder(self.name), _folder(f".{self.name}")
            # Locked before it can be taken for a leftover by another one that begins now.
            hidden.mkdir(exist_ok=True)
            self._lock = os.open(hidden / "lock", os.O_CREAT | os.O_RDWR)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            hidden.rename(folder)
            self._reaper = _reaper(self.name, self._lock)
            hosts = [f"{network.address(i)} {m.name}" for i, m in enumerate(self.machines)]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")
            hierarchies = Hierarchies.here()
            self._folders = [hierarchies.make(f"{self.name}-{i}", m) for i, m in enumerate(self.members)]
            network.make(self.name, self.machines)
        except BaseException as error:
            self.close()
            if isinstance(error, (cgroup.CgroupError, network.NetworkError)):
                raise MissingError(f"an emulated cluster needs {error}") from error
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and take everything away; may be called twice."""
        if self._lock < 0:
            return
        remove(self.name)
        os.close(self._lock)
        self._lock = -1
        for process in self._processes:
            with process:
                process.wait()
        if self._reaper is not None:
            self._reaper.communicate()

    def start(self, i: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Process i, on its machine, with its output and errors piped.

        `{i}`, `{n}`, `{name}` and `{coordinator}` stand for its number, how many there are, the machine's name, and
        `coordinator`. The environment has them too, where `jax.distributed.initialize()` looks for them.
        """
        machine = self.members[i]
        space = f"{self.name}-{self.machines.index(machine)}"
        fields = {"i": str(i), "n": str(len(self.members)), "name": machine.name, "coordinator": self.coordinator}
        filled = [re.sub(r"\{(i|n|name|coordinator)\}", lambda m: fields[m[1]], part) for part in command]
        environment = {
            **(os.environ if env is None else env),
            "FOLDERS": " ".join(map(str, self._folders[i])),
            "EMULATED_CPU": str(self._folders[i][0]),
            "EMULATED_QUOTA": str(machine.quota),
            "PYTHON": sys.executable,
            "PACE": _PACE.format(cgroup.PERIOD_US * 1e-6 * machine.quota / 2) if machine.quota < 1 else "",
            **Launch(1, len(self.members), i, self.coordinator).environments()[0],
        }
        cores = cores_of([m.quota for m in self.members], sorted(os.sched_getaffinity(0)))[i]
        hosts = str(_folder(self.name) / "hosts")
        process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cores)), "sh", "-c", _ENTER, "sh", space, machine.name, hosts, *filled],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
        self._processes.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        show: Callable[[str, str], None] | None = None,
    ) -> list[int]:
        """The command as every process, to its end; exit codes, minus the signal of one that was killed.

        When one fails, or time is up, the others are ended. `show(machine, line)` gets the output, lines after
        `[machine] ` on standard output if not given.
        """
        # With the line's end in one piece: each process has a thread that shows what it says.
        shown = show or (lambda name, line: print(f"[{name}] {line}\n", end="", flush=True))
        processes = [self.start(i, command, env) for i in range(len(self.members))]
        threads = [
            threading.Thread(target=_read, args=(process, self._label(i), shown), daemon=True)
            for i, process in enumerate(processes)
        ]
        for thread in threads:
            thread.start()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        late = failed = False
        while not failed and not late and any(process.poll() is None for process in processes):
            failed = any(process.poll() for process in processes)
            late = until is not None and time.monotonic() > until
            time.sleep(0.02)
        if late:
            shown("cluster", f"ended after {timeout_s:g} s")
        elif broken := [i for i, process in enumerate(processes) if process.poll()]:
            shown("cluster", f"ended: {self._why(broken[0], processes)}")
        for folders in self._folders:
            cgroup.kill(folders)
        for thread in threads:
            thread.join(timeout=5)
        return [process.wait() for process in processes]

    def _label(self, i: int) -> str:
        """The machine's name; of several processes with the number that each has there."""
        machine = self.members[i]
        return machine.name if machine.processes == 1 else f"{machine.name}.{i - self.members.index(machine)}"

    def _why(self, i: int, processes: Sequence[subprocess.Popen[str]]) -> str:
        code, name = processes[i].wait(), self._label(i)
        if code == -9 and cgroup.out_of_memory(self._folders[i]):
            return f"{name} was killed at its memory limit of {self.members[i].memory} bytes"
        return f"{name} was killed by signal {-code}" if code < 0 else f"{name} failed with exit code {code}"


def remove_leftovers() -> list[str]:
    """Take away the leftovers of runs that are over; their names."""
    leftovers = {m[1] for name in _names() if (m := re.match(rf"({PREFIX}\d+)(-\d+)?$", name))}
    gone = [name for name in sorted(leftovers) if not _alive(name)]
    for name in gone:
        remove(name)
    return gone


def remove(name: str) -> None:
    """End and take away all of one cluster, as far as it is there."""
    with contextlib.suppress(cgroup.CgroupError):
        hierarchies = Hierarchies.here()
        groups = {folder.name for folder in (*hierarchies.cpu.iterdir(), *hierarchies.memory.iterdir())}
        for group in sorted(g for g in groups if g.startswith(f"{name}-")):
            cgroup.remove(hierarchies.folders(group))
    network.remove(name)
    shutil.rmtree(_folder(name), ignore_errors=True)


def _names() -> list[str]:
    with contextlib.suppress(cgroup.CgroupError):
        hierarchies = Hierarchies.here()
        groups = [folder.name for folder in (*hierarchies.cpu.iterdir(), *hierarchies.memory.iterdir())]
        return [*network.names(), *os.listdir(tempfile.gettempdir()), *groups]
    return [*network.names(), *os.listdir(tempfile.gettempdir())]


def _alive(name: str) -> bool:
    """Whether the run, or the process that cleans up after it, is still there to hold its lock."""
    try:
        lock = os.open(_folder(name) / "lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _folder(name: str) -> Path:
    return Path(tempfile.gettempdir()) / name


def _reaper(name: str, lock: int) -> subprocess.Popen[bytes]:
    """A process that removes the cluster when this one is gone, in whatever way: its input ends then."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from emulated.cluster import remove; sys.stdin.read(); "
    command = [sys.executable, "-c", code + "remove(sys.argv[2])", str(Path(__file__).parent.parent), name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[lock], start_new_session=True)


def _read(process: subprocess.Popen[str], name: str, show: Callable[[str, str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        show(name, line.rstrip("\n"))
