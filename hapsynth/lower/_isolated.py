"""What a device does of a program without the others: to see how long that takes it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hapsynth import _jax
from hapsynth.graph.ir import Graph
from hapsynth.lower._buckets import Bundle
from hapsynth.lower._collective_order import Each, Order
from hapsynth.lower._collectives import LOWERINGS
from hapsynth.lower._device_groups import Group, groups_of
from hapsynth.lower._switch_form import Lowered


class IsolatedProgram(Lowered):
    """A program in switch form as each of this process's devices runs it by itself, where the others would send what it
    sends them.

    Right in its shapes, and so in its time, not in its values. Not of what `waits`.
    """

    def compiled_runs(self) -> list[tuple[Any, Callable[[], list[Any]]]]:
        """A compiled function, and what makes operands for it, for each group of devices that are alike."""
        shard = lambda whole: jax.ShapeDtypeStruct(whole.sharding.shard_shape(whole.shape), whole.dtype)
        given = [shard(s.struct()) for s in (*self.inputs, *self.constants)]
        made = [shard(s.struct()) for s in self.outputs if s is not None]
        found: list[tuple[Any, Callable[[], list[Any]]]] = []
        with _jax.no_mesh():
            for group in groups_of(self.sizes, self.mesh):
                run = lambda here, stored: list(self.at(here.index, stored))
                compiled = group.lower(run, given, made, (), self.compiler_options).compile()
                found.append((compiled, partial(_operands, group, given)))
        return found

    def _order(self) -> Order:
        """None: nothing is sent."""
        return Order(kept=False)

    def _exchange(self, bundle: Bundle, each: Each, x: jax.Array) -> jax.Array:
        step, joined = bundle.steps[0], len(bundle.steps) > 1 or bundle.flat
        lengths = [size for _, size in self.program.axes]
        n, source, target = lengths[step.axis], step.source[step.axis].dim, step.target[step.axis].dim
        blocks = lambda dim: lax.split(x, [x.shape[dim] // n] * n, dim)
        collective = step.collective
        made = LOWERINGS[step.step].alone(self.sizes, step, x)
        if made is not None:
            return made
        if collective.splits and not collective.joins:
            return reduce(operator.add, blocks(0 if joined else target))
        if collective.joins and not collective.splits:
            if joined and not bundle.flat:
                return jnp.stack([x] * n)
            return lax.concatenate([x] * n, 0 if bundle.flat else source)
        return lax.concatenate(blocks(target), source) if collective.joins and not joined else x


def _operands(group: Group, given: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    return [group.join([jax.device_put(ones(s.shape, s.dtype), d) for d in group.devices]) for s in given]


def waits(graph: Graph) -> bool:
    """Whether where a program goes on depends on its values, and perhaps on those of other devices."""
    return bool(graph.unsure) or any(region.kind == "while" for region in graph.regions)


def ones(shape: tuple[int, ...], dtype: Any) -> Any:
    """Numbers that no op is slow on; as indices they are in range, or clipped to it."""
    if _jax.is_extended(dtype):
        return jnp.broadcast_to(jax.random.key(0), shape)
    return np.ones(shape, dtype)
