"""Replicated state that devices compute redundantly, compared and made the same again (decisions.md D2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from hapsynth import _jax
from hapsynth.lower import Each, Storage, each_of, options_of, with_weak_type


class LeafDrift(NamedTuple):
    """How far the devices' copies of one leaf are apart from the first device's.

    `max_abs`: the largest difference; infinite where one is NaN or infinite and the other is not the same; of complex
    numbers, of their parts. `max_rel`: that over the largest finite number of the first device's copy. `equal`: whether
    all copies are the same bit for bit (0 and -0 are not, though their difference is 0).
    """

    path: str
    max_abs: float
    max_rel: float
    equal: bool


@dataclass(frozen=True)
class DriftReport:
    """`leaves`: every leaf of carried state of which several devices hold the same part."""

    leaves: tuple[LeafDrift, ...]

    @property
    def equal(self) -> bool:
        """Whether all copies of all leaves are the same bit for bit."""
        return all(leaf.equal for leaf in self.leaves)

    def __str__(self) -> str:
        apart = sorted((leaf for leaf in self.leaves if not leaf.equal), key=lambda leaf: -leaf.max_rel)
        if not apart:
            return f"the copies of {len(self.leaves)} replicated leaves are equal"
        lines = [f"  {leaf.path}: {leaf.max_abs:.3g}, relative {leaf.max_rel:.3g}" for leaf in apart]
        head = f"the copies of {len(apart)} of {len(self.leaves)} replicated leaves differ"
        return "\n".join([f"{head}; make them equal with plan.resync", *lines])


def copied_along(storage: Storage) -> tuple[str, ...]:
    """The mesh axes along which devices hold the same part of a value."""
    cutting = {a for axes, _ in storage.cuts.values() for a in axes}
    lengths = storage.mesh.devices.shape
    return tuple(name for a, name in enumerate(storage.mesh.axis_names) if a not in cutting and lengths[a] > 1)


def leaf_drift(path: str, storage: Storage, stored: Any) -> LeafDrift:
    """A collective: in a run of several processes all must call."""
    stored = storage.padded(stored)
    if _jax.is_extended(storage.dtype):
        with _jax.no_mesh():
            stored = jax.random.key_data(stored)
    with _jax.on_mesh(storage.mesh):
        distances = _comparing(storage.mesh, storage.spec, copied_along(storage), _lengths(storage))(stored)
    apart, largest, differs = (x.item() for x in map(np.asarray, distances))
    relative = 0.0 if apart == 0 else apart / largest if largest else float("inf")
    return LeafDrift(path, float(apart), relative, not differs)


def resynced(storage: Storage, stored: Any) -> Any:
    """The stored array with the first device's copy on all that hold the same part; as `leaf_drift`."""
    copy = _copying(storage.mesh, storage.spec, copied_along(storage), storage.weak_type)
    if not _jax.is_extended(storage.dtype):
        with _jax.on_mesh(storage.mesh):
            copied = copy(storage.padded(stored))
        return storage.unpadded(copied)
    with _jax.no_mesh():
        data = jax.random.key_data(stored)
    with _jax.on_mesh(storage.mesh):
        data = copy(data)
    with _jax.no_mesh():
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(stored))


Lengths = tuple[tuple[int, tuple[str, ...], tuple[int, ...]], ...]
"""(dimension, mesh axes, length of each shard)"""


def _lengths(storage: Storage) -> Lengths:
    names = storage.mesh.axis_names
    return tuple((dim, tuple(names[a] for a in axes), lengths) for dim, (axes, lengths) in storage.cuts.items())


@lru_cache(maxsize=512)
def _comparing(mesh: Mesh, spec: PartitionSpec, axes: tuple[str, ...], lengths: Lengths) -> Any:
    platform = mesh.devices.flat[0].platform

    def body(x: jax.Array) -> tuple[jax.Array, ...]:
        each = each_of(mesh.axis_names, platform)
        inside = jnp.ones(x.shape, bool)
        for dim, along, own_lengths in lengths:
            # Elements beyond a shard's own length are undefined.
            own = jnp.asarray(own_lengths, jnp.int32)[lax.axis_index(along)]
            inside &= lax.broadcasted_iota(jnp.int32, x.shape, dim) < own
        parts, first = _parts(x), _parts(_of_first(x, axes, each))
        inside = inside.reshape(*x.shape, *[1] * (parts.ndim - x.ndim))
        differs = (_bits(parts) != _bits(first)).reshape(*parts.shape, -1).any(-1) & inside
        a, b = (y.astype(jnp.float64 if y.dtype == jnp.float64 else jnp.float32) for y in (parts, first))
        apart = jnp.abs(a - b)
        if jnp.issubdtype(parts.dtype, jnp.floating):
            same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
            apart = jnp.where(same, 0, jnp.where(jnp.isnan(apart), jnp.inf, apart))
        else:
            # Integers that differ do so by one at least, even where these floats don't tell them apart.
            apart = jnp.maximum(apart, 1)
        apart = jnp.where(differs, apart, 0)
        size = jnp.where(inside & jnp.isfinite(b), jnp.abs(b), 0)
        largest = lambda a: each(lambda a: lax.pmax(a, mesh.axis_names), jnp.max(a, initial=0))
        return largest(apart), largest(size), largest(differs.astype(jnp.int32))

    on_mesh = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(on_mesh, compiler_options=options_of(platform))


@lru_cache(maxsize=512)
def _copying(mesh: Mesh, spec: PartitionSpec, axes: tuple[str, ...], weak: bool) -> Any:
    platform = mesh.devices.flat[0].platform
    body = lambda x: _of_first(x, axes, each_of(mesh.axis_names, platform))
    on_mesh = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(lambda x: with_weak_type(on_mesh(x), x.dtype, weak), compiler_options=options_of(platform))


def _of_first(x: jax.Array, axes: tuple[str, ...], each: Each) -> jax.Array:
    """The first device's copy, bit for bit: a sum of its bits and of the others' zeros."""
    if (wide := _of_bytes(x)).dtype != x.dtype:
        return _of_first(wide, axes, each).astype(x.dtype)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(_of_first(x.real, axes, each), _of_first(x.imag, axes, each))
    bits = _bits(x)
    is_first = sum(lax.axis_index(a) for a in axes) == 0
    sent = jnp.where(is_first, bits, 0).astype(jnp.uint32).reshape(-1)
    first = each(lambda sent: lax.psum(sent, axes), sent).reshape(bits.shape)
    return lax.bitcast_convert_type(first.astype(bits.dtype), x.dtype)


def _bits(x: jax.Array) -> jax.Array:
    """Unsigned words; of eight bytes an element two, along a last dimension of their own."""
    words = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(x, words)


def _of_bytes(x: jax.Array) -> jax.Array:
    """Numbers of at least eight bits: bools as 0 and 1, small numbers as larger ones that keep all their values."""
    if x.dtype == jnp.bool_ or (jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8):
        return x.astype(jnp.int8)
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 8:
        return x.astype(jnp.float32)
    return x


def _parts(x: jax.Array) -> jax.Array:
    """Numbers of at least eight bits that can be subtracted: complex ones as two along a last dimension."""
    x = _of_bytes(x)
    return jnp.stack([x.real, x.imag], -1) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
