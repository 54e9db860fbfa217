"""The staged form: local stages on exact shapes, each process its own, and collective stages, the same everywhere
(decisions.md D2); `Run` is one call of it: the arrays that this process's devices hold between stages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from hapsynth import _jax
from hapsynth.graph.ir import Literal
from hapsynth.hlo.collectives import collectives_of
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.staging.stages import Cond, Loop, Stage
from hapsynth.lower._bundles import Bundle, bundles
from hapsynth.lower._collective_order import Order
from hapsynth.lower._collective_thread import OverlappedCall, Transfer
from hapsynth.lower._collectives import receive, send
from hapsynth.lower._compute_timer import ComputeTimer
from hapsynth.lower._control_flow import run_cond, run_loop
from hapsynth.lower._device_groups import Group, groups_of, in_memory_of_their_own, reused
from hapsynth.lower._exact_storage import ExactStorage, Shards, parts
from hapsynth.lower._host_schedule import (
    CollectiveStage,
    Copies,
    HostCond,
    HostDecision,
    HostLoop,
    HostSlot,
    Item,
    LocalStage,
    LocalStep,
    LoopEnter,
    LoopStep,
    Name,
    Sent,
    Slice,
    schedule,
)
from hapsynth.lower._lowered_form import LoweredProgram, held_bytes
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.lower._overlap import overlapped
from hapsynth.lower._pinned import each_of
from hapsynth.lower._recorded_call import RecordedCall, Recorder
from hapsynth.lower._scopes import scope_of, scope_of_step
from hapsynth.lower._storage import cut_to, pad_to, with_weak_type

Env = dict[Any, Any]
Wire = Bundle | HostDecision


@dataclass(frozen=True, eq=False)
class LoweredStages:
    """JAX's lowered functions of all stages of this process."""

    staged: Staged

    def as_text(self) -> str:
        return "\n".join(x.as_text() for lowered in self.staged.stages.values() for x in lowered)

    def compile(self) -> CompiledStages:
        """Compile all: no call waits for it later."""
        _ = self.staged.compiled
        return CompiledStages(self.staged)


@dataclass(frozen=True, eq=False)
class CompiledStages:
    """What XLA compiled of all stages of this process, which calls run."""

    staged: Staged

    def as_text(self) -> str:
        return "\n".join(x.as_text() for compiled in self.staged.compiled.values() for x in compiled)


@dataclass(eq=False)
class Staged(LoweredProgram):
    """A program as stages that the host runs one after another; uneven values are stored as `Shards`.

    With `overlap` its collectives run on a thread of their own, in the order of the program, while local stages that
    do not need them go on. `spare_bytes`: what every device has beside what the program holds in its own order. Where
    all that is sent and received takes more, it keeps to that order.

    A local stage is compiled for each group of this process's devices that are alike, on their exact shapes. A
    collective stage is one function over the whole mesh, on wire shapes that are padded to the largest shard: what is
    laid out and cut for it is so in the local stages around it, so that nothing differs where processes meet.
    """

    overlap: bool = False
    spare_bytes: float = inf

    storage = ExactStorage

    def __call__(self, stored: Sequence[Any], record: Callable[[RecordedCall], None] | None = None) -> list[Any]:
        _ = self.compiled
        # Stages are compiled programs, also where JAX runs functions op by op.
        with _jax.no_mesh(), jax.disable_jit(False):
            recorder = None if record is None else Recorder()
            run = Run(self, [*stored, *self.placed_constants], recorder)
            self.meetings.begin(stored)
            try:
                run.items(self.items)
            except BaseException:
                run.abandon()
                raise
            outputs = run.outputs()
            self.meetings.end(outputs)
            if record is not None and recorder is not None:
                record(recorder.call([parts(x) for x in outputs]))
            return outputs

    def lower(self) -> LoweredStages:
        """The lowered stages: `.as_text()`, `.compile()`."""
        _ = self.stages
        return LoweredStages(self)

    def prepare(self) -> str:
        _ = self.compiled
        return self.fingerprint

    @property
    def compiled_collectives(self) -> list[str]:
        stages = [compiled[0] for item, compiled in self.compiled.items() if isinstance(item, CollectiveStage)]
        said = {stage: [str(c) for c in collectives_of(stage.as_text())] for stage in dict.fromkeys(stages)}
        return [text for stage in stages for text in said[stage]]

    @property
    def compiled_bytes(self) -> dict[Any, int]:
        found = dict.fromkeys(self.mesh.local_devices, 0)
        for item, compiled in self.compiled.items():
            for number, group in enumerate(self.groups):
                held = held_bytes(compiled[number if isinstance(item, LocalStage) else 0])
                found.update((device, max(found[device], held)) for device in group.devices)
        return found

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the collective stages' text, which must be the same in all processes, in their order."""
        digest = hashlib.sha256(b"overlap" if self.overlap else b"")
        for lowered, _ in self.collective_stages:
            digest.update(lowered.as_text().encode())
        return digest.hexdigest()[:16]

    @cached_property
    def groups(self) -> list[Group]:
        return groups_of(self.sizes, self.mesh)

    @cached_property
    def items(self) -> list[Item]:
        graph, inputs = self.graph, self.program.inputs
        sources: list[Any] = []
        for o, layout in zip(graph.outputs, self.program.outputs, strict=True):
            sources.append((o, layout) if isinstance(o, int) else o)
        last = Copies(tuple(sources), tuple(HostSlot("output", i) for i in range(len(sources))))
        kept = [(v, inputs[v]) for v, donated in zip(graph.inputs, self.donated) if not donated]
        kept += [(v, inputs[v]) for v in graph.constants]
        scheduled = partial(schedule, graph, self.steps, last, kept)
        if not self.overlap:
            return scheduled()
        items = scheduled(overlapped)
        return items if self._sent_bytes(items) <= self.spare_bytes else scheduled(partial(overlapped, in_order=True))

    def _sent_bytes(self, items: Sequence[Item]) -> float:
        """What a device sends and receives in all."""
        wires = self.wires_of([item for item in _flat(items) if isinstance(item, CollectiveStage)])
        nbytes = lambda x: prod(x.shape) * _jax.itemsize(x.dtype)
        return sum(nbytes(self.wire(w)) + nbytes(self.arrived(w)) for w in wires)

    @cached_property
    def meetings(self) -> ComputeTimer:
        return ComputeTimer(self.mesh)

    @cached_property
    def stages(self) -> dict[LocalStage | CollectiveStage, list[Any]]:
        """JAX's lowered functions of each stage: of a local one for each group."""
        self.traces += 1
        found: dict[LocalStage | CollectiveStage, list[Any]] = {}
        known: dict[Any, Any] = {}
        with _jax.no_mesh():
            for item in _flat(self.items):
                if isinstance(item, LocalStage):
                    found[item] = [self._lower_local(item, group) for group in self.groups]
                else:
                    found[item] = [self._lower_collective(item, known)]
        return found

    @cached_property
    def compiled(self) -> dict[LocalStage | CollectiveStage, list[Any]]:
        """The compiled functions of each stage, in the same order; stages that are alike share them."""
        with _jax.no_mesh():
            compiled = {x: x.compile() for x in dict.fromkeys(x for lowered in self.stages.values() for x in lowered)}
        return {item: [compiled[x] for x in lowered] for item, lowered in self.stages.items()}

    @property
    def collective_stages(self) -> list[tuple[Any, int]]:
        """JAX's lowered functions of the collective stages, in their order, and how often each runs in a call; alike in
        all processes."""
        runs = _flat(self.items)
        return [(x[0], runs[item]) for item, x in self.stages.items() if isinstance(item, CollectiveStage)]

    @property
    def local_stages(self) -> list[tuple[list[Any], int]]:
        """Those of the local stages, each for each of `groups`."""
        runs = _flat(self.items)
        return [(x, runs[item]) for item, x in self.stages.items() if isinstance(item, LocalStage)]

    # Local stages

    def struct(self, name: Name, coords: Sequence[int]) -> jax.ShapeDtypeStruct:
        """What the device at `coords` of the mesh has of a name."""
        if not isinstance(name, HostSlot):
            value, layout = name
            return jax.ShapeDtypeStruct(self.sizes.local_shape(value, layout, coords), self.graph.values[value].dtype)
        if name.kind != "output":
            return jax.ShapeDtypeStruct((), np.int32)
        source, layout = self.graph.outputs[name.number], self.program.outputs[name.number]
        if isinstance(source, Literal) or layout is None:
            assert isinstance(source, Literal)
            return jax.ShapeDtypeStruct(source.shape, source.dtype)
        return self.struct((source, layout), coords)

    @cached_property
    def _wires(self) -> dict[tuple[Sent, ...], list[Wire]]:
        return {}

    def sent(self, steps: tuple[Sent, ...]) -> list[Wire]:
        """What goes over the wire for some steps: one array for each."""
        if steps not in self._wires:
            decided = [s for s in steps if isinstance(s, HostDecision)]
            moved = [s for s in steps if not isinstance(s, HostDecision)]
            structs = list(map(self._sent_of, moved))
            how = {"flat": self.flat, "planned": self.overlap}
            made = bundles(moved, structs, self.local.platform, self.options, **how)
            self._wires[steps] = [*decided, *made]
        return self._wires[steps]

    def _sent_of(self, step: Convert) -> Any:
        """The shape and dtype that a step sends."""
        shape = self.sizes.padded_shape(step.value, step.source)
        padded = jax.ShapeDtypeStruct(shape, self.graph.values[step.value].dtype)
        return jax.eval_shape(lambda x: send(self.sizes, step, x, self._anyone), padded)

    def wires_of(self, stages: Sequence[CollectiveStage]) -> list[Wire]:
        """What goes over the wire in some stages."""
        return [wire for stage in stages for wire in self.sent(stage.steps)]

    def wire(self, wire: Wire) -> jax.ShapeDtypeStruct:
        """What a device sends."""
        if wire not in self._leaving:
            if isinstance(wire, HostDecision):
                struct = jax.ShapeDtypeStruct((), np.int32)
            else:
                struct = jax.eval_shape(lambda *xs: wire.pack(xs, self.mesh.devices.shape), *wire.sent)
            self._leaving[wire] = jax.ShapeDtypeStruct((1,) if _is_scalar(wire) else struct.shape, struct.dtype)
        return self._leaving[wire]

    @cached_property
    def _anyone(self) -> MeshPosition:
        """Any device: what goes over the wire has the same shape on all."""
        origin = (0,) * self.mesh.devices.ndim
        return MeshPosition(self.mesh.devices.shape, (origin,), tuple(map(jnp.int32, origin)))

    def arrived(self, wire: Wire) -> jax.ShapeDtypeStruct:
        """What a device receives."""
        if wire not in self._arriving:
            made = jax.eval_shape(self._exchanging([wire]), self._on_mesh(self.wire(wire)))[0]
            shape = (made.shape[0] // self.mesh.size, *made.shape[1:])
            self._arriving[wire] = jax.ShapeDtypeStruct(shape, made.dtype)
        return self._arriving[wire]

    @cached_property
    def _leaving(self) -> dict[Wire, jax.ShapeDtypeStruct]:
        return {}

    @cached_property
    def _arriving(self) -> dict[Wire, jax.ShapeDtypeStruct]:
        return {}

    def _on_mesh(self, wire: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.joined(wire.shape), wire.dtype, sharding=self.everyone)

    def joined(self, shape: Sequence[int]) -> tuple[int, ...]:
        """All devices' parts of what goes over the wire, one after another along the first dimension: each is just what
        a stage takes or makes, in the same memory."""
        return (self.mesh.size * shape[0], *shape[1:])

    @cached_property
    def everyone(self) -> NamedSharding:
        """One shard for each device, along the first dimension."""
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    def _lower_local(self, stage: LocalStage, group: Group) -> Any:
        coords, lengths = group.positions[0], self.mesh.devices.shape
        arrives, leaves = self.wires_of(stage.arrives), self.wires_of(stage.leaves)
        given = [*map(self.arrived, arrives), *(self.struct(p, coords) for p in stage.reads)]
        made = [*(self.struct(p, coords) for p in stage.writes), *map(self.wire, leaves)]

        def run(here: MeshPosition, arrays: Sequence[Any]) -> list[Any]:
            env: Env = dict(zip(stage.reads, arrays[len(arrives) :], strict=True))
            for wire, x in zip(arrives, arrays):
                x = x.reshape(()) if _is_scalar(wire) else x
                if isinstance(wire, HostDecision):
                    env[wire.target] = x
                    continue
                for step, part in zip(wire.steps, wire.unpack(x, lengths), strict=True):
                    due = self.sizes.local_shape(step.value, step.target, here.coords)
                    with scope_of_step(self.graph, step):
                        env[step.value, step.target] = cut_to(receive(self.sizes, step, part, here), due)
            self._steps(stage.steps, env, here)
            out = [self._strong(p, env[p]) for p in stage.writes]
            for wire in leaves:
                if isinstance(wire, HostDecision):
                    x = env[wire.source].astype(jnp.int32)
                else:
                    x = wire.pack([self._sent(step, env, here) for step in wire.steps], lengths)
                out.append(x.reshape(1) if _is_scalar(wire) else x)
            return in_memory_of_their_own(arrays, out)

        over = {i for i, p in enumerate(stage.reads, len(arrives)) if p in stage.dead or p in stage.writes}
        donated = reused(given, made, {*range(len(arrives)), *over})
        return group.lower(run, given, made, donated, self.compiler_options)

    def _sent(self, step: Convert, env: Env, here: MeshPosition) -> Any:
        with scope_of_step(self.graph, step):
            x = pad_to(env[step.value, step.source], self.sizes.padded_shape(step.value, step.source))
            return send(self.sizes, step, x, here)

    def _strong(self, name: Name, x: Any) -> Any:
        if isinstance(name, HostSlot):
            return x
        return with_weak_type(x, self.graph.values[name[0]].dtype, False)

    def _steps(self, steps: Sequence[LocalStep], env: Env, here: MeshPosition) -> None:
        """Run local steps, adding what they make to `env`."""
        inside = lambda steps, env: self._steps(steps, env, here)
        for step in steps:
            match step:
                case Stage():
                    self.local.run(step.instructions, env, here)
                case Loop():
                    run_loop(self.graph, self.uniform, step, env, inside, Order())
                case Cond():
                    run_cond(self.graph, self.uniform, step, env, inside, Order())
                case Convert():
                    target = step.value, step.target
                    env[target] = jnp.zeros(self.struct(target, here.coords).shape, env[step.value, step.source].dtype)
                case Copies():
                    made = [self._moved(env, *pair) for pair in zip(step.sources, step.targets, strict=True)]
                    env.update(zip(step.targets, made, strict=True))
                case LoopStep():
                    self._loop_step(step, env, here)
                case HostDecision():
                    env[step.target] = env[step.source].astype(jnp.int32)

    def _moved(self, env: Env, source: Any, target: Name) -> Any:
        x = jnp.asarray(source.value) if isinstance(source, Literal) else env[source]
        if not isinstance(target, HostSlot):
            return self._strong(target, x)
        return with_weak_type(x, x.dtype, False)

    def _loop_step(self, step: LoopStep, env: Env, here: MeshPosition) -> None:
        loop, trip = step.loop, step.trip
        scans = loop.region.kind == "scan"
        if isinstance(step, LoopEnter):
            for p, x in zip(loop.carried, loop.initial, strict=True):
                env[p] = self._strong(p, jnp.asarray(x.value, x.dtype) if isinstance(x, Literal) else env[x])
            for p in loop.stacked:
                struct = self.struct(p, here.coords)
                env[p] = jnp.zeros(struct.shape, struct.dtype)
            env[trip] = jnp.int32(0)
            return
        at = int(loop.region.count) - 1 - env[trip] if scans and loop.region.reverse else env.get(trip)
        if isinstance(step, Slice):
            for p, whole in zip(loop.parts, loop.whole, strict=True):
                x = env[whole]
                # The body of a scan without iterations is compiled, too.
                env[p] = lax.dynamic_index_in_dim(x, at, keepdims=False) if len(x) else jnp.zeros(x.shape[1:], x.dtype)
            return
        onward = [self._strong(p, env[q]) for p, q in zip(loop.carried, loop.onward, strict=True)]
        for p, piece in zip(loop.stacked, loop.pieces, strict=True):
            if len(env[p]):
                env[p] = lax.dynamic_update_index_in_dim(env[p], self._strong(p, env[piece]), at, 0)
        env.update(zip(loop.carried, onward, strict=True))
        if scans:
            env[trip] = env[trip] + 1

    # Collective stages

    def _exchanging(self, wires: Sequence[Wire]) -> Callable[..., list[Any]]:
        names = self.mesh.axis_names

        def hapsynth_exchange(*arrays: Any) -> list[Any]:
            out: list[Any] = []
            each = each_of(names, self.local.platform)
            for wire, x in zip(wires, arrays, strict=True):
                if isinstance(wire, HostDecision):
                    out.append(self.uniform(x, each))
                    continue
                # One program for all that send alike: of no single op.
                with scope_of(None, wire.steps[0].step):
                    out.append(wire.exchange(self.sizes, names, x, self.gloo, each))
            return out

        spec = self.everyone.spec
        return jax.shard_map(
            hapsynth_exchange, mesh=self.mesh, in_specs=(spec,) * len(wires), out_specs=spec, check_vma=False
        )

    def _lower_collective(self, stage: CollectiveStage, known: dict[Any, Any]) -> Any:
        sent = self.sent(stage.steps)
        wires = [self._on_mesh(self.wire(w)) for w in sent]
        key = tuple("decide" if isinstance(w, HostDecision) else w.key(self.sizes) for w in sent)
        if key not in known:
            fn = self._exchanging(sent)
            donated = reused(wires, jax.eval_shape(fn, *wires), set(range(len(wires))))
            jitted = jax.jit(fn, donate_argnums=tuple(donated), compiler_options=self.communicating_options)
            known[key] = jitted.lower(*wires)
        return known[key]


def _is_scalar(wire: Wire) -> bool:
    """Whether a device sends a single number, which is given a dimension: all devices' lie one after another."""
    return isinstance(wire, HostDecision) or (not wire.flat and len(wire.sent) == 1 and not wire.sent[0].shape)


def _flat(items: Sequence[Item], runs: int = 1) -> dict[LocalStage | CollectiveStage, int]:
    """All stages, those of loops and branches too, and how often each runs: as if a loop of unknown trips had one, and
    all branches were taken."""
    found: dict[LocalStage | CollectiveStage, int] = {}
    for item in items:
        match item:
            case HostLoop():
                found |= _flat([*item.test, *item.body], runs * (item.count if item.decision is None else 1))
            case HostCond():
                for branch in item.branches:
                    found |= _flat(branch, runs)
            case _:
                found[item] = runs
    return found


class Run:
    """One call: what each group has at hand."""

    def __init__(self, staged: Staged, stored: Sequence[Any], record: Recorder | None) -> None:
        self.staged, self.record = staged, record
        names = [(v, staged.program.inputs[v]) for v in staged.graph.sources]
        self.envs: list[Env] = [{} for _ in staged.groups]
        for name, x in zip(names, stored, strict=True):
            arrays = parts(x)
            for env, group in zip(self.envs, staged.groups, strict=True):
                env[name] = group.join([arrays[n] for n in group.numbers])
        self.consumed: dict[Name, Any] = {p: x for p, x, donated in zip(names, stored, staged.donated) if donated}
        self.leaving: dict[CollectiveStage, list[Any]] = {}
        """What local stages have handed over."""
        self.arrived: dict[CollectiveStage, Sequence[Any]] = {}
        self.under_way: dict[CollectiveStage, Transfer] = {}
        # Where processes meet at every collective, the call tells how long each computes by itself.
        self.call = OverlappedCall() if staged.overlap and not staged.meetings.now else None

    def items(self, items: Sequence[Item]) -> None:
        for item in items:
            match item:
                case LocalStage():
                    self.local(item)
                case CollectiveStage():
                    self.exchange(item)
                case HostLoop():
                    self.loop(item)
                case HostCond():
                    taken = min(max(self.decision(item.decision), 0), len(item.branches) - 1)
                    self.items(item.branches[taken])
            if not isinstance(item, CollectiveStage):
                self.drop(item.dead)

    def loop(self, item: HostLoop) -> None:
        if item.decision is None:
            for _ in range(item.count):
                self.items(item.body)
            return
        self.items(item.test)
        while self.decision(item.decision):
            self.items(item.body)
            self.items(item.test)

    def decision(self, slot: HostSlot) -> int:
        return int(np.asarray(self.envs[0][slot]))

    def drop(self, names: Sequence[Name]) -> None:
        """Free what nobody needs any more; arguments are freed though the caller holds them, which were consumed."""
        for name in names:
            for env in self.envs:
                env.pop(name, None)
            if name in self.consumed:
                self.consumed.pop(name).delete()

    def exchange(self, stage: CollectiveStage) -> None:
        """Start a collective; where nothing overlaps, run it."""
        staged, run = self.staged, self.staged.compiled[stage][0]
        # Nobody else may hold what is sent, or what arrived: it is consumed.
        if self.call is not None:
            self.under_way[stage] = self.call.start(run, self.leaving.pop(stage))
            return
        wires: Sequence[Any] = self.leaving.pop(stage)
        staged.meetings.before(wires)
        began = self.record.now(wires) if self.record else 0.0
        wires = run(*wires)
        if self.record:
            self.record.ran(stage, began, ended := self.record.now(wires), began, ended)
        staged.meetings.after(wires)
        self.arrived[stage] = wires

    def take(self, stage: CollectiveStage) -> Sequence[Any]:
        """What arrived, once it has."""
        transfer = self.under_way.pop(stage, None)
        if transfer is None:
            return self.arrived.pop(stage)
        since = self.record.now([list(env.values()) for env in self.envs]) if self.record else 0.0
        wires = transfer.wait()
        if self.record:
            self.record.ran(stage, transfer.began, transfer.ended, since, self.record.now(()))
        return wires

    def abandon(self) -> None:
        """The call has failed."""
        if self.call is not None:
            self.call.abandon()

    def local(self, stage: LocalStage) -> None:
        staged = self.staged
        arrived = [parts(x) for one in stage.arrives for x in self.take(one)]
        devices = len(staged.mesh.local_devices)
        left: list[list[Any]] = [[None] * devices for _ in staged.wires_of(stage.leaves)]
        results: list[Any] = []
        for env, group, run in zip(self.envs, self.staged.groups, self.staged.compiled[stage], strict=True):
            arrays = [group.join([x[n] for n in group.numbers]) for x in arrived]
            made = run(*arrays, *(env[p] for p in stage.reads))
            results += made
            env.update(zip(stage.writes, made))
            for wire, x in zip(left, made[len(stage.writes) :], strict=True):
                for n, part in zip(group.numbers, group.split(x), strict=True):
                    wire[n] = part
        staged.catch_up(results)
        wires = iter(left)
        for one in stage.leaves:
            self.leaving[one] = []
            for _ in staged.sent(one.steps):
                wire = next(wires)
                shape = staged.joined(wire[0].shape)
                self.leaving[one].append(jax.make_array_from_single_device_arrays(shape, staged.everyone, wire))

    def outputs(self) -> list[Any]:
        """The stored outputs; arguments that were consumed and not needed are freed too."""
        staged = self.staged
        self.drop(tuple(self.consumed))
        out: list[Any] = []
        everywhere = NamedSharding(staged.mesh, PartitionSpec())
        for i, storage in enumerate(staged.outputs):
            arrays: list[Any] = [None] * len(staged.mesh.local_devices)
            for env, group in zip(self.envs, staged.groups, strict=True):
                for n, part in zip(group.numbers, group.split(env[HostSlot("output", i)]), strict=True):
                    arrays[n] = part
            if storage is not None and not storage.is_even:
                out.append(Shards(arrays))
                continue
            if storage is None:
                source = staged.graph.outputs[i]
                assert isinstance(source, Literal)
                shape, sharding, weak = source.shape, everywhere, jnp.asarray(source.value).weak_type
            else:
                shape, sharding, weak = storage.shape, storage.sharding, storage.weak_type
            # What is joined is strongly typed.
            x = jax.make_array_from_single_device_arrays(shape, sharding, arrays)
            out.append(with_weak_type(x, x.dtype, True) if weak else x)
        return out
