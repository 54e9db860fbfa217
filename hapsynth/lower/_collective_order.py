"""What keeps the collectives of a program with loops or branches in one order on all devices.

XLA's CPU backend begins the collectives of a computation in its schedule's order, the same on all devices, but it lets
the next begin when a loop or a branch before it has only *begun*: once the rest of that waits for another thread, the
collectives inside and those after it race (`ThunkExecutor`: a scheduling edge, no execution edge). Then devices enter
two collectives in different orders and wait for each other forever. Only buffers order them: barriers are gone, or
share their operand's buffer. So what is sent depends on a token, a number that is always zero, which XLA cannot know,
made of what the loop or branch before it made; and that takes one made of all results before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hapsynth._jax import is_extended
from hapsynth.graph.ir import Graph
from hapsynth.instructions.program.bundles import joined
from hapsynth.instructions.staging.stages import Cond, Loop, Step

Each = Callable[[Callable[[Any], Any], Any], Any]
"""Runs one of XLA's collectives on what is sent."""


def as_it_is(run: Callable[[Any], Any], x: Any) -> Any:
    """A collective that waits for nothing but its operand."""
    return run(x)


class Order:
    """Where tracing stands: the token that collectives now wait for, and those of the collectives since. `kept`:
    whether a loop or a branch communicates, so that XLA alone would not keep them in order."""

    def __init__(self, kept: bool = True) -> None:
        self.kept = kept
        self.after: Any = None
        self.since: list[Any] = []

    def collective(self, run: Callable[[Any], Any], x: Any, whole: bool = False) -> Any:
        """What a collective makes of `x`, in order. `whole`: it is several of XLA's, each its part."""
        made = run(self.wait(x))
        if self.kept:
            self.done(made, whole)
        return made

    def each(self, run: Callable[[Any], Any], x: Any) -> Any:
        """One of XLA's collectives, of those that a collective is."""
        return run(x)

    def after_computing(self, x: Any, made: Sequence[Any]) -> tuple[Any, list[Any]]:
        """What a collective is to send, not before the others are made, and these."""
        return x, [*made]

    def wait(self, x: Any) -> Any:
        """What a collective is to send, not before the loop or branch before it has ended."""
        if self.after is None:
            return x
        if is_extended(x.dtype):
            return jax.random.wrap_key_data(self.wait(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        # Of nothing that is known: between a constant and the same XLA would not choose.
        never = jnp.broadcast_to(lax.convert_element_type(self.after, x.dtype), x.shape)
        return lax.select(jnp.broadcast_to(self.after == 0, x.shape), x, never)

    def done(self, x: Any, whole: bool) -> None:
        """A collective gave `x`; `whole`: by several of XLA's, each its part."""
        if is_extended(x.dtype):
            x = jax.random.key_data(x)
        seen = x if whole else lax.slice(x, (0,) * x.ndim, tuple(min(1, n) for n in x.shape))
        self.since.append(jnp.any(seen != jnp.zeros((), x.dtype)).astype(jnp.int32) & 2)

    def token(self) -> Any:
        """One that waits for everything so far."""
        token = jnp.zeros((), jnp.int32) if self.after is None else self.after
        for one in self.since:
            token = token | one
        return token

    def start(self, token: Any) -> None:
        """Collectives from here on wait for `token`."""
        self.after, self.since = token, []


def communicates(graph: Graph, steps: Sequence[Step]) -> bool:
    """Whether there is a collective in these steps of a region."""
    # Which branch is taken is agreed on before it: that is a collective of these steps.
    agreed_on = lambda step: isinstance(step, Cond) and step.unsure
    return any(
        isinstance(step, list) or agreed_on(step) or region_communicates(graph, step) for step in joined(graph, steps)
    )


def region_communicates(graph: Graph, step: Any) -> bool:
    """Whether a step is a loop or a branch with a collective inside."""
    if isinstance(step, Loop):
        return step.unsure or communicates(graph, step.body) or communicates(graph, step.test)
    return isinstance(step, Cond) and any(communicates(graph, branch) for branch in step.branches)
