"""Which figures can't be true: a profile with such is not saved unless that is forced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hapsynth.cluster.op_classes import OP_CLASSES
from hapsynth.profile.kind_fit import KindFit, Times
from hapsynth.profile.op_kernels import DISPATCH, LAUNCH, STREAM, Kernel

MOST_SPREAD = 0.5
"""As `sampled` has it."""
MOST_FALL = 0.5
"""An op of more work that takes less than this part of the time of one of less."""
MOST_FLOPS, MOST_BYTES = 2e16, 1e14
"""Per second and device: several times what any device does in 2026."""
NEEDED = (STREAM, "matmul")
"""Without figures of these in float32 there is no device kind."""


class Implausible(NamedTuple):
    """A doubt in words, and the figures to measure again."""

    text: str
    keys: tuple[str, ...]


class ProfileError(ValueError):
    """Nothing can be measured here, or the measured figures can't be true."""


def refusal(doubts: Sequence[Implausible], partial: str) -> ProfileError:
    shown = "; ".join(doubt.text for doubt in doubts[:3]) + (f"; and {len(doubts) - 3} more" if len(doubts) > 3 else "")
    return ProfileError(
        f"not saved, as these figures can't be relied on: {shown}. End what else runs on these devices and run it "
        f"again: only these and what hangs on them are measured{f' ({partial} keeps the others)' if partial else ''}; "
        "or save them as they are with --force"
    )


def unsteady(where: str, times: Times) -> Iterator[Implausible]:
    """Figures that came out differently each time."""
    for key, (_, spread) in times.items():
        if spread > MOST_SPREAD:
            yield Implausible(f"{key} on {where} varies by {spread:.0%}", (key,))


def unlikely(where: str, fit: KindFit) -> Iterator[Implausible]:
    """Rates that no device has, and those that every device has and that came out as none."""
    usual = [k for k in fit.kernels if k.family not in (DISPATCH, LAUNCH) and not k.op]
    starting = tuple(k.key for k in fit.kernels if k.family in (DISPATCH, LAUNCH))
    for family, dtype in dict.fromkeys((k.family, k.dtype) for k in usual):
        alike = [k for k in usual if (k.family, k.dtype) == (family, dtype)]
        keys, largest, seconds = tuple(k.key for k in alike), alike[-1], fit.net(alike[-1])
        what, most = ("bytes", MOST_BYTES) if family == STREAM else ("FLOP", MOST_FLOPS)
        if family in NEEDED and dtype == "float32" and not fit.measurable(family, dtype):
            # It may be the figures of starting that are too large.
            text = f"{family} in {dtype} on {where} takes no longer than starting it, or than it varies, at any size"
            yield Implausible(text, (*keys, *starting))
        elif seconds < -fit.noise(largest):
            yield Implausible(f"{largest.key} on {where} takes no longer than starting it", keys)
        elif seconds > fit.noise(largest) and largest.amount / seconds > most:
            yield Implausible(f"{largest.key} on {where} makes {largest.amount / seconds:.2g} {what}/s", keys)
        yield from falling(where, keys, [(fit.net(k), fit.noise(k)) for k in alike])
    # An op of a user's may be small, and XLA may have a slower kernel for a part of it.
    for signature, op in fit.ops().items():
        if (rate := max(a / t for a, t in op.curve.points)) > MOST_FLOPS:
            keys = tuple(k.key for k in fit.kernels if k.family == signature)
            yield Implausible(f"{op.op} ({signature}) on {where} makes {rate:.2g} FLOP/s", keys)


def lacking(
    failed: Mapping[str, str], ran: Sequence[Kernel], families: Sequence[str] = (*OP_CLASSES, DISPATCH, LAUNCH, STREAM)
) -> Iterator[Implausible]:
    """What plans are priced by and was not measured at any size, as it failed. `failed`: figure -> how."""
    measured = {(k.family, k.dtype) for k in ran}
    for family in families:
        keys = tuple(key for key in failed if key.startswith(f"{family}/float32/"))
        if keys and (family, "float32") not in measured:
            yield Implausible(f"there is no figure of {family} in float32, as {failed[keys[0]]}", keys)


def falling(where: str, keys: Sequence[str], times: Sequence[tuple[float, float]]) -> Iterator[Implausible]:
    """Times that fall where the work grows, by more than they vary. `times`: seconds and by how many they vary, of each
    figure in `keys`."""
    for i in range(1, len(keys)):
        (before, varies), (after, at_least) = times[i - 1], times[i]
        if before > varies and 0 < max(after, at_least) < MOST_FALL * before:
            text = f"{keys[i]} on {where} takes {after:.2g} s, and the smaller {keys[i - 1]} {before:.2g} s"
            yield Implausible(text, (keys[i - 1], keys[i]))
