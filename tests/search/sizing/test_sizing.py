"""Sizes: the linear program and the rounding against every way to cut."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cp_sat import exact_sizes
from graphs import cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from sized_steps import step, three_layers

from hapsynth.graph.trace import trace
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.memory.profile import peak
from hapsynth.search.planning.baselines import Baselines
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.sizing.ratios import round_shares
from hapsynth.search.sizing.sizer import Sizer


def sizer(speeds, rows, width=512, **link):
    """The sizer of a data-parallel step over a batch of `rows`."""
    struct = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    graph = trace(step, (struct(width, width), struct(rows, width))).graph
    task = Task(graph, cluster(speeds, **link))
    program = Baselines(task).all()["data_parallel"].program
    classes = Classes.build(graph, program, task.factors)
    return Sizer(program, classes, task.costs), program


def within(found, limit):
    """The sizer of the same program where each device has `limit` bytes."""
    task = Task(found.graph, found.costs.cluster, PlanningOptions(memory_limit=limit))
    return Sizer(found.program, found.classes, task.costs)


@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0], [3.0, 1.0, 1.0], [5.0, 2.0, 1.0], [1.0, 1.0, 0.01]])
@pytest.mark.parametrize("rows", [7, 12])
def test_sizes_are_the_best_of_all(speeds, rows):
    """Units of many rows each, so that every way to cut can be tried."""
    found, program = sizer(speeds, rows)
    assert [c.units for c in found.classes.all] == [rows]
    best = np.inf
    for cut in product(range(rows + 1), repeat=len(speeds)):
        if sum(cut) == rows:
            sizes = Sizes(found.graph, found.classes, (cut,))
            best = min(best, program_cost(program, sizes, found.costs))
    sizes = found.best(np.full(len(speeds), 1 / len(speeds)))
    assert program_cost(program, sizes, found.costs) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(
    ("system", "speeds", "widths", "rows", "bandwidth", "limited"),
    [
        # Two devices of a kind are the slowest: one unit of one of them changes nothing.
        ("data_parallel", [0.5, 0.5, 2.0, 2.0, 1.0], (7, 5, 11), 34, 1e10, False),
        ("data_parallel", [0.5, 0.5, 2.0, 2.0, 1.0], (7, 5, 11), 34, 1e10, True),
        # Several classes share the memory.
        ("zero3", [0.5, 5.0, 0.01], (6, 10, 33), 39, 1e8, True),
        ("zero3", [0.5, 5.0, 0.01, 0.5, 5.0], (34, 12, 6), 17, 1e8, True),
        ("tensor_parallel", [3.0, 1.0, 2.0], (9, 20, 12), 16, 1e10, False),
    ],
)
def test_sizes_are_as_good_as_cp_sat_proves(system, speeds, widths, rows, bandwidth, limited):
    struct = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    a, b, c = widths
    weights = {"a": struct(a, b), "b": struct(b, c), "c": struct(c, 7)}
    graph = trace(three_layers, (weights, struct(rows, a))).graph
    task = Task(graph, cluster(speeds, bandwidth=bandwidth, latency=1e-9))
    program = Baselines(task).all([system])[system].program
    found = Sizer(program, Classes.build(graph, program, task.factors), task.costs)
    even = np.full(len(speeds), 1.0 / len(speeds))
    sizes, limit = found.best(even), np.inf
    if limited:
        limit = (found.memory.peak(sizes) + found.memory.peak(found.fixed(even))) / 2
        assert limit < found.memory.peak(sizes)
        found = within(found, limit)
        sizes = found.best(even)
        assert found.memory.peak(sizes) <= limit
    exact = exact_sizes(found, sizes, limit)
    assert exact is not None
    assert found.variable_cost(sizes) == pytest.approx(found.variable_cost(exact), rel=1e-6)
    # No whole units, these least of all, are below the bound, and it is no empty one.
    bound = found.bound(sizes)
    assert 0.85 * found.variable_cost(exact) <= bound <= found.variable_cost(exact) * (1 + 1e-9)


def test_the_bound_is_met_where_units_are_many():
    found, program = sizer([4.0, 2.0, 1.0, 1.0], 65536, width=2048)
    sizes = found.best(np.full(4, 0.25))
    assert found.bound(sizes) == pytest.approx(found.variable_cost(sizes), rel=1e-3)
    even = found.fixed(np.ones(4))
    assert found.bound(even) == pytest.approx(found.bound(sizes))
    assert found.bound(even) < 0.75 * found.variable_cost(even)
    assert program_cost(program, even, found.costs) > program_cost(program, sizes, found.costs)


def test_variable_cost_differs_from_the_program_by_a_constant():
    found, program = sizer([3.0, 1.0], 4096)
    rest = set()
    for first in (0, 1000, 2048, 4096):
        sizes = Sizes(found.graph, found.classes, ((first, 4096 - first),))
        rest.add(round(program_cost(program, sizes, found.costs) - found.variable_cost(sizes), 12))
    assert len(rest) == 1


def test_work_goes_by_speed_when_it_is_all_compute():
    found, _ = sizer([4.0, 2.0, 1.0, 1.0], 65536, width=2048)
    (shares,) = found.best(np.full(4, 0.25)).shares
    np.testing.assert_allclose(np.array(shares) / 65536, [0.5, 0.25, 0.125, 0.125], rtol=0.02)


def test_memory_is_never_broken_where_it_can_be_kept():
    found, program = sizer([8.0, 1.0], 65536, width=256)
    free = found.best(np.array([0.5, 0.5]))
    even = found.fixed(np.array([0.5, 0.5]))
    limit = (peak(program, free, found.costs) + peak(program, even, found.costs)) / 2
    kept = within(found, limit).best(np.array([0.5, 0.5]))
    assert peak(program, free, found.costs) > limit
    assert peak(program, kept, found.costs) <= limit
    assert kept.shares[0][0] > kept.shares[0][1]


def test_what_costs_alike_and_holds_unlike_bytes_has_ratios_of_its_own_where_memory_is_full():
    """Three tensors of the one are held at once, and one of the other: the bound was that of equal ratios."""

    def fn(x, y):
        later = jnp.sort(y, axis=1), jnp.cumsum(y, axis=1)
        return *[a.sum() for a in later], jnp.sort(x, axis=1).sum(), jnp.cumsum(x, axis=1).sum()

    graph = trace(fn, [jax.ShapeDtypeStruct((64, 1024), jnp.float32)] * 2).graph
    task = Task(graph, cluster([3.0, 1.0]))
    program = Baselines(task).all(["data_parallel"])["data_parallel"].program
    found = Sizer(program, Classes.build(graph, program, task.factors), task.costs)
    assert found.class_costs.alike(0, ()) == found.class_costs.alike(1, ())
    alike = Sizes(graph, found.classes, ((40, 24),) * 2)
    limit = found.memory.peak(alike)
    found = within(found, limit)
    best = found.best(np.full(2, 0.5))
    assert found.memory.peak(best) <= limit
    assert 0.95 * found.variable_cost(best) < found.bound(alike) <= found.variable_cost(best)
    # Where the busiest device counts alone, the slow one has even less to do.
    balanced = within(found, limit + 4096).balanced(alike, {0: 0.0, 1: 0.0}, 1.0)
    assert sum(slow for _, slow in balanced.shares) < sum(slow for _, slow in best.shares)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9), st.integers(0, 1000))
@settings(max_examples=200)
def test_rounding_keeps_the_sum_and_stays_near(weights, units):
    vector = np.array(weights) + 1e-9
    vector /= vector.sum()
    shares = round_shares(vector, units)
    assert sum(shares) == units
    assert min(shares) >= 0
    assert np.all(np.abs(np.array(shares) - vector * units) < 1 + 1e-6)
