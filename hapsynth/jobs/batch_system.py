"""What SLURM and Open MPI tell a process that they start: how many there are, which it is, and where the first runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_PORTS = range(20_000, 30_000, 2)
"""Two for each job, below those that Linux gives to outgoing connections; JAX's own choice is among these."""


@dataclass(frozen=True)
class Task:
    """One of the processes that `srun` or `mpirun` started: of `count`, number `index`; `host` is that of the first."""

    count: int
    index: int
    host: str
    job: int

    @property
    def coordinator(self) -> str:
        """An address for JAX's coordinator, alike in all tasks; the port after it is the rendezvous's."""
        return f"{self.host}:{_PORTS[self.job % len(_PORTS)]}"


def started_by(environment: Mapping[str, str]) -> Task | None:
    """This process among those that a batch system started with it; None where none did, or it is the only one.

    Open MPI says where `mpirun` runs, which is taken to be the first process's host, as JAX takes it.
    """
    read = lambda name: int(environment.get(name, ""))
    try:
        if "OMPI_COMM_WORLD_RANK" in environment:
            uri = environment["OMPI_MCA_orte_hnp_uri"]
            hosts = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
            assert hosts is not None
            host, number = hosts[1] or f"[{hosts[2]}]", int(uri.partition(".")[0]) >> 12
            task = Task(read("OMPI_COMM_WORLD_SIZE"), read("OMPI_COMM_WORLD_RANK"), host, number)
        else:
            number = 31 * read("SLURM_JOB_ID") + int(environment.get("SLURM_STEP_ID", "0"))
            host = _first_host(environment["SLURM_STEP_NODELIST"])
            task = Task(read("SLURM_NTASKS"), read("SLURM_PROCID"), host, number)
    except (KeyError, ValueError, AssertionError):
        return None
    return task if task.count > 1 else None


def _first_host(nodes: str) -> str:
    """Of SLURM's list of nodes: `a1` of `a1,b2`, `a001` of `a[001-004,7],b2`."""
    found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    if found is None:
        raise ValueError(nodes)
    return found[1] + (found[2] or "")
