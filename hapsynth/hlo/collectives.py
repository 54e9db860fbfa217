"""The collectives of a compiled program in the order in which they start, and whether something is computed meanwhile.

Processes that compile for unlike devices must come to the same sequence: where one waits in another collective than
its peers, they wait forever, or take one another's numbers. What two ends must agree on is in a collective's text, and
so in the fingerprint: op, reduction, operand types with their layouts, groups, kernel strategy, and in which trips of
which loop it runs. What it is called, and when it ends, is not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from math import prod

from hapsynth.hlo.text import Instruction, Module, parse

_OPS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
        *("copy", "copy-start", "copy-done", "opt-barrier", "iota"),
    )
)
"""What keeps no core busy between the start of a transfer and its end: copies are no computing."""
_BITS = {"pred": 8, "token": 0, "c64": 64, "c128": 128}


@dataclass(frozen=True)
class Collective:
    """One collective of XLA's. `operands`: types as "f32[1024]", with the layout where it is not row-major. `groups`:
    which devices, or the pairs of a permute. `detail`: the dimensions, and the kernel where it is not the usual one.
    `inside`: the loops and branches around it. `trips`: how often it runs, as far as XLA knows. `group`: devices in a
    group. `asynchronous`: it has a start and an end; `overlapped`: in between something is computed."""

    op: str
    reduction: str
    operands: tuple[str, ...]
    groups: str
    detail: str
    inside: str
    trips: int
    group: int
    asynchronous: bool = False
    overlapped: bool = False

    def __str__(self) -> str:
        """What two ends must agree on."""
        words = (self.op, self.reduction, " ".join(self.operands), self.groups, self.detail, self.inside)
        return " ".join(word for word in words if word)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in all trips, by the usual algorithms around a ring."""
        held, n = sum(map(_nbytes, self.operands)), self.group
        times = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "collective-permute": 1}
        return self.trips * held * times.get(self.op, (n - 1) / n)


def collectives_of(text: str) -> tuple[Collective, ...]:
    """The collectives of a compiled program, from `compiled.as_text()`, in the order in which they start.

    Raises HloError for another text.
    """
    return tuple(_Walk(parse(text)).entry())


def fingerprint(collectives: Iterable[object]) -> str:
    """A digest of what two ends must agree on."""
    return hashlib.sha256("\n".join(map(str, collectives)).encode()).hexdigest()[:16]


def first_difference(sequences: Sequence[Sequence[object]]) -> tuple[int, list[str]] | None:
    """The number of the first collective that is not the same in all, from 0, with what each has in its place ("none"
    where it has ended); None where all are the same."""
    for number, row in enumerate(zip_longest(*sequences)):
        texts = ["none" if one is None else str(one) for one in row]
        if len({*texts}) > 1:
            return number, texts
    return None


def overlapped_share(collectives: Sequence[Collective]) -> float:
    """Of the bytes on the wire, those of collectives beside which something is computed; 1 where there are none."""
    total = sum(c.wire_bytes for c in collectives)
    return sum(c.wire_bytes for c in collectives if c.overlapped) / total if total else 1.0


class _Walk:
    """Through a module, computations where they are used."""

    def __init__(self, module: Module) -> None:
        self.module, self.numbers = module, count()

    def entry(self) -> list[Collective]:
        return list(self.computation(self.module.entry, "", 1))

    def computation(self, name: str, inside: str, trips: int) -> Iterator[Collective]:
        instructions = self.module.computations.get(name, [])
        types = {i.name: i.type for i in instructions}
        beside = _computed_beside(self.module, instructions)
        for i in instructions:
            found = _started(self.module, i)
            if found is not None:
                # A wrapper of what XLA starts so has the operands that count.
                held = types if found is i else {o.name: o.type for o in self.module.computations[i.computations()[0]]}
                one = _collective(self.module, found, held, inside, trips)
                if i.opcode.endswith("-start") and '"is_sync":true' not in i.attributes:
                    one = replace(one, asynchronous=True, overlapped=i.name in beside)
                yield one
            elif i.opcode in ("while", "conditional", "call"):
                yield from self.region(i, inside, trips)

    def region(self, i: Instruction, inside: str, trips: int) -> Iterator[Collective]:
        names = [name for name in i.computations() if self.communicates(name)]
        if not names:
            return
        if i.opcode == "call":
            yield from self.computation(names[0], inside, trips)
            return
        number = next(self.numbers)
        if i.opcode == "while":
            known = re.search(r'"known_trip_count":\{"n":"?(\d+)', i.attributes)
            label = f"in loop {number} of {known[1] if known else 'unknown'} trips"
            yield from self.computation(names[0], f"{inside} {label}".strip(), trips * (int(known[1]) if known else 1))
            return
        for at, name in enumerate(i.computations()):
            yield from self.computation(name, f"{inside} in branch {at} of switch {number}".strip(), trips)

    def communicates(self, name: str) -> bool:
        return any(
            _started(self.module, i) is not None
            or (i.opcode in ("while", "conditional", "call") and any(map(self.communicates, i.computations())))
            for i in self.module.computations.get(name, [])
        )


def _started(module: Module, i: Instruction) -> Instruction | None:
    """The collective that an instruction is, or that it starts; None for the end of one, or for anything else."""
    if i.opcode.removesuffix("-start") in _OPS:
        return i
    if i.opcode != "async-start":
        return None
    inner = [x for name in i.computations() for x in module.computations.get(name, ()) if x.opcode in _OPS]
    return inner[0] if inner else None


def _computed_beside(module: Module, instructions: Sequence[Instruction]) -> set[str]:
    """The names of collectives between whose start and end something is computed."""
    under_way: set[str] = set()
    found: set[str] = set()
    for i in instructions:
        if _started(module, i) is not None:
            if i.opcode.endswith("-start"):
                under_way.add(i.name)
        elif i.opcode.endswith(("-done", "-update")):
            under_way -= {*i.operands}
        elif i.opcode not in _FREE:
            found |= under_way
    return found


def _collective(module: Module, i: Instruction, types: dict[str, str], inside: str, trips: int) -> Collective:
    applied = module.computations.get(i.attribute("to_apply").lstrip("%"), [])
    groups = i.attribute("replica_groups") or i.attribute("source_target_pairs")
    strategy = re.search(r'"kernel_strategy":"(\w+)"', i.attributes)
    mode = re.search(r'"collectives_mode":"(\w+)"', i.attributes)
    backend = re.search(r'"collective_backend_config":\{[^}]*"backend":"(\w+)"', i.attributes)
    said = [found[1] for found in (backend, mode, strategy) if found]
    usual = ("DEFAULT", "COLLECTIVES_MODE_INVALID", "KERNEL_STRATEGY_DEFAULT", "KERNEL_STRATEGY_INVALID")
    dimensions = i.attribute("dimensions")
    return Collective(
        op=i.opcode.removesuffix("-start"),
        reduction=applied[-1].opcode if applied else "",
        operands=tuple(_plain(types.get(name, "?")) for name in i.operands),
        groups=groups,
        detail=" ".join([*([f"dimensions={dimensions}"] if dimensions else []), *(s for s in said if s not in usual)]),
        inside=inside,
        trips=trips,
        group=_group_size(groups),
    )


def _plain(type_text: str) -> str:
    """A type with its layout only where that is not row-major."""

    def layout(found: re.Match[str]) -> str:
        order = found[1].split(":")[0]
        usual = ",".join(map(str, reversed(range(len(order.split(","))))))
        return "" if order in ("", usual) else "{" + order + "}"

    return re.sub(r"\{([^}]*)\}", layout, type_text)


def _group_size(groups: str) -> int:
    """Devices in a group of "{{0,1},{2,3}}", or of "[2,4]<=[8]", which are two of four."""
    if listed := re.match(r"\{\{([\d,]*)\}", groups):
        return len(listed[1].split(","))
    rows = re.match(r"\[(\d+),(\d+)\]", groups)
    return int(rows[2]) if rows else 1


def _nbytes(type_text: str) -> float:
    """Of "f32[2,3]", or of a tuple of such."""
    total = 0.0
    for name, shape in re.findall(r"([a-z]\w*)\[([\d,]*)\]", type_text):
        digits = re.search(r"\d+", name)
        bits = _BITS.get(name, int(digits[0]) if digits else 0)
        total += bits / 8 * prod(int(n) for n in shape.split(",") if n)
    return total
