"""Images: an MLP-Mixer (nnx), a ResNet with batch norm, a ViT and a U-Net with transposed convolutions (linen), a small
net with a state of its own (equinox)."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state

from zoo.kinds import Model, abstract, f32, i32

CLASSES = 10


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linen_step(module: nn.Module, optimizer: Any, images: Any, labels: Any) -> Model:
    """A classifier without state of its own, in flax's TrainState."""

    def init(key: Any, x: Any) -> Any:
        params = module.init(key, x)["params"]
        return train_state.TrainState.create(apply_fn=module.apply, params=params, tx=optimizer)

    def step(state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(module.apply({"params": p}, x), y))(state.params)
        return state.apply_gradients(grads=grads), loss

    return step, (abstract(init, jax.random.key(0), images), images, labels)


class MixerBlock(nnx.Module):
    def __init__(self, tokens: int, width: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.up = nnx.List([nnx.Linear(n, 2 * n, rngs=rngs) for n in (tokens, width)])
        self.down = nnx.List([nnx.Linear(2 * n, n, rngs=rngs) for n in (tokens, width)])

    def __call__(self, x: Any) -> Any:
        y = jnp.swapaxes(self.norms[0](x), 1, 2)
        x = x + jnp.swapaxes(self.down[0](nnx.gelu(self.up[0](y))), 1, 2)
        return x + self.down[1](nnx.gelu(self.up[1](self.norms[1](x))))


class Mixer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(3, 16, (4, 4), strides=(4, 4), rngs=rngs)
        self.blocks = nnx.List([MixerBlock(16, 16, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


def mixer() -> Model:
    """nnx, AdamW."""
    graph, params = nnx.split(nnx.eval_shape(lambda: Mixer(nnx.Rngs(0))))
    optimizer = optax.adamw(1e-3)

    def step(state: Any, images: Any, labels: Any) -> Any:
        params, moments = state
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(nnx.merge(graph, p)(images), labels))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return step, ((params, abstract(optimizer.init, params)), f32(48, 16, 16, 3), i32(48))


class ResidualBlock(nn.Module):
    features: int
    strides: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        norm = lambda: nn.BatchNorm(use_running_average=False, momentum=0.9)
        y = nn.relu(norm()(nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(x)))
        y = norm()(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.features, (1, 1), self.strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3), use_bias=False)(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for features, strides in ((8, 1), (16, 2)):
            x = ResidualBlock(features, strides)(x)
        return nn.Dense(CLASSES)(x.mean(axis=(1, 2)))


def resnet() -> Model:
    """Batch statistics carried beside the weights; SGD with momentum on a cosine schedule."""
    module = ResNet()
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.sgd(optax.cosine_decay_schedule(0.1, 100), momentum=0.9, nesterov=True)
    )
    images, labels = f32(40, 16, 16, 3), i32(40)
    variables = abstract(module.init, jax.random.key(0), images)
    state = {**variables, "optimizer": abstract(optimizer.init, variables["params"])}

    def step(state: Any, images: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            logits, new = module.apply(variables, images, mutable=["batch_stats"])
            return cross_entropy(logits, labels), (new["batch_stats"], (logits.argmax(-1) == labels).mean())

        (value, (stats, accuracy)), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, moments = optimizer.update(grads, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "batch_stats": stats, "optimizer": moments}, {"loss": value, "accuracy": accuracy}

    return step, (state, images, labels)


class ViT(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(16, (4, 4), (4, 4))(x).reshape(x.shape[0], -1, 16)
        first = self.param("class", nn.initializers.zeros, (1, 1, 16))
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, 16)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], 16))
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
        x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(nn.LayerNorm()(x)[:, 0])


def vit() -> Model:
    """A class token and multi-head attention; Lion, in flax's own train state."""
    return linen_step(ViT(), optax.lion(1e-3), f32(48, 12, 12, 3), i32(48))


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        skips: list[Any] = []
        for features in (8, 16):
            x = nn.relu(nn.GroupNorm(4)(nn.Conv(features, (3, 3))(x)))
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(16, (3, 3), kernel_dilation=2)(x))
        for features, skip in zip((16, 8), reversed(skips)):
            x = nn.ConvTranspose(features, (3, 3), (2, 2))(x)
            x = nn.relu(nn.Conv(features, (3, 3))(jnp.concatenate([x, skip], axis=-1)))
        return nn.Conv(1, (1, 1))(x)


def unet() -> Model:
    """Segmentation; Adam and an exponential moving average of the weights."""
    module, optimizer = UNet(), optax.adam(1e-3)
    images, masks = f32(24, 16, 16, 3), f32(24, 16, 16, 1)
    params = abstract(module.init, jax.random.key(0), images)
    state = {"params": params, "average": params, "optimizer": abstract(optimizer.init, params)}

    def step(state: Any, images: Any, masks: Any) -> Any:
        loss = lambda p: optax.sigmoid_binary_cross_entropy(module.apply(p, images), masks).mean()
        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, moments = optimizer.update(grads, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], 0.01)
        return {"params": params, "average": average, "optimizer": moments}, value

    return step, (state, images, masks)


class Convolutional(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(3, 8, 3, stride=2, padding=1, key=first)
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
        self.head = eqx.nn.Linear(8, CLASSES, key=second)

    def __call__(self, x: Any, state: Any) -> Any:
        x, state = self.norm(self.conv(x), state)
        return self.head(jax.nn.relu(x).mean(axis=(1, 2))), state


def convolutional() -> Model:
    """equinox, whose batch norm keeps its statistics in a state of its own; RMSProp."""
    model, statistics = eqx.filter_eval_shape(eqx.nn.make_with_state(Convolutional), jax.random.key(0))
    dynamic, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    optimizer = optax.rmsprop(1e-3)

    def loss(weights: Any, statistics: Any, images: Any, labels: Any) -> Any:
        run = jax.vmap(eqx.combine(weights, static), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, statistics = run(images, statistics)
        return cross_entropy(logits, labels), statistics

    def step(state: Any, images: Any, labels: Any) -> Any:
        weights, moments, statistics = state
        (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(weights, statistics, images, labels)
        updates, moments = optimizer.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments, statistics), value

    state = (dynamic, abstract(optimizer.init, dynamic), statistics)
    return step, (state, f32(40, 3, 16, 16), i32(40))
