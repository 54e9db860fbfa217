"""Where the processes of a staged program can meet before they send: CPUs of a job with a rendezvous.

Up to a meeting a process waits for nobody, so a call in which they meet tells how long each takes for its own work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from hapsynth.lower import _gloo
from hapsynth.lower._exact_storage import parts
from hapsynth.rendezvous.meeting import met


class ComputeTimer:
    """The meetings of one program, at all of its collective stages in a call that is `measured`. None where they are
    not `possible`: the job has no rendezvous, or needs none."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.possible = _gloo.joins(mesh)
        self.measured = False
        """Whether the next call is to be measured: the same in all processes."""
        self.local_s: float | None = None
        """Seconds in which this process computed in the last measured call; what it waited for others is not in it."""
        self._since = self._sum = 0.0

    @property
    def now(self) -> bool:
        """Whether processes meet in this call."""
        return self.possible and self.measured

    def begin(self, stored: Sequence[Any]) -> None:
        """A call begins on these inputs. The calls before it may still run, and wait for others."""
        if self.now:
            jax.block_until_ready([parts(x) for x in stored])
        self._since, self._sum = time.perf_counter(), 0.0

    def before(self, wires: Sequence[Any]) -> None:
        """`wires`: what is about to be sent."""
        if self.now:
            jax.block_until_ready(wires)
            self._sum += time.perf_counter() - self._since
            self.possible = met(self.mesh) is not None

    def after(self, wires: Sequence[Any]) -> None:
        """`wires`: what arrives."""
        if self.now:
            jax.block_until_ready(wires)
            self._since = time.perf_counter()

    def end(self, outputs: Sequence[Any]) -> None:
        """A call has ended."""
        if self.now:
            jax.block_until_ready([parts(x) for x in outputs])
            self.local_s, self.measured = self._sum + time.perf_counter() - self._since, False
