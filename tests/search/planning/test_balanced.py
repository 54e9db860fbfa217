"""All-gathers and reduce-scatters of unlike shards: padded to the largest, or by way of even ones.

Every threshold is derived in its test. The search must take the cheaper one on both sides of it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graphs import cluster
from hypothesis import given
from hypothesis import strategies as st
from slow_devices import first_devices, untiled

import hapsynth
from hapsynth.cluster.cluster import Link
from hapsynth.cluster.curves import Curve
from hapsynth.graph.trace import trace
from hapsynth.instructions.collectives import STEPS
from hapsynth.instructions.layout import Layout, P, R, S
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.staging.gloo import exchanges
from hapsynth.instructions.staging.moved_rows import even_rows, moves
from hapsynth.instructions.staging.options import DEFAULT
from hapsynth.plan import Form
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.network import Even, Shares
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.formulation.choice_space import Restriction
from hapsynth.search.planning.device_subsets import ClusterPlanner
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.sizing.class_costs import ClassCosts
from hapsynth.search.sizing.fixed_ratios import FixedRatios

NBYTES, BANDWIDTH = 64 << 20, 1.25e9


def model(n: int, latency: float = 0.0, rows: int = 6400) -> CostModel:
    """Of one value of 64 MiB in so many rows."""
    x = jax.ShapeDtypeStruct((rows, (NBYTES // 4) // rows), jnp.float32)
    graph = trace(lambda x: x, (x,)).graph
    return CostModel(graph, cluster([1.0] * n, bandwidth=BANDWIDTH, latency=latency), FactorTable(graph))


def seconds(costs: CostModel, shares: list[float], step: str) -> float:
    held = np.array(shares) / sum(shares)
    source, target = ((P(),), (S(0),)) if "scatter" in step else ((S(0),), (R,))
    return costs.conversion(0, source, target, 0, Shares(lambda *cut: held.max(), lambda *cut: held), STEPS[step])[0]


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_64_mib_at_10_gbit_per_second(kind: str) -> None:
    """Shares of 48, 8 and six times 4 of 80. Padded 7 blocks of 48/80: 225 ms. Balanced the first sends 38 of its 48,
    in pieces of 10, 10, 10 and 8 to the next four, while others send no more at as many distances, then 7 blocks of
    10: 72 ms. Even shards: 7 blocks of 10, 47 ms."""
    costs, shares, whole = model(8), [48.0, 8.0, *[4.0] * 6], NBYTES / BANDWIDTH
    nbytes = costs.graph.values[0].nbytes / BANDWIDTH
    assert nbytes == pytest.approx(whole, rel=1e-3)
    assert seconds(costs, shares, kind) == pytest.approx(7 * 48 / 80 * nbytes)
    assert seconds(costs, shares, f"balanced_{kind}") == pytest.approx((38 + 7 * 10) / 80 * nbytes)
    assert seconds(costs, [1.0] * 8, f"balanced_{kind}") == pytest.approx(seconds(costs, [1.0] * 8, kind))
    ms = [1e3 * seconds(costs, *how) for how in ((shares, kind), (shares, f"balanced_{kind}"), ([1.0] * 8, kind))]
    assert [round(x) for x in ms] == [225, 72, 47]


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("skew", [1.1, 1.5, 2.0])
def test_where_one_device_has_more(n: int, skew: float, kind: str) -> None:
    """`skew` times the mean, at most twice: what is over goes to the next device, whose end moves on by less, and so
    on: one message, as long as what is over, (skew - 1) / n. Padded (n - 1) blocks of skew / n; so the balanced
    one is the faster where a latency is less than (n - 2) (skew - 1) / n of the bytes' time."""
    costs = model(n)
    shares = [skew, *[(n - skew) / (n - 1)] * (n - 1)]
    flip = (n - 2) * (skew - 1) / n * costs.graph.values[0].nbytes / BANDWIDTH
    for factor in (0.95, 1.05):
        there = model(n, latency=factor * flip)
        padded, balanced = (seconds(there, shares, step) for step in (kind, f"balanced_{kind}"))
        assert (balanced < padded) == (factor < 1)
        assert balanced - padded == pytest.approx((factor - 1) * flip, rel=1e-6)


CURVE = {1.0: (47, 47), 1.25: (59, 49), 1.5: (70, 50), 2.0: (94, 54), 3.0: (141, 60), 4.0: (188, 67), 6.0: (282, 81)}


@pytest.mark.parametrize("skew", CURVE)
def test_the_curve_over_skew(skew: float) -> None:
    """As docs/design/lowering.md has it: one device of eight with `skew` times the mean. Padded 7 blocks of skew / 8 of
    64 MiB; balanced what that device has too much, (skew - 1) / 8, and 7 blocks of 1 / 8."""
    costs, shares, whole = model(8), [skew, *[(8 - skew) / 7] * 7], 1e3 * NBYTES / BANDWIDTH
    found = [1e3 * seconds(costs, shares, step) for step in ("all_gather", "balanced_all_gather")]
    assert found == pytest.approx([7 * skew / 8 * whole, (skew - 1 + 7) / 8 * whole], rel=1e-3)
    assert tuple(map(round, found)) == CURVE[skew]


@given(st.lists(st.integers(0, 40), min_size=2, max_size=9).filter(lambda x: sum(x) > 0))
def test_what_the_pieces_come_to(rows: list[int]) -> None:
    """The price counts the permutes that the lowering makes, and their longest pieces."""
    n, whole = len(rows), sum(rows)
    costs = model(n, latency=1e-3, rows=whole)
    pieces = [m for m in moves(rows, even_rows(whole, n)) if m.distance]
    nbytes = costs.graph.values[0].nbytes / BANDWIDTH
    sent = sum(m.longest for m in pieces) + (n - 1) * -(-whole // n)
    expected = (len(pieces) + n) * 1e-3 + sent / whole * nbytes
    assert seconds(costs, [float(x) for x in rows], "balanced_all_gather") == pytest.approx(expected)
    held = np.array(rows) / whole
    of_each, step = Shares(lambda *cut: held.max(), lambda *cut: held), STEPS["balanced_all_gather"]
    gathered = exchanges("all_gather", costs.graph.values[0].nbytes * -(-whole // n) / whole, n, (), DEFAULT)
    assert costs.exchanges(0, (S(0),), (R,), 0, of_each, step) == len(pieces) + gathered
    assert list(accumulate(even_rows(whole, n)))[-1] == whole


X = np.arange(480 * 64, dtype=np.float32).reshape(480, 64) % 7


def gathering(latency: float, skew: float, *, collectives: Any = None, **options: Any) -> hapsynth.Plan:
    """A product of two batches, one of which must be whole: with this network, or these measured `collectives`, the
    gather is what a plan pays for."""
    n, where = 4, cluster([1.0] * 4, bandwidth=1e9, latency=latency)
    where = replace(
        where, collectives=collectives or {}, devices=tuple(replace(d, overhead=1e-12) for d in where.devices)
    )
    ratios = [skew / n, *[(1 - skew / n) / (n - 1)] * (n - 1)]
    asked: dict[str, Any] = {"fixed": {"[0]": "S(0)"}, "ratios": ratios, "leave_out": False, **options}
    return hapsynth.synthesize(lambda x: x @ x.T, (X,), first_devices(n), cluster=where, **asked)


@pytest.mark.parametrize("skew", [1.25, 2.0])
def test_the_search_takes_the_cheaper_one(skew: float) -> None:
    """As above: flips where a latency is 2 (skew - 1) / 4 of the bytes' time."""
    flip = 2 * (skew - 1) / 4 * 480 * 64 * 4 / 1e9
    for factor, name in ((0.95, "balanced_all_gather"), (1.05, "all_gather")):
        assert gathering(factor * flip, skew).program.collectives() == {name: 1}
    assert gathering(0.0, 1.0).program.collectives() == {"all_gather": 1}


def test_a_measured_permute_counts_for_what_it_took() -> None:
    """The even gather takes as long for a byte as the padded one, which sends 2 (skew - 1) / 4 of the tensor more; the
    permute in between takes (skew - 1) / 4 of it, and so long on top that both are even at `flip`."""
    skew, nbytes = 2.0, 480 * 64 * 4
    flip = (skew - 1) / 4 * nbytes * 1e-9
    for factor, name in ((0.95, "balanced_all_gather"), (1.05, "all_gather")):
        line = lambda start: Curve(((0.0, start), (1e6, start + 1e-3)))
        curves = {"all_gather": line(1e-9), "reshare": line(factor * 2 * flip)}
        assert gathering(0.1, skew, collectives={"hap": curves}).program.collectives() == {name: 1}


def test_a_program_may_be_held_to_the_usual_collectives() -> None:
    plan = gathering(0.0, 2.0)
    assert plan.program.collectives() == {"balanced_all_gather": 1}
    options = PlanningOptions(
        restriction=Restriction({plan.traced.graph.inputs[0]: (S(0),)}),
        fixed_ratios=FixedRatios(np.array([0.5, *[1 / 6] * 3])),
        collectives=frozenset(),
    )
    result = ClusterPlanner(Task(plan.traced.graph, plan.cluster, options)).run()
    assert result.program.collectives() == {"all_gather": 1}
    assert result.cost_s > plan.cost


@pytest.mark.parametrize("rows", [168, 216])
def test_the_search_changes_at_the_predicted_skew(rows: int) -> None:
    """At one latency: padded up to so many rows of 480 on one of four devices, balanced from there on. Within 5 %, and
    in thirds, as the others share the rest."""
    latency = 2 * (4 * rows / 480 - 1) / 4 * 480 * 64 * 4 / 1e9
    off = int(0.05 * rows) // 3 * 3
    for held, name in ((rows - off, "all_gather"), (rows + off, "balanced_all_gather")):
        assert gathering(latency, 4 * held / 480).program.collectives() == {name: 1}


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_it_gives_the_same(form: Form) -> None:
    plan = gathering(0.0, 2.0, form=form)
    assert plan.check()
    np.testing.assert_array_equal(plan.unshard(plan(plan.shard(X))), X @ X.T)
    assert "collective_permute" in plan.lower().as_text()


def two_products(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x @ w
    return y @ y.T


def layered(sent: float) -> tuple[hapsynth.Plan, float]:
    """Two products by rows on a device three times as fast as three others, and the first gathered between them, in
    `sent` of the time that a slow one alone would compute. The plan and the fast device's share."""
    where = untiled(cluster([3.0, 1.0, 1.0, 1.0], latency=0.0))
    computing = 2 * 480 * 64 * (64 + 480) / where.devices[-1].rate("float32")
    bandwidth = 480 * 64 * 4 / (sent * computing)
    devices = tuple(replace(d, overhead=1e-15, bandwidth=1e18) for d in where.devices)
    where = replace(where, devices=devices, network=Link(bandwidth, 0.0))
    w = np.eye(64, dtype=np.float32)
    fixed = {"[0]": "S(0)", "[1]": "R"}
    plan = hapsynth.synthesize(two_products, (X, w), where, fixed=fixed, leave_out=False)
    (shares,) = {shares for c, shares in zip(plan.sizes.classes.all, plan.sizes.shares, strict=True) if c.units == 480}
    return plan, shares[0] / 480


def test_ratios_follow_what_they_cost() -> None:
    """With a share s of the fast device, from an even 1/4 on, the others compute for (1 - s) / 3: as fast as all can at
    1/2. The balanced gather takes s longer, so it pays to go there up to where all bytes take 1/3 of the computing. One
    that is padded takes 3 s, and would stop paying at 1/9."""
    for factor, share, name in ((0.95, 1 / 2, "balanced_all_gather"), (1.05, 1 / 4, "all_gather")):
        plan, found = layered(factor / 3)
        assert found == pytest.approx(share, abs=0.01)
        assert plan.program.collectives() == {name: 1}


LINES = Curve(((0.0, 1e-5), (1e5, 3e-5), (1e6, 2e-4)))


@pytest.mark.parametrize("measured", [{}, {"reshare": LINES, "all_gather": LINES}])
def test_what_sizes_decide_of_its_cost(measured: dict[str, Curve]) -> None:
    """All but what even shards take is counted where sizes are chosen."""
    plan = gathering(0.0, 2.0, collectives={"hap": measured})
    costs, classes = plan.cost_model(), plan.sizes.classes
    class_costs = ClassCosts(plan.program, classes, costs)
    assert [b.new for b in class_costs.boundaries] == [Even(4, 4)]
    assert not class_costs.comm_terms
    found: list[float] = []
    for shares in ((240, 80, 80, 80), (120, 120, 120, 120), (400, 0, 40, 40), (0, 0, 0, 480), (121, 119, 1, 239)):
        sizes = Sizes(plan.traced.graph, classes, (shares,) * len(classes.all))
        found.append(program_cost(plan.program, sizes, costs) - class_costs.cost(sizes))
    assert found == pytest.approx([found[0]] * len(found))


def test_an_axis_that_cuts_a_dimension_with_another_has_no_balanced_one() -> None:
    layouts: tuple[Layout, Layout] = (S(0), S(0, 1)), (S(0), R)
    names = [step.name for step in STEPS.values() if step.turns(layouts[0][1], layouts[1][1])]
    assert names == ["all_gather", "hierarchical_all_gather"]
