"""The switch form: one HLO for all devices, a `lax.switch` over shares in each stage that is uneven (DESIGN D2)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from hapsynth._jax import is_extended
from hapsynth.graph import Graph, Literal
from hapsynth.instructions.factors import Cut, Local
from hapsynth.instructions.layout import cut_axes
from hapsynth.instructions.program import (
    Compute,
    Convert,
    FactorTable,
    Instruction,
    Program,
    reads,
    writes,
)
from hapsynth.instructions.rules import execute
from hapsynth.instructions.rules.registry import apart
from hapsynth.instructions.sizes import Sizes, cut_nodes
from hapsynth.lower._collectives import communicate, cut_to, pad_to
from hapsynth.lower._control import Env, Run, run_cond, run_loop
from hapsynth.lower._stages import CHEAP, Cond, Loop, Stage, Step, factor_shares, split
from hapsynth.lower._storage import Storage, own_mesh, with_weak_type
from hapsynth.lower._where import Where


@dataclass(eq=False)
class Lowered:
    """A program as one compiled function over stored arrays.

    `inputs`, `constants` and `outputs` say how each is stored (an output that is a literal has None); `donated` says
    which inputs a call consumes. `traces` counts how often the function was traced: once, however often it is called.
    """

    graph: Graph
    program: Program
    sizes: Sizes
    mesh: Mesh
    inputs: tuple[Storage, ...]
    constants: tuple[Storage, ...]
    outputs: tuple[Storage | None, ...]
    donated: tuple[bool, ...]
    traces: int = 0
    compiled: Any = None
    table: FactorTable = field(init=False)

    def __post_init__(self) -> None:
        self.table = FactorTable(self.graph)

    def __call__(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Run on the stored inputs; the stored outputs. Arguments that are `donated` are consumed."""
        with jax.set_mesh(self.mesh):
            return (self.compiled or self.function)(*stored, *self.placed_constants)

    def prepare(self) -> str:
        """Compile now, not at the first call; a fingerprint of what must be the same in every process."""
        lowered = self.lower()
        self.compiled = lowered.compile()
        return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]

    def lower(self) -> Any:
        """JAX's `Lowered` of the function: `.as_text()`, `.compile()`."""
        with jax.set_mesh(self.mesh):
            return self.function.lower(*(s.struct() for s in (*self.inputs, *self.constants)))

    @cached_property
    def placed_constants(self) -> list[jax.Array]:
        """The graph's constants on the mesh: placed once, passed as arguments, never compiled in."""
        return [s.put(x, copy=False) for s, x in zip(self.constants, self.graph.constants.values(), strict=True)]

    @cached_property
    def steps(self) -> list[Step]:
        return split(self.graph, self.program, self.sizes)

    @cached_property
    def function(self) -> Any:
        """The jitted function: stored inputs, then constants, to stored outputs."""
        sources = (*self.inputs, *self.constants)
        on_mesh = jax.shard_map(
            self._body,
            mesh=self.mesh,
            in_specs=tuple(s.spec for s in sources),
            out_specs=tuple(s.spec for s in self.outputs if s is not None),
            check_vma=False,
        )

        def hapsynth_plan(*stored: jax.Array) -> list[Any]:
            self.traces += 1
            made = iter(on_mesh(*stored))
            out: list[Any] = []
            for operand, storage in zip(self.graph.outputs, self.outputs, strict=True):
                if storage is None:
                    assert isinstance(operand, Literal)
                    out.append(jnp.asarray(operand.value))
                else:
                    out.append(with_weak_type(next(made), storage.dtype, storage.weak_type))
            return out

        everywhere = jax.sharding.NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(
            hapsynth_plan,
            in_shardings=tuple(s.sharding for s in sources),
            out_shardings=[everywhere if s is None else s.sharding for s in self.outputs],
            donate_argnums=tuple(i for i, donated in enumerate(self.donated) if donated),
            keep_unused=True,
        )

    def _body(self, *stored: jax.Array) -> tuple[Any, ...]:
        """What every device runs, on its own stored shards."""
        lengths = tuple(size for _, size in self.program.axes)
        index = tuple(lax.axis_index(name) for name, _ in self.program.axes)
        everyone = Where(lengths, tuple(np.ndindex(*lengths)), index)
        env: Env = dict(zip(((v, self.program.inputs[v]) for v in self.graph.sources), stored, strict=True))
        self._steps(self.steps, env, everyone)
        outputs = zip(self.graph.outputs, self.program.outputs)
        return tuple(env[v, layout] for v, layout in outputs if isinstance(v, int) and layout is not None)

    def _steps(self, steps: Sequence[Step], env: Env, everyone: Where) -> None:
        """Run the steps of a region, adding what they make to `env`."""
        inside: Run = lambda steps, env: self._steps(steps, env, everyone)
        for step in steps:
            if isinstance(step, Convert):
                self._communicate(step, env, everyone)
            elif isinstance(step, Loop):
                run_loop(self.graph, self.program.axes, step, env, inside)
            elif isinstance(step, Cond):
                run_cond(self.graph, self.program.axes, step, env, inside)
            else:
                self._run(step.before, env, everyone)
                if step.switch:
                    self._switch(step, env, everyone)
                self._run(step.after, env, everyone)

    def _communicate(self, step: Convert, env: Env, here: Where) -> None:
        with jax.named_scope(f"hap/{step.step}_{self.graph.values[step.value].name}"):
            x = env[step.value, step.source]
            if (step.value, step.target) in env:
                # Gathered again so that the first copy need not live: XLA must not merge the two.
                x = lax.optimization_barrier(x)
            name, _ = self.program.axes[step.axis]
            env[step.value, step.target] = communicate(self.graph, self.sizes, name, step, x, here)

    def _switch(self, stage: Stage, env: Env, everyone: Where) -> None:
        """Run the uneven part of a stage: one branch per distinct tuple of shares, each on its exact shapes."""
        graph, sizes = self.graph, self.sizes

        def branch(members: tuple[int, ...]) -> Callable[..., tuple[Any, ...]]:
            here = replace(everyone, devices=tuple(everyone.devices[m] for m in members))

            def run(*operands: Any) -> tuple[Any, ...]:
                local: Env = {
                    (v, layout): cut_to(x, sizes.local_shape(v, layout, here.coords))
                    for (v, layout), x in zip(stage.reads, operands, strict=True)
                }
                self._run(stage.switch, local, here)
                return tuple(
                    pad_to(with_weak_type(local[p], graph.values[p[0]].dtype, False), sizes.padded_shape(*p))
                    for p in stage.writes
                )

            return run

        taken = everyone.lookup(range(len(everyone.lengths)), stage.branch_of)
        made = lax.switch(taken, [branch(m) for m in stage.members], *(env[p] for p in stage.reads))
        for p, x in zip(stage.writes, made, strict=True):
            env.setdefault(p, x)

    def _run(self, instructions: Sequence[Instruction], env: Env, here: Where) -> None:
        """Run local instructions in order on exact shards, adding their results to `env`."""
        for i in instructions:
            due = [self.sizes.local_shape(v, layout, here.coords) for v, layout in writes(self.graph, i)]
            dtypes = [self.graph.values[v].dtype for v, _ in writes(self.graph, i)]
            if due and not any(map(prod, due)) and not any(map(is_extended, dtypes)):
                # Nothing to compute; XLA's CPU compiler of JAX 0.11.2 dies of reducing a dynamic slice of nothing.
                made = [jnp.zeros(shape, dtype) for shape, dtype in zip(due, dtypes)]
            else:
                made = self._local_step(i, env, here) if isinstance(i, Convert) else self._compute(i, env, here)
            for (v, layout), x, expected in zip(writes(self.graph, i), made, due, strict=True):
                assert x.shape == expected, f"{i} made {x.shape} on {here.coords}, where {expected} was due"
                env.setdefault((v, layout), x)

    def _local_step(self, i: Convert, env: Env, here: Where) -> list[Any]:
        if i.step == "partial":
            x = env[i.value, i.source]
            return [jnp.where(here.index[i.axis] == 0, x, jnp.zeros_like(x))]
        dim = i.target[i.axis].dim
        axes = cut_axes(i.target, dim)
        lengths, starts = self.sizes.lengths(i.value, dim, axes), self.sizes.starts(i.value, dim, axes)
        # The start within what the other axes leave of the dimension.
        n = here.lengths[i.axis]
        start = here.lookup(axes, [start - starts[at - at % n] for at, start in enumerate(starts)])
        length = lengths[self.sizes.position(axes, here.coords)]
        with jax.named_scope(f"hap/slice_{self.graph.values[i.value].name}"):
            whole = env[i.value, i.source]
            if self._is_window(i.value):
                whole = apart(whole)
            return [lax.dynamic_slice_in_dim(whole, start, length, dim)]

    def _is_window(self, value: int) -> bool:
        """Whether a value is, but for its form, part of another from a start that is known at run time."""
        while value in self.graph.producer:
            op = self.graph.ops[self.graph.producer[value]]
            if op.name in ("dynamic_slice", "gather"):
                return True
            if op.name not in CHEAP or len(op.value_operands) != 1:
                return False
            value = op.value_operands[0][1]
        return False

    def _compute(self, i: Compute, env: Env, here: Where) -> list[Any]:
        graph, sizes = self.graph, self.sizes
        op, factors = graph.ops[i.op], self.table[i.op]
        given = dict(zip((position for position, _ in op.value_operands), reads(graph, i)))
        operands = [o.value if isinstance(o, Literal) else env[given[n]] for n, o in enumerate(op.operands)]
        shapes = tuple(
            o.shape if isinstance(o, Literal) else sizes.local_shape(*given[n], here.coords)
            for n, o in enumerate(op.operands)
        )
        cuts: dict[int, Cut] = {}
        for factor, (node, *_) in cut_nodes(graph, i.op, factors, i.triples):
            lengths, starts = factor_shares(sizes, factors, factor, node)
            share = lengths[sizes.position(node[2], here.coords)]
            cuts[factor] = Cut(share, partial(here.lookup, node[2], starts))
        local = Local(
            op=op,
            factors=factors,
            triples=i.triples,
            shapes=shapes,
            result_shapes=tuple(sizes.local_shape(*p, here.coords) for p in writes(graph, i)),
            cuts=cuts,
            axis_index=lambda axis: here.index[axis],
            platform=self.mesh.devices.flat[0].platform,
        )
        with jax.named_scope(f"hap/{op.name}_{op.index}"):
            return execute(local, operands)


def lower(graph: Graph, program: Program, sizes: Sizes, mesh: Mesh, *, donate: bool = True) -> Lowered:
    """Lower a checked program for the devices of `mesh`, whatever its axes are.

    With `donate` the arguments of carried state are consumed by a call, so that the new state can take their memory.
    Raises ValueError where the mesh has another number of devices than the program.
    """
    devices = own_mesh(mesh, program.axes)
    stored = lambda v, layout: Storage.of(graph, sizes, v, layout, devices)
    inputs = tuple(stored(v, program.inputs[v]) for v in graph.inputs)
    outputs = tuple(
        stored(v, layout) if isinstance(v, int) and layout is not None else None
        for v, layout in zip(graph.outputs, program.outputs, strict=True)
    )
    donated = [False] * len(inputs)
    for source, target in graph.carry if donate else ():
        out = outputs[target]
        # What JAX could not reuse it would warn of.
        donated[source] = out is not None and (out.stored_shape, out.dtype, out.spec) == (
            inputs[source].stored_shape,
            inputs[source].dtype,
            inputs[source].spec,
        )
    constants = tuple(stored(v, program.inputs[v]) for v in graph.constants)
    return Lowered(graph, program, sizes, devices, inputs, constants, outputs, tuple(donated))
