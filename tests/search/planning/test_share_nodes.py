"""Shares rounded to nodes: no program costs less on the mean than it did, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graphs import random_graph
from hypothesis import strategies as st
from resharing import cluster as new_and_old
from test_joint_refinement import (
    ARGS,
    TASKS,
    _TwoRatios,
    deep,
    just,
    least_at_ratios,
    model,
    named,
    random_costs,
    random_ranges,
    shortest,
    way_of,
)

from hapsynth.graph.trace import trace
from hapsynth.instructions.layout import Layout, R, S
from hapsynth.instructions.program.sizes import Node
from hapsynth.search.analysis.liveness import LiveSet
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import MOVES, Shares
from hapsynth.search.cost.share_range import Mask
from hapsynth.search.formulation.choice_space import ChoiceSpace
from hapsynth.search.formulation.memory_constraints import MemoryConstraints
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.formulation.share_nodes import ShareNodes
from hapsynth.search.formulation.share_ranges import RangeBuilder, RangeChoices, ShareRanges
from hapsynth.search.formulation.ways import ChoicesInWays
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.sizing.ratios import Ratios
from hapsynth.search.solver import Edge, Ints, Problem, solve

FEW = st.integers(2, 6).flatmap(lambda n: st.lists(st.booleans(), min_size=n, max_size=n))


# Functions of a share


@hypothesis.given(st.data())
def test_straight_lines_between_nodes_lie_below(data: st.DataObject) -> None:
    """Whatever is least within each cell, be it of single units or of many."""
    fast = data.draw(FEW.filter(lambda fast: any(fast) and not all(fast)))
    units = data.draw(st.integers(1, 60))
    nodes = ShareNodes.near(units, fast, data.draw(st.lists(st.floats(0, 1), max_size=4)))
    if data.draw(st.booleans()):
        nodes = ShareNodes(units, tuple(fast), nodes.shares, finest=data.draw(st.integers(1, 8)))
    seconds = np.array(
        data.draw(st.lists(st.floats(0, 10), min_size=len(nodes.cells), max_size=len(nodes.cells))), dtype=np.float64
    )
    (below,) = nodes.below(seconds[None])
    for (low, high), least in zip(nodes.cells, seconds.tolist(), strict=True):
        for share in (low, high):
            assert np.interp(share, nodes.shares, below) <= least + 1e-9
    assert (below >= seconds.min() * 0.98 - 1e-9).all()


def test_what_is_straight_between_nodes_is_known_at_them() -> None:
    """A function that falls to its least at a node and rises from there; one whose least lies between two nodes is
    lowered there, and known with a node more."""
    fast = (True, True, False, False)
    kinked = lambda least: lambda s: np.maximum(1 - s, 1 - least + 3 * (s - least))
    for units in (200, 40_000):
        nodes = ShareNodes.near(units, fast, [0.0, 0.3])
        middle = np.array(nodes.cells).mean(axis=1)
        middle[-1] = nodes.even
        at, off = kinked(0.3)(middle), kinked(0.4)(middle)
        assert nodes.below(at[None])[0] == pytest.approx(kinked(0.3)(np.array(nodes.shares)), abs=2e-3)
        below = nodes.below(off[None])[0]
        assert below[1] < 0.7 - 0.01
        share, less = nodes.worst(off, 1)
        assert (share, less) == pytest.approx((0.4, 0.2), abs=0.01)
        more = nodes.with_more([share])
        assert more.below(off[None])[0][1:3] == pytest.approx([0.7, 0.6], abs=2e-3)
    # Before the first node and beyond the last a function may be less than there.
    first = ShareNodes.near(200, fast, [0.3])
    assert first.below(middle_of(first)[None])[0] == pytest.approx([0.0, 0.5 * (1 - 1e-9)])


def middle_of(nodes: ShareNodes) -> Floats:
    """A function that is the share."""
    found = np.array(nodes.cells).mean(axis=1)
    found[-1] = nodes.even
    return found


def test_where_nodes_are() -> None:
    fast = (True, False, False)
    nodes = ShareNodes.near(9, fast, [0.54, 0.55, 0.9])
    assert nodes.shares == (5 / 9, 2 / 3)
    assert nodes.cells[0] == (0, 0)
    assert nodes.cells[-1] == (2 / 3, 1)
    first, last = nodes.ranges()
    assert (first.fast, last.fast) == (pytest.approx((4 / 9, 1)), pytest.approx((0, 1 / 3)))
    # One of the slow has half of theirs, or more.
    assert first.largest[0] == pytest.approx(4 / 9)
    assert nodes.point(0).slow == pytest.approx((2.5 / 9, 5 / 9))
    assert nodes.with_more([0.0]).shares == (0, 5 / 9, 2 / 3)
    assert nodes.with_more([0.56]) == nodes
    assert nodes.halfway(0) == [0, pytest.approx(11 / 18)]
    assert nodes.beside(1).fast == pytest.approx((0, 4 / 9))


# Programs


def random_nodes(costs: CostModel, rng: np.random.Generator, most: int = 3) -> ShareRanges:
    """Up to so many kinds of dimensions with a few nodes each, the others in ranges."""
    fast, roots = costs.fastest.tolist(), [root for root, units in shortest(costs).items() if units > 1]
    some = [roots[i] for i in rng.permutation(len(roots))[:most].tolist()]
    nodes = {
        root: ShareNodes.near(shortest(costs)[root], fast, rng.uniform(0, 0.6, int(rng.integers(3))).tolist())
        for root in some
    }
    return random_ranges(costs, rng).divided({}, nodes)


def builder_of(ranges: ShareRanges) -> RangeBuilder:
    return RangeBuilder(RangeChoices(ranges.costs, ranges.count, sparing=True), ranges.costs, ranges)


# Of others all sequences of instructions take half a minute.
@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(8))
def test_no_program_at_any_ratios_is_below_the_bound(seed: int) -> None:
    costs, rng = random_costs(seed), np.random.default_rng(seed)
    bound = max(solve(builder_of(random_nodes(costs, rng, 9)).problem()).lower_bound for _ in range(6))
    for _, least in least_at_ratios(costs):
        assert bound <= least * (1 + 1e-9)


@pytest.mark.few("pooled-100 MB/s")
@pytest.mark.parametrize(("name", "bandwidth"), [*product(TASKS, ["100 MB/s", "20 GB/s"])])
def test_no_program_that_moves_rows_is_below_it_at_a_price_of_memory(name: str, bandwidth: str) -> None:
    """The best program whose instructions are each at one of two ratios, with what it holds at some op."""
    fn, args = TASKS[name]
    graph, rng = trace(fn, args).graph, np.random.default_rng(len(name))
    costs = model(graph, new_and_old(bandwidth))
    near: list[float] = []
    for fast in ((5.0, 5.0), (10.0, 1.0), (4.0, 1.0), *rng.uniform(0.5, 9, (2, 2)).tolist()):
        two = [np.array([f, f, 1, 1]) / (2 * f + 2) for f in fast]
        choices = ChoicesInWays(costs, lambda value, dim: 2, sparing=True)
        memory = MemoryConstraints(_TwoRatios(choices, costs, named(costs, *two)), at_least=True)
        op = memory.fullest_near(int(rng.integers(len(graph.ops))))
        free = solve(memory.problem({}), start=np.array(choices.replicated()), tolerance=1e-3).cost
        per_byte = free / (sum(v.nbytes for v in graph.values)) * 10 ** rng.uniform(-1, 1)
        problem = memory.priced({op: 0.0}, per_byte)
        best = solve(problem, start=memory.extended(problem, np.array(choices.replicated())), tolerance=1e-4)
        at_ratios = [1 - r[costs.fastest].sum() for r in two]
        mine = {
            root: ShareNodes.near(units, costs.fastest.tolist(), at_ratios) for root, units in shortest(costs).items()
        }
        for ranges in (ShareRanges(costs, {}, mine), random_nodes(costs, rng, 99)):
            here = MemoryConstraints(builder_of(ranges), at_least=True)
            if here.fullest_near(op) != memory.fullest_near(op):
                continue
            bound = solve(here.priced({op: 0.0}, per_byte), tolerance=1e-4).lower_bound
            assert bound <= best.cost * (1 + 1e-9)
            near.append(bound / best.cost)
    assert max(near) > 0.75


def test_a_gap_is_brought_down_where_memory_is_short() -> None:
    graph, devices = trace(deep, ARGS).graph, new_and_old("20 GB/s")
    limit = 0.7 * max(Planner(Task(graph, devices)).run().memory_bytes)
    plain = Planner(Task(graph, devices, PlanningOptions(memory_limit=limit))).run()
    closer = Planner(Task(graph, devices, PlanningOptions(memory_limit=limit, joint_gap=0.6))).run()
    assert closer.cost_s == plain.cost_s
    assert closer.joint_gap <= 0.6 < 0.7 < plain.joint_gap


# What is there on the mean


@pytest.mark.parametrize("seed", range(3))
def test_conversions_take_no_longer_rounded_on_the_mean(seed: int) -> None:
    """Each step between random shares of a tensor, and what moves rows; of `x @ x.T` one threshold rounds both
    dimensions, of `x` each has its own."""
    x = jax.ShapeDtypeStruct((26, 38), jnp.float32)
    graph, rng = trace(lambda x: (x @ x.T, x + 1.0), (x,)).graph, np.random.default_rng(seed)
    devices = new_and_old(["1 kB/s", "1 MB/s"][seed % 2])
    if seed == 2:
        devices = replace(devices, devices=tuple(devices.devices[i] for i in (0, 2, 1, 3)))
    costs, near = model(graph, devices), list[float]()
    columns, of_itself = ShareRanges(costs, {}).root(graph.inputs[0], 1), graph.outputs[0]
    assert isinstance(of_itself, int)
    for n in range(12):
        # Every second time all is known of how columns are cut.
        known = {columns: _random_shares(38, costs.fastest, rng)} if n % 2 else {}
        nodes = {
            root: ShareNodes.near(units, costs.fastest.tolist(), rng.uniform(0, 0.5, 2))
            for root, units in shortest(costs).items()
            if root not in known
        }
        here = builder_of(ShareRanges(costs, {root: (just(s, costs.fastest),) for root, s in known.items()}, nodes))
        for value in (of_itself, graph.inputs[0]) * 3:
            near += list(_times_on_the_mean(here, value, known, rng))
    assert max(near) <= 1 + 1e-9
    assert np.mean(near) > 0.6
    assert max(near) > 0.999


def _random_shares(units: int, fast: Mask, rng: np.random.Generator) -> Floats:
    """Of two fast devices and two slow ones; of every second draw both of a kind have as much."""
    if rng.random() < 0.5:
        return rng.multinomial(units, rng.dirichlet(np.full(4, 2.0))) / units
    few = int(rng.integers(units // 4 + 1))
    return np.where(fast, units // 2 - few, few) / units


def _times_on_the_mean(
    here: RangeBuilder, value: int, known: Mapping[Node, Floats], rng: np.random.Generator
) -> Iterator[float]:
    """Of steps between random shares of a tensor's dimensions, or known ones, seconds at the nodes over those that they
    take."""
    costs, ranges, shape = here.costs, here.ranges, here.graph.values[value].shape
    link, nbytes, conversions = costs.links[0], float(here.graph.values[value].nbytes), here.conversions(value)
    roots = [ranges.root(value, dim) for dim in range(len(shape))]
    draw = lambda root, units: known[root] if root in known else _random_shares(units, costs.fastest, rng)
    shares = [draw(root, units) for root, units in zip(roots, shape, strict=True)]
    slow = lambda *each: [float(x[~costs.fastest].sum()) for x in each]
    rounded_to = lambda root, *each: (
        roundings(ranges.nodes[root], slow(*each)) if root not in known else [(1.0, (0, 0))]
    )
    if roots[0] == roots[1]:
        ways = rounded_to(roots[0], *shares)
    else:
        each = [rounded_to(root, s) for root, s in zip(roots, shares, strict=True)]
        ways = [(a * b, (i, j)) for (a, (i, *_)), (b, (j, *_)) in product(*each)]
    there = Shares(lambda dim, axes, way: float(shares[dim].max()), lambda dim, axes, way: shares[dim])

    def at(layout: Layout, way: tuple[int, ...]) -> Layout:
        (p,) = layout
        return (p._replace(way=way[p.dim]),) if p.is_sharded else layout

    plain = ChoiceSpace(costs.graph, costs.table).layouts[value]
    for i, j, axis in plain.hops:
        source, target = plain.layouts[i], plain.layouts[j]
        rounded = [(chance, here._step_times(value, at(source, way), at(target, way), axis)) for chance, way in ways]
        for n, step in enumerate(costs.steps(source, target, axis)):
            takes = float(costs.conversion(value, source, target, axis, there, step)[0])
            if takes > 0:
                yield float(sum(chance * seconds[n] for chance, seconds in rounded)) / takes
    for dim, (root, old) in enumerate(zip(roots, shares, strict=True)):
        new = draw(root, shape[dim])
        latency, moving = MOVES.between(link, old, new, nbytes)
        number = conversions.layouts.number
        if latency:
            ends = [(c, *(number[S(dim)._replace(way=k),] for k in way)) for c, way in rounded_to(root, old, new)]
            mean = float(sum(chance * conversions.seconds[a, b] for chance, a, b in ends))
            yield mean / float(latency + moving)


def test_ops_that_are_alike_but_for_their_nodes_are_told_apart() -> None:
    x = jax.ShapeDtypeStruct((24,), jnp.float32)
    costs = model(trace(lambda x, y: (jnp.sin(x), jnp.sin(y)), (x, x)).graph, new_and_old())
    fast = costs.fastest.tolist()
    nodes = {root: ShareNodes.near(24, fast, [k / 24]) for k, root in enumerate(shortest(costs), 1)}
    builder = builder_of(ShareRanges(costs, {}, nodes))
    assert len(nodes) == 2
    assert builder.times_key(0) != builder.times_key(1)


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(16))
def test_no_choices_cost_less_than_rounded_on_the_mean(seed: int) -> None:
    """Those of all choices at two ratios, with what is held at some op at its price, that cost the least more than the
    same at the nodes, on the mean over all thresholds."""
    graph, rng = random_graph(500 + seed, ops=4).graph, np.random.default_rng(seed)
    devices = new_and_old(["10 MB/s", "100 MB/s", "2 GB/s"][seed % 3])
    costs, rounded = model(graph, devices), 0
    for _ in range(3):
        two = [np.array([f, f, 1, 1]) / (2 * f + 2) for f in rng.uniform(0.2, 9, 2)]
        ratios = named(costs, *two)
        there = _TwoRatios(ChoicesInWays(costs, lambda value, dim: 2, sparing=True), costs, ratios)
        known = _Held(there)
        op = int(rng.choice([op for op in range(len(graph.ops) + 1) if known.held_at(op)]))
        free = solve(known.problem({}), tolerance=0.01).cost
        per_byte = free / sum(v.nbytes for v in graph.values) * 10 ** rng.uniform(-1, 1)
        for ranges in (random_nodes(costs, rng), random_nodes(costs, rng), random_nodes(costs, rng)):
            here = builder_of(ranges)
            held = _Held(here).held_at(op)
            mine, theirs = (_ByChoice(b, op, held, b is there).priced({op: 0.0}, per_byte) for b in (here, there))
            ways = [(chance, at) for chance, at in _thresholds(ranges, ratios)]
            rounded += len(ways) > 1
            states = [
                (chance, [_states_within(there, here, at, k) for k in range(len(theirs.unary))]) for chance, at in ways
            ]
            assert _least_difference(theirs, mine, states) >= -1e-9 * free
    assert rounded > 0


Ways = Callable[[int, int, int], int]
"""(value, dimension, way) -> in which it lies rounded"""


def _thresholds(ranges: ShareRanges, ratios: Ratios) -> Iterator[tuple[float, Ways]]:
    """(chance, in which ways of the ranges all lie) for every way in which thresholds may fall."""
    costs = ranges.costs
    shares = lambda value, dim, way: ratios.vectors[ratios.of(value, dim, (0,), way)]
    first: dict[Node, tuple[int, int]] = {}
    for v in costs.graph.values:
        for dim in range(len(v.shape)):
            first.setdefault(ranges.root(v.index, dim), (v.index, dim))
    roots = [root for root in ranges.nodes if root in first]
    every: list[list[tuple[float, tuple[int, ...]]]] = []
    for root in roots:
        slow = (float(shares(*first[root], way)[~costs.fastest].sum()) for way in range(2))
        every.append(roundings(ranges.nodes[root], slow))

    for combined in product(*every):
        found = dict(zip(roots, (at for _, at in combined), strict=True))

        def rounded(value: int, dim: int, way: int, found: Mapping[Node, tuple[int, ...]] = found) -> int:
            root = ranges.root(value, dim)
            return found[root][way] if root in found else way_of(ranges, value, dim, shares(value, dim, way))

        yield float(np.prod([chance for chance, _ in combined])), rounded


def roundings(nodes: ShareNodes, slow: Iterable[float]) -> list[tuple[float, tuple[int, ...]]]:
    """(chance, the nodes that these shares become) for every way in which the threshold may fall."""
    places = list[tuple[int, float]]()
    for share in slow:
        k = int(np.searchsorted(nodes.shares, share + 1e-12, side="right")) - 1
        inside = 0 <= k < len(nodes.shares) - 1
        along = (share - nodes.shares[k]) / (nodes.shares[k + 1] - nodes.shares[k]) if inside else 0.0
        places.append((max(k, 0), max(along, 0.0)))
    ends = sorted({0.0, 1.0, *(along for _, along in places)})
    at = [((a + b) / 2, b - a) for a, b in pairwise(ends)]
    return [(chance, tuple(k + (along > t) for k, along in places)) for t, chance in at]


class _Held(MemoryConstraints):
    def __init__(self, builder: ProblemBuilder) -> None:
        super().__init__(builder, at_least=True)

    def held_at(self, op: int) -> list[int]:
        """Values that an op only passes by and that count as their smallest tensor."""
        alive = self._alive(op)
        between = lambda v: v in alive.around and self._between(v, *alive.around[v], 0) is not None
        return [v for v in alive.live_through if not between(v)]


class _ByChoice(_Held):
    """Counts some values at an op alone, each as its smallest tensor. `named`: of those that a choice names, and not of
    those on the way to them: where such a one is held, there is a choice that names it."""

    def __init__(self, builder: ProblemBuilder, op: int, values: list[int], named: bool) -> None:
        super().__init__(builder)
        self._op, self._values, self._named = op, values, named

    def limited(self, limits: Mapping[int, float]) -> Mapping[int, float]:
        return limits

    def _found_at(self, alive: LiveSet, added: int) -> Iterator[tuple[int, Floats, list[Edge]]]:
        assert alive.op == self._op
        st = self.structure
        for value in self._values:
            variable = st.value_variable[value]
            held = self._held(value, False)
            if self._named:
                tensors = ((a.computed, *a.targets) for a in st.choices[variable].options)
                held = np.stack(
                    [np.min([self.tensor_bytes(value, t) for t in some], axis=0) for some in tensors], axis=1
                )
            yield variable, held[:, st.choices[variable].option], []


def _least_difference(more: Problem, less: Problem, states: list[tuple[float, list[Ints]]]) -> float:
    """The least that an assignment costs more than another problem's on the mean, which takes `states` [states] of each
    of its variables in place of each, each list with its chance; inf where there is none."""
    unary = [u.astype(np.float64) for u in more.unary]
    edges, offset = list[Edge](), more.offset - less.offset
    tables = [e.table[np.ix_(e.gu, e.gv)].astype(np.float64) for e in more.edges]
    finite = lambda a: np.where(np.isfinite(a), a, 0.0)
    for chance, mine in states:
        for k, (s, v) in enumerate(zip(mine, less.unary, strict=True)):
            unary[k] = np.where(s < 0, np.inf, unary[k] - chance * finite(v[np.maximum(s, 0)]))
        for k, f in enumerate(less.edges):
            assert (f.u, f.v) == (more.edges[k].u, more.edges[k].v)
            tables[k] = tables[k] - chance * finite(f.table[np.ix_(f.gu[mine[f.u]], f.gv[mine[f.v]])])
    for e, table in zip(more.edges, tables, strict=True):
        least = float(table[np.isfinite(table)].min(initial=0.0))
        offset += least
        edges.append(Edge(e.u, e.v, np.arange(e.gu.size), np.arange(e.gv.size), table - least))
    found = solve(Problem(tuple(unary), tuple(edges), (), offset), tolerance=1e-3, max_nodes=5000)
    return found.cost if found.assignment is not None else np.inf


def _states_within(there: ProblemBuilder, here: RangeBuilder, way_at: Ways, variable: int) -> Ints:
    """Of each state of a variable, its number where its shares lie; -1 where it is none of those that are bounded."""
    graph, a, b = there.graph, there.structure, here.structure

    def moved(value: int, layout: Layout) -> Layout:
        (p,) = layout
        return (p._replace(way=way_at(value, p.dim, p.way)),) if p.is_sharded else layout

    key = lambda triples, option: (triples, None if option is None else (option[0], frozenset(option[1])))
    number = {
        key(s.triples, s.availability and (s.availability.computed, s.availability.targets)): k
        for k, s in enumerate(b.choices[variable].states)
    }
    found: list[int] = []
    for state in a.choices[variable].states:
        triples = option = None
        if state.triples is not None:
            o, (t,) = graph.ops[a.op_variable.index(variable)], state.triples
            tensors = zip((*o.operands, *o.results), (*t.operands, *t.results), strict=True)
            cut = next(((v, p) for v, p in tensors if p.is_sharded and isinstance(v, int)), None)
            triples = (t.along(moved(cut[0], (cut[1],))[0].way if cut else 0),)
        if state.availability is not None:
            value = a.value_variable.index(variable)
            made = moved(value, state.availability.computed)
            # What is made on the way is there too.
            targets = {moved(value, t) for t in there.offer(value, state.availability).tensors} - {made}
            others = {t for t in targets if t[0].is_sharded and t[0].dim != made[0].dim}
            if len({t[0].dim for t in others}) > 1:
                others = {(s,) for s in b.layouts[value].shards if any(s.dim == t[0].dim for t in others)}
            if (R,) in targets:
                # All else is a slice of that.
                targets = others = {(R,)}
            option = made, {t for t in targets if not t[0].is_sharded or t[0].dim == made[0].dim} | others
        found.append(number.get(key(triples, option), -1))
    return np.array(found)
