"""Branches of a search for the least makespan: programs that use one tensor alike, and those that use it otherwise.

A bound by weighted chains is no higher than the mean of any programs takes: half of a step that gathers a large tensor
and half of one that gathers what is multiplied with it. Programs that do either have bounds of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The programs that take only some states of some variables (`allowed`, bool [states]), and what is known of them:
    `bound` seconds that they take at least, found at `weights` of the chains that there were. `messages`: what the dual
    of the last problem came to. `most`: that a bound can come to, as far as was known at the last weights; `rose`:
    whether it did there. `in_vain`: how many rounds have told nothing new since, as what a program takes is more than
    its choices cost in the weighted problem. `begun`: some round was made; `ended`: no other would change anything."""

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

    def parted(self, limiting: Sequence[tuple[Seen, float]], space: ChainSpace) -> tuple[Branch, Branch] | None:
        """By how some programs of it, each with its share in the bound, use the tensor that they convert the most
        differently: those that use it as the one of the largest share does, and the others. None where they use all
        alike."""
        found = _unlike_use(limiting, space) if limiting else None
        if found is None:
            return None
        variable, states = found
        within = self.allowed.get(variable, np.ones_like(states))
        some, others = (
            Branch(self.weights, dict(self.messages), {**self.allowed, variable: within & of}, self.bound)
            for of in (states, ~states)
        )
        return some, others


def _unlike_use(limiting: Sequence[tuple[Seen, float]], space: ChainSpace) -> tuple[int, Mask] | None:
    """Of a use of that tensor, the one that parts the shares the most evenly, its variable and the states in which it
    needs the tensor as in the program of the largest share."""
    shares = np.array([share for _, share in limiting])
    sent = np.array([space.sent_of_each(known.taken) for known, _ in limiting])
    spread = shares @ np.abs(sent - shares @ sent)
    for value in np.argsort(-spread, kind="stable")[:_TENSORS].tolist():
        most, found = 0.0, None
        for use in space.structure.uses:
            if use.value != value or use.reader < 0:
                continue
            groups = np.array([use.needs.groups[known.choices[use.variable]] for known, _ in limiting])
            of_most = groups[int(shares.argmax())]
            share = float(shares[groups == of_most].sum())
            if share * (1 - share) > most:
                most, found = share * (1 - share), (use.variable, use.needs.groups == of_most)
        if found is not None:
            return found
    return None
