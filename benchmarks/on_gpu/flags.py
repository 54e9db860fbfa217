"""XLA flags that a job of unlike GPUs may need, or that its processes may set differently, each in its own process.

The rows of a flag say whether XLA accepts it, the compile time and step time of an example (the last one asked for, at
the sizes of its file), and the collectives that XLA leaves in the example's data parallel step for two such GPUs, which
are only described to the compiler. Two processes whose lists differ would wait for each other for ever, so preflight
has to refuse them.
"""

from __future__ import annotations

import hashlib
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from harness.timing import Stepper, interleaved
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hapsynth.hlo.collectives import collectives_of, fingerprint
from on_gpu.settings import Example, Row, Settings, is_gpu, skipped

DEFAULT = "none"
_COMBINED = ("all_reduce", "all_gather", "reduce_scatter")


def _combining(most: int) -> str:
    return " ".join(f"--xla_gpu_{step}_combine_threshold_bytes={most}" for step in _COMBINED)


VARIANTS = {
    DEFAULT: "",
    "shards autotuning": "--xla_gpu_shard_autotuning=true",
    "shards no autotuning": "--xla_gpu_shard_autotuning=false",
    "no autotuning": "--xla_gpu_autotune_level=0",
    "combines nothing": _combining(0),
    "combines all": _combining(1 << 32),
    "hides latency": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "hides no latency": "--xla_gpu_enable_latency_hiding_scheduler=false",
    "deterministic": "--xla_gpu_deterministic_ops=true",
}


def rows(settings: Settings, variant: str) -> Iterator[Row]:
    flags = VARIANTS[variant]
    if flags and not is_gpu():
        yield skipped("the flags are of XLA's GPU backend", flags=flags)
        return
    example = settings.example(settings.examples[-1], "own" if settings.sizes == "card" else "")
    yield {"what": "run", "flags": flags, **ran(settings, example)}
    # One host with two GPUs; two hosts too for the flag by which processes share out autotuning.
    for topology in ("1x1x2", *(("1x2x1",) if "shards" in variant else ())):
        of = {"what": "described", "flags": flags, "topology": topology}
        if not is_gpu():
            yield skipped("the compiler takes descriptions of GPUs only where one is", **of)
            continue
        try:
            described = topologies.get_topology_desc("described", "cuda", topology=topology)
            yield {**of, **collectives(example, described.devices)}
        except (RuntimeError, ValueError, NotImplementedError) as error:
            yield skipped(f"{type(error).__name__}: {str(error)[:300]}", **of)


def ran(settings: Settings, example: Example) -> Row:
    """Compile and step time of a plan for one device, without the compilation cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    device = jax.devices()[0]
    plan = example.planned(device)
    began = time.perf_counter()
    compiled = plan.lower().compile()
    seconds = time.perf_counter() - began
    text = compiled.as_text() or ""
    stepper = Stepper(plan, *plan.shard(*example.arguments(device)))
    (times,) = interleaved({"step": stepper}, settings.rounds).values()
    return {
        **example.told(),
        "compile_s": seconds,
        "step_s": statistics.median(times),
        "hlo": digest(text),
        "command_buffers": len(re.findall(r"^\s*%?command_buffer", text, re.MULTILINE)),
    }


def collectives(example: Example, devices: list[Any]) -> Row:
    """The collectives that XLA leaves in the data parallel step for `devices`: the number of each kind, and a digest of
    what two ends must agree on."""
    fn, (state, batch) = example.target()
    mesh = Mesh(np.array(devices), ("data",))
    everywhere, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(fn, in_shardings=(everywhere, cut), out_shardings=everywhere)
    began = time.perf_counter()
    found = collectives_of(step.lower(state, batch).compile().as_text() or "")
    return {
        "compile_s": time.perf_counter() - began,
        "collectives": dict(Counter(one.op for one in found)),
        "collectives_digest": fingerprint(found),
    }


def digest(text: str) -> str:
    """A digest of HLO text without its metadata, which names source lines."""
    return hashlib.sha256(re.sub(r", metadata={[^}]*}", "", text).encode()).hexdigest()[:16]
