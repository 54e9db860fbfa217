"""Trial: a plan's outputs beside those of the original function on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hapsynth import _jax
from hapsynth.graph import Graph, Value
from hapsynth.lower import host_array, with_weak_type
from hapsynth.trace import Traced


@dataclass(frozen=True)
class CheckReport:
    """How far each output leaf is from the original function's.

    `leaves`: (output path, error). The error of floats is max |a - b| / (max |b| + tiny), over finite values; of
    integers, bools and keys 0 where all are equal and infinite otherwise; infinite too where one side is NaN or
    infinite and the other is not the same.
    """

    leaves: tuple[tuple[str, float], ...]
    rtol: float

    @property
    def max_relative_error(self) -> float:
        """The largest error of any leaf; 0 for a function without outputs."""
        return max((e for _, e in self.leaves), default=0.0)

    @property
    def ok(self) -> bool:
        return self.max_relative_error <= self.rtol

    @property
    def worst(self) -> tuple[tuple[str, float], ...]:
        """The leaves beyond the tolerance, the worst first."""
        return tuple(sorted((x for x in self.leaves if not x[1] <= self.rtol), key=lambda x: -x[1]))

    def __str__(self) -> str:
        head = f"{len(self.leaves)} output leaves, max relative error {self.max_relative_error:.2e}, rtol {self.rtol:g}"
        if self.ok:
            return f"check passed: {head}"
        named = ", ".join(f"output{path} {error:.2e}" for path, error in self.worst[:5])
        return f"check FAILED: {head}: {named}{', ...' if len(self.worst) > 5 else ''}"


def relative_error(got: Any, want: Any) -> float:
    """The error of one leaf as `CheckReport` defines it; infinite where shape or dtype differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if _jax.is_extended(want.dtype):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    if not jax.numpy.issubdtype(want.dtype, jax.numpy.inexact):
        return 0.0 if np.array_equal(got, want) else float("inf")
    tiny = float(jax.numpy.finfo(want.dtype).tiny)
    wide = np.complex128 if jax.numpy.issubdtype(want.dtype, jax.numpy.complexfloating) else np.float64
    a, b = np.asarray(got).astype(wide), np.asarray(want).astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    a, b = a[finite], b[finite]
    return float(np.max(np.abs(a - b), initial=0.0) / (np.max(np.abs(b), initial=0.0) + tiny))


def run_on_one_device(fn: Callable[..., Any], traced: Traced, leaves: Sequence[Any], device: Any) -> list[Any]:
    """The array outputs of the original function, jitted on one device, as host arrays."""
    values = [traced.graph.values[v] for v in traced.graph.inputs]
    placed = [_on(device, leaves[i], v) for i, v in zip(traced.array_leaves, values, strict=True)]

    def flat(*arrays: Any) -> list[Any]:
        full = list(leaves)
        for i, x in zip(traced.array_leaves, arrays):
            full[i] = x
        args, kwargs = jax.tree_util.tree_unflatten(traced.in_tree, full)
        out = jax.tree_util.tree_leaves(fn(*args, **kwargs))
        return [out[i] for i in traced.out_array_leaves]

    with jax.default_device(device):
        return [host_array(x) for x in jax.jit(flat)(*placed)]


def _on(device: Any, leaf: Any, value: Value) -> Any:
    """A leaf on one device, typed as planned."""
    host = host_array(leaf)
    x = jax.device_put(host if _jax.is_extended(value.dtype) else np.asarray(host, value.dtype), device)
    return with_weak_type(x, value.dtype, value.weak_type)


def random_arguments(traced: Traced, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments to try a function on: (args, kwargs).

    Floats: normal, of scale 1, for what is not carried; for carried state absolute values of scale 0.02, so that
    parameters are small and second moments are not negative. Integers: 0 or 1, valid as labels and step counts, or
    any index of the table that they are seen to look up. Bools: even odds. Keys: random.
    """
    rng = np.random.default_rng(seed)
    graph = traced.graph
    carried = {i for i, _ in graph.carry}
    leaves: list[Any] = [traced.static_leaves.get(i) for i in range(traced.in_tree.num_leaves)]
    for i, (leaf, v) in enumerate(zip(traced.array_leaves, graph.inputs, strict=True)):
        leaves[leaf] = _random(rng, graph.values[v], i in carried, _index_bound(graph, v))
    return jax.tree_util.tree_unflatten(traced.in_tree, leaves)


def _random(rng: np.random.Generator, value: Value, carried: bool, bound: int) -> Any:
    if _jax.is_extended(value.dtype):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(value.shape, value.dtype)).shape
        data = rng.integers(0, 1 << 32, words).astype(np.uint32)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(jax.numpy.zeros((), value.dtype)))
    if value.dtype == np.bool_:
        return rng.random(value.shape) < 0.5
    if jax.numpy.issubdtype(value.dtype, jax.numpy.integer):
        return rng.integers(0, bound, value.shape).astype(value.dtype)
    x = rng.normal(size=value.shape)
    return np.asarray(0.02 * np.abs(x) if carried else x).astype(value.dtype)


# What hands an integer on unchanged.
_MOVES = (
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "reshape",
    "rev",
    "select_n",
    "slice",
    "squeeze",
    "transpose",
)


def _index_bound(graph: Graph, value: int) -> int:
    """One more than the largest integer that is surely an index wherever `value`, moved only, looks something up."""
    bounds: list[int] = []
    seen, todo = {value}, [value]
    while todo:
        for index, position in graph.uses[todo.pop()]:
            op = graph.ops[index]
            if op.name == "gather" and position == 1:
                bounds += [op.shapes[0][d] for d in op.params["dimension_numbers"].start_index_map]
            elif op.name.startswith("scatter") and position == 1:
                bounds += [op.shapes[0][d] for d in op.params["dimension_numbers"].scatter_dims_to_operand_dims]
            elif op.name in _MOVES:
                todo += [r for r in op.results if r not in seen]
                seen.update(op.results)
    return max(1, min(bounds, default=2))
