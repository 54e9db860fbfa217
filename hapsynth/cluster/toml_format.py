"""Cluster files: the parts of the document that list devices and measured collectives, and the TOML that is written."""

import json
import math
import re
from collections.abc import Mapping
from typing import NamedTuple, cast

from hapsynth.cluster.curves import Curve
from hapsynth.cluster.device_kinds import DeviceKind, find_kind
from hapsynth.cluster.links import HostLinks, read_host_links
from hapsynth.cluster.toml_reader import Table

OVER_HOSTS = ("hierarchical_all_reduce", "hierarchical_reduce_scatter", "hierarchical_all_gather")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reshare", *OVER_HOSTS)
"""Those of which a cluster may have measured times; of `reshare` a permute's."""
_MOST_DEVICES = 1 << 16


def read_collectives(table: Table) -> dict[str, dict[str, Curve]]:
    found: dict[str, dict[str, Curve]] = {}
    for axis in table.data:
        by_step = table.table(axis, COLLECTIVES)
        found[axis] = {step: by_step.curve(step, "MEMORY") for step in by_step.data}
    return found


def read_profile(table: Table) -> dict[str, object]:
    """What is kept as it is: text, numbers, and tables of these."""
    found: dict[str, object] = {}
    for key, value in table.data.items():
        if isinstance(value, Mapping):
            found[key] = read_profile(table.table(key))
        elif isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
            found[key] = value
        else:
            raise table.error(key, f"= {value!r} must be text, a finite number or a table")
    return found


class Entries(NamedTuple):
    """What the [[devices]] entries spell out, in order: the kind and host of each device, the hosts by label, and the
    links of those that have some of their own."""

    devices: tuple[DeviceKind, ...]
    hosts: tuple[int, ...]
    labels: Mapping[str, int]
    links: Mapping[int, HostLinks]


def read_devices(top: Table, kinds: Mapping[str, DeviceKind]) -> Entries:
    """The [[devices]] of a cluster file."""
    entries = top.data.get("devices", [])
    if not isinstance(entries, list):
        raise top.error("devices", f"= {entries!r} must be a list of tables; write [[devices]]")
    devices: list[DeviceKind] = []
    hosts: list[int] = []
    labels: dict[str, int] = {}
    links: dict[int, HostLinks] = {}
    for i, data in enumerate(cast(list[object], entries)):
        entry = Table(data, top.source, f"devices[{i}]", _ENTRY_KEYS)
        kind = find_kind(entry, "kind", kinds)
        if "count" in entry and ("hosts" in entry or "per_host" in entry):
            raise entry.error("count", "stands for one device in each host; use either count or hosts and per_host")
        n_hosts = next((entry.count(key) for key in ("count", "hosts") if key in entry), 1)
        per_host = entry.count("per_host") if "per_host" in entry else 1
        if len(devices) + n_hosts * per_host > _MOST_DEVICES:
            raise entry.error("", f"brings the cluster to more than {_MOST_DEVICES} devices")
        first = max(hosts, default=-1) + 1
        here = list(range(first, first + n_hosts))
        if "host" in entry:
            label = entry.text("host")
            named = [label] if n_hosts == 1 else [f"{label}{k}" for k in range(n_hosts)]
            here = [labels.setdefault(name, host) for name, host in zip(named, here, strict=True)]
        own = read_host_links(entry)
        for host in here:
            links[host] = _joined(entry, links.get(host, HostLinks()), own)
        devices += [kind] * (n_hosts * per_host)
        hosts += [host for host in here for _ in range(per_host)]
    if not devices:
        raise top.error("devices", 'lists no device; add [[devices]] with kind = "V100-16GB" and count = 4')
    return Entries(tuple(devices), tuple(hosts), labels, {host: own for host, own in links.items() if any(own)})


_ENTRY_KEYS = ("kind", "count", "hosts", "per_host", "host", *HostLinks._fields)


def _joined(entry: Table, known: HostLinks, own: HostLinks) -> HostLinks:
    """The links of a host by all of its entries."""
    for key, before, link in zip(HostLinks._fields, known, own, strict=True):
        if before and link and before != link:
            raise entry.error(key, "is not what another entry says of the same host; give it once")
    return HostLinks(own.network or known.network, own.intra or known.intra)


def to_toml(data: Mapping[str, object]) -> str:
    """`data` as TOML, for the documents that `Cluster.to_dict` makes."""

    def key(name: str) -> str:
        return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else scalar(name)

    def scalar(value: object) -> str:
        if isinstance(value, Mapping):
            items = cast(Mapping[str, object], value).items()
            return "{ " + ", ".join(f"{key(k)} = {scalar(v)}" for k, v in items) + " }"
        # JSON's strings, numbers and lists of these are TOML's, but for the delete character, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

    def table(header: str, body: object, opened: tuple[str, ...] = ()) -> str:
        """`opened`: the sub-tables that get a header of their own, line by line."""
        items = cast(Mapping[str, object], body).items()
        lines = [header, *(f"{key(k)} = {scalar(v)}" for k, v in items if k not in opened)]
        inner = [(f"{header[:-1]}.{key(k)}", v) for k, v in items if k in opened]
        return "\n\n".join(["\n".join(lines), *(f"{tables(head, v)}" for head, v in inner)])

    def tables(header: str, body: object) -> str:
        return "\n\n".join(table(f"{header}.{key(k)}]", v) for k, v in cast(Mapping[str, object], body).items())

    parts = [table("", {k: data[k] for k in ("name", "axes")}).lstrip()]
    parts += [table(f"[{k}]", data[k]) for k in ("network", "intra") if k in data]
    parts += [table("[[devices]]", entry) for entry in cast(list[object], data["devices"])]
    parts += [table("[[links]]", entry) for entry in cast(list[object], data.get("links", []))]
    kinds = cast(Mapping[str, object], data["kinds"]).items()
    parts += [table(f"[kinds.{key(k)}]", v, opened=("measured", "ops")) for k, v in kinds]
    parts += [tables("[collectives", data["collectives"])] if "collectives" in data else []
    parts += [table("[profile]", data["profile"])] if "profile" in data else []
    return "\n\n".join(parts) + "\n"
