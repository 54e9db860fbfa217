"""Pytrees without their leaves."""

from __future__ import annotations

from typing import Any

from jax.tree_util import tree_unflatten


def skeleton(tree: Any) -> Any:
    """A tree of this structure with an `object()` for each leaf, as JAX makes them: what users' containers, some of
    which look at their leaves, let pass."""
    return tree_unflatten(tree, [object() for _ in range(tree.num_leaves)])
