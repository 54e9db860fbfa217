"""Weighted pairwise constraint problems: the types that the solver reads and writes, and their validation.

A problem has variables, each with finitely many states. An assignment picks one state per variable; its cost is

    offset + sum_i unary_i[x_i] + sum_e table_e[gu_e[x_u], gv_e[x_v]]

and an assignment is feasible when that is finite and every resource's sum of usages is within its limit.
An edge sees its ends only through group indices, so a table is [groups_u, groups_v], never
[states_u, states_v]: a conversion cost depends on the layouts, and many states share a layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Status: TypeAlias = Literal["optimal", "gap", "infeasible"]
Messages: TypeAlias = dict[tuple[int, int], Floats]
"""Of a dual: of the end at i of link (i, j), float64 [states of i in the problem], nan where none is known."""

# A sum over limits and usages of 1e10 bytes rounds in the last bits; a limit met exactly must stay met.
_LIMIT_SLACK = 1e-9
_BATCH = 1000  # edges validated at a time


class Edge(NamedTuple):
    """One pairwise cost: `table[gu[x_u], gv[x_v]]`.

    gu: int [states_u], gv: int [states_v], table: float64 [groups_u, groups_v], >= 0, may hold inf.
    """

    u: int
    v: int
    gu: Ints
    gv: Ints
    table: Floats


@dataclass(frozen=True, eq=False)
class Resource:
    """A limit on a sum: sum_i usage_i[x_i] <= limit. usage: per variable, float64 [states_i], finite."""

    usage: tuple[Floats, ...]
    limit: float
    name: str


@dataclass(frozen=True, eq=False)
class Problem:
    """unary: per variable, float64 [states_i], may hold inf. Costs are in one unit (the planner's: seconds)."""

    unary: tuple[Floats, ...]
    edges: tuple[Edge, ...]
    resources: tuple[Resource, ...] = ()
    offset: float = 0.0

    @cached_property
    def shared(self) -> "SharedArrays":
        """Which of its arrays are one. Callers give what is alike as one array, so equal ones need not be compared."""
        number: dict[int, int] = {}
        # By identity: the problem keeps its arrays, so no two of them ever have one.
        of = lambda array: number.setdefault(id(array), len(number))
        edges = [(of(gu), of(gv), of(table)) for _, _, gu, gv, table in self.edges]
        return SharedArrays([of(row) for row in self.unary], edges)

    @cached_property
    def ends(self) -> Ints:
        """The variables that each edge joins: int64 [edges, 2]."""
        return np.array([(e.u, e.v) for e in self.edges], dtype=np.int64).reshape(-1, 2)

    def cost(self, assignment: npt.NDArray[np.integer] | Sequence[int]) -> float:
        """The cost of an assignment (int [variables]); inf if a table or a unary forbids it."""
        x = [int(s) for s in assignment]
        parts: list[float] = [row.item(s) for row, s in zip(self.unary, x, strict=True)]
        parts += [table.item(gu.item(x[u]), gv.item(x[v])) for u, v, gu, gv, table in self.edges]
        # fsum: the same on every Python, whatever the order.
        return self.offset + math.fsum(parts)

    def usage(self, assignment: npt.NDArray[np.integer] | Sequence[int]) -> Floats:
        """What an assignment uses of each resource: float64 [resources]."""
        x = [int(s) for s in assignment]
        return np.array(
            [math.fsum(float(row[s]) for row, s in zip(r.usage, x, strict=True)) for r in self.resources],
            dtype=np.float64,
        )

    def fits(self, assignment: npt.NDArray[np.integer] | Sequence[int]) -> bool:
        """Whether every resource's limit is kept (up to rounding: 1e-9 of the limit)."""
        return bool(np.all(self.usage(assignment) <= padded_limits(self)))


class SharedArrays(NamedTuple):
    """Numbers of a problem's arrays, equal where they are one. `unary`: per variable; `edges`: of each edge's gu, gv
    and table."""

    unary: list[int]
    edges: list[tuple[int, int, int]]


@dataclass(frozen=True, eq=False)
class Solution:
    """What `solve` found.

    assignment: int64 [variables], None if none is known; cost: its cost, inf if none.
    lower_bound: no assignment within the limits costs less (inf if the problem is infeasible).
    expanded: nodes that A* expanded. sweeps: passes of the dual, forward and backward counted as one. status:
    "optimal" when cost - lower_bound <= tolerance * |cost|, "infeasible" when that is proved, else "gap".
    interrupted: by Ctrl-C. messages: what the dual came to; that of a similar problem may begin from them.
    """

    assignment: Ints | None
    cost: float
    lower_bound: float
    expanded: int
    sweeps: int
    status: Status
    interrupted: bool = False
    messages: Messages = field(default_factory=dict[tuple[int, int], Floats])


class SolverProgress(NamedTuple):
    """What `solve` tells its caller now and then: at which stage it is, what the best assignment costs, the bound on
    all, and the nodes expanded so far."""

    stage: str
    cost: float
    lower_bound: float
    expanded: int


def padded_limits(problem: Problem) -> Floats:
    """The limits with room for rounding: float64 [resources]."""
    limits = np.array([r.limit for r in problem.resources], dtype=np.float64)
    return limits + _LIMIT_SLACK * np.abs(limits)


def validate(problem: Problem) -> None:
    """Raises ValueError that names the variable, edge or resource at fault, its shape and what was expected."""
    sizes = [_validated_size(i, row) for i, row in enumerate(problem.unary)]
    shared = problem.shared
    everything = np.concatenate([np.zeros(0), *dict(zip(shared.unary, problem.unary, strict=True)).values()])
    if np.isnan(everything).any() or np.isneginf(everything).any():
        wrong = next(i for i, row in enumerate(problem.unary) if np.isnan(row).any() or np.isneginf(row).any())
        raise ValueError(f"variable {wrong}: unary holds nan or -inf; expected numbers or inf")
    if not np.isfinite(problem.offset):
        raise ValueError(f"Problem.offset is {problem.offset}; expected a finite number")
    tables: dict[int, tuple[int, Floats]] = {}
    known: set[tuple[int, int, int, int, int]] = set()
    count = len(sizes)
    for k, (edge, numbers) in enumerate(zip(problem.edges, shared.edges, strict=True)):
        u, v, _, _, table = edge
        if 0 <= u < count and 0 <= v < count and u != v:
            alike = *numbers, sizes[u], sizes[v]
            if alike in known:
                continue
            known.add(alike)
        _validate_edge(k, edge, sizes)
        tables.setdefault(numbers[2], (k, table))
    for at in range(0, len(tables), _BATCH):
        some = list(tables.values())[at : at + _BATCH]
        entries = np.concatenate([table.ravel() for _, table in some])
        if not (entries >= 0).all():
            k = next(k for k, table in some if not (table >= 0).all())
            name = f"edge {k} ({problem.edges[k].u}, {problem.edges[k].v})"
            raise ValueError(f"{name}: table holds nan or a negative cost; expected costs >= 0 or inf")
    last = range(len(problem.edges) - 1, -1, -1)
    apart = {(*shared.edges[k][:2], problem.edges[k].table.shape): k for k in last}
    firsts = sorted(apart.values())
    for at in range(0, len(firsts), _BATCH):
        _validate_groups(problem, firsts[at : at + _BATCH])
    for resource in problem.resources:
        name = f"resource {resource.name!r}"
        if np.isnan(resource.limit):
            raise ValueError(f"{name}: its limit is nan; expected a number (inf for no limit)")
        if len(resource.usage) != len(sizes):
            raise ValueError(f"{name}: usage for {len(resource.usage)} variables; expected {len(sizes)}")
        for i, (row, n) in enumerate(zip(resource.usage, sizes, strict=True)):
            if np.shape(row) != (n,):
                raise ValueError(f"{name}: usage of variable {i} has shape {np.shape(row)}; expected {(n,)}")
        if not np.isfinite(np.concatenate([np.zeros(0), *resource.usage])).all():
            wrong = next(i for i, row in enumerate(resource.usage) if not np.isfinite(row).all())
            raise ValueError(f"{name}: usage of variable {wrong} is not finite; forbid a state by unary = inf")


def _validated_size(i: int, row: Floats) -> int:
    if row.ndim != 1 or not row.size:
        raise ValueError(f"variable {i}: unary has shape {row.shape}; expected (states,) with states >= 1")
    if row.dtype != np.float64:
        raise ValueError(f"variable {i}: unary is {row.dtype}; expected float64")
    return row.size


def _validate_edge(k: int, edge: Edge, sizes: list[int]) -> None:
    """All but what its arrays hold."""
    name = lambda: f"edge {k} ({edge.u}, {edge.v})"
    for end in (edge.u, edge.v):
        if not 0 <= end < len(sizes):
            raise ValueError(f"{name()}: variable {end} does not exist; there are {len(sizes)}")
    if edge.u == edge.v:
        raise ValueError(f"{name()}: both ends are variable {edge.u}; add its costs to the variable's unary")
    table = edge.table
    if table.ndim != 2 or table.dtype != np.float64:
        raise ValueError(
            f"{name()}: table is {table.dtype} of shape {table.shape}; expected float64 [groups_u, groups_v]"
        )
    for side, end, groups in (("gu", edge.u, edge.gu), ("gv", edge.v, edge.gv)):
        if groups.shape != (sizes[end],):
            raise ValueError(f"{name()}: {side} has shape {groups.shape}; variable {end} has {sizes[end]} states")
        if groups.dtype.kind not in "iu":
            raise ValueError(f"{name()}: {side} is {groups.dtype}; expected integers")


def _validate_groups(problem: Problem, numbers: Sequence[int]) -> None:
    """Many edges at a time: the groups of each end must lie in 0..count - 1."""
    edges = [problem.edges[k] for k in numbers]
    for axis, side in enumerate(("gu", "gv")):
        groups = [edge.gv if axis else edge.gu for edge in edges]
        counts = [edge.table.shape[axis] for edge in edges]
        joined = np.concatenate(groups)
        starts = np.cumsum([0, *(row.size for row in groups[:-1])])
        least, most = np.minimum.reduceat(joined, starts), np.maximum.reduceat(joined, starts)
        wrong = np.flatnonzero((least < 0) | (most >= counts))
        if wrong.size:
            k = int(wrong[0])
            name = f"edge {numbers[k]} ({edges[k].u}, {edges[k].v})"
            raise ValueError(f"{name}: {side} holds groups {least[k]}..{most[k]}; the table has {counts[k]} of them")
