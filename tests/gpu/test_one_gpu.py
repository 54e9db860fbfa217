"""Plans on a real GPU, beside plain `jax.jit` there and float64 on the host.

    HAPSYNTH_GPU=1 python -m pytest tests/gpu

Skipped without that, and where JAX finds no GPU. What is smaller in one test and larger in another (bfloat16, TF32) is
judged by what `jax.jit` loses of the same function on the same device.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_gpu.one_device import OneStaged, OneSwitch, Steps, one_of, with_shares
from on_gpu.overhead import in_float64, off, peak
from on_gpu.settings import DTYPES, Example, Settings
from on_gpu.shares import for_two

from hapsynth import _device_memory
from hapsynth.plan import Form
from hapsynth.profile.job import Job
from hapsynth.profile.run import Options, profile

pytestmark = [pytest.mark.gpu, pytest.mark.optimized]

ASKED = os.environ.get("HAPSYNTH_GPU", "")


@pytest.fixture(scope="module")
def device() -> Any:
    if not ASKED:
        pytest.skip("tests of a real GPU: ask for them with HAPSYNTH_GPU=1")
    first = jax.devices()[0]
    if first.platform != "gpu" and ASKED != "cpu":
        pytest.skip(f"JAX finds no GPU here, its first device is {first.device_kind}")
    return first


def example(name: str, dtype: str = "float32") -> Example:
    """As its file has it; tiny where the tests themselves are tried."""
    return replace(Settings("tiny" if ASKED == "cpu" else "own").example(name), dtype=dtype)


def further_off(plan: list[float], jit: list[float], floor: float) -> list[tuple[int, float, float]]:
    """The results that the plan has further from float64 than twice what `jax.jit` loses, beyond `floor`."""
    return [(i, a, b) for i, (a, b) in enumerate(zip(plan, jit, strict=True)) if a > 2 * b + floor]


@pytest.mark.parametrize("form", ["switch", "staged"])
@pytest.mark.parametrize("name", DTYPES)
def test_float32_is_as_near_to_float64_as_jit(device: Any, name: str, form: Form) -> None:
    with jax.default_matmul_precision("highest"):
        one = example(name)
        want = in_float64(one, device)
        plan = off(one.planned(device, form)(*one.arguments(device)), want)
        jit = off(one.jitted()(*one.arguments(device)), want)
    assert further_off(plan, jit, 1e-5) == []
    assert plan[-1] < 1e-5, "the loss"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", DTYPES)
def test_default_precision_loses_what_jit_loses(device: Any, name: str, dtype: str) -> None:
    """TF32 where float32 is multiplied, and bfloat16 throughout."""
    one = example(name, dtype)
    want = in_float64(one, device)
    made = one.planned(device)(*one.arguments(device))
    jit = one.jitted()(*one.arguments(device))
    assert [x.dtype for x in jax.tree.leaves(made)] == [x.dtype for x in jax.tree.leaves(jit)]
    assert further_off(off(made, want), off(jit, want), 2 * float(jnp.finfo(dtype).eps)) == []


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_a_call_consumes_the_state_and_reuses_its_memory(device: Any, form: Form) -> None:
    one = example("mlp")
    plan = one.planned(device, form)
    state, batch = plan.shard(*one.arguments(device))
    held = jax.tree.leaves(state)
    before = [x.unsafe_buffer_pointer() for x in held]
    new, _ = plan(state, batch)
    assert all(x.is_deleted() for x in held)
    assert not any(x.is_deleted() for x in jax.tree.leaves(batch))
    jax.block_until_ready(new)
    kept = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(new)} & set(before)
    assert len(kept) == len(before)


@pytest.mark.parametrize("name", DTYPES)
def test_a_plan_allocates_what_jit_allocates(device: Any, name: str) -> None:
    one = example(name, DTYPES[name])
    plan = peak(one.planned(device).lower().compile())
    jit = peak(one.jitted().lower(*one.target()[1]).compile())
    assert plan is not None
    assert jit is not None
    assert plan <= 1.05 * jit


@pytest.mark.parametrize("form", [OneStaged, OneSwitch])
@pytest.mark.parametrize("name", DTYPES)
def test_a_device_that_holds_everything_computes_the_step(device: Any, name: str, form: Any) -> None:
    """Then what others would send is not needed, and a share's program can be compared with the function."""
    with jax.default_matmul_precision("highest"):
        # Stages are many; tiny ones compile sooner.
        one = replace(Settings("tiny").example(name), dtype="float32")
        plan = for_two(Settings("tiny"), one)
        assert plan.sizes.shares, "nothing is cut"
        made = Steps(one_of(form, plan, with_shares(plan, (1, 0)), device), jax.tree.leaves(one.arguments(device)))()
        want = [np.asarray(x, np.float64) for x in jax.tree.leaves(one.jitted()(*one.arguments(device)))]
    assert max(off(made, want)) < 1e-3
    assert off(made, want)[-1] < 1e-5


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_smaller_share_takes_less_memory(device: Any, name: str) -> None:
    one = example(name, DTYPES[name])
    plan = for_two(Settings("tiny"), one)
    held: list[int] = []
    for share in (1 / 8, 1 / 2):
        staged = one_of(OneStaged, plan, with_shares(plan, (share, 1 - share)), device)
        steps = Steps(staged, jax.tree.leaves(one.arguments(device)))
        for _ in range(2):
            made = jax.block_until_ready(steps())
        assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in made)
        held.append(staged.temporary_bytes() + sum(x.nbytes for x in steps.held))
    assert held[0] < 0.75 * held[1]


def test_memory_is_told_as_the_allocator_has_it(device: Any) -> None:
    if not device.memory_stats():
        pytest.skip("the CPU backend tells no allocator's figures")
    most, free = device.memory_stats()["bytes_limit"], _device_memory.free(device)
    assert 0 < free <= most
    x = jax.block_until_ready(jax.device_put(np.zeros(1 << 26, np.float32), device))
    assert free - _device_memory.free(device) == pytest.approx(x.nbytes, rel=0.01)


def test_a_quick_profile(device: Any) -> None:
    options = Options(dtypes=("float32",), quick=True, limit_s=0.05, window_s=0.01, longest_s=0.05)
    kind = profile(Job(1), options, None, force=True).devices[0]
    assert kind.name == device.device_kind
    assert kind.flops["float32"] > 1e9
    assert kind.bandwidth > 1e9
    assert kind.memory == pytest.approx(_device_memory.free(device), rel=0.2)
