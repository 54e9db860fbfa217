"""Bounds by ranges of shares: never above a program, at whatever ratios; and as close as is asked for."""

from __future__ import annotations

import inspect
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graphs import cluster, random_graph
from hypothesis import strategies as st
from resharing import arguments, pooled, running_step, step_arguments
from resharing import cluster as new_and_old
from test_search import brute_force
from thoroughness import THOROUGH

import hapsynth
from hapsynth.cli.main import main
from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.curves import Curve
from hapsynth.cluster.memory_budget import MemoryBudget
from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import trace
from hapsynth.instructions.layout import Layout, P, R
from hapsynth.instructions.program.sizes import Classes, Node
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import MOVES, axis_links
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.cost.share_range import Mask, ShareRange
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.choice_space import AvailableLayouts, ChoiceSpace, Owners
from hapsynth.search.formulation.conversions import LayoutSet
from hapsynth.search.formulation.emission import Emitter
from hapsynth.search.formulation.memory_constraints import MemoryConstraints
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.formulation.share_ranges import ConversionsWithMoves, RangeBuilder, RangeChoices, ShareRanges
from hapsynth.search.formulation.ways import BuilderOfWays, ChoicesInWays
from hapsynth.search.memory.profile import MemoryProfile
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.sizing.ratios import Ratios, round_shares
from hapsynth.search.solver import Problem, solve

MIXED = cluster([3.0, 1.0, 1.0], bandwidth=1e10)


def random_ranges(costs: CostModel, rng: np.random.Generator, most: int = 3) -> ShareRanges:
    """Up to `most` ends for each set of dimensions, some at shares that whole units have; every second range is divided
    by the slow devices' share, too."""
    found: dict[Node, tuple[ShareRange, ...]] = {}
    for root, units in shortest(costs).items():
        shares = rng.integers(1, max(units, 2), most) / max(units, 2)
        either = np.where(rng.random(most) < 0.5, shares, rng.uniform(1 / costs.n, 1, most))
        ends = sorted({x for x in either.tolist() if 1 / costs.n < x < 1})[: int(rng.integers(most + 1))]
        slow = [[float(rng.uniform(0, 0.6))] if rng.random() < 0.5 else [] for _ in range(len(ends) + 1)]
        found[root] = divided_at(costs, ends, slow)
    return ShareRanges(costs, found)


def ranges_around(costs: CostModel, *ratios: Floats) -> ShareRanges:
    """Ends right beside the shares that dimensions have at some ratios: nearly all that is left of a bound is what
    these cost."""
    found: dict[Node, tuple[ShareRange, ...]] = {}
    for root, units in shortest(costs).items():
        cut = [rounded(r, units) for r in ratios]
        ends = sorted(x for x in {float(c.max()) + side for c in cut for side in (-1e-3, 1e-3)} if 1 / costs.n < x < 1)
        slow: list[list[float]] = [[] for _ in range(len(ends) + 1)]
        for c in cut:
            slow[bisect_right(ends, float(c.max()))].append(float(c[~costs.fastest].max(initial=0.0)) + 1e-3)
        found[root] = divided_at(costs, ends, slow)
    return ShareRanges(costs, found)


def divided_at(costs: CostModel, ends: Sequence[float], slow: Sequence[Sequence[float]]) -> tuple[ShareRange, ...]:
    """At largest shares, and each of these ranges at shares of slow devices."""
    every = zip(pairwise([1 / costs.n, *ends, 1.0]), slow, strict=True)
    parts = ((within, part) for within, some in every for part in pairwise([0.0, *sorted({*some}), 1.0]))
    return tuple(ShareRange(within, part).tightened(costs.fastest) for within, part in parts)


def way_of(ranges: ShareRanges, value: int, dim: int, shares: Floats) -> int:
    """The first range that has these shares of a dimension."""
    largest, slow = float(shares.max()), float(shares[~ranges.costs.fastest].max(initial=0.0))
    inside = lambda x, ends: ends[0] - 1e-9 <= x <= ends[1] + 1e-9
    every = enumerate(ranges.at(ranges.root(value, dim)))
    return next(way for way, r in every if inside(largest, r.largest) and inside(slow, r.slow))


def just(shares: Floats, fast: Mask) -> ShareRange:
    """All that a range may say of some shares."""
    ends = shares.max(), shares[~fast].max(), min(shares[fast].sum(), 1.0)
    return ShareRange(*((x, x) for x in map(float, ends)))


def shortest(costs: CostModel) -> dict[Node, int]:
    """Of what ops can cut together, the length of the shortest dimension."""
    kin, found = ShareRanges(costs, {}), dict[Node, int]()
    for v in costs.graph.values:
        for dim, units in enumerate(v.shape):
            root = kin.root(v.index, dim)
            found[root] = min(found.get(root, units), units)
    return found


def named(costs: CostModel, *ratios: Floats) -> Ratios:
    """Each a way to cut everything, in whole units of the shortest dimension that ops can cut with one."""
    kin, units, nodes = ShareRanges(costs, {}), shortest(costs), dict[Node, Floats]()
    for v in costs.graph.values:
        for dim, (way, fractions) in product(range(len(v.shape)), enumerate(ratios)):
            nodes[v.index, dim, (0,), way] = rounded(fractions, units[kin.root(v.index, dim)])
    return Ratios(costs.graph, costs.table, ratios[0], None, costs.lengths, named=nodes).strictly()


def rounded(fractions: Floats, units: int) -> Floats:
    return np.array(round_shares(fractions, units)) / units if units else fractions


def bound_by(ranges: ShareRanges, owners: Owners | None = None) -> float:
    choices = RangeChoices(ranges.costs, ranges.count, owners=owners)
    problem = RangeBuilder(choices, ranges.costs, ranges).problem()
    found = solve(problem, start=np.array(choices.replicated()))
    assert found.status == "optimal"
    return found.lower_bound


def model(graph: Graph, devices: Cluster) -> CostModel:
    return CostModel(graph, devices, FactorTable(graph))


def random_costs(seed: int) -> CostModel:
    """Of a few ops on one fast device and one or two slow ones."""
    speeds = [[2.0, 1.0], [3.0, 1.0, 1.0]][seed % 2]
    return model(random_graph(300 + seed, ops=4).graph, cluster(speeds, bandwidth=[1e9, 1e10, 1e11][seed % 3]))


def least_at_ratios(costs: CostModel) -> Iterator[tuple[Floats, float]]:
    """(ratios, the least of all sequences of instructions) at a grid of ratios of the first device and the others."""
    structure, others = ChoiceSpace(costs.graph, costs.table), costs.n - 1
    for first in np.linspace(0, 1, 9):
        weights = np.array([first, *[(1 - first) / others] * others])
        yield weights, brute_force(ProblemBuilder(structure, costs, named(costs, weights)))


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(10))
def test_no_program_at_any_ratios_is_below_the_bound(seed: int) -> None:
    """All sequences of instructions, at a grid of ratios."""
    costs, rng = random_costs(seed), np.random.default_rng(seed)
    bound = max(bound_by(random_ranges(costs, rng)) for _ in range(4))
    whole = solve(ProblemBuilder(ChoiceSpace(costs.graph, costs.table), costs, None).problem()).lower_bound
    # Balanced collectives are in this bound, and not in that one.
    assert bound >= 0.9 * whole
    for weights, least in least_at_ratios(costs):
        assert max(bound, bound_by(ranges_around(costs, weights))) <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_whoever_may_own_an_update(seed: int) -> None:
    graph = random_graph(400 + seed, ops=2).graph
    costs = model(graph, cluster([2.0, 1.0], bandwidth=1e9, latency=[1e-6, 1e-4][seed % 2]))
    owners = {op.index: (seed % 2,) for op in graph.ops}
    structure, rng = ChoiceSpace(graph, costs.table, owners=owners), np.random.default_rng(seed)
    bound = max(bound_by(random_ranges(costs, rng), owners) for _ in range(3))
    for first in (0.0, 0.4, 0.5, 0.8):
        weights = np.array([first, 1 - first])
        least = brute_force(ProblemBuilder(structure, costs, named(costs, weights)))
        assert max(bound, bound_by(ranges_around(costs, weights), owners)) <= least * (1 + 1e-9)


F32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)


def deep(weights: Any, x: Any) -> Any:
    """Contractions, which suit shares by FLOP/s, and what reads memory between them."""
    for w in weights:
        x = jnp.tanh(x @ w)
        x = x - x.mean(axis=1, keepdims=True)
        x = x / jnp.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5)
    return x.sum(axis=0)


def again(x: Any, w: Any) -> Any:
    """What is made by rows is read by columns and by rows, several times."""
    y = jnp.tanh(x @ w)
    z = jnp.sort(y, axis=0)
    return jnp.tanh(jnp.sort(y, axis=1) @ w) + z, jnp.tanh(y @ w).sum(), jnp.sort(z @ w, axis=1)


ARGS = ([F32(256, 256)] * 4, F32(4096, 256))
SLOW = new_and_old("100 MB/s")
TASKS: dict[str, tuple[Any, Any]] = {
    "deep": (deep, ARGS),
    "again": (again, (F32(512, 256), F32(256, 256))),
    "pooled": (pooled, arguments(layers=2)),
    "step": (running_step, step_arguments(layers=2)),
}


@pytest.mark.few("again-100 MB/s")
@pytest.mark.parametrize(("name", "bandwidth"), [*product(TASKS, ["100 MB/s", "400 MB/s", "2 GB/s", "20 GB/s"])])
def test_no_program_that_communicates_or_changes_its_ratio_is_below_the_bound(name: str, bandwidth: str) -> None:
    """The best program whose instructions are each at one of two ratios, resharing between them where that pays."""
    fn, args = TASKS[name]
    graph, rng = trace(fn, args).graph, np.random.default_rng(len(name))
    costs = model(graph, new_and_old(bandwidth))
    whole = bound_by(ShareRanges(costs, {}))
    gained: list[float] = []
    named_ones = ((5.0, 5.0), (10.0, 1.0), (10.0, 1.5), (4.0, 1.0)) if THOROUGH else ((10.0, 1.0), (4.0, 1.0))
    for fast in (*named_ones, tuple(rng.uniform(0, 4, 2).tolist())):
        two = [np.array([f, f, 1, 1]) / (2 * f + 2) for f in fast]
        choices = ChoicesInWays(costs, lambda value, dim: 2)
        found = solve(_TwoRatios(choices, costs, named(costs, *two)).problem(), start=np.array(choices.replicated()))
        assert found.status == "optimal"
        bound = bound_by(ranges_around(costs, *two))
        assert bound <= found.cost * (1 + 1e-9)
        gained.append(bound / whole)
    assert max(gained) > 1


@pytest.mark.few("again-100 MB/s")
@pytest.mark.parametrize("bandwidth", ["100 MB/s", "2 GB/s"])
@pytest.mark.parametrize("name", TASKS)
def test_nothing_costs_more_than_at_ratios_in_its_ranges(name: str, bandwidth: str) -> None:
    """Ops, conversions and what is shared of every value, at two ratios, in the ranges that these lie in."""
    fn, args = TASKS[name]
    graph, rng = trace(fn, args).graph, np.random.default_rng(len(name))
    costs = model(graph, new_and_old(bandwidth))
    counts = {"moved": 0, "shared": 0}
    for _ in range(4):
        two = [np.array([f, f, 1, 1]) / (2 * f + 2) for f in rng.uniform(0.2, 9, 2)]
        ratios, ranges = named(costs, *two), random_ranges(costs, rng)
        there = _TwoRatios(ChoicesInWays(costs, lambda value, dim: 2), costs, ratios)
        here = RangeBuilder(RangeChoices(costs, ranges.count), costs, ranges)

        def within(value: int, layout: Layout, ratios: Ratios = ratios, ranges: ShareRanges = ranges) -> Layout:
            (p,) = layout
            if not p.is_sharded:
                return layout
            shares = ratios.vectors[ratios.of(value, p.dim, (0,), p.way)]
            return (p._replace(way=way_of(ranges, value, p.dim, shares)),)

        for op in graph.ops:
            times, known = here.op_times((op.index,))[0], {t: n for n, t in enumerate(here.structure.triples[op.index])}
            for triples, seconds in zip(there.structure.triples[op.index], there.op_times((op.index,))[0], strict=True):
                cut = [(v, p) for v, p in zip(op.operands, triples[0].operands, strict=True) if p.is_sharded]
                cut += [(v, p) for v, p in zip(op.results, triples[0].results, strict=True) if p.is_sharded]
                way = within(cut[0][0], (cut[0][1],))[0].way if cut else 0
                assert times[known[(triples[0].along(way),)]] <= seconds * (1 + 1e-9)
        for value in range(len(graph.values)):
            before, after = there.conversions(value), here.conversions(value)
            number = after.layouts.number
            for i, source in enumerate(before.layouts.layouts):
                for j, target in enumerate(before.layouts.layouts):
                    s, t = within(value, source), within(value, target)
                    assert after.seconds[number[s], number[t]] <= before.seconds[i, j] * (1 + 1e-9)
                    moved = source[0].is_sharded and target[0].is_sharded and source[0].dim == target[0].dim
                    counts["moved"] += moved and s != t and np.isfinite(before.seconds[i, j])
            mine = [(o, here.offer(value, o).seconds) for o in _options(here, value)]
            for option in _options(there, value):
                made, targets = within(value, option.computed), {within(value, t) for t in option.targets}
                again = {t for t in targets if t[0].dim == made[0].dim} - {made}
                others = targets - again - {made}
                if len(again) > 1 or (len({t[0].dim for t in others}) == 1 < len(others)):
                    continue
                # A slice of what is whole is everybody's.
                holds = lambda o, targets=targets, made=made: (R,) in o.targets or targets - {made} <= {*o.targets}
                enough = [s for o, s in mine if o.computed == made and holds(o)]
                assert min(enough) <= there.offer(value, option).seconds * (1 + 1e-9)
                counts["shared"] += len(targets) > 1
    assert counts["moved"] > 0
    # There every value is used once.
    assert counts["shared"] > 0 or name == "pooled"


def _options(builder: ProblemBuilder, value: int) -> tuple[AvailableLayouts, ...]:
    return builder.structure.choices[builder.structure.value_variable[value]].options


class _TwoRatios(BuilderOfWays):
    def _allows(self, value: int, step: Any) -> bool:
        return not (step.recuts and self.whole[value])


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_ranges_hold_what_works_take_at_their_shares(seed: int) -> None:
    """Random works and shares: each takes at least as long as the range says in which its largest share lies, and some
    shares in it take just that."""
    rng, costs = np.random.default_rng(seed), model(random_graph(1, ops=1).graph, MIXED)
    works = [
        Work(
            float(10 ** rng.uniform(4, 9)),
            (((), 1e3), ((0,), float(10 ** rng.uniform(4, 9)))),
            1,
            "float32",
            (lanes,),
            (0,),
        )
        for lanes in (0, 100, 4096) * (4 if THOROUGH else 2)
    ]
    for work in works:
        shares = rng.dirichlet(np.ones(3), 2000)
        shares[:200, 1] = 0.0
        shares /= shares.sum(axis=1, keepdims=True)
        times = np.array([costs.time(work, [s]) for s in shares])
        largest, slow = shares.max(axis=1), shares[:, ~costs.fastest].max(axis=1)
        together = shares[:, costs.fastest].sum(axis=1)
        for few, many in ((0.0, 0.3), (0.4, 0.5), (0.2, 0.9), (0.95, 1.0)):
            within = ShareRange((1 / 3, 1.0), (0.0, 1.0), (few, many))
            least = costs.times_within([(work, within), (work, within.tightened(costs.fastest))])
            assert (least <= times[(together >= few) & (together <= many)].min() * (1 + 1e-9)).all()
            assert least[1] >= 0.8 * times[(together >= few) & (together <= many)].min() or work.lanes[0] == 100
        for low, high in ((1 / 3, 0.4), (0.4, 0.6), (0.5, 0.51), (0.7, 1.0), (1 / 3, 1.0)):
            for least_slow, most_slow in ((0.0, 1.0), (0.1, 0.2), (0.3, 0.34), (0.45, 0.5)):
                within = ShareRange((low, high), (least_slow, most_slow))
                inside = (largest >= low) & (largest <= high) & (slow >= least_slow) & (slow <= most_slow)
                if not inside.any():
                    continue
                for mine in (within, within.tightened(costs.fastest)):
                    (least,) = costs.times_within([(work, mine)])
                    assert least <= times[inside].min() * (1 + 1e-9)
                    few = most_slow < 1 and np.count_nonzero(inside) < 20
                    assert least >= 0.8 * times[inside].min() or work.lanes[0] == 100 or few
    within = lambda *ends: costs.times_within([(works[0], ShareRange(*ends))])[0]
    for none in (((0.6, 0.5),), ((0.5, 1.0), (0.6, 0.5)), ((1 / 3, 0.5), (0.0, 0.2)), ((1 / 3, 0.4), (0.5, 0.6))):
        assert within(*none) == np.inf
    assert within((1 / 3, 1.0)) == pytest.approx(costs.ideal_time(works[0]), rel=1e-6)


@hypothesis.given(
    st.integers(2, 5).flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, 20), min_size=n, max_size=n)] * 2))
)
def test_what_moves_is_at_least_what_the_largest_share_loses(units: tuple[list[int], list[int]]) -> None:
    hypothesis.assume(all(map(sum, units)))
    old, new = (np.array(u) / sum(u) for u in units)
    (modelled,) = axis_links(cluster([1.0] * old.size), [("hap", old.size)])
    measured = replace(modelled, curves={"reshare": Curve(((0.0, 1e-6), (1e6, 1e-5)))})
    for link in (modelled, measured):
        latency, moving = MOVES.between(link, old, new, 1e6)
        if latency:
            assert MOVES.least(link, 1e6, abs(old.max() - new.max())) <= (latency + moving) * (1 + 1e-9)
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


def test_targets_are_made_in_the_best_order() -> None:
    layouts, rng = LayoutSet(1, tuple(range(5)), ("sum",)), np.random.default_rng(1)
    ways = ConversionsWithMoves(layouts, lambda p, q, _: float(rng.integers(1, 100)), {})
    source, *targets = [layouts.number[(p,)] for p in (P("sum"), *layouts.shards)]

    def in_order(order: Sequence[int]) -> float:
        there, total = [source], 0.0
        for target in order:
            total += min(ways.seconds[at, target] for at in there)
            there.append(target)
        return total

    seconds, hops = ways.reached(source, targets)
    assert seconds == min(map(in_order, permutations(targets)))
    assert sorted(target for _, target, _ in hops) == sorted(targets)


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


def test_so_does_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shapes = "[jax.ShapeDtypeStruct((256, 256), 'float32')] * 4, jax.ShapeDtypeStruct((4096, 256), 'float32')"
    function = f"import jax\nimport jax.numpy as jnp\nfrom typing import Any\n\n{inspect.getsource(deep)}"
    Path("model.py").write_text(f"{function}\n\ndef target():\n    return deep, ({shapes})\n")
    SLOW.save(Path("slow.toml"))
    asked = ["search", "model.py", "--cluster", "slow.toml", "--json", "out.json", "--joint-gap", "2%"]
    assert main(asked) == 0
    assert json.loads(Path("out.json").read_text())["joint_gap"] <= 0.02


@pytest.mark.few(1)
@pytest.mark.parametrize("exact", [False, True])
def test_within_limits_of_memory_too(exact: bool) -> None:
    graph = trace(deep, ARGS).graph
    free = Planner(Task(graph, SLOW)).run()
    limit = 0.7 * max(free.memory_bytes)
    options = PlanningOptions(memory_limit=limit, exact=exact, joint_gap=0.02)
    found = Planner(Task(graph, SLOW, options)).run()
    assert max(found.memory_bytes) <= limit
    assert 0 < found.joint_lower_bound_s <= found.lower_bound_s <= found.cost_s


def short_of_memory(width: int = 64, rows: int = 512) -> Graph:
    """What is made before the loss and read again after it takes most of the memory."""

    def loss(w: Any, x: Any) -> Any:
        y = jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])
        return ((y @ w[2]) ** 2).mean()

    return trace(jax.grad(loss), ([F32(width, width)] * 3, F32(rows, width))).graph


def least_within(ranges: ShareRanges, limits: dict[int, float]) -> float:
    choices = RangeChoices(ranges.costs, ranges.count, sparing=True)
    memory = MemoryConstraints(RangeBuilder(choices, ranges.costs, ranges), at_least=True)
    problem = memory.problem(limits)
    start = memory.extended(problem, np.array(choices.replicated()))
    return solve(problem, start=start, tolerance=1e-3, max_nodes=2000).lower_bound


def test_limits_that_are_counted_at_one_op_have_one_price() -> None:
    """Two ops beside the fullest were counted there once, and priced twice."""
    costs = model(short_of_memory(), MIXED)
    ranges = ShareRanges(costs, {})
    choices = RangeChoices(costs, ranges.count)
    memory, joint = MemoryConstraints(RangeBuilder(choices, costs, ranges), at_least=True), dict[int, list[int]]()
    for op in range(len(costs.graph.ops)):
        joint.setdefault(memory.fullest_near(op), []).append(op)
    limits = dict.fromkeys(max(joint.values(), key=len)[:2], 1e5)
    assert len(limits) == 2
    problem, priced = memory.problem(limits), memory.priced(limits, 1e-9)
    (resource,) = problem.resources
    start = memory.extended(problem, np.array(choices.replicated()))
    beyond = float(problem.usage(start)[0]) - resource.limit
    assert priced.cost(start) == pytest.approx(problem.cost(start) + 1e-9 * beyond)


@pytest.mark.few(1)
@pytest.mark.parametrize(("bandwidth", "exact"), [*product([3e8, 3e9], [False, True])])
def test_no_program_that_fits_is_below_the_bound(bandwidth: float, exact: bool) -> None:
    """Programs at a grid of ratios, the cheapest at many prices of what is held at some op: those within a limit are no
    cheaper than the bound within it, in any ranges and in ones around their ratios."""
    graph, devices = short_of_memory(), cluster([3.0, 1.0], bandwidth=bandwidth)
    costs = CostModel(graph, devices, FactorTable(graph), memory_budget=MemoryBudget((1e9, 1e9), exact=exact))
    structure, rng = ChoiceSpace(graph, costs.table, sparing=True), np.random.default_rng(7)
    programs: list[tuple[float, float, float]] = []
    for first in (0.25, 0.5, 0.625, 0.75, 0.875) if THOROUGH else (0.5, 0.75):
        ratios = named(costs, np.array([first, 1 - first]))
        builder = ProblemBuilder(structure, costs, ratios)
        for price in 10.0 ** rng.uniform(-12, -7, 12 if THOROUGH else 5):
            counted = MemoryConstraints(builder, at_least=False).problem({int(rng.integers(len(graph.ops))): np.inf})
            used = counted.resources[0].usage
            priced = Problem(tuple(u + price * b for u, b in zip(counted.unary, used, strict=True)), counted.edges)
            found = solve(priced, tolerance=1e-3, max_nodes=2000).assignment
            assert found is not None
            emitter = Emitter(builder, found.tolist()[: len(structure.choices)])
            for program in (emitter.ordered(costs.axes), emitter.ordered(costs.axes, sparing=True)):
                classes = Classes.build(graph, program, costs.table)
                sizes = ratios.sizes_of(classes)
                assert sizes is not None
                held = MemoryProfile(program, classes, costs).peak(sizes)
                programs.append((first, program_cost(program, sizes, costs), held))
    joint = MemoryConstraints(ProblemBuilder(structure, costs, None), at_least=True)
    op = max(range(len(graph.ops)), key=joint.least_at)
    raised = 0.0
    for limit in np.quantile([held for *_, held in programs], [0.0, 0.2, 0.5] if THOROUGH else [0.0, 0.2]).tolist():
        anywhere = random_ranges(costs, rng)
        bound = least_within(anywhere, {op: limit})
        raised = max(raised, bound / least_within(anywhere, {}))
        for first in dict.fromkeys(at for at, *_ in programs):
            around = least_within(ranges_around(costs, np.array([first, 1 - first])), {op: limit})
            fitting = [cost for at, cost, held in programs if at == first and held <= limit]
            assert max(bound, around) <= min(fitting, default=np.inf) * (1 + 1e-9)
    assert raised > 1.01, "limits that bind nowhere show nothing"


def test_what_is_asked_for_is_checked() -> None:
    for wrong in (0, 1, -0.5, 3):
        with pytest.raises(ValueError, match="between 0 and 1"):
            hapsynth.synthesize(deep, ARGS, SLOW, joint_gap=wrong)
    for wrong in ("3%", True):
        with pytest.raises(TypeError, match="a fraction of the plan's cost"):
            hapsynth.synthesize(deep, ARGS, SLOW, joint_gap=wrong)
    with pytest.raises(ValueError, match="joint_gap is given with overlap"):
        hapsynth.synthesize(deep, ARGS, SLOW, joint_gap=0.03, overlap=True)
