"""Plans that use only some of a cluster's devices.

Every device of a planned mesh takes part in every collective and in every op that is not cut, whatever its shares. So
slow devices can cost more than they bring, and so can a slow network: what is left out holds and computes nothing.

Considered are all devices; without the slower kinds, or without any one of them; of each such set the fastest half of
the hosts, and of the positions along a mesh axis, the fastest quarter and so on, and the hosts without those of the
slowest links; and one device of each kind. Of more
than a few kinds (`leaving_out.py`): all; without the slowest one, two, four and so on; without the one that is worst in
something; of all devices the fastest half of the hosts or positions and so on; and one that is best in something. How
many of the slowest kinds are left out is then narrowed down by what the programs found cost.

All devices are planned for first. A set is given up as soon as a bound on it exceeds the best plan so far: first the
work of its ops shared out ideally, then the joint bound. What is left is searched, and the best plan's bounds are
proved.

The joint bound of the whole is the least over all sets, where one that was given up counts with the bound that did it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import numpy as np

from hapsynth._gc import gc_paused
from hapsynth.cluster.cluster import DEFAULT_AXIS, Cluster
from hapsynth.cluster.device_kinds import DeviceKind
from hapsynth.search.formulation.choice_space import Restriction
from hapsynth.search.planning.effort import Effort
from hapsynth.search.planning.ideal_work import IdealWorkBound
from hapsynth.search.planning.planner import InfeasibleError, Planner
from hapsynth.search.planning.task import Task
from hapsynth.search.result import SETTLED, Progress, Result, proven
from hapsynth.search.sizing.leaving_out import FEW, between, ladder

_T = TypeVar("_T")

_NOTHING_CUT = Restriction(allowed=lambda value, dim: False)
"""The restriction for a single device."""
_WORTH = 1.03
"""A set of devices is fully planned for only if a first look finds a makespan within this factor of the best."""
_LOOKING = 0.6
"""The fraction of the remaining time budget for a first look at one set with overlap; the rest is for other sets and
for planning on the best."""
_LEAST_LEFT = 0.2
"""The fraction of a time budget that must be left to plan for another set."""
_CONCLUDING = 0.15
"""The fraction of a time budget for the bounds of the best plan."""
_ONE_AXIS = 0.15
"""The fraction of a time budget for a first plan on one mesh axis."""
Devices = tuple[int, ...]
"""Positions in mesh order, rising."""
SpeedOf = Callable[[DeviceKind], float]


def _by_float32(kind: DeviceKind) -> float:
    return kind.rate("float32")


def subclusters(cluster: Cluster, speed_of: SpeedOf = _by_float32) -> list[Devices]:
    """The sets of devices worth a look, the whole cluster excepted."""
    ranking = Ranking(cluster, speed_of)
    kinds, rank, everyone = ranking.kinds, ranking.rank, ranking.fastest(len(ranking.kinds))
    speed = [speed_of(kinds[k]) for k in rank]
    if len(kinds) <= FEW:
        sets = [everyone, *(ranking.fastest(count) for count in range(1, len(kinds)))]
        sets += [ranking.without(k) for k in range(len(kinds))]
        divided, alone = sets, list(range(len(kinds)))
    else:
        most = lambda of: max(range(len(kinds)), key=lambda k: of(kinds[k]))
        slow = dict.fromkeys((len(kinds) - 1, most(lambda k: -k.bandwidth), most(lambda k: k.overhead)))
        sets = [everyone, *map(ranking.fastest, ladder(len(kinds))), *map(ranking.without, slow)]
        divided = [everyone]
        alone = list(dict.fromkeys((0, most(lambda k: k.bandwidth), most(lambda k: -k.overhead))))
    found: dict[Devices, None] = {}
    for devices in filter(None, sets):
        found[devices] = None
        for groups in _groupings(cluster, devices) if devices in divided else ():
            ranked = sorted(groups, key=lambda g: (-sum(speed[d] for d in g), -_uplink(cluster, g), g))
            while len(ranked) > 1:
                ranked = ranked[: (len(ranked) + 1) // 2]
                found[tuple(sorted(d for group in ranked for d in group))] = None
        uplinks = sorted({_uplink(cluster, (d,)) for d in devices}) if devices in divided else []
        for least in uplinks[1:FEW]:
            found[tuple(d for d in devices if _uplink(cluster, (d,)) >= least)] = None
    found.update({(rank.index(k),): None for k in alone})
    found.pop(everyone)
    return list(found)


class Ranking:
    """The kinds of a cluster's devices, fastest first. `rank`: of each device, its kind."""

    def __init__(self, cluster: Cluster, speed_of: SpeedOf = _by_float32) -> None:
        self.kinds = sorted(cluster.kinds, key=lambda k: -speed_of(k))
        number = {kind: k for k, kind in enumerate(self.kinds)}
        self.rank = [number[kind] for kind in cluster.devices]

    def fastest(self, count: int) -> Devices:
        """The devices of the `count` fastest kinds."""
        return tuple(d for d, k in enumerate(self.rank) if k < count)

    def without(self, kind: int) -> Devices:
        """All devices but those of a kind."""
        return tuple(d for d, k in enumerate(self.rank) if k != kind)


def _uplink(cluster: Cluster, devices: Devices) -> float:
    """The least bandwidth, in bytes per second, from a host of `devices` to the others."""
    return min(cluster.nic(cluster.hosts[d]).bandwidth for d in devices)


def _groupings(cluster: Cluster, devices: Devices) -> Iterator[list[Devices]]:
    """Some devices by host, and by their positions along each mesh axis."""
    keys = [cluster.hosts]
    stride = cluster.n
    for _, size in cluster.axes:
        stride //= size
        keys.append(tuple(d // stride % size for d in range(cluster.n)))
    for key in keys:
        groups: dict[int, list[int]] = {}
        for d in devices:
            groups.setdefault(key[d], []).append(d)
        yield [tuple(group) for group in groups.values()]


@dataclass
class _Entry:
    """One set of devices. `bound`: on all programs for it; `planner`: None until it deserves one."""

    devices: Devices
    cluster: Cluster
    bound: float = 0.0
    planner: Planner | None = None
    searched: float = 0.0
    """The cutoff that its programs had to stay below."""


class ClusterPlanner:
    """One planning task, for all of a cluster's devices or those that are worth it. All are used if `leave_out` is
    false or layouts or ratios are asked for (`PlanningOptions`)."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def first_excess(self) -> float:
        """The largest ratio of bytes held to bytes available on a device, of the first program on all devices; `run`
        continues from it."""
        self._whole.first_cost()
        return self._whole.excess

    def no_time(self) -> bool:
        """Whether the time budget leaves less than a problem on all devices takes to build."""
        return self._whole.clock.no_time()

    @gc_paused()
    def run(self) -> Result:
        """Plan; InfeasibleError and Ctrl-C as with `Planner.run`. The time budget counts from `first_excess`, if that
        was called."""
        options = self.task.options
        return self._run() if not options.overlap or options.least_speedup <= 1.0 else self._where_it_gains()

    def _where_it_gains(self) -> Result:
        """The plan with overlap if that makes a step `least_speedup` times as fast, else the plan without."""
        task, clock = self.task, self._whole.clock
        plain = ClusterPlanner(task.on(task.cluster, overlap=False, time_budget_s=clock.allotted(0.5))).run()
        if plain.interrupted or clock.no_time():
            return plain
        cutoff = plain.cost_s / task.options.least_speedup
        try:
            found = self._run(cutoff)
        except InfeasibleError:
            return plain  # there was no time left to find a program that fits once more
        except KeyboardInterrupt:
            return replace(plain, interrupted=True)
        return found if found.cost_s <= cutoff else replace(plain, interrupted=found.interrupted)

    def _run(self, cutoff: float = np.inf) -> Result:
        """Plan. `cutoff`: no makespan above it is sought."""
        options, n = self.task.options, self.task.cluster.n
        if options.devices is not None:
            result = self._whole.run(cutoff)
            return result if len(options.devices) == n else _spread(result, options.devices, self.task)
        asked = options.restriction is not None or options.fixed_ratios is not None
        if not options.leave_out or asked or n == 1:
            return self._whole.run(cutoff)
        if options.overlap:
            return _OverlappedSubsets(self.task, self._whole, cutoff).run()
        return _SubsetSearch(self.task, self._whole).run()

    @cached_property
    def _whole(self) -> Planner:
        """The planner for all devices that may be used."""
        task, devices = self.task, self.task.options.devices
        return Planner(task if devices is None else task.on(task.cluster.subset(devices)))


def _spread(result: Result, devices: Devices, task: Task) -> Result:
    """The result for some of a task's devices as one for its cluster."""
    held = np.zeros(task.cluster.n)
    held[list(devices)] = result.memory_bytes
    return replace(
        result,
        memory_bytes=tuple(map(float, held)),
        memory_limit_bytes=task.memory_budget.limits,
        devices=devices,
    )


def _of_all_sets(
    result: Result,
    devices: Devices,
    task: Task,
    proved: tuple[float, float],
    bounds: Mapping[Devices, float],
    efforts: Sequence[Effort],
    with_all_s: float | None,
) -> Result:
    """The best result, for some `devices`, as that of a search through sets of them. `proved`: the lower bound and the
    joint one; `with_all_s`: None where all devices take part."""
    lower_bound, joint = proved
    effort = Effort.together(efforts)
    return replace(
        _spread(result, devices, task),
        lower_bound_s=lower_bound,
        joint_lower_bound_s=joint,
        bounds=bounds,
        status=proven(result.cost_s, lower_bound, joint, result.unpriced_primitives),
        expanded=effort.expanded,
        sweeps=effort.sweeps,
        states=effort.states,
        timings_s=effort.timings_s(),
        devices=None if with_all_s is None else devices,
        with_all_s=with_all_s,
    )


class _SetsOfDevices:
    """A search through sets of devices, `whole` first: the planner of them all."""

    def __init__(self, task: Task, whole: Planner) -> None:
        self.task, self.cluster, self.whole = task, task.cluster, whole
        self._least = IdealWorkBound(whole.task.choices, whole.task.costs)
        self._planners = [whole]
        self._interrupted = False
        self._kept = 0.0
        """Seconds of a time budget to be left for the best plan."""

    def _planner(self, cluster: Cluster, seconds: float, progress: Callable[[Progress], None] | None = None) -> Planner:
        """A planner for some of the devices, with a time budget of `seconds`."""
        left = None if self.task.options.time_budget_s is None else max(0.05, seconds)
        # One device has nothing to cut.
        restriction = _NOTHING_CUT if cluster.n == 1 else None
        options = {"time_budget_s": left, "restriction": restriction, "progress": progress}
        self._planners.append(planner := Planner(self.whole.task.on(cluster, **options)))
        return planner

    def _attempt(self, search: Callable[[], _T], otherwise: _T) -> _T:
        """The result of `search`, or `otherwise` where Ctrl-C ended it."""
        try:
            return otherwise if self._interrupted else search()
        except KeyboardInterrupt:
            self._interrupted = True
            return otherwise

    def _left(self) -> float:
        """Seconds of the time budget; inf without one."""
        budget = self.task.options.time_budget_s
        return np.inf if budget is None else budget - self.whole.clock.elapsed()

    def _first_made_to_fit(self, planners: Iterable[Planner]) -> Planner | None:
        """Where no set has a program that fits: the first planner that finds one, as far as there is time."""
        for planner in planners:
            if self._late():
                return None
            if np.isfinite(self._attempt(planner.shrink, np.inf)):
                return planner
        return None

    def _late(self) -> bool:
        """Whether no other set is to be looked at."""
        self._interrupted |= any(planner.clock.interrupted for planner in self._planners)
        return self._interrupted or self._left() <= self._kept


class _OverlappedSubsets(_SetsOfDevices):
    """For the least makespan. A set is looked at briefly where the work of its ops alone takes less than the best
    makespan so far, and planned for in earnest where what came up then is about as good as the best. `cutoff`: a
    makespan that none is sought above."""

    def __init__(self, task: Task, whole: Planner, cutoff: float) -> None:
        super().__init__(task, whole)
        self.cutoff = cutoff
        self._kept = _LEAST_LEFT * (task.options.time_budget_s or 0.0)

    def run(self) -> Result:
        """As `ClusterPlanner.run`."""
        cluster, whole = self.cluster, self.whole
        everyone = tuple(range(cluster.n))
        bounds = {
            devices: self._least.makespan_on(cluster.subset(devices))
            for devices in subclusters(cluster, self.task.costs.speed_of)
        }
        looks = [self._look(everyone, whole, np.inf)]
        for devices, bound in sorted(bounds.items(), key=lambda item: (item[1], item[0])):
            known_s = min(looks).makespan_s
            if bound < known_s * (1 - SETTLED / 2) and not self._late():
                look = self._attempt(partial(self._look_at, devices, known_s), None)
                looks += [look] if look else []
        if not np.isfinite(min(looks).makespan_s):
            squeezed = self._first_made_to_fit(look.planner for look in looks[1:])
            for n, look in enumerate(looks):
                if squeezed and look.planner is squeezed:
                    as_sum = look._replace(makespan_s=squeezed.cost)
                    looks[n] = self._attempt(partial(self._makespans, look.devices, squeezed), as_sum)
        if not np.isfinite(min(looks).makespan_s):
            # No set fits. What is told is what all devices lack, not the first in order.
            whole.clock.interrupted |= self._interrupted
            return whole.conclude(self.cutoff)
        best: Result | None = None
        chosen, with_all = everyone, looks[0].makespan_s
        for look in sorted(looks):
            enough = min(best.cost_s * (1 - SETTLED / 2) if best else np.inf, self.cutoff)
            look.planner.clock.allow(self._left())
            late = self._late()
            look.planner.clock.interrupted |= self._interrupted
            if best and (
                late or look.planner.makespan_bound >= enough or not look.comes_near(best.cost_s * _WORTH, enough)
            ):
                continue
            found = look.planner.conclude(enough)
            if look.planner is whole:
                with_all = found.cost_s
            if best is None or found.cost_s < enough:
                best, chosen = found, look.devices
        assert best is not None
        bounds[chosen] = best.joint_lower_bound_s
        for look in looks:
            if look.devices != chosen:
                bounds[look.devices] = look.planner.joint_makespan_bound()
        bounds[everyone] = min(bounds[everyone], with_all)
        joint = min(*bounds.values(), best.cost_s)
        efforts = [planner.effort for planner in self._planners]
        left_out = None if chosen == everyone else with_all
        self._late()
        found = _of_all_sets(best, chosen, self.task, (best.lower_bound_s, joint), bounds, efforts, left_out)
        return replace(found, interrupted=self._interrupted)

    def _look_at(self, devices: Devices, known_s: float) -> _Look:
        return self._look(devices, self._planner(self.cluster.subset(devices), self._left()), known_s)

    def _look(self, devices: Devices, planner: Planner, known_s: float) -> _Look:
        """A first look at a set. `known_s`: the best makespan found on other sets, in seconds."""
        if not np.isfinite(planner.explore()) and planner is self.whole:
            planner.shrink()
        return self._makespans(devices, planner, known_s)

    def _makespans(self, devices: Devices, planner: Planner, known_s: float = np.inf) -> _Look:
        """The look at a set from the makespans of its programs, within a part of the remaining time."""
        with planner.clock.within(_LOOKING):
            return _Look(planner.explore_makespans(known_s), devices, planner)


class _Look(NamedTuple):
    """The result of a first look at a set of devices: the best makespan, inf if no program fits."""

    makespan_s: float
    devices: Devices
    planner: Planner

    def comes_near(self, seconds: float, cutoff: float) -> bool:
        """Whether some program takes no longer than that, as far as it is worth looking on: all may take `cutoff`."""
        return self.makespan_s <= seconds or self.planner.explore_makespans_on(seconds, cutoff) <= seconds


class _SubsetSearch(_SetsOfDevices):
    """The search for the plan with the least sum over its instructions."""

    def __init__(self, task: Task, whole: Planner) -> None:
        super().__init__(task, whole)
        everyone = tuple(range(self.cluster.n))
        self._all = self._best = _Entry(everyone, self.cluster, self._least.on(self.cluster), whole)
        entries = map(self._entry, subclusters(self.cluster, self.task.costs.speed_of))
        self._entries = [self._all, *sorted(entries, key=lambda e: (e.bound, e.devices))]
        self._first_cost = np.inf
        """The cost of the first program on all devices, until these are fully planned for; then inf."""

    def run(self) -> Result:
        """As `ClusterPlanner.run`."""
        whole, budget = self.whole, self.task.options.time_budget_s
        # Before all devices are planned for in earnest, as a better plan on some of them makes that short.
        self._first_cost = first_cost = self._attempt(whole.first_cost, np.inf)
        several_axes = len(whole.task.costs.axes) > 1 and not self._late()
        all_first = several_axes and self._attempt(self._devices_on_one_axis, 0) == self.cluster.n
        if all_first:
            self._attempt(whole.explore, np.inf)
        if budget is not None:
            # The last bounds take two more problems.
            self._kept = min(max(2 * whole.effort.problems_s, _CONCLUDING * budget), budget / 2)
        self._consider_all()
        if self._best is not self._all:
            whole.clock.allow(self._left() - self._kept)
            bound = self._attempt(lambda: whole.joint_bound(self._cost()), 0.0)
            self._all.bound = max(self._all.bound, bound)
        if self._all.bound < self._cost() and not all_first:
            self._attempt(lambda: whole.explore(np.inf if self._best is self._all else self._cost()), np.inf)
            self._best = self._all if whole.cost < self._cost() else self._best
        self._first_cost = np.inf
        self._consider_all()
        self._narrow_down()
        if not np.isfinite(self._cost()):
            hopeful = {e.planner: e for e in self._entries if e.planner and np.isfinite(e.bound)}
            if found := self._first_made_to_fit(hopeful):
                self._best = hopeful[found]
        return self._concluded(first_cost)

    def _devices_on_one_axis(self) -> int:
        """How many devices the plan for one axis over all of them uses, which is soon known: where all, several axes
        are likely to use all too, and what they come to then is a cutoff for every other set."""
        task, cluster = self.task, self.cluster
        measured = {axis: curves for axis, curves in cluster.collectives.items() if axis == DEFAULT_AXIS}
        budget = task.options.time_budget_s
        left = None if budget is None else max(0.05, min(self._left(), _ONE_AXIS * budget))
        flat = replace(cluster, axes=(), collectives=measured)
        try:
            result = ClusterPlanner(task.on(flat, time_budget_s=left, progress=None, joint_gap=None)).run()
        except InfeasibleError:
            return 0
        if result.interrupted:
            # It was meant for the whole search.
            raise KeyboardInterrupt
        return self.cluster.n if result.devices is None else len(result.devices)

    def _entry(self, devices: Devices) -> _Entry:
        cluster = self.cluster.subset(devices)
        return _Entry(devices, cluster, self._least.on(cluster))

    def _consider_all(self) -> None:
        """Search the sets that may be better than the best so far."""
        full = self.whole.full_ops()
        for entry in self._entries[1:]:
            if entry.planner and entry.planner.cost < self._cutoff():
                self._best = entry
            if entry.searched >= self._cutoff() or entry.bound >= self._cutoff() or self._late():
                continue
            planner = entry.planner = entry.planner or self._attempt(partial(self._planner_of, entry), None)
            if planner is None:
                continue
            held = self._attempt(lambda p=planner: p.bytes_at(full), 0.0)
            if held > planner.limit:
                entry.bound = np.inf
                continue
            entry.bound = max(entry.bound, self._attempt(lambda p=planner: p.joint_bound(self._cutoff()), 0.0))
            if entry.bound < self._cutoff() and not self._late():
                entry.searched = self._cutoff()
                if self._attempt(lambda p=planner: p.explore(self._cutoff()), np.inf) < self._cutoff():
                    self._best = entry

    def _narrow_down(self) -> None:
        """Of many kinds: how many of the slowest to leave out, between the numbers that were looked at."""
        ranking = Ranking(self.cluster, self.task.costs.speed_of)
        count = len(ranking.kinds)
        tried = {ranking.fastest(number): number for number in ladder(count)} if count > FEW else {}
        while self._best.devices in tried and not self._late():
            more = between(tried.values(), tried[self._best.devices])
            if not more:
                return
            for number in more:
                devices = ranking.fastest(number)
                tried[devices] = number
                if all(entry.devices != devices for entry in self._entries):
                    self._entries.append(self._entry(devices))
            self._consider_all()

    def _planner_of(self, entry: _Entry) -> Planner:
        return self._planner(entry.cluster, self._left() - self._kept, self._relay(entry))

    def _relay(self, entry: _Entry) -> Callable[[Progress], None] | None:
        """A callback that reports one set's progress as that of the whole search."""
        tell = self.task.options.progress
        if tell is None:
            return None

        def relay(p: Progress) -> None:
            stage = f"{len(entry.devices)} of {self.cluster.n} devices: {p.stage}"
            seconds = self.whole.clock.elapsed()
            others = sum(e.planner.effort.expanded for e in self._entries if e.planner and e is not entry)
            best = min(p.cost_s, self._cost())
            tell(Progress(stage, seconds, best, min(p.lower_bound_s, best), p.expanded + others))

        return relay

    def _cost(self) -> float:
        return self._best.planner.cost if self._best.planner else np.inf

    def _cutoff(self) -> float:
        """The cost below which a plan on fewer devices is worth having."""
        return min(self._cost(), self._first_cost) * (1 - SETTLED / 2)

    def _with_all(self, first_cost: float) -> float:
        """Seconds of the best program found in which every device takes part; inf where none fits."""
        if self._all.bound >= self._cost():
            return min(self.whole.cost, first_cost)
        return self.whole.cost if np.isfinite(self.whole.cost) else self.whole.given_up

    def _seek_closer(self, cost: float) -> None:
        """Tighten the joint bounds of all sets but the best towards `cost`, the best plan's, as asked for."""
        for entry in self._entries:
            if entry is not self._best and entry.bound < cost and not self._late():
                closer = self._attempt(partial(self._joint_bound_below, cost, entry), 0.0)
                entry.bound = max(entry.bound, closer)

    def _joint_bound_below(self, cost: float, entry: _Entry) -> float:
        planner = entry.planner = entry.planner or self._planner_of(entry)
        return planner.joint_bound_below(cost)

    def _concluded(self, first_cost: float) -> Result:
        best, planner = self._best, self._best.planner
        assert planner is not None
        self._late()
        planner.clock.interrupted |= self._interrupted
        planner.clock.allow(self._left())
        result = planner.conclude()
        self._interrupted |= result.interrupted
        cost = result.cost_s
        if self.task.options.joint_gap is not None:
            self._seek_closer(cost)
        # Where there was no time for the joint bound, that of the work alone.
        own = min(max(result.joint_lower_bound_s, best.bound), cost)
        bounds = {e.devices: own if e is best else e.bound for e in self._entries}
        joint, lower_bound = min(bounds.values()), max(result.lower_bound_s, own)
        efforts = [planner.effort for planner in self._planners]
        with_all = None if planner is self.whole else self._with_all(first_cost)
        found = _of_all_sets(result, best.devices, self.task, (lower_bound, joint), bounds, efforts, with_all)
        return replace(found, interrupted=self._interrupted)
