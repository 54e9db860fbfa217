"""Tasks and what planning does with them: what is shared, what is asked, what one additive problem comes to."""

from __future__ import annotations

import inspect
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from graphs import cluster

import hapsynth
from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import trace
from hapsynth.instructions.layout import R
from hapsynth.search.formulation.choice_space import Interned, Restriction
from hapsynth.search.planning.effort import Clock, Effort
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.search_at_ratios import FixedRatioSearch
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.solver import Problem, SolverOptions
from hapsynth.search.solver.problem import Edge

SHAPE = strategies.shape
ARGS = ({"up": SHAPE(64, 96), "down": SHAPE(96, 64)}, SHAPE(256, 64))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(strategies.mlp, ARGS).graph


def test_tasks_of_one_graph_share_what_no_device_decides(graph: Graph) -> None:
    whole = Task(graph, cluster([2.0, 1.0, 1.0]))
    part = whole.on(cluster([1.0, 1.0]), memory_limit=1e6)
    assert part.factors is whole.factors
    assert part.choices is whole.choices
    assert part.costs.n == 2
    assert part.memory_budget.limits == (1e6, 1e6)
    # What devices decide is each task's own, even where it was asked for before.
    assert whole.costs.fastest.tolist() == [True, False, False]
    assert whole.on(cluster([1.0, 2.0])).costs.fastest.tolist() == [False, True]
    assert whole.options.memory_limit is None
    value = graph.inputs[0]
    fixed = whole.on(whole.cluster, restriction=Restriction({value: (R,)}))
    assert fixed.choices is not whole.choices
    assert fixed.choices.restriction.stored == {value: (R,)}
    assert Task(graph, whole.cluster).choices is not whole.choices


def test_a_plan_on_other_devices_is_that_of_a_task_of_its_own(graph: Graph) -> None:
    whole = Task(graph, cluster([2.0, 1.0, 1.0]))
    Planner(whole).run()
    few = cluster([3.0, 1.0])
    kin, alone = Planner(whole.on(few)).run(), Planner(Task(graph, few)).run()
    assert (kin.cost_s, kin.lower_bound_s, kin.joint_lower_bound_s) == (
        alone.cost_s,
        alone.lower_bound_s,
        alone.joint_lower_bound_s,
    )
    assert kin.program.to_dict() == alone.program.to_dict()


def test_defaults_of_options_stand_in_one_place() -> None:
    signature = inspect.signature(hapsynth.synthesize).parameters
    same = [f.name for f in fields(PlanningOptions) if f.name in signature]
    named = {"memory_limit", "time_budget_s", "progress", "leave_out", "lowering", "overlap", "joint_gap"}
    assert set(same) == named
    for name in same:
        assert signature[name].default == getattr(PlanningOptions, name)


def test_an_additive_problem_comes_to_a_choice_its_cost_and_a_bound(graph: Graph) -> None:
    task = Task(graph, cluster([2.0, 1.0]))
    clock, effort = Clock(), Effort()
    search = FixedRatioSearch(task, clock, effort)
    ratios = task.ratios(*task.starts()[0])
    solved = search.cheapest(search.builder(ratios), {}, None, at_least=False, tolerance=1e-9, seconds=clock.allotted)
    problem = search.builder(ratios).problem()
    assert solved.assignment is not None
    assert problem.cost(solved.assignment) == solved.cost
    assert 0 < solved.lower_bound <= solved.cost
    assert solved.cost - solved.lower_bound <= 1e-9 * solved.cost
    assert (effort.sweeps, effort.expanded) == (solved.sweeps, solved.expanded)
    assert effort.states == sum(u.size for u in problem.unary)
    assert 0 < effort.solver_s <= effort.problems_s
    assert search.incumbent.best is None, "only `best` makes programs"
    found = search.best(ratios, None, 1e-9, certain=True)
    assert found.candidate is not None
    assert search.incumbent.best is found.candidate
    # At sizes of its own a program is no dearer than at those that were assumed.
    assert found.candidate.cost <= solved.cost * (1 + 1e-9)


def test_a_planner_goes_about_problems_as_its_options_say(graph: Graph) -> None:
    where = cluster([3.0, 1.0, 1.0], latency=2e-7)
    usual = Planner(Task(graph, where)).run()
    searching = SolverOptions(elimination_cells=0, cheap_work=0, joined_entries=0)
    searched = Planner(Task(graph, where, PlanningOptions(solver=searching))).run()
    assert searched.cost_s == pytest.approx(usual.cost_s, rel=1e-9)
    assert searched.sweeps > usual.sweeps


def test_efforts_together_are_sums_but_for_the_largest_problem() -> None:
    total = Effort.together([Effort(expanded=1, states=7, solver_s=0.5), Effort(expanded=2, states=5, ratio_s=1.0)])
    assert total == Effort(expanded=3, states=7, solver_s=0.5, ratio_s=1.0)


def test_what_is_interned_is_a_key_of_its_own() -> None:
    one, other = Interned([1, 2]), Interned([1, 2])
    assert list(one) == list(other)
    assert one != other
    assert {one: "one", other: "other"}[one] == "one"


def test_a_problem_numbers_its_arrays() -> None:
    row, groups, table = np.zeros(2), np.arange(2), np.ones((2, 2))
    edges = (Edge(0, 1, groups, groups, table), Edge(1, 2, groups, groups.copy(), table))
    shared = Problem((row, row, row.copy()), edges).shared
    assert shared.unary[0] == shared.unary[1] != shared.unary[2]
    (gu, gv, one), (hu, hv, two) = shared.edges
    assert gu == gv == hu != hv
    assert one == two


@pytest.mark.parametrize(("rank", "most"), [(9, 8), (14, 2)])
def test_of_many_dimensions_few_are_cut_together(rank: int, most: int) -> None:
    """All sets of 14 would be 100,000 states of a value used twice."""

    def used_twice(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.sin(x)
        return 2 * y, y.sum()

    task = Task(trace(used_twice, (SHAPE(*[2] * rank),)).graph, cluster([2.0, 1.0]))
    options = [option for domain in task.choices.choices for option in domain.options]
    cut = [option for option in options if option.computed[0].is_sharded]
    assert max(len(option.targets) for option in cut) == most
    # Each cut may be beside each other one.
    assert len({(option.computed, target) for option in cut for target in option.targets}) >= rank * (rank - 1)
    assert max(map(len, task.choices.choices)) < 3000
