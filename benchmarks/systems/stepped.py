"""Systems that run one training step on the processes of a job: hapsynth's programs, and those usual today.

Each is given the same function and the same arguments, consumes its state as it goes (donation), and has one device
per process. `Jitted`, `BySpeed` and `Alone` know nothing of hapsynth. XLA's CPU compiler joins all gradients, and the
loss, into one all-reduce after the last of them, so what is data parallel in JAX overlaps nothing here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import TrainingStep

import hapsynth
from hapsynth.graph.trace import Traced
from hapsynth.instructions.testing.example_arguments import random_arguments
from hapsynth.lower import host_array

Arguments = tuple[Any, Any]
"""State and batch, whole, on the host."""
AGREE = 1e-4
"""The most by which losses, and states (`differences`), of the same step may differ."""


def begun(fn: TrainingStep, traced: Traced) -> Arguments:
    """A state and a batch as in the middle of training: second moments ten times as long as clipped gradients. (From
    nothing, Adam makes a step of what gradients that cancel are off by; from large ones it hides all gradients.)"""
    (state, batch), _ = random_arguments(traced)
    size = sum(x.size for x in jax.tree.leaves(state["params"]))
    values = {"count": 1000, "nu": 100 / size}
    name = lambda path: next((k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)), "")
    fill = lambda path, x: np.full(x.shape, values.get(name(path), 0), x.dtype)
    opt = jax.eval_shape(fn.optimizer.init, state["params"])
    return {"params": state["params"], "opt": jax.tree_util.tree_map_with_path(fill, opt)}, batch


class System(Protocol):
    """`place` puts the arguments on the devices, which compiles nothing; `step` runs one step and waits for it."""

    def place(self, arguments: Arguments) -> None: ...

    def step(self) -> float:
        """The loss."""
        ...

    def values(self) -> Any:
        """The state, whole, on the host, None where there is none here; called by all processes."""
        ...


class Planned:
    """A plan of hapsynth, or a program of its instructions that something else chose. A process whose device it leaves
    out does nothing."""

    def __init__(self, plan: hapsynth.Plan) -> None:
        self.plan = plan
        self.idle = plan.mesh is None or not plan.mesh.local_devices

    def place(self, arguments: Arguments) -> None:
        if not self.idle:
            self.state, self.batch = self.plan.shard(*arguments)

    def step(self) -> float:
        if self.idle:
            return math.nan
        self.state, loss = self.plan(self.state, self.batch)
        jax.block_until_ready(jax.tree.leaves(self.state))
        return float(self.plan.unshard(loss))

    def exposed(self) -> float:
        """Seconds of one more step in which this process computes nothing (`hapsynth.RecordedCall`)."""
        if self.idle:
            return 0.0
        (self.state, _), call = self.plan.recorded(self.state, self.batch)
        return call.exposed_s

    def values(self) -> Any:
        return None if self.idle else self.plan.unshard(self.state)


class Idle:
    """A process that a system leaves out."""

    def place(self, arguments: Arguments) -> None:
        pass

    def step(self) -> float:
        return math.nan

    def values(self) -> Any:
        return None


class Jitted:
    """Stock JAX: `jax.jit` with the batch cut evenly along its first dimension. `cut_state`: every array of the state
    is cut evenly along its longest dimension that the devices divide, as in ZeRO-3 (FSDP), whose communication it is
    not: XLA's CPU compiler all-reduces gradients, and reduce-scatters none. Else the state is replicated."""

    def __init__(self, fn: TrainingStep, mesh: Mesh, arguments: Arguments, *, cut_state: bool) -> None:
        self.mesh = mesh
        state, _ = arguments
        self.of_state = jax.tree.map(lambda x: self._sharding(x.shape, cut_state), state)
        self.of_batch = NamedSharding(mesh, PartitionSpec("d"))
        outputs = (self.of_state, NamedSharding(mesh, PartitionSpec()))
        self.function: Any = jax.jit(fn, donate_argnums=0, out_shardings=outputs)

    def _sharding(self, shape: Sequence[int], cut: bool) -> NamedSharding:
        dims = [d for d, size in enumerate(shape) if cut and size and size % self.mesh.size == 0]
        longest = max(dims, key=lambda d: shape[d], default=None)
        return NamedSharding(self.mesh, PartitionSpec(*[("d" if d == longest else None) for d in range(len(shape))]))

    def compile(self, arguments: Arguments) -> None:
        """Before anything is placed."""
        state, batch = arguments
        struct = lambda x, of: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of)
        structs = jax.tree.map(struct, state, self.of_state), jax.tree.map(lambda x: struct(x, self.of_batch), batch)
        self.function = self.function.lower(*structs).compile()

    def place(self, arguments: Arguments) -> None:
        state, batch = arguments
        self.state = jax.tree.map(_placed, state, self.of_state)
        self.batch = jax.tree.map(lambda x: _placed(x, self.of_batch), batch)

    def step(self) -> float:
        self.state, loss = self.function(self.state, self.batch)
        jax.block_until_ready(self.state)
        return float(loss)

    def values(self) -> Any:
        return jax.tree.map(host_array, self.state)


class BySpeed:
    """Data parallelism with an uneven batch, by hand: every process computes the gradients of just its rows in a
    function of its own, weighted by how many they are; one function that is alike everywhere sums them and updates. No
    sum is beside computing. (One SPMD program would pad every process's rows to the most of any, and gain nothing.)

    `rows`: of each device of the mesh."""

    def __init__(self, fn: TrainingStep, mesh: Mesh, rows: Sequence[int]) -> None:
        self.fn, self.mesh, self.rows = fn, mesh, list(rows)
        self.mine = list(mesh.devices.flat).index(mesh.local_devices[0])
        self.each = NamedSharding(mesh, PartitionSpec("d"))
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        share = self.rows[self.mine] / sum(self.rows)

        def gradients(params: Any, batch: Any) -> Any:
            return jax.tree.map(lambda x: share * x[None], fn.gradients(params, batch))

        def update(state: Any, summands: Any) -> Any:
            loss, grads = jax.tree.map(lambda x: lax.psum(x[0], "d"), summands)
            return fn.update(state, grads), loss

        self.gradients = jax.jit(gradients)
        specs: Any = (PartitionSpec(), PartitionSpec("d"))
        on_mesh = jax.shard_map(update, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        self.update = jax.jit(on_mesh, donate_argnums=0)

    def place(self, arguments: Arguments) -> None:
        state, batch = arguments
        self.state = jax.tree.map(lambda x: _placed(x, self.everywhere), state)
        begin = sum(self.rows[: self.mine])
        device = self.mesh.local_devices[0]
        self.batch = jax.tree.map(lambda x: jax.device_put(x[begin : begin + self.rows[self.mine]], device), batch)

    def step(self) -> float:
        params = jax.tree.map(lambda x: x.addressable_shards[0].data, self.state["params"])
        joined = jax.tree.map(self._joined, self.gradients(params, self.batch))
        self.state, loss = self.update(self.state, joined)
        jax.block_until_ready(self.state)
        return float(loss)

    def _joined(self, x: jax.Array) -> jax.Array:
        """One row per process."""
        shape = (self.mesh.size, *x.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.each, [x])

    def values(self) -> Any:
        return jax.tree.map(host_array, self.state)


class Alone:
    """The function on this process's device, with which all must agree."""

    def __init__(self, fn: TrainingStep) -> None:
        self.function = jax.jit(fn, donate_argnums=0)

    def place(self, arguments: Arguments) -> None:
        device = jax.local_devices()[0]
        self.state, self.batch = jax.tree.map(lambda x: jax.device_put(np.array(x), device), arguments)

    def step(self) -> float:
        self.state, loss = self.function(self.state, self.batch)
        jax.block_until_ready(self.state)
        return float(loss)

    def values(self) -> Any:
        return jax.tree.map(np.asarray, self.state)


def rows_by_speed(rows: int, speeds: Sequence[float]) -> list[int]:
    """Whole rows in proportion to the speeds, the largest remainders rounded up."""
    exact = rows * np.asarray(speeds, np.float64) / np.sum(speeds)
    whole = np.floor(exact).astype(int)
    for i in np.argsort(whole - exact, kind="stable")[: rows - whole.sum()]:
        whole[i] += 1
    return whole.tolist()


def differences(got: Any, wanted: Any) -> float:
    """How far apart two states are: of the parameters, and of each kind of moments, the norm of what differs over that
    of all. (One array's own norm tells nothing: the moments of a key's bias, in which gradients cancel, are noise.)"""
    apart, size = defaultdict[str, float](float), defaultdict[str, float](float)
    leaves = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, b), a in zip(leaves, jax.tree.leaves(got), strict=True):
        kind = next((k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)), "params")
        exact = np.asarray(b, np.float64)
        apart[kind] += float(np.sum((np.asarray(a, np.float64) - exact) ** 2))
        size[kind] += float(np.sum(exact**2))
    return max(math.sqrt(apart[kind] / max(size[kind], 1e-300)) for kind in size)


def _placed(x: Any, sharding: NamedSharding) -> jax.Array:
    host = np.array(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
