"""Clusters: files, units, the table of known GPUs."""

import json
import os
import pickle
import platform
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from warnings import catch_warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cluster_files import CARD, GOOD, WIRE, load
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from thoroughness import THOROUGH

import hapsynth
from hapsynth.cluster import _units
from hapsynth.cluster.cluster import Cluster, ClusterError, DeviceKind, Link, known_kinds
from hapsynth.cluster.curves import Curve
from hapsynth.cluster.device_kinds import kind_of
from hapsynth.cluster.toml_format import to_toml

H100, V100 = ("NVIDIA H100 80GB HBM3",), ("Tesla V100-SXM2-16GB",)
CLUSTERS = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.toml"))


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
        "hap64": 64,
        "lab4": 4,
        "mixed8": 8,
        "mixed8_100gbit": 8,
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


@settings(max_examples=100 if THOROUGH else 40)
@given(
    kinds=st.lists(kind_figures, min_size=1, max_size=3),
    places=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=12),
    name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
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


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before, after = Cluster("before", (CARD,), (0,), WIRE), Cluster("after", (CARD,), (0,), WIRE)
    before.save(tmp_path / "c.toml")
    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        after.save(tmp_path / "c.toml")
    assert Cluster.load(tmp_path / "c.toml").name == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["c.toml"]


def test_figures_of_numpy_are_saved(tmp_path: Path) -> None:
    number: Any = np.float64
    memory: Any = np.int64(1 << 30)
    kind = DeviceKind("card", {"float32": number(1e13)}, number(1e11), memory, overhead=number(1e-6))
    cluster = Cluster("c", (kind,) * 2, (0, 1), Link(number(1e9), number(2e-5)))
    assert {type(rate) for rate in kind.flops.values()} == {float}
    cluster.save(tmp_path / "c.toml")
    assert Cluster.load(tmp_path / "c.toml") == cluster


def test_format_reads_well() -> None:
    assert _units.format(15.7e12, _units.RATE) == "15.7 TFLOP/s"
    assert _units.format(1.25e9, _units.BANDWIDTH) == "1.25 GB/s"
    assert _units.format(1 << 34, _units.MEMORY) == "16 GiB"
    assert _units.format(16e9, _units.MEMORY) == "16 GB"
    assert _units.format(2e-5, _units.TIME) == "20 us"


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
    ordinary = {"float64": 0.5, "complex128": 0.5, "float32": 1, "float16": 1, "float8_e4m3fn": 1, "int32": 1}
    assert {dtype: full.rate(dtype, ordinary=True) for dtype in ordinary} == ordinary
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


@pytest.mark.parametrize(
    ("described", "names", "wrong"),
    [
        (["H100-80GB"] * 2 + ["V100-16GB"], [*H100] * 2 + [*V100], ""),
        (["H100-80GB"] * 2 + ["V100-16GB"], [*V100] + [*H100] * 2, "device 0 of the mesh is a Tesla V100"),
        # As a profile calls them: a known GPU, and one that is not.
        ([*H100, "NVIDIA X-2", "NVIDIA X-1"], [*H100, "NVIDIA X", "NVIDIA X"], ""),
        (["NVIDIA X-2", "NVIDIA X-1", *H100], [*H100, "NVIDIA X", "NVIDIA X"], "as device 1 of the mesh is"),
        # One that nothing here is stands for another.
        (["A100-80GB", "V100-16GB"], ["cpu", "cpu"], ""),
        (["H100-80GB", "V100-16GB"], [*H100, "Tesla V100-PCIE-16GB"], ""),
    ],
)
def test_kinds_are_described_in_the_order_of_the_mesh(described: list[str], names: list[str], wrong: str) -> None:
    known = known_kinds()
    kinds = tuple(known.get(name) or replace(known["T4"], name=name, card="") for name in described)
    said = Cluster("c", kinds, (0,) * len(kinds), Link(1e9, 1e-5)).misplaced(names)
    assert bool(said) == bool(wrong)
    assert wrong in (said or "")


def test_axes_of_the_mesh_count_where_the_cluster_has_one() -> None:
    kind, curves = known_kinds()["T4"], {"all_reduce": Curve(((0.0, 1e-5), (1e6, 1e-3)))}
    one = Cluster("c", (kind,) * 8, (0,) * 8, Link(1e9, 1e-5), axes=(("data", 8),), collectives={"data": curves})
    two = one.along([("a", 2), ("b", 4), ("c", 1)])
    assert two.axes == (("a", 2), ("b", 4))
    assert two.collectives_along("hap", 8) == one.collectives_along("data", 8) == curves
    assert one.along([("x", 8), ("y", 1)]) is one
    assert two.along([("x", 2), ("y", 4)]) is two
    plan = hapsynth.synthesize(jnp.sin, (jnp.ones((4, 8)),), jax.make_mesh((2, 4), ("a", "b")), cluster=one)
    assert plan.program.axes == (("a", 2), ("b", 4))


def test_devices_in_another_order_than_the_cluster_s_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((8,), ("a",))
    plan = hapsynth.synthesize(jnp.sin, (jnp.ones((4, 8)),), cluster := Cluster.from_mesh(mesh))
    monkeypatch.setattr(Cluster, "misplaced", lambda self, kinds: f"{len(kinds)} unlike")
    with pytest.raises(ValueError, match="unlike"):
        hapsynth.synthesize(jnp.sin, (jnp.ones((4, 8)),), mesh, cluster=cluster)
    with pytest.raises(ValueError, match=f"{len(plan.devices)} unlike"):
        type(plan)(plan.traced, plan.result, plan.cluster, mesh, plan.fn)


@pytest.mark.parametrize(("processes", "warnings"), [((0, 0), 0), ((0, 1), 1)])
def test_gpus_of_several_processes_may_be_on_one_host(processes: tuple[int, ...], warnings: int) -> None:
    gpu = lambda p: SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", process_index=p)
    mesh: Any = SimpleNamespace(devices=np.array([gpu(p) for p in processes]), shape={"d": 2})
    with catch_warnings(record=True, action="always") as said:
        assert Cluster.from_mesh(mesh).hosts == processes
    assert ["each of 2 processes is taken for a host" in str(w.message) for w in said] == [True] * warnings


def test_planning_starts_no_backend() -> None:
    code = f"from hapsynth.cluster.cluster import Cluster; print(Cluster.load({str(CLUSTERS[0])!r}).n)"
    # A platform that doesn't exist: whatever starts a backend fails.
    env = {**os.environ, "JAX_PLATFORMS": "none_such"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


def test_contention_is_measured_or_the_default_of_the_kind(tmp_path: Path) -> None:
    text = GOOD.replace("count = 4", 'count = 3\n[[devices]]\nkind = "mine"')
    cluster = load(tmp_path, text + '[kinds.mine]\nbase = "T4"\nspeed = 0.5')
    known, mine = cluster.kinds
    assert (known.contention, known.slowdown) == (None, known_kinds()["V100-16GB"].default_contention)
    assert mine.slowdown == known_kinds()["T4"].default_contention > 1
    # Files of plans without overlap don't have it: a kind of a known name is that one.
    assert [k.slowdown for k in Cluster.from_dict(cluster.to_dict()).kinds] == [known.slowdown, 1.0]
    assert not any("contention" in key for table in cluster.to_dict()["kinds"].values() for key in table)  # type: ignore[union-attr]
    cluster.save(tmp_path / "saved.toml")
    assert [k.slowdown for k in Cluster.load(tmp_path / "saved.toml").kinds] == [known.slowdown, mine.slowdown]
    stated = load(tmp_path, text + '[kinds.mine]\nbase = "T4"\ncontention = 1.5')
    stated.save(tmp_path / "saved.toml")
    assert Cluster.load(tmp_path / "saved.toml") == stated != cluster
    assert stated.kinds[1].slowdown == 1.5
    with pytest.raises(ClusterError, match=r"contention = 0\.9 is how many times as long .* at least 1"):
        replace(mine, contention=0.9)


def test_contention_delay(tmp_path: Path) -> None:
    text = GOOD.replace("count = 4", 'count = 3\n[[devices]]\nkind = "mine"')
    cluster = load(
        tmp_path, text + '[kinds.late]\nbase = "T4"\ncontention_delay = "12 ms"\n[kinds.mine]\nbase = "late"'
    )
    assert [kind.contention_delay for kind in cluster.kinds] == [0.0, 0.012]
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    with pytest.raises(ClusterError, match="device kind 'mine': contention_delay"):
        replace(cluster.kinds[1], contention_delay=-1e-3)


def test_efficiency_of_single_rates(tmp_path: Path) -> None:
    """What is not named is as in the base; TF32 is apart from float32's ordinary cores."""
    text = """
        [[devices]]
        kind = "one"
        [[devices]]
        kind = "other"
        [intra]
        bandwidth = "12 GB/s"
        latency = "10 us"
        [network]
        bandwidth = "10 Gbit/s"
        latency = "10 us"
        [kinds.one]
        base = "A100-40GB"
        efficiency = { tf32 = 0.25, float16 = 0.3 }
        [kinds.other]
        base = "one"
        efficiency = { float32 = 0.75 }
    """
    file = tmp_path / "c.toml"
    file.write_text(text)
    cluster = Cluster.load(file)
    one, other = cluster.devices
    assert one.rate("float32") == 0.25 * one.flops["tf32"]
    assert (one.rate("float16"), one.rate("bfloat16")) == (0.3 * 312e12, 0.5 * 312e12)
    assert one.rate("int32") == 0.5 * 19.5e12
    assert other.rate("int32") == 0.75 * 19.5e12
    assert other.rate("float32") == one.rate("float32")
    assert Cluster.from_dict(cluster.to_dict()).devices == cluster.devices
