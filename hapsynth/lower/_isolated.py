"""What a device does of a program without the others: to see how long that takes it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from hapsynth import _jax
from hapsynth.graph.ir import Graph
from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.lower._bundles import Bundle
from hapsynth.lower._collective_order import Each, Order
from hapsynth.lower._collectives import LOWERINGS
from hapsynth.lower._device_groups import Group, groups_of
from hapsynth.lower._fused_form import Fused
from hapsynth.lower._lowered_form import held_bytes


class IsolatedRun(NamedTuple):
    """What some devices that are alike run by themselves."""

    run: Any
    """A compiled function."""
    operands: Callable[[], list[Any]]
    devices: tuple[Any, ...]
    held_bytes: int
    """At most, operands and results with it, on each of the devices."""


def isolated_runs(
    graph: Graph,
    program: Program,
    sizes: Sizes,
    mesh: Mesh,
    *,
    options: LoweringOptions = DEFAULT,
    platform: str | None = None,
) -> list[IsolatedRun]:
    """What each of this process's devices computes of a program that doesn't `wait`, compiled."""
    of = partial(IsolatedProgram, graph, program, sizes, mesh, donate=False, platform=platform, options=options)
    return [of(own=group.positions).compiled_for(group) for group in groups_of(sizes, mesh)]


class IsolatedProgram(Fused):
    """A program as devices that are alike run it by themselves, on their exact shapes, where the others would send what
    they send them.

    Right in its shapes, and so in its time, not in its values. Not of what `waits`.
    """

    sinks: ClassVar[int] = 0

    def compiled_for(self, group: Group) -> IsolatedRun:
        shard = lambda s: jax.ShapeDtypeStruct(s.shard_shape(self.own[0]), s.dtype)
        given = [shard(s) for s in (*self.inputs, *self.constants)]
        made = [shard(s) for s in self.outputs if s is not None]
        run = lambda here, stored: list(self.at(here.index, stored))
        with _jax.no_mesh():
            compiled = group.lower(run, given, made, (), self.compiler_options).compile()
        return IsolatedRun(compiled, partial(_operands, group, given), group.devices, held_bytes(compiled))

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
