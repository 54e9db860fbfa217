"""What no rule can divide, so that every device computes it whole, and what no cost is known of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from hapsynth.graph.ir import SCAN_SLICE, SCAN_STACK, Graph, Op
from hapsynth.instructions.factors import Factors
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.rules.registry import entry_of, is_priced, rule_name


@dataclass(frozen=True)
class Uncovered:
    """The ops of one primitive that cannot be divided for one reason.

    `without_rule`: no op of the kind can be divided, but in batch dimensions. `nbytes`: what they read and write in
    all, each op counted as often as it runs and as a kernel of its own; `bytes_share`: of the whole graph's.
    """

    primitive: str
    reason: str
    without_rule: bool
    count: int
    nbytes: float
    bytes_share: float


def uncovered(graph: Graph, table: FactorTable | None = None) -> tuple[Uncovered, ...]:
    """The ops that have no sharding rule, or all of whose factors need replication; the most bytes first.

    Ops that the search may divide and chose not to are not among them, nor are ops on single elements.
    """
    table = table or FactorTable(graph)
    found: dict[tuple[str, str], list[Op]] = {}
    for op in graph.ops:
        reason = why_whole(op, table[op.index])
        if reason is not None:
            found.setdefault((rule_name(op), reason), []).append(op)
    all_bytes = max(_nbytes(graph, graph.ops), 1.0)
    rows: list[Uncovered] = []
    for (name, reason), ops in found.items():
        nbytes = _nbytes(graph, ops)
        bare = all((e := entry_of(op)) is None or bool(e.replicated) for op in ops)
        rows.append(Uncovered(name, reason, bare, len(ops), nbytes, nbytes / all_bytes))
    return tuple(sorted(rows, key=lambda r: (-r.nbytes, r.primitive, r.reason)))


_NOTABLE = 1e-3
"""Of all bytes: what an op with a rule touches without being divisible, to be named."""


def named(graph: Graph, table: FactorTable | None = None) -> dict[str, int]:
    """What a report names as replicated, and how many ops: those without a rule, and others that cannot be divided
    and touch a part of all bytes that is worth knowing."""
    rows = uncovered(graph, table)
    found: dict[str, int] = {}
    for row in rows:
        if row.bytes_share >= _NOTABLE or row.without_rule:
            found[row.primitive] = found.get(row.primitive, 0) + row.count
    return dict(sorted(found.items()))


def unpriced(graph: Graph) -> dict[str, list[Op]]:
    """The ops of which nothing says what they take, by name: each counts as one elementwise op.

    Not those of a branch that is never taken: they cost nothing, whatever they take.
    """
    found: dict[str, list[Op]] = {}
    for op in graph.ops:
        if not is_priced(op) and all(graph.regions[r].count for r in graph.around(op.region)):
            found.setdefault(rule_name(op), []).append(op)
    return dict(sorted(found.items()))


def why_whole(op: Op, factors: Factors) -> str | None:
    """Why no device can do a part of an op only; None where one can, and where there is nothing to divide."""
    if any(t.factor is not None for t in factors.triples) or all(size == 1 for size in factors.sizes):
        return None
    part = {SCAN_SLICE: op.result_shapes[:1], SCAN_STACK: op.shapes[:1]}.get(op.primitive)
    if part is not None and prod(part[0]) <= 1:
        return None
    reasons = dict.fromkeys(factors.blocked.values())
    return "; ".join(reasons) or "its operands are constants"


def _nbytes(graph: Graph, ops: Iterable[Op]) -> float:
    """Bytes that ops read and write, were each a kernel of its own."""
    touched = ((op, v) for op in ops for v in (*(v for _, v in op.value_operands), *op.results))
    return float(sum(graph.runs[op.region] * graph.values[v].nbytes for op, v in touched))
