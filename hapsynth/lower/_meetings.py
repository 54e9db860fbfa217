"""Where the processes of a staged program meet before they send: CPUs only.

gloo's thread of a process that data have come to before it asks for them spins until it does. A process that comes late
to a collective so has half of its core, or of its quota, from when the first of the others has sent: the one that all
wait for is slowed down to half by their waiting. At the rendezvous they wait without sending.

Up to a meeting a process waits for nobody, so meetings also tell how long its own work takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from hapsynth.jobs import met
from hapsynth.lower._exact import parts
from hapsynth.lower._schedule import CollectiveStage

WORTH_S = 3e-3
"""Seconds of local work before a collective from which on a meeting, of less than one, is worth it."""
_NEVER_RUN = 1e9


class Meetings:
    """The meetings of one program: at all of `stages` in a call that is `measured`, as the first one is, and else at
    those where the local work before is long enough in any process. None where they are not `possible`: the job has no
    rendezvous, or needs none."""

    def __init__(self, mesh: Mesh, platform: str, stages: Sequence[CollectiveStage]) -> None:
        self.mesh = mesh
        self.possible = mesh.is_multi_process and platform == "cpu"
        self.measured = True
        """Whether the next call is to be measured: the same in all processes."""
        self.local_s = 0.0
        """Seconds in which this process computed in the last measured call; what it waited for others is not in it."""
        self.at: frozenset[CollectiveStage] | None = None
        """Where they meet in other calls; None: not known yet."""
        self._before_s = dict.fromkeys(stages, -1.0)
        self._since = self._sum = 0.0

    def begin(self) -> None:
        """A call begins."""
        self._since, self._sum = time.perf_counter(), 0.0

    def before(self, stage: CollectiveStage, wires: Sequence[Any]) -> None:
        """`wires`: what is about to be sent."""
        if not self.possible or not (self.measured or self.at is None or stage in self.at):
            return
        jax.block_until_ready(wires)
        if self.measured:
            took = time.perf_counter() - self._since
            self._before_s[stage] = max(self._before_s[stage], took)
            self._sum += took
        self.possible = met(self.mesh) is not None

    def after(self, wires: Sequence[Any]) -> None:
        """`wires`: what arrives."""
        if self.possible and self.measured:
            jax.block_until_ready(wires)
            self._since = time.perf_counter()

    def end(self, outputs: Sequence[Any]) -> None:
        """A call has ended: after the first one all settle on the same places."""
        if not (self.possible and self.measured):
            return
        jax.block_until_ready([parts(x) for x in outputs])
        self.local_s, self.measured = self._sum + time.perf_counter() - self._since, False
        if self.at is None:
            mine = [_NEVER_RUN if seconds < 0 else seconds for seconds in self._before_s.values()]
            said = met(self.mesh, mine)
            self.possible = said is not None
            longest = map(max, zip(*(said or ()), strict=True))
            self.at = frozenset(stage for stage, s in zip(self._before_s, longest) if s >= WORTH_S)
