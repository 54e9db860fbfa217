"""What goes before the first call of a plan that runs on several processes, and what watches over them after it.

The processes meet at the rendezvous, compare what they are and hold, compile, and meet again: gloo's first collective
fails where one process comes to it 30 s after another. From then on a process that dies or stalls, or that ends while
others still run, ends the job in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.sharding import Mesh

from hapsynth._warn import warn_user
from hapsynth.jobs.process_facts import (
    Facts,
    compiled_facts,
    left_out,
    notices,
    of_collectives,
    of_plan,
    problems,
    software,
)
from hapsynth.rendezvous.address import PREFLIGHT, JobError
from hapsynth.rendezvous.cpu_scheduling import as_batch_work
from hapsynth.rendezvous.meeting import connect, meeting, ranks_of, wanted
from hapsynth.running.base import Planned

_checked: WeakKeyDictionary[Planned, set[bool]] = WeakKeyDictionary()


class PreflightError(JobError):
    """The processes of a job do not fit together. All of them raise it, with the same text, before anything runs."""


def check_mesh(mesh: Any) -> None:
    """Called with the mesh to plan for: the processes of a mesh of several join, so that all hear of one that fails
    from here on.

    Raises PreflightError, in all processes and before anything is sent, where the mesh leaves out a process for
    another's second device; JobError where the processes do not find each other; TypeError where it is no mesh.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; give a jax.sharding.Mesh, or None for a plan that is not run"
        )
    if jax.process_count() == 1 or not wanted():
        return
    place = lambda devices: [(d.process_index, d.id) for d in devices]
    wrong = left_out(place(mesh.devices.flat), place(jax.devices(mesh.devices.flat[0].platform)))
    if wrong:
        raise PreflightError(wrong)
    ranks = ranks_of(mesh)
    # A process may plan for others: what it plans it can't call. But all processes take part in agreeing where they
    # meet.
    if len(ranks) > 1 and (jax.process_index() in ranks or not meeting.knows_where):
        connect()


def before_placing(plan: Planned, donate: bool) -> None:
    """Called by a plan before it places the arguments of a call: before its first one its processes meet, as what lies
    on others' devices is gathered by a collective. Raises as `before_call` does."""
    if plan.mesh is None or not plan.mesh.is_multi_process or not wanted():
        return
    if donate not in _checked.get(plan, ()):
        as_batch_work()
        with meeting.doing("placing arguments"):
            meeting.gather(None, ranks_of(plan.mesh))


def before_call(plan: Planned, arguments: Sequence[Any], donate: bool) -> None:
    """Called by a plan before each run: checks its job before the first one. Does nothing within one process.

    `arguments`: as they are stored; `donate`: whether the call consumes carried state, for which another program is
    compiled. A plan in fused form whose collectives differ, as compiled, runs staged from now on, unless that form was
    asked for. Raises PreflightError where the processes do not fit together, JobError where they do not find each
    other; the process ends where another one died, stalls or never comes.
    """
    if plan.mesh is None or not plan.mesh.is_multi_process:
        return
    as_batch_work()
    if not wanted():
        if plan.form == "fused":
            _not_fused(plan, f"{PREFLIGHT}=off leaves the collectives of its processes' programs uncompared")
        return
    meeting.join()
    checked = _checked.setdefault(plan, set())
    if donate not in checked:
        preflight(plan.mesh, plan, arguments, donate)
        checked.add(donate)
    meeting.begin_call(ranks_of(plan.mesh))


def after_call(plan: Planned, returned: bool) -> None:
    """Called by a plan after each run that `before_call` let begin: whether it returned, or raised."""
    if plan.mesh is not None and plan.mesh.is_multi_process:
        meeting.end_call(returned)


def preflight(
    mesh: Mesh, plan: Planned | None = None, arguments: Iterable[Any] = (), donate: bool | None = None
) -> list[Facts]:
    """Compare the processes that hold the devices of `mesh`; with a plan compile it, so that all run it at once.
    `donate`: as of `before_call`; None for what the plan does by itself.

    Returns what each process says of itself, in the order of their numbers; nothing in a process that holds none of
    the devices. Raises as `before_call` does.
    """
    client, ranks = meeting.client, ranks_of(mesh)
    if client.rank not in ranks:
        return []
    said, arguments = software(str(client), client.host, mesh), [*arguments]
    if plan is not None:
        said |= of_plan(plan, arguments, donate)
    together = checked_together(meeting.gather(said, ranks))
    if client.rank == ranks[0]:
        for text in notices(together):
            warn_user(text, RuntimeWarning)
    # They have been compared, and are most of what is said.
    said.pop("values", None)
    said |= {} if plan is None else _compiled(plan, donate, arguments)
    if said["platform"] == "cpu":
        # Of gloo's network; those between accelerators may be others.
        said["links"] = {"rank": client.rank, "never": client.unreachable(ranks)}
    found = meeting.gather(said, ranks)
    unlike = of_collectives(found)
    if plan is not None and unlike and plan.may_run_staged:
        # In all processes, as all have found the same.
        _not_fused(plan, unlike[0])
        found = meeting.gather(said | _compiled(plan, donate, arguments), ranks)
    return checked_together(found)


def _compiled(plan: Planned, donate: bool | None, arguments: Sequence[Any]) -> Facts:
    try:
        with meeting.doing("compiling"):
            return compiled_facts(plan, plan.donate if donate is None else donate, arguments)
    except Exception as error:
        meeting.fail(error, "compiling the plan")
        raise


def _not_fused(plan: Planned, why: str) -> None:
    """Run a plan staged in place of fused. Raises PreflightError where the form was asked for."""
    if not plan.may_run_staged:
        raise PreflightError(f"the plan can't run in fused form, as {why}; or give form='staged'")
    plan.run_staged(why)
    warn_user(f"the plan runs in staged form, not fused, as {why}", RuntimeWarning)


def checked_together(found: list[Facts]) -> list[Facts]:
    """What the processes say; PreflightError where they do not fit together."""
    wrong = problems(found)
    if wrong:
        # All have found the same.
        meeting.part()
        raise PreflightError("; ".join(wrong))
    return found
