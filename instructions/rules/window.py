"""Windows over dimensions: the reduce_window family and select-and-scatter.

A dimension that the window does not touch passes; neighbours needed across a cut (halos) are not exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from hapsynth.graph import Op
from hapsynth.instructions.factors import Factors
from hapsynth.instructions.rules.reduce import keeps
from hapsynth.instructions.rules.registry import register
from hapsynth.instructions.rules.slice import passing

_WHY = "a window reaches over neighbours"


def _flops(op: Op) -> float:
    return float(prod(op.result_shapes[0]) * prod(op.params["window_dimensions"]))


def _chosen_flops(tensor: int) -> Callable[[Op], float]:
    """Every element that may be chosen counts: backends differ in how often they look at one that windows share."""
    return lambda op: float(prod(op.shapes[tensor]))


def _untouched(op: Op) -> list[bool]:
    p = op.params
    ones = (1,) * len(p["window_dimensions"])
    return [
        (window, step, tuple(padding), base) == (1, 1, (0, 0), 1)
        for window, step, padding, base in zip(
            p["window_dimensions"], p["window_strides"], p["padding"], p.get("base_dilation", ones)
        )
    ]


def _window(f: Factors) -> None:
    x = f.operand(0)
    f.results.append(passing(f, x, f.op.result_shapes[0], _untouched(f.op), _WHY))


@register("reduce_window_sum", flops=_flops)
def _reduce_window_sum(f: Factors) -> None:
    _window(f)
    f.linear = ((0,),)


@register("reduce_window_max", flops=_flops)
def _reduce_window_max(f: Factors) -> None:
    _window(f)
    keeps(f, "max")


@register("reduce_window_min", flops=_flops)
def _reduce_window_min(f: Factors) -> None:
    _window(f)
    keeps(f, "min")


@register("reduce_window", flops=_flops)
def _reduce_window(f: Factors) -> None:
    """The user's own reduction of several operands together, each with its initial value."""
    n = len(f.op.operands) // 2
    x = f.operand(0)
    f.operands += [x] * (n - 1)
    for initial in range(n, 2 * n):
        f.operand(initial)
    f.results += [passing(f, x, f.op.result_shapes[0], _untouched(f.op), _WHY)] * n


@register("select_and_scatter_add", flops=_chosen_flops(1))
def _select_and_scatter_add(f: Factors) -> None:
    """The gradient of max pooling: linear in the source once the operand is known."""
    operand = f.dims(f.op.shapes[1])
    f.operands.append(passing(f, operand, f.op.shapes[0], _untouched(f.op), _WHY))
    f.operands.append(operand)
    f.results.append(operand)
    f.linear = ((0,),)


@register("select_and_gather_add", flops=_flops)
def _select_and_gather_add(f: Factors) -> None:
    """The tangent of max pooling: linear in the tangents once the operand is known."""
    x = f.operand(0)
    f.operands.append(x)
    f.results.append(passing(f, x, f.op.result_shapes[0], _untouched(f.op), _WHY))
    f.linear = ((0,),)


@register("select_and_scatter", flops=_chosen_flops(0))
def _select_and_scatter(f: Factors) -> None:
    """The user's own choice and accumulation, from an initial value."""
    operand = f.operand(0)
    f.operands.append(passing(f, operand, f.op.shapes[1], _untouched(f.op), _WHY))
    f.operand(2)
    f.results.append(operand)
