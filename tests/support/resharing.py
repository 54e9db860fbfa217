"""A layer bound by memory bandwidth next to one bound by compute, on devices whose two ratios differ."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hapsynth import Cluster
from hapsynth.instructions.program.program import Convert, Program

ROWS, FEATURES, READ, LAYERS = 512, 64, 16, 4


def pooled(x: Any, weights: Any) -> Any:
    """Reads much and computes little, then the other way around: [rows, features, read] -> [rows, features]. What is
    read can be cut by its rows alone."""
    rows, features, read = x.shape
    h = jnp.tanh(x).reshape(rows, features * read).reshape(rows, read, features).max(axis=1)
    for w in weights:
        h = jnp.tanh(h @ w)
    return h


def arguments(rows: int = ROWS, features: int = FEATURES, read: int = READ, layers: int = LAYERS) -> tuple[Any, Any]:
    weights = [jax.ShapeDtypeStruct((features, features), jnp.float32)] * layers
    return jax.ShapeDtypeStruct((rows, features, read), jnp.float32), weights


def step_arguments(**shape: int) -> tuple[Any, Any]:
    x, weights = arguments(**shape)
    return (jax.ShapeDtypeStruct(x.shape[1:], jnp.float32), weights), x


def cluster(bandwidth: str = "400 MB/s", counts: tuple[int, int] = (2, 2), **more: Any) -> Cluster:
    """New devices beside old ones of as much memory bandwidth and a tenth of the FLOP/s."""
    kinds = {
        kind: {"flops": {"float32": flops}, "bandwidth": "1 GB/s", "memory": "16 GiB", "overhead": "2 us"}
        for kind, flops in (("new", "20 GFLOP/s"), ("old", "2 GFLOP/s"))
    }
    devices = [{"kind": kind, "count": n} for kind, n in zip(kinds, counts, strict=True)]
    link = {"bandwidth": bandwidth, "latency": "2 us"}
    return Cluster.from_dict({"name": "new_and_old", "network": link, "devices": devices, "kinds": kinds, **more})


def reshares(program: Program) -> list[Convert]:
    return [i for i in program.instructions if isinstance(i, Convert) and i.step == "reshare"]


def running(params: Any, x: Any) -> Any:
    """Sums that only rows cut, then layers: a loss."""
    scale, weights = params
    h = jnp.cumsum(jnp.cumsum(jnp.tanh(x * scale), 1), 2)[:, :, -1] / (x.shape[1] * x.shape[2])
    for w in weights:
        h = jnp.tanh(h @ w)
    return (h**2).mean()


def running_step(params: Any, x: Any) -> tuple[Any, Any]:
    value, slopes = jax.value_and_grad(running)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, slopes), value
