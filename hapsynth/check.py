"""Trial: a plan's outputs beside those of the original function on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hapsynth import _jax
from hapsynth._arguments import Arguments
from hapsynth.example_data import random_arguments
from hapsynth.graph import Value
from hapsynth.lower import host_array, with_weak_type
from hapsynth.sharded_array import plain, whole
from hapsynth.trace import Traced

if TYPE_CHECKING:
    from hapsynth.plan import Plan


@dataclass(frozen=True)
class CheckReport:
    """How far each output leaf is from the original function's.

    `leaves`: (output path, error). The error of floats is max |a - b| / max |b|, over finite values; of integers,
    bools and keys 0 where all are equal and infinite otherwise; infinite too where one side is NaN or infinite and
    the other is not the same.

    A leaf that is zero but for rounding (a gradient that cancels) can't agree to any number of digits. So a leaf
    beyond `rtol` passes when max |a - b| <= 8 x its noise: how far the function's own result moves on one device when
    its arguments move in their last place (`noise`). Its error is then that of a leaf of size 8 x noise / rtol.
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


def check_plan(
    plan: Plan, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], rtol: float
) -> CheckReport:
    """`Plan.check`."""
    function, traced, lowered = plan.function, plan.traced, plan.lowered
    if not args and not kwargs:
        args, kwargs = random_arguments(traced)
    leaves = [plain(x) for x in arguments.flatten(args, kwargs)]
    placed = arguments.place_copies(lowered, leaves, 0)
    args, kwargs = jax.tree_util.tree_unflatten(traced.in_tree, placed)
    out = jax.tree_util.tree_leaves(plan(*args, **kwargs))
    got = [whole(out[i]) for i in traced.out_array_leaves]
    reference = Reference(function, traced, leaves, lowered.mesh.local_devices[0])
    errors = compare(reference, [leaves[i] for i in traced.array_leaves], got, rtol)
    return CheckReport(tuple(zip(traced.out_paths, errors, strict=True)), rtol)


def relative_error(got: Any, want: Any, floor: float = 0.0) -> float:
    """The error of one leaf as `CheckReport` defines it; infinite where shape or dtype differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if _jax.is_extended(want.dtype):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    if not _is_inexact(want.dtype):
        return 0.0 if np.array_equal(got, want) else float("inf")
    a, b = _wide(got), _wide(want)
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    scale = max(float(np.max(np.abs(b[finite]), initial=0.0)), floor) + float(jax.numpy.finfo(want.dtype).tiny)
    return float(np.max(np.abs(a[finite] - b[finite]), initial=0.0) / scale)


class Reference:
    """The original function on one device: the array leaves of its arguments to those of its results.

    `leaves` are all leaves of a call; those that are no arrays are kept. Compiled once.
    """

    def __init__(self, fn: Callable[..., Any], traced: Traced, leaves: Sequence[Any], device: Any) -> None:
        self.traced, self.device = traced, device

        def flat(*arrays: Any) -> list[Any]:
            full = list(leaves)
            for i, x in zip(traced.array_leaves, arrays, strict=True):
                full[i] = x
            args, kwargs = jax.tree_util.tree_unflatten(traced.in_tree, full)
            out = jax.tree_util.tree_leaves(fn(*args, **kwargs))
            return [out[i] for i in traced.out_array_leaves]

        self._compiled = jax.jit(flat)

    def hosted(self, arrays: Sequence[Any]) -> list[Any]:
        """Arguments that may lie anywhere as host arrays, typed as planned."""
        whole = [(host_array(x), v.dtype) for x, v in zip(arrays, self._values, strict=True)]
        return [x if _jax.is_extended(dtype) else np.asarray(x, dtype) for x, dtype in whole]

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """The results, as host arrays, of `hosted` arguments."""
        with _jax.no_mesh(), jax.default_device(self.device):
            # Not committed to the device: the function may name others, in a sharding constraint for instance.
            typed = [with_weak_type(x, v.dtype, v.weak_type) for x, v in zip(arrays, self._values, strict=True)]
            return [host_array(x) for x in self._compiled(*typed)]

    @property
    def _values(self) -> list[Value]:
        return [self.traced.graph.values[v] for v in self.traced.graph.inputs]


def compare(reference: Reference, arrays: Sequence[Any], got: Sequence[Any], rtol: float) -> list[float]:
    """The error of each output leaf; leaves beyond `rtol` are judged by the noise of the reference as well."""
    arrays = reference.hosted(arrays)
    want = reference(arrays)
    errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    if all(e <= rtol for e in errors) or rtol <= 0:
        return errors
    floors = [_CLEAR * n / rtol for n in noise(reference, arrays, want)]
    # A leaf that is nothing but zeros may be a variance of equals, the square of a rounding error elsewhere.
    floors = [max(f, _CLEAR * _epsilon(b) ** 2 / rtol) if _largest(b) == 0 else f for f, b in zip(floors, want)]
    # No more than the leaf would be allowed if it were as large as anything that goes in or out.
    cap = max((_largest(x) for x in (*arrays, *want)), default=0.0)
    return [relative_error(a, b, min(f, cap)) for a, b, f in zip(got, want, floors, strict=True)]


def noise(reference: Reference, arrays: Sequence[Any], want: Sequence[Any]) -> list[float]:
    """How far each output leaf moves when the arguments move by one unit in their last place.

    That is what rounding alone may do to it. The second largest of a few runs, so that a comparison that tips over
    in one of them counts for nothing. Whole numbers stay, since code compares and truncates them, and so do arguments
    of fewer digits than the leaf; integers, bools and keys have no noise.
    """
    moved: list[list[float]] = [[] for _ in want]
    digits = [_epsilon(x) for x in want]
    for epsilon in sorted({e for e in digits if e}):
        for seed in range(_NOISE_RUNS):
            rng = np.random.default_rng(seed)
            again = reference([nudged(rng, x, epsilon) for x in arrays])
            for leaf, (a, b, e) in enumerate(zip(again, want, digits)):
                if e == epsilon:
                    moved[leaf].append(_distance(a, b))
    return [sorted(m)[-2] if m else 0.0 for m in moved]


_NOISE_RUNS = 4
_CLEAR = 8.0
"""An error of more than this many times the noise is no rounding error."""


def nudged(rng: np.random.Generator, x: Any, epsilon: float) -> Any:
    """An argument moved by one unit in the last place, up or down; whole numbers stay (`noise`)."""
    if not 0 < _epsilon(x) <= epsilon:
        return x
    wide = _wide(x)
    factor = 1.0 + _epsilon(x) * rng.choice([-1.0, 1.0], wide.shape)
    return np.where(wide == np.round(wide), wide, wide * factor).astype(x.dtype)


def _distance(a: Any, b: Any) -> float:
    """Over the elements that are finite in both."""
    a, b = _wide(a), _wide(b)
    finite = np.isfinite(a) & np.isfinite(b)
    return float(np.max(np.abs(a[finite] - b[finite]), initial=0.0))


def _largest(x: Any) -> float:
    return _distance(x, np.zeros_like(x)) if _epsilon(x) else 0.0


def _epsilon(x: Any) -> float:
    """The unit in the last place of 1, or 0 for what is not a float."""
    return float(jax.numpy.finfo(x.dtype).eps) if _is_inexact(x.dtype) else 0.0


def _is_inexact(dtype: Any) -> bool:
    return not _jax.is_extended(dtype) and jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(host_array(x))
    return x.astype(np.complex128 if np.issubdtype(x.dtype, np.complexfloating) else np.float64)
