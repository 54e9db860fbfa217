"""Ops with effects on the host (`jax.debug.print`, `jax.debug.callback`; `graph.HostCallback`), in no order, and ops
that every device runs whole, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from jax import lax

from hapsynth.instructions.factors import Factors, Local, Triple
from hapsynth.instructions.layout import P, R, Reduction
from hapsynth.instructions.rules.registry import bind, no_flops, register, replicate, unknown


def _on_first(local: Local, operands: Sequence[Any]) -> list[Any]:
    """The first device shows the values, which all devices have."""
    x, *shown = operands

    def show(*values: Any) -> None:
        bind(local.op.primitive, (x, *values), local.op.params)

    positions = [local.axis_index(axis) for axis in range(len(local.triples))]
    lax.cond(sum(positions) == 0, show, lambda *values: None, *shown)
    return [x, np.int32(0)]


@register("debug_print", "debug_callback", local=_on_first, flops=no_flops, fusible=True)
def _shown(f: Factors) -> None:
    """`(i j, k) -> (i j, )`: the first operand passes as it is, the others are whole."""
    x = f.operand(0)
    for position in range(1, len(f.op.operands)):
        f.block(f.operand(position), "the host is shown the whole")
    f.results += [x, ()]
    for kind in cast("tuple[Reduction, ...]", ("sum", "max", "min")):
        f.extra.append(Triple((P(kind), *[R] * (len(f.operands) - 1)), (P(kind), R)))


replicate("rng_bit_generator", why="one stream of random bits, which no device can enter in the middle")
replicate("pure_callback", why="every device calls the host's function, which is given whole arrays", flops=unknown)
register("empty2", "platform_index", flops=no_flops, fusible=True)(lambda f: f.results.append(()))
