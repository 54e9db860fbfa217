"""Collectives on stored shards: padded to the largest on the wire, cut to the exact pieces on arrival.

Sizes are static, so nothing is masked: a dimension that is whole on a device is laid out as one block per position by
static slices, and blocks that arrive are joined the same way.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hapsynth.instructions.collectives import Collective, Hosts
from hapsynth.instructions.layout import Layout, Placement, S, cut_axes, way_of
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.staging.moved_rows import even_rows
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.lower import _gloo, _hierarchical, _tree
from hapsynth.lower._collective_order import Each
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.lower._pairwise import Pairwise
from hapsynth.lower._recut import Recut
from hapsynth.lower._storage import off_wire, on_wire, pad_to, with_length


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
        return _Blocks(dim, axes, sizes.rows(value, dim, axes, way_of(layout, dim)))

    @property
    def largest(self) -> int:
        return max(map(max, self.rows))

    def split(self, here: MeshPosition, x: jax.Array) -> jax.Array:
        largest = self.largest
        return self._switch(here, lambda lengths, x: to_blocks(x, self.dim, lengths, largest), x)

    def join(self, here: MeshPosition, x: jax.Array) -> jax.Array:
        largest, stored = self.largest, max(map(sum, self.rows))
        return self._switch(here, lambda lengths, x: from_blocks(x, self.dim, lengths, largest, stored), x)

    def join_numbers(self, x: np.ndarray) -> np.ndarray | None:
        """As `join`, of NumPy's; None where pieces are even or depend on where the device is."""
        (lengths, *others), largest = dict.fromkeys(self.rows), self.largest
        if others or set(lengths) == {largest}:
            return None
        own = np.arange(largest) < np.asarray(lengths)[:, None]
        return np.compress(own.ravel(), x, self.dim)

    def _switch(
        self, here: MeshPosition, fn: Callable[[tuple[int, ...], jax.Array], jax.Array], x: jax.Array
    ) -> jax.Array:
        kinds = tuple(dict.fromkeys(self.rows[p] for p in here.positions(self.axes[:-1])))
        if len(kinds) == 1:
            return fn(kinds[0], x)
        kind = here.lookup(self.axes[:-1], [kinds.index(row) if row in kinds else 0 for row in self.rows])
        return lax.switch(kind, [partial(fn, lengths) for lengths in kinds], x)


Run = Callable[[jax.Array, str, Placement, Placement, Hosts, LoweringOptions | None, Each], jax.Array]
"""(x, axis, source, target, the hosts along the axis, gloo's thresholds where devices send by it, what runs each of
XLA's) -> what one of JAX's collectives gives, tiled along the dimensions that the placements cut."""


class Lowering(ABC):
    """What a collective is, between padded shards."""

    in_parts: bool
    """Whether it is several of XLA's, each for its part of what arrives."""

    @abstractmethod
    def key(self, sizes: Sizes, step: Convert) -> Hashable:
        """What decides `exchange`, whatever the value is."""

    @abstractmethod
    def send(self, sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
        """A shard as the collective takes it."""

    @abstractmethod
    def exchange(
        self, sizes: Sizes, name: str, step: Convert, x: jax.Array, gloo: LoweringOptions | None, each: Each
    ) -> jax.Array:
        """The collective itself, of the same shapes on all devices; `each` runs one of XLA's."""

    def join_numbers(self, sizes: Sizes, step: Convert, x: np.ndarray) -> np.ndarray | None:
        """As `receive`, of NumPy's, where pieces that are uneven alike for all devices are joined; None elsewhere."""
        return None

    def alone(self, sizes: Sizes, step: Convert, x: jax.Array) -> jax.Array | None:
        """What `exchange` gives where all devices send what this one does; None where the table's entry tells it."""
        return None

    @abstractmethod
    def receive(self, sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
        """What it gave as a shard under the target layout."""


@dataclass(frozen=True)
class BlockLowering(Lowering):
    """A device sends all, or each other one a block of the target's, and has all then, or joins blocks of the source's,
    as the collective's entry in the table says."""

    run: Run
    in_parts: bool = False

    def key(self, sizes: Sizes, step: Convert) -> Hashable:
        return step.step, step.axis, step.source[step.axis], step.target[step.axis]

    def send(self, sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
        if not step.collective.splits:
            return x
        return _Blocks.of(sizes, step.value, step.target, step.target[step.axis].dim).split(here, x)

    def exchange(
        self, sizes: Sizes, name: str, step: Convert, x: jax.Array, gloo: LoweringOptions | None, each: Each
    ) -> jax.Array:
        hosts = sizes.classes.hosts_along(step.axis)
        return self.run(x, name, step.source[step.axis], step.target[step.axis], hosts, gloo, each)

    def receive(self, sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
        if not step.collective.joins:
            return x
        return _Blocks.of(sizes, step.value, step.source, step.source[step.axis].dim).join(here, x)

    def join_numbers(self, sizes: Sizes, step: Convert, x: np.ndarray) -> np.ndarray | None:
        if not step.collective.joins:
            return None
        return _Blocks.of(sizes, step.value, step.source, step.source[step.axis].dim).join_numbers(x)


@dataclass(frozen=True)
class PiecesLowering(Lowering):
    """Each piece goes straight to who gets it."""

    of: Callable[[Sizes, Convert], Recut | Pairwise]
    """What moves in a step."""
    in_parts: bool = True

    def key(self, sizes: Sizes, step: Convert) -> Hashable:
        return self.of(sizes, step)

    def send(self, sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
        return self.of(sizes, step).send(x, here)

    def exchange(
        self, sizes: Sizes, name: str, step: Convert, x: jax.Array, gloo: LoweringOptions | None, each: Each
    ) -> jax.Array:
        return self.of(sizes, step).exchange(name, x, each=each)

    def receive(self, sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
        return self.of(sizes, step).receive(x, here)


@dataclass(frozen=True)
class PairwiseLowering(PiecesLowering):
    """Those of one round go together, in as many bytes as arrive."""

    def alone(self, sizes: Sizes, step: Convert, x: jax.Array) -> jax.Array:
        return x


class _Evenly(NamedTuple):
    """Even shards of a dimension that the axis of a step cuts, and unlike ones, and what moves between them."""

    dim: int
    lengths: tuple[int, ...]
    recut: Recut
    everyone: tuple[int, ...]
    """The lengths of the mesh axes."""

    @staticmethod
    def of(sizes: Sizes, step: Convert) -> _Evenly:
        gathers = step.source[step.axis].is_sharded
        placement = (step.source if gathers else step.target)[step.axis]
        unlike = sizes.lengths(step.value, placement.dim, (step.axis,), placement.way)
        even = even_rows(sum(unlike), len(unlike))
        ends = (unlike, even) if gathers else (even, unlike)
        recut = Recut.between(placement.dim, (step.axis,), *ends)
        return _Evenly(placement.dim, even, recut, sizes.classes.lengths)

    def here(self, name: str) -> MeshPosition:
        """All devices, told apart by their places along the axis alone."""
        (axis,) = self.recut.axes
        index = tuple(lax.axis_index(name) if a == axis else 0 for a in range(len(self.everyone)))
        return MeshPosition(self.everyone, tuple(np.ndindex(*self.everyone)), index, padded=True)


@dataclass(frozen=True)
class BalancedLowering(Lowering):
    """Of even shards: rows move between these and the unlike ones."""

    in_parts: bool = True

    def key(self, sizes: Sizes, step: Convert) -> Hashable:
        return step.step, _Evenly.of(sizes, step)


class BalancedGatherLowering(BalancedLowering):
    """Rows go to even shards, which are gathered."""

    def send(self, sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
        return _Evenly.of(sizes, step).recut.send(x, here)

    def exchange(
        self, sizes: Sizes, name: str, step: Convert, x: jax.Array, gloo: LoweringOptions | None, each: Each
    ) -> jax.Array:
        evenly = _Evenly.of(sizes, step)
        shard = evenly.recut.receive(evenly.recut.exchange(name, x, each=each), evenly.here(name))
        flat = _gloo.all_gather(shard.reshape(-1), name, 0, gloo, each)
        return joined_blocks(flat.reshape(-1, *shard.shape), evenly.dim)

    def alone(self, sizes: Sizes, step: Convert, x: jax.Array) -> jax.Array:
        evenly = _Evenly.of(sizes, step)
        shard = lax.slice_in_dim(x, 0, evenly.lengths[0], axis=evenly.dim)
        return lax.concatenate([shard] * len(evenly.lengths), evenly.dim)

    def receive(self, sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
        dim, lengths, *_ = _Evenly.of(sizes, step)
        return from_blocks(x, dim, lengths, lengths[0], sum(lengths))


class BalancedScatterLowering(BalancedLowering):
    """Even shards are reduced, and their rows go to their owners."""

    def send(self, sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
        dim, lengths, *_ = _Evenly.of(sizes, step)
        return to_blocks(x, dim, lengths, lengths[0])

    def exchange(
        self, sizes: Sizes, name: str, step: Convert, x: jax.Array, gloo: LoweringOptions | None, each: Each
    ) -> jax.Array:
        evenly = _Evenly.of(sizes, step)
        blocks = blocks_of(x, evenly.dim, len(evenly.lengths))
        flat = _gloo.psum_scatter(blocks.reshape(-1), name, 0, gloo, each)
        shard = flat.reshape(blocks.shape[1:])
        return evenly.recut.exchange(name, evenly.recut.send(shard, evenly.here(name)), each=each)

    def alone(self, sizes: Sizes, step: Convert, x: jax.Array) -> jax.Array:
        evenly = _Evenly.of(sizes, step)
        shard = reduce(operator.add, blocks_of(x, evenly.dim, len(evenly.lengths)))
        return pad_to(shard, with_length(shard, evenly.dim, sum(evenly.recut.lengths)))

    def receive(self, sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
        return _Evenly.of(sizes, step).recut.receive(x, here)


def blocks_of(x: jax.Array, dim: int, n: int) -> jax.Array:
    """The `n` equal blocks of a dimension, along one of their own before all others."""
    return jnp.moveaxis(x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :]), dim, 0)


def joined_blocks(x: Any, dim: int) -> Any:
    """The inverse of `blocks_of`, of JAX's array or NumPy's."""
    n, *block = x.shape
    block[dim] *= n
    return x.transpose(*range(1, dim + 1), 0, *range(dim + 1, x.ndim)).reshape(block)


LOWERINGS: dict[str, Lowering] = {
    "all_reduce": BlockLowering(lambda x, axis, p, q, hosts, *how: _gloo.all_reduce(x, axis, p.reduction, *how)),
    "reduce_scatter": BlockLowering(lambda x, axis, p, q, hosts, *how: _gloo.psum_scatter(x, axis, q.dim, *how)),
    "all_gather": BlockLowering(lambda x, axis, p, q, hosts, *how: _gloo.all_gather(x, axis, p.dim, *how)),
    "all_to_all": BlockLowering(lambda x, axis, p, q, hosts, *how: _gloo.all_to_all(x, axis, q.dim, p.dim, *how)),
    "reduce": BlockLowering(lambda x, axis, p, q, hosts, gloo, each: _tree.reduce_to(x, axis, q, each), in_parts=True),
    "broadcast": BlockLowering(
        lambda x, axis, p, q, hosts, gloo, each: _tree.broadcast(x, axis, p, each), in_parts=True
    ),
    "pairwise_all_to_all": PairwiseLowering(Pairwise.of),
    "reshare": PiecesLowering(Recut.of),
    "balanced_reduce_scatter": BalancedScatterLowering(),
    "balanced_all_gather": BalancedGatherLowering(),
    "hierarchical_all_reduce": BlockLowering(lambda x, axis, p, q, *how: _hierarchical.all_reduce(x, axis, *how)),
    "hierarchical_reduce_scatter": BlockLowering(
        lambda x, axis, p, q, *how: _hierarchical.psum_scatter(x, axis, q.dim, *how)
    ),
    "hierarchical_all_gather": BlockLowering(
        lambda x, axis, p, q, *how: _hierarchical.all_gather(x, axis, p.dim, *how)
    ),
}
"""Of every collective in `instructions.collectives.STEPS`."""


def send(sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
    """A padded shard as the collective takes it. A dimension of an even cut is laid out as it is."""
    return LOWERINGS[step.step].send(sizes, step, on_wire(x), here)


def exchange(
    sizes: Sizes, name: str, step: Convert, x: jax.Array, gloo: LoweringOptions | None, each: Each
) -> jax.Array:
    """The collective itself, of the same shapes on all devices; `each` runs one of XLA's."""
    return LOWERINGS[step.step].exchange(sizes, name, step, x, gloo, each)


def receive(sizes: Sizes, step: Convert, x: jax.Array, here: MeshPosition) -> jax.Array:
    """What the collective gave as a padded shard under the target layout."""
    return off_wire(LOWERINGS[step.step].receive(sizes, step, x, here), sizes.graph.values[step.value].dtype)


def join_numbers(sizes: Sizes, step: Convert, x: np.ndarray) -> np.ndarray | None:
    """As `receive`, of NumPy's, where pieces that are uneven alike for all devices are joined; None elsewhere."""
    return LOWERINGS[step.step].join_numbers(sizes, step, x)


def exchange_first(
    step: Collective,
    name: str,
    x: jax.Array,
    source: Placement,
    target: Placement,
    gloo: LoweringOptions | None,
    each: Each,
    hosts: Hosts = (),
) -> jax.Array:
    """A collective of blocks that splits and joins the first dimension, whatever it is of, between two placements that
    it turns one into the other."""
    lowering = LOWERINGS[step.name]
    assert isinstance(lowering, BlockLowering), f"{step.name} sends no blocks"
    source, target = S(0) if step.joins else source, S(0) if step.splits else target
    return lowering.run(x, name, source, target, hosts, gloo, each)
