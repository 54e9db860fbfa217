"""What a search tells on its way, and what it returns: the program, its sizes, and the certificate."""

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
"""`unpriced`: optimal, at these ratios at least, were each op of an unknown cost no dearer than it counts."""

SETTLED = 1e-4
"""The gap that counts as optimal."""


def qualified(status: Status, unpriced: Sequence[str]) -> Status:
    """A status of costs that leave out what the `unpriced` primitives take: nothing is optimal then."""
    return "unpriced" if unpriced and status in ("optimal", "optimal_at_ratios") else status


def proven(cost: float, bound: float, joint: float, unpriced: Sequence[str]) -> Status:
    """What the bounds say of a cost."""
    if cost - bound > SETTLED * cost:
        return "gap"
    return qualified("optimal" if cost - joint <= SETTLED * cost else "optimal_at_ratios", unpriced)


@dataclass(frozen=True)
class Progress:
    """What a search tells its caller now and then.

    `seconds`: since the planning began. `cost_s`, `lower_bound_s`: of the best program so far, and the bound at the
    ratios searched now or, in the stage "joint bound", at any. `expanded`: search nodes so far.
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

    Times are seconds per step. `lower_bound_s` holds for every program at this plan's ratios (with reshares, for all
    whose instructions are each at one of those that it has for their dimensions), `joint_lower_bound_s` for every
    program at every ratio; 0 where the search was interrupted before it knew better. `memory_bytes` is the
    predicted peak of each device in mesh order. `expanded`: nodes of A*, `sweeps`: of the dual, `states`: of the
    largest problem.

    The program is for a mesh of the cluster's `devices`; the others hold and compute nothing. The first bound is about
    programs on just these devices, the second about those on any of the sets that `search/planning/device_subsets.py`
    considers.
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
    """Seconds that planning took: `trace_s`; `build_s`, to pose the problems; `search_s`, to solve them; `ratio_s`, for
    the sizes; `bound_s`, for the joint bound; `total_s`."""
    sweeps: int = 0
    states: int = 0
    interrupted: bool = False
    """Ctrl-C ended the search: this is the best that it had."""
    devices: tuple[int, ...] | None = None
    """Positions in mesh order, rising; None: every device takes part."""
    with_all_s: float | None = None
    """Where some are left out, what the best program found takes in which all take part; inf where none fits. (One that
    would not fit as it is counts where there is no other, and it was too slow to be made to fit.)"""
    ratio_bound_s: float = 0.0
    """Seconds that this program takes at least, at any sizes, whole units or not; 0 where that was not sought."""
    bounds: Mapping[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])
    """The joint bound on each set of devices that was considered; empty where only one was."""
    unpriced_primitives: tuple[str, ...] = ()
    """Of which nothing says what they take (`instructions.rules.replicated_ops.unpriced`)."""
    overlap: bool = False
    """Whether `cost_s` is the makespan of the program in its order, its collectives beside what is computed; else it is
    the sum over its instructions."""
    exposed_communication_s: float = 0.0
    """With overlap: seconds in which the device that computes longest computes nothing, until its last result."""
    clocks_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """With overlap: by name, how long each kind of device computes, and each link is taken. No step is shorter."""
    exact: bool = False
    """Whether `memory_bytes` is of shards stored at exact size, in staged or fused form; else they are padded."""
    lowering: LoweringOptions = DEFAULT
    """The thresholds by which the program was priced, and is lowered."""

    @property
    def room(self) -> MemoryBudget:
        """What the devices that take part may hold."""
        used = range(len(self.memory_limit_bytes)) if self.devices is None else self.devices
        return MemoryBudget(tuple(self.memory_limit_bytes[d] for d in used), self.exact)

    @property
    def rounding_gap(self) -> float:
        """How much of the cost its sizes, in whole units, are at most above the best fractions."""
        return (self.cost_s - self.ratio_bound_s) / self.cost_s if self.cost_s else 0.0

    @property
    def gap(self) -> float:
        return (self.cost_s - self.lower_bound_s) / self.cost_s if self.cost_s else 0.0

    @property
    def joint_gap(self) -> float:
        return (self.cost_s - self.joint_lower_bound_s) / self.cost_s if self.cost_s else 0.0
