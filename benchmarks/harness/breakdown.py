"""Where a plan's predicted seconds go."""

from __future__ import annotations

from collections import defaultdict

import hapsynth
from hapsynth.instructions.program.program import Convert
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.program_cost import instruction_costs


def where(plan: hapsynth.Plan, costs: CostModel) -> dict[str, float]:
    """Predicted seconds of each primitive and collective, the most first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for cost in instruction_costs(plan.program, plan.sizes, costs):
        i = cost.instruction
        seconds[i.step if isinstance(i, Convert) else plan.traced.graph.ops[i.op].name] += cost.seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
