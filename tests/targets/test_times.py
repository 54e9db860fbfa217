"""What a compiled plan takes on a card: the network's price for XLA's collectives, and what the plan says beside it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from lowering_options import SWITCHED
from slow_devices import thin_cluster

import hapsynth
from hapsynth.cluster.cluster import Cluster, Link
from hapsynth.cluster.curves import Curve
from hapsynth.cluster.device_kinds import known_kinds
from hapsynth.hlo.collectives import Collective
from hapsynth.instructions.layout import R
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.staging.stages import Cond, Stage, split
from hapsynth.search.cost.collective_price import NetworkPrice
from hapsynth.search.cost.network import axis_links
from hapsynth.targets.times import branches_of, predicted

FOUR = Cluster("four", (known_kinds()["V100-16GB"],) * 4, (0, 0, 1, 1), Link(1e9, 1e-5), Link(1e11, 1e-6))


ALL = ((0, 1, 2, 3),)
HOSTS, PLACES = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def collective(op: str, members: tuple[tuple[int, ...], ...] = ALL, held: int = 1024) -> Collective:
    return Collective(op, "add", (f"f32[{held // 4}]",), "", "", 1, members)


@pytest.mark.parametrize(
    ("op", "wire"),
    [("all-reduce", 2 * 3 / 4 * 1024), ("all-gather", 3 * 1024), ("reduce-scatter", 3 / 4 * 1024)],
)
def test_rings_cost_what_the_axis_does(op: str, wire: float) -> None:
    (link,) = axis_links(FOUR, [("d", 4)])
    price = NetworkPrice(FOUR, [("d", 4)])
    assert price(collective(op)) == pytest.approx(link.seconds(op.replace("-", "_"), wire))
    assert price(collective("all-to-all")) == pytest.approx(link.seconds("all_to_all", link.swapped * 256))


@pytest.mark.parametrize("axes", [[("d", 4)], [("hosts", 2), ("inside", 2)], [("inside", 2), ("hosts", 2)]])
def test_groups_are_priced_by_what_they_go_over(axes: list[tuple[str, int]]) -> None:
    price = NetworkPrice(FOUR, axes)
    slow, fast = axis_links(FOUR, [("hosts", 2), ("inside", 2)])
    assert (slow.beta, fast.beta) == (2e-9, 1e-11)
    assert price(collective("all-gather", PLACES)) == pytest.approx(slow.seconds("all_gather", 1024))
    # In another order, and with devices that have nobody.
    assert price(collective("all-gather", PLACES[::-1])) == price(collective("all-gather", PLACES))
    assert price(collective("all-reduce", ((0, 2), (1,), (3,)))) < price(collective("all-reduce", PLACES))
    assert price(collective("all-gather", HOSTS)) == pytest.approx(fast.seconds("all_gather", 1024))
    assert price(collective("all-reduce", ((0,), (1,), (2,), (3,)))) == 0
    whole = axis_links(FOUR, [("d", 4)])[0].seconds("all_gather", 3072)
    assert price(collective("all-gather")) == pytest.approx(whole)


def test_a_permute_takes_what_its_pairs_cross() -> None:
    price = NetworkPrice(FOUR, [("d", 4)])
    each = {
        pairs: price(collective("collective-permute", pairs)) for pairs in (HOSTS, PLACES, ((0, 2),), ((2, 0), (3, 0)))
    }
    assert each[HOSTS] == pytest.approx(1e-6 + 1024 * 1e-11)
    # A host has one link for all of its devices.
    assert each[PLACES] == each[(2, 0), (3, 0)] == pytest.approx(1e-5 + 2 * 1024 * 1e-9)
    assert each[(0, 2),] == pytest.approx(1e-5 + 1024 * 1e-9)
    measured = replace(FOUR, collectives={"hap": {"reshare": Curve(((0.0, 1e-3), (1024.0, 3e-3)))}})
    # Measured one place on, where one device of a host sends to the other: both do, two places on.
    for pairs, seconds in ((HOSTS, 3e-3), (((3, 2), (1, 0)), 3e-3), (PLACES, 5e-3), (((0, 2), (2, 0), (3, 3)), 5e-3)):
        price = NetworkPrice(measured, [("hap", 4)])(collective("collective-permute", pairs))
        assert price == pytest.approx(seconds)


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)


def planned(fn: Callable[..., Any] = step) -> hapsynth.Plan:
    shapes = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((64, 16), jnp.float32)
    return hapsynth.synthesize(fn, shapes, thin_cluster((3.0, 3.0, 1.0, 1.0)), leave_out=False, fixed={"[1]": "S(0)"})


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


def test_what_goes_together_is_sent_once() -> None:
    """Where a plan's collectives run beside computing, they go in bundles."""
    sums = lambda w, x: (jnp.sum(x), jnp.sum(jnp.tanh(x)))
    plan = planned(sums)
    costs, graph, result = plan.cost_model(), plan.traced.graph, plan.result
    computed = [i for i in plan.program.instructions if not isinstance(i, Convert)]
    sent = [i._replace(bundle=1) for i in plan.program.instructions if isinstance(i, Convert)]
    assert [i.step for i in sent] == ["all_reduce"] * 2
    bundled = replace(result, overlap=True, program=replace(plan.program, instructions=(*computed, *sent)))
    apart, beside = (predicted(graph, r, costs, 0).sending_s for r in (result, bundled))
    assert beside == pytest.approx(apart - costs.links[0].seconds("all_reduce", 0.0))


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
    # Nor may one be taken for a cond of the function's.
    cond = lambda count: Cond((0, (R,)), ((),) * count, ((),) * count, ())
    assert branches_of([*steps, cond(2)], 0) == {}
    assert branches_of([*steps, cond(3)], 0) == branches_of(steps, 0)
