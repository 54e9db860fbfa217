"""Planning for many devices: how much is looked at, by counts and not by the clock, and that a time budget ends it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting_clock import count_looks
from graphs import cluster
from random_programs import RandomProgram
from sized_steps import step, three_layers

from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import trace
from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.search.cost.roofline import Roofline
from hapsynth.search.formulation.choice_space import ChoiceSpace
from hapsynth.search.planning import device_subsets, planner
from hapsynth.search.planning.baselines import Baselines
from hapsynth.search.planning.device_subsets import ClusterPlanner
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.sizing import ratio_lp, sizer, whole_units
from hapsynth.search.sizing.leaving_out import between, ladder, least_at
from hapsynth.search.sizing.ratio_lp import RatioLP
from hapsynth.search.sizing.rounding import best_of, group_moves
from hapsynth.search.sizing.sizer import KnownShares, Sizer
from hapsynth.search.sizing.whole_units import ClassUnits

STRUCT = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)


def unlike(n: int) -> Cluster:
    return cluster([round(1 + 9 * (i * 7919 % n) / n, 3) for i in range(n)])


def sizer_for(where: Cluster, rows: int = 4096, system: str = "data_parallel", **given: Any) -> tuple[Sizer, Program]:
    graph = trace(step, (STRUCT(256, 256), STRUCT(rows, 256))).graph
    task = Task(graph, where)
    program = Baselines(task).all([system])[system].program
    return Sizer(program, Classes.build(graph, program, task.factors), task.costs, **given), program


@pytest.mark.parametrize("best", [1, 2, 9, 57, 99, 100])
def test_the_best_number_is_found_in_few_trials(best: int) -> None:
    tried: list[int] = []

    def merit(number: int) -> tuple[float, float]:
        tried.append(number)
        return 0.0, 1 + 0.05 * abs(number - best) / 100

    assert least_at(ladder(100), merit) == best
    assert len(tried) == len(set(tried)) <= 20
    assert between([1, 5, 9], 5) == [3, 7]
    assert between([4, 5, 6], 5) == []


def test_linear_programs_grow_with_the_logarithm_of_the_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    solved, solve = [0], RatioLP.solve
    monkeypatch.setattr(RatioLP, "solve", lambda *args: solved.__setitem__(0, solved[0] + 1) or solve(*args))
    counts: list[int] = []
    for n in (8, 32, 128):
        before = solved[0]
        sizer_for(unlike(n))[0].best(np.full(n, 1 / n))
        counts.append(solved[0] - before)
    assert all(count <= 2 + 4 * np.log2(n) for n, count in zip((8, 32, 128), counts, strict=True)), counts


def test_moves_are_looked_at_in_proportion_to_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs of 64 unlike devices were 4,032 trials a round, and 256 rounds a class."""
    made: list[ClassUnits] = []

    class Counted(ClassUnits):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(sizer, "ClassUnits", Counted)
    per_round: list[float] = []
    for n in (16, 64):
        made.clear()
        sizer_for(unlike(n))[0].best(np.full(n, 1 / n))
        per_round.append(sum(u.evaluated for u in made) / n)
    assert per_round[1] <= 4 * per_round[0] + 4 * 64, per_round


@pytest.mark.parametrize("seed", range(6))
def test_moves_cost_what_the_loads_say(seed: int) -> None:
    """Looked up per kind and share, a class costs as much as the whole program says."""
    rng = np.random.default_rng(seed)
    speeds = rng.choice([1.0, 2.0, 3.5], size=6).tolist()
    graph = trace(three_layers, ({"a": STRUCT(9, 20), "b": STRUCT(20, 12), "c": STRUCT(12, 7)}, STRUCT(34, 9))).graph
    task = Task(graph, cluster(speeds))
    system = ("data_parallel", "zero3", "tensor_parallel")[seed % 3]
    program = Baselines(task).all([system])[system].program
    found = Sizer(program, Classes.build(graph, program, task.factors), task.costs)
    shares = lambda total: tuple(np.bincount(rng.integers(6, size=total), minlength=6).tolist())
    sizes = Sizes(graph, found.classes, tuple(shares(c.units) for c in found.classes.all))
    for c in range(len(sizes.shares)):
        of_class = ClassUnits(found.class_costs, c, sizes)
        if not of_class.decides:
            continue
        here = np.array(sizes.shares[c])
        of_class.begin(here)
        total = np.full(6, sum(sizes.shares[c]))
        move = of_class.best_move(total)
        trials: list[tuple[float, tuple[int, ...]]] = []
        for source in np.flatnonzero(here).tolist():
            for target in set(range(6)) - {source}:
                after = here.copy()
                after[source] -= 1
                after[target] += 1
                moved = Sizes(graph, found.classes, (*sizes.shares[:c], tuple(after.tolist()), *sizes.shares[c + 1 :]))
                due = found.variable_cost(moved) - found.variable_cost(sizes)
                now, then = of_class.seconds(np.stack([here, after]))
                assert then - now == pytest.approx(due, abs=1e-15)
                trials.append((due, tuple(after.tolist())))
        best = min(trials)[0]
        # Where some move pays, the best is among those tried.
        if best < -1e-12 * found.variable_cost(sizes):
            assert move is not None
            assert move.seconds - of_class.seconds(here[None])[0] == pytest.approx(best, abs=1e-15)


@pytest.mark.parametrize("axes", [{"a": 12}, {"a": 3, "b": 4}], ids=str)
def test_group_moves_that_are_left_out_cannot_pay(axes: dict[str, int]) -> None:
    """Of all moves of groups and of those that may cost less than the shares that they are from, the best is the same
    where it is cheaper."""
    rng = np.random.default_rng(0)
    graph = trace(three_layers, ({"a": STRUCT(9, 40), "b": STRUCT(40, 24), "c": STRUCT(24, 7)}, STRUCT(64, 9))).graph
    paid, evaluated = 0, {True: 0, False: 0}
    for trial in range(12):
        speeds = np.repeat(rng.choice([1.0, 2.0, 3.5], size=3, replace=False), 4)
        of = Task(graph, replace(cluster(speeds.tolist()), axes=tuple(axes.items())))
        program = RandomProgram(graph, tuple(axes.items()), random.Random(trial)).build()
        found = Sizer(program, Classes.build(graph, program, of.factors), of.costs)
        sizes = found.fixed(rng.uniform(0.5, 1.5, size=3).repeat(4) * speeds)
        for c, shares in enumerate(map(np.array, sizes.shares)):
            units = ClassUnits(found.class_costs, c, sizes)
            if not units.decides or not units.only_rises:
                continue
            units.begin(shares)
            now = float(units.seconds(shares[None])[0])
            best: dict[bool, tuple[float, Any]] = {}
            for some in (False, True):
                before = units.evaluated
                given = (now, units.at_least) if some else ()
                best[some] = best_of(group_moves(shares, units.kind_of, units.seconds, *given), units.seconds)
                evaluated[some] += units.evaluated - before
            if best[False][0] < now * (1 - 1e-12):
                paid += 1
                assert best[True][0] == best[False][0]
                assert best[True][1].tolist() == best[False][1].tolist()
            else:
                assert best[True][0] >= now * (1 - 1e-12)
    assert paid >= 5, paid
    assert evaluated[True] < evaluated[False], evaluated


def test_groups_move_where_one_position_of_the_major_axis_holds_all_units() -> None:
    """While units are taken and not given back yet, it holds more than there are."""
    axes = {"a": 2, "b": 3}
    graph = trace(three_layers, ({"a": STRUCT(9, 40), "b": STRUCT(40, 24), "c": STRUCT(24, 7)}, STRUCT(64, 9))).graph
    of = Task(graph, replace(cluster([1.0, 1.0, 1.0, 3.0, 3.0, 3.0]), axes=tuple(axes.items())))
    moved = 0
    for seed in range(6):
        program = RandomProgram(graph, tuple(axes.items()), random.Random(seed)).build()
        found = Sizer(program, Classes.build(graph, program, of.factors), of.costs)
        sizes = found.fixed(np.full(6, 1 / 6))
        for c, cls in enumerate(sizes.classes.all):
            units = ClassUnits(found.class_costs, c, sizes)
            if cls.axes == (0, 1) and units.decides:
                shares = np.array([0, 0, 0, 0, 0, cls.units])
                for trial in group_moves(shares, units.kind_of, units.seconds):
                    assert trial.sum() == cls.units
                    assert np.isfinite(units.seconds(trial[None])).all()
                    moved += 1
    assert moved


def test_what_was_found_for_a_class_is_known_in_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    where, known = cluster([1.0, 1.0, 2.0, 2.0]), KnownShares()
    graph = trace(three_layers, ({"a": STRUCT(9, 40), "b": STRUCT(40, 24), "c": STRUCT(24, 7)}, STRUCT(64, 9))).graph
    of = Task(graph, where)
    program = Baselines(of).all(["zero3"])["zero3"].program
    looked: list[int] = []
    of_class = Sizer._of_class
    monkeypatch.setattr(Sizer, "_of_class", lambda *args, **k: looked.append(1) or of_class(*args, **k))
    found: list[Sizes] = []
    for _ in range(2):
        classes = Classes.build(graph, program, of.factors)
        found.append(Sizer(program, classes, of.costs, known=known).best(np.full(4, 0.25)))
        looked.append(0)
    assert found[0].shares == found[1].shares
    first = looked.index(0)
    assert first > 0
    assert looked[first + 1 :] == [0]


def test_tables_are_of_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much is computed for 512 devices of two kinds as for 8."""
    graph = trace(step, (STRUCT(256, 256), STRUCT(4096, 256))).graph
    widest: dict[int, int] = {}
    seen: list[int] = []
    seconds = Roofline.seconds

    def watched(self: Roofline, kinds: Any, *rest: Any, **options: Any) -> Any:
        if len(self.works) > 1 and not self.scaled:
            seen.append(kinds.size)
        return seconds(self, kinds, *rest, **options)

    monkeypatch.setattr(Roofline, "seconds", watched)
    for n in (8, 512):
        task = Task(graph, cluster([4.0, 1.0] * (n // 2)))
        assert len(task.costs.kinds) == 2
        assert task.costs.kinds_along((0,)).tolist() == [0, 1] * (n // 2)
        seen.clear()
        planner.Planner(task).run()
        widest[n] = max(seen)
    # By kind and share: largest remainders leave two shares to a kind.
    assert widest[512] <= 2 * widest[8] <= 32


def test_sets_of_devices_grow_with_the_logarithm_of_the_kinds() -> None:
    counts = [len(device_subsets.subclusters(unlike(n))) for n in (8, 32, 128, 512)]
    assert all(later - before <= 8 for before, later in pairwise(counts)), counts
    # Of few kinds every way to leave out the slower ones is looked at.
    few = device_subsets.subclusters(cluster([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert {tuple(range(k, 6)) for k in range(1, 6)} <= set(few)


def test_where_no_time_is_left_sizes_are_those_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RatioLP, "solve", lambda *_: pytest.fail("no time is left"))
    monkeypatch.setattr(whole_units.ClassUnits, "best_move", lambda *_: pytest.fail("no time is left"))
    late, program = sizer_for(unlike(16), left=lambda: 0.0)
    sizes = late.best(np.full(16, 1 / 16))
    sizes.check(program.axes)
    assert late.variable_cost(sizes) <= late.variable_cost(late.fixed(np.ones(16)))
    assert late.bound(sizes) <= late.variable_cost(sizes)


@pytest.mark.parametrize(("status", "fails"), [(1, True), (2, False), (4, True)])
def test_a_solver_that_fails_bounds_nothing(status: int, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of time or out of numerical precision, it has not shown that there is no solution."""
    monkeypatch.setattr(ratio_lp, "linprog", lambda *_, **_how: SimpleNamespace(status=status, x=None))
    sizer, _ = sizer_for(unlike(4))
    sizes = sizer.fixed(np.ones(4))
    assert (sizer.bound(sizes) < sizer.variable_cost(sizes)) == fails


def test_a_budget_ends_every_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second each time it is looked at: once it is over few looks follow."""
    graph = trace(step, (STRUCT(256, 256), STRUCT(4096, 256))).graph
    looks: dict[float | None, int] = {}
    for budget in (None, 40.0):
        now = count_looks(monkeypatch)
        result = ClusterPlanner(Task(graph, unlike(32), PlanningOptions(time_budget_s=budget))).run()
        assert result.cost_s >= result.joint_lower_bound_s
        looks[budget] = int(now[0])
    assert looks[40.0] <= 40 + 60 < looks[None], looks


def test_no_search_is_begun_that_there_is_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first program does not fit, what values are held as becomes a choice: many more states."""
    graph = trace(step, (STRUCT(256, 256), STRUCT(4096, 256))).graph
    sparing = list[bool]()
    build = ChoiceSpace.__init__

    def watched(self: ChoiceSpace, *args: Any, **given: Any) -> None:
        sparing.append(given.get("sparing", False))
        build(self, *args, **given)

    monkeypatch.setattr(ChoiceSpace, "__init__", watched)
    count_looks(monkeypatch)
    small = cluster([1.0, 2.0, 3.0, 4.0], memory=1e5)
    for budget, said in ((6.0, "no program that fits was found within the time budget"), (None, "no program fits")):
        sparing.clear()
        with pytest.raises(planner.InfeasibleError, match=said):
            ClusterPlanner(Task(graph, small, PlanningOptions(time_budget_s=budget))).run()
        assert any(sparing) == (budget is None)


def test_units_of_many_unlike_devices_go_where_they_exceed_their_due_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single moves alone cannot cross a tile."""
    given = np.full(16, 1 / 16)
    found, _ = sizer_for(unlike(16))
    cost = found.variable_cost(found.best(given))
    monkeypatch.setattr(ClassUnits, "allotted", lambda *_: None)
    single, _ = sizer_for(unlike(16))
    assert cost <= 0.99 * single.variable_cost(single.best(given))
