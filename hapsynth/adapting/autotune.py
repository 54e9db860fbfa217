"""Plans of one function run in turn on its devices, and the fastest kept.

Predictions are a few percent off, and programs that cost alike may differ by more: what waits for what, what a compiler
fuses, how busy a network is. Who can spare a minute before a long run lets the plan show that it is the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic

import jax
import numpy as np
from jax.sharding import Mesh

from hapsynth._options import check_count, check_gain, check_planned, check_positive
from hapsynth.graph.trace import check_dict
from hapsynth.running.allgather import gathered
from hapsynth.running.base import P, Planned
from hapsynth.running.form import no_overlap
from hapsynth.search.planning.baselines import Baselines
from hapsynth.search.planning.task import PlanningOptions, Task

OURS = "hapsynth"
WITHOUT_OVERLAP = "hapsynth without overlap"
IN_STAGES = "hapsynth in stages"


@dataclass(frozen=True, eq=False)
class AutotuneResult(Generic[P]):
    """The winning `plan` and its `name`. `seconds`: of every plan, the median over its steps of the time that the
    slowest process took."""

    name: str
    plan: P
    seconds: Mapping[str, float]


def autotune_candidates(plan: P, mesh: Mesh | None = None, *, within: float = 1.5) -> dict[str, P]:
    """The plan, as "hapsynth", and where it has overlap its program with one instruction after another, as "hapsynth
    without overlap", and between CPUs in the other form that hides collectives, as "hapsynth in stages"; then the
    baselines (`hapsynth.search.planning.baselines`) as plans of the same function: those that fit into memory and are
    predicted to take at most `within` times as long, by rising prediction. Baselines have their own layouts and ratios,
    also where some were asked for of the plan (`fixed`, `ratios`).

    `mesh`: of all devices of the plan's cluster. By default the plan's: where it leaves devices out, so do they.
    Raises RuntimeError for a plan without devices, ValueError for a mesh of another number of them, TypeError where it
    is no plan.
    """
    check_planned("plan", plan)
    check_positive("within", within, "times the plan's prediction")
    if plan.mesh is None:
        raise RuntimeError("this plan has no devices to run on: load it where they are, with hapsynth.load")
    limits = plan.result.memory_limit_bytes
    everyone = mesh is not None or len(plan.devices) == plan.cluster.n
    devices = tuple(range(plan.cluster.n)) if everyone else plan.devices
    if mesh is not None and mesh.devices.size != len(devices):
        raise ValueError(
            f"the mesh has {mesh.devices.size} devices, the plan's cluster {len(devices)}: give one of all"
        )
    options = PlanningOptions(max(limits), exact=plan.result.exact, lowering=plan.result.lowering)
    of_some = None if everyone else devices
    baselines = Baselines(Task(plan.traced.graph, plan.cluster.subset(devices), options), of_some)
    plans = {OURS: plan}
    found = baselines.all()
    if plan.result.overlap:
        if plan.form != "staged" and not no_overlap("staged", plan.mesh):
            # They keep to the plan's order, and take longer to start.
            plans[IN_STAGES] = plan.with_result(plan.result, plan.cluster, form="staged")
        alone = plan.without_overlap()
        plans |= {WITHOUT_OVERLAP: alone} if alone.cost <= within * plan.cost else {}
        found = {name: baselines.overlapped(b) for name, b in found.items()}
    for name, b in sorted(found.items(), key=lambda item: item[1].cost_s):
        same = (b.program, b.sizes.shares) == (plan.program, plan.sizes.shares)
        if same or not b.fits or b.cost_s > within * plan.cost:
            continue
        result = b.result(limits)
        plans[name] = plan.with_result(result, plan.cluster, mesh=mesh)
    return plans


def autotune(
    plans: Mapping[str, P],
    *args: Any,
    steps: int = 5,
    margin: float = 0.05,
    **kwargs: Any,
) -> AutotuneResult[P]:
    """Run each plan for `steps` steps, twice, feeding carried state back, and pick the one with the lowest median step
    time.

    `args`, `kwargs`: the function's arguments, whole, as `Plan.shard` takes them; they are not consumed. The second
    turn is in the opposite order of plans; the first step of each turn is not counted; the devices hold the arguments
    of one plan at a time. The first plan wins unless another takes at least the fraction `margin` less. In a run of
    several processes all must call, with the same plans, and all get the same answer. Raises TypeError and ValueError
    for invalid plans and options, RuntimeError for a plan without devices.
    """
    check_dict("plans", plans)
    if not plans:
        raise ValueError("no plan was given; give {name: plan}, as hapsynth.autotune_candidates does")
    for name, plan in plans.items():
        check_planned(f"plans[{name!r}]", plan)
    check_count("steps", steps)
    check_gain("margin", margin)
    names = list(plans)
    times = np.zeros((len(names), 2, steps))
    for turn, order in enumerate((range(len(names)), reversed(range(len(names))))):
        for i in order:
            times[i, turn] = list(_timed(plans[names[i]], steps, args, kwargs))
    everyone = _everyone(plans[names[0]])
    slowest = gathered(everyone, times.ravel()).max(axis=0).reshape(len(names), -1)
    seconds = dict(zip(names, np.median(slowest, axis=1).tolist(), strict=True))
    best = min(names, key=lambda name: seconds[name])
    name = best if seconds[best] <= seconds[names[0]] * (1 - margin) else names[0]
    return AutotuneResult(name, plans[name], seconds)


def _everyone(plan: Planned) -> Mesh:
    """All devices of the run: a process that no plan uses is told the times as well."""
    assert plan.mesh is not None
    return Mesh(np.array(jax.devices(plan.mesh.devices.flat[0].platform)), ("all",))


def _timed(plan: Planned, steps: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[float]:
    """Seconds of each step but the first; 0 in a process that has no part in the plan."""
    if plan.mesh is not None and not plan.mesh.local_devices:
        yield from [0.0] * steps
        return
    traced, count = plan.traced, len(args) + bool(kwargs)
    placed = plan.shard(*args, **kwargs)
    items = [placed] if count == 1 else list(placed)
    leaves, tree = jax.tree_util.tree_flatten((tuple(items[: len(args)]), items[-1] if kwargs else {}))
    jax.block_until_ready(leaves)
    for step in range(steps + 1):
        began = perf_counter()
        now, named = tree.unflatten(leaves)
        out = plan(*now, **named)
        jax.block_until_ready(out)
        if step:
            yield perf_counter() - began
        arrays = jax.tree_util.tree_leaves(out)
        for source, target in traced.graph.carry:
            leaves[traced.array_leaves[source]] = arrays[traced.out_array_leaves[target]]
