"""Memory of the staged form: each device holds its own exact shards within its own limit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_cases import floats
from lowering_options import ALONE
from slow_devices import first_devices, thin_cluster

import hapsynth
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import trace
from hapsynth.instructions.layout import S
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.staging.options import DEFAULT
from hapsynth.lower import Shards, Staged, parts
from hapsynth.lower._host_schedule import CollectiveStage
from hapsynth.plan import Plan
from hapsynth.running.check import relative_error
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.formulation.choice_space import Restriction
from hapsynth.search.memory.profile import MemoryProfile
from hapsynth.search.planning.device_subsets import ClusterPlanner
from hapsynth.search.planning.infeasibility import shortage
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.sizing.sizer import Sizer


def momentum(state: Any, x: Any) -> Any:
    """Each column of the state is updated by itself."""
    w, m = state
    m = 0.9 * m + x.T @ jnp.tanh(x @ w)
    return (w - 0.1 * m, m), x.sum()


STATE = (floats(32, 60), floats(32, 60)), floats(8, 32)


def limited(*memory: float) -> Cluster:
    """Devices of one speed with so many bytes."""
    fast = thin_cluster([1.0] * len(memory))
    return replace(
        fast, devices=tuple(replace(k, name=f"d{int(m)}", memory=int(m)) for k, m in zip(fast.devices, memory))
    )


def planned(memory: tuple[float, ...], fn: Any = momentum, args: Any = STATE, **options: Any) -> Plan:
    return hapsynth.synthesize(
        fn, args, first_devices(len(memory)), cluster=limited(*memory), leave_out=False, **options
    )


def profile_of(plan: Plan) -> MemoryProfile:
    return MemoryProfile(plan.program, plan.sizes.classes, plan.cost_model())


@cache
def tight() -> Plan:
    """The second device has a third of the memory of the others, and too little for a third of the whole."""
    with pytest.raises(InfeasibleError) as caught:
        planned((1e9,) * 3, memory_limit=1e3)
    assert caught.value.needs is not None
    return planned(tuple(x * caught.value.needs for x in (1.7, 0.57, 1.7)), form="staged")


def test_a_small_device_holds_small_shards() -> None:
    plan = tight()
    limits = [float(k.memory) for k in plan.cluster.devices]
    assert (plan.result.exact, plan.form) == (True, "staged")
    assert all(held <= limit for held, limit in zip(plan.memory, limits, strict=True))
    with pytest.raises(InfeasibleError, match="no program fits: device 1 "):
        planned(tuple(limits), form="switch")
    # One process, so "auto" plans for the switch form.
    with pytest.raises(InfeasibleError):
        planned(tuple(limits))
    w, m, x = STATE[0][0], STATE[0][1], STATE[1]
    state, given = plan.shard((w, m), x)
    for got, want in zip(jax.tree.leaves(plan(state, given)), jax.tree.leaves(momentum((w, m), x)), strict=True):
        assert relative_error(plan.unshard(got), np.asarray(want)) < 1e-5


def test_the_bytes_of_arguments_are_those_stored() -> None:
    plan = tight()
    stored = jax.tree.leaves(plan.shard(*STATE), is_leaf=lambda x: isinstance(x, hapsynth.ShardedArray))
    held = np.zeros(3)
    for x in stored:
        held += [part.nbytes for part in parts(x.data if isinstance(x, hapsynth.ShardedArray) else x)]
    assert any(isinstance(getattr(x, "data", None), Shards) for x in stored)
    assert profile_of(plan).of_devices(plan.sizes)[:, 0].tolist() == held.tolist()


def test_a_plan_file_tells_what_its_memory_is_of(tmp_path: Path) -> None:
    plan, path = tight(), tmp_path / "plan.json"
    plan.save(path)
    again = hapsynth.load(path, momentum, STATE, first_devices(3))
    assert (again.result.exact, again.memory, again.form) == (True, plan.memory, "staged")
    assert "padded shards would need" in again.form_reason
    with pytest.raises(ValueError, match=r"form is 'switch', but padded shards would need .* on device 1"):
        hapsynth.load(path, momentum, STATE, first_devices(3), form="switch")
    data = json.loads(path.read_text())
    assert data.pop("memory_of") == "exact"
    path.write_text(json.dumps(data))
    older = hapsynth.load(path, momentum, STATE, first_devices(3))
    assert (older.result.exact, older.form) == (False, "switch")
    path.write_text(json.dumps({**data, "memory_of": "some"}))
    with pytest.raises(hapsynth.PlanError, match="its memory is of 'some' shards"):
        hapsynth.load(path, momentum, STATE)


def test_what_fits_nowhere_names_the_fullest_device() -> None:
    limits = [float(k.memory) / 4 for k in tight().cluster.devices]
    with pytest.raises(InfeasibleError, match=r"device \d \(d\d+\) has .* \(every program needs \d+ %"):
        planned(tuple(limits), form="staged")


def shortage_of(*memory: float, **options: Any) -> InfeasibleError:
    """Of a product on devices with so many bytes, on which it does not fit."""
    graph = trace(lambda w, x: jnp.tanh(x @ w), (floats(64, 64), floats(256, 64))).graph
    with pytest.raises(InfeasibleError) as caught:
        ClusterPlanner(Task(graph, limited(*memory), PlanningOptions(**options))).run()
    return caught.value


def test_a_device_is_told_by_its_place_in_the_cluster() -> None:
    assert str(shortage_of(1e9, 1e9, 1e9, 2e3, devices=(2, 3))).startswith("no program fits: device 3 (d2000) has ")


def test_what_a_device_that_lacks_memory_needs_is_told() -> None:
    """Not what a larger one holds, which has it; nor that every program needs 0 % of some device; and that none fits
    only where that is proved."""
    error = shortage_of(1e9, 1e9, 1e9, 9e3, exact=True, leave_out=False)
    told = re.fullmatch(
        r"no program that fits was found: device 3 .* needs ([\d.]+) MiB, [\d.]+ MiB too much; .*", str(error)
    )
    assert told
    assert error.needs == pytest.approx(float(told[1]) * 2**20, rel=1e-3)
    assert error.needs == pytest.approx(error.excess * 9e3)


def test_where_layouts_are_fixed_others_are_named() -> None:
    costs = tight().cost_model()
    only = PlanningOptions(restriction=Restriction(stored={0: (S(0),)}))
    assert shortage(costs, None, 0.0, only) == "no program keeps to the layouts that are fixed"
    fixed = shortage_of(1e3, 1e3, restriction=only.restriction)
    assert "; other layouts, a device with that much memory, more devices, or a smaller batch would fit" in str(fixed)


def exchanges(w: Any, x: Any) -> Any:
    """All four collectives."""
    both = jnp.tanh(x) + jnp.cumsum(w, 1)
    return w - 0.1 * both.T.sum() * x.T @ jnp.cumsum(both, 0) @ x.T, (x**2).sum()


@pytest.mark.parametrize("bundled", [True, False])
def test_wires_are_those_that_the_stages_send(bundled: bool) -> None:
    fixed = {"[0]": "S(0)", "[1]": "S(1)"}
    cluster = thin_cluster((3.0, 1.0, 2.0))
    args = floats(24, 24), floats(24, 24)
    plan = hapsynth.synthesize(
        exchanges,
        args,
        first_devices(3),
        cluster=cluster,
        leave_out=False,
        fixed=fixed,
        form="staged",
        lowering=DEFAULT if bundled else ALONE,
    )
    staged, profile = plan.lowered, profile_of(plan)
    assert isinstance(staged, Staged)
    sent: list[int] = []
    for item in staged.items:
        for one in staged.sent(item.steps) if isinstance(item, CollectiveStage) else ():
            wire, arrived = staged.wire(one), staged.arrived(one)
            kinds = [wire] if wire.shape == arrived.shape else [wire, arrived]
            sent += [int(np.prod(k.shape)) * k.dtype.itemsize for k in kinds]
    counted = profile.bytes_of(plan.sizes)[:, len(profile.tensors) :]
    assert (counted == counted[0]).all()
    assert counted[0].sum() == pytest.approx(sum(sent))
    # A shard and the rows of it that change owner are one array, counted apart.
    buffers = counted[0].round().tolist()
    assert bundled or {*sent} <= {*buffers, *(one + other for one, other in pairwise(buffers))}
    balanced = {"balanced_all_gather", "balanced_reduce_scatter"}
    assert balanced & set(plan.program.collectives())
    assert {"pairwise_all_to_all", "all_reduce"} <= set(plan.program.collectives())


def test_sizes_within_exact_memory_are_near_the_best_of_all() -> None:
    """Against every way to cut the state, and the bound below them all."""
    plan = tight()
    sizer = Sizer(plan.program, plan.sizes.classes, plan.cost_model())
    units, *_ = (c.units for c in plan.sizes.classes.all)
    best = np.inf
    for first, second in product(range(units + 1), repeat=2):
        if first + second <= units:
            shares = ((first, second, units - first - second), *plan.sizes.shares[1:])
            sizes = Sizes(plan.traced.graph, plan.sizes.classes, shares)
            if sizer.memory.peak(sizes) <= sizer.limit:
                best = min(best, program_cost(plan.program, sizes, sizer.costs))
    assert best <= plan.cost <= best * (1 + 1e-6)
    rest = plan.cost - sizer.variable_cost(plan.sizes)
    assert rest + sizer.bound(plan.sizes) <= best
    assert plan.result.joint_lower_bound_s <= plan.result.lower_bound_s <= plan.cost
