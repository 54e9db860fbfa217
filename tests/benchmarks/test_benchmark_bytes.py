"""The bytes that the cost model counts beside those of XLA's HLO: how far off the model is."""

import bench_bytes
import jax
import jax.numpy as jnp
import pytest
from bench_bytes import hlo_bytes, model_bytes


@pytest.mark.optimized
def test_a_fused_chain_moves_its_ends() -> None:
    struct = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    chain = lambda x, y: jnp.tanh(x) * y + 1.0
    compiled = jax.jit(chain).lower(struct, struct).compile()
    counted = hlo_bytes(compiled.as_text()), model_bytes(chain, (struct, struct))
    assert [sum(moved.values()) for moved in counted] == [3 * 512 * 512 * 4] * 2


@pytest.mark.optimized
def test_how_far_off_the_model_is() -> None:
    """Within 15 % on the MLP example; `benchmarks/bench_bytes.py` has the others."""
    row = bench_bytes.one("mlp")
    assert row["xla"] == pytest.approx(row["analysis"], rel=0.05)
    assert 0.85 < row["model"] / row["xla"] < 1.05
    assert sum(model for model, _ in row["ops"].values()) == pytest.approx(row["model"])
