"""`profile`: measure everything, then make a cluster of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from hapsynth import _jax
from hapsynth.cluster.cluster import DEFAULT_AXIS, Cluster
from hapsynth.graph.ir import Graph
from hapsynth.profile.cluster_builder import Builder, speed_groups
from hapsynth.profile.collectives import Axes, Exchange, exchanges, runner
from hapsynth.profile.contention import (
    BESIDE,
    beside,
    can_overlap,
    delayed,
    delayed_by,
    of_contention,
    small_gather,
)
from hapsynth.profile.job import Job
from hapsynth.profile.kind_fit import typical_kind
from hapsynth.profile.measured_ops import MOST_OPS, MOST_OPS_QUICK, Ops
from hapsynth.profile.op_kernels import TF32, Kernel, kernels, largest_matmul
from hapsynth.profile.plausibility import ProfileError, refusal
from hapsynth.profile.resume import State, packed, unpacked
from hapsynth.profile.sampling import Floats, sampled

_LATENCY_BYTES = 1 << 18


@dataclass(frozen=True)
class Options:
    """`axes`: of the mesh, () for one over all devices. `dtypes`: that rates are measured of, float32 too in any case;
    () for those that the devices are used with. `quick`: fewer sizes. `limit_s`: seconds per figure, of which the
    spread should come down to `tolerance`, `window_s` per sample. `longest_s`: sizes
    that would take longer per run are left out."""

    axes: Axes = ()
    dtypes: tuple[str, ...] = ()
    quick: bool = False
    tolerance: float = 0.05
    limit_s: float = 0.5
    window_s: float = 0.1
    longest_s: float = 0.25


def profile(
    job: Job,
    options: Options,
    partial: Path | None,
    *,
    graph: Graph | None = None,
    force: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> Cluster:
    """Measure the devices and links of this job; called by all its processes.

    `graph`: of a function (`hapsynth.graph.trace`), the same in all processes, whose heavy ops are measured too.
    `partial`: the file that keeps what has been measured until all has been. `tell` is called with what is being
    measured, `note` with what a person should know, such as what failed. Raises ProfileError for figures that can't be
    true and ops of float32 that all failed, unless `force`, and for axes that don't fit the devices.
    """
    axes = options.axes or ((DEFAULT_AXIS, job.n),)
    shape = " x ".join(f"{name}={size}" for name, size in axes)
    if int(np.prod([size for _, size in axes])) != job.n:
        raise ProfileError(
            f"the mesh {shape} does not fit the {job.n} devices of this job; give sizes that make {job.n}"
        )
    if DEFAULT_AXIS in dict(axes) and sum(size > 1 for _, size in axes) > 1:
        raise ProfileError(
            f"the mesh {shape} has an axis called {DEFAULT_AXIS!r}, as all devices together are called, along which "
            "collectives are measured too; give that axis another name"
        )
    state = State(partial if job.first else None, job.fingerprint(asdict(options)))
    if text := state.load():
        note(text)
    known = unpacked(json.loads(job.shared(json.dumps(packed(state.figures)))))
    # What failed is tried again, and says why if it fails again.
    state.figures = {key: rows for key, rows in known.items() if np.isfinite(rows).all()}
    limits = [m for m in job.memory() if m > 0]
    measuring = _Measuring(job, options, state, tell, min(limits, default=1 << 62))
    ran = measuring.kernels(list(kernels(_dtypes(job, options), options.quick)))
    ran += measuring.kernels(_heavy(job, options, graph, ran, state.figures)) if graph is not None else []
    sent = measuring.exchanges(list(exchanges(axes, job.hosts, options.quick)) if job.n > 1 else [])
    if not measuring.beside(ran, sent) and not job.lone:
        note("how much collectives slow computing down can't be measured here: no contention is written")
    for text in measuring.failed.values():
        note(f"{text}; not measured anywhere")
    # Now that much has been compiled and run: a CPU's process has grown by that, and will for a plan.
    builder = Builder(job, axes, ran, sent, state.figures, job.memory(), measuring.failed)
    doubts = builder.doubts()
    try:
        if doubts and not force:
            raise refusal(doubts, str(partial or ""))
        cluster = builder.cluster()
    except ProfileError:
        # By new ones devices may be grouped otherwise, or another matmul be the largest.
        doubted = {key for doubt in doubts for key in doubt.keys}
        state.drop([key for key in state.figures if key in doubted or of_contention(key)])
        raise
    for text in builder.unmeasured():
        note(text)
    for doubt in doubts:
        note(f"saved all the same: {doubt.text}")
    return cluster


def _heavy(
    job: Job, options: Options, graph: Graph, ran: Sequence[Kernel], figures: Mapping[str, Floats]
) -> list[Kernel]:
    """The heavy ops of a function, by the figures that were measured of all devices."""
    ops, kind = Ops(graph), typical_kind(ran, figures)
    most = MOST_OPS_QUICK if options.quick else MOST_OPS
    # One process chooses for all: they measure together.
    chosen = json.loads(job.shared(json.dumps(ops.heaviest(kind, most) if kind else [])))
    if not job.agree(all(signature in ops.by_signature for signature in chosen)):
        raise ProfileError("the processes of this job have unlike functions to measure; give all the same --model")
    return list(ops.kernels(chosen, job.n, job.devices[job.local[0]].platform, options.quick))


def _first_line(error: Exception) -> str:
    name = type(error).__name__
    return f"{name}: {str(error).splitlines()[0]}" if str(error) else name


def _dtypes(job: Job, options: Options) -> tuple[str, ...]:
    if job.devices[0].platform == "cpu":
        always, usual = ("float32",), ()
    else:
        always, usual = ("float32", TF32), ("bfloat16", "float16")
    if _jax.is_available(np.dtype("float64")):
        usual = (*usual, "float64")
    return tuple(dict.fromkeys((*always, *(options.dtypes or usual))))


class _Measuring:
    """One figure after another, those that are not known yet."""

    def __init__(self, job: Job, options: Options, state: State, tell: Callable[[str], None], memory: int) -> None:
        self.job, self.options, self.state, self.tell, self.memory = job, options, state, tell, memory
        self.failed: dict[str, str] = {}
        """Figure -> the error of the first process that had one, and which processes had one."""

    def kernels(self, wanted: Sequence[Kernel]) -> list[Kernel]:
        """Those that were measured: all but the ones that take too long or too much memory."""
        done: list[Kernel] = []
        for kernel in wanted:
            before = next((k for k in reversed(done) if (k.family, k.dtype) == (kernel.family, kernel.dtype)), None)
            growth = kernel.amount / before.amount if before else 1.0
            if self._fits(before and before.key, growth, 2 * kernel.nbytes):
                self._measure(kernel.key, lambda k=kernel: self.job.runner(k), kernel.op)
                done.append(kernel)
        return [k for k in done if np.isfinite(self.state.figures[k.key]).all()]

    def exchanges(self, wanted: Sequence[Exchange]) -> list[Exchange]:
        """Likewise."""
        done: list[Exchange] = []
        for e in wanted:
            # Small ones take their latency, which says nothing of the next size.
            sized = (x for x in reversed(done) if x.family == e.family and x.nbytes >= _LATENCY_BYTES)
            before = next(sized, None)
            if self._fits(before and before.key, 1.0, 2.0 * e.nbytes * e.n):
                self._measure(e.key, lambda e=e: runner(self.job, e))
                done.append(e)
        return [e for e in done if np.isfinite(self.state.figures[e.key]).all()]

    def _fits(self, before: str | None, growth: float, nbytes: float) -> bool:
        """Whether the next size of a family is to be tried, after the measurement of the one before."""
        if 4 * nbytes > self.memory:
            return False
        return before is None or float(self.state.figures[before][:, 0].max()) * growth <= self.options.longest_s

    def beside(self, ran: Sequence[Kernel], sent: Iterable[Exchange]) -> bool:
        """Whether computing beside a collective, and a collective beside computing, could be measured."""
        job, o, kernel = self.job, self.options, largest_matmul(ran)
        large = [e for e in sent if e.step == "all_reduce" and e.n == job.n][-1:]
        small = small_gather(job, sent)
        if kernel is None or not large or small is None or not can_overlap(job):
            return False
        figures = self.state.figures
        slowest = lambda exchange: float(figures[exchange.key][:, 0].max())

        def both() -> Callable[[], Floats]:
            compute, send = job.runner(kernel), runner(job, large[0])
            # Compiled and run once, before anything runs beside.
            compute()
            send()
            return beside(job, compute, send, figures[kernel.key][:, 0], slowest(large[0]), o.window_s)

        def late(group: Sequence[int]) -> Callable[[], Floats]:
            mine, send = [i for i in job.local if i in group], runner(job, small)
            compute = job.runner(kernel, mine) if mine else None
            if compute:
                compute()
            send()
            return delayed(job, compute, send, max(1, round(o.window_s / slowest(small))))

        delays = {delayed_by(group): partial(late, group) for group in speed_groups(job, ran, figures)}
        for key, compiled in {BESIDE: both, **delays}.items():
            self._measure(key, compiled)
        return all(bool(np.isfinite(figures[key]).all()) for key in (BESIDE, *delays))

    def _measure(self, key: str, compiled: Callable[[], Callable[[], Floats]], op: str = "") -> None:
        if key in self.state.figures:
            return
        self.tell(f"{len(self.state.figures)} {key}{op and f' {op}'}")
        once: Callable[[], Floats] | None = None
        problem = ""
        try:
            once = compiled()
            once()
        except (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError) as error:
            once, problem = None, _first_line(error)
        # What one device can't run, or has no room for, is no figure of any.
        if self.job.agree(once is not None) and once is not None:
            o = self.options
            seconds, spread = sampled(once, self.job.least, o.tolerance, o.limit_s, o.window_s)
            self._keep(key, np.stack([seconds, spread], axis=1))
        else:
            kind = self.job.devices[self.job.local[0]].device_kind
            said = [json.loads(text) for text in self.job.texts(json.dumps([kind, problem]))]
            where = [f"{kind} (process {i})" for i, (kind, text) in enumerate(said) if text]
            self.failed[key] = f"{key} fails on {', '.join(where)}: {next(text for _, text in said if text)}"
            self._keep(key, np.full((len(self.job.local), 2), np.nan))

    def _keep(self, key: str, seconds: Floats) -> None:
        self.state.add(key, self.job.gather(seconds))
