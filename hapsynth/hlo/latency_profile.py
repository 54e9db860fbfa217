"""How long the kernels and collectives of a compiled program take, as XLA's latency-hiding scheduler reads it.

By itself the scheduler takes all collectives to last alike, and a kernel by its kind: it ends a transfer of half a
millisecond after five kernels of some microseconds. A profile by name, which is meant to be measured, tells it better
(`ProfiledInstructionsProto`, as text); here it says what the plan goes by.
"""

from __future__ import annotations

from collections.abc import Iterator

from hapsynth.cluster.device_kinds import DeviceKind
from hapsynth.hlo.collectives import collectives_of
from hapsynth.hlo.replay import RUN_OTHERS, Price, kernel_seconds, steps_of
from hapsynth.hlo.text import Module, parse

_UNITS = 1e8
"""To a second. The profile counts microseconds, but for what it does not name the scheduler takes numbers of its own,
5,000 for a collective, 1,000 for a loop's fusion, 1 for the rest and between two kernels: 50 us, 10 us, 10 ns. XLA does
not name all of Triton's kernels the same when it compiles a program again."""


def latency_profile(text: str, kind: DeviceKind, price: Price) -> bytes:
    """Of a program (`compiled.as_text()`) on a device of a kind; empty where it has no collectives.

    Raises HloError for another text.
    """
    if not collectives_of(text):
        return b""
    module = parse(text)
    found = dict(_seconds(module, module.entry, kind, price))
    return "".join(f'costs {{ name: "{name}" cost_us: {_UNITS * s:.3f} }}\n' for name, s in found.items()).encode()


def _seconds(module: Module, computation: str, kind: DeviceKind, price: Price) -> Iterator[tuple[str, float]]:
    """By the name of each instruction that takes time, also in loops and branches."""
    for i, start, work in steps_of(module, computation):
        if start is not None:
            yield i.name, price(start)
        elif work is not None:
            yield i.name, kernel_seconds(work, kind)
        elif i.opcode in RUN_OTHERS:
            for name in i.computations():
                yield from _seconds(module, name, kind, price)
