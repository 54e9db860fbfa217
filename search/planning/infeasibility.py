"""Where no program fits: what is said of it."""

from __future__ import annotations

import numpy as np

from hapsynth.search.cost.model import CostModel
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.task import PlanningOptions


def shortage(
    costs: CostModel, least: Candidate | None, certain: float, options: PlanningOptions, *, late: bool = False
) -> str:
    """Which device is too small for the program that holds the least of those found, by how much, and what helps.

    `certain`: what every program's bytes count; that none fits is proved where these are too many. `options`: of the
    task, whose `devices` are what positions are told as. `late`: whether the time budget ended the search.
    """
    within, more = (" within the time budget", "more time may find one") if late else ("", "")
    restricted = options.restriction is not None and options.restriction.stored
    if least is None:
        keeping = "keeps to the layouts that are fixed"
        if late:
            return f"no program{f' that {keeping}' if restricted else ''} was found{within}; {more}"
        return f"no program {keeping}"
    budget = costs.memory_budget
    held = least.held()
    device = int(np.argmin([k.memory for k in costs.cluster.devices]))
    if budget.exact:
        device = int(np.argmax(np.array(held) / budget.limits))
    mib = lambda nbytes: f"{nbytes / 2**20:.4g} MiB"
    limit, name = budget.limits[device], costs.cluster.devices[device].name
    found = f"the smallest program found needs {mib(held[device])}, {mib(held[device] - limit)} too much"
    counted = min(certain, least.memory)
    # Less than they need, never more.
    percent = int(100 * counted / budget.limit)
    if budget.proportions is None and counted:
        found += f" (every program needs {mib(counted)} or more)"
    elif budget.proportions is not None and percent:
        found += f" (every program needs {percent} % of what some device has or more)"
    none = "no program fits" if certain > budget.limit else f"no program that fits was found{within}"
    at, other = ("", "") if options.fixed_ratios is None else (" at these ratios", "other ratios, ")
    layouts = "other layouts, " if restricted else ""
    position = device if options.devices is None else options.devices[device]
    return (
        f"{none}{at}: device {position} ({name}) has {mib(limit)} and {found}; {more}{more and '; '}{layouts}{other}"
        "a device with that much memory, more devices, or a smaller batch would fit"
    )
