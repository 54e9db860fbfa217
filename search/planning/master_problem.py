"""The restricted master problem: weights, of chains or of ops, as far as the programs seen so far tell.

`lengths`: seconds of each chain, or bytes at each op, in each program [programs, chains]; `floors`: the least weight of
each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from hapsynth.search.cost.model import Floats


def limiting_weights(lengths: Floats, floors: Sequence[float]) -> tuple[Floats, float, Floats]:
    """Weights at which the least weighted length of the programs is the greatest (Kelley's cutting planes), this
    length, and the shares of the programs that limit it. Where HiGHS solves nothing: even weights above the floors, a
    length that no weights exceed, and equal shares."""
    count, unit = lengths.shape[1], float(lengths.max()) or 1.0
    found = linprog(
        np.array([0.0] * count + [-1.0]),
        A_ub=np.column_stack([-lengths / unit, np.ones(len(lengths))]),
        b_ub=np.zeros(len(lengths)),
        A_eq=np.array([[1.0] * count + [0.0]]),
        b_eq=np.ones(1),
        bounds=[*[(floor, None) for floor in floors], (None, None)],
        method="highs",
    )
    if found.x is None:
        even = (1.0 - sum(floors)) / count
        return np.array(floors) + even, float(lengths.max()), np.full(len(lengths), 1.0 / len(lengths))
    return np.maximum(found.x[:count], 0.0), -float(found.fun) * unit, np.maximum(-found.ineqlin.marginals, 0.0)


def nearest_weights(lengths: Floats, best: Floats, floors: Sequence[float], level: float) -> Floats:
    """The weights nearest to the best ones, in the sum of what differs, at which each program's weighted lengths are
    `level` or more (the level bundle method: Lemarechal, Nemirovskii, Nesterov 1995)."""
    count, unit = best.size, float(lengths.max()) or 1.0
    more = [(max(floor - weight, 0.0), None) for floor, weight in zip(floors, best, strict=True)]
    found = linprog(
        np.ones(2 * count),
        A_ub=np.column_stack([-lengths, lengths]) / unit,
        b_ub=(lengths @ best - level) / unit,
        A_eq=np.array([[1.0] * count + [-1.0] * count]),
        b_eq=np.array([1.0 - best.sum()]),
        bounds=[*more, *[(0.0, weight) for weight in best]],
        method="highs",
    )
    return best if found.x is None else np.maximum(best + found.x[:count] - found.x[count:], 0.0)
