"""What one instruction of a scheduled program does: FLOPs and the bytes that it moves.

Contractions count 2 FLOPs for each product, 8 for each of complex numbers, wherever they are: a dot in a fusion,
cuBLAS's and cuDNN's calls. Anything else that a kernel computes counts one for each element. A kernel reads each
operand once, of one that it only slices the slice, and writes its result once, of one that it updates in place the
update.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from hapsynth.hlo.text import Instruction, Module

FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
        *("opt-barrier", "add-dependency", "async-update"),
    )
)
"""What starts no kernel."""
_BITS = {"pred": 8, "token": 0, "c64": 64, "c128": 128}
_FLOATS = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
_NAMES = {**_FLOATS, "c64": "complex64", "c128": "complex128"}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "reshape")
_REORDERED = ("transpose", "copy")
"""Views within a kernel: of what it slices then it reads the slice."""
_COMPUTES_NOTHING = FREE | {*_SLICES, *_VIEWS} | {"broadcast", "iota", "copy", "transpose", "concatenate", "pad"}
_PRECISE = re.compile(
    r'operand_precision(=\{|":\[)[^\]}]*highest|algorithm(=|":")(alg_)?dot_f32_f32_f32\b', re.IGNORECASE
)
_CONVOLUTION = re.compile(r"([a-z0-9]+)_([a-z0-9]+)->")


class Contracted(NamedTuple):
    """FLOPs of products, the dtype that they are taken in, as NumPy names it; `precise`: whether TF32 won't do."""

    flops: float
    dtype: str
    precise: bool = False


@dataclass(frozen=True)
class Work:
    """Of one kernel. `contracted`: its products; `elementwise`: FLOPs of anything else; `nbytes`: read and written."""

    contracted: tuple[Contracted, ...]
    elementwise: float
    nbytes: float

    @property
    def products(self) -> float:
        """FLOPs of contractions."""
        return sum(c.flops for c in self.contracted)


def nbytes(type_text: str) -> float:
    """Of "f32[2,3]", or of a tuple of such."""
    total = 0.0
    for name, shape in _ARRAY.findall(type_text):
        digits = re.search(r"\d+", name)
        bits = _BITS.get(name, int(digits[0]) if digits else 0)
        total += bits / 8 * prod(_sizes(shape))
    return total


def _sizes(shape: str) -> list[int]:
    return [int(n) for n in shape.split(",") if n]


def _array(type_text: str) -> tuple[str, list[int]]:
    """Dtype and shape of an array, of a tuple those of its first."""
    found = _ARRAY.search(type_text)
    return (found[1], _sizes(found[2])) if found else ("", [])


class Computation:
    """The instructions of one computation by name."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.instructions = module, module.computations.get(name, [])

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for i in self.instructions:
            for name in dict.fromkeys(i.operands):
                found.setdefault(name, []).append(i)
        return found

    def type(self, name: str) -> str:
        found = self.by_name.get(name)
        return found.type if found else ""

    def work(self, i: Instruction) -> Work:
        """Of an instruction that is no collective, loop, branch or call."""
        contracted, elementwise = list[Contracted](), 0.0
        if i.opcode == "fusion":
            for inner, where in _inside(self.module, i):
                found = where.contracted(inner)
                contracted += found
                if not found and inner.opcode not in _COMPUTES_NOTHING and inner.opcode != "fusion":
                    elementwise += where.elements(inner)
            moved = self._moved_by_fusion(i)
        else:
            contracted += self.contracted(i)
            if not contracted and i.opcode not in _COMPUTES_NOTHING:
                elementwise = self.elements(i)
            moved = self._moved(i)
        return Work(tuple(contracted), elementwise, moved)

    def elements(self, i: Instruction) -> float:
        """Of what an instruction makes, or of the largest array that it reduces."""
        sizes = [prod(_array(i.type)[1])]
        if i.opcode.startswith(("reduce", "scatter", "select-and-scatter")):
            sizes += [prod(_array(self.type(name))[1]) for name in i.operands]
        return float(max(sizes))

    def contracted(self, i: Instruction) -> list[Contracted]:
        """The products that an instruction takes by itself."""
        target = _quoted(i.attributes, "custom_call_target")
        if i.opcode == "dot":
            over = _sizes(i.attribute("lhs_contracting_dims").strip("{}"))
        elif i.opcode == "convolution":
            return self._convolved(i, result=i.type, kernel=self.type(i.operands[1]))
        elif target.startswith("__cublas"):
            listed = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.attributes)
            over = _sizes(listed[1].replace('"', "")) if listed else []
        elif target.startswith("__cudnn$conv"):
            x, y = (self.type(name) for name in i.operands[:2])
            if "BackwardFilter" in target:
                return self._convolved(i, result=y, kernel=i.type)
            return self._convolved(i, result=x if "BackwardInput" in target else i.type, kernel=y)
        else:
            return []
        dtype, shape = _array(self.type(i.operands[0]))
        return [_products(i, prod(_array(i.type)[1]) * prod(shape[d] for d in over), dtype)]

    def _convolved(self, i: Instruction, result: str, kernel: str) -> list[Contracted]:
        """Each element of the forward result is a sum over what one output channel of the kernel holds."""
        labels = _CONVOLUTION.search(i.attribute("dim_labels"))
        dtype, shape = _array(kernel)
        each = prod(n for n, label in zip(shape, labels[2] if labels else "", strict=False) if label != "o")
        return [_products(i, prod(_array(result)[1]) * each, dtype)]

    def _moved(self, i: Instruction) -> float:
        made = nbytes(i.type)
        if i.opcode in _SLICES:
            return 2 * made
        if i.opcode == "dynamic-update-slice":
            return 2 * nbytes(self.type(i.operands[1]))
        if i.opcode == "custom-call" and i.type.startswith("("):
            # What comes after the result is a workspace.
            dtype, shape = _array(i.type)
            made = nbytes(f"{dtype}[{','.join(map(str, shape))}]")
        return made + sum(nbytes(self.type(name)) for name in i.operands)

    def _moved_by_fusion(self, i: Instruction) -> float:
        inside = Computation(self.module, i.computations()[0])
        read = sum(inside.read(p.name) for p in inside.instructions if p.opcode == "parameter")
        return read + sum(map(inside.written, inside.results))

    @property
    def results(self) -> list[str]:
        """Names of what it returns."""
        root = self.instructions[-1]
        return [*root.operands] if root.opcode == "tuple" else [root.name]

    def read(self, name: str) -> float:
        """Bytes that are read of a parameter, or of a view of it, in whatever order."""
        whole, parts = nbytes(self.type(name)), 0.0
        for user in self.users.get(name, ()):
            if user.opcode in _SLICES and user.operands[0] == name:
                parts += nbytes(user.type)
            elif user.opcode in (*_VIEWS, *_REORDERED) and user.name not in self.results:
                parts += self.read(user.name)
            elif not (user.opcode == "dynamic-update-slice" and user.operands[0] == name):
                return whole
        return min(whole, parts)

    def written(self, name: str) -> float:
        """Bytes that are written of a result."""
        i = self.by_name.get(name)
        while i is not None and i.opcode in _VIEWS and i.operands:
            i = self.by_name.get(i.operands[0])
        if i is not None and i.opcode == "dynamic-update-slice":
            return nbytes(self.type(i.operands[1]))
        return nbytes(self.type(name))


def _products(i: Instruction, count: int, dtype: str) -> Contracted:
    name = "float8" if dtype.startswith("f8") else _NAMES.get(dtype, "int32")
    precise = dtype in ("f32", "c64") and bool(_PRECISE.search(i.attributes))
    return Contracted((8.0 if dtype in ("c64", "c128") else 2.0) * count, name, precise)


def _inside(module: Module, fusion: Instruction) -> Iterator[tuple[Instruction, Computation]]:
    """All that a fusion computes, of fusions in it too."""
    where = Computation(module, fusion.computations()[0])
    for i in where.instructions:
        yield i, where
        if i.opcode == "fusion":
            yield from _inside(module, i)


def _quoted(attributes: str, key: str) -> str:
    found = re.search(rf'\b{key}="([^"]*)"', attributes)
    return found[1] if found else ""
