"""What keeps the collectives of a program for GPUs in the plan's order, whatever card it is compiled for.

XLA's GPU compiler orders, combines and lays out collectives by what it takes the card to be: the same program has other
collectives on a V100 than on an H100, and unlike cards would wait for each other forever. What it leaves alone:

- What is sent is flat. Of several dimensions each card may choose another memory layout.
- A barrier stands on both sides of every collective, and what is sent waits for what the collective before it gave
  (`Chain`). So none is combined, moved or replaced. A barrier around an element of the result alone is pruned. Where
  XLA drops barriers before it schedules (`_jax.gpus_schedule_around_barriers`), what is sent is made of a number
  besides that the result before it gives, always zero, which XLA does not know: a scanned GPT had two pairs of
  collectives the other way round on an A100 than on an H100.
- Options (`OPTIONS`): collectives run beside what does not need them on all cards; small sums are taken by NCCL
  everywhere, not by a kernel of XLA's own where the card is new; processes do not share out autotuning (`UNSHARED`).

Found by compiling for P4, V100, A100 and H100 with JAX 0.10.2 and 0.12; `hapsynth compile` tells whether it holds.

The order leaves open what stands between a transfer's start and its end, and what XLA takes both to last is far off. So
it is told what the plan goes by (`compile_with`): of the wire bytes of a wide transformer 72 % are hidden then, not 50.
The collectives stay what they were.

Where the programs themselves differ between processes (fused form), XLA knows other things of each: that a result is
of no use to whom it leaves no rows, that what is sent is a constant, or the same in all trips of a loop. So there the
program returns what the last collective leaves to wait for, which is made of all results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hapsynth._jax import gpus_schedule_around_barriers, is_extended, is_gpu
from hapsynth._xla_flags import UNSHARED
from hapsynth.hlo.text import HloError
from hapsynth.lower._collective_order import Each, Order, as_it_is

OPTIONS: Mapping[str, bool] = MappingProxyType(
    {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_unsupported_use_all_reduce_one_shot_kernel": False,
        **UNSHARED,
    }
)
"""Of XLA, for programs with collectives on GPUs."""


Latencies = Callable[[str], bytes]
"""Of a compiled program's text how long XLA's scheduler is to take its kernels and collectives to last
(`hlo.latency_profile`)."""


def compile_with(lowered: Any, latencies: Latencies | None, options: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A program (`jitted.lower(...)`) as XLA compiles it with further options, scheduled by `latencies`. It is compiled
    twice then: what has a latency has no name before."""
    made = lowered.compile(compiler_options=dict(options) or None)
    if latencies is None:
        return made
    try:
        profile = latencies(made.as_text())
    except HloError:
        return made
    return lowered.compile(compiler_options={**options, "fdo_profile": profile}) if profile else made


def is_pinned(platform: str) -> bool:
    """Whether collectives between devices of a platform are pinned: on GPUs, of which there may be several kinds."""
    return is_gpu(platform)


def options_of(platform: str) -> dict[str, bool]:
    """`compiler_options` of `jax.jit` for programs with collectives between devices of a platform."""
    return dict(OPTIONS) if is_pinned(platform) else {}


def each_of(names: Sequence[str], platform: str) -> Each:
    """Runs the collectives of a program that is traced, in their order where they are pinned. `names`: of the mesh
    axes."""
    return Chain(names, platform).each if is_pinned(platform) else as_it_is


class Chain(Order):
    """Where tracing stands: a token that an element of every result goes into, which loops carry and branches return. A
    program that returns it too keeps every collective. `names`: of the mesh axes.

    Where XLA drops barriers before it schedules, what is sent depends on the token: on CPUs, where it also runs in any
    order what only they order, and on GPUs from some version on. Else barriers tie it to the result before, whose
    element goes into the token beside it: no kernel stands between two collectives, and no more than two results wait.
    """

    def __init__(self, names: Sequence[str], platform: str) -> None:
        super().__init__()
        self.by_data = not (is_pinned(platform) and gpus_schedule_around_barriers())
        # Zero, as no mesh has so many devices; XLA does not know it.
        self.start(lax.axis_index(tuple(names)) & np.int32(1 << 30))

    def start(self, token: Any) -> None:
        self.after = self.previous = token

    def collective(self, run: Callable[[Any], Any], x: Any, whole: bool = False) -> Any:
        return run(x)

    def each(self, run: Callable[[Any], Any], x: Any) -> Any:
        if self.by_data:
            x = lax.optimization_barrier(self.wait(x))
        else:
            x, self.previous, self.after = lax.optimization_barrier((x, self.previous, self.after))
            self.after = self.token()
        made = lax.optimization_barrier(run(x))
        self.previous = jax.random.key_data(made) if is_extended(made.dtype) else made
        if self.by_data:
            self.after = self.token()
        return made

    def after_computing(self, x: Any, made: Sequence[Any]) -> tuple[Any, list[Any]]:
        if not made:
            return x, []
        if self.by_data:
            for one in made:
                self.after = self.after | _zero_of(one)
            return x, [*made]
        x, *made = lax.optimization_barrier((x, *made))
        return x, made

    def token(self) -> Any:
        return self.after | _zero_of(self.previous)


def _zero_of(x: Any) -> Any:
    """Zero, which waits for `x`, and of which XLA does not know it."""
    first = lax.slice(x, (0,) * x.ndim, tuple(min(1, n) for n in x.shape))
    return jnp.any(first != jnp.zeros((), x.dtype)).astype(jnp.int32) & 2
