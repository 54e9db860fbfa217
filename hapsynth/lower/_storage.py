"""How one value is stored in the devices' memory: even shards at their exact shape, uneven ones padded with zeros to
the largest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hapsynth import _jax
from hapsynth.graph.ir import Graph
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program.sizes import Sizes, layout_nodes
from hapsynth.lower._pinned import options_of


def own_mesh(mesh: Mesh, axes: Sequence[tuple[str, int]]) -> Mesh:
    """The mesh that hapsynth runs on: the devices of `mesh` in their order, one Auto axis per program axis.

    `mesh` may have any axes of any type. Raises ValueError where its number of devices is another than the program's.
    """
    sizes = [size for _, size in axes]
    if mesh.devices.size != prod(sizes):
        raise ValueError(
            f"the program is for {prod(sizes)} devices, {dict(axes)}, and the mesh has {mesh.devices.size}, "
            f"{dict(mesh.shape)}: give a mesh of as many devices, or synthesize for this one"
        )
    devices = np.asarray(mesh.devices).reshape(sizes)
    return Mesh(devices, tuple(name for name, _ in axes), axis_types=(AxisType.Auto,) * len(axes))


def host_array(x: Any) -> Any:
    """`x`, plain or replicated or sharded in any way, as one NumPy array; a typed key as an unsharded key array.

    In a run of several processes an array that not every process can see is gathered first: all must call.
    """
    if isinstance(x, jax.Array):
        if _jax.is_extended(x.dtype):
            with _jax.no_mesh():
                data = host_array(jax.random.key_data(x))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        if not (x.is_fully_addressable or x.is_fully_replicated):
            sharding = x.sharding
            assert isinstance(sharding, NamedSharding)
            with _jax.no_mesh():
                whole = _gather(sharding.mesh, next(iter(x.devices())).platform)(on_wire(x))
            return off_wire(np.asarray(whole), x.dtype)
    return np.asarray(x)


def on_wire(x: jax.Array) -> jax.Array:
    """`x` as collectives take it: integers of fewer than 8 bits as int8, which keeps their values, and as much of sums
    as they do. XLA's collectives on CPUs raise with those of 2 bits or write past their memory (JAX 0.10.2), and NCCL
    has no type of fewer than 8."""
    narrow = jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8
    return x.astype(jnp.int8) if narrow else x


def off_wire(x: Any, dtype: Any) -> Any:
    """What collectives gave of what is `on_wire`, of JAX's or NumPy's, as it was."""
    return x if x.dtype == dtype else x.astype(dtype)


@lru_cache(maxsize=64)
def _gather(mesh: Mesh, platform: str) -> Any:
    """Makes an array whole on all devices of its mesh: of one shape traced and compiled once."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda x: x, out_shardings=whole, compiler_options=options_of(platform))


def with_weak_type(x: Any, dtype: Any, weak: bool) -> Any:
    """`x` as `dtype`, weakly typed or not. Like `lax.convert_element_type`, which can only make strong types."""
    if _jax.is_extended(dtype):
        return x
    if not weak:
        return jax.lax.convert_element_type(x, dtype)
    return primitives.convert_element_type_p.bind(x, new_dtype=np.dtype(dtype), weak_type=True, sharding=None)


def put_own(x: np.ndarray, where: Any) -> jax.Array:
    """`x`, which no one else writes to or keeps, on a device of this process, or under a sharding over such, in
    memory of JAX's own.

    JAX may read it until long after `device_put`, and on CPUs keeps it where it is aligned, with `may_alias=False` too:
    no call could use its memory again for its results.
    """
    put = jax.device_put(x, where, may_alias=False)
    begin, end = np.lib.array_utils.byte_bounds(x)
    pieces = [s.data for s in put.addressable_shards if s.data.size and s.device.platform == "cpu"]
    return put.copy() if any(begin <= piece.unsafe_buffer_pointer() < end for piece in pieces) else put


def local_positions(mesh: Mesh) -> list[tuple[int, ...]]:
    """Where in the mesh this process's devices are, row-major, as `mesh.local_devices` lists them."""
    here = jax.process_index()
    places = zip(np.ndindex(*mesh.devices.shape), mesh.devices.flat, strict=True)
    return [at for at, device in places if device.process_index == here]


@dataclass(frozen=True, eq=False)
class Storage:
    """One value under one layout on one mesh.

    `shape` is logical. `cuts` holds, per sharded dimension, the mesh axes that cut it (their positions, major to minor)
    and the exact length of each shard, in row-major order of the positions along those axes.
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    layout: Layout
    cuts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    mesh: Mesh

    @classmethod
    def of(cls, graph: Graph, sizes: Sizes, value: int, layout: Layout, mesh: Mesh) -> Storage:
        v = graph.values[value]
        cuts = {node[1]: (node[2], sizes.lengths(*node)) for node in layout_nodes(value, layout)}
        # JAX has no weakly typed bools and keys.
        weak = v.weak_type and not _jax.is_extended(v.dtype) and v.dtype != np.bool_
        return cls(v.shape, v.dtype, weak, layout, cuts, mesh)

    @cached_property
    def is_even(self) -> bool:
        """Whether all shards are alike, so that the stored array is the logical one."""
        return all(len(set(lengths)) == 1 for _, lengths in self.cuts.values())

    @cached_property
    def sharding(self) -> NamedSharding:
        names: list[Any] = [None] * (max(self.cuts, default=-1) + 1)
        for dim, (axes, _) in self.cuts.items():
            named = [self.mesh.axis_names[axis] for axis in axes]
            names[dim] = tuple(named) if len(named) > 1 else named[0]
        return NamedSharding(self.mesh, PartitionSpec(*names))

    @cached_property
    def spec(self) -> PartitionSpec:
        return self.sharding.spec

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """The global shape of the stored array: every shard as long as the largest."""
        shape = list(self.shape)
        for dim, (_, lengths) in self.cuts.items():
            shape[dim] = max(lengths) * len(lengths)
        return tuple(shape)

    def slices(self, coords: Sequence[int]) -> tuple[slice, ...]:
        """The part of the logical value that the device at `coords` of the mesh holds, from start to stop."""
        found = [slice(0, n) for n in self.shape]
        for dim, (axes, lengths) in self.cuts.items():
            at = np.ravel_multi_index([coords[a] for a in axes], [self.mesh.devices.shape[a] for a in axes])
            found[dim] = slice(sum(lengths[:at]), sum(lengths[: at + 1]))
        return tuple(found)

    @cached_property
    def local_slices(self) -> list[tuple[slice, ...]]:
        """The part of the logical value on each device of this process, in mesh order."""
        return [self.slices(at) for at in local_positions(self.mesh)]

    def shard_shape(self, coords: Sequence[int]) -> tuple[int, ...]:
        """The exact shape of the shard on the device at `coords` of the mesh."""
        return tuple(s.stop - s.start for s in self.slices(coords))

    def struct(self) -> jax.ShapeDtypeStruct:
        """The stored array, abstractly."""
        return jax.ShapeDtypeStruct(self.stored_shape, self.dtype, sharding=self.sharding, weak_type=self.weak_type)

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable, and equal where one value is stored alike."""
        return (type(self), self.shape, self.dtype, self.weak_type, self.sharding, tuple(self.cuts.items()))

    def holds(self, x: jax.Array) -> bool:
        """Whether an array of the logical shape and dtype lies as it is stored, types included."""
        return self.lies(x) and getattr(x, "weak_type", False) == self.weak_type

    def lies(self, x: jax.Array) -> bool:
        """Whether an array of the logical shape and dtype lies as it is stored."""
        if not self.is_even:
            return False
        # JAX writes out in the spec of keys also the dimensions that nothing cuts.
        return self.shards_fit(x) if _jax.is_extended(self.dtype) else x.sharding == self.sharding

    def shards_fit(self, x: jax.Array) -> bool:
        """Whether every shard of an array of the logical shape and dtype lies where it is stored, whatever the axes of
        its mesh are called and of whatever type they are."""
        return self.is_even and x.sharding.is_equivalent_to(self.sharding, x.ndim)

    def is_alike(self, other: Storage) -> bool:
        """Whether what is stored so can take the memory of what is stored as `other`."""
        return (type(self), self.stored_shape, self.dtype, self.sharding) == (
            type(other),
            other.stored_shape,
            other.dtype,
            other.sharding,
        )

    def accepts(self, stored: Any) -> bool:
        """Whether a stored array has the shape that is due."""
        return stored.shape == self.stored_shape

    def with_dtype(self, dtype: Any) -> Storage:
        """The same cut for values of another dtype."""
        return replace(self, dtype=np.dtype(dtype), weak_type=False)

    def put(self, x: Any, *, copy: bool) -> Any:
        """Store `x`, an array of the logical shape and dtype that lies anywhere.

        With `copy` the result shares no memory with `x`, so that it may be donated.
        """
        with _jax.no_mesh():
            if self.is_even and self.sharding.is_fully_addressable:
                stored = self._put_here(x, copy)
            elif isinstance(x, jax.Array) and self.shards_fit(x):
                stored = self.of_shards(self._held_shards(x, copy))
            elif isinstance(x, jax.Array) and self._is_whole_here(x):
                stored = self.of_shards(self._cut_shards(x, copy))
            elif _jax.is_extended(self.dtype):
                data = host_array(jax.random.key_data(x))
                stored = jax.make_array_from_callback(data.shape, self.sharding, lambda index: np.array(data[index]))
                stored = jax.random.wrap_key_data(stored, impl=jax.random.key_impl(x))
            else:
                host = np.asarray(host_array(x), self.dtype)
                return self.put_shards(lambda slices: host[slices])
            if isinstance(stored, jax.Array) and getattr(stored, "weak_type", False) != self.weak_type:
                stored = with_weak_type(stored, self.dtype, self.weak_type)
            return stored

    def put_shards(self, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
        """Store what `read` gives for the slices of each shard of this process: just that part of the logical value.

        The result shares no memory with it. Not for typed keys, which no NumPy array holds.
        """
        with _jax.no_mesh():
            # `make_array_from_callback` counts as an implicit transfer, which `jax.transfer_guard` refuses.
            shards, held = list[jax.Array](), (None, np.zeros(0))
            for slices, device in zip(self.local_slices, self.mesh.local_devices, strict=True):
                # What is replicated is read once.
                held = held if held[0] == slices else (slices, read(slices))
                shards.append(put_own(self._own_shard(held[1]), device))
            stored = self.of_shards(shards)
            is_weak = self.weak_type and isinstance(stored, jax.Array)
            return with_weak_type(stored, self.dtype, True) if is_weak else stored

    def _own_shard(self, shard: np.ndarray) -> np.ndarray:
        """A copy of a shard of exact shape, as it is to be stored."""
        widths = [(0, large - small) for small, large in zip(shard.shape, self.sharding.shard_shape(self.stored_shape))]
        return np.pad(shard, widths) if any(after for _, after in widths) else np.array(shard)

    def of_shards(self, shards: Sequence[jax.Array]) -> Any:
        """What is stored of the shards on this process's devices, in mesh order, of exact shape or as they are stored;
        it takes their memory."""
        shape = self.sharding.shard_shape(self.stored_shape)
        arrays = [pad_to(x, shape) for x in shards]
        return jax.make_array_from_single_device_arrays(self.stored_shape, self.sharding, arrays)

    def _put_here(self, x: Any, copy: bool) -> jax.Array:
        """Even shards, all of this process's devices."""
        if isinstance(x, jax.Array):
            # `may_alias=False` alone keeps the shard that lies right already.
            return jax.device_put(x.copy() if copy else x, self.sharding, may_alias=False if copy else None)
        if copy:
            return put_own(np.array(x, self.dtype), self.sharding)
        return jax.device_put(np.asarray(x, self.dtype), self.sharding)

    def _held_shards(self, x: jax.Array, copy: bool) -> list[jax.Array]:
        """The shards of an array whose `shards_fit`."""
        held = {s.device: s.data for s in x.addressable_shards}
        # Of an array without elements JAX may give the whole as each shard.
        shape = self.sharding.shard_shape(self.shape)
        shards = [held[d] if x.size else held[d].reshape(shape) for d in self.mesh.local_devices]
        return [shard.copy() for shard in shards] if copy else shards

    def _is_whole_here(self, x: jax.Array) -> bool:
        """Whether a device of this process holds all of an array, in memory that it computes on."""
        where = x.sharding
        usual = where.memory_kind == self.sharding.memory_kind and x.dtype == self.dtype
        return usual and where.is_fully_replicated and bool(where.addressable_devices)

    def _cut_shards(self, x: jax.Array, copy: bool) -> list[jax.Array]:
        """The shards of an array that a device here holds whole. Nothing waits until it is computed, as a look at it
        from the host would."""
        if not self.is_even and getattr(x, "weak_type", False):
            # Weak is the whole that is made of even shards, and nothing of uneven ones.
            x = with_weak_type(x, self.dtype, False)
        held = {s.device: s.data for s in x.addressable_shards}
        first = next(iter(held.values()))
        shards: list[jax.Array] = []
        for device, slices in zip(self.mesh.local_devices, self.local_slices, strict=True):
            whole = held.get(device, first)
            shard = whole
            if any(s.stop - s.start < n for s, n in zip(slices, self.shape)):
                # One compiled program for all places.
                shard = lax.dynamic_slice(whole, [s.start for s in slices], [s.stop - s.start for s in slices])
            elif copy and device in held:
                # On its own device `device_put` makes none.
                shard = whole.copy()
            shards.append(jax.device_put(shard, device))
        return shards

    def padded(self, stored: Any) -> jax.Array:
        """What is stored as one array on the mesh, every shard padded to the largest. All processes must call."""
        return stored

    def unpadded(self, padded: jax.Array) -> Any:
        """The inverse of `padded`."""
        return padded

    def duplicate(self, stored: Any) -> Any:
        """A stored array again, in memory of its own."""
        with _jax.no_mesh():
            return jax.device_put(stored.copy(), self.sharding)

    def fetch(self, stored: Any) -> Any:
        """The logical value as one NumPy array (a typed key: an unsharded key array); the inverse of `put`."""
        host = host_array(stored)
        if self.is_even:
            return host
        out = np.empty(self.shape, host.dtype)
        positions = [range(len(lengths)) for _, lengths in self.cuts.values()]
        for where in itertools.product(*positions):
            source, target = [slice(None)] * len(self.shape), [slice(None)] * len(self.shape)
            for position, (dim, (_, lengths)) in zip(where, self.cuts.items()):
                first, start, length = position * max(lengths), sum(lengths[:position]), lengths[position]
                source[dim], target[dim] = slice(first, first + length), slice(start, start + length)
            out[tuple(target)] = host[tuple(source)]
        return out


def pad_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Zeros after the end of each dimension; `x` itself where it already has the shape."""
    if x.shape == tuple(shape):
        return x
    return jnp.pad(x, [(0, large - small) for small, large in zip(x.shape, shape, strict=True)])


def cut_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The first elements of each dimension; `x` itself where it already has the shape."""
    return x if x.shape == tuple(shape) else lax.slice(x, (0,) * x.ndim, shape)


def with_length(x: jax.Array, dim: int, length: int) -> tuple[int, ...]:
    """The shape with another length of one dimension."""
    return tuple(length if i == dim else n for i, n in enumerate(x.shape))
