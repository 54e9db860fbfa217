"""An expert's programs in JAX without hapsynth: the examples' training steps, distributed by hand.

    data_parallel    `jax.jit` with NamedSharding: the state replicated, the batch cut; XLA puts in the all-reduces
    zero3            shard_map: parameters and optimizer state cut, `all_gather` before the forward pass and, by a
                     policy of `jax.checkpoint`, again in the backward pass; its transpose is the reduce-scatter
    tensor_parallel  shard_map: Megatron-LM's operators f and g around column- and row-parallel layers, heads cut,
                     vocabulary-parallel cross entropy

Only what an example's own file computes is used from it; where and what to communicate is all written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "d"
Tree = Any
Loss = Callable[[Tree, Tree], tuple[jax.Array, Tree]]
"""(parameters, this device's batch) -> (this device's loss, batch statistics)"""


class ByHand(NamedTuple):
    """A compiled-on-call step of (state, batch); `pack` and `unpack` turn a state to what the step takes and back."""

    step: Any
    pack: Callable[[Tree], Tree]
    unpack: Callable[[Tree], Tree]


def same(tree: Tree) -> Tree:
    return tree


def data_parallel(module: ModuleType, config: Any, mesh: Mesh) -> ByHand:
    """As JAX's own documentation teaches."""
    everywhere, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(AXIS))
    step = jax.jit(module.make_step(config), in_shardings=(everywhere, cut), out_shardings=everywhere, donate_argnums=0)
    return ByHand(step, same, same)


# Shared by both shard_map forms


def optimizer(config: Any, norm: Callable[[Tree], jax.Array]) -> optax.GradientTransformation:
    """The examples' optimizer, its global norm taken over all devices."""

    def clip(grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        total = norm(grads)
        return jax.tree.map(lambda g: jnp.where(total < 1.0, g, g / total), grads), state

    clipped = optax.GradientTransformation(lambda params: optax.EmptyState(), clip)
    return optax.chain(clipped, optax.adamw(config.learning_rate, weight_decay=1e-2))


def update(config: Any, state: Tree, grads: Tree, stats: Tree, norm: Callable[[Tree], jax.Array]) -> Tree:
    """The new state of these shards of the state."""
    updates, opt = optimizer(config, norm).update(grads, state["opt"], state["params"])
    new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
    if "stats" in state:
        m = config.momentum
        new["stats"] = jax.tree.map(lambda old, seen: m * old + (1 - m) * seen, state["stats"], stats)
    return new


def squares(grads: list[jax.Array]) -> jax.Array:
    return sum((jnp.sum(jnp.square(g)) for g in grads), jnp.float32(0))


def on_mesh(body: Callable[..., Any], mesh: Mesh, state: Tree, batch: PartitionSpec) -> Any:
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(state, batch), out_specs=(state, PartitionSpec()), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


# ZeRO-3


def longest(shape: tuple[int, ...]) -> int:
    """The dimension in which a tensor is stored cut; -1: whole."""
    dim = max(range(len(shape)), key=lambda d: shape[d], default=-1)
    return dim if dim >= 0 and shape[dim] > 1 else -1


def spec(dim: int) -> PartitionSpec:
    return PartitionSpec() if dim < 0 else PartitionSpec(*[None] * dim, AXIS)


def global_mean(x: jax.Array) -> jax.Array:
    """The mean over the batch of all devices, height and width."""
    return lax.pmean(x.mean((0, 1, 2)), AXIS)


def synchronised_norm(p: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
    """The example's batch norm over all devices' examples. As `x.var` does there, the variance takes a mean of its
    own."""
    mean = global_mean(x)
    var = global_mean(jnp.square(x - global_mean(x)))
    return (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"], {"mean": mean, "var": var}


def local_losses(module: ModuleType) -> Loss:
    """The example's loss on one device's part of the batch: the sum over the devices is the loss."""

    def loss(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        if "image" in batch:
            x, stats = batch["image"], {}
            for i in range(len(params) // 2):
                x, stats[f"norm{i}"] = synchronised_norm(params[f"norm{i}"], module.conv(x, params[f"conv{i}"]))
                x = module.max_pool(jax.nn.relu(x))
            x = module.avg_pool(x, x.shape[1]).reshape(x.shape[0], -1)
            logits, labels = x @ params["dense"]["kernel"] + params["dense"]["bias"], batch["label"]
            return cross_entropy(logits, labels).mean(), stats
        inputs, labels = (batch["x"], batch["y"]) if "x" in batch else (batch["tokens"], batch["targets"])
        return cross_entropy(module.apply(params, inputs), labels).mean(), {}

    def scaled(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        value, stats = loss(params, batch)
        return value / lax.axis_size(AXIS), stats

    return scaled


def gathered_again(primitive: Any, *_: Any, **__: Any) -> bool:
    """The policy of ZeRO-3: the backward pass keeps everything but gathered parameters (and cuts of them)."""
    return primitive not in (lax.all_gather_p, lax.slice_p)


def zero3(module: ModuleType, config: Any, mesh: Mesh) -> ByHand:
    n = mesh.size
    _, (shapes, _) = module.target_for(config)
    dims = jax.tree.map(lambda s: longest(s.shape), shapes)
    loss_of = local_losses(module)

    def gather(shard: jax.Array, dim: int, like: Any) -> jax.Array:
        whole = lax.all_gather(shard, AXIS, axis=dim, tiled=True)
        return whole if whole.shape == like.shape else lax.slice_in_dim(whole, 0, like.shape[dim], axis=dim)

    @partial(jax.checkpoint, policy=gathered_again)
    def loss(shards: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        return loss_of(jax.tree.map(gather, shards, dims["params"], shapes["params"]), batch)

    def norm(grads: Tree) -> jax.Array:
        return jnp.sqrt(lax.psum(squares(jax.tree.leaves(grads)), AXIS))

    def mine(whole: jax.Array) -> jax.Array:
        size = len(whole) // n
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(AXIS) * size, size)

    def body(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state["params"], batch)
        return update(config, state, grads, jax.tree.map(mine, stats), norm), lax.psum(value, AXIS)

    def pack(state: Tree) -> Tree:
        """Padded with zeros to whole shards."""

        def one(x: Any, dim: int) -> Any:
            if dim < 0:
                return x
            return np.pad(x, [(0, -size % n if d == dim else 0) for d, size in enumerate(x.shape)])

        return jax.tree.map(one, state, dims)

    def unpack(state: Tree) -> Tree:
        return jax.tree.map(lambda x, s: np.asarray(x)[tuple(slice(size) for size in s.shape)], state, shapes)

    step = on_mesh(body, mesh, jax.tree.map(spec, dims), PartitionSpec(AXIS))
    return ByHand(step, pack, unpack)


# Tensor parallelism


@jax.custom_vjp
def enter(x: jax.Array) -> jax.Array:
    """Megatron's f: a whole tensor goes into column-parallel layers; its gradient is summed over the devices."""
    return x


enter.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, AXIS),))


@jax.custom_vjp
def leave(x: jax.Array) -> jax.Array:
    """Megatron's g: the sum over the devices of a row-parallel layer's results; its gradient is whole."""
    return lax.psum(x, AXIS)


leave.defvjp(lambda x: (lax.psum(x, AXIS), None), lambda _, g: (g,))


@jax.custom_vjp
def join(x: jax.Array) -> jax.Array:
    """Megatron's gather_output: the last dimension made whole; of its gradient each device takes its own part."""
    return lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)


def _own_part(size: int, g: jax.Array) -> tuple[jax.Array]:
    return (lax.dynamic_slice_in_dim(g, lax.axis_index(AXIS) * size, size, axis=g.ndim - 1),)


join.defvjp(lambda x: (join(x), x.shape[-1]), _own_part)


def parallel_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Megatron's vocabulary-parallel cross entropy: the classes are cut, three all-reduces of one number per row."""
    largest = lax.pmax(lax.stop_gradient(logits.max(-1)), AXIS)
    local = labels - lax.axis_index(AXIS) * logits.shape[-1]
    here = (local >= 0) & (local < logits.shape[-1])
    own = jnp.take_along_axis(logits, jnp.where(here, local, 0)[..., None], axis=-1)[..., 0]
    label = leave(jnp.where(here, own, 0.0))
    total = leave(jnp.exp(logits - largest[..., None]).sum(-1))
    return jnp.log(total) + largest - label


def mlp_loss(module: ModuleType, params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
    """Columns, then rows, then columns again."""
    x = batch["x"]
    for i in range(len(params)):
        kernel, bias = params[f"dense{i}"]["kernel"], params[f"dense{i}"]["bias"]
        x = enter(x) @ kernel + bias if i % 2 == 0 else leave(x @ kernel) + bias
        if i + 1 < len(params):
            x = jax.nn.relu(x)
    logits = join(x) if len(params) % 2 else x
    return cross_entropy(logits, batch["y"]).mean(), {}


def transformer_loss(module: ModuleType, params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
    """Heads and the MLP's inner width cut; embeddings and norms whole; the head's vocabulary cut."""
    x = params["embed"][batch["tokens"]] + params["position"]
    for i in range(sum(name.startswith("block") for name in params)):
        p = params[f"block{i}"]
        x = x + leave(module.attention(p, enter(module.layer_norm(p["norm1"], x))))
        y = enter(module.layer_norm(p["norm2"], x))
        hidden = jax.nn.gelu(y @ p["up"]["kernel"] + p["up"]["bias"])
        x = x + (leave(hidden @ p["down"]["kernel"]) + p["down"]["bias"])
    logits = enter(module.layer_norm(params["norm"], x)) @ params["head"]
    return parallel_cross_entropy(logits, batch["targets"]).mean(), {}


def cnn_loss(module: ModuleType, params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
    """Output channels cut, then input channels; a batch norm between them norms the channels that it holds."""
    x, stats = batch["image"], {}
    convolutions = len(params) // 2
    for i in range(convolutions):
        kernel = params[f"conv{i}"]
        y = module.conv(enter(x), kernel) if i % 2 == 0 else leave(module.conv(x, kernel))
        x, stats[f"norm{i}"] = module.batch_norm(params[f"norm{i}"], y)
        x = module.max_pool(jax.nn.relu(x))
    x = module.avg_pool(x, x.shape[1]).reshape(x.shape[0], -1)
    kernel, bias = params["dense"]["kernel"], params["dense"]["bias"]
    logits = leave(x @ kernel) + bias if convolutions % 2 else join(enter(x) @ kernel + bias)
    return cross_entropy(logits, batch["label"]).mean(), stats


TENSOR_PARALLEL: dict[str, tuple[Callable[..., tuple[jax.Array, Tree]], dict[str, int]]] = {
    "mlp": (mlp_loss, {r"dense[02468].*kernel": 1, r"dense[02468].*bias": 0, r"dense[13579].*kernel": 0}),
    "transformer": (
        transformer_loss,
        {
            r"query|'key|value": 1,
            r"'out'": 0,
            r"up.*kernel": 1,
            r"up.*bias": 0,
            r"down.*kernel": 0,
            r"head": 1,
        },
    ),
    "cnn": (cnn_loss, {r"conv[02468]": 3, r"conv[13579]": 2, r"norm[02468]": 0, r"dense.*kernel": 0}),
}
"""Per example: its loss, and the dimensions in which tensors are cut, by patterns of their paths."""


def tensor_parallel(module: ModuleType, config: Any, mesh: Mesh) -> ByHand:
    loss_of, rules = TENSOR_PARALLEL[module.__name__]
    _, (shapes, _) = module.target_for(config)

    def cut(path: Any, leaf: Any) -> int:
        name = jax.tree_util.keystr(path)
        return next((dim for pattern, dim in rules.items() if re.search(pattern, name)), -1)

    dims = jax.tree_util.tree_map_with_path(cut, shapes)

    def norm(grads: Tree) -> jax.Array:
        leaves = list(zip(jax.tree.leaves(grads), jax.tree.leaves(dims["params"]), strict=True))
        of_cut = lax.psum(squares([g for g, dim in leaves if dim >= 0]), AXIS)
        return jnp.sqrt(of_cut + squares([g for g, dim in leaves if dim < 0]))

    def body(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        grad = jax.value_and_grad(partial(loss_of, module), has_aux=True)
        (value, stats), grads = grad(state["params"], batch)
        return update(config, state, grads, stats, norm), value

    return ByHand(on_mesh(body, mesh, jax.tree.map(spec, dims), PartitionSpec()), same, same)


STEPS: dict[str, Callable[[ModuleType, Any, Mesh], ByHand]] = {
    "data_parallel": data_parallel,
    "data_parallel_speed": data_parallel,
    "zero3": zero3,
    "tensor_parallel": tensor_parallel,
}
"""By the baseline's name. On equal devices cutting the batch by speed cuts it evenly."""
