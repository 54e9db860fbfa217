"""Ctrl-C while planning: the best plan so far is returned; only a bound for it is still sought."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from cli_model import CLUSTER, MODEL
from control_cases import floats
from random_programs import mlp_args, mlp_step
from slow_devices import first_devices, slow_cluster

import hapsynth
from hapsynth.cli import commands, main
from hapsynth.cli.options import INTERRUPTED
from hapsynth.graph.trace import trace
from hapsynth.plan import Plan
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.planning import planner, search_at_ratios
from hapsynth.search.planning.candidate import CandidateBuilder
from hapsynth.search.planning.device_subsets import ClusterPlanner
from hapsynth.search.planning.ideal_work import IdealWorkBound
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.result import Progress

Told = list[Progress]
Press = Callable[[Progress, Told], bool]

# The stages of an uninterrupted search, in order: programs at some ratios, priced by the dual and searched; each
# program that was sized; the joint bound.
PRESSED: dict[str, Press] = {
    "at once": lambda p, told: len(told) == 1,
    "in the dual": lambda p, told: p.stage == "dual" and not any(t.stage == "dual" for t in told[:-1]),
    "when a program was found": lambda p, told: [t.stage for t in told].count("search") == 1 and p.stage == "search",
    "when a second was found": lambda p, told: [t.stage for t in told].count("search") == 2 and p.stage == "search",
    "in the joint bound": lambda p, told: p.stage == "joint bound",
    "again and again": lambda p, told: True,
}


def planned(progress: Callable[[Progress], None] | None = None) -> Plan:
    """On two axes: with one, so small a problem is solved before there is anything to tell."""
    cluster = replace(slow_cluster((3.0,) * 4 + (1.0,) * 4), axes=(("a", 2), ("b", 4)))
    # All devices: the stages are those of one search.
    mesh = first_devices(8)
    return hapsynth.synthesize(mlp_step, mlp_args(), mesh, cluster=cluster, leave_out=False, progress=progress)


def pressing(press: Press, told: Told) -> Callable[[Progress], None]:
    def show(p: Progress) -> None:
        told.append(p)
        if press(p, told):
            raise KeyboardInterrupt

    return show


def pressed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole() -> tuple[Plan, Told]:
    told: Told = []
    return planned(told.append), told


def test_every_stage_tells_of_itself(whole: tuple[Plan, Told]) -> None:
    plan, told = whole
    assert not plan.result.interrupted
    assert {p.stage for p in told} >= {"dual", "search", "joint bound"}
    for before, after in pairwise(told):
        assert before.seconds <= after.seconds
        assert before.expanded <= after.expanded
    for p in told:
        assert p.lower_bound_s <= p.cost_s
        assert p.gap == pytest.approx((p.cost_s - p.lower_bound_s) / p.cost_s)
    assert told[-1].cost_s == pytest.approx(plan.cost)
    assert told[-1].expanded == plan.result.expanded


@pytest.mark.parametrize("press", PRESSED.values(), ids=PRESSED)
def test_the_best_so_far_is_returned(press: Press, whole: tuple[Plan, Told], monkeypatch: pytest.MonkeyPatch) -> None:
    told: Told = []
    begun: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        begun.append(len(told))
        return solve(*args, **options)

    solve = search_at_ratios.solve
    monkeypatch.setattr(search_at_ratios, "solve", counted)
    plan = planned(pressing(press, told))
    best, all_told = whole
    assert plan.result.interrupted
    assert len(told) < len(all_told)
    at = next(n for n, p in enumerate(told) if press(p, told[: n + 1]))
    assert sum(n > at for n in begun) <= 1, "no more than the bound is sought after Ctrl-C"
    assert best.cost * (1 - 1e-4) <= plan.cost <= told[at].cost_s * (1 + 1e-9)
    assert plan.joint_lower_bound <= best.cost
    assert plan.joint_lower_bound <= plan.lower_bound <= plan.cost
    assert (plan.result.status == "gap") == (plan.gap > 1e-4)
    twice = any(press(p, told[: n + 1]) for n, p in enumerate(told) if n > at)
    assert (plan.joint_lower_bound == 0) == (twice or press is PRESSED["in the joint bound"])


def test_a_certificate_that_was_found_is_kept(whole: tuple[Plan, Told]) -> None:
    told: Told = []
    plan = planned(pressing(PRESSED["in the joint bound"], told))
    assert plan.gap == whole[0].gap < 0.01
    assert plan.joint_gap == 1.0
    assert plan.check().ok


def test_without_any_plan_it_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProblemBuilder, "problem", pressed)
    with pytest.raises(KeyboardInterrupt):
        planned()


STEPS: dict[str, tuple[Any, str, bool]] = {
    "the planner of some devices": (search_at_ratios.FixedRatioSearch, "__init__", False),
    "the bound of a program's sizes": (CandidateBuilder, "bound", False),
    "memory in XLA's order": (planner, "held_by", False),
    "the check": (planner, "check", False),
    "the check, with overlap": (planner, "check", True),
    "the bound by the work": (IdealWorkBound, "weighted_on", True),
    "its own order": (planner, "as_it_is", True),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_between_searches_too_it_is_returned(step: tuple[Any, str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan was lost."""
    owner, name, overlap = step
    of, calls, whole = getattr(owner, name), list[int](), 0

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == whole:
            raise KeyboardInterrupt
        return of(*args, **options)

    monkeypatch.setattr(owner, name, counted)
    graph = trace(lambda w, x: jnp.tanh(x @ w), (floats(64, 64), floats(256, 64))).graph
    task = Task(graph, slow_cluster((3.0, 3.0, 0.02)), PlanningOptions(overlap=overlap))
    best, whole = ClusterPlanner(task).run(), len(calls)
    calls.clear()
    found = ClusterPlanner(Task(graph, task.cluster, task.options)).run()
    assert found.interrupted
    assert best.cost_s * (1 - 1e-4) <= found.cost_s < float("inf")


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "mixed.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "progress", lambda wanted: nullcontext(pressing(PRESSED["at once"], [])))
    options = ["--cluster", "mixed.toml"]
    assert main.main(["search", "model.py", *options, "--plan", "p.json", "--json", "s.json"]) == commands.DONE
    text, errors = capsys.readouterr()
    assert re.fullmatch(r"hapsynth search: interrupted: this is the best plan so far, gap [\d.]+ %\n", errors)
    assert "interrupted    the best plan so far" in text
    assert json.loads(Path("s.json").read_text())["interrupted"] is True
    assert main.main(["explain", "p.json", "model.py"]) == commands.DONE
    monkeypatch.setattr(ProblemBuilder, "problem", pressed)
    assert main.main(["search", "model.py", *options, "--plan", "none.json"]) == INTERRUPTED
    assert not Path("none.json").exists()
