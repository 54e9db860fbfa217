"""One card, in a process that has JAX's CUDA plugin: lowered on devices that are only described, and compiled."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.compiler_target import CompilerTarget
from hapsynth.graph.trace import Traced
from hapsynth.hlo.collectives import Collective, collectives_of
from hapsynth.lower import Lowered, Staged, lower, lower_staged, own_mesh
from hapsynth.running.form import Chosen, Form, chosen_form, only_staged
from hapsynth.running.plan_file import read_plan
from hapsynth.search.result import Result
from hapsynth.targets.compiled_target import CompiledTarget

_LONGEST = 400
"""Characters of a compiler's message that are told."""


def compile_in_this_process(
    path: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    form: Form,
    target: CompilerTarget,
) -> CompiledTarget:
    """Compile the plan of a file for a card; what the compiler refuses is the result's `error`.

    Raises PlanError for a file that is no plan of the function.
    """
    plan = _Saved(*read_plan(path, fn, args, kwargs), target)
    began = time.perf_counter()
    chosen = plan.form(form)
    try:
        peak, collectives = plan.switch() if chosen == "switch" else plan.staged()
    except Exception as error:  # whatever JAX, XLA or ptxas raises for a program or a card
        text = " ".join(re.sub(r"\n-{5,}.*", "", str(error), flags=re.DOTALL).split())
        return CompiledTarget(target.kind, chosen, f"{type(error).__name__}: {text[:_LONGEST]}")
    seconds = time.perf_counter() - began
    return CompiledTarget(target.kind, chosen, "", seconds, peak, plan.predicted, tuple(collectives))


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

    @property
    def own(self) -> list[int]:
        """Of `used` those of this kind, by their places in it; all where there are none."""
        alike = [i for i, d in enumerate(self.used) if self.cluster.devices[d].name == self.target.kind]
        return alike or [*range(len(self.used))]

    @property
    def predicted(self) -> float:
        return max(self.result.memory_bytes[self.used[i]] for i in self.own)

    def mesh(self, *, processes: bool) -> Mesh:
        """As many devices, each with a process of its own, or all in this one."""
        n = len(self.used)
        shape = f"1x{n}x1" if processes else f"1x1x{n}"
        described = topologies.get_topology_desc(platform="cuda", target_config=self.target.text(), topology=shape)
        return Mesh(np.array(described.devices), ("used",))

    def form(self, asked: Form) -> Chosen:
        if asked != "auto":
            return asked
        needed = only_staged(self.traced.graph, self.result, self.cluster)
        mesh = own_mesh(self.mesh(processes=True), self.result.program.axes)
        return chosen_form(self.traced.graph, self.result, mesh, needed)[0]

    def switch(self) -> tuple[int, Iterable[Collective]]:
        """Peak bytes and collectives of the one program."""
        lowered = self._lowered(lower, processes=True)
        assert isinstance(lowered, Lowered)
        compiled = lowered.lower().compile()
        return _peak(compiled), collectives_of(compiled.as_text())

    def staged(self) -> tuple[int, Iterable[Collective]]:
        """Peak bytes of the largest stage of a device of this kind; collectives of all collective stages, in order."""
        of_all, of_one = self._lowered(lower_staged, processes=False), self._lowered(lower_staged, processes=True)
        assert isinstance(of_all, Staged)
        assert isinstance(of_one, Staged)
        groups = [k for k, group in enumerate(of_all.groups) if {*self.own} & {*group.numbers}]
        local = [x for lowered in of_all.local_stages for k, x in enumerate(lowered) if k in groups]
        sent = of_one.collective_stages
        compiled = {x: x.compile() for x in dict.fromkeys([*local, *sent])}
        collectives = [c for x in sent for c in collectives_of(compiled[x].as_text())]
        return max(map(_peak, compiled.values()), default=0), collectives

    def _lowered(self, form: Callable[..., Lowered | Staged], *, processes: bool) -> Lowered | Staged:
        traced, result = self.traced, self.result
        mesh = self.mesh(processes=processes)
        return form(traced.graph, result.program, result.sizes, mesh, options=result.lowering)


def _peak(compiled: Any) -> int:
    return int(compiled.memory_analysis().peak_memory_in_bytes)
