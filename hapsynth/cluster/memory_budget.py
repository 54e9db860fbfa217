"""What devices may hold, and how the bytes of their shards are counted: padded or exact (decisions.md D2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hapsynth.cluster.cluster import Cluster

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MemoryBudget:
    """The bytes that each device may hold, in mesh order.

    The switch form stores shards padded: every device holds as much as the one with the largest, and the least limit is
    everyone's. `exact`, in the staged form, each device holds its own shards within its own limit.

    Bytes are counted so that one `limit`, the least, is everyone's: on a device with twice that limit they count half.
    """

    limits: tuple[float, ...]
    exact: bool = False

    @staticmethod
    def of(cluster: Cluster, memory_limit: float | None = None, *, exact: bool = False) -> MemoryBudget:
        """Of the cluster's devices; `memory_limit`: bytes of each, where it has more; None for what they have."""
        limits = [k.memory if memory_limit is None else min(k.memory, memory_limit) for k in cluster.devices]
        return MemoryBudget(tuple(map(float, limits)), exact)

    @property
    def limit(self) -> float:
        return min(self.limits)

    @cached_property
    def weights(self) -> Floats:
        """What a byte counts: on each device or, padded, on all alike [1]."""
        limits = np.array(self.limits if self.exact else (self.limit,))
        return np.divide(self.limit, limits, out=np.ones_like(limits), where=limits > self.limit)

    @cached_property
    def proportions(self) -> Floats | None:
        """Fractions in which unlike limits are filled alike; None where limits are alike, or shards padded."""
        limits = np.array(self.limits)
        return limits / limits.sum() if self.exact and limits.min() < limits.max() else None

    def _alike(self, alone: tuple[int, ...]) -> list[npt.NDArray[np.int64]]:
        """Devices with like limits, but for those that are alone."""
        if alone not in self._groups:
            kinds = [(limit, d if d in alone else -1) for d, limit in enumerate(self.limits)]
            found = [[d for d, kind in enumerate(kinds) if kind == one] for one in dict.fromkeys(kinds)]
            self._groups[alone] = [np.array(devices) for devices in found]
        return self._groups[alone]

    @cached_property
    def _groups(self) -> dict[tuple[int, ...], list[npt.NDArray[np.int64]]]:
        return {}

    def counted(self, held: float | Floats, *, free: bool, alone: tuple[int, ...] = ()) -> Floats:
        """What the fraction of a tensor that is held counts, for each of a few sums that are to keep to the limit.

        `held`: by each device or, padded, by all alike. Exact, the sums are of the means over devices with like limits,
        which are within the limit where all devices are; each of those `alone`, as the owners of tensors may be, has a
        sum of its own. `free`: ratios may be any, and `held` is what they would
        hold at even ones. Then there is one mean, over all devices, which is the same at any ratios; what the smallest
        device holds whole; and what those `alone` do, or own.
        """
        if not self.exact:
            return np.array([held])
        if not free:
            each = np.broadcast_to(held, len(self.limits)) * self.weights
            return np.array([each[some].mean() for some in self._alike(alone)])
        mean, whole = np.mean(held) * self.limit / np.mean(self.limits), 1.0 if np.min(held) == 1.0 else 0.0
        owned = whole if isinstance(held, float) else held
        smallest = [] if self.proportions is None else [whole]
        return np.array([mean, *smallest, *(np.broadcast_to(owned, len(self.limits)) * self.weights)[list(alone)]])
