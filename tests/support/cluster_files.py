"""Clusters as tests write them."""

from __future__ import annotations

import textwrap
from pathlib import Path

from hapsynth.cluster.cluster import Cluster, DeviceKind, Link

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
