"""Where no program fits: what is said of it."""

from __future__ import annotations

import numpy as np

from hapsynth.search.cost.model import CostModel
from hapsynth.search.planning.candidate import Candidate


def shortage(costs: CostModel, least: Candidate | None, certain: float, *, pinned: bool, late: bool = False) -> str:
    """Which device is too small for the program that holds the least of those found, by how much, and what helps.

    `certain`: what every program's bytes count. `pinned`: whether ratios were asked for. `late`:
    whether the time budget ended the search.
    """
    budget = costs.memory_budget
    device = int(np.argmin([k.memory for k in costs.cluster.devices]))
    mib = lambda nbytes: f"{nbytes / 2**20:.4g} MiB"
    found = "no program keeps to the layouts that are fixed"
    if least is not None:
        held = least.held()
        if budget.exact:
            device = int(np.argmax(np.array(held) / budget.limits))
        found = f"the smallest program found needs {mib(held[device])}, {mib(held[device] - budget.limits[device])}"
        every = mib(min(certain, least.memory))
        if budget.proportions is not None:
            every = f"{100 * min(certain, least.memory) / budget.limit:.0f} % of what some device has"
        found += f" too much (every program needs {every} or more)" if certain else " too much"
    limit, name = budget.limits[device], costs.cluster.devices[device].name
    at, other = (" at these ratios", "other ratios, ") if pinned else ("", "")
    none, more = "no program fits", ""
    if late:
        none, more = "no program that fits was found within the time budget", "more time may find one that does; "
    return (
        f"{none}{at}: device {device} ({name}) has {mib(limit)} and {found}; {more}{other}a device with "
        "that much memory, more devices, or a smaller batch would fit"
    )
