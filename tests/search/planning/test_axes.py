"""Programs of several mesh axes: what is lowered, and plans that run."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from control_cases import CASES as CONTROL
from lowered_programs import SEEDS, assert_close, random_lowered, run
from lowering_options import SWITCHED
from random_programs import RandomProgram, floats, mlp_args, mlp_step
from slow_devices import SPEEDS, first_devices, thin_cluster
from thoroughness import THOROUGH
from two_axes import AXES, mesh, product, sized
from unflatten import unflattened

import hapsynth
from hapsynth.cli.main import main
from hapsynth.cluster.cluster import Cluster, Link
from hapsynth.graph.ir import Op
from hapsynth.graph.trace import trace
from hapsynth.instructions.factors import cutting
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Compute
from hapsynth.lower import Lowered
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.plan import Plan
from hapsynth.running.check import relative_error
from hapsynth.running.plan_file import PlanError
from hapsynth.search.result import Result

EMITTED = r"stablehlo\.(all_\w+|reduce_scatter|case|pad)\b(?:.*replica_groups = (?:dense<(.*?)>|.*?name = \"(\w+)\"))?"
GROUPS = {"[[0, 1, 2, 3], [4, 5, 6, 7]]": "b", "[[0, 4], [1, 5], [2, 6], [3, 7]]": "a"}
"""The devices that differ along one axis only; from JAX 0.12 on the axis itself is written."""


def test_a_reduction_over_two_axes_is_three_collectives() -> None:
    traced, program = product()
    lowered = Lowered(traced.graph, program, sized(traced, program, (2,) * 8, (2,) * 4), mesh(2, 4))
    found = re.findall(EMITTED, lowered.lower().as_text())
    steps = [(name, GROUPS.get(groups, groups) or axis) for name, groups, axis in found]
    assert steps == [("reduce_scatter", "b"), ("all_reduce", "a"), ("all_gather", "b")]
    x, y = floats(8, 16), floats(16, 24)
    assert_close(run(lowered, (x, y)), x @ y)


ON_TWO: dict[str, tuple[strategies.Step, strategies.Arguments]] = {
    "perceptron": (strategies.mlp, strategies.mlp_args(batch=512, width=256, hidden=1024)),
    "experts": (strategies.experts, strategies.experts_args(groups=8, tokens=64, width=256, count=4, hidden=1024)),
}


# Of experts a plan takes ten times as long.
@pytest.mark.parametrize("name", ON_TWO if THOROUGH else ["perceptron"])
@pytest.mark.parametrize(("speeds", "bandwidth"), [([0.1] * 8, 1e9), ([0.15] * 4 + [0.1] * 4, 1e11)])
def test_two_axes_take_no_longer_than_one(speeds: list[float], bandwidth: float, name: str) -> None:
    """Two hosts of four as rows of a mesh, where links are what a step waits for and where computing is: each axis cuts
    something of its own, and what one axis over all can do the two do after one another."""
    links = Link(bandwidth, 1e-6), Link(8 * bandwidth, 1e-6)
    hosts = replace(strategies.gpus(speeds), hosts=(0,) * 4 + (1,) * 4, network=links[0], intra=links[1])
    on = lambda *axes: hapsynth.synthesize(*ON_TWO[name], replace(hosts, axes=axes), leave_out=False)
    flat, grid = on(("all", 8)), on(("hosts", 2), ("within", 4))
    assert grid.gap <= 1e-3
    assert grid.cost <= flat.cost


def test_its_shares_may_be_of_any_lengths() -> None:
    """Rows that no two devices have alike, terms of which some devices have none."""
    traced, program = product()
    sizes = sized(traced, program, (1, 0, 4, 2, 5, 3, 1, 0), (3, 0, 4, 1))
    x, y = floats(8, 16), floats(16, 24)
    assert_close(run(Lowered(traced.graph, program, sizes, mesh(8)), (x, y)), x @ y)


class Nested(RandomProgram):
    """Both axes cut one factor of every op that has one."""

    def choose(self, op: Op) -> Compute:
        joint = self.table[op.index].joint(2)
        nested = [ts for ts in joint if any(len(axes) == 2 for axes in cutting(ts).values())]
        return Compute(op.index, self.rng.choice(nested)) if nested else super().choose(op)


def by_place(key: Any, table: Any, i: Any) -> Any:
    """What a shard computes depends on where in the whole it lies."""
    return jnp.arange(12) * 2, jax.random.bits(key, (12,)), table[i], table.at[i].add(1.0)


@pytest.mark.parametrize("seed", range(3))
def test_shards_of_shards_know_their_place(seed: int) -> None:
    args = (jax.random.key(1), floats(12, 3), np.array([3, 0, 11, 7, 7, 10], np.int32))
    traced = trace(by_place, args)
    maker = Nested(traced.graph, AXES, random.Random(seed))
    program = maker.build()
    sizes = maker.sizes(program, "skewed")
    check(traced.graph, program, sizes)
    assert_close(run(Lowered(traced.graph, program, sizes, mesh(8)), args), jax.jit(by_place)(*args))


# ---- what is emitted

COLLECTIVES = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all"}


def equations(jaxpr: Any, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """The primitives of a jaxpr, and whether each stands in a branch."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        yield name, inside
        for param in eqn.params.values():
            for sub in param if isinstance(param, (tuple, list)) else (param,):
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    yield from equations(sub, inside or name == "cond")


def emitted(lowered: Any) -> list[tuple[str, bool]]:
    with jax.set_mesh(lowered.mesh):
        structs = [s.struct() for s in (*lowered.inputs, *lowered.constants)]
        return list(equations(lowered.function.trace(*structs).jaxpr.jaxpr))


def powers_of_two(x: Any, w: Any) -> Any:
    y = jnp.tanh(x @ w)
    return y.sum(0), jax.grad(lambda w: ((x @ w) ** 2).sum())(w), y.reshape(8, 8, 8, 8).transpose(2, 0, 1, 3)


@pytest.mark.parametrize("seed", range(4))
def test_even_shards_take_neither_switch_nor_padding(seed: int) -> None:
    traced = trace(powers_of_two, (floats(64, 16), floats(16, 64)))
    maker = RandomProgram(traced.graph, AXES, random.Random(seed))
    program = maker.build()
    sizes = maker.sizes(program, "equal")
    assert all(len(set(shares)) == 1 for shares in sizes.shares)
    names = {name for name, _ in emitted(Lowered(traced.graph, program, sizes, mesh(2, 4)))}
    assert names & COLLECTIVES
    assert names.isdisjoint({"cond", "pad"})


def test_collectives_stand_outside_of_switches() -> None:
    """A branch is taken by some devices only: a collective in it would wait for the others."""
    traced = trace(mlp_step, mlp_args())
    found: set[tuple[str, bool]] = set()
    for seed in range(3 if THOROUGH else 1):
        found.update(emitted(random_lowered(traced, AXES, seed, "zeros", SWITCHED)))
    assert ("cond", False) in found
    assert ("dot_general", True) in found
    assert {inside for name, inside in found if name in COLLECTIVES} == {False}


TABLES: dict[str, tuple[tuple[int, ...], list[int], bool]] = {
    "the same everywhere": ((0, 1), [3] * 6, True),
    "along one axis": ((1,), [0, 5, 10], True),
    "in steps of both": ((0, 1), [1, 3, 5, 8, 10, 12], True),
    "in steps of both, the second axis first": ((1, 0), [0, 6, 1, 7, 2, 8], True),
    "any": ((0, 1), [0, 4, 4, 9, 1, 2], False),
    "any, the second axis first": ((1, 0), [0, 4, 4, 9, 1, 2], False),
}


@pytest.mark.parametrize(("axes", "table", "computed"), TABLES.values(), ids=TABLES)
def test_a_device_looks_up_its_entry(axes: tuple[int, ...], table: list[int], computed: bool) -> None:
    lengths = (2, 3)
    devices = tuple(np.ndindex(*lengths))
    look = lambda i, j: MeshPosition(lengths, devices, (i, j)).lookup(axes, table)
    for coords in devices:
        at = np.ravel_multi_index([coords[a] for a in axes], [lengths[a] for a in axes])
        assert look(*map(jnp.int32, coords)) == table[at]
        alone = MeshPosition(lengths, (coords,), (None, None))
        assert alone.lookup(axes, table) == table[at]
    names = {name for name, _ in equations(jax.make_jaxpr(look)(jnp.int32(0), jnp.int32(0)).jaxpr)}
    assert names.isdisjoint({"dynamic_slice", "gather"}) == computed


# ---- plans


STEP = """
import jax.numpy as jnp
import numpy as np

X, W = (np.linspace(-1, 1, m * n, dtype=np.float32).reshape(m, n) for m, n in ((9, 6), (6, 10)))


def step(w, x):
    g = x.T @ jnp.tanh(x @ w)
    return w - 0.1 * g, (g * g).sum()


def target():
    return step, (W, X)
"""
MODEL: dict[str, Any] = {}
exec(STEP, MODEL)
step, ARGS = MODEL["target"]()


def planned(fn: Any, args: Any, axes: Any = AXES, mode: str = "zeros", seed: int = 0) -> Plan:
    traced = trace(fn, args)
    maker = RandomProgram(traced.graph, axes, random.Random(seed))
    program = maker.build()
    sizes = maker.sizes(program, mode)
    check(traced.graph, program, sizes)
    inf = float("inf")
    result = Result(program, sizes, 2.0, 1.5, 1.0, "gap", 7, (1e6,) * 8, (inf,) * 8, (), {"total_s": 1.0})
    return Plan(traced, result, Cluster.from_mesh(mesh(8)), mesh(8), fn)


def same(plan: Plan, got: Any, want: Any) -> None:
    assert_close(jax.tree.leaves(plan.unshard(got)), want)


def test_a_plan_runs_and_is_saved(tmp_path: Path) -> None:
    first = planned(step, ARGS, seed=13)
    assert any("/1" in layout for layout in first.layouts.values()), first.layouts
    first.save(tmp_path / "plan.json")
    plan = hapsynth.load(tmp_path / "plan.json", step, ARGS, mesh(2, 4))
    assert plan.program.text(plan.traced.graph) == first.program.text(first.traced.graph)
    assert plan.sizes.shares == first.sizes.shares
    assert plan.ratios == first.ratios
    assert plan.check(*ARGS).ok
    w, x = plan.shard(*ARGS)
    assert isinstance(w, hapsynth.ShardedArray)
    assert len(w.shard_shapes) == 8
    same(plan, (w, x), ARGS)
    same(plan, plan.map(lambda v: v * 2, w), ARGS[0] * 2)
    want = ARGS[0]
    for _ in range(2):
        before = w
        w, size = plan(w, x)
        want, want_size = jax.jit(step)(want, ARGS[1])
        assert before.is_deleted()
        same(plan, (w, size), (want, want_size))
    assert plan.lowered.traces == 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("/1", ""),
        lambda text: text.replace("S(0)/1", "S(0)/7"),
        lambda text: text.replace('"a",\n    2', '"a",\n    4'),
    ],
    ids=["without orders", "an order that is none", "another mesh"],
)
def test_an_edited_plan_file(tmp_path: Path, edit: Callable[[str], str]) -> None:
    path = tmp_path / "plan.json"
    planned(step, ARGS, seed=13).save(path)
    text = path.read_text()
    assert edit(text) != text
    path.write_text(edit(text))
    with pytest.raises(PlanError, match=r"plan\.json"):
        hapsynth.load(path, step, ARGS)


def test_the_command_line_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(STEP)
    planned(step, ARGS, mode="skewed").save(tmp_path / "plan.json")
    status = main(["run", str(tmp_path / "model.py"), "--plan", str(tmp_path / "plan.json"), "--steps", "2"])
    said = capsys.readouterr()
    assert (status, "check passed" in said.out) == (0, True), said
    assert "ran 2 steps on 8 devices" in said.out


def test_shares_are_shown_by_device() -> None:
    traced, program = product()
    sizes = sized(traced, program, (1, 0, 4, 2, 5, 3, 1, 0), (3, 0, 4, 1))
    rows = next(c for c in sizes.classes.all if c.axes == (1,))
    assert sizes.of_devices(rows.index) == (3, 0, 4, 1) * 2
    terms = next(c for c in sizes.classes.all if c.axes == (0, 1))
    assert sizes.of_devices(terms.index) == (1, 0, 4, 2, 5, 3, 1, 0)


def test_the_first_device_shows_values(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(x: Any) -> Any:
        jax.debug.print("shown {}", x.sum())
        return x * 2

    x = np.ones((8, 8), np.float32)
    plan = planned(fn, (x,))
    same(plan, plan(x), x * 2)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("shown 64.0") == 1


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["scanned layers", "recurrent", "while whose test communicates", "switch"])
def test_control_flow(name: str) -> None:
    """Plans of one axis, their shards cut again by a second one."""
    fn, args = CONTROL[name]
    cluster, devices = thin_cluster(SPEEDS["3:1"]), first_devices(4)
    flat = hapsynth.synthesize(fn, args, devices, cluster=cluster, leave_out=False)
    program, sizes = unflattened(flat.traced.graph, flat.program, flat.sizes, 2)
    check(flat.traced.graph, program, sizes)
    plan = Plan(flat.traced, replace(flat.result, program=program, sizes=sizes), cluster, devices, fn)
    got, want = plan(*args), jax.jit(fn)(*args)
    for a, b in zip(jax.tree.leaves(plan.unshard(got)), jax.tree.leaves(want), strict=True):
        assert relative_error(np.asarray(a), np.asarray(b)) <= 1e-5


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["nested", "while", "switch", "scanned layers"])
def test_random_programs_with_loops_and_branches(name: str) -> None:
    fn, args = CONTROL[name]
    traced = trace(fn, args)
    want = [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*args))]
    for seed in SEEDS:
        got = run(random_lowered(traced, AXES, seed, "zeros"), args)
        for a, b in zip(got, want, strict=True):
            assert relative_error(a, b) <= 1e-5
