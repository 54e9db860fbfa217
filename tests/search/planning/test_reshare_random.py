"""Random programs whose classes are cut at random, at random sizes, equal the function; on one mesh axis and on two."""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
import pytest
from assignments import layers
from control_cases import CASES as CONTROL
from control_cases import floats
from lowered_programs import mesh_of, run
from random_programs import RandomProgram, mlp_args, mlp_step
from resharing import reshares

from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.memory_budget import MemoryBudget
from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import trace
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.lower import Lowered, Staged
from hapsynth.running.check import Reference, compare
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.program_cost import conversion_cost, program_cost
from hapsynth.search.memory.profile import MemoryProfile
from hapsynth.search.planning.resharding.atoms import ReshardAtoms
from hapsynth.search.planning.resharding.rewrite import merged, relabelled
from hapsynth.search.sizing.sizer import Sizer
from hapsynth.search.sizing.whole_units import ClassUnits

AXES = {"4": (("hap", 4),), "2x2": (("a", 2), ("b", 2))}


def model(graph: Graph, axes: tuple[tuple[str, int], ...], *, exact: bool = False) -> CostModel:
    cluster = Cluster.from_dict(
        {
            "name": "cut",
            "axes": dict(axes),
            "network": {"bandwidth": "10 GB/s", "latency": "1 us"},
            "devices": [{"kind": "V100-16GB", "count": 4}],
        }
    )
    return CostModel(graph, cluster, FactorTable(graph), axes, MemoryBudget.of(cluster, exact=exact))


def cut_at_random(maker: RandomProgram, program: Program, costs: CostModel, rng: random.Random) -> Program:
    """Some classes in parts, and parts in parts again."""
    for _ in range(4):
        sizes = maker.sizes(program, "skewed")
        known = [c for c in sizes.classes.all if all(len(m[2]) == 1 for m in c.members)]
        if not known:
            break
        parts = ReshardAtoms(program, sizes, costs, max(rng.choices(known, k=2), key=lambda c: len(c.members)).index)
        program = relabelled(parts, np.array([rng.randrange(3) for _ in range(parts.count)], dtype=np.int64))
    return program


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("axes", AXES)
def test_a_step_cut_at_random(axes: str, seed: int) -> None:
    found = assert_equal(mlp_step, mlp_args(), AXES[axes], "switch", seed)
    assert found or axes == "2x2"


@pytest.mark.few(1)
@pytest.mark.parametrize(("axes", "seed"), [("4", 0), ("2x2", 1)])
def test_a_small_step_cut_at_random_in_stages(axes: str, seed: int) -> None:
    """In staged form those of the step above are of hundreds of stages, each compiled for every shape. Sizes of both
    modes."""
    assert assert_equal(layers, ({"a": floats(6, 10), "b": floats(10, 7)}, floats(9, 6)), AXES[axes], "staged", seed)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["scanned layers", "nested", "while", "cond", "carries on the outside"])
@pytest.mark.parametrize("axes", AXES)
def test_loops_and_branches_are_not_cut_inside(name: str, axes: str) -> None:
    fn, args = CONTROL[name]
    assert_equal(fn, args, AXES[axes], "switch", 1)


def assert_equal(fn: Any, args: Any, axes: tuple[tuple[str, int], ...], form: str, seed: int) -> int:
    """How many reshares there were."""
    traced = trace(fn, args)
    rng, graph = random.Random(seed), traced.graph
    maker, costs = RandomProgram(graph, axes, rng), model(graph, axes)
    program = cut_at_random(maker, maker.build(), costs, rng)
    sizes = maker.sizes(program, "zeros" if seed % 2 else "skewed")
    check(graph, program, sizes)
    assert all(i.region == 0 for i in reshares(program))
    made = (Lowered if form == "switch" else Staged)(graph, program, sizes, mesh_of(4))
    leaves = jax.tree.leaves(args)
    # Sums that nearly cancel agree to their noise.
    got = run_form(made, args, form)
    errors = compare(Reference(fn, traced, leaves, jax.devices()[0]), leaves, got, [1e-4] * len(got))
    assert max(j.error for j in errors) <= 1e-4, dict(zip(traced.out_paths, errors))
    return len(reshares(program))


def run_form(made: Any, args: Any, form: str) -> list[Any]:
    if form == "switch":
        return run(made, args)
    inputs = [s.put(x, copy=True) for s, x in zip(made.inputs, jax.tree.leaves(args), strict=True)]
    return [x if s is None else s.fetch(x) for s, x in zip(made.outputs, made(inputs), strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_costs_add_up_and_equal_parts_are_merged(seed: int) -> None:
    graph = trace(mlp_step, mlp_args()).graph
    rng = random.Random(seed)
    maker, costs = RandomProgram(graph, AXES["4"], rng), model(graph, AXES["4"])
    whole = maker.build()
    program = cut_at_random(maker, whole, costs, rng)
    one, other = (maker.sizes(program, "skewed") for _ in range(2))
    sizer = Sizer(program, one.classes, costs)
    # What sizes decide, as arrays, is what the instructions cost.
    apart = program_cost(program, one, costs) - program_cost(program, other, costs)
    assert apart == pytest.approx(sizer.variable_cost(one) - sizer.variable_cost(other), abs=1e-12)
    for c in range(len(one.shares)):
        moved = Sizes(graph, one.classes, (*one.shares[:c], other.shares[c], *one.shares[c + 1 :]))
        units = ClassUnits(sizer.class_costs, c, one)
        if units.decides:
            seconds = units.seconds(np.array([one.shares[c], other.shares[c]]))
            due = sizer.variable_cost(moved) - sizer.variable_cost(one)
            assert seconds[1] - seconds[0] == pytest.approx(due, abs=1e-12)
    assert all(conversion_cost(costs, one, i)[0] >= 0 for i in reshares(program))
    # Where all is on one device every reshare is between equal shards, and what is left has the classes of before.
    lone = Sizes(graph, one.classes, tuple((c.units, 0, 0, 0) for c in one.classes.all))
    again, sizes = merged(graph, program, lone, costs.table)
    check(graph, again, sizes)
    assert not reshares(again)
    assert len(sizes.shares) == len(Classes.build(graph, whole).all)
    assert program_cost(again, sizes, costs) == pytest.approx(program_cost(program, lone, costs))


def test_exact_memory_counts_what_is_sent() -> None:
    graph = trace(mlp_step, mlp_args()).graph
    rng = random.Random(0)
    maker, costs = RandomProgram(graph, AXES["4"], rng), model(graph, AXES["4"], exact=True)
    program = cut_at_random(maker, maker.build(), costs, rng)
    sizes = maker.sizes(program, "skewed")
    assert MemoryProfile(program, sizes.classes, costs).peak(sizes) > 0
