"""Moves a stored value from one cut to another of the same dimensions: only rows that change their owner are sent."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from hapsynth import _jax
from hapsynth.lower import Each, MeshPosition, Storage, each_of, off_wire, on_wire, options_of, with_weak_type
from hapsynth.lower._recut import Recut


class Change(NamedTuple):
    """One dimension, cut along mesh axes (major to minor) into `old` lengths that become `new` ones."""

    dim: int
    axes: tuple[str, ...]
    old: tuple[int, ...]
    new: tuple[int, ...]


def exchange(source: Storage, target: Storage, stored: Any) -> Any | None:
    """The stored array of `source` as `target` stores it, bit for bit; None where their layouts or meshes differ.

    Kept rows stay where they are: the array itself is returned where nothing moves. Each piece goes straight to
    its new owner, one collective permute for each distance between them in the mesh, padded to the largest piece at
    that distance. A value with several cut dimensions is moved along one after the other. In a run of several
    processes all must call.
    """
    if source.mesh != target.mesh or source.layout != target.layout or source.shape != target.shape:
        return None
    names = source.mesh.axis_names
    steps = tuple(
        Change(dim, tuple(names[a] for a in axes), lengths, target.cuts[dim][1])
        for dim, (axes, lengths) in source.cuts.items()
        if lengths != target.cuts[dim][1]
    )
    if not steps:
        if type(source) is type(target) or source.is_even:
            return stored
        # Of the other form: the shards that need neither padding nor cutting would be the same memory.
        return target.duplicate(target.unpadded(source.padded(stored)))
    with _jax.on_mesh(source.mesh):
        moved = exchanger(source.mesh, source.spec, steps, target.weak_type)(source.padded(stored))
    return target.unpadded(moved)


@lru_cache(maxsize=512)
def exchanger(mesh: Mesh, spec: PartitionSpec, steps: tuple[Change, ...], weak: bool) -> Any:
    """The jitted function that moves arrays stored under `spec`; compiled once for all that lie alike. As a
    plan's own, the permutes keep their order whatever device it is compiled for."""
    platform = mesh.devices.flat[0].platform

    def moved(x: jax.Array) -> jax.Array:
        # As words: to copy a float of two bytes may change the bits of a NaN.
        words: Any = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}.get(x.dtype.itemsize)
        if words is not None and jnp.issubdtype(x.dtype, jnp.floating):
            return lax.bitcast_convert_type(recut(lax.bitcast_convert_type(x, words)), x.dtype)
        return off_wire(recut(on_wire(x)), x.dtype)

    def recut(x: jax.Array) -> jax.Array:
        each = each_of(mesh.axis_names, platform)
        for step in steps:
            x = _recut(x, step, mesh, each)
        return x

    on_mesh = jax.shard_map(moved, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(lambda x: with_weak_type(on_mesh(x), x.dtype, weak), compiler_options=options_of(platform))


def _recut(x: jax.Array, step: Change, mesh: Mesh, each: Each) -> jax.Array:
    """One device's shard, padded to the longest old one, as its new shard, padded to the longest new one."""
    names, lengths = mesh.axis_names, mesh.devices.shape
    axes = tuple(names.index(name) for name in step.axes)
    here = MeshPosition(lengths, tuple(np.ndindex(*lengths)), tuple(map(lax.axis_index, names)), padded=True)
    # A permute numbers devices by the mesh, whichever axis cuts the dimension first.
    by_mesh = sorted(axes)
    number = np.arange(len(step.old)).reshape([lengths[a] for a in by_mesh])
    number = number.transpose([by_mesh.index(a) for a in axes]).ravel().tolist()
    recut = Recut.between(step.dim, axes, step.old, step.new)
    sent = recut.send(x, here)
    return recut.receive(recut.exchange(tuple(names[a] for a in by_mesh), sent, number, each), here)
