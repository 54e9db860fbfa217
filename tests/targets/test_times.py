"""What a compiled plan takes on a card: the network's price for XLA's collectives, and what the plan says beside it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from lowering_options import SWITCHED
from slow_devices import thin_cluster

import hapsynth
from hapsynth.cluster.cluster import Cluster, Link
from hapsynth.cluster.device_kinds import known_kinds
from hapsynth.hlo.collectives import Collective
from hapsynth.instructions.staging.stages import Stage, split
from hapsynth.search.cost.collective_price import NetworkPrice
from hapsynth.search.cost.network import axis_links
from hapsynth.targets.times import branches_of, predicted

FOUR = Cluster("four", (known_kinds()["V100-16GB"],) * 4, (0, 0, 1, 1), Link(1e9, 1e-5), Link(1e11, 1e-6))


def collective(op: str, group: int = 4, held: int = 1024) -> Collective:
    return Collective(op, "add", (f"f32[{held // 4}]",), "", "", "", 1, group)


@pytest.mark.parametrize(
    ("op", "wire"),
    [("all-reduce", 2 * 3 / 4 * 1024), ("all-gather", 3 * 1024), ("reduce-scatter", 3 / 4 * 1024)],
)
def test_rings_cost_what_the_axis_does(op: str, wire: float) -> None:
    (link,) = axis_links(FOUR, [("d", 4)])
    price = NetworkPrice(FOUR, [("d", 4)])
    assert price(collective(op)) == pytest.approx(link.seconds(op.replace("-", "_"), wire))
    assert price(collective("all-to-all")) == pytest.approx(link.seconds("all_to_all", link.swapped * 256))
    assert price(collective("collective-permute")) == pytest.approx(link.latency + 1024 * link.beta)


def test_a_group_is_priced_by_the_axis_that_is_as_long() -> None:
    axes = [("hosts", 2), ("inside", 2)]
    slow, fast = axis_links(FOUR, axes)
    assert slow.beta > fast.beta
    # Both axes are two long: the slower one.
    assert NetworkPrice(FOUR, axes)(collective("all-gather", 2)) == pytest.approx(slow.seconds("all_gather", 1024))
    whole = NetworkPrice(FOUR, [("d", 4)])(collective("all-gather"))
    assert NetworkPrice(FOUR, axes)(collective("all-gather", 4)) == pytest.approx(whole)


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)


def planned() -> hapsynth.Plan:
    shapes = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((64, 16), jnp.float32)
    return hapsynth.synthesize(step, shapes, thin_cluster((3.0, 3.0, 1.0, 1.0)), leave_out=False, fixed={"[1]": "S(0)"})


def test_a_device_does_the_flops_of_its_shares() -> None:
    plan = planned()
    each = [predicted(plan.traced.graph, plan.result, plan.cost_model(), d) for d in range(4)]
    whole = 2 * 2 * 64 * 16 * 16
    assert each[0].whole_products == whole
    assert sum(one.products for one in each) == pytest.approx(whole)
    assert each[0].products > each[2].products > 0
    for one in each:
        assert one.kernels > 0
        assert one.computing_s > 0
    # Sums of the parts that all devices take.
    assert each[0].sending_s == each[3].sending_s > 0


def test_the_branch_of_a_device_in_switches_of_so_many() -> None:
    plan = planned()
    steps = split(plan.traced.graph, plan.program, plan.sizes, SWITCHED, switches=True)
    stages = [s for s in steps if isinstance(s, Stage) and s.switch]
    assert stages
    for device in range(4):
        assert branches_of(steps, device) == {2: stages[0].branch_of[device]}
    turned = [replace(s, branch_of=tuple(1 - b for b in s.branch_of)) for s in stages]
    # Two switches of two branches that the device takes otherwise: none is known.
    assert branches_of([*steps, *turned], 0) == {}
