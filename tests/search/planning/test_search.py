"""The search against brute force over all programs of the instruction set."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count, product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graphs import cluster, random_graph
from slow_devices import slow_cluster

from hapsynth.graph.trace import trace
from hapsynth.instructions.layout import is_partial
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Compute, reads, writes
from hapsynth.instructions.program.sizes import Classes
from hapsynth.instructions.rules.factor_table import FactorTable, cut_nodes
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.formulation.choice_space import ChoiceSpace
from hapsynth.search.formulation.conversions import LayoutSet
from hapsynth.search.formulation.emission import Emitter
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.memory.profile import peak
from hapsynth.search.planning import effort
from hapsynth.search.planning.baselines import Baselines
from hapsynth.search.planning.device_subsets import ClusterPlanner
from hapsynth.search.planning.effort import Clock
from hapsynth.search.planning.planner import InfeasibleError, Planner
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.sizing.ratios import Ratios, proportional
from hapsynth.search.solver import solve


def brute_force(builder: ProblemBuilder) -> float:
    """The least cost of any instruction sequence, by Dijkstra over sets of properties.

    A state is (next op, properties that hold of values still needed). A step converts any value that was just made,
    or runs the next op under any triples whose properties hold. It shares no choice of conversions with the problem.
    What local steps make of a property holds with it.
    """
    graph, structure = builder.graph, builder.structure
    last = {v: max((op for op, _ in uses), default=-1) for v, uses in graph.uses.items()}
    for v in graph.outputs:
        last[v] = len(graph.ops)

    @cache
    def layouts(value):
        # A dimension no op cuts has no ratio to be stored at: only cuts that the formulation knows exist in both.
        known = structure.layouts[value]
        owners = [placement.owner for placement in known.owned]
        return LayoutSet(structure.axes, known.dims, ("sum", "max", "min"), owners=owners)

    @cache
    def with_slices(value, layout):
        known = layouts(value)
        return frozenset((value, known.layouts[i]) for i in np.flatnonzero(known.free[known.number[layout]]))

    @cache
    def steps(value):
        known, found = layouts(value), {}
        for i, j, axis in known.hops:
            source, target = known.layouts[i], known.layouts[j]
            found.setdefault(source, []).append((target, builder.step_time(value, source, target, axis)))
        return found

    ways = _Ways(builder, last, with_slices, steps)
    best = np.inf
    for stored in product(*(layouts(v).storable for v in graph.sources)):
        kept = dict(zip(graph.sources, stored, strict=True))
        fed = sum(builder.feed_time(v, layout) for v, layout in kept.items())
        best = min(best, fed + _dijkstra(ways, kept, best - fed))
    return best


class _Ways(NamedTuple):
    builder: ProblemBuilder
    last: dict
    with_slices: Callable
    steps: Callable


def _dijkstra(ways, stored, enough):
    builder, last, with_slices, steps = ways
    graph, tick = builder.graph, count()
    tied = {graph.outputs[t]: graph.inputs[s] for s, t in graph.carry}
    start = frozenset().union(*(with_slices(v, layout) for v, layout in stored.items()))
    times = [builder.op_times((at,))[0].tolist() for at in range(len(graph.ops))]
    heap = [(0.0, next(tick), 0, start, frozenset(graph.sources))]
    done = set()
    while heap:
        cost, _, at, holds, fresh = heapq.heappop(heap)
        if cost >= enough:
            return np.inf
        if (at, holds, fresh) in done:
            continue
        done.add((at, holds, fresh))
        if at == len(graph.ops) and all(
            ((v, stored[tied[v]]) in holds) if v in tied else any(h == v and not is_partial(p) for h, p in holds)
            for v in graph.outputs
        ):
            return cost
        for value, source in holds:
            for target, seconds in steps(value)[source] if value in fresh else ():
                if (value, target) not in holds and cost + seconds < enough:
                    more = holds | with_slices(value, target)
                    heapq.heappush(heap, (cost + seconds, next(tick), at, more, fresh))
        if at < len(graph.ops):
            op = graph.ops[at]
            for triples, seconds in zip(builder.structure.triples[at], times[at], strict=True):
                compute = Compute(at, triples)
                if cost + seconds < enough and all(need in holds for need in reads(graph, compute)):
                    kept = frozenset(h for h in holds if last[h[0]] > at)
                    made = [with_slices(*each) for each in writes(graph, compute)]
                    after = kept.union(*made)
                    heapq.heappush(heap, (cost + seconds, next(tick), at + 1, after, frozenset(op.results)))
    return np.inf


def unequal(seed, **links):
    """Two or three devices, of some speeds, behind a network of some bandwidth."""
    speeds = [[1.0, 1.0], [3.0, 1.0, 1.0], [1.0, 0.05]][seed % 3]
    return np.array(speeds), cluster(speeds, bandwidth=[1e9, 1e10, 1e11][seed // 3 % 3], **links)


def assert_equal_to_brute_force(costs, structure, speeds):
    """At ratios by speed, at even ones, and with all on one device: what the search comes to costs as much as the least
    of all programs, which neither its bound nor the joint one is above. (builder, solution) of each."""
    joint = solve(ProblemBuilder(structure, costs, None).problem()).lower_bound
    found = []
    for fractions in (proportional(speeds), np.full(len(speeds), 1 / len(speeds)), _spike(len(speeds))):
        builder = ProblemBuilder(structure, costs, Ratios(costs.graph, costs.table, fractions))
        solution = solve(builder.problem())
        wanted = brute_force(builder)
        assert solution.status == "optimal"
        assert solution.cost == pytest.approx(wanted, rel=1e-6)
        assert solution.lower_bound <= wanted * (1 + 1e-9)
        assert joint <= wanted * (1 + 1e-9)
        found.append((builder, solution))
    return found


@pytest.mark.parametrize("seed", range(24))
def test_search_equals_brute_force_over_all_programs(seed):
    graph = random_graph(seed, ops=2 + seed % 6).graph
    assert len(graph.ops) <= 8
    speeds, devices = unequal(seed)
    costs = CostModel(graph, devices, FactorTable(graph))
    assert_equal_to_brute_force(costs, ChoiceSpace(graph, costs.table), speeds)


@pytest.mark.few(6)
@pytest.mark.parametrize("axes", [(("a", 2), ("b", 2)), (("a", 2), ("b", 2), ("c", 2))], ids=["two axes", "three axes"])
@pytest.mark.parametrize("seed", range(5))
def test_no_program_of_several_axes_is_below_a_bound(seed, axes):
    """Of programs that nest as the search has them, any conversions of any value, where it shares one of each."""
    graph = random_graph(200 + seed, ops=1 + seed % 2).graph
    devices = cluster([1.0] * 2 ** len(axes), bandwidth=[1e9, 1e10, 1e11][seed % 3])
    table = FactorTable(graph)
    costs = CostModel(graph, devices, table, axes)
    structure = ChoiceSpace(graph, table, axes=len(axes))
    ratios = Ratios(graph, table, np.full(devices.n, 1 / devices.n), lengths=costs.lengths)
    builder = ProblemBuilder(structure, costs, ratios)
    solution = solve(builder.problem())
    wanted = brute_force(builder)
    joint = solve(ProblemBuilder(structure, costs, None).problem()).lower_bound
    assert joint <= wanted * (1 + 1e-9)
    assert solution.lower_bound <= wanted * (1 + 1e-9)
    assert wanted <= solution.cost * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_with_owners_too(seed):
    """Each op may be one device's alone, or some; below no bound at any ratios, nor at the best ones."""
    graph = random_graph(200 + seed, ops=2 + seed % 2).graph
    speeds, devices = unequal(seed, latency=[1e-6, 1e-4][seed % 2])
    table = FactorTable(graph)
    costs = CostModel(graph, devices, table)
    last = len(speeds) - 1
    owners = {op.index: (last * (seed % 2),) for op in graph.ops}
    for builder, solution in assert_equal_to_brute_force(costs, ChoiceSpace(graph, table, owners=owners), speeds):
        program = Emitter(builder, solution.assignment.tolist()).ordered(costs.axes)
        check(graph, program)
        sizes = builder.ratios.sizes_of(Classes.build(graph, program, table))
        if sizes is not None:
            check(graph, program, sizes)
            assert program_cost(program, sizes, costs) == pytest.approx(solution.cost, rel=1e-9)


def _spike(n):
    fractions = np.zeros(n)
    fractions[0] = 1.0
    return fractions


@pytest.mark.parametrize("seed", range(6))
def test_what_is_shared_is_what_each_would_have(seed):
    """Values and ops that are told apart by kind alone have the seconds that they have by themselves."""
    graph = random_graph(seed, ops=8).graph
    devices = cluster([3.0, 1.0, 1.0], bandwidth=1e10)
    task = Task(graph, devices)
    plan = Planner(task).run()
    weights = proportional(np.array([3.0, 1.0, 1.0]))
    evenly = frozenset((v.index, d) for v in graph.values[::2] for d in range(len(v.shape)))
    for sizes, even in ((None, frozenset()), (None, evenly), (plan.sizes, frozenset())):
        ratios = Ratios(graph, task.factors, weights, sizes, evenly=even)
        shared = ProblemBuilder(task.choices, task.costs, ratios)
        shared.problem()
        for value in range(len(graph.values)):
            alone = ProblemBuilder(task.choices, task.costs, ratios)
            assert np.array_equal(shared.conversions(value).seconds, alone.conversions(value).seconds)
        for op in graph.ops:
            alone = ProblemBuilder(task.choices, task.costs, ratios)
            assert np.array_equal(*alone.op_times((op.index,)), *shared.op_times((op.index,)))


@pytest.mark.parametrize("seed", range(8))
def test_no_program_at_any_ratio_is_below_the_joint_bound(seed):
    traced = random_graph(100 + seed, ops=5)
    unequal = cluster([2.0, 1.0], bandwidth=1e10)
    result = Planner(Task(traced.graph, unequal)).run()
    table = FactorTable(traced.graph)
    costs = CostModel(traced.graph, unequal, table)
    structure = ChoiceSpace(traced.graph, table)
    for first in np.linspace(0, 1, 9):
        builder = ProblemBuilder(structure, costs, Ratios(traced.graph, table, np.array([first, 1 - first])))
        assert result.joint_lower_bound_s <= brute_force(builder) * (1 + 1e-9)
    assert result.joint_lower_bound_s <= result.lower_bound_s <= result.cost_s


def mlp_step(params, batch):
    def loss(p):
        hidden = jax.nn.relu(batch[0] @ p[0])
        return jnp.mean((hidden @ p[1] - batch[1]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, grads)], value


def mlp(batch=4096, width=256):
    struct = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    args = ([struct(64, width), struct(width, 32)], (struct(batch, 64), struct(batch, 32)))
    return trace(mlp_step, args).graph


def test_the_plan_is_its_problem():
    """The program that is emitted costs what the search said, and passes the checker."""
    graph = mlp()
    even = cluster([1.0] * 4)
    result = Planner(Task(graph, even)).run()
    check(graph, result.program, result.sizes)
    costs = CostModel(graph, even, FactorTable(graph))
    assert result.cost_s == pytest.approx(program_cost(result.program, result.sizes, costs), rel=1e-12)
    assert result.status == "optimal"
    assert result.joint_gap < 1e-4


def test_never_above_a_baseline():
    graph = mlp()
    for speeds in ([1.0] * 4, [3.0, 3.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.05]):
        task = Task(graph, cluster(speeds))
        result = Planner(task).run()
        for name, baseline in Baselines(task).all().items():
            assert result.cost_s <= baseline.cost_s * (1 + 1e-9), name


def test_faster_devices_get_more_and_a_hopeless_one_nothing():
    graph = mlp(batch=65536)
    fast = Planner(Task(graph, cluster([3.0, 3.0, 1.0, 1.0]))).run()
    batch = max(fast.sizes.shares, key=lambda s: max(s))
    assert min(batch[:2]) > max(batch[2:])
    hopeless = Planner(Task(graph, cluster([1.0, 1.0, 1.0, 1e-4]))).run()
    assert any(s[3] == 0 for s in hopeless.sizes.shares)


@pytest.mark.parametrize("fraction", [0.9, 0.7, 0.4])
def test_a_memory_limit_is_kept(fraction):
    """Everything everywhere is fastest on this network; as memory tightens the plan must cut."""
    graph = mlp(batch=256, width=8192)
    even = cluster([1.0] * 4, bandwidth=1e8, latency=1e-3)
    free = Planner(Task(graph, even)).run()
    limit = fraction * free.memory_bytes[0]
    tight = Planner(Task(graph, even, PlanningOptions(memory_limit=limit))).run()
    assert max(tight.memory_bytes) <= limit
    assert tight.cost_s >= free.cost_s * (1 - 1e-9)
    costs = CostModel(graph, even, FactorTable(graph))
    assert peak(tight.program, tight.sizes, costs) <= limit


def test_a_limit_that_nothing_keeps_is_named():
    with pytest.raises(InfeasibleError, match=r"device 0 .* MiB too much"):
        Planner(Task(mlp(), cluster([1.0] * 4), PlanningOptions(memory_limit=1e5))).run()


def test_same_input_same_program():
    graph = mlp()
    unequal = cluster([2.0, 1.0, 1.0])
    first, second = (Planner(Task(graph, unequal)).run() for _ in range(2))
    assert first.program.text(graph) == second.program.text(graph)
    assert first.sizes.shares == second.sizes.shares


@pytest.mark.parametrize("overlap", [False, True])
def test_no_second_problem_is_built_without_time_left(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several axes building one takes seconds, not the 50 ms in which whatever is begun may end."""
    built: list[float] = []
    monkeypatch.setattr(effort, "_LEAST_S", 0.0)
    monkeypatch.setattr(Clock, "built", lambda clock, began: built.append(began))
    grid = replace(cluster([2.0, 1.0, 1.0, 1.0]), axes=(("a", 2), ("b", 2)))
    result = ClusterPlanner(Task(mlp(), grid, PlanningOptions(time_budget_s=1e-9, overlap=overlap))).run()
    assert 0 <= result.lower_bound_s <= result.cost_s
    assert len(built) == 1


def test_a_joint_bound_stands_where_that_at_the_plans_sizes_is_less(monkeypatch) -> None:
    """As where there was no time left for the latter: then no bound at all was told."""
    small = mlp(64, 64), cluster([2.0, 1.0])
    plain = Planner(Task(*small)).run()
    monkeypatch.setattr(Planner, "_certify", lambda self, best: (best, -np.inf))
    found = Planner(Task(*small)).run()
    assert found.joint_lower_bound_s == found.lower_bound_s == plain.joint_lower_bound_s > 0


def test_a_search_has_as_long_as_its_problem_took_to_build() -> None:
    """Where a fourth of what is left is less: a search that ends in its reductions has found nothing."""
    for built, left, share in ((4.0, 10.0, 4.0), (1.0, 10.0, 2.5), (4.0, 3.0, 3.0)):
        clock = Clock(left)
        clock.built(clock.began - built)
        assert clock.share(0.25) == pytest.approx(share, rel=0.01)
    assert Clock().share(0.25) is None


def test_a_bound_is_of_programs_that_its_sizes_allow() -> None:
    """What a plan cuts in rows of seven no program at its sizes cuts otherwise; before, such were compared."""
    fn = lambda w, x: jnp.tanh(x).reshape(256, 7 * 512) @ w
    shapes = jax.ShapeDtypeStruct((7 * 512, 64), jnp.float32), jax.ShapeDtypeStruct((256, 7, 512), jnp.float32)
    graph = trace(fn, shapes).graph
    task = Task(graph, cluster([3.0, 1.0]))
    reshape = next(op for op in graph.ops if op.name == "reshape")
    (flat,) = reshape.results

    def seconds(first: int, strict: bool) -> dict[tuple[int, ...], float]:
        """Of the reshape, by the units in which its triples cut."""
        vector = np.array([first, 7 * 512 - first]) / (7 * 512)
        ratios = Ratios(graph, task.factors, np.ones(2) / 2, named={(flat, 1, (0,), 0): vector})
        builder = ProblemBuilder(task.choices, task.costs, ratios.strictly() if strict else ratios)
        sizes = task.factors[reshape.index].sizes
        triples = task.choices.triples[reshape.index]
        cuts = [
            tuple(sizes[f] for f, _ in cut_nodes(graph, reshape.index, task.factors[reshape.index], t)) for t in triples
        ]
        return dict(zip(cuts, builder.op_times([reshape.index])[0].tolist(), strict=True))

    loose, strict, rows = seconds(2500, False), seconds(2500, True), seconds(5 * 512, True)
    assert set(loose) == {(), (256,), (7,)}
    assert strict == loose | {(7,): np.inf}
    assert np.isfinite(list(rows.values())).all()


@pytest.mark.parametrize("rows", [200_000, 200_001])
def test_a_third_of_many_rows_may_be_no_whole_number_of_them(rows: int) -> None:
    """To within a part of them it is: three devices then held 200,001 rows of 200,000."""
    graph, where = trace(jnp.add, [jax.ShapeDtypeStruct((rows, 4), jnp.float32)] * 2).graph, cluster([1.0] * 3)
    thirds = {(v.index, 0, (0,), 0): np.full(3, 1 / 3) for v in graph.values}
    ratios = Ratios(graph, FactorTable(graph), np.full(3, 1 / 3), named=thirds)
    program = Baselines(Task(graph, where)).all(["data_parallel"])["data_parallel"].program
    sizes = ratios.sizes_of(Classes.build(graph, program, FactorTable(graph)))
    assert (sizes and sizes.shares) == (((66_667,) * 3,) if rows % 3 == 0 else None)
    assert ratios.strictly().allow([*thirds], rows) == (rows % 3 == 0)


def test_a_strict_problem_has_no_optimum_that_nothing_can_be_cut_as() -> None:
    """Columns before they are heads would be cut in finer units than the heads."""

    def heads(x, w):
        return jnp.tanh((x @ w).reshape(3, 4, 8)).sum(-1)

    graph = trace(heads, (jnp.zeros((3, 256)), jnp.zeros((256, 32))), {}).graph
    task = Task(graph, slow_cluster((1.0, 1.7, 2.3, 0.6)))
    costs, table = task.costs, task.factors
    ratios = Ratios(graph, table, proportional(costs.rate("float32")))
    feasible: list[bool] = []
    for at in (ratios, ratios.strictly()):
        builder = ProblemBuilder(task.choices, costs, at)
        solution = solve(builder.problem(), tolerance=1e-9)
        assert solution.assignment is not None
        program = Emitter(builder, solution.assignment.tolist()).ordered(costs.axes)
        sizes = at.sizes_of(Classes.build(graph, program, table))
        cut = sizes is not None and program_cost(program, sizes, costs) == pytest.approx(solution.cost, rel=1e-9)
        feasible.append(cut)
    assert feasible == [False, True]
