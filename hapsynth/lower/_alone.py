"""What one device does of a program without the others: to see how long that takes it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hapsynth import _jax
from hapsynth.graph import Graph
from hapsynth.lower._bundles import Bundle
from hapsynth.lower._switch import Lowered


class Alone(Lowered):
    """A program in switch form as one device runs it by itself, where the others would send what it sends them.

    Right in its shapes, and so in its time, not in its values. Not of what `waits`.
    """

    def on(self, coords: Sequence[int], device: Any) -> tuple[Any, list[Any]]:
        """The jitted function for the device at `coords` of the mesh, and operands for it."""

        def hapsynth_alone(*stored: Any) -> tuple[Any, ...]:
            return self.at([jnp.int32(c) for c in coords], stored)

        sources = [s.struct() for s in (*self.inputs, *self.constants)]
        with _jax.no_mesh():
            operands = [jax.device_put(ones(s.sharding.shard_shape(s.shape), s.dtype), device) for s in sources]
        return jax.jit(hapsynth_alone, compiler_options=self.compiler_options), operands

    def _exchange(self, bundle: Bundle, lengths: Sequence[int], x: jax.Array) -> jax.Array:
        step, joined = bundle.steps[0], len(bundle.steps) > 1
        n, source, target = lengths[step.axis], step.source[step.axis].dim, step.target[step.axis].dim
        blocks = lambda dim: lax.split(x, [x.shape[dim] // n] * n, dim)
        match step.step:
            case "reduce_scatter":
                return reduce(operator.add, blocks(0 if joined else target))
            case "all_gather":
                return jnp.stack([x] * n) if joined else lax.concatenate([x] * n, source)
            case "all_to_all" if not joined:
                return lax.concatenate(blocks(target), source)
            case _:
                return x


def waits(graph: Graph) -> bool:
    """Whether where a program goes on depends on its values, and perhaps on those of other devices."""
    return bool(graph.unsure) or any(region.kind == "while" for region in graph.regions)


def ones(shape: tuple[int, ...], dtype: Any) -> Any:
    """Numbers that no op is slow on; as indices they are in range, or clipped to it."""
    if _jax.is_extended(dtype):
        return jnp.broadcast_to(jax.random.key(0), shape)
    return jnp.ones(shape, dtype)
