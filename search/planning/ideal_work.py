"""A lower bound on the seconds of a graph's ops on any devices, whatever is communicated."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from hapsynth.cluster.cluster import Cluster
from hapsynth.search.cost.device_speed import DeviceFigures, Floats
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.roofline import Roofline
from hapsynth.search.cost.share_range import Mask
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.choice_space import ChoiceSpace

_SAFETY = 1e-6
"""A relative margin for the linear program's tolerances."""


class Works(NamedTuple):
    """The ops of a graph, equal ops merged: `each` work, its `runs` per step [works], whether it can be `cut` or have
    an owner [works]; the work of each op (`of_ops` [ops])."""

    each: list[Work]
    runs: Floats
    cut: Mask
    of_ops: list[int]

    @classmethod
    def of(cls, structure: ChoiceSpace, costs: CostModel) -> Works:
        graph, number = structure.graph, dict[object, int]()
        # On some set of devices one may run it alone.
        owned = {op for group in costs.bucketing.groups for op in group.ops}
        runs: list[float] = []
        works: list[Work] = []
        cut: list[bool] = []
        of_ops: list[int] = []
        for op in graph.ops:
            key = (costs.kind(op.index), structure.triples[op.index], op.index in owned)
            if key not in number:
                number[key] = len(works)
                runs.append(0.0)
                found = [costs.work(op.index, triples) for triples in structure.triples[op.index]]
                # Whatever divides it.
                works.append(found[0]._replace(lanes=()))
                cut.append(op.index in owned or any(w.divided for w in found))
            of_ops.append(number[key])
            runs[number[key]] += graph.runs[op.region]
        return cls(works, np.array(runs), np.array(cut, bool), of_ops)


class IdealWorkBound:
    """Lower bounds on the seconds of a graph's ops on any devices, however they are cut and whatever is communicated.

    A device with a fraction of an op's work takes at least that fraction of its roofline's seconds, at the highest rate
    that was measured, and the fractions sum to 1; bytes that are not divided are moved once at least. An
    op that can neither be cut nor have an owner waits for the slowest device.
    """

    def __init__(self, structure: ChoiceSpace, costs: CostModel) -> None:
        self.structure, self.costs = structure, costs
        self._known: dict[int, Works] = {}

    def works(self, cluster: Cluster, figures: DeviceFigures) -> Works:
        """The works for devices with these figures: fewer kinds may launch fewer kernels."""
        if figures.outputs not in self._known:
            self._known[figures.outputs] = Works.of(self.structure, self.costs.on(cluster))
        return self._known[figures.outputs]

    def on(self, cluster: Cluster) -> float:
        """A lower bound on the seconds per step, as a sum over ops."""
        works, seconds = self._seconds(cluster)
        return float(works.runs @ seconds)

    def of_ops(self, cluster: Cluster) -> Floats:
        """A lower bound on the seconds of one run of each op [ops]."""
        works, seconds = self._seconds(cluster)
        return seconds[works.of_ops]

    def _seconds(self, cluster: Cluster) -> tuple[Works, Floats]:
        """The works on these devices, and a lower bound on the seconds of one run of each [works]."""
        counts = Counter(cluster.devices)
        figures = DeviceFigures(list(counts))
        works = self.works(cluster, figures)
        if not works.each:
            return works, np.zeros(0)
        roofline = Roofline(figures, works.each)
        shared = roofline.least_shared(np.array(list(counts.values()), dtype=np.float64))
        return works, np.where(works.cut, shared, roofline.least_alone().max(axis=1))

    def makespan_on(self, cluster: Cluster) -> float:
        """A lower bound on the seconds per step if devices may compute different ops at the same time."""
        return self.weighted_on(cluster)[0]

    def weighted_on(self, cluster: Cluster) -> tuple[float, Floats]:
        """`makespan_on`, and the weights [kinds] that prove it: no step is shorter than a weighted mean of its devices'
        times; a linear program finds the weights with the greatest mean."""
        counts = Counter(cluster.devices)
        kinds, figures = len(counts), DeviceFigures(list(counts))
        works = self.works(cluster, figures)
        if not works.each:
            return 0.0, np.full(kinds, 1.0 / kinds)
        alone = Roofline(figures, works.each).least_alone() * works.runs[:, None]
        number = np.array(list(counts.values()), dtype=np.float64)
        unit = float(alone.max()) or 1.0
        # Maximize the sum of least[work] <= weight[kind] / devices * alone, the weights being 1 together.
        cut = np.flatnonzero(works.cut)
        rows = np.arange(cut.size * kinds)
        columns = np.concatenate([kinds + rows // kinds, rows % kinds])
        values = np.concatenate([np.ones(rows.size), (-alone[cut] / unit / number).ravel()])
        found = linprog(
            -np.concatenate([alone[~works.cut].sum(axis=0) / unit, np.ones(cut.size)]),
            A_ub=coo_array((values, (np.tile(rows, 2), columns)), shape=(rows.size, kinds + cut.size)),
            b_ub=np.zeros(rows.size),
            A_eq=np.concatenate([np.ones(kinds), np.zeros(cut.size)])[None],
            b_eq=np.ones(1),
            method="highs",
        )
        weights = np.maximum(found.x[:kinds], 0.0)
        # They sum to 1 within the solver's tolerance.
        return -float(found.fun) * unit * (1 - _SAFETY), weights / weights.sum()
