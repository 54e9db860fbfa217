"""Random whole functions on random clusters: planned by the search, lowered, compared with plain JAX.

Run more seeds than the suite does with `HAPSYNTH_FUZZ=100:400 pytest tests/test_fuzz.py`, and many more, nearly all
with a plan that is uneven, with `python tests/fuzz.py`, of which there are a few here.
"""

from __future__ import annotations

import os
import random
from typing import Any

import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowered_programs import MODES, run
from random_functions import RandomFunction, pick
from random_programs import RandomProgram
from slow_devices import SPEEDS, first_devices, thin_cluster
from thoroughness import THOROUGH

import hapsynth
from hapsynth.instructions.factors import Factors
from hapsynth.instructions.program.checker import check
from hapsynth.lower import Lowered
from hapsynth.plan import Plan
from hapsynth.running.check import Reference, compare


def plan_of(seed: int) -> tuple[RandomFunction, tuple[Any, Any], Plan]:
    fn = RandomFunction(seed)
    rng = np.random.default_rng([seed, 3])
    speeds = pick(rng, list(SPEEDS.values()))
    cluster = thin_cluster(speeds, bandwidth=float(10.0 ** rng.uniform(8, 13)))
    args = fn.params, fn.data
    return fn, args, hapsynth.synthesize(fn, args, first_devices(len(speeds)), cluster=cluster, leave_out=False)


def with_other_shares(plan: Plan, seed: int) -> Lowered:
    """The plan's program at sizes that no search would choose."""
    graph, n = plan.traced.graph, plan.cluster.n
    maker = RandomProgram(graph, n, random.Random(seed))
    sizes = maker.sizes(plan.program, MODES[seed % len(MODES)])
    check(graph, plan.program, sizes)
    assert plan.mesh is not None
    return Lowered(graph, plan.program, sizes, plan.mesh)


FIRST, LAST = map(int, os.environ.get("HAPSYNTH_FUZZ", "0:25" if THOROUGH else "0:10").split(":"))


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_random_function_on_a_random_cluster(seed: int) -> None:
    fn, args, plan = plan_of(seed)
    got = run(plan.lowered if seed % 3 else with_other_shares(plan, seed // 3), args)
    leaves = jax.tree.leaves(args)
    reference = Reference(fn, plan.traced, leaves, jax.devices()[0])
    # Loops of drawn bodies amplify rounding: what differs by 1e-4 in float32 agrees to 1e-12 in float64.
    errors = [judged.error for judged in compare(reference, leaves, got, [1e-3] * len(got))]
    assert max(errors) <= 1e-3, dict(zip(plan.traced.out_paths, errors))


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(8))
def test_a_plan_that_is_uneven(seed: int) -> None:
    outcome = fuzz.tried(seed, nonfinite=0.5)
    assert outcome.verdict in (fuzz.SAME, fuzz.AS_OPS), outcome
    assert outcome.uneven


def any_sum_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial sum passes a product or quotient by anything, finite or not."""
    monkeypatch.setattr(Factors, "multiplies", lambda self, *groups: setattr(self, "linear", groups))
    monkeypatch.setattr("hapsynth.instructions.rules.elementwise.is_known", lambda *given: True)


def nan_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As XLA's collectives do with max and min."""
    monkeypatch.setattr("hapsynth.lower._gloo.to_ordered", lambda x, reduction: x)
    monkeypatch.setattr("hapsynth.lower._gloo.from_ordered", lambda keys, dtype: keys)


FAULTS = {
    "a sum in a planned program": (any_sum_passes, 48),
    "a sum in a staged program": (any_sum_passes, 49),
    "a sum in a random program": (any_sum_passes, 13),
    "a largest": (nan_is_dropped, 34),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_campaign_finds_a_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it, seed = FAULTS[name]
    break_it(monkeypatch)
    assert fuzz.tried(seed).verdict == fuzz.MISMATCH


def test_the_summary_of_a_campaign() -> None:
    outcomes = [
        fuzz.Outcome(0, (3,), "switch", True, uneven=True, empty=True, partial=("add", "mul"), verdict=fuzz.SAME),
        fuzz.Outcome(1, (3,), "random", False, uneven=True, partial=("add",), verdict=fuzz.MISMATCH),
    ]
    assert fuzz.summary(outcomes) == (
        "2 programs: uneven 100.0 %; with empty shares 50.0 %; with arguments that are not finite 50.0 %; "
        "in which a partial result is multiplied 50.0 %; mismatches 1\n"
        "programs in which an op takes on a partial result: add 2, mul 1"
    )


def square(x: Any) -> Any:
    return x * x, (x > 0).sum(), jnp.where(x > 3, jnp.inf, x).max()


WRONG = {
    "a value": (0, lambda x: (square(x)[0] * 1.01, *square(x)[1:])),
    "a NaN": (0, lambda x: (jnp.where(jnp.arange(24) == 7, jnp.nan, x * x), *square(x)[1:])),
    "an integer": (1, lambda x: (x * x, (x > 0).sum() + 1, square(x)[2])),
    "an infinity": (2, lambda x: (x * x, (x > 0).sum(), -square(x)[2])),
}


def verdict_on(plan: Plan, fn: Any, args: Any) -> tuple[str, str]:
    return fuzz.compared(plan.traced, fn, args, jax.tree.leaves(plan.unshard(plan(*args))))


@pytest.mark.parametrize("name", WRONG)
def test_the_driver_finds_what_differs(name: str) -> None:
    output, wrong = WRONG[name]
    args = (np.linspace(-4, 4, 24, dtype=np.float32),)
    plan = hapsynth.synthesize(square, args, first_devices(4), cluster=thin_cluster(SPEEDS["3:1"]), leave_out=False)
    assert verdict_on(plan, square, args) == (fuzz.SAME, "")
    verdict, note = verdict_on(plan, wrong, args)
    assert verdict == fuzz.MISMATCH
    assert note.startswith(f"output[{output}]")


@pytest.mark.parametrize("name", WRONG)
def test_a_result_as_op_by_op_is_told_from_an_error(name: str) -> None:
    """A function that `jit` makes into another, as XLA does where it reckons without NaN."""
    output, wrong = WRONG[name]
    args = (np.linspace(-4, 4, 24, dtype=np.float32),)
    plan = hapsynth.synthesize(square, args, first_devices(4), cluster=thin_cluster(SPEEDS["3:1"]), leave_out=False)
    by_jit = lambda jitted, stepped: lambda x: (jitted if isinstance(x, jax.core.Tracer) else stepped)(x)
    assert verdict_on(plan, by_jit(wrong, square), args) == (fuzz.AS_OPS, f"[{output}]")
    assert verdict_on(plan, by_jit(square, wrong), args) == (fuzz.SAME, "")


def test_a_knife_edge_is_told_from_an_error() -> None:
    x = np.linspace(0.1, 2.4, 24, dtype=np.float32)
    above = lambda x: ((x > x[0] * 11).sum(), x.sum())
    plan = hapsynth.synthesize(above, (x,), first_devices(4), cluster=thin_cluster(SPEEDS["3:1"]), leave_out=False)
    assert verdict_on(plan, lambda x: ((x >= x[0] * 11).sum(), x.sum()), (x,)) == (fuzz.EDGE, "[0]")
    assert verdict_on(plan, lambda x: ((x >= x[0] * 11).sum(), -x.sum()), (x,))[0] == fuzz.MISMATCH


def test_the_sign_of_a_zero_is_told_from_an_error() -> None:
    """XLA's all-reduce begins from 0.0, so -0.0 on all devices becomes 0.0 (docs/nonfinite.md)."""
    x = np.append(np.linspace(-4, 4, 23), -0.0).astype(np.float32)
    inverse = lambda x: 1 / jnp.where(x == 0, 0.0, x)
    plan = hapsynth.synthesize(inverse, (x,), first_devices(4), cluster=thin_cluster(SPEEDS["3:1"]), leave_out=False)
    assert verdict_on(plan, inverse, (x,)) == (fuzz.SAME, "")
    assert verdict_on(plan, lambda x: 1 / x, (x,)) == (fuzz.EDGE, "")
    assert verdict_on(plan, lambda x: -1 / x, (x,))[0] == fuzz.MISMATCH
