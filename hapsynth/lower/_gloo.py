"""What is done for gloo, which runs JAX's collectives between the CPUs of several processes.

gloo's thread of a process tries again and again what it can't do yet, on the core that the process computes on:

- Its reduce-scatter sends what nobody may have asked for yet; then the thread of who is late spins at half of the core,
  from when the first of the others sent. The other collectives send when they are asked. So it is lowered to them:
  small blocks all at once and a sum, large ones around a ring, each device adding its own, which fills a slow network
  evenly. Four processes at 100 Mbit/s: of 4 KB 0.8 ms instead of 17, of 6 MB 0.4 s (around) or 0.65 (at once)
  instead of 1.0.
- Around a ring all wait for the slowest again and again, and longest beside computing, where each time a thread has to
  get a core first. So among more than two devices small blocks go to all at once in other collectives too: an
  all-reduce is an all-to-all, a sum and an all-to-all of copies of it, and an all-gather the latter alone. The four
  beside computing: an all-reduce of 64 KB 44 ms instead of 79, and as long as gloo's alone, of 512 KB 82 instead of
  128; an all-gather of 128 KB of each 38 instead of 55. Blocks of 512 KB take half as long again as around a ring.
- Linux lets a thread that something arrived for run at once, in the middle of the one that computes: where that holds
  the lock that gloo's needs it spins until the scheduler's tick, milliseconds later. Threads that are batch work, as a
  training step is, do not interrupt one another: an all-reduce of 4 KiB takes 0.14 ms instead of 4.

What it sends is lowered so that less is waited for:

- The smallest all-reduces are one exchange and not two, an all-gather and a sum (the four: of 4 KB 1.3 ms instead of
  2.5).
- gloo's permute, all-gather and all-to-all send before they say that they are ready to receive. Where two devices send
  one another, what the later one says waits behind its own data, and one direction goes after the other. gloo's
  all-reduce says it first. So two devices swap large blocks by an all-reduce: the sum of both blocks, as integers that
  wrap, less one's own is the other's. Two processes at 100 Mbit/s: 1 MiB each way in 90 ms instead of 160; 2 MiB at
  1 Gbit/s in 20 instead of 34, beside computing in 37 instead of 45 (gloo's other collectives 83).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from hapsynth import _jax
from hapsynth.instructions.collectives import are_equal
from hapsynth.instructions.rules.registry import apart
from hapsynth.instructions.staging import gloo as algorithms
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.lower._collective_order import Each, as_it_is
from hapsynth.lower._ordered_floats import from_ordered, to_ordered

Groups = Sequence[Sequence[int]] | None
"""Of positions along an axis, each of which communicates by itself; None for all as one."""


_REDUCE: dict[str, tuple[Any, Any]] = {
    "sum": (lax.psum, lax.add),
    "max": (lax.pmax, lax.max),
    "min": (lax.pmin, lax.min),
}


def joins(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices of a mesh send to one another by gloo."""
    return isinstance(mesh, Mesh) and mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu"


def all_reduce(
    x: jax.Array,
    axis: str | tuple[str, ...],
    reduction: str,
    gloo: LoweringOptions | None,
    each: Each = as_it_is,
    groups: Groups = None,
) -> jax.Array:
    """As JAX's psum, pmax or pmin, by a `reduction` of "sum", "max" or "min", but that a NaN on any device is the
    largest and the smallest. `gloo`: the thresholds where the devices send by gloo (`joins`), else None; what is small
    is then reduced in one order of the devices. `each` runs every one of XLA's collectives, here and below, where
    `groups` are equally large."""
    collective, pair = _REDUCE[reduction]
    n = _size(axis, groups)
    if gloo is not None and (groups is None or are_equal(groups)):
        flat = x.reshape(-1)
        algorithm = algorithms.all_reduce(x.nbytes, n, gloo, one_axis=isinstance(axis, str)).name
        if algorithm == "gather":
            gathered = all_gather(flat, axis, 0, gloo, each, groups)
            return reduce(pair, lax.split(gathered, [x.size] * n)).reshape(x.shape)
        if algorithm == "at once":
            padded = jnp.pad(flat, (0, -x.size % n))
            blocks = lax.split(_swapped(padded, axis, 0, 0, each, groups), [padded.size // n] * n)
            whole = all_gather(reduce(pair, blocks), axis, 0, gloo, each, groups)
            return whole[: x.size].reshape(x.shape)
    run = lambda x: collective(x, axis, axis_index_groups=groups)
    if reduction != "sum" and jnp.issubdtype(x.dtype, jnp.floating):
        return from_ordered(each(run, to_ordered(x, reduction)), x.dtype)
    return each(run, x)


def psum_scatter(
    x: jax.Array,
    axis: str,
    dim: int,
    gloo: LoweringOptions | None,
    each: Each = as_it_is,
    groups: Groups = None,
) -> jax.Array:
    """As JAX's, tiled along `dim`. `gloo`: as for `all_reduce`; every block is then summed in one order of the devices,
    whoever comes first."""
    if gloo is None:
        scatter = partial(lax.psum_scatter, axis_name=axis, axis_index_groups=groups, tiled=True)
        return each(lambda x: scatter(x, scatter_dimension=dim), x)
    n = _size(axis, groups)
    if algorithms.reduce_scatter(x.nbytes, n, gloo).name == "at once":
        blocks = all_to_all(x, axis, dim, dim, gloo, each, groups)
        return reduce(lax.add, lax.split(blocks, [x.shape[dim] // n] * n, dim))
    me, x = _place(axis, groups), apart(x)
    part = _block(x, me - 1, n, dim)
    for away in range(2, n + 1):
        part = _sent_on(part, axis, 1, gloo, each, groups) + _block(x, me - away, n, dim)
    return part


def all_gather(
    x: jax.Array,
    axis: str | tuple[str, ...],
    dim: int,
    gloo: LoweringOptions | None,
    each: Each = as_it_is,
    groups: Groups = None,
) -> jax.Array:
    """As JAX's, tiled along `dim`. `gloo`: as for `all_reduce`; of more than two devices each sends a large block to
    one and receives from another."""
    n = _size(axis, groups)
    gather = partial(lax.all_gather, axis_name=axis, axis_index_groups=groups)
    one_axis = isinstance(axis, str)
    algorithm = None if gloo is None else algorithms.all_gather(x.nbytes, n, gloo, one_axis=one_axis).name
    if algorithm == "at once":
        return _swapped(lax.concatenate([x] * n, dim), axis, dim, dim, each, groups)
    if algorithm == "swap" and _has_whole_bytes(x):
        at = (1 - _place(axis, groups)) * x.shape[dim]
        other = _swap(x, axis, each, groups)
        return lax.dynamic_update_slice_in_dim(lax.concatenate([x, x], dim), other, at, dim)
    return each(lambda x: gather(x, axis=dim, tiled=True), x)


def all_to_all(
    x: jax.Array,
    axis: str,
    split: int,
    concat: int,
    gloo: LoweringOptions | None,
    each: Each = as_it_is,
    groups: Groups = None,
) -> jax.Array:
    """As JAX's, tiled. `gloo`: as for `all_reduce`; large blocks then go in rounds, to one device at a time."""
    n = _size(axis, groups)
    if gloo is None or algorithms.all_to_all(x.nbytes, n, gloo).name == "at once":
        return _swapped(x, axis, split, concat, each, groups)
    me, x = _place(axis, groups), apart(x)
    mine = _block(x, me, n, split)
    made = lax.concatenate([mine] * n, concat)
    for away in range(1, n):
        part = _sent_on(_block(x, me + away, n, split), axis, away, gloo, each, groups)
        made = lax.dynamic_update_slice_in_dim(made, part, (me - away) % n * mine.shape[concat], concat)
    return made


def _swapped(x: jax.Array, axis: Any, split: int, concat: int, each: Each, groups: Groups) -> jax.Array:
    """All at once."""
    # XLA splits the operand again and takes the blocks' producers as they are; where their memory layouts
    # differ its verifier then refuses the program ("operands with different shapes", JAX 0.10.2, CPU).
    x = lax.optimization_barrier(x)
    swap = partial(lax.all_to_all, axis_name=axis, axis_index_groups=groups, tiled=True)
    return each(lambda x: swap(x, split_axis=split, concat_axis=concat), x)


def _size(axis: str | tuple[str, ...], groups: Groups) -> int:
    return max(map(len, groups)) if groups else lax.axis_size(axis)


def _place(axis: str | tuple[str, ...], groups: Groups) -> jax.Array:
    """Of this device in its group."""
    here = lax.axis_index(axis)
    if groups is None:
        return here
    places = np.zeros(sum(map(len, groups)), np.int32)
    for group in groups:
        places[[*group]] = range(len(group))
    return lax.dynamic_index_in_dim(jnp.asarray(places), here, keepdims=False)


def _block(x: jax.Array, index: jax.Array, n: int, dim: int) -> jax.Array:
    """One of `n` blocks along `dim`, counted around."""
    length = x.shape[dim] // n
    return lax.dynamic_slice_in_dim(x, index % n * length, length, dim)


def _sent_on(x: jax.Array, axis: str, away: int, gloo: LoweringOptions, each: Each, groups: Groups) -> jax.Array:
    """What the device that is so many before this one in its group has."""
    n = _size(axis, groups)
    if algorithms.swaps(x.nbytes, n, away, gloo) and _has_whole_bytes(x):
        pairs = [[group[i], group[i + away]] for group in groups or [range(n)] for i in range(away)]
        return _swap(x, axis, each, pairs if groups or n > 2 else None)
    onward = [(group[i], group[(i + away) % n]) for group in groups or [range(n)] for i in range(n)]
    return each(lambda x: lax.ppermute(x, axis, onward), x)


def _has_whole_bytes(x: jax.Array) -> bool:
    """Whether it is of numbers, of 8 bits or more each: random keys are none."""
    if _jax.is_extended(x.dtype):
        return False
    if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.complexfloating):
        return True
    return (jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo)(x.dtype).bits >= 8


def _swap(x: jax.Array, axis: str | tuple[str, ...], each: Each, pairs: Groups) -> jax.Array:
    """What the other device of each pair has. The sum of both, as integers that wrap, less one's own."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(*(_swap(part, axis, each, pairs) for part in (x.real, x.imag)))
    as_bytes = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    per_word = max(1, 4 // as_bytes.dtype.itemsize)
    flat = jnp.pad(as_bytes.reshape(-1), (0, -x.size % per_word))
    own = lax.bitcast_convert_type(flat.reshape(-1, per_word) if per_word > 1 else flat, jnp.uint32)
    both = each(lambda words: lax.psum(words, axis, axis_index_groups=pairs), own)
    other = lax.bitcast_convert_type(both - own, as_bytes.dtype).reshape(-1)[: x.size].reshape(x.shape)
    return other.astype(x.dtype)
