"""Exact compute on uneven shards against the same program with every shard padded to the largest.

    python benchmarks/bench_exact.py [--rounds 30] [--json OUT]

Eight host devices, a data-parallel MLP step, shares 48/8/4/4/4/4/4/4 of the batch. The padded peer is what an SPMD
program without per-device shapes does: every device computes 48 units.
"""

from __future__ import annotations

from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402  the device count must be set first
import numpy as np  # noqa: E402
from harness.command import parser, write_json  # noqa: E402
from harness.timing import interleaved, report  # noqa: E402

from hapsynth import Cluster  # noqa: E402
from hapsynth.graph.trace import trace  # noqa: E402
from hapsynth.instructions.program.sizes import Classes, Sizes  # noqa: E402
from hapsynth.lower import Lowered  # noqa: E402
from hapsynth.search.planning.baselines import Baselines  # noqa: E402
from hapsynth.search.planning.task import Task  # noqa: E402

SHARES = (48, 8, 4, 4, 4, 4, 4, 4)
ROWS = 32  # of the batch, per unit


def step(params: Any, batch: Any) -> tuple[Any, Any]:
    def loss(p: Any) -> jax.Array:
        hidden = jax.nn.relu(batch["x"] @ p["in"])
        return jnp.mean((hidden @ p["out"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value


def lowered(units: int, shares: tuple[int, ...], mesh: jax.sharding.Mesh):
    """The data-parallel program on `units` x ROWS rows, cut by `shares`, and its arguments on the mesh."""
    struct = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    rows = units * ROWS
    args = ({"in": struct(512, 1024), "out": struct(1024, 256)}, {"x": struct(rows, 512), "y": struct(rows, 256)})
    graph = trace(step, args).graph
    cluster = Cluster.from_mesh(mesh)
    task = Task(graph, cluster)
    program = Baselines(task).all()["data_parallel"].program
    classes = Classes.build(graph, program, task.factors)
    sizes = Sizes(graph, classes, tuple(tuple(s * c.units // units for s in shares) for c in classes.all))
    sizes.check(program.axes)
    form = Lowered(graph, program, sizes, mesh, donate=False)
    rng = np.random.default_rng(0)
    values = [rng.normal(size=graph.values[v].shape).astype(np.float32) for v in graph.inputs]
    stored = [s.put(x, copy=True) for s, x in zip(form.inputs, values, strict=True)]
    return lambda: form(stored)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=30)
    options = command.parse_args()
    mesh = jax.make_mesh((8,), ("data",))
    units, largest = sum(SHARES), max(SHARES)
    steps = {
        "exact": lowered(units, SHARES, mesh),
        "padded to the largest": lowered(8 * largest, (largest,) * 8, mesh),
    }
    times = interleaved(steps, options.rounds)
    write_json(options.json, report(f"exact compute, shares {SHARES}", times, "padded to the largest"))


if __name__ == "__main__":
    main()
