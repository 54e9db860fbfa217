"""The switch form: one HLO for all devices, a `lax.switch` over shares in each uneven stage (decisions.md D2)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from hapsynth import _jax
from hapsynth._quantities import nbytes
from hapsynth._warn import OverlapWarning, warn_user
from hapsynth.graph.ir import Boundary, Literal
from hapsynth.hlo.collectives import collectives_of
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program.bundles import joined
from hapsynth.instructions.program.program import Compute, Convert, Instruction, Property, reads, writes
from hapsynth.instructions.rules.contraction import CONTRACTIONS
from hapsynth.instructions.rules.registry import is_fusible
from hapsynth.instructions.staging.stages import Cond, Loop, Stage, Step
from hapsynth.lower._bundles import Bundle, bundles
from hapsynth.lower._collective_order import Each, Order, region_communicates
from hapsynth.lower._collectives import LOWERINGS, send
from hapsynth.lower._control_flow import Env, Run, run_cond, run_loop
from hapsynth.lower._lowered_form import LoweredProgram, held_bytes
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.lower._pinned import Chain, compile_with
from hapsynth.lower._recorded_call import RecordedCall, record_program
from hapsynth.lower._scopes import scope_of_step
from hapsynth.lower._storage import Storage, cut_to, pad_to, with_weak_type


class Lowered(LoweredProgram):
    """A program as one compiled function over stored arrays, uneven ones padded to the largest shard."""

    compiled: Any = None
    _last: Sequence[Any] = ()
    """One result of the last call, where calls wait for one another."""
    switches: ClassVar[bool] = True
    sinks: ClassVar[int] = 0
    """How many more results it has, which keep collectives alive."""

    def __call__(
        self, stored: Sequence[jax.Array], record: Callable[[RecordedCall], None] | None = None
    ) -> list[jax.Array]:
        # Compiled also where JAX runs functions op by op.
        with _jax.on_mesh(self.mesh), jax.disable_jit(False):
            return self.run([*stored, *self.placed_constants], record)

    def run(self, arrays: Sequence[jax.Array], record: Callable[[RecordedCall], None] | None) -> list[jax.Array]:
        """The function's results."""
        self.catch_up([*arrays, *self._last])
        if record is None:
            made = (self.compiled or self.function)(*arrays)
            if self.catches_up:
                # All results are there at once, and this one keeps the least memory.
                self._last = sorted(made, key=lambda x: x.size)[:1]
            return made
        if self.compiled is None:
            self._compile()
        made, recorded = record_program(self.compiled, arrays)
        record(recorded)
        return made

    def prepare(self) -> str:
        return hashlib.sha256(self._compile().as_text().encode()).hexdigest()[:16]

    def _compile(self) -> Any:
        """Compile now; the function as lowered."""
        lowered = self.lower()
        self.compiled = compile_with(lowered, self.latencies)
        if self.overlaps and (held := held_bytes(self.compiled)) > self.memory_limit_bytes:
            warn_user(
                f"with its collectives beside computing this process would hold {nbytes(held)}, and it has "
                f"{nbytes(self.memory_limit_bytes)}: it computes in the order that holds least, and hides less of them",
                OverlapWarning,
            )
            self.compiled = compile_with(lowered, self.latencies, self.compiler_options)
        return lowered

    @property
    def compiled_collectives(self) -> list[str]:
        return [str(c) for c in collectives_of(self._compiled().as_text())]

    @property
    def compiled_bytes(self) -> dict[Any, int]:
        return dict.fromkeys(self.mesh.local_devices, held_bytes(self._compiled()))

    def _compiled(self) -> Any:
        if self.compiled is None:
            self._compile()
        return self.compiled

    def lower(self) -> Any:
        """JAX's `Lowered` of the function: `.as_text()`, `.compile()`."""
        with _jax.on_mesh(self.mesh):
            return self.function.lower(*map(self.struct, (*self.inputs, *self.constants)))

    def struct(self, storage: Storage) -> jax.ShapeDtypeStruct:
        """A stored array as the function takes it."""
        return storage.struct()

    @cached_property
    def function(self) -> Any:
        """The jitted function: stored inputs, then constants, to stored outputs."""
        sources = (*self.inputs, *self.constants)

        def hapsynth_plan(*stored: jax.Array) -> list[Any]:
            self.traces += 1
            made = iter(self.on_mesh(*stored))
            out: list[Any] = []
            for operand, storage in zip(self.graph.outputs, self.outputs, strict=True):
                if storage is None:
                    assert isinstance(operand, Literal)
                    out.append(jnp.asarray(operand.value))
                else:
                    out.append(with_weak_type(next(made), storage.dtype, self.struct(storage).weak_type))
            return [*out, *made]

        everywhere = jax.sharding.NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(
            hapsynth_plan,
            in_shardings=tuple(s.sharding for s in sources),
            out_shardings=[
                *(everywhere if s is None else s.sharding for s in self.outputs),
                *[everywhere] * self.sinks,
            ],
            donate_argnums=tuple(i for i, donated in enumerate(self.donated) if donated),
            keep_unused=True,
            compiler_options=self.communicating_options,
        )

    @property
    def on_mesh(self) -> Callable[..., tuple[Any, ...]]:
        """The function of stored inputs, then constants, to those stored outputs that are no literals, then `sinks`."""
        return jax.shard_map(
            self._body,
            mesh=self.mesh,
            in_specs=tuple(s.spec for s in (*self.inputs, *self.constants)),
            out_specs=(*(s.spec for s in self.outputs if s is not None), *[PartitionSpec()] * self.sinks),
            check_vma=False,
        )

    def _body(self, *stored: jax.Array) -> tuple[Any, ...]:
        """What every device runs, on its own stored shards."""
        return self.at([lax.axis_index(name) for name, _ in self.program.axes], stored)

    def at(self, index: Sequence[Any], stored: Sequence[Any]) -> tuple[Any, ...]:
        """What the device at a traced position along each mesh axis runs: its stored outputs that are no literals, then
        `sinks`."""
        here, order = self._here(index), self._order()
        env: Env = dict(zip(((v, self.program.inputs[v]) for v in self.graph.sources), stored, strict=True))
        self._steps(self.steps, env, here, order)
        outputs = zip(self.graph.outputs, self.program.outputs)
        left = [self._left(v, layout, env, here) for v, layout in outputs if isinstance(v, int) and layout is not None]
        return *left, *[order.token() for _ in range(self.sinks)]

    def _here(self, index: Sequence[Any]) -> MeshPosition:
        """The devices that run it, of which one is at a traced position along each mesh axis."""
        lengths = tuple(size for _, size in self.program.axes)
        return MeshPosition(lengths, tuple(np.ndindex(*lengths)), tuple(index), padded=True)

    def _order(self) -> Order:
        """What keeps the collectives in order."""
        # Where collectives run beside computing each process schedules by its own threads and memory.
        chained = self.flat or (self.scheduled and self.gloo is not None)
        return Chain(self.mesh.axis_names, self.local.platform) if chained else Order(self._ordered)

    def _left(self, value: int, layout: Layout, env: Env, here: MeshPosition) -> Any:
        """An output: what was computed of padding, which may be no number, doesn't leave."""
        if not here.padded:
            return env[value, layout]
        producer = self.graph.producer.get(value)
        of_loop = producer is not None and isinstance(self.graph.ops[producer].primitive, Boundary)
        x = env[value, layout]
        return self.local.closed((value, layout), x, here) if of_loop or (value, layout) in self.local.loose else x

    @cached_property
    def _ordered(self) -> bool:
        """Whether a loop or a branch communicates, so that XLA alone would not keep the collectives in order."""
        return any(region_communicates(self.graph, step) for step in self.steps)

    def _steps(self, steps: Sequence[Step], env: Env, here: MeshPosition, order: Order) -> None:
        """Run the steps of a region, adding what they make to `env`."""
        inside: Run = lambda steps, env: self._steps(steps, env, here, order)

        def uniform(decision: Any) -> Any:
            return order.collective(lambda x: self.uniform(x, order.each), decision)

        computed = self._computed_before if steps is self.steps else {}
        for n, step in enumerate(joined(self.graph, steps)):
            if isinstance(step, list):
                self._communicate(step, env, here, order, computed.get(n, ()))
            elif isinstance(step, Convert):
                shape = self.local.shape((step.value, step.target), here)
                env[step.value, step.target] = jnp.zeros(shape, env[step.value, step.source].dtype)
            elif isinstance(step, Loop):
                run_loop(self.graph, uniform, step, env, inside, order)
            elif isinstance(step, Cond):
                run_cond(self.graph, uniform, step, env, inside, order)
            else:
                self.local.run(step.before, env, here)
                if step.switch:
                    self._switch(step, env, here)
                self.local.run(step.after, env, here)

    @cached_property
    def _computed_before(self) -> dict[int, list[Property]]:
        """Of a program in a schedule's order, for each run of collectives of arguments or of elementwise functions of
        arguments (a broadcast bias), by its place among the joined steps: the values computed since the last such run
        and read after this one. Nothing else keeps these collectives from starting at once, and XLA's scheduler, which
        goes back from the end, hides each transfer behind whatever computing is left: the first would find none. Left
        out is what XLA makes in one kernel with its readers: results of elementwise ops, and of contractions, that
        elementwise ops alone read."""
        if not (self.scheduled and self.is_pinned) or len(self.graph.regions) > 1:
            return {}
        graph, steps = self.graph, [*joined(self.graph, self.steps)]
        read = {p: n for n, step in enumerate(steps) for i in _instructions(step) for p in reads(graph, i)}
        leave = zip(graph.outputs, self.program.outputs, strict=True)
        read.update(((v, layout), len(steps)) for v, layout in leave if isinstance(v, int) and layout is not None)
        elementwise = lambda i: isinstance(i, Compute) and is_fusible(graph.ops[i.op])
        stored = {p for step in steps for i in _instructions(step) if not elementwise(i) for p in reads(graph, i)}
        stored.update(p for p, n in read.items() if n == len(steps))
        found: dict[int, list[Property]] = {}
        made: list[Property] = []
        of_arguments = set(self.program.inputs.items())
        for n, step in enumerate(steps):
            if isinstance(step, list):
                if all(p in of_arguments for i in step for p in reads(graph, i)):
                    found[n] = [p for p in made if read.get(p, -1) >= n]
                    made = []
                continue
            for i in _instructions(step):
                # A conversion here sends nothing: a slice, or zeros.
                op = None if isinstance(i, Convert) else graph.ops[i.op]
                light = op is None or is_fusible(op)
                fuses = light or (op is not None and op.name in CONTRACTIONS)
                made += [p for p in writes(graph, i) if p in stored or not fuses]
                if light and all(p in of_arguments for p in reads(graph, i)):
                    of_arguments.update(writes(graph, i))
        return found

    def _communicate(
        self, steps: Sequence[Convert], env: Env, here: MeshPosition, order: Order, computed: Sequence[Property] = ()
    ) -> None:
        """Run collectives that don't depend on one another, not before what is `computed`."""
        computed = [p for p in computed if p in env and not _jax.is_extended(env[p].dtype)]
        scope = partial(scope_of_step, self.graph)
        lengths = [size for _, size in self.program.axes]
        sent: list[Any] = []
        for step in steps:
            with scope(step):
                x = pad_to(env[step.value, step.source], self.sizes.padded_shape(step.value, step.source))
                if (step.value, step.target) in env:
                    # Gathered again so that the first copy need not live: XLA must not merge the two.
                    x = lax.optimization_barrier(x)
                sent.append(send(self.sizes, step, x, here))
        arrays = dict(zip(steps, sent, strict=True))
        for bundle in self._bundles(steps, sent):
            with scope(bundle.steps[0]):
                packed = bundle.pack([arrays[s] for s in bundle.steps], lengths)
                packed, made_before = order.after_computing(packed, [env[p] for p in computed])
                env.update(zip(computed, made_before, strict=True))
                computed = ()
                run = partial(self._exchange, bundle, order.each)
                whole = self.gloo is not None or LOWERINGS[bundle.steps[0].step].in_parts
                made = order.collective(run, packed, whole)
            with scope(bundle.steps[0]):
                received = bundle.receive(self.sizes, made, lengths, here, self.most_indexed)
            for step, x in zip(bundle.steps, received, strict=True):
                with scope(step):
                    x = cut_to(x, self.local.shape((step.value, step.target), here))
                    if len(bundle.steps) > 1 and self._is_cut_out(step, x):
                        x = lax.optimization_barrier(x)
                    env[step.value, step.target] = self.local.named((step.value, step.target), x)
                    if (step.value, step.source) in self.local.loose:
                        # Along another axis it may still be padded.
                        self.local.loose.add((step.value, step.target))

    def _bundles(self, steps: Sequence[Convert], sent: Sequence[Any]) -> list[Bundle]:
        # Whatever threads this process has: all have the same collectives.
        planned = self.scheduled and (self.is_pinned or self.gloo is not None)
        return bundles(steps, sent, self.local.platform, self.options, flat=self.flat, planned=planned)

    def _is_cut_out(self, step: Convert, x: jax.Array) -> bool:
        """Whether a part of what a bundle gives is made once for all readers. On GPUs XLA joins a large part of unlike
        blocks again where it is read later, and keeps all that the bundle gave until then."""
        large = x.nbytes >= self.options.bundled_bytes
        return self.is_pinned and large and not self.sizes.is_even(step.value, step.source)

    @property
    def most_indexed(self) -> int:
        """Bytes up to which a gather joins uneven parts: none but on CPUs, and where the program is to be read."""
        # Export's mesh is an abstract one.
        mesh: Any = self.mesh
        return self.options.indexed_bytes if self.local.platform == "cpu" and isinstance(mesh, Mesh) else -1

    def _exchange(self, bundle: Bundle, each: Each, x: jax.Array) -> jax.Array:
        return bundle.exchange(self.sizes, [name for name, _ in self.program.axes], x, self.gloo, each)

    def _switch(self, stage: Stage, env: Env, everyone: MeshPosition) -> None:
        """Run the uneven part of a stage: one branch per distinct tuple of shares, each on its exact shapes."""
        graph, sizes = self.graph, self.sizes

        def branch(members: tuple[int, ...]) -> Callable[..., tuple[Any, ...]]:
            here = replace(everyone, devices=tuple(everyone.devices[m] for m in members), padded=False)

            def run(*operands: Any) -> tuple[Any, ...]:
                local: Env = {
                    (v, layout): cut_to(x, sizes.local_shape(v, layout, here.coords))
                    for (v, layout), x in zip(stage.reads, operands, strict=True)
                }
                self.local.run(stage.switch, local, here)
                return tuple(
                    pad_to(with_weak_type(local[p], graph.values[p[0]].dtype, False), sizes.padded_shape(*p))
                    for p in stage.writes
                )

            return run

        taken = everyone.lookup(range(len(everyone.lengths)), stage.branch_of)
        made = lax.switch(taken, [branch(m) for m in stage.members], *(env[p] for p in stage.reads))
        for p, x in zip(stage.writes, made, strict=True):
            env.setdefault(p, self.local.named(p, x))


def _instructions(step: Step | list[Convert]) -> Sequence[Instruction]:
    """Of a step that is no loop and no branch."""
    match step:
        case list():
            return step
        case Convert():
            return [step]
        case Stage():
            return step.instructions
        case _:
            raise AssertionError(f"control flow: {step}")
