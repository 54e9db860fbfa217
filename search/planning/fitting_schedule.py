"""The fastest order of a program, with collectives beside computing, in which it fits in memory.

Tried with its own conversions and with those that are cheapest bundled; if neither fits, in orders that hold less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.program_cost import by_cheapest_steps
from hapsynth.search.memory.profile import MemoryProfile, peak
from hapsynth.search.planning.memory_bound_schedules import schedules_holding_less
from hapsynth.search.scheduling.list_schedule import ordered
from hapsynth.search.scheduling.timeline import Timeline, never, program_timeline


class ScheduledSteps(NamedTuple):
    """The steps of a program, and a timeline of them, the order of which it may take."""

    program: Program
    timeline: Timeline


class TimedProgram(NamedTuple):
    """A program in its order, its timeline, and what it holds. `steps`: those from whose timeline the order is; None
    where the order was made otherwise."""

    program: Program
    timeline: Timeline
    memory: MemoryProfile
    steps: ScheduledSteps | None = None


def timed(program: Program, sizes: Sizes, costs: CostModel) -> TimedProgram:
    """A program in its own order, with what collectives hold while others are computed."""
    timeline = program_timeline(program, sizes, costs)
    return TimedProgram(program, timeline, MemoryProfile(program, sizes.classes, costs, timeline.under_way))


def scheduled_steps(
    program: Program,
    sizes: Sizes,
    costs: CostModel,
    scheduled: Callable[[Program], Timeline],
    late: Callable[[], bool] = never,
) -> list[ScheduledSteps]:
    """A program, and the same by the steps that go together, where these are others and it is not `late`, as they are
    `scheduled`."""
    found = [ScheduledSteps(program, scheduled(program))]
    if not late():
        together = by_cheapest_steps(program, sizes, costs, bundled=True)
        if together is not program:
            found.append(ScheduledSteps(together, scheduled(together)))
    return found


def shortest_fitting(
    program: Program,
    sizes: Sizes,
    costs: CostModel,
    ways: Sequence[ScheduledSteps],
    late: Callable[[], bool] = never,
) -> TimedProgram | None:
    """A program in the order of the shortest of some `ways`, its `scheduled_steps`, in which it fits beside what is
    sent meanwhile; where there is none in an order that holds less, its own at last; None where it fits in none."""
    limit = costs.memory_budget.limit

    def fitting(program: Program, steps: ScheduledSteps | None = None) -> TimedProgram | None:
        found = timed(program, sizes, costs)._replace(steps=steps)
        return found if found.memory.peak(sizes) <= limit else None

    found = [known for way in ways if (known := fitting(ordered(*way), way))]
    if found or peak(program, sizes, costs) > limit:
        return min(found, key=lambda each: each.timeline.makespan_s, default=None)
    less = schedules_holding_less(program, sizes, costs, late)
    return next(filter(None, map(fitting, less)), None) or fitting(program)
