"""What came of compiling a plan for one card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from hapsynth.hlo.collectives import Collective, fingerprint, first_difference
from hapsynth.hlo.replay import Replay
from hapsynth.targets.times import Predicted


@dataclass(frozen=True)
class CompiledTarget:
    """A plan compiled for a card. `target`: the card's name in devices.toml; `error`: why it could not be compiled,
    else empty. `seconds` to lower and compile. `peak_bytes`: of a device, as XLA plans its buffers (in staged form of
    the stage that takes most, as what is held between stages is not in it); `predicted_bytes`: by the plan, of its
    devices of this kind, or of all. `collectives`: in the order in which they start. `replay`: of a call on a device of
    this kind, as XLA has scheduled it; `predicted`: the same as the plan has it. `without_triton`: XLA found
    no tiles for a contraction, and has taken cuBLAS's kernels for all. `plan_bytes`: what planning holds to the limit,
    in this form, of a device of this kind. `memory_bytes`: that such a device has; `in_plan`: the plan has such a
    device. `unknown_loops`: loops that `collectives` and `replay` count once, as XLA does not know their trips."""

    target: str
    form: str = ""
    error: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    predicted_bytes: float = 0.0
    collectives: tuple[Collective, ...] = ()
    replay: Replay = field(default_factory=Replay)
    predicted: Predicted = field(default_factory=Predicted)
    without_triton: bool = False
    plan_bytes: float = 0.0
    memory_bytes: float = inf
    in_plan: bool = False
    unknown_loops: int = 0

    @property
    def needed_bytes(self) -> float:
        """Of a device: what XLA plans, but in staged form what the plan holds where that is more, as it also counts
        what is between stages."""
        return max(self.peak_bytes, self.plan_bytes) if self.form == "staged" else self.peak_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.memory_bytes

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the collectives: the same for cards that can run together."""
        return fingerprint(self.collectives)

    @property
    def asynchronous(self) -> int:
        """How many collectives run beside the program, of those that `collectives` lists."""
        return sum(c.asynchronous for c in self.collectives)


def collectives_differ(targets: Sequence[CompiledTarget]) -> str:
    """Which collective is the first that is not the same for all that compiled, and what it is for each; empty where
    all are the same."""
    compiled = [t for t in targets if not t.error]
    found = first_difference([t.collectives for t in compiled])
    if found is None:
        return ""
    number, texts = found
    cards: dict[str, list[str]] = {}
    for target, text in zip(compiled, texts, strict=True):
        cards.setdefault(text, []).append(target.target)
    said = "; ".join(f"{', '.join(names)}: {text}" for text, names in cards.items())
    return f"collective {number + 1} is not the same: {said}"
