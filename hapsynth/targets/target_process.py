"""One card, in a process that has JAX's CUDA plugin: lowered on devices that are only described, and compiled."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from hapsynth._files import write_text
from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.compiler_target import CompilerTarget
from hapsynth.cluster.device_kinds import DeviceKind, card_of, known_kinds
from hapsynth.graph.trace import Traced
from hapsynth.hlo.collectives import Collective, collectives_of, first_difference
from hapsynth.hlo.latency_profile import latency_profile
from hapsynth.hlo.replay import Replay, loops_of_unknown_trips, replay
from hapsynth.hlo.text import HloError
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.lower import Fused, Latencies, Lowered, Staged, alike, compile_with, own_mesh
from hapsynth.running.form import Chosen, Form, chosen_form, held_bytes, only_exact
from hapsynth.running.plan_file import read_plan
from hapsynth.search.cost.collective_price import NetworkPrice
from hapsynth.search.cost.model import CostModel
from hapsynth.search.memory.profile import SMALL, held_pinned
from hapsynth.search.memory.xla_schedule import Library
from hapsynth.search.result import Result
from hapsynth.targets.compiled_target import CompiledTarget
from hapsynth.targets.times import Predicted, branches_of, predicted

_LONGEST = 400
"""Characters of a compiler's message that are told."""
_WORKSPACE, _WORKSPACE_OF_HOPPER = 4 << 20, 32 << 20
"""Bytes, as NVIDIA recommends them for cuBLAS (`GemmConfig` in XLA's matmul_utils.h)."""


def compile_in_this_process(
    path: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    form: Form,
    target: CompilerTarget,
    texts: str = "",
) -> CompiledTarget:
    """Compile the plan of a file for a card; what the compiler refuses, or makes that can't be read, is the result's
    `error`. `texts`: a folder for the programs as they are compiled.

    Raises PlanError for a file that is no plan of the function.
    """
    plan = _Saved(*read_plan(path, fn, args, kwargs), target)
    began = time.perf_counter()
    chosen = plan.form(form)
    try:
        compiled = {"switch": plan.switch, "staged": plan.staged, "fused": plan.fused}[chosen]()
    except Exception as error:  # whatever JAX, XLA or ptxas raises for a program or a card
        text = " ".join(re.sub(r"\n-{5,}.*", "", str(error), flags=re.DOTALL).split())
        return CompiledTarget(target.kind, chosen, f"{type(error).__name__}: {text[:_LONGEST]}")
    seconds = time.perf_counter() - began
    if texts:
        for number, text in enumerate([*compiled.texts, *compiled.others]):
            write_text(Path(texts, f"{target.kind}-{chosen}-{number}.txt"), text)
    try:
        if different := compiled.difference:
            return CompiledTarget(target.kind, chosen, different)
        collectives, replayed = compiled.collectives, plan.replayed(compiled)
        unknown_loops = sum(map(loops_of_unknown_trips, compiled.texts))
    except HloError as error:
        why = f"the program that XLA made can't be read: {error}; report it with what `hapsynth compile --hlo` writes"
        return CompiledTarget(target.kind, chosen, why)
    return CompiledTarget(
        target=target.kind,
        form=chosen,
        seconds=seconds,
        peak_bytes=compiled.peak,
        predicted_bytes=plan.held(chosen, without_triton=compiled.without_triton),
        collectives=collectives,
        replay=replayed,
        predicted=plan.call,
        without_triton=compiled.without_triton,
        plan_bytes=plan.planned(chosen),
        memory_bytes=plan.memory,
        in_plan=plan.has_card,
        unknown_loops=unknown_loops,
    )


class _Compiled(NamedTuple):
    """`texts`: of all programs that a device of this kind runs in a call, each `runs` times, of which `sent`, the last,
    communicate. `without_triton`: as `CompiledTarget` has it. `branches`: as `replay` takes them. `others`: the
    programs of devices of this kind with other shares."""

    peak: int
    texts: Sequence[str]
    sent: Sequence[str]
    without_triton: bool
    branches: Mapping[int, int] = MappingProxyType({})
    runs: Sequence[int] = (1,)
    others: Sequence[str] = ()

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """In all runs."""
        runs = self.runs[len(self.runs) - len(self.sent) :]
        each = zip(self.sent, runs, strict=True)
        return tuple(replace(c, trips=c.trips * n) for text, n in each for c in collectives_of(text))

    @property
    def difference(self) -> str:
        """What devices of this kind would wait for each other in; empty where their collectives are the same."""
        found = (
            first_difference([collectives_of(text) for text in (*self.texts, *self.others)]) if self.others else None
        )
        if found is None:
            return ""
        number, said = found
        each = "; ".join(dict.fromkeys(said))
        return f"devices of this kind have unlike shares and another collective {number + 1}: {each}"


@dataclass(frozen=True)
class _Saved:
    """A plan as its file has it, on devices of one card."""

    traced: Traced
    result: Result
    cluster: Cluster
    target: CompilerTarget

    @property
    def used(self) -> list[int]:
        """The devices that take part, by their positions in the cluster."""
        return [*(range(self.cluster.n) if self.result.devices is None else self.result.devices)]

    @cached_property
    def _of_card(self) -> list[int]:
        """Of `used` those that are this card, by their places in it."""
        return [i for i, d in enumerate(self.used) if card_of(self.cluster.devices[d]) == self.target.kind]

    @property
    def own(self) -> list[int]:
        """As `_of_card`; all where there are none."""
        return self._of_card or [*range(len(self.used))]

    @property
    def has_card(self) -> bool:
        """Whether a device that takes part is this card."""
        return bool(self._of_card)

    @property
    def memory(self) -> float:
        """Bytes of the device of this kind that has least."""
        if not self.has_card:
            return float(self.kind.memory)
        return float(min(self.cluster.devices[self.used[i]].memory for i in self.own))

    def planned(self, form: Chosen) -> float:
        """Bytes that planning counts of the device of this kind that holds most."""
        held = held_bytes(form, self.traced.graph, self.result, self.cluster, overlap=self.result.overlap)
        return max(held[self.used[i]] for i in self.own)

    def held(self, form: Chosen, *, without_triton: bool) -> float:
        """Predicted bytes of the device of this kind that holds most. Staged: as the plan has them, and a workspace."""
        if form == "staged":
            return self.planned(form) + self._library(without_triton).workspace + SMALL
        fused, library = form == "fused", self._library(without_triton)
        costs, program, sizes = self._costs(exact=fused), self.result.program, self.result.sizes
        # Padded shards are alike on all.
        own = self.own if fused else self.own[:1]
        return max(held_pinned(program, sizes, costs, i, library, scheduled=self.result.overlap) for i in own)

    def _library(self, without_triton: bool) -> Library:
        """XLA gives a contraction of cuBLAS a workspace, and writes contractions itself on tensor cores that Triton
        knows, where autotuning may still take cuBLAS's (`GemmConfig` and `GemmFusion` of XLA). Before Hopper cuDNN
        gets channels first (`HeuristicLayoutAssignment`), and bfloat16 is computed in float32 (`GpuFloatSupport`)."""
        hopper, ampere, volta = (self.target.capability >= least for least in ((9, 0), (8, 0), (7, 0)))
        positions_last = lambda dtype: not hopper and not (volta and dtype in ("float16", "bfloat16"))
        workspace = _WORKSPACE_OF_HOPPER if hopper else _WORKSPACE
        in_float32 = lambda dtype: not ampere and dtype == "bfloat16"
        return Library(workspace, not ampere or without_triton, positions_last, in_float32)

    def mesh(self, *, processes: bool) -> Mesh:
        """As many devices, each with a process of its own, or all in this one."""
        n = len(self.used)
        shape = f"1x{n}x1" if processes else f"1x1x{n}"
        described = topologies.get_topology_desc(platform="cuda", target_config=self.target.text(), topology=shape)
        return Mesh(np.array(described.devices), ("used",))

    def form(self, asked: Form) -> Chosen:
        if asked != "auto":
            return asked
        needed = only_exact(self.traced.graph, self.result, self.cluster)
        mesh = own_mesh(self.mesh(processes=True), self.result.program.axes)
        return chosen_form(self.traced.graph, self.result, mesh, needed)[0]

    def switch(self) -> _Compiled:
        """The one program."""
        lowered = self._lowered(partial(Lowered, scheduled=self.result.overlap), processes=True)
        assert isinstance(lowered, Lowered)
        made, without = compiled_of(lowered.lower(), self.latencies)
        text = made.as_text()
        return _Compiled(_peak(made), [text], [text], without, branches_of(lowered.steps, self.own[0]))

    def fused(self) -> _Compiled:
        """The programs of the devices of this kind, of the first of each share that they have, as in a process of its
        own; the largest peak."""
        places = [*np.ndindex(*(size for _, size in self.result.program.axes))]
        own = [places[i] for i in self.own]
        peaks, texts, without = list[int](), list[str](), False
        for numbers in alike(self.result.sizes, own):
            of_these = partial(Fused, own=(own[numbers[0]],), scheduled=self.result.overlap)
            made, each = compiled_of(self._lowered(of_these, processes=True).lower(), self.latencies)
            peaks.append(_peak(made))
            texts.append(made.as_text())
            without |= each
        return _Compiled(max(peaks), texts[:1], texts[:1], without, others=texts[1:])

    def staged(self) -> _Compiled:
        """The stages of a device of this kind, and the collective stages, in order; the peak of the largest."""
        of_all, of_one = self._lowered(Staged, processes=False), self._lowered(Staged, processes=True)
        assert isinstance(of_all, Staged)
        assert isinstance(of_one, Staged)
        groups = [k for k, group in enumerate(of_all.groups) if {*self.own} & {*group.numbers}]
        mine = next(k for k, group in enumerate(of_all.groups) if self.own[0] in group.numbers)
        local = [x for lowered, _ in of_all.local_stages for k, x in enumerate(lowered) if k in groups]
        own = [(lowered[mine], runs) for lowered, runs in of_all.local_stages if mine < len(lowered)]
        sent = [x for x, _ in of_one.collective_stages]
        compiled = {x: compiled_of(x) for x in dict.fromkeys([*local, *sent])}
        text = {x: made.as_text() for x, (made, _) in compiled.items()}
        peak = max((_peak(made) for made, _ in compiled.values()), default=0)
        without = any(each for _, each in compiled.values())
        called = [*own, *of_one.collective_stages]
        texts, runs = [text[x] for x, _ in called], [n for _, n in called]
        return _Compiled(peak, texts, [text[x] for x in sent], without, runs=runs)

    def replayed(self, compiled: _Compiled) -> Replay:
        """One call of a device of this kind: of several programs one after the other."""
        each = [replay(text, self.kind, self.price, compiled.branches, self.own[0]) for text in compiled.texts]
        return sum((one.times(runs) for one, runs in zip(each, compiled.runs, strict=True)), Replay())

    @property
    def price(self) -> NetworkPrice:
        return NetworkPrice(self.costs.cluster, self.result.program.axes)

    @property
    def latencies(self) -> Latencies:
        """By which XLA schedules on this card, as a process of a job has them."""
        return partial(latency_profile, kind=self.kind, price=self.price)

    @property
    def kind(self) -> DeviceKind:
        """The cluster's, which may be measured, or where it has none the known one."""
        return self.cluster.devices[self.used[self.own[0]]] if self._of_card else known_kinds()[self.target.kind]

    @cached_property
    def costs(self) -> CostModel:
        return self._costs(self.result.exact)

    def _costs(self, exact: bool) -> CostModel:
        cluster, result, table = self.cluster.subset(self.used), self.result, FactorTable(self.traced.graph)
        if not self._of_card:
            cluster = replace(cluster, devices=(self.kind,) * cluster.n)
        budget = replace(result.memory_budget, exact=exact)
        return CostModel(self.traced.graph, cluster, table, result.program.axes, budget, result.lowering)

    @property
    def call(self) -> Predicted:
        """What the plan says of a device of this kind."""
        return predicted(self.traced.graph, self.result, self.costs, self.own[0])

    def _lowered(self, form: Callable[..., Lowered | Staged], *, processes: bool) -> Lowered | Staged:
        traced, result = self.traced, self.result
        mesh = self.mesh(processes=processes)
        return form(traced.graph, result.program, result.sizes, mesh, options=result.lowering)


def compiled_of(lowered: Any, latencies: Latencies | None = None) -> tuple[Any, bool]:
    """What XLA makes of a lowered program, and whether it had to do without Triton's contractions.

    XLA writes a contraction of new cards in Triton by a configuration that on the card autotuning would have tried;
    here it is the usual one, which some shapes have no tiles for (jax-ml/jax#34010). Then cuBLAS computes them: as
    collectives are none of its business, these stay the same.
    """
    try:
        return compile_with(lowered, latencies), False
    except jax.errors.JaxRuntimeError as error:
        if " tile" not in str(error):
            raise
        return compile_with(lowered, latencies, {"xla_gpu_enable_triton_gemm": False}), True


def _peak(compiled: Any) -> int:
    return int(compiled.memory_analysis().peak_memory_in_bytes)
