"""Two cuts of one value, between which it moves."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from hapsynth.lower import Storage


def storages(lengths: tuple[int, ...], layout: Any, old: Any, new: Any, dtype: Any, shape: Any) -> list[Storage]:
    devices = np.array(jax.devices()[: np.prod(lengths)]).reshape(lengths)
    mesh = Mesh(devices, tuple("ab"[: len(lengths)]), axis_types=(AxisType.Auto,) * len(lengths))
    return [Storage(shape, np.dtype(dtype), False, layout, cuts, mesh) for cuts in (old, new)]
