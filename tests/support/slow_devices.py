"""Clusters on which even tiny work is worth dividing: small functions get plans with uneven and empty shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from hapsynth.cluster.cluster import Cluster, DeviceKind, Link

HOPELESS = 1e-4
SPEEDS: dict[str, tuple[float, ...]] = {
    "equal": (1.0,) * 4,
    "3:1": (3.0, 3.0, 1.0, 1.0),
    "20:1": (20.0, 1.0, 20.0, 1.0),
    "hopeless": (1.0, HOPELESS, 1.0, 1.0),
    "odd": (1.0, 1.7, 2.3, 0.6, 1.1),
    "two": (1.0, 2.5),
    "one": (1.0,),
}


def slow_cluster(speeds: Sequence[float], bandwidth: float = 1e12, memory: float = 16e9) -> Cluster:
    """Devices of `speeds` GFLOP/s and GB/s that start an op in no time, each on a host of its own.

    `bandwidth`: of the network, bytes/s.
    """
    kinds = {
        s: DeviceKind(f"x{s}", {"float32": 1e9 * s}, 1e9 * s, int(memory), overhead=1e-10, efficiency=1.0)
        for s in speeds
    }
    return Cluster("slow", tuple(kinds[s] for s in speeds), tuple(range(len(speeds))), Link(bandwidth, 1e-10))


def thin_cluster(speeds: Sequence[float], bandwidth: float = 1e12, memory: float = 16e9) -> Cluster:
    """The same without tiles: tiny contractions are worth cutting too."""
    return untiled(slow_cluster(speeds, bandwidth, memory))


def untiled(cluster: Cluster) -> Cluster:
    devices = [replace(kind, granularity=replace(kind.granularity, tile=1)) for kind in cluster.devices]
    return replace(cluster, devices=tuple(devices))


def first_devices(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), ("d",))
