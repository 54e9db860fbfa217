"""The source program: values and ops, calls inlined, in an order in which every operand comes first.

Control flow is flat too: the ops of a loop's body or of a branch stand in the same list, each marked with the region
that it runs in, and boundary ops (`Boundary`) carry values into a region and out of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import Any
from typing import Literal as OneOf

import numpy as np

from hapsynth import _jax
from hapsynth.graph.without_arguments import same_everywhere


@dataclass(frozen=True)
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

    @cached_property
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


@dataclass(frozen=True, slots=True)
class Boundary:
    """Stands where an op has its primitive. A boundary op computes nothing: it is a value's way between a region and
    the one around it.

        loop_carry   (initial) -> (carried, final): `carried` lives in the loop, the others around it. A while loop has
                     a third result, what is carried as its test finds it, which lives there: the test runs before the
                     body, and finds nothing that the body makes
        scan_slice   (xs) -> (x): a scan's part of `xs` for this iteration
        scan_stack   (y) -> (ys): the results that a scan stacks
        loop_test    (predicate) -> (): a while loop goes on where it is true; belongs to the loop's test region
        cond_join    (branch number, one operand per branch) -> (result)
    """

    name: str
    multiple_results: bool = False


LOOP_CARRY = Boundary("loop_carry", True)
SCAN_SLICE = Boundary("scan_slice")
SCAN_STACK = Boundary("scan_stack")
LOOP_TEST = Boundary("loop_test", True)
COND_JOIN = Boundary("cond_join")

RegionKind = OneOf["program", "scan", "while", "test", "cond", "branch"]


@dataclass(frozen=True)
class Region:
    """A body of control flow. Number 0 is the program itself.

    `count`: how often it runs for one run of `parent`: a scan's length, a while loop's assumed trips, a branch's
    assumed frequency. A while loop has a region of its own for its test, a cond one for each branch. `reverse` and
    `unroll` are a scan's.
    """

    index: int
    kind: RegionKind
    parent: int
    count: float
    source: str = ""
    reverse: bool = False
    unroll: int = 1

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        match self.kind:
            case "scan":
                return f"scan{where}, {self.count:g} times{', in reverse' if self.reverse else ''}"
            case "while":
                return f"while{where}, {self.count:g} times as assumed"
            case "branch":
                return f"branch, {self.count:.3g} of the time"
            case _:
                return f"{self.kind}{where}"


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
    """The user's scopes (`jax.named_scope`) and JAX's transformations, as `transpose(jvp(mlp))/attention`."""
    region: int = 0
    """A boundary op belongs to the region that it leads into or out of."""
    traceback: Any = None
    """Where the user's code made it, for the compiled program's metadata."""

    @property
    def name(self) -> str:
        return self.primitive.name

    @cached_property
    def value_operands(self) -> tuple[tuple[int, int], ...]:
        """(operand position, value index) of the operands that are values."""
        return tuple((i, v) for i, v in enumerate(self.operands) if isinstance(v, int))

    def __repr__(self) -> str:
        return f"Op({self.index}: {self.name} {self.operands} -> {self.results})"


@dataclass(frozen=True)
class HostCallback:
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


@dataclass(frozen=True)
class Rematerialized:
    """`ops`, none after op `at`, run again for those that take their results after it."""

    at: int
    ops: tuple[int, ...]


_NOT_UNIQUE = frozenset({"eig", "eigh", "geqp3", "geqrf", "hessenberg", "lu", "qr", "schur", "svd", "tridiagonal"})
"""Factorizations whose signs, order or bases are the kernel's choice, near a tie or where the rank is not full: parts
of two devices' results don't belong together."""


def _chooses(op: Op) -> bool:
    """Whether an op's floats too are what floats selected: unlike devices' may differ by their own size."""
    by_keys = op.name == "sort" and any(map(_jax.is_inexact, op.dtypes[: op.params["num_keys"]]))
    return op.name in _NOT_UNIQUE or (by_keys and op.params["num_keys"] < len(op.operands))


def _selects(op: Op) -> list[int]:
    """The positions of the operands that tell which elements an op reads or writes, or which random numbers it draws;
    of integers that are compared, all."""
    count, name = len(op.operands), op.name
    if any(map(_jax.is_extended, (*op.dtypes, *op.result_dtypes))):
        return list(range(count))
    if name == "sort" and op.params["num_keys"] < count:
        return list(range(op.params["num_keys"]))
    if name == "gather" or name.startswith("scatter"):
        return [1]
    if name == "dynamic_slice":
        return list(range(1, count))
    if name == "dynamic_update_slice":
        return list(range(2, count))
    if name == "ragged_dot_general":
        return [2]
    # Of single numbers no one-hot vector is made; what way control flow goes is agreed on by itself.
    compares = name in ("eq", "ne", "lt", "le", "gt", "ge") and any(op.shapes)
    return list(range(count)) if compares else []


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
    kept: tuple[int, ...] = ()
    """Positions of inputs that lie on the devices from call to call, though no output succeeds them."""
    inexact_inputs: tuple[int, ...] = ()
    """Positions of inputs that other functions with the same state make of floats, whatever their own dtype."""
    selecting_outputs: tuple[int, ...] = ()
    """Positions of outputs by which other functions with the same state select elements."""
    strong_inputs: tuple[int, ...] = ()
    """Positions of weakly typed inputs that other functions with the same state leave strongly typed."""
    regions: tuple[Region, ...] = (Region(0, "program", -1, 1.0),)
    ties: dict[int, int] = field(default_factory=dict)
    """Index of a loop_carry op -> the value that the next iteration finds as its carried one."""
    again: Rematerialized | None = None
    """Which ops of the traced function run twice here (`graph/rematerialize.py`)."""
    partitionable: bool | None = None
    """`jax_threefry_partitionable`, with which its random numbers are drawn; None where none depend on it."""

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

    def op_behind(self, value: int) -> Op | None:
        """The op that makes a value; of one that none makes, the first that uses it."""
        at = self.producer.get(value, min((op for op, _ in self.uses[value]), default=None))
        return None if at is None else self.ops[at]

    @cached_property
    def state(self) -> frozenset[int]:
        """Inputs that lie on the devices before a call: carried ones, and those that are kept."""
        return frozenset(self.inputs[i] for i in (*(source for source, _ in self.carry), *self.kept))

    def output(self, position: int) -> Value | Literal:
        """What the function returns there."""
        out = self.outputs[position]
        return out if isinstance(out, Literal) else self.values[out]

    @property
    def sources(self) -> tuple[int, ...]:
        """Values that no op makes: inputs and constants."""
        return (*self.inputs, *self.constants)

    @cached_property
    def runs(self) -> tuple[float, ...]:
        """How often each region runs in one step. One that never does still costs next to nothing: 0 times infinity,
        the cost of what can't be, would be no number."""
        counts: list[float] = []
        for r in self.regions:
            counts.append(max(r.count, 1e-6) * (counts[r.parent] if r.parent >= 0 else 1.0))
        return tuple(counts)

    def around(self, region: int) -> tuple[int, ...]:
        """A region and those around it, innermost first."""
        return self._around[region]

    @cached_property
    def _around(self) -> tuple[tuple[int, ...], ...]:
        enclosing: list[tuple[int, ...]] = []
        for r in self.regions:
            enclosing.append((r.index, *(enclosing[r.parent] if r.parent >= 0 else ())))
        return tuple(enclosing)

    @cached_property
    def home(self) -> tuple[int, ...]:
        """The region in which each value lives."""
        regions = [0] * len(self.values)
        for op in self.ops:
            leaves = op.primitive in (SCAN_STACK, COND_JOIN)
            for value in op.results:
                regions[value] = self.regions[op.region].parent if leaves else op.region
            if op.primitive == LOOP_CARRY:
                regions[op.results[1]] = self.regions[op.region].parent
                for tested in op.results[2:]:
                    regions[tested] = self.test(op.region)
        return tuple(regions)

    def test(self, region: int) -> int:
        """The test region of a while loop."""
        return next(r.index for r in self.regions if r.parent == region and r.kind == "test")

    def branches(self, region: int) -> tuple[int, ...]:
        """The branch regions of a cond, in order."""
        return tuple(r.index for r in self.regions if r.parent == region)

    def read_in(self, op: Op, position: int) -> int:
        """The region in which an operand must be at hand."""
        if not isinstance(op.primitive, Boundary):
            return op.region
        if op.primitive in (LOOP_CARRY, SCAN_SLICE) or (op.primitive == COND_JOIN and position == 0):
            return self.regions[op.region].parent
        if op.primitive == COND_JOIN:
            return self.branches(op.region)[position - 1]
        return op.region

    def place_of_conversion(self, value: int, region: int) -> int:
        """Where a value is converted for a use in a region: where that happens least often, as far out as can be."""
        if region == self.home[value]:
            return region
        chosen = inner = region
        for r in self.around(region)[: self.around(region).index(self.home[value]) + 1]:
            # A test finds nothing that its loop's body makes.
            if self.runs[r] <= self.runs[chosen] and self.regions[inner].kind != "test":
                chosen = r
            inner = r
        return chosen

    @cached_property
    def inexact(self) -> frozenset[int]:
        """The values that depend on floats, of this call or of one before."""
        inexact = {v.index for v in self.values if _jax.is_inexact(v.dtype)}
        inexact.update(self.inputs[i] for i in self.inexact_inputs)
        grown = -1
        while grown != len(inexact):
            grown = len(inexact)
            inexact.update(self.inputs[i] for i, o in self.carry if self.outputs[o] in inexact)
            for op in self.ops:
                if op.index in self.ties and self.ties[op.index] in inexact:
                    inexact.update(op.results)
                if any(v in inexact for _, v in op.value_operands):
                    inexact.update(op.results)
        return frozenset(inexact)

    @cached_property
    def unsure(self) -> frozenset[int]:
        """The ops that decide which way control flow goes, by floating-point values, of this call or of one before: the
        loop_test of a while loop, the first cond_join of a cond. Unlike devices may round differently, and must not
        part ways."""
        sensitive: dict[int, int] = {}
        for op in self.ops:
            if op.primitive in (LOOP_TEST, COND_JOIN) and op.operands[0] in self.inexact:
                sensitive.setdefault(op.region, op.index)
        return frozenset(sensitive.values())

    @property
    def selections(self) -> frozenset[int]:
        """The ops that tell by floating-point values which elements are read or written: an `argmax` by which a table
        is indexed, a router's `top_k`. Unlike devices round differently, and where each has a part of the table they
        must not select differently. Found backwards from indices, sizes of groups, keys of sorts and of random numbers,
        and integers that are compared, as one-hot vectors are made; through carried values into the call before, which
        may have chosen a token. With them all sorts by floats that move others along, and factorizations that are not
        unique. Not masks of floats, such as relu's: what they choose between meets where they change."""
        return self._selections[0]

    @property
    def selecting_inputs(self) -> tuple[int, ...]:
        """Positions of inputs by which elements are selected, in this call or a later one."""
        return tuple(i for i, v in enumerate(self.inputs) if v in self._selections[1])

    @cached_property
    def _selections(self) -> tuple[frozenset[int], frozenset[int]]:
        """The ops, and all integers by which elements are selected."""
        exact = [not _jax.is_inexact(v.dtype) for v in self.values]
        before = {self.inputs[i]: self.outputs[o] for i, o in self.carry}
        found = {op.index for op in self.ops if _chooses(op)}
        seen: set[int] = set()
        indices = ((p, v) for op in self.ops if (at := _selects(op)) for p, v in op.value_operands if p in at)
        waiting: list[Operand] = [v for _, v in indices if exact[v]]
        waiting += (self.outputs[o] for o in self.selecting_outputs)
        while waiting:
            value = waiting.pop()
            if isinstance(value, Literal) or value in seen:
                continue
            seen.add(value)
            if value not in self.producer:
                waiting += [before[value]] if value in before else []
                continue
            op = self.ops[self.producer[value]]
            read = [v for _, v in op.value_operands] + ([self.ties[op.index]] if op.index in self.ties else [])
            waiting += (v for v in read if exact[v])
            if not all(exact[v] for v in read) and not isinstance(op.primitive, Boundary):
                found.add(op.index)
        return frozenset(found - same_everywhere(self, found)), frozenset(seen)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that decides what the program computes, but not of large constants' values."""
        import hashlib

        digest, name = hashlib.sha256(), cache(str)
        for v in self.values:
            digest.update(f"{v.shape}{name(v.dtype)}".encode())
        for op in self.ops:
            printed = ((k, str(p)) for k, p in op.params.items())
            # Functions and meshes print an address, which differs between processes.
            params = sorted((k, text) for k, text in printed if " at 0x" not in text)
            operands = [o if isinstance(o, int) else f"lit{np.asarray(o.value).tolist()}" for o in op.operands]
            digest.update(f"{op.name}{operands}{op.results}{params}{op.region or ''}".encode())
        for r in self.regions[1:]:
            length = r.count if r.kind == "scan" else ""
            digest.update(f"{r.kind}{r.parent}{length}{r.reverse}".encode())
        outputs = [o if isinstance(o, int) else "lit" for o in self.outputs]
        whole = "" if self.partitionable is not False else "not partitionable"
        digest.update(f"{self.inputs}{outputs}{self.carry}{self.ties or ''}{whole}".encode())
        return digest.hexdigest()[:16]
