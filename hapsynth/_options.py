"""Options of `synthesize`, `synthesize_several` and what adapts plans, checked before any work; `ratios` parsed:
fractions for all or some dimension classes."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np

from hapsynth._gc import gc_paused
from hapsynth._jax import is_extended
from hapsynth._warn import OverlapWarning, warn_user
from hapsynth.cluster import _units
from hapsynth.cluster.cluster import Cluster, ClusterWarning
from hapsynth.cluster.memory_budget import MemoryBudget
from hapsynth.graph.ir import Value
from hapsynth.graph.trace import FUNCTION, Traced, check_call, check_dict, trace
from hapsynth.graph.trip_counts import Expectation, expecting
from hapsynth.instructions.layout import (
    Layout,
    cut_alone,
    cuts_of,
    format_layout,
    is_consistent,
    orders,
    parse_layout,
)
from hapsynth.instructions.program.sizes import Node
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.running.base import Planned
from hapsynth.running.form import Form, check_form, holds_exact, no_overlap
from hapsynth.search.cost.model import Floats
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.search.planning.task import PlanningOptions
from hapsynth.search.result import Progress, Result
from hapsynth.search.sizing.fixed_ratios import FixedRatios, RatioError, check_granule

_LEAST_S = 0.05
"""Seconds for planning where tracing has used up the time budget."""
_EXACT = (
    "form='fused' (--form fused) for a job of several processes, or 'staged', may, as each device is then limited by "
    "its own memory"
)


def planning_options(
    mesh: Any,
    cluster: Any,
    *,
    fixed: Mapping[str, str] | None,
    memory_limit: float | None,
    leave_out: bool,
    time_budget_s: float | None,
    progress: Callable[[Progress], None] | None,
    form: Form,
    lowering: LoweringOptions,
    overlap: bool,
    joint_gap: float | None,
) -> tuple[jax.sharding.Mesh | None, Cluster, PlanningOptions]:
    """The mesh to run on, if there is one, what its devices can do, and what is asked of plans for one function or
    several: the arguments of `synthesize`, checked."""
    check_positive("memory_limit", memory_limit, "bytes per device")
    if memory_limit == math.inf:
        memory_limit = None
    check_positive("time_budget_s", time_budget_s, "seconds")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is {progress!r}; give a function that is called with how far the search is")
    check_dict("fixed", fixed)
    check_form(form)
    check_lowering(lowering)
    check_joint_gap(joint_gap, overlap=overlap)
    devices, cluster = devices_of(mesh, cluster)
    tell_lesser_memory(cluster, memory_limit)
    if overlap and (why := no_overlap(form, devices)):
        warn_user(f"overlap is asked for, and {why}: planned without", OverlapWarning)
        overlap = False
    options = PlanningOptions(
        memory_limit,
        time_budget_s,
        progress,
        leave_out=leave_out,
        exact=planned_exact(form, devices),
        lowering=lowering,
        overlap=overlap,
        joint_gap=joint_gap,
    )
    return devices, cluster, options


@contextmanager
def hinting(options: PlanningOptions, cluster: Cluster, *hints: str) -> Generator[None]:
    """Where nothing fits, what may help is named: `hints`, and another form where the memory of the smallest device
    limits larger ones."""
    try:
        yield
    except InfeasibleError as error:
        if error.needs is None:
            raise  # it isn't for want of memory
        limits = MemoryBudget.of(cluster, options.memory_limit).limits
        unlike = not options.exact and min(limits) < max(limits)
        text = "; ".join([str(error), *([_EXACT] if unlike else []), *hints])
        raise InfeasibleError(text, error.needs, error.excess) from error


def tell_without_overlap(options: PlanningOptions, result: Result, of: str = "") -> None:
    """Warn where overlap is asked for and gains too little, or does not fit. `of`: which function."""
    if not options.overlap or result.overlap:
        return
    if options.least_speedup > 1.0:
        text = (
            f"no step was found that it makes {options.least_speedup:g} times as fast, from where it pays between CPUs"
            ": planned without; give form='staged' or 'fused' to have it all the same"
        )
    else:
        text = f"no program{of} was found that fits in memory beside what is sent meanwhile: planned without"
    warn_user(f"overlap is asked for, and {text}", OverlapWarning)


def devices_of(mesh: Any, cluster: Any) -> tuple[jax.sharding.Mesh | None, Cluster]:
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
    if wrong := cluster.misplaced([d.device_kind for d in mesh.devices.flat]):
        raise ValueError(wrong)
    return mesh, cluster.along([(str(axis), int(size)) for axis, size in mesh.shape.items()])


def check_positive(name: str, value: Any, unit: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; give a number of {unit}")
    if not float(value) > 0:
        raise ValueError(f"{name} is {value!r}; give a positive number of {unit}")


def check_tolerance(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; give a number, at least 0, or None")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} is {value!r}; give a finite number, at least 0")


def check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}; give a whole number of at least 1")


def check_gain(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < 1:
        raise ValueError(f"{name} is {value!r}; give the least gain as a fraction, like 0.05")


def check_joint_gap(value: Any, *, overlap: bool) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"joint_gap is {value!r}; give a fraction of the plan's cost, e.g. 0.03, or None")
    if not 0 < float(value) < 1:
        raise ValueError(f"joint_gap is {value!r}; give a fraction of the plan's cost between 0 and 1, e.g. 0.03")
    if overlap:
        raise ValueError(
            "joint_gap is given with overlap, for which there is no closer bound at any ratios; leave one of them out"
        )


def check_lowering(lowering: Any) -> None:
    if not isinstance(lowering, LoweringOptions):
        raise TypeError(f"lowering is {lowering!r}; give a hapsynth.LoweringOptions")


def tell_lesser_memory(cluster: Cluster, limit: float | None) -> None:
    """Warn where a limit is beyond what devices have, which holds then: `MemoryBudget.of`."""
    less = [k for k in cluster.devices if limit is not None and k.memory < limit]
    if limit is None or not less:
        return
    kinds = {k.name: _units.format(float(k.memory), _units.MEMORY) for k in less}
    has = ", ".join(f"{name}: {memory}" for name, memory in kinds.items())
    warn_user(
        f"memory_limit is {_units.format(float(limit), _units.MEMORY)}, and {len(less)} of {cluster.n} devices have "
        f"less ({has}): these keep to what they have; what a device has is said by the cluster (kinds.NAME.memory)",
        ClusterWarning,
    )


def check_planned(name: str, value: Any) -> None:
    """TypeError where an argument is no plan."""
    if not isinstance(value, Planned):
        what = f"{name} is a {type(value).__name__}"
        raise TypeError(f"{what}; give a hapsynth.Plan, of plans of several functions one, such as plans['train']")


def planned_exact(form: Form, devices: jax.sharding.Mesh | None) -> bool:
    """Whether a plan is made for shards of exact size in memory (`synthesize`)."""
    return holds_exact(form) or (form == "auto" and devices is not None and devices.is_multi_process)


def left_for_planning(time_budget_s: float | None, trace_s: float) -> float | None:
    """Seconds of a time budget that tracing leaves."""
    return None if time_budget_s is None else max(_LEAST_S, time_budget_s - trace_s)


def traced_as_asked(
    fn: Any,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    carry: Sequence[tuple[str, str]] | None,
    expect: Mapping[str, Expectation] | None,
    names: tuple[str, str] = FUNCTION,
) -> Traced:
    """A function, traced; TypeError where it or its arguments are none, which are called by `names`."""
    check_call(fn, args, kwargs, names)
    check_dict("expect", expect, names[0])
    with gc_paused():
        traced = trace(fn, args, dict(kwargs or {}), carry=carry)
    return replace(traced, graph=expecting(traced.graph, expect)) if expect else traced


def layouts_of(arguments: Mapping[str, Value], fixed: Mapping[str, str], axes: int, what: str) -> dict[int, Layout]:
    """The stored layouts that `fixed` asks for, by value, on a mesh of so many axes; ValueError names a path or layout
    that cannot be met, and `what` the paths are of."""
    check_dict("fixed", fixed)
    stored: dict[int, Layout] = {}
    for path, text in fixed.items():
        if path not in arguments:
            raise ValueError(f"fixed names {what} {path!r}, but the {what}s are {', '.join(arguments)}")
        value = arguments[path]
        each = f" for each of the {axes} mesh axes longer than 1, e.g. {_cut_by((0,), axes)}" if axes > 1 else ""
        why = f"fixed asks for {text!r} of {path}, whose shape is {value.shape}; expected R or S(<dim>){each}"
        try:
            layout = parse_layout(text)
        except (AttributeError, ValueError):
            raise ValueError(why) from None
        partial = any(p.is_partial or p.way or p.dim >= len(value.shape) for p in layout)
        if len(layout) != axes:
            longer = f"{axes} {'is' if axes == 1 else 'are'} longer than 1"
            raise ValueError(f"{why}; {len(layout)} are given for the mesh axes, of which {longer}")
        if partial:
            raise ValueError(why)
        if not is_consistent(layout):
            if axes > 1:
                why += f", or S(<dim>)/1 for the axis that cuts a dimension again, e.g. {_cut_by((0, 1), axes)}"
            raise ValueError(why)
        for dim, by, _ in cuts_of(layout):
            if by not in (known := orders(tuple(sorted(by)), axes)):
                others = ", ".join(format_layout(cut_alone((dim, order, 0), axes)) for order in known)
                raise ValueError(
                    f"fixed asks for {text!r} of {path}, but of {axes} mesh axes what one cuts is cut again by the one "
                    f"before it in the mesh alone, and what the first cuts by the last: give dimension {dim} "
                    + (f"as one of {others}" if others else "to axes beside one another")
                )
        if any(p.is_sharded and (value.shape[p.dim] == 0 or is_extended(value.dtype)) for p in layout):
            raise ValueError(f"fixed asks for {text!r} of {path}, but {value} cannot be cut there; expected R")
        stored[value.index] = layout
    return stored


def _cut_by(by: tuple[int, ...], axes: int) -> str:
    """A layout whose first dimension some of the axes cut."""
    return format_layout(cut_alone((0, orders(by, axes)[-1], 0), axes))


Ratios = Sequence[float] | Mapping[str, Sequence[float]]
"""One fraction per device, in mesh order, for every class; or class name -> one per shard, as in `Plan.ratios`."""

_SUM = 1e-6


def fixed_ratios_of(traced: Traced, ratios: Ratios, axes: tuple[tuple[str, int], ...]) -> FixedRatios:
    """What `ratios` ask for on a mesh of `axes`; TypeError or RatioError names the class, the fault and the way out."""
    if not isinstance(ratios, Mapping):
        n = int(np.prod([size for _, size in axes]))
        return FixedRatios(weights=_fractions("ratios", ratios, n, "one for each device, in mesh order"))
    if not ratios:
        raise RatioError("ratios name no class; give class name -> fractions as in Plan.ratios, or None")
    named: dict[Node, Floats] = {}
    for name, fractions in ratios.items():
        value, dim, cut, _ = node = _node(traced, name, axes)
        positions = int(np.prod([axes[a][1] for a in cut]))
        vector = _fractions(f"ratios[{name!r}]", fractions, positions, "one for each of its shards")
        units = traced.graph.values[value].shape[dim]
        check_granule(name, vector, units)
        rounded = np.round(vector * units) / units
        if not np.array_equal(named.setdefault(node, rounded), rounded):
            raise RatioError(f"ratios name {name!r}, whose fractions another of its names gives unlike: name it once")
    return FixedRatios(named=named)


def _fractions(what: str, given: Any, count: int, each: str) -> Floats:
    if isinstance(given, str) or not isinstance(given, (Sequence, np.ndarray)):
        raise TypeError(f"{what} is {given!r}; give {count} fractions that sum to 1, {each}")
    fractions = list(cast(Sequence[Any], given))
    if any(isinstance(x, bool) or not isinstance(x, numbers.Real) for x in fractions):
        raise TypeError(f"{what} holds something that is no number: {fractions}; give {count} fractions, {each}")
    if len(fractions) != count:
        raise RatioError(f"{what} holds {len(fractions)} fractions; give {count}, {each}")
    vector = np.array(fractions, dtype=np.float64)
    for place in np.flatnonzero(~(vector >= 0) | ~np.isfinite(vector)):
        raise RatioError(f"{what} is {fractions[place]!r} at position {place}; give fractions of at least 0")
    if abs(vector.sum() - 1.0) > _SUM:
        total = float(vector.sum())
        hint = f"; divided by their sum they are {[round(x, 9) for x in (vector / total).tolist()]}" if total else ""
        raise RatioError(f"{what} sum to {total:.9g}, not to 1{hint}")
    return vector / vector.sum()


def _node(traced: Traced, name: Any, axes: tuple[tuple[str, int], ...]) -> Node:
    """The dimension and mesh axes that a class's name tells, as in `Plan.ratios`; arguments also by their paths."""
    graph = traced.graph
    paths = dict(zip(traced.in_paths, graph.inputs, strict=True))
    known = {**{v.name: v.index for v in graph.values}, **paths}
    cut, _, along = str(name).partition("@")
    tensor, _, dim = cut.rpartition(".")
    form = "give <argument path or value name>.<dimension>, as in Plan.ratios"
    if tensor not in known or not dim.isdecimal():
        near = difflib.get_close_matches(tensor, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RatioError(f"ratios name {name!r}, which is no class{hint}; {form}")
    value = graph.values[known[tensor]]
    if int(dim) >= len(value.shape) or value.shape[int(dim)] == 0:
        raise RatioError(f"ratios name {name!r}, but {value} has no dimension {dim} to cut; {form}")
    numbered = {axis: a for a, (axis, _) in enumerate(axes)}
    chosen = along.split(",") if along else list(numbered) if len(axes) == 1 else []
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(numbered):
        raise RatioError(
            f"ratios name {name!r} on a mesh of the axes {', '.join(numbered)}; say along which of them the dimension "
            f"is cut, e.g. {cut}@{axes[0][0]}"
        )
    return value.index, int(dim), tuple(numbered[a] for a in chosen), 0
