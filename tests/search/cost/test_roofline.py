"""How long devices take over ops: one formula for every use of it, and each kind of device in its own tiles."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graphs import cluster, device
from measured_ops import struct

from hapsynth.cluster.cluster import Cluster, DeviceKind, Link
from hapsynth.cluster.curves import Curve
from hapsynth.graph.trace import trace
from hapsynth.instructions.layout import P
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.search.cost.device_speed import DeviceFigures
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.cost.roofline import Roofline
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.choice_space import ChoiceSpace
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.task import Task

CURVE = Curve(((1e8, 3e-5), (1e10, 2e-3)))


def kinds() -> list[DeviceKind]:
    fast, slow = device("fast", 3.0), device("slow", 1.0)
    return [fast, replace(slow, measured={"matmul": {"float32": CURVE}})]


def works(rng: np.random.Generator, count: int, cuts: int) -> list[Work]:
    """All that there is: with and without lanes, FLOPs, divided bytes and others, launches."""
    found: list[Work] = []
    for n in range(count):
        moved = {(): 1e5, (0,): float(rng.integers(10**7)), tuple(range(cuts)): float(rng.integers(10**8))}
        lanes = tuple(rng.choice([0, 100, 4096], cuts).tolist())
        flops = float(rng.integers(10**10)) * (n % 3 > 0)
        name = ("matmul", "elementwise")[n % 2]
        found.append(Work(flops, tuple(sorted(moved.items())), n % 2, "float32", lanes, (0,), name))
    return found


@pytest.mark.parametrize("cuts", [1, 2])
def test_every_use_is_of_one_formula(cuts: int) -> None:
    rng = np.random.default_rng(cuts)
    figures, mine = DeviceFigures(kinds()), works(rng, 12, cuts)
    of, fractions = np.array([0, 1, 1, 0, 1]), list(rng.dirichlet(np.ones(5), cuts))
    fractions[0][3] = 0.0
    plain, scaled = (Roofline(figures, mine, scaled=scaled) for scaled in (False, True))
    seconds = plain.seconds(of, fractions)
    assert (seconds[:, 3] == 0).all()
    np.testing.assert_allclose(scaled.seconds(of, fractions), seconds, rtol=1e-12)
    # Work by work as all together, and as the parts say.
    one_by_one = np.concatenate([Roofline(figures, [work]).seconds(of, fractions) for work in mine])
    np.testing.assert_array_equal(one_by_one, seconds)
    flops, nbytes = plain.loads(of, fractions)
    for row, work in enumerate(mine):
        computing = figures.speeds(work.op_class, "float32").at(of).seconds(flops[row])
        by_hand = work.launches * figures.overhead[of] + np.maximum(computing, nbytes[row] / figures.bandwidth[of])
        np.testing.assert_allclose(seconds[row], np.where(fractions[0] > 0, by_hand, 0.0), rtol=1e-12)
    # Its line through the share held, without tiles.
    held = np.where(fractions[0] > 0, fractions[0], 0.2)
    fixed, computing, moving, besides = plain.line(of, 0, [held, *fractions[1:]], held)
    line = fixed + np.maximum(computing * held, moving * held + besides)
    np.testing.assert_allclose(line, plain.seconds(of, [held, *fractions[1:]], whole_tiles=False), rtol=1e-12)
    # Nothing takes less than the least.
    whole = plain.seconds(np.array([0, 1]), [np.ones(2)] * cuts)
    assert (plain.least_alone() <= whole * (1 + 1e-12)).all()
    assert (plain.least_shared(np.array([1.0, 1.0])) <= whole.min(axis=1)).all()


def test_what_is_done_within_some_time_takes_no_longer() -> None:
    rng = np.random.default_rng(0)
    figures, mine = DeviceFigures(kinds()), works(rng, 12, 1)
    roofline, every = Roofline(figures, mine), np.array([0, 1])
    whole = roofline.seconds(every, [np.ones(2)])
    for part in (0.3, 0.8, 1.0):
        share = roofline.within(part * whole.min(axis=1))
        took = roofline.seconds(every, [np.clip(share, 0.0, 1.0)])
        allowed = np.broadcast_to(part * whole.min(axis=1, keepdims=True), took.shape)
        assert (share > 0).any()
        assert (took[share > 0] <= allowed[share > 0] * (1 + 1e-9)).all()


def mixed(tile: int) -> Cluster:
    """Two kinds that differ in their tiles alone, and compute rather than read."""
    usual, other = (replace(device(name, 1.0), bandwidth=1e14) for name in ("usual", "other"))
    other = replace(other, granularity=replace(other.granularity, tile=tile))
    return Cluster("mixed", (usual, other), (0, 1), Link(1e10, 1e-6))


def model(fn, args, cluster: Cluster) -> CostModel:
    graph = trace(fn, args).graph
    return CostModel(graph, cluster, FactorTable(graph))


def test_each_kind_works_in_its_own_tiles() -> None:
    costs = model(jnp.matmul, (struct(64, 4096), struct(4096, 4096)), mixed(tile=1))
    rows = next(t for t in costs.table[0].joint(1) if t[0].operands[0].is_sharded and t[0].operands[0].dim == 0)
    times = costs.device_times(costs.work(0, rows), [np.array([4 / 64, 4 / 64])])
    assert times[0] > 3 * times[1]
    assert costs.tiles_along((0,)).tolist() == [16, 1]
    # As batched, and as the ideal shares have it.
    assert costs.times([(costs.work(0, rows), [np.array([4 / 64, 4 / 64])])])[0] == times[0]
    assert costs.ideal_time(costs.work(0, rows)) <= times[0] * 16


def test_shards_are_aligned_to_the_tiles_of_their_device() -> None:
    """No way to deal the rows out is cheaper than the one that was found, in tiles of 128 on one device and of 8 on the
    other."""
    fast, slow = device("fast", 5.0), device("slow", 1.0)
    fast = replace(fast, granularity=replace(fast.granularity, tile=128))
    slow = replace(slow, granularity=replace(slow.granularity, tile=8))
    cluster = Cluster("tiles", (fast, slow), (0, 1), Link(1e11, 1e-7))
    graph = trace(jnp.matmul, (struct(1000, 2048), struct(2048, 2048))).graph
    task = Task(graph, cluster)
    result = Planner(task).run()
    (cls,) = result.sizes.classes.all
    assert cls.units == 1000
    costs = [
        program_cost(result.program, Sizes(graph, result.sizes.classes, ((k, 1000 - k),)), task.costs)
        for k in range(1001)
    ]
    assert result.cost_s == pytest.approx(min(costs), rel=1e-12)
    # Tiles of 16 on both would have it otherwise.
    other = Planner(task.on(replace(cluster, devices=(device("fast", 5.0), device("slow", 1.0))))).run()
    assert other.sizes.shares != result.sizes.shares


def test_what_is_as_many_bytes_in_fewer_elements_is_converted_at_a_cost_of_its_own() -> None:
    """Of what transposes read, every element is a line of memory."""

    def fn(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (a @ b).T, (c @ d).T

    floats = lambda *shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
    wide = floats(256, 64, dtype=jnp.float32), floats(64, 512, dtype=jnp.float32)
    narrow = floats(512, 64, dtype=jnp.bfloat16), floats(64, 512, dtype=jnp.bfloat16)
    graph = trace(fn, (*wide, *narrow)).graph
    costs = CostModel(graph, cluster([1.0, 1.0]), FactorTable(graph))
    one, other = (op.results[0] for op in graph.ops if op.name == "dot_general")
    assert graph.values[one].nbytes == graph.values[other].nbytes
    assert costs.turning(one, (P("sum"),), 0) != costs.turning(other, (P("sum"),), 0)
    builder = ProblemBuilder(ChoiceSpace(graph, costs.table), costs, None)
    assert builder.conversions(one) is not builder.conversions(other)
