"""The orders in which a search's best programs take the least time and fit.

In the search programs are scheduled quickly, and in the steps that they have; the best ones are scheduled again, by
steps that go together too, and in orders that hold less where they do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from typing import NamedTuple

import numpy as np

from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.cost.model import CostModel
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.fitting_schedule import (
    ScheduledSteps,
    TimedProgram,
    scheduled_steps,
    shortest_fitting,
    timed,
)
from hapsynth.search.planning.makespan.clocks import clocks
from hapsynth.search.planning.makespan.search import MakespanSearch, Scheduled
from hapsynth.search.planning.search_at_ratios import FixedRatioSearch
from hapsynth.search.scheduling.list_schedule import improved, iterated, ordered
from hapsynth.search.scheduling.tasks import tasks_of
from hapsynth.search.scheduling.timeline import Timeline

_TRIED, _NEARLY, MOST_GAINED = 8, 1.01, 1.25
"""Programs that are scheduled again, or more until one fits, and how many times as long as the best their quick
schedules are at most; of those that a search was begun from."""


class Overlapped(NamedTuple):
    """A program in the order in which it takes the least time found, and seconds that all programs at its ratios take
    at least. `memory_bytes`: of each device. `clocks`: by name, how long each kind of device computes, and collectives
    take together."""

    program: Program
    sizes: Sizes
    timeline: Timeline
    memory_bytes: tuple[float, ...]
    lower_bound_s: float
    clocks: dict[str, float]


class Tried(NamedTuple):
    """A program that was scheduled again. `steps`: those from whose timeline its order is; None where it is another."""

    known: Scheduled
    steps: ScheduledSteps | None
    overlapped: Overlapped

    @property
    def makespan_s(self) -> float:
        return self.overlapped.timeline.makespan_s


def as_it_is(search: FixedRatioSearch, best: Candidate) -> Overlapped | None:
    """The best program of the search by sums, in its own order; None where what is sent meanwhile does not fit beside
    it."""
    return _timed(best.program, best.sizes, search)


def final_makespan_s(known: Scheduled, search: FixedRatioSearch) -> float:
    """Seconds of a program in the best order found in which it fits. Its quick schedule may take a tenth longer, and
    says little of which devices are the better."""
    again = _within_limit(known, search)
    return again.makespan_s if again else known.makespan_s


def best_within_limit(found: MakespanSearch, begun: Sequence[Scheduled]) -> list[Tried]:
    """The best programs of a search, and those that it was begun from, in orders in which they fit: the best one, and
    those with the least mean of quick schedule and longest chain, as more orders may gain what the schedule is above
    the chain."""
    search, tried, fitting = found.search, list[Scheduled](), list[Tried]()
    least = np.inf

    def is_tried(known: Scheduled) -> bool:
        # Of two that take as long one may hold less.
        as_long = any(isclose(known.makespan_s, other.known.makespan_s) for other in fitting)
        return as_long or any(known.candidate.is_like(other.candidate) for other in tried)

    def fit(known: Scheduled) -> None:
        nonlocal least
        tried.append(known)
        again = _within_limit(known, search)
        if again is not None:
            fitting.append(again)
            least = min(least, again.makespan_s)

    chain = {known: found.longest_chain(known.seen) for known in found.scheduled}
    for known in sorted(found.scheduled, key=lambda known: (known is not found.best, known.makespan_s + chain[known])):
        if fitting and (len(tried) >= _TRIED or search.clock.late()):
            break
        if known.makespan_s < least * _NEARLY and chain[known] < least and not is_tried(known):
            fit(known)
    for known in begun:
        # What sends much of little gains the most by more orders.
        if not (fitting and search.clock.late()) and not is_tried(known) and known.makespan_s < least * MOST_GAINED:
            fit(known)
    best = min(fitting, key=lambda each: each.makespan_s, default=None)
    if best and best.steps and not search.clock.late():
        shorter = iterated(best.steps.timeline, search.clock.late)
        overlapped = _timed(ordered(best.steps.program, shorter), best.known.candidate.sizes, search)
        if overlapped is not None:
            fitting.append(best._replace(overlapped=overlapped))
    return fitting


def _within_limit(known: Scheduled, search: FixedRatioSearch) -> Tried | None:
    """A program in an order in which it fits, by the steps that it has or those that go together; None where there is
    none. Where time has run out it is the order that it has, or the best until then."""
    candidate, costs, late = known.candidate, search.task.costs, search.clock.late
    given = candidate.program, candidate.sizes, costs
    again = lambda program: improved(tasks_of(program, candidate.sizes, costs, dominated=False), late)
    ways = [ScheduledSteps(candidate.program, known.timeline)] if late() else scheduled_steps(*given, again, late)
    found = shortest_fitting(*given, ways, late)
    return found and Tried(known, found.steps, _overlapped(found, candidate.sizes, costs))


def _timed(program: Program, sizes: Sizes, search: FixedRatioSearch) -> Overlapped | None:
    """A program in its own order; None where it holds too much."""
    found = timed(program, sizes, search.task.costs)
    fits = found.memory.peak(sizes) <= search.limit
    return _overlapped(found, sizes, search.task.costs) if fits else None


def _overlapped(found: TimedProgram, sizes: Sizes, costs: CostModel) -> Overlapped:
    memory_bytes = found.memory.peaks(sizes)
    return Overlapped(found.program, sizes, found.timeline, memory_bytes, 0.0, clocks(found.timeline, costs))
