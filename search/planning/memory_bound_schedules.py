"""Schedules of a program that hold ever less.

The best schedule of a program may hold more than its own order does: what is gathered early waits for its use, what is
made early for its last one. The large tensors decide that. So the instructions that make or take a tensor of so many
bytes keep the program's own order, and the others are scheduled around them; the fewer bytes, the nearer is the
schedule to the program's own order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from hapsynth.instructions.program.program import Program, Property
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.cost.model import CostModel
from hapsynth.search.memory.profile import MemoryProfile
from hapsynth.search.scheduling.list_schedule import ordered, schedule
from hapsynth.search.scheduling.tasks import Machine, TaskGraph, tasks_of
from hapsynth.search.scheduling.timeline import never

_PARTS = tuple(4**k for k in range(1, 9))
"""Of the memory: tensors that are at least so large stay in order."""


def schedules_holding_less(
    program: Program, sizes: Sizes, costs: CostModel, stopped: Callable[[], bool] = never
) -> Iterator[Program]:
    """A program in orders of which each holds less than the one before, as a rule, and takes longer; no more once it is
    `stopped`."""
    tasks, largest = tasks_of(program, sizes, costs, dominated=False), _largest_tensors(program, sizes, costs)
    nbytes = [max((largest[at] for at in places), default=0.0) for places in tasks.instructions]
    before = 0
    for parts in _PARTS:
        if stopped():
            return
        large = {task for task, held in enumerate(nbytes) if held >= costs.memory_budget.limit / parts}
        if len(large) > before:
            before = len(large)
            yield ordered(program, schedule(_in_own_order(tasks, large), stopped=stopped))


def _largest_tensors(program: Program, sizes: Sizes, costs: CostModel) -> list[float]:
    """Per instruction, what the largest tensor that it makes or takes counts on some device, in bytes."""
    profile = MemoryProfile(program, sizes.classes, costs)
    counted = (profile.memory_budget.weights[:, None] * profile.bytes_of(sizes)).max(axis=0)
    held: dict[Property, float] = {}
    for tensor, nbytes in zip(profile.tensors, counted.tolist()):
        held[tensor.value, tensor.layout] = max(held.get((tensor.value, tensor.layout), 0.0), nbytes)
    accessed = ((*needs, *results) for needs, results in profile.index.accesses)
    return [max((held.get(tensor, 0.0) for tensor in tensors), default=0.0) for tensors in accessed]


def _in_own_order(tasks: TaskGraph, some: Collection[int]) -> TaskGraph:
    """The same with some of the tasks one after another: a collective begins after what is computed before it, and
    nothing waits for it that does not need it."""
    makers, last = list(tasks.makers), None
    for task in range(len(makers)):
        if task not in some:
            continue
        if last is not None and last not in makers[task]:
            makers[task] = (*makers[task], last)
        if tasks.machine[task] in (Machine.COMPUTE, Machine.EVERYTHING):
            last = task
    return replace(tasks, makers=tuple(makers))
