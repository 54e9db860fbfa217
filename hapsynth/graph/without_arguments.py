"""What ops make that no argument reaches, within what devices may round: the indices of a nearest upsampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from hapsynth import _jax

if TYPE_CHECKING:
    from hapsynth.graph.ir import Graph, Op, Operand

Bounds = tuple[Any, Any]
"""float64 arrays: what an array's elements are no less and no more than, on any device."""

_OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
}
_TO_INTEGERS: dict[str, Callable[[Any], Any]] = {"floor": np.floor, "ceil": np.ceil}
_ROUNDINGS = 4
"""Of one op: a reciprocal in the place of a division, constants that the compiler multiplies beforehand."""
_LARGEST = 1 << 16
"""Elements of what is looked at, so that it takes no time."""


def is_same_everywhere(graph: Graph, op: Op) -> bool:
    """Whether an op makes integers of floats that are the same on all devices, however these round."""
    if op.name != "convert_element_type" or not jnp.issubdtype(op.result_dtypes[0], jnp.integer):
        return False
    bounds = _bounds(graph, op.operands[0], {})
    if bounds is None:
        return False
    low, high = map(np.trunc, bounds)
    limits = jnp.iinfo(op.result_dtypes[0])
    return bool(np.all((low == high) & (low >= limits.min) & (high < limits.max)))


def _bounds(graph: Graph, operand: Operand, known: dict[int, Bounds | None]) -> Bounds | None:
    """None where an argument or a constant array is behind it, or an op that is not known here. `known`: of the values
    that were looked at, as each may be read again and again."""
    if not isinstance(operand, int):
        is_real = jnp.issubdtype(operand.dtype, jnp.floating) or jnp.issubdtype(operand.dtype, jnp.integer)
        return (np.float64(operand.value),) * 2 if is_real else None
    if operand not in known:
        known[operand] = _of_value(graph, operand, known)
    return known[operand]


def _of_value(graph: Graph, operand: int, known: dict[int, Bounds | None]) -> Bounds | None:
    value = graph.values[operand]
    if operand not in graph.producer or value.size > _LARGEST:
        return None
    op = graph.ops[graph.producer[operand]]
    given = [b for b in (_bounds(graph, o, known) for o in op.operands) if b is not None]
    if len(given) < len(op.operands):
        return None
    if op.name == "iota":
        shape, dim = value.shape, op.params["dimension"]
        low = high = np.broadcast_to(
            np.arange(shape[dim], dtype=np.float64).reshape(-1, *[1] * (len(shape) - dim - 1)), shape
        )
        if not _jax.is_inexact(value.dtype):
            return low, high
    elif not _jax.is_inexact(value.dtype):
        return None
    elif op.name in _TO_INTEGERS:
        low, high = map(_TO_INTEGERS[op.name], given[0])
        return low, high
    elif op.name in _OF_TWO and (op.name != "div" or np.all(given[1][0] * given[1][1] > 0)):
        corners = [_OF_TWO[op.name](a, b) for a in given[0] for b in given[1]]
        low, high = np.minimum.reduce(corners), np.maximum.reduce(corners)
    elif op.name == "convert_element_type":
        low, high = given[0]
    else:
        return None
    kind = jnp.finfo(value.dtype)
    off = lambda x: _ROUNDINGS * float(kind.eps) * np.abs(x) + float(kind.tiny)
    return low - off(low), high + off(high)
