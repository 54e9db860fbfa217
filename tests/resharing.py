"""A layer bound by memory bandwidth next to one bound by compute, on devices whose two ratios differ."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hapsynth import Cluster

ROWS, FEATURES, READ, LAYERS = 4096, 512, 64, 4


def pooled(x: Any, weights: Any) -> Any:
    """Reads much and computes little, then the other way around: [rows, features, read] -> [rows, features]."""
    h = jnp.tanh(x).sum(axis=2)
    for w in weights:
        h = jnp.tanh(h @ w)
    return h


def arguments(rows: int = ROWS, features: int = FEATURES, read: int = READ, layers: int = LAYERS) -> tuple[Any, ...]:
    weights = [jax.ShapeDtypeStruct((features, features), jnp.float32)] * layers
    return jax.ShapeDtypeStruct((rows, features, read), jnp.float32), weights


def cluster(
    bandwidth: str = "400 GB/s", latency: str = "2 us", counts: tuple[int, int] = (2, 2), **more: Any
) -> Cluster:
    """New devices beside old ones of as much memory bandwidth and a tenth of the FLOP/s."""
    kinds = {
        "new": {"flops": {"float32": "20 TFLOP/s"}, "bandwidth": "1 TB/s", "memory": "16 GiB", "overhead": "2 us"},
        "old": {"flops": {"float32": "2 TFLOP/s"}, "bandwidth": "1 TB/s", "memory": "16 GiB", "overhead": "2 us"},
    }
    devices = [{"kind": kind, "count": n} for kind, n in zip(kinds, counts, strict=True)]
    link = {"bandwidth": bandwidth, "latency": latency}
    return Cluster.from_dict({"name": "new_and_old", "network": link, "devices": devices, "kinds": kinds, **more})
