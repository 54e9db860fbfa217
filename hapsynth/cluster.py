"""The cluster that a plan is for: the devices in mesh order, the hosts they sit in, the links between them.

Written as TOML (`examples/clusters/`). Units are never optional:

    name = "mixed8"
    axes = { data = 8 }               # the mesh; without it one axis, "hap", over all devices

    [network]                         # between hosts
    bandwidth = "10 Gbit/s"
    latency = "20 us"

    [intra]                           # inside a host; without it, the network
    bandwidth = "12 GB/s"
    latency = "5 us"

    [[devices]]                       # in mesh order
    kind = "V100-16GB"                # a known GPU (hapsynth/devices.toml) or a name under [kinds]
    hosts = 2                         # or count = N: one in each of N hosts
    per_host = 4

    [kinds.small]                     # either on a base, or flops, bandwidth and memory
    base = "V100-16GB"
    memory = "4 GiB"
    speed = 0.5                       # scales flops and bandwidth
    price_per_hour = 1.2              # of a device, in any currency: for `search --advise`

Everything here is arithmetic on descriptions: no backend is started, so that planning needs no device.
"""

import hashlib
import itertools
import json
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from hapsynth.devices import (
    ClusterError,
    DeviceKind,
    Link,
    Table,
    find_kind,
    kind_of,
    known_kinds,
    read_kinds,
    read_link,
    write_kind,
    write_link,
)

__all__ = ["Cluster", "ClusterError", "DeviceKind", "Link", "known_kinds"]

if TYPE_CHECKING:
    import jax


class _Device(Protocol):
    """What is read of a `jax.Device`."""

    platform: str
    device_kind: str
    process_index: int


DEFAULT_AXIS = "hap"
_MOST_DEVICES = 1 << 16

# What `from_mesh` assumes of links, which JAX tells nothing about. Nominal: a slow PCIe 3.0 x16 inside a host,
# 10 Gbit/s Ethernet between hosts, and for XLA's host devices a copy through shared memory.
NOMINAL_INTRA = Link(bandwidth=12e9, latency=10e-6)
NOMINAL_NETWORK = Link(bandwidth=1.25e9, latency=20e-6)
NOMINAL_CPU_LINK = Link(bandwidth=4e9, latency=50e-6)
# And of a host's CPU, in all: XLA's host devices share them evenly. Nominal, per core and per machine.
NOMINAL_CPU_FLOPS = {"float32": 60e9, "float64": 30e9}
NOMINAL_CPU_BANDWIDTH = 20e9


@dataclass(frozen=True)
class Cluster:
    """Devices in mesh order (row-major over `axes`), and what joins them.

    `devices`: one kind per device. `hosts`: the host of each device, renumbered 0, 1, ... in order of appearance.
    `network`: between hosts. `intra`: inside a host, None where it is no better than the network. `axes`: (name,
    size) of each mesh axis; () stands for one axis "hap" over all devices. One kind name means one kind.

    Raises ClusterError when these don't fit each other.
    """

    name: str
    devices: tuple[DeviceKind, ...]
    hosts: tuple[int, ...]
    network: Link
    intra: Link | None = None
    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        def error(problem: str) -> ClusterError:
            return ClusterError(f"cluster {self.name!r}: {problem}")

        if not self.devices:
            raise error("has no device; name at least one under [[devices]]")
        if len(self.hosts) != self.n:
            raise error(f"hosts has {len(self.hosts)} entries for {self.n} devices; give one host per device")
        number = {host: i for i, host in enumerate(dict.fromkeys(self.hosts))}
        object.__setattr__(self, "hosts", tuple(number[host] for host in self.hosts))
        object.__setattr__(self, "axes", tuple((a, s) for a, s in self.axes) or ((DEFAULT_AXIS, self.n),))
        names = [axis for axis, _ in self.axes]
        if len(set(names)) < len(names):
            raise error(f"axes {names} repeat a name; every mesh axis needs its own")
        if (size := math.prod(s for _, s in self.axes)) != self.n:
            raise error(f"axes {dict(self.axes)} make a mesh of {size}, but there are {self.n} devices")
        for a, b in itertools.combinations(self.kinds, 2):
            if a.name == b.name:
                raise error(f"two unlike device kinds are both called {a.name!r}; give each its own name")

    @property
    def n(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """The distinct kinds, in order of appearance."""
        return tuple(dict.fromkeys(self.devices))

    def slowest_link(self) -> Link:
        """The link that a collective over all devices waits for: least bandwidth, most latency of those in use."""
        intra = self.intra or self.network
        used = [self.network] if len(set(self.hosts)) > 1 else []
        if len(set(self.hosts)) < self.n or not used:
            used.append(intra)
        return Link(min(link.bandwidth for link in used), max(link.latency for link in used))

    def without(self, kind: str) -> "Cluster":
        """The cluster less its devices of one kind. Raises ClusterError where there are none, or no others."""
        self._of_kind(kind)
        kept = [i for i, device in enumerate(self.devices) if device.name != kind]
        if not kept:
            raise ClusterError(f"cluster {self.name!r}: nothing is left without kind {kind!r}")
        return self._picked(f"{self.name} without {kind}", kept, [self.hosts[i] for i in kept])

    def plus(self, kind: str, n: int) -> "Cluster":
        """The cluster with `n` more devices of one kind, after those there are, in new hosts as full as the fullest
        with that kind. Raises ClusterError where there are none of that kind."""
        here = self._of_kind(kind)
        per_host = max(Counter(self.hosts[i] for i in here).values())
        order = [*range(here[-1] + 1), *[here[-1]] * n, *range(here[-1] + 1, self.n)]
        new = [len(self.hosts) + i // per_host for i in range(n)]
        hosts = [*self.hosts[: here[-1] + 1], *new, *self.hosts[here[-1] + 1 :]]
        return self._picked(f"{self.name} plus {n} {kind}", order, hosts)

    def scaled_network(self, factor: float) -> "Cluster":
        """The cluster with `factor` times the bandwidth between its hosts; inside where there is only one host."""
        several, intra = len(set(self.hosts)) > 1, self.intra or self.network
        link = self.network if several else intra
        scaled = replace(link, bandwidth=link.bandwidth * factor)
        changed = {"network": scaled} if several else {"intra": scaled}
        return replace(self, name=f"{self.name} at {factor:g}x the network", **changed)

    def _of_kind(self, kind: str) -> list[int]:
        found = [i for i, device in enumerate(self.devices) if device.name == kind]
        if not found:
            names = ", ".join(k.name for k in self.kinds)
            raise ClusterError(f"cluster {self.name!r}: has no device of kind {kind!r}; there are {names}")
        return found

    def _picked(self, name: str, order: list[int], hosts: Sequence[int]) -> "Cluster":
        """These devices in these hosts, over one axis unless they are a mesh over the same axes."""
        coords = list(itertools.product(*(range(size) for _, size in self.axes)))
        along = [len({coords[i][a] for i in order}) for a in range(len(self.axes))]
        axes = tuple((axis, size) for (axis, _), size in zip(self.axes, along, strict=True))
        if math.prod(along) != len(order):
            axes = ((self.axes[0][0] if len(self.axes) == 1 else DEFAULT_AXIS, len(order)),)
        devices = tuple(self.devices[i] for i in order)
        return replace(self, name=name, devices=devices, hosts=tuple(hosts), axes=axes)

    def fingerprint(self) -> str:
        """16 hex digits that change with anything a plan's cost depends on; the cluster's own name is left out."""
        data = {key: value for key, value in self.to_dict().items() if key != "name"}
        for kind in cast(dict[str, dict[str, object]], data["kinds"]).values():
            kind.pop("source", None)
            kind.pop("price_per_hour", None)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Cluster":
        """Reads a TOML file. Raises ClusterError, naming file, key and value, for whatever is wrong with it."""
        file = Path(path)
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ClusterError(f"{file}: can't be read: {error.strerror}; give the path of a cluster file") from None
        except UnicodeDecodeError:
            raise ClusterError(f"{file}: is not UTF-8 text; a cluster file is TOML") from None
        except tomllib.TOMLDecodeError as error:
            raise ClusterError(f"{file}: is not valid TOML: {error}") from None
        return cls.from_dict({"name": file.stem, **data}, source=str(file))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the TOML that `load` reads back as an equal cluster: every kind in full, no [kinds] base."""
        Path(path).write_text(_toml(self.to_dict()), encoding="utf-8")

    @classmethod
    def from_dict(cls, data: Mapping[str, object], source: str = "cluster") -> "Cluster":
        """The cluster of a parsed TOML or JSON document; `source` is what errors call it. Raises ClusterError."""
        top = Table(data, source, keys=("name", "axes", "network", "intra", "devices", "kinds"))
        kinds = read_kinds(top.table("kinds"), known_kinds()) if "kinds" in top else known_kinds()
        devices, hosts = _read_devices(top, kinds)
        intra = read_link(top.table("intra", ("bandwidth", "latency"))) if "intra" in top else None
        # A single host has no network to describe, as long as it says what joins its devices.
        if "network" in top or intra is None or len(set(hosts)) > 1:
            top.need("network", 'a table [network] with bandwidth = "10 Gbit/s" and latency = "20 us"')
            network = read_link(top.table("network", ("bandwidth", "latency")))
        else:
            network = intra
        axes = top.table("axes") if "axes" in top else None
        sizes = tuple((axis, axes.count(axis)) for axis in axes.data) if axes else ()
        try:
            return cls(top.text("name", "a name"), devices, hosts, network, intra, sizes)
        except ClusterError as error:
            raise ClusterError(f"{source}: {error}") from None

    def to_dict(self) -> dict[str, object]:
        """The document that `from_dict` reads back as an equal cluster: plain strings, numbers, lists and dicts."""
        runs: list[dict[str, object]] = []
        for (kind, host), run in itertools.groupby(zip(self.devices, self.hosts, strict=True)):
            runs.append({"kind": kind.name, "per_host": len(list(run)), "host": str(host)})
        # Where each run is a host of its own, labels say nothing, and like hosts in a row are one entry.
        if len(runs) == len(set(self.hosts)):
            groups = itertools.groupby(runs, key=lambda run: (run["kind"], run["per_host"]))
            runs = [{"kind": k, "hosts": len(list(group)), "per_host": c} for (k, c), group in groups]
        return {
            "name": self.name,
            "axes": dict(self.axes),
            "network": write_link(self.network),
            **({"intra": write_link(self.intra)} if self.intra else {}),
            "devices": runs,
            "kinds": {kind.name: write_kind(kind) for kind in self.kinds},
        }

    @classmethod
    def from_mesh(cls, mesh: "jax.sharding.Mesh") -> "Cluster":
        """A description of the devices of `mesh` from their names: known GPUs, or XLA's host devices.

        Hosts are JAX's processes. Links and CPUs get nominal figures (`NOMINAL_*`): good enough to plan something,
        no ground for comparing plans; a cluster file with measured figures is. Raises ClusterError for a device
        that is neither.
        """
        devices = cast(list[_Device], mesh.devices.flatten().tolist())
        cpus = [device for device in devices if device.platform == "cpu"]
        share = _cpu_share(len(cpus)) if cpus else None
        kinds = tuple(share if share and d.platform == "cpu" else kind_of(d.device_kind) for d in devices)
        intra = NOMINAL_CPU_LINK if cpus else NOMINAL_INTRA
        name = " + ".join(f"{kinds.count(kind)} x {kind.name}" for kind in dict.fromkeys(kinds))
        axes = tuple((str(axis), int(size)) for axis, size in mesh.shape.items())
        return cls(name, kinds, tuple(d.process_index for d in devices), NOMINAL_NETWORK, intra, axes)


def _read_devices(top: Table, kinds: Mapping[str, DeviceKind]) -> tuple[tuple[DeviceKind, ...], tuple[int, ...]]:
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


def _cpu_share(n: int) -> DeviceKind:
    """The kind of one of `n` XLA host devices, which share this machine's cores, bandwidth and memory."""
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
    return DeviceKind(
        name=f"cpu/{n}",
        flops={dtype: rate * cores / n for dtype, rate in NOMINAL_CPU_FLOPS.items()},
        bandwidth=NOMINAL_CPU_BANDWIDTH / n,
        memory=memory // n,
        source="nominal",
    )


def _toml(data: Mapping[str, object]) -> str:
    """`data` as TOML, for the documents that `Cluster.to_dict` makes."""

    def key(name: str) -> str:
        return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else scalar(name)

    def scalar(value: object) -> str:
        if isinstance(value, Mapping):
            items = cast(Mapping[str, object], value).items()
            return "{ " + ", ".join(f"{key(k)} = {scalar(v)}" for k, v in items) + " }"
        # JSON's strings and numbers are TOML's, but for the delete character, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

    def table(header: str, body: object) -> str:
        return header + "".join(f"\n{key(k)} = {scalar(v)}" for k, v in cast(Mapping[str, object], body).items())

    parts = [table("", {k: data[k] for k in ("name", "axes")}).lstrip()]
    parts += [table(f"[{k}]", data[k]) for k in ("network", "intra") if k in data]
    parts += [table("[[devices]]", entry) for entry in cast(list[object], data["devices"])]
    parts += [table(f"[kinds.{key(k)}]", v) for k, v in cast(Mapping[str, object], data["kinds"]).items()]
    return "\n\n".join(parts) + "\n"
