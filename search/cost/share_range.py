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


class ShareRange(NamedTuple):
    """From the least to the most that the largest of all shares may be, and the largest of the slow devices: of all but
    those of the fastest kind."""

    largest: Range
    slow: Range = (0.0, 1.0)

    def tightened(self, fast: Mask) -> ShareRange:
        """The same with the ends that each of the two leaves the other."""
        (low, high), (least, most) = self
        some = int(np.count_nonzero(fast))
        others = fast.size - some
        most = min(most, high)
        low = max(low, least, (1.0 - others * most) / some)
        least = max(least, (1.0 - some * high) / others) if others else least
        return ShareRange((low, high), (least, most))

    def in_units(self, units: int) -> ShareRange:
        """The same of a dimension that is cut in so many whole units."""
        # One more than rounding makes of a whole number is a looser bound, and one less would be none.
        whole = lambda x: (ceil(x[0] * units - 1e-9) / max(units, 1), floor(x[1] * units + 1e-9) / max(units, 1))
        return ShareRange(whole(self.largest), whole(self.slow))

    def bounds(self, fast: Mask) -> tuple[Floats, Floats]:
        """(the least, the most) that the share of each position may be."""
        most = np.where(fast, self.largest[1], min(self.largest[1], self.slow[1]))
        return np.maximum(1.0 - (most.sum() - most), 0.0), most
