"""The numerical check: strict on what is wrong, lenient only on what the function itself can't hold still."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from slow_devices import SPEEDS, first_devices, slow_cluster

import hapsynth
from hapsynth.graph.trace import trace
from hapsynth.plan import Plan
from hapsynth.running.check import NOISE, Reference, compare, noise, nudged, relative_error

rng = np.random.default_rng(0)
floats = lambda *shape: rng.normal(size=shape).astype(np.float32)


def step(params: Any, x: Any, y: Any) -> Any:
    """The gradients of `shift` and `key_bias` are zero: one is taken away by the norm, the other by the softmax."""

    def loss(p: Any) -> Any:
        h = x @ p["w"] + p["shift"]
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)
        scores = (h @ p["q"]) @ (h @ p["k"] + p["key_bias"]).T
        return jnp.mean((jax.nn.softmax(scores) @ h - y) ** 2)

    return jax.grad(loss)(params)


QK = 0.3 * floats(2, 16, 8)
ARGS = (
    {"w": floats(12, 16), "shift": floats(16), "q": QK[0], "k": QK[1], "key_bias": floats(8)},
    floats(96, 12),
    floats(96, 16),
)
ZERO = ("['key_bias']", "['shift']")


def planned(fn: Any, args: Any) -> Plan:
    return hapsynth.synthesize(
        fn, args, first_devices(4), cluster=slow_cluster(SPEEDS["3:1"]), carry=[], leave_out=False
    )


@pytest.fixture(scope="module")
def planned_step() -> Plan:
    return planned(step, ARGS)


@pytest.fixture
def plan(planned_step: Plan) -> Iterator[Plan]:
    """Planned and compiled once; `fn` is the test's to change."""
    yield planned_step
    planned_step.fn = step


def reference_of(plan: Plan, args: Any) -> tuple[Reference, list[Any]]:
    leaves = jax.tree.leaves(args)
    assert plan.fn is not None
    reference = Reference(plan.fn, plan.traced, leaves, jax.devices()[0])
    return reference, reference.hosted(leaves)


def test_gradients_that_cancel_pass(plan: Plan) -> None:
    """Beside zero no digit of theirs agrees, and yet the plan is right."""
    reference, leaves = reference_of(plan, ARGS)
    want = dict(zip(plan.traced.out_paths, reference(leaves)))
    out = plan.unshard(plan(*ARGS))
    got = {f"['{name}']": x for name, x in out.items()}
    assert all(np.abs(want[path]).max() < 1e-6 for path in ZERO)
    assert max(relative_error(got[path], want[path]) for path in ZERO) > 0.1
    report = plan.check(*ARGS)
    assert report.ok, report
    assert plan.check(*ARGS).leaves == report.leaves


def test_noise_is_small_and_of_every_float(plan: Plan) -> None:
    reference, leaves = reference_of(plan, ARGS)
    want = reference(leaves)
    for path, x, moved in zip(plan.traced.out_paths, want, noise(reference, leaves, want)):
        assert 0 < moved < 1e-5, path
        # Where nothing cancels the noise is too small to count.
        assert path in ZERO or 8 * moved < 1e-4 * np.abs(x).max(), path


@pytest.mark.few(5)
@pytest.mark.parametrize("factor", [1.001, 0.0, -1.0])
@pytest.mark.parametrize("path", ["w", "q", "k"])
def test_a_wrong_gradient_fails(plan: Plan, path: str, factor: float) -> None:
    """The plan against another function stands for a wrong plan against the function."""
    plan.fn = lambda p, x, y: (g := step(p, x, y)) | {path: g[path] * factor}
    report = plan.check(*ARGS)
    assert [name for name, _ in report.worst] == [f"['{path}']"]


@pytest.mark.parametrize("path", ["shift", "key_bias"])
def test_a_gradient_that_does_not_cancel_but_should_fails(plan: Plan, path: str) -> None:
    """A hundred thousandth of what is taken away would be left of it."""
    plan.fn = lambda p, x, y: (g := step(p, x, y)) | {path: g[path] + 1e-5}
    assert [name for name, _ in plan.check(*ARGS).worst] == [f"['{path}']"]


def test_a_small_part_of_a_leaf_is_seen() -> None:
    plan = planned(lambda x: (x * 2, x.sum()), (floats(40, 3),))
    x = floats(40, 3)
    plan.fn = lambda x: ((x * 2).at[7, 1].add(0.01), x.sum())
    assert [path for path, _ in plan.check(x).worst] == ["[0]"]


def test_steps_at_the_arguments_own_values_are_no_noise() -> None:
    """Whole numbers, where code compares and truncates, are not moved."""
    fn = lambda x: (jnp.floor(x).sum(0), (x == 3).astype(jnp.float32), jnp.where(x > 2, 100.0, 0.0))
    x = np.tile(np.arange(6, dtype=np.float32), (20, 1))
    plan = planned(fn, (x,))
    reference, leaves = reference_of(plan, (x,))
    assert noise(reference, leaves, reference(leaves)) == [0.0, 0.0, 0.0]
    assert plan.check(x).max_relative_error == 0


def test_other_values_have_no_noise() -> None:
    fn = lambda i, key, x: (i + 1, jax.random.split(key), i > 2, x.astype(jnp.bfloat16))
    args = np.arange(24), jax.random.key(0), floats(24)
    plan = planned(fn, args)
    reference, leaves = reference_of(plan, args)
    assert noise(reference, leaves, reference(leaves))[:3] == [0.0] * 3
    assert plan.check(*args).ok
    plan.fn = lambda i, key, x: (i.at[3].add(1) + 1, jax.random.split(jax.random.fold_in(key, 1)), i > 3, x)
    assert [path for path, _ in plan.check(*args).worst[:3]] == ["[0]", "[1]", "[2]"]


def test_nan_and_infinity() -> None:
    want = np.array([1.0, np.nan, np.inf])
    assert relative_error(want, want) == 0
    for got in ([1.0, 2.0, np.inf], [1.0, np.nan, -np.inf], [np.inf, np.nan, np.inf], [np.nan] * 3):
        assert relative_error(np.array(got), want, floor=1e9) == np.inf
    assert relative_error(np.zeros(3), np.zeros(3)) == 0
    assert relative_error(np.zeros(2), np.zeros(3)) == np.inf
    assert relative_error(np.zeros(3, np.float32), np.zeros(3)) == np.inf


@pytest.mark.parametrize(("left", "passes"), [(3e-15, True), (1e-6, False)])
def test_a_leaf_of_zeros_may_be_the_square_of_a_rounding_error(left: float, passes: bool) -> None:
    args = (floats(40, 3),)
    plan = planned(lambda x: (x * 2, x[:4, 0] * 0), args)
    reference, leaves = reference_of(plan, args)
    got = [args[0] * 2, np.full(4, left, np.float32)]
    assert all(j.error <= 1e-4 for j in compare(reference, leaves, got, (1e-4, 1e-4))) == passes


RTOL = 1e-4


def alone(fn: Any, *args: Any) -> tuple[Reference, list[Any]]:
    """The function without a plan: what a plan gave is the test's to say."""
    reference = Reference(fn, trace(fn, args), args, jax.devices()[0])
    return reference, reference.hosted(args)


def passes(reference: Reference, args: Any, got: Any) -> bool:
    return all(j.error <= RTOL for j in compare(reference, args, got, [RTOL] * len(got)))


def test_noise_is_not_capped() -> None:
    """What a difference leaves after it cancels, made large: the noise is many times what comes in and goes out."""
    x, w = floats(128, 64), floats(64, 16)
    x = (x / float((x.astype(np.float64) @ w).sum())).astype(np.float32)
    reference, args = alone(lambda x, w: (jnp.sum(x @ w) - 1) * 3e5, x, w)
    want = reference(args)
    moved = noise(reference, args, want)[0]
    assert moved > 1e-4 * max(np.abs(a).max() for a in (*args, *want))
    assert passes(reference, args, [want[0] + np.float32(7 * moved)])
    # A part of the sum that is missing.
    assert not passes(reference, args, [want[0] - np.float32(0.01 * 3e5)])


@pytest.mark.parametrize("wide", [False, True])
def test_a_result_at_a_knife_edge(wide: bool) -> None:
    """Some roundings of the sum tip a comparison over: a plan may end on either side, and nowhere else.

    `wide`: floats of 64 bits, for which there are no wider ones.
    """
    with jax.enable_x64(wide):
        x = np.random.default_rng(3).normal(size=999).astype(np.float64 if wide else np.float32)
        total = lambda x: lax.scan(lambda c, a: (c + a, None), jnp.zeros((), x.dtype), x)[0]
        sums, args = alone(total, x)
        moved = [nudged(np.random.default_rng(n), x, np.finfo(x.dtype).eps) for n in range(16)]
        near = sorted(float(sums([n])[0]) for n in moved)
        # Three of sixteen are beyond it, or a few more that are equal, and the arguments themselves are not.
        edge = max(x.dtype.type(near[-3]), np.nextafter(sums(args)[0], x.dtype.type(np.inf)))
        reference, args = alone(lambda x: jnp.where(total(x) >= edge, x + 0.01, x), x)
        (want,) = reference(args)
        assert sum(np.abs(reference([n])[0] - want).max() > 0.005 for n in moved) in range(2, 9)
        assert passes(reference, args, [want + x.dtype.type(0.01)])
        assert not passes(reference, args, [want + x.dtype.type(0.2)])


def test_one_number_may_be_exact_by_luck() -> None:
    """The function's rounding is measured near its arguments too, and a wrong number is beyond all of that."""
    x = floats(300)
    fn = lambda x: jnp.sum(x.astype(jnp.bfloat16) ** 2).astype(jnp.float32)
    reference, args = alone(fn, x)
    (wide,) = reference.widened(args) or [None]
    lucky = Lucky(fn, trace(fn, [x]), [x], jax.devices()[0])
    lucky.exact = wide
    assert passes(lucky, args, [np.float32(wide * (1 + 2**-9))])
    assert not passes(lucky, args, [np.float32(wide * 1.1)])


@pytest.fixture(scope="module", params=[jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def half_step(request: pytest.FixtureRequest) -> tuple[Reference, list[Any], Any]:
    """A step whose parameters are of 16 bits, and what a plan on four devices makes of it, with `wrong` gradients."""
    dtype = request.param
    draw = np.random.default_rng(0).normal
    p, x = jnp.asarray(draw(size=(16, 8)), dtype), jnp.asarray(draw(size=(256, 16)), dtype)
    rate = 0.3 * float(jnp.finfo(dtype).eps)
    grad = jax.jit(jax.grad(lambda p, x: jnp.sum(jnp.tanh(x @ p))))
    reference, args = alone(lambda p, x: p - rate * grad(p, x), p, x)

    def planned(wrong: Any = lambda parts: parts) -> Any:
        return np.asarray(p - rate * sum(wrong([grad(p, rows) for rows in jnp.split(x, 4)])))

    return reference, args, planned


@pytest.mark.parametrize("wrong", [lambda g: [0 * x for x in g], lambda g: [-x for x in g], lambda g: g[2:]])
def test_a_wrong_gradient_of_coarse_parameters_fails(half_step: Any, wrong: Any) -> None:
    """It changes them by less than eight of their last places, by which arguments are moved to measure noise."""
    reference, args, planned = half_step
    (want,) = reference(args)
    assert np.abs((planned(wrong) - want).astype(np.float64)).max() < 8 * noise(reference, args, [want])[0]
    assert passes(reference, args, [planned()])
    assert not passes(reference, args, [planned(wrong)])


def test_coarse_parameters_are_judged_by_noise_where_nothing_else_can_be_had(
    half_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, args, planned = half_step
    monkeypatch.setattr(reference, "not_widened", "no floats of 64 bits here")
    assert [j.yardstick for j in compare(reference, args, [planned(lambda g: g[2:])], [RTOL])] == [NOISE]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_sum_over_many_devices_is_rounded_at_each(dtype: Any) -> None:
    x = np.random.default_rng(0).normal(size=(256, 400))
    reference, args = alone(lambda x: x.sum(0), jnp.asarray(x, dtype))
    parts = [part.astype(np.float32).sum(0).astype(dtype) for part in np.split(args[0], 64)]
    ok = lambda got, devices: compare(reference, args, [got], [RTOL], devices)[0].error <= RTOL
    assert ok(sum(parts), 64)
    assert not ok(sum(parts), 8)
    assert not ok(sum(parts[1:]), 64)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_single_sum_may_be_smaller_than_its_parts(dtype: Any) -> None:
    """It is then rounded less than they are. A parameter, which is carried, passes its own last place on."""
    x = np.random.default_rng(0).normal(size=(256, 1)).astype(dtype)
    parts = [part.astype(np.float32).sum(0).astype(dtype) for part in np.split(x, 64)]
    reference, args = alone(lambda x: x.sum(0), x)
    assert [j.yardstick for j in compare(reference, args, [sum(parts)], [RTOL], 64)] == [NOISE]
    assert passes(reference, args, [sum(parts)])
    assert not passes(reference, args, [sum(parts[8:])])
    rate = 0.1 * float(jnp.finfo(dtype).eps)
    reference, args = alone(lambda p, x: p - rate * x.sum(0), p := np.full(1, 1.5, dtype), x)
    assert not passes(reference, args, [p + 3 * jnp.finfo(dtype).eps])


class Lucky(Reference):
    """Exact at the first arguments that it is given."""

    exact: Any = None

    def __call__(self, arrays: Any) -> list[Any]:
        if self.exact is not None:
            exact, self.exact = self.exact, None
            return [np.float32(exact)]
        return super().__call__(arrays)


def test_whole_numbers_that_floats_decide() -> None:
    """The argmax of logits in bfloat16 is another where two are a rounding apart."""
    logits = lambda x: x.astype(jnp.bfloat16) @ W.astype(jnp.bfloat16)
    x, W = floats(400, 16), floats(16, 32)
    reference, args = alone(lambda x: jnp.argmax(logits(x), -1), x)
    (want,), (wide,) = reference(args), reference.widened(args) or [None]
    assert 0 < np.mean(want != wide) < 0.1
    assert passes(reference, args, [np.asarray(wide)])
    assert not passes(reference, args, [np.roll(want, 1)])


def test_without_a_widened_function_the_report_says_so(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise NotImplementedError("no floats of 64 bits here")

    monkeypatch.setattr("hapsynth._jax.wide_floats", refuse)
    plan.fn = lambda p, x, y: (g := step(p, x, y)) | {"w": g["w"] * 1.01}
    report = plan.check(*ARGS)
    assert [name for name, _ in report.worst] == ["['w']"]
    assert "the function can't be widened (no floats of 64 bits here)" in str(report)


def test_what_is_nan_alone_is_not_checked() -> None:
    """NaN on both sides shows nothing of a plan; beside numbers it is counted."""
    x = floats(40, 3)
    plan = planned(lambda x: (jnp.log(x).sum(), x.sum(0), jnp.argmax(x)), (x,))
    report = plan.check(x)
    assert report.ok
    assert report.not_finite == ("[0]",)
    assert "1 leaf without a finite number" in str(report)
    report = plan.check(np.full_like(x, np.nan))
    assert not report.ok
    assert not report.worst
    assert str(report).startswith("check FAILED: 3 output leaves")
    assert "no float was compared: give arguments at which the function is finite" in str(report)


def test_floats_of_64_bits_are_held_to_more_digits() -> None:
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(40, 3))
        fn = lambda x: (jnp.sin(x), jnp.sin(x.astype(jnp.float32)))
        plan = planned(fn, (x,))
        assert plan.check(x).ok
        plan.fn = lambda x: tuple(y * (1 + 1e-7) for y in fn(x))
        report = plan.check(x)
        assert [path for path, _ in report.worst] == ["[0]"]
        assert "rtol 0.0001, 1e-09" in str(report)
        assert plan.check(x, rtol=1e-4).ok


def test_a_tolerance_of_no_use_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(jnp.sin, (floats(8),))
    assert plan.check(np.zeros(8, np.float32), rtol=0).ok
    monkeypatch.setattr(plan, "fn", None)
    for rtol, error in (
        (-1e-3, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (False, TypeError),
        ("1e-3", TypeError),
        (True, TypeError),
    ):
        with pytest.raises(error, match=r"rtol is .*; give a .*number"):
            plan.check(rtol=rtol)
