"""Full training steps of well-known models, as shapes: nothing is allocated, whatever their size.

    fn, args = bert(8)  # the arguments of `hapsynth.synthesize(fn, args, cluster)`
    fn, args = bert(8, layers=48)

Each function takes the number of devices, by which the batch grows (and the experts, where there are any). A step is
`(state, batch) -> (state, loss)`: forward, backward, clipping by the global norm, AdamW. Layers are unrolled. Plain
JAX and optax, written for one device; nothing here knows of hapsynth. Sizes are fields of a small config, so that
tests can run tiny versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Params = dict[str, Any]
Batch = dict[str, Any]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@dataclass(frozen=True)
class TrainingStep:
    """`(state, batch) -> (state, loss)`, in one call or, for those who put communication between them, two."""

    loss_fn: Callable[[Params, Batch], jax.Array]
    optimizer: Any

    def __call__(self, state: Params, batch: Batch) -> tuple[Params, jax.Array]:
        loss, grads = self.gradients(state["params"], batch)
        return self.update(state, grads), loss

    def gradients(self, params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        return jax.value_and_grad(self.loss_fn)(params, batch)

    def update(self, state: Params, grads: Params) -> Params:
        updates, opt = self.optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


Target = tuple[TrainingStep, tuple[Params, Batch]]
"""A step and its example arguments: pytrees of `jax.ShapeDtypeStruct`."""


def training_step(loss_fn: Callable[[Params, Batch], jax.Array], params: Params, batch: Batch) -> Target:
    """`loss_fn` under AdamW with clipping; parameters and moments are float32."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=1e-2))
    state = {"params": params, "opt": jax.eval_shape(optimizer.init, params)}
    return TrainingStep(loss_fn, optimizer), (state, batch)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def dense_shapes(*shape: int, bias: Sequence[int] = ()) -> Params:
    """A kernel, and a bias where its shape is given."""
    return {"kernel": f32(*shape), **({"bias": f32(*bias)} if bias else {})}


def dense(p: Params, spec: str, x: jax.Array) -> jax.Array:
    y = jnp.einsum(spec, x, p["kernel"])
    return y + p["bias"] if "bias" in p else y


# Multilayer perceptron and VGG-19.


@dataclass(frozen=True)
class Perceptron:
    """`batch`: rows per device."""

    batch: int = 1024
    width: int = 768
    classes: int = 1000
    activation: Callable[[jax.Array], jax.Array] = jax.nn.relu


def mlp(devices: int, *, layers: int = 12, config: Perceptron = Perceptron()) -> Target:
    """A perceptron of `layers` hidden layers of equal width."""
    c, rows = config, config.batch * devices
    params = {f"dense{i}": dense_shapes(c.width, c.width, bias=(c.width,)) for i in range(layers)}
    params["head"] = dense_shapes(c.width, c.classes, bias=(c.classes,))

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        x = batch["x"]
        for i in range(layers):
            x = c.activation(dense(params[f"dense{i}"], "nd,de->ne", x))
        return cross_entropy(dense(params["head"], "nd,de->ne", x), batch["y"]).mean()

    return training_step(loss_fn, params, {"x": f32(rows, c.width), "y": i32(rows)})


def max_pooled(x: jax.Array) -> jax.Array:
    """Of 2 x 2."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def mean_pooled(x: jax.Array) -> jax.Array:
    """Of 2 x 2."""
    return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") * 0.25


@dataclass(frozen=True)
class ConvNet:
    """`batch`: images per device. `stages`: (convolutions, channels), each followed by pooling. `spread`: to how many
    squared the last map, of one pixel, is repeated; 0: it is as it is."""

    batch: int = 32
    size: int = 224
    stages: tuple[tuple[int, int], ...] = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))
    spread: int = 0
    hidden: int = 4096
    classes: int = 1000
    activation: Callable[[jax.Array], jax.Array] = jax.nn.relu
    pooled: Callable[[jax.Array], jax.Array] = max_pooled


def vgg19(devices: int, *, config: ConvNet = ConvNet()) -> Target:
    """Simonyan and Zisserman's network E: 16 convolutions of 3x3, 3 dense layers; no dropout."""
    c, images = config, config.batch * devices
    channels = [3, *(width for count, width in c.stages for _ in range(count))]
    pooled_after = {sum(count for count, _ in c.stages[: n + 1]) - 1 for n in range(len(c.stages))}
    flat = (c.spread or c.size >> len(c.stages)) ** 2 * channels[-1]
    widths = (flat, c.hidden, c.hidden, c.classes)
    pairs = list(pairwise(channels))
    convs = {f"conv{i}": dense_shapes(3, 3, a, b, bias=(b,)) for i, (a, b) in enumerate(pairs)}
    fulls = {f"dense{i}": dense_shapes(a, b, bias=(b,)) for i, (a, b) in enumerate(pairwise(widths))}

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        x = batch["image"]
        for i in range(len(pairs)):
            p = params[f"conv{i}"]
            x = lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = c.activation(x + p["bias"])
            if i in pooled_after:
                x = c.pooled(x)
        if c.spread:
            x = jnp.broadcast_to(x, (x.shape[0], c.spread, c.spread, x.shape[-1]))
        x = x.reshape(x.shape[0], -1)
        for i in range(2):
            x = c.activation(dense(params[f"dense{i}"], "nd,de->ne", x))
        return cross_entropy(dense(params["dense2"], "nd,de->ne", x), batch["label"]).mean()

    batch = {"image": f32(images, c.size, c.size, 3), "label": i32(images)}
    return training_step(loss_fn, {**convs, **fulls}, batch)


# Transformers.


@dataclass(frozen=True)
class Transformer:
    """`batch`: sequences per device, or `sequences` in all. `kv_heads`: 0 for as many as `heads`. `experts`: per
    device, 0 for none, in every second layer. `dtype`: of activations and of the parameters where they are used."""

    batch: int
    seq: int
    width: int
    heads: int
    ff: int
    sequences: int = 0
    vocab: int = 0
    kv_heads: int = 0
    experts: int = 0
    capacity: float = 1.25
    """Places in the experts' queues, for each that a token asks for."""
    post_norm: bool = False
    causal: bool = False
    llama: bool = False
    """RMSNorm, rotary positions, SwiGLU, no biases, an untied head."""
    untied: bool = False
    """The head's weights are not the embedding's."""
    dtype: str = "float32"


BERT = Transformer(batch=32, seq=128, width=768, heads=12, ff=3072, vocab=33280, post_norm=True)
BERT_MOE = replace(BERT, experts=2)
VIT_B = replace(BERT, post_norm=False)
GPT2_XL = Transformer(batch=1, seq=1024, width=1600, heads=25, ff=6400, vocab=50257, causal=True)
GPT3_XL = Transformer(batch=0, sequences=2, seq=2560, width=2048, heads=16, ff=8192, vocab=50257, causal=True)
LLAMA3_8B = Transformer(
    batch=1,
    seq=2048,
    width=4096,
    heads=32,
    kv_heads=8,
    ff=14336,
    vocab=128256,
    causal=True,
    llama=True,
    dtype="bfloat16",
)


def norm_shapes(c: Transformer) -> Params:
    return {"scale": f32(c.width), **({} if c.llama else {"bias": f32(c.width)})}


def norm(p: Params, x: jax.Array) -> jax.Array:
    """Layer norm, or RMSNorm where there is no bias; computed in float32."""
    y = x.astype(jnp.float32)
    if "bias" in p:
        y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)
    y = y.astype(x.dtype) * p["scale"]
    return y + p["bias"] if "bias" in p else y


def block_shapes(c: Transformer, experts: int = 0) -> Params:
    """One layer. Attention kernels keep heads and head width as dimensions of their own."""
    d, h, g, k = c.width, c.heads, c.kv_heads or c.heads, c.width // c.heads
    some = lambda *shape: () if c.llama else shape
    shapes = {
        "norm1": norm_shapes(c),
        "query": dense_shapes(d, h, k, bias=some(h, k)),
        "key": dense_shapes(d, g, k, bias=some(g, k)),
        "value": dense_shapes(d, g, k, bias=some(g, k)),
        "out": dense_shapes(h, k, d, bias=some(d)),
        "norm2": norm_shapes(c),
    }
    if experts:
        return {**shapes, "router": f32(d, experts), "up": f32(experts, d, c.ff), "down": f32(experts, c.ff, d)}
    gate = {"gate": dense_shapes(d, c.ff)} if c.llama else {}
    return {**shapes, **gate, "up": dense_shapes(d, c.ff, bias=some(c.ff)), "down": dense_shapes(c.ff, d, bias=some(d))}


def rotary(seq: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the angles of each position: [seq, 1, width / 2]."""
    frequencies = 500_000.0 ** (-2.0 / width * jnp.arange(width // 2, dtype=jnp.float32))
    angles = jnp.arange(seq, dtype=jnp.float32)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotated(x: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x (batch, seq, heads, width) with its two halves turned into each other (Su et al. 2021)."""
    cos, sin = turn
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(c: Transformer, p: Params, x: jax.Array) -> jax.Array:
    """Multi-head self-attention over x (batch, seq, width); heads share keys and values where there are fewer."""
    q = dense(p["query"], "btd,dhk->bthk", x)
    k = dense(p["key"], "btd,dhk->bthk", x)
    v = dense(p["value"], "btd,dhk->bthk", x)
    if c.llama:
        turn = rotary(x.shape[1], q.shape[-1])
        q, k = rotated(q, turn), rotated(k, turn)
    if c.kv_heads:
        k, v = (jnp.repeat(y, c.heads // c.kv_heads, axis=2) for y in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    if c.causal:
        scores = jnp.where(jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool)), scores, -1e9)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    return dense(p["out"], "bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", weights, v))


def feed_forward(c: Transformer, p: Params, x: jax.Array) -> jax.Array:
    hidden = dense(p["up"], "btd,df->btf", x)
    hidden = jax.nn.silu(dense(p["gate"], "btd,df->btf", x)) * hidden if c.llama else jax.nn.gelu(hidden)
    return dense(p["down"], "btf,fd->btd", hidden)


def mixture(c: Transformer, p: Params, x: jax.Array) -> jax.Array:
    """Top-2 experts of each token (GShard): a queue per sequence and expert, contractions there and back; what
    overflows a queue is dropped."""
    experts = p["router"].shape[-1]
    places = math.ceil(c.capacity * 2 * x.shape[1] / experts)
    gates, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    gates = gates / gates.sum(-1, keepdims=True)
    asked = jax.nn.one_hot(chosen, experts)
    # A token's first choice and then its second, tokens in order: where each stands in its expert's queue.
    queue = asked.reshape(x.shape[0], -1, experts)
    place = ((jnp.cumsum(queue, axis=1) - 1) * queue).sum(-1).reshape(chosen.shape)
    there = jnp.einsum("btje,btjp->btjep", asked, jax.nn.one_hot(place.astype(jnp.int32), places))
    inside = jnp.einsum("btjep,btd->ebpd", there, x)
    hidden = jax.nn.gelu(jnp.einsum("ebpd,edf->ebpf", inside, p["up"]))
    outside = jnp.einsum("ebpf,efd->ebpd", hidden, p["down"])
    return jnp.einsum("btjep,btj,ebpd->btd", there, gates, outside)


def block(c: Transformer, p: Params, x: jax.Array) -> jax.Array:
    second = mixture if "router" in p else feed_forward
    if c.post_norm:
        x = norm(p["norm1"], x + attention(c, p, x))
        return norm(p["norm2"], x + second(c, p, x))
    x = x + attention(c, p, norm(p["norm1"], x))
    return x + second(c, p, norm(p["norm2"], x))


def blocks_shapes(c: Transformer, layers: int, devices: int) -> Params:
    return {f"block{i}": block_shapes(c, c.experts * devices * (i % 2)) for i in range(layers)}


def blocks(c: Transformer, params: Params, x: jax.Array) -> jax.Array:
    for i in range(sum(name.startswith("block") for name in params)):
        x = block(c, params[f"block{i}"], x)
    return x if c.post_norm else norm(params["norm"], x)


def language_model(devices: int, layers: int, c: Transformer) -> Target:
    """Cross entropy over all positions; each counts as the batch's `weight` says where the model sees both ways."""
    params = {"embed": f32(c.vocab, c.width), **blocks_shapes(c, layers, devices)}
    params |= {} if c.llama else {"position": f32(c.seq, c.width)}
    params |= {} if c.post_norm else {"norm": norm_shapes(c)}
    untied = c.llama or c.untied
    params |= {"head": f32(c.vocab, c.width)} if untied else {}

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        params = jax.tree.map(lambda p: p.astype(c.dtype), params)
        x = params["embed"][batch["tokens"]]
        x = blocks(c, params, x if c.llama else x + params["position"])
        logits = jnp.einsum("btd,vd->btv", x, params["head" if untied else "embed"])
        losses = cross_entropy(logits, batch["targets"])
        return losses.mean() if c.causal else (losses * batch["weight"]).sum() / batch["weight"].sum()

    shape = (c.sequences or c.batch * devices, c.seq)
    batch = {"tokens": i32(*shape), "targets": i32(*shape), **({} if c.causal else {"weight": f32(*shape)})}
    return training_step(loss_fn, params, batch)


def bert(devices: int, *, layers: int = 12, config: Transformer = BERT) -> Target:
    """BERT-base at the reference's sizes, with a masked language model's loss."""
    return language_model(devices, layers, config)


def bert_moe(devices: int, *, layers: int = 12, config: Transformer = BERT_MOE) -> Target:
    """BERT-base with experts, two per device, in every second layer."""
    return language_model(devices, layers, config)


def gpt2_xl(devices: int, *, layers: int = 48, config: Transformer = GPT2_XL) -> Target:
    """GPT-2 XL, 1.6e9 parameters."""
    return language_model(devices, layers, config)


def gpt3_xl(devices: int, *, layers: int = 24, config: Transformer = GPT3_XL) -> Target:
    """GPT-3 XL's sizes, 1.3e9 parameters, on two long sequences: fewer than there are devices."""
    return language_model(devices, layers, config)


def llama3_8b(devices: int, *, layers: int = 32, config: Transformer = LLAMA3_8B) -> Target:
    """LLaMA-3-8B: bfloat16, with parameters and moments kept in float32."""
    return language_model(devices, layers, config)


@dataclass(frozen=True)
class Vision:
    """`batch`: images per device."""

    batch: int = 32
    size: int = 224
    patch: int = 16
    classes: int = 1000
    encoder: Transformer = VIT_B


def vit_b(devices: int, *, layers: int = 12, config: Vision = Vision()) -> Target:
    """ViT-B/16 with a class token."""
    c, e, images = config, config.encoder, config.batch * devices
    params = {
        "patch": dense_shapes(c.patch, c.patch, 3, e.width, bias=(e.width,)),
        "class": f32(1, 1, e.width),
        "position": f32((c.size // c.patch) ** 2 + 1, e.width),
        **blocks_shapes(e, layers, devices),
        "norm": norm_shapes(e),
        "head": dense_shapes(e.width, c.classes, bias=(c.classes,)),
    }

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        p, stride = params["patch"], (c.patch, c.patch)
        layout = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(batch["image"], p["kernel"], stride, "VALID", dimension_numbers=layout)
        x = (x + p["bias"]).reshape(x.shape[0], -1, e.width)
        first = jnp.broadcast_to(params["class"], (x.shape[0], 1, e.width))
        x = blocks(e, params, jnp.concatenate([first, x], axis=1) + params["position"])
        return cross_entropy(dense(params["head"], "nd,de->ne", x[:, 0]), batch["label"]).mean()

    return training_step(loss_fn, params, {"image": f32(images, c.size, c.size, 3), "label": i32(images)})


# As the configuration of HAP's released code has them: images of CIFAR-10, heads of their own.
HAP_VGG = ConvNet(size=32, spread=7, classes=10)
HAP_VIT = Vision(size=32, patch=4, classes=10)
HAP_BERT = replace(BERT, untied=True)
HAP_MOE = replace(BERT_MOE, untied=True)
BERT_HALF = replace(BERT, dtype="float16")


def hap_vgg19(devices: int, *, config: ConvNet = HAP_VGG) -> Target:
    """VGG-19 on images of 32 x 32, whose last map of one pixel torchvision's pooling repeats to 7 x 7."""
    return vgg19(devices, config=config)


def hap_vit(devices: int, *, layers: int = 12, config: Vision = HAP_VIT) -> Target:
    """A vision transformer on images of 32 x 32 in patches of 4 x 4."""
    return vit_b(devices, layers=layers, config=config)


def hap_bert(devices: int, *, layers: int = 12, config: Transformer = HAP_BERT) -> Target:
    """BERT-base with a head of its own."""
    return language_model(devices, layers, config)


def hap_moe(devices: int, *, layers: int = 12, config: Transformer = HAP_MOE) -> Target:
    """The same with experts, two per device, in every second layer."""
    return language_model(devices, layers, config)


def bert_half(devices: int, *, layers: int = 12, config: Transformer = BERT_HALF) -> Target:
    """BERT-base computed in float16, as Poplar trains; parameters and moments are float32."""
    return language_model(devices, layers, config)


MODELS: dict[str, Callable[..., Target]] = {
    "mlp": mlp,
    "vgg19": vgg19,
    "vit_b": vit_b,
    "bert": bert,
    "bert_moe": bert_moe,
    "gpt2_xl": gpt2_xl,
    "gpt3_xl": gpt3_xl,
    "llama3_8b": llama3_8b,
    "hap_vgg19": hap_vgg19,
    "hap_vit": hap_vit,
    "hap_bert": hap_bert,
    "hap_moe": hap_moe,
    "bert_half": bert_half,
}
