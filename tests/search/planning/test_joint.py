"""Functions with one state, weighed as one problem."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from slow_devices import SPEEDS, slow_cluster

import hapsynth
from hapsynth.graph.trace import Traced, trace
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.search.cost.model import CostModel
from hapsynth.search.formulation.choice_space import ChoiceSpace, Restriction
from hapsynth.search.formulation.joint import JointProblem, Subproblem
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.solver import solve

SLOW = slow_cluster(SPEEDS["equal"], bandwidth=1e8)
STATE = {"a": np.ones((64, 64), np.float32), "b": np.ones((64, 64), np.float32)}


def columns(state: Any) -> Any:
    """Has to see columns of `a` whole; would have `b` in columns, but not for much."""
    return {"a": jnp.sort(state["a"], axis=0), "b": state["b"] + jnp.sort(state["b"].sum(0))}


def rows(state: Any) -> Any:
    """Has to see rows of `b` whole; would have `a` in rows, but not for much."""
    return jnp.sort(state["b"], axis=1).sum(), jnp.sort(state["a"].sum(1))


FUNCTIONS = {"columns": columns, "rows": rows}
ARGS = {"columns": (STATE,), "rows": (STATE,)}


def part(traced: Traced, weight: float, restriction: Restriction) -> Subproblem:
    graph, table = traced.graph, FactorTable(traced.graph)
    builder = ProblemBuilder(ChoiceSpace(graph, table, restriction), CostModel(graph, SLOW, table), None)
    return Subproblem(builder, weight, dict(enumerate(graph.inputs)))


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_it_is_the_best_of_all_layouts(weight: float) -> None:
    traced = [trace(fn, (STATE,)) for fn in (columns, rows)]
    either = lambda t: Restriction(cuttable=dict.fromkeys(t.graph.inputs, frozenset((0, 1))))
    parts = [part(t, w, either(t)) for t, w in zip(traced, (1.0, weight))]
    together = JointProblem(parts)
    found = solve(together.problem, start=together.replicated(), tolerance=1e-9)
    assert found.assignment is not None
    ways = parts[0].builder.structure.layouts[traced[0].graph.inputs[0]].storable
    assert len(ways) == 3
    costs: dict[tuple[Any, ...], float] = {}
    for layouts in product(ways, repeat=2):
        costs[layouts] = 0.0
        for t, w in zip(traced, (1.0, weight)):
            alone = part(t, w, Restriction(dict(zip(t.graph.inputs, layouts)))).builder.problem()
            costs[layouts] += w * solve(alone).cost
    assert found.cost == pytest.approx(min(costs.values()), rel=1e-9)
    assert costs[tuple(together.layouts(found.assignment).values())] == pytest.approx(found.cost, rel=1e-9)


def planned(**options: Any) -> hapsynth.Plans:
    return hapsynth.synthesize_several(FUNCTIONS, ARGS, SLOW, frequency={"rows": 1}, leave_out=False, **options)


def test_the_state_lies_as_no_function_alone_would_have_it() -> None:
    plans = planned()
    assert plans.layouts == {"[0]['a']": "S(1)", "[0]['b']": "S(0)"}
    assert sum(plans.alone.values()) <= plans.lower_bound <= plans.cost
    assert plans.gap < 1e-3
    for layout in ("S(1)", "S(0)"):
        # As `columns` or `rows` would have both.
        assert planned(fixed={"[0]['a']": layout, "[0]['b']": layout}).cost > 1.1 * plans.cost


def test_the_bound_is_on_every_set_of_devices() -> None:
    """Where one function would leave out the slow devices, and the other would not."""
    cluster = slow_cluster((9, 9, 1, 1), bandwidth=2e7)
    wide = {"columns": ARGS["columns"], "rows": (STATE, np.ones((4096, 64), np.float32))}
    functions = {"columns": columns, "rows": lambda s, x: (jnp.tanh(x) ** 2).sum() + s["a"].sum()}
    plans = hapsynth.synthesize_several(functions, wide, cluster)
    assert hapsynth.synthesize(functions["rows"], wide["rows"], cluster).devices == (0, 1, 2, 3)
    assert plans["columns"].devices == plans["rows"].devices == (0, 1)
    assert plans.cost > 1.05 * sum(plans.frequency[name] * cost for name, cost in plans.alone.items())
    assert plans.gap < 1e-3
