"""Collectives over hosts: around one ring, or within hosts and between them. Every threshold is derived in its test."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from graphs import device
from rich.console import Console
from slow_devices import first_devices

import hapsynth
from hapsynth._quantities import seconds as quantity
from hapsynth.cluster.cluster import Cluster, Link
from hapsynth.cluster.curves import Curve
from hapsynth.instructions.collectives import STEPS, hosts_along, over_parts
from hapsynth.instructions.layout import P, R
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import ProgramError
from hapsynth.plan import Form
from hapsynth.report.cost_breakdown import Sending, cost_lines, print_costs
from hapsynth.search.cost.network import AxisLink, axis_links
from hapsynth.search.scheduling.tasks import Machine, tasks_of

NETWORK = Link(1e9, 0.0)


def cluster_of(*per_host: int, ratio: float, latency: float = 0.0, **changed: Any) -> Cluster:
    """Devices within a host are joined by `ratio` times the network's bandwidth."""
    hosts = tuple(h for h, count in enumerate(per_host) for _ in range(count))
    card = replace(device("card", 1.0), overhead=1e-12)
    links = Link(1e9, latency), Link(ratio * 1e9, latency / 4)
    return replace(Cluster("c", (card,) * len(hosts), hosts, *links), **changed)


def along(cluster: Cluster) -> AxisLink:
    (link,) = axis_links(cluster, (("hap", cluster.n),))
    return link


def seconds(link: AxisLink, step: str, block: float) -> float:
    return link.seconds(step, link.wire_bytes(step, block))


def test_two_hosts_of_four() -> None:
    """Of a tensor of 1 GB. Flat 2 x 7/8 of it pass a host's link. Over hosts 2 x 1/2 do, whichever of the four sends
    them, and within hosts 3/4 go round twice, at ten times the pace."""
    link = along(cluster_of(4, 4, ratio=10.0))
    assert seconds(link, "all_reduce", 1e9) == pytest.approx(1.75)
    assert seconds(link, "hierarchical_all_reduce", 1e9) == pytest.approx(1.0 + 2 * 0.75 / 10)
    # Of eight blocks flat 7 pass; over hosts the 4 of the other host, and each device of a host is sent 3 pairs.
    for step in ("all_gather", "reduce_scatter"):
        assert seconds(link, step, 1e9 / 8) == pytest.approx(7 / 8)
        assert seconds(link, f"hierarchical_{step}", 1e9 / 8) == pytest.approx(4 / 8 + 3 * 2 / 8 / 10)


def test_hosts_of_three_and_one() -> None:
    """Flat 2 x 3/4 pass. Over hosts the first of each sends 2 x 1/2, and all of it is summed twice within the host of
    three, 2 x 2/3 each time. Only sums take groups that are unequal."""
    link = along(cluster_of(3, 1, ratio=10.0))
    assert seconds(link, "all_reduce", 1e9) == pytest.approx(1.5)
    assert seconds(link, "hierarchical_all_reduce", 1e9) == pytest.approx(1.0 + 2 * 4 / 3 / 10)
    assert [step.name for step in STEPS.values() if step.over != "positions" and link.offers(step)] == [
        "hierarchical_all_reduce"
    ]


def test_hosts_of_eight_eight_and_four() -> None:
    """A gather and a reduce-scatter go over five parts of four: 4 rings of 4 blocks each pass a host's link, flat 19
    blocks; and each device is sent 3 times 5 blocks within its part. A sum goes by the first device of each host."""
    assert over_parts(((0, 1, 4, 5), (2, 3)), "equal hosts") == ((0, 1), (4, 5), (2, 3))
    assert over_parts(((0, 1, 2), (3,)), "hosts") == ((0, 1, 2), (3,))
    link = along(cluster_of(8, 8, 4, ratio=10.0))
    for step in ("all_gather", "reduce_scatter"):
        assert link.offers(STEPS[f"hierarchical_{step}"])
        assert seconds(link, step, 1e9 / 20) == pytest.approx(19 / 20)
        assert seconds(link, f"hierarchical_{step}", 1e9 / 20) == pytest.approx(16 / 20 + 3 * 5 / 20 / 10)
    assert seconds(link, "hierarchical_all_reduce", 1e9) == pytest.approx(2 * 2 / 3 + 4 * 7 / 8 / 10)


def test_messages() -> None:
    """Four hosts of four, 20 us between and 5 within. A flat ring begins with one of 20, and a message passes 4 x 3
    hops of 5 and 4 of 20 but the least: 155 us; a tree is a chain of 3 and 2 hops of 20. Over hosts a ring of four
    within takes 4 x 5, and a tree between 20 + 2 x 2 x 20, a ring 20 + 3 x 20."""
    link, us = along(cluster_of(4, 4, 4, 4, ratio=10.0, latency=20e-6)), 1e-6
    assert link.seconds("all_reduce", 0.0) == pytest.approx((20 + 2 * (3 * 5 + 2 * 20)) * us)
    assert link.seconds("hierarchical_all_reduce", 0.0) == pytest.approx((20 + 20 + 4 * 20 + 20) * us)
    assert link.seconds("all_gather", 0.0) == pytest.approx((20 + 11 * 5 + 4 * 20) * us)
    assert link.seconds("hierarchical_all_gather", 0.0) == pytest.approx((20 + 60 + 20) * us)


def test_where_there_are_hosts() -> None:
    assert hosts_along([[0, 0, 1, 1], [2, 2, 3, 3]]) == ((0, 1), (2, 3))
    assert hosts_along([[0, 1, 0]]) == ((0, 2), (1,))
    for lines in ([[0, 0, 0]], [[0, 1, 2]], [[0, 0, 1, 1], [0, 1, 0, 1]]):
        assert hosts_along(lines) == ()
    for per_host in ((8,), (1,) * 8):
        link = along(cluster_of(*per_host, ratio=10.0))
        assert not any(link.offers(step) for step in STEPS.values() if step.over != "positions")
    # Two axes: neither has several hosts and several devices in one.
    assert [link.hosts for link in axis_links(cluster_of(2, 2, ratio=10.0), (("a", 2), ("b", 2)))] == [(), ()]
    # What is modelled is not compared with what was measured.
    curve = Curve(((0.0, 1e-5), (1e6, 1e-3)))
    measured = along(cluster_of(4, 4, ratio=10.0, collectives={"hap": {"all_reduce": curve}}))
    assert not measured.offers(STEPS["hierarchical_all_reduce"])
    assert measured.offers(STEPS["all_reduce"])
    # Nor the permutes that a balanced one has a part in.
    for names in (("all_gather",), ("all_gather", "reshare")):
        measured = along(cluster_of(1, 1, ratio=10.0, collectives={"hap": dict.fromkeys(names, curve)}))
        assert measured.offers(STEPS["balanced_all_gather"]) == ("reshare" in names)


def test_of_a_measured_cluster_the_search_takes_what_was_measured_to_be_faster() -> None:
    """Seconds by wire bytes, of which a flat sum sends 2 x 7/8 of the tensor, one over hosts the whole: the flip is
    where that takes 7/4 times as long for each byte."""
    for factor, name in ((1.05, "all_reduce"), (0.95, "hierarchical_all_reduce")):
        per_byte = {"all_reduce": 1e-9, "hierarchical_all_reduce": 7 / 4 * factor * 1e-9}
        curves = {step: Curve(((0.0, 1e-12), (1e6, 1e6 * seconds))) for step, seconds in per_byte.items()}
        cluster = cluster_of(4, 4, ratio=1.0, collectives={"hap": curves})
        assert planned(summed, cluster).program.collectives() == {name: 1}


X = np.arange(480 * 64, dtype=np.float32).reshape(480, 64) % 7


def planned(fn: Any, cluster: Cluster, cut: str = "S(0)", **options: Any) -> hapsynth.Plan:
    asked: dict[str, Any] = {
        "fixed": {"[0]": cut},
        "leave_out": False,
        "ratios": [1 / cluster.n] * cluster.n,
        **options,
    }
    return hapsynth.synthesize(fn, (X,), first_devices(cluster.n), cluster=cluster, **asked)


def summed(x: jax.Array) -> jax.Array:
    """A sum over the rows, with which each goes on: cut by rows it is an all-reduce."""
    return x * (x.T @ x).sum()


def gathered(x: jax.Array) -> jax.Array:
    return x @ x.T


@pytest.mark.parametrize(
    ("fn", "per_host", "flip", "step"),
    [
        # 2 x (7/8 - 1/2) of the tensor less between hosts for 2 x 3/4 within.
        (summed, (4, 4), 2, "all_reduce"),
        # 2 x (3/4 - 1/2) less for 2 x 2 x 2/3.
        (summed, (3, 1), 16 / 3, "all_reduce"),
        # 2 x (7/8 - 2/3) less for 2 x 2 x 3/4.
        (summed, (4, 2, 2), 7.2, "all_reduce"),
        # 7 - 4 blocks less for 3 x 2.
        (gathered, (4, 4), 2, "all_gather"),
        # 7 - 6 for 4.
        (gathered, (2, 2, 2, 2), 4, "all_gather"),
        # 5 - 4 for 3, over three parts of two.
        (gathered, (4, 2), 3, "all_gather"),
    ],
)
def test_the_search_changes_at_the_predicted_ratio_of_links(
    fn: Any, per_host: tuple[int, ...], flip: float, step: str
) -> None:
    for factor, name in ((0.95, step), (1.05, f"hierarchical_{step}")):
        plan = planned(fn, cluster_of(*per_host, ratio=factor * flip))
        assert plan.program.collectives() == {name: 1}


@pytest.mark.parametrize("form", ["switch", "staged", "fused"])
@pytest.mark.parametrize(
    ("fn", "per_host"), [(summed, (4, 4)), (summed, (3, 1)), (gathered, (2, 2)), (gathered, (4, 2))]
)
def test_it_gives_the_same(fn: Any, per_host: tuple[int, ...], form: Form, tmp_path: Path) -> None:
    cluster = cluster_of(*per_host, ratio=100.0)
    plan = planned(fn, cluster, form=form)
    (name,) = plan.program.collectives()
    assert name.startswith("hierarchical")
    assert plan.check()
    plan.save(tmp_path / "plan.json")
    again = hapsynth.load(tmp_path / "plan.json", fn, (X,), first_devices(cluster.n))
    assert again.program.hosts == plan.program.hosts != ()
    for one in (plan, again):
        np.testing.assert_allclose(one.unshard(one(one.shard(X))), fn(X), rtol=1e-5)
    if form == "switch":
        source = plan.to_source()
        assert "axis_index_groups" in source


def test_in_a_schedule_it_takes_the_network_for_all_of_its_time() -> None:
    """A run does the parts of a collective one after the other, and nothing else over the network meanwhile."""
    cluster = cluster_of(4, 4, ratio=10.0)
    asked: dict[str, Any] = {"fixed": {"[0]": "S(0)"}, "leave_out": False, "ratios": [1 / 8] * 8}
    plan = hapsynth.synthesize(summed, (X,), cluster, overlap=True, **asked)
    (name,) = plan.program.collectives()
    assert name == "hierarchical_all_reduce"
    tasks = tasks_of(plan.program, plan.sizes, plan.cost_model())
    (sent,) = [task for task, machine in enumerate(tasks.machine) if machine is Machine.LINK]
    assert tasks.longest[sent] == pytest.approx(seconds(along(cluster), name, tasks.transfers[sent].nbytes))
    assert tasks.transfers[sent].nbytes in (4.0, 64 * 64 * 4.0)


def test_why_this_one() -> None:
    """The others' seconds stand beside it, each of all runs."""
    cluster = cluster_of(2, 2, ratio=10.0)
    plan = planned(gathered, cluster, ratios=[0.4, 0.2, 0.2, 0.2])
    (line,) = [line for line in cost_lines(plan) if isinstance(line, Sending)]
    every = {line.step: line.seconds, **line.others}
    assert set(every) == {"all_gather", "balanced_all_gather", "hierarchical_all_gather"}
    assert line.seconds == min(every.values())
    assert every["all_gather"] == pytest.approx(seconds(along(cluster), "all_gather", 0.4 * X.nbytes))
    out = StringIO()
    print_costs(Console(file=out, width=200), plan, cost_lines(plan), 5)
    assert f", by all_gather {quantity(every['all_gather'])}" in out.getvalue()


def test_hosts_that_are_not_there_are_refused() -> None:
    plan = planned(gathered, cluster_of(2, 2, ratio=100.0))
    graph, program = plan.traced.graph, plan.program
    check(graph, program)
    with pytest.raises(ProgramError, match="hierarchical_all_gather along hap is for equal hosts, and there are none"):
        check(graph, replace(program, hosts=()))
    with pytest.raises(ProgramError, match="is for equal hosts"):
        check(graph, replace(program, hosts=(((0, 1, 2), (3,)),)))
    with pytest.raises(ProgramError, match="the hosts of axis hap have positions"):
        check(graph, replace(program, hosts=(((0, 1), (1, 2)),)))
    with pytest.raises(ProgramError, match="hosts of 2 axes"):
        check(graph, replace(program, hosts=(*program.hosts, ())))


def test_a_largest_goes_over_all_alike() -> None:
    assert [s.name for s in STEPS.values() if s.turns(P("max"), R)] == ["all_reduce"]
