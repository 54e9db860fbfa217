"""Cluster files: the parts of the document that list devices and measured collectives, and the TOML that is written."""

import json
import math
import re
from collections.abc import Mapping
from typing import cast

from hapsynth.cluster.curves import Curve
from hapsynth.cluster.device_kinds import DeviceKind, find_kind
from hapsynth.cluster.toml_reader import Table

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
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


def read_devices(top: Table, kinds: Mapping[str, DeviceKind]) -> tuple[tuple[DeviceKind, ...], tuple[int, ...]]:
    """The kinds and hosts that the [[devices]] entries spell out, in order."""
    entries = top.data.get("devices", [])
    if not isinstance(entries, list):
        raise top.error("devices", f"= {entries!r} must be a list of tables; write [[devices]]")
    devices: list[DeviceKind] = []
    hosts: list[int] = []
    labels: dict[str, int] = {}
    for i, data in enumerate(cast(list[object], entries)):
        entry = Table(data, top.source, f"devices[{i}]", ("kind", "count", "hosts", "per_host", "host"))
        kind = find_kind(entry, "kind", kinds)
        if "count" in entry and ("hosts" in entry or "per_host" in entry):
            raise entry.error("count", "stands for one device in each host; use either count or hosts and per_host")
        if "host" in entry and ("count" in entry or "hosts" in entry):
            raise entry.error("host", "puts the entry's devices on one named host; use it with per_host only")
        n_hosts = next((entry.count(key) for key in ("count", "hosts") if key in entry), 1)
        per_host = entry.count("per_host") if "per_host" in entry else 1
        if len(devices) + n_hosts * per_host > _MOST_DEVICES:
            raise entry.error("", f"brings the cluster to more than {_MOST_DEVICES} devices")
        first = max(hosts, default=-1) + 1
        if "host" in entry:
            first = labels.setdefault(entry.text("host"), first)
        devices += [kind] * (n_hosts * per_host)
        hosts += [first + host for host in range(n_hosts) for _ in range(per_host)]
    if not devices:
        raise top.error("devices", 'lists no device; add [[devices]] with kind = "V100-16GB" and count = 4')
    return tuple(devices), tuple(hosts)


def to_toml(data: Mapping[str, object]) -> str:
    """`data` as TOML, for the documents that `Cluster.to_dict` makes."""

    def key(name: str) -> str:
        return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else scalar(name)

    def scalar(value: object) -> str:
        if isinstance(value, Mapping):
            items = cast(Mapping[str, object], value).items()
            return "{ " + ", ".join(f"{key(k)} = {scalar(v)}" for k, v in items) + " }"
        # JSON's strings and numbers are TOML's, but for the delete character, which TOML wants escaped.
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
    kinds = cast(Mapping[str, object], data["kinds"]).items()
    parts += [table(f"[kinds.{key(k)}]", v, opened=("measured", "ops")) for k, v in kinds]
    parts += [tables("[collectives", data["collectives"])] if "collectives" in data else []
    parts += [table("[profile]", data["profile"])] if "profile" in data else []
    return "\n\n".join(parts) + "\n"
