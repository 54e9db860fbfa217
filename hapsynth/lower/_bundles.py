"""Small collectives that do not depend on one another go as one (GradientFlow's fusion, arXiv 1902.06855).

Each has a latency of its own, and XLA does not join them on CPUs, nor those that are pinned on GPUs: between two
processes, one with 30 % of a core, 20 all-reduces of 1 KiB took 161 ms with gloo, one of 20 KiB 5 ms. What a large one
would save is not worth the copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax

from hapsynth._jax import is_extended, itemsize
from hapsynth.instructions.program.bundles import as_planned, family, filled
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.lower._collective_order import Each, as_it_is
from hapsynth.lower._collectives import (
    LOWERINGS,
    blocks_of,
    exchange,
    exchange_first,
    join_numbers,
    joined_blocks,
    receive,
)
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.lower._pinned import is_pinned
from hapsynth.lower._storage import off_wire


@dataclass(frozen=True)
class Bundle:
    """Collectives of one kind that run as one; a single one as it is, or `flat`, of one dimension. `sent`: what each
    takes, of equal shapes on all devices."""

    steps: tuple[Convert, ...]
    sent: tuple[jax.ShapeDtypeStruct, ...]
    flat: bool = False

    @property
    def _as_it_is(self) -> bool:
        return len(self.steps) == 1 and (not self.flat or LOWERINGS[self.steps[0].step].in_parts)

    def key(self, sizes: Sizes) -> Hashable:
        """What decides the collective, whatever the values are."""
        return self.flat, *(
            (LOWERINGS[step.step].key(sizes, step), s.shape, str(s.dtype))
            for step, s in zip(self.steps, self.sent, strict=True)
        )

    def pack(self, xs: Sequence[jax.Array], lengths: Sequence[int]) -> jax.Array:
        """One array of all that is sent. `lengths`: of the mesh axes."""
        if self._as_it_is:
            return xs[0]
        parts = [_blocks(step, x, lengths[step.axis]) for step, x in zip(self.steps, xs, strict=True)]
        packed = parts[0] if len(parts) == 1 else lax.concatenate(parts, parts[0].ndim - 1)
        return packed.reshape(-1) if self.flat else packed

    def exchange(
        self,
        sizes: Sizes,
        names: Sequence[str],
        x: jax.Array,
        gloo: LoweringOptions | None,
        each: Each = as_it_is,
    ) -> jax.Array:
        """The collective itself. `names`: of the mesh axes. `gloo`: the thresholds where devices send by gloo. `each`:
        runs one of XLA's collectives."""
        step = self.steps[0]
        name = names[step.axis]
        if self._as_it_is:
            return exchange(sizes, name, step, x, gloo, each)
        collective = step.collective
        x = x[None] if collective.joins and not collective.splits and not self.flat else x
        hosts = sizes.classes.hosts_along(step.axis)
        return exchange_first(collective, name, x, step.source[step.axis], step.target[step.axis], gloo, each, hosts)

    def unpack(self, x: Any, lengths: Sequence[int]) -> list[Any]:
        """What each collective alone would have given, of JAX's array or NumPy's."""
        if self._as_it_is:
            return [x]
        if self.flat and self.steps[0].collective.joins:
            x = x.reshape(lengths[self.steps[0].axis], -1)
        found: list[jax.Array] = []
        sizes = [_length(step, s, lengths) for step, s in zip(self.steps, self.sent, strict=True)]
        for step, sent, begin, size in zip(self.steps, self.sent, accumulate([0, *sizes]), sizes):
            part = x[..., begin : begin + size]
            found.append(_joined(step, part, sent.shape, lengths[step.axis]))
        return found

    def receive(
        self, sizes: Sizes, x: jax.Array, lengths: Sequence[int], here: MeshPosition, indexed: int
    ) -> list[jax.Array]:
        """What arrived, as padded shards under the target layouts. `indexed`: bytes that arrive, up to
        which a gather joins uneven parts."""
        numbers: list[np.ndarray | None] = [None] * len(self.steps)
        if x.nbytes <= indexed and not is_extended(x.dtype):
            whole = self.unpack(np.arange(x.size, dtype=np.int32).reshape(x.shape), lengths)
            numbers = [join_numbers(sizes, step, part) for step, part in zip(self.steps, whole, strict=True)]
        due = [sizes.graph.values[step.value].dtype for step in self.steps]
        if not any(number is None for number in numbers):
            return [off_wire(_taken(x, n), dtype) for n, dtype in zip(numbers, due, strict=True) if n is not None]
        return [
            receive(sizes, step, part, here) if number is None else off_wire(_taken(x, number), dtype)
            for step, part, number, dtype in zip(self.steps, self.unpack(x, lengths), numbers, due, strict=True)
        ]


def _taken(x: jax.Array, numbers: np.ndarray) -> jax.Array:
    """The elements of these numbers, row-major."""
    each = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    at = numbers.reshape(-1, 1)
    made = lax.gather(x.reshape(-1), at, each, (1,), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    return made.reshape(numbers.shape)


def bundles(
    steps: Sequence[Convert],
    sent: Sequence[Any],
    platform: str,
    options: LoweringOptions,
    *,
    flat: bool = False,
    planned: bool = False,
) -> list[Bundle]:
    """Collectives that don't depend on one another, those that can go as one together; the same in all processes.
    `sent`: the shape and dtype that each takes. `flat`: as of `Bundle`. `planned`: those of a bundle of the program are
    one whatever they send, and no others but in loops and branches. Where XLA joins them itself each is alone."""
    of_each = [_family_of(step, struct, platform, options) for step, struct in zip(steps, sent, strict=True)]
    groups = filled([name for name, _ in of_each], [nbytes for _, nbytes in of_each], options.bundle_bytes)
    if planned and steps and not steps[0].region and (platform == "cpu" or is_pinned(platform)):
        groups = as_planned(steps)
    structs = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in sent]
    return [Bundle(tuple(steps[i] for i in g), tuple(structs[i] for i in g), flat) for g in groups]


def _family_of(step: Convert, sent: Any, platform: str, options: LoweringOptions) -> tuple[Hashable | None, int]:
    """What a collective has in common with those that it can go with, None where it goes alone, and the bytes that it
    sends. `sent`: the shape and dtype."""
    nbytes = prod(sent.shape) * itemsize(sent.dtype)
    alone = not (platform == "cpu" or is_pinned(platform)) or nbytes > options.bundled_bytes
    return None if alone else family(step, sent.dtype), nbytes


def _length(step: Convert, sent: jax.ShapeDtypeStruct, lengths: Sequence[int]) -> int:
    return prod(sent.shape) // (lengths[step.axis] if step.collective.splits else 1)


def _blocks(step: Convert, x: jax.Array, n: int) -> jax.Array:
    """[elements], or [devices, elements] where each device is sent its own block."""
    if not step.collective.splits:
        return x.reshape(-1)
    return blocks_of(x, step.target[step.axis].dim, n).reshape(n, -1)


def _joined(step: Convert, x: Any, sent: Sequence[int], n: int) -> Any:
    """The elements of one collective, as it gives them. `sent`: the shape of what it took."""
    shape = list(sent)
    if step.collective.splits:
        shape[step.target[step.axis].dim] //= n
    if not step.collective.joins:
        return x.reshape(shape)
    return joined_blocks(x.reshape(n, *shape), step.source[step.axis].dim)
