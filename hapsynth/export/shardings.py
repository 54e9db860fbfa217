"""How a plan keeps arguments and results, as plain `jax.jit` takes it."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_unflatten

from hapsynth.instructions.layout import format_layout
from hapsynth.lower import Storage
from hapsynth.running.base import AbsentError, Planned


def in_shardings(plan: Planned) -> tuple[Any, ...]:
    """`Plan.in_shardings`."""
    leaves: list[Any] = [None] * plan.traced.in_tree.num_leaves
    for i, path, storage in zip(plan.traced.array_leaves, plan.traced.in_paths, plan.lowered.inputs, strict=True):
        leaves[i] = _sharding(plan, f"argument {path}", storage)
    args, kwargs = tree_unflatten(plan.traced.in_tree, leaves)
    if kwargs:
        named = ", ".join(kwargs)
        raise AbsentError(
            f"jax.jit has in_shardings for positional arguments only, and the plan has {named} by keyword"
        )
    return args


def out_shardings(plan: Planned) -> Any:
    """`Plan.out_shardings`."""
    leaves: list[Any] = [None] * plan.traced.out_tree.num_leaves
    outputs = zip(plan.traced.out_array_leaves, plan.traced.out_paths, plan.lowered.outputs, strict=True)
    for i, path, storage in outputs:
        whole = NamedSharding(plan.lowered.mesh, PartitionSpec())
        leaves[i] = whole if storage is None else _sharding(plan, f"output {path or 'of the function'}", storage)
    return tree_unflatten(plan.traced.out_tree, leaves)


def _sharding(plan: Planned, what: str, storage: Storage) -> NamedSharding:
    if not storage.is_even:
        cuts = ", ".join(f"dimension {d} in shards of {'/'.join(map(str, n))}" for d, (_, n) in storage.cuts.items())
        devices = len(plan.devices)
        raise AbsentError(
            f"{what}, {storage.dtype}{list(storage.shape)}, is kept as {format_layout(storage.layout)}, {cuts}, and a "
            f"NamedSharding has shards alike only: synthesize with ratios=[1 / {devices}] * {devices}, or take "
            "plan.to_source(), which pads"
        )
    return storage.sharding
