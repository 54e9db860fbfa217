"""The ratios at which a search begins, and those at which a plan is certified."""

from __future__ import annotations

import numpy as np

from hapsynth.instructions.sizes import Sizes
from hapsynth.search.costs import CostModel, Floats
from hapsynth.search.ratios import NOTHING, Evenly, kinship, of_state, proportional


def starts(costs: CostModel) -> list[tuple[Floats, Evenly]]:
    """Weights of the devices to begin from, and what is cut evenly all the same: by speed but for the state, which is
    communicated at the size of its largest shard; by speed; even; by memory, where that is exact and unlike.

    Sizes may leave devices out, and plans for fewer devices are made besides (`subclusters.py`).
    """
    speed = proportional(costs.rate("float32"))
    found = [(speed, NOTHING)]
    if len(set(speed.tolist())) > 1:
        if costs.graph.state:
            # First: it mostly is the best, and others are given up where they begin above what is known.
            found.insert(0, (speed, of_state(costs.graph, kinship(costs.graph, costs.table))))
        found.append((np.full(costs.n, 1.0 / costs.n), NOTHING))
    if costs.room.proportions is not None:
        found.append((costs.room.proportions, NOTHING))
    return found


def own_weights(costs: CostModel, sizes: Sizes) -> Floats:
    """Weights of the devices by which a plan's largest class is cut; by speed where it cuts nothing."""
    speed = proportional(costs.rate("float32"))
    if not sizes.shares:
        return speed
    weigh = lambda c: (len(c.axes), sum(costs.graph.values[v].nbytes for v in {v for v, *_ in c.members}))
    cls = max(sizes.classes.all, key=weigh)
    if not cls.units:
        return speed
    held = np.array(sizes.shares[cls.index], dtype=np.float64)[costs.position(cls.axes)]
    return held / held.sum()
