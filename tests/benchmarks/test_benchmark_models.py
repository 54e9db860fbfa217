"""The benchmarks' models: as large as published, abstract, and steps that compute something finite and learn."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from hapsynth.graph.trace import trace
from hapsynth.instructions.testing.example_arguments import random_arguments

TINY_BERT = replace(models.BERT, batch=2, seq=8, width=16, heads=2, ff=32, vocab=40)
TINY: dict[str, Any] = {
    "mlp": models.Perceptron(batch=8, width=16, classes=4),
    "vgg19": models.ConvNet(batch=2, size=8, stages=((1, 4), (2, 8)), hidden=16, classes=4),
    "vit_b": models.Vision(batch=2, size=8, patch=4, classes=4, encoder=replace(TINY_BERT, post_norm=False)),
    "bert": TINY_BERT,
    "bert_moe": replace(TINY_BERT, experts=2),
    "gpt2_xl": replace(models.GPT2_XL, batch=2, seq=8, width=16, heads=2, ff=32, vocab=40),
    "gpt3_xl": replace(models.GPT3_XL, sequences=4, seq=8, width=16, heads=2, ff=32, vocab=40),
    "hap_vgg19": models.ConvNet(batch=2, size=4, stages=((1, 4), (2, 8)), spread=3, hidden=16, classes=4),
    "hap_vit": models.Vision(batch=2, size=8, patch=4, classes=4, encoder=replace(TINY_BERT, post_norm=False)),
    "hap_bert": replace(TINY_BERT, untied=True),
    "hap_moe": replace(TINY_BERT, untied=True, experts=2),
    "bert_half": replace(TINY_BERT, dtype="float16"),
    "llama3_8b": replace(models.LLAMA3_8B, batch=2, seq=8, width=16, heads=4, kv_heads=2, ff=32, vocab=40),
}
# Of the papers' checkpoints, but BERT: the reference's vocabulary, no segments, pooler or head of its own.
PARAMETERS = {
    "vgg19": 143_667_240,
    "vit_b": 86_567_656,
    "bert": 33280 * 768 + 128 * 768 + 12 * 7_087_872,
    "hap_vgg19": 143_667_240 - 990 * 4097,
    "hap_bert": 2 * 33280 * 768 + 128 * 768 + 12 * 7_087_872,
    "gpt2_xl": 1_557_611_200,
    "llama3_8b": 8_030_261_248,
}


def tiny(name: str, devices: int = 2) -> models.Target:
    build = models.MODELS[name]
    # Experts are in every second layer.
    count = 2 if name in ("bert_moe", "hap_moe") else 1
    layers = {"layers": count} if "layers" in inspect.signature(build).parameters else {}
    return build(devices, config=TINY[name], **layers)


def test_every_model_has_a_tiny_version() -> None:
    assert TINY.keys() == models.MODELS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_full_size_is_as_published(name: str) -> None:
    _, (state, batch) = models.MODELS[name](8)
    leaves = jax.tree.leaves((state, batch))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(state["params"])) == PARAMETERS[name]
    assert {x.dtype for x in jax.tree.leaves(state["params"])} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", models.MODELS)
def test_the_state_is_carried(name: str) -> None:
    fn, args = tiny(name)
    graph = trace(fn, args).graph
    assert len(graph.carry) == len(jax.tree.leaves(args[0]))
    assert len(graph.outputs) == len(graph.carry) + 1


@pytest.mark.few(5)
@pytest.mark.parametrize("name", models.MODELS)
def test_a_tiny_step_learns(name: str) -> None:
    """Finite states, and the same batch costs less after some steps."""
    fn, args = tiny(name)
    (state, batch), _ = random_arguments(trace(fn, args))
    # Moments as an optimizer starts with; random ones would drown the gradients.
    state = {"params": state["params"], "opt": jax.tree.map(np.zeros_like, state["opt"])}
    step, losses = jax.jit(fn), []
    for _ in range(6):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    assert losses[-1] < losses[0] - 1e-3


def test_more_devices_bring_more_batch_and_experts() -> None:
    few, many = (tiny("bert_moe", n)[1] for n in (2, 8))
    assert many[1]["tokens"].shape[0] == 4 * few[1]["tokens"].shape[0]
    experts = lambda args: args[0]["params"]["block1"]["up"].shape[0]
    assert (experts(few), experts(many)) == (4, 16)
    assert "router" not in few[0]["params"]["block0"]


def test_experts_take_what_fits_their_queues() -> None:
    """With room for all, each token is the gated sum of its two experts; with one place, the first tokens' only."""
    c = replace(TINY["bert_moe"], capacity=100.0)
    shapes = models.block_shapes(c, 4)
    rng = np.random.default_rng(0)
    p = {k: rng.normal(size=shapes[k].shape).astype(np.float32) for k in ("router", "up", "down")}
    x = rng.normal(size=(2, 8, c.width)).astype(np.float32)
    shares = jax.nn.softmax(x @ p["router"])
    gates, chosen = jax.lax.top_k(shares, 2)
    all_experts = jnp.einsum("btef,efd->bted", jax.nn.gelu(jnp.einsum("btd,edf->btef", x, p["up"])), p["down"])
    both = jnp.take_along_axis(all_experts, chosen[..., None], axis=2)
    expected = (both * (gates / gates.sum(-1, keepdims=True))[..., None]).sum(2)
    np.testing.assert_allclose(models.mixture(c, p, x), expected, rtol=1e-4, atol=1e-4)
    short = models.mixture(replace(c, capacity=1 / 16), p, x)
    np.testing.assert_allclose(short[:, 0], expected[:, 0], rtol=1e-4, atol=1e-4)
    assert not np.asarray(short[:, -1]).any()


def test_rotary_scores_depend_on_distance_alone() -> None:
    rng = np.random.default_rng(0)
    q, k = (np.broadcast_to(rng.normal(size=8), (1, 6, 1, 8)) for _ in range(2))
    turn = models.rotary(6, 8)
    scores = np.einsum("bthk,bshk->ts", models.rotated(jnp.asarray(q), turn), models.rotated(jnp.asarray(k), turn))
    for apart in range(-5, 6):
        np.testing.assert_allclose(np.diagonal(scores, apart), np.diagonal(scores, apart)[0], rtol=1e-4, atol=1e-5)
    assert abs(scores[0, 3] - scores[0, 0]) > 1e-3
