"""What else a plan could have done with one value, and what that would cost.

The planning problem is posed again at the plan's own shard sizes. To ask about a value, every choice that leaves it
where it is is forbidden, and the best of the remaining programs is found by the same exact search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hapsynth.graph.ir import Op
from hapsynth.instructions.layout import Layout, format_layout
from hapsynth.instructions.program.program import Compute, Convert
from hapsynth.instructions.program.sizes import Classes
from hapsynth.plan import Plan
from hapsynth.search.cost.program_cost import Cost, feed_costs, instruction_costs
from hapsynth.search.formulation.choice_space import ChoiceSpace, Owners
from hapsynth.search.formulation.emission import Emitter
from hapsynth.search.formulation.owners import owners
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.memory.profile import held_by
from hapsynth.search.sizing.ratios import Ratios, own_weights
from hapsynth.search.solver import Ints, solve

_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Alternative:
    """The best program among those that have a value elsewhere: in `layout`.

    `memory_bytes`: its peak on each device, None where its sizes are not those of the plan. `proved`:
    no such program is cheaper.
    """

    layout: Layout
    cost_s: float
    memory_bytes: tuple[float, ...] | None
    proved: bool


class Alternatives:
    """Answers questions about one plan; the problem is built once. `budget_s`: seconds for a question, whose answer is
    then the best program found, and marked as not proved; None for as many as it takes."""

    def __init__(self, plan: Plan, budget_s: float | None = 10.0) -> None:
        self._budget_s = budget_s
        self.plan, self.graph = plan, plan.traced.graph
        self.model = plan.cost_model()
        self.table = self.model.table
        self.costs: list[Cost] = list(instruction_costs(plan.program, plan.sizes, self.model))
        self.layouts: dict[int, Layout] = dict(plan.program.inputs)
        for i in plan.program.instructions:
            if isinstance(i, Compute):
                self.layouts.update((v, i.result_layout(n)) for n, v in enumerate(self.graph.ops[i.op].results))
        axes, agreed_axes = len(self.model.axes), self.model.agreed_axes
        structure = ChoiceSpace(self.graph, self.table, axes=axes, owners=self._owners(), agreed_axes=agreed_axes)
        weights = own_weights(self.model, plan.sizes)
        ratios = Ratios(self.graph, self.table, weights, plan.sizes, self.model.lengths)
        self.ratios = ratios
        self.formulator = ProblemBuilder(structure, self.model, ratios)
        self.problem = self.formulator.problem()

    def _owners(self) -> Owners:
        """Those that the plan has, and those that the search would have offered it."""
        found = {**owners(self.model)}
        for i in self.plan.program.instructions if len(self.model.axes) == 1 else ():
            if isinstance(i, Compute) and (its := {p.owner for p in i.triples[0].operands} - {None}):
                found[i.op] = tuple(dict.fromkeys((*found.get(i.op, ()), *(at for at in its if at is not None))))
        return found

    def spent(self) -> dict[int, float]:
        """Seconds that go into each value: the op that makes it or its feeding, and its conversions."""
        found: dict[int, float] = dict(feed_costs(self.plan.program, self.plan.sizes, self.model))
        for cost in self.costs:
            i = cost.instruction
            value = i.value if isinstance(i, Convert) else _main_value(self.graph.ops[i.op])
            found[value] = found.get(value, 0.0) + cost.seconds
        return found

    def others(self, value: int) -> list[Layout]:
        """The layouts, other than the plan's, in which a value could be made or stored; whole first."""
        variable = self.formulator.structure.value_variable[value]
        made = {a.computed for a in self.formulator.structure.choices[variable].options}
        return sorted(made - {self.layouts[value]}, key=lambda layout: (format_layout(layout) != "R", layout))

    def best_with(self, value: int, layout: Layout) -> Alternative | None:
        """The best program that makes or stores a value in one layout; None where there is none."""
        return self._best(value, lambda found: found == layout)

    def best_other(self, value: int) -> Alternative | None:
        """The best program that does not make or store a value where the plan does; None where there is none."""
        return self._best(value, lambda found: found != self.layouts[value])

    def _best(self, value: int, allowed: Callable[[Layout], bool]) -> Alternative | None:
        structure = self.formulator.structure
        variable = structure.value_variable[value]
        choices = structure.choices[variable]
        forbidden = np.array([not allowed(a.computed) for a in choices.options])[choices.option]
        if forbidden.all():
            return None
        unary = list(self.problem.unary)
        unary[variable] = np.where(forbidden, np.inf, unary[variable])
        # Begun from the best program of all with only this value moved: a good first bound prunes most of the search.
        starts = [self._moved(variable, int(state)) for state in np.flatnonzero(~forbidden)]
        problem = replace(self.problem, unary=tuple(unary))
        solution = solve(problem, start=starts, tolerance=_TOLERANCE, time_budget_s=self._budget_s)
        if solution.assignment is None or not np.isfinite(solution.cost):
            return None
        chosen = choices.state(int(solution.assignment[variable])).availability
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
        found = solve(self.problem, tolerance=_TOLERANCE, time_budget_s=self._budget_s).assignment
        assert found is not None
        return found

    def _memory(self, assignment: list[int]) -> tuple[float, ...] | None:
        program = Emitter(self.formulator, assignment).ordered(self.plan.program.axes)
        sizes = self.ratios.sizes_of(Classes.build(self.graph, program, self.table))
        return None if sizes is None else held_by(program, sizes, self.model)


def _main_value(op: Op) -> int:
    """What an op makes or, of the test of a loop, what it tests."""
    return (*op.results, *(v for _, v in op.value_operands))[0]
