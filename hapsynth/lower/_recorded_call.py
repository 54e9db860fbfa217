"""When each collective of one call ran, and how long the process waited for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any

import jax

from hapsynth.lower._host_schedule import CollectiveStage, Sent


@dataclass(frozen=True)
class RecordedCollective:
    """Seconds since the call began: from `began_s` to `ended_s` it ran, and from `awaited_s` on the process waited for
    it, until `exposed_s` seconds later."""

    steps: tuple[Sent, ...]
    began_s: float
    ended_s: float
    awaited_s: float
    exposed_s: float


@dataclass(frozen=True)
class RecordedCall:
    """What one process did in a call. `collectives`: as it waited for them. `total_s`: until all results were there."""

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

    @property
    def computed_s(self) -> float:
        """Seconds in which the process computed, with what collectives beside it slowed it down."""
        return self.total_s - self.exposed_s


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
