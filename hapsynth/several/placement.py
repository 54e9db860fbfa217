"""How a state that several functions share lies, and what that asks of the plan of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Node, Sizes, layout_nodes
from hapsynth.search.cost.model import Floats
from hapsynth.search.formulation.choice_space import Restriction
from hapsynth.several.shared_state import Role

_Where = tuple[int, tuple[int, ...]]
"""(dimension, mesh axes that cut it)"""


class StatePlacement(NamedTuple):
    """How a leaf of the state lies: the elements on each position along the axes that cut a dimension; none are known
    where only the layout is asked for."""

    layout: Layout
    lengths: Mapping[_Where, tuple[int, ...]]


def placements(role: Role, program: Program, sizes: Sizes) -> dict[int, StatePlacement]:
    """How the program of a function keeps the leaves of the state that it has."""
    graph, found = role.traced.graph, dict[int, StatePlacement]()
    for leaf, position in role.outputs.items():
        value, layout = graph.outputs[position], program.outputs[position]
        if isinstance(value, int) and layout is not None:
            nodes = layout_nodes(value, layout)
            found[leaf] = StatePlacement(layout, {node[1:3]: sizes.lengths(*node) for node in nodes})
    for leaf, position in role.inputs.items():
        value = graph.inputs[position]
        nodes = layout_nodes(value, program.inputs[value])
        lengths = {node[1:3]: sizes.lengths(*node) for node in nodes}
        found[leaf] = StatePlacement(program.inputs[value], lengths)
    return found


@dataclass(frozen=True, eq=False)
class StateRequirements:
    """What is asked of a function's plan: the layouts of arguments, by value, and of results, by position, and how
    dimensions of them are cut, which two of them may ask of one value."""

    stored: Mapping[int, Layout]
    ends: Mapping[int, Layout]
    cuts: Sequence[tuple[Node, tuple[int, ...]]]

    @staticmethod
    def of(role: Role, kept: Mapping[int, StatePlacement]) -> StateRequirements:
        graph = role.traced.graph
        stored: dict[int, Layout] = {}
        ends: dict[int, Layout] = {}
        cuts: list[tuple[Node, tuple[int, ...]]] = []
        for leaf, how in kept.items():
            if leaf in role.inputs:
                value = graph.inputs[role.inputs[leaf]]
                stored[value] = how.layout
            elif leaf in role.outputs and isinstance(made := graph.outputs[role.outputs[leaf]], int):
                value = made
                ends[role.outputs[leaf]] = how.layout
            else:
                continue
            # What has an owner is said by its layout.
            cut = (at for at in how.lengths.items() if how.layout[at[0][1][0]].owner is None)
            cuts += [((value, dim, axes, 0), lengths) for (dim, axes), lengths in cut]
        return StateRequirements(stored, ends, cuts)

    @property
    def named(self) -> dict[Node, Floats]:
        """As in `FixedRatios`."""
        return {node: np.array(lengths) / sum(lengths) for node, lengths in self.cuts}

    def restriction(self, uncut: frozenset[tuple[int, int]]) -> Restriction | None:
        """`uncut`: (value, dimension) that no op may cut."""
        if not self.stored and not self.ends:
            return None
        allowed = (lambda value, dim: (value, dim) not in uncut) if uncut else None
        return Restriction(self.stored, allowed, ends=self.ends)

    def broken(self, sizes: Sizes) -> frozenset[tuple[int, int]]:
        """(value, dimension) that are cut in other ways than is asked."""
        return frozenset(node[:2] for node, lengths in self.cuts if sizes.lengths(*node) != lengths)
