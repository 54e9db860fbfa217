"""Plans that share a state follow one of them that gets other sizes: none of it moves between them then."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from slow_devices import SPEEDS, first_devices, thin_cluster
from test_several import ARGS, CUT, FLAT, FLAT_FUNCTIONS, FUNCTIONS, X, evaluate, init, planned, stored, train

import hapsynth
from hapsynth import Plans, StateWarning
from hapsynth.adapting.rebalance import busy_seconds
from hapsynth.plan import Plan
from hapsynth.report.several import print_several
from hapsynth.report.tables import console


def slower(plan: Plan, *times: float) -> Plan:
    """The plan rebalanced for devices that take so many times as long as predicted."""
    return plan.rebalance([*(busy_seconds(plan) * times)])


@pytest.mark.few(1)
@pytest.mark.parametrize(("form", "fixed"), [("switch", CUT), ("staged", None)])
def test_the_others_follow(form: Any, fixed: Any, tmp_path: Path) -> None:
    plans = planned(form=form, fixed=fixed, cluster=thin_cluster(SPEEDS["3:1"]))
    state, plain = plans["init"](jax.random.key(3)), init(jax.random.key(3))
    state, _ = plans["train"](state, X)
    plain, _ = jax.jit(train)(plain, X)
    new = slower(plans["train"], 6, 1, 1, 1)
    assert new.sizes.shares != plans["train"].sizes.shares
    moved = new.adopt(state, plans["train"])
    # Before, the others take it as it lies no more.
    with pytest.raises(ValueError, match="does not lie as the plan keeps it"):
        stored(plans["eval"], moved)
    found = plans.rebalanced("train", new)
    assert found["train"] is new
    assert [*found] == [*plans]
    assert {p.cluster for p in found.values()} == {new.cluster}
    assert all(p.program is plans[n].program for n, p in found.items())
    assert (found.alone, found.lower_bound) == ({}, 0.0)
    out = io.StringIO()
    print_several(console(out), found)
    assert "lower bound    none known" in out.getvalue()
    assert "gap" not in out.getvalue()
    assert found.frequency == plans.frequency
    assert found.cost == pytest.approx(new.cost + 0.1 * found["eval"].cost)
    found.save(tmp_path / "plans.json")
    for each in (found, hapsynth.load_plans(tmp_path / "plans.json", FUNCTIONS, ARGS, first_devices(4), form=form)):
        assert [id(x) for x in stored(each["eval"], moved)] == [id(x) for x in stored(each["train"], moved)]
        np.testing.assert_allclose(each["eval"](moved, X), jax.jit(evaluate)(plain, X), rtol=1e-5)
        fresh = each["init"](jax.random.key(3))
        assert stored(each["train"], fresh)
        jax.tree.map(
            np.testing.assert_array_equal, each["eval"].unshard(fresh), jax.device_get(init(jax.random.key(3)))
        )
    _, value = found["train"](moved, X)
    np.testing.assert_allclose(value, jax.jit(train)(plain, X)[1], rtol=1e-5)
    # Padded by one, so by all, and the other way around.
    other: Any = "staged" if form == "switch" else "switch"
    as_there = plans.rebalanced("train", new.with_result(new.result, new.cluster, form=other))
    assert {p.form for p in as_there.values()} == {other}
    # And back, from a file.
    again = slower(each["train"], 1 / 6, 1, 1, 1)
    assert again.sizes.shares != each["train"].sizes.shares
    assert stored(each.rebalanced("train", again)["eval"], again.adopt(fresh, each["train"]))


def test_what_the_first_has_not_lies_alike_in_the_others() -> None:
    fixed = {"[0]['a']": "S(0)", "[1]['a']": "S(1)"}
    plans = planned(FLAT_FUNCTIONS, FLAT, fixed=fixed, cluster=thin_cluster(SPEEDS["3:1"]))
    found = plans.rebalanced("eval", slower(plans["eval"], 6, 1, 1, 1))
    _, made = found["init"](np.float32(0.05))
    held = found["train"].arguments.held(found["train"].lowered, made, 1)  # pyright: ignore[reportPrivateUsage]
    assert len([*held]) == 2


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: ((x * w) ** 2).mean())(w), 0.0


def blocks(w: Any, x: Any) -> Any:
    """Cuts `w` in eights alone."""
    return (w.reshape(8, 8).cumsum(axis=1).reshape(64) * x).mean()


def of_blocks(**options: Any) -> Plans:
    args = (np.ones(64, np.float32), np.ones((8, 64), np.float32))
    functions = {"step": step, "blocks": blocks}
    return planned(functions, {"step": args, "blocks": args}, fixed={"[0]": "S(0)"}, **options)


def test_what_cannot_follow_keeps_its_sizes(caplog: pytest.LogCaptureFixture) -> None:
    plans = of_blocks(cluster=thin_cluster(SPEEDS["3:1"]))
    new = slower(plans["step"], 1, 1, 4.3, 1)
    assert new.sizes.shares != plans["step"].sizes.shares
    with pytest.warns(StateWarning, match=r"'blocks' keeps its sizes.*\[0\]"):
        found = plans.rebalanced("step", new)
    assert found["blocks"] is plans["blocks"]
    assert found["step"] is new
    w = new.shard(np.arange(64, dtype=np.float32), np.ones((8, 64), np.float32))[0]
    x = np.ones((8, 64), np.float32)
    with caplog.at_level(logging.INFO, "hapsynth"):
        for _ in range(2):
            np.testing.assert_allclose(found["blocks"](w, x), blocks(np.arange(64, dtype=np.float32), x), rtol=1e-5)
        found["step"](w, x)
    # Once, and not of what came from the host.
    assert [r.getMessage() for r in caplog.records if "moves" in r.getMessage()] == [
        "each call moves [0], which the plan keeps otherwise: plan.adopt moves an argument once"
    ]


def test_bad_input() -> None:
    plans = of_blocks()
    assert plans.rebalanced("step", plans["step"]) is plans
    with pytest.raises(KeyError, match="other"):
        plans.rebalanced("other", plans["step"])
    with pytest.raises(ValueError, match="the plan is not that of 'step' at other sizes"):
        plans.rebalanced("step", plans["blocks"])
