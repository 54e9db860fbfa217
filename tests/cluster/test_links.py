"""Links of single hosts and of pairs of them: what files say, what joins which devices."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_files import CARD, WIRE, assert_refused, load
from hypothesis import given
from hypothesis import strategies as st

from hapsynth.cluster.cluster import Cluster, ClusterError
from hapsynth.cluster.links import HostLinks, Link
from hapsynth.cluster.toml_format import to_toml

FILE = """
[network]
bandwidth = "10 Gbit/s"
latency = "20 us"

[intra]
bandwidth = "12 GB/s"
latency = "10 us"

[[devices]]
kind = "V100-16GB"
host = "new"
hosts = 2
per_host = 8
network = { bandwidth = "100 Gbit/s", latency = "5 us" }
intra = { bandwidth = "150 GB/s", latency = "2 us" }

[[devices]]
kind = "P4-8GB"
host = "old"
per_host = 4

[[devices]]
kind = "T4"
host = "new0"

[[links]]
between = ["new0", "new1"]
bandwidth = "200 Gbit/s"
latency = "1 us"
"""
NETWORK, INTRA = Link(1.25e9, 20e-6), Link(12e9, 10e-6)


def test_what_joins_which(tmp_path: Path) -> None:
    cluster = load(tmp_path, FILE)
    new0, new1, old = 0, 1, 2
    assert cluster.hosts == (*[new0] * 8, *[new1] * 8, *[old] * 4, new0)
    assert cluster.inside(new0) == cluster.inside(new1) == Link(150e9, 2e-6)
    assert cluster.inside(old) == INTRA
    assert cluster.between(new0, new1) == cluster.between(new1, new0) == Link(25e9, 1e-6)
    # The worse of the two ways out.
    assert cluster.between(new0, old) == cluster.between(old, new1) == NETWORK
    assert cluster.nic(new1) == Link(12.5e9, 5e-6)
    # Without [intra] what a host has to others joins its devices too.
    assert replace(cluster, intra=None).inside(old) == NETWORK


def test_other_clusters_keep_the_links(tmp_path: Path) -> None:
    cluster = load(tmp_path, FILE)
    less = cluster.without("V100-16GB")
    assert (less.hosts, less.host_links, less.pairs) == ((0, 0, 0, 0, 1), {1: cluster.host_links[0]}, {})
    more = cluster.plus("V100-16GB", 9)
    assert [more.inside(host) for host in (2, 3)] == [Link(150e9, 2e-6)] * 2
    assert cluster.plus("P4-8GB", 1).inside(3) == INTRA
    fast = cluster.scaled_network(2)
    assert (fast.nic(0).bandwidth, fast.between(0, 1).bandwidth, fast.between(0, 2).bandwidth) == (25e9, 50e9, 2.5e9)
    assert fast.inside(0) == cluster.inside(0)
    one = cluster.subset(range(8)).scaled_network(2)
    assert one.inside(0) == Link(300e9, 2e-6)
    assert len({c.fingerprint() for c in (cluster, replace(cluster, pairs={}), replace(cluster, host_links={}))}) == 3


def test_a_network_where_all_hosts_have_their_own(tmp_path: Path) -> None:
    text = '[[devices]]\nkind = "T4"\nhosts = 2\nnetwork = { bandwidth = "1 GB/s", latency = "3 us" }\n'
    assert load(tmp_path, text).between(0, 1) == Link(1e9, 3e-6)
    with pytest.raises(ClusterError, match=r"network is missing; .* the 3 hosts \(T4\)"):
        load(tmp_path, text + '[[devices]]\nkind = "T4"\n')
    inside = '[[devices]]\nkind = "T4"\nper_host = 2\nintra = { bandwidth = "1 GB/s", latency = "3 us" }\n'
    assert load(tmp_path, inside).inside(0) == Link(1e9, 3e-6)


BAD = {
    "link key": ('latency = "2 us" }', 'latencey = "2 us" }', ["devices[0].intra.latencey", "'latency'"]),
    "link unit": ('"150 GB/s"', '"150"', ["devices[0].intra.bandwidth", "no unit"]),
    "no table": ('network = { bandwidth = "100 Gbit/s", latency = "5 us" }', "network = 1", ["devices[0].network"]),
    "two of one host": ('host = "new0"', 'host = "new0"\nintra = { bandwidth = "1 GB/s", latency = "2 us" }', [
        "devices[2].intra", "another entry", "same host"]),
    "links": ("[[links]]", "[links]", ["links", "[[links]]"]),
    "no pair": ('["new0", "new1"]', '["new0"]', ["links[0].between", "two hosts"]),
    "no label": ('["new0", "new1"]', '["new0", "nwe1"]', ["links[0].between", "'nwe1'", "did you mean 'new1'?"]),
    "one host": ('["new0", "new1"]', '["new0", "new0"]', ["links[0].between", "one host", "intra"]),
    "again": ('[[links]]', '[[links]]\nbetween = ["new1", "new0"]\nbandwidth = "1 GB/s"\nlatency = "1 us"\n[[links]]', [
        "links[1].between", "entry above"]),
    "no figures": ('bandwidth = "200 Gbit/s"', "", ["links[0].bandwidth", "missing"]),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "says"), BAD.values(), ids=BAD)
def test_bad_links(tmp_path: Path, old: str, new: str, says: list[str]) -> None:
    assert old in FILE
    assert_refused(tmp_path, FILE.replace(old, new), says)


def test_pairs_need_labels(tmp_path: Path) -> None:
    text = FILE.replace('host = "new"\n', "").replace('host = "old"\n', "").replace('host = "new0"\n', "")
    with pytest.raises(ClusterError, match="'new0' is none; write host"):
        load(tmp_path, text)


links = st.builds(Link, st.floats(1e-3, 1e18), st.floats(0, 1))
own = st.builds(HostLinks, st.none() | links, st.none() | links)


@given(
    hosts=st.lists(st.integers(0, 4), min_size=1, max_size=10),
    of_hosts=st.dictionaries(st.integers(0, 4), own),
    pairs=st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda p: p[0] < p[1]), links),
)
def test_round_trip_of_any_links(
    hosts: list[int], of_hosts: dict[int, HostLinks], pairs: dict[tuple[int, int], Link]
) -> None:
    cluster = Cluster("c", (CARD,) * len(hosts), tuple(hosts), WIRE, None, (), {}, {}, of_hosts, pairs)
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert Cluster.from_dict(tomllib.loads(to_toml(cluster.to_dict()))) == cluster
    for a in hosts:
        assert cluster.subset(range(len(hosts))) is cluster
        number = cluster.hosts[hosts.index(a)]
        assert cluster.inside(number) == (of_hosts.get(a, HostLinks()).intra or cluster.nic(number))
