"""Trains the transformer on Shakespeare's sonnets, byte by byte, on 8 host devices with uneven shards.

    python examples/train.py                # 50 steps on the cluster of examples/clusters/mixed8.toml
    python examples/train.py --check        # and the same on one device with jax.jit: the curves must agree

The devices are XLA's host devices, all alike; the plan is the one for the cluster named, whose devices aren't.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import transformer

import hapsynth

HERE = Path(__file__).parent
CLUSTER = HERE / "clusters" / "mixed8.toml"
CONFIG = transformer.Config(batch=96, seq=64, vocab=256, layers=2, width=96, heads=4, ff=384, learning_rate=3e-3)
# How far the two loss curves may part, relative: float32 sums in another order, through 50 steps of AdamW.
TOLERANCE = 1e-3
# As one program: many small ones would take longer to compile.
init = jax.jit(transformer.init, static_argnums=1)


def batches(config: transformer.Config = CONFIG, seed: int = 0) -> Iterator[transformer.Batch]:
    """Endless batches of windows of the text at random places: byte t + 1 is the target of byte t."""
    text = np.frombuffer((HERE / "data" / "sonnets.txt").read_bytes(), dtype=np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - config.seq, config.batch)
        window = text[starts[:, None] + np.arange(config.seq + 1)]
        yield {"tokens": jax.numpy.asarray(window[:, :-1]), "targets": jax.numpy.asarray(window[:, 1:])}


def run(
    steps: int = 50, cluster: Path = CLUSTER, config: transformer.Config = CONFIG, every: int | None = None
) -> list[float]:
    """The losses of `steps` training steps under a plan for `cluster`; printed every `every` steps."""
    fn, args = transformer.target_for(config)
    described = hapsynth.Cluster.load(cluster)
    mesh = jax.make_mesh(tuple(size for _, size in described.axes), tuple(name for name, _ in described.axes))
    plan = hapsynth.synthesize(fn, args, mesh, cluster=described)

    losses, start = [], time.perf_counter()
    # Once: a call consumes the state and returns the next, which lies as the plan wants it.
    state = plan.shard(init(jax.random.key(0), config))
    for step, batch in zip(range(steps), batches(config)):
        state, loss = plan(state, batch)
        losses.append(float(loss))
        if every and (step % every == 0 or step + 1 == steps):
            print(f"step {step:3}  loss {losses[-1]:.4f}  {time.perf_counter() - start:6.1f} s", flush=True)
    return losses


def reference(steps: int = 50, config: transformer.Config = CONFIG) -> list[float]:
    """The losses of the same steps on one device with jax.jit."""
    step = jax.jit(transformer.make_step(config), donate_argnums=0)
    state, losses = init(jax.random.key(0), config), []
    for _, batch in zip(range(steps), batches(config)):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--cluster", type=Path, default=CLUSTER, help="cluster file (default: mixed8)")
    parser.add_argument("--check", action="store_true", help="compare with jax.jit on one device")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: must be at least 1")

    # As many host devices as the cluster has, before any backend starts.
    jax.config.update("jax_num_cpu_devices", hapsynth.Cluster.load(options.cluster).n)
    losses = run(options.steps, options.cluster, every=5)
    if not options.check:
        return 0
    alone = reference(options.steps)
    apart = max(abs(a - b) / b for a, b in zip(losses, alone))
    print(f"largest relative difference to one device over {options.steps} steps: {apart:.2e} (limit {TOLERANCE:.0e})")
    return int(apart > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
