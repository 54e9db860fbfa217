"""What all forms of a program have in common: how its inputs, constants and outputs are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hapsynth import _jax
from hapsynth.graph.ir import Graph
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.instructions.staging.stages import Step, split
from hapsynth.lower import _gloo
from hapsynth.lower._collective_order import Each, as_it_is
from hapsynth.lower._interpreter import Interpreter
from hapsynth.lower._pinned import Latencies, is_pinned, options_of
from hapsynth.lower._recorded_call import RecordedCall
from hapsynth.lower._storage import Storage, own_mesh


@dataclass(frozen=True, eq=False)
class _Placed:
    """A constant, so that no other takes its identity, and what is stored of it."""

    constant: Any
    stored: Any


_PLACED: WeakValueDictionary[tuple[Any, ...], _Placed] = WeakValueDictionary()
"""By a constant's identity and its storage, for as long as a program has it: plans of several shapes or functions, at
new sizes beside old ones, and what runs under `jax_debug_nans` close over the same arrays."""


def _placed(constant: Any, storage: Storage) -> _Placed:
    key = (id(constant), *storage.key)
    # What lies on several processes is placed by all of them together, and whether another program still has it is each
    # one's own.
    shared = not isinstance(constant, jax.Array) or constant.is_fully_addressable or constant.is_fully_replicated
    found = _PLACED.get(key) if shared else None
    if found is None:
        # JAX arrays can't change, so they may be shared; a NumPy array may be written to later. A shard that has
        # another array's memory would be gone where a call consumes that one.
        copy = not (isinstance(constant, jax.Array) and storage.is_even and storage.sharding.is_fully_addressable)
        found = _Placed(constant, storage.put(constant, copy=copy))
        if shared:
            _PLACED[key] = found
    return found


@dataclass(eq=False)
class LoweredProgram(ABC):
    """A checked program on stored arrays, for the devices of `mesh`, whatever its axes are.

    Raises ValueError where the mesh has another number of devices than the program.

    With `donate` the arguments of carried state are consumed by a call, so that the new state can take their memory.
    `inputs`, `constants` and `outputs` say how each is stored (an output that is a literal has None); `donated` says
    which inputs a call consumes. `platform` is by default that of the mesh's devices. `latencies`: by which XLA is to
    schedule it, where it is prepared. `scheduled`: the program's order is a schedule of what is computed beside its
    collectives, which XLA is held to where these are pinned. `memory_limit_bytes`: of the device of this process that
    has the least. `traces` counts how often the program was traced: once, however often it is called.
    """

    graph: Graph
    program: Program
    sizes: Sizes
    mesh: Mesh
    donate: bool = True
    platform: str | None = None
    options: LoweringOptions = DEFAULT
    latencies: Latencies | None = None
    scheduled: bool = False
    memory_limit_bytes: float = inf
    traces: int = 0
    inputs: tuple[Storage, ...] = field(init=False)
    constants: tuple[Storage, ...] = field(init=False)
    outputs: tuple[Storage | None, ...] = field(init=False)
    donated: tuple[bool, ...] = field(init=False)
    local: Interpreter = field(init=False)

    storage: ClassVar[type[Storage]] = Storage
    switches: ClassVar[bool] = False
    """Whether it is one program for all devices."""

    def __post_init__(self) -> None:
        graph, program = self.graph, self.program
        # Export's mesh is an abstract one.
        mesh: Any = self.mesh
        if isinstance(mesh, Mesh):
            self.mesh = own_mesh(mesh, program.axes)
        platform = self.mesh.devices.flat[0].platform if self.platform is None else self.platform
        self.local = Interpreter(graph, self.sizes, platform)
        self.inputs = tuple(self._stored(v, program.inputs[v]) for v in graph.inputs)
        self.constants = tuple(self._stored(v, program.inputs[v]) for v in graph.constants)
        self.outputs = tuple(
            self._stored(v, layout) if isinstance(v, int) and layout is not None else None
            for v, layout in zip(graph.outputs, program.outputs, strict=True)
        )
        # As calls leave the state, or each would copy it.
        strong = {i for i, o in graph.carry if (out := self.outputs[o]) is not None and not out.weak_type}
        strong.update(graph.strong_inputs)
        self.inputs = tuple(replace(s, weak_type=False) if i in strong else s for i, s in enumerate(self.inputs))
        donated = [False] * len(self.inputs)
        for source, target in graph.carry if self.donate else ():
            out = self.outputs[target]
            # What JAX could not reuse it would warn of.
            donated[source] = out is not None and self.inputs[source].is_alike(out)
        self.donated = tuple(donated)

    @abstractmethod
    def __call__(self, stored: Sequence[Any], record: Callable[[RecordedCall], None] | None = None) -> list[Any]:
        """Run on the stored inputs; the stored outputs. Arguments that are `donated` are consumed. `record` is told
        when each collective ran and was waited for."""

    def _stored(self, value: int, layout: Layout) -> Storage:
        return self.storage.of(self.graph, self.sizes, value, layout, self.mesh)

    @cached_property
    def gloo(self) -> LoweringOptions | None:
        """The thresholds of what its devices send to one another by gloo; None where they don't."""
        return self.options if _gloo.joins(self.mesh) else None

    def uniform(self, decision: Any, each: Each = as_it_is) -> Any:
        """A decision that unlike devices may have rounded apart, the same on all: the largest. `each` runs one of XLA's
        collectives."""
        largest = _gloo.all_reduce(decision.astype(jnp.int32), self.mesh.axis_names, "max", self.gloo, each)
        return largest.astype(decision.dtype)

    @cached_property
    def compiler_options(self) -> dict[str, str]:
        """What `jax.jit` takes so that a call holds about what the search counted."""
        return _jax.memory_first(self.mesh.devices.flat[0].platform)

    @property
    def is_pinned(self) -> bool:
        """Whether its collectives are to keep their order whatever device it is compiled for."""
        return is_pinned(self.local.platform)

    @property
    def flat(self) -> bool:
        """Whether what is sent is of one dimension: of several, programs that differ may have other memory layouts."""
        return self.is_pinned

    @property
    def communicating_options(self) -> dict[str, str | bool]:
        """What `jax.jit` takes for a program with collectives."""
        return {**({} if self.overlaps else self.compiler_options), **options_of(self.local.platform)}

    @property
    def overlaps(self) -> bool:
        """Whether XLA's CPU backend is to run ready ops while a collective blocks. Under its memory-optimized scheduler
        ops reuse the buffers of collectives, and wait for them."""
        return self.scheduled and self.gloo is not None and _jax.cpu_threads() > 1

    @cached_property
    def catches_up(self) -> bool:
        """Whether calls wait for one another."""
        return self.local.platform == "cpu" and len(self.mesh.local_devices) > 1

    def catch_up(self, arrays: Sequence[Any]) -> None:
        """Wait until several CPU devices have made `arrays`: no program is launched on them far ahead of what runs.

        They share a pool of threads, and each has up to 32 computations in flight; whoever launches one more keeps a
        thread until one ends, and none may be left to run it: 400 calls of a plain `jax.jit` with an all-gather on four
        devices of two cores hang.
        """
        if self.catches_up:
            jax.block_until_ready([x for x in arrays if not x.is_deleted()])

    @abstractmethod
    def prepare(self) -> str:
        """Compile now, not at the first call; a fingerprint of what must be lowered the same in every process."""

    @property
    @abstractmethod
    def compiled_collectives(self) -> list[str]:
        """The collectives as XLA has compiled them, in the order in which they start: the same in every process of a
        job, or it hangs. Compiles what is not compiled yet. Raises HloError where XLA's text can't be read."""

    @property
    @abstractmethod
    def compiled_bytes(self) -> dict[Any, int]:
        """Bytes that a call needs at least on each of this process's devices, as XLA has compiled it: its arguments
        and constants with it, of several stages what the largest holds. Compiles what is not compiled yet."""

    @property
    def table(self) -> FactorTable:
        return self.local.table

    @property
    def placed_constants(self) -> list[Any]:
        """The graph's constants on the mesh: placed once, passed as arguments, never compiled in."""
        return [each.stored for each in self._placed]

    @property
    def held_constants(self) -> list[Any]:
        """Those of `placed_constants` that take memory already: all once a call has placed its arguments, or none."""
        return self.placed_constants if "_placed" in vars(self) else []

    @cached_property
    def _placed(self) -> list[_Placed]:
        """Those of another program that are stored alike, where there are such."""
        constants = zip(self.constants, self.graph.constants.values(), strict=True)
        return [_placed(x, storage) for storage, x in constants]

    @cached_property
    def steps(self) -> list[Step]:
        # Export's mesh is an abstract one, of which nothing is known.
        mesh: Any = self.mesh
        near = isinstance(mesh, Mesh) and not mesh.is_multi_process
        return split(self.graph, self.program, self.sizes, self.options, switches=self.switches, near=near)


def held_bytes(compiled: Any) -> int:
    """Bytes that a call of a compiled program holds at most, on one device; 0 where XLA does not say."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
