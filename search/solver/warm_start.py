"""Messages of one problem as the beginning of a similar one's dual: same variables and edges, other costs.

Any messages are valid, and the bound is computed from those there are: what is recalled decides how soon it is tight,
never whether it holds.
"""

import numpy as np

from hapsynth.search.solver.interning import least_by_group
from hapsynth.search.solver.problem import Floats, Messages
from hapsynth.search.solver.reduction import ReducedProblem


def remember(messages: Messages, network: ReducedProblem, sizes: list[int]) -> None:
    """Notes a network's messages; those of states that it has lost stay as they were. sizes: states per variable."""
    for (i, j), message in network.messages.items():
        known = messages.get((i, j))
        if known is None or known.size != sizes[i]:
            known = np.full(sizes[i], np.nan)
        # Not in place: callers keep what they had.
        noted = messages[i, j] = known.copy()
        noted[network.states(i)] = message


def recall(messages: Messages, network: ReducedProblem, sizes: list[int]) -> None:
    """Gives a network's links the messages known. What has another number of states is another variable."""
    for i in network.active():
        for j in network.links[i]:
            mine, theirs = messages.get((i, j)), messages.get((j, i))
            if i > j or mine is None or theirs is None or mine.size != sizes[i] or theirs.size != sizes[j]:
                continue
            at_i, at_j = mine[network.states(i)], theirs[network.states(j)]
            begin(network, i, j, at_i, at_j)


def begin(network: ReducedProblem, i: int, j: int, at_i: Floats, at_j: Floats) -> None:
    """Gives a link its messages; nan where a state has none."""
    network.messages[i, j] = _filled(network, i, j, at_i, at_j)
    network.messages[j, i] = _filled(network, j, i, at_j, network.messages[i, j])


def _filled(network: ReducedProblem, i: int, j: int, message: Floats, other: Floats) -> Floats:
    """A state without a message takes the one at which its least cost over the link is 0."""
    lost = ~np.isfinite(message)
    if not lost.any():
        return message
    own, table, others = network.seen_from(i, j)
    known = np.isfinite(other)
    least = (table + least_by_group(others[known], other[known], table.shape[1])).min(axis=1)
    return np.where(lost, np.where(np.isfinite(least), -least, 0.0)[own], message)
