"""Trial: a plan's outputs beside those of the original function on one device."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from hapsynth import _jax
from hapsynth.graph.ir import Literal, Value
from hapsynth.graph.trace import Traced
from hapsynth.instructions.testing.example_arguments import random_arguments
from hapsynth.lower import host_array, with_weak_type
from hapsynth.running.allgather import allgather_json
from hapsynth.running.arguments import Arguments
from hapsynth.running.base import Planned
from hapsynth.running.sharded_array import plain, whole
from hapsynth.running.widened import Widening, is_widened

PLAIN, NOISE, WIDENED = "plain", "noise", "widened"
"""Yardsticks, as `CheckReport` defines them."""


class Judged(NamedTuple):
    """The error of one output leaf, and the yardstick by which it is so small."""

    error: float
    yardstick: str


@dataclass(frozen=True)
class CheckReport:
    """How far each output leaf is from the original function's.

    `leaves`: (output path, error). The error of floats is max |a - b| / max |b|, over finite values; of integers,
    bools and keys 0 where all are equal and infinite otherwise; infinite too where one side is NaN or infinite and
    the other is not the same. This is the yardstick `plain`. A leaf beyond its tolerance (`rtol`) has two others:

    `noise`: max |a - b| <= 8 x how far the function's own result moves on one device when its arguments move in their
    last place (`noise`). A leaf that is zero but for rounding (a gradient that cancels) can't agree to any number of
    digits. Its error is then that of a leaf of size 8 x noise / rtol. A leaf of bfloat16 or float16 is held to it only
    where the function can't be widened as a whole or has no number there widened (a parameter's last place may be more
    than a step changes), and where it is not carried and has fewer than 64 elements.

    `widened`: the plan is at most 4 times as far as the function on one device is from the same function with its
    floats kept in 64 bits (`hapsynth.running.widened`), in the largest difference and in the root mean square; on more
    than 5 devices 4 x sqrt(devices / 5) times, since a sum over them is rounded at each. A
    function of bfloat16 or float16 rounds so coarsely that two right programs differ by more than `rtol`; a wrong
    program is further off than rounding. How far the function is: the most at its arguments and at a few that are close
    by, since a single number may be exact by luck. Its error is then `rtol` where the plan is as far as it may be. Of
    integers and bools that depend on floats (an argmax, a count of steps) the share that differs takes the place of the
    root mean square.

    Devices of unlike kinds round unlike: some multiply float32 in TF32, others do not. Of each kind in each process one
    judges, and a leaf's error is that of the device that finds it least; in all processes the same.

    `rtols`: of each leaf. `yardsticks`: (output path, yardstick) of the leaves that are not judged by `plain`. `as_is`:
    primitives that could not be widened; `not_widened` why there is no widened function at all. `not_finite`: the paths
    of the float leaves without a finite number, of which only that can be told; `only_not_finite`: whether all float
    leaves are so, by which the plan is not checked.
    """

    leaves: tuple[tuple[str, float], ...]
    rtols: tuple[float, ...]
    yardsticks: tuple[tuple[str, str], ...] = ()
    as_is: tuple[str, ...] = ()
    not_widened: str = ""
    not_finite: tuple[str, ...] = ()
    only_not_finite: bool = False

    @classmethod
    def of(
        cls,
        traced: Traced,
        judged: Sequence[Judged],
        rtols: Sequence[float],
        not_finite: Collection[int],
        as_is: Iterable[str],
        not_widened: str,
    ) -> CheckReport:
        """Of the verdict on each leaf of a traced function; `not_finite`: as `without_numbers` gives them."""
        paths = traced.out_paths
        floats = {i for i, x in enumerate(_outputs(traced)) if _has_floats(x)}
        return cls(
            tuple((path, j.error) for path, j in zip(paths, judged, strict=True)),
            tuple(rtols),
            tuple((path, j.yardstick) for path, j in zip(paths, judged, strict=True) if j.yardstick != PLAIN),
            tuple(sorted(as_is)),
            not_widened,
            tuple(paths[i] for i in sorted(not_finite)),
            bool(floats) and floats <= set(not_finite),
        )

    @property
    def max_relative_error(self) -> float:
        """The largest error of any leaf; 0 for a function without outputs."""
        return max((e for _, e in self.leaves), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether every output is as near as its `rtols` asks, and there were numbers to tell by."""
        return not self.worst and not self.only_not_finite

    @property
    def worst(self) -> tuple[tuple[str, float], ...]:
        """The leaves beyond their tolerance, the worst first."""
        beyond = [x for x, rtol in zip(self.leaves, self.rtols, strict=True) if not x[1] <= rtol]
        return tuple(sorted(beyond, key=lambda x: -x[1]))

    def __str__(self) -> str:
        rtols = ", ".join(f"{rtol:g}" for rtol in sorted({*self.rtols}, reverse=True))
        head = f"{len(self.leaves)} output leaves, max relative error {self.max_relative_error:.2e}, rtol {rtols or 0}"
        head += "".join(f"; {line}" for line in self.explained)
        if self.ok:
            return f"check passed: {head}"
        named = ", ".join(f"output{path} {error:.2e}" for path, error in self.worst[:5])
        return f"check FAILED: {head}" + (f": {named}{', ...' if len(self.worst) > 5 else ''}" if named else "")

    @property
    def explained(self) -> list[str]:
        """One line each: how many leaves were judged by which other yardstick, or have nothing to be judged by."""
        counts = Counter(name for _, name in self.yardsticks)
        lines: list[str] = []
        if n := counts[NOISE]:
            lines.append(f"{_leaves(n)} judged by the function's own noise")
        if n := counts[WIDENED]:
            narrow = f", with {', '.join(self.as_is)} as they are" if self.as_is else ""
            lines.append(f"{_leaves(n)} judged by the function with its floats widened{narrow}")
        if self.not_widened:
            lines.append(f"the function can't be widened ({self.not_widened})")
        if self.not_finite:
            lines.append(f"{_leaves(len(self.not_finite))} without a finite number")
        if self.only_not_finite:
            lines.append("no float was compared: give arguments at which the function is finite")
        return lines


def without_numbers(got: Sequence[Any]) -> set[int]:
    """Which leaves hold floats and none that is finite: they show the function's NaNs and infinities, and no more."""
    return {i for i, x in enumerate(got) if _has_floats(x) and not np.any(np.isfinite(_wide(x)))}


def _outputs(traced: Traced) -> list[Value | Literal]:
    return [traced.graph.values[x] if isinstance(x, int) else x for x in traced.graph.outputs]


def _has_floats(x: Any) -> bool:
    return _jax.is_inexact(x.dtype) and 0 not in x.shape


def default_rtols(traced: Traced) -> tuple[float, ...]:
    """The tolerance of each output leaf where none is asked for: 1e-9 of 64-bit floats, else 1e-4."""
    dtypes = [x.dtype for x in _outputs(traced)]
    return tuple(1e-9 if _jax.is_inexact(d) and jax.numpy.finfo(d).bits == 64 else 1e-4 for d in dtypes)


def _leaves(count: int) -> str:
    return "1 leaf" if count == 1 else f"{count} leaves"


def check_plan(
    plan: Planned, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], rtol: float | None
) -> CheckReport:
    """`Plan.check`."""
    function, traced, lowered = plan.function, plan.traced, plan.lowered
    rtols = default_rtols(traced) if rtol is None else (rtol,) * len(traced.out_paths)
    if not args and not kwargs:
        args, kwargs = random_arguments(traced)
    leaves = [plain(x) for x in arguments.flatten(args, kwargs)]
    placed = arguments.place_copies(lowered, leaves, 0)
    args, kwargs = jax.tree_util.tree_unflatten(traced.in_tree, placed)
    out = jax.tree_util.tree_leaves(plan(*args, **kwargs))
    got = [whole(out[i]) for i in traced.out_array_leaves]
    # Gathered by all processes: from here on each works by itself.
    arrays = [host_array(leaves[i]) for i in traced.array_leaves]

    def verdict(device: Any) -> _Verdict:
        reference = Reference(function, traced, leaves, device)
        judged = compare(reference, arrays, got, rtols, lowered.mesh.size)
        return _Verdict(judged, reference.as_is, reference.not_widened)

    of_kinds = {d.device_kind: d for d in reversed(lowered.mesh.local_devices)}
    verdicts = _of_all(lowered.mesh, lambda: [verdict(d) for d in of_kinds.values()])
    judged = [
        min((Judged(*j) for j in of_leaf), key=partial(severity, rtol=rtol))
        for *of_leaf, rtol in zip(*(v.judged for v in verdicts), rtols, strict=True)
    ]
    as_is = {name for v in verdicts for name in v.as_is}
    not_widened = next((v.not_widened for v in verdicts if v.not_widened), "")
    return CheckReport.of(traced, judged, rtols, without_numbers(got), as_is, not_widened)


class _Verdict(NamedTuple):
    """The verdict by one device."""

    judged: Sequence[Judged]
    as_is: Sequence[str]
    not_widened: str


def _of_all(mesh: Mesh, work: Callable[[], list[_Verdict]]) -> list[_Verdict]:
    """The verdicts of all processes of the mesh. Where `work` fails in one, which the others wait for, all raise."""
    if not mesh.is_multi_process:
        return work()
    message: dict[str, Any] = {}
    error = None
    try:
        message["verdicts"] = work()
    except Exception as failed:
        error = failed
        at = f"[process {jax.process_index()} on {socket.gethostname()}]"
        message["error"] = f"the function can't be run to check the plan: {type(failed).__name__}: {failed} {at}"
    answers = allgather_json(mesh, message, "checking a plan")
    if error is not None:
        raise error
    for answer in answers:
        if "error" in answer:
            raise RuntimeError(answer["error"])
    return [_Verdict(*verdict) for answer in answers for verdict in answer["verdicts"]]


def severity(judged: Judged, rtol: float) -> tuple[bool, bool, float]:
    """A sort key, larger for worse verdicts: whether it fails, whether it needed another yardstick, the error."""
    return not judged.error <= rtol, judged.yardstick != PLAIN, judged.error


def relative_error(got: Any, want: Any, floor: float = 0.0) -> float:
    """The error of one leaf as `CheckReport` defines it; infinite where shape or dtype differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if _jax.is_extended(want.dtype):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    if not _jax.is_inexact(want.dtype):
        return 0.0 if np.array_equal(got, want) else float("inf")
    a, b = _wide(got), _wide(want)
    if not _is_finite_alike(a, b):
        return float("inf")
    finite = np.isfinite(b)
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

        self._flat, self._compiled = flat, jax.jit(flat)
        self._widening: Widening | None = None
        self._widened: Callable[..., list[Any]] | None = None
        self.not_widened = ""
        """Why `widened` gives nothing, once it has been tried."""

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

    def widened(self, arrays: Sequence[Any]) -> list[Any] | None:
        """The results of the function with its floats widened, of `hosted` arguments; None where that can't be had."""
        if self.not_widened:
            return None
        try:
            if self._widened is None:
                avals = [jax.ShapeDtypeStruct(v.shape, v.dtype, weak_type=v.weak_type) for v in self._values]
                self._widening = Widening(_jax.make_jaxpr(self._flat, *avals)[0])
                self._widened = jax.jit(self._widening)
            with _jax.no_mesh(), jax.default_device(self.device), _jax.wide_floats():
                return [host_array(x) for x in self._widened(*arrays)]
        except Exception as error:
            # A backend without such floats, no memory for them, a primitive that has no lowering for them: it was one
            # way to judge of several, and the report says why it wasn't taken.
            self.not_widened = (str(error).splitlines() or [type(error).__name__])[0]
            return None

    @property
    def as_is(self) -> tuple[str, ...]:
        """The primitives that `widened` ran as they are."""
        return tuple(sorted(self._widening.kept)) if self._widening else ()

    @property
    def epsilon(self) -> float:
        """The coarsest unit in the last place of 1 among the floats that `widened` widens."""
        return self._widening.epsilon if self._widening else 0.0

    @property
    def _values(self) -> list[Value]:
        return [self.traced.graph.values[v] for v in self.traced.graph.inputs]


def compare(
    reference: Reference, arrays: Sequence[Any], got: Sequence[Any], rtols: Sequence[float], devices: int = 1
) -> list[Judged]:
    """The error of each output leaf of a plan on so many devices.

    Leaves beyond their tolerance are judged by the other yardsticks, the cheapest first.
    """
    arrays = reference.hosted(arrays)
    want = reference(arrays)
    judged = [Judged(relative_error(a, b), PLAIN) for a, b in zip(got, want, strict=True)]
    coarse = {i for i, b in enumerate(want) if is_widened(b.dtype) and _epsilon(b) > _COARSE}

    def beyond() -> list[int]:
        return [i for i, (j, rtol) in enumerate(zip(judged, rtols, strict=True)) if not j.error <= rtol and rtol > 0]

    def take(leaf: int, yardstick: str, error: float) -> None:
        if error < judged[leaf].error:
            judged[leaf] = Judged(error, yardstick)

    def by_noise(leaves: Sequence[int], runs: int) -> None:
        moved = noise(reference, arrays, want, runs) if leaves else []
        for i in leaves:
            # A leaf that is nothing but zeros may be a variance of equals, the square of a rounding error elsewhere.
            least = _epsilon(want[i]) ** 2 if _largest(want[i]) == 0 else 0.0
            take(i, NOISE, relative_error(got[i], want[i], _CLEAR * max(moved[i], least) / rtols[i]))

    by_noise([i for i in beyond() if i not in coarse], 4)
    times = _times_as_far(reference, arrays, got, want, beyond(), _AS_FAR * max(1.0, devices / _DEVICES) ** 0.5)
    for i, part in times.items():
        take(i, WIDENED, rtols[i] * part)
    # Primitives that ran as they are round the same in both functions, which measures nothing: no leaf fails by it.
    carried = {target for _, target in reference.traced.graph.carry}
    measured = {i for i in coarse & times.keys() if i in carried or want[i].size >= _FEW}
    settled = set[int]() if reference.as_is else measured
    # For functions that can't be widened: a line search that tips over in one run of eight moves few of a few.
    by_noise([i for i in beyond() if i not in settled], 16)
    return judged


def noise(reference: Reference, arrays: Sequence[Any], want: Sequence[Any], runs: int = 4) -> list[float]:
    """How far each output leaf moves when the arguments move by one unit in their last place.

    Rounding alone may do that to it. The second largest of some runs, so that a comparison that tips over
    in one of them counts for nothing. Whole numbers stay, since code compares and truncates them, and so do arguments
    of fewer digits than the leaf; integers, bools and keys have no noise.
    """
    moved: list[list[float]] = [[] for _ in want]
    digits = [_epsilon(x) for x in want]
    for epsilon in sorted({e for e in digits if e}):
        for seed in range(runs):
            rng = np.random.default_rng(seed)
            again = reference([nudged(rng, x, e if (e := _epsilon(x)) <= epsilon else 0.0) for x in arrays])
            for leaf, (a, b, e) in enumerate(zip(again, want, digits)):
                if e == epsilon:
                    moved[leaf].append(_distance(a, b))
    return [sorted(m)[-2] if m else 0.0 for m in moved]


_CLEAR = 8.0
"""An error of more than this many times the noise is no rounding error."""
_COARSE = 1e-5
"""Floats whose last place is more than this are judged by the widened function: a parameter passes its own nudge on to
the parameter after the step, so that by noise a gradient that is missing would pass."""
_AS_FAR, _DEVICES = 4.0, 5
"""How many times as far as the function a plan may be from the widened function, on up to so many devices. A sum over n
devices is rounded n times, which adds up to sqrt(n) times the rounding of one: simulated in bfloat16 at most 4.5, 5.8,
10.8 and 19.8 times in the largest difference, 2.6, 4.3, 6.8 and 8.2 in the root mean square, for n = 8, 32, 64, 128.
Where partial sums are rounded so and cancel, as of numbers of mean 0, up to 1 in 800 right leaves are beyond (with 8
for 5 devices 1 in 60)."""
_FEW = 64
"""A leaf of fewer elements may hold sums that are all smaller, and rounded less, than what was summed on the way: of
single numbers 1 in 6 right ones are beyond."""
_NEIGHBOURS = 8
"""Arguments close to those given at which the function's rounding is measured as well."""


def _times_as_far(
    reference: Reference,
    arrays: Sequence[Any],
    got: Sequence[Any],
    want: Sequence[Any],
    leaves: Sequence[int],
    most: float,
) -> dict[int, float]:
    """Of these leaves how far the plan is from the widened function, where `most` times as far as the function is 1.

    Without those of which the widened function says nothing.
    At each of the neighbours the function is held against the widened function of the same arguments, so that only its
    rounding counts and not how far they moved: by the coarsest of its floats, since a smaller change would be rounded
    away by the first cast. They are tried only until all leaves pass.
    """
    wide = reference.widened(arrays) if leaves else None
    if wide is None:
        return {}
    plans = {i: _norms(got[i], wide[i]) for i in leaves if _alike(got[i], want[i]) and _holds(want[i], wide[i])}
    times = dict.fromkeys(plans, float("inf"))
    furthest = dict.fromkeys(plans, (0.0, 0.0))
    for seed in range(_NEIGHBOURS + 1):
        if all(part <= 1 for part in times.values()):
            break
        if seed:
            rng = np.random.default_rng(seed)
            near = [nudged(rng, x, max(e, reference.epsilon) if (e := _epsilon(x)) else 0.0) for x in arrays]
            want, wide = reference(near), reference.widened(near)
            if wide is None:
                break
        for i, plan in plans.items():
            if _holds(want[i], wide[i]):
                (largest, mean), (a, b) = furthest[i], _norms(want[i], wide[i])
                furthest[i] = max(largest, a), max(mean, b)
            times[i] = max(map(_ratio, plan, furthest[i])) / most
    return times


def _alike(got: Any, want: Any) -> bool:
    """Whether a leaf is off by amounts: of the same type, and finite and infinite at the same places."""
    if got.shape != want.shape or got.dtype != want.dtype or _jax.is_extended(want.dtype):
        return False
    return _is_finite_alike(_wide(got), _wide(want))


def _is_finite_alike(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether numbers are finite at the same places, and the same elsewhere."""
    finite = np.isfinite(b)
    return np.array_equal(np.isfinite(a), finite) and np.array_equal(a[~finite], b[~finite], equal_nan=True)


def _holds(want: Any, wide: Any) -> bool:
    """Whether the widened function has a number wherever the function has one."""
    return want.shape == wide.shape and bool(np.all(np.isfinite(_wide(wide)) | ~np.isfinite(_wide(want))))


def _norms(x: Any, wide: Any) -> tuple[float, float]:
    """The largest difference, and its root mean square or, for values other than floats, the share that differs."""
    a, b = _wide(x), _wide(wide)
    finite = np.isfinite(a) & np.isfinite(b)
    off = np.abs(a[finite] - b[finite])
    if not off.size:
        return 0.0, 0.0
    largest = float(np.max(off))
    if not _jax.is_inexact(x.dtype):
        return largest, float(np.mean(off > 0))
    return largest, largest and largest * float(np.sqrt(np.mean((off / largest) ** 2)))


def _ratio(plan: float, function: float) -> float:
    if plan == 0:
        return 0.0
    return plan / function if function else float("inf")


def nudged(rng: np.random.Generator, x: Any, by: float) -> Any:
    """`x` with each value that is not whole made larger or smaller, at random, by the fraction `by` of it."""
    if not by:
        return x
    wide = _wide(x)
    factor = 1.0 + by * rng.choice([-1.0, 1.0], wide.shape)
    return np.where(wide == np.round(wide), wide, wide * factor).astype(x.dtype)


def _distance(a: Any, b: Any) -> float:
    """The largest difference over elements that are finite in both."""
    a, b = _wide(a), _wide(b)
    finite = np.isfinite(a) & np.isfinite(b)
    return float(np.max(np.abs(a[finite] - b[finite]), initial=0.0))


def _largest(x: Any) -> float:
    return _distance(x, np.zeros_like(x)) if _epsilon(x) else 0.0


def _epsilon(x: Any) -> float:
    """The unit in the last place of 1, or 0 for a dtype that is not a float."""
    return float(jax.numpy.finfo(x.dtype).eps) if _jax.is_inexact(x.dtype) else 0.0


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(host_array(x))
    return x.astype(np.complex128 if np.issubdtype(x.dtype, np.complexfloating) else np.float64)
