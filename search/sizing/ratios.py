"""Ratio vectors: which fraction of a dimension each device holds, while programs are still being compared; those at
which a search begins, and those at which a plan is certified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from copy import copy
from functools import cached_property
from math import prod

import numpy as np

from hapsynth.graph.ir import Graph
from hapsynth.instructions.layout import owner_of
from hapsynth.instructions.program.sizes import Classes, Node, Sizes, UnionFind
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.search.analysis.dimension_groups import kinship, of_state
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import devices_of

_EVEN = -2
"""In place of a plan's vector that a dimension is cut like, where -1 is none."""

_SAME_UNITS = 1e-6
"""The tolerance within which a number of units is whole."""

EvenDims = Set[tuple[int, int]]
"""(value, dimension) that are cut evenly whatever else is not."""
NOTHING: EvenDims = frozenset()


def round_shares(fractions: Floats, units: int) -> tuple[int, ...]:
    """Whole units nearest to the fractions (largest remainder), summing to `units`; ties go to the first device."""
    exact = fractions * units
    shares = np.floor(exact + 1e-9).astype(int)
    order = np.argsort(-(exact - shares), kind="stable")
    shares[order[: units - int(shares.sum())]] += 1
    return tuple(shares.tolist())


def _whole_shares(vector: Floats, units: int) -> tuple[int, ...] | None:
    """A vector in units; None where these are not whole, or not as many."""
    exact = vector * units
    shares = np.round(exact)
    if shares.sum() != units or not np.allclose(exact, shares, rtol=0.0, atol=_SAME_UNITS):
        return None
    return tuple(shares.astype(int).tolist())


def nested_shares(weights: Floats, units: int) -> tuple[int, ...]:
    """Whole units in proportion to weights [positions along the major axis, along the next, ...]: what each axis cuts
    is nearest to its own proportion, then cut again by the next one's. Row-major."""
    total = weights.sum(axis=tuple(range(1, weights.ndim)))
    even = np.full(total.shape, 1.0 / total.size)
    outer = round_shares(total / total.sum() if total.sum() > 0 else even, units)
    if weights.ndim == 1:
        return outer
    return tuple(s for row, held in zip(weights, outer, strict=True) for s in nested_shares(row, held))


class Ratios:
    """A fraction vector for every (value, dimension, mesh axes) of a graph; positions row-major in the axes.

    Dimensions that the current plan cuts have that plan's exact sizes. Every other dimension is cut by `weights`, one
    per device, rounded to what its length allows, or like a dimension that some op cuts alike, where the plan cuts one.
    `evenly`: (value, dimension) that are cut evenly instead of by `weights`. `named`: the vectors of some dimensions,
    and so of those cut alike, whatever the sizes and weights are. What has an owner is all at one position.
    """

    def __init__(
        self,
        graph: Graph,
        table: FactorTable,
        weights: Floats,
        sizes: Sizes | None = None,
        lengths: Sequence[int] | None = None,
        evenly: EvenDims = NOTHING,
        named: Mapping[Node, Floats] | None = None,
    ) -> None:
        self.graph, self.weights, self.evenly = graph, weights, evenly
        self.strict = False
        self.lengths = tuple(lengths or (len(weights),))
        self.vectors: list[Floats] = []
        """Per position along the axes."""
        self.devices: list[Floats] = []
        """The same vectors, per device."""
        self.largest: list[float] = []
        self._index: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._rounded: dict[tuple[int, tuple[int, ...], int], int] = {}
        self._exact: dict[Node, int] = {}
        self._kin: dict[tuple[Node, tuple[int, ...], int], int] = {}
        self._kinship = kinship(graph, table) if sizes is not None or named else UnionFind()
        self._kin_of: dict[int, list[tuple[int, int]]] = {}
        """Per value, (dimension, what it is cut like) of those that are cut alike with what has a vector."""
        if sizes is not None or named:
            self._adopt(sizes, named or {})

    def _adopt(self, sizes: Sizes | None, named: Mapping[Node, Floats]) -> None:
        weight: dict[tuple[Node, tuple[int, ...], int], float] = {}
        for (value, dim, axes, way), vector in named.items():
            self._exact[(value, dim, axes, way)] = self._intern(axes, vector)
            if (kin := self._kinship.root(value, dim)) is not None:
                root = (kin, axes, way)
                weight[root], self._kin[root] = np.inf, self._intern(axes, vector)
        for cls in sizes.classes.all if sizes is not None else ():
            assert sizes is not None
            if cls.owner is not None:
                continue
            nbytes = sum(self.graph.values[v].nbytes for v in {v for v, *_ in cls.members})
            # Of all members that the same axes cut.
            vectors: dict[tuple[int, ...], int] = {}
            for value, dim, axes, way in cls.members:
                if axes not in vectors:
                    lengths = np.array(sizes.lengths(value, dim, axes, way), dtype=np.float64)
                    vectors[axes] = self._intern(axes, lengths / max(lengths.sum(), 1.0))
                vector = vectors[axes]
                self._exact[(value, dim, axes, way)] = vector
                if (kin := self._kinship.root(value, dim)) is not None:
                    root = (kin, axes, way)
                    if weight.get(root, -1) < nbytes:
                        weight[root] = nbytes
                        self._kin[root] = vector
        cut: dict[Node, list[tuple[tuple[int, ...], int, int]]] = {}
        for (root, axes, way), vector in self._kin.items():
            cut.setdefault(root, []).append((axes, way, vector))
        number: dict[object, int] = {}
        like = {root: number.setdefault(tuple(sorted(ways)), len(number)) for root, ways in cut.items()}
        for node in list(self._kinship.parent) if like else ():
            if (k := like.get(self._kinship.find(node))) is not None:
                self._kin_of.setdefault(node[0], []).append((node[1], k))

    def strictly(self) -> Ratios:
        """The same ratios, but an op may cut dimensions together only if they have one vector, and this is whole in the
        op's units. Without that the problem has programs that no sizes of shards realize, so its bound is looser; they
        are allowed at first, as such a program may be worth sizing."""
        found = copy(self)
        found.strict = True
        return found

    def allow(self, nodes: Sequence[Node], units: int) -> bool:
        """Whether some dimensions can be cut as one, in `units`."""
        if not self.strict:
            return True
        every = {self.of(*node) for node in nodes}
        shares = _whole_shares(self.vectors[every.pop()], units)
        return not every and shares is not None

    @cached_property
    def roles(self) -> list[int]:
        """Per value, a number: values of equal shape and number are cut alike. 0 where the weights alone decide."""
        exact: dict[int, list[tuple[int, tuple[int, ...], int, int]]] = {}
        for (value, dim, axes, way), vector in self._exact.items():
            exact.setdefault(value, []).append((dim, axes, way, vector))
        even: dict[int, list[int]] = {}
        for value, dim in self.evenly:
            even.setdefault(value, []).append(dim)
        number: dict[object, int] = {}
        found = [0] * len(self.graph.values)
        for v in exact.keys() | self._kin_of.keys() | even.keys():
            cut = (
                tuple(sorted(exact.get(v, ()))),
                tuple(sorted(self._kin_of.get(v, ()))),
                tuple(sorted(even.get(v, ()))),
            )
            found[v] = number.setdefault(cut, len(number) + 1)
        return found

    def sizes_of(self, classes: Classes) -> Sizes | None:
        """The sizes that a program has at these ratios, where each of its classes is cut in one way."""
        shares: list[tuple[int, ...]] = []
        for cls in classes.all:
            value, dim, axes, way = next(m for m in cls.members if m[2] == cls.axes)
            mine = _whole_shares(self.vectors[self.of(value, dim, axes, way, cls.units)], cls.units)
            if mine is None:
                return None
            shares.append(mine)
        return Sizes(self.graph, classes, tuple(shares))

    def _intern(self, axes: tuple[int, ...], vector: Floats) -> int:
        key = (axes, vector.tobytes())
        if key not in self._index:
            self._index[key] = len(self.vectors)
            self.vectors.append(vector)
            self.devices.append(vector[devices_of(self.lengths, axes)])
            self.largest.append(float(vector.max()))
        return self._index[key]

    def of(self, value: int, dim: int, axes: tuple[int, ...], way: int = 0, units: int | None = None) -> int:
        """The index of the vector for a dimension cut in `units` (its length by default) along some axes, one way."""
        if (owner := owner_of(way)) is not None:
            return self._owned(axes, owner)
        node = (value, dim, axes, way)
        if node in self._exact:
            return self._exact[node]
        kin = self._kinship.root(value, dim)
        base = -1 if kin is None else self._kin.get((kin, axes, way), -1)
        if base < 0 and (value, dim) in self.evenly:
            base = _EVEN
        units = units or self.graph.values[value].shape[dim]
        key = (base, axes, units)
        if key not in self._rounded:
            shares = (
                nested_shares(self._weights(axes, base), units) if base < 0 else round_shares(self.vectors[base], units)
            )
            self._rounded[key] = self._intern(axes, np.array(shares) / units)
        return self._rounded[key]

    def _owned(self, axes: tuple[int, ...], owner: int) -> int:
        """The vector of what one position has all of."""
        key = (_EVEN - 1 - owner, axes, 1)
        if key not in self._rounded:
            whole = np.zeros(prod(self.lengths[a] for a in axes))
            whole[owner] = 1.0
            self._rounded[key] = self._intern(axes, whole)
        return self._rounded[key]

    def _weights(self, axes: tuple[int, ...], base: int) -> Floats:
        """[positions along each of the axes]"""
        of_devices = np.ones_like(self.weights) if base == _EVEN else self.weights
        weights = np.bincount(devices_of(self.lengths, axes), of_devices).astype(np.float64)
        return weights.reshape([self.lengths[a] for a in axes])


def proportional(speeds: Sequence[float] | Floats) -> Floats:
    """Fractions by speed."""
    vector = np.asarray(speeds, dtype=np.float64)
    return vector / vector.sum()


def starts(costs: CostModel) -> list[tuple[Floats, EvenDims]]:
    """Weights of the devices to begin from, and what is cut evenly all the same: by speed but for the state, which is
    communicated at the size of its largest shard; by speed; even; by memory, where that is exact and unlike.

    Sizes may leave devices out, and plans for fewer devices are made besides (`planning/device_subsets.py`).
    """
    speed = proportional(costs.speed)
    found = [(speed, NOTHING)]
    if len(set(speed.tolist())) > 1:
        if costs.graph.state:
            # First: it mostly is the best, and others are given up where they begin above what is known.
            found.insert(0, (speed, of_state(costs.graph, kinship(costs.graph, costs.table))))
        found.append((np.full(costs.n, 1.0 / costs.n), NOTHING))
    if costs.memory_budget.proportions is not None:
        found.append((costs.memory_budget.proportions, NOTHING))
    return found


def own_weights(costs: CostModel, sizes: Sizes) -> Floats:
    """Weights of the devices by which a plan's largest class is cut, of those that nobody owns; by speed where it cuts
    nothing."""
    speed = proportional(costs.speed)
    weigh = lambda c: (len(c.axes), sum(costs.graph.values[v].nbytes for v in {v for v, *_ in c.members}))
    cls = max((c for c in sizes.classes.all if c.owner is None), key=weigh, default=None)
    if cls is None or not cls.units:
        return speed
    held = np.array(sizes.shares[cls.index], dtype=np.float64)[costs.position(cls.axes)]
    return held / held.sum()
