"""The cheapest ways between layouts, whatever single steps cost."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from hapsynth.instructions.layout import Layout
from hapsynth.search.formulation.conversions import Conversions, LayoutSet

LAYOUTS = LayoutSet(2, (0, 1), ("sum",))


@pytest.mark.parametrize(
    "prices", [(0.0, 0.001, 0.002), (0.0, 1e-20, 0.001, 1.0)], ids=["some for nothing", "some lost in a sum"]
)
@pytest.mark.parametrize("seed", range(8))
def test_ways_lead_there_at_their_cost(prices: Sequence[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    price: dict[tuple[Layout, Layout], float] = {}

    def time(source: Layout, target: Layout, axis: int) -> float:
        return price.setdefault((source, target), float(rng.choice(prices)))

    ways = Conversions(LAYOUTS, time)
    for i, source in enumerate(LAYOUTS.layouts):
        for j, target in enumerate(LAYOUTS.layouts):
            path = ways.path(source, target)
            assert (path is None) == math.isinf(ways.seconds[i, j])
            if path is None:
                continue
            at = [source, *(after for _, after, _ in path)]
            assert [before for before, _, _ in path] == at[:-1]
            assert at[-1] == target
            assert len(set(at)) == len(at)
            assert sum(price[a, b] for a, b, _ in path) == pytest.approx(ways.seconds[i, j], abs=0)
