"""Collectives of all devices along an axis over hosts, within hosts and between them.

Around one ring all that is sent passes every host's link: with two hosts of four devices 7 blocks of 8 of an
all-gather, of which the other host has 4 to give. Between hosts first, or after sums within them, these 4 pass alone.

Where hosts have equally many devices, each has its part to send between them, and all do so at once. Elsewhere a gather
or reduce-scatter takes hosts in parts of equally many, as far as there are such, and a sum goes by way of the first
device of each host. XLA takes groups that are unequal for sums only, so the others give it
zeros when it hands the whole on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hapsynth.instructions.collectives import Hosts, are_equal, groups_between, over_parts
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.lower import _gloo
from hapsynth.lower._collective_order import Each
from hapsynth.lower._storage import pad_to


def all_reduce(x: jax.Array, axis: str, hosts: Hosts, gloo: LoweringOptions | None, each: Each) -> jax.Array:
    """The sum."""
    between, flat = groups_between(hosts), x.reshape(-1)
    if are_equal(hosts):
        part = pad_to(flat, (-(-flat.size // len(between)) * len(between),))
        part = _gloo.psum_scatter(part, axis, 0, gloo, each, hosts)
        part = _gloo.all_reduce(part, axis, "sum", gloo, each, between)
        whole = _gloo.all_gather(part, axis, 0, gloo, each, hosts)
        return lax.slice_in_dim(whole, 0, flat.size).reshape(x.shape)
    (first,) = between
    others = tuple((p,) for host in hosts for p in host[1:])
    here = _gloo.all_reduce(flat, axis, "sum", gloo, each, hosts)
    whole = _gloo.all_reduce(here, axis, "sum", gloo, each, (first, *others))
    is_first = np.zeros(sum(map(len, hosts)), np.bool_)
    is_first[[*first]] = True
    mine = lax.dynamic_index_in_dim(jnp.asarray(is_first), lax.axis_index(axis), keepdims=False)
    given = jnp.where(mine, whole, jnp.zeros_like(whole))
    return _gloo.all_reduce(given, axis, "sum", gloo, each, hosts).reshape(x.shape)


def psum_scatter(
    x: jax.Array, axis: str, dim: int, hosts: Hosts, gloo: LoweringOptions | None, each: Each
) -> jax.Array:
    """As JAX's, tiled along `dim`, over parts of hosts with equally many devices."""
    hosts, n = over_parts(hosts, "equal hosts"), sum(map(len, hosts))
    blocks = jnp.moveaxis(x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :]), dim, 0)
    block, (at, _) = blocks.shape[1:], _by_place(hosts)
    flat = _taken(blocks, at).reshape(-1)
    flat = _gloo.psum_scatter(flat, axis, 0, gloo, each, hosts)
    return _gloo.psum_scatter(flat, axis, 0, gloo, each, groups_between(hosts)).reshape(block)


def all_gather(x: jax.Array, axis: str, dim: int, hosts: Hosts, gloo: LoweringOptions | None, each: Each) -> jax.Array:
    """As JAX's, tiled along `dim`, over parts of hosts with equally many devices."""
    hosts = over_parts(hosts, "equal hosts")
    flat = _gloo.all_gather(x.reshape(-1), axis, 0, gloo, each, groups_between(hosts))
    flat = _gloo.all_gather(flat, axis, 0, gloo, each, hosts)
    _, back = _by_place(hosts)
    blocks = _taken(flat.reshape(sum(map(len, hosts)), *x.shape), back)
    return jnp.moveaxis(blocks, 0, dim).reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def _by_place(hosts: Hosts) -> tuple[np.ndarray, np.ndarray]:
    """The positions by their places in their hosts, host by host at each; and where each position stands there."""
    at = np.array(hosts).T.ravel()
    return at, np.argsort(at)


def _taken(blocks: jax.Array, order: np.ndarray) -> jax.Array:
    """Blocks [n, ...] in another order."""
    n, *block = blocks.shape
    for rows in range(1, n):
        # Hosts are mostly one after the other, and then it is but a transposition.
        if n % rows == 0 and np.array_equal(order, np.arange(n).reshape(rows, -1).T.ravel()):
            return jnp.swapaxes(blocks.reshape(rows, n // rows, *block), 0, 1).reshape(blocks.shape)
    return jnp.take(blocks, order, axis=0, unique_indices=True, mode="clip")
