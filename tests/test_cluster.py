"""Clusters: files, units, every error, the table of known GPUs."""

import json
import os
import pickle
import platform
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

import hapsynth
from hapsynth import _units
from hapsynth._cluster_file import to_toml
from hapsynth.cluster import Cluster, ClusterError, DeviceKind, Link, known_kinds
from hapsynth.curves import Curve
from hapsynth.devices import kind_of

CLUSTERS = sorted((Path(__file__).parents[1] / "examples" / "clusters").glob("*.toml"))
GOOD = """
[network]
bandwidth = "10 Gbit/s"
latency = "20 us"

[[devices]]
kind = "V100-16GB"
count = 4
"""
CARD = DeviceKind("card", {"float32": 1e12}, bandwidth=1e11, memory=1 << 30)
WIRE = Link(1e9, 1e-5)


def load(tmp_path: Path, text: str) -> Cluster:
    file = tmp_path / "c.toml"
    file.write_text(textwrap.dedent(text))
    return Cluster.load(file)


def test_other_clusters_of_the_same_kinds(tmp_path: Path) -> None:
    lab = load(tmp_path, GOOD + '[[devices]]\nkind = "T4"\nhosts = 2\nper_host = 2\n')
    less = lab.without("T4")
    assert [d.name for d in less.devices] == ["V100-16GB"] * 4
    assert (less.hosts, less.axes) == ((0, 1, 2, 3), (("hap", 4),))
    more = lab.plus("V100-16GB", 2)
    assert [d.name for d in more.devices] == ["V100-16GB"] * 6 + ["T4"] * 4
    assert more.hosts == (0, 1, 2, 3, 4, 5, 6, 6, 7, 7)
    assert lab.plus("T4", 3).hosts == (0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7)
    fast = lab.scaled_network(10)
    assert fast.network.bandwidth == 10 * lab.network.bandwidth
    assert (fast.intra, fast.devices, fast.hosts) == (lab.intra, lab.devices, lab.hosts)
    alone = replace(lab, hosts=(0,) * 8).scaled_network(2)
    assert (alone.intra or alone.network).bandwidth == 2 * (lab.intra or lab.network).bandwidth
    # Measured times: the latency is the same, what goes over the network takes less; those of other devices are gone.
    curve = Curve(((0.0, 1e-4), (1e6, 2e-4)))
    measured = replace(
        lab, axes=(("a", 4), ("b", 2)), collectives={"a": {"all_reduce": curve}, "b": {"all_reduce": curve}}
    )
    wider = measured.scaled_network(10).collectives
    assert wider["a"]["all_reduce"].seconds(1e7) == pytest.approx(2e-4)
    assert wider["a"]["all_reduce"].seconds(0.0) == pytest.approx(1e-4)
    # What is left may be a mesh over the same axes; what is added makes one axis.
    grid = replace(lab, axes=(("a", 2), ("b", 4)))
    assert grid.without("T4").axes == (("a", 1), ("b", 4))
    assert grid.plus("T4", 2).axes == (("hap", 10),)
    with pytest.raises(ClusterError, match="no device of kind 'P4-8GB'; there are V100-16GB, T4"):
        lab.without("P4-8GB")
    with pytest.raises(ClusterError, match="nothing is left without kind 'T4'"):
        lab.without("V100-16GB").without("T4")


def test_a_price_is_optional_and_changes_no_plan(tmp_path: Path) -> None:
    text = GOOD.replace("V100-16GB", "mine") + '[kinds.mine]\nbase = "V100-16GB"\n'
    free, priced = load(tmp_path, text), load(tmp_path, text + "price_per_hour = 1.5\n")
    assert (free.devices[0].price_per_hour, priced.devices[0].price_per_hour) == (None, 1.5)
    assert free.fingerprint() == priced.fingerprint()
    priced.save(tmp_path / "saved.toml")
    assert Cluster.load(tmp_path / "saved.toml").devices[0].price_per_hour == 1.5
    for bad, problem in (("-1", "-1"), ('"1 USD"', "plain number"), ("inf", "inf")):
        with pytest.raises(ClusterError, match=f"price_per_hour.*{problem}"):
            load(tmp_path, text + f"price_per_hour = {bad}\n")


def test_the_examples() -> None:
    clusters = {file.stem: Cluster.load(file) for file in CLUSTERS}
    assert {name: c.n for name, c in clusters.items()} == {
        "even8": 8,
        "h200_a100": 16,
        "lab4": 4,
        "mixed8": 8,
        "paper64": 64,
        "poplar_a": 8,
        "poplar_b": 4,
        "poplar_c": 8,
        "straggler": 8,
        "tiny_and_big": 8,
        "two_unlike": 2,
    }
    assert all(c.name == stem and c.axes == (("hap", c.n),) for stem, c in clusters.items())
    assert len(clusters["even8"].kinds) == 1

    mixed = clusters["mixed8"]
    fast, slow = mixed.kinds
    assert [d.name for d in mixed.devices] == [fast.name] * 4 + [slow.name] * 4
    assert fast.rate("float32") > 2.3 * slow.rate("float32")
    assert mixed.network == Link(1.25e9, 20e-6)

    tiny = clusters["tiny_and_big"]
    assert [d.memory for d in tiny.devices] == [16 * 10**9] * 7 + [128 << 20]
    assert tiny.devices[0].rate("float32") == tiny.devices[7].rate("float32")

    paper = clusters["paper64"]
    assert [k.name for k in paper.kinds] == ["V100-16GB", "P100-16GB"]
    assert paper.hosts == tuple(i // 8 for i in range(64))
    assert paper.network == Link(1.3e9, 20e-6)

    straggler = clusters["straggler"].devices
    assert straggler[0].rate("float32") == pytest.approx(20 * straggler[7].rate("float32"))
    assert straggler[0].bandwidth == pytest.approx(20 * straggler[7].bandwidth)


@pytest.mark.parametrize("file", CLUSTERS, ids=lambda f: f.stem)
def test_round_trip_of_files(file: Path, tmp_path: Path) -> None:
    cluster = Cluster.load(file)
    cluster.save(tmp_path / "again.toml")
    again = Cluster.load(tmp_path / "again.toml")
    assert again == cluster
    assert again.fingerprint() == cluster.fingerprint()
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert {hash(kind) for kind in again.devices} == {hash(kind) for kind in cluster.devices}


figures = st.floats(1e-3, 1e18)
kind_figures = st.fixed_dictionaries(
    {"flops": figures, "bandwidth": figures, "memory": st.integers(1, 1 << 50), "overhead": st.floats(0, 1)}
)


@given(
    kinds=st.lists(kind_figures, min_size=1, max_size=3),
    places=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=12),
    name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
    link=st.tuples(figures, st.floats(0, 1)),
    intra=st.booleans(),
)
def test_round_trip_of_any_cluster(kinds, places, name, link, intra) -> None:
    made = [DeviceKind(f"{name}{i}", **{**k, "flops": {"float32": k["flops"]}}) for i, k in enumerate(kinds)]
    devices = tuple(made[k % len(made)] for k, _ in places)
    cluster = Cluster(name, devices, tuple(h for _, h in places), Link(*link), WIRE if intra else None)
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert Cluster.from_dict(tomllib.loads(to_toml(cluster.to_dict()))) == cluster


@pytest.mark.parametrize(
    ("text", "units", "value"),
    [
        ("10 Gbit/s", "BANDWIDTH", 1.25e9),
        ("10 GB/s", "BANDWIDTH", 1e10),
        ("1 GiB/s", "BANDWIDTH", 2**30),
        ("10.4Gbit/s", "BANDWIDTH", 1.3e9),
        ("16 GiB", "MEMORY", 2**34),
        ("16 GB", "MEMORY", 16e9),
        (" 20 us ", "TIME", 20e-6),
        ("0 s", "TIME", 0.0),
        ("1.5e-2 ms", "TIME", 15e-6),
        ("15.7 TFLOP/s", "RATE", 15.7e12),
        ("2.25 PFLOP/s", "RATE", 2.25e15),
    ],
)
def test_units(text: str, units: str, value: float) -> None:
    assert _units.parse(text, getattr(_units, units), zero=units == "TIME") == value


@given(st.floats(0, 1e300), st.sampled_from(["BANDWIDTH", "MEMORY", "TIME", "RATE"]))
def test_format_is_exact(value: float, units: str) -> None:
    table = getattr(_units, units)
    assert _units.parse(_units.format(value, table), table, zero=True) == value


def test_format_reads_well() -> None:
    assert _units.format(15.7e12, _units.RATE) == "15.7 TFLOP/s"
    assert _units.format(1.25e9, _units.BANDWIDTH) == "1.25 GB/s"
    assert _units.format(1 << 34, _units.MEMORY) == "16 GiB"
    assert _units.format(16e9, _units.MEMORY) == "16 GB"
    assert _units.format(2e-5, _units.TIME) == "20 us"


BAD = {
    # what is replaced in GOOD: (old, new, what the message must say)
    "no unit": ('"10 Gbit/s"', '"10"', ["network.bandwidth", "'10'", "no unit", "Gbit/s"]),
    "bare number": ('"10 Gbit/s"', "10", ["network.bandwidth", "10", "no unit"]),
    "ambiguous": ('"10 Gbit/s"', '"10 Gb/s"', ["network.bandwidth", "'Gb/s'", "GB/s", "Gbit/s"]),
    "wrong quantity": ('"20 us"', '"20 GB"', ["network.latency", "'GB'", "us"]),
    "nan": ('"10 Gbit/s"', '"nan Gbit/s"', ["network.bandwidth", "not a finite"]),
    "inf": ('"10 Gbit/s"', '"inf Gbit/s"', ["network.bandwidth", "not a finite"]),
    "infinity": ('"10 Gbit/s"', '"-Infinity Gbit/s"', ["network.bandwidth", "not a finite"]),
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
    "host and hosts": ("count = 4", 'host = "a"\nhosts = 2', ["devices[0].host", "per_host"]),
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
    with pytest.raises(ClusterError) as error:
        load(tmp_path, GOOD.replace(old, new))
    for part in [str(tmp_path / "c.toml"), *says]:
        assert part in str(error.value)


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
    "overhead": ('base = "T4"\noverhead = 5', ["kinds.x.overhead", "no unit", "us"]),
    "jax": ('base = "T4"\njax = ["T4"]', ["kinds.x.jax", "not a known key"]),
}


@pytest.mark.parametrize(("text", "says"), BAD_KINDS.values(), ids=BAD_KINDS)
def test_bad_kind(tmp_path: Path, text: str, says: list[str]) -> None:
    with pytest.raises(ClusterError) as error:
        load(tmp_path, f"{GOOD}\n[kinds.x]\n{text}")
    for part in [str(tmp_path / "c.toml"), *says]:
        assert part in str(error.value)


def test_kinds_that_nothing_joins(tmp_path: Path) -> None:
    inside = '[intra]\nbandwidth = "12 GB/s"\nlatency = "5 us"\n'
    devices = GOOD.partition("\n\n")[2].replace("count = 4", "per_host = 4")
    assert load(tmp_path, inside + devices).n == 4
    with pytest.raises(ClusterError, match=r"c\.toml: network is missing; add .* the 2 hosts \(V100-16GB, T4\)"):
        load(tmp_path, f'{inside}{devices}[[devices]]\nkind = "T4"\n')


MEASURED_ON = {
    # machines, JAX: what is said on machine "here" with JAX 1.0
    "here": ("here", "1.0", None),
    "one of its machines": ("there, here", "1.0", None),
    "another machine": ("there", "1.0", "was measured on there (2026-11-21), and this machine is here:"),
    "another JAX": ("here", "0.9", "was measured with JAX 0.9 (2026-11-21), and this machine has JAX 1.0:"),
    "both": ("there", "0.9", "measured on there with JAX 0.9 (2026-11-21), and this machine is here and has JAX 1.0:"),
}


@pytest.mark.parametrize(("machines", "version", "says"), MEASURED_ON.values(), ids=MEASURED_ON)
def test_where_a_profile_is_from(machines: str, version: str, says: str | None) -> None:
    profile = {"machines": machines, "jax": version, "when": "2026-11-21"}
    cluster = Cluster("c", (CARD,), (0,), WIRE, profile=profile)
    said = cluster.measured_elsewhere("here", "1.0")
    assert (says is None and said is None) or (says is not None and said is not None and says in said)
    assert replace(cluster, profile={}).measured_elsewhere("here", "1.0") is None
    assert replace(cluster, profile={"jax": 3}).measured_elsewhere("here", "1.0") is None


def test_a_profile_from_elsewhere_is_used_with_a_warning(tmp_path: Path) -> None:
    """Where there are devices; planning for other ones is what profiles are carried around for."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    here = {"machines": platform.node(), "jax": jax.__version__}
    there = {"machines": "another-machine", "jax": jax.__version__}
    cluster = Cluster("c", (CARD, CARD), (0, 1), WIRE, profile=here)
    step, args = lambda x: x + 1, (np.ones((8, 8), np.float32),)
    hapsynth.synthesize(step, args, mesh, cluster=cluster)
    cluster = replace(cluster, profile=there)
    named = f"measured on another-machine, and this machine is {platform.node()}"
    with pytest.warns(hapsynth.ClusterWarning, match=named) as warned:
        plan = hapsynth.synthesize(step, args, mesh, cluster=cluster)
    assert warned[0].filename == __file__
    assert np.array_equal(plan.unshard(plan(*args)), step(args[0]))
    hapsynth.synthesize(step, args, cluster).save(tmp_path / "p.json")
    hapsynth.load(tmp_path / "p.json", step, args)
    with pytest.warns(hapsynth.ClusterWarning, match=named):
        hapsynth.load(tmp_path / "p.json", step, args, mesh)


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none\.toml: can't be read: No such file"):
        Cluster.load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterError, match="UTF-8"):
        Cluster.load(tmp_path / "binary.toml")


def test_kinds_of_a_file(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        """
        axes = { data = 2, model = 3 }
        network = { bandwidth = "25 Gbit/s", latency = "20 us" }
        [[devices]]
        kind = "mine"
        per_host = 2
        host = "a"
        [[devices]]
        kind = "half"
        hosts = 1
        per_host = 3
        [[devices]]
        kind = "V100-16GB"
        host = "a"
        [kinds.mine]
        flops = { float32 = "2 TFLOP/s", float16 = "8 TFLOP/s" }
        bandwidth = "100 GB/s"
        memory = "1 GiB"
        overhead = "0 s"
        efficiency = 1
        [kinds.half]
        base = "mine"
        speed = 0.5
        memory = "3 GiB"
        [kinds.V100-16GB]
        base = "V100-16GB"
        flops = { float32 = "10 TFLOP/s" }
        """,
    )
    assert cluster.name == "c"
    assert cluster.axes == (("data", 2), ("model", 3))
    assert cluster.hosts == (0, 0, 1, 1, 1, 0)
    mine, half, v100 = cluster.kinds
    assert (mine.rate("float32"), mine.rate("bfloat16"), mine.memory, mine.overhead) == (2e12, 8e12, 1 << 30, 0)
    assert half == replace(mine, name="half", flops={"float32": 1e12, "float16": 4e12}, bandwidth=5e10, memory=3 << 30)
    assert v100.flops == {**known_kinds()["V100-16GB"].flops, "float32": 10e12}
    assert Cluster.from_dict(cluster.to_dict()) == cluster


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


def test_fingerprint() -> None:
    cluster = Cluster("a", (CARD,) * 2, (0, 1), WIRE)
    same = [replace(cluster, name="b"), replace(cluster, devices=(replace(CARD, source="here"),) * 2)]
    other = [
        replace(cluster, hosts=(0, 0)),
        replace(cluster, network=Link(1e9, 2e-5)),
        replace(cluster, intra=WIRE),
        replace(cluster, axes=(("x", 2),)),
        replace(cluster, devices=(replace(CARD, memory=1),) * 2),
    ]
    assert {c.fingerprint() for c in same} == {cluster.fingerprint()}
    assert len({c.fingerprint() for c in [cluster, *other]}) == 1 + len(other)


def test_rates() -> None:
    full = DeviceKind(
        "full",
        {"float64": 1.0, "float32": 2.0, "tf32": 8.0, "float16": 16.0, "bfloat16": 17.0},
        bandwidth=1,
        memory=1,
        efficiency=0.5,
    )
    expected = {"float64": 0.5, "float32": 4, "tf32": 4, "float16": 8, "bfloat16": 8.5, "int32": 1, "bool": 1}
    assert {dtype: full.rate(dtype) for dtype in expected} == expected
    assert full.rate(np.dtype(np.int8)) == 1
    assert full.rate(jax.numpy.bfloat16.dtype) == 8.5
    assert full.rate("float8_e4m3fn") == 8
    bare = replace(full, flops={"float32": 64.0})
    assert {d: bare.rate(d) for d in ["float64", "tf32", "bfloat16", "complex64", "complex128"]} == {
        "float64": 0.5,
        "tf32": 32,
        "bfloat16": 32,
        "complex64": 32,
        "complex128": 0.5,
    }
    half = replace(full, flops={"float32": 2.0, "float16": 16.0})
    assert half.rate("bfloat16") == 8


@pytest.mark.parametrize("kind", known_kinds().values(), ids=lambda kind: kind.name)
def test_known_gpu(kind: DeviceKind) -> None:
    assert "NVIDIA" in kind.source
    assert kind.flops["float64"] < kind.flops["float32"] <= kind.flops["float16"]
    assert kind.flops["bfloat16"] in (kind.flops["float32"], kind.flops["float16"])
    assert kind.flops.get("tf32", kind.flops["float32"]) >= kind.flops["float32"]
    # The name's figure is the memory, in the decimal GB of the datasheet.
    if kind.name.endswith("GB"):
        assert kind.memory == int(kind.name.rpartition("-")[2][:-2]) * 10**9


def test_kinds_from_jax_names() -> None:
    assert kind_of("NVIDIA H200").name == "H200-141GB"
    assert kind_of("Tesla V100-SXM2-16GB").name == "V100-16GB"
    with pytest.raises(ClusterError, match=r"'NVIDIA H201'.*NVIDIA H200.*\[kinds\]"):
        kind_of("NVIDIA H201")


def test_from_mesh() -> None:
    cluster = Cluster.from_mesh(jax.make_mesh((2, 4), ("a", "b")))
    assert (cluster.n, cluster.axes, cluster.name) == (8, (("a", 2), ("b", 4)), "8 x cpu/8")
    assert len(cluster.kinds) == 1
    assert set(cluster.hosts) == {0}
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    one = Cluster.from_mesh(jax.make_mesh((1,), ("a",)))
    assert one.devices[0].rate("float32") == pytest.approx(8 * cluster.devices[0].rate("float32"))


def test_planning_starts_no_backend() -> None:
    code = f"from hapsynth.cluster import Cluster; print(Cluster.load({str(CLUSTERS[0])!r}).n)"
    # A platform that doesn't exist: whatever starts a backend fails.
    env = {**os.environ, "JAX_PLATFORMS": "none_such"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr
