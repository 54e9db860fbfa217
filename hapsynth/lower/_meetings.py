"""Where the processes of a staged program meet before they send: CPUs only.

gloo's thread of a process that data have come to before it asks for them spins until it does. A process that comes late
to a collective so has half of its core, or of its quota, from when the first of the others has sent: the one that all
wait for is slowed down to half by their waiting. At the rendezvous they wait without sending.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from hapsynth.jobs import met
from hapsynth.lower._schedule import CollectiveStage

WORTH_S = 3e-3
"""Seconds of local work before a collective from which on a meeting, of less than one, is worth it."""
_NEVER_RUN = 1e9


class Meetings:
    """The meetings of one program: at all of `stages` in its first call, which measures the local work before each, and
    then at those where that is worth it in any process. None where the job has no rendezvous, or does not need it."""

    def __init__(self, mesh: Mesh, platform: str, stages: Sequence[CollectiveStage]) -> None:
        self.mesh = mesh
        self.possible = mesh.is_multi_process and platform == "cpu"
        self.before_s = dict.fromkeys(stages, -1.0)
        """Seconds of the longest local work before each; less than none: has not been run."""
        self.at: frozenset[CollectiveStage] | None = None
        """Where they meet; None: not known yet."""
        self._since = 0.0

    def begin(self) -> None:
        """A call begins."""
        self._since = time.perf_counter()

    def before(self, stage: CollectiveStage, wires: Sequence[Any]) -> None:
        """`wires`: what is about to be sent."""
        if not self.possible or (self.at is not None and stage not in self.at):
            return
        jax.block_until_ready(wires)
        self.before_s[stage] = max(self.before_s[stage], time.perf_counter() - self._since)
        self.possible = met(self.mesh) is not None

    def after(self, wires: Sequence[Any]) -> None:
        """`wires`: what arrives."""
        if self.possible and self.at is None:
            jax.block_until_ready(wires)
            self._since = time.perf_counter()

    def end(self) -> None:
        """A call has ended: after the first one all settle on the same places."""
        if not self.possible or self.at is not None:
            return
        mine = [_NEVER_RUN if seconds < 0 else seconds for seconds in self.before_s.values()]
        said = met(self.mesh, mine)
        self.possible = said is not None
        longest = map(max, zip(*(said or ()), strict=True))
        self.at = frozenset(stage for stage, s in zip(self.before_s, longest) if s >= WORTH_S)
