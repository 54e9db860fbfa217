"""`synthesize`: from a function and a cluster to a plan."""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from hapsynth._forms import Form, check_form
from hapsynth._jax import is_extended
from hapsynth._ratios import Ratios, pins_of
from hapsynth.cluster import Cluster
from hapsynth.frequency import Expectation, expecting
from hapsynth.instructions.layout import Layout, is_consistent, parse_layout
from hapsynth.plan import Plan
from hapsynth.search.links import mesh_axes
from hapsynth.search.result import Progress
from hapsynth.search.structure import Restriction
from hapsynth.search.subclusters import ClusterPlanner
from hapsynth.trace import Traced, trace


def synthesize(
    fn: Callable[..., Any],
    example_args: Sequence[Any],
    mesh: jax.sharding.Mesh | Cluster,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
    carry: Sequence[tuple[str, str]] | None = None,
    fixed: Mapping[str, str] | None = None,
    ratios: Ratios | None = None,
    expect: Mapping[str, Expectation] | None = None,
    memory_limit: float | None = None,
    leave_out: bool = True,
    time_budget_s: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    form: Form = "auto",
) -> Plan:
    """Find the cheapest distributed program of `fn` on a cluster (HAP, EuroSys'24, with a proof of optimality).

    `example_args`, `example_kwargs`: pytrees of arrays or `jax.ShapeDtypeStruct`s, as `fn` is called. `mesh`: the
    devices to run on, or a `Cluster` to plan without them. `cluster`: what the mesh's devices can do, in mesh order;
    by default the table's figures for their kind. `carry`: pairs (argument path, output path), e.g.
    `[("[0]", "[0]")]`, whose layouts must agree so that the step can be repeated; found by structure when None.
    `fixed`: argument path -> layout (as in `Plan.layouts`) to keep. `ratios`: fractions, one per device in mesh order,
    by which everything that the plan cuts has to be cut; or class -> one per shard, as in `Plan.ratios`, for just those
    classes (`"[1]['x'].0"`, dimension 0 of an argument, names its class too). `expect`: source line of a `while_loop`
    or `cond`, e.g. `"train.py:40"` -> its trips (10 by default), or how often its predicate is true (each branch is
    taken to be as frequent as the others by default; give a sequence for a `switch`). `memory_limit`: bytes per device.
    `leave_out`: whether the plan may leave out devices that would make the step slower (`Plan.devices` are those that
    it uses, `Plan.mesh` is a mesh of them); none is left out where `fixed` or `ratios` say how things lie on them all.
    `time_budget_s`: seconds after which the best plan so far is returned with its gap. `progress`: called now and then
    with the stage, the best cost, the bound, the nodes and the seconds so far. `form`: "switch", one compiled function
    that runs on any mesh, uneven shards padded in memory; "staged", functions that each process compiles for its own
    shards of exact size, with collectives between them; "auto" takes the second for uneven shards among processes.
    A plan for "staged", or for a mesh of several processes, keeps each device within its own memory, of exact shards;
    any other keeps the smallest device, of shards padded to the largest.

    Ctrl-C during the search returns the best plan so far, `plan.result.interrupted`, with a bound that is sought for a
    second or until Ctrl-C is pressed again; where there is no plan yet, KeyboardInterrupt is raised.
    Raises TraceError for arguments or functions that cannot be planned, InfeasibleError when no program fits the
    memory, ValueError for a mesh that is not the cluster's size, TypeError and ValueError for options of no use:
    RatioError, one of these, for `ratios` that break a class's granule, with the nearest that do not.
    """
    began = time.perf_counter()
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}, which can't be called")
    if not isinstance(example_args, (tuple, list)):
        kind = type(example_args).__name__
        raise TypeError(f"example_args is a {kind}; give a tuple of the arguments, (x,) where there is one")
    _check_positive("memory_limit", memory_limit, "bytes per device")
    _check_positive("time_budget_s", time_budget_s, "seconds")
    check_form(form)
    devices, cluster = _devices(mesh, cluster)
    traced = trace(fn, example_args, dict(example_kwargs or {}), carry=carry)
    if expect:
        traced = replace(traced, graph=expecting(traced.graph, expect))
    trace_s = time.perf_counter() - began
    restriction = None if fixed is None else Restriction(stored=_fixed(traced, fixed, len(mesh_axes(cluster))))
    pins = None if ratios is None else pins_of(traced, ratios, mesh_axes(cluster))
    planner = ClusterPlanner(
        traced.graph,
        cluster,
        memory_limit,
        time_budget_s,
        restriction,
        progress,
        leave_out=leave_out,
        pins=pins,
        exact=form == "staged" or (form == "auto" and devices is not None and devices.is_multi_process),
    )
    result = planner.run()
    timings = {"trace_s": trace_s, **result.timings_s, "total_s": time.perf_counter() - began}
    return Plan(traced, replace(result, timings_s=timings), cluster, devices, fn=fn, form=form)


def _devices(mesh: Any, cluster: Any) -> tuple[jax.sharding.Mesh | None, Cluster]:
    """The mesh to run on, if there is one, and what its devices can do."""
    if not isinstance(mesh, (jax.sharding.Mesh, Cluster)):
        raise TypeError(f"mesh is a {type(mesh).__name__}; give a jax.sharding.Mesh, or a hapsynth.Cluster")
    if not isinstance(cluster, (Cluster, type(None))):
        raise TypeError(f"cluster is a {type(cluster).__name__}; give a hapsynth.Cluster, e.g. Cluster.load(path)")
    if isinstance(mesh, Cluster):
        if cluster is not None:
            raise TypeError("two clusters are given, one as mesh; with cluster=, mesh is the jax.sharding.Mesh")
        return None, mesh
    cluster = cluster or Cluster.from_mesh(mesh)
    if mesh.size != cluster.n:
        raise ValueError(
            f"the mesh has {mesh.size} devices and cluster {cluster.name!r} {cluster.n}; give a mesh over "
            f"{cluster.n} devices, or a cluster that describes these {mesh.size}"
        )
    return mesh, cluster


def _check_positive(name: str, value: Any, unit: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; give a number of {unit}")
    if not float(value) > 0:
        raise ValueError(f"{name} is {value!r}; give a positive number of {unit}")


def _fixed(traced: Traced, fixed: Mapping[str, str], axes: int) -> dict[int, Layout]:
    """The stored layouts that `fixed` asks for; ValueError names a path or layout that cannot be met."""
    stored: dict[int, Layout] = {}
    paths = dict(zip(traced.in_paths, traced.graph.inputs, strict=True))
    for path, text in fixed.items():
        if path not in paths:
            raise ValueError(f"fixed names argument {path!r}, but the arguments are {', '.join(paths)}")
        value = traced.graph.values[paths[path]]
        each = " for each mesh axis, e.g. S(0),R" if axes > 1 else ""
        why = f"fixed asks for {text!r} of {path}, whose shape is {value.shape}; expected R or S(<dim>){each}"
        try:
            layout = parse_layout(text)
        except (AttributeError, ValueError):
            raise ValueError(why) from None
        partial = any(p.is_partial or p.dim >= len(value.shape) for p in layout)
        if len(layout) != axes or partial or not is_consistent(layout):
            raise ValueError(why)
        if any(p.is_sharded and (value.shape[p.dim] == 0 or is_extended(value.dtype)) for p in layout):
            raise ValueError(f"fixed asks for {text!r} of {path}, but {value} cannot be cut there; expected R")
        stored[value.index] = layout
    return stored
