"""What collectives pass along an axis, derived by hand: alpha-beta of rings, trees and direct messages."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from cluster_files import CARD

from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.curves import Curve, Lines
from hapsynth.cluster.links import HostLinks, Link
from hapsynth.hlo.collectives import Collective
from hapsynth.instructions.collectives import Moved
from hapsynth.instructions.staging.moved_rows import moves
from hapsynth.search.cost.collective_price import NetworkPrice
from hapsynth.search.cost.network import MOVES, PRICES, AxisLink, PriceOfRounds, Shares, axis_links

NETWORK, INTRA = Link(1e9, 20e-6), Link(10e9, 5e-6)
US = 1e-6


def cluster_of(*per_host: int, intra: Link | None = INTRA, **links: object) -> Cluster:
    hosts = tuple(h for h, count in enumerate(per_host) for _ in range(count))
    return replace(Cluster("c", (CARD,) * len(hosts), hosts, NETWORK, intra), **links)


def along(cluster: Cluster) -> AxisLink:
    """All devices as one axis."""
    (link,) = axis_links(cluster, (("hap", cluster.n),))
    return link


def test_one_device_in_each_of_64_hosts() -> None:
    """After one latency to begin, a ring all-reduce waits for 2 x 63 messages, a tree for 2 x 6 (64 = 2^6), of 20 us
    each; the ring sends 126 / 64 of the tensor over each link, the tree twice the tensor."""
    link = along(cluster_of(*[1] * 64))
    small = 4096.0
    wire = link.wire_bytes("all_reduce", small)
    assert wire == pytest.approx(126 / 64 * small)
    assert link.seconds("all_reduce", wire) == pytest.approx(13 * 20 * US + 2 * small / 1e9)
    # Not what it takes two: 1 + 2 x 1 messages.
    two = along(cluster_of(1, 1))
    assert two.seconds("all_reduce", two.wire_bytes("all_reduce", small)) == pytest.approx(3 * 20 * US + small / 1e9)
    # The other rings go round once, and messages to each other device come one after the other.
    for step in ("all_gather", "reduce_scatter", "all_to_all"):
        assert link.seconds(step, 0.0) == pytest.approx(64 * 20 * US)
        assert link.seconds(step, 63e6) == pytest.approx(64 * 20 * US + 63e-3)


@pytest.mark.parametrize(("n", "depth"), [(4, 2), (5, 3), (8, 3), (9, 4), (64, 6)])
def test_from_a_size_on_all_reduce_is_a_ring(n: int, depth: int) -> None:
    """2 (n - 1) messages and 2 (n - 1) / n of the bytes against 2 x depth and twice the bytes: equal where the bytes
    are (n - 1 - depth) n x latency x bandwidth."""
    link = along(cluster_of(*[1] * n))
    flip = (n - 1 - depth) * n * 20 * US * 1e9
    ring = lambda nbytes: (1 + 2 * (n - 1)) * 20 * US + 2 * (n - 1) / n * nbytes / 1e9
    tree = lambda nbytes: (1 + 2 * depth) * 20 * US + 2 * nbytes / 1e9
    for factor, cheaper in ((0.95, tree), (1.05, ring)):
        nbytes = factor * flip
        found = link.seconds("all_reduce", link.wire_bytes("all_reduce", nbytes))
        assert found == pytest.approx(cheaper(nbytes))
        assert found <= min(ring(nbytes), tree(nbytes)) * (1 + 1e-12)


def test_hosts_of_several_devices() -> None:
    """Hosts of 8, 8 and 4: a ring has 7 + 7 + 3 hops inside them and 3 between, and a message makes all but one inside.
    The tree is a chain of 8 in each host and two levels of hosts."""
    link = along(cluster_of(8, 8, 4))
    assert link.ring_s == pytest.approx((16 * 5 + 3 * 20) * US)
    assert link.tree_s == pytest.approx((7 * 5 + 2 * 20) * US)
    # From a device of the last host, 3 messages inside it and 16 to others.
    assert link.direct_s == pytest.approx((3 * 5 + 16 * 20) * US)
    assert (link.beta, link.latency) == (1e-9, 20e-6)
    # Eight devices of a host have a block for each of the 12 others.
    assert link.swapped == 8 * 12


def test_inside_one_host() -> None:
    link = along(cluster_of(8))
    assert (link.ring_s, link.tree_s, link.direct_s) == tuple(pytest.approx(7 * 5 * US) for _ in range(3))
    assert (link.beta, link.swapped) == (1e-10, 7)
    # A chain of 8 is as far as around the ring, and sends more.
    pace = link.pace("all_reduce")
    assert isinstance(pace, Lines)
    assert pace.lines == (pytest.approx((75 * US, 1e-10)),)
    assert along(cluster_of(8, intra=None)).beta == 1e-9


def test_groups_share_the_way_out_of_a_host() -> None:
    cluster = cluster_of(4, 4)
    across, within = axis_links(cluster, (("host", 2), ("device", 4)))
    assert (across.beta, within.beta) == (4e-9, 1e-10)
    assert (across.ring_s, within.ring_s) == (pytest.approx(20 * US), pytest.approx(3 * 5 * US))
    assert across.slowest == "[network] of the cluster file, shared by 4 groups"
    assert within.slowest == "[intra] of the cluster file"


def test_the_slowest_link_that_it_passes() -> None:
    slow, fast = HostLinks(Link(0.25e9, 50e-6)), HostLinks(Link(4e9, 2e-6), Link(40e9, 1e-6))
    mixed = along(cluster_of(2, 2, 2, host_links={0: fast, 2: slow}))
    assert mixed.beta == 4e-9
    assert mixed.slowest == "network of host 2 of the cluster file"
    # Hops in order: inside 1, 5, 5 us; from 0 to 1 20, from 1 to 2 and back to 0 50. A message spares the least.
    assert mixed.ring_s == pytest.approx((5 + 5 + 20 + 50 + 50) * US)
    assert mixed.tree_s == pytest.approx((5 + 2 * 50) * US)
    assert mixed.direct_s == pytest.approx((5 + 4 * 50) * US)
    # All of 0 to 1 alone is as fast as 1.
    assert along(cluster_of(2, 2, host_links={0: fast})).beta == 1e-9
    # PCIe beside NVLink: the ring goes through both.
    pcie = along(cluster_of(4, 4, network=Link(100e9, 2e-6), host_links={1: HostLinks(intra=Link(2e9, 9e-6))}))
    assert (pcie.beta, pcie.slowest) == (5e-10, "intra of host 1 of the cluster file")
    assert (along(cluster_of(4, 4, network=Link(100e9, 2e-6))).slowest) == "[intra] of the cluster file"


def test_a_pair_of_hosts_with_a_link_of_its_own() -> None:
    """Around 0, 1, 2: from 0 to 1 by the pair's link, from 1 to 2 and from 2 to 0 by the network. All of an all-to-all
    from host 2 goes through its way out: 2 devices with 4 blocks each; from 0, 2 devices with 2 each."""
    pair = {(0, 1): Link(8e9, 1e-6)}
    link = along(cluster_of(2, 2, 2, pairs=pair))
    assert (link.beta, link.swapped) == (1e-9, 8)
    assert link.ring_s == pytest.approx((3 * 5 + 20 + 20) * US)
    assert along(cluster_of(2, 2, pairs=pair)).beta == 1 / 8e9
    slow = along(cluster_of(2, 2, 2, pairs={(0, 1): Link(0.1e9, 1e-6)}))
    assert slow.beta == pytest.approx(1e-8)
    assert slow.slowest == "[[links]] between hosts 0 and 1 of the cluster file"
    # 2 x 2 blocks over a link of a tenth: as 4 of the 10 ns units that beta counts.
    assert slow.swapped == pytest.approx(4)


@pytest.mark.parametrize(
    ("cluster", "network", "seconds"),
    [
        # Four devices of a host have four blocks each for the other host: 16 at 25 GB/s; three stay, at 12 GB/s.
        (cluster_of(4, 4, intra=Link(12e9, 1e-6)), 25e9, 16 / 25e9),
        # At 100 GB/s those that stay take longer.
        (cluster_of(4, 4, intra=Link(12e9, 1e-6)), 100e9, 3 / 12e9),
        # Two blocks leave each of three devices; inside host 0 two come to each, at 0.5 GB/s.
        (cluster_of(3, 2, host_links={0: HostLinks(intra=Link(5e8, 1e-6))}), 1e9, 6 / 1e9),
        (cluster_of(3, 1, 1, host_links={0: HostLinks(intra=Link(5e8, 1e-6))}), 4e9, 2 / 5e8),
        # Four blocks go over the link that two hosts have of their own; by the network two leave each of these, and
        # four the third.
        (cluster_of(2, 2, 1, intra=Link(5e8, 1e-6), pairs={(0, 1): Link(1e9, 1e-6)}), 2e9, 4 / 1e9),
    ],
)
def test_an_all_to_all_where_a_ring_is_slowest_inside_hosts(cluster: Cluster, network: float, seconds: float) -> None:
    link = along(replace(cluster, network=Link(network, 1e-6)))
    assert link.beta > 1 / network
    wire = link.wire_bytes("all_to_all", 1e9)
    assert link.seconds("all_to_all", wire) - link.seconds("all_to_all", 0.0) == pytest.approx(1e9 * seconds)
    rounds = PRICES["pairwise_all_to_all"]
    assert isinstance(rounds, PriceOfRounds)
    assert rounds.evenly(link, 1e9, 1) == pytest.approx(link.seconds("all_to_all", wire))


def test_a_message_around_any_ring(rng: np.random.Generator) -> None:
    """From whichever device it comes: the longest of all ways around but one hop."""
    for _ in range(50):
        per_host = rng.integers(1, 5, int(rng.integers(2, 6))).tolist()
        own = {h: HostLinks(*(Link(1e9, float(x) * US) for x in rng.integers(1, 60, 2))) for h in range(len(per_host))}
        pairs = {(a, b): Link(1e9, 3e-6) for a, b in pairwise(range(len(per_host))) if rng.random() < 0.3}
        cluster = cluster_of(*per_host, host_links=own, pairs=pairs)
        n, hosts = cluster.n, cluster.hosts
        hop = [
            (cluster.inside(a) if a == b else cluster.between(a, b)).latency
            for a, b in zip(hosts, [*hosts[1:], hosts[0]], strict=True)
        ]
        longest = max(sum(hop[(first + k) % n] for k in range(n - 1)) for first in range(n))
        assert along(cluster).ring_s == pytest.approx(longest)


def reshared(link: AxisLink, old: list[int], new: list[int], nbytes: float) -> float:
    """Seconds of sending the rows that change owner."""
    fractions = np.array(old) / sum(old), np.array(new) / sum(new)
    cuts = (0, (0,), 0), (0, (0,), 1)
    each = Shares(lambda *cut: 1.0, lambda dim, axes, way: fractions[way])
    return MOVES.sent(link, "reshare", nbytes, Moved(*cuts, ()), each).seconds


def test_rows_that_several_devices_send_share_their_way_out() -> None:
    """Three rows in each of four devices and one in each of four others become two. Two places on go up to two rows of
    the third, fourth and fifth device, one place on up to two of all others. Of two hosts of four the third and fourth
    send at once, and then the fourth: pieces of 2 x 2 and 2 rows of 16 go through the way out."""
    old, new = [3, 3, 3, 3, 1, 1, 1, 1], [2] * 8
    still = {"network": Link(1e9, 0.0), "intra": Link(10e9, 0.0)}
    assert reshared(along(cluster_of(*[1] * 8, **still)), old, new, 16e9) == pytest.approx(2 + 2)
    assert reshared(along(cluster_of(4, 4, **still)), old, new, 16e9) == pytest.approx(2 * 2 + 2)
    # Nothing leaves a host.
    assert reshared(along(cluster_of(4, 4, **still)), [3, 1, 1, 3, 2, 2, 2, 2], new, 16e9) == pytest.approx(2 * 0.1)


@pytest.mark.parametrize("measured", [False, True])
def test_rows_that_move_cost_what_their_permutes_do(measured: bool, rng: np.random.Generator) -> None:
    """As a compiled program's permutes are priced, between the devices that send something; and no less than what some
    device has to send or to get."""
    for lengths in ((8,), (2, 4), (4, 2), (5,)) * 5:
        hosts = np.cumsum(rng.random(np.prod(lengths)) < 0.4)
        own = {h: HostLinks(*(Link(float(x) * 1e9, 0.0) for x in rng.integers(1, 30, 2))) for h in range(0, 8, 2)}
        pairs = {(a, a + 1): Link(3e9, 0.0) for a in range(7) if rng.random() < 0.2}
        curve = {"reshare": Curve(((0.0, 1e-9), (1e6, 1e-3)))} if measured else {}
        axes = [(f"axis {length}", length) for length in lengths]
        cluster = replace(
            cluster_of(*[1] * hosts.size, host_links=own, pairs=pairs),
            hosts=tuple(hosts.tolist()),
            network=Link(1e9, 0.0),
            intra=Link(10e9, 0.0),
            axes=tuple(axes),
            collectives={name: curve for name, _ in axes},
        )
        price = NetworkPrice(cluster, axes)
        for axis, (n, link) in enumerate(zip(lengths, axis_links(cluster, axes), strict=True)):
            lines = np.moveaxis(np.arange(hosts.size).reshape(lengths), axis, -1).reshape(-1, n)
            old, new = (rng.multinomial(40, rng.dirichlet(np.full(n, 0.7))).tolist() for _ in range(2))
            expected = 0.0
            for move in moves(old, new):
                sends = [i for i, rows in enumerate(move.rows) if rows]
                members = tuple((int(line[i]), int(line[i + move.distance])) for line in lines for i in sends)
                permute = Collective("collective-permute", "", (f"f32[{move.longest}]",), "", "", 1, members)
                expected += price(permute) if move.distance else 0.0
            assert reshared(link, old, new, 4.0 * 40) == pytest.approx(expected)
            part = np.abs(np.array(old) - new).max() / 40
            assert MOVES.least(link, 4.0 * 40, part) <= expected * (1 + 1e-9)


def test_what_was_measured_goes_before() -> None:
    curve = Curve(((0.0, 1e-5), (1e6, 2e-3)))
    link = along(cluster_of(1, 1, 1, collectives={"hap": {"all_reduce": curve}}))
    assert link.pace("all_reduce") is curve
    assert link.seconds("all_gather", 0.0) == pytest.approx(60 * US)


def test_lines() -> None:
    lines = Lines.least([(1.0, 3.0), (2.0, 5.0), (4.0, 1.0), (1.0, 4.0)])
    assert lines.lines == ((1.0, 3.0), (4.0, 1.0))
    amounts = np.array([0.0, 1.0, 1.5, 2.0, 5.0])
    np.testing.assert_allclose(lines.seconds(amounts), [1.0, 4.0, 5.5, 6.0, 9.0])
    assert [lines.slope(x) for x in (0.0, 1.4, 1.5, 2.0)] == [3.0, 3.0, 1.0, 1.0]
    least, rest = lines.parted()
    assert rest is not None
    np.testing.assert_allclose(least * amounts + rest.seconds(amounts), lines.seconds(amounts))
    assert Lines.least([(1.0, 3.0)]).parted() == (3.0, None)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
