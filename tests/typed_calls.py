"""What a type checker knows of plans: `make lint` reads this, nothing runs it."""

from typing import Any, assert_type

import jax

import hapsynth

State = dict[str, jax.Array]


def step(state: State, batch: jax.Array) -> tuple[State, float]:
    return state, float(batch.sum())


def calls(state: State, batch: jax.Array, cluster: hapsynth.Cluster) -> None:
    plan = hapsynth.synthesize(step, (state, batch), cluster)
    assert_type(plan(state, batch), tuple[State, float])
    assert_type(plan.recorded(state, batch)[0], tuple[State, float])
    assert_type(plan.adopt(state, plan), State)
    plan(state)  # pyright: ignore[reportCallIssue]
    plan(state, "batch")  # pyright: ignore[reportArgumentType]
    again = hapsynth.load("plan.json", step, (state, batch))
    assert_type(again.for_shapes(state, batch)(state, batch), tuple[State, float])
    # A function without annotations stays as it was.
    plans = hapsynth.synthesize_several({"train": step}, {"train": (state, batch)}, cluster)
    assert_type(plans["train"](state, batch), Any)
