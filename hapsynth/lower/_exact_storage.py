"""Values stored at their exact size: a small device holds a small shard (DESIGN D2, staged form)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hapsynth import _jax
from hapsynth.lower._storage import Storage, cut_to, pad_to, put_copy


def local_positions(mesh: Mesh) -> list[tuple[int, ...]]:
    """Where in the mesh this process's devices are, row-major, as `mesh.local_devices` lists them."""
    here = jax.process_index()
    places = zip(np.ndindex(*mesh.devices.shape), mesh.devices.flat, strict=True)
    return [at for at, device in places if device.process_index == here]


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
    def positions(self) -> list[tuple[int, ...]]:
        return local_positions(self.mesh)

    def is_alike(self, other: Storage) -> bool:
        return super().is_alike(other) and self.cuts == other.cuts

    def accepts(self, stored: Any) -> bool:
        return [x.shape for x in stored.arrays] == [self.shard_shape(at) for at in self.positions]

    def put_shards(self, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
        if self.is_even:
            return super().put_shards(read)
        with _jax.no_mesh():
            places = zip(self.positions, self.mesh.local_devices, strict=True)
            return Shards([put_copy(read(self.slices(at)), d) for at, d in places])

    def padded(self, stored: Any) -> jax.Array:
        if self.is_even:
            return stored
        shape = self.sharding.shard_shape(self.stored_shape)
        with _jax.no_mesh():
            arrays = [pad_to(x, shape) for x in stored.arrays]
            return jax.make_array_from_single_device_arrays(self.stored_shape, self.sharding, arrays)

    def unpadded(self, padded: jax.Array) -> Any:
        if self.is_even:
            return padded
        with _jax.no_mesh():
            pieces = zip(parts(padded), self.positions, strict=True)
            return Shards([cut_to(x, self.shard_shape(at)) for x, at in pieces])

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
            shape = self.joined_shape(self.positions[0])
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
            for at, x in zip(self.positions, stored.arrays, strict=True):
                out[self.slices(at)] = x
            return out
        # Others hold the rest: all send padded shards, of one shape.
        plain = Storage(**{name: getattr(self, name) for name in Storage.__dataclass_fields__})
        return plain.fetch(self.padded(stored))
