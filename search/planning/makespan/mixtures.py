"""Programs put together from parts of others: the shortest, as far as chains tell.

Where two programs differ, their variables fall into patches (`solver/patches.py`), each of which may be taken from
either. Those of several programs that share a variable or an edge exclude each other. A constraint program takes
those with which the longest chain is the shortest. Of the programs that limit a bound it is the restricted master
problem of column generation, with integers (price and branch): the convex combination of them that the linear program
finds is as short as the bound allows, and a mixture of them is often nearly so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array, csr_array

from hapsynth.search.cost.model import Floats
from hapsynth.search.formulation.chains import Chain, ChainSpace
from hapsynth.search.planning.makespan.branches import Seen
from hapsynth.search.scheduling.constraint_programming import reproducible_solver
from hapsynth.search.solver import Ints
from hapsynth.search.solver.patches import patches

_EFFORT = 1.0
"""In CP-SAT's deterministic time, about seconds, so that it ends, at the same mixture each time. HiGHS takes two to
four times as long for mixtures as short, and in late rounds of BERT more than a minute, at its root node."""
_KEPT = 2
"""The number of mixtures kept. Some that chains take to be longer are scheduled in less time."""
_TICKS = 1_000_000
"""The number of units of time into which the longest chain is divided."""


class _Patch(NamedTuple):
    """States that another program gives some variables, and by how much each chain is longer with them [chains]."""

    variables: Ints
    states: Ints
    changes: Floats


def mixtures(
    space: ChainSpace, chains: Sequence[Chain], base: Seen, others: Sequence[Seen], tolerance: float
) -> list[Ints]:
    """The choices of at most `_KEPT` programs, `base` with patches of others, the shortest first: the last improvements
    that the solver found. Empty where there are fewer than two patches, or nothing is shorter than `base`."""
    st = space.structure
    ends, size = st.joined_variables, base.choices.size
    places = np.concatenate([chain.places for chain in chains])
    of_chain = np.repeat(np.arange(len(chains)), [chain.places.size for chain in chains])
    found: dict[tuple[bytes, bytes], _Patch] = {}
    for other in others:
        patch, count = patches(ends, base.choices != other.choices)
        of_uses = patch[ends[: len(st.uses)]].min(axis=1)
        of_place = space.in_each_place(patch[st.op_variable], of_uses, patch[st.value_variable], count)
        longer, columns = other.taken.flat - base.taken.flat, count + 1
        # Most seconds are the same in both programs.
        differs = (longer != 0)[places]
        at = places[differs]
        sums = np.bincount(of_chain[differs] * columns + of_place[at], longer[at], minlength=len(chains) * columns)
        changes = np.asarray(sums, dtype=np.float64).reshape(len(chains), columns)
        for k in range(count):
            variables = np.flatnonzero(patch == k)
            states = other.choices[variables]
            found.setdefault((variables.tobytes(), states.tobytes()), _Patch(variables, states, changes[:, k]))
    every = [*found.values()]
    if len(every) < 2:
        return []
    changes = np.array([patch.changes for patch in every]).T
    lengths = np.array([chain.length(base.taken) for chain in chains])
    mixed = list[Ints]()
    for taken in _shortest(lengths, changes, _exclusive(every, ends, size), tolerance):
        choices = base.choices.copy()
        for patch in (every[k] for k in taken):
            choices[patch.variables] = patch.states
        mixed += [choices] if taken else []
    return mixed


def _adjacent(ends: Ints, size: int) -> csr_array:
    """Which variables edges join [size, size]."""
    return coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(size, size)).tocsr()


def _exclusive(every: Sequence[_Patch], ends: Ints, size: int) -> Ints:
    """Pairs of patches that share a variable, or that an edge joins [pairs, 2]."""
    rows = np.repeat(np.arange(len(every)), [patch.variables.size for patch in every])
    columns = np.concatenate([patch.variables for patch in every])
    inside = coo_array((np.ones(rows.size), (rows, columns)), shape=(len(every), size)).tocsr()
    near = _adjacent(ends, size)
    both = (inside @ (inside + inside @ (near + near.T)).T).tocoo()
    return np.stack(both.coords, axis=1)[both.coords[0] < both.coords[1]]


def _shortest(lengths: Floats, changes: Floats, exclusive: Ints, tolerance: float) -> list[list[int]]:
    """The patches of the solver's last `_KEPT` improvements, those with the shortest longest chain first; an empty list
    is `base`. `lengths`: [chains] without any; `changes`: [chains, patches]."""
    from ortools.sat.python import cp_model

    unit = (float(lengths.max()) or 1.0) / _TICKS
    model = cp_model.CpModel()
    takes = [model.new_bool_var("") for _ in changes.T]
    longest = model.new_int_var(0, _TICKS, "")
    for length, row in zip(np.rint(lengths / unit).tolist(), np.rint(changes / unit).astype(int), strict=True):
        some = np.flatnonzero(row).tolist()
        longer = cp_model.LinearExpr.weighted_sum([takes[k] for k in some], row[some].tolist())
        model.add(longer + int(length) <= longest)
    for one, other in exclusive.tolist():
        model.add_at_most_one(takes[one], takes[other])
    for take in takes:
        model.add_hint(take, False)
    model.minimize(longest)
    solver = reproducible_solver(_EFFORT)
    solver.parameters.relative_gap_limit = tolerance
    found = list[list[int]]()

    class Kept(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            found.append([k for k, take in enumerate(takes) if self.value(take)])

    solver.solve(model, Kept())
    return found[: -_KEPT - 1 : -1]
