"""What the gallery's scripts share: eight unlike devices, and the comparison of a plan with one device."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import hapsynth

jax.config.update("jax_num_cpu_devices", 8)  # before any backend starts; where there are real devices, leave it out


def devices() -> tuple[jax.sharding.Mesh, hapsynth.Cluster]:
    """Eight host devices, and the unlike devices that the plans are made for."""
    return jax.make_mesh((8,), ("hap",)), hapsynth.Cluster.load(Path(__file__).with_name("unlike8.toml"))


def show(plan: hapsynth.Plan, arg: int) -> None:
    """Prints what was planned, and the rows that each device has of argument `arg`; asserts that these are uneven."""
    rows = [slices[0].stop - slices[0].start for slices in plan.local_slices(arg).devices.values()]
    print(f"planned for {plan.cluster.name}: {1e3 * plan.cost:.2f} ms a step, none takes over {plan.gap:.1%} less")
    print(f"rows of the batch on each device: {rows}")
    assert sum(rows) == plan.local_slices(arg).shape[0]
    assert len(set(rows)) > 1


def train(step: Callable[..., Any], state: Any, batches: Sequence[Any]) -> tuple[Any, list[float]]:
    """The state after one step for each batch, and the losses."""
    losses = []
    for batch in batches:
        state, loss = step(state, *batch)
        losses.append(float(loss))
    return state, losses


def follow(
    plan: hapsynth.Plan, step: Callable[..., Any], state: Any, batches: Sequence[Any], rtol: float = 1e-4
) -> Any:
    """The state after training by the plan; asserts that losses and state are those of `step`, on one device."""
    show(plan, len(batches[0]))
    alone, expected = train(step, state, batches)
    state, losses = train(plan, plan.shard(state), batches)
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    for got, want in zip(jax.tree.leaves(plan.unshard(state)), jax.tree.leaves(alone), strict=True):
        if jax.dtypes.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        np.testing.assert_allclose(got, want, rtol=rtol, atol=10 * rtol * np.abs(want).max())
    return state
