"""The text of a compiled HLO module as its computations, instructions in the order in which they are scheduled."""

from __future__ import annotations

import re
from dataclasses import dataclass

_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_TYPE = re.compile(r"[a-z]\w*\[[^\]]*\](\{[^}]*\})?")
_OPERAND = re.compile(r"(?:^|[\s,(])%?([\w.\-]+)(?=,|$)")


class HloError(ValueError):
    """The text is not that of a module, or not in a form that is known here."""


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. `type`: of its result, as printed, with its layout; `attributes`: all after the
    operands, with `metadata` and `backend_config`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def attribute(self, key: str) -> str:
        """The text of an attribute, braces with what they hold as a whole; empty where there is none."""
        found = re.search(rf"\b{key}=", self.attributes)
        return _balanced(self.attributes, found.end()) if found else ""

    def computations(self) -> list[str]:
        """The names of the computations that it runs: branches in their order; a loop's body, not its condition."""
        for key in ("branch_computations", "true_computation", "body", "calls", "to_apply"):
            if text := self.attribute(key):
                names = [name.strip().lstrip("%") for name in text.strip("{}").split(",")]
                return [*names, self.attribute("false_computation").lstrip("%")] if key.startswith("true") else names
        return []


@dataclass(frozen=True)
class Module:
    """Computations by name; `entry` is the name of the one that is run, `devices` how many run it together."""

    computations: dict[str, list[Instruction]]
    entry: str
    devices: int = 1


def parse(text: str) -> Module:
    """The module that `compiled.as_text()` prints. Raises HloError for any other text."""
    computations: dict[str, list[Instruction]] = {}
    entry, current, devices = "", None, 1
    for line in text.splitlines():
        if current is not None:
            if line.startswith("}"):
                current = None
            elif found := _INSTRUCTION.match(line):
                current.append(_instruction(found[1], _COMMENT.sub("", found[2])))
        elif line.startswith("HloModule"):
            devices = max(map(int, _DEVICES.findall(line)), default=1)
        elif not line[:1].isspace() and (found := _COMPUTATION.match(line.rstrip())):
            current = computations.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
    if not entry:
        raise HloError("no entry computation: this is no text of a compiled HLO module")
    return Module(computations, entry, devices)


def _instruction(name: str, text: str) -> Instruction:
    found = _TYPE.match(text)
    end = _closing(text, 0) if text.startswith("(") else found.end() if found else text.find(" ")
    opcode = _OPCODE.match(text, end)
    if opcode is None:
        raise HloError(f"instruction {name} has no opcode that is known: {text[:120]}")
    last = _closing(text, opcode.end() - 1)
    operands = _OPERAND.findall(text[opcode.end() : last - 1])
    return Instruction(name, text[:end], opcode[1], tuple(operands), text[last:])


def _closing(text: str, begin: int) -> int:
    """Behind the parenthesis or brace that closes the one at `begin`."""
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] in "({") - (text[at] in ")}")
        if not depth:
            return at + 1
    raise HloError(f"parentheses are not closed: {text[:120]}")


def _balanced(text: str, begin: int) -> str:
    """A value that ends at the next comma outside of braces and brackets."""
    depth = 0
    for at in range(begin, len(text)):
        if text[at] == "," and not depth:
            return text[begin:at]
        depth += (text[at] in "({[") - (text[at] in ")}]")
    return text[begin:]
