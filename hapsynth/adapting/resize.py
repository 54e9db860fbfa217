"""A plan's program on other devices, or at other shapes, without a search: its sizes, and the plan that it is then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import Traced
from hapsynth.instructions.program.program import ProgramError
from hapsynth.instructions.program.sizes import Classes, Node, Sizes
from hapsynth.running.allgather import agreed
from hapsynth.running.base import P, Planned
from hapsynth.running.form import holds_exact, only_exact
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.memory.profile import MemoryProfile, held_by
from hapsynth.search.scheduling.timeline import program_timeline
from hapsynth.search.sizing.fixed_ratios import FixedRatios
from hapsynth.search.sizing.ratios import proportional
from hapsynth.search.sizing.sizer import Sizer


def best_sizes(
    plan: Planned, costs: CostModel, classes: Classes | None = None, pinned: Mapping[Node, Floats] | None = None
) -> tuple[Sizes, float]:
    """The sizes at which the plan's program takes the least, the same in all processes, and the bytes that the device
    nearest to its limit holds then, which may be more than it has. `classes`: of the program at other shapes; `pinned`:
    fractions by which dimensions stay cut.

    Raises ProgramError where the program has no such sizes.
    """
    program, classes, overlap = plan.program, classes or plan.sizes.classes, plan.scheduled
    # At other sizes collectives last otherwise: about as long at the plan's as at those that are found.
    under_way = plan.timeline.under_way if overlap else {}
    sizer = Sizer(program, classes, costs, FixedRatios(named=dict(pinned or {})), under_way=under_way)
    sizes = agreed(plan.mesh, sizer.best(proportional(costs.speed)))
    if not overlap:
        return sizes, sizer.memory.peak(sizes)
    under_way = program_timeline(program, sizes, costs).under_way
    return sizes, MemoryProfile(program, classes, costs, under_way).peak(sizes)


def resized(
    plan: P,
    sizes: Sizes,
    costs: CostModel,
    cluster: Cluster,
    traced: Traced | None = None,
    like: Planned | None = None,
) -> P:
    """The plan at these sizes; its bounds do not hold on another cluster or at other shapes. `like`: a plan that stores
    unevenly what this one is to find as it lies, so that both pad it or neither does.

    Raises ProgramError where that one pads, and there is no room for it here.
    """
    timeline = None
    if plan.result.overlap:
        timeline = program_timeline(plan.program, sizes, costs)
        held = MemoryProfile(plan.program, sizes.classes, costs, timeline.under_way).peaks(sizes)
    else:
        held = held_by(plan.program, sizes, costs)
    memory = np.zeros(plan.cluster.n)
    memory[list(plan.devices)] = held
    result = replace(
        plan.result,
        sizes=sizes,
        cost_s=program_cost(plan.program, sizes, costs) if timeline is None else timeline.makespan_s,
        lower_bound_s=0.0,
        joint_lower_bound_s=0.0,
        ratio_bound_s=0.0,
        bounds={},
        status="gap",
        memory_bytes=tuple(memory.tolist()),
        with_all_s=None,
        exposed_communication_s=0.0 if timeline is None else timeline.exposed_s,
        clocks_s={},
    )
    new = plan.with_result(result, cluster, traced)
    if like is None or plan.mesh is None or holds_exact(new.form) == holds_exact(like.form):
        return new
    if not holds_exact(new.form):
        reason = f"its arguments stay as another plan stores them, at exact size: {like.form_reason}"
        return plan.with_result(result, cluster, traced, form="staged", reason=reason)
    if why := only_exact(costs.graph, result, cluster):
        raise ProgramError(f"arguments are to stay as another plan stores them, padded, and {why}")
    reason = f"its arguments stay as another plan stores them, padded: {like.form_reason}"
    return plan.with_result(result, cluster, traced, form="switch", reason=reason)
