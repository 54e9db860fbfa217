"""Ctrl-C while several functions are planned: the best plans so far are returned, none of them for another state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_devices import SPEEDS, slow_cluster

import hapsynth
from hapsynth.search.planning.device_subsets import ClusterPlanner
from hapsynth.search.result import Progress
from hapsynth.search.solver import Solution

# On two axes: with one, so small a problem is solved before there is anything to tell.
CLUSTER = replace(slow_cluster(SPEEDS["3:1"], bandwidth=1e8), axes=(("a", 2), ("b", 2)))
STATE = {"a": np.ones((64, 64), np.float32), "b": np.ones((64, 64), np.float32)}


def columns(state: Any) -> Any:
    """Has to see columns of `a` whole, and would have `b` in columns."""
    return {"a": jnp.sort(state["a"], axis=0), "b": state["b"] + jnp.sort(state["b"].sum(0))}


def rows(state: Any) -> Any:
    return jnp.sort(state["b"], axis=1).sum(), jnp.sort(state["a"].sum(1))


def init(scale: jax.Array) -> Any:
    return jax.tree.map(lambda x: jnp.full(x.shape, scale), STATE)


FUNCTIONS: dict[str, Callable[..., Any]] = {"columns": columns, "rows": rows, "init": init}
ARGS: dict[str, tuple[Any, ...]] = {"columns": (STATE,), "rows": (STATE,), "init": (np.float32(1),)}


def planned(progress: Callable[[Progress], None] | None = None) -> hapsynth.Plans:
    return hapsynth.synthesize_several(
        FUNCTIONS, ARGS, CLUSTER, frequency={"rows": 1}, leave_out=False, progress=progress
    )


@pytest.fixture(scope="module")
def whole() -> hapsynth.Plans:
    plans = planned()
    assert not any(plan.result.interrupted for plan in plans.values())
    return plans


def holds_together(plans: hapsynth.Plans, best: hapsynth.Plans) -> None:
    """All are said to be interrupted, and keep the state in one way."""
    assert plans.keys() == FUNCTIONS.keys()
    assert all(plan.result.interrupted for plan in plans.values())
    assert plans["rows"].layouts == plans.layouts
    assert {f"[0]{path}": layout for path, layout in plans["init"].output_layouts.items()} == plans.layouts
    assert best.lower_bound * (1 - 1e-4) <= plans.cost
    assert plans.lower_bound <= plans.cost


@pytest.mark.parametrize("first", ["columns", "rows", "init"])
@pytest.mark.parametrize("again", [False, True])
def test_the_best_so_far_is_returned(first: str, again: bool, whole: hapsynth.Plans) -> None:
    pressed: list[str] = []

    def press(p: Progress) -> None:
        if p.stage.startswith(f"{first}:") and (again or not pressed):
            pressed.append(p.stage)
            raise KeyboardInterrupt

    plans = planned(press)
    assert pressed
    holds_together(plans, whole)


def test_plans_that_were_found_are_not_lost(whole: hapsynth.Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where it is pressed before there is any plan for another layout of the state."""
    run, count = ClusterPlanner.run, 0

    def pressed(planner: ClusterPlanner) -> Any:
        nonlocal count
        count += 1
        # Each alone, `rows` under the state of `columns`, and then one under that which is weighed.
        if count == 4:
            raise KeyboardInterrupt
        return run(planner)

    monkeypatch.setattr(ClusterPlanner, "run", pressed)
    plans = planned()
    assert count > 4
    holds_together(plans, whole)
    assert plans.cost > whole.cost


def test_while_the_state_is_weighed(whole: hapsynth.Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Solution(None, np.inf, 0.0, 0, 0, "gap", True)
    monkeypatch.setattr("hapsynth.several.joint_layouts.solve", lambda *_, **__: nothing)
    plans = planned()
    holds_together(plans, whole)


def test_without_any_plans_it_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(planner: ClusterPlanner) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ClusterPlanner, "run", pressed)
    with pytest.raises(KeyboardInterrupt):
        planned()
