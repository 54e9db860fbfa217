"""Baselines on the devices that suit each best.

Whoever runs data parallelism may leave the slow devices out by hand, so a baseline is also made on those sets of
devices among which the planner chooses (`device_subsets.subclusters`): without the slower kinds, each kind alone, half
of the hosts, a quarter, and so on; not on every set there is. Beside these there is one device, the fastest that holds
all of it.

Each set is made anew: its programs are solved, sized and priced for its devices alone. A set is passed over where the
work alone, shared out ideally, takes as long as the best so far, and a baseline on it where its own tasks do in any
order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hapsynth._quantities import indices
from hapsynth.search.planning.baselines import LABELS, ONE_DEVICE, Baseline, Baselines
from hapsynth.search.planning.device_subsets import Devices, Ranking, subclusters
from hapsynth.search.planning.ideal_work import IdealWorkBound
from hapsynth.search.planning.task import Task
from hapsynth.search.scheduling.list_schedule import least_makespan
from hapsynth.search.scheduling.tasks import tasks_of

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
        self._sets = subclusters(task.cluster, task.costs.speed_of)
        self._on = dict[Devices, Baselines]()
        self._plain = dict[Devices, Mapping[str, Baseline]]()
        self._beside = dict[tuple[Devices, str], Baseline]()
        """With their collectives beside what is computed."""

    def best(self, *, overlap: bool = False, each: bool = True) -> dict[str, Baseline]:
        """By name those on all devices; each again, as its name with the devices, on a set that is better than all
        devices and than the other sets; the best on the fastest kind alone; and one device. `overlap`: in terms of the
        makespan, with collectives beside what is computed. `each`: else a baseline is given on a set only where it
        could be the best of all there, which takes less time."""
        cluster = self.task.cluster
        whole = self._made(tuple(range(cluster.n)), {}, overlap=overlap)
        best = dict(whole)
        bound = self._work.makespan_on if overlap else self._work.on
        sets = {devices: bound(cluster.subset(devices)) for devices in self._sets if len(devices) > 1}
        for devices, least in sorted(sets.items(), key=lambda item: (item[1], item[0])):
            cutoffs = {name: b.cost_s if b.fits else np.inf for name, b in best.items()}
            if not each:
                cutoffs = dict.fromkeys(cutoffs, min(cutoffs.values()))
            if least < max(cutoffs.values()):
                for name, b in self._made(devices, cutoffs, overlap=overlap).items():
                    best[name] = min(best[name], b, key=_merit)
        found = dict(whole)
        found |= {name_on(name, b): b for name, b in best.items() if b is not whole[name]}
        fastest = Ranking(cluster, self.task.costs.speed_of).fastest(1)
        if 1 < len(fastest) < cluster.n:
            alone = self._best_on(fastest, overlap=overlap)
            found[name_on(FAST_KIND, alone)] = alone
        if cluster.n > 1:
            found[ONE_DEVICE] = self._on_one(overlap=overlap)
        return found

    def _made(self, devices: Devices, cutoffs: Mapping[str, float], *, overlap: bool) -> dict[str, Baseline]:
        """All on some devices; with `overlap` those that may take less than their `cutoffs` of seconds."""
        if devices not in self._plain:
            self._plain[devices] = self._make(self._baselines(devices), self.names)
        if not overlap:
            return dict(self._plain[devices])
        made = {name: self._overlapped(devices, name, cutoffs.get(name, np.inf)) for name in self.names}
        return {name: b for name, b in made.items() if b is not None}

    def _overlapped(self, devices: Devices, name: str, cutoff: float) -> Baseline | None:
        """One whose plain program was made; None where that takes `cutoff` seconds in any order."""
        key = devices, name
        if key not in self._beside:
            plain, on = self._plain[devices][name], self._baselines(devices)
            tasks = tasks_of(plain.program, plain.sizes, on.costs, dominated=False)
            if least_makespan(tasks) >= cutoff:
                return None
            self._beside[key] = on.overlapped(plain, tasks)
        return self._beside[key]

    def _best_on(self, devices: Devices, *, overlap: bool) -> Baseline:
        """The best of all on some devices."""
        found = sorted(self._made(devices, {}, overlap=False).items(), key=lambda item: _merit(item[1]))
        if not overlap:
            return found[0][1]
        best: Baseline | None = None
        for name, _ in found:
            cutoff = best.cost_s if best is not None and best.fits else np.inf
            b = self._overlapped(devices, name, cutoff)
            best = min(filter(None, (best, b)), key=_merit)
        assert best is not None
        return best

    def _baselines(self, devices: Devices) -> Baselines:
        if len(devices) == self.task.cluster.n:
            return self.everywhere
        if devices not in self._on:
            self._on[devices] = self.everywhere.on(devices)
        return self._on[devices]

    def _on_one(self, *, overlap: bool) -> Baseline:
        """The fastest device that holds it all; where none does, the fastest. It has nothing to overlap."""
        every = [self._baselines(devices).alone() for devices in self._sets if len(devices) == 1]
        return replace(min(every, key=_merit), overlap=overlap)


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
