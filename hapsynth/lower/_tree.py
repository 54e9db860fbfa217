"""Values that one device owns: sums that are brought there, and copies that go from there to all, by a binary tree.

Of n devices it has ceil(log2 n) rounds, in each of which half of the devices that still have something send it on. It
is made of permutes, which run everywhere; no round has two messages for one device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from hapsynth.instructions.collectives import tree_rounds
from hapsynth.instructions.layout import Placement
from hapsynth.lower._collective_order import Each, as_it_is


def reduce_to(x: jax.Array, axis: str, target: Placement, each: Each = as_it_is) -> jax.Array:
    """The sum of what the devices along an axis have, on the owner that `target` names; zeros on the others."""
    owner = _owner(target)
    return _at(owner, axis, _up(x, axis, owner, each), jnp.zeros_like(x))


def broadcast(x: jax.Array, axis: str, source: Placement, each: Each = as_it_is) -> jax.Array:
    """What the owner that `source` names has, on all devices along an axis."""
    owner = _owner(source)
    n = lax.axis_size(axis)
    for level in reversed(range(tree_rounds(n))):
        pairs = [(to, one) for one, to in _senders(n, owner, level)]
        x = _at([to for _, to in pairs], axis, _sent(x, axis, pairs, each), x)
    return x


def _owner(placement: Placement) -> int:
    assert placement.owner is not None, placement
    return placement.owner


def _up(x: jax.Array, axis: str, owner: int, each: Each) -> jax.Array:
    n = lax.axis_size(axis)
    for level in range(tree_rounds(n)):
        # Whom nothing is sent gets zeros.
        x = x + _sent(x, axis, _senders(n, owner, level), each)
    return x


def _senders(n: int, owner: int, level: int) -> list[tuple[int, int]]:
    """(from, to) of the messages up the tree that join subtrees of 2 ** level devices, counted from the owner on."""
    away = 1 << level
    return [((owner + k) % n, (owner + k - away) % n) for k in range(away, n, 2 * away)]


def _sent(x: jax.Array, axis: str, pairs: list[tuple[int, int]], each: Each) -> jax.Array:
    return each(lambda flat: lax.ppermute(flat, axis, pairs), x.reshape(-1)).reshape(x.shape)


def _at(places: int | list[int], axis: str, there: jax.Array, elsewhere: jax.Array) -> jax.Array:
    """One array at some places along an axis, another at the others."""
    return lax.select(jnp.isin(lax.axis_index(axis), jnp.array(places, jnp.int32)), there, elsewhere)
