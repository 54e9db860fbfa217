"""Reshares on padded shards: one permute for every distance at which rows move, as wide as the longest piece there.

What is sent is the shard, which stays, and behind it a piece for each permute. What arrived is laid out in rising order
of rows, each part over what the one before it has too much: sizes are static, and nothing is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hapsynth.instructions.collectives import Moved
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.staging.moved_rows import Move, moves
from hapsynth.lower._collective_order import Each, as_it_is
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.lower._storage import pad_to, with_length


class Recut(NamedTuple):
    """What moves along dimension `dim`, cut by mesh axes, whose longest shard has `before` rows and gets `after`."""

    dim: int
    axes: tuple[int, ...]
    before: int
    after: int
    moves: tuple[Move, ...]

    @staticmethod
    def of(sizes: Sizes, step: Convert) -> Recut:
        moved = step.traffic
        assert isinstance(moved, Moved)
        old, new = (sizes.lengths(step.value, *cut) for cut in (moved.old, moved.new))
        return Recut.between(moved.old[0], (step.axis,), old, new)

    @staticmethod
    def between(dim: int, axes: tuple[int, ...], old: Sequence[int], new: Sequence[int]) -> Recut:
        """Of shards of these lengths, positions row-major along the axes, major to minor."""
        return Recut(dim, axes, max(old), max(new), tuple(moves(old, new)))

    @property
    def lengths(self) -> list[int]:
        """Of the parts on the wire: the shard, and what is permuted at each distance."""
        return [self.before, *(m.longest for m in self.moves if m.distance)]

    def send(self, x: jax.Array, here: MeshPosition) -> jax.Array:
        """A padded shard with the pieces that go elsewhere behind it."""
        pieces = [self._taken(x, move, here) for move in self.moves if move.distance]
        return lax.concatenate([x, *pieces], self.dim) if pieces else x

    def exchange(
        self,
        name: str | tuple[str, ...],
        x: jax.Array,
        number: Sequence[int] | None = None,
        each: Each = as_it_is,
    ) -> jax.Array:
        """Each piece to its new owner; the same shapes on all devices. `name`: of the axis, or of several as they come
        in the mesh, by which a permute numbers devices; `number`: that of each position, where they cut the dimension
        in another order; `each`: runs a permute of a piece that is flat."""
        _, *pieces = self._parts(x)
        at = number or range(len(self.moves[0].rows))
        start = self.before
        for piece, m in zip(pieces, (m for m in self.moves if m.distance), strict=True):
            pairs = [(at[i], at[i + m.distance]) for i, rows in enumerate(m.rows) if rows]
            flat = each(lambda piece, pairs=pairs: lax.ppermute(piece, name, pairs), piece.reshape(-1))
            arrived = flat.reshape(piece.shape)
            # In its place, so that what is kept is not copied.
            x = lax.dynamic_update_slice_in_dim(x, arrived, start, self.dim)
            start += m.longest
        return x

    def receive(self, x: jax.Array, here: MeshPosition) -> jax.Array:
        """What arrived as a padded shard of the new lengths."""
        kept, *pieces = self._parts(x)
        if not pieces:
            return kept
        position = self._position(here)
        if position is not None:
            return self._received_at(position, kept, pieces)
        shape, arrived = list(x.shape), iter(pieces)
        shape[self.dim] = self.after + max(m.longest for m in self.moves)
        made, filled = jnp.zeros(shape, x.dtype), [0] * len(self.moves[0].rows)
        for move in self.moves:
            piece = next(arrived) if move.distance else self._taken(kept, move, here)
            if move.longest:
                made = lax.dynamic_update_slice(
                    made,
                    piece,
                    self._at(here.lookup(self.axes, filled), made.ndim),
                    allow_negative_indices=False,
                )
            for i, rows in enumerate(move.rows):
                if rows:
                    filled[i + move.distance] += rows
        return lax.slice_in_dim(made, 0, self.after, axis=self.dim)

    def _received_at(self, position: int, kept: jax.Array, pieces: Sequence[jax.Array]) -> jax.Array:
        """As `receive`, where all devices are at one position: what it gets is known, and written once."""
        arrived, parts = iter(pieces), list[jax.Array]()
        for move in self.moves:
            giver = position - move.distance
            start = 0 if move.distance else move.start[position]
            piece = next(arrived) if move.distance else kept
            if 0 <= giver < len(move.rows) and move.rows[giver]:
                parts.append(lax.slice_in_dim(piece, start, start + move.rows[giver], axis=self.dim))
        made = lax.concatenate([*parts, lax.slice_in_dim(kept, 0, 0, axis=self.dim)], self.dim)
        return pad_to(made, with_length(made, self.dim, self.after))

    def _taken(self, x: jax.Array, move: Move, here: MeshPosition) -> jax.Array:
        """The rows of a device's own shard that a move takes, and anything after them."""
        position = self._position(here)
        if position is not None:
            start = move.start[position]
            mine = lax.slice_in_dim(x, start, start + move.rows[position], axis=self.dim)
            return pad_to(mine, with_length(mine, self.dim, move.longest))
        padding = [(0, 0, 0)] * x.ndim
        # A slice that went over the end would begin elsewhere.
        over = max(s + move.longest for s in move.start) - x.shape[self.dim]
        padding[self.dim] = (0, max(0, over), 0)
        wide = lax.pad(x, jnp.zeros((), x.dtype), padding) if over > 0 else x
        shape = with_length(x, self.dim, move.longest)
        return lax.dynamic_slice(
            wide, self._at(here.lookup(self.axes, move.start), x.ndim), shape, allow_negative_indices=False
        )

    def _position(self, here: MeshPosition) -> int | None:
        """Along the mesh axes, where that is the same for all."""
        at = set(here.positions(self.axes))
        return at.pop() if len(at) == 1 else None

    def _at(self, start: jax.Array, rank: int) -> Sequence[jax.Array]:
        return [start if d == self.dim else jnp.int32(0) for d in range(rank)]

    def _parts(self, x: jax.Array) -> list[jax.Array]:
        found: list[jax.Array] = []
        start = 0
        for length in self.lengths:
            found.append(lax.slice_in_dim(x, start, start + length, axis=self.dim))
            start += length
        return found
