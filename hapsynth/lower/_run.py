"""One call of a program in staged form: what this process's devices have at hand between its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hapsynth.graph import Literal
from hapsynth.lower._exact import Shards, parts
from hapsynth.lower._schedule import CollectiveStage, HostCond, HostLoop, Item, LocalStage, Name, Slot
from hapsynth.lower._storage import with_weak_type

if TYPE_CHECKING:
    from hapsynth.lower._staged import Env, Staged


class Run:
    """One call: what each group has at hand."""

    def __init__(self, staged: Staged, stored: Sequence[Any]) -> None:
        self.staged = staged
        names = [(v, staged.program.inputs[v]) for v in staged.graph.sources]
        self.envs: list[Env] = [{} for _ in staged.groups]
        for name, x in zip(names, stored, strict=True):
            arrays = parts(x)
            for env, group in zip(self.envs, staged.groups, strict=True):
                env[name] = group.join([arrays[n] for n in group.numbers])
        self.consumed: dict[Name, Any] = {p: x for p, x, donated in zip(names, stored, staged.donated) if donated}
        self.wires: list[Any] = []

    def items(self, items: Sequence[Item]) -> None:
        for item in items:
            match item:
                case LocalStage():
                    self.local(item)
                case CollectiveStage():
                    self.staged.meetings.before(self.wires)
                    self.wires = self.staged.compiled[item][0](*self.wires)
                    self.staged.meetings.after(self.wires)
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

    def decision(self, slot: Slot) -> int:
        return int(np.asarray(self.envs[0][slot]))

    def drop(self, names: Sequence[Name]) -> None:
        """Free what nobody needs any more; arguments are freed though the caller holds them, which were consumed."""
        for name in names:
            for env in self.envs:
                env.pop(name, None)
            if name in self.consumed:
                self.consumed.pop(name).delete()

    def local(self, stage: LocalStage) -> None:
        arrived = [parts(x) for x in self.wires]
        # Nobody else may hold what arrived: it is consumed.
        self.wires = []
        left: list[list[Any]] = [[None] * len(self.staged.mesh.local_devices) for _ in self.staged.sent(stage.leaves)]
        for env, group, run in zip(self.envs, self.staged.groups, self.staged.compiled[stage], strict=True):
            arrays = [group.join([x[n] for n in group.numbers]) for x in arrived]
            made = run(*arrays, *(env[p] for p in stage.reads))
            env.update(zip(stage.writes, made))
            for wire, x in zip(left, made[len(stage.writes) :], strict=True):
                for n, part in zip(group.numbers, group.split(x), strict=True):
                    wire[n] = part
        for wire in left:
            shape = self.staged.joined(wire[0].shape)
            self.wires.append(jax.make_array_from_single_device_arrays(shape, self.staged.everyone, wire))

    def outputs(self) -> list[Any]:
        """The stored outputs; arguments that were consumed and not needed are freed too."""
        staged = self.staged
        self.drop(tuple(self.consumed))
        out: list[Any] = []
        everywhere = NamedSharding(staged.mesh, PartitionSpec())
        for i, storage in enumerate(staged.outputs):
            arrays: list[Any] = [None] * len(staged.mesh.local_devices)
            for env, group in zip(self.envs, staged.groups, strict=True):
                for n, part in zip(group.numbers, group.split(env[Slot("output", i)]), strict=True):
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
