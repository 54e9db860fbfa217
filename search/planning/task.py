"""A planning task: one graph on one cluster, what is asked of its plan, and the facts of these that planning reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.memory_budget import MemoryBudget
from hapsynth.graph.ir import Graph
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.staging.options import DEFAULT as LOWERED_BY_DEFAULT
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.formulation.choice_space import ChoiceSpace, Owners, Restriction
from hapsynth.search.formulation.owners import owners
from hapsynth.search.result import Progress
from hapsynth.search.sizing.fixed_ratios import FixedRatios
from hapsynth.search.sizing.ratios import NOTHING, EvenDims, Ratios, own_weights, starts
from hapsynth.search.solver.options import DEFAULT, SolverOptions


@dataclass(frozen=True, eq=False)
class PlanningOptions:
    """What is asked of a plan: the options of `synthesize` as the search reads them, and their defaults.

    `memory_limit`: bytes per device; None: what each device has. `time_budget_s`: seconds, counted from the creation
    of the planner. `exact`: shards are stored at their own size, not padded (`MemoryBudget`). `leave_out`: the plan may
    use fewer devices; ignored with a restriction or fixed ratios, which are for a mesh of all devices. `devices`: use
    just these positions of the cluster; a restriction and ratios then refer to them. `overlap`: minimize the makespan,
    with collectives beside computing, instead of the sum of all instructions. `least_speedup`: with overlap, return the
    plan without it unless overlap makes a step this many times as fast. `joint_gap`: tighten the joint bound until it
    is within this fraction of the plan's cost (`JointRefinement`); None: solve for it once.
    `solver`: limits and tolerances of each problem. `lowering`: thresholds by which programs are priced and lowered.
    `collectives`: names of steps (`instructions.collectives.STEPS`) allowed besides the usual ones; None: all.
    """

    memory_limit: float | None = None
    time_budget_s: float | None = None
    progress: Callable[[Progress], None] | None = None
    leave_out: bool = True
    exact: bool = False
    restriction: Restriction | None = None
    fixed_ratios: FixedRatios | None = None
    devices: tuple[int, ...] | None = None
    overlap: bool = False
    least_speedup: float = 1.0
    joint_gap: float | None = None
    solver: SolverOptions = DEFAULT
    lowering: LoweringOptions = LOWERED_BY_DEFAULT
    collectives: frozenset[str] | None = None


@dataclass(frozen=True, eq=False)
class Task:
    """`parent`: the task of the same graph that this one was derived from; what does not depend on the devices is taken
    from it."""

    graph: Graph
    cluster: Cluster
    options: PlanningOptions = field(default_factory=PlanningOptions)
    parent: Task | None = None

    def on(self, cluster: Cluster, **options: Any) -> Task:
        """The same graph on other devices, with other `options` where some are given."""
        return replace(self, cluster=cluster, options=replace(self.options, **options), parent=self)

    @cached_property
    def factors(self) -> FactorTable:
        return self.parent.factors if self.parent else FactorTable(self.graph)

    @cached_property
    def memory_budget(self) -> MemoryBudget:
        """What the devices may hold."""
        return MemoryBudget.of(self.cluster, self.options.memory_limit, exact=self.options.exact)

    @cached_property
    def costs(self) -> CostModel:
        if self.parent:
            return self.parent.costs.on(self.cluster, self.memory_budget)
        budget, lowering = self.memory_budget, self.options.lowering
        return CostModel(
            self.graph,
            self.cluster,
            self.factors,
            memory_budget=budget,
            lowering=lowering,
            offered=self.options.collectives,
        )

    @cached_property
    def choices(self) -> ChoiceSpace:
        """What a program may choose, at any ratios, where memory is not short."""
        key = self.options.restriction, len(self.costs.axes), tuple(self.owners.items()), self.costs.agreed_axes
        if key not in self._choices:
            self._choices[key] = self.choice_space()
        return self._choices[key]

    @cached_property
    def _choices(self) -> dict[object, ChoiceSpace]:
        return self.parent._choices if self.parent else {}

    def choice_space(self, *, sparing: bool = False) -> ChoiceSpace:
        """A choice space of the task's own; `sparing` where memory is short."""
        given = self.graph, self.factors, self.options.restriction, len(self.costs.axes)
        owners = self._owners(sparing=True) if sparing else self.owners
        return ChoiceSpace(*given, sparing=sparing, owners=owners, agreed_axes=self.costs.agreed_axes)

    @cached_property
    def owners(self) -> Owners:
        """The ops that may have an owner where memory is not short, and the positions that may be it; none where it is
        said what may be cut."""
        return self._owners(sparing=False)

    def _owners(self, *, sparing: bool) -> Owners:
        asked, restriction = self.options.fixed_ratios, self.options.restriction
        if restriction is not None and restriction.allowed is not None:
            return {}
        return owners(self.costs, None if asked is None else asked.weights, sparing=sparing)

    def ratios(self, weights: Floats, evenly: EvenDims = NOTHING, sizes: Sizes | None = None) -> Ratios:
        """Those of sizes, and by weights where these cut nothing, but for what is asked for."""
        asked = self.options.fixed_ratios
        if asked is not None and asked.weights is not None:
            weights, evenly = asked.weights, NOTHING
        named = None if asked is None else asked.named
        return Ratios(self.graph, self.factors, weights, sizes, self.costs.lengths, evenly, named)

    def own_ratios(self, sizes: Sizes) -> Ratios:
        """A plan's own; what it does not cut is compared at the ratio of its largest class."""
        return self.ratios(own_weights(self.costs, sizes), NOTHING, sizes)

    def starts(self) -> list[tuple[Floats, EvenDims]]:
        """Weights to begin the search from, and what is cut evenly all the same."""
        asked = self.options.fixed_ratios
        return starts(self.costs) if asked is None or asked.weights is None else [(asked.weights, NOTHING)]
