"""What communication along each mesh axis goes over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np

from hapsynth.cluster.cluster import DEFAULT_AXIS, Cluster
from hapsynth.cluster.curves import Curve
from hapsynth.instructions.collectives import Block, Moved, Traffic
from hapsynth.instructions.staging.moved_rows import moved
from hapsynth.search.cost.device_speed import Floats

Largest = Callable[[int, tuple[int, ...], int], float]
"""(dimension, the axes that cut it, which way) -> the fraction that its largest shard holds."""

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
    what `beta` counts. `crosses_hosts`: whether some group has devices on several hosts. `curves`: seconds by wire
    bytes of the collectives that were measured, which go before these.
    """

    n: int
    latency: float
    beta: float
    swapped: float
    crosses_hosts: bool
    curves: Mapping[str, Curve] = field(default_factory=dict[str, Curve])

    def seconds(self, step: str, wire: float) -> float:
        """Of one collective that sends `wire` bytes; never falls as they grow."""
        curve = self.curves.get(step)
        if curve is not None:
            return float(curve.seconds(wire))
        return PRICES[step].messages(self) * self.latency + wire * self.beta

    def least_per_byte(self, step: str, most: float) -> float:
        """The least seconds per byte of one that sends up to `most`: at a measured point, or at that many."""
        curve = self.curves.get(step)
        amounts = [] if curve is None else [amount for amount, _ in curve.points if 0 < amount < most]
        return min(self.seconds(step, amount) / amount for amount in (*amounts, most))

    def wire_bytes(self, step: str, block: float) -> float:
        """Bytes that one group sends over its slowest link, padding included. `block`: of what a device sends at once
        (`instructions.collectives.Block`), or of all rows that may move."""
        return PRICES[step].blocks(self) * block


class Sent(NamedTuple):
    """What one collective comes to along an axis.

    `wire_bytes`: what one group sends over its slowest link, padding included, in `moving_s` seconds; `latency_s`:
    those that it takes however little it sends; `turned_s`: those of what reads it, as `CostModel.turning` says.
    """

    wire_bytes: float = 0.0
    latency_s: float = 0.0
    moving_s: float = 0.0
    turned_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.moving_s + self.latency_s + self.turned_s


def _unknown(dim: int, axes: tuple[int, ...], way: int) -> Floats:
    raise AssertionError(f"what all positions hold of dimension {dim} is not known")


@dataclass(frozen=True)
class Shares:
    """How dimensions are cut: the largest share, and the fraction that each position along the axes holds."""

    largest: Largest
    each: Callable[[int, tuple[int, ...], int], Floats] = _unknown


@dataclass(frozen=True)
class Price:
    """What a collective costs along an axis, in proportion to the largest block that a device sends.

    `blocks`: how many of these one group sends over its slowest link; `messages`: how many wait for one another.
    """

    blocks: Callable[[AxisLink], float]
    messages: Callable[[AxisLink], float] = lambda link: 1.0

    def sent(self, link: AxisLink, step: str, nbytes: float, traffic: Traffic, shares: Shares) -> Sent:
        """Of a value of `nbytes`."""
        assert isinstance(traffic, Block)
        wire = self.blocks(link) * traffic.nbytes(nbytes, shares.largest)
        latency = link.seconds(step, 0.0)
        return Sent(wire, latency, link.seconds(step, wire) - latency)


class PriceOfMoves(Price):
    """In proportion to the rows that change their owner: a permute for each distance that some move, padded to the
    longest piece."""

    def between(self, old: Floats, new: Floats, latency: float, whole: Floats | float) -> tuple[Floats, Floats]:
        """Between shards of these fractions [..., positions]: the latencies of all permutes, of `latency` each, and the
        part that moves of `whole`, what the dimension is all together."""
        permutes, rows = moved(old, new)
        return permutes * latency, rows * whole

    def sent(self, link: AxisLink, step: str, nbytes: float, traffic: Traffic, shares: Shares) -> Sent:
        assert isinstance(traffic, Moved)
        whole = self.blocks(link) * nbytes * prod(shares.largest(*cut) for cut in traffic.around)
        cuts = shares.each(*traffic.old), shares.each(*traffic.new)
        latency, wire = (float(x) for x in self.between(*cuts, link.latency, whole))
        return Sent(wire, latency, wire * link.beta)


MOVES = PriceOfMoves(lambda link: 1.0)

PRICES: dict[str, Price] = {
    # Rings for the first three; in an all-to-all the devices of a host share its link.
    "all_reduce": Price(lambda link: 2.0 * (link.n - 1) / link.n),
    "reduce_scatter": Price(lambda link: link.n - 1),
    "all_gather": Price(lambda link: link.n - 1),
    "all_to_all": Price(lambda link: link.swapped),
    "reshare": MOVES,
}
"""Of every collective in `instructions.collectives.STEPS`."""


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
    return AxisLink(n, max(link.latency for link in used), beta, swapped, bool(rings), curves)


def devices_of(lengths: Sequence[int], axes: Sequence[int]) -> np.ndarray:
    """int [devices]: each device's position along some axes, row-major in their order."""
    coords = np.indices(lengths).reshape(len(lengths), prod(lengths))
    at = np.zeros(prod(lengths), dtype=np.int64)
    for axis in axes:
        at = at * lengths[axis] + coords[axis]
    return at
