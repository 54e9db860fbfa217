"""The linear relaxation of a reduced network, over its local polytope: its optimal dual is messages.

TRW-S stops where no node's step raises the bound, which may be far below the relaxation: with costs of chains, of which
each weighs other parts of a step, 675 ms where that is 738 and the optimum 755 (BERT-base on `paper64`). Any messages
are valid, so a bound from these does not hang on how exactly the linear program was solved.

Source: Wainwright, Jaakkola, Willsky, "MAP estimation via agreement on trees" (2005): the dual of the bound by trees is
this relaxation.
"""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from hapsynth.search.solver.problem import Floats
from hapsynth.search.solver.reduction import ReducedProblem


def cells(network: ReducedProblem) -> int:
    """Entries of the tables of all links, which have a column each."""
    ends = ((i, j) for i in network.active() for j in network.links[i] if i < j)
    return sum(network.seen_from(i, j)[1].size for i, j in ends)


def relax(network: ReducedProblem, extra: dict[int, Floats], seconds: float = np.inf) -> bool:
    """Gives all links the messages of an optimal dual; says whether one was found in so many seconds. extra: as of
    `Dual`."""
    active = network.active()
    links = [(i, j) for i in active for j in network.links[i] if i < j]
    sizes = [network.count(i) for i in active]
    first = dict(zip(active, np.cumsum([0, *sizes]).tolist(), strict=False))
    states = sum(sizes)
    costs = [network.unary(i) + extra[i] if i in extra else network.unary(i) for i in active]
    # A row per variable, whose states sum to 1, then one per group of each end, whose cells sum to its states.
    rows = [np.repeat(np.arange(len(active)), sizes)]
    columns, signs = [np.arange(states)], [np.ones(states)]
    column, row = states, len(active)
    row_of: dict[tuple[int, int], int] = {}
    for i, j in links:
        own, table, others = network.seen_from(i, j)
        possible = np.nonzero(np.isfinite(table))
        costs.append(table[possible])
        here = column + np.arange(possible[0].size)
        column += here.size
        ends = (i, j, own, possible[0], table.shape[0]), (j, i, others, possible[1], table.shape[1])
        for end, other, groups, at, count in ends:
            row_of[end, other] = row
            rows += [row + at, row + groups]
            columns += [here, first[end] + np.arange(groups.size)]
            signs += [np.ones(here.size), -np.ones(groups.size)]
            row += count
    every = np.concatenate(costs)
    unit = float(np.abs(every).max(initial=0.0)) or 1.0
    found = linprog(
        every / unit,
        A_eq=coo_array((np.concatenate(signs), (np.concatenate(rows), np.concatenate(columns)))).tocsr(),
        b_eq=np.concatenate([np.ones(len(active)), np.zeros(row - len(active))]),
        bounds=(0, None),
        method="highs",
        options={"time_limit": max(0.0, seconds)} if np.isfinite(seconds) else {},
    )
    if found.status:
        return False
    prices = -unit * np.asarray(found.eqlin.marginals)
    for i, j in links:
        own, _, others = network.seen_from(i, j)
        network.messages[i, j] = prices[row_of[i, j] + own]
        network.messages[j, i] = prices[row_of[j, i] + others]
    return True
