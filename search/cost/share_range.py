"""What the shares of one dimension along a mesh axis may be, as far as bounds over all ratios tell ratios apart."""

from __future__ import annotations

from math import ceil, floor
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hapsynth.search.cost.device_speed import Floats

Mask: TypeAlias = npt.NDArray[np.bool_]
Range: TypeAlias = tuple[float, float]
"""The least and the most that a share may be; none where the least is the greater."""


def spread(count: int, most: int) -> list[int]:
    """At most `most` evenly spaced indices into range(count), the first and the last included, rising."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


class ShareRange(NamedTuple):
    """Ranges, each from the least to the most: `largest`, of the largest of all shares; `slow`, of the largest share of
    a device that is not of the fastest kind; `fast`, of the sum of the fastest kind's shares."""

    largest: Range
    slow: Range = (0.0, 1.0)
    fast: Range = (0.0, 1.0)

    def tightened(self, fast: Mask) -> ShareRange:
        """The same ranges, each narrowed to what the other two allow. `fast` [devices]: which are of the fastest
        kind."""
        (low, high), (least, most), (few, many) = self
        some = int(np.count_nonzero(fast))
        others = fast.size - some
        most = min(most, high, 1.0 - few)
        few, many = max(few, 1.0 - others * most), min(many, some * high)
        least = max(least, (1.0 - many) / others) if others else least
        low = max(low, least, few / some)
        many = min(many, 1.0 - least)
        high = min(high, max(most, many))
        return ShareRange((low, high), (least, most), (few, many))

    def in_units(self, units: int) -> ShareRange:
        """The same for a dimension that is cut in `units` whole units."""
        # One more than rounding makes of a whole number is a looser bound, and one less would be none.
        whole = lambda x: (ceil(x[0] * units - 1e-9) / max(units, 1), floor(x[1] * units + 1e-9) / max(units, 1))
        return ShareRange(*map(whole, self))

    def bounds(self, fast: Mask) -> tuple[Floats, Floats]:
        """(the least, the most) that the share of each position may be."""
        (few, many), most = self.fast, np.where(fast, self.largest[1], min(self.largest[1], self.slow[1]))
        most = np.minimum(most, np.where(fast, many, 1.0 - few))
        together = np.where(fast, most[fast].sum(), most[~fast].sum())
        least = np.where(fast, few, 1.0 - many) - (together - most)
        return np.maximum(np.maximum(least, 1.0 - (most.sum() - most)), 0.0), most
