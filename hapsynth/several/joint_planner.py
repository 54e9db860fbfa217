"""Plans of several functions that keep one state in the same way, shard for shard.

Each function that is called is planned alone first: no joint plan takes less than the sum of their joint bounds. Then
the state lies as one of these plans has it, on its devices, and the others are planned for that; where that makes them
dearer, all are weighed as one problem, which raises the bound, or finds how the state lies better
(`several/joint_layouts.py`). The least sum wins. What is left between it and the bound is the gap of the whole.

A function's best program may cut the state in larger units than it lies in (whole heads, say). Then its ops are not to
cut that dimension: it is gathered before them, or cut after them, as whatever else costs least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import numpy as np

from hapsynth.cluster.cluster import Cluster
from hapsynth.instructions.layout import Layout
from hapsynth.search.cost.model import Floats
from hapsynth.search.planning.device_subsets import ClusterPlanner
from hapsynth.search.planning.ideal_work import IdealWorkBound
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.result import SETTLED, Progress, Result
from hapsynth.search.sizing.fixed_ratios import FixedRatios, RatioError
from hapsynth.several.joint_layouts import Weighing
from hapsynth.several.placement import StatePlacement, StateRequirements, placements
from hapsynth.several.shared_state import Role, SharedState

_HURRY_S = 1.0
"""Of each function that is still to be planned after Ctrl-C."""


@dataclass(eq=False)
class JointPlanner:
    """One planning task for several functions. `weights`: how often each is called; `fixed`: layouts of leaves;
    `fixed_ratios`: of some functions; `options`: for each of them, but that the time is for all."""

    state: SharedState
    weights: Mapping[str, float]
    cluster: Cluster
    fixed: Mapping[int, Layout] = field(default_factory=dict[int, Layout])
    fixed_ratios: Mapping[str, FixedRatios] = field(default_factory=dict[str, FixedRatios])
    options: PlanningOptions = field(default_factory=PlanningOptions)
    alone: dict[str, Result] = field(init=False, default_factory=dict[str, Result])
    """Of the functions that are called, each at its own best."""
    _interrupted: bool = field(init=False, default=False)
    """By Ctrl-C."""

    def run(self) -> dict[str, Result]:
        """The result of each function; raises InfeasibleError where one does not fit, RatioError where one can't take
        the state as it lies. Ctrl-C ends the search with the best plans so far; KeyboardInterrupt where a function has
        none."""
        self._began = time.perf_counter()
        called = sorted((n for n, w in self.weights.items() if w > 0), key=lambda n: -self.weights[n])
        # Each alone, and each again under every other's state and under that which is weighed.
        self._searches = len(called) * (len(called) + 1) + len(self.weights) - len(called)
        tasks: dict[str, Task] = {}
        for name in called:
            self.alone[name] = self._plan(name, {}, None, tasks)
        ranked = sorted(called, key=lambda n: -self.weights[n] * self.alone[n].cost_s)
        everyone = tuple(range(self.cluster.n))
        known = {n: r.bounds or {everyone: r.joint_lower_bound_s} for n, r in self.alone.items()}
        subsets = dict.fromkeys(devices for bounds in known.values() for devices in bounds)
        works = {n: IdealWorkBound(tasks[n].choices, tasks[n].costs) for n in called}

        def bound(name: str, subset: tuple[int, ...]) -> float:
            """Also on devices that only another function's search looked at."""
            if subset in known[name]:
                return known[name][subset]
            work = works[name]
            return (work.makespan_on if self.options.overlap else work.on)(self.cluster.subset(subset))

        self._bounds = {s: sum(self.weights[n] * bound(n, s) for n in called) for s in subsets}
        self._weighing = Weighing(self.state, tasks, self.weights, self.fixed)
        under = (partial(self._under, first, ranked) for first in ranked)
        attempts: list[Callable[[], dict[str, Result] | None]] = list(under)
        attempts.insert(1, partial(self._as_weighed, ranked))
        failed: Exception | None = None
        self._found: list[tuple[float, int, dict[str, Result]]] = []
        for attempt in attempts:
            try:
                results = attempt()
            except (InfeasibleError, RatioError) as error:
                failed = failed or error
                continue
            except KeyboardInterrupt:
                if not self._found:
                    raise
                self._interrupted = True
                break
            if results is not None:
                self._found.append((self.cost(results), len(self._found), results))
            if self._settled():
                break
        for _, _, results in sorted(self._found):
            try:
                results = self._completed(results)
                return {n: replace(r, interrupted=self._interrupted) for n, r in results.items()}
            except (InfeasibleError, RatioError) as error:
                failed = failed or error
        assert failed is not None
        raise failed

    @property
    def bound(self) -> float:
        """Seconds that no plans of these functions with one state take less than, each as often as it is called."""
        return min(self._bounds.values())

    def _settled(self) -> bool:
        """Whether none is dearer than alone, no plans can be much cheaper, or there is no time for others."""
        if not self._found:
            return False
        cost = min(self._found)[0]
        most = max(self.bound, self.cost(self.alone))
        return cost - most <= SETTLED * cost or self._interrupted

    def cost(self, results: Mapping[str, Result]) -> float:
        """Seconds of all functions, each as often as it is called."""
        return sum(self.weights[name] * result.cost_s for name, result in results.items())

    def _under(self, first: str, called: Sequence[str], begun: Result | None = None) -> dict[str, Result]:
        """Of functions that are called, `first` as it is alone, or begun; what of the state it uses lies so for the
        others."""
        result = begun or self.alone[first]
        results, kept = {first: result}, self._decided(first, result)
        devices = _devices(self.cluster, result)
        for name in called:
            if name != first:
                results[name] = self._plan(name, kept, devices)
                kept = self._decided(name, results[name]) | kept
        return results

    def _as_weighed(self, called: Sequence[str]) -> dict[str, Result] | None:
        """All under the layouts of the state that are best for them together, at the sizes of the best so far; None
        where it has these. The bounds are raised before."""
        if not self._found:
            return None
        cost, _, best = min(self._found)
        # What is weighed are sums over instructions, which take longer than beside each other: no bound on makespans.
        for devices, bound in self._bounds.items() if not self.options.overlap else ():
            if len(devices) > 1 and bound < cost * (1 - SETTLED) and not self._late():
                enough = cost * (1 - SETTLED / 2)
                self._bounds[devices] = max(
                    bound, self._weighing.bound(self.cluster.subset(devices), enough, self._left())
                )
        self._interrupted |= self._weighing.interrupted
        if self._settled() or self._late():
            return None
        devices = _devices(self.cluster, best[called[0]])
        sizes = {name: result.sizes for name, result in best.items()}
        worth = np.inf if self.options.overlap else cost
        layouts = self._weighing.layouts(self.cluster.subset(devices), sizes, worth, self._left())
        self._interrupted |= self._weighing.interrupted
        if not layouts:
            return None
        kept = {leaf: StatePlacement(layout, {}) for leaf, layout in layouts.items()}
        return self._under(called[0], called, self._plan(called[0], kept, devices))

    def _completed(self, results: dict[str, Result]) -> dict[str, Result]:
        """With the functions that are not counted, and all within the memory that the rest of the state leaves."""
        kept: dict[int, StatePlacement] = {}
        for name, result in results.items():
            kept = self._decided(name, result) | kept
        devices = _devices(self.cluster, next(iter(results.values())))
        for name in self.state.roles:
            if name not in results:
                results[name] = self._plan(name, kept, devices)
                kept = self._decided(name, results[name]) | kept
        for name, result in results.items():
            # What no function uses.
            kept |= {leaf: how for leaf, how in self._kept(name, result).items() if leaf not in kept}
        for name, role in self.state.roles.items():
            result = results[name]
            room = np.array(result.memory_limit_bytes)
            room[list(devices)] -= self._rest(role, kept, result)
            full = bool((np.array(result.memory_bytes) > room).any())
            if full or any(how != kept[leaf] for leaf, how in self._kept(name, result).items()):
                results[name] = self._plan(name, kept, devices, cluster=self._with_room(room) if full else None)
        return {name: results[name] for name in self.state.roles}

    def _decided(self, name: str, result: Result) -> dict[int, StatePlacement]:
        """How a function's plan keeps what it uses of the state: to what it only takes any way is as good."""
        role = self.state.roles[name]
        graph = role.traced.graph
        used = lambda leaf: leaf in role.outputs or bool(graph.uses[graph.inputs[role.inputs[leaf]]])
        return {leaf: how for leaf, how in self._kept(name, result).items() if used(leaf)}

    def _kept(self, name: str, result: Result) -> dict[int, StatePlacement]:
        return placements(self.state.roles[name], result.program, result.sizes)

    def _rest(self, role: Role, kept: Mapping[int, StatePlacement], result: Result) -> Floats:
        """Bytes on each device that takes part of what a function leaves alone of the state: [devices]. What makes the
        state finds none."""
        axes = result.program.axes
        lengths = [size for _, size in axes]
        held = np.zeros(prod(lengths))
        if role.outputs.keys() - role.inputs.keys():
            return held
        for leaf in kept.keys() - role.inputs.keys():
            shape, dtype = self.state.leaves[leaf].shape, self.state.leaves[leaf].dtype
            part = np.ones(held.size)
            for (dim, along), shards in kept[leaf].lengths.items():
                of_position = np.array(shards if result.exact else (max(shards),) * len(shards)) / max(shape[dim], 1)
                where = np.unravel_index(np.arange(held.size), lengths)
                at = np.ravel_multi_index([where[a] for a in along], [lengths[a] for a in along])
                part = part * of_position[at]
            held += part * prod(shape) * dtype.itemsize
        return held

    def _with_room(self, room: Floats) -> Cluster:
        """The cluster with no more memory than `room` [devices]; devices of a kind stay alike."""
        kinds = self.cluster.devices
        least = {kind: min(room[d] for d, one in enumerate(kinds) if one == kind) for kind in set(kinds)}
        return replace(self.cluster, devices=tuple(replace(kind, memory=max(least[kind], 1.0)) for kind in kinds))

    def _left(self) -> float | None:
        budget = self.options.time_budget_s
        return None if budget is None else budget - (time.perf_counter() - self._began)

    def _late(self) -> bool:
        left = self._left()
        return left is not None and left <= 0

    def _plan(
        self,
        name: str,
        kept: Mapping[int, StatePlacement],
        devices: tuple[int, ...] | None,
        tasks: dict[str, Task] | None = None,
        cluster: Cluster | None = None,
    ) -> Result:
        """One function, with some leaves of the state as `kept`; on some devices, or those that are worth it.
        `tasks` takes the task that it was; `cluster`: with the memory that it may use, else all."""
        uncut = frozenset[tuple[int, int]]()
        fixed = {leaf: StatePlacement(layout, {}) for leaf, layout in self.fixed.items()}
        asked = StateRequirements.of(self.state.roles[name], fixed | dict(kept))
        left = self._left()
        if left is not None:
            left = max(0.05, left) / max(self._searches, 1)
            self._searches -= 1
        if self._interrupted:
            left = min(_HURRY_S, _HURRY_S if left is None else left)
        while True:
            options = replace(
                self.options,
                time_budget_s=left,
                progress=self._relay(name),
                restriction=asked.restriction(uncut),
                fixed_ratios=self._pins(name, asked),
                devices=devices,
            )
            task = Task(self.state.roles[name].traced.graph, cluster or self.cluster, options)
            try:
                result = ClusterPlanner(task).run()
            except InfeasibleError as error:
                raise InfeasibleError(f"{name!r}: {error}", error.needs, error.excess) from error
            except RatioError as error:
                broken = error.cuts & {node[:2] for node in asked.named}
                if not broken:
                    raise RatioError(f"{name!r}: {error}") from error
            else:
                self._interrupted |= result.interrupted
                broken = asked.broken(result.sizes)
                if not broken:
                    if tasks is not None:
                        tasks[name] = task
                    return result
            if broken <= uncut:
                which = ", ".join(sorted({self._path(name, value) for value, _ in broken}))
                raise RatioError(f"{name!r} cannot have the state as the other functions have it: {which}")
            uncut |= broken

    def _pins(self, name: str, asked: StateRequirements) -> FixedRatios | None:
        """What is asked for by hand, and what the state that lies there asks for."""
        own = self.fixed_ratios.get(name)
        if own is None:
            return FixedRatios(named=asked.named) if asked.named else None
        for node, fractions in own.named.items():
            if not np.array_equal(fractions, asked.named.get(node, fractions)):
                raise RatioError(
                    f"{name!r}: ratios are given for {self._path(name, node[0])}.{node[1]}, which another function has "
                    "by others: give those of one of them"
                )
        # Where all is cut by one vector, so is the state.
        return own if own.weights is not None else FixedRatios(named={**own.named, **asked.named})

    def _path(self, name: str, value: int) -> str:
        traced = self.state.roles[name].traced
        paths = dict(zip(traced.graph.inputs, traced.in_paths, strict=True))
        return paths.get(value, traced.graph.values[value].name)

    def _relay(self, name: str) -> Callable[[Progress], None] | None:
        tell = self.options.progress
        return None if tell is None else lambda p: tell(replace(p, stage=f"{name}: {p.stage}"))


def _devices(cluster: Cluster, result: Result) -> tuple[int, ...]:
    return tuple(range(cluster.n)) if result.devices is None else result.devices
