"""`Planned`: a plan's description of itself and its lowering; `Plan` calls it, checks it, saves it."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Self, TypeVar

import jax
from jax.sharding import Mesh

from hapsynth._quantities import nbytes
from hapsynth._warn import OverlapWarning, warn_user
from hapsynth.cluster.cluster import Cluster, ClusterWarning
from hapsynth.graph.trace import Traced
from hapsynth.hlo.latency_profile import latency_profile
from hapsynth.instructions.layout import format_layout
from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.lower import (
    Fused,
    Latencies,
    Lowered,
    Staged,
    is_pinned,
    local_numbers,
    own_mesh,
)
from hapsynth.running.arguments import Arguments
from hapsynth.running.form import (
    Chosen,
    Form,
    check_form,
    chosen_form,
    held_bytes,
    no_overlap,
    not_fused,
    only_exact,
    peak_bytes,
)
from hapsynth.search.cost.collective_price import NetworkPrice
from hapsynth.search.cost.model import CostModel
from hapsynth.search.result import Result
from hapsynth.search.scheduling.list_schedule import in_scheduled_order
from hapsynth.search.scheduling.timeline import Timeline, program_timeline, step_seconds


class AbsentError(AttributeError, ValueError, RuntimeError):
    """An attribute that this plan can't have, with the reason: to `hasattr` it is not there."""


P = TypeVar("P", bound="Planned")


class Planned(ABC):
    """A program planned for a traced function on a cluster; `Plan` explains the arguments.

    Everything that works on plans takes this, so that `Plan` can offer it as a method.
    """

    def __init__(
        self,
        traced: Traced,
        result: Result,
        cluster: Cluster,
        mesh: Mesh | None = None,
        fn: Callable[..., Any] | None = None,
        *,
        donate: bool = True,
        form: Form = "auto",
        overlap: bool = False,
    ) -> None:
        check_form(form)
        self.traced, self.result, self.cluster = traced, result, cluster
        self.fn = fn
        self.mesh = None if mesh is None else own_mesh(self._of_used(mesh), result.program.axes)
        if self.mesh is not None:
            found = [device.device_kind for device in self.mesh.devices.flat]
            if wrong := self.used.misplaced(found):
                raise ValueError(wrong)
        self._donate = donate
        self._asked: Form = form
        self._asked_overlap = overlap or result.overlap
        self._no_room = ""
        """Why overlap that was asked for does not fit."""
        self._forms: dict[bool, Lowered | Staged] = {}
        """The compiled form by whether it consumes carried state."""
        self.arguments = Arguments(traced)
        too_large = only_exact(traced.graph, result, cluster) if form == "switch" else ""
        if too_large:
            raise ValueError(f"form is 'switch', but {too_large}; give 'auto' or 'staged'")
        if form == "fused" and self.mesh is not None and (why := not_fused(result.sizes, self.mesh)):
            raise ValueError(f"form is 'fused', but {why}")
        elsewhere = cluster.measured_elsewhere(platform.node(), jax.__version__)
        if mesh is not None and elsewhere:
            warn_user(elsewhere, ClusterWarning)
        if self._asked_overlap and mesh is not None:
            if not self.overlap:
                warn_user(f"overlap is asked for, and {self.overlap_reason}: it runs without", OverlapWarning)
            elif not result.overlap:
                self._put_in_scheduled_order()

    def _put_in_scheduled_order(self) -> None:
        """The program of a result without overlap in the order for it; where that holds more than a device has, it runs
        without, with a warning."""
        graph, cluster = self.traced.graph, self.cluster
        program = in_scheduled_order(self.program, self.sizes, self.cost_model())
        found = replace(self.result, program=program)
        memory = peak_bytes(graph, found, cluster, exact=found.exact, overlap=True)
        found = replace(found, memory_bytes=memory)
        held, limits = held_bytes(self.form, graph, found, cluster, overlap=True), found.memory_limit_bytes
        over = [d for d in self.devices if held[d] > limits[d]]
        if not over:
            self.result = found
            return
        needed, room = nbytes(held[over[0]]), nbytes(limits[over[0]])
        text = f"overlap is asked for, and would need {needed} on device {over[0]}, which has {room}: it runs without"
        warn_user(text, OverlapWarning)
        self._asked_overlap, self._no_room = False, f"device {over[0]} has no room for it"
        # It was chosen for overlap.
        del self._form

    def _of_used(self, mesh: Mesh) -> Mesh:
        """The devices of a mesh of the whole cluster that take part, in a row; any other mesh as it is."""
        if mesh.devices.size != self.cluster.n or len(self.devices) == self.cluster.n:
            return mesh
        return Mesh(mesh.devices.flatten()[list(self.devices)], ("used",))

    @property
    def function(self) -> Callable[..., Any]:
        """`fn`; RuntimeError for a plan that was made without."""
        if self.fn is None:
            raise AbsentError("this plan does not hold its function: load it with hapsynth.load(path, fn, ...)")
        return self.fn

    @property
    def program(self) -> Program:
        """The instructions that run, in their order."""
        return self.result.program

    @property
    def sizes(self) -> Sizes:
        """The integer shard sizes, by dimension class and device."""
        return self.result.sizes

    @property
    def cost(self) -> float:
        """Predicted seconds per call."""
        return self.result.cost_s

    @property
    def lower_bound(self) -> float:
        """A lower bound on the predicted seconds per call of any program with these ratios (`Result.lower_bound_s`)."""
        return self.result.lower_bound_s

    @property
    def joint_lower_bound(self) -> float:
        """A lower bound on the predicted seconds per call of any program, whatever its ratios."""
        return self.result.joint_lower_bound_s

    @property
    def gap(self) -> float:
        """(cost - lower bound) / cost."""
        return self.result.gap

    @property
    def joint_gap(self) -> float:
        """(cost - joint lower bound) / cost."""
        return self.result.joint_gap

    @property
    def memory(self) -> tuple[float, ...]:
        """Predicted peak bytes of each device of the cluster, in mesh order; 0 for one that is left out.

        As planned: with shards of exact size if `result.exact` (staged and fused form), else with shards padded to the
        largest (switch form).
        """
        return self.result.memory_bytes

    @property
    def held_bytes(self) -> tuple[float, ...]:
        """As `memory`, but in `Plan.form`, which may store exact shards where padded ones were planned."""
        return held_bytes(self.form, self.traced.graph, self.result, self.cluster, overlap=self.scheduled)

    @property
    def memory_limit(self) -> float:
        """The smallest memory limit, in bytes, among the devices that take part."""
        return min(self.result.memory_limit_bytes[d] for d in self.devices)

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that take part, by their positions in the cluster; the others hold and compute nothing."""
        return tuple(range(self.cluster.n)) if self.result.devices is None else self.result.devices

    @cached_property
    def used(self) -> Cluster:
        """The cluster of just the devices that take part; the program is for these."""
        return self.cluster.subset(self.devices)

    def cost_model(self, cluster: Cluster | None = None) -> CostModel:
        """The cost model of the devices that take part, or of `cluster`, which must have as many."""
        graph, result = self.traced.graph, self.result
        axes = self.program.axes
        return CostModel(graph, cluster or self.used, FactorTable(graph), axes, result.memory_budget, result.lowering)

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted start and end of each instruction, in the program's order and with overlap."""
        return program_timeline(self.program, self.sizes, self.cost_model())

    @property
    def exposed(self) -> tuple[float, ...]:
        """Predicted exposed communication with overlap, in seconds [devices of the cluster, in mesh order]: the time
        until a device's own last result in which it waits for collectives and computes nothing; 0 for one that is left
        out. `RecordedCall.exposed_s` is the measured time."""
        timeline, found = self.timeline, [0.0] * self.cluster.n
        for device, group in zip(self.devices, timeline.tasks.group_of.tolist(), strict=True):
            found[device] = float(timeline.exposed[group])
        return tuple(found)

    @cached_property
    def ratios(self) -> dict[str, tuple[float, ...]]:
        """Dimension class -> the fraction of each shard, in mesh order; 0 for devices that are left out. Classes with
        an owner are not cut and have no entry.

        There are as many shards as positions along the mesh axes that cut the class, which its name tells, major first:
        axes of the cluster, or one over all its devices.
        """
        names = [name for name, _ in self.program.axes]
        along = lambda axes: [names[a] for a in axes] if len(names) > 1 else []
        return {
            c.name: self.cluster.spread(self.devices, along(c.axes), [s / c.units for s in shares])
            for c, shares in zip(self.sizes.classes.all, self.sizes.shares)
            if c.owner is None
        }

    @cached_property
    def layouts(self) -> dict[str, str]:
        """Argument path -> layout."""
        inputs = zip(self.traced.in_paths, self.traced.graph.inputs)
        return {path: format_layout(self.program.inputs[v]) for path, v in inputs}

    @cached_property
    def output_layouts(self) -> dict[str, str]:
        """Output path -> layout; a constant output is `R`."""
        outputs = zip(self.traced.out_paths, self.program.outputs)
        return {path: "R" if layout is None else format_layout(layout) for path, layout in outputs}

    # Where and how it runs

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's results."""

    @abstractmethod
    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments, placed on the devices as the plan keeps them."""

    @property
    def lowered(self) -> Lowered | Staged:
        """The compiled form, made when first needed. Raises RuntimeError for a plan without devices."""
        return self.lowered_for(self._donate)

    def lowered_for(self, donate: bool) -> Lowered | Staged:
        """The compiled form that consumes carried state, or that does not."""
        if donate not in self._forms:
            self._forms[donate] = self._lower(donate)
        return self._forms[donate]

    def _lower(self, donate: bool) -> Lowered | Staged:
        if self.mesh is None:
            raise AbsentError(
                f"this plan was made for the cluster {self.cluster.name!r} without its devices: save it with "
                "plan.save(path) and load it where they are with hapsynth.load(path, fn, example_args, mesh)"
            )
        if not self.mesh.local_devices:
            raise AbsentError(
                f"the plan uses devices {list(self.devices)} of the cluster {self.cluster.name!r}, and this process "
                "has none of them: start the job on these devices alone and load the plan with a mesh of them "
                "(hapsynth.load), or plan for all (leave_out=False, --all-devices)"
            )
        given, options = (self.traced.graph, self.program, self.sizes, self.mesh), self.result.lowering
        if self.form == "staged":
            limits, held = self.result.memory_limit_bytes, self.held_bytes
            return Staged(
                *given,
                donate=donate,
                options=options,
                overlap=self.overlap,
                spare_bytes=min(limits[d] - held[d] for d in self.devices),
            )
        whole = Lowered if self.form == "switch" else Fused
        return whole(
            *given,
            donate=donate,
            options=options,
            latencies=self.latencies,
            scheduled=self.scheduled,
            memory_limit_bytes=min(self.result.memory_budget.limits[d] for d in local_numbers(self.mesh)),
        )

    @property
    def latencies(self) -> Latencies | None:
        """The latencies by which XLA is to schedule collectives concurrently with computing; None where it does not."""
        mesh = self.mesh
        if mesh is None or not (mesh.is_multi_process and is_pinned(mesh.devices.flat[0].platform)):
            return None
        kind = self.used.devices[local_numbers(mesh)[0]]
        return partial(latency_profile, kind=kind, price=NetworkPrice(self.used, self.program.axes))

    @property
    def form(self) -> Chosen:
        """How the plan runs on its mesh (decisions.md D2)."""
        return self._form[0]

    @property
    def form_reason(self) -> str:
        """Why in this form."""
        return self._form[1]

    @cached_property
    def _form(self) -> tuple[Chosen, str]:
        if self._asked != "auto":
            return self._asked, "it was asked for"
        needed = only_exact(self.traced.graph, self.result, self.cluster)
        speedup = self._overlap_speedup if self._asked_overlap and self.mesh is not None else None
        return chosen_form(self.traced.graph, self.result, self.mesh, needed, overlap_speedup=speedup)

    def _overlap_speedup(self) -> float:
        """The predicted speedup of a step by overlap."""
        seconds = partial(step_seconds, self.program, self.sizes, self.cost_model())
        makespan = seconds(overlap=True)
        return seconds(overlap=False) / makespan if makespan > 0 else 1.0

    @property
    def may_run_staged(self) -> bool:
        """Whether the form is fused by choice of "auto", so that it may be changed to staged."""
        return self.form == "fused" and self._asked == "auto"

    def run_staged(self, reason: str) -> None:
        """Switch to staged form, which stores what the fused form does. In a run of several processes all must call."""
        self._form = "staged", reason
        self._forms.clear()

    @property
    def overlap(self) -> bool:
        """Whether collectives run beside computing."""
        return self._asked_overlap and self.mesh is not None and not self.overlap_reason

    @property
    def scheduled(self) -> bool:
        """Whether the program's order is a schedule with overlap."""
        return self.overlap or self.result.overlap

    @property
    def overlap_reason(self) -> str:
        """Why collectives can't run beside computing here; empty where they can."""
        if self.mesh is None:
            return "the plan was made without its devices"
        return self._no_room or no_overlap(self.form, self.mesh, self.sizes)

    @property
    def donate(self) -> bool:
        """Whether a call consumes carried state."""
        return self._donate

    @property
    def argument_paths(self) -> list[str]:
        """The path of every leaf of the arguments, of those too that are no arrays."""
        return self.arguments.paths

    def without_overlap(self) -> Self:
        """The same program with one instruction after another, in the form that suits that unless one was asked for."""
        cost = step_seconds(self.program, self.sizes, self.cost_model(), overlap=False)
        result = replace(self.result, overlap=False, cost_s=cost)
        return type(self)(self.traced, result, self.cluster, self.mesh, self.fn, donate=self._donate, form=self._asked)

    def with_result(
        self,
        result: Result,
        cluster: Cluster,
        traced: Traced | None = None,
        mesh: Mesh | None = None,
        form: Form | None = None,
        reason: str = "",
    ) -> Self:
        """This plan with another result for the same devices, described by another cluster, or for other shapes, or for
        those of another mesh, or in another form, for a `reason` that its own and later results tell of."""
        mesh = self.mesh if mesh is None else mesh
        options: dict[str, Any] = {"donate": self._donate, "form": form or self._asked, "overlap": self._asked_overlap}
        plan = type(self)(traced or self.traced, result, cluster, mesh, self.fn, **options)
        if form is not None and reason:
            plan._form = plan.form, reason
        elif form is None and self._asked != "auto":
            plan._form = self._form
        return plan
