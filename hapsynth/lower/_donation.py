"""What a stage's results take the memory of, and what must have its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from hapsynth import _jax


def reused(given: Sequence[Any], made: Sequence[Any], over: set[int]) -> list[int]:
    """Which of the arguments that nobody needs afterwards a result can take the memory of."""
    kind = lambda s: (s.shape, str(s.dtype))
    free = Counter(map(kind, made))
    found: list[int] = []
    for i, s in enumerate(given):
        if i in over and not _jax.is_extended(s.dtype) and free[kind(s)] > 0:
            free[kind(s)] -= 1
            found.append(i)
    return found


def in_memory_of_their_own(given: Sequence[Any], made: Sequence[Any]) -> list[Any]:
    """JAX hands an argument that is returned, or a result that is returned twice, out as the same array."""
    seen = set(map(id, given))
    out: list[Any] = []
    for x in made:
        held = id(x) in seen
        seen.add(id(x))
        if held:
            # Of nothing XLA's CPU compiler of JAX 0.11.2 dies at a barrier.
            nothing = x.size == 0 and not _jax.is_extended(x.dtype)
            x = jnp.zeros(x.shape, x.dtype) if nothing else lax.optimization_barrier(x)
        out.append(x)
    return out
