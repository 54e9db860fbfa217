"""When each collective of one call ran, and how long the process waited for it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import fsum
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions

from hapsynth.hlo.collectives import is_collective
from hapsynth.hlo.replay import RUN_OTHERS
from hapsynth.hlo.text import parse
from hapsynth.lower._host_schedule import CollectiveStage, Sent

Span = tuple[float, float]
"""Start and end, in seconds."""


@dataclass(frozen=True)
class RecordedCollective:
    """Seconds since the call began: from `began_s` to `ended_s` it ran. From `awaited_s` on the process waited for it,
    `exposed_s` seconds in all: in stages without a break; in one program until something else is ready.

    `steps`: the program's, in stages. `op`: what XLA calls it, in one program.
    """

    steps: tuple[Sent, ...]
    began_s: float
    ended_s: float
    awaited_s: float
    exposed_s: float
    op: str = ""


@dataclass(frozen=True)
class RecordedCall:
    """What one process did in a call. `collectives`: as it waited for them, in one program as they began. `total_s`:
    until all results were there."""

    collectives: tuple[RecordedCollective, ...]
    total_s: float

    @property
    def communication_s(self) -> float:
        """Seconds in which collectives ran, and waited for other processes."""
        return fsum(c.ended_s - c.began_s for c in self.collectives)

    @property
    def exposed_s(self) -> float:
        """Seconds in which the process only waited for collectives, and in them for other processes."""
        return fsum(c.exposed_s for c in self.collectives)


@dataclass
class Recorder:
    """Of a call that begins now. What it records it waits for, so that computing is not taken for waiting."""

    since: float = field(default_factory=time.perf_counter)
    found: list[RecordedCollective] = field(default_factory=list[RecordedCollective])

    def now(self, arrays: Any) -> float:
        """The time once these are there."""
        jax.block_until_ready(arrays)
        return time.perf_counter()

    def ran(self, stage: CollectiveStage, began: float, ended: float, awaited: float, waited: float) -> None:
        """A collective, by the clock; it was waited for until `waited`."""
        of = (began - self.since, ended - self.since, awaited - self.since, waited - awaited)
        self.found.append(RecordedCollective(stage.steps, *of))

    def call(self, outputs: Sequence[Any]) -> RecordedCall:
        """All of it, once there are results."""
        return RecordedCall(tuple(self.found), self.now(outputs) - self.since)


def record_program(compiled: Any, arrays: Sequence[jax.Array]) -> tuple[Any, RecordedCall]:
    """What one compiled program makes of these on CPUs, and when each of its collectives ran, by JAX's profiler. That
    begins late on slow processes, for which others then wait. Raises RuntimeError where it is in use already."""
    # Until then calls before this one run.
    jax.block_until_ready(arrays)
    module = parse(compiled.as_text())
    opcodes = {i.name: i.opcode for computation in module.computations.values() for i in computation}
    options = ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            began = time.perf_counter()
            made = jax.block_until_ready(compiled(*arrays))
            total = time.perf_counter() - began
        (file,) = Path(folder).rglob("*.xplane.pb")
        spans = [(op, span) for op, span in _spans(ProfileData.from_file(str(file))) if op in opcodes]
    first = min((begin for _, (begin, _) in spans), default=0.0)
    computes = lambda op: not is_collective(opcodes[op]) and opcodes[op] not in RUN_OTHERS
    computing = _union((begin - first, end - first) for op, (begin, end) in spans if computes(op))
    found: list[RecordedCollective] = []
    for op, (begin, end) in sorted(spans, key=lambda of: of[1]):
        if is_collective(opcodes[op]):
            idle = list(_gaps((begin - first, end - first), computing))
            awaited = idle[0][0] if idle else end - first
            exposed = fsum(until - since for since, until in idle)
            found.append(RecordedCollective((), begin - first, end - first, awaited, exposed, op))
    return made, RecordedCall(tuple(found), total)


def _spans(profile: Any) -> list[tuple[str, Span]]:
    """When XLA ran each op on this host's CPU, by the op's name. An asynchronous op ends with its event "end: ", not
    when the thread that started it is free."""
    found: list[tuple[str, Span]] = []
    begun: dict[Any, int] = {}
    ended: list[tuple[Any, float]] = []
    lines = (line for plane in profile.planes if plane.name == "/host:CPU" for line in plane.lines)
    for event in (event for line in lines for event in line.events):
        stats = dict(event.stats)
        if op := stats.get("hlo_op"):
            begun[stats.get("_p")] = len(found)
            found.append((str(op), (event.start_ns * 1e-9, (event.start_ns + event.duration_ns) * 1e-9)))
        elif event.name.startswith("end: "):
            ended.append((stats.get("_c"), event.start_ns * 1e-9))
    for of, at in ended:
        if of in begun:
            op, (begin, end) = found[begun[of]]
            found[begun[of]] = op, (begin, max(end, at))
    return found


def _union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans that cover the same time, in order."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def _gaps(span: Span, covered: Sequence[Span]) -> Iterable[Span]:
    """The parts of a span outside these disjoint ones, which are in order."""
    since, until = span
    for begin, end in covered:
        if end <= since or begin >= until:
            continue
        if begin > since:
            yield since, begin
        since = max(since, end)
    if since < until:
        yield since, until
