"""A decoder-only transformer language model and its training step.

    hapsynth search examples/transformer.py --cluster examples/clusters/mixed8.toml

Token embedding, learned positions, pre-norm blocks (causal multi-head attention, then a GELU MLP), a final layer
norm, an untied head over the vocabulary, mean cross entropy over all tokens. Plain JAX and optax, written for one
device. Nothing here knows of hapsynth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

State = dict[str, Any]
Batch = dict[str, jax.Array]


@dataclass(frozen=True)
class Config:
    batch: int = 192
    seq: int = 32
    vocab: int = 1024
    layers: int = 2
    width: int = 256
    heads: int = 8
    ff: int = 1024
    learning_rate: float = 1e-3


def optimizer(config: Config) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(config.learning_rate, weight_decay=1e-2),
    )


def init(key: jax.Array, config: Config = Config()) -> State:
    """Parameters and optimizer state. Attention kernels keep heads and head width as dimensions of their own."""
    c, head = config, config.width // config.heads
    keys = iter(jax.random.split(key, 3 + 6 * c.layers))

    def normal(*shape: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * fan_in**-0.5

    def norm() -> State:
        return {"scale": jnp.ones(c.width), "bias": jnp.zeros(c.width)}

    def block() -> State:
        return {
            "norm1": norm(),
            "query": normal(c.width, c.heads, head, fan_in=c.width),
            "key": normal(c.width, c.heads, head, fan_in=c.width),
            "value": normal(c.width, c.heads, head, fan_in=c.width),
            "out": normal(c.heads, head, c.width, fan_in=c.width),
            "norm2": norm(),
            "up": {"kernel": normal(c.width, c.ff, fan_in=c.width), "bias": jnp.zeros(c.ff)},
            "down": {"kernel": normal(c.ff, c.width, fan_in=c.ff), "bias": jnp.zeros(c.width)},
        }

    params = {
        "embed": normal(c.vocab, c.width, fan_in=c.width),
        "position": normal(c.seq, c.width, fan_in=c.width),
        **{f"block{i}": block() for i in range(c.layers)},
        "norm": norm(),
        "head": normal(c.width, c.vocab, fan_in=c.width),
    }
    return {"params": params, "opt": optimizer(config).init(params)}


def make_batch(key: jax.Array, config: Config = Config()) -> Batch:
    """Random walks over the vocabulary, each step 1 to 4 tokens up: a text whose next token can be learnt."""
    k1, k2 = jax.random.split(key)
    start = jax.random.randint(k1, (config.batch, 1), 0, config.vocab)
    steps = jax.random.randint(k2, (config.batch, config.seq), 1, 5)
    walk = jnp.concatenate([start, start + jnp.cumsum(steps, axis=1)], axis=1) % config.vocab
    return {"tokens": walk[:, :-1], "targets": walk[:, 1:]}


def layer_norm(p: State, x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    var = x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"]


def attention(p: State, x: jax.Array) -> jax.Array:
    """Causal multi-head self-attention over x (batch, seq, width)."""
    q = jnp.einsum("btd,dhk->bthk", x, p["query"])
    k = jnp.einsum("btd,dhk->bthk", x, p["key"])
    v = jnp.einsum("btd,dhk->bthk", x, p["value"])
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhts,bshk->bthk", weights, v)
    return jnp.einsum("bthk,hkd->btd", mixed, p["out"])


def mlp(p: State, x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(x @ p["up"]["kernel"] + p["up"]["bias"])
    return hidden @ p["down"]["kernel"] + p["down"]["bias"]


def apply(params: State, tokens: jax.Array) -> jax.Array:
    """Logits (batch, seq, vocab) of tokens (batch, seq)."""
    x = params["embed"][tokens] + params["position"]
    for i in range(sum(name.startswith("block") for name in params)):
        block = params[f"block{i}"]
        x = x + attention(block, layer_norm(block["norm1"], x))
        x = x + mlp(block, layer_norm(block["norm2"], x))
    return layer_norm(params["norm"], x) @ params["head"]


def make_step(config: Config = Config()) -> Callable[[State, Batch], tuple[State, jax.Array]]:
    """`train_step(state, batch) -> (state, loss)`."""

    def loss_fn(params: State, batch: Batch) -> jax.Array:
        logits = apply(params, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer(config).update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return train_step


def target_for(config: Config) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """`target` at another size."""
    key = jax.random.key(0)
    state = jax.eval_shape(lambda k: init(k, config), key)
    batch = jax.eval_shape(lambda k: make_batch(k, config), key)
    return make_step(config), (state, batch)


def target() -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """For hapsynth to plan: the training step and its arguments as shapes; nothing is allocated."""
    return target_for(Config())


def six_layers() -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Of a size that is worth more than one device: 93 million parameters, 32,768 tokens a step."""
    return target_for(Config(batch=64, seq=512, vocab=32768, layers=6, width=768, heads=12, ff=3072))
