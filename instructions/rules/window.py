"""Windows over dimensions: the reduce_window family and select-and-scatter.

A dimension that the window does not touch passes; neighbours needed across a cut (halos) are not exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from hapsynth.graph.ir import Op
from hapsynth.instructions.factors import Factors, Local
from hapsynth.instructions.rules.reduce import extreme, keeps
from hapsynth.instructions.rules.registry import bind, register
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


@register("reduce_window_max", "reduce_window_min", flops=_flops)
def _reduce_window_extreme(f: Factors) -> None:
    _window(f)
    keeps(f, extreme(f))


@register("reduce_window", flops=_flops)
def _reduce_window(f: Factors) -> None:
    """The user's own reduction of several operands together, each with its initial value."""
    n = len(f.op.operands) // 2
    x = f.operand(0)
    f.operands += [x] * (n - 1)
    for initial in range(n, 2 * n):
        f.operand(initial)
    f.results += [passing(f, x, f.op.result_shapes[0], _untouched(f.op), _WHY)] * n


_FEW = 32
"""Positions of a window that are written out one by one."""


def _select_and_scatter_add_on_shard(local: Local, operands: Sequence[Any]) -> list[Any]:
    params, (source, operand) = local.op.params, operands
    if prod(source.shape) > 0 and is_written_out(params, operand.dtype):
        return [chosen_given(source, operand, params)]
    return bind(local.op.primitive, operands, params)


def is_written_out(params: Mapping[str, Any], dtype: Any) -> bool:
    """Whether `select_and_scatter_add` is lowered as `chosen_given`."""
    few = prod(params["window_dimensions"]) <= _FEW
    return few and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1


def chosen_given(source: Any, operand: Any, params: Mapping[str, Any]) -> Any:
    """Each window's source, where its first best element is: `select_and_scatter_add`. XLA has no kernel for that: it
    makes integers of the operand's shape for every dimension, chooses among them and scatters: four operands' worth of
    memory, and 2 to 8 times the time (CPU, JAX 0.10.2). The bits are the same: windows that share an element are added
    in their order."""
    better, steps, padding = params["select_prim"], params["window_strides"], params["padding"]
    outside = jnp.asarray(-jnp.inf if better is lax.ge_p else jnp.inf, operand.dtype)
    whole = lax.pad(operand, outside, [(*p, 0) for p in padding])
    reach = [(n - 1) * step + 1 for n, step in zip(source.shape, steps)]
    places = list(product(*map(range, params["window_dimensions"])))
    at = lambda place: lax.slice(whole, place, [a + r for a, r in zip(place, reach)], steps)
    best, chosen = at(places[0]), jnp.zeros(source.shape, jnp.uint8)
    for n, place in enumerate(places[1:], 1):
        x = at(place)
        stays = better.bind(best, x)
        best, chosen = lax.select(stays, best, x), lax.select(stays, chosen, jnp.full_like(chosen, n))
    zero, given = jnp.zeros((), source.dtype), jnp.zeros_like(operand)
    for n, place in reversed([*enumerate(places)]):
        # Less than no padding cuts off what lies outside of the operand.
        starts = [a - low for a, (low, _) in zip(place, padding)]
        edges = [(s, m - s - r, step - 1) for s, m, r, step in zip(starts, operand.shape, reach, steps)]
        given += lax.pad(lax.select(chosen == n, source, jnp.zeros_like(source)), zero, edges)
    return given


@register("select_and_scatter_add", local=_select_and_scatter_add_on_shard, flops=_chosen_flops(1))
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
