"""Moves a stored value from one cut to another of the same dimensions: only rows that change their owner are sent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from hapsynth import _jax
from hapsynth.lower import Storage, with_weak_type


class Recut(NamedTuple):
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
        Recut(dim, tuple(names[a] for a in axes), lengths, target.cuts[dim][1])
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
def exchanger(mesh: Mesh, spec: PartitionSpec, steps: tuple[Recut, ...], weak: bool) -> Any:
    """The jitted function that moves arrays stored under `spec`; compiled once for all that lie alike."""

    def moved(x: jax.Array) -> jax.Array:
        # As words: to copy a float of two bytes may change the bits of a NaN.
        words: Any = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}.get(x.dtype.itemsize)
        if words is not None and jnp.issubdtype(x.dtype, jnp.floating):
            return lax.bitcast_convert_type(recut(lax.bitcast_convert_type(x, words)), x.dtype)
        return recut(x)

    def recut(x: jax.Array) -> jax.Array:
        for step in steps:
            x = _recut(x, step, mesh)
        return x

    on_mesh = jax.shard_map(moved, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(lambda x: with_weak_type(on_mesh(x), x.dtype, weak))


def _recut(x: jax.Array, step: Recut, mesh: Mesh) -> jax.Array:
    """One device's shard, padded to the longest old one, as its new shard, padded to the longest new one."""
    n, dim = len(step.old), step.dim
    old, new = _starts(step.old), _starts(step.new)
    me = lax.axis_index(step.axes)
    # A permute numbers devices by the mesh, whichever axis cuts the dimension first.
    by_mesh = tuple(name for name in mesh.axis_names if name in step.axes)
    order = np.arange(n).reshape([mesh.shape[name] for name in by_mesh])
    number = order.transpose([by_mesh.index(name) for name in step.axes]).ravel().tolist()
    here = lambda table: jnp.asarray(table, jnp.int32)[me]
    rows = here(new) + jnp.arange(max(step.new), dtype=jnp.int32)
    # Where each row of the new shard lies in the old shard followed by the rows that arrive.
    source_rows, parts, length = rows - here(old), [x], x.shape[dim]
    for distance in range(1, n):
        # Of device i: the rows that it sends, and those that arrive.
        sent = [_common(step, old, new, i, (i + distance) % n) for i in range(n)]
        arriving = [sent[i - distance] for i in range(n)]
        longest = max(stop - start for start, stop in sent)
        if longest == 0:
            continue
        first = here([start - old[i] for i, (start, _) in enumerate(sent)])
        piece = jnp.take(x, first + jnp.arange(longest, dtype=jnp.int32), axis=dim, mode="clip")
        pairs = [(number[i], number[(i + distance) % n]) for i, (start, stop) in enumerate(sent) if start < stop]
        parts.append(lax.ppermute(piece, by_mesh, pairs))
        start, stop = here([a for a, _ in arriving]), here([b for _, b in arriving])
        source_rows = jnp.where((rows >= start) & (rows < stop), length + rows - start, source_rows)
        length += longest
    return jnp.take(jnp.concatenate(parts, dim), source_rows, axis=dim, mode="clip")


def _common(step: Recut, old: Sequence[int], new: Sequence[int], i: int, j: int) -> tuple[int, int]:
    """(start, stop) of the rows that are in the old shard of i and in the new one of j."""
    start, stop = max(old[i], new[j]), min(old[i] + step.old[i], new[j] + step.new[j])
    return (start, stop) if start < stop else (old[i], old[i])


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths[:-1], initial=0))
