"""What else a plan could have done with one value, and what that would cost.

The planning problem is posed again at the plan's own shard sizes. To ask about a value, every choice that leaves it
where it is is forbidden, and the best of the remaining programs is found by the same exact search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hapsynth.instructions.layout import Placement, R
from hapsynth.instructions.program import Compute, Convert, FactorTable
from hapsynth.instructions.sizes import Classes
from hapsynth.plan import Plan
from hapsynth.search.costs import CostModel, Floats
from hapsynth.search.emit import Emitter
from hapsynth.search.evaluate import Cost, feed_costs, instruction_costs
from hapsynth.search.formulate import Formulator
from hapsynth.search.memory import peak
from hapsynth.search.problem import Ints, solve
from hapsynth.search.ratios import Ratios, proportional
from hapsynth.search.structure import Structure

_TOLERANCE = 1e-5
_BUDGET_S = 10.0
"""For one question. Its answer is then the best program found, and marked as not proved."""


@dataclass(frozen=True)
class Alternative:
    """The best program among those that have a value elsewhere: in `placement`.

    `memory_bytes`: its peak per device, None where its sizes are not those of the plan. `proved`:
    no such program is cheaper.
    """

    placement: Placement
    cost_s: float
    memory_bytes: float | None
    proved: bool


class Alternatives:
    """Answers questions about one plan; the problem is built once."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, plan.traced.graph
        self.table = FactorTable(self.graph)
        self.model = CostModel(self.graph, plan.cluster, self.table)
        self.costs: list[Cost] = list(instruction_costs(plan.program, plan.sizes, self.model))
        self.placements = {v: layout[0] for v, layout in plan.program.inputs.items()}
        for i in plan.program.instructions:
            if isinstance(i, Compute):
                for value, placement in zip(self.graph.ops[i.op].results, i.triples[0].results, strict=True):
                    self.placements[value] = placement
        structure = Structure(self.graph, self.table)
        ratios = Ratios(self.graph, self.table, self._default(), plan.sizes)
        self.ratios = ratios
        self.formulator = Formulator(structure, self.model, ratios)
        self.problem = self.formulator.problem()

    def _default(self) -> Floats:
        """Dimensions that the plan leaves whole are cut as its heaviest class is, or by speed."""
        sizes = self.plan.sizes
        if not sizes.shares:
            return proportional(self.model.rate("float32"))
        weight = lambda c: sum(self.graph.values[v].nbytes for v, _, _ in sizes.classes.all[c].members)
        heaviest = max(range(len(sizes.shares)), key=weight)
        return np.array(sizes.shares[heaviest]) / sizes.classes.all[heaviest].units

    def spent(self) -> dict[int, float]:
        """Seconds that go into each value: the op that makes it or its feeding, and its conversions."""
        found: dict[int, float] = dict(feed_costs(self.plan.program, self.plan.sizes, self.model))
        for cost in self.costs:
            i = cost.instruction
            value = i.value if isinstance(i, Convert) else self.graph.ops[i.op].results[0]
            found[value] = found.get(value, 0.0) + cost.seconds
        return found

    def others(self, value: int) -> list[Placement]:
        """The placements, other than the plan's, in which a value could be made or stored; whole first."""
        variable = self.formulator.structure.value_variable[value]
        made = {s.availability.computed for s in self.formulator.structure.states[variable] if s.availability}
        return sorted(made - {self.placements[value]}, key=lambda p: (p != R, p))

    def best_with(self, value: int, placement: Placement) -> Alternative | None:
        """The best program that makes or stores a value in one placement; None where there is none."""
        return self._best(value, lambda p: p == placement)

    def best_other(self, value: int) -> Alternative | None:
        """The best program that does not make or store a value where the plan does; None where there is none."""
        return self._best(value, lambda p: p != self.placements[value])

    def _best(self, value: int, allowed: Callable[[Placement], bool]) -> Alternative | None:
        structure = self.formulator.structure
        variable = structure.value_variable[value]
        states = structure.states[variable]
        forbidden = np.array([s.availability is None or not allowed(s.availability.computed) for s in states])
        if forbidden.all():
            return None
        unary = list(self.problem.unary)
        unary[variable] = np.where(forbidden, np.inf, unary[variable])
        # Begun from the best program of all with only this value moved: a good first bound prunes most of the search.
        starts = [self._moved(variable, int(state)) for state in np.flatnonzero(~forbidden)]
        problem = replace(self.problem, unary=tuple(unary))
        solution = solve(problem, start=starts, tolerance=_TOLERANCE, time_budget_s=_BUDGET_S)
        if solution.assignment is None or not np.isfinite(solution.cost):
            return None
        chosen = states[int(solution.assignment[variable])].availability
        assert chosen is not None
        cost = float(solution.cost)
        proved = cost - solution.lower_bound <= 10 * _TOLERANCE * cost
        return Alternative(chosen.computed, cost, self._memory(solution.assignment.tolist()), proved)

    def _moved(self, variable: int, state: int) -> Ints:
        moved = self._best_of_all.copy()
        moved[variable] = state
        return moved

    @cached_property
    def _best_of_all(self) -> Ints:
        found = solve(self.problem, tolerance=_TOLERANCE, time_budget_s=_BUDGET_S).assignment
        assert found is not None
        return found

    def _memory(self, assignment: list[int]) -> float | None:
        program = Emitter(self.formulator, assignment).run(self.plan.program.axes)
        sizes = self.ratios.sizes_of(Classes.build(self.graph, program, self.table))
        return None if sizes is None else peak(program, sizes, self.model)
