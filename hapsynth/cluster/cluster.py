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
    kind = "V100-16GB"                # a known GPU (hapsynth/cluster/devices.toml) or a name under [kinds]
    hosts = 2                         # or count = N: one in each of N hosts
    per_host = 4
    host = "fast"                     # their label; of several hosts "fast0", "fast1" and so on
    network = { bandwidth = "25 Gbit/s", latency = "10 us" }     # these hosts' own links, where not as above;
    intra = { bandwidth = "150 GB/s", latency = "2 us" }         # between unlike hosts the slower counts

    [[links]]                         # what joins two hosts, whatever their own
    between = ["fast0", "fast1"]
    bandwidth = "100 Gbit/s"
    latency = "2 us"

    [kinds.small]                     # either on a base, or flops, bandwidth and memory
    base = "V100-16GB"
    memory = "4 GiB"
    speed = 0.5                       # scales flops and bandwidth
    price_per_hour = 1.2              # of a device, in any currency: for `search --advise`
    contention = 1.05                 # how many times as long computing takes while a collective runs
    contention_delay = "12 ms"        # what each exchange of such a collective takes longer than alone

`hapsynth profile` writes measured figures beside these, which go before them:

    [kinds.small.measured.matmul]     # seconds by FLOPs, without the overhead
    float32 = [["4.2 MFLOP", "55 us"], ["537 MFLOP", "5.1 ms"]]

    [kinds.small.ops."matmul:0123456789ab"]    # an op of a function by itself (`hapsynth profile --model`)
    op = "dot_general f32[4096,256] f32[256,512]"
    seconds = [["134 MFLOP", "1.4 ms"], ["1.07 GFLOP", "9.7 ms"]]

    [collectives.data]                # along a mesh axis: seconds by bytes sent over the slowest link
    all_reduce = [["0 B", "18 us"], ["64 KiB", "44 us"], ["4 MiB", "1.6 ms"]]

    [profile]                         # where and with what it was measured; nothing is computed from it
    jax = "0.10.2"

Everything here is arithmetic on descriptions: no backend is started, so that planning needs no device.
"""

import hashlib
import itertools
import json
import math
import os
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from hapsynth._files import write_text
from hapsynth._warn import warn_user
from hapsynth.cluster import _units
from hapsynth.cluster.curves import Curve, write_curve
from hapsynth.cluster.device_kinds import (
    DeviceKind,
    check_name,
    kind_of,
    known_kinds,
    model_of,
    models_by_jax_name,
    read_kinds,
    write_kind,
)
from hapsynth.cluster.links import (
    LINK_KEYS,
    HostLinks,
    Link,
    Pair,
    read_link,
    read_pairs,
    slower,
    write_host_links,
    write_link,
    write_pairs,
)
from hapsynth.cluster.toml_format import COLLECTIVES, OVER_HOSTS, read_collectives, read_devices, read_profile, to_toml
from hapsynth.cluster.toml_reader import ClusterError, Table

__all__ = ["Cluster", "ClusterError", "ClusterWarning", "DeviceKind", "Link", "known_kinds"]

if TYPE_CHECKING:
    import jax


class _Device(Protocol):
    """What is read of a `jax.Device`."""

    platform: str
    device_kind: str
    process_index: int


class ClusterWarning(UserWarning):
    """A cluster's figures are used where they may not hold."""


DEFAULT_AXIS = "hap"

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
    `host_links`: the links of hosts that have some of their own; `pairs`: of two hosts that are joined by another one
    than theirs.
    `collectives`: by axis ("hap": all devices as one) and collective, measured seconds by the bytes that one group
    sends over its slowest link, padding included. `profile`: where figures were measured and with what; not compared.

    Raises ClusterError when these don't fit each other, or the name is empty.
    """

    name: str
    devices: tuple[DeviceKind, ...]
    hosts: tuple[int, ...]
    network: Link
    intra: Link | None = None
    axes: tuple[tuple[str, int], ...] = ()
    collectives: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict[str, Mapping[str, Curve]], hash=False)
    profile: Mapping[str, object] = field(default_factory=dict[str, object], compare=False)
    host_links: Mapping[int, HostLinks] = field(default_factory=dict[int, HostLinks], hash=False)
    pairs: Mapping[Pair, Link] = field(default_factory=dict[Pair, Link], hash=False)

    def __post_init__(self) -> None:
        def error(problem: str) -> ClusterError:
            return ClusterError(f"cluster {self.name!r}: {problem}")

        check_name(f"cluster {self.name!r}", self.name)
        if not self.devices:
            raise error("has no device; name at least one under [[devices]]")
        if len(self.hosts) != self.n:
            raise error(f"hosts has {len(self.hosts)} entries for {self.n} devices; give one host per device")
        number = {host: i for i, host in enumerate(dict.fromkeys(self.hosts))}
        object.__setattr__(self, "hosts", tuple(number[host] for host in self.hosts))
        own = {number[host]: links for host, links in self.host_links.items() if host in number and any(links)}
        object.__setattr__(self, "host_links", dict(sorted(own.items())))
        between = {
            (min(number[a], number[b]), max(number[a], number[b])): link
            for (a, b), link in self.pairs.items()
            if a in number and b in number
        }
        object.__setattr__(self, "pairs", dict(sorted(between.items())))
        object.__setattr__(self, "axes", tuple((a, s) for a, s in self.axes) or ((DEFAULT_AXIS, self.n),))
        names = [axis for axis, _ in self.axes]
        if len(set(names)) < len(names):
            raise error(f"axes {names} repeat a name; every mesh axis needs its own")
        if (size := math.prod(s for _, s in self.axes)) != self.n:
            raise error(f"axes {dict(self.axes)} make a mesh of {size}, but there are {self.n} devices")
        for a, b in itertools.combinations(self.kinds, 2):
            if a.name == b.name:
                raise error(f"two unlike device kinds are both called {a.name!r}; give each its own name")
        for axis, curves in self.collectives.items():
            if axis not in (*names, DEFAULT_AXIS):
                raise error(f"collectives.{axis} is no mesh axis; there are {', '.join(names)}")
            if unknown := [step for step in curves if step not in COLLECTIVES]:
                raise error(f"collectives.{axis}.{unknown[0]} is not one of {', '.join(COLLECTIVES)}")

    @property
    def n(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """The distinct kinds, in order of appearance."""
        return tuple(dict.fromkeys(self.devices))

    def inside(self, host: int) -> Link:
        """What joins the devices of a host."""
        return self._own(host).intra or self.intra or self.nic(host)

    def between(self, a: int, b: int) -> Link:
        """What joins two hosts; of one, it and another like it."""
        return self.pairs.get((min(a, b), max(a, b))) or slower(self.nic(a), self.nic(b))

    def nic(self, host: int) -> Link:
        """What joins a host to those with which it is no pair."""
        return self._own(host).network or self.network

    def _own(self, host: int) -> HostLinks:
        return self.host_links.get(host, HostLinks())

    def collectives_along(self, axis: str, size: int) -> Mapping[str, Curve]:
        """The measured collectives along an axis of `size` devices; none where only other axes were measured."""
        sizes = dict(self.axes)
        if sizes.get(axis) != size and size == self.n:
            # All devices as one axis, whatever it is called.
            axis = next((a for a, s in self.axes if s == size), "" if DEFAULT_AXIS in sizes else DEFAULT_AXIS)
        return self.collectives.get(axis, {})

    def without(self, kind: str) -> "Cluster":
        """The cluster less its devices of one kind. Raises ClusterError where there are none, or no others."""
        self._of_kind(kind)
        kept = [i for i, device in enumerate(self.devices) if device.name != kind]
        if not kept:
            raise ClusterError(f"cluster {self.name!r}: nothing is left without kind {kind!r}")
        return replace(self.subset(kept), name=f"{self.name} without {kind}")

    @property
    def is_closed(self) -> bool:
        """Whether all devices are in one host, and nothing is said of what would join it to another."""
        described = self._own(0).intra or self.intra
        alike = self.nic(0) == self.inside(0) and (described is not None or self.n > 1)
        return len(set(self.hosts)) == 1 and alike

    def plus(self, kind: str, n: int) -> "Cluster":
        """The cluster with `n` more devices of one kind, after those there are, in new hosts as full as the fullest
        with that kind, with its links; of a cluster that `is_closed`, in its host. The first mesh axis grows, if the
        new devices fill whole rows of the other axes and come after a whole row; otherwise the cluster gets one axis,
        `hap`, over all devices. Raises ClusterError where there are none of that kind, or `n` is below 1."""
        here = self._of_kind(kind)
        if n < 1:
            raise ClusterError(f"cluster {self.name!r}: {n!r} more {kind} are asked for; give a number of at least 1")
        ((fullest, per_host),) = Counter(self.hosts[i] for i in here).most_common(1)
        order = [*range(here[-1] + 1), *[here[-1]] * n, *range(here[-1] + 1, self.n)]
        new = [self.hosts[0] if self.is_closed else len(self.hosts) + i // per_host for i in range(n)]
        own = {**self.host_links, **(dict.fromkeys(new, self._own(fullest)) if fullest in self.host_links else {})}
        hosts = [*self.hosts[: here[-1] + 1], *new, *self.hosts[here[-1] + 1 :]]
        devices = tuple(self.devices[i] for i in order)
        ((major, rows), *others) = self.axes
        row = self.n // rows
        whole = n % row == 0 and (here[-1] + 1) % row == 0
        axes = ((major, rows + n // row), *others) if whole else ()
        name = f"{self.name} plus {n} {kind}"
        # What was measured among fewer devices says nothing of these.
        changed = {"devices": devices, "hosts": tuple(hosts), "axes": axes, "host_links": own}
        return replace(self, name=name, collectives={}, **changed)

    def scaled_network(self, factor: float) -> "Cluster":
        """The cluster with `factor` times the bandwidth between its hosts; inside where there is only one host. Of what
        was measured all time beyond the latency is taken for that of these links."""
        if len(set(self.hosts)) > 1:
            changed: dict[str, object] = {
                "network": self.network.wider(factor),
                "host_links": {host: links.wider(factor) for host, links in self.host_links.items()},
                "pairs": {pair: link.wider(factor) for pair, link in self.pairs.items()},
            }
        else:
            changed = {"intra": self.inside(0).wider(factor), "host_links": {}}
        curves = {
            axis: {step: curve.wider(factor) for step, curve in by_step.items()} if self._crosses(axis) else by_step
            for axis, by_step in self.collectives.items()
        }
        return replace(self, name=f"{self.name} at {factor:g}x the network", collectives=curves, **changed)

    def _crosses(self, axis: str) -> bool:
        """Whether the devices along an axis are in several hosts, or all devices in one."""
        if axis not in (names := [name for name, _ in self.axes]):
            return True
        hosts = np.array(self.hosts).reshape([size for _, size in self.axes])
        lines = np.moveaxis(hosts, names.index(axis), -1)
        return bool((lines != lines[..., :1]).any()) or len(set(self.hosts)) == 1

    def _of_kind(self, kind: str) -> list[int]:
        found = [i for i, device in enumerate(self.devices) if device.name == kind]
        if not found:
            names = ", ".join(k.name for k in self.kinds)
            raise ClusterError(f"cluster {self.name!r}: has no device of kind {kind!r}; there are {names}")
        return found

    def positions(self, devices: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
        """The positions along each mesh axis at whose crossings some devices stand; None where others stand there too,
        so that the devices are no mesh of these axes."""
        found: list[tuple[int, ...]] = []
        stride = self.n
        for _, size in self.axes:
            stride //= size
            found.append(tuple(sorted({d // stride % size for d in devices})))
        return tuple(found) if math.prod(map(len, found)) == len(devices) else None

    def spread(self, devices: Sequence[int], along: Sequence[str], fractions: Sequence[float]) -> tuple[float, ...]:
        """Fractions per position of `devices` along mesh axes (none: of all in a row), as those per position of the
        whole cluster, 0 where none of them stand."""
        if len(devices) == self.n:
            return tuple(fractions)
        lengths, kept = [self.n], [tuple(devices)]
        if along:
            positions = self.positions(devices)
            assert positions is not None
            known = {name: (size, p) for (name, size), p in zip(self.axes, positions, strict=True)}
            lengths, kept = [known[a][0] for a in along], [known[a][1] for a in along]
        whole = np.zeros(lengths)
        whole[np.ix_(*kept)] = np.reshape(fractions, [len(p) for p in kept])
        return tuple(whole.ravel().tolist())

    def subset(self, devices: Sequence[int]) -> "Cluster":
        """The cluster of some of the devices, given by their positions in mesh order, rising; all of them: the cluster
        itself. It has the same mesh axes where the devices are a mesh of these, and one over all where they are not.
        Collectives that were measured along an axis count for a part of it too, unless it is inside one host and the
        whole is not; those over hosts with equally many devices only for others such. Raises ClusterError for
        positions that are not rising or that no device has."""
        rising = all(a < b for a, b in itertools.pairwise(devices))
        if not devices or not rising or devices[0] < 0 or devices[-1] >= self.n:
            what = f"{list(devices)} are not positions of its {self.n} devices, each once and rising"
            raise ClusterError(f"cluster {self.name!r}: {what}")
        if len(devices) == self.n:
            return self
        kept = self.positions(devices)
        axes = tuple((a, len(p)) for (a, _), p in zip(self.axes, kept, strict=True)) if kept else ()
        pick = lambda row: tuple(row[d] for d in devices)
        hosts = pick(self.hosts)
        whole = {a for a, size in axes if dict(self.axes)[a] == size}
        alike = {a for a, _ in axes} | {DEFAULT_AXIS} if (len(set(hosts)) > 1) == (len(set(self.hosts)) > 1) else set()
        measured = {a: curves for a, curves in self.collectives.items() if a in whole | alike}
        if _equally_full(hosts) != _equally_full(self.hosts):
            # Over these hosts they go otherwise.
            measured = {a: {k: c for k, c in by.items() if k not in OVER_HOSTS} for a, by in measured.items()}
        return replace(self, devices=pick(self.devices), hosts=hosts, axes=axes, collectives=measured)

    def along(self, axes: Sequence[tuple[str, int]]) -> "Cluster":
        """The cluster along a mesh's axes, where the mesh has several and it has one; else as it is.
        Raises ClusterError where both have several, and others."""
        given, own = ([(axis, size) for axis, size in of if size > 1] for of in (axes, self.axes))
        if len(given) < 2 or [size for _, size in given] == [size for _, size in own]:
            return self
        if len(own) > 1:
            raise ClusterError(
                f"the mesh has axes {dict(given)}, and cluster {self.name!r} {dict(own)}; give a mesh of the cluster's "
                "axes, or of one axis over all devices, for which the cluster's count"
            )
        # What was measured along its one axis was measured of all devices.
        measured = self.collectives_along(DEFAULT_AXIS, self.n)
        return replace(self, axes=tuple(given), collectives={DEFAULT_AXIS: measured} if measured else {})

    def misplaced(self, device_kinds: Sequence[str]) -> str | None:
        """What is wrong where a device's kind is described at another's place: `device_kinds` are what JAX calls the
        devices, in the cluster's order; None where nothing is. One kind may be described as another, as a careful
        description does, where the cluster has none of it."""
        models = models_by_jax_name()
        found = [models.get(name, name) for name in device_kinds]
        described = [model_of(kind) for kind in self.devices]
        for i, (actual, planned) in enumerate(zip(found, described, strict=True)):
            if actual != planned and planned in found and actual in described:
                return (
                    f"device {i} of the mesh is a {device_kinds[i]}, and cluster {self.name!r} has a {planned} in its "
                    f"place, as device {found.index(planned)} of the mesh is: shares would go to the wrong devices; "
                    "give the mesh's devices in the cluster's order, or describe them in the mesh's "
                    f"({', '.join(_runs(device_kinds))})"
                )
        return None

    def measured_elsewhere(self, machine: str, jax_version: str) -> str | None:
        """What to warn of on a machine with a JAX version that the figures are not from, which names both; None where
        they are from there, or were not measured."""
        machines, version = (self.profile.get(key) for key in ("machines", "jax"))
        then, now = list[str](), list[str]()
        if isinstance(machines, str) and machine not in machines.split(", "):
            then.append(f"on {machines}")
            now.append(f"is {machine}")
        if isinstance(version, str) and version != jax_version:
            then.append(f"with JAX {version}")
            now.append(f"has JAX {jax_version}")
        if not then:
            return None
        when = f" ({self.profile['when']})" if "when" in self.profile else ""
        return (
            f"cluster {self.name!r} was measured {' '.join(then)}{when}, and this machine {' and '.join(now)}: "
            "times and shard sizes may be off; measure with hapsynth profile here"
        )

    def fingerprint(self) -> str:
        """16 hex digits that change with anything a plan's cost depends on; the cluster's own name is left out."""
        without = replace(
            self,
            devices=tuple(kind.bare() for kind in self.devices),
            profile={},
        )
        data = {key: value for key, value in without.to_dict().items() if key != "name"}
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
        """Writes the TOML that `load` reads back as an equal cluster: every kind in full, no [kinds] base. The file is
        there whole or not at all; OSError where that cannot be done."""
        write_text(path, to_toml(self.to_dict(defaults=True)))

    @classmethod
    def from_dict(cls, data: Mapping[str, object], source: str = "cluster") -> "Cluster":
        """The cluster of a parsed TOML or JSON document; `source` is what errors call it. Raises ClusterError."""
        top = Table(data, source, keys=_KEYS)
        kinds = read_kinds(top.table("kinds"), known_kinds()) if "kinds" in top else known_kinds()
        devices, hosts, labels, own = read_devices(top, kinds)
        several = len(set(hosts)) > 1
        intra = read_link(top.table("intra", LINK_KEYS)) if "intra" in top else None
        # A single host has no network to describe, as long as it says what joins its devices; nor have hosts that each
        # say what joins them to others.
        every = [own.get(host, HostLinks()) for host in dict.fromkeys(hosts)]
        given = [links.network if several else intra or links.intra or links.network for links in every]
        stated = [link for link in given if link is not None]
        if "network" in top or len(stated) < len(every):
            names = ", ".join(dict.fromkeys(kind.name for kind in devices))
            joined = f" for what joins the {len(every)} hosts ({names})" if several else ""
            top.need("network", f'a table [network] with bandwidth = "10 Gbit/s" and latency = "20 us"{joined}')
            network = read_link(top.table("network", LINK_KEYS))
        else:
            network = reduce(slower, stated)
        axes = top.table("axes") if "axes" in top else None
        sizes = tuple((axis, axes.count(axis)) for axis in axes.data) if axes else ()
        collectives = read_collectives(top.table("collectives")) if "collectives" in top else {}
        profile = read_profile(top.table("profile")) if "profile" in top else {}
        name, pairs = top.text("name", "a name"), read_pairs(top, labels)
        try:
            return cls(name, devices, hosts, network, intra, sizes, collectives, profile, own, pairs)
        except ClusterError as error:
            raise ClusterError(f"{source}: {error}") from None

    def to_dict(self, *, defaults: bool = False) -> dict[str, object]:
        """The document that `from_dict` reads back as an equal cluster: plain strings, numbers, lists and dicts.

        `defaults`: with those of the kinds that only a plan with overlap goes by.
        """
        runs: list[dict[str, object]] = []
        for (kind, host), run in itertools.groupby(zip(self.devices, self.hosts, strict=True)):
            links = write_host_links(self._own(host))
            runs.append({"kind": kind.name, "per_host": len(list(run)), "host": str(host), **links})
        # Where each run is a host of its own, labels say nothing but to pairs, and like hosts in a row are one entry.
        if len(runs) == len(set(self.hosts)) and not self.pairs:
            groups = itertools.groupby([{k: v for k, v in run.items() if k != "host"} for run in runs])
            runs = [{"kind": one["kind"], "hosts": len(list(like)), **one} for one, like in groups]
        curves = lambda by: {step: write_curve(curve, _units.MEMORY) for step, curve in by.items()}
        collectives = {axis: curves(by_step) for axis, by_step in self.collectives.items()}
        return {
            "name": self.name,
            "axes": dict(self.axes),
            "network": write_link(self.network),
            **({"intra": write_link(self.intra)} if self.intra else {}),
            "devices": runs,
            **({"links": write_pairs(self.pairs)} if self.pairs else {}),
            "kinds": {kind.name: write_kind(kind, defaults=defaults) for kind in self.kinds},
            **({"collectives": collectives} if collectives else {}),
            **({"profile": dict(self.profile)} if self.profile else {}),
        }

    @classmethod
    def from_mesh(cls, mesh: "jax.sharding.Mesh") -> "Cluster":
        """A description of the devices of `mesh` from their names: known GPUs, or XLA's host devices.

        Hosts are JAX's processes. Links and CPUs get nominal figures (`NOMINAL_*`): good enough to plan something,
        no ground for comparing plans; a cluster file with measured figures is. Raises ClusterError for a device
        that is neither. ClusterWarning for GPUs of several processes, some of which may be on one host.
        """
        devices = cast(list[_Device], mesh.devices.flatten().tolist())
        cpus = [device for device in devices if device.platform == "cpu"]
        share = _cpu_share(len(cpus)) if cpus else None
        kinds = tuple(share if share and d.platform == "cpu" else kind_of(d.device_kind) for d in devices)
        intra = NOMINAL_CPU_LINK if cpus else NOMINAL_INTRA
        name = " + ".join(f"{kinds.count(kind)} x {kind.name}" for kind in dict.fromkeys(kinds))
        axes = tuple((str(axis), int(size)) for axis, size in mesh.shape.items())
        hosts = tuple(d.process_index for d in devices)
        if not cpus and len(set(hosts)) > 1:
            # One for each GPU, as is recommended, has NVLink taken for the network.
            warn_user(
                f"no cluster is given: each of {len(set(hosts))} processes is taken for a host, and between them a "
                f"network of {_units.format(NOMINAL_NETWORK.bandwidth, _units.BANDWIDTH)}; where several run on one "
                "host, or the links are others, give cluster= (a file that hapsynth profile writes)",
                ClusterWarning,
            )
        return cls(name, kinds, hosts, NOMINAL_NETWORK, intra, axes)


_KEYS = ("name", "axes", "network", "intra", "devices", "links", "kinds", "collectives", "profile")


def _equally_full(hosts: Sequence[int]) -> bool:
    return len(set(Counter(hosts).values())) == 1


def _runs(names: Sequence[str]) -> Iterator[str]:
    for name, run in itertools.groupby(names):
        yield f"{sum(1 for _ in run)} x {name}"


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
