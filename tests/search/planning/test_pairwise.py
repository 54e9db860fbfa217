"""All-to-alls of unlike shards: padded to the largest block, or in rounds of permutes, each of its own largest piece.

Every threshold is derived in its test. The search must take the cheaper one on both sides of it.
"""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graphs import cluster, device
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console
from slow_devices import first_devices, untiled
from test_joint_refinement import just
from thoroughness import THOROUGH

import hapsynth
from hapsynth._quantities import seconds as quantity
from hapsynth.cluster.cluster import Cluster, Link
from hapsynth.cluster.curves import Curve
from hapsynth.graph.trace import trace
from hapsynth.instructions.collectives import STEPS
from hapsynth.instructions.layout import Layout, R, S
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.staging.moved_rows import rounds
from hapsynth.plan import Form
from hapsynth.report.cost_breakdown import Sending, cost_lines, print_costs
from hapsynth.search.cost.least_rounds import least_rounds, least_rounds_of_each
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import PRICES, AxisLink, PriceOfRounds, Shares, axis_links
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.cost.share_range import ShareRange
from hapsynth.search.formulation.choice_space import Restriction
from hapsynth.search.memory.profile import MemoryProfile
from hapsynth.search.planning.device_subsets import ClusterPlanner
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.scheduling.tasks import Machine, tasks_of
from hapsynth.search.sizing.class_costs import ClassCosts
from hapsynth.search.sizing.ratio_lp import RatioLP
from hapsynth.search.sizing.relaxation import relaxation_bound
from hapsynth.search.sizing.whole_units import ClassUnits

STEP, PADDED = "pairwise_all_to_all", "all_to_all"
SKEWED = [48.0, 8.0, *[4.0] * 6]


def model(n: int, latency: float = 0.0, where: Cluster | None = None) -> CostModel:
    """Of one value whose bytes take a second."""
    graph = trace(lambda x: x, (jax.ShapeDtypeStruct((1000, 1000), jnp.float32),)).graph
    return CostModel(graph, where or cluster([1.0] * n, bandwidth=4e6, latency=latency), FactorTable(graph))


def seconds(costs: CostModel, old: list[float], new: list[float], step: str) -> float:
    held = [np.array(shares) / sum(shares) for shares in (old, new)]
    shares = Shares(lambda dim, *_: held[dim].max(), lambda dim, *_: held[dim])
    return costs.conversion(0, (S(0),), (S(1),), 0, shares, STEPS[step])[0]


@pytest.mark.parametrize(
    ("shares", "padded", "in_rounds"),
    [
        # 7 blocks of 0.6 x 0.6. In rounds: between the first and the second 0.06, twice, as they come to each other at
        # either end of the ring; between the first and one of 0.05 five times 0.03.
        (SKEWED, 7 * 0.36, 2 * 0.06 + 5 * 0.03),
        # Of 11: 3 x 36 of 121. One place on 6 x 3, two 6 x 1, three 6 x 3 back.
        ([6.0, 3.0, 1.0, 1.0], 3 * 36 / 121, (18 + 6 + 18) / 121),
        # The two large ones to each other at one place and at three; two places on a large one and a small one.
        ([35.0, 35.0, 15.0, 15.0], 3 * 0.1225, 2 * 0.1225 + 0.0525),
        # Even pieces are padded to nothing.
        ([1.0] * 8, 7 / 64, 7 / 64),
        # Who has nothing sends nothing, and gets nothing: between the first two one round each way.
        ([3.0, 3.0, 0.0, 0.0], 3 / 4, 2 / 4),
    ],
)
def test_what_it_sends(shares: list[float], padded: float, in_rounds: float) -> None:
    costs = model(len(shares))
    assert seconds(costs, shares, shares, PADDED) == pytest.approx(padded)
    assert seconds(costs, shares, shares, STEP) == pytest.approx(in_rounds)
    held = np.array(shares) / sum(shares)
    of_each = Shares(lambda *_: held.max(), lambda *_: held)
    in_turn = 2 if 0.0 in shares else len(shares) - 1
    assert costs.exchanges(0, (S(0),), (S(1),), 0, of_each, STEPS[STEP]) == in_turn


def test_two_unlike_cuts() -> None:
    """Even rows, and columns of 0.4, 0.3, 0.2 and 0.1: in each round somebody gets a quarter of the largest."""
    columns = [4.0, 3.0, 2.0, 1.0]
    assert seconds(model(4), [1.0] * 4, columns, STEP) == pytest.approx(3 * 0.25 * 0.4)
    # From 0.7 and three times 0.1: the first sends 0.3, 0.2 and 0.1 of that, all others at most 0.1 of 0.4.
    assert seconds(model(4), [7.0, 1.0, 1.0, 1.0], columns, STEP) == pytest.approx(0.7 * 0.6)


def test_each_round_waits_for_all() -> None:
    """A permute is a collective by itself: a message, and one more to come to it. Padded all come together once."""
    costs = model(4, latency=1e-3)
    assert seconds(costs, [1.0] * 4, [1.0] * 4, STEP) - 3 / 16 == pytest.approx(3 * 2e-3)
    assert seconds(costs, [1.0] * 4, [1.0] * 4, PADDED) - 3 / 16 == pytest.approx(4e-3)
    # No round in which nobody has anything to send.
    zeros = [3.0, 3.0, 0.0, 0.0]
    assert seconds(costs, zeros, zeros, STEP) - 2 / 4 == pytest.approx(2 * 2e-3)


def along(*per_host: int, ratio: float = 10.0, **changed: Any) -> AxisLink:
    hosts = tuple(h for h, count in enumerate(per_host) for _ in range(count))
    where = Cluster("c", (device("card", 1.0),) * len(hosts), hosts, Link(1.0, 0.0), Link(ratio, 0.0))
    (link,) = axis_links(replace(where, **changed), (("hap", len(hosts)),))
    return link


def test_what_crosses_a_hosts_link() -> None:
    """Two hosts of four: k places on, k of each host send to the other, up to all four, at a byte a second."""
    assert along(4, 4).shifts == (1.0, 2.0, 3.0, 4.0, 3.0, 2.0, 1.0)
    # Of even pieces as much crosses in all as where they are padded: 4 x 4.
    assert sum(along(4, 4).shifts) == along(4, 4).swapped * along(4, 4).beta == 16
    # Three and one: only one has to leave the host, and within it is slower still.
    assert along(3, 1, ratio=0.5).shifts == (2.0, 2.0, 2.0)
    # A pair has a link of its own, ten times as fast.
    assert along(2, 2, pairs={(0, 1): Link(10.0, 0.0)}).shifts == (0.1, 0.2, 0.1)


def test_hosts_that_two_groups_share() -> None:
    """Along the first of two axes each pair is between hosts, two pairs at once."""
    where = Cluster("c", (device("card", 1.0),) * 4, (0, 0, 1, 1), Link(1.0, 0.0), Link(10.0, 0.0))
    assert [link.shifts for link in axis_links(where, (("a", 2), ("b", 2)))] == [(2.0,), (0.1,)]


@settings(max_examples=100 if THOROUGH else 50)
@given(st.data())
def test_least_of_a_range_is_no_more_than_any_in_it_takes(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 6))
    some = st.lists(st.integers(0, 20), min_size=n, max_size=n)
    old, new = (np.array(data.draw(some), dtype=np.float64) for _ in range(2))
    # Of a byte only the number of rounds counts.
    nbytes = data.draw(st.sampled_from([1e6, 1.0]))
    assume(old.sum() > 0 and new.sum() > 0)
    old, new = old / old.sum(), new / new.sum()
    hosts = tuple(sorted(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))))
    where = replace(cluster([1.0] * n), hosts=hosts, network=Link(1e6, 1e-3), intra=Link(1e7, 1e-4))
    (link,) = axis_links(where, (("hap", n),))
    price = PRICES[STEP]
    assert isinstance(price, PriceOfRounds)
    _, latency, moving = price.between(link, old, new, nbytes)
    fast = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    assume(fast.any() and not fast.all())

    def around(shares: Floats) -> ShareRange:
        low, high, *ends = (data.draw(st.floats(0, 1)) for _ in range(6))
        largest, slow, together = shares.max(), shares[~fast].max(), min(shares[fast].sum(), 1.0)
        wide = lambda x, less, more: (x * (1 - less), x + (1 - x) * more)
        between = 1 / n + (largest - 1 / n) * (1 - low), largest + (1 - largest) * high
        return ShareRange(between, wide(slow, *ends[:2]), wide(together, *ends[2:])).tightened(fast)

    exactly = [just(old, fast), just(new, fast)]
    around_them = [around(old), around(new)]
    for within in (exactly, around_them):
        assert price.least(link, nbytes, *within, fast) <= (latency + moving) * (1 + 1e-9)
        for varied, other, backward in ((within, within[1], False), (within[::-1], within[0], True)):
            # Of several ranges that were asked for at once, that of the first.
            of, beside = [varied[0], *around_them], [*around_them, other]
            each = price.least_of_each(link, nbytes, of, beside, fast, backward=backward)
            assert each[-1, 0] <= (latency + moving) * (1 + 1e-9)
    even = link.seconds(PADDED, link.wire_bytes(PADDED, nbytes / n**2))
    whole = ShareRange((1 / n, 1.0))
    assert price.least(link, nbytes, whole, whole, fast) == pytest.approx(even)


@given(st.integers(2, 7), st.floats(0, 1), st.floats(0, 1))
def test_where_even_blocks_are_less(n: int, first: float, second: float) -> None:
    """As docs/design/search.md has it: where no device has more than all but an even share of both dimensions, rounds
    send no less than even blocks would, so that this is no more than what they take."""
    of = lambda part: np.array([(m := 1 / n + part * (1 - 2 / n)), *[(1 - m) / (n - 1)] * (n - 1)])
    assert rounds(of(first), of(second), n)[1:].sum() >= (n - 1) / n**2 - 1e-12


X = np.arange(480 * 480, dtype=np.float32).reshape(480, 480) % 7


def sums(x: Any) -> Any:
    """Along the one dimension, and then along the other: each is whole where the other is cut."""
    return jnp.cumsum(jnp.cumsum(x, axis=1), axis=0).astype(jnp.int32)


def planned(n: int, largest: float, latency: float, **options: Any) -> hapsynth.Plan:
    """One device has the largest share of everything, and the others share the rest."""
    where = cluster([1.0] * n, bandwidth=1e9, latency=latency)
    measured = options.pop("collectives", {})
    where = replace(where, collectives=measured, devices=tuple(replace(d, overhead=1e-12) for d in where.devices))
    ratios = [largest, *[(1 - largest) / (n - 1)] * (n - 1)]
    asked: dict[str, Any] = {"fixed": {"[0]": "S(0)"}, "ratios": ratios, "leave_out": False, **options}
    if options.get("overlap"):
        return hapsynth.synthesize(sums, (X,), where, **asked)
    return hapsynth.synthesize(sums, (X,), first_devices(n), cluster=where, **asked)


def flip(n: int, largest: float) -> float:
    """With the largest share m padded (n - 1) m^2 of the tensor, in rounds m (1 - m), what its device gets; n - 2 more
    latencies. So rounds take less up to a latency of m (n m - 1) / (n - 2) of the bytes' time."""
    return largest * (n * largest - 1) / (n - 2) * X.nbytes / 1e9


@pytest.mark.parametrize(("n", "largest"), [(4, 0.4), (4, 0.55), (8, 0.3)])
def test_the_search_takes_the_cheaper_one(n: int, largest: float) -> None:
    for factor, name in ((0.95, STEP), (1.05, PADDED)):
        assert planned(n, largest, factor * flip(n, largest)).program.collectives() == {name: 1}
    assert planned(n, 1 / n, 0.0).program.collectives() == {PADDED: 1}


@pytest.mark.parametrize("rows", [180, 240])
def test_the_search_changes_at_the_predicted_share(rows: int) -> None:
    """At one latency: padded up to so many rows of 480 on one of four devices, in rounds from there on. Within 5 %."""
    latency, off = flip(4, rows / 480), int(0.05 * rows) // 3 * 3
    for held, name in ((rows - off, PADDED), (rows + off, STEP)):
        assert planned(4, held / 480, latency).program.collectives() == {name: 1}


def test_a_measured_permute_counts_for_what_it_took() -> None:
    """All bytes take as long by either; three permutes take as much longer than one padded all-to-all as the padding
    of 3 m^2 less m (1 - m) takes at `flip`. What was not measured is not compared."""
    m = 0.5
    line = lambda start: Curve(((0.0, start), (1e6, start + 1e-3)))
    saved = (3 * m * m - m * (1 - m)) * X.nbytes * 1e-9
    for factor, name in ((0.95, STEP), (1.05, PADDED)):
        curves = {PADDED: line(1e-9), "reshare": line(factor * saved / 3)}
        assert planned(4, m, 0.1, collectives={"hap": curves}).program.collectives() == {name: 1}
    assert planned(4, m, 0.0, collectives={"hap": {PADDED: line(1e-9)}}).program.collectives() == {PADDED: 1}


def test_it_is_offered_with_others() -> None:
    plan = planned(4, 0.5, 0.0)
    assert plan.program.collectives() == {STEP: 1}
    costs = plan.cost_model()
    assert [step.name for step in costs.steps((S(0),), (S(1),), 0)] == [PADDED, STEP]
    assert [step.name for step in STEPS.values() if step.turns(S(0), R) and step.in_rounds] == []


@pytest.mark.parametrize("speeds", [(1.0,) * 4, (3.0, 1.0, 1.0, 1.0)])
def test_the_joint_bound_is_what_it_was_without_rounds(speeds: tuple[float, ...]) -> None:
    """At its best ratios an all-to-all is of even blocks."""
    plan = planned(4, 0.5, 0.0)
    graph, where = plan.traced.graph, replace(plan.cluster, devices=cluster(list(speeds)).devices)
    restriction = Restriction({graph.inputs[0]: (S(0),)})
    bounds: list[float] = []
    for collectives in (None, frozenset[str]()):
        options = PlanningOptions(restriction=restriction, collectives=collectives)
        result = ClusterPlanner(Task(graph, where, options)).run()
        assert 0 < result.joint_lower_bound_s <= result.cost_s * (1 + 1e-9)
        bounds.append(result.joint_lower_bound_s)
    assert bounds[0] == pytest.approx(bounds[1])


@pytest.mark.few(1)
@pytest.mark.parametrize("sent", [0.5, 2.0])
def test_closer_joint_bounds_hold_at_all_ratios(sent: float) -> None:
    """As there are more nodes, however its arguments lie."""
    free = lambda **options: crossed([3.0, 1.0, 1.0, 1.0], sent, fixed=None, **options)[0]
    plan, closer = free(), free(joint_gap=1e-3)
    costs = [free(ratios=[m, *[(1 - m) / 3] * 3]).cost for m in SHARES]
    print(plan.program.collectives(), plan.joint_lower_bound, closer.joint_lower_bound, plan.cost, costs)
    assert plan.joint_lower_bound < closer.joint_lower_bound <= min(plan.cost, *costs) * (1 + 1e-9)


SHARES = (0.25, 0.3, 0.4, 0.5, 0.55, 0.7, 0.85, 1.0) if THOROUGH else (0.25, 0.55, 0.85)


@pytest.mark.few(4)
@pytest.mark.parametrize("form", ["switch", "staged"])
@pytest.mark.parametrize("ratios", [(0.5, 0.25, 0.125, 0.125), (0.5, 0.5, 0.0, 0.0), (0.4, 0.35, 0.15, 0.1)])
def test_it_gives_the_same(ratios: tuple[float, ...], form: Form, tmp_path: Path) -> None:
    plan = planned(4, 0.5, 0.0, ratios=list(ratios), form=form)
    assert plan.program.collectives() == {STEP: 1}
    assert plan.check()
    plan.save(tmp_path / "plan.json")
    again = hapsynth.load(tmp_path / "plan.json", sums, (X,), first_devices(4))
    assert again.program.instructions == plan.program.instructions
    for one in (plan, again):
        np.testing.assert_array_equal(one.unshard(one(one.shard(X))), sums(X))
    if form == "switch":
        source = plan.to_source()
        assert "lax.ppermute" in source
        assert "all_to_all" not in plan.lower().as_text()


def test_on_eight_devices() -> None:
    plan = planned(8, 0.6, 0.0, ratios=[x / 80 for x in SKEWED])
    assert plan.program.collectives() == {STEP: 1}
    np.testing.assert_array_equal(plan.unshard(plan(plan.shard(X))), sums(X))
    assert plan.lower().as_text().count("stablehlo.collective_permute") == 7


def test_in_a_schedule_it_takes_the_network_for_all_of_its_time() -> None:
    plan = planned(4, 0.5, 0.0, overlap=True)
    assert plan.program.collectives() == {STEP: 1}
    tasks = tasks_of(plan.program, plan.sizes, plan.cost_model())
    (sent,) = [task for task, machine in enumerate(tasks.machine) if machine is Machine.LINK]
    assert tasks.longest[sent] == pytest.approx(0.25 * X.nbytes / 1e9)


def test_why_this_one() -> None:
    """The other's seconds stand beside it."""
    plan = planned(4, 0.5, 0.0)
    (line,) = [line for line in cost_lines(plan) if isinstance(line, Sending)]
    assert (line.step, set(line.others)) == (STEP, {PADDED})
    assert line.seconds == pytest.approx(0.25 * X.nbytes / 1e9)
    assert line.others[PADDED] == pytest.approx(0.75 * X.nbytes / 1e9)
    out = StringIO()
    print_costs(Console(file=out, width=200), plan, cost_lines(plan), 5)
    assert f", by all_to_all {quantity(line.others[PADDED])}" in out.getvalue()


def crossed(speeds: list[float], sent: float, **options: Any) -> tuple[hapsynth.Plan, set[float]]:
    """A product by rows and one by columns, an all-to-all between, on a device three times as fast as three others:
    sent whole in `sent` of the time that a slow one alone would compute a product in. The plan and the fast one's
    shares."""
    where = untiled(cluster(speeds, latency=0.0))
    computing = 2 * 480 * 480 * 240 / where.devices[-1].rate("float32")
    bandwidth = 480 * 240 * 4 / (sent * computing)
    devices = tuple(replace(d, overhead=1e-15, bandwidth=1e18) for d in where.devices)
    asked: dict[str, Any] = {"fixed": {"[0]": "S(0)", "[1]": "R", "[2]": "R"}, "leave_out": False, **options}
    where = replace(where, devices=devices, network=Link(bandwidth, 0.0))
    u = np.eye(480, dtype=np.float32)
    fn = lambda x, w, u: (u @ jnp.cumsum(x @ w, axis=1)).astype(jnp.bfloat16)
    plan = hapsynth.synthesize(fn, (X, u[:, :240], u), where, **asked)
    return plan, {round(shares[0] / sum(shares), 3) for shares in plan.sizes.shares}


def test_ratios_follow_what_it_costs() -> None:
    """With a share m of the fast device both products take (1 - m) / 3 of a slow one's time, down to 1/6 at 1/2; rounds
    take m (1 - m) of the bytes' time, 3/16 when all are even and 1/4 there. So it pays to go there, and to no other m,
    as what is gained grows with m, up to where the bytes take 2 (1/4 - 1/6) x 16 = 8/3 of a product's time. Padded
    3 m^2 would stop paying at (1/6) / (9/16) = 8/27."""
    for factor, share, name in ((0.95, 0.5, STEP), (1.05, 0.25, PADDED)):
        plan, shares = crossed([3.0, 1.0, 1.0, 1.0], factor * 8 / 3)
        assert (plan.program.collectives(), shares) == ({name: 1}, {share})


def test_what_sizes_decide_of_its_cost() -> None:
    """All of it is counted where sizes are chosen, and where units are."""
    plan = planned(4, 0.5, 1e-5)
    assert plan.program.collectives() == {STEP: 1}
    costs, classes = plan.cost_model(), plan.sizes.classes
    class_costs = ClassCosts(plan.program, classes, costs)
    assert (len(class_costs.rounds), class_costs.comm_terms, class_costs.has_products) == (1, [], True)
    found: list[float] = []
    for shares in ((240, 80, 80, 80), (120, 120, 120, 120), (400, 0, 40, 40), (0, 0, 0, 480), (121, 119, 1, 239)):
        sizes = Sizes(plan.traced.graph, classes, (shares, *plan.sizes.shares[1:]))
        found.append(program_cost(plan.program, sizes, costs) - class_costs.cost(sizes))
        units = ClassUnits(class_costs, 0, plan.sizes).seconds(np.array([shares, plan.sizes.shares[0]]))
        assert units[0] - units[1] == pytest.approx(class_costs.cost(sizes) - class_costs.cost(plan.sizes))
    assert found == pytest.approx([found[0]] * len(found))


def test_a_linear_program_knows_each_round() -> None:
    """With the shares of one dimension given, those of the other are the best that there are."""
    plan = planned(4, 0.5, 0.0)
    costs, classes = plan.cost_model(), plan.sizes.classes
    class_costs, memory = (
        ClassCosts(plan.program, classes, costs),
        MemoryProfile(plan.program, classes, costs),
    )
    (term,) = class_costs.rounds
    draw, given = np.random.default_rng(0), np.array([0.45, 0.25, 0.2, 0.1])
    for free, pinned in ((term.old[0], term.new[0]), (term.new[0], term.old[0])):
        shares = [
            tuple(int(x) for x in given * c.units) if c.index == pinned else plan.sizes.shares[c.index]
            for c in classes.all
        ]
        sizes = Sizes(plan.traced.graph, classes, tuple(shares))
        lp = RatioLP(class_costs, memory, (0,), np.arange(4), np.ones(4), sizes, {pinned})
        found = lp.solve([], np.inf)
        assert found is not None

        def at(x: Any, free: int = free) -> float:
            old, new = (x, given) if free == term.old[0] else (given, x)
            return float(term.at(old, new, lambda cut: 1.0))

        others = np.concatenate([draw.dirichlet(np.full(4, spread), 200) for spread in (0.3, 1.0, 10.0)])
        # What is computed is a hundredth.
        assert at(found[free]) <= 1.01 * min(map(at, others))
        assert at(found[free]) < 0.95 * at(np.full(4, 0.25))


def test_bounds_of_sizes_hold_at_all_sizes() -> None:
    plan = planned(4, 0.5, 0.0)
    costs, classes = plan.cost_model(), plan.sizes.classes
    class_costs, memory = (
        ClassCosts(plan.program, classes, costs),
        MemoryProfile(plan.program, classes, costs),
    )
    bound = relaxation_bound(class_costs, memory, {(0,): np.zeros(4, np.int64)}, {}, plan.sizes, np.inf, lambda: np.inf)
    even = Sizes(plan.traced.graph, classes, tuple((c.units // 4,) * 4 for c in classes.all))
    assert 0.9 * class_costs.cost(even) < bound <= class_costs.cost(even) < class_costs.cost(plan.sizes)


def test_two_axes() -> None:
    """Where another axis cuts the rows too, a round is as wide as the largest piece in any of its groups: in the one
    the first device has 6 of its 8 rows of 12, in the other half of 4. Of 12 x 8 elements, in columns of 6 and 2, one
    place on goes 6 x 2, or 2 x 6."""
    x = jax.ShapeDtypeStruct((12, 8), jnp.float32)
    graph = trace(lambda x: x, (x,)).graph
    costs = CostModel(
        graph, cluster([1.0] * 4, bandwidth=12 * 8 * 4.0, latency=0.0), FactorTable(graph), (("a", 2), ("b", 2))
    )
    source: Layout = (S(0), S(0, 1))
    rows, columns = np.array([6, 2, 2, 2]) / 12, np.array([6, 2]) / 8
    each: dict[tuple[int, tuple[int, ...]], Any] = {(0, (0, 1)): rows, (1, (1,)): columns}
    shares = Shares(lambda dim, axes, way: each[dim, axes].max(), lambda dim, axes, way: each[dim, axes])
    found = costs.conversion(0, source, (S(0), S(1)), 1, shares, STEPS[STEP])[0]
    assert found == pytest.approx(12 / 96)


def test_rounds_that_send_something() -> None:
    """Two devices have half of one dimension each. Of four shares of the other all but one may be nothing, so in only
    one round something must be sent; where all have some, in all three."""
    fast = np.array([True, True, False, False])
    halves = ShareRange((0.5, 0.5), (0.0, 0.0), (1.0, 1.0))
    number = lambda other: least_rounds(halves, other, fast, [1.0] * 3).number
    assert number(ShareRange((0.25, 1.0))) == 1
    assert number(ShareRange((0.25, 0.3), (0.2, 0.25), (0.5, 0.6)).tightened(fast)) == 3


@pytest.mark.parametrize("backward", [False, True])
def test_many_at_once_are_as_each_alone(backward: bool) -> None:
    """Also beside a range of which no shares are: the fast ones have at most 0.6 together, and are said to have 0.9."""
    fast, ones = np.array([True, True, False, False]), [1.0] * 3
    none = ShareRange((0.25, 0.3), (0.0, 0.3), (0.9, 1.0))
    varied = [ShareRange((0.3, 0.35)), none, ShareRange((0.25, 0.6), (0.1, 0.2)).tightened(fast)]
    others = [ShareRange((3 / 8, 3 / 8), (1 / 8, 1 / 8)), ShareRange((0.25, 1.0)), ShareRange((0.9, 1.0))]
    number, sent = least_rounds_of_each(varied, others, fast, ones, backward=backward)
    for k, other in enumerate(others):
        (of,), (least,) = least_rounds_of_each(varied, [other], fast, ones, backward=backward)
        assert (of == number[k]).all()
        assert least == pytest.approx(sent[k], rel=1e-9)
        for i in (0, 2):
            alone = least_rounds_of_each([varied[i]], [other], fast, ones, backward=backward)[1]
            assert alone.item() <= sent[k, i] * (1 + 1e-9)


def test_who_has_most_of_one_dimension_gets_nearly_all_of_it() -> None:
    """All of nine tenths or more, but what its share of the other, of 0.6 at most, leaves it."""
    fast = np.array([True, True, False, False])
    assert least_rounds(ShareRange((0.25, 0.6)), ShareRange((0.9, 1.0)), fast, [1.0] * 3).sent == pytest.approx(0.36)


def test_what_rounds_send_at_least_is_nearly_what_they_send() -> None:
    """Two devices of 0.35 of the rows and 3 of 8 experts, two slower ones: of the experts all is known, of the rows how
    much slow devices have at most. The rounds send 0.319 of the tensor: 0.131 between the fast ones, twice, 0.056."""
    fast = np.array([True, True, False, False])
    experts = ShareRange((3 / 8, 3 / 8), (1 / 8, 1 / 8))
    rows = ShareRange((0.25, 1.0), (0.0, 0.15)).tightened(fast)
    assert rows.largest[0] == pytest.approx(0.35)
    sent = rounds(np.array([0.35, 0.35, 0.15, 0.15]), np.array([3, 3, 1, 1]) / 8, 4)[1:]
    assert sent.tolist() == pytest.approx([0.13125, 0.05625, 0.13125])
    # Both fast ones may not have 0.35 each, but together no less than 0.7.
    assert least_rounds(rows, experts, fast, [1.0] * 3).sent == pytest.approx(sent.sum(), rel=1e-6)
    # As of the slow ones together.
    together = ShareRange((0.25, 1.0), (0.0, 1.0), (0.7, 0.7)).tightened(fast)
    assert together.slow == pytest.approx((0.15, 0.3))
    assert least_rounds(together, experts, fast, [1.0] * 3).sent == pytest.approx(0.9875 * sent.sum(), rel=0.02)
    assert least_rounds(ShareRange((0.34, 0.36)), experts, fast, [1.0] * 3).sent == pytest.approx(0.28125, rel=1e-6)
