"""The JSON documents of `search`, `compare` and `run`, and the figures that they share with the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hapsynth._quantities import finite
from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.memory_budget import MemoryBudget
from hapsynth.graph.trace import Traced
from hapsynth.instructions.program.program import Convert, Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.replicated_ops import named, unpriced
from hapsynth.plan import Plan
from hapsynth.running.check import CheckReport
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.network import mesh_axes
from hapsynth.search.cost.program_cost import Cost, instruction_costs
from hapsynth.search.planning.baseline_subsets import BaselinesOnSubsets
from hapsynth.search.planning.baselines import ONE_DEVICE
from hapsynth.search.planning.task import PlanningOptions, Task

_TIMINGS = ("trace_s", "build_s", "search_s", "ratio_s", "bound_s", "total_s")

SEARCH_SCHEMA = "hapsynth-search-1"
SEVERAL_SCHEMA = "hapsynth-search-several-1"
COMPARE_SCHEMA = "hapsynth-compare-1"
RUN_SCHEMA = "hapsynth-run-1"


def costs_of(plan: Plan) -> list[Cost]:
    """Seconds and wire bytes of every instruction, in order."""
    return list(instruction_costs(plan.program, plan.sizes, plan.cost_model()))


def search_record(plan: Plan, entries: Mapping[str, Entry] | None = None) -> dict[str, Any]:
    """The document of `search --json`. `entries`: the plan and baselines (`COMMON`), where these were planned."""
    result = plan.result
    best, alone = best_baseline(entries), (entries or {}).get(ONE_DEVICE)
    timings = result.timings_s
    return {
        "schema": SEARCH_SCHEMA,
        "ops": len(plan.traced.graph.ops),
        "devices": plan.cluster.n,
        "devices_used": list(plan.devices),
        "mesh": dict(mesh_axes(plan.cluster)),
        "mesh_used": dict(plan.program.axes),
        "with_all_s": None if result.with_all_s is None else finite(result.with_all_s),
        **{key: timings.get(key, 0.0) for key in _TIMINGS},
        "cost_s": finite(result.cost_s),
        "best_baseline": best and best[0],
        "best_baseline_s": best and finite(best[1].cost_s),
        "one_device_s": finite(alone.cost_s) if alone and alone.fits else None,
        "lower_bound_s": finite(result.lower_bound_s),
        "gap": finite(result.gap),
        "overlap": result.overlap,
        "exposed_communication_s": finite(result.exposed_communication_s) if result.overlap else None,
        "communication_s": finite(plan.timeline.communication_s) if result.overlap else None,
        "clocks": dict(result.clocks_s),
        "joint_lower_bound_s": finite(result.joint_lower_bound_s),
        "joint_gap": finite(result.joint_gap),
        "ratio_bound_s": finite(result.ratio_bound_s),
        "rounding_gap": finite(result.rounding_gap),
        "expanded": result.expanded,
        "sweeps": result.sweeps,
        "states": result.states,
        "interrupted": result.interrupted,
        "status": result.status,
        "collectives": plan.program.collectives(),
        "ratios": {name: list(shares) for name, shares in plan.ratios.items()},
        "memory_bytes": list(result.memory_bytes),
        "memory_limit_bytes": list(result.memory_limit_bytes),
        "memory_of": "exact" if result.exact else "padded",
        "ops_twice": 0 if plan.traced.graph.again is None else len(plan.traced.graph.again.ops),
        "replicated_primitives": list(result.replicated_primitives),
        "unpriced_primitives": list(result.unpriced_primitives),
    }


def infeasible_record(
    traced: Traced,
    cluster: Cluster,
    limit: float | None,
    message: str,
    timings: Mapping[str, float],
    *,
    exact: bool = False,
) -> dict[str, Any]:
    """The document of `search --json` where no program fits: the same keys, null where there is no figure."""
    limits = list(MemoryBudget.of(cluster, limit).limits)
    return {
        "schema": SEARCH_SCHEMA,
        "ops": len(traced.graph.ops),
        "devices": cluster.n,
        "devices_used": [],
        "mesh": dict(mesh_axes(cluster)),
        **dict.fromkeys(("mesh_used", "with_all_s")),
        **{key: timings.get(key) for key in _TIMINGS},
        **dict.fromkeys(("cost_s", "lower_bound_s", "gap", "joint_lower_bound_s", "joint_gap")),
        **dict.fromkeys(("best_baseline", "best_baseline_s", "one_device_s")),
        **dict.fromkeys(
            ("overlap", "exposed_communication_s", "communication_s", "clocks", "ratio_bound_s", "rounding_gap")
        ),
        **dict.fromkeys(("expanded", "sweeps", "states", "interrupted")),
        "status": "infeasible",
        "message": message,
        "collectives": {},
        "ratios": {},
        "memory_bytes": [],
        "memory_limit_bytes": limits,
        "memory_of": "exact" if exact else "padded",
        "ops_twice": None,
        "replicated_primitives": list(named(traced.graph)),
        "unpriced_primitives": list(unpriced(traced.graph)),
    }


@dataclass(frozen=True)
class Entry:
    """One plan of a comparison. `collectives`: name -> (how many, wire bytes in all). `memory_bytes`: peak. `devices`:
    those that it uses."""

    cost_s: float
    memory_bytes: float
    fits: bool
    collectives: Mapping[str, tuple[int, float]]
    devices: Sequence[int] = ()


OURS = "hapsynth"
COMMON = ("data_parallel", "data_parallel_speed", "zero2", "zero2_speed", "zero3", "zero3_speed")
"""The baselines that `search` plans: with overlap ZeRO-3 is often the best. `compare` has the others, too."""


def best_baseline(entries: Mapping[str, Entry] | None) -> tuple[str, Entry] | None:
    """The fastest that fits of those planned, one device alone apart, with its name; None where none does."""
    others = [(name, e) for name, e in (entries or {}).items() if name not in (OURS, ONE_DEVICE) and e.fits]
    return min(others, key=lambda one: one[1].cost_s, default=None)


def comparison(plan: Plan, names: Sequence[str] = (), *, each: bool = True) -> dict[str, Entry]:
    """The plan, as `hapsynth`, and the baselines (`BaselinesOnSubsets`), all costed by one model; beside a plan with
    overlap each in the order found that takes the least, its collectives beside computing too. `names`: only
    these baselines, and one device. `each`: on the devices that suit each; else only where it may be the best of
    all."""
    model = plan.cost_model()
    memory, limits = plan.result.memory_bytes, plan.result.memory_limit_bytes
    peak, fits = max(memory), all(used <= limit for used, limit in zip(memory, limits, strict=True))
    entries = {OURS: Entry(plan.cost, peak, fits, traffic(plan.program, plan.sizes, model), plan.devices)}
    options = PlanningOptions(max(limits), exact=plan.result.exact, lowering=plan.result.lowering)
    task = Task(plan.traced.graph, plan.cluster, options)
    for name, b in BaselinesOnSubsets(task, names=names).best(overlap=plan.result.overlap, each=each).items():
        devices = b.devices or tuple(range(plan.cluster.n))
        on = model.on(plan.cluster.subset(devices))
        entries[name] = Entry(b.cost_s, b.memory_bytes, b.fits, traffic(b.program, b.sizes, on), devices)
    return entries


def traffic(program: Program, sizes: Sizes, model: CostModel) -> dict[str, tuple[int, float]]:
    """Collective -> (how many, bytes over the slowest link in all)."""
    total: dict[str, tuple[int, float]] = {}
    for cost in instruction_costs(program, sizes, model):
        i = cost.instruction
        if isinstance(i, Convert) and i.is_collective:
            count, wire = total.get(i.step, (0, 0.0))
            total[i.step] = count + 1, wire + cost.wire_bytes
    return dict(sorted(total.items()))


def compare_record(entries: Mapping[str, Entry]) -> dict[str, Any]:
    """The document of `compare --json`. `speedup`: of the plan over this one."""
    ours = entries[OURS].cost_s
    return {
        "schema": COMPARE_SCHEMA,
        "plans": {
            name: {
                "cost_s": finite(e.cost_s),
                "memory_bytes": finite(e.memory_bytes),
                "fits": e.fits,
                "devices": list(e.devices),
                "speedup": finite(e.cost_s / ours) if ours else None,
                "collectives": {c: {"count": n, "wire_bytes": wire} for c, (n, wire) in e.collectives.items()},
            }
            for name, e in entries.items()
        },
    }


def run_record(report: CheckReport, step_s: Sequence[float]) -> dict[str, Any]:
    """The document of `run --json`: the largest relative error of each output leaf over all steps (null: not finite).

    `tolerances`: of each leaf; `tolerance`: the largest of any. `yardsticks`, `not_finite` as in `CheckReport`.
    """
    return {
        "schema": RUN_SCHEMA,
        "ok": report.ok,
        "steps": len(step_s),
        "tolerance": max(report.rtols, default=0.0),
        "max_relative_error": finite(report.max_relative_error),
        "outputs": {path: finite(error) for path, error in report.leaves},
        "tolerances": {path: rtol for (path, _), rtol in zip(report.leaves, report.rtols, strict=True)},
        "yardsticks": dict(report.yardsticks),
        "not_finite": list(report.not_finite),
        "step_s": list(step_s),
    }
