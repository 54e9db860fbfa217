"""All-to-alls in rounds on padded shards: a permute for every distance around the axis, as wide as its largest piece.

What is sent is flat: the piece that stays, and behind it one for each round, each padded to the largest of its round.
So it has one shape on all devices, and each lays out and joins what it has in shapes of its own, in a switch where
devices that share a program have unlike places; where all pieces are alike, by where each begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hapsynth.instructions.collectives import Exchanged
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.registry import apart
from hapsynth.lower._collective_order import Each
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.lower._storage import cut_to, pad_to


class _Cut(NamedTuple):
    """A dimension cut by `axes`, the minor one that of the step; `rows`: the lengths along that one, for each position
    along the major ones."""

    dim: int
    axes: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(sizes: Sizes, value: int, dim: int, axes: tuple[int, ...], way: int) -> _Cut:
        return _Cut(dim, axes, sizes.rows(value, dim, axes, way))

    @property
    def largest(self) -> list[int]:
        """The length at each position along the minor axis, whatever the major ones."""
        return [max(lengths) for lengths in zip(*self.rows, strict=True)]


class _Place(NamedTuple):
    """Where a device is: `at` along the axis of the step, and what all there have of the two dimensions."""

    at: int
    old: tuple[int, ...]
    new: tuple[int, ...]


class Pairwise(NamedTuple):
    """What is exchanged between cuts `old` and `new` of two dimensions of a value that is stored as `source` shapes
    before and as `target` shapes after."""

    old: _Cut
    new: _Cut
    source: tuple[int, ...]
    target: tuple[int, ...]

    @staticmethod
    def of(sizes: Sizes, step: Convert) -> Pairwise:
        exchanged = step.traffic
        assert isinstance(exchanged, Exchanged)
        old, new = (_Cut.of(sizes, step.value, *cut) for cut in (exchanged.old, exchanged.new))
        return Pairwise(old, new, *(sizes.padded_shape(step.value, p) for p in (step.source, step.target)))

    @property
    def n(self) -> int:
        return len(self.old.rows[0])

    @property
    def lengths(self) -> list[int]:
        """Elements of each round's largest piece; of round 0 of what stays."""
        rest = prod(n for dim, n in enumerate(self.source) if dim not in (self.old.dim, self.new.dim))
        return [rest * max(self._rows(away)) for away in range(self.n)]

    def _rows(self, away: int) -> list[int]:
        """Of each position's piece for the one so far away, the product of its two lengths."""
        held, wanted = self.old.largest, self.new.largest
        return [held[at] * wanted[(at + away) % self.n] for at in range(self.n)]

    def send(self, x: jax.Array, here: MeshPosition) -> jax.Array:
        """A padded shard as pieces, the one that stays first."""
        return self._evenly_apart(here, x) if self._is_even else self._switch(here, self._apart, x)

    def exchange(self, name: str, x: jax.Array, each: Each) -> jax.Array:
        """Every piece to who gets it; the same shapes on all devices."""
        start, *lengths = self.lengths
        for away, length in enumerate(lengths, 1):
            if length:
                pairs = [(at, (at + away) % self.n) for at, rows in enumerate(self._rows(away)) if rows]
                piece = lax.slice_in_dim(x, start, start + length)
                arrived = each(lambda piece, pairs=pairs: lax.ppermute(piece, name, pairs), piece)
                x = lax.dynamic_update_slice_in_dim(x, arrived, start, 0)
                start += length
        return x

    def receive(self, x: jax.Array, here: MeshPosition) -> jax.Array:
        """The pieces that arrived as a padded shard."""
        return self._evenly_joined(here, x) if self._is_even else self._switch(here, self._joined, x)

    @property
    def _is_even(self) -> bool:
        return all(len(set().union(*cut.rows)) == 1 for cut in (self.old, self.new))

    def _evenly_apart(self, here: MeshPosition, x: jax.Array) -> jax.Array:
        dim, width, x = self.new.dim, self.new.largest[0], apart(x)
        at = (self._placed(here, width, away) for away in range(self.n))
        pieces = [lax.dynamic_slice_in_dim(x, start, width, dim) for start in at]
        return lax.concatenate([piece.reshape(-1) for piece in pieces], 0)

    def _evenly_joined(self, here: MeshPosition, x: jax.Array) -> jax.Array:
        dim, rows = self.old.dim, self.old.largest[0]
        made, pieces = jnp.zeros(self.target, x.dtype), lax.split(x, self.lengths)
        for away, piece in enumerate(pieces):
            piece = piece.reshape(self._shape(self.target, rows, self.new.largest[0]))
            made = lax.dynamic_update_slice_in_dim(made, piece, self._placed(here, rows, -away), dim)
        return made

    def _placed(self, here: MeshPosition, length: int, away: int) -> jax.Array:
        """Where the block of the device so far away begins, of blocks of one length."""
        return here.lookup(self.old.axes[-1:], [(at + away) % self.n * length for at in range(self.n)])

    def _apart(self, place: _Place, x: jax.Array) -> jax.Array:
        starts, pieces = [0, *accumulate(place.new)], list[jax.Array]()
        x = cut_to(x, self._shape(self.source, place.old[place.at], x.shape[self.new.dim]))
        for away, length in enumerate(self.lengths):
            to = (place.at + away) % self.n
            piece = lax.slice_in_dim(x, starts[to], starts[to + 1], axis=self.new.dim)
            pieces.append(pad_to(piece.reshape(-1), (length,)))
        return lax.concatenate(pieces, 0)

    def _joined(self, place: _Place, x: jax.Array) -> jax.Array:
        starts, pieces = [0, *accumulate(self.lengths)], list[jax.Array]()
        for giver, rows in enumerate(place.old):
            start = starts[(place.at - giver) % self.n]
            shape = self._shape(self.target, rows, place.new[place.at])
            pieces.append(lax.slice_in_dim(x, start, start + prod(shape)).reshape(shape))
        return pad_to(lax.concatenate(pieces, self.old.dim), self.target)

    def _shape(self, stored: Sequence[int], old: int, new: int) -> tuple[int, ...]:
        lengths = {self.old.dim: old, self.new.dim: new}
        return tuple(lengths.get(dim, n) for dim, n in enumerate(stored))

    def _switch(self, here: MeshPosition, fn: Callable[[_Place, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        majors, minor = (self.old.axes[:-1], self.new.axes[:-1]), self.old.axes[-1]
        positions = zip(here.positions(majors[0]), here.positions(majors[1]), here.positions((minor,)), strict=True)
        places = [_Place(at, self.old.rows[p], self.new.rows[q]) for p, q, at in positions]
        kinds = list(dict.fromkeys(places))
        if len(kinds) == 1:
            return fn(kinds[0], x)
        every = [_Place(at, old, new) for old in self.old.rows for new in self.new.rows for at in range(self.n)]
        table = [kinds.index(place) if place in kinds else 0 for place in every]
        kind = here.lookup((*majors[0], *majors[1], minor), table)
        return lax.switch(kind, [partial(fn, place) for place in kinds], x)
