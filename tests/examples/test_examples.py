"""The examples as plain JAX: they trace without allocating, learn, and have the parts they claim."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_models import TINY, example, start

EXAMPLES = Path(__file__).parents[2] / "examples"
# What the issue names in each example; gradients included.
PRIMITIVES = {
    "mlp": {"dot_general", "custom_jvp_call", "gather", "scatter-add"},
    "transformer": {"dot_general", "tanh", "rsqrt", "exp", "gather", "scatter-add"},
    "cnn": {
        "conv_general_dilated",
        "reduce_window_max",
        "reduce_window_sum",
        "select_and_scatter_add",
        "rsqrt",
        "dot_general",
    },
}


def primitives(jaxpr: Any) -> Iterator[str]:
    """The names of all primitives, also inside calls."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


@pytest.mark.parametrize("name", TINY)
def test_target_is_abstract_and_traces(name: str) -> None:
    fn, (state, batch) = example(name).target()
    leaves = jax.tree.leaves((state, batch))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    found = Counter(primitives(jax.make_jaxpr(fn)(state, batch).jaxpr))
    assert found.keys() >= PRIMITIVES[name] | {"sqrt", "pow", "log"}
    # Loops would be replicated for now, dropout needs keys: neither belongs in these three.
    assert not found.keys() & {"scan", "while", "cond", "random_bits", "threefry2x32"}
    new_state, loss = jax.eval_shape(fn, state, batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new_state) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


@pytest.mark.parametrize("name", TINY)
def test_real_arrays_match_the_target(name: str) -> None:
    module = example(name)
    config = module.Config(**TINY[name])
    _, args = module.target_for(config)
    real = start(module, config)
    assert jax.tree.structure(real) == jax.tree.structure(args)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(real)] == [(x.shape, x.dtype) for x in jax.tree.leaves(args)]


@pytest.mark.parametrize("name", TINY)
def test_the_loss_falls(name: str) -> None:
    module = example(name)
    config = module.Config(**TINY[name], learning_rate=1e-2)
    step = jax.jit(module.make_step(config))
    state, batch = start(module, module.Config(**TINY[name]))
    losses = []
    for _ in range(8):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]


def test_attention_is_causal() -> None:
    transformer = example("transformer")
    config = transformer.Config(**TINY["transformer"])
    state, batch = start(transformer, config)
    tokens = batch["tokens"]
    changed = tokens.at[:, 10:].set(0)
    apply = jax.jit(transformer.apply)
    before, after = apply(state["params"], tokens), apply(state["params"], changed)
    np.testing.assert_allclose(before[:, :10], after[:, :10], rtol=1e-5, atol=1e-5)
    assert not np.allclose(before[:, 10:], after[:, 10:])


def test_batch_norm_uses_and_averages_batch_statistics() -> None:
    cnn = example("cnn")
    x = jax.random.normal(jax.random.key(0), (16, 4, 4, 3)) * 5 + 2
    y, stats = cnn.batch_norm({"scale": jnp.ones(3), "bias": jnp.zeros(3)}, x)
    np.testing.assert_allclose(y.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(y.var((0, 1, 2)), 1, atol=1e-3)
    np.testing.assert_allclose(stats["mean"], x.mean((0, 1, 2)), rtol=1e-6)

    config = cnn.Config(**TINY["cnn"])
    state, batch = start(cnn, config)
    _, seen = cnn.apply(state["params"], batch["image"])
    after, _ = jax.jit(cnn.make_step(config))(state, batch)
    expected = 0.9 * state["stats"]["norm0"]["var"] + 0.1 * seen["norm0"]["var"]
    np.testing.assert_allclose(after["stats"]["norm0"]["var"], expected, rtol=1e-4)


def test_train_feeds_the_text() -> None:
    train = example("train")
    text = (EXAMPLES / "data" / "sonnets.txt").read_bytes()
    assert text.isascii()
    assert len(text) > 15_000
    for batch in islice(train.batches(), 2):
        tokens, targets = np.asarray(batch["tokens"]), np.asarray(batch["targets"])
        assert tokens.shape == targets.shape == (train.CONFIG.batch, train.CONFIG.seq)
        np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
        assert bytes(tokens[0].astype(np.uint8)) in text
    again = next(train.batches())
    np.testing.assert_array_equal(again["tokens"], next(train.batches())["tokens"])


def test_train_reference_curve_falls() -> None:
    train = example("train")
    config = example("transformer").Config(**TINY["transformer"] | {"vocab": 256}, learning_rate=1e-2)
    losses = train.reference(12, config)
    assert losses[-1] < 0.8 * losses[0]
