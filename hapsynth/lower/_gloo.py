"""What is done for gloo, which runs JAX's collectives between the CPUs of several processes.

gloo's thread of a process tries again and again what it can't do yet, on the core that the process computes on:

- Its reduce-scatter sends what nobody may have asked for yet; then the thread of who is late spins at half of the core,
  from when the first of the others sent. The other collectives send when they are asked. So it is lowered to them:
  small blocks all at once and a sum, large ones around a ring, each device adding its own, which fills a slow network
  evenly. Four processes at 100 Mbit/s: of 4 KB 0.8 ms instead of 17, of 6 MB 0.4 s (around) or 0.65 (at once)
  instead of 1.0.
- Linux lets a thread that something arrived for run at once, in the middle of the one that computes: where that holds
  the lock that gloo's needs it spins until the scheduler's tick, milliseconds later. Threads that are batch work, as a
  training step is, do not interrupt one another: an all-reduce of 4 KiB takes 0.14 ms instead of 4.

What it sends is lowered so that less is waited for:

- Its all-reduce goes around twice, an all-gather once, and every time is one in which all wait for the slowest: small
  ones are an all-gather and a sum (the four: of 4 KB 1.3 ms instead of 2.5).
- Where two devices send one another much at once, TCP's acknowledgements queue behind the data of the other direction,
  and only one direction at a time is fast. In segments that both have received before the next one goes they stay in
  step: 8 MB each way between two processes at 100 Mbit/s take 0.70 s instead of 1.39, at 1 Gbit/s 70 ms instead of 134.
  Around a ring of more nobody sends to whom it hears from, and a block goes whole: for every segment gloo's thread
  waits for the one that computes, which keeps the core until its time slice or quota ends.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.lower._collective_order import Each, as_it_is
from hapsynth.lower._ordered_floats import from_ordered, to_ordered

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
) -> jax.Array:
    """As JAX's psum, pmax or pmin, by a `reduction` of "sum", "max" or "min", but that a NaN on any device is the
    largest and the smallest. `gloo`: the thresholds where the devices send by gloo (`joins`), else None; what is small
    is then reduced in one order of the devices. `each` runs every one of XLA's collectives, here and below."""
    collective, pair = _REDUCE[reduction]
    n = lax.axis_size(axis)
    if gloo is not None and x.nbytes * n <= gloo.gloo_gathered_bytes:
        gathered = each(lambda x: lax.all_gather(x, axis), x)
        return reduce(pair, [gathered[i] for i in range(n)])
    if reduction != "sum" and jnp.issubdtype(x.dtype, jnp.floating):
        return from_ordered(each(lambda x: collective(x, axis), to_ordered(x, reduction)), x.dtype)
    return each(lambda x: collective(x, axis), x)


def psum_scatter(x: jax.Array, axis: str, dim: int, gloo: LoweringOptions | None, each: Each = as_it_is) -> jax.Array:
    """As JAX's, tiled along `dim`. `gloo`: as for `all_reduce`; every block is then summed in one order of the devices,
    whoever comes first."""
    if gloo is None:
        return each(lambda x: lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True), x)
    n = lax.axis_size(axis)
    if x.nbytes < gloo.gloo_ring_bytes * n:
        blocks = all_to_all(x, axis, dim, dim, gloo, each)
        return reduce(lax.add, lax.split(blocks, [x.shape[dim] // n] * n, dim))
    me = lax.axis_index(axis)
    part = _block(x, me - 1, n, dim)
    for away in range(2, n + 1):
        part = _sent_on(part, axis, 1, gloo, each) + _block(x, me - away, n, dim)
    return part


def all_gather(x: jax.Array, axis: str, dim: int, gloo: LoweringOptions | None, each: Each = as_it_is) -> jax.Array:
    """As JAX's, tiled along `dim`. `gloo`: as for `all_reduce`; of more than two devices each sends to one and receives
    from another."""
    n = lax.axis_size(axis)
    if gloo is None or n != 2 or x.nbytes <= gloo.gloo_segment_bytes:
        return each(lambda x: lax.all_gather(x, axis, axis=dim, tiled=True), x)
    parts = [each(lambda part: lax.all_gather(part, axis), part) for part in _segments(x, gloo)]
    joined = lax.concatenate(parts, 1).reshape(n, *x.shape)
    return lax.collapse(lax.transpose(joined, [*range(1, dim + 1), 0, *range(dim + 1, x.ndim + 1)]), dim, dim + 2)


def all_to_all(
    x: jax.Array, axis: str, split: int, concat: int, gloo: LoweringOptions | None, each: Each = as_it_is
) -> jax.Array:
    """As JAX's, tiled. `gloo`: as for `all_reduce`; large blocks then go in rounds, to one device at a time."""
    n = lax.axis_size(axis)
    if gloo is None or x.nbytes <= gloo.gloo_segment_bytes * n:
        # XLA splits the operand again and takes the blocks' producers as they are; where their memory layouts
        # differ its verifier then refuses the program ("operands with different shapes", JAX 0.10.2, CPU).
        x = lax.optimization_barrier(x)
        return each(lambda x: lax.all_to_all(x, axis, split_axis=split, concat_axis=concat, tiled=True), x)
    me = lax.axis_index(axis)
    mine = _block(x, me, n, split)
    made = lax.concatenate([mine] * n, concat)
    for away in range(1, n):
        part = _sent_on(_block(x, me + away, n, split), axis, away, gloo, each)
        made = lax.dynamic_update_slice_in_dim(made, part, (me - away) % n * mine.shape[concat], concat)
    return made


def _block(x: jax.Array, index: jax.Array, n: int, dim: int) -> jax.Array:
    """One of `n` blocks along `dim`, counted around."""
    length = x.shape[dim] // n
    return lax.dynamic_slice_in_dim(x, index % n * length, length, dim)


def _sent_on(x: jax.Array, axis: str, away: int, gloo: LoweringOptions, each: Each) -> jax.Array:
    """What the device that is so many before this one has."""
    n = lax.axis_size(axis)
    onward = [(i, (i + away) % n) for i in range(n)]
    sent = lambda part: lax.ppermute(part, axis, onward)
    if 2 * away % n:
        return each(sent, x)
    # Two devices send one another.
    return lax.concatenate([each(sent, part) for part in _segments(x, gloo)], 0).reshape(x.shape)


def _segments(x: jax.Array, gloo: LoweringOptions) -> list[jax.Array]:
    count = max(1, -(-x.nbytes // gloo.gloo_segment_bytes))
    least, more = divmod(x.size, count)
    return list(lax.split(x.reshape(-1), [least + 1] * more + [least] * (count - more)))
