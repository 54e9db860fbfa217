"""Small graphs and clusters that several tests share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hapsynth.cluster.cluster import Cluster, DeviceKind, Link
from hapsynth.graph.trace import Traced, trace
from hapsynth.search.cost.model import CostModel
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.task import Task
from hapsynth.search.result import Result


def device(name: str, speed: float, memory: float = 16e9) -> DeviceKind:
    """A device of `speed` x 10 TFLOP/s and 500 GB/s."""
    return DeviceKind(name, {"float32": 1e13 * speed}, 5e11 * speed, int(memory), overhead=1e-7, efficiency=1.0)


def cluster(speeds: list[float], bandwidth: float = 1e10, latency: float = 1e-6, memory: float = 16e9) -> Cluster:
    """One device per speed, each on a host of its own. `bandwidth`: bytes/s, `latency`: seconds."""
    kinds = {s: device(f"x{s}", s, memory) for s in speeds}
    return Cluster("test", tuple(kinds[s] for s in speeds), tuple(range(len(speeds))), Link(bandwidth, latency))


def random_graph(seed: int, ops: int, width: int = 512) -> Traced:
    """A random function of two matrices with about `ops` ops: contractions, elementwise ops, reductions."""
    rng = np.random.default_rng(seed)
    carried = bool(rng.integers(2))

    def fn(x, w):
        values = [x, w]
        for _ in range(ops):
            a = values[rng.integers(len(values))]
            b = values[rng.integers(len(values))]
            kind = rng.integers(6)
            if kind <= 1:
                values.append(a @ b)
            elif kind == 2:
                values.append(a + b)
            elif kind == 3:
                values.append(jnp.tanh(a))
            elif kind == 4:
                values.append(a.T)
            else:
                values.append(a * b)
        return values[-1], values[rng.integers(2, len(values))]

    struct = jax.ShapeDtypeStruct((width, width), jnp.float32)
    return trace(fn, (struct, struct), carry=[("[1]", "[0]")] if carried else [])


def planned(seed: int, bandwidth: float) -> tuple[CostModel, Result]:
    """A random function planned for two fast and two slow devices: the costs, and what the planner came to."""
    task = Task(random_graph(seed, 12, 1024).graph, cluster([3.0, 3.0, 1.0, 1.0], bandwidth))
    return task.costs, Planner(task).run()
