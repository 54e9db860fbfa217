"""Orders of tasks and their bundles: list schedules by several priorities, each improved forward and backward, some of
which bundle as they send, and a bound on all orders.

A list schedule starts, whenever a machine is free, the task of highest priority that can start (Graham 1966). No one
priority suits all programs. By the longest path to the end, the chain of a backward pass goes first, and the gradients
of weights wait, with their collectives; in the order of the source these start early; in between part of them waits,
for what is sent last to have something computed beside it. A schedule of the reversed graph orders the collectives at
the end of a step by their release times. Scheduling the reversed graph in the order in which
tasks ended, and so on in turn, rarely makes a schedule longer and often shorter (forward-backward improvement: Li and
Willis 1992).

Collectives that wait for a link when it sends go together: forward those of what has been made, backward those of what
is used later. In a schedule of single ones others wait, as each of them has a latency of its own. In turn, from starts
that are a little sooner or later each time, that is an iterated local search (`iterated`). Bundles are chosen by trials
and cut besides (`bundles.py`). What remains is left to constraint programming (`constraint_programming.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from random import Random
from typing import NamedTuple

import numpy as np

from hapsynth.instructions.program.program import Convert, Instruction, Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.scheduling.bundles import MORE_TRIALS, Apart, Trial, bundled, cut, rebundled
from hapsynth.search.scheduling.constraint_programming import polished
from hapsynth.search.scheduling.idle_time import filled
from hapsynth.search.scheduling.tasks import Machine, TaskGraph, tasks_of
from hapsynth.search.scheduling.timeline import Timeline, never, simulate

_ROUNDS = 3
_TURNS = 2
_LINK_ROUNDS = 6
_PUT_OFF = 0.5, 0.7
"""Fractions of a task's slack by which it is delayed."""
_LEAST_GAIN = 1e-6
_PERTURBED, _PERTURBATION = 100, 5e-3
"""How many perturbed starts are tried, and the most by which a task's start is shifted, as a fraction of the
makespan."""
_QUEUES = {Machine.LINK: 0, Machine.COMPUTE: 1, Machine.EVERYTHING: 1, Machine.LOCAL: -1}
"""The queue in which tasks wait for a machine; -1: they do not. Where both are free at once, queue 0 goes first."""


def schedule(
    tasks: TaskGraph, *, quick: bool = False, cutoff: float = np.inf, stopped: Callable[[], bool] = never
) -> Timeline:
    """The timeline of the best order and bundles found. `quick`: only the most promising orders are tried, and other
    bundles than those of ready collectives only if the makespan with these is at most `cutoff` seconds. Once `stopped`
    returns true, the result is as with `quick`, or the best so far."""
    if not quick:
        return iterated(improved(tasks, stopped), stopped)
    return _quick(_of_best_order(tasks.contracted(), quick=True), cutoff, stopped)


def improved(tasks: TaskGraph, stopped: Callable[[], bool] = never) -> Timeline:
    """As `schedule`, without the final local search."""
    order = _of_best_order(tasks.contracted(), quick=True)
    quick = _quick(order, np.inf, stopped)
    best = refined(quick, stopped)
    if stopped() or _is_proved(best):
        return best
    # Where latency is much of what is sent, as in data parallelism over a fast network, these end better.
    other = _reordered(rebundled(bundled(order), stopped=stopped))
    return min(best, refined(other, stopped), key=_makespan) if other.makespan_s < quick.makespan_s else best


def _quick(order: Timeline, cutoff: float, stopped: Callable[[], bool]) -> Timeline:
    found = _bundled_as_sent(order)
    return _reordered(rebundled(found, stopped=stopped)) if found.makespan_s <= cutoff else found


def _reordered(timeline: Timeline) -> Timeline:
    """The best of a timeline and of new orders of its tasks: with fewer latencies another order may be better."""
    found = min(timeline, _of_best_order(timeline.tasks, quick=True), key=_makespan)
    return min(found, _for_link(found), key=_makespan)


def refined(timeline: Timeline, stopped: Callable[[], bool] = never) -> Timeline:
    """The best timeline found by trying more orders and other bundles in turn, then filling idle time; stops early once
    `stopped` returns true."""
    in_turn, cut_in_turn, with_filled = (partial(f, stopped=stopped) for f in (_in_turn, _cut_in_turn, filled))
    for step in (_of_more_orders, _bundled_as_sent, in_turn, cut_in_turn, with_filled, _polished):
        if stopped():
            break
        timeline = step(timeline)
    return timeline


def iterated(timeline: Timeline, stopped: Callable[[], bool] = never) -> Timeline:
    """The best timeline found by iterated local search (Lourenço, Martin, Stützle 2003): the start times of the best so
    far are perturbed and its collectives bundled anew; the result is refined. Stops early once `stopped` returns
    true."""
    rng, best = Random(0), timeline
    for n in range(0 if _is_proved(timeline) else _PERTURBED):
        if stopped():
            break
        backward, apart = n % 2 == 1, Apart.of(best)
        most = _PERTURBATION * best.makespan_s
        found = _as_sent(replace(apart, begun=[x + rng.uniform(-most, most) for x in apart.begun]), backward=backward)
        found = min(found, _as_sent(Apart.of(found), backward=not backward), key=_makespan)
        if Trial.of(found).is_better_than(Trial.of(best)):
            best = found
    return best if best is timeline else min(best, refined(best, stopped), key=_makespan)


def _is_proved(timeline: Timeline) -> bool:
    return timeline.makespan_s <= least_makespan(timeline.tasks) * (1 + _LEAST_GAIN)


def _of_more_orders(timeline: Timeline) -> Timeline:
    return min(timeline, _of_best_order(timeline.tasks), key=_makespan)


def _polished(timeline: Timeline) -> Timeline:
    return timeline if _is_proved(timeline) else polished(timeline)


def _in_turn(best: Timeline, stopped: Callable[[], bool]) -> Timeline:
    """A timeline in other bundles, in another order for these, and bundled as that sends them, in turn."""
    for _ in range(_TURNS):
        if stopped():
            break
        found = rebundled(best, trials=MORE_TRIALS, stopped=stopped)
        found = min(found, _of_best_order(found.tasks), key=_makespan)
        found = _bundled_as_sent(found)
        if not Trial.of(found).is_better_than(Trial.of(best)):
            break
        best = found
    return best


def _bundled_as_sent(timeline: Timeline) -> Timeline:
    """A shorter timeline, where one is found, by list schedules in which each collective that is sent takes those along
    that wait for the link too: forward for those of what is computed, backward for those before which nothing is, in
    turn."""
    best = timeline
    for _ in range(_ROUNDS):
        found = min(best, _as_sent(Apart.of(best)), key=_makespan)
        found = min(found, _as_sent(Apart.of(found), backward=True), key=_makespan)
        if found.makespan_s >= best.makespan_s * (1 - _LEAST_GAIN):
            break
        best = found
    return best


def _cut_in_turn(timeline: Timeline, stopped: Callable[[], bool]) -> Timeline:
    """A timeline with bundles cut, and then the others changed in turn, where any is."""
    found = cut(timeline, partial(_of_best_order, quick=True), stopped)
    return timeline if found is timeline else _in_turn(found, stopped)


def _as_sent(apart: Apart, *, backward: bool = False) -> Timeline:
    """One list schedule of `_bundled_as_sent`, by the start times of `apart`."""
    released, transfers = apart.tasks.released, apart.tasks.transfers
    joining = {task for task, each in transfers.items() if (released[task] <= each.latency_s) == backward}
    kept = [bundle for bundle in apart.bundles.values() if joining.isdisjoint(bundle)]
    tasks = apart.tasks.joined(apart.order, kept)
    assert tasks is not None, "bundles of a timeline"
    number = {at: task for task, places in enumerate(tasks.instructions) for at in places}
    begun, mine = [0.0] * len(tasks.machine), set[int]()
    for task, places in enumerate(apart.tasks.instructions):
        for at in places[:1]:
            begun[number[at]] = apart.begun[task]
            if task in joining:
                mine.add(number[at])
    if backward:
        order, _, bundles = _greedy(tasks, tasks.users, tasks.makers, [-x for x in begun], mine)
    else:
        order, _, bundles = _greedy(tasks, tasks.makers, tasks.users, begun, mine)
    found = tasks.joined(order[::-1] if backward else order, bundles)
    assert found is not None, "none of a bundle waits for another"
    return simulate(found, range(len(found.machine)))


def _makespan(timeline: Timeline) -> float:
    return timeline.makespan_s


def _of_best_order(tasks: TaskGraph, *, quick: bool = False) -> Timeline:
    found = [simulate(tasks, order) for order in _orders(tasks, quick)]
    return min(found if quick else map(_for_link, found), key=_makespan)


def in_scheduled_order(program: Program, sizes: Sizes, costs: CostModel) -> Program:
    """The same program with its instructions in the best order found, and in bundles."""
    return ordered(program, schedule(tasks_of(program, sizes, costs)))


def ordered(program: Program, timeline: Timeline) -> Program:
    """A program with its instructions in the order of a timeline of it, and bundles as there. A collective stands
    behind what all devices have computed when it starts, and before the rest: XLA's compiler for GPUs is held to that
    (`lower/_switch_form.py`)."""
    found: list[Instruction] = []
    bundles, tasks = 0, timeline.tasks
    for task in _by_time(timeline):
        mine = [program.instructions[k] for k in tasks.instructions[task]]
        if tasks.machine[task] is Machine.LINK:
            bundles += len(mine) > 1
            bundle = bundles if len(mine) > 1 else 0
            mine = [i._replace(bundle=bundle) if isinstance(i, Convert) else i for i in mine]
        found += mine
    return replace(program, instructions=tuple(found))


def _by_time(timeline: Timeline) -> list[int]:
    """The tasks in an order of the same makespan: collectives by their start, what is computed by its end."""
    machine, place = timeline.tasks.machine, {task: n for n, task in enumerate(timeline.order)}
    start, end = timeline.start.max(axis=1, initial=0.0).tolist(), timeline.end.max(axis=1, initial=0.0).tolist()

    def key(task: int) -> tuple[float, bool, int]:
        sent = machine[task] is Machine.LINK
        return start[task] if sent else end[task], sent, place[task]

    return sorted(timeline.order, key=key)


def least_makespan(tasks: TaskGraph) -> float:
    """Seconds below which no order of the tasks comes.

    Of a device that computes c times as long beside a collective: its work and 1 - 1/c of what a link sends, as in each
    of these seconds that much less is done. With computing as fast as alone: the preemptive one-machine bound of each
    machine. A task has a head, the longest path before it, and a tail, the longest path after it, and the largest tail
    goes first (Jackson 1955; Carlier 1982).
    """
    forward = range(len(tasks.machine))
    heads = _longest_paths(tasks, tasks.makers, forward)
    tails = _longest_paths(tasks, tasks.users, forward[::-1])
    found = float((heads + tails + tasks.seconds).max(initial=0.0))
    machine = np.array(tasks.machine, dtype=np.int64)
    for each in (Machine.COMPUTE, Machine.LINK):
        mine = np.flatnonzero((machine == each) | (machine == Machine.EVERYTHING))
        groups = range(tasks.seconds.shape[1] if each is Machine.COMPUTE else 1)
        for group in groups if mine.size else ():
            head, seconds, tail = (x[mine, group] for x in (heads, tasks.seconds, tails))
            if each is not Machine.COMPUTE:
                # A collective takes all devices.
                head, tail = heads[mine].max(axis=1), tails[mine].max(axis=1)
            found = max(found, _preemptive_bound(head.tolist(), seconds.tolist(), tail.tolist()))
    if tasks.slowdown is not None:
        work = tasks.seconds[(machine == Machine.COMPUTE) | (machine == Machine.EVERYTHING)].sum(axis=0)
        sent = float(tasks.seconds[machine == Machine.LINK].max(axis=1, initial=0.0).sum())
        found = max(found, float((work + (1 - 1 / tasks.slowdown) * sent).max(initial=0.0)))
    return found


def _longest_paths(tasks: TaskGraph, before: Sequence[Sequence[int]], order: Sequence[int]) -> Floats:
    """Seconds of the longest path to each task [tasks, groups], which changes the device in collectives only. `before`:
    per task those next to it on such paths; `order`: has these before it."""
    found = np.zeros(tasks.seconds.shape)
    for task in order:
        for other in before[task]:
            np.maximum(found[task], found[other] + tasks.seconds[other], out=found[task])
        if tasks.machine[task] not in (Machine.COMPUTE, Machine.LOCAL):
            found[task] = found[task].max(initial=0.0)
    return found


def _preemptive_bound(head: Sequence[float], seconds: Sequence[float], tail: Sequence[float]) -> float:
    """The least maximum of end + tail on one machine, tasks begun at their heads at the earliest and interrupted at
    will."""
    jobs = sorted(range(len(head)), key=head.__getitem__)
    left, ready, now, found, at = list(seconds), list[tuple[float, int]](), 0.0, 0.0, 0
    while at < len(jobs) or ready:
        if not ready:
            now = max(now, head[jobs[at]])
        while at < len(jobs) and head[jobs[at]] <= now:
            heappush(ready, (-tail[jobs[at]], jobs[at]))
            at += 1
        _, job = ready[0]
        until = head[jobs[at]] if at < len(jobs) else np.inf
        if now + left[job] <= until:
            heappop(ready)
            now += left[job]
            found = max(found, now + tail[job])
        else:
            left[job] -= until - now
            now = until
    return found


def _orders(tasks: TaskGraph, quick: bool) -> list[tuple[int, ...]]:
    """Orders worth a look, none of them twice; `quick`: those from the best priority, the last improvement and what it
    began from."""
    makers, users, longest = tasks.makers, tasks.users, tasks.longest
    count = len(longest)
    to_end, first = [0.0] * count, [0.0] * count
    from_start = [released + seconds for released, seconds in zip(tasks.released, longest, strict=True)]
    for task in reversed(range(count)):
        to_end[task] = longest[task] + max((to_end[u] for u in users[task]), default=0.0)
        computes = tasks.machine[task] in (Machine.COMPUTE, Machine.EVERYTHING)
        # A collective goes with the first that needs it.
        first[task] = float(task) if computes else min((first[u] for u in users[task]), default=float(count))
    _, ended, _ = _greedy(tasks, users, makers, [-x for x in from_start])
    priorities = [-x for x in to_end], first, [-x for x in ended]
    begun = [_greedy(tasks, makers, users, priority) for priority in priorities]
    begun += [_greedy(tasks, makers, users, each) for each in _put_off(tasks, to_end, begun[1].ended)]
    if quick:
        best = min(begun, key=lambda found: max(found.ended, default=0.0))
        improved = _improved(tasks, best.order, best.ended)
        orders = [improved[0], improved[-1]]
    else:
        orders = [order for each in begun for order in _improved(tasks, each.order, each.ended)]
    return list(dict.fromkeys(map(tuple, orders)))


def _put_off(tasks: TaskGraph, to_end: Sequence[float], ended: Sequence[float]) -> list[list[float]]:
    """Priorities that delay tasks with slack relative to the source order, in which they end at `ended`: all of them by
    a fraction of their slack; and, to their latest start, tasks that compute for longer than their results are sent
    (Johnson 1954: on the first of two machines in a row such jobs go last)."""
    machine, users, longest, whole = tasks.machine, tasks.users, tasks.longest, max(ended, default=0.0)
    begun = [end - seconds for end, seconds in zip(ended, longest, strict=True)]
    slack = [max(0.0, whole - rest - start) for rest, start in zip(to_end, begun, strict=True)]
    # Which collective alone waits for a task, and what is computed for each.
    sent: list[int | None] = [None] * len(begun)
    computed = dict.fromkeys((k for k, m in enumerate(machine) if m is Machine.LINK), 0.0)
    for task in reversed(range(len(begun))):
        waiting = {task} if machine[task] is Machine.LINK else {sent[user] for user in users[task]}
        one = sent[task] = waiting.pop() if len(waiting) == 1 else None
        if one is not None and machine[task] is Machine.COMPUTE and slack[task] > 0:
            computed[one] += longest[task]
    last = [
        machine[task] is Machine.COMPUTE and one is not None and longest[one] <= computed[one]
        for task, one in enumerate(sent)
    ]
    parts = [[start + part * at for start, at in zip(begun, slack, strict=True)] for part in _PUT_OFF]
    return [*parts, [start + at if late else start for start, at, late in zip(begun, slack, last, strict=True)]]


def _improved(tasks: TaskGraph, order: list[int], ended: list[float]) -> list[list[int]]:
    """An order, in which tasks end at `ended`, and its improvements by alternating backward and forward passes."""
    found, least = [order], max(ended, default=0.0)
    for _ in range(_ROUNDS):
        _, backward, _ = _greedy(tasks, tasks.users, tasks.makers, [-x for x in ended])
        order, ended, _ = _greedy(tasks, tasks.makers, tasks.users, [-x for x in backward])
        length = max(ended, default=0.0)
        if length >= least * (1 - _LEAST_GAIN):
            break
        found.append(order)
        least = length
    return found


def _for_link(timeline: Timeline) -> Timeline:
    """The best of a timeline and of list schedules in which the link waits less. Each takes the collectives' order of
    the last one, assumes that they are sent without pauses up to the end, and computes first what is needed first."""
    tasks, best, order = timeline.tasks, timeline, [*timeline.order]
    for _ in range(_LINK_ROUNDS):
        before = order
        order, ended, _ = _greedy(tasks, tasks.makers, tasks.users, _latest_starts(tasks, order))
        if order == before:
            break
        if max(ended, default=0.0) < best.makespan_s * (1 - _LEAST_GAIN):
            best = min(best, simulate(tasks, order), key=_makespan)
    return best


def _latest_starts(tasks: TaskGraph, order: Sequence[int]) -> list[float]:
    """Seconds from the end, negative, at which each task must begin so that the link sends in an order without a
    pause."""
    machine, users, longest = tasks.machine, tasks.users, tasks.longest
    found = [0.0] * len(order)
    sent = 0.0
    for task in reversed(order):
        latest = 0.0
        for user in users[task]:
            if found[user] < latest:
                latest = found[user]
        on = machine[task]
        if on is Machine.COMPUTE or on is Machine.LOCAL:
            found[task] = latest - longest[task]
            continue
        sent = found[task] = min(latest, sent) - longest[task]
    return found


class _Pass(NamedTuple):
    """A list schedule: the tasks in their order, when each ends, and the collectives that go together."""

    order: list[int]
    ended: list[float]
    bundles: list[list[int]]


def _greedy(
    tasks: TaskGraph,
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    priority: Sequence[float],
    joining: Collection[int] = (),
) -> _Pass:
    """The list schedule of a graph given both ways, least `priority` first, as if all devices took as long as the
    slowest. Of the collectives `joining`, one that is sent takes those along that it may go with and that wait too."""
    machine, longest, transfers = tasks.machine, tasks.longest, tasks.transfers
    count = len(longest)
    queue_of = [_QUEUES[m] for m in machine]
    ranked = sorted(range(count), key=priority.__getitem__)
    rank = [0] * count
    for place, task in enumerate(ranked):
        rank[task] = place
    missing = [len(each) for each in before]
    since, end = [0.0] * count, [0.0] * count
    free = [0.0] * 2
    coming: list[list[tuple[float, int]]] = [[], []]
    ready: list[list[int]] = [[], []]
    queues = [*enumerate(zip(coming, ready, strict=True))]
    order: list[int] = []
    bundles: list[list[int]] = []
    released = [task for task in reversed(range(count)) if not missing[task]]

    def release_users(task: int) -> None:
        """Release the tasks of which this is the last maker."""
        ended = end[task]
        for user in after[task]:
            if since[user] < ended:
                since[user] = ended
            missing[user] -= 1
            if not missing[user]:
                released.append(user)

    def with_others(first: int, waiting: list[int]) -> tuple[list[int], float]:
        """A collective with the waiting ones that join it, and the seconds of the bundle. `waiting`: their ranks."""
        mine, sent = [first], transfers[first]
        for other in sorted(waiting):
            task = ranked[other]
            if task in joining and sent.takes(transfers[task], tasks.lowering.bundle_bytes):
                mine.append(task)
                sent = sent.beside(transfers[task])
                waiting.remove(other)
        heapify(waiting)
        return mine, sent.seconds if len(mine) > 1 else longest[first]

    while True:
        # Those whose last maker is done, and what takes no time.
        while released:
            at = released.pop()
            queue, begun = queue_of[at], since[at]
            if queue < 0:
                end[at] = begun
                order.append(at)
                release_users(at)
            elif begun <= free[queue]:
                heappush(ready[queue], rank[at])
            else:
                heappush(coming[queue], (begun, rank[at]))
        if len(order) == count:
            return _Pass(order, end, bundles)
        at, begun = 0, np.inf
        for queue, (waiting, can) in queues:
            now = free[queue]
            while waiting and waiting[0][0] <= now:
                heappush(can, heappop(waiting)[1])
            if can:
                if now < begun:
                    at, begun = queue, now
            elif waiting and waiting[0][0] < begun:
                at, begun = queue, waiting[0][0]
        while coming[at] and coming[at][0][0] <= begun:
            heappush(ready[at], heappop(coming[at])[1])
        task = ranked[heappop(ready[at])]
        if machine[task] is Machine.EVERYTHING:
            begun = max(begun, *free)
            free = [begun + longest[task]] * 2
        mine, seconds = with_others(task, ready[at]) if task in joining else ([task], longest[task])
        if len(mine) > 1:
            bundles.append(mine)
        free[at] = begun + seconds
        for each in mine:
            end[each] = free[at]
        order += mine
        for each in mine:
            release_users(each)
        released.reverse()
