"""The ratios of a plan with reshares, as the ways in which each dimension may be cut while programs are compared.

A class that the plan has in parts has a ratio for each of them. What ops can cut together is cut in the same ways, so
an op takes one way for all that it cuts; conversions lead from one to another, at what a reshare costs. `RatioVariants`
counts the ways and has the ratio of each.
"""

from __future__ import annotations

import numpy as np

from hapsynth.instructions.collectives import Collective
from hapsynth.instructions.program.sizes import Node, Sizes
from hapsynth.search.analysis.dimension_groups import kinship
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.formulation.ways import BuilderOfWays
from hapsynth.search.sizing.ratios import Ratios, own_weights

_CutGroup = tuple[Node, tuple[int, ...]]
"""What ops can cut together, and the axis."""


class RatioVariants:
    """Of a plan's sizes along one mesh axis. `named`: the ratio of each way of what the plan cuts, those of the largest
    classes last."""

    def __init__(self, costs: CostModel, sizes: Sizes) -> None:
        self.costs, self.sizes = costs, sizes
        self._kin = kinship(costs.graph, costs.table)
        self._vectors: dict[_CutGroup, list[Floats]] = {}
        self._counts: dict[Node, int] = {}
        self.named: dict[Node, Floats] = {}
        values = sizes.graph.values
        weight = lambda c: sum(values[v].nbytes for v in {v for v, *_ in c.members})
        for cls in sorted((c for c in sizes.classes.all if c.owner is None), key=weight):
            vector = np.array(sizes.shares[cls.index], dtype=np.float64) / max(cls.units, 1)
            way: dict[_CutGroup, int] = {}
            for value, dim, axes, _ in cls.members:
                group = self._root(value, dim), axes
                # Whole units of another length are as near as these are coarse.
                if group not in way:
                    way[group] = self._way(group, vector, 1.0 / max(cls.units, 1), cls.members)
                self.named[value, dim, axes, way[group]] = vector

    def count(self, value: int, dim: int) -> int:
        """In how many ways a dimension may be cut."""
        return self._counts.get(self._root(value, dim), 1)

    def ratios(self) -> Ratios:
        """By which problems are posed: the plan's of each way, and its largest class's where it cuts nothing."""
        costs, weights = self.costs, own_weights(self.costs, self.sizes)
        return Ratios(costs.graph, costs.table, weights, None, costs.lengths, named=self.named)

    def _root(self, value: int, dim: int) -> Node:
        return self._kin.root(value, dim) or (value, dim, (), 0)

    def _way(self, group: _CutGroup, vector: Floats, near: float, members: tuple[Node, ...]) -> int:
        """The number of a vector among those by which a group is cut along an axis."""
        root, axes = group
        known = self._vectors.setdefault(group, [])
        for way, other in enumerate(known):
            taken = any((v, d, axes, way) in self.named for v, d, by, _ in members if by == axes)
            if not taken and np.abs(other - vector).max() <= near:
                return way
        known.append(vector)
        self._counts[root] = max(self._counts.get(root, 1), len(known))
        return len(known) - 1


class VariantBuilder(BuilderOfWays):
    """Knows what it takes to change from one way of being cut to another."""

    def _allows(self, value: int, step: Collective) -> bool:
        return not (step.recuts and self.whole[value])
