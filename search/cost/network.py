"""What communication along each mesh axis goes over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from hapsynth.cluster.cluster import DEFAULT_AXIS, Cluster
from hapsynth.cluster.curves import Curve
from hapsynth.instructions.collectives import Step

_MOST_AXES = 2


def mesh_axes(cluster: Cluster) -> tuple[tuple[str, int], ...]:
    """(name, size) of the mesh axes that are planned for: those longer than 1, or where that leaves one, or more than
    two, a single one over all devices."""
    axes = tuple((name, size) for name, size in cluster.axes if size > 1)
    return axes if 2 <= len(axes) <= _MOST_AXES else ((DEFAULT_AXIS, cluster.n),)


@dataclass(frozen=True)
class AxisLink:
    """One mesh axis of `n` positions. Every device is in one group of them, and all groups communicate at once.

    `latency`: seconds per collective. `beta`: seconds per byte that a ring of each group passes on, where groups share
    a host's link that of all of them. `swapped`: how many blocks of an all-to-all cross the slowest link, in units of
    what `beta` counts. `curves`: seconds by wire bytes of the collectives that were measured, which go before these.
    """

    n: int
    latency: float
    beta: float
    swapped: float
    curves: Mapping[str, Curve] = field(default_factory=dict[str, Curve])

    def seconds(self, step: Step, wire: float) -> float:
        """Of one collective that sends `wire` bytes; never falls as they grow."""
        curve = self.curves.get(step)
        return self.latency + wire * self.beta if curve is None else float(curve.seconds(wire))

    def wire_bytes(self, step: Step, source: float, target: float, block: float) -> float:
        """Bytes that one group sends over its slowest link, padding included.

        `source`, `target`: bytes of the largest shard before and after, `block`: of what one device sends another in
        an all-to-all or, padded, of what it sends in a reshare. Rings for the first three; in an all-to-all the devices
        of a host share its link.
        """
        match step:
            case "slice" | "partial":
                return 0.0
            case "all_reduce":
                return 2.0 * (self.n - 1) / self.n * source
            case "reduce_scatter":
                return (self.n - 1) * target
            case "all_gather":
                return (self.n - 1) * source
            case "all_to_all":
                return self.swapped * block
            case "reshare":
                # Of rows that move only as far as they must.
                return block


def axis_links(cluster: Cluster, axes: Sequence[tuple[str, int]]) -> tuple[AxisLink, ...]:
    """The link of each axis (name, size) of a mesh, devices row-major."""
    hosts = np.array(cluster.hosts).reshape([n for _, n in axes])
    return tuple(_link(cluster, name, np.moveaxis(hosts, a, -1).reshape(-1, n)) for a, (name, n) in enumerate(axes))


def _link(cluster: Cluster, axis: str, groups: np.ndarray) -> AxisLink:
    """groups: int [groups, n], the host of each member."""
    n = groups.shape[1]
    rings: Counter[int] = Counter()
    swaps: Counter[int] = Counter()
    together = False
    for group in groups.tolist():
        members = Counter[int](group)
        together |= max(members.values()) > 1
        for host, inside in members.items():
            if inside < n:
                rings[host] += 1
                swaps[host] += inside * (n - inside)
    used = [cluster.network] if rings else []
    if together or not used:
        used.append(cluster.intra or cluster.network)
    share = max(rings.values(), default=1)
    beta = max(share / cluster.network.bandwidth if rings else 0.0, max(1.0 / link.bandwidth for link in used))
    swapped = max(swaps.values()) / share if swaps else n - 1
    curves = cluster.collectives_along(axis, n)
    return AxisLink(n, max(link.latency for link in used), beta, swapped, curves)


def devices_of(lengths: Sequence[int], axes: Sequence[int]) -> np.ndarray:
    """int [devices]: each device's position along some axes, row-major in their order."""
    coords = np.indices(lengths).reshape(len(lengths), prod(lengths))
    at = np.zeros(prod(lengths), dtype=np.int64)
    for axis in axes:
        at = at * lengths[axis] + coords[axis]
    return at
