"""What the collectives of a compiled program take, at the network's price as the search has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hapsynth.cluster.cluster import DEFAULT_AXIS, Cluster
from hapsynth.hlo.collectives import Collective
from hapsynth.search.cost.network import AxisLink, axis_links

_STEPS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
}


@dataclass(frozen=True)
class NetworkPrice:
    """Seconds of XLA's collectives between the devices of a cluster, on a mesh of `axes` (name, size). One whose groups
    are as large as several axes, or their parts within hosts or between them, is priced by the slowest of these; as
    large as none, by all devices in a row."""

    cluster: Cluster
    axes: Sequence[tuple[str, int]]

    def __call__(self, one: Collective) -> float:
        return max(self._along(link, one) for link in self._links.get(one.group, self._whole))

    @cached_property
    def _links(self) -> dict[int, list[AxisLink]]:
        found: dict[int, list[AxisLink]] = {}
        for link in axis_links(self.cluster, self.axes):
            for one in (link, *(one for levels in link.levels.values() for one in (levels.inside, levels.between))):
                found.setdefault(one.n, []).append(one)
        return found

    @cached_property
    def _whole(self) -> list[AxisLink]:
        return [*axis_links(self.cluster, ((DEFAULT_AXIS, self.cluster.n),))]

    def _along(self, link: AxisLink, one: Collective) -> float:
        step = _STEPS.get(one.op)
        if step is None:
            # A permute, or a broadcast: one block from each.
            return link.latency + one.held_bytes * link.beta
        blocks = step == "all_to_all"
        wire = link.wire_bytes(step, one.held_bytes / one.group) if blocks else one.wire_bytes / one.trips
        return link.seconds(step, wire)
