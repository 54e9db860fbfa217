"""What joins devices: links inside a host and between hosts, and how cluster files write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

from hapsynth.cluster import _units
from hapsynth.cluster.toml_reader import ClusterError, Table, nearest


@dataclass(frozen=True)
class Link:
    """What joins two devices: `bandwidth` in bytes/s each way, `latency` in seconds per message (may be 0).

    Raises ClusterError for a figure that is not finite and positive.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        for what, value, zero in (("bandwidth", self.bandwidth, False), ("latency", self.latency, True)):
            try:
                _units.check(value, zero=zero)
            except ValueError as error:
                raise ClusterError(f"link: {what} = {value!r} {error}") from None

    def wider(self, factor: float) -> Link:
        """The same latency, and `factor` times the bandwidth."""
        return Link(self.bandwidth * factor, self.latency)


class HostLinks(NamedTuple):
    """The links of one host where they are not the cluster's: to other hosts, and between its devices."""

    network: Link | None = None
    intra: Link | None = None

    def wider(self, factor: float) -> HostLinks:
        """With `factor` times the bandwidth to other hosts."""
        return self._replace(network=self.network and self.network.wider(factor))


Pair = tuple[int, int]
"""Two hosts, the lower one first."""
LINK_KEYS = ("bandwidth", "latency")


def slower(a: Link, b: Link) -> Link:
    """What two links come to one after the other, as a message waits for the worse of both."""
    return Link(min(a.bandwidth, b.bandwidth), max(a.latency, b.latency))


def read_link(table: Table) -> Link:
    return Link(table.quantity("bandwidth", "BANDWIDTH"), table.quantity("latency", "TIME"))


def read_host_links(entry: Table) -> HostLinks:
    """The `network` and `intra` of a [[devices]] entry."""
    return HostLinks(*(read_link(entry.table(key, LINK_KEYS)) if key in entry else None for key in HostLinks._fields))


def read_pairs(top: Table, hosts: Mapping[str, int]) -> dict[Pair, Link]:
    """The [[links]] of a cluster file; `hosts`: by label."""
    entries = top.data.get("links", [])
    if not isinstance(entries, list):
        raise top.error("links", f"= {entries!r} must be a list of tables; write [[links]]")
    found: dict[Pair, Link] = {}
    for i, data in enumerate(cast(list[object], entries)):
        entry = Table(data, top.source, f"links[{i}]", ("between", *LINK_KEYS))
        between = entry.need("between", 'between = ["a", "b"], the labels of two hosts')
        problem = f"= {between!r} must be the labels of two hosts, which `host` gives"
        if not isinstance(between, list) or len(labels := cast(list[object], between)) != 2:
            raise entry.error("between", problem)
        for label in labels:
            if not isinstance(label, str) or label not in hosts:
                known = nearest(str(label), hosts) if hosts else 'write host = "a" in a [[devices]] entry'
                raise entry.error("between", f"{problem}: {label!r} is none; {known}")
        a, b = sorted(hosts[str(label)] for label in labels)
        if a == b:
            raise entry.error("between", f"{problem}: these are one host, whose link is its `intra`")
        if (a, b) in found:
            raise entry.error("between", f"= {between!r} has a link in an entry above; give it once")
        found[a, b] = read_link(entry)
    return found


def write_link(link: Link) -> dict[str, object]:
    return {
        "bandwidth": _units.format(link.bandwidth, _units.BANDWIDTH),
        "latency": _units.format(link.latency, _units.TIME),
    }


def write_host_links(links: HostLinks) -> dict[str, object]:
    """The keys of a [[devices]] entry that `read_host_links` reads."""
    return {key: write_link(link) for key, link in links._asdict().items() if link is not None}


def write_pairs(pairs: Mapping[Pair, Link]) -> list[dict[str, object]]:
    """The [[links]] of a cluster file whose hosts are labelled by their numbers."""
    return [{"between": [str(a), str(b)], **write_link(link)} for (a, b), link in pairs.items()]
