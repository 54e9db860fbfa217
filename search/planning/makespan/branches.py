"""Branches of a search for the least makespan: programs that use one tensor alike, and those that use it otherwise.

A bound by weighted chains is no higher than the mean of any programs takes: half of a step that gathers a large tensor
and half of one that gathers what is multiplied with it. Programs that do either have bounds of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hapsynth.search.analysis.reachability import Mask
from hapsynth.search.cost.model import Floats
from hapsynth.search.formulation.chains import ChainSpace, Occupancy
from hapsynth.search.solver import Ints, Messages

_TENSORS = 8
"""At which programs may be parted: those that they convert the most differently."""


class Seen(NamedTuple):
    """The choices of a program, and what it takes of each resource."""

    choices: Ints
    taken: Occupancy


@dataclass(eq=False)
class Branch:
    """The programs whose states are `allowed` (variable -> bool [states]), and the bound on them.

    `bound`: a lower bound on their makespans in seconds, found at `weights` of the chains known then. `messages`: of
    the dual of the last problem. `most`: an upper bound on the bound, by the programs known at the last weights;
    `rose`: whether the bound rose there. `in_vain`: rounds without news since then, as a program's chains are longer
    than its choices cost in the weighted problem. `begun`: the next round is at weights that the programs suggest, not
    at `weights`. `ended`: no further round would change anything.
    """

    weights: Floats
    messages: Messages
    allowed: Mapping[int, Mask] = field(default_factory=dict)
    bound: float = 0.0
    begun: bool = False
    ended: bool = False
    most: float = np.inf
    rose: bool = False
    in_vain: int = 0

    def has(self, choices: Ints) -> bool:
        return all(states[choices[variable]] for variable, states in self.allowed.items())

    def parted(self, variable: int, states: Mask) -> tuple[Branch, Branch]:
        """Its programs in which a variable takes some states, and the others."""
        within = self.allowed.get(variable, np.ones_like(states))
        some, others = (
            Branch(self.weights, self.messages, {**self.allowed, variable: within & of}, self.bound)
            for of in (states, ~states)
        )
        return some, others


def unlike_uses(limiting: Sequence[tuple[Seen, float]], space: ChainSpace) -> Iterator[tuple[int, Mask]]:
    """Ways to part the programs that limit a bound, given with their shares: the uses of the tensors whose conversion
    differs the most between them. Yields the variable of a use, and the states [states] in which it requires the same
    layout as some of the programs."""
    shares = np.array([share for _, share in limiting])
    sent = np.array([space.sent_of_each(known.taken) for known, _ in limiting])
    spread = shares @ np.abs(sent - shares @ sent)
    among = {value for value in np.argsort(-spread, kind="stable")[:_TENSORS].tolist() if spread[value]}
    for use in space.structure.uses:
        if use.value in among and use.reader >= 0:
            groups = {int(use.needs.groups[known.choices[use.variable]]) for known, _ in limiting}
            for group in sorted(groups) if len(groups) > 1 else ():
                yield use.variable, use.needs.groups == group
