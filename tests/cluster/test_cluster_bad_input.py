"""Clusters that are none: what is said of each file, kind and figure."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_files import CARD, GOOD, WIRE, assert_refused, load

from hapsynth.cluster.cluster import Cluster, ClusterError, DeviceKind, Link

BAD = {
    # what is replaced in GOOD: (old, new, what the message must say)
    "no unit": ('"10 Gbit/s"', '"10"', ["network.bandwidth", "'10'", "no unit", "Gbit/s"]),
    "bare number": ('"10 Gbit/s"', "10", ["network.bandwidth", "10", "no unit"]),
    "ambiguous": ('"10 Gbit/s"', '"10 Gb/s"', ["network.bandwidth", "'Gb/s'", "GB/s", "Gbit/s"]),
    "wrong quantity": ('"20 us"', '"20 GB"', ["network.latency", "'GB'", "us"]),
    "nan": ('"10 Gbit/s"', '"nan Gbit/s"', ["network.bandwidth", "not a finite"]),
    "inf": ('"10 Gbit/s"', '"inf Gbit/s"', ["network.bandwidth", "not a finite"]),
    "infinity": ('"10 Gbit/s"', '"-Infinity Gbit/s"', ["network.bandwidth", "not a finite"]),
    "infinite": ('"10 Gbit/s"', '"infinite Gbit/s"', ["network.bandwidth", "'infinite Gbit/s'", "not a number"]),
    "far too much": ('"10 Gbit/s"', '"1e1000000 Gbit/s"', ["network.bandwidth", "not a finite"]),
    "beyond decimals": ('"10 Gbit/s"', f'"1e{10**20} Gbit/s"', ["network.bandwidth", "not a finite"]),
    "overflow": ('"10 Gbit/s"', '"1e999 Gbit/s"', ["network.bandwidth", "not a finite"]),
    "toml nan": ('"10 Gbit/s"', "nan", ["network.bandwidth", "no unit"]),
    "negative": ('"10 Gbit/s"', '"-10 Gbit/s"', ["network.bandwidth", "greater than zero"]),
    "zero": ('"10 Gbit/s"', '"0 Gbit/s"', ["network.bandwidth", "greater than zero"]),
    "negative latency": ('"20 us"', '"-1 us"', ["network.latency", "negative"]),
    "words": ('"20 us"', '"fast"', ["network.latency", "'fast'", "not a number"]),
    "no latency": ('latency = "20 us"', "", ["network.latency", "missing", "us"]),
    "no network": ('[network]\nbandwidth = "10 Gbit/s"\nlatency = "20 us"', "", ["network", "missing"]),
    "network no table": ("[network]", "[other]", ["other", "not a known key", "network"]),
    "unknown key": ("count = 4", "cuont = 4", ["devices[0].cuont", "count"]),
    "unknown link key": ("latency", "latencey", ["network.latencey", "'latency'"]),
    "unknown kind": ("V100-16GB", "V100-16Gb", ["devices[0].kind", "did you mean 'V100-16GB'?"]),
    "kind cut short": ("V100-16GB", "H200", ["did you mean 'H200-141GB'?"]),
    "no such kind": ("V100-16GB", "%%%", ["'%%%'", "use one of", "T4"]),
    "kind not a string": ('"V100-16GB"', "100", ["devices[0].kind", "string"]),
    "no kind": ('kind = "V100-16GB"', "", ["devices[0].kind", "missing"]),
    "no device": ('[[devices]]\nkind = "V100-16GB"\ncount = 4', "", ["no device", "[[devices]]"]),
    "devices not a list": ("[[devices]]", "[devices]", ["devices", "[[devices]]"]),
    "zero count": ("count = 4", "count = 0", ["devices[0].count", "0"]),
    "negative count": ("count = 4", "count = -1", ["devices[0].count", "-1"]),
    "count not whole": ("count = 4", "count = 4.0", ["devices[0].count", "whole"]),
    "count true": ("count = 4", "count = true", ["devices[0].count", "whole"]),
    "count and hosts": ("count = 4", "count = 4\nhosts = 2", ["devices[0].count", "hosts"]),
    "far too many": ("count = 4", "hosts = 60000\nper_host = 60000", ["devices[0]", "65536"]),
    "axes": ("[network]", "axes = { data = 8 }\n[network]", ["axes", "8", "4 devices"]),
    "axis zero": ("[network]", "axes = { data = 0 }\n[network]", ["axes.data", "0"]),
    "axes not a table": ("[network]", "axes = 4\n[network]", ["axes", "table"]),
    "name": ("[network]", 'name = ""\n[network]', ["name", "''"]),
    "not toml": ("count = 4", "count = = 4", ["TOML", "line"]),
}


@pytest.mark.parametrize(("old", "new", "says"), BAD.values(), ids=BAD)
def test_bad_file(tmp_path: Path, old: str, new: str, says: list[str]) -> None:
    assert load(tmp_path, GOOD).n == 4
    assert old in GOOD
    assert_refused(tmp_path, GOOD.replace(old, new), says)


BAD_KINDS = {
    "no flops": ('bandwidth = "1 GB/s"\nmemory = "1 GB"', ["kinds.x.flops", "missing"]),
    "no float32": ('flops = { float16 = "1 TFLOP/s" }', ["kinds.x.flops.float32", "missing"]),
    "no bandwidth": ('flops = { float32 = "1 TFLOP/s" }\nmemory = "1 GB"', ["kinds.x.bandwidth", "missing"]),
    "no memory": ('flops = { float32 = "1 TFLOP/s" }\nbandwidth = "1 GB/s"', ["kinds.x.memory", "missing"]),
    "dtype": ('base = "T4"\nflops = { flaot16 = "1 TFLOP/s" }', ["kinds.x.flops.flaot16", "'float16'"]),
    "rate unit": ('base = "T4"\nflops = { float16 = "1 TFLOPS" }', ["flops.float16", "'TFLOPS'", "TFLOP/s"]),
    "rate nan": ('base = "T4"\nflops = { float16 = "nan TFLOP/s" }', ["flops.float16", "finite"]),
    "flops no table": ('base = "T4"\nflops = "1 TFLOP/s"', ["kinds.x.flops", "table"]),
    "base": ('base = "V101-16GB"', ["kinds.x.base", "V100-16GB"]),
    "later base": ('base = "y"\n[kinds.y]\nbase = "T4"', ["kinds.x.base", "'y'"]),
    "memory unit": ('base = "T4"\nmemory = "4 Gi"', ["kinds.x.memory", "'Gi'", "GiB"]),
    "less than a byte": ('base = "T4"\nmemory = "0.5 B"', ["kinds.x.memory", "byte"]),
    "speed zero": ('base = "T4"\nspeed = 0', ["kinds.x.speed", "0"]),
    "speed nan": ('base = "T4"\nspeed = nan', ["kinds.x.speed", "finite"]),
    "speed text": ('base = "T4"\nspeed = "2 x"', ["kinds.x.speed", "plain number"]),
    "efficiency": ('base = "T4"\nefficiency = 1.5', ["kinds.x.efficiency", "1.5", "at most 1"]),
    "contention": ('base = "T4"\ncontention = 0.5', ["kinds.x.contention", "0.5", "at least 1"]),
    "contention text": ('base = "T4"\ncontention = "2 x"', ["kinds.x.contention", "plain number"]),
    "contention delay": ('base = "T4"\ncontention_delay = 0.01', ["kinds.x.contention_delay", "us"]),
    "default contention": ('base = "T4"\ndefault_contention = 0', ["kinds.x.default_contention", "greater than zero"]),
    "efficiency of a rate": (
        'base = "T4"\nefficiency = { float16 = 1.5 }',
        ["kinds.x.efficiency.float16", "1.5", "at most 1"],
    ),
    "efficiency of no rate": (
        'base = "T4"\nefficiency = { half = 0.5 }',
        ["kinds.x.efficiency.half", "not a known key"],
    ),
    "overhead": ('base = "T4"\noverhead = 5', ["kinds.x.overhead", "no unit", "us"]),
    "jax": ('base = "T4"\njax = ["T4"]', ["kinds.x.jax", "not a known key"]),
}


@pytest.mark.parametrize(("text", "says"), BAD_KINDS.values(), ids=BAD_KINDS)
def test_bad_kind(tmp_path: Path, text: str, says: list[str]) -> None:
    assert_refused(tmp_path, f"{GOOD}\n[kinds.x]\n{text}", says)


def test_kinds_that_nothing_joins(tmp_path: Path) -> None:
    inside = '[intra]\nbandwidth = "12 GB/s"\nlatency = "5 us"\n'
    devices = GOOD.partition("\n\n")[2].replace("count = 4", "per_host = 4")
    assert load(tmp_path, inside + devices).n == 4
    with pytest.raises(ClusterError, match=r"c\.toml: network is missing; add .* the 2 hosts \(V100-16GB, T4\)"):
        load(tmp_path, f'{inside}{devices}[[devices]]\nkind = "T4"\n')


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none\.toml: can't be read: No such file"):
        Cluster.load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterError, match="UTF-8"):
        Cluster.load(tmp_path / "binary.toml")


def test_bad_figures_in_code() -> None:
    with pytest.raises(ClusterError, match=r"'x': flops\.float32 = nan is not a finite"):
        DeviceKind("x", {"float32": float("nan")}, 1e9, 1)
    with pytest.raises(ClusterError, match="lacks float32"):
        DeviceKind("x", {"float16": 1e12}, 1e9, 1)
    with pytest.raises(ClusterError, match="did you mean 'bfloat16'"):
        DeviceKind("x", {"float32": 1e12, "bf16": 1e12}, 1e9, 1)
    with pytest.raises(ClusterError, match="bandwidth = 0 must be greater"):
        Link(0, 0)
    with pytest.raises(ClusterError, match="latency = -1 must not be negative"):
        Link(1, -1)
    with pytest.raises(ClusterError, match=r"bandwidth = '1 GB/s' is no number; units are for cluster files"):
        Link("1 GB/s", 0)  # pyright: ignore[reportArgumentType]
    for figures in (({"float32": "1 TFLOP/s"}, 1e9, 1), ({"float32": 1e12}, 1e9, "1 GB"), ({"float32": 1e12}, None, 1)):
        with pytest.raises(ClusterError, match=r"'x': \S+ = .* is no number; units are for cluster files"):
            DeviceKind("x", *figures)  # pyright: ignore[reportArgumentType]
    for make in (lambda: DeviceKind("", {"float32": 1e12}, 1e9, 1), lambda: Cluster("", (CARD,), (0,), WIRE)):
        with pytest.raises(ClusterError, match="'': the name must be a string that is not empty"):
            make()
    with pytest.raises(ClusterError, match="-1 more card are asked for"):
        Cluster("c", (CARD,), (0,), WIRE).plus("card", -1)
    with pytest.raises(ClusterError, match="no device"):
        Cluster("c", (), (), WIRE)
    with pytest.raises(ClusterError, match="1 entries for 2 devices"):
        Cluster("c", (CARD,) * 2, (0,), WIRE)
    with pytest.raises(ClusterError, match="mesh of 4, but there are 2"):
        Cluster("c", (CARD,) * 2, (0, 1), WIRE, axes=(("a", 4),))
    with pytest.raises(ClusterError, match="repeat a name"):
        Cluster("c", (CARD,) * 4, (0,) * 4, WIRE, axes=(("a", 2), ("a", 2)))
    with pytest.raises(ClusterError, match="both called 'card'"):
        Cluster("c", (CARD, CARD.faster(2)), (0, 1), WIRE)
