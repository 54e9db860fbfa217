"""Small training steps and clusters on which one known way to distribute training is clearly the best.

Every step is plain JAX with plain SGD or Adam: nothing in it says how it should be cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hapsynth.cluster.cluster import Cluster, DeviceKind, Link

Step = Callable[[Any, Any], Any]
Arguments = tuple[Any, Any]
"""(parameters or state, batch), as shapes."""


def gpus(
    speeds: list[float], *, bandwidth: float = 3e10, latency: float = 5e-7, memory_bandwidth: float = 1e13
) -> Cluster:
    """One device per speed (x 10 TFLOP/s), each on a host of its own; bytes/s and seconds.

    With such a fast memory only contractions and collectives take time worth speaking of.
    """
    kinds = {
        s: DeviceKind(f"x{s}", {"float32": 1e13 * s}, memory_bandwidth * s, 16 << 30, overhead=1e-8, efficiency=1.0)
        for s in speeds
    }
    return Cluster("gpus", tuple(kinds[s] for s in speeds), tuple(range(len(speeds))), Link(bandwidth, latency))


def hosts(
    count: int,
    per_host: int,
    *,
    speed: float = 1.0,
    network: float = 1e9,
    intra: float = 3e10,
    latency: float = 5e-7,
) -> Cluster:
    """Equal hosts of several devices, a mesh axis over the hosts and one inside them; the links in bytes/s.

    The devices of a host share its link to the network.
    """
    inside = gpus([speed] * per_host).devices
    numbers = tuple(h for h in range(count) for _ in range(per_host))
    axes = (("host", count), ("device", per_host))
    return Cluster("hosts", inside * count, numbers, Link(network, latency), Link(intra, latency), axes)


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def sgd(loss: Callable[[Any, Any], jax.Array]) -> Step:
    """`step(parameters, batch) -> parameters`."""

    def step(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, batch))

    return step


# Data parallelism, Megatron's pair, one device


def _mlp(p: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)


mlp: Step = sgd(_mlp)
"""Two layers: [batch, width] up to hidden and down again."""


def mlp_args(batch: int, width: int, hidden: int) -> Arguments:
    return {"up": shape(width, hidden), "down": shape(hidden, width)}, shape(batch, width)


# Sequence-sharded norms


def _norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def _residual(p: Any, x: jax.Array) -> jax.Array:
    for layer in p:
        x = x + jax.nn.relu(_norm(x) @ layer["up"]) @ layer["down"]
    return jnp.mean(x * x)


residual: Step = sgd(_residual)
"""Pre-norm residual blocks [tokens, width], as a transformer's MLPs."""


def residual_args(tokens: int, width: int, hidden: int, layers: int) -> Arguments:
    return [{"up": shape(width, hidden), "down": shape(hidden, width)}] * layers, shape(tokens, width)


# Vocabulary-parallel softmax and embedding


def _language(p: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    tokens, targets = batch
    x = p["embed"][tokens]
    logits = (x + jax.nn.relu(x @ p["up"]) @ p["down"]) @ p["embed"].T
    picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)


language: Step = sgd(_language)
"""A language model of one block, its embedding tied to its head."""


def language_args(tokens: int, vocab: int, width: int, hidden: int) -> Arguments:
    params = {"embed": shape(vocab, width), "up": shape(width, hidden), "down": shape(hidden, width)}
    return params, (shape(tokens, dtype=jnp.int32), shape(tokens, dtype=jnp.int32))


# Expert parallelism


def _experts(p: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """GShard's layer (Lepikhin et al. 2020) with one expert per token, behind a dense layer."""
    x, y = batch
    x = jnp.tanh(x @ p["dense"])
    count = p["gate"].shape[1]
    capacity = 2 * x.shape[1] // count
    gates = jax.nn.softmax(x @ p["gate"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), count)
    place = jnp.sum(jnp.cumsum(chosen, axis=1) * chosen, axis=-1).astype(jnp.int32) - 1
    mask = chosen[..., None] * jax.nn.one_hot(place, capacity)[:, :, None, :]
    inside = jnp.einsum("gsec,gsd->egcd", mask, x)
    hidden = jax.nn.relu(jnp.einsum("egcd,edh->egch", inside, p["up"]))
    out = jnp.einsum("egch,ehd->egcd", hidden, p["down"])
    return jnp.mean((jnp.einsum("gsec,egcd->gsd", gates[..., None] * mask, out) - y) ** 2)


experts: Step = sgd(_experts)
"""A mixture of experts on groups of tokens [groups, tokens, width]; the experts have two places per token in all."""


def experts_args(groups: int, tokens: int, width: int, count: int, hidden: int) -> Arguments:
    params = {
        "dense": shape(width, width),
        "gate": shape(width, count),
        "up": shape(count, width, hidden),
        "down": shape(count, hidden, width),
    }
    return params, (shape(groups, tokens, width), shape(groups, tokens, width))


# Sufficient factor broadcasting


def _conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


POOL = 4


def _autoencoder(p: Any, x: jax.Array) -> jax.Array:
    h = jax.nn.relu(_conv(jax.nn.relu(_conv(x, p["first"])), p["second"]))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, POOL, POOL, 1), (1, POOL, POOL, 1), "VALID")
    batch, rows, columns, channels = h.shape
    code = jnp.tanh(h.reshape(batch, -1) @ p["dense"]).reshape(batch, rows, 1, columns, 1, channels)
    wide = jnp.broadcast_to(code, (batch, rows, POOL, columns, POOL, channels))
    wide = wide.reshape(batch, rows * POOL, columns * POOL, channels)
    return jnp.mean((_conv(jax.nn.relu(_conv(wide, p["third"])), p["last"]) - x) ** 2)


autoencoder: Step = sgd(_autoencoder)
"""Convolutions, a fully connected layer, convolutions: images [batch, size, size, 16]."""


def autoencoder_args(batch: int, size: int, channels: int) -> Arguments:
    """The fully connected layer is square, (size / POOL)^2 x channels wide."""
    width = (size // POOL) ** 2 * channels
    params = {
        "first": shape(3, 3, 16, channels),
        "second": shape(3, 3, channels, channels),
        "dense": shape(width, width),
        "third": shape(3, 3, channels, channels),
        "last": shape(3, 3, channels, 16),
    }
    return params, shape(batch, size, size, 16)


# ZeRO


def adam(state: Any, batches: list[jax.Array]) -> Any:
    """A step of Adam on a stack of square layers: (parameters, first moments, second moments), gradients added up
    over batches [samples, width]."""
    params, first, second = state

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x * x)

    each = [jax.grad(loss)(params, x) for x in batches]
    grads = [sum(gs[1:], gs[0]) for gs in zip(*each, strict=True)]
    first = [0.9 * m + 0.1 * g for m, g in zip(first, grads, strict=True)]
    second = [0.99 * v + 0.01 * g * g for v, g in zip(second, grads, strict=True)]
    params = [p - 1e-3 * m / (jnp.sqrt(v) + 1e-8) for p, m, v in zip(params, first, second, strict=True)]
    return params, first, second


def adam_args(samples: int, width: int, layers: int, batches: int) -> Arguments:
    weights = [shape(width, width)] * layers
    return (weights, weights, weights), [shape(samples, width)] * batches
