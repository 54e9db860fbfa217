"""What ops make that no argument reaches, within what devices may round: the indices of a nearest upsampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from hapsynth import _jax

if TYPE_CHECKING:
    from hapsynth.graph.ir import Graph, Op, Operand

Bounds = tuple[Any, Any]
"""float64 arrays: what an array's elements are no less and no more than, on any device."""

_OF_TWO: dict[str, Callable[..., Any]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
_TO_INTEGERS: dict[str, Callable[..., Any]] = {"floor": np.floor, "ceil": np.ceil}
_KNOWN = frozenset({*_OF_TWO, *_TO_INTEGERS, "convert_element_type", "iota"})
_ROUNDINGS = 4
"""Of one op: a reciprocal in the place of a division, constants that the compiler multiplies beforehand."""
_LARGEST = 1 << 16
"""Elements of what is looked at, so that it takes no time."""


def same_everywhere(graph: Graph, ops: Iterable[int]) -> set[int]:
    """Those of some ops that make integers of floats which are the same on all devices, however these round."""
    asked = [graph.ops[i] for i in ops if graph.ops[i].name == "convert_element_type"]
    # Infinities among constants are no errors.
    with np.errstate(all="ignore"):
        known = _bounds(graph) if asked else {}
    return {op.index for op in asked if _is_whole(known.get(op.operands[0]), op.result_dtypes[0])}


def _is_whole(bounds: Bounds | None, dtype: Any) -> bool:
    """Whether numbers within the bounds become the same integers."""
    if bounds is None or not jnp.issubdtype(dtype, jnp.integer):
        return False
    low, high = map(np.trunc, bounds)
    limits = jnp.iinfo(dtype)
    return bool(np.all((low == high) & (low >= limits.min) & (high < limits.max)))


def _bounds(graph: Graph) -> dict[Operand, Bounds]:
    """Of every value that ops known here make of no argument and no constant array."""
    known: dict[Operand, Bounds] = {}
    for op in graph.ops:
        if op.name in _KNOWN and graph.values[op.results[0]].size <= _LARGEST:
            given = [b for o in op.operands if (b := known.get(o) or _number(o)) is not None]
            made = _of_op(op, given) if len(given) == len(op.operands) else None
            if made is not None:
                known[op.results[0]] = made
    return known


def _number(operand: Operand) -> Bounds | None:
    """Of a literal; None of booleans, complex numbers and keys, and of what is no literal."""
    if isinstance(operand, int) or not any(jnp.issubdtype(operand.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        return None
    number = np.asarray(operand.value, dtype=np.float64)
    return number, number


def _of_op(op: Op, given: list[Bounds]) -> Bounds | None:
    """`given`: of its operands. None where it divides by what may be zero, or its floats overflow."""
    (shape, dtype), name = (op.result_shapes[0], op.result_dtypes[0]), op.name
    if name == "iota":
        dim = op.params["dimension"]
        along = np.arange(shape[dim], dtype=np.float64)
        low = high = np.broadcast_to(along.reshape(-1, *[1] * (len(shape) - dim - 1)), shape)
        if not _jax.is_inexact(dtype):
            return low, high
    elif not _jax.is_inexact(dtype) or (name == "div" and not np.all(given[1][0] * given[1][1] > 0)):
        return None
    elif name in _TO_INTEGERS:
        low, high = map(_TO_INTEGERS[name], given[0])
        return low, high
    elif name in _OF_TWO:
        corners = [_OF_TWO[name](a, b) for a in given[0] for b in given[1]]
        low, high = np.minimum.reduce(corners), np.maximum.reduce(corners)
    else:
        low, high = given[0]
    kind = jnp.finfo(dtype)
    if np.any((low < float(kind.min)) | (high > float(kind.max))):
        return None
    off = lambda x: _ROUNDINGS * float(kind.eps) * np.abs(x) + float(kind.tiny)
    return low - off(low), high + off(high)
