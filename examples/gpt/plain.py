"""A GPT in flax nnx for plain JAX: adamw, warm-up and cosine, clipping, evaluation, orbax's CheckpointManager.

python examples/gpt/plain.py [--layers 2] [--steps 8] [--folder checkpoints]
"""

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

VOCABULARY, LENGTH, WIDTH, HEADS, BATCH = 64, 32, 64, 4, 24


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.before_attention = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.before_mlp = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.before_attention(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.before_mlp(x))))


class GPT(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.tokens.attend(self.norm(x))


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(state, tokens):
    model, optimizer = nnx.merge(graph, state)
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


def batches(steps):
    """Sequences that count up, each from somewhere and by some step."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        start, by = rng.integers(0, VOCABULARY, (2, BATCH, 1))
        yield np.asarray((start + (by % 5) * np.arange(LENGTH + 1)) % VOCABULARY, np.int32)


parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--folder", default="checkpoints")
options = parser.parse_args()

model = GPT(options.layers, nnx.Rngs(0))
schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 4, 100)
rule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
graph, state = nnx.split((model, nnx.Optimizer(model, rule, wrt=nnx.Param)))
train = jax.jit(train_step, donate_argnums=0)
with ocp.CheckpointManager(os.path.abspath(options.folder)) as manager:
    first = manager.latest_step()
    if first is not None:
        state = manager.restore(first, args=ocp.args.StandardRestore(state))
    for step, tokens in enumerate(batches(options.steps)):
        if step >= (first or 0):
            state, loss = train(state, tokens)
            print(f"step {step}  loss {loss:.9f}")
    manager.save(options.steps, args=ocp.args.StandardSave(state))
