"""The program of each system that is compared, as hapsynth's cost model knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import hapsynth
from hapsynth.adapting import rebalance
from hapsynth.graph.trace import Traced
from hapsynth.instructions.layout import S
from hapsynth.plan import Form
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.formulation.choice_space import Restriction
from hapsynth.search.planning.baselines import NAMES, Baseline, Baselines
from hapsynth.search.planning.device_subsets import ClusterPlanner
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.scheduling.timeline import step_seconds
from hapsynth.search.sizing.fixed_ratios import FixedRatios
from hapsynth.search.sizing.sizer import Sizer
from systems.hap import Hap

TWIN = {
    "fastest": "plan",
    "even": "data_parallel",
    "even_fast": "data_parallel",
    "by_speed": "data_parallel_speed",
    "by_speed_fast": "data_parallel_speed",
    "one_process": "data_parallel",
}
"""System -> the same program by another name: a baseline, or for `fastest` the one that the contest begins with."""


def chosen(
    systems: Sequence[str],
    fn: Any,
    shapes: Any,
    traced: Traced,
    cluster: hapsynth.Cluster,
    form: Form = "auto",
) -> dict[str, hapsynth.Plan]:
    """The program and sizes of each system; `form`: of hapsynth's own."""
    baselines = Baselines(Task(traced.graph, cluster))
    twins = {system: TWIN.get(system, system) for system in systems}
    by_name = baselines.all([name for name in dict.fromkeys(twins.values()) if name in NAMES])
    plans: dict[str, hapsynth.Plan] = {}
    for system, twin in twins.items():
        if twin == "plan":
            plans[system] = plans.get("plan") or hapsynth.synthesize(fn, shapes, cluster, form=form)
        elif twin == "always_overlap":
            plans[system] = hapsynth.synthesize(fn, shapes, cluster, form="staged", overlap=True)
        else:
            same = Hap(baselines).baseline() if system == "hap" else by_name[twin]
            plans[system] = as_plan(same, fn, traced, cluster)
    return plans


def by_shares(
    fn: Any, traced: Traced, cluster: hapsynth.Cluster, parts: Sequence[int], offered: frozenset[str] | None
) -> hapsynth.Plan:
    """The best plan by the usual collectives and those that are `offered` (None: any) in which all arguments, and
    whatever else is cut, lie by these parts, one for each device: along the first dimension that they divide."""
    graph, whole = traced.graph, sum(parts)
    shapes = {v: graph.values[v].shape for v in graph.inputs}
    stored = {v: (S(next(d for d, n in enumerate(shape) if n % whole == 0)),) for v, shape in shapes.items() if shape}
    options = PlanningOptions(
        exact=True,
        restriction=Restriction(stored=stored),
        fixed_ratios=FixedRatios(np.array(parts) / whole),
        collectives=offered,
    )
    result = ClusterPlanner(Task(graph, cluster, options)).run()
    return hapsynth.Plan(traced, result, cluster, fn=fn)


def alone_seconds(fn: Any, shapes: Any, traced: Traced, cluster: hapsynth.Cluster) -> Floats:
    """Predicted seconds of a whole step on each device by itself, float64 [devices]."""
    each = {kind: i for i, kind in enumerate(cluster.devices)}
    found = {k: chosen(["even"], fn, shapes, traced, cluster.subset([i]))["even"].cost for k, i in each.items()}
    return np.array([found[kind] for kind in cluster.devices])


def at_rows(plan: hapsynth.Plan, rows: Sequence[int], slowdown: Floats | None = None) -> float:
    """Predicted seconds of data parallelism where each device has so many rows of the batch. `slowdown`: as of
    `seconds_at_speeds`."""
    costs = _slowed(plan, slowdown)
    sizes = Sizer(plan.program, plan.sizes.classes, costs).fixed(np.array(rows, np.float64))
    return program_cost(plan.program, sizes, costs)


def seconds_at_speeds(plan: hapsynth.Plan, slowdown: Floats) -> float:
    """Predicted seconds of a step where each device of the cluster takes so many times as long as it says, float64
    [devices]."""
    return step_seconds(plan.program, plan.sizes, _slowed(plan, slowdown), overlap=plan.result.overlap)


def _slowed(plan: hapsynth.Plan, slowdown: Floats | None) -> CostModel:
    if slowdown is None:
        return plan.cost_model()
    cluster = rebalance.at_speeds(plan.cluster, range(plan.cluster.n), slowdown, 0.0)
    return plan.cost_model(cluster.subset(plan.devices))


def as_plan(b: Baseline, fn: Any, traced: Traced, cluster: hapsynth.Cluster) -> hapsynth.Plan:
    result = b.result([float(kind.memory) for kind in cluster.devices])
    return hapsynth.Plan(traced, result, cluster, fn=fn)
