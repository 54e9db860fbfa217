"""What orbax saves of a plan's state is read by orbax alone. Skipped where it is not installed: `.[orbax]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import BATCH, kinds, plan_on

from hapsynth.running.sharded_array import ShardedArray

ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")


@pytest.mark.parametrize("name", ["8 skewed", "4 skewed, staged"])
def test_plain_orbax_reads_what_was_saved(name: str, tmp_path: Path) -> None:
    from hapsynth.checkpoint import orbax

    given, plan = kinds(), plan_on(name)
    state = plan.shard(given, BATCH)[0]
    assert sum(isinstance(x, ShardedArray) for x in state.values()) > 4
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=orbax.registry())) as saver:
        saver.save(tmp_path / "ck", state)
    # It may be consumed then.
    for x in jax.tree.leaves(state):
        x.delete() if hasattr(x, "delete") else None
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = lambda x: ocp.RestoreArgs() if isinstance(x, str) else ocp.ArrayRestoreArgs(sharding=one)
    with ocp.PyTreeCheckpointer() as reader:
        found = reader.restore(tmp_path / "ck", restore_args=jax.tree.map(target, given))
    assert found.keys() == given.keys()
    for k, x in given.items():
        if isinstance(x, str):
            assert found[k] == x
            continue
        assert isinstance(found[k], jax.Array)
        data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        want: Any = np.asarray(x, np.float32) if isinstance(x, float) else data(x)
        assert (found[k].shape, np.asarray(data(found[k])).tobytes()) == (np.shape(x), np.asarray(want).tobytes())


def test_orbax_alone_saves_it_whole_within_one_process(tmp_path: Path) -> None:
    given, plan = kinds(), plan_on("8 skewed")
    state = {k: x for k, x in plan.shard(given, BATCH)[0].items() if isinstance(x, ShardedArray)}
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "ck", state)
        saver.wait_until_finished()
        found = saver.restore(tmp_path / "ck", plan.unshard(state))
    for k, x in plan.unshard(state).items():
        assert np.asarray(found[k]).tobytes() == x.tobytes()
