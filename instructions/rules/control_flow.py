"""Boundary ops: how values enter and leave loops and branches. They compute nothing, so every placement passes.

What a loop carries has one placement, the same at every iteration (`checker.py`): partial sums may be carried and
reduced once, after the loop. The dimension that a scan runs over is whole everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from hapsynth.instructions.factors import Factors, Local
from hapsynth.instructions.rules.registry import no_flops, register


def _never(local: Local, operands: Sequence[Any]) -> NoReturn:
    raise AssertionError(f"{local.op.name} is part of its region's lowering")


@register("loop_carry", local=_never, flops=no_flops)
def _carry(f: Factors) -> None:
    x = f.operand(0)
    f.results += [x] * len(f.op.result_shapes)
    f.linear = f.passes = ((0,),)


@register("scan_slice", local=_never, flops=no_flops)
def _slice(f: Factors) -> None:
    xs = f.operand(0)
    f.block(xs[:1], "a scan runs over it")
    f.results.append(xs[1:])
    f.linear = f.passes = ((0,),)


@register("scan_stack", local=_never, flops=no_flops)
def _stack(f: Factors) -> None:
    y = f.operand(0)
    loop = f.dims(f.op.result_shapes[0][:1])
    f.block(loop, "a scan runs over it")
    f.results.append((*loop, *y))
    f.linear = f.passes = ((0,),)


@register("loop_test", local=_never, flops=no_flops)
def _test(f: Factors) -> None:
    f.operand(0)


@register("cond_join", local=_never, flops=no_flops)
def _join(f: Factors) -> None:
    f.operand(0)
    x = f.operand(1)
    branches = len(f.op.operands) - 1
    f.operands += [x] * (branches - 1)
    f.results.append(x)
    f.linear = f.passes = (tuple(range(1, branches + 1)),)
