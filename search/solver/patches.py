"""Patches of two assignments: variables in which they differ and that edges join.

Where all else is equal, what a patch changes does not depend on the others, so each can be taken from either.
"""

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from hapsynth.search.solver.problem import Ints


def patches(ends: Ints, differs: npt.NDArray[np.bool_]) -> tuple[Ints, int]:
    """Of each variable the patch that it is in (int64 [variables]), and how many patches there are: the number after
    the last stands where the assignments are the same. `ends`: the variables that edges join, int64 [edges, 2];
    `differs`: bool [variables]."""
    joined = ends[differs[ends].all(axis=1)]
    graph = coo_array((np.ones(len(joined)), (joined[:, 0], joined[:, 1])), shape=(differs.size, differs.size))
    _, component = connected_components(graph, directed=False)
    names = np.unique(component[differs])
    return np.where(differs, np.searchsorted(names, component), names.size), names.size
