"""One search for all processes of a job: the process that holds the mesh's first device searches, and the others take
its plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import Traced
from hapsynth.jobs.preflight import checked_together
from hapsynth.jobs.process_facts import VERSIONS, of_functions, software
from hapsynth.rendezvous.address import JobError
from hapsynth.rendezvous.meeting import exchanged, meeting, ranks_of, wanted
from hapsynth.rendezvous.server import COMPARING
from hapsynth.running.plan_cache import plain
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.search.sizing.fixed_ratios import RatioError

PLANNED_ONCE = "the plan of the process that searched"
"""How errors in the other processes name the plan, where a saved plan's would name its file."""
T = TypeVar("T")
_PLANNING = "planning"
_COMPARED = ("process", "host", "numerics", "threads", "mesh", *VERSIONS)


def searched_once(
    mesh: Mesh | None,
    functions: Sequence[Traced],
    cluster: Cluster,
    asked: Mapping[str, Any],
    search: Callable[[], T],
    to_dict: Callable[[T], Any],
    read: Callable[[Any], T],
) -> T:
    """What `search` finds in the process of the mesh's first device, in all processes that hold devices of the mesh.

    They first compare what they are to plan: `functions`, `cluster` and the options `asked`, of which `plain` makes
    JSON. `to_dict` makes JSON of what was found, `read` the inverse. A process that holds none of the devices, or is
    alone, or meets nobody (HAPSYNTH_PREFLIGHT=off) searches by itself.

    InfeasibleError, RatioError and KeyboardInterrupt of the search are raised in all; for any other exception the
    others raise JobError, which has its text. Raises PreflightError where the processes are to plan unlike things,
    JobError where the job is over.
    """
    if mesh is None or not mesh.is_multi_process or not wanted() or jax.process_index() not in ranks_of(mesh):
        return search()
    client, ranks, first = meeting.client, ranks_of(mesh), mesh.devices.flat[0].process_index
    here = software(str(client), client.host, mesh)
    facts = {key: here[key] for key in _COMPARED if key in here} | of_functions(functions, cluster)
    facts["asked"] = json.loads(json.dumps(asked, sort_keys=True, default=plain))
    with meeting.doing(COMPARING):
        together = checked_together(meeting.gather(facts, ranks))
    if client.rank != first:
        told = _exchanged(mesh, None)[ranks.index(first)]
        if "found" in told:
            return read(told["found"])
        raise _error(told, together[ranks.index(first)]["process"])
    try:
        with meeting.doing(_PLANNING):
            found = search()
        said = {"found": to_dict(found)}
    except BaseException as error:
        # Whatever it is: the others wait without a time limit.
        details = {"needs": error.needs, "excess": error.excess} if isinstance(error, InfeasibleError) else {}
        _exchanged(mesh, {"error": type(error).__name__, "text": str(error), **details})
        raise
    _exchanged(mesh, said)
    return found


def _error(told: Mapping[str, Any], searcher: str) -> BaseException:
    """What the others raise for what the search did."""
    match told["error"]:
        case "InfeasibleError":
            return InfeasibleError(told["text"], told["needs"], told["excess"])
        case "RatioError":
            return RatioError(told["text"])
        case "KeyboardInterrupt":
            return KeyboardInterrupt(told["text"])
        case kind:
            return JobError(f"{searcher} could not plan: {kind}: {told['text']}")


def _exchanged(mesh: Mesh, said: Any) -> list[Any]:
    """Waits as long as the search takes."""
    messages = exchanged(mesh, said, _PLANNING)
    assert messages is not None
    return messages
