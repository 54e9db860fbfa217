"""Values, ops and uses of a structure that are alike, by number: layers share what is made of one of them.

Costs tell those that are alike apart by nothing but how they are cut: at ratios that cut them alike too, they have the
same conversions, the same seconds, the same tables.
"""

from __future__ import annotations

from hapsynth.search.costs import CostModel
from hapsynth.search.problem import Ints
from hapsynth.search.structure import Structure


class Kinds:
    """Of one structure, with any cost model of its graph."""

    def __init__(self, structure: Structure, costs: CostModel) -> None:
        graph, restriction = structure.graph, structure.restriction
        role = (lambda value: None) if restriction.convertible is None else restriction.role
        number: dict[object, int] = {}
        self.values = [
            number.setdefault((kind, role(v), costs.conversion_kind(v)), len(number))
            for v, kind in enumerate(structure.value_kinds)
        ]
        """Values of one kind are converted alike."""
        number = {}
        self.ops: list[int] = []
        """Ops of one kind take as long under each of the same states, what they make is converted alike."""
        self.tensors: list[tuple[int, ...]] = []
        """Per op, the values that it takes and makes: those of ops of one kind correspond."""
        for op in graph.ops:
            choices, runs = structure.choices[structure.op_variable[op.index]], graph.runs[op.region]
            key = costs.kind(op.index), id(structure.triples[op.index]), id(choices), runs, op.index in graph.unsure
            made = [(self.values[v], graph.runs[graph.home[v]]) for v in op.results]
            self.ops.append(number.setdefault((key, *made), len(number)))
            self.tensors.append((*[v for _, v in op.value_operands], *op.results))
        number = {}
        self.uses: list[tuple[int, int, Ints]] = []
        """Per use, its number, the variable that makes its value and the groups of that one's states: uses of one
        number cost alike where the value is converted alike."""
        for use in structure.uses:
            variable = structure.value_variable[use.value]
            choices = structure.choices[variable]
            kind = number.setdefault((id(choices.options), id(use.needs), use.runs), len(number))
            self.uses.append((kind, variable, choices.option))
