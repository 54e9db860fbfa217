"""Plans whose collectives go beside what is computed: their bounds, and what `overlap` changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import graphs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assignments import FOUR, HOSTS, Space, case, clipped, layers, programs, random_assignment, space
from control_cases import CASES, floats
from orders import random_order
from random_programs import mlp_args, mlp_step
from slow_devices import first_devices, slow_cluster
from thoroughness import THOROUGH

import hapsynth
from hapsynth.cluster.cluster import Cluster, DeviceKind, Link
from hapsynth.graph.trace import trace
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.cost.device_speed import DeviceFigures
from hapsynth.search.cost.roofline import Roofline
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.device_subsets import ClusterPlanner, subclusters
from hapsynth.search.planning.ideal_work import IdealWorkBound
from hapsynth.search.planning.makespan import MakespanSearch
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.result import Progress, Result
from hapsynth.search.scheduling.list_schedule import least_makespan, schedule
from hapsynth.search.scheduling.tasks import Machine, TaskGraph, tasks_of
from hapsynth.search.scheduling.timeline import simulate
from hapsynth.search.sizing.sizer import Sizer
from hapsynth.search.solver import Ints, Solution
from hapsynth.search.solver.patches import patches

TINY = {
    "product": lambda x, w: jnp.tanh(x @ w),
    "sum": lambda x, w: (x @ w).sum(0),
    "two uses": lambda x, w: (jnp.sin(x), w * x.sum()),
}
ROUNDING = 1 + 1e-9
MANY = 20 if THOROUGH else 8
_MOST = 300 if THOROUGH else 150


def tiny(name: str, bandwidth: float, contention: float, speeds: Sequence[float] = (3.0, 1.0)) -> Space:
    cluster = graphs.cluster([*speeds], bandwidth, 1e-7)
    cluster = replace(cluster, devices=tuple(replace(kind, contention=contention) for kind in cluster.devices))
    return space(TINY[name], (floats(64, 64), floats(64, 64)), cluster)


def choices_of(given: Space, rng: random.Random) -> Iterator[Ints]:
    """All choices of a choice space, or many and those that send nothing."""
    problem = given.builder.problem()
    every = product(*(range(row.size) for row in problem.unary))
    fine = [choices for choices in every if np.isfinite(problem.cost(choices))]
    for choices in (*rng.sample(fine, min(len(fine), _MOST)), given.search.choices.replicated()):
        yield np.array(choices)


def candidates(given: Space, rng: random.Random, *, joined: bool = False) -> Iterator[Candidate]:
    """Of these choices; `joined`: those with collectives in a row, with one in their place too."""
    maker = given.search.maker
    for choices in choices_of(given, rng):
        candidate = maker.chosen(given.builder, choices)
        yield candidate
        if joined and (fewer := maker.in_fewest_collectives(given.builder, candidate)):
            yield fewer


def least_makespan_of(given: Space, rng: random.Random, *, joined: bool = False) -> float:
    """Of these programs, each in several orders; not of those that some order of another is below any order of."""
    found = np.inf
    for candidate in candidates(given, rng, joined=joined):
        tasks = tasks_of(candidate.program, candidate.sizes, given.task.costs)
        found = min(found, simulate(tasks, random_order(rng, tasks)).makespan_s)
        if least_makespan(tasks) < found:
            found = min(found, schedule(tasks).makespan_s)
    return found


@pytest.mark.few(8)
@pytest.mark.parametrize("contention", [1.0, 1.5])
@pytest.mark.parametrize("bandwidth", [1e8, 1e11])
@pytest.mark.parametrize("name", TINY)
def test_no_program_in_any_order_is_below_the_bound(name: str, bandwidth: float, contention: float) -> None:
    given = tiny(name, bandwidth, contention)
    least = least_makespan_of(given, random.Random(1))
    search = MakespanSearch(given.search, given.builder.ratios, np.array(given.search.choices.replicated()))
    search.run(6)
    assert 0 < search.bound <= least * ROUNDING
    assert search.best is not None
    assert least / ROUNDING <= search.best.makespan_s <= 1.2 * least
    ideal = IdealWorkBound(given.task.choices, given.task.costs)
    assert 0 < ideal.makespan_on(given.task.cluster) <= least


@pytest.mark.parametrize("fn", [lambda x: x, lambda x: x * 2])
def test_a_step_that_takes_no_time(fn: Callable[..., Any]) -> None:
    kind = DeviceKind("quick", {"float32": 1e12}, 1e11, 1 << 30, overhead=0.0)
    cluster = Cluster("c", (kind, replace(kind, name="half", bandwidth=5e10)), (0, 1), Link(1e9, 0.0))
    plan = hapsynth.synthesize(fn, (jax.ShapeDtypeStruct((0, 8), jnp.float32),), cluster, overlap=True)
    assert plan.lower_bound <= plan.cost < 1e-9


def test_makespans_are_sought_once_memory_was_found_to_be_short() -> None:
    """The best program is then of choices that are no longer searched."""
    graph, unlike = trace(mlp_step, mlp_args()).graph, graphs.cluster([3.0, 1.0])
    task = Task(graph, unlike, PlanningOptions(overlap=True))
    planner = Planner(task)
    planner.explore()
    planner._search._spare()
    assert np.isfinite(planner.explore_makespans())
    assert planner.makespan_bound > 0


@pytest.mark.usefixtures("all_rounds")
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_bound_is_certified_whatever_ways_conversions_go(interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each branch, or where there is no time by all programs at once, also after an interruption; the search is left
    as it was."""

    def press(*_: Any, **__: Any) -> Solution:
        raise KeyboardInterrupt

    given = tiny("two uses", 1e8, 1.5)
    search = MakespanSearch(given.search, given.builder.ratios, np.array(given.search.choices.replicated()))
    search.run(3)
    search.raise_bound()
    best, parts = search.best, len(search.branches)
    with monkeypatch.context() as pressed:
        pressed.setattr(MakespanSearch, "_cheapest", press)
        with pytest.raises(KeyboardInterrupt):
            search.certify()
    assert search.bound == 0
    given.search.clock.interrupted = interrupted
    search.certify()
    assert best is not None
    assert search.best is not None
    assert search.best.candidate is best.candidate
    assert len(search.branches) == (1 if interrupted else parts)
    least = least_makespan_of(given, random.Random(1), joined=True)
    assert 0 < search.bound <= least * ROUNDING
    assert all(known.taken is not None for known in search.seen)
    bound = search.bound
    search.certify()
    assert search.bound == bound


def test_collectives_in_a_row_are_scheduled_as_one_where_that_is_sooner() -> None:
    """A reduce-scatter and an all-gather as an all-reduce, which goes together with others."""
    given = tiny("two uses", 1e8, 1.0)
    maker, costs, sooner = given.search.maker, given.task.costs, 0
    for choices in choices_of(given, random.Random(1)):
        candidate = maker.chosen(given.builder, choices)
        fewer = maker.in_fewest_collectives(given.builder, candidate)
        if fewer is None:
            continue
        check(given.task.graph, fewer.program, fewer.sizes)
        assert len(fewer.program.instructions) < len(candidate.program.instructions)
        each = [
            schedule(tasks_of(c.program, c.sizes, costs, dominated=False), quick=True).makespan_s
            for c in (candidate, fewer)
        ]
        search = MakespanSearch(given.search, given.builder.ratios, choices)
        assert [known.makespan_s for known in search.scheduled] == each
        assert search.best
        assert search.best.makespan_s == min(each)
        sooner += each[1] < each[0]
    assert sooner


def test_many_kinds_of_devices_each_have_a_weight() -> None:
    given = tiny("two uses", 1e8, 1.5, [1.0 + k / 100 for k in range(130)])
    search = MakespanSearch(given.search, given.builder.ratios, np.array(given.search.choices.replicated()))
    search.run(3)
    assert len(search.chains) > len(search.space.alone) > 130
    assert search.best is not None
    assert 0 < search.bound <= search.best.makespan_s * ROUNDING


def test_a_bound_leans_on_no_tolerance_of_weights() -> None:
    given, bounds = tiny("two uses", 1e8, 1.0), list[float]()
    for excess in (1.0, 1.5):
        search = MakespanSearch(given.search, given.builder.ratios, np.array(given.search.choices.replicated()))
        search._solve(search._best_weights() * excess)
        bounds.append(search.bound)
        assert search._best_weights().sum() == pytest.approx(1.0, rel=1e-12)
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-6)


def test_a_branch_without_programs_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the solver finds none in a round, there are no weights at which programs limit the bound."""
    given = tiny("two uses", 1e8, 1.0)
    search = MakespanSearch(given.search, given.builder.ratios, np.array(given.search.choices.replicated()))
    (seen,) = search.seen
    variable = int(np.argmax([len(domain) for domain in search.structure.choices]))
    states = np.arange(len(search.structure.choices[variable])) == seen.choices[variable]
    search.branches = [*search.branches[0].parted(variable, states)]
    search._at = search.branches[1]
    cheapest = MakespanSearch._cheapest

    def none(*args: Any, **how: Any) -> Solution:
        return replace(cheapest(*args, **how), assignment=None)

    monkeypatch.setattr(MakespanSearch, "_cheapest", none)
    search.run(2)
    assert search.seen == [seen]
    assert search.branches[1].in_vain > 0


@pytest.mark.usefixtures("all_rounds")
@pytest.mark.few("taken again on hosts")
@pytest.mark.parametrize("name", ["several results", "taken again on hosts", "tied", "layers"])
def test_no_program_of_a_branch_is_below_its_bound(name: str) -> None:
    given = case(name)
    search = MakespanSearch(given.search, given.builder.ratios, np.array(given.search.choices.replicated()))
    search.run(1)
    search.raise_bound()
    assert len(search.branches) > 1
    assert search.bound == min(branch.bound for branch in search.branches)
    least = dict.fromkeys(search.branches, np.inf)
    found = [(x.seen.choices, x.makespan_s) for x in search.scheduled]
    found += [(x, schedule(tasks).makespan_s) for x, _, tasks in programs(given, MANY, seed=1, frugal=True)]
    for choices, makespan_s in found:
        (of,) = (branch for branch in search.branches if branch.has(choices))
        least[of] = min(least[of], makespan_s)
    for branch, makespan_s in least.items():
        assert 0 < branch.bound <= makespan_s * ROUNDING
    assert sum(map(np.isfinite, least.values())) > 1


def test_two_programs_each_good_in_a_part_are_linked() -> None:
    given, rng = case("layers"), random.Random(1)
    problem, ratios = given.builder.problem(), given.builder.ratios
    good = MakespanSearch(given.search, ratios, np.array(given.search.choices.replicated()))
    good.run(6)
    assert good.best is not None
    best, linked = good.best.seen.choices, 0
    for _ in range(60):
        other = random_assignment(problem, best, rng, 6)
        patch, count = patches(given.search.choices.joined_variables, best != other)
        if count < 2:
            continue
        halves = [np.where(mine, other, best) for mine in (patch < count // 2, (patch >= count // 2) & (patch < count))]
        search = MakespanSearch(given.search, ratios, halves[0])
        for choices in (halves[1], best):
            search._schedule(search._see(choices), *scheduled(given, choices))
        first, second, least = (
            min(known.makespan_s for known in search.scheduled if np.array_equal(known.seen.choices, choices))
            for choices in (*halves, best)
        )
        if min(first, second) <= least * ROUNDING:
            continue
        # As if the best one had not come up.
        search = MakespanSearch(given.search, ratios, halves[0])
        search._schedule(search._see(halves[1]), *scheduled(given, halves[1]))
        search.relink()
        assert search.best is not None
        assert search.best.makespan_s <= least * ROUNDING
        assert all(np.isfinite(problem.cost(known.choices)) for known in search.seen)
        linked += 1
    assert linked > 3


def scheduled(given: Space, choices: Ints) -> tuple[Candidate, TaskGraph]:
    candidate = given.search.maker.chosen(given.builder, choices)
    return candidate, tasks_of(candidate.program, candidate.sizes, given.task.costs)


# Without contention at one bandwidth: `test_no_program_in_any_order_is_below_the_bound` has it at others.
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "bandwidth", "contention"),
    [(name, *on) for name in TINY for on in ((1e8, 1.5), (1e10, 1.0), (1e10, 1.5), (1e11, 1.5))],
)
def test_no_program_at_any_ratios_is_below_the_joint_bound(name: str, bandwidth: float, contention: float) -> None:
    given = tiny(name, bandwidth, contention)
    search = MakespanSearch(given.search, given.builder.ratios, np.array(given.search.choices.replicated()))
    search.run(6)
    work, parts = IdealWorkBound(given.task.choices, given.task.costs).weighted_on(given.task.cluster)
    joint = search.joint_bound(parts)
    assert 0 < joint <= search.bound * ROUNDING
    rng = random.Random(2)
    for part in (0.0, 0.25, 0.5, 0.625, 0.75, 0.875, 1.0) if THOROUGH else (0.25, 0.5, 0.75, 1.0):
        ratios = given.task.ratios(np.array([part, 1 - part]), frozenset())
        least = least_makespan_of(given._replace(builder=given.search.builder(ratios)), rng)
        assert max(joint, work) <= least * ROUNDING


def test_nor_is_one_with_balanced_collectives() -> None:
    """Of two devices a balanced gather takes as long as a padded one: there have to be three."""
    given = tiny("product", 1e8, 1.5, (3.0, 1.0, 1.0))
    at = lambda *parts: given._replace(builder=given.search.builder(given.task.ratios(np.array(parts), frozenset())))
    search = MakespanSearch(given.search, given.builder.ratios, np.array(given.search.choices.replicated()))
    search.run(6)
    work, parts = IdealWorkBound(given.task.choices, given.task.costs).weighted_on(given.task.cluster)
    joint = search.joint_bound(parts)
    for part in (0.0, 0.25, 1 / 3, 0.5, 0.6, 0.75, 0.9) if THOROUGH else (0.25, 1 / 3, 0.6, 0.9):
        there = at(part, (1 - part) / 2, (1 - part) / 2)
        made = list(candidates(there, random.Random(3)))
        steps = {step for candidate in made for step in candidate.program.collectives()}
        assert ({"balanced_all_gather", "balanced_reduce_scatter"} <= steps) == (part > 1 / 3)
        least = least_makespan_of(there, random.Random(3))
        assert max(joint, work) <= least * ROUNDING
        if part == 0.6:
            uneven = MakespanSearch(there.search, there.builder.ratios, np.array(there.search.choices.replicated()))
            uneven.run(6)
            assert 0 < uneven.bound <= least * ROUNDING


def test_a_search_at_other_ratios_knows_the_program_at_its_sizes() -> None:
    """As its choices may come to other conversions there, which may take longer."""
    given = tiny("product", 1e10, 1.0)
    search = MakespanSearch(given.search, given.builder.ratios, np.array(given.search.choices.replicated()))
    search.run(6)
    best = search.best
    assert best is not None
    sizes = best.candidate.sizes
    assert sizes.shares
    even = Sizes(given.task.graph, sizes.classes, tuple((32, 32) for _ in sizes.shares))
    known = best.candidate.at(even)
    assert known.over is None
    again = MakespanSearch(given.search, given.task.own_ratios(even), best.seen.choices, search, known)
    assert [found.candidate for found in again.scheduled[1:]] == [known]
    assert again.best is min(again.scheduled, key=lambda found: found.makespan_s)
    little = given.task.on(given.task.cluster, memory_limit=1.0).costs
    short = replace(best.candidate, sizer=Sizer(best.candidate.program, sizes.classes, little))
    assert short.at(even).over is even


def test_what_was_found_at_other_ratios_is_scheduled_where_it_comes_up() -> None:
    given = tiny("product", 1e10, 1.0)
    begin = np.array(given.search.choices.replicated())
    search = MakespanSearch(given.search, given.builder.ratios, begin)
    search.run(6)
    best = search.best
    assert best is not None
    assert not np.array_equal(best.seen.choices, begin)
    even = Sizes(given.task.graph, best.candidate.sizes.classes, tuple((32, 32) for _ in best.candidate.sizes.shares))
    again = MakespanSearch(given.search, given.task.own_ratios(even), begin, search)
    again.try_from(search)
    assert again.best is not None
    assert np.array_equal(again.best.seen.choices, best.seen.choices)


def test_each_op_may_go_where_it_is_fast() -> None:
    """Two ops, each faster on another device: at once they take less than one after another."""
    one, other = graphs.device("computes", 1.0), graphs.device("moves", 1.0)
    one = replace(one, flops={"float32": 1e13}, bandwidth=1e11)
    other = replace(other, flops={"float32": 1e12}, bandwidth=1e12)
    cluster = replace(graphs.cluster([1.0, 1.0]), devices=(one, other))
    task = Task(trace(lambda x, w: (x @ x, jnp.sin(w)), (floats(512, 512), floats(2048, 512))).graph, cluster)
    ideal = IdealWorkBound(task.choices, task.costs)
    figures = DeviceFigures(list(cluster.devices))
    works = ideal.works(cluster, figures)
    alone = Roofline(figures, works.each).least_alone() * works.runs[:, None]
    assert len(alone) == 2
    grid = np.linspace(0, 1, 201)
    least = min(
        max(a * alone[0, 0] + b * alone[1, 0], (1 - a) * alone[0, 1] + (1 - b) * alone[1, 1])
        for a, b in product(grid, grid)
    )
    assert least * 0.98 <= ideal.makespan_on(cluster) <= least * ROUNDING
    assert ideal.makespan_on(cluster) < ideal.on(cluster)


def planned(fn: Callable[..., Any], args: Any, cluster: Cluster, **options: Any) -> tuple[Task, Result]:
    task = Task(trace(fn, args).graph, cluster, PlanningOptions(**{"overlap": True, **options}))
    return task, Planner(task).run()


@cache
def planned_step(name: str) -> tuple[Task, Result]:
    return planned(*STEPS[name])


@cache
def on_two(**figures: float) -> tuple[Task, Result]:
    """A clipped step on two devices whose kinds have these figures of what collectives do beside computing."""
    args = {"a": floats(64, 96), "b": floats(96, 64)}, floats(960, 64)
    cluster = slow_cluster((3.0, 1.0), bandwidth=1e8)
    return planned(clipped, args, replace(cluster, devices=tuple(replace(kind, **figures) for kind in cluster.devices)))


STEPS = {
    "training": (mlp_step, mlp_args(), FOUR),
    "layers": (layers, ({"a": floats(64, 96), "b": floats(96, 64)}, floats(80, 64)), FOUR),
    "layers on hosts": (layers, ({"a": floats(64, 96), "b": floats(96, 64)}, floats(80, 64)), HOSTS),
    "scan": (*CASES["scanned layers"], FOUR),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STEPS)
def test_the_cost_is_the_makespan_of_the_program_in_its_order(name: str) -> None:
    task, found = planned_step(name)
    _, as_a_sum = planned(*STEPS[name], overlap=False)
    check(task.graph, found.program, found.sizes)
    tasks = tasks_of(found.program, found.sizes, task.costs)
    assert simulate(tasks, range(len(tasks.machine))).makespan_s == found.cost_s
    assert 0 < found.joint_lower_bound_s <= found.lower_bound_s <= found.cost_s
    assert found.cost_s <= schedule(tasks_of(as_a_sum.program, as_a_sum.sizes, task.costs)).makespan_s * ROUNDING
    assert max(found.clocks_s.values()) <= found.cost_s * ROUNDING
    assert 0 <= found.exposed_communication_s <= found.cost_s
    _, again = planned(*STEPS[name])
    assert again.program.instructions == found.program.instructions
    assert again.sizes.shares == found.sizes.shares
    assert (again.cost_s, again.lower_bound_s) == (found.cost_s, found.lower_bound_s)


def test_kinds_that_differ_in_memory_alone() -> None:
    """They take equally long over equal shares, and are two kinds all the same."""
    plain = slow_cluster((1.0, 1.0), bandwidth=3e9)
    larger = replace(plain.devices[0], name="larger", memory=2 * plain.devices[0].memory)
    cluster = replace(plain, devices=(plain.devices[0], larger))
    _, found = planned(lambda x, w: jnp.tanh(x @ w), (floats(64, 64), floats(64, 64)), cluster)
    assert found.clocks_s["compute larger"] == found.clocks_s["compute x1.0"] > 0


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "bandwidth"), [("layers", 3e7), ("layers", 1e9), ("training", 3e9)])
def test_no_set_of_devices_that_is_looked_at_is_better(name: str, bandwidth: float) -> None:
    fn, args, _ = STEPS[name]
    cluster = slow_cluster((3.0, 3.0, 1.0, 1.0), bandwidth=bandwidth)
    task = Task(trace(fn, args).graph, cluster, PlanningOptions(overlap=True))
    found = ClusterPlanner(task).run()
    on_each = {devices: Planner(task.on(cluster.subset(devices))).run() for devices in subclusters(cluster)}
    least = min(result.cost_s for result in on_each.values())
    whole = Planner(task).run()
    assert found.cost_s <= min(least, whole.cost_s) * ROUNDING
    assert (found.devices is not None) == (least < whole.cost_s)
    assert found.joint_lower_bound_s <= found.lower_bound_s <= found.cost_s


@pytest.mark.few(1)
@pytest.mark.parametrize("leave_out", [True, False])
def test_overlap_that_gains_too_little_is_not_planned(leave_out: bool) -> None:
    fn, args, _ = STEPS["layers"]
    task = Task(trace(fn, args).graph, slow_cluster((3.0, 3.0, 2.0, 2.0), bandwidth=3e9))

    def found(**options: Any) -> Result:
        return ClusterPlanner(task.on(task.cluster, leave_out=leave_out, **options)).run()

    plain, any_gain = found(), found(overlap=True)
    gain = plain.cost_s / any_gain.cost_s
    assert gain > 1.05
    enough, less = (found(overlap=True, least_speedup=least) for least in (gain / 1.02, gain * 1.02))
    assert enough.overlap
    assert plain.cost_s / enough.cost_s >= gain / 1.02
    assert not less.overlap
    assert (less.program.instructions, less.sizes.shares) == (plain.program.instructions, plain.sizes.shares)
    assert less.cost_s == plain.cost_s


def test_overlap_of_too_little_gain_in_little_time() -> None:
    fn, args, cluster = STEPS["training"]
    options = PlanningOptions(overlap=True, least_speedup=1.2, time_budget_s=0.05)
    found = ClusterPlanner(Task(trace(fn, args).graph, cluster, options)).run()
    assert found.lower_bound_s <= found.cost_s


def test_ctrl_c_while_overlap_is_planned_keeps_the_plan_without(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args, cluster = STEPS["training"]
    run = ClusterPlanner._run

    def pressed(self: ClusterPlanner, cutoff: float = np.inf) -> Result:
        if self.task.options.overlap:
            raise KeyboardInterrupt
        return run(self, cutoff)

    monkeypatch.setattr(ClusterPlanner, "_run", pressed)
    options = PlanningOptions(overlap=True, least_speedup=1.2)
    found = ClusterPlanner(Task(trace(fn, args).graph, cluster, options)).run()
    assert found.interrupted
    assert not found.overlap


def test_a_look_goes_on_until_a_program_is_near_or_the_bound_is_reached() -> None:
    fn, args, _ = STEPS["training"]
    cluster = slow_cluster((3.0, 3.0, 1.0, 1.0), bandwidth=3e8)
    planner = Planner(Task(trace(fn, args).graph, cluster, PlanningOptions(overlap=True)))
    planner.explore()
    first, bound = planner.explore_makespans(), planner.makespan_bound
    assert planner.explore_makespans_on(first, np.inf) == first
    assert planner.explore_makespans_on(0.0, bound) == first
    assert planner.makespan_bound == bound
    assert planner.explore_makespans_on(0.0, np.inf) <= first
    assert planner.makespan_bound > bound


def test_a_limit_of_memory_is_kept() -> None:
    _, free = planned_step("layers")
    limit = 0.8 * max(free.memory_bytes)
    _, limited = planned(*STEPS["layers"], memory_limit=limit)
    assert max(limited.memory_bytes) <= limit
    assert limited.cost_s >= free.cost_s / ROUNDING


def test_where_nothing_fits_beside_what_is_sent_it_is_planned_without() -> None:
    """The plan that held more than the limit was said to fit."""

    def step(ws: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        loss = lambda ws: (jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) ** 2).mean()
        return [w - 1e-3 * g for w, g in zip(ws, jax.grad(loss)(ws), strict=True)]

    args = [floats(64, 64)] * 2, floats(128, 64)
    options = {"form": "staged", "leave_out": False, "cache": False}
    synthesize = partial(hapsynth.synthesize, step, args, slow_cluster((1.0, 1.0), bandwidth=1e8), **options)
    limit = 111_000
    with pytest.warns(hapsynth.OverlapWarning, match="fits in memory beside what is sent meanwhile: planned without"):
        plan = synthesize(overlap=True, memory_limit=limit)
    assert not plan.result.overlap
    assert max(plan.memory) <= limit
    assert plan.cost == synthesize(memory_limit=limit).cost
    assert plan.joint_lower_bound <= plan.lower_bound <= plan.cost


def test_little_time_and_an_interruption() -> None:
    _, hasty = planned(*STEPS["training"], time_budget_s=0.05)
    assert hasty.overlap
    assert hasty.lower_bound_s <= hasty.cost_s

    def press(p: Progress) -> None:
        if np.isfinite(p.cost_s):
            raise KeyboardInterrupt

    task, interrupted = planned(*STEPS["training"], progress=press)
    assert interrupted.interrupted
    tasks = tasks_of(interrupted.program, interrupted.sizes, task.costs)
    assert simulate(tasks, range(len(tasks.machine))).makespan_s == interrupted.cost_s


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mlp", "scan"])
def test_it_runs_and_is_saved(name: str, tmp_path: Path) -> None:
    fn, args = (mlp_step, mlp_args()) if name == "mlp" else CASES["scanned layers"]
    cluster = slow_cluster((3.0,) * 4 + (1.0,) * 4, bandwidth=1e9)
    plan = hapsynth.synthesize(fn, args, cluster, overlap=True)
    assert plan.result.overlap
    plan.save(tmp_path / "p.json")
    with pytest.warns(hapsynth.OverlapWarning, match=r"one process holds all devices.*runs without"):
        loaded = hapsynth.load(tmp_path / "p.json", fn, args, mesh=first_devices(8))
    assert loaded.check().ok
    for field in ("overlap", "clocks_s", "exposed_communication_s", "cost_s"):
        assert getattr(loaded.result, field) == getattr(plan.result, field)


def test_on_devices_of_one_process_it_is_planned_without() -> None:
    cluster = slow_cluster((3.0,) * 4 + (1.0,) * 4, bandwidth=1e9)
    with pytest.warns(hapsynth.OverlapWarning, match=r"one process holds all devices.*planned without"):
        plan = hapsynth.synthesize(mlp_step, mlp_args(), first_devices(8), cluster=cluster, overlap=True)
    assert not plan.result.overlap


def test_in_a_form_without_overlap_it_is_planned_without() -> None:
    with pytest.warns(
        hapsynth.OverlapWarning, match=r"in conditionals, which run alone: give form='fused': planned without"
    ):
        plan = hapsynth.synthesize(*STEPS["layers"], overlap=True, form="switch")
    assert not plan.result.overlap


def test_makespan_and_bound_are_with_contention() -> None:
    for factor in (1.0, 1.5):
        task, found = on_two(contention=factor)
        tasks = tasks_of(found.program, found.sizes, task.costs)
        assert Machine.LINK in tasks.machine
        assert simulate(tasks, range(len(tasks.machine))).makespan_s == found.cost_s >= found.lower_bound_s
        assert simulate(replace(tasks, slowdown=None), range(len(tasks.machine))).makespan_s <= found.cost_s
        if factor == 1.0:
            _, plain = on_two()
            for field in ("cost_s", "lower_bound_s", "exposed_communication_s", "clocks_s"):
                assert getattr(plain, field) == getattr(found, field)
            assert plain.program.instructions == found.program.instructions


def test_fewer_collectives_are_sent_where_each_is_late() -> None:
    sent = list[int]()
    for figures in ({}, {"contention_delay": 1e-3}):
        task, found = on_two(**figures)
        tasks = tasks_of(found.program, found.sizes, task.costs)
        assert simulate(tasks, range(len(tasks.machine))).makespan_s == found.cost_s >= found.lower_bound_s
        assert simulate(replace(tasks, delay=None), range(len(tasks.machine))).makespan_s <= found.cost_s
        sent.append(tasks.machine.count(Machine.LINK))
    assert 0 < sent[1] < sent[0]
