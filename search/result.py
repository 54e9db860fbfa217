"""A search's progress, and its result: the program, its sizes, and the certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal as OneOf

import numpy as np

from hapsynth.cluster.memory_budget import MemoryBudget
from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions

Status = OneOf["optimal", "optimal_at_ratios", "gap", "unpriced", "infeasible"]
"""`unpriced`: optimal, at least at these ratios, if no op of unknown cost takes longer than the model assumes."""

SETTLED = 1e-4
"""The gap that counts as optimal."""


def qualified(status: Status, unpriced: Sequence[str]) -> Status:
    """The status where the costs of the `unpriced` primitives are unknown: if there are any, nothing is optimal."""
    return "unpriced" if unpriced and status in ("optimal", "optimal_at_ratios") else status


def proven(cost: float, bound: float, joint: float, unpriced: Sequence[str]) -> Status:
    """The status that a cost has by the bound at its ratios and the `joint` bound."""
    if cost - bound > SETTLED * cost:
        return "gap"
    return qualified("optimal" if cost - joint <= SETTLED * cost else "optimal_at_ratios", unpriced)


@dataclass(frozen=True)
class Progress:
    """The state of a running search, for `progress` callbacks.

    `seconds`: since planning began. `cost_s`: of the best program so far. `lower_bound_s`: the bound at the ratios
    searched now or, in the stage "joint bound", at any. `expanded`: search nodes so far.
    """

    stage: str
    seconds: float
    cost_s: float
    lower_bound_s: float
    expanded: int

    @property
    def gap(self) -> float:
        """(cost - lower bound) / cost; inf while one of them is unknown."""
        known = np.isfinite(self.cost_s) and np.isfinite(self.lower_bound_s) and self.cost_s > 0
        return max(0.0, (self.cost_s - self.lower_bound_s) / self.cost_s) if known else np.inf


@dataclass(frozen=True, eq=False)
class Result:
    """A planned program and how good it provably is.

    Times are seconds per step. `lower_bound_s` bounds every program with this plan's ratios; if the plan reshares a
    dimension, every program that uses for it only the ratios that this plan uses. `joint_lower_bound_s` bounds every
    program with any ratios. Both are 0 where the search was interrupted before it had a bound. `memory_bytes` is the
    predicted peak of each device in mesh order. `expanded`: A* nodes; `sweeps`: sweeps of the dual; `states`: states of
    the largest problem.

    The program is for a mesh of the cluster's `devices`; the others hold and compute nothing. `lower_bound_s` is for
    programs on just these devices, `joint_lower_bound_s` for programs on any of the sets of devices that
    `search/planning/device_subsets.py` considers.
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
    """Seconds that planning took: `trace_s`; `build_s`, to pose the problems; `search_s`, to solve them; `ratio_s`, to
    find sizes; `bound_s`, for the joint bound; `total_s`."""
    sweeps: int = 0
    states: int = 0
    interrupted: bool = False
    """Ctrl-C ended the search: this is the best that it had."""
    devices: tuple[int, ...] | None = None
    """Positions in mesh order, rising; None: every device takes part."""
    with_all_s: float | None = None
    """If devices are left out: the seconds of the best program found that uses all of them; inf if none fits. (A
    program that does not fit counts if there is no other and it was too slow to be worth making it fit.)"""
    ratio_bound_s: float = 0.0
    """A lower bound on this program's seconds over all sizes, fractional ones included; 0 if not computed."""
    bounds: Mapping[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])
    """The joint bound on each set of devices that was considered; empty where only one was."""
    unpriced_primitives: tuple[str, ...] = ()
    """Primitives of unknown cost (`instructions.rules.replicated_ops.unpriced`)."""
    overlap: bool = False
    """Whether `cost_s` is the makespan of the program in its order, with collectives running while devices compute;
    else it is the sum over its instructions."""
    exposed_communication_s: float = 0.0
    """With overlap: seconds, until its last result, in which the device that computes longest computes nothing."""
    clocks_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """With overlap: name of a kind of device or of a link -> seconds that it is busy. No step is shorter."""
    exact: bool = False
    """Whether `memory_bytes` counts shards at exact size (staged and fused form); else padded to the largest."""
    lowering: LoweringOptions = DEFAULT
    """The thresholds by which the program was priced, and is lowered."""

    @property
    def memory_budget(self) -> MemoryBudget:
        """The memory budget of the devices that take part."""
        used = range(len(self.memory_limit_bytes)) if self.devices is None else self.devices
        return MemoryBudget(tuple(self.memory_limit_bytes[d] for d in used), self.exact)

    @property
    def rounding_gap(self) -> float:
        """Upper bound on the fraction of the cost that is due to sizes in whole units instead of the best fractions."""
        return (self.cost_s - self.ratio_bound_s) / self.cost_s if self.cost_s else 0.0

    @property
    def gap(self) -> float:
        return (self.cost_s - self.lower_bound_s) / self.cost_s if self.cost_s else 0.0

    @property
    def joint_gap(self) -> float:
        return (self.cost_s - self.joint_lower_bound_s) / self.cost_s if self.cost_s else 0.0
