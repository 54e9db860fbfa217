"""What goes before the first call of a plan that runs on several processes, and what watches over them after it.

The processes meet at the rendezvous, compare what they are and hold, compile, and meet again: gloo's first collective
fails where one process comes to it 30 s after another. From then on a process that dies or stalls, or that ends while
others still run, ends the job in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Mesh

from hapsynth.jobs.process_facts import Facts, of_plan, problems, software
from hapsynth.rendezvous.address import JobError
from hapsynth.rendezvous.client import Client
from hapsynth.rendezvous.cpu_scheduling import as_batch_work
from hapsynth.rendezvous.meeting import _gathered, _job, _joined, _ranks, _wanted
from hapsynth.running.base import Planned


class PreflightError(JobError):
    """The processes of a job do not fit together. All of them raise it, with the same text, before anything runs."""


def before_call(plan: Planned, arguments: Sequence[Any]) -> None:
    """Called by a plan before each run: checks its job before the first one. Does nothing within one process.

    `arguments`: as they are stored. Raises PreflightError where the processes do not fit together, JobError where they
    do not find each other; the process ends where another one died, stalls or never comes.
    """
    if plan.mesh is None or not plan.mesh.is_multi_process:
        return
    as_batch_work()
    if not _wanted():
        return
    client = _joined()
    if plan not in _job.checked:
        preflight(plan.mesh, plan, arguments)
        _job.checked.add(plan)
    _job.in_call = _ranks(plan.mesh)
    client.calls[_job.in_call] += 1


def after_call() -> None:
    """Called by a plan after each run that did not raise."""
    _job.in_call = ()


def preflight(mesh: Mesh, plan: Planned | None = None, arguments: Iterable[Any] = ()) -> list[Facts]:
    """Compare the processes that hold the devices of `mesh`; with a plan compile it, so that all run it at once.

    Returns what each process says of itself, in the order of their numbers; nothing in a process that holds none of
    the devices. Raises as `before_call` does.
    """
    client, ranks = _joined(), _ranks(mesh)
    if client.rank not in ranks:
        return []
    said = software(str(client), client.host, mesh)
    if plan is not None:
        said |= of_plan(plan, arguments)
    found = _meet(client, said, ranks)
    if plan is None:
        return found
    client.doing = "compiling"
    try:
        said["lowered"] = plan.lowered.prepare()
    except Exception as error:
        client.leave(f"{type(error).__name__} in compiling the plan")
        _job.failed = True
        raise
    client.doing = "at work"
    return _meet(client, said, ranks)


def _meet(client: Client, said: Facts, ranks: tuple[int, ...]) -> list[Facts]:
    found = _gathered(client, said, ranks)
    wrong = problems(found)
    if wrong:
        # All have found the same and go their own ways.
        client.close()
        _job.client = None
        raise PreflightError("; ".join(wrong))
    return found
