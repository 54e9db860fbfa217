"""The cases of the rules, by family; every registered primitive must occur."""

from __future__ import annotations

import array_cases
import contraction_cases
import indexing_cases
import jax
import key_cases
import linalg_cases
from rule_case import CASES

FAMILIES = (array_cases, contraction_cases, indexing_cases, key_cases, linalg_cases)
NEWER = {*(n for n in array_cases.NEWER if not hasattr(jax.lax, n)), *linalg_cases.NEWER}
"""Registered primitives that this JAX has not yet."""


def primitives() -> dict[str, int]:
    """How many ops of each primitive the cases hold."""
    counts: dict[str, int] = {}
    for c in CASES:
        for op in c.graph.ops:
            counts[op.name] = counts.get(op.name, 0) + 1
    return counts
