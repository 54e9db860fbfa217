"""Arguments to try a function on, where only their shapes are known.

What an argument may hold follows from how the function uses it: an integer that indexes a dimension lies within it
(token ids, labels), and what a square root or a logarithm is taken of is not negative (second moments, variances).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hapsynth import _jax
from hapsynth.graph.ir import Graph, Op, Value
from hapsynth.graph.trace import Traced
from hapsynth.instructions.rules.index import components, extents

# Ops whose result lies in the range of their operands, or shifts it as the indexing code of jax.numpy does.
_MOVES = frozenset(
    {"broadcast_in_dim", "concatenate", "convert_element_type", "copy", "expand_dims", "optimization_barrier"}
    | {"reduce_precision", "reshape", "rev", "select_n", "slice", "squeeze", "stop_gradient", "transpose"}
)
_CARRIED = frozenset({"cond_join", "loop_carry", "scan_slice", "scan_stack"})
_SAME_INDEX = _MOVES | _CARRIED | {"add", "clamp"}
# Ops that keep the sign: nothing that subtracts, negates or contracts.
_SAME_SIGN = _MOVES | _CARRIED | {"add", "div", "max", "min", "mul", "reduce_sum"}
_NOT_NEGATIVE = frozenset({"log", "pow", "rsqrt", "sqrt"})
_DEFAULT_BOUND = 2


def example_arguments(
    traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs` with every abstract leaf filled in; leaves that hold data are kept.

    Carried floats of rank two or more are normal with variance 1 / fan-in, so that activations stay of order one;
    other carried floats scatter around 1 by 0.1; floats that are not carried are standard normal. Integers are
    uniform below the length that they index, or 0 and 1 where they index nothing; unsigned 32-bit ones (raw keys)
    that index nothing, and typed keys, have all bits random.
    """
    leaves, tree = jax.tree_util.tree_flatten((tuple(args), dict(kwargs)))
    # A leaf that an array library did not make may still describe one: whatever has a shape but no data.
    data = (jax.Array, np.ndarray, np.generic)
    abstract = [i for i in traced.array_leaves if hasattr(leaves[i], "shape") and not isinstance(leaves[i], data)]
    _fill(traced, leaves, abstract, seed)
    return jax.tree_util.tree_unflatten(tree, leaves)


def random_arguments(traced: Traced, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) with every array leaf made as `example_arguments` makes the abstract ones."""
    leaves = [traced.static_leaves.get(i) for i in range(traced.in_tree.num_leaves)]
    _fill(traced, leaves, traced.array_leaves, seed)
    return jax.tree_util.tree_unflatten(traced.in_tree, leaves)


def _fill(traced: Traced, leaves: list[Any], wanted: Sequence[int], seed: int) -> None:
    graph = traced.graph
    rng = np.random.default_rng(seed)
    carried = {graph.inputs[source] for source, _ in graph.carry}
    for leaf, value in zip(traced.array_leaves, graph.inputs, strict=True):
        if leaf in wanted:
            leaves[leaf] = _sample(rng, graph, value, value in carried)


def _sample(rng: np.random.Generator, graph: Graph, value: int, carried: bool) -> Any:
    v = graph.values[value]
    if _jax.is_extended(v.dtype):
        return _keys(rng, v)
    dtype = np.dtype(v.dtype)
    if dtype == np.bool_:
        return rng.random(v.shape) < 0.5
    if jax.numpy.issubdtype(dtype, jax.numpy.integer):
        bound = index_bound(graph, value)
        if bound is None and dtype == np.uint32:
            return rng.integers(0, 1 << 32, v.shape, dtype=np.uint32)
        bound = _DEFAULT_BOUND if bound is None else max(1, bound)
        return rng.integers(0, min(bound, int(jax.numpy.iinfo(dtype).max)), v.shape).astype(dtype)
    x = rng.normal(size=v.shape)
    if jax.numpy.issubdtype(dtype, jax.numpy.complexfloating):
        return (x + 1j * rng.normal(size=v.shape)).astype(dtype)
    if carried:
        fan_in = int(np.prod(v.shape[:-1])) if len(v.shape) > 1 else 0
        x = x / np.sqrt(max(1, fan_in)) if fan_in else 1.0 + 0.1 * x
    return np.asarray(np.abs(x) if is_not_negative(graph, value) else x).astype(dtype)


def _keys(rng: np.random.Generator, v: Value) -> jax.Array:
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(v.shape, v.dtype)).shape
    data = rng.integers(0, 1 << 32, words, dtype=np.uint32)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(jax.numpy.zeros((), v.dtype)))


def index_bound(graph: Graph, value: int) -> int | None:
    """The least number of places that an integer value counts along a dimension; None where it indexes nothing."""
    bounds: list[int] = []
    for op, position in _reached(graph, value, _SAME_INDEX):
        bounds += _indexed(graph, op, position)
    return min(bounds, default=None)


def is_not_negative(graph: Graph, value: int) -> bool:
    """Whether the function takes a root or a logarithm of a value, or of what only scales or adds to it."""
    return any(op.name in _NOT_NEGATIVE and position == 0 for op, position in _reached(graph, value, _SAME_SIGN))


def _reached(graph: Graph, value: int, through: frozenset[str]) -> list[tuple[Op, int]]:
    """The uses of a value and of whatever ops in `through` make of it, in order."""
    found: list[tuple[Op, int]] = []
    seen, pending = {value}, [value]
    while pending:
        for index, position in graph.uses[pending.pop()]:
            op = graph.ops[index]
            found.append((op, position))
            # What is squared may have any sign.
            square = op.name == "mul" and op.operands[0] == op.operands[1]
            if op.name in through and not square:
                new = [r for r in op.results if r not in seen]
                seen.update(new)
                pending += new
    return found


def _indexed(graph: Graph, op: Op, position: int) -> list[int]:
    """The numbers of places that an operand chooses among, if it is indices."""
    if position == 1 and (op.name == "gather" or op.name.startswith("scatter")):
        return _starts(op.shapes[0], extents(op), components(op))
    if op.name == "dynamic_slice" and position >= 1:
        return _starts(op.shapes[0], op.result_shapes[0], [position - 1])
    if op.name == "dynamic_update_slice" and position >= 2:
        return _starts(op.shapes[0], op.shapes[1], [position - 2])
    if op.name == "eq":
        # A one-hot compares with an iota.
        other = op.operands[1 - position]
        if isinstance(other, int) and (source := _iota_length(graph, other)) is not None:
            return [source]
    return []


def _starts(shape: Sequence[int], window: Sequence[int], indexed: Sequence[int]) -> list[int]:
    """How many places a window may start at; a dimension taken whole has one start and says nothing."""
    return [shape[d] - window[d] + 1 for d in indexed if window[d] < shape[d]]


def _iota_length(graph: Graph, value: int) -> int | None:
    while value in graph.producer:
        op = graph.ops[graph.producer[value]]
        if op.name == "iota":
            return int(op.result_shapes[0][op.params["dimension"]])
        operand = op.operands[0] if op.operands else None
        if op.name not in ("reshape", "broadcast_in_dim", "convert_element_type") or not isinstance(operand, int):
            return None
        value = operand
    return None
