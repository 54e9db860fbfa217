"""Choices where a dimension may be cut in several ways, each in shards of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from hapsynth.instructions.factors import Triples
from hapsynth.instructions.layout import Reduction
from hapsynth.instructions.rules.factor_table import cut_nodes
from hapsynth.search.cost.model import CostModel
from hapsynth.search.formulation.choice_space import ChoiceSpace, Interned, Owners, Restriction
from hapsynth.search.formulation.conversions import LayoutSet
from hapsynth.search.formulation.problem_builder import ProblemBuilder


class ChoicesInWays(ChoiceSpace):
    """Along one mesh axis. `count`: in how many ways a (value, dimension) may be cut, as many for all that ops can cut
    together: an op takes one way for all that it cuts."""

    def __init__(
        self,
        costs: CostModel,
        count: Callable[[int, int], int],
        restriction: Restriction | None = None,
        *,
        sparing: bool = False,
        owners: Owners | None = None,
    ) -> None:
        assert len(costs.axes) == 1
        self._count = count
        super().__init__(
            costs.graph, costs.table, restriction, sparing=sparing, owners=owners, agreed_axes=costs.agreed_axes
        )

    def _triples(self, op: int) -> Interned[Triples]:
        """An op's triples, each in every way in which its cut dimensions may be cut."""
        every, factors = super()._triples(op), self.table[op]
        counts: list[int] = []
        for triples in every:
            if any(map(factors.is_whole, triples)):
                counts.append(1)
                continue
            cut = (self._count(v, d) for _, nodes in cut_nodes(self.graph, op, factors, triples) for v, d, *_ in nodes)
            counts.append(max(cut, default=1))
        in_ways = lambda t, count: (t, *((t[0].along(way),) for way in range(1, count)))
        each = lambda: zip(every, counts, strict=True)
        make = lambda: Interned(t for triples, count in each() for t in in_ways(triples, count))
        return self.once(("ways", every, *counts), make)

    def _layout_set(
        self, value: int, dims: tuple[int, ...], reductions: tuple[Reduction, ...], owners: tuple[int, ...]
    ) -> LayoutSet:
        key = dims, reductions, tuple(self._count(value, d) for d in dims), owners
        return self.once(("layouts", *key), lambda: LayoutSet(self.axes, *key))


class BuilderOfWays(ProblemBuilder):
    """Problems of `ChoicesInWays`: tensors may come to be cut in another way, but for those that are `whole`."""

    @cached_property
    def whole(self) -> list[bool]:
        """Per value, whether it has several ways and may not come from one to another, as `ReshardAtoms` has it: inside
        a fused chain, a loop or a branch."""
        several = lambda v: any(way > 0 for *_, way in self.structure.layouts[v].cuts)
        inside = lambda v: self.graph.home[v] > 0 or not self.costs.is_materialized(v)
        return [several(v) and inside(v) for v in range(len(self.graph.values))]

    @cached_property
    def _roles(self) -> Sequence[int]:
        number: dict[object, int] = {}
        return [number.setdefault(role, len(number)) for role in zip(super()._roles, self.whole, strict=True)]

    def _profile(self, value: int) -> object:
        return super()._profile(value), self.whole[value]
