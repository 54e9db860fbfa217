"""Collectives along each mesh axis, run by all devices together, and the links that they tell of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy.optimize import linprog

from hapsynth.cluster.cluster import COLLECTIVES, DEFAULT_AXIS
from hapsynth.cluster.links import Link
from hapsynth.instructions.collectives import RESHARE, STEPS, Hosts, hosts_along, lines_along
from hapsynth.instructions.layout import P, R
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.lower import _gloo
from hapsynth.lower._collective_order import as_it_is
from hapsynth.lower._collectives import exchange_first
from hapsynth.profile.job import Job
from hapsynth.profile.sampling import Floats

Point = tuple[float, float, float]
Points = Sequence[Point]
"""(messages that wait for one another, bytes, seconds)."""
Axes = tuple[tuple[str, int], ...]
INSIDE = "inside"
"""Rings within each host, where an axis over all devices tells of the network only."""


@dataclass(frozen=True)
class Exchange:
    """`repeats` collectives along one axis of a mesh, each of `nbytes` per device."""

    step: str
    axes: Axes
    axis: str
    nbytes: int
    repeats: int
    hosts: Hosts = ()
    """Those that the axis goes over."""

    @property
    def family(self) -> str:
        return f"{self.step}/{self.axis}"

    @property
    def key(self) -> str:
        return f"{self.family}/{self.nbytes}"

    @property
    def n(self) -> int:
        return dict(self.axes)[self.axis]

    @property
    def words(self) -> int:
        """float32 numbers per device, a multiple of the devices."""
        return -(-self.nbytes // (4 * self.n)) * self.n

    @property
    def scatters(self) -> bool:
        """Whether a device sends a block of `words` to each, and gets one."""
        return self.step in STEPS and STEPS[self.step].splits and not STEPS[self.step].joins

    @property
    def block(self) -> float:
        """Bytes of what a device sends at once: all it holds, or of that each other one's part."""
        step = STEPS[self.step]
        return 4.0 * self.words / (self.n if step.splits and step.joins else 1)


BASE = "none"
"""The program of an exchange without one."""


def exchanges(axes: Axes, hosts: Sequence[int], quick: bool) -> Iterator[Exchange]:
    """All that is measured: every collective that can be run along every axis and along all devices as one axis, from
    small to large."""
    n = len(hosts)
    meshes = [(axes, axis) for axis, size in axes if size > 1]
    if len(meshes) > 1:
        meshes.append((((DEFAULT_AXIS, n),), DEFAULT_AXIS))
    sizes = (1 << 12, 1 << 20) if quick else (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 24, 1 << 26)
    for mesh, axis in meshes:
        yield Exchange(BASE, mesh, axis, sizes[0], 1)
        names, lengths = zip(*mesh, strict=True)
        along = hosts_along(lines_along(hosts, lengths, names.index(axis)))
        for step in COLLECTIVES:
            for nbytes in sizes if STEPS[step].goes_over(along) else ():
                yield Exchange(step, mesh, axis, nbytes, 8 if nbytes < 1 << 17 else 2, along)
    if 1 < len(set(hosts)) < n:
        for nbytes in sizes:
            # Along the axis over all devices, whatever it is called.
            yield Exchange(INSIDE, *meshes[-1], nbytes, 8 if nbytes < 1 << 17 else 2)


def runner(job: Job, exchange: Exchange) -> Callable[[], Floats]:
    """Compiles an exchange: the seconds until this process had its results, for each of its devices."""
    lengths = [size for _, size in exchange.axes]
    names = tuple(name for name, _ in exchange.axes)
    words = exchange.words * (exchange.n if exchange.scatters else 1)
    mesh = Mesh(np.array(job.devices).reshape(lengths), names)
    one = _step(exchange, job.hosts, DEFAULT if _gloo.joins(mesh) else None)

    def body(x: jax.Array) -> jax.Array:
        # The data of every device must stay its own, or XLA may see that nothing needs to be sent.
        mark = lax.axis_index(exchange.axis).astype(jnp.float32) * 1e-6
        for _ in range(exchange.repeats):
            made = one(x) + mark
            # In place: to make all that is sent anew takes as long as to send it at times.
            x = lax.dynamic_update_slice(x, made, (0,)) if exchange.scatters else made
        return x

    spec = PartitionSpec(names)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    fn = jax.jit(mapped, donate_argnums=(0,) if exchange.scatters else ())
    ones = np.ones(words, np.float32)
    x = jax.make_array_from_callback((words * job.n,), NamedSharding(mesh, spec), lambda _: ones)
    run = fn.lower(x).compile()

    def once() -> Floats:
        nonlocal x
        began = time.perf_counter()
        x = jax.block_until_ready(run(x))
        return np.full(len(job.local), time.perf_counter() - began)

    return once


def _step(exchange: Exchange, hosts: Sequence[int], gloo: LoweringOptions | None) -> Callable[[jax.Array], jax.Array]:
    """One collective to [words] on every device, from as many, or as many for each where it scatters."""
    axis, n, words = exchange.axis, exchange.n, exchange.words
    if exchange.step == BASE:
        return lambda x: x
    if exchange.step in (INSIDE, RESHARE):
        around = rings(hosts if exchange.step == INSIDE else [0] * n)
        return lambda x: lax.ppermute(x, axis, around)
    step = STEPS[exchange.step]

    def one(x: jax.Array) -> jax.Array:
        made = exchange_first(step, axis, x, P("sum"), R, gloo, as_it_is, exchange.hosts)
        if not step.joins:
            return made * (1 / n)
        # The neighbour's part: one's own would need no gathering.
        at = lambda: (lax.axis_index(axis) + 1) % n * words
        return made if step.splits else lax.dynamic_slice(made, (at(),), (words,))

    return one


def rings(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """(from, to) of a ring within each host."""
    members: dict[int, list[int]] = {}
    for device, host in enumerate(hosts):
        members.setdefault(host, []).append(device)
    return [pair for m in members.values() for pair in zip(m, [*m[1:], m[0]], strict=True)]


def fitted(points: Points) -> tuple[float, float]:
    """(seconds per message, seconds per byte), neither negative, that miss the points by the least sum of fractions: a
    few wild points don't move them."""
    messages, x, t = np.array(points, dtype=np.float64).T
    k = len(x)
    lines = np.stack([messages / t, x / t], axis=1)
    solution = linprog(
        np.r_[0.0, 0.0, np.ones(k)],
        A_ub=np.block([[lines, -np.eye(k)], [-lines, -np.eye(k)]]),
        b_ub=np.r_[np.ones(k), -np.ones(k)],
        method="highs",
    )
    latency, beta = solution.x[:2].tolist()
    return max(latency, 0.0), max(beta, 0.0)


def link_of(points: Points) -> Link:
    """The link of seconds by messages and bytes over it. Where time does not grow with the bytes, that of the largest
    alone."""
    latency, beta = fitted(points)
    largest, seconds = max((nbytes, t) for _, nbytes, t in points)
    return Link(1 / beta, latency) if beta > 0 else Link(largest / seconds, min(t / count for count, _, t in points))
