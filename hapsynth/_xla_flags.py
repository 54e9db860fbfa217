"""XLA's flags that hapsynth sets: in what it compiles, and by a launcher, which does without JAX."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

AUTOTUNING = "xla_gpu_shard_autotuning"
UNSHARED: Mapping[str, bool] = MappingProxyType({AUTOTUNING: False})
"""Of XLA, for programs of several processes on GPUs: each tunes its kernels itself. Processes that share that out wait
for one another's results, which those with another program or another kind of GPU never give."""
