"""The machines of an emulated cluster, from a TOML file or from options."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
MOST_USED = 0.98
"""Part of the cores of this machine that the quotas may take together: something must be left for the kernel."""


class SpecError(ValueError):
    """The description of a cluster is wrong."""


@dataclass(frozen=True)
class Machine:
    """`name`: its host name and its output's label. `rate`: bits per second of its link, each way, None for as fast as
    it goes; `delay`: seconds that each packet waits on its way out. `processes`: how many run on it, which reach one
    another by its loopback, and all others by that link; each has `quota` cores, and `memory` bytes, None for no limit.
    """

    name: str
    quota: float
    rate: float | None = None
    delay: float = 0.0
    memory: int | None = None
    processes: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", self.name):
            raise SpecError(f"machine {self.name!r}: a name is small letters, digits and -, at most 32")
        if not self.quota > 0:
            raise SpecError(f"machine {self.name}: a quota of {self.quota:g} cores; give more than 0")
        if self.rate is not None and self.rate < 1e5:
            raise SpecError(f"machine {self.name}: {self.rate:g} bit/s; give at least 100kbit")
        if self.delay < 0:
            raise SpecError(f"machine {self.name}: a delay of {self.delay:g} s; give 0 or more")
        if self.memory is not None and self.memory < 1 << 20:
            raise SpecError(f"machine {self.name}: {self.memory} bytes of memory; give at least 1MiB")
        if self.processes < 1:
            raise SpecError(f"machine {self.name}: {self.processes} processes; give at least 1")


def number(text: Any, what: str, suffix: str) -> float:
    """A number in plain units: `100Mbit`, `1.5GiB`, `2ms`; plain numbers are in the plain unit."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text)
    match = re.fullmatch(rf"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmg]i?)?(?:{suffix})?\s*", str(text), re.IGNORECASE)
    try:
        assert match is not None
        # Of seconds, m is a thousandth.
        scale = 1e-3 if suffix == "s" and match[2] else _UNITS[(match[2] or "").lower()]
        return float(match[1]) * scale
    except (AssertionError, ValueError):
        example = {"bit": "100Mbit", "B": "512MiB", "s": "1ms"}[suffix]
        raise SpecError(f"{what} is {text!r}; give a number with its unit, as {example}") from None


def _rate(x: Any) -> float | None:
    return None if x in (None, "none", "") else number(x, "rate", "bit")


def _memory(x: Any) -> int | None:
    return None if x in (None, "none", "") else int(number(x, "memory", "B"))


def _processes(x: Any) -> int:
    try:
        return int(str(x))
    except ValueError:
        raise SpecError(f"processes is {x!r}; give a whole number, as 3") from None


_READ: Mapping[str, Callable[[Any], Any]] = {
    "quota": lambda x: number(x, "quota", "B"),
    "rate": _rate,
    "delay": lambda x: number(x, "delay", "s"),
    "memory": _memory,
    "processes": _processes,
}


def machines(quotas: str, **common: Any) -> list[Machine]:
    """`1.0:0.3` and what each field is: one text for all machines, or as many as there are quotas, joined by `:`."""
    each: dict[str, list[Any]] = {"quota": quotas.split(":")}
    for name, text in common.items():
        values = [text] if text is None else str(text).split(":")
        each[name] = values * (len(each["quota"]) if len(values) == 1 else 1)
        if len(each[name]) != len(each["quota"]):
            raise SpecError(f"{name} {text}: {len(values)} values for {len(each['quota'])} machines; give one, or each")
    rows = [dict(zip(each, row)) for row in zip(*each.values())]
    return checked([_machine(f"m{i}", row) for i, row in enumerate(rows)])


def load(path: str | os.PathLike[str]) -> list[Machine]:
    """`[[machine]]` tables with the fields of `Machine`; `count = 3` stands for three alike."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{path}: {error}") from None
    rows = table.pop("machine", None)
    if table or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SpecError(f"{path}: give a [[machine]] table for each machine and nothing else")
    parsed: list[Machine] = []
    for row in rows:
        count, name = row.pop("count", 1), row.pop("name", None)
        if not isinstance(count, int) or count < 1:
            raise SpecError(f"{path}: count is {count!r}; give a whole number of at least 1")
        for i in range(count):
            own = f"m{len(parsed)}" if name is None else f"{name}{i}" if count > 1 else str(name)
            parsed.append(_machine(own, row))
    return checked(parsed)


def _machine(name: str, row: Mapping[str, Any]) -> Machine:
    names = {f.name for f in fields(Machine)}
    if unknown := set(row) - names:
        raise SpecError(f"machine {name}: {', '.join(sorted(unknown))}; the fields are {', '.join(sorted(names))}")
    if "quota" not in row:
        raise SpecError(f"machine {name} has no quota; give its cores, as quota = 0.5")
    return Machine(name, **{key: _READ[key](value) for key, value in row.items() if value is not None})


def checked(cluster: list[Machine]) -> list[Machine]:
    """Machines that fit this one together. Raises SpecError."""
    if not 1 <= len(cluster) <= 250:
        raise SpecError(f"{len(cluster)} machines; give 1 to 250")
    if len({m.name for m in cluster}) < len(cluster):
        raise SpecError(f"two machines have one name: {', '.join(m.name for m in cluster)}")
    cores, quotas = len(os.sched_getaffinity(0)), sum(m.quota * m.processes for m in cluster)
    if quotas > MOST_USED * cores:
        raise SpecError(
            f"the quotas are {quotas:g} cores together, and of the {cores} here at most {MOST_USED * cores:g} can be "
            "had: give smaller ones, in the same proportions"
        )
    return cluster


def cores_of(quotas: Sequence[float], cores: list[int]) -> list[list[int]]:
    """The cores that each process is held to: one, where the quotas can be packed so, for steadier times; else all."""
    free = dict.fromkeys(cores, 1.0)
    chosen: dict[int, int] = {}
    for i in sorted(range(len(quotas)), key=lambda i: (-quotas[i], i)):
        core = max(free, key=lambda c: free[c])
        if quotas[i] > free[core] + 1e-9:
            return [cores] * len(quotas)
        free[core] -= quotas[i]
        chosen[i] = core
    return [[chosen[i]] for i in range(len(quotas))]
