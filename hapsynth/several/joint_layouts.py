"""What functions that share a state gain and lose by how it lies, before any is planned for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hapsynth.cluster.cluster import Cluster
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.formulation.choice_space import ChoiceSpace, Restriction
from hapsynth.search.formulation.joint import JointProblem, Subproblem
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.planning.planner import ROUGH_TOLERANCE
from hapsynth.search.planning.task import Task
from hapsynth.search.result import SETTLED
from hapsynth.search.sizing.ratios import Ratios, own_weights
from hapsynth.search.solver import Solution, solve
from hapsynth.several.shared_state import SharedState


@dataclass(eq=False)
class Weighing:
    """`tasks`: of the functions that are called, as they were planned alone; `weights`: how often each is;
    `fixed`: layouts of leaves."""

    state: SharedState
    tasks: Mapping[str, Task]
    weights: Mapping[str, float]
    fixed: Mapping[int, Layout]
    interrupted: bool = field(init=False, default=False)
    """By Ctrl-C."""
    _structures: dict[object, ChoiceSpace] = field(init=False, default_factory=dict[object, ChoiceSpace])

    def bound(self, cluster: Cluster, enough: float, seconds: float | None) -> float:
        """Seconds, weighed, that no plans for all devices of a cluster take less than, at any ratios; nothing beyond
        `enough` is sought, nor for longer than `seconds`."""
        return self._solve(self._together(cluster, None), enough * (1 + 1e-9), seconds).lower_bound

    def layouts(
        self, cluster: Cluster, sizes: Mapping[str, Sizes], cost: float, seconds: float | None
    ) -> dict[int, Layout]:
        """How the state lies best at these sizes of each function; nothing where that costs `cost` or more."""
        together = self._together(cluster, sizes)
        found = self._solve(together, cost * (1 - SETTLED), seconds)
        if found.assignment is None or found.cost >= cost * (1 - SETTLED):
            return {}
        return together.layouts(found.assignment)

    def _solve(self, together: JointProblem, enough: float, seconds: float | None) -> Solution:
        tolerance = SETTLED if together.parts[0].builder.structure.axes == 1 else ROUGH_TOLERANCE
        found = solve(
            together.problem,
            start=together.replicated(),
            tolerance=tolerance,
            enough=enough,
            time_budget_s=None if seconds is None else max(seconds, 0.0),
        )
        self.interrupted |= found.interrupted
        return found

    def _together(self, cluster: Cluster, sizes: Mapping[str, Sizes] | None) -> JointProblem:
        parts: list[Subproblem] = []
        for name, task in self.tasks.items():
            here = task.on(cluster)
            costs = here.costs
            ratios = None
            if sizes is not None:
                weights = own_weights(costs, sizes[name])
                ratios = Ratios(task.graph, task.factors, weights, sizes[name], costs.lengths)
            builder = ProblemBuilder(self._structure(name, here), costs, ratios)
            parts.append(Subproblem(builder, self.weights[name], self._given(name)))
        return JointProblem(parts)

    def _given(self, name: str) -> dict[int, int]:
        """Leaf -> the value that it is given as."""
        role = self.state.roles[name]
        return {leaf: role.traced.graph.inputs[position] for leaf, position in role.inputs.items()}

    def _structure(self, name: str, task: Task) -> ChoiceSpace:
        """Of a function's task on some devices, in which a leaf may lie in every way in which some function would have
        it."""
        owners, agreed_axes = task.owners, task.costs.agreed_axes
        key = name, len(task.costs.axes), tuple(owners.items()), agreed_axes
        if key not in self._structures:
            cuttable: dict[int, frozenset[int]] = {}
            stored: dict[int, Layout] = {}
            for leaf, value in self._given(name).items():
                cuttable[value] = self._dims(leaf)
                if leaf in self.fixed:
                    stored[value] = self.fixed[leaf]
            restriction = Restriction(stored, cuttable=cuttable)
            self._structures[key] = ChoiceSpace(
                task.graph, task.factors, restriction, key[1], owners=owners, agreed_axes=agreed_axes
            )
        return self._structures[key]

    def _dims(self, leaf: int) -> frozenset[int]:
        """The dimensions by which some function would cut a leaf."""
        given = ((task, self._given(name)) for name, task in self.tasks.items())
        return frozenset(d for f, at in given if leaf in at for d in f.choices.layouts[at[leaf]].dims)
