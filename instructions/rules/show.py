"""What shows values to the host, in no order: `jax.debug.print` and `jax.debug.callback` (`graph.Shown`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from jax import lax

from hapsynth.instructions.factors import Factors, Local, Triple
from hapsynth.instructions.layout import P, R, Reduction
from hapsynth.instructions.rules.registry import bind, no_flops, register


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
