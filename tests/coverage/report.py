"""The coverage list: every primitive that JAX's public functions reach, and what the instruction set does with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal as OneOf

import jax
from rich.console import Console

from hapsynth import _jax
from hapsynth._quantities import plural
from hapsynth.graph.inline import REFUSED
from hapsynth.instructions.rules import REGISTRY
from hapsynth.instructions.rules.registry import MANY
from hapsynth.report.tables import Table, console, heading
from tests.coverage.reach import Reached, reached

Status = OneOf["covered", "region", "needs replication", "refused", "unknown"]

_INSIDE = "a collective over a named axis: it stands only inside shard_map or pmap, which the trace refuses"
_STATE = "reads or changes a mutable reference: the trace refuses its effect by name"
_CUT = "; batch dimensions are cut"
_REPLACED = "the plan's layouts replace it"
_NOTES = {"sharding_constraint": _REPLACED, "reshard": _REPLACED, "device_put": "placed where the plan says"}

_IN_BATCHES = """
cholesky eig eigh geqrf hessenberg householder_product lu lu_pivots_to_permutation qr schur svd tridiagonal
"""
BATCHED = frozenset(_IN_BATCHES.split())
"""They need replication, but in their batch dimensions."""

REGIONS = ("scan", "while", "cond")
"""They hold programs of their own, which are planned as such."""
_COLLECTIVES = """
all_gather all_gather_invariant all_gather_reduced all_to_all axis_index pbroadcast pmax pmin ppermute precv preduced
psend psum psum_invariant pvary ragged_all_to_all reduce_scatter unreduced_psum unreduced_reduce_scatter
"""
_REFERENCES = "accum_grad_in_ref addupdate empty_ref free_ref freeze get new_ref swap"
_ELSEWHERE: dict[str, tuple[Status, str]] = {
    **dict.fromkeys(_jax.inlined(), ("covered", "replaced by what it calls")),
    **dict.fromkeys(REGIONS, ("region", "the program in it is planned as such")),
    **{name: ("refused", why) for name, why in REFUSED.items()},
    **dict.fromkeys(_COLLECTIVES.split(), ("refused", _INSIDE)),
    **dict.fromkeys(("pmax", "pmin", "psum"), ("covered", "over an axis of vmap: replaced by a reduction")),
    **dict.fromkeys(_REFERENCES.split(), ("refused", _STATE)),
    "dce_sink": ("refused", "keeps what is computed for nothing: the trace refuses its effect by name"),
    "custom_lin": ("covered", "stands only inside differentiation: no traced function holds it"),
    "stage": ("covered", "lifts a number into the trace: no traced function holds it"),
    "io_callback": ("refused", "its effect is on the host, once: the trace refuses it by name"),
    **{name: ("needs replication", f"{why}; register_rule gives it a rule") for name, why in MANY.items()},
    "custom_partitioning": ("covered", "by the sharding rule that it carries; without one, run whole"),
}


@dataclass(frozen=True)
class Row:
    """One primitive: what becomes of it, why, and where it was met."""

    name: str
    status: Status
    why: str
    where: str


def row(name: str, where: str = "") -> Row:
    """What the instruction set does with the primitive of this name."""
    entry = REGISTRY.get(name)
    if entry is not None:
        if entry.replicated:
            return Row(name, "needs replication", entry.replicated + (_CUT if name in BATCHED else ""), where)
        return Row(name, "covered", _NOTES.get(name, ""), where)
    status, why = _ELSEWHERE.get(name, ("unknown", "no sharding rule for this primitive"))
    return Row(name, status, why, where)


def rows(found: Reached) -> list[Row]:
    """Every reached primitive, by name."""
    return [row(name, where) for name, where in sorted(found.primitives.items())]


def print_coverage(out: Console, found: Reached) -> int:
    """Print the list; the number of primitives that are unknown and of functions that could not be tried."""
    listed = rows(found)
    functions = plural(found.functions, "public function")
    out.print(f"JAX {jax.__version__}: {plural(len(listed), 'primitive')} reached by {functions}")
    out.print(heading("Primitives"))
    headers = ["primitive", "status", "met first at", "why"]
    out.print(Table(headers, [[r.name, r.status, r.where, r.why] for r in listed], left=4))
    if found.untraced:
        out.print(heading("Functions of which no call could be traced"))
        out.print(Table(["function", "why"], [list(item) for item in sorted(found.untraced.items())], left=2))
    counts = {status: sum(r.status == status for r in listed) for status in dict.fromkeys(r.status for r in listed)}
    out.print(", ".join(f"{n} {status}" for status, n in sorted(counts.items())))
    return counts.get("unknown", 0) + len(found.untraced)


def main() -> int:
    """List what is covered; exit status 1 where anything is unknown, or could not be tried."""
    return 1 if print_coverage(console(), reached()) else 0
