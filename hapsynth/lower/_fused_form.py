"""The fused form: each process lowers the whole program on the exact shapes of its own devices, all with the same
collectives on the same wires (decisions.md D2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from hapsynth import _jax
from hapsynth.instructions.staging.stages import Stage
from hapsynth.lower._control_flow import Env
from hapsynth.lower._device_groups import Positions, alike
from hapsynth.lower._exact_storage import ExactStorage, Shards
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.lower._recorded_call import RecordedCall
from hapsynth.lower._storage import Storage, local_positions
from hapsynth.lower._switch_form import Lowered


@dataclass(eq=False)
class Fused(Lowered):
    """A program as one compiled function for devices whose shares are alike, those of this process: their shards at
    their exact size, as if all devices of the mesh had such. Uneven values are stored as `Shards`.

    JAX and XLA are told of arrays whose every shard is as long as this process's. Nothing compares that with what other
    processes say: what must be the same in all are the collectives, which are padded to the largest shard.
    `own`: the places of the devices in the mesh, where they are not this process's.
    """

    own: Positions = ()

    storage = ExactStorage
    switches: ClassVar[bool] = False
    sinks: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.own = self.own or tuple(local_positions(self.mesh))
        assert len(alike(self.sizes, self.own)) == 1, "devices of unlike shares have no program in common"

    def __call__(self, stored: Sequence[Any], record: Callable[[RecordedCall], None] | None = None) -> list[Any]:
        kept = zip((*self.inputs, *self.constants), (*stored, *self.placed_constants), strict=True)
        # Compiled also where JAX runs functions op by op.
        with _jax.on_mesh(self.mesh), jax.disable_jit(False):
            made = self.run([_exact(storage).joined(x) for storage, x in kept], record)
        for x, donated in zip(stored, self.donated, strict=True):
            if donated and isinstance(x, Shards):
                # What was consumed is the joined array.
                x.delete()
        return [x if storage is None else _exact(storage).apart(x) for storage, x in zip(self.outputs, made)]

    def prepare(self) -> str:
        self._compile()
        # The programs differ, and only the collectives are compared.
        return "fused"

    def struct(self, storage: Storage) -> jax.ShapeDtypeStruct:
        shape = _exact(storage).joined_shape(self.own[0])
        weak = storage.weak_type and storage.is_even
        return jax.ShapeDtypeStruct(shape, storage.dtype, sharding=storage.sharding, weak_type=weak)

    @property
    def flat(self) -> bool:
        return True

    def _here(self, index: Sequence[Any]) -> MeshPosition:
        return MeshPosition(tuple(size for _, size in self.program.axes), self.own, tuple(index))

    def _switch(self, stage: Stage, env: Env, everyone: MeshPosition) -> None:
        self.local.run(stage.switch, env, everyone)


def _exact(storage: Storage) -> ExactStorage:
    assert isinstance(storage, ExactStorage)
    return storage
