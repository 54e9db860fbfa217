"""Clusters as tests write them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

from hapsynth.cluster.cluster import Cluster, ClusterError, DeviceKind, Link

GOOD = """
[network]
bandwidth = "10 Gbit/s"
latency = "20 us"

[[devices]]
kind = "V100-16GB"
count = 4
"""
OF_KIND = """
network = {bandwidth = "1 GB/s", latency = "1 us"}
[[devices]]
kind = "x"
count = 2
[kinds.x]
base = "T4"
"""
"""To which tables of its kind, and others, can be added."""
CARD = DeviceKind("card", {"float32": 1e12}, bandwidth=1e11, memory=1 << 30)
WIRE = Link(1e9, 1e-5)


def load(tmp_path: Path, text: str) -> Cluster:
    file = tmp_path / "c.toml"
    file.write_text(textwrap.dedent(text))
    return Cluster.load(file)


def assert_refused(tmp_path: Path, text: str, says: Iterable[str]) -> None:
    """With an error that names the file, once, and says all that."""
    with pytest.raises(ClusterError) as error:
        load(tmp_path, text)
    for part in (str(tmp_path / "c.toml"), *says):
        assert part in str(error.value)
    assert str(error.value).count("c.toml") == 1
