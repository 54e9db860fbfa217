"""Updates that one device runs for all: where the search takes them, and what becomes of them. Every threshold is
derived in its test."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from exported import module
from graphs import device
from rich.console import Console
from slow_devices import first_devices

import hapsynth
from hapsynth.cluster.cluster import Cluster, Link
from hapsynth.cluster.curves import Curve
from hapsynth.graph.trace import trace
from hapsynth.instructions.program.program import Compute
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.plan import Form
from hapsynth.report.cost_breakdown import Sending, cost_lines, print_costs
from hapsynth.search.cost.model import Floats
from hapsynth.search.formulation.choice_space import ChoiceSpace
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.planning.task import Task
from hapsynth.search.sizing.ratios import Ratios
from hapsynth.search.solver import solve

N = 8
"""Devices."""
ROWS = 4096
SIZE = 4.0 * ROWS
"""Bytes of the weights."""
PACE = 1e9
"""Bytes per second over the network."""
BATCH = np.linspace(-1, 1, 512 * ROWS, dtype=np.float32).reshape(512, ROWS)
WEIGHTS = np.linspace(1, 2, ROWS, dtype=np.float32)


def step(weights: jax.Array, x: jax.Array) -> jax.Array:
    """A step whose gradient is a sum over the batch. To bring the weights forward moves three times their bytes: reads
    them and the gradient, and writes them."""
    return weights - 0.001 * jax.grad(lambda w: jnp.square(x @ w).sum())(weights)


def cluster_of(fast: float, slow: float, latency: float, first: int = 0) -> Cluster:
    """One device of `fast` bytes per second, the others of `slow`, each in a host of its own."""
    of = lambda name, pace: replace(device(name, 1.0), overhead=1e-12, bandwidth=pace)
    devices = tuple(of("fast", fast) if d == first else of("slow", slow) for d in range(N))
    return Cluster("c", devices, tuple(range(N)), Link(PACE, latency))


def planned(cluster: Cluster, **options: Any) -> hapsynth.Plan:
    """The batch cut evenly."""
    asked: dict[str, Any] = {"fixed": {"[1]": "S(0)"}, "leave_out": False, "ratios": [1 / N] * N, **options}
    return hapsynth.synthesize(step, (WEIGHTS, BATCH), first_devices(N), cluster=cluster, **asked)


OWNER = {"reduce": 1, "broadcast": 1}
CUT = {"reduce_scatter": 1, "all_gather": 1}
ALL = {"all_reduce": 1}


def by_latency(factor: float) -> Cluster:
    """Reduce-scatter and all-gather wait 2 x 8 messages for the 2 x (1 + 3) of an owner, and send 2 x 7/8 of the tensor
    for 2 x 3; each device brings forward an eighth where the owner, fast enough, does all of it in no time."""
    slow = 3e8
    flip = ((6 - 1.75) * SIZE / PACE - 3 * SIZE / N / slow) / 8
    return cluster_of(1e13, slow, factor * flip)


def by_link(factor: float) -> Cluster:
    """The same, by how fast the network is at a latency of 10 us."""
    slow, latency = 3e8, 1e-5
    pace = 4.25 * SIZE / (8 * latency + 3 * SIZE / N / slow)
    return replace(cluster_of(1e13, slow, latency), network=Link(factor * pace, latency))


def by_rate(factor: float) -> Cluster:
    """A message takes a millisecond, so none are to spare: up a tree and down again are 1 + 2 x 3 of them and twice the
    tensor, an owner's are one more and four tensors more. All but the fast device take that over the update."""
    latency = 1e-3
    slow = 3 * SIZE / (latency + 4 * SIZE / PACE)
    return cluster_of(1e13, slow / factor, latency)


@pytest.mark.parametrize(("setting", "otherwise"), [(by_latency, CUT), (by_link, CUT), (by_rate, ALL)])
def test_the_search_changes_at_the_predicted_ratio(setting: Any, otherwise: dict[str, int]) -> None:
    assert planned(setting(0.95)).program.collectives() == otherwise
    assert planned(setting(1.05)).program.collectives() == OWNER


@pytest.mark.parametrize("first", [0, 5])
def test_the_fastest_device_is_the_owner(first: int) -> None:
    plan = planned(cluster_of(1e13, 3e8, 2e-5, first))
    owners = {p.owner for i in plan.program.instructions if isinstance(i, Compute) for p in i.triples[0].results}
    assert owners == {None, first}
    assert plan.lower_bound == pytest.approx(plan.cost, rel=1e-6)
    assert plan.joint_lower_bound <= plan.lower_bound


@pytest.mark.parametrize("owner", range(N))
@pytest.mark.parametrize("weights", [np.full(N, 1 / N), np.arange(1.0, N + 1) / 36, np.eye(N)[0]], ids=str)
def test_whoever_the_owner_is_no_program_is_below_the_joint_bound(owner: int, weights: Floats) -> None:
    """The search knows one owner, and bounds what programs with any other take."""
    cluster = cluster_of(1e13, 3e8, 2e-5, first=5)
    plan = planned(cluster, ratios=None)
    task = Task(plan.traced.graph, cluster)
    ops = [op for group in task.costs.bucketing.groups for op in group.ops]
    choices = ChoiceSpace(task.graph, task.factors, owners=dict.fromkeys(ops, (owner,)))
    problem = ProblemBuilder(choices, task.costs, Ratios(task.graph, task.factors, weights)).problem()
    assert plan.joint_lower_bound <= solve(problem).cost * (1 + 1e-9)


FORMS: tuple[Form, ...] = ("switch", "staged")


@pytest.mark.parametrize("form", FORMS)
def test_it_gives_the_same(form: Form, tmp_path: Path) -> None:
    plan = planned(cluster_of(1e13, 3e8, 2e-5, first=2), form=form)
    assert plan.program.collectives() == OWNER
    assert plan.check()
    plan.save(tmp_path / "plan.json")
    again = hapsynth.load(tmp_path / "plan.json", step, (WEIGHTS, BATCH), first_devices(N), form=form)
    assert again.program.text(again.traced.graph) == plan.program.text(plan.traced.graph)
    want = step(jnp.asarray(WEIGHTS), jnp.asarray(BATCH))
    for one in (plan, again):
        np.testing.assert_allclose(one.unshard(one(*one.shard(WEIGHTS, BATCH))), want, rtol=1e-5)


def test_one_process_has_no_program_for_an_owner_and_others() -> None:
    with pytest.raises(ValueError, match="process 0 holds devices of unlike shares"):
        planned(cluster_of(1e13, 3e8, 2e-5), form="fused")


def test_what_has_an_owner_has_no_ratio() -> None:
    plan = planned(cluster_of(1e13, 3e8, 2e-5, first=2))
    assert list(plan.ratios.values()) == [(1 / N,) * N]
    assert planned(plan.cluster, ratios=plan.ratios).program.collectives() == OWNER


def test_a_report_names_the_owner_and_what_it_spares() -> None:
    plan = planned(cluster_of(1e13, 3e8, 2e-5, first=2))
    lines = {line.step: line for line in cost_lines(plan) if isinstance(line, Sending)}
    assert set(lines["reduce"].others) >= {"all_reduce", "reduce_scatter"}
    assert set(lines["broadcast"].others) >= {"all_gather"}
    out = StringIO()
    print_costs(Console(file=out, width=200), plan, [*lines.values()], 10)
    for text in ("reduce P(sum) -> O(2)", "broadcast O(2) -> R", "by reduce_scatter"):
        assert text in out.getvalue()


def test_an_exported_program_sends_up_a_tree() -> None:
    plan = planned(cluster_of(1e13, 3e8, 2e-5))
    made = module(plan)
    mesh = made.make_mesh()
    got = made.unshard(made.make_step(mesh)(*made.shard(mesh, WEIGHTS, BATCH)))
    np.testing.assert_allclose(got, plan.unshard(plan(*plan.shard(WEIGHTS, BATCH))), rtol=1e-6)
    assert "ppermute" in plan.to_source()


def adam(state: Any, x: jax.Array) -> Any:
    """Three tensors of state, a clip by the gradient's norm, a count."""
    weights, mean, square, count = state
    gradient = jax.grad(lambda w: jnp.square(x @ w).sum())(weights)
    gradient = gradient / jnp.maximum(1.0, jnp.sqrt(jnp.square(gradient).sum()))
    mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
    return weights - 0.001 * mean / (jnp.sqrt(square) + 1e-8), mean, square, count + 1


STATE = (WEIGHTS, np.zeros_like(WEIGHTS), np.zeros_like(WEIGHTS), np.int32(0))


def trained(plan: hapsynth.Plan, steps: int = 2) -> None:
    """Compared with one device, step by step."""
    state, batch = plan.shard(STATE, BATCH)
    want: Any = STATE
    for _ in range(steps):
        state, want = plan(state, batch), adam(want, jnp.asarray(BATCH))
    for got, one in zip(plan.unshard(state), want, strict=True):
        np.testing.assert_allclose(got, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_optimizers_state_stays_with_the_owner(form: Form) -> None:
    """Padded, every device has room for it; exact, the owner alone."""
    cluster = cluster_of(1e13, 3e8, 1e-4, first=1)
    asked: dict[str, Any] = {"fixed": {"[1]": "S(0)"}, "leave_out": False, "ratios": [1 / N] * N, "form": form}
    plan = hapsynth.synthesize(adam, (STATE, BATCH), first_devices(N), cluster=cluster, **asked)
    assert {path for path, layout in plan.layouts.items() if layout == "O(1)"} == {"[0][1]", "[0][2]"}
    assert plan.program.collectives()["broadcast"] == 1
    more = 0.0 if form == "switch" else 2 * SIZE
    assert [plan.memory[1] - held for held in plan.memory] == [more, 0.0, *[more] * (N - 2)]
    assert plan.check()
    trained(plan)


def with_memory(*limits: float) -> Cluster:
    """Devices that differ in memory alone; a message takes a millisecond."""
    devices = tuple(replace(device(f"m{limit}", 1.0, limit), overhead=1e-12) for limit in limits)
    return Cluster("c", devices, tuple(range(N)), Link(PACE, 1e-3))


def spared(fn: Any, state: Any, cluster: Cluster, lowering: LoweringOptions = DEFAULT) -> hapsynth.Plan:
    asked: dict[str, Any] = {"fixed": {"[1]": "S(0)"}, "leave_out": False, "form": "staged", "lowering": lowering}
    return hapsynth.synthesize(fn, (state, BATCH), first_devices(N), cluster=cluster, **asked)


def test_where_memory_is_short_the_device_with_much_of_it_is_the_owner() -> None:
    """All devices alike had rather run the update each; there is room for the optimizer's state on one alone. A gather
    of cut weights waits for eight messages, an owner's broadcast for four."""
    free = spared(adam, STATE, with_memory(*[1.2e6] * N))
    assert free.program.collectives() == ALL
    assert min(free.memory) > 1.11e6 > max(free.memory) - 2 * SIZE
    plan = spared(adam, STATE, with_memory(*[1.11e6] * (N - 1), 1.2e6))
    assert {layout for path, layout in plan.layouts.items() if path in ("[0][1]", "[0][2]")} == {"O(7)"}
    assert plan.program.collectives() == {"all_reduce": 1, "broadcast": 1}
    assert plan.memory[-1] <= 1.2e6
    # The weights too are elsewhere only while the model reads them.
    assert [plan.memory[-1] - held for held in plan.memory[:-1]] == [3 * SIZE] * (N - 1)
    assert plan.cost == pytest.approx(free.cost + 4e-3, rel=0.01)
    assert plan.lower_bound == pytest.approx(plan.cost, rel=1e-5)
    trained(plan)


def test_where_no_device_has_room_nobody_owns() -> None:
    """Cut, at the price of eight messages."""
    free, plan = (spared(adam, STATE, with_memory(*[limit] * N)) for limit in (1.2e6, 1.11e6))
    assert plan.program.collectives() == {"all_reduce": 1, "all_gather": 1}
    assert plan.cost == pytest.approx(free.cost + 8e-3, rel=0.01)
    assert max(plan.memory) <= 1.11e6


def two_weights(state: Any, x: jax.Array) -> Any:
    one, two = jax.grad(lambda a, b: jnp.square(x @ a + x @ b).sum(), (0, 1))(state[0][0], state[1][0])
    momenta = [0.9 * mean + gradient for (_, mean), gradient in zip(state, (one, two), strict=True)]
    return [(w - 0.001 * mean, mean) for (w, _), mean in zip(state, momenta, strict=True)]


def test_zero_by_whole_tensors() -> None:
    """Neither device has room for what is kept of both weights."""
    state = [(WEIGHTS, np.zeros_like(WEIGHTS)), (2 * WEIGHTS, np.zeros_like(WEIGHTS))]
    plan = spared(two_weights, state, with_memory(*[1.15e6] * N), LoweringOptions(bundled_bytes=1024))
    assert [plan.layouts[f"[0][{k}][1]"] for k in (0, 1)] == ["O(0)", "O(1)"]
    assert plan.program.collectives() == {"reduce": 2, "broadcast": 2}
    assert plan.memory[0] == plan.memory[1] == plan.memory[2] + 2 * SIZE <= 1.15e6
    assert plan.check()
    stored = plan.shard(state, BATCH)
    want, got = two_weights(state, jnp.asarray(BATCH)), plan.unshard(plan(*stored))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)


def test_with_overlap() -> None:
    """The chains of the least makespan know owners; of weights that lie cut an all-gather is sent while the batch is
    read."""
    cluster = cluster_of(1e13, 3e8, 2e-5, first=2)
    asked: dict[str, Any] = {"leave_out": False, "ratios": [1 / N] * N, "overlap": True}
    plan = hapsynth.synthesize(step, (WEIGHTS, BATCH), cluster, fixed={"[0]": "R", "[1]": "S(0)"}, **asked)
    assert plan.program.collectives() == OWNER
    free = hapsynth.synthesize(step, (WEIGHTS, BATCH), cluster, fixed={"[1]": "S(0)"}, **asked)
    assert free.cost < plan.cost
    assert plan.joint_lower_bound <= plan.lower_bound <= plan.cost <= planned(cluster).cost * (1 + 1e-9)


def test_devices_that_are_left_out_own_nothing() -> None:
    """Each set of devices has an owner of its own; one axis of two has none."""
    graph = trace(step, (WEIGHTS, BATCH)).graph
    cluster = cluster_of(1e13, 3e8, 2e-5, first=2)
    owners = lambda cluster: {at for ats in Task(graph, cluster).owners.values() for at in ats}
    assert owners(cluster) == {2}
    assert owners(cluster.subset((1, 2, 3, 4, 5, 6, 7))) == {1}
    assert owners(cluster.subset((0, 1, 3, 4, 5, 6, 7))) == set()
    assert owners(replace(cluster, axes=(("a", 2), ("b", 4)))) == set()
    curve = Curve(((0.0, 1e-5), (1e6, 1e-3)))
    assert owners(replace(cluster, collectives={"hap": {"all_reduce": curve}})) == set()


def test_problems_in_which_no_owner_pays_are_as_they_were() -> None:
    task = Task(trace(strategies.mlp, strategies.mlp_args(2048, 64, 256)).graph, strategies.gpus([3.0, 1.0] * 4))
    assert task.costs.bucketing.groups
    assert task.owners == {}
    assert all(not known.owned for known in task.choices.layouts)


def evaluate(state: Any, x: jax.Array) -> jax.Array:
    return jnp.square(x @ state[0]).mean()


def test_functions_of_one_state_leave_it_to_its_owner() -> None:
    functions = {"train": adam, "evaluate": evaluate}
    args = dict.fromkeys(functions, (STATE, BATCH))
    asked: dict[str, Any] = {"leave_out": False, "ratios": dict.fromkeys(functions, [1 / N] * N), "form": "staged"}
    cluster = cluster_of(1e13, 3e8, 1e-4, first=1)
    plans = hapsynth.synthesize_several(
        functions, args, first_devices(N), cluster=cluster, frequency={"train": 10}, **asked
    )
    assert [plans.layouts[f"[0][{k}]"] for k in (1, 2)] == ["O(1)", "O(1)"]
    assert plans.lower_bound <= plans.cost
    train = plans["train"]
    state = train(*train.shard(STATE, BATCH))
    one = plans["evaluate"]
    got = one.unshard(one(state, one.shard(STATE, BATCH)[1]))
    np.testing.assert_allclose(got, evaluate(adam(STATE, jnp.asarray(BATCH)), jnp.asarray(BATCH)), rtol=1e-4)


def test_at_other_speeds_the_owner_stays() -> None:
    plan = planned(cluster_of(1e13, 3e8, 2e-5, first=2)).rebalance([1.0] * 3 + [3.0] * 5)
    assert plan.program.collectives() == OWNER
    (shares,) = plan.ratios.values()
    assert min(shares[:3]) > max(shares[3:])
    assert plan.check()
    assert "[0] at 2" in plan.explain()
