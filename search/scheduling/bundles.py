"""The choice of bundles: collectives are joined where that saves latency and waiting for the last of them costs
nothing.

Two neighbours among the collectives of one family, in their order, go together or apart, and the simulated makespan
decides, not their size (GradientFlow's lazy all-reduce, arXiv 1902.06855, takes all that wait until there are enough
bytes). Of two that take as long the one that keeps the link busy for less time is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hapsynth.search.scheduling.group_testing import improving
from hapsynth.search.scheduling.tasks import Machine, TaskGraph, Transfer, nearest_order
from hapsynth.search.scheduling.timeline import Simulation, Timeline, never, simulate
from hapsynth.search.scheduling.waits import waits

TRIALS, MORE_TRIALS = 16, 256
"""At most so many simulations to choose a timeline's bundles, and those of one that is refined: only so are ViT's last
sends on `paper64` bundled (667.0 ms for 672.2)."""
_CUTS, _CUT_AT_ONCE, _ENDS = 3, 8, 4
"""Bundles that are cut, one after the other; of how many each time, and at how many places."""
_SAME = 1e-9
"""The relative difference up to which makespans count as equal."""


@dataclass(frozen=True, eq=False)
class Apart:
    """A timeline's `tasks` before collectives were joined. `bundles`: task of the timeline -> the collectives joined in
    it. `place`, `begun` [tasks]: the place in the order, and the start in seconds, of the timeline's task that each is
    in."""

    tasks: TaskGraph
    bundles: dict[int, list[int]]
    place: list[int]
    begun: list[float]

    @classmethod
    def of(cls, timeline: Timeline) -> Apart:
        tasks, whole = timeline.tasks, timeline.tasks.unbundled
        if whole is None:
            whole, parts = tasks, [[task] for task in range(len(tasks.machine))]
        else:
            task_of = {at: task for task, places in enumerate(whole.instructions) for at in places}
            parts = [sorted({task_of[at] for at in places}) for places in tasks.instructions]
        place, begun = [0] * len(whole.machine), [0.0] * len(whole.machine)
        started = timeline.start.max(axis=1, initial=0.0).tolist()
        for n, task in enumerate(timeline.order):
            for part in parts[task]:
                place[part], begun[part] = n, started[task]
        bundles = {
            task: parts[task] for task in timeline.order if tasks.machine[task] is Machine.LINK and len(parts[task]) > 1
        }
        return cls(whole, bundles, place, begun)

    @cached_property
    def order(self) -> list[int]:
        """The tasks in the order of the timeline."""
        return sorted(range(len(self.place)), key=lambda task: (self.place[task], task))


def bundled(timeline: Timeline) -> Timeline:
    """A timeline in which those collectives go together that wait at once for the link, where that is better."""
    neighbours = Neighbours(timeline)
    together = neighbours.waiting()
    found = neighbours.tried(together)
    if found is None or not found.is_better_than(Trial.of(timeline)):
        return timeline
    return neighbours.simulated(together)


def rebundled(timeline: Timeline, *, trials: int = TRIALS, stopped: Callable[[], bool] = never) -> Timeline:
    """A timeline with more collectives together, where that is better: all neighbours, else half of them, and so on,
    until it is `stopped`."""
    neighbours, best = Neighbours(timeline), Trial.of(timeline)

    def is_better(together: set[int]) -> bool:
        nonlocal best
        found = None if stopped() else neighbours.tried(together)
        if found is None or not found.is_better_than(best):
            return False
        best = found
        return True

    taken = improving(len(neighbours.pairs), is_better, trials)
    return neighbours.simulated(taken) if taken else timeline


def cut(
    timeline: Timeline, scheduled: Callable[[TaskGraph], Timeline], stopped: Callable[[], bool] = never
) -> Timeline:
    """A timeline in which bundles that computing waits for are cut in two, what is needed first before the rest, where
    that is better: the rest next to it, or wherever it goes as it is `scheduled`; the best until it is `stopped`."""
    best = timeline
    for _ in range(_CUTS):
        better = best
        for found in _cuts(best):
            if stopped():
                return better
            for other in (found, scheduled(found.tasks)):
                better = other if Trial.of(other).is_better_than(Trial.of(better)) else better
        if better is best:
            break
        best = better
    return best


def _cuts(timeline: Timeline) -> Iterator[Timeline]:
    """With one bundle cut, of those that are waited for longest."""
    apart = Apart.of(timeline)
    waited = waits(timeline)
    longest = sorted((task for task in apart.bundles if task in waited), key=lambda task: -float(waited[task].max()))
    for task in longest[:_CUT_AT_ONCE]:
        needed = [(_needed_at(apart.tasks, part, apart.place), part) for part in apart.bundles[task]]
        needed.sort()
        ends = [n for n in range(1, len(needed)) if needed[n][0] > needed[n - 1][0]]
        for end in ends[:: max(1, -(-len(ends) // _ENDS))]:
            mine = [part for _, part in needed]
            others = [bundle for other, bundle in apart.bundles.items() if other != task]
            found = apart.tasks.joined(apart.order, [*others, mine[:end], mine[end:]])
            if found is not None:
                yield simulate(found, range(len(found.machine)))


def _needed_at(tasks: TaskGraph, task: int, place: Sequence[int]) -> tuple[int, int]:
    """The places, in the order, of the first task that needs a collective, and of the last task that it needs."""
    first, waiting = len(place), [task]
    while waiting:
        for user in tasks.users[waiting.pop()]:
            if tasks.machine[user] is Machine.LOCAL:
                waiting.append(user)
            else:
                first = min(first, place[user])
    return first, max((place[maker] for maker in tasks.makers[task]), default=-1)


class Trial(NamedTuple):
    """The makespan of a timeline and the total seconds in which its link sends, by which timelines are compared."""

    makespan_s: float
    sending_s: float

    @classmethod
    def of(cls, timeline: Timeline) -> Trial:
        tasks = timeline.tasks
        each = zip(tasks.machine, tasks.longest, strict=True)
        return cls(timeline.makespan_s, sum(seconds for machine, seconds in each if machine is Machine.LINK))

    def is_better_than(self, other: Trial) -> bool:
        if self.makespan_s < other.makespan_s * (1 - _SAME):
            return True
        longer = self.makespan_s > other.makespan_s * (1 + _SAME)
        return not longer and self.sending_s < other.sending_s * (1 - _SAME)


class _Sent(NamedTuple):
    """The last collective sent, with those bundled with it."""

    task: int
    begun: float
    ended: float


class Neighbours:
    """The pairs of collectives of one family that are neighbours in a timeline's order (`pairs`)."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.tasks = timeline, timeline.tasks
        last: dict[Hashable, int] = {}
        self.pairs: list[tuple[int, int]] = []
        for task in timeline.order:
            transfer = self.tasks.transfers.get(task)
            if transfer is None or transfer.alone:
                continue
            if transfer.family in last:
                self.pairs.append((last[transfer.family], task))
            last[transfer.family] = task

    def waiting(self) -> set[int]:
        """Pairs of which the second waits for the link as the first starts."""
        tasks, end = self.tasks, self.timeline.end
        number = {pair: n for n, pair in enumerate(self.pairs)}
        found: set[int] = set()
        last = _Sent(-1, 0.0, 0.0)
        for task in self.timeline.order:
            if tasks.machine[task] is Machine.EVERYTHING:
                last = _Sent(-1, 0.0, float(end[task].max()))
            if tasks.machine[task] is not Machine.LINK:
                continue
            ready = max((float(end[m].max()) for m in tasks.makers[task]), default=0.0)
            pair = number.get((last.task, task))
            if pair is not None and ready <= last.begun:
                found.add(pair)
                saved = tasks.transfers[task].latency_s
                last = _Sent(task, last.begun, last.ended + tasks.longest[task] - saved)
            else:
                begun = max(last.ended, ready)
                last = _Sent(task, begun, begun + tasks.longest[task])
        return found

    def simulated(self, together: set[int]) -> Timeline:
        """The timeline with these pairs together, which is one (`tried`)."""
        tasks = self.tasks.joined(self.timeline.order, [bundle for bundle, _ in self.bundles(together)])
        assert tasks is not None, "pairs that can be together"
        return simulate(tasks, range(len(tasks.machine)))

    def tried(self, together: set[int]) -> Trial | None:
        """The makespan and sending time with these pairs joined; None where none are, or they cannot be. It does
        without the joined `TaskGraph`, which takes longer to make."""
        bundles = self.bundles(together)
        if not bundles:
            return None
        plain, makers = self._simulation, self.tasks.makers
        users, missing, seconds = [*plain.users], [*plain.missing], [[*each] for each in plain.seconds]
        delay = None if plain.delay is None else [*plain.delay]
        first: dict[int, int] = {}
        for bundle, transfer in bundles:
            one = bundle[0]
            first.update(dict.fromkeys(bundle[1:], one))
            users[one] = [user for task in bundle for user in plain.users[task]]
            missing[one] = sum(plain.missing[task] for task in bundle)
            for each in seconds:
                each[one] = transfer.seconds
            if delay is not None:
                delay[one] = self.tasks.late_by(transfer.exchanges(self.tasks.lowering))
        for one in {first.get(maker, maker) for task in first for maker in makers[task]}:
            users[one] = [first.get(user, user) for user in users[one]]
        order = nearest_order([task for task in self.timeline.order if task not in first], users, missing)
        if order is None:
            return None
        _, end = replace(plain, seconds=seconds, users=users, missing=missing, delay=delay).run(order)
        machine = plain.machine
        sending = sum([max(each[task] for each in seconds) for task in order if machine[task] is Machine.LINK])
        return Trial(max(max(each) for each in end), sending)

    @cached_property
    def _simulation(self) -> Simulation:
        return Simulation.of(self.tasks)

    def bundles(self, together: set[int]) -> list[tuple[list[int], Transfer]]:
        """The bundles that joined pairs make, each filled as far as it has room, with their transfers."""
        most, transfers = self.tasks.lowering.bundle_bytes, self.tasks.transfers
        of: dict[int, list[int]] = {}
        held: dict[int, Transfer] = {}
        for n in sorted(together):
            one, other = self.pairs[n]
            bundle = of.get(one, [one])
            before, more = held.get(bundle[0], transfers[one]), transfers[other]
            if before.takes(more, most):
                bundle.append(other)
                of[one] = of[other] = bundle
                held[bundle[0]] = before.beside(more)
        return [(bundle, held[first]) for first, bundle in of.items() if bundle[0] == first]
