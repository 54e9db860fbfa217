"""Plans of several functions that keep one state in the same way, shard for shard.

Each function that is called is planned alone first: no joint plan takes less than the sum of their joint bounds. Then
the state lies as one of these plans has it, on its devices, and the others are planned for that; the least sum wins.
What is left between the two is the gap of the whole.

A function's best program may cut the state in larger units than it lies in (whole heads, say). Then its ops are not to
cut that dimension: it is gathered before them, or cut after them, as whatever else costs least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import numpy as np

from hapsynth._shared_state import Role, SharedState
from hapsynth.cluster import Cluster
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.sizes import Node, layout_nodes
from hapsynth.search.costs import Floats
from hapsynth.search.pins import Pins, RatioError
from hapsynth.search.planner import InfeasibleError
from hapsynth.search.result import SETTLED, Progress, Result
from hapsynth.search.structure import Restriction
from hapsynth.search.subclusters import ClusterPlanner

_Where = tuple[int, tuple[int, ...]]
"""(dimension, mesh axes that cut it)"""


class Kept(NamedTuple):
    """How a leaf of the state lies: the elements on each position along the axes that cut a dimension; none are known
    where only the layout is asked for."""

    layout: Layout
    lengths: Mapping[_Where, tuple[int, ...]]


@dataclass(eq=False)
class JointPlanner:
    """One planning task for several functions. `weights`: how often each is called; `fixed`: layouts of leaves; all
    else as in `ClusterPlanner`."""

    state: SharedState
    weights: Mapping[str, float]
    cluster: Cluster
    fixed: Mapping[int, Layout] = field(default_factory=dict[int, Layout])
    memory_limit: float | None = None
    time_budget_s: float | None = None
    progress: Callable[[Progress], None] | None = None
    leave_out: bool = True
    exact: bool = False
    alone: dict[str, Result] = field(init=False, default_factory=dict[str, Result])
    """Of the functions that are called, each at its own best."""

    def run(self) -> dict[str, Result]:
        """The result of each function; raises InfeasibleError where one does not fit, RatioError where one can't take
        the state as it lies."""
        self._began = time.perf_counter()
        called = sorted((n for n, w in self.weights.items() if w > 0), key=lambda n: -self.weights[n])
        # Each alone, and each again under every other's state.
        self._searches = len(called) ** 2 + len(self.weights) - len(called)
        for name in called:
            self.alone[name] = self._plan(name, {}, None, self.memory_limit)
        ranked = sorted(called, key=lambda n: -self.weights[n] * self.alone[n].cost_s)
        found: list[tuple[float, int, dict[str, Result]]] = []
        failed: Exception | None = None
        for first in ranked:
            try:
                results = self._under(first, [n for n in ranked if n != first])
            except (InfeasibleError, RatioError) as error:
                failed = failed or error
                continue
            cost = self.cost(results)
            found.append((cost, len(found), results))
            if cost - self.cost(self.alone) <= SETTLED * cost or any(r.interrupted for r in results.values()):
                # None is dearer than alone, or there is no time for others.
                break
        for _, _, results in sorted(found):
            try:
                return self._completed(results)
            except (InfeasibleError, RatioError) as error:
                failed = failed or error
        assert failed is not None
        raise failed

    @property
    def bound(self) -> float:
        """Seconds that no plans of these functions with one state take less than, each as often as it is called."""
        return sum(self.weights[name] * result.joint_lower_bound_s for name, result in self.alone.items())

    def cost(self, results: Mapping[str, Result]) -> float:
        """Seconds of all functions, each as often as it is called."""
        return sum(self.weights[name] * result.cost_s for name, result in results.items())

    def _under(self, first: str, others: Sequence[str]) -> dict[str, Result]:
        """Of functions that are called, `first` as it is alone; what of the state it uses lies so for the others."""
        results, kept = {first: self.alone[first]}, self._decided(first, self.alone[first])
        devices = _devices(self.cluster, self.alone[first])
        for name in others:
            results[name] = self._plan(name, kept, devices, self.memory_limit)
            kept = self._decided(name, results[name]) | kept
        return results

    def _completed(self, results: dict[str, Result]) -> dict[str, Result]:
        """With the functions that are not counted, and all within the memory that the rest of the state leaves."""
        kept: dict[int, Kept] = {}
        for name, result in results.items():
            kept = self._decided(name, result) | kept
        devices = _devices(self.cluster, next(iter(results.values())))
        for name in self.state.roles:
            if name not in results:
                results[name] = self._plan(name, kept, devices, self.memory_limit)
                kept = self._decided(name, results[name]) | kept
        for name, result in results.items():
            # What no function uses.
            kept |= {leaf: how for leaf, how in self.kept(name, result).items() if leaf not in kept}
        for name, role in self.state.roles.items():
            result, limit = results[name], self.memory_limit
            room = np.array(result.memory_limit_bytes)[list(devices)] - self._rest(role, kept, result)
            full = bool((np.array(result.memory_bytes)[list(devices)] > room).any())
            if full or any(how != kept[leaf] for leaf, how in self.kept(name, result).items()):
                results[name] = self._plan(name, kept, devices, float(room.min()) if full else limit)
        return {name: results[name] for name in self.state.roles}

    def _decided(self, name: str, result: Result) -> dict[int, Kept]:
        """How a function's plan keeps what it uses of the state: to what it only takes any way is as good."""
        role = self.state.roles[name]
        graph = role.traced.graph
        used = lambda leaf: leaf in role.outputs or bool(graph.uses[graph.inputs[role.inputs[leaf]]])
        return {leaf: how for leaf, how in self.kept(name, result).items() if used(leaf)}

    def kept(self, name: str, result: Result) -> dict[int, Kept]:
        """How a function's plan keeps the leaves of the state that it has."""
        role, found = self.state.roles[name], dict[int, Kept]()
        graph, sizes = role.traced.graph, result.sizes
        for leaf, position in role.outputs.items():
            value, layout = graph.outputs[position], result.program.outputs[position]
            if isinstance(value, int) and layout is not None:
                nodes = layout_nodes(value, layout)
                found[leaf] = Kept(layout, {(dim, axes): sizes.lengths(v, dim, axes) for v, dim, axes in nodes})
        for leaf, position in role.inputs.items():
            value = graph.inputs[position]
            nodes = layout_nodes(value, result.program.inputs[value])
            lengths = {(dim, axes): sizes.lengths(v, dim, axes) for v, dim, axes in nodes}
            found[leaf] = Kept(result.program.inputs[value], lengths)
        return found

    def _rest(self, role: Role, kept: Mapping[int, Kept], result: Result) -> Floats:
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

    def _plan(
        self, name: str, kept: Mapping[int, Kept], devices: tuple[int, ...] | None, limit: float | None
    ) -> Result:
        """One function, with some leaves of the state as `kept`; on some devices, or those that are worth it."""
        uncut = frozenset[tuple[int, int]]()
        fixed = {leaf: Kept(layout, {}) for leaf, layout in self.fixed.items()}
        asked = _Asked.of(self.state.roles[name], fixed | dict(kept))
        left = None
        if self.time_budget_s is not None:
            left = max(0.05, self.time_budget_s - (time.perf_counter() - self._began)) / max(self._searches, 1)
            self._searches -= 1
        while True:
            planner = ClusterPlanner(
                self.state.roles[name].traced.graph,
                self.cluster,
                limit,
                left,
                asked.restriction(uncut),
                self._relay(name),
                leave_out=self.leave_out,
                pins=Pins(named=asked.named) if asked.named else None,
                exact=self.exact,
                devices=devices,
            )
            try:
                result = planner.run()
            except InfeasibleError as error:
                raise InfeasibleError(f"{name!r}: {error}", error.needs) from error
            except RatioError as error:
                broken = error.cuts
            else:
                broken = asked.broken(result)
                if not broken:
                    return result
            if broken <= uncut:
                which = ", ".join(sorted({self._path(name, value) for value, _ in broken}))
                raise RatioError(f"{name!r} cannot have the state as the other functions have it: {which}")
            uncut |= broken

    def _path(self, name: str, value: int) -> str:
        traced = self.state.roles[name].traced
        paths = dict(zip(traced.graph.inputs, traced.in_paths, strict=True))
        return paths.get(value, traced.graph.values[value].name)

    def _relay(self, name: str) -> Callable[[Progress], None] | None:
        tell = self.progress
        return None if tell is None else lambda p: tell(replace(p, stage=f"{name}: {p.stage}"))


@dataclass(frozen=True, eq=False)
class _Asked:
    """What is asked of a function's plan: the layouts of arguments, by value, and of results, by position, and how
    dimensions of them are cut, which two of them may ask of one value."""

    stored: Mapping[int, Layout]
    ends: Mapping[int, Layout]
    cuts: Sequence[tuple[Node, tuple[int, ...]]]

    @staticmethod
    def of(role: Role, kept: Mapping[int, Kept]) -> _Asked:
        graph = role.traced.graph
        stored: dict[int, Layout] = {}
        ends: dict[int, Layout] = {}
        cuts: list[tuple[Node, tuple[int, ...]]] = []
        for leaf, how in kept.items():
            if leaf in role.inputs:
                value = graph.inputs[role.inputs[leaf]]
                stored[value] = how.layout
            elif leaf in role.outputs and isinstance(made := graph.outputs[role.outputs[leaf]], int):
                value = made
                ends[role.outputs[leaf]] = how.layout
            else:
                continue
            cuts += [((value, dim, axes), lengths) for (dim, axes), lengths in how.lengths.items()]
        return _Asked(stored, ends, cuts)

    @property
    def named(self) -> dict[Node, Floats]:
        """As in `Pins`."""
        return {node: np.array(lengths) / sum(lengths) for node, lengths in self.cuts}

    def restriction(self, uncut: frozenset[tuple[int, int]]) -> Restriction | None:
        """`uncut`: (value, dimension) that no op may cut."""
        if not self.stored and not self.ends:
            return None
        allowed = (lambda value, dim: (value, dim) not in uncut) if uncut else None
        return Restriction(self.stored, allowed, ends=self.ends)

    def broken(self, result: Result) -> frozenset[tuple[int, int]]:
        """(value, dimension) that are cut in other ways than is asked."""
        return frozenset(node[:2] for node, lengths in self.cuts if result.sizes.lengths(*node) != lengths)


def _devices(cluster: Cluster, result: Result) -> tuple[int, ...]:
    return tuple(range(cluster.n)) if result.devices is None else result.devices
