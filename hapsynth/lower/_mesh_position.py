"""Where in the mesh a piece of code runs, and what the devices there look up by their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class MeshPosition:
    """The devices of a mesh of `lengths` that a piece of code runs on: all, or those of one branch.

    `devices` are their coordinates in the mesh; they have equal shares of everything that the code cuts, or all compute
    on `padded` shards. `index` holds the traced position of this device along each axis.
    """

    lengths: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    index: tuple[Any, ...]
    padded: bool = False

    @property
    def coords(self) -> tuple[int, ...]:
        return self.devices[0]

    def positions(self, axes: Sequence[int]) -> list[int]:
        """The devices' positions along some axes, row-major."""
        found: list[int] = []
        for coords in self.devices:
            at = 0
            for axis in axes:
                at = at * self.lengths[axis] + coords[axis]
            found.append(at)
        return found

    def lookup(self, axes: Sequence[int], table: Sequence[int]) -> Any:
        """This device's entry of a table over the positions along some axes, row-major: a constant where all devices
        agree."""
        entries = np.asarray(table, np.int32).reshape([self.lengths[a] for a in axes])
        here = {int(entries[tuple(c[a] for a in axes)]) for c in self.devices}
        if len(here) == 1:
            return jnp.int32(here.pop())
        steps = [int(entries.take(1, k).flat[0] - entries.flat[0]) if n > 1 else 0 for k, n in enumerate(entries.shape)]
        if np.array_equal(entries, entries.flat[0] + sum(np.indices(entries.shape) * _column(steps))):
            found = (self.index[a] * jnp.int32(step) for a, step in zip(axes, steps) if step)
            return sum(found, start=jnp.int32(entries.flat[0]))
        at = self.index[axes[0]]
        for axis in axes[1:]:
            at = at * self.lengths[axis] + self.index[axis]
        return lax.dynamic_slice(entries.ravel(), (at,), (1,), allow_negative_indices=False)[0]


def _column(steps: Sequence[int]) -> np.ndarray:
    return np.reshape(steps, (-1, *[1] * len(steps)))
