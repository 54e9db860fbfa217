"""New sizes for a plan whose devices turn out faster or slower than they were taken to be; no new search.

The program stays. The cluster gets the speeds that were measured, the linear program sizes the same program for it
(`search/sizing/sizer.py`), and the state moves from the old cut to the new one (`running/transfer.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

import numpy as np

from hapsynth._options import check_gain
from hapsynth.adapting.resize import best_sizes, resized
from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.device_kinds import DeviceKind
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.running.allgather import agreed, of_first_process
from hapsynth.running.base import P, Planned
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.program_cost import load_seconds, shares
from hapsynth.search.cost.program_index import ProgramIndex
from hapsynth.search.scheduling.timeline import step_seconds

THRESHOLD = 0.05
"""The predicted gain that is worth moving state for."""


@dataclass(frozen=True, eq=False)
class Proposal(Generic[P]):
    """Sizes for the measured speeds, and their gain.

    `plan`: the new plan, or the old one where there is nothing to gain. `before_s`, `after_s`: predicted seconds per
    step at the measured speeds, with the old sizes and with the plan's. `slowdown`: of each device that takes part,
    measured over predicted busy seconds.
    """

    plan: P
    before_s: float
    after_s: float
    slowdown: tuple[float, ...]

    @property
    def gain(self) -> float:
        """How many times as fast a step is predicted to become."""
        return self.before_s / self.after_s if self.after_s else 1.0


def busy_seconds(plan: Planned, costs: CostModel | None = None) -> Floats:
    """Predicted seconds per step in which each device that takes part computes: float64 [devices], in mesh order.

    The time in collectives, and of waiting for others, is not in it.
    """
    costs = costs or plan.cost_model()
    busy = np.zeros(costs.n)
    index = ProgramIndex.of(plan.program, plan.sizes.classes, costs)
    seconds = load_seconds(index, plan.sizes)
    for load, runs in zip(index.load_of, index.runs, strict=True):
        if load >= 0:
            busy += runs * seconds[load]
    for load in index.feeds.values():
        busy += costs.device_times(load.work, shares(costs, plan.sizes, load.nodes))
    return busy


def slowdowns(plan: Planned, measured: Sequence[float]) -> Floats:
    """Measured over predicted busy seconds of each device that takes part: float64 [devices].

    `measured`: seconds per device, in mesh order, or per process, by rising process number, whose devices work at the
    same time. A device that has nothing to do is taken to be as predicted. ValueError for anything else.
    """
    times = np.array([float(t) for t in measured])
    predicted = busy_seconds(plan)
    processes = [0] * len(predicted) if plan.mesh is None else [d.process_index for d in plan.mesh.devices.flat]
    numbers = sorted(set(processes))
    if len(times) not in (len(predicted), len(numbers)):
        per_process = f", or {len(numbers)}, one per process" if len(numbers) > 1 else ""
        raise ValueError(
            f"{len(times)} measured times were given for {len(predicted)} devices; give {len(predicted)}, one per "
            f"device that the plan uses, in mesh order{per_process}"
        )
    bad = [i for i, t in enumerate(times) if not (np.isfinite(t) and t > 0)]
    if bad:
        raise ValueError(f"measured time {bad[0]} is {measured[bad[0]]!r}; give positive seconds per step")
    if len(times) < len(predicted):
        place = np.array([numbers.index(p) for p in processes])
        most = np.array([predicted[place == p].max() for p in range(len(numbers))])
        times, predicted = times[place], most[place]
    return np.where(predicted > 0, times / np.where(predicted > 0, predicted, 1.0), 1.0)


def propose(plan: P, slowdown: Floats, threshold: float = THRESHOLD) -> Proposal[P]:
    """Sizes for devices that take `slowdown` times as long as predicted: float64 [devices that take part], or [those,
    measurements], of which the medians count.

    The plan is the old one unless a step is predicted to take at least the fraction `threshold` less, by each
    measurement alone: noise is in some of them, and a device that slows between two is not known yet. Raises ValueError
    for a threshold that is no fraction. In a run of several processes all must call, and the first one's numbers count.
    """
    check_gain("threshold", threshold)
    measured = slowdown.astype(np.float64).reshape(len(slowdown), -1)
    measured = of_first_process(plan.mesh, measured.ravel()).reshape(measured.shape)
    slowdown, program = np.median(measured, axis=1), plan.program
    cost = partial(step_seconds, overlap=plan.result.overlap)

    def at(slowdown: Floats) -> tuple[Cluster, CostModel]:
        cluster = at_speeds(plan.cluster, plan.devices, slowdown, threshold)
        return cluster, plan.cost_model(cluster.subset(plan.devices))

    def gains(sizes: Sizes, costs: CostModel) -> bool:
        return cost(program, sizes, costs) <= cost(program, plan.sizes, costs) * (1 - threshold)

    cluster, costs = at(slowdown)
    proposed, peak = best_sizes(plan, costs)
    before = cost(program, plan.sizes, costs)
    models = [costs, *(at(one)[1] for one in measured.T if measured.shape[1] > 1)]
    fits = peak <= plan.memory_limit
    # All do what the first one's numbers say.
    sizes = agreed(plan.mesh, proposed if fits and all(gains(proposed, c) for c in models) else plan.sizes)
    if sizes.shares == plan.sizes.shares:
        return Proposal(plan, before, before, tuple(slowdown.tolist()))
    new = resized(plan, sizes, costs, cluster)
    return Proposal(new, before, new.cost, tuple(slowdown.tolist()))


def at_speeds(cluster: Cluster, devices: Sequence[int], slowdown: Floats, tolerance: float) -> Cluster:
    """The cluster whose `devices` take so many times as long for everything.

    Devices of a kind whose slowdowns lie within the tolerance are one kind, at their median: they keep equal shares.
    """
    kinds = list(cluster.devices)
    by_name: dict[str, DeviceKind] = {}
    for kind in dict.fromkeys(cluster.devices[d] for d in devices):
        members = sorted((float(slowdown[i]), d) for i, d in enumerate(devices) if cluster.devices[d] == kind)
        while members:
            alike = [pair for pair in members if pair[0] <= members[0][0] * (1 + tolerance)]
            members = members[len(alike) :]
            slower = _slower(kind, float(np.median([s for s, _ in alike])))
            # Of one name, within what the name tells.
            slower = by_name.setdefault(slower.name, slower)
            for _, d in alike:
                kinds[d] = slower
    return replace(cluster, devices=tuple(kinds))


def _slower(kind: DeviceKind, slowdown: float) -> DeviceKind:
    """The kind, everything of it taking `slowdown` times as long; its name tells the speed in all."""
    base, _, speed = kind.name.partition(_SPEED)
    total = float(speed or 1) / slowdown
    return replace(kind.faster(1 / slowdown, f"{base}{_SPEED}{total:.5g}"), overhead=kind.overhead * slowdown)


_SPEED = " at speed "
