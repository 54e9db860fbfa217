"""The choice of the form in which a plan runs (decisions.md D2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

from jax.sharding import Mesh

from hapsynth import _jax
from hapsynth._quantities import nbytes
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.ir import Graph
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.lower import is_pinned, unlike_in_process
from hapsynth.search.cost.model import CostModel
from hapsynth.search.memory.profile import MemoryProfile, peak
from hapsynth.search.result import Result
from hapsynth.search.scheduling.timeline import program_timeline

_LEAST_SPEEDUP_OF_STAGES = 1.2
"""Between CPUs: the predicted speedup by overlap from which a plan runs in stages. One program has no stages to start,
but some of its computing waits for collectives whose results it does not need (docs/measurements.md, Overlap)."""

Chosen = Literal["switch", "staged", "fused"]
Form = Literal["auto", "switch", "staged", "fused"]
"""How a program runs: as one compiled function for all, as stages that each process compiles for its own shards, as one
function that each compiles for its own, or as fits."""


def check_form(form: Any) -> None:
    """ValueError for an unknown form."""
    if form not in get_args(Form):
        raise ValueError(f"form is {form!r}; give 'auto', 'switch', 'staged' or 'fused'")


def holds_exact(form: Form) -> bool:
    """Whether a form that is asked for stores shards at their exact size."""
    return form in ("staged", "fused")


def not_fused(sizes: Sizes, mesh: Mesh) -> str:
    """Why a plan can't run in fused form on a mesh, and the way out; empty where it can."""
    why = _unlike(sizes, mesh)
    return f"{why}, or give form='switch', or 'staged'" if why else ""


def _unlike(sizes: Sizes, mesh: Mesh) -> str:
    """As `not_fused`, for one that does not ask for the form. Devices of one kind may have unlike shares, too: by
    rounding, or as their hosts' links do."""
    process = unlike_in_process(sizes, mesh)
    if process is None:
        return ""
    return (
        f"process {process} holds devices of unlike shares, which have no program in common: start a process for each "
        "device (hapsynth launch)"
    )


def is_even(sizes: Sizes) -> bool:
    """Whether all devices hold equal shares of everything."""
    return all(len(set(shares)) <= 1 for shares in sizes.shares)


def chosen_form(
    graph: Graph,
    result: Result,
    mesh: Mesh | None,
    only_exact: str,
    *,
    overlap_speedup: Callable[[], float] | None = None,
) -> tuple[Chosen, str]:
    """The form that "auto" chooses, and why. `only_exact`: as the function says. `overlap_speedup`: where collectives
    are to run beside computing, how many times as long the step would take without, as predicted."""
    uneven = not is_even(result.sizes)
    unlike = _unlike(result.sizes, mesh) if uneven and mesh is not None and mesh.is_multi_process else ""
    if overlap_speedup is not None and not no_overlap("staged", mesh):
        speedup = overlap_speedup()
        if speedup >= _LEAST_SPEEDUP_OF_STAGES:
            return "staged", f"overlap makes a step {speedup:.2f} times as fast, and stages keep to the plan's order"
        if _jax.cpu_threads() == 1:
            return "staged", "XLA has one thread in this process, and nothing that one program sends is hidden"
    if uneven and mesh is not None and mesh.is_multi_process and not unlike:
        return "fused", "shards are uneven among processes: each compiles a program of its own exact sizes"
    if only_exact:
        return "staged", only_exact
    if mesh is None:
        return "switch", "the plan was made without its devices"
    if not uneven:
        return "switch", "all shards are alike, so one program is exact on every device"
    if not mesh.is_multi_process:
        return "switch", "one process holds all devices"
    if _sends_in_loops(graph, result):
        return "switch", f"a loop communicates in every trip, and each would be started from the host; {unlike}"
    return "staged", f"shards are uneven, and each process stores and computes its own at exact size; {unlike}"


def least_speedup(form: Form, mesh: Mesh | None) -> float:
    """The predicted speedup from which a plan is made with overlap; 1 where any gain will do. Between CPUs stages alone
    reach it (docs/measurements.md, Overlap), so where the form is left to choose, it is that from which they run."""
    stages = form == "auto" and mesh is not None and mesh.devices.flat[0].platform == "cpu"
    return _LEAST_SPEEDUP_OF_STAGES if stages else 1.0


def no_overlap(form: Form, mesh: Mesh | None, sizes: Sizes | None = None) -> str:
    """Why collectives of a plan can't run beside its computing, and the way out; empty where they can, or where that is
    not known yet: without a mesh, or in the form "auto". `sizes`: of its shards, where they are known."""
    if mesh is not None and not mesh.is_multi_process:
        why = "one process holds all devices, where collectives are copies in memory"
        return f"{why}: start a process for each (hapsynth launch)"
    way_out = lambda: (mesh is not None and sizes is not None and _unlike(sizes, mesh)) or "give form='fused'"
    if form == "switch" and (sizes is None or not is_even(sizes)):
        return f"the plan runs as one program with its computing in conditionals, which run alone: {way_out()}"
    platform = None if mesh is None else mesh.devices.flat[0].platform
    if platform is None or (is_pinned(platform) and form != "staged"):
        return ""
    if is_pinned(platform):
        return f"on {platform} XLA overlaps collectives within one program alone: {way_out()}"
    if platform != "cpu":
        why = f"collectives run beside computing on CPUs and GPUs, and these devices are {platform}"
        return f"{why}: leave overlap out, so that plans are compared as they run"
    # A form that is chosen may be stages.
    if _jax.cpu_threads() > 1 or (form in ("auto", "staged") and _jax.runs_beside()):
        return ""
    return (
        "XLA has one thread in this process, which a collective would keep: begin with the environment variable NPROC=2"
    )


def _sends_in_loops(graph: Graph, result: Result) -> bool:
    sent = (i for i in result.program.instructions if isinstance(i, Convert) and i.is_collective)
    return any(graph.runs[i.region] > 1 for i in sent)


def held_bytes(form: Form, graph: Graph, result: Result, cluster: Cluster, *, overlap: bool) -> tuple[float, ...]:
    """Predicted peak bytes of each device of the cluster in a form, 0 for one that is left out: a plan that was made
    for padded shards may run in one that stores them at their exact size. `overlap`: collectives run beside what is
    computed."""
    if result.exact or not holds_exact(form):
        return result.memory_bytes
    return peak_bytes(graph, result, cluster, exact=True, overlap=overlap)


def peak_bytes(graph: Graph, result: Result, cluster: Cluster, *, exact: bool, overlap: bool) -> tuple[float, ...]:
    """As `held_bytes`, in the program's order, of shards that are stored at their exact size or padded."""
    program, sizes = result.program, result.sizes
    used = tuple(range(cluster.n)) if result.devices is None else result.devices
    budget = replace(result.memory_budget, exact=exact)
    costs = CostModel(graph, cluster.subset(used), FactorTable(graph), program.axes, budget, result.lowering)
    under_way = program_timeline(program, sizes, costs).under_way if overlap else {}
    held = MemoryProfile(program, sizes.classes, costs, under_way).peaks(sizes)
    return tuple(dict(zip(used, held, strict=True)).get(d, 0.0) for d in range(cluster.n))


def only_exact(graph: Graph, result: Result, cluster: Cluster) -> str:
    """Why a plan fits with shards at their exact size alone; empty where padded shards fit too."""
    if not result.exact:
        return ""
    used = tuple(range(cluster.n)) if result.devices is None else result.devices
    budget = replace(result.memory_budget, exact=False)
    padded = CostModel(graph, cluster.subset(used), FactorTable(graph), result.program.axes, budget, result.lowering)
    needed = peak(result.program, result.sizes, padded)
    if needed <= budget.limit:
        return ""
    device = used[budget.limits.index(budget.limit)]
    name = cluster.devices[device].name
    return f"padded shards would need {nbytes(needed)} on device {device} ({name}), which has {nbytes(budget.limit)}"
