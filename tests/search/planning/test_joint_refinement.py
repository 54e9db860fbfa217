"""Bounds by ranges of shares: never above a program, at whatever ratios; and as close as is asked for."""

from __future__ import annotations

from itertools import product
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graphs import cluster, random_graph
from hypothesis import strategies as st
from resharing import arguments, pooled
from resharing import cluster as new_and_old
from test_search import brute_force

import hapsynth
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import trace
from hapsynth.instructions.program.sizes import Node
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import MOVES
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.choice_space import ChoiceSpace, Owners
from hapsynth.search.formulation.conversions import LayoutSet
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.formulation.share_ranges import ConversionsWithMoves, RangeBuilder, RangeChoices, ShareRanges
from hapsynth.search.formulation.ways import BuilderOfWays, ChoicesInWays
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.sizing.ratios import Ratios
from hapsynth.search.solver import solve

MIXED = cluster([3.0, 1.0, 1.0], bandwidth=1e10)


def ranges_of(costs: CostModel, rng: np.random.Generator, most: int = 3) -> ShareRanges:
    """Up to `most` ends for each set of dimensions, some at shares that whole units have."""
    at, found = ShareRanges(costs, {}), dict[Node, tuple[float, ...]]()
    for value in costs.graph.values:
        for dim, units in enumerate(value.shape):
            shares = rng.integers(1, max(units, 2), most) / max(units, 2)
            either = np.where(rng.random(most) < 0.5, shares, rng.uniform(1 / costs.n, 1, most))
            ends = sorted({x for x in either.tolist() if 1 / costs.n < x < 1})
            found[at.root(value.index, dim)] = tuple(ends[: int(rng.integers(most + 1))])
    return ShareRanges(costs, found)


def bound_by(ranges: ShareRanges, owners: Owners | None = None) -> float:
    choices = RangeChoices(ranges.costs, ranges.count, owners=owners)
    problem = RangeBuilder(choices, ranges.costs, ranges).problem()
    found = solve(problem, start=np.array(choices.replicated()))
    assert found.status == "optimal"
    return found.lower_bound


def model(graph: Graph, devices: Cluster) -> CostModel:
    return CostModel(graph, devices, FactorTable(graph))


@pytest.mark.parametrize("seed", range(10))
def test_no_program_at_any_ratios_is_below_the_bound(seed: int) -> None:
    """All sequences of instructions, at a grid of ratios, with balanced collectives."""
    graph = random_graph(300 + seed, ops=4).graph
    speeds = [[2.0, 1.0], [3.0, 1.0, 1.0]][seed % 2]
    costs = model(graph, cluster(speeds, bandwidth=[1e9, 1e10, 1e11][seed % 3]))
    structure, rng = ChoiceSpace(graph, costs.table), np.random.default_rng(seed)
    bounds = [bound_by(ranges_of(costs, rng)) for _ in range(4)]
    whole = solve(ProblemBuilder(structure, costs, None).problem()).lower_bound
    # Balanced collectives are in these bounds, and not in that one.
    assert max(bounds) > 0
    assert max(bounds) >= 0.9 * whole
    for first in np.linspace(0, 1, 9):
        weights = np.array([first, *[(1 - first) / (len(speeds) - 1)] * (len(speeds) - 1)])
        least = brute_force(ProblemBuilder(structure, costs, Ratios(graph, costs.table, weights).strictly()))
        assert max(bounds) <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_whoever_may_own_an_update(seed: int) -> None:
    graph = random_graph(400 + seed, ops=2).graph
    costs = model(graph, cluster([2.0, 1.0], bandwidth=1e9, latency=[1e-6, 1e-4][seed % 2]))
    owners = {op.index: (seed % 2,) for op in graph.ops}
    structure, rng = ChoiceSpace(graph, costs.table, owners=owners), np.random.default_rng(seed)
    bounds = [bound_by(ranges_of(costs, rng), owners) for _ in range(3)]
    for first in (0.0, 0.4, 0.5, 0.8):
        ratios = Ratios(graph, costs.table, np.array([first, 1 - first])).strictly()
        assert max(bounds) <= brute_force(ProblemBuilder(structure, costs, ratios)) * (1 + 1e-9)


class _TwoRatios(BuilderOfWays):
    def _allows(self, value: int, step: Any) -> bool:
        return not (step.recuts and self.whole[value])


@pytest.mark.parametrize("seed", range(8))
def test_no_program_that_changes_its_ratio_is_below_the_bound(seed: int) -> None:
    """The best program with reshares whose instructions are each at one of two ratios, for many pairs of them."""
    rng = np.random.default_rng(seed)
    if seed % 2:
        # Where reshares pay.
        graph, devices = trace(pooled, arguments(layers=2)).graph, new_and_old(["400 MB/s", "4 GB/s"][seed % 4 // 2])
    else:
        graph, devices = random_graph(500 + seed, ops=5).graph, MIXED
    costs = model(graph, devices)
    kin = ShareRanges(costs, {})
    bounds = [bound_by(ranges_of(costs, rng, 2)) for _ in range(3)]
    reshared = 0
    for _ in range(6):
        two = rng.dirichlet(np.ones(costs.n), 2)
        if seed % 2:
            two = np.array([[2 * x + 1, 2 * x + 1, 1, 1] for x in rng.uniform(0, 4, 2)])
            two /= two.sum(axis=1, keepdims=True)
        named: dict[Node, Floats] = {}
        for v in graph.values:
            for dim, way in product(range(len(v.shape)), range(2)):
                units = v.shape[dim]
                # Whole units of the shortest dimension that ops can cut with this one.
                short = min(
                    w.shape[d]
                    for w in graph.values
                    for d in range(len(w.shape))
                    if kin.root(w.index, d) == kin.root(v.index, dim)
                )
                named[v.index, dim, (0,), way] = _rounded(two[way], short) if units else two[way]
        choices = ChoicesInWays(costs, lambda value, dim: 2)
        ratios = Ratios(graph, costs.table, two[0], None, costs.lengths, named=named).strictly()
        found = solve(_TwoRatios(choices, costs, ratios).problem(), start=np.array(choices.replicated()))
        one = ProblemBuilder(ChoiceSpace(graph, costs.table), costs, ratios)
        reshared += found.cost < solve(one.problem()).cost * (1 - 1e-6)
        assert max(bounds) <= found.cost * (1 + 1e-9)
    assert reshared or not seed % 2


def _rounded(fractions: Floats, units: int) -> Floats:
    shares = np.floor(fractions * units)
    shares[: int(units - shares.sum())] += 1
    return shares / units


@pytest.mark.parametrize("seed", range(3))
def test_ranges_hold_what_works_take_at_their_shares(seed: int) -> None:
    """Random works and shares: each takes at least as long as the range says in which its largest share lies, and some
    shares in it take just that."""
    rng, costs = np.random.default_rng(seed), model(random_graph(1, ops=1).graph, MIXED)
    works = [
        Work(
            (float(10 ** rng.uniform(4, 9)),),
            (((), 1e3), ((0,), float(10 ** rng.uniform(4, 9)))),
            1,
            "float32",
            (lanes,),
            (0,),
        )
        for lanes in (0, 100, 4096) * 4
    ]
    for work in works:
        shares = rng.dirichlet(np.ones(3), 2000)
        shares[:200, 1] = 0.0
        shares /= shares.sum(axis=1, keepdims=True)
        times = np.array([costs.time(work, [s]) for s in shares])
        for low, high in ((1 / 3, 0.4), (0.4, 0.6), (0.5, 0.51), (0.7, 1.0), (1 / 3, 1.0)):
            (least,) = costs.times_within([(work, (low, high))])
            inside = (shares.max(axis=1) >= low) & (shares.max(axis=1) <= high)
            assert least <= times[inside].min() * (1 + 1e-9)
            assert least >= 0.8 * times[inside].min() or work.lanes[0] == 100
    assert costs.times_within([(works[0], (0.6, 0.5))])[0] == np.inf
    assert costs.times_within([(works[0], (1 / 3, 1.0))])[0] == pytest.approx(costs.ideal_time(works[0]), rel=1e-6)


@hypothesis.given(
    st.integers(2, 5).flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, 20), min_size=n, max_size=n)] * 2))
)
def test_what_moves_is_at_least_what_the_largest_share_loses(units: tuple[list[int], list[int]]) -> None:
    hypothesis.assume(all(map(sum, units)))
    old, new = (np.array(u) / sum(u) for u in units)
    link = model(random_graph(1, ops=1).graph, MIXED).links[0]
    latency, rows = MOVES.between(old, new, link.latency, 1e6)
    if latency:
        assert MOVES.least(link, 1e6, abs(old.max() - new.max())) <= (latency + rows * link.beta) * (1 + 1e-9)
    else:
        assert np.allclose(old, new)


def test_no_way_is_shorter_for_going_in_small_steps() -> None:
    """From one end of five ranges to the other, neighbours being next to nothing apart."""
    layouts = LayoutSet(1, (0, 1), ("sum",), (5, 1))
    (first, *_, last) = [layouts.number[(p,)] for p in layouts.shards[:5]]
    apart = lambda i, j: 1.0 + 10.0 * max(0, abs(i - j) - 1)
    moves = {
        (i, j): apart(p[0].way, q[0].way)
        for i, p in enumerate(layouts.layouts)
        for j, q in enumerate(layouts.layouts)
        if i != j and p[0].is_sharded and q[0].is_sharded and p[0].dim == q[0].dim == 0
    }
    step = lambda p, q, _: np.inf if p[0].dim == q[0].dim >= 0 else 100.0
    ways = ConversionsWithMoves(layouts, step, moves)
    assert ways.seconds[first, last] == 31.0
    assert ways.moves_between(first, last) == (first, last)
    # Between other steps they may move, before and after.
    other = layouts.number[(layouts.shards[5],)]
    assert ways.seconds[first, other] == 100.0
    assert ways.moves_between(first, other) is None
    assert ways.reached(first, [last, other]) == (131.0, [(first, last, 0), (last, other, 0)]) or ways.reached(
        first, [last, other]
    ) == (131.0, [(first, last, 0), (first, other, 0)])


F32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)


def deep(weights: Any, x: Any) -> Any:
    """Contractions, which suit shares by FLOP/s, and what reads memory between them."""
    for w in weights:
        x = jnp.tanh(x @ w)
        x = x - x.mean(axis=1, keepdims=True)
        x = x / jnp.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5)
    return x.sum(axis=0)


ARGS = ([F32(256, 256)] * 4, F32(4096, 256))
SLOW = new_and_old("100 MB/s")


def test_a_gap_is_brought_down_as_asked() -> None:
    plain = hapsynth.synthesize(deep, ARGS, SLOW, cache=False)
    assert plain.joint_gap > 0.15
    closer = hapsynth.synthesize(deep, ARGS, SLOW, joint_gap=0.02, cache=False)
    assert closer.joint_gap <= 0.02
    assert closer.joint_lower_bound <= closer.lower_bound <= closer.cost
    assert closer.program.instructions == plain.program.instructions
    assert (closer.ratios, closer.cost) == (plain.ratios, plain.cost)
    # Of every set of devices that was considered.
    assert min(closer.result.bounds.values()) == closer.joint_lower_bound
    assert all(closer.result.bounds[devices] >= bound * (1 - 1e-9) for devices, bound in plain.result.bounds.items())


@pytest.mark.parametrize("exact", [False, True])
def test_within_limits_of_memory_too(exact: bool) -> None:
    graph = trace(deep, ARGS).graph
    free = Planner(Task(graph, SLOW)).run()
    limit = 0.7 * max(free.memory_bytes)
    options = PlanningOptions(memory_limit=limit, exact=exact, joint_gap=1e-6)
    found = Planner(Task(graph, SLOW, options)).run()
    assert max(found.memory_bytes) <= limit
    assert 0 < found.joint_lower_bound_s <= found.lower_bound_s <= found.cost_s


def test_what_is_asked_for_is_checked() -> None:
    for wrong in (0, 1, -0.5, 3):
        with pytest.raises(ValueError, match="between 0 and 1"):
            hapsynth.synthesize(deep, ARGS, SLOW, joint_gap=wrong)
    for wrong in ("3%", True):
        with pytest.raises(TypeError, match="a fraction of the plan's cost"):
            hapsynth.synthesize(deep, ARGS, SLOW, joint_gap=wrong)
    with pytest.raises(ValueError, match="joint_gap is given with overlap"):
        hapsynth.synthesize(deep, ARGS, SLOW, joint_gap=0.03, overlap=True)
