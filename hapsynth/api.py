"""`synthesize`: from a function and a cluster to a plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import jax

from hapsynth._options import (
    Ratios,
    fixed_ratios_of,
    hinting,
    layouts_of,
    left_for_planning,
    planning_options,
    tell_without_overlap,
    traced_as_asked,
)
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import Traced
from hapsynth.graph.trip_counts import Expectation
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.jobs.one_search import PLANNED_ONCE, searched_once
from hapsynth.jobs.preflight import check_mesh
from hapsynth.plan import Plan
from hapsynth.running.form import Form, least_speedup
from hapsynth.running.plan_cache import CachedPlan, found_to_dict, read_found
from hapsynth.search.cost.network import mesh_axes
from hapsynth.search.formulation.choice_space import Restriction
from hapsynth.search.planning.device_subsets import ClusterPlanner
from hapsynth.search.planning.rematerialization import planned_to_fit
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.result import Progress, Result

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
_RECOMPUTE = "recompute=True (--recompute) may, by making values again later rather than holding them"


def synthesize(
    fn: Callable[P, R],
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
    leave_out: bool = PlanningOptions.leave_out,
    time_budget_s: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    form: Form = "auto",
    lowering: LoweringOptions = PlanningOptions.lowering,
    recompute: bool = False,
    overlap: bool = PlanningOptions.overlap,
    joint_gap: float | None = PlanningOptions.joint_gap,
    cache: bool = True,
    donate: bool = True,
) -> Plan[P, R]:
    """Find the cheapest distributed program of `fn` on a cluster (HAP, EuroSys'24, with a proof of optimality).

    Functions with one state, such as a training step, its loss and its initialization, are planned together by
    `synthesize_several`.

    Ctrl-C during the search returns the best plan so far, with `plan.result.interrupted` true and a bound that is
    sought for a second or until Ctrl-C is pressed again; where there is no plan yet, KeyboardInterrupt is raised. In a
    job only Ctrl-C in the process that searches does so; in one that waits it ends the job.

    With a mesh of several processes every process that holds devices of it must call, with the same arguments. The
    process with the mesh's first device searches, by its `time_budget_s`, and calls its `progress`; the others'
    `progress` is never called. The others wait for its plan, or raise what it raises: KeyboardInterrupt,
    InfeasibleError or RatioError, or else JobError with the error's text. (With HAPSYNTH_PREFLIGHT=off each searches
    by itself.) It must not run beside another call of the job, in another thread.

    Args:
        fn: Any function that `jax.jit` takes.
        example_args: Pytrees of arrays or `jax.ShapeDtypeStruct`s, as `fn` is called.
        example_kwargs: Likewise, by name.
        mesh: The devices to run on, or a `Cluster` to plan without them.
        cluster: What the mesh's devices can do, in mesh order, along the mesh's axes unless it has several of its own;
            by default the table's figures for their kind.
        carry: Pairs (argument path, output path), e.g. `[("[0]", "[0]")]`, whose layouts must agree so that the step
            can be repeated; found by structure when None.
        fixed: Argument path -> layout (as in `Plan.layouts`) to keep.
        ratios: Fractions, one per device in mesh order, by which everything that the plan cuts has to be cut; or class
            -> one per shard, as in `Plan.ratios`, for just those classes (`"[1]['x'].0"`, dimension 0 of an argument,
            names its class too).
        expect: Source line of a `while_loop` or `cond`, e.g. `"train.py:40"` -> its trips (10 by default), or how often
            its predicate is true (each branch is taken to be as frequent as the others by default; give a sequence for
            a `switch`).
        memory_limit: Bytes per device; a device that has less keeps to what it has, with a `ClusterWarning`.
        leave_out: Whether the plan may leave out devices that would make the step slower (`Plan.devices` are those that
            it uses, `Plan.mesh` is a mesh of them); none is left out where `fixed` or `ratios` say how things lie on
            them all.
        time_budget_s: Seconds, tracing included, after which the best plan so far is returned with its gap; the problem
            of the first search is built whatever it takes, which on three mesh axes may be seconds.
        progress: Called now and then with the stage, the best cost, the bound, the nodes and the seconds so far.
        form: How the plan runs. "switch": one program for all devices, on any mesh; uneven shards are padded in memory.
            "staged": several programs per process, compiled for its own shards of exact size, and collectives between
            them. "fused": one program per process, compiled for its own shards of exact size; the collectives must be
            the same in all, which is compared before the first call. "auto": "fused" for uneven shards among processes,
            "staged" between CPUs where `overlap` gains a fifth; `Plan.form_reason` says why. A plan for "staged" or
            "fused", or for "auto" on a mesh of several processes, keeps each device within its own memory, with exact
            shards; any other keeps every device within the smallest memory, with shards padded to the largest.
        lowering: Size thresholds (`hapsynth.LoweringOptions`) for bundling collectives and padding stages, by which the
            plan is priced and lowered. The plan file has those that differ from the defaults.
        recompute: Whether values may be recomputed instead of kept, as `jax.checkpoint` does, where memory is short.
            `plan.traced.graph.again` names the ops that run twice, if any; the bounds are for programs that recompute
            these.
        overlap: Minimize the makespan, from a common start to the last result, with collectives running while devices
            compute, instead of the sum of instruction times. The plan's instructions are in the order of that schedule
            and run in it between processes, in one program or, between CPUs, in stages too. Where the mesh's devices or
            the requested form cannot overlap, an `OverlapWarning` says so and the plan is made without; so too between
            CPUs of a mesh where overlap gains less than a fifth and `form` is "auto", and where what is sent meanwhile
            fits in memory beside no program found.
        joint_gap: Target for `Plan.joint_gap`, e.g. 0.03: the bound over all ratios is tightened until the gap is at
            most this, if possible. That takes about as long again as planning, and several times as long with experts.
            The bound is then for programs that hold no value at more than two ratios of a dimension at once. Only for
            plans without `overlap`; without effect on several mesh axes, with `fixed`, or over devices of one kind. By
            default the bound comes from one further problem, without tightening.
        cache: Whether the plan is looked for in the plan cache first (in HAPSYNTH_CACHE_DIR, or the user's cache;
            HAPSYNTH_CACHE_DIR=off switches it off), and kept there if the search ended by itself. What was planned
            before, by this very version, for the same function, shapes, cluster and options, then takes no search.
        donate: Whether a call consumes carried state, as of `Plan`.

    Raises:
        TraceError: for arguments or functions that cannot be planned.
        InfeasibleError: where no program fits the memory.
        JobError: where the processes of the mesh do not find each other, or the one that searches fails;
            PreflightError, one of these, where it leaves out a process for another's second device, or they are to plan
            unlike things.
        ValueError: for a mesh that is not the cluster's (in number, in the order of its kinds, in its axes).
        TypeError, ValueError: for options of no use. RatioError, one of these, for `ratios` that break a class's
            granule, with the nearest that do not.
    """
    began = time.perf_counter()
    if isinstance(fn, Mapping) and not callable(fn):
        raise TypeError("fn is a dict; functions with one state are planned by hapsynth.synthesize_several")
    devices, cluster, options = planning_options(
        mesh,
        cluster,
        fixed=fixed,
        memory_limit=memory_limit,
        leave_out=leave_out,
        time_budget_s=time_budget_s,
        progress=progress,
        form=form,
        lowering=lowering,
        overlap=overlap,
        joint_gap=joint_gap,
    )
    # No layouts are none: nothing is restricted.
    fixed = fixed or None
    if devices is not None:
        check_mesh(devices)
    traced = traced_as_asked(fn, example_args, example_kwargs, carry, expect)
    trace_s = time.perf_counter() - began
    logger.info("traced in %.1f s: %d ops, to be planned for %r", trace_s, len(traced.graph.ops), cluster.name)
    restriction = None
    if fixed is not None:
        arguments = {path: traced.graph.values[v] for path, v in zip(traced.in_paths, traced.graph.inputs, strict=True)}
        restriction = Restriction(stored=layouts_of(arguments, fixed, len(mesh_axes(cluster)), "argument"))
    options = replace(options, restriction=restriction, least_speedup=least_speedup(form, devices))

    if ratios is not None:
        # A plan is looked for by what is asked, which has to make sense.
        fixed_ratios_of(traced, ratios, mesh_axes(cluster))

    def task(graph: Graph, budget: float | None) -> Task:
        of = replace(traced, graph=graph)
        fixed_ratios = None if ratios is None else fixed_ratios_of(of, ratios, mesh_axes(cluster))
        return Task(graph, cluster, replace(options, time_budget_s=budget, fixed_ratios=fixed_ratios))

    asked = {
        "fixed": fixed,
        "ratios": ratios,
        "memory_limit": options.memory_limit,
        "leave_out": leave_out,
        "exact": options.exact,
        "lowering": lowering.to_dict(),
        "overlap": options.least_speedup if options.overlap else None,
        "joint_gap": joint_gap,
        "recompute": recompute,
    }

    def read(where: str, data: Mapping[str, Any]) -> tuple[Traced, Result]:
        return read_found(where, data, traced)

    def search() -> tuple[Traced, Result]:
        sought = time.perf_counter()
        kept = CachedPlan.of([traced], cluster, asked) if cache else None
        if kept is not None and (found := kept.find(read)) is not None:
            return found[0], replace(found[1], timings_s={"cache_s": time.perf_counter() - sought})
        left = left_for_planning(time_budget_s, trace_s)
        with hinting(options, cluster, *([] if recompute else [_RECOMPUTE])):
            if recompute:
                graph, result = planned_to_fit(traced.graph, task, left)
            else:
                graph, result = traced.graph, ClusterPlanner(task(traced.graph, left)).run()
        total_s = time.perf_counter() - began
        logger.info("planned in %.1f s: %.4g s a step, gap %.2g", total_s, result.cost_s, result.gap)
        found = replace(traced, graph=graph), result
        if kept is not None and time_budget_s is None and not result.interrupted:
            kept.keep(found_to_dict(*found, cluster))
        return found

    traced, result = searched_once(
        devices,
        [traced],
        cluster,
        {**asked, "form": form, "donate": donate},
        search,
        lambda found: found_to_dict(*found, cluster),
        partial(read, PLANNED_ONCE),
    )
    timings = {"trace_s": trace_s, **result.timings_s, "total_s": time.perf_counter() - began}
    result = replace(result, timings_s=timings)
    tell_without_overlap(options, result)
    return Plan(traced, result, cluster, devices, fn=fn, donate=donate, form=form)
