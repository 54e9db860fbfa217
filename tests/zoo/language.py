"""Text: GPTs with layers unrolled and scanned, a GRU over time, greedy decoding, mixtures of experts."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from zoo.kinds import Model, abstract, f32, i32, key
from zoo.vision import cross_entropy

VOCAB, LENGTH, WIDTH, HEADS = 64, 12, 16, 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        y = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(x[..., 0])
        y = nn.MultiHeadDotProductAttention(num_heads=HEADS)(y, mask=mask)
        x = x + nn.Dropout(0.1, deterministic=False)(y)
        y = nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=False)(y), None


class GPT(nn.Module):
    """Tied embeddings; `scanned`: the layers are stacked and rematerialised one by one."""

    scanned: bool
    layers: int

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCAB, WIDTH)
        positions = self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x = embed(tokens) + positions
        if self.scanned:
            split = {"params": True, "dropout": True}
            layers = nn.scan(nn.remat(Block, prevent_cse=False), {"params": 0}, split_rngs=split, length=self.layers)
            x, _ = layers()(x, None)
        else:
            for _ in range(self.layers):
                x, _ = Block()(x)
        return embed.attend(nn.LayerNorm()(x))


def _gpt(scanned: bool, layers: int, optimizer: Any) -> Model:
    module = GPT(scanned, layers)
    tokens = i32(24, LENGTH)
    params = abstract(lambda k, t: module.init({"params": k, "dropout": k}, t), jax.random.key(0), tokens)

    def step(state: Any, tokens: Any, targets: Any, rng: Any) -> Any:
        params, moments = state
        loss = lambda p: cross_entropy(module.apply(p, tokens, rngs={"dropout": rng}), targets)
        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, ((params, abstract(optimizer.init, params)), tokens, tokens, key())


def gpt(layers: int = 1) -> Model:
    """Layers one after the other, with dropout; AdamW."""
    return _gpt(False, layers, optax.adamw(1e-3))


def gpt_scanned() -> Model:
    """`nn.scan` over the layers, each rematerialised; AdamW after a warm-up, without decay of vectors."""
    decay = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    return _gpt(True, 2, optax.adamw(schedule, weight_decay=0.1, mask=decay))


class Recurrent(eqx.Module):
    embed: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, rng: Any) -> None:
        a, b, c = jax.random.split(rng, 3)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=a)
        self.cell = eqx.nn.GRUCell(WIDTH, WIDTH, key=b)
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=c)

    def __call__(self, tokens: Any) -> Any:
        """Logits at each position of one sequence."""
        step = lambda h, x: (self.cell(x, h),) * 2
        _, hidden = jax.lax.scan(step, jnp.zeros(WIDTH), jax.vmap(self.embed)(tokens))
        return jax.vmap(self.head)(hidden)

    def decode(self, first: Any, limit: int) -> Any:
        """Greedy: the likeliest token each time, until token 0 or the limit."""

        def more(state: Any) -> Any:
            count, token, _, _ = state
            return (count < limit) & (token != 0)

        def body(state: Any) -> Any:
            count, token, hidden, out = state
            hidden = self.cell(self.embed(token), hidden)
            token = jnp.argmax(self.head(hidden)).astype(token.dtype)
            return count + 1, token, hidden, out.at[count].set(token)

        start = jnp.int32(0), first, jnp.zeros(WIDTH), jnp.zeros(limit, first.dtype)
        return jax.lax.while_loop(more, body, start)[3]


def gru() -> Model:
    """equinox, `vmap` of a `lax.scan` over time; Adafactor with factored second moments."""
    model = eqx.filter_eval_shape(Recurrent, jax.random.key(0))
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=16)

    def step(state: Any, tokens: Any, targets: Any) -> Any:
        model, moments = state
        value, grads = eqx.filter_value_and_grad(lambda m: cross_entropy(jax.vmap(m)(tokens), targets))(model)
        updates, moments = optimizer.update(grads, moments, model)
        return (eqx.apply_updates(model, updates), moments), value

    moments = abstract(optimizer.init, model)
    return step, ((model, moments), i32(32, LENGTH), i32(32, LENGTH))


def greedy_decoding() -> Model:
    """A while loop whose body is batched by `vmap`; no training."""
    model = eqx.filter_eval_shape(Recurrent, jax.random.key(0))
    return lambda model, first: jax.vmap(lambda t: model.decode(t, 6))(first), (model, i32(32))


EXPERTS, CAPACITY = 4, 16


def _routed(tokens: Any, router: Any) -> tuple[Any, Any, Any]:
    """Top-2 gates and experts of each token, and its place in each expert's queue: all [tokens, 2]."""
    gates, experts = jax.lax.top_k(jax.nn.softmax(tokens @ router), 2)
    chosen = jax.nn.one_hot(experts.T.reshape(-1), EXPERTS, dtype=jnp.int32)
    place = (jnp.cumsum(chosen, axis=0) * chosen).sum(-1) - 1
    return gates / gates.sum(-1, keepdims=True), experts, place.reshape(2, -1).T


def _by_einsum(p: Any, x: Any) -> Any:
    """Tokens go to experts and back by contractions with one-hots (GShard, Switch)."""
    gates, experts, place = _routed(x, p["router"])
    there = jax.nn.one_hot(experts, EXPERTS)[..., None] * jax.nn.one_hot(place, CAPACITY)[..., None, :]
    inside = jnp.einsum("tkec,td->ecd", there, x)
    outside = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", inside, p["up"])), p["down"])
    return jnp.einsum("tkec,tk,ecd->td", there, gates, outside)


def _by_scatter(p: Any, x: Any) -> Any:
    """The same by a scatter into the experts' queues and a gather out of them; what overflows is dropped."""
    gates, experts, place = _routed(x, p["router"])
    empty = jnp.zeros((EXPERTS, CAPACITY, x.shape[-1]), x.dtype)
    inside = empty.at[experts, place].add(jnp.broadcast_to(x[:, None], (*experts.shape, x.shape[-1])), mode="drop")
    outside = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", inside, p["up"])), p["down"])
    back = outside.at[experts, place].get(mode="fill", fill_value=0.0)
    return jnp.einsum("tkd,tk->td", back, gates)


def _experts(layer: Any) -> Model:
    """Regression through one layer of experts; LAMB, whose trust ratios are norms of every tensor."""
    params = {"router": f32(WIDTH, EXPERTS), "up": f32(EXPERTS, WIDTH, 32), "down": f32(EXPERTS, 32, WIDTH)}
    optimizer = optax.lamb(1e-3, weight_decay=1e-2)

    def step(state: Any, x: Any, y: Any) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(lambda p: jnp.mean((x + layer(p, x) - y) ** 2))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, ((params, abstract(optimizer.init, params)), f32(48, WIDTH), f32(48, WIDTH))


def experts_einsum() -> Model:
    return _experts(_by_einsum)


def experts_scatter() -> Model:
    return _experts(_by_scatter)
