"""How coarse a kind of device is: in files, on kinds built on others, and what is wrong with one."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_files import assert_refused, load

from hapsynth import Cluster
from hapsynth.cluster.cluster import ClusterError
from hapsynth.cluster.device_kinds import known_kinds
from hapsynth.cluster.granularity import GPU_GRANULARITY, Granularity
from hapsynth.cluster.op_classes import OP_CLASSES
from hapsynth.cluster.toml_format import to_toml

FILE = """
name = "c"
[network]
bandwidth = "10 GB/s"
latency = "5 us"
[[devices]]
kind = "fine"
[[devices]]
kind = "finer"
[kinds.fine]
base = "T4"
granularity = { tile = 8 }
[kinds.finer]
base = "fine"
speed = 2
granularity = { tile = 4, outputs = 2 }
"""


def test_a_file_gives_what_differs(tmp_path: Path) -> None:
    fine, finer = load(tmp_path, FILE).devices
    assert fine.granularity == replace(GPU_GRANULARITY, tile=8)
    assert finer.granularity == Granularity(tile=4, outputs=2)


def test_it_is_kept(tmp_path: Path) -> None:
    cluster = load(tmp_path, FILE)
    assert Cluster.from_dict(tomllib.loads(to_toml(cluster.to_dict()))) == cluster
    plain = replace(cluster.devices[0], granularity=Granularity())
    other = replace(cluster, devices=(plain, cluster.devices[1]))
    assert other != cluster
    assert other.fingerprint() != cluster.fingerprint()
    assert cluster.devices[0].bare().granularity == cluster.devices[0].faster(2.0).granularity == fine_of(cluster)


def fine_of(cluster: Cluster) -> Granularity:
    return cluster.devices[0].granularity


def test_what_nobody_gives_is_not_written() -> None:
    assert all(kind.granularity == GPU_GRANULARITY == Granularity(outputs=96) for kind in known_kinds().values())
    here = Path(__file__).parents[2] / "examples" / "clusters"
    for file in sorted(here.glob("*.toml")):
        # A kind that is built on a known GPU is written in full.
        text = str(Cluster.load(file).to_dict()).replace("'granularity': {'outputs': 96}", "")
        assert "granularity" not in text


def test_a_known_gpu_is_one_in_full_too(tmp_path: Path) -> None:
    cluster = load(tmp_path, FILE)
    known = known_kinds()["V100-16GB"]
    for granularity in (GPU_GRANULARITY, Granularity()):
        kinds = replace(known, granularity=granularity), replace(known, name="own", granularity=granularity)
        mine = replace(cluster, devices=kinds)
        text = to_toml(mine.to_dict())
        assert Cluster.from_dict(tomllib.loads(text)) == mine
        assert text.count("granularity") == 1


BAD = {
    "unknown": ("tile = 8", "tiles = 8", ["kinds.fine.granularity.tiles", "did you mean 'tile'"]),
    "no whole number": ("tile = 8", "tile = 8.5", ["kinds.fine.granularity.tile", "whole"]),
    "none": ("tile = 8", "tile = 0", ["kinds.fine.granularity.tile", "from 1"]),
    "for all": ("tile = 8", 'line = "32 B"', ["kinds.fine.granularity.line", "not a known key"]),
    "no table": ("{ tile = 8 }", "8", ["kinds.fine.granularity", "table"]),
}


@pytest.mark.parametrize(("old", "new", "says"), BAD.values(), ids=BAD)
def test_bad_file(tmp_path: Path, old: str, new: str, says: list[str]) -> None:
    assert old in FILE
    assert_refused(tmp_path, FILE.replace(old, new), says)


def test_bad_figure() -> None:
    with pytest.raises(ClusterError, match=r"granularity\.tile = 0 must be greater than zero"):
        Granularity(tile=0)


def test_classes_count_as_known_ones() -> None:
    for name, known in OP_CLASSES.items():
        assert set(known.counts_as) <= OP_CLASSES.keys() - {name}
