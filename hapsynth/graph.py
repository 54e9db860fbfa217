"""The source program: values and ops, calls inlined, in an order in which every operand comes first."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from hapsynth import _jax


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the source program."""

    index: int
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    name: str

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * _jax.itemsize(self.dtype)

    def __str__(self) -> str:
        short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "int32": "i32"}
        return f"{self.name}:{short.get(str(self.dtype), str(self.dtype))}{list(self.shape)}"


@dataclass(frozen=True, eq=False, slots=True)
class Literal:
    """A constant written into an equation; every device knows it."""

    value: Any
    shape: tuple[int, ...]
    dtype: Any

    @property
    def is_zero(self) -> bool:
        return not _jax.is_extended(self.dtype) and not np.any(np.asarray(self.value))


Operand = int | Literal


@dataclass(frozen=True, eq=False)
class Op:
    """One equation: `results = primitive(operands, **params)`."""

    index: int
    primitive: Any
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    params: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    result_shapes: tuple[tuple[int, ...], ...]
    result_dtypes: tuple[Any, ...]
    source: str = ""
    scope: str = ""

    @property
    def name(self) -> str:
        return self.primitive.name

    @property
    def value_operands(self) -> tuple[tuple[int, int], ...]:
        """(operand position, value index) of the operands that are values."""
        return tuple((i, v) for i, v in enumerate(self.operands) if isinstance(v, int))

    def __repr__(self) -> str:
        return f"Op({self.index}: {self.name} {self.operands} -> {self.results})"


@dataclass(frozen=True)
class Shown:
    """Stands for a primitive that shows values to the host: `(x, *shown) -> (x, 0)`.

    It passes on a value that the program needs, so that it is not dead code; the 0 is there on every device.
    """

    primitive: Any
    multiple_results = True

    @property
    def name(self) -> str:
        return self.primitive.name

    def bind(self, x: Any, *shown: Any, **params: Any) -> list[Any]:
        self.primitive.bind(*shown, **params)
        return [x, np.int32(0)]


@dataclass(frozen=True, eq=False)
class Graph:
    """Values are numbered in order of definition: inputs, constants, then results of ops."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    constants: dict[int, Any] = field(default_factory=dict)
    carry: tuple[tuple[int, int], ...] = ()
    """Pairs (position in inputs, position in outputs) whose layouts must agree."""

    @cached_property
    def producer(self) -> dict[int, int]:
        """Value -> index of the op that makes it; inputs and constants are absent."""
        return {v: op.index for op in self.ops for v in op.results}

    @cached_property
    def uses(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Value -> (op index, operand position) of each use."""
        uses: dict[int, list[tuple[int, int]]] = {v.index: [] for v in self.values}
        for op in self.ops:
            for position, v in op.value_operands:
                uses[v].append((op.index, position))
        return {v: tuple(u) for v, u in uses.items()}

    @property
    def sources(self) -> tuple[int, ...]:
        """Values that no op makes: inputs and constants."""
        return (*self.inputs, *self.constants)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that decides what the program computes, but not of large constants' values."""
        import hashlib

        digest = hashlib.sha256()
        for v in self.values:
            digest.update(f"{v.shape}{v.dtype}".encode())
        for op in self.ops:
            params = sorted((k, str(p)) for k, p in op.params.items() if _is_plain(p))
            operands = [o if isinstance(o, int) else f"lit{np.asarray(o.value).tolist()}" for o in op.operands]
            digest.update(f"{op.name}{operands}{op.results}{params}".encode())
        digest.update(f"{self.inputs}{[o if isinstance(o, int) else 'lit' for o in self.outputs]}{self.carry}".encode())
        return digest.hexdigest()[:16]


def _is_plain(param: Any) -> bool:
    """Functions and meshes print an address, which differs between processes."""
    return " at 0x" not in str(param)
