"""How long this process's devices take for their own work in a plan, when nothing is sent or waited for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

from hapsynth import _jax
from hapsynth._device_memory import free
from hapsynth.adapting.rebalance import busy_seconds
from hapsynth.graph.ir import Boundary
from hapsynth.instructions.program.program import Compute, reads, writes
from hapsynth.lower import Interpreter, MeshPosition, isolated_runs, local_numbers, local_positions, ones, waits
from hapsynth.running.base import Planned
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.program_cost import device_seconds

logger = logging.getLogger(__name__)

_AHEAD_S, _MOST_AHEAD = 0.02, 100
"""Predicted seconds of runs that an accelerator is given before they are waited for, and how many at most."""

Run = tuple[Any, Callable[[], list[Any]]]
"""A function, and the maker of its operands."""


class Probe:
    """All that each of this process's devices computes in a plan, on arrays of its own, which are there while it
    measures. Where a device has no memory for them beside the plan, and of programs that go on as their values say, the
    heaviest op alone."""

    def __init__(self, plan: Planned) -> None:
        assert plan.mesh is not None
        self.plan = plan
        costs = plan.cost_model()
        own_devices = [*zip(local_numbers(plan.mesh), local_positions(plan.mesh), plan.mesh.local_devices, strict=True)]
        self._runs: list[Run] = []
        self.predicted_s = 0.0
        """Of the slowest of the devices, which work at the same time."""
        if not waits(plan.traced.graph):
            self._runs = self._whole({device: number for number, _, device in own_devices})
        if self._runs:
            busy = busy_seconds(plan, costs)
            self.predicted_s = max(float(busy[number]) for number, _, _ in own_devices)
            return
        for number, coords, device in own_devices:
            heaviest, seconds = self._heaviest(costs, number)
            if heaviest is not None:
                self._runs.append(self._compiled(heaviest, coords, device))
                self.predicted_s = max(self.predicted_s, seconds)

    def _whole(self, numbers: dict[Any, int]) -> list[Run]:
        """Of all that the devices, of these numbers in the mesh, compute; nothing where one has no room."""
        plan = self.plan
        room = {device: self._room(device, number) for device, number in numbers.items()}
        # What holds more than there is by prediction is not compiled.
        if all(plan.result.memory_bytes[plan.devices[numbers[d]]] <= left for d, left in room.items()):
            assert plan.mesh is not None
            options = plan.result.lowering
            runs = isolated_runs(plan.traced.graph, plan.program, plan.sizes, plan.mesh, options=options)
            if all(run.held_bytes <= room[device] for run in runs for device in run.devices):
                return [(run.run, run.operands) for run in runs]
        logger.info("no memory for what a step holds once more: the heaviest op alone tells how fast this process is")
        return []

    def _room(self, device: Any, number: int) -> float:
        """Bytes that a device has beside the plan: by the cluster, and no more than it can give out now."""
        place = self.plan.devices[number]
        meant = self.plan.cluster.devices[place].memory - self.plan.result.memory_bytes[place]
        assert self.plan.mesh is not None
        # CPU devices share their process's.
        left = free(device) // (len(self.plan.mesh.local_devices) if device.platform == "cpu" else 1)
        return meant if left < 0 else min(meant, left)

    def _heaviest(self, costs: CostModel, device: int) -> tuple[Compute | None, float]:
        """The instruction that takes the device longest in one run, and its predicted seconds."""
        heaviest: tuple[Compute | None, float] = (None, 0.0)
        for i in self.plan.program.instructions:
            if isinstance(i, Compute) and not isinstance(self.plan.traced.graph.ops[i.op].primitive, Boundary):
                each = device_seconds(costs, self.plan.sizes, i)
                heaviest = max(heaviest, (i, float(each[device])), key=lambda pair: pair[1])
        return heaviest

    def _compiled(self, i: Compute, coords: tuple[int, ...], device: Any) -> Run:
        """The op as a function for one device."""
        graph, sizes = self.plan.traced.graph, self.plan.sizes
        assert self.plan.mesh is not None
        lengths = self.plan.mesh.devices.shape
        needed = list(dict.fromkeys(reads(graph, i)))
        local = Interpreter(graph, sizes, device.platform)

        def run(*values: Any) -> list[Any]:
            env = dict(zip(needed, values, strict=True))
            local.run([i], env, MeshPosition(lengths, (coords,), tuple(jnp.int32(c) for c in coords)))
            return [env[result] for result in writes(graph, i)]

        shapes = [(sizes.local_shape(*p, coords), graph.values[p[0]].dtype) for p in needed]
        return jax.jit(run), lambda: [jax.device_put(ones(shape, dtype), device) for shape, dtype in shapes]

    def slowdown(self, least_s: float) -> float:
        """Measured over predicted seconds, the mean over at least `least_s` seconds; 1 where there is nothing to do.

        Nothing else may run on the devices. A quota stops a process for tens of milliseconds at a time, so `least_s`
        should be some tenths of a second at least. On an accelerator several runs are queued before waiting: a step
        is dispatched once, and predictions leave dispatch out.
        """
        if not self._runs or not self.predicted_s:
            return 1.0
        assert self.plan.mesh is not None
        ahead = 1
        if self.plan.mesh.local_devices[0].platform != "cpu":
            ahead = min(math.ceil(_AHEAD_S / self.predicted_s), _MOST_AHEAD)
        with _jax.no_mesh(), _jax.unlooked():
            runs = [(run, operands()) for run, operands in self._runs]
            once = lambda: [run(*values) for run, values in runs]
            jax.block_until_ready(once())
            rounds, began = 0, perf_counter()
            while (passed := perf_counter() - began) < least_s or not rounds:
                made: list[Any] = []
                for _ in range(ahead):
                    # Nothing is kept of those before, which are done when this is.
                    made = once()
                jax.block_until_ready(made)
                rounds += ahead
        return passed / rounds / self.predicted_s
