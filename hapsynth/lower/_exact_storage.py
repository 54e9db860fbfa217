"""Values stored at their exact size: a small device holds a small shard (decisions.md D2, staged form)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hapsynth import _jax
from hapsynth.lower._storage import Storage, cut_to, local_positions


def local_numbers(mesh: Mesh) -> list[int]:
    """This process's devices, by their numbers in the mesh, row-major."""
    return [int(np.ravel_multi_index(at, mesh.devices.shape)) for at in local_positions(mesh)]


def parts(x: Any) -> list[Any]:
    """What is stored as one array for each of this process's devices, in mesh order."""
    if isinstance(x, Shards):
        return list(x.arrays)
    if len(x.sharding.addressable_devices) == 1:
        found = [x.addressable_data(0)]
    else:
        on = {s.device: s.data for s in x.addressable_shards}
        found = [on[d] for d in x.sharding.mesh.local_devices]
    if x.size > 0:
        return found
    # Of an array without elements JAX gives the whole as each shard.
    shape = x.sharding.shard_shape(x.shape)
    return [part.reshape(shape) for part in found]


class Shards:
    """An unevenly stored value: one array of exact shape for each device of this process, in mesh order.

    `joined`: where a program of this process's own shapes takes or made it (`ExactStorage.joined`), these as one array.
    """

    __slots__ = ("__weakref__", "_arrays", "joined")

    def __init__(self, arrays: Sequence[jax.Array] = (), joined: jax.Array | None = None) -> None:
        self._arrays = tuple(arrays)
        self.joined = joined

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        if not self._arrays:
            self._arrays = tuple(parts(self.joined))
        return self._arrays

    @property
    def _held(self) -> tuple[jax.Array, ...]:
        return self._arrays if self.joined is None else (self.joined, *self._arrays)

    def is_deleted(self) -> bool:
        return any(x.is_deleted() for x in self._held)

    def delete(self) -> None:
        for x in self._held:
            x.delete()

    def block_until_ready(self) -> Shards:
        for x in self._held:
            x.block_until_ready()
        return self

    @property
    def nbytes(self) -> int:
        """Bytes on this process's devices."""
        return sum(x.nbytes for x in self.arrays)

    def __repr__(self) -> str:
        return f"Shards({', '.join(f'{x.dtype}{list(x.shape)}' for x in self.arrays)})"


@dataclass(frozen=True, eq=False)
class ExactStorage(Storage):
    """One value under one layout: even, as any array of JAX's; uneven, as `Shards`."""

    @cached_property
    def local_shapes(self) -> list[tuple[int, ...]]:
        """The exact shape of each shard of this process, in mesh order."""
        return [tuple(s.stop - s.start for s in slices) for slices in self.local_slices]

    @cached_property
    def local_joined_shape(self) -> tuple[int, ...] | None:
        """The global shape of an array whose shards are all as long as those of this process; None where these are
        unlike."""
        if len(set(self.local_shapes)) > 1:
            return None
        return self.joined_shape(local_positions(self.mesh)[0])

    def is_alike(self, other: Storage) -> bool:
        return super().is_alike(other) and self.cuts == other.cuts

    def accepts(self, stored: Any) -> bool:
        if stored.joined is not None:
            return stored.joined.shape == self.local_joined_shape
        return [x.shape for x in stored.arrays] == self.local_shapes

    def _own_shard(self, shard: np.ndarray) -> np.ndarray:
        return np.array(shard)

    def of_shards(self, shards: Sequence[jax.Array]) -> Any:
        return super().of_shards(shards) if self.is_even else Shards(shards)

    def padded(self, stored: Any) -> jax.Array:
        if self.is_even:
            return stored
        with _jax.no_mesh():
            return super().of_shards(stored.arrays)

    def unpadded(self, padded: jax.Array) -> Any:
        if self.is_even:
            return padded
        with _jax.no_mesh():
            return Shards([cut_to(x, shape) for x, shape in zip(parts(padded), self.local_shapes, strict=True)])

    def joined_shape(self, coords: Sequence[int]) -> tuple[int, ...]:
        """The global shape of an array whose shards are all as long as that of the device at `coords`."""
        shape = list(self.shard_shape(coords))
        for dim, (_, lengths) in self.cuts.items():
            shape[dim] *= len(lengths)
        return tuple(shape)

    def joined(self, stored: Any) -> jax.Array:
        """What is stored, where this process's shards are alike, as a part of an array whose shards all are so: in the
        same memory. Other processes think of other arrays."""
        if self.is_even:
            return stored
        if stored.joined is None:
            shape = self.local_joined_shape
            assert shape is not None
            stored.joined = jax.make_array_from_single_device_arrays(shape, self.sharding, list(stored.arrays))
        return stored.joined

    def apart(self, joined: jax.Array) -> Any:
        """The inverse of `joined`."""
        return joined if self.is_even else Shards(joined=joined)

    def duplicate(self, stored: Any) -> Any:
        if self.is_even:
            return super().duplicate(stored)
        with _jax.no_mesh():
            return Shards([x.copy() for x in stored.arrays])

    def fetch(self, stored: Any) -> Any:
        if self.is_even:
            return super().fetch(stored)
        if self.sharding.is_fully_addressable:
            out = np.empty(self.shape, self.dtype)
            for slices, x in zip(self.local_slices, stored.arrays, strict=True):
                out[slices] = x
            return out
        # Others hold the rest: all send padded shards, of one shape.
        plain = Storage(**{name: getattr(self, name) for name in Storage.__dataclass_fields__})
        return plain.fetch(self.padded(stored))
