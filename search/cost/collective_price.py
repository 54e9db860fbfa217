"""What the collectives of a compiled program take, at the network's price as the search has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hapsynth.cluster.cluster import Cluster
from hapsynth.hlo.collectives import Collective
from hapsynth.search.cost.device_speed import Ints
from hapsynth.search.cost.network import AxisLink, axis_links, devices_of, link_between, permute_per_byte

_STEPS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
}


@dataclass(frozen=True)
class NetworkPrice:
    """Seconds of XLA's collectives between the devices of a cluster, on a mesh of `axes` (name, size): by what their
    groups go over, or the pairs of a permute. A group along an axis whose collectives were measured takes what these
    took."""

    cluster: Cluster
    axes: Sequence[tuple[str, int]]

    def __call__(self, one: Collective) -> float:
        if one.group == 1:
            return 0.0
        if one.op == "collective-permute":
            return self._permuted(one)
        link, step = self._between(one.members), _STEPS.get(one.op)
        if step is None:
            # A broadcast: one block from each.
            return link.latency + one.held_bytes * link.beta
        blocks = step == "all_to_all"
        wire = link.wire_bytes(step, one.held_bytes / one.group) if blocks else one.wire_bytes / one.trips
        return link.seconds(step, wire)

    def _permuted(self, one: Collective) -> float:
        """One block from each that sends."""
        senders, receivers = np.array(one.members).T
        lengths = [n for _, n in self.axes]
        for axis, (link, line_of) in enumerate(zip(self._along, self._lines, strict=True)):
            if "reshare" in link.curves and (line_of[senders] == line_of[receivers]).all():
                start, per_byte = link.rounds
                place_of = devices_of(lengths, [axis])
                away = (place_of[receivers] - place_of[senders]) % link.n
                return start + one.held_bytes * float(per_byte[away[away > 0] - 1].max(initial=0.0))
        hosts = np.array(self.cluster.hosts)
        per_byte = permute_per_byte(self.cluster, hosts[senders], hosts[receivers])
        return self._between(one.members).latency + one.held_bytes * per_byte

    def _between(self, groups: Sequence[Sequence[int]]) -> AxisLink:
        key = frozenset(frozenset(group) for group in groups if len(group) > 1)
        if key not in self._links:
            self._links[key] = link_between(self.cluster, sorted(map(sorted, key)))
        return self._links[key]

    @cached_property
    def _links(self) -> dict[frozenset[frozenset[int]], AxisLink]:
        """By the groups that go over them, at first those along the axes."""
        groups = ([np.flatnonzero(line_of == line) for line in np.unique(line_of)] for line_of in self._lines)
        keys = [frozenset(frozenset(line.tolist()) for line in lines) for lines in groups]
        return dict(zip(keys, self._along, strict=True))

    @cached_property
    def _along(self) -> tuple[AxisLink, ...]:
        return axis_links(self.cluster, self.axes)

    @cached_property
    def _lines(self) -> list[Ints]:
        """Of each axis, which line along it a device is on [devices]."""
        lengths = [n for _, n in self.axes]
        return [devices_of(lengths, [b for b in range(len(lengths)) if b != a]) for a in range(len(lengths))]
