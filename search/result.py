"""What a search returns: the program, its sizes, and the certificate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal as OneOf

from hapsynth.instructions.program import Program
from hapsynth.instructions.sizes import Sizes

Status = OneOf["optimal", "optimal_at_ratios", "gap", "infeasible"]


@dataclass(frozen=True, eq=False)
class Result:
    """A planned program and how good it provably is.

    Times are seconds per step. `lower_bound_s` holds for every program at this plan's ratios, `joint_lower_bound_s`
    for every program at every ratio. `memory_bytes` is the predicted peak of each device in mesh order.
    """

    program: Program
    sizes: Sizes
    cost_s: float
    lower_bound_s: float
    joint_lower_bound_s: float
    status: Status
    expanded: int
    memory_bytes: tuple[float, ...]
    memory_limit_bytes: tuple[float, ...]
    replicated_primitives: tuple[str, ...] = ()
    timings_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that planning took: `trace_s, search_s, ratio_s, total_s`."""

    @property
    def gap(self) -> float:
        return (self.cost_s - self.lower_bound_s) / self.cost_s if self.cost_s else 0.0

    @property
    def joint_gap(self) -> float:
        return (self.cost_s - self.joint_lower_bound_s) / self.cost_s if self.cost_s else 0.0
