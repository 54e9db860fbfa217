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
from graphs import device
from rich.console import Console
from slow_devices import first_devices

import hapsynth
from hapsynth.cluster.cluster import Cluster, Link
from hapsynth.instructions.program.program import Compute
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
    """A message takes a millisecond, so that there are none to spare: up a tree and down again are 1 + 2 x 3 of them and
    twice the tensor, an owner's are one more and 4 of the tensor more; all the others run the update three times as
    long as that."""
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
    ops = [op for group in task.costs.together.groups for op in group.ops]
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
    owner, *others = plan.memory[1], plan.memory[0], *plan.memory[2:]
    assert len(set(others)) == 1
    assert owner - others[0] == pytest.approx(0 if form == "switch" else owner - others[0])
    assert plan.check()
    trained(plan)
