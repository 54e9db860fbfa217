"""The report of `hapsynth compile`: what came of each card, and whether cards can run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from hapsynth._quantities import nbytes, percent, plural, seconds
from hapsynth.report.tables import Table, heading
from hapsynth.targets import CompiledTarget, collectives_differ

COMPILE_SCHEMA = "hapsynth-compile-1"


def print_targets(out: Console, targets: Sequence[CompiledTarget]) -> None:
    """A row for each card that compiled, a line for each other; then the first collective that is not the same."""
    rows = [
        [
            t.target,
            t.form,
            nbytes(t.peak_bytes),
            nbytes(t.predicted_bytes),
            nbytes(t.plan_bytes),
            str(len(t.collectives)),
            str(t.asynchronous),
            percent(t.replay.hidden),
            seconds(t.replay.exposed_s),
            t.fingerprint,
            f"{t.seconds:.1f} s",
        ]
        for t in targets
        if not t.error
    ]
    if rows:
        columns = ["target", "form", "peak", "predicted", "plan", "collectives", "asynchronous", "hidden", "exposed"]
        out.print(Table([*columns, "fingerprint", "compiled in"], rows, left=2))
    for t in targets:
        if t.error:
            out.print(f"{t.target}: not compiled: {t.error}")
    for t in targets:
        if not t.error and not t.fits:
            out.print(memory_short(t))
    if any(t.form == "staged" for t in targets if not t.error):
        out.print("staged: the peak is of the largest stage, without what is held between stages")
    for t in targets:
        if t.unknown_loops:
            out.print(f"{t.target}: {plural(t.unknown_loops, 'loop')} of unknown trips counted once")
    if plain := [t.target for t in targets if t.without_triton]:
        out.print(
            f"{', '.join(plain)}: contractions by cuBLAS, as XLA has no tiles for some of them without autotuning"
        )
    if len(compared := _compared(targets)) > 1:
        out.print(heading("Collectives"))
        missing = [t.target for t in targets if t.error]
        same = f"the same on {', '.join(compared) if missing else 'all'}, in the same order"
        out.print(collectives_differ(targets) or same + "".join(f"; {name} not compared" for name in missing))


def _compared(targets: Sequence[CompiledTarget]) -> list[str]:
    """The cards whose collectives are set side by side."""
    return [t.target for t in targets if not t.error]


def memory_short(t: CompiledTarget) -> str:
    """What a card needs that has less memory."""
    return f"{t.target}: needs {nbytes(t.needed_bytes)}, has {nbytes(t.memory_bytes)}"


def targets_record(targets: Sequence[CompiledTarget]) -> dict[str, Any]:
    """The document of `compile --json`."""
    return {
        "schema": COMPILE_SCHEMA,
        "compared": _compared(targets),
        "difference": collectives_differ(targets) or None,
        "targets": [_record(t) for t in targets],
    }


def _record(t: CompiledTarget) -> dict[str, Any]:
    if t.error:
        return {"target": t.target, "compiled": False, "error": t.error}
    return {
        "target": t.target,
        "compiled": True,
        "form": t.form,
        "seconds": t.seconds,
        "peak_bytes": t.peak_bytes,
        "predicted_bytes": t.predicted_bytes,
        "plan_bytes": t.plan_bytes,
        "memory_bytes": t.memory_bytes,
        "fits": t.fits,
        "fingerprint": t.fingerprint,
        "without_triton": t.without_triton,
        "unknown_loops": t.unknown_loops,
        "asynchronous": t.asynchronous,
        "replay": {**asdict(t.replay), "hidden": t.replay.hidden, "hidden_of_time": t.replay.hidden_of_time},
        "predicted": t.predicted._asdict(),
        "collectives": [
            {
                "op": c.op,
                "reduction": c.reduction or None,
                "operands": list(c.operands),
                "groups": c.groups,
                "detail": c.detail or None,
                "inside": c.inside or None,
                "trips": c.trips,
                "wire_bytes": c.wire_bytes,
                "asynchronous": c.asynchronous,
            }
            for c in t.collectives
        ],
    }
