"""CPU and memory limits, of control groups version 1 and 2."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from emulated.spec import Machine

PERIOD_US = 5000
"""Short, so that a step of tens of milliseconds sees a slow core and not one that comes and goes."""


class CgroupError(RuntimeError):
    """No control groups can be made here."""


@dataclass(frozen=True)
class Hierarchies:
    """Where groups of the processor and of memory are made; one folder for both in version 2."""

    version: int
    cpu: Path
    memory: Path

    @staticmethod
    def find(mounts: str, own: str) -> Hierarchies:
        """From the text of /proc/self/mounts and /proc/self/cgroup. Raises CgroupError that says what is missing."""
        tables = [line.split() for line in mounts.splitlines()]
        v1 = {name: Path(t[1]) for t in tables if t[2] == "cgroup" for name in t[3].split(",")}
        if "cpu" in v1 and "memory" in v1:
            parts = (line.split(":", 2) for line in own.splitlines())
            own_paths = {name: path for _, names, path in parts for name in names.split(",")}
            # Limits of those above go on to hold; a path of another namespace is not there to be seen.
            inside = lambda name: p if (p := v1[name] / own_paths.get(name, "/").lstrip("/")).is_dir() else v1[name]
            return Hierarchies(1, inside("cpu"), inside("memory"))
        for t in tables:
            if t[2] == "cgroup2":
                root = Path(t[1])
                have = (root / "cgroup.controllers").read_text().split()
                if {"cpu", "memory"} <= set(have):
                    return Hierarchies(2, root, root)
        raise CgroupError("the cpu and memory controllers of control groups, version 1 or 2, mounted and writable")

    @staticmethod
    def here() -> Hierarchies:
        return Hierarchies.find(Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text())

    def folders(self, name: str) -> list[Path]:
        return list(dict.fromkeys([self.cpu / name, self.memory / name]))

    def make(self, group: str, machine: Machine) -> list[Path]:
        """The folders of a new group with a machine's limits; a process joins by writing itself to `cgroup.procs`."""
        try:
            if self.version == 2:
                (self.cpu / "cgroup.subtree_control").write_text("+cpu +memory")
            for folder in self.folders(group):
                folder.mkdir()
            self.limit(group, machine.quota)
            if machine.memory is not None:
                file = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
                (self.memory / group / file).write_text(str(machine.memory))
                self._without_swap(group, machine.memory)
        except OSError as error:
            raise CgroupError(f"a control group that may be written to: {error}") from error
        return self.folders(group)

    def _without_swap(self, group: str, memory: int) -> None:
        """What does not fit is not to be slow. The files are there where the kernel counts swap."""
        for name, most in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", memory)):
            if (self.memory / group / name).exists():
                (self.memory / group / name).write_text(str(most))

    def limit(self, group: str, quota: float | None) -> None:
        """Hold a group to `quota` cores, and put it before what else runs on this machine; None: neither."""
        _limit(self.cpu / group, quota)


def _limit(folder: Path, quota: float | None) -> None:
    microseconds = None if quota is None else max(1000, round(quota * PERIOD_US))
    # With a quota a group can't starve others; without one it takes its turn.
    first = quota is not None
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{'max' if microseconds is None else microseconds} {PERIOD_US}")
        (folder / "cpu.weight").write_text("10000" if first else "100")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text("-1" if microseconds is None else str(microseconds))
        (folder / "cpu.shares").write_text("262144" if first else "1024")


@contextlib.contextmanager
def unlimited() -> Generator[None]:
    """In a process of an emulated cluster: as many cores as there are for this block, in which nothing is measured, as
    compiling. Does nothing in any other process."""
    folder, quota = os.environ.get("EMULATED_CPU"), os.environ.get("EMULATED_QUOTA")
    if folder is None or quota is None:
        yield
        return
    _limit(Path(folder), None)
    try:
        yield
    finally:
        _limit(Path(folder), float(quota))


def hold_to(quota: float) -> None:
    """In a process of an emulated cluster: hold its machine to so many cores from now on."""
    _limit(Path(os.environ["EMULATED_CPU"]), quota)
    os.environ["EMULATED_QUOTA"] = str(quota)


def kill(folders: Sequence[Path]) -> None:
    """End what runs in the groups now."""
    for folder in folders:
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def remove(folders: Sequence[Path], patience_s: float = 10.0) -> None:
    """End the processes in the groups, and take these away. Raises CgroupError where that can't be done in time."""
    until = time.monotonic() + patience_s
    for folder in folders:
        while folder.exists():
            kill([folder])
            try:
                folder.rmdir()
            except FileNotFoundError:
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise CgroupError(f"{folder} could not be removed: {error}") from error
                time.sleep(0.01)


def out_of_memory(folders: Sequence[Path]) -> bool:
    """Whether the kernel killed something of these groups at their memory limit."""
    files = [folder / name for folder in folders for name in ("memory.oom_control", "memory.events")]
    counts = [line.split() for file in files if file.exists() for line in file.read_text().splitlines()]
    return any(name == "oom_kill" and int(count) > 0 for name, count in counts)
