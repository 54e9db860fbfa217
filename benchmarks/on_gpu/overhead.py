"""A plan for one device beside plain `jax.jit`: step time, memory, and errors against float64 on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from harness.timing import Stepper, burst, interleaved

from on_gpu.settings import Example, Row, Settings, fitting, skipped

VARIANTS = {"times": "", "allocated by plan": "", "allocated by jit": ""}
_BURST = 4
"""Steps that are started before the first is waited for, as in a training loop."""


def rows(settings: Settings, variant: str) -> Iterator[Row]:
    if variant != "times":
        # The allocator remembers its highest peak, so a process runs one example.
        largest = "transformer" if "transformer" in settings.examples else settings.examples[0]
        yield from fitting(settings.example(largest), lambda example: allocated(example, variant.rpartition(" ")[2]))
        return
    for sizes in dict.fromkeys((settings.sizes, "own" if not settings.is_tiny else settings.sizes)):
        for name in settings.examples:
            yield from fitting(settings.example(name, sizes), partial(times, settings, sizes))


def peak(compiled: Any) -> int | None:
    """Bytes that XLA allocates for a call: arguments, results that take no argument's place, temporaries."""
    a = compiled.memory_analysis()
    if a is None:
        return None
    made = a.output_size_in_bytes - a.alias_size_in_bytes
    return int(a.argument_size_in_bytes + made + a.temp_size_in_bytes)


def compiled(lowered: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    done = lowered.compile()
    return done, time.perf_counter() - began


def times(settings: Settings, sizes: str, example: Example) -> Iterator[Row]:
    device = jax.devices()[0]
    plan, plain = example.planned(device), example.jitted()
    of_plan, plan_s = compiled(plan.lower())
    of_jit, jit_s = compiled(plain.lower(*example.target()[1]))
    bytes_of = {"plan": peak(of_plan), "jit": peak(of_jit)}
    del of_plan, of_jit
    state, batch = example.arguments(device)
    steppers = {"plan": Stepper(plan, *plan.shard(state, batch)), "jit": Stepper(plain, state, batch)}
    del state, batch
    single = interleaved(steppers, settings.rounds)
    queued = interleaved(
        {name: burst(step, _BURST) for name, step in steppers.items()}, max(2, settings.rounds // _BURST)
    )
    yield {
        **example.told(),
        "sizes": sizes,
        "plan_compile_s": plan_s,
        "jit_compile_s": jit_s,
        **compared("step", single),
        **compared("queued", {name: [t / _BURST for t in ts] for name, ts in queued.items()}),
        "plan_bytes": bytes_of["plan"],
        "jit_bytes": bytes_of["jit"],
        "bytes_ratio": bytes_of["plan"] / bytes_of["jit"] if bytes_of["plan"] and bytes_of["jit"] else None,
        "losses": {name: float(step()[1]) for name, step in steppers.items()},
        # Float64 on the host would take minutes at the sizes of a card.
        **({} if sizes == "card" else errors(example, device, plan, plain)),
    }


def compared(what: str, found: dict[str, list[float]]) -> Row:
    """Medians of plan and jit, and the median and quartiles of the ratio round by round."""
    ratios = [a / b for a, b in zip(found["plan"], found["jit"], strict=True)]
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    medians = {f"{name}_{what}_s": statistics.median(ts) for name, ts in found.items()}
    return {**medians, f"{what}_ratio": middle, f"{what}_ratio_quartiles": [low, high]}


def allocated(example: Example, form: str) -> Iterator[Row]:
    """The peak of the device's allocator after two steps of a plan or of `jax.jit`."""
    device = jax.devices()[0]
    told = {**example.told(), "of": form}
    if not device.memory_stats():
        yield skipped(f"the {device.platform} backend does not tell what was allocated", **told)
        return
    plan = example.planned(device)
    state, batch = example.arguments(device)
    before = int(device.memory_stats()["peak_bytes_in_use"])
    step = Stepper(plan, *plan.shard(state, batch)) if form == "plan" else Stepper(example.jitted(), state, batch)
    del state, batch
    for _ in range(2):
        jax.block_until_ready(step())
    after = device.memory_stats()
    yield {
        **told,
        "peak_bytes": int(after["peak_bytes_in_use"]),
        "peak_bytes_before": before,
        "limit_bytes": int(after["bytes_limit"]),
        "predicted_bytes": max(plan.memory),
    }


def in_float64(example: Example, device: Any) -> list[np.ndarray]:
    """The results of one step, all in float64, on the host."""
    fn, _ = example.target()
    wide = lambda x: np.asarray(x, np.float64) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) else np.asarray(x)
    args = jax.tree.map(wide, example.arguments(device))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*args))]


def off(got: Any, want: list[np.ndarray]) -> list[float]:
    """|a - b| / |b| of each leaf, by norms: where a gradient is only rounding error, Adam may step either way."""
    found: list[float] = []
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        scale = float(np.linalg.norm(b.astype(np.float64))) or 1.0
        found.append(float(np.linalg.norm(np.asarray(a, np.float64) - b)) / scale)
    return found


def errors(example: Example, device: Any, plan: Any, plain: Any) -> Row:
    """Errors of one step against float64, of the plan and of `jax.jit`: the largest of all results, and the loss's; and
    the largest ratio of the plan's error to that of `jax.jit`."""
    want = in_float64(example, device)
    of_plan, of_jit = (off(call(*example.arguments(device)), want) for call in (plan, plain))
    return {
        "plan_error": max(of_plan),
        "jit_error": max(of_jit),
        "plan_loss_error": of_plan[-1],
        "jit_loss_error": of_jit[-1],
        "plan_over_jit": max(a / b if b else float(a > 0) for a, b in zip(of_plan, of_jit, strict=True)),
    }
