"""Functions whose programs are lowered at random, and how a lowered program is run and compared."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from random_programs import RandomProgram, floats, mlp_args, mlp_step, rng

from hapsynth.graph.trace import Traced
from hapsynth.instructions.collectives import Hosts
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.lower import Lowered

MODES = ("equal", "skewed", "zeros", "one")

SEEDS = range(*map(int, os.environ.get("HAPSYNTH_SEEDS", "0:1").split(":")))
"""Of random programs, for each mode others; of small functions on one axis twice as many."""


def random_lowered(
    traced: Traced, axes: int | tuple[tuple[str, int], ...], seed: int, mode: str, options: LoweringOptions = DEFAULT
) -> Lowered:
    lengths = [axes] if isinstance(axes, int) else [size for _, size in axes]
    hosts = tuple(some_hosts(n, equal=seed % 2 == 0) for n in lengths)
    maker = RandomProgram(traced.graph, axes, random.Random(seed), 0.85, hosts=hosts)
    program = maker.build()
    sizes = maker.sizes(program, mode)
    check(traced.graph, program, sizes)
    return Lowered(traced.graph, program, sizes, mesh_of(prod(size for _, size in program.axes)), options=options)


def some_hosts(n: int, *, equal: bool) -> Hosts:
    """Two hosts whose positions along an axis of `n` take turns, or of which one has a single position; none where
    there are too few."""
    if n < 3 or (equal and n % 2):
        return ()
    return (tuple(range(0, n, 2)), tuple(range(1, n, 2))) if equal else ((0, *range(2, n)), (1,))


def mesh_of(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), ("x",), axis_types=(AxisType.Auto,))


def run(lowered: Lowered, args: Any) -> list[Any]:
    leaves = jax.tree.leaves(args)
    inputs = [s.put(x, copy=True) for s, x in zip(lowered.inputs, leaves, strict=True)]
    stored = lowered.lower().compile()(*inputs, *lowered.placed_constants)
    return [x if s is None else s.fetch(x) for s, x in zip(lowered.outputs, stored, strict=True)]


def assert_close(got: Sequence[Any], want: Any) -> None:
    for a, b in zip(got, jax.tree.leaves(want), strict=True):
        b = np.asarray(b)
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if jnp.issubdtype(b.dtype, jnp.inexact):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
        else:
            np.testing.assert_array_equal(a, b)


def integers(x: Any, mask: Any) -> Any:
    """Integers and bools, selected, compared, summed, maximised."""
    y = jnp.where(mask, x * 3, x - 1)
    return y, y.sum(0), y.max(1), (y > 4) & mask, (y == 2).any(), y.min()


def chain(a: Any, b: Any) -> Any:
    """Matrix products whose every index may be cut, and an output that is an input."""
    c = a @ b
    return a, a.T @ (c * 2 + c), jnp.exp(-c * c).sum(), c.T


def scalars(x: Any, y: Any) -> Any:
    return x * y + 1, jnp.sin(x)


def batched(q: Any, k: Any, v: Any) -> Any:
    """Attention without softmax: two batch dimensions."""
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.einsum("bqhd,bkhd->bhqk", q, k), v)


def embedding_step(params: Any, tokens: Any) -> Any:
    """Gather, its scatter-add gradient, layer norm, reshapes, cross-entropy by index."""

    def loss(p: Any) -> Any:
        h = p["emb"][tokens]
        h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
        h = h.reshape(h.shape[0], h.shape[1], 2, 2).transpose(0, 2, 1, 3)
        h = h.transpose(0, 2, 1, 3).reshape(-1, 4)
        logp = jax.nn.log_softmax(h @ p["out"])
        return -jnp.mean(jnp.take_along_axis(logp, tokens.reshape(-1, 1), 1))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def orders(x: Any) -> Any:
    """Order along a dimension, concatenation, padding, slices."""
    y = jnp.concatenate([x, x[:, ::-1] * 2], 1)
    return jnp.argmax(y, 1), jnp.cumsum(x, 0), jnp.sort(x, 1), jnp.pad(x, 1)[1:, 2:], y[2:5]


def convolve(x: Any, k: Any) -> Any:
    """A convolution with its gradients, pooled."""

    def loss(k: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(
            jax.lax.reduce_window(jax.nn.relu(y), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        )

    value, grad = jax.value_and_grad(loss)(k)
    return k - grad, value


CASES: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "mlp": (mlp_step, mlp_args),
    "integers": (integers, lambda: (rng.integers(-9, 9, (6, 5), np.int32), rng.random((6, 5)) < 0.5)),
    "chain": (chain, lambda: (floats(8, 5), floats(5, 3))),
    "embedding": (
        embedding_step,
        lambda: ({"emb": floats(7, 4), "out": floats(4, 7)}, rng.integers(0, 7, (5, 3), np.int32)),
    ),
    "orders": (orders, lambda: (floats(6, 5),)),
    "convolve": (convolve, lambda: (floats(3, 6, 6, 2), floats(3, 3, 2, 5))),
    "scalars": (scalars, lambda: (np.float32(2), np.float32(3))),
    "batched": (batched, lambda: (floats(3, 5, 2, 4), floats(3, 6, 2, 4), floats(3, 6, 2, 4))),
}
