"""One device of a plan for many, run on the single device of this machine.

The device runs the plan's own computation on its own shapes. A copy in its memory, of the shapes that would go over the
wire, replaces each collective: the device receives its own data in place of every other device's. So values are right
only where the device holds everything and the others nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from hapsynth.graph.ir import Literal
from hapsynth.instructions.program.program import Convert, Property
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.staging.stages import Stage
from hapsynth.lower import Lowered, Staged, own_mesh
from hapsynth.lower._collective_order import Order
from hapsynth.lower._collectives import receive, send
from hapsynth.lower._control_flow import Env
from hapsynth.lower._device_groups import Group
from hapsynth.lower._host_schedule import CollectiveStage, HostSlot, Item, LocalStage, Name
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.lower._storage import pad_to
from hapsynth.plan import Plan
from on_gpu.settings import stand_ins


def with_shares(plan: Plan, parts: Sequence[float]) -> Sizes:
    """The sizes of a plan on one mesh axis with every class cut in these parts, rounded to whole units; the last
    device takes the rest."""
    shares: list[tuple[int, ...]] = []
    for cls in plan.sizes.classes.all:
        ends = [round(sum(parts[: i + 1]) / sum(parts) * cls.units) for i in range(len(parts))]
        shares.append(tuple(np.diff([0, *ends]).tolist()))
    return Sizes(plan.traced.graph, plan.sizes.classes, tuple(shares))


def due(step: Convert, shape: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """The shape that a collective makes of an array of `shape` on a mesh of `lengths`."""
    out = list(shape)
    source, target, n = step.source[step.axis], step.target[step.axis], lengths[step.axis]
    if step.collective.splits:
        out[target.dim] //= n
    if step.collective.joins:
        out[source.dim] *= n
    return tuple(out)


def copied(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """A copy of `x` in another shape: the first part of a dimension, or the whole dimension repeated. Collectives that
    go as one have one dimension more, for the devices."""
    if x.ndim < len(shape):
        x = x[..., None, :]
    elif x.ndim > len(shape):
        x = x[..., 0, :]
    repeats = [-(-long // max(short, 1)) for long, short in zip(shape, x.shape, strict=True)]
    return lax.slice(jnp.tile(x, repeats) if max(repeats, default=1) > 1 else x, (0,) * x.ndim, shape)


@dataclass(eq=False)
class OneStaged(Staged):
    """The stages of the device at `place` in the mesh, run on `device`. Raises ValueError where the host would have to
    follow a loop or a branch."""

    place: tuple[int, ...] = (0,)
    device: Any = None

    @cached_property
    def groups(self) -> list[Group]:
        return [Group((0,), (self.place,), (self.device,), self.mesh.devices.shape)]

    @cached_property
    def items(self) -> list[Item]:
        items = super().items
        if any(not isinstance(item, LocalStage | CollectiveStage) for item in items):
            raise ValueError("the program has a loop or branch with collectives inside, which one device can't follow")
        return items

    def count(self, kind: type[LocalStage | CollectiveStage]) -> int:
        return sum(isinstance(item, kind) for item in self.items)

    def _lower_collective(self, stage: CollectiveStage, known: dict[Any, Any]) -> Any:
        wires = self._given(stage)
        shapes = [self.arrived(wire).shape for wire in self.sent(stage.steps)]

        def hapsynth_copies(*wires: Any) -> list[Any]:
            return [copied(x, shape) for x, shape in zip(wires, shapes, strict=True)]

        # XLA copies an argument that is returned unchanged too, as it is not donated.
        return jax.jit(hapsynth_copies).lower(*wires)

    def _given(self, stage: CollectiveStage) -> list[jax.ShapeDtypeStruct]:
        here = SingleDeviceSharding(self.device)
        wires = map(self.wire, self.sent(stage.steps))
        return [jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=here) for w in wires]

    def __call__(self, stored: Sequence[Any], record: Any = None) -> list[Any]:
        """Runs one step on the device's shards of inputs and constants; its outputs. Donated inputs are consumed,
        and nothing is recorded."""
        names = ((v, self.program.inputs[v]) for v in self.graph.sources)
        env: dict[Name, Any] = dict(zip(names, stored, strict=True))
        wires: list[Any] = []
        for item in self.items:
            (run,) = self.compiled[cast(LocalStage | CollectiveStage, item)]
            if isinstance(item, LocalStage):
                made = run(*wires, *(env[p] for p in item.reads))
                env.update(zip(item.writes, made))
                wires = made[len(item.writes) :]
                for name in item.dead:
                    env.pop(name, None)
            else:
                wires = run(*wires)
        return [env[HostSlot("output", i)] for i in range(len(self.outputs))]

    def copies(self) -> Callable[[], list[Any]]:
        """A function that runs only the copies that replace collectives."""
        stages = [item for item in self.items if isinstance(item, CollectiveStage)]
        with jax.default_device(self.device):
            wires = [[jnp.zeros(w.shape, w.dtype) for w in self._given(stage)] for stage in stages]
        return lambda: [self.compiled[stage][0](*sent) for stage, sent in zip(stages, wires, strict=True)]

    def temporary_bytes(self) -> int:
        """The largest temporary memory of any stage."""
        analyses = [run.memory_analysis() for runs in self.compiled.values() for run in runs]
        return max(int(a.temp_size_in_bytes) for a in analyses)


@dataclass(eq=False)
class OneSwitch(Lowered):
    """The switch form of the device at `place` in the mesh, run on `device`; the place is an argument."""

    place: tuple[int, ...] = (0,)
    device: Any = None

    def count(self) -> int:
        """How many stages have a switch."""
        return sum(isinstance(step, Stage) and bool(step.switch) for step in self.steps)

    @cached_property
    def function(self) -> Any:
        def hapsynth_plan(place: Any, *stored: Any) -> list[Any]:
            made = iter(self.at(tuple(place), stored))
            out: list[Any] = []
            for operand, storage in zip(self.graph.outputs, self.outputs, strict=True):
                out.append(jnp.asarray(cast(Literal, operand).value) if storage is None else next(made))
            return out

        donated = tuple(1 + i for i, donated in enumerate(self.donated) if donated)
        return jax.jit(hapsynth_plan, donate_argnums=donated, keep_unused=True)

    @cached_property
    def _place(self) -> jax.Array:
        return jax.device_put(np.array(self.place, np.int32), self.device)

    def __call__(self, stored: Sequence[Any], record: Any = None) -> list[Any]:
        """As `OneStaged` does, on padded shards."""
        return self.function(self._place, *stored)

    def _communicate(
        self, steps: Sequence[Convert], env: Env, here: MeshPosition, order: Order, computed: Sequence[Property] = ()
    ) -> None:
        for step in steps:
            wire = lax.optimization_barrier(send(self.sizes, step, env[step.value, step.source], here))
            # Between barriers, so that XLA does not see that nothing is sent.
            came = lax.optimization_barrier(copied(wire, due(step, wire.shape, here.lengths)))
            env[step.value, step.target] = receive(self.sizes, step, came, here)


One = OneStaged | OneSwitch
AnyOne = TypeVar("AnyOne", bound=One)


def one_of(form: type[AnyOne], plan: Plan, sizes: Sizes, device: Any) -> AnyOne:
    """The first device of a plan that was made without devices, at these sizes."""
    mesh = own_mesh(stand_ins(sizes.classes.lengths[0]), plan.program.axes)
    graph, options = plan.traced.graph, plan.result.lowering
    return form(graph, plan.program, sizes, mesh, True, device.platform, options, place=(0,), device=device)


def holding(one: One, leaves: Sequence[jax.Array]) -> list[Any]:
    """The device's shards of the program's inputs, which are given whole, and of its constants."""
    found: list[Any] = []
    whole = [*leaves, *one.graph.constants.values()]
    for storage, x in zip((*one.inputs, *one.constants), whole, strict=True):
        part = jax.device_put(x, one.device)[storage.slices(one.place)]
        padded = isinstance(one, OneSwitch)
        found.append(pad_to(part, storage.sharding.shard_shape(storage.stored_shape)) if padded else part)
    return found


class Steps:
    """Runs a device's steps one after another, each on the state that the last one left."""

    def __init__(self, one: One, leaves: Sequence[jax.Array]) -> None:
        self.one, self.held = one, holding(one, leaves)

    def __call__(self) -> list[Any]:
        made = self.one(self.held)
        for source, target in self.one.graph.carry:
            self.held[source] = made[target]
        return made
