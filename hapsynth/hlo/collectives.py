"""The collectives of a compiled program in the order in which they start.

Processes that compile for unlike devices must come to the same sequence: where one waits in another collective than
its peers, they wait forever, or take one another's numbers. What two ends must agree on is in a collective's text, and
so in the fingerprint: op, reduction, operand types with their layouts, groups, kernel strategy, and in which trips of
which loop it runs. What it is called, and when it ends, is not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from math import prod

import numpy as np

from hapsynth.hlo.text import HloError, Instruction, Module, parse
from hapsynth.hlo.work import nbytes

_OPS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)


def is_collective(opcode: str) -> bool:
    return opcode in _OPS


@dataclass(frozen=True)
class Collective:
    """One collective of XLA's. `operands`: types as "f32[1024]", with the layout where it is not row-major.
    `members`: the devices of each group, or the pairs of a permute, by their places in the mesh. `detail`: the
    dimensions, and the kernel where it is not the usual one. `inside`: the loops and branches around it. `trips`: how
    often it runs, as far as XLA knows. `asynchronous`: it has a start and an end, with room for other work between
    them."""

    op: str
    reduction: str
    operands: tuple[str, ...]
    detail: str
    inside: str
    trips: int
    members: tuple[tuple[int, ...], ...]
    asynchronous: bool = False

    def __str__(self) -> str:
        """What two ends must agree on."""
        words = (self.op, self.reduction, " ".join(self.operands), self.groups, self.detail, self.inside)
        return " ".join(word for word in words if word)

    @property
    def groups(self) -> str:
        """`members` as "{{0,1},{2,3}}"."""
        return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in self.members) + "}"

    @property
    def group(self) -> int:
        """Devices in a group."""
        return max(map(len, self.members))

    @property
    def wire_bytes(self) -> float:
        """Bytes sent in all trips by a device that sends at all, by the usual algorithms around a ring."""
        n = self.group
        times = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "collective-permute": 1}
        return self.trips * self.held_bytes * times.get(self.op, (n - 1) / n)

    def sent_by(self, device: int) -> float:
        """`wire_bytes` of one device, by its place in the mesh; none where it takes no part, or only receives."""
        if self.op == "collective-permute":
            sends = any(source == device != target for source, target in self.members)
        else:
            sends = any(device in group and len(group) > 1 for group in self.members)
        return self.wire_bytes if sends else 0.0

    @property
    def held_bytes(self) -> float:
        """Bytes of what a device puts into one run."""
        return sum(map(nbytes, self.operands))


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


class _Walk:
    """Through a module, computations where they are used."""

    def __init__(self, module: Module) -> None:
        self.module, self.numbers = module, count()

    def entry(self) -> list[Collective]:
        return list(self.computation(self.module.entry, "", 1))

    def computation(self, name: str, inside: str, trips: int) -> Iterator[Collective]:
        instructions = self.module.computations.get(name, [])
        types = {i.name: i.type for i in instructions}
        for i in instructions:
            one = started(self.module, i, types)
            if one is not None:
                yield replace(one, inside=inside, trips=trips)
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
            known = trips_of(i)
            label = f"in loop {number} of {'unknown' if known is None else known} trips"
            yield from self.computation(names[0], f"{inside} {label}".strip(), trips * (1 if known is None else known))
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
    """The collective that an instruction is, or that it starts; None for the end of one, or for anything else. Raises
    HloError where it starts several."""
    if i.opcode.removesuffix("-start") in _OPS:
        return i
    if i.opcode != "async-start":
        return None
    inner = [x for name in i.computations() for x in module.computations.get(name, ()) if x.opcode in _OPS]
    if len(inner) > 1:
        raise HloError(f"{i.name} starts {len(inner)} collectives as one")
    return inner[0] if inner else None


def started(module: Module, i: Instruction, types: Mapping[str, str]) -> Collective | None:
    """One run of the collective that an instruction is or starts. `types`: of the instructions around it."""
    found = _started(module, i)
    if found is None:
        return None
    if found is not i:
        # A wrapper of what XLA starts so has the operands that count.
        types = {o.name: o.type for o in module.computations[i.computations()[0]]}
    asynchronous = i.opcode.endswith("-start") and '"is_sync":true' not in i.attributes
    return _collective(module, found, types, asynchronous)


def trips_of(loop: Instruction) -> int | None:
    """How often a loop runs, where XLA knows it."""
    known = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.attributes)
    return int(known[1]) if known else None


def _collective(module: Module, i: Instruction, types: Mapping[str, str], asynchronous: bool) -> Collective:
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
        detail=" ".join([*([f"dimensions={dimensions}"] if dimensions else []), *(s for s in said if s not in usual)]),
        inside="",
        trips=1,
        members=_members(groups, module.devices),
        asynchronous=asynchronous,
    )


def _plain(type_text: str) -> str:
    """A type with its layout only where that is not row-major."""

    def layout(found: re.Match[str]) -> str:
        order = found[1].split(":")[0]
        usual = ",".join(map(str, reversed(range(len(order.split(","))))))
        return "" if order in ("", usual) else "{" + order + "}"

    return re.sub(r"\{([^}]*)\}", layout, type_text)


def _members(groups: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The devices of each group of "{{0,1},{2,3}}"; of "[2,4]<=[4,2]T(1,0)", two of four, the numbers of an array of
    these lengths transposed; or along the axes named last in "mesh['x'=2,'y'=4] {'y'}". Without groups all are one.

    JAX versions print the same groups in unlike ways. Raises HloError for one that is none of these."""
    if listed := re.findall(r"\{(\d[\d,]*)\}", groups):
        return tuple(tuple(map(int, group.split(","))) for group in listed)
    if rows := re.fullmatch(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", groups):
        count, size, lengths, order = rows.groups()
        numbers = np.arange(int(count) * int(size)).reshape([*map(int, lengths.split(","))])
        numbers = numbers.transpose([*map(int, order.split(","))]) if order else numbers
        return _rows(numbers.reshape(int(count), int(size)))
    # Sub-axes, as 'x':(1)2, are refused below: `jax.shard_map` makes none.
    if named := re.fullmatch(r"mesh\[([^\]]*)\]\s*\{('[^':]*'(?:,\s*'[^':]*')*)\}", groups):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", named[1])}
        along = re.findall(r"'([^']*)'", named[2])
        others = [axis for axis in sizes if axis not in along]
        numbers = np.arange(prod(sizes.values())).reshape([*sizes.values()])
        numbers = numbers.transpose([[*sizes].index(axis) for axis in (*others, *along)])
        return _rows(numbers.reshape(-1, prod(sizes[axis] for axis in along)))
    if groups not in ("", "{}"):
        raise HloError(f"the groups of a collective can't be read: {groups}")
    return (tuple(range(devices)),)


def _rows(numbers: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, numbers.tolist()))
