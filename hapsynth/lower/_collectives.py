"""Collectives on stored shards: padded to the largest on the wire, cut to the exact pieces on arrival.

Sizes are static, so nothing is masked: a dimension that is whole on a device is laid out as one block per position by
static slices, and blocks that arrive are joined the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
from jax import lax

from hapsynth.instructions.layout import Layout, cut_axes, way_of
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.lower import _gloo
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.lower._reshard import Recut
from hapsynth.lower._storage import pad_to, with_length


def to_blocks(x: jax.Array, dim: int, lengths: Sequence[int], largest: int) -> jax.Array:
    """A dimension of stored length as consecutive blocks of these lengths, each padded to the largest."""
    if set(lengths) == {largest}:
        return x
    blocks: list[jax.Array] = []
    start = 0
    for length in lengths:
        block = lax.slice_in_dim(x, start, start + length, axis=dim)
        blocks.append(pad_to(block, with_length(x, dim, largest)))
        start += length
    return lax.concatenate(blocks, dim)


def from_blocks(x: jax.Array, dim: int, lengths: Sequence[int], largest: int, stored: int) -> jax.Array:
    """The inverse of `to_blocks`: the exact pieces of the padded blocks, joined, and padded to the stored length.

    Neighbours without padding are one.
    """
    if set(lengths) == {largest}:
        return x
    runs: list[tuple[int, int]] = []
    for position, length in enumerate(lengths):
        start = position * largest
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + length)
        elif length:
            runs.append((start, start + length))
    pieces = [lax.slice_in_dim(x, start, end, axis=dim) for start, end in runs or [(0, 0)]]
    return pad_to(pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, dim), with_length(x, dim, stored))


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a dimension along the minor of the axes that cut it.

    What the major axes leave a device of the dimension is cut along the minor one in lengths that may depend on where
    along the major ones the device is: then they are laid out in a switch. All devices send and receive blocks of the
    largest length.
    """

    dim: int
    axes: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    """The lengths along the minor axis, for each position along the major ones."""

    @staticmethod
    def of(sizes: Sizes, value: int, layout: Layout, dim: int) -> _Blocks:
        axes = cut_axes(layout, dim)
        n, lengths = sizes.classes.lengths[axes[-1]], sizes.lengths(value, dim, axes, way_of(layout, dim))
        return _Blocks(dim, axes, tuple(lengths[i : i + n] for i in range(0, len(lengths), n)))

    @property
    def largest(self) -> int:
        return max(map(max, self.rows))

    def split(self, here: MeshPosition, x: jax.Array) -> jax.Array:
        largest = self.largest
        return self._switch(here, lambda lengths, x: to_blocks(x, self.dim, lengths, largest), x)

    def join(self, here: MeshPosition, x: jax.Array) -> jax.Array:
        largest, stored = self.largest, max(map(sum, self.rows))
        return self._switch(here, lambda lengths, x: from_blocks(x, self.dim, lengths, largest, stored), x)

    def _switch(
        self, here: MeshPosition, fn: Callable[[tuple[int, ...], jax.Array], jax.Array], x: jax.Array
    ) -> jax.Array:
        kinds = tuple(dict.fromkeys(self.rows[p] for p in here.positions(self.axes[:-1])))
        if len(kinds) == 1:
            return fn(kinds[0], x)
        kind = here.lookup(self.axes[:-1], [kinds.index(row) if row in kinds else 0 for row in self.rows])
        return lax.switch(kind, [partial(fn, lengths) for lengths in kinds], x)


def send(sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
    """A padded shard as the collective takes it. A dimension of an even cut is laid out as it is."""
    if step.step in ("reduce_scatter", "all_to_all"):
        return _Blocks.of(sizes, step.value, step.target, step.target[step.axis].dim).split(here, x)
    return Recut.of(sizes, step).send(x, here) if step.step == "reshare" else x


def exchange(sizes: Sizes, name: str, step: Convert, x: jax.Array, by_gloo: bool) -> jax.Array:
    """The collective itself, of the same shapes on all devices."""
    source, target = step.source[step.axis], step.target[step.axis]
    match step.step:
        case "all_reduce":
            return _gloo.all_reduce(x, name, source.reduction, by_gloo)
        case "reduce_scatter":
            return _gloo.psum_scatter(x, name, target.dim, by_gloo)
        case "all_gather":
            return _gloo.all_gather(x, name, source.dim, by_gloo)
        case "all_to_all":
            return _gloo.all_to_all(x, name, target.dim, source.dim, by_gloo)
        case "reshare":
            return Recut.of(sizes, step).exchange(name, x)
        case "slice" | "partial":
            raise AssertionError(f"{step.step} communicates nothing")


def receive(sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
    """What the collective gave as a padded shard under the target layout."""
    if step.step in ("all_gather", "all_to_all"):
        return _Blocks.of(sizes, step.value, step.source, step.source[step.axis].dim).join(here, x)
    return Recut.of(sizes, step).receive(x, here) if step.step == "reshare" else x
