"""Training steps in mixed precision: bfloat16 or float16 compute, mostly on float32 parameters. Small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale
from thoroughness import THOROUGH

Step = tuple[Callable[..., Any], tuple[Any, ...]]
bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
WIDTH, ROWS = 16, 24


def draws(seed: int) -> Callable[..., np.ndarray]:
    rng = np.random.default_rng(seed)
    return lambda *shape, by=1.0: (by * rng.normal(size=shape)).astype(np.float32)


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def descend(params: Any, grads: Any, rate: float = 0.5) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g.astype(p.dtype), params, grads)


def scan() -> Step:
    """Layers in a scan, each with a norm in float32."""
    draw = draws(0)
    params = {"w": draw(3, WIDTH, WIDTH, by=WIDTH**-0.5), "b": draw(3, WIDTH, by=0.1), "out": draw(WIDTH, 4, by=0.3)}

    def loss(params: Any, x: Any, y: Any) -> Any:
        def layer(h: Any, p: Any) -> tuple[Any, None]:
            wide = h.astype(f32)
            h = (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(bf16)
            return h + jax.nn.gelu(h @ p["w"] + p["b"]), None

        half = cast(params, bf16)
        h, _ = jax.lax.scan(layer, x.astype(bf16), {"w": half["w"], "b": half["b"]})
        return jnp.mean(((h @ half["out"]).astype(f32) - y) ** 2)

    def step(params: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return descend(params, grads), value

    return step, (params, draw(ROWS, WIDTH), draw(ROWS, 4))


def remat() -> Step:
    """Rematerialised layers, a momentum kept in bfloat16."""
    draw = draws(1)
    params = [draw(WIDTH, WIDTH, by=0.3) for _ in range(3)]

    def loss(params: Any, x: Any, y: Any) -> Any:
        layer = jax.checkpoint(lambda w, h: h + jnp.tanh(h @ w))
        h = x.astype(bf16)
        for w in params:
            h = layer(w.astype(bf16), h)
        return -jnp.mean(jax.nn.log_softmax(h.astype(f32))[jnp.arange(ROWS), y])

    def step(state: Any, x: Any, y: Any) -> Any:
        params, momentum = state
        value, grads = jax.value_and_grad(loss)(params, x, y)
        momentum = jax.tree.map(lambda m, g: (0.9 * m + g).astype(bf16), momentum, grads)
        return (descend(params, momentum), momentum), value

    momentum = [(0.01 * w).astype(bf16) for w in params]
    return step, ((params, momentum), draw(ROWS, WIDTH), np.arange(ROWS, dtype=np.int32) % WIDTH)


def multi_steps() -> Step:
    """Gradients gathered over micro-batches by `optax.MultiSteps` before Adam sees them."""
    draw = draws(2)
    params = {"in": draw(WIDTH, 32, by=0.3), "scale": draw(32, by=0.5) + 1, "out": draw(32, 8, by=0.3)}
    optimizer = optax.MultiSteps(optax.adam(1e-1), every_k_schedule=2)

    def loss(params: Any, x: Any, y: Any) -> Any:
        p, x = cast((params, x), bf16)
        return jnp.mean(((jax.nn.silu(x @ p["in"]) * p["scale"]) @ p["out"] - y.astype(bf16)).astype(f32) ** 2)

    def step(state: Any, x: Any, y: Any) -> Any:
        params, moments = state
        for part in range(2):
            rows = slice(part * ROWS, (part + 1) * ROWS)
            value, grads = jax.value_and_grad(loss)(params, x[rows], y[rows])
            updates, moments = optimizer.update(grads, moments, params)
            params = optax.apply_updates(params, updates)
        return (params, moments), value

    return step, ((params, optimizer.init(params)), draw(2 * ROWS, WIDTH), draw(2 * ROWS, 8))


def loss_scaling() -> Step:
    """float16 under a loss scale that is so large that the last layer's gradients overflow once in a while."""
    draw = draws(3)
    params = {"in": draw(WIDTH, 32, by=0.3), "out": draw(32, 8, by=0.3)}
    scale = DynamicScale(growth_interval=3, scale=f32(2**10))

    def loss(params: Any, x: Any, y: Any) -> Any:
        p, x = cast((params, x), f16)
        return jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"] - y.astype(f16)) ** 2)

    def step(state: Any, x: Any, y: Any) -> Any:
        params, scale = state
        scale, finite, value, grads = scale.value_and_grad(loss)(params, x, y)
        updated = descend(params, grads, rate=4.0)
        return (jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, params), scale), value

    return step, ((params, scale), draw(ROWS, WIDTH), draw(ROWS, 8))


def half() -> Step:
    """Parameters and Adam's moments in bfloat16: nothing is wider but the loss."""
    draw = draws(6)
    params = cast({"in": draw(WIDTH, 32, by=0.3), "scale": draw(32, by=0.5) + 1, "out": draw(32, 8, by=0.3)}, bf16)
    optimizer = optax.adam(1e-1)

    def loss(p: Any, x: Any, y: Any) -> Any:
        return jnp.mean(((jax.nn.silu(x @ p["in"]) * p["scale"]) @ p["out"] - y).astype(f32) ** 2)

    def step(state: Any, x: Any, y: Any) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    x, y = cast((draw(2 * ROWS, WIDTH), draw(2 * ROWS, 8)), bf16)
    return step, ((params, optimizer.init(params)), x, y)


def gpt() -> Step:
    """A bfloat16 GPT of one block, or in thorough runs two: float32 softmax, norms, logits and accumulators of the
    attention's products."""
    draw = draws(4)
    heads, tokens, rows, words = 2, 8, 8, 24

    def block() -> Any:
        wide = lambda m, n: draw(m, n, by=m**-0.5)
        return {"qkv": wide(WIDTH, 3 * WIDTH), "o": wide(WIDTH, WIDTH), "up": wide(WIDTH, 32), "down": wide(32, WIDTH)}

    params = {"embed": draw(words, WIDTH), "at": draw(tokens, WIDTH), "blocks": [block() for _ in range(1 + THOROUGH)]}

    def norm(x: Any) -> Any:
        wide = x.astype(f32)
        wide = wide - wide.mean(-1, keepdims=True)
        return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(bf16)

    def attend(p: Any, h: Any) -> Any:
        q, k, v = jnp.split((norm(h) @ p["qkv"]).reshape(rows, tokens, heads, -1), 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=f32) * q.shape[-1] ** -0.5
        scores = jnp.where(np.tri(tokens, dtype=bool), scores, jnp.finfo(f32).min)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(bf16), v, preferred_element_type=f32)
        return mixed.astype(bf16).reshape(rows, tokens, WIDTH) @ p["o"]

    def loss(params: Any, ids: Any) -> Any:
        p = cast(params, bf16)
        h = p["embed"][ids] + p["at"]
        for q in p["blocks"]:
            h = h + attend(q, h)
            h = h + jax.nn.gelu(norm(h) @ q["up"]) @ q["down"]
        logits = jnp.einsum("btd,wd->btw", norm(h), p["embed"], preferred_element_type=f32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

    def step(params: Any, ids: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, ids)
        return descend(params, grads), value

    ids = np.random.default_rng(5).integers(0, words, (rows, tokens)).astype(np.int32)
    return step, (params, ids)


CASES: dict[str, Callable[[], Step]] = {f.__name__: f for f in (scan, remat, multi_steps, loss_scaling, half, gpt)}
