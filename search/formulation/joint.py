"""Several functions that keep some arrays in the same way, as one problem: what one would gain by another layout and
what the others would lose by it are weighed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hapsynth.instructions.layout import Layout
from hapsynth.search.cost.model import Floats
from hapsynth.search.formulation.choice_space import Domain
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.solver import Edge, Ints, Problem


@dataclass(frozen=True, eq=False)
class Subproblem:
    """One function. `weight`: how often it is called; `kept`: array that is shared -> the value that it is given as."""

    builder: ProblemBuilder
    weight: float
    kept: Mapping[int, int]

    def variable(self, array: int) -> int:
        return self.builder.structure.value_variable[self.kept[array]]

    def choices(self, array: int) -> Domain:
        return self.builder.structure.choices[self.variable(array)]


class _Scaled:
    """Multiplies the costs of one problem by a weight; shared arrays stay shared."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self._made: dict[int, Floats] = {}

    def __call__(self, costs: Floats, number: int) -> Floats:
        """The weighted costs. `number`: the number of this array (`Problem.shared`)."""
        if self.weight == 1.0:
            return costs
        if number not in self._made:
            self._made[number] = costs * self.weight
        return self._made[number]


class JointProblem:
    """The joint problem of several functions. Its optimum is the least weighted sum of their costs."""

    def __init__(self, parts: Sequence[Subproblem]) -> None:
        self.parts = parts
        problems = [p.builder.problem() for p in parts]
        self._first = list(accumulate((len(p.unary) for p in problems), initial=0))
        self._made: dict[tuple[Domain, Domain], tuple[Ints, Ints, Floats]] = {}
        unary: list[Floats] = []
        edges: list[Edge] = []
        for part, problem, first in zip(parts, problems, self._first):
            scaled = _Scaled(part.weight)
            shared = problem.shared
            unary += [scaled(u, n) for u, n in zip(problem.unary, shared.unary, strict=True)]
            edges += [
                e._replace(u=e.u + first, v=e.v + first, table=scaled(e.table, table))
                for e, (_, _, table) in zip(problem.edges, shared.edges, strict=True)
            ]
        self._lead: dict[int, int] = {}
        """Array -> the first part that takes it."""
        for p, part in enumerate(parts):
            for array in part.kept:
                if self._lead.setdefault(array, p) != p:
                    edges.append(self._tie(array, self._lead[array], p))
        self.problem = Problem(tuple(unary), tuple(edges))

    def _tie(self, array: int, one: int, two: int) -> Edge:
        """An edge that forces two parts to store an array in one layout."""
        a, b = (self.parts[p].choices(array) for p in (one, two))
        if (key := (a, b)) not in self._made:
            number: dict[Layout, int] = {}
            rows = [np.array([number.setdefault(o.computed, len(number)) for o in c.options])[c.option] for c in (a, b)]
            self._made[key] = rows[0], rows[1], np.where(np.eye(len(number), dtype=bool), 0.0, np.inf)
        u, v = (self._first[p] + self.parts[p].variable(array) for p in (one, two))
        return Edge(u, v, *self._made[key])

    def replicated(self) -> Ints:
        """The assignment in which every device runs every function whole."""
        return np.concatenate([np.array(p.builder.structure.replicated()) for p in self.parts])

    def layouts(self, assignment: Ints) -> dict[int, Layout]:
        """Array -> its layout under an assignment."""
        found: dict[int, Layout] = {}
        for array, p in self._lead.items():
            state = int(assignment[self._first[p] + self.parts[p].variable(array)])
            availability = self.parts[p].choices(array).state(state).availability
            assert availability is not None
            found[array] = availability.computed
        return found
