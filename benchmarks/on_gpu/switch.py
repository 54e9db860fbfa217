"""The overhead of a stage: as a switch over 2, 4 and 8 branches, and as a function of its own.

A chain of stages with a reduction between them, for eight devices, runs as the first of them, which holds the largest
shard and so pads nothing. With even shares hapsynth makes no switch: the same work for this device, in one program.
The overhead is the difference in time to that program over the number of stages.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from harness.timing import interleaved

import hapsynth
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.lower._host_schedule import LocalStage
from on_gpu.one_device import OneStaged, OneSwitch, Steps, one_of
from on_gpu.settings import Row, Settings, is_gpu, like_cluster, skipped, slow_kind

DEFAULT = "as JAX sets it"
VARIANTS = {
    DEFAULT: "",
    "no command buffers": "--xla_gpu_enable_command_buffer=",
    "conditionals in command buffers": "--xla_gpu_enable_command_buffer=+CONDITIONAL --xla_gpu_graph_min_graph_size=1",
}
DEVICES = 8
SWITCHED = LoweringOptions(small_stage_elements=0, small_op_elements=0, gathered_bytes=0)
"""Small stages and collectives would be padded: chains are small so that switches are what takes time."""
_STEPS = (0.01, 0.1, 1.0)
"""Seconds of a step, of which a hundredth may go to switches."""


@dataclass(frozen=True)
class Chain:
    """`stages` of x -> y + the sum of y over the rows, y = op(x, w); the first device has `rows` x `width`."""

    op: str
    rows: int
    width: int
    stages: int

    def fn(self, x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(self.stages):
            # Needs whole rows, so that the rows stay the sharded dimension.
            y = jnp.tanh(x @ w if self.op == "matmul" else x * w - x.mean(axis=1, keepdims=True))
            x = y + y.sum(axis=0) * (1e-3 / self.rows)
        return x

    def shares(self, branches: int) -> list[int]:
        """Rows of each of the eight devices: `branches` different numbers."""
        return [self.rows - (i * branches // DEVICES) * max(self.rows // 16, 1) for i in range(DEVICES)]

    def plan(self, shares: Sequence[int]) -> hapsynth.Plan:
        f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        w = f32(self.width, self.width) if self.op == "matmul" else f32(self.width)
        cluster = like_cluster(slow_kind(), DEVICES)
        args = (f32(sum(shares), self.width), w)
        ratios = {"[0].0": [n / sum(shares) for n in shares]}
        return hapsynth.synthesize(self.fn, args, cluster, fixed={"[0]": "S(0)"}, ratios=ratios, lowering=SWITCHED)


def chains(settings: Settings) -> list[tuple[Chain, tuple[int, ...]]]:
    """The chains, each with the numbers of branches to try."""
    if settings.is_tiny:
        return [(Chain("elementwise", 32, 8, 2), (2,)), (Chain("matmul", 32, 8, 1), (8,))]
    small = [(Chain("elementwise", 512, 256, stages), (2, 4, 8)) for stages in (4, 32)]
    return [*small, (Chain("matmul", 8192, 1024, 8), (2, 8))]


def rows(settings: Settings, variant: str) -> Iterator[Row]:
    if variant != DEFAULT and not is_gpu():
        yield skipped("command buffers are of XLA's GPU backend")
        return
    for chain, branches in chains(settings):
        yield from prices(settings, chain, branches, staged=variant == DEFAULT)


def prices(settings: Settings, chain: Chain, branches: Sequence[int], *, staged: bool) -> Iterator[Row]:
    device = jax.devices()[0]
    steps: dict[str, Callable[[], Any]] = {}
    stages: dict[str, int] = {}

    def add(name: str, count: int) -> None:
        shares = chain.shares(count)
        plan = chain.plan(shares)
        one = one_of(OneStaged if name == "staged" else OneSwitch, plan, plan.sizes, device)
        shape = (sum(shares), chain.width)
        w = (chain.width,) * (2 if chain.op == "matmul" else 1)
        steps[name] = Steps(one, [jnp.full(shape, 0.5), jnp.full(w, 1 / chain.width)])
        stages[name] = one.count(LocalStage) if isinstance(one, OneStaged) else one.count()

    add("none", 1)
    for count in branches:
        add(f"switch {count}", count)
    if staged:
        add("staged", 2)
    medians = {name: statistics.median(ts) for name, ts in interleaved(steps, 3 * settings.rounds).items()}
    of = {"op": chain.op, "rows": chain.rows, "width": chain.width, "chain": chain.stages}
    yield {"what": "none", **of, "stages": stages["none"], "step_s": medians["none"]}
    for name in list(steps)[1:]:
        form, _, count = name.partition(" ")
        each = (medians[name] - medians["none"]) / stages[name]
        matters = {f"{s:g}": 0.01 * s / each if each > 0 else None for s in _STEPS}
        yield {
            "what": form,
            **of,
            "branches": int(count or 1),
            "stages": stages[name],
            "step_s": medians[name],
            "each_us": each * 1e6,
            "stages_for_a_hundredth": matters,
        }
