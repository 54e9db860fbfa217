"""`Planned`: what a plan says of itself, devices or none."""

from __future__ import annotations

from functools import cached_property

from hapsynth.cluster import Cluster
from hapsynth.instructions.layout import format_layout
from hapsynth.instructions.program import FactorTable, Program
from hapsynth.instructions.sizes import Sizes
from hapsynth.search.costs import CostModel
from hapsynth.search.result import Result
from hapsynth.trace import Traced


class AbsentError(AttributeError, ValueError, RuntimeError):
    """An attribute that this plan can't have, with the reason: to `hasattr` it is not there."""


class Planned:
    """What was planned of a traced function for a cluster."""

    def __init__(self, traced: Traced, result: Result, cluster: Cluster) -> None:
        self.traced, self.result, self.cluster = traced, result, cluster

    @property
    def program(self) -> Program:
        return self.result.program

    @property
    def sizes(self) -> Sizes:
        return self.result.sizes

    @property
    def cost(self) -> float:
        """Predicted seconds per call."""
        return self.result.cost_s

    @property
    def lower_bound(self) -> float:
        """Seconds that no program at these ratios goes below."""
        return self.result.lower_bound_s

    @property
    def joint_lower_bound(self) -> float:
        """Seconds that no program at any ratios goes below."""
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

        `result.exact`: in staged form, each device's own shards; else in switch form, which pads them.
        """
        return self.result.memory_bytes

    @property
    def memory_limit(self) -> float:
        """Bytes that every device that takes part has: the least of all."""
        return min(self.result.memory_limit_bytes[d] for d in self.devices)

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that take part, by their positions in the cluster; the others hold and compute nothing."""
        return tuple(range(self.cluster.n)) if self.result.devices is None else self.result.devices

    @cached_property
    def used(self) -> Cluster:
        """The cluster of the devices that take part: what the program is for."""
        return self.cluster.subset(self.devices)

    def cost_model(self, cluster: Cluster | None = None) -> CostModel:
        """What the plan's instructions cost on the devices that take part, or on others as many."""
        graph = self.traced.graph
        return CostModel(graph, cluster or self.used, FactorTable(graph), self.program.axes, self.result.room)

    @cached_property
    def ratios(self) -> dict[str, tuple[float, ...]]:
        """Dimension class -> the fraction of each shard, in mesh order; 0 for devices that are left out.

        There are as many shards as positions along the mesh axes that cut the class, which its name tells, major first:
        axes of the cluster, or one over all its devices.
        """
        names = [name for name, _ in self.program.axes]
        along = lambda axes: [names[a] for a in axes] if len(names) > 1 else []
        return {
            c.name: self.cluster.spread(self.devices, along(c.axes), [s / c.units for s in shares])
            for c, shares in zip(self.sizes.classes.all, self.sizes.shares)
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
