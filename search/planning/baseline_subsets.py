"""Baselines on the devices that suit each best.

Whoever runs data parallelism may leave the slow devices out by hand, so a baseline is also made on those sets of
devices among which the planner chooses (`device_subsets.subclusters`): without the slower kinds, each kind alone, half
of the hosts, a quarter, and so on; not on every set there is. Beside these there is one device, the fastest that holds
all of it.

Each set is made anew: its programs are solved, sized and priced for its devices alone. One is passed over where the
work alone, shared out ideally, takes it longer than the best that each baseline has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hapsynth._quantities import indices
from hapsynth.search.planning.baselines import LABELS, ONE_DEVICE, Baseline, Baselines
from hapsynth.search.planning.device_subsets import Devices, Ranking, subclusters
from hapsynth.search.planning.ideal_work import IdealWorkBound
from hapsynth.search.planning.task import Task

FAST_KIND = "fast kind"
"""Whichever baseline is best on the devices of the fastest kind."""
_ON = ", on "
Make = Callable[[Baselines, Sequence[str]], Mapping[str, Baseline]]


class BaselinesOnSubsets:
    """The baselines of one task on all of its devices and on sets of them.

    `make`: some of those `names`, or all that there are for the graph, on the devices that a `Baselines` is for.
    """

    def __init__(self, task: Task, make: Make = Baselines.all, names: Sequence[str] = ()) -> None:
        self.task, self.everywhere, self._make = task, Baselines(task), make
        self.names = tuple(names) or self.everywhere.names
        self._work = IdealWorkBound(task.choices, task.costs)
        self._sets = subclusters(task.cluster)
        self._on = dict[Devices, Baselines]()
        self._found = dict[tuple[Devices, bool], dict[str, Baseline]]()

    def best(self, *, overlap: bool = False) -> dict[str, Baseline]:
        """By name those on all devices; each again, as its name with the devices, on a set that is better than all
        devices and than the other sets, where there is one; the best on the fastest kind alone; and one device.
        `overlap`: in terms of the makespan, with collectives beside what is computed."""
        cluster = self.task.cluster
        whole = self._made(tuple(range(cluster.n)), self.names, overlap=overlap)
        best = dict(whole)
        bound = self._work.makespan_on if overlap else self._work.on
        sets = {devices: bound(cluster.subset(devices)) for devices in self._sets if len(devices) > 1}
        for devices, least in sorted(sets.items(), key=lambda item: (item[1], item[0])):
            hopeful = [name for name, b in best.items() if least < b.cost_s or not b.fits]
            for name, b in self._made(devices, hopeful, overlap=overlap).items():
                best[name] = min(best[name], b, key=_merit)
        found = dict(whole)
        found |= {name_on(name, b): b for name, b in best.items() if b is not whole[name]}
        fastest = Ranking(cluster).fastest(1)
        if 1 < len(fastest) < cluster.n:
            alone = min(self._made(fastest, self.names, overlap=overlap).values(), key=_merit)
            found[name_on(FAST_KIND, alone)] = alone
        if cluster.n > 1:
            found[ONE_DEVICE] = self._on_one(overlap=overlap)
        return found

    def _made(self, devices: Devices, names: Sequence[str], *, overlap: bool) -> dict[str, Baseline]:
        found = self._found.setdefault((devices, overlap), {})
        missing = [name for name in names if name not in found]
        if missing and overlap:
            on = self._baselines(devices)
            plain = self._made(devices, missing, overlap=False)
            found |= {name: on.overlapped(b) for name, b in plain.items()}
        elif missing:
            found |= self._make(self._baselines(devices), missing)
        return {name: found[name] for name in names}

    def _baselines(self, devices: Devices) -> Baselines:
        if len(devices) == self.task.cluster.n:
            return self.everywhere
        if devices not in self._on:
            self._on[devices] = self.everywhere.on(devices)
        return self._on[devices]

    def _on_one(self, *, overlap: bool) -> Baseline:
        """The fastest device that holds it all; where none does, the fastest."""
        every = [self._baselines(devices) for devices in self._sets if len(devices) == 1]
        return min((on.overlapped(on.alone()) if overlap else on.alone() for on in every), key=_merit)


def name_on(name: str, baseline: Baseline) -> str:
    """The name of a baseline on some devices."""
    assert baseline.devices is not None
    return f"{name}{_ON}{indices(baseline.devices)}"


def label(name: str) -> str:
    """A name, with devices or without, as a report says it."""
    plain, on, devices = name.partition(_ON)
    return LABELS.get(plain, plain) + on + devices


def _merit(baseline: Baseline) -> tuple[bool, float]:
    """The less the better: whether it does not fit, then what it takes."""
    return not baseline.fits, baseline.cost_s
