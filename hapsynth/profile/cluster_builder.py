"""From the figures of a job to its cluster."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from hapsynth._quantities import nbytes
from hapsynth.cluster.cluster import COLLECTIVES, DEFAULT_AXIS, NOMINAL_CPU_LINK, NOMINAL_INTRA, Cluster, ClusterError
from hapsynth.cluster.curves import Curve
from hapsynth.cluster.device_kinds import DeviceKind, kind_of
from hapsynth.cluster.granularity import DEFAULT_GRANULARITY, GPU_GRANULARITY
from hapsynth.cluster.links import Link
from hapsynth.cluster.op_classes import OP_CLASSES
from hapsynth.instructions.collectives import STEPS
from hapsynth.profile.collectives import BASE, INSIDE, Axes, Exchange, Point, Points, link_of
from hapsynth.profile.contention import BESIDE, delayed_by, of_contention, small_gather
from hapsynth.profile.job import Job
from hapsynth.profile.kind_fit import KindFit, by_memory, groups, rounded, smooth, typical
from hapsynth.profile.op_kernels import DISPATCH, LAUNCH, STREAM, Kernel, largest_matmul
from hapsynth.profile.plausibility import NEEDED, Implausible, ProfileError, falling, lacking, unlikely, unsteady
from hapsynth.profile.sampling import Floats
from hapsynth.search.cost.network import PRICES, axis_links

_LATENCY = 0.98
"""The time of a collective of no bytes, as a part of that of the smallest that was measured."""


def speed_groups(job: Job, ran: Sequence[Kernel], figures: Mapping[str, Floats]) -> list[list[int]]:
    """Devices of one model that computed equally fast, by their numbers."""
    computing = [k.key for k in ran if k.family not in (DISPATCH, LAUNCH) and not k.op]
    seconds = np.array([figures[k][:, 0] for k in computing]).T.reshape(job.n, len(computing))
    spread = float(np.median([figures[k][:, 1] for k in computing])) if computing else 0.0
    return groups([d.device_kind for d in job.devices], seconds, spread)


def _known(device_kind: str) -> DeviceKind | None:
    """What the table has of a device that JAX calls so."""
    try:
        return kind_of(device_kind)
    except ClusterError:
        return None


class Builder:
    """`ran`, `sent`: the measurements. `figures`: seconds and spread of each, [devices, 2]. `memory`: bytes of each
    device, -1 where not known. `failed`: figure -> how, of those that could not be measured."""

    def __init__(
        self,
        job: Job,
        axes: Axes,
        ran: Sequence[Kernel],
        sent: Sequence[Exchange],
        figures: Mapping[str, Floats],
        memory: Sequence[int],
        failed: Mapping[str, str],
    ) -> None:
        self.job, self.axes, self.ran, self.sent, self.figures = job, axes, ran, sent, figures
        self.memory, self.failed = memory, failed
        names = [d.device_kind for d in job.devices]
        self.alike = alike = speed_groups(job, ran, figures)
        # Devices that only memory tells apart are equally fast.
        fits = [KindFit(ran, typical([self._times(i) for i in group])) for group in alike]
        parts = [by_memory(group, memory) for group in alike]
        self.groups = [part for of_speed in parts for part in of_speed]
        self.fits = [fit for fit, of_speed in zip(fits, parts, strict=True) for _ in of_speed]
        several = {names[g[0]] for g in self.groups if sum(names[o[0]] == names[g[0]] for o in self.groups) > 1}
        count: dict[str, int] = {}
        self.names: list[str] = []
        for group in self.groups:
            name = names[group[0]]
            count[name] = count.get(name, 0) + 1
            self.names.append(f"{name}-{count[name]}" if name in several else name)

    def _times(self, device: int) -> dict[str, tuple[float, float]]:
        return {k.key: (float(t), float(s)) for k in self.ran for t, s in [self.figures[k.key][device]]}

    def doubts(self) -> list[Implausible]:
        """The figures that can't be true."""
        doubts: list[Implausible] = []
        for name, fit in zip(self.names, self.fits, strict=True):
            doubts += [*unlikely(name, fit), *unsteady(name, fit.times)]
        beside = {key: rows for key, rows in self.figures.items() if of_contention(key)}
        doubts += unsteady("all devices", {key: (0.0, float(rows[:, 1].max())) for key, rows in beside.items()})
        wires = {e.key: (t, float(self.figures[e.key][:, 1].max())) for e, t in self._waits()}
        doubts += unsteady("all devices", wires)
        for family in dict.fromkeys(e.family for e in self.sent if e.step != BASE):
            entries = [e for e in self.sent if e.family == family]
            times = [wires[e.key][0] for e in entries]
            doubts += falling("all devices", [e.key for e in entries], [(t, 0.0) for t in times])
            if times[-1] <= 0:
                last = entries[-1]
                keys = [e.key for e in self.sent if (e.step, e.axis) == (BASE, last.axis)]
                doubts.append(Implausible(f"{last.key} takes no longer than a program without it", (*keys, last.key)))
        return [*doubts, *lacking(self.failed, self.ran)]

    def unmeasured(self) -> list[str]:
        """The classes of ops that were run and have no curve."""
        return [
            f"{family} in {dtype} on {name} takes no longer than it varies at any size: priced as if not measured"
            for name, fit in zip(self.names, self.fits, strict=True)
            for family, dtype in dict.fromkeys((k.family, k.dtype) for k in self.ran if k.family in OP_CLASSES)
            if not fit.measurable(family, dtype)
        ]

    def _waits(self) -> list[tuple[Exchange, float]]:
        """Seconds of one collective, without the program around it; those that there were."""
        whole = {e.key: float(self.figures[e.key][:, 0].max()) for e in self.sent}
        base = {e.axis: whole[e.key] for e in self.sent if e.step == BASE}
        less = lambda e: 0.0 if e.step == BASE else base.get(e.axis, 0.0)
        return [(e, (whole[e.key] - less(e)) / e.repeats) for e in self.sent]

    def cluster(self) -> Cluster:
        """Raises ProfileError where there is no way to make one of these figures, forced or not."""
        job, kinds = self.job, [self._kind(g) for g in range(len(self.groups))]
        devices: list[DeviceKind] = [kinds[0]] * job.n
        for kind, group in zip(kinds, self.groups, strict=True):
            for i in group:
                devices[i] = kind
        name = " + ".join(f"{len(g)} x {k.name}" for k, g in zip(kinds, self.groups, strict=True))
        nominal = NOMINAL_CPU_LINK if job.devices[0].platform == "cpu" else NOMINAL_INTRA
        bare = Cluster(name, tuple(devices), job.hosts, nominal, None, self.axes)
        collectives, lines = self._collectives(bare)
        network = self._link(lines.get(self._flat, [])) if job.n > 1 else nominal
        inside = [(1.0, float(4 * e.words), t) for e, t in self._waits() if e.step == INSIDE and t > 0]
        intra = self._link(inside) if inside else None if job.n > 1 else nominal
        return Cluster(name, tuple(devices), job.hosts, network, intra, self.axes, collectives, self._told())

    def _kind(self, group: int) -> DeviceKind:
        name, members, fit = self.names[group], self.groups[group], self.fits[group]
        memory, known = min(self.memory[i] for i in members), _known(self.job.devices[members[0]].device_kind)
        if memory <= 0:
            if known is None:
                raise ProfileError(f"{name} does not tell how much memory it has, and is no known device")
            memory = known.memory
        source = f"hapsynth profile, JAX {jax.__version__}, {platform.node()}"
        dtypes = list(dict.fromkeys(k.dtype for k in self.ran))
        kind = fit.kind(name, dtypes, memory, source)
        if kind is None:
            raise ProfileError(self._lacks(name, fit, memory))
        on_cpu = self.job.devices[members[0]].platform == "cpu"
        granularity = DEFAULT_GRANULARITY if on_cpu else GPU_GRANULARITY
        # Contention is not measured everywhere, as where there is one device.
        usual = kind.default_contention if known is None else known.default_contention
        kind = replace(kind, contention=self._contention(members), default_contention=usual, granularity=granularity)
        return replace(kind, contention_delay=self._delay(members[0]))

    def _lacks(self, name: str, fit: KindFit, memory: int) -> str:
        """Why there is no `KindFit.kind`."""
        failures = lacking(self.failed, self.ran, NEEDED)
        if failure := next(failures, None):
            return f"{name} can't be priced: {failure.text}"
        if not any(k.family == STREAM for k in fit.kernels):
            return (
                f"{name} has {nbytes(memory)} of memory, too little for the smallest array that its bandwidth is "
                "measured with: end what else uses it, or give it more"
            )
        return f"{name}: float32 matmuls or memory came out as taking no time; run it again"

    def _contention(self, devices: Sequence[int]) -> float | None:
        """How many times as long the largest matmul takes beside a collective; None where that was not measured."""
        rows = self.figures.get(BESIDE)
        matmul = largest_matmul(self.ran)
        if rows is None or matmul is None:
            return None
        factor = float(np.median(rows[devices, 0] / self.figures[matmul.key][devices, 0]))
        return round(max(factor, 1.0), 3) if np.isfinite(factor) else None

    def _delay(self, device: int) -> float:
        """Seconds that a small collective takes longer beside computing on those that are as fast as a device."""
        small, group = small_gather(self.job, self.sent), next(group for group in self.alike if device in group)
        if small is None or delayed_by(group) not in self.figures:
            return 0.0
        beside, alone = (float(self.figures[key][:, 0].max()) for key in (delayed_by(group), small.key))
        longer = (beside - alone) / small.repeats
        return rounded(longer) if longer > 0 else 0.0

    @property
    def _flat(self) -> str:
        """The axis over all devices."""
        return next((name for name, size in self.axes if size == self.job.n), DEFAULT_AXIS)

    def _collectives(self, bare: Cluster) -> tuple[dict[str, dict[str, Curve]], dict[str, list[Point]]]:
        """The curves by axis and collective, and by axis all points of the rings."""
        waits = [(e, t) for e, t in self._waits() if e.step in COLLECTIVES and t > 0]
        curves: dict[str, dict[str, Curve]] = {}
        lines: dict[str, list[Point]] = {}
        for axes, axis in dict.fromkeys((e.axes, e.axis) for e, _ in waits):
            link = axis_links(bare, axes)[[a for a, _ in axes].index(axis)]
            for step in COLLECTIVES:
                own = [(e, t) for e, t in waits if (e.axes, e.axis, e.step) == (axes, axis, step)]
                points = [(link.wire_bytes(step, e.block), t) for e, t in own]
                curve = smooth(points)
                if curve is not None:
                    start = (0.0, rounded(curve.points[0][1] * _LATENCY))
                    curves.setdefault(axis, {})[step] = Curve((start, *curve.points))
                if STEPS[step].over == "positions" and not (STEPS[step].splits and STEPS[step].joins):
                    # All links of a bare cluster are alike.
                    messages = PRICES[step].algorithms[0].latency(link) / link.latency
                    lines.setdefault(axis, []).extend((messages, a, t) for a, t in points)
        return curves, lines

    def _link(self, points: Points) -> Link:
        if not points:
            raise ProfileError("collectives came out as taking no time at all; run it again")
        link = link_of(points)
        return Link(rounded(link.bandwidth), rounded(link.latency))

    def _told(self) -> dict[str, object]:
        """Place and versions of the measurement, and the figures that no cost uses."""
        spread: dict[str, object] = {}
        dispatch: dict[str, object] = {}
        for name, fit in zip(self.names, self.fits, strict=True):
            largest = {k.family: fit.times[k.key][1] for k in fit.kernels}
            spread[name] = {"bandwidth": round(largest[STREAM], 3), "overhead": round(largest[LAUNCH], 3)}
            dispatch[name] = f"{fit.dispatch * 1e6:.1f} us"
        return {
            "jax": jax.__version__,
            "machines": ", ".join(dict.fromkeys(self.job.machines)),
            "devices": ", ".join(dict.fromkeys(d.device_kind for d in self.job.devices)),
            "when": time.strftime("%Y-%m-%d"),
            "dispatch": dispatch,
            "spread": spread,
        }
