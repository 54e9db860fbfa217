"""The search on full training steps of well-known models, for several clusters; nothing is allocated or run.

    python benchmarks/search.py [--only bert,gpt2_xl] [--clusters mixed8] [--layers 2,12,48] [--milp 0] [--json OUT]
    python benchmarks/search.py --only bert --clusters mixed8 --layers "" --milp 0 --without elimination_cells=0
    python benchmarks/search.py --only bert_moe --depth 2 --clusters paper64,paper64_8x8 --layers "" --milp 0

A table of models x clusters, each row in a process of its own; then how the time grows with BERT's layers on mixed8,
without memory limits, which only the deeper ones would meet.
Seconds are wall-clock, but for `cpu`. `gap` is to the best program at the plan's ratios, `joint` at any ratios; `peak`
is what a device holds, as predicted. `milp`: what HiGHS proves of the same problem, at the plan's ratios and without
memory limits, in --milp seconds: the excess of the plan's cost over its optimum or, after a `<`, over its bound.
`--without`: what a part of the solver is worth; one of its options and a value (`search/solver/options.py`), or
`decoding`, assignments read off the dual.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import sys
import time
from dataclasses import replace
from typing import Any

import jax
import scipy
from harness import examples
from harness.command import RowError, Table, in_own_process, names, parser, write_json
from models import MODELS

import hapsynth
from hapsynth.report.json_records import search_record
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.search.planning.task import Task
from hapsynth.search.solver import Problem
from hapsynth.search.solver.options import DEFAULT
from hapsynth.search.solver.trws import Dual

sys.path.insert(0, str(examples.ROOT / "tests" / "support"))

from milp import optimum

# The cluster of autoparallel's published figures: 64 H100 in eight hosts.
EVEN64 = {
    "name": "even64",
    "network": {"bandwidth": "400 Gbit/s", "latency": "10 us"},
    "intra": {"bandwidth": "450 GB/s", "latency": "5 us"},
    "devices": [{"kind": "H100-80GB", "hosts": 8, "per_host": 8}],
}
CLUSTERS = ("mixed8", "paper64", "paper64_8x8", "even64_8x8")
MESHES = (*CLUSTERS, "even64", "mixed8_2x4", "mixed8_2x2x2", "paper64_4x2x8", "even64_2x4x8")
"""Those that may be asked for."""
COLUMNS = {
    "": -30,
    "ops": 7,
    "trace": 7,
    "build": 7,
    "bound": 7,
    "search": 7,
    "ratio": 7,
    "total": 7,
    "cpu": 7,
    "nodes": 8,
    "gap": 9,
    "joint": 9,
    "peak GiB": 9,
    "RSS GiB": 8,
    "milp": 10,
    "milp s": 7,
    "  status": -20,
}


def cluster(name: str) -> hapsynth.Cluster:
    """One of the clusters in examples/, or `even64`; with `_8x8`, as a mesh of hosts and devices within, and so on."""
    base, _, grid = name.partition("_")
    flat = examples.cluster(base) if base != "even64" else hapsynth.Cluster.from_dict(EVEN64)
    return replace(flat, axes=tuple(zip("abcd", map(int, grid.split("x"))))) if grid else flat


_BOUNDLESS = 2**60


def one(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Plan one model for one cluster; the row of the table, with `search --json`'s record."""
    if options.without:
        go_without(options.without)
    where = cluster(row["cluster"])
    layers = {} if row.get("layers") is None else {"layers": row["layers"]}
    fn, args = MODELS[row["model"]](where.n, **layers)
    memory = row.get("memory", options.memory)
    form: dict[str, Any] = {}
    if memory == "unlimited":
        where = unlimited(where)
    elif memory != "devices":
        form = {"form": "staged", "recompute": True}
        where = limited(where, float(memory), hapsynth.synthesize(fn, args, unlimited(where), **form))
    began, cpu = time.perf_counter(), time.process_time()
    try:
        plan = hapsynth.synthesize(fn, args, where, time_budget_s=options.budget, **form)
    except InfeasibleError as error:
        return {**row, "status": "infeasible", "total_s": time.perf_counter() - began, "error": str(error)}
    used = time.process_time() - cpu
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    # Stages that this version times; `search --json` has less.
    row = {**row, **plan.result.timings_s, **search_record(plan), "cpu_s": used, "rss_bytes": rss}
    del row["ratios"]
    if row["ops_twice"]:
        row["status"] += f", {row['ops_twice']} ops twice"
    if "reshare" in plan.program.collectives():
        row["status"] += ", with reshares: no MILP"
    elif options.milp:
        # HiGHS may need more memory than there is, and end with the process: the plan's row is printed before.
        print(json.dumps(row), flush=True)
        row["milp"] = beside(plan, options.milp)
    return row


def go_without(part: str) -> None:
    """In this process, from now on."""
    if part == "decoding":
        Dual.decoded = lambda self: (math.inf, None)  # pyright: ignore[reportAttributeAccessIssue]
        return
    name, value = part.split("=")
    known = json.loads(value)
    # The one instance that is everybody's default.
    object.__setattr__(DEFAULT, name, tuple(known) if isinstance(known, list) else known)


def unlimited(where: hapsynth.Cluster) -> hapsynth.Cluster:
    """The cluster with more memory than any plan holds."""
    return replace(where, devices=tuple(replace(k, memory=_BOUNDLESS) for k in where.devices))


def limited(where: hapsynth.Cluster, fraction: float, free: hapsynth.Plan) -> hapsynth.Cluster:
    """The cluster whose every kind has that fraction of the most that one of it holds of a plan without limits; what it
    has where that plan leaves it out."""
    most = {kind.name: 0.0 for kind in where.kinds}
    for nbytes, kind in zip(free.memory, where.devices, strict=True):
        most[kind.name] = max(most[kind.name], nbytes)
    limits = [int(fraction * most[k.name]) or k.memory for k in where.devices]
    return replace(where, devices=tuple(replace(k, memory=m) for k, m in zip(where.devices, limits, strict=True)))


def beside(plan: hapsynth.Plan, limit_s: float) -> dict[str, Any]:
    """The MILP on the problem whose optimum the plan is said to be."""
    began, cpu = time.perf_counter(), time.process_time()
    solution = optimum(problem_of(plan), limit_s, tolerance=1e-7)
    return {
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "cost_s": solution.cost if solution.assignment is not None else None,
        "lower_bound_s": solution.lower_bound if math.isfinite(solution.lower_bound) else None,
        "status": solution.status,
        "nodes": solution.expanded,
    }


def problem_of(plan: hapsynth.Plan) -> Problem:
    """The problem that `lower_bound_s` bounds: the choices for this graph at the plan's own ratios."""
    task = Task(plan.traced.graph, plan.used)
    return ProblemBuilder(task.choices, task.costs, task.own_ratios(plan.sizes).strictly()).problem()


def planned(row: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """`one` in a process of its own; its failure is a row too."""
    try:
        return in_own_process(row, timeout_s=timeout_s)
    except RowError as error:
        if error.printed is None:
            return error.as_row()
        status = f"{error.printed['status']}, the MILP ended with {error.exit_code}"
        return {**error.printed, "status": status, "error": error.stderr}


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table; a dash for a missing figure."""

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    name = f"{row['model']}{'' if row.get('layers') is None else ' ' + str(row['layers'])} on {row['cluster']}"
    seconds = [show(row.get(f"{k}_s"), ".2f") for k in ("trace", "build", "bound", "search", "ratio", "total", "cpu")]
    peak = max(row["memory_bytes"]) / 2**30 if row.get("memory_bytes") else None
    rss = row["rss_bytes"] / 2**30 if "rss_bytes" in row else None
    milp_row = row.get("milp")
    milp = ("-", "-") if milp_row is None else ("no bound", f"{milp_row['seconds']:.1f}")
    if milp_row is not None and milp_row["lower_bound_s"] is not None:
        proved = milp_row["status"] == "optimal"
        excess = 1 - (milp_row["cost_s"] if proved else milp_row["lower_bound_s"]) / row["cost_s"]
        milp = (f"{'' if proved else '< '}{excess:.1e}", milp[1])
    shown = [name, show(row.get("ops"), "d"), *seconds, show(row.get("expanded"), "d"), show(row.get("gap"), ".1e")]
    shown += [show(row.get("joint_gap"), ".2e"), show(peak, ".2f"), show(rss, ".2f"), *milp, f"  {row['status']}"]
    return shown


def growth(rows: list[dict[str, Any]]) -> None:
    """How the seconds after tracing grow between the deepest model and the one nearest to a quarter of it."""
    done = {row["layers"]: row for row in rows if "cost_s" in row}
    timed = {n: row["total_s"] - row["trace_s"] for n, row in done.items()}
    if len(timed) < 2:
        return
    deep = max(timed)
    base = min(timed, key=lambda n: (abs(4 * n - deep), n))
    print(f"after tracing: time({deep}) / time({base}) = {timed[deep]:.2f} s / {timed[base]:.2f} s", end="")
    print(f" = {timed[deep] / timed[base]:.2f}; of CPU seconds in all {done[deep]['cpu_s'] / done[base]['cpu_s']:.2f}")


def machine() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "jax": jax.__version__, "scipy": scipy.__version__}
    cpu = platform.processor() or platform.machine()
    return {"platform": platform.platform(), "cpu": cpu, "cores": os.cpu_count(), **versions}


def arguments() -> argparse.Namespace:
    command = parser(__doc__)
    listed = ", ".join(MODELS)
    command.add_argument("--only", type=names(MODELS), default=list(MODELS), help=f"of {listed}; empty for none")
    listed = ", ".join(MESHES)
    command.add_argument("--clusters", type=names(MESHES), default=list(CLUSTERS), help=f"of {listed}")
    command.add_argument("--depth", type=int, help="layers of the table's models (default: their own)")
    layers = lambda text: [n for n in text.split(",") if n]
    command.add_argument("--layers", type=layers, default="2,4,8,12,24,48", help="of the growth; empty for none")
    command.add_argument("--budget", type=float, help="seconds per plan (default: until proved)")
    command.add_argument("--timeout", type=float, default=1800, help="seconds per row (default: 1800)")
    command.add_argument("--milp", type=float, default=120, help="seconds for the MILP (default: 120); 0 for none")
    memory = "devices (default), unlimited, or a fraction of each kind's memory of the plan without limits"
    command.add_argument("--without", metavar="PART", help="elimination_cells=0, or decoding")
    command.add_argument("--memory", default="devices", help=memory)
    options = command.parse_args()
    if not all(n.isdecimal() and int(n) > 0 for n in options.layers):
        command.error(f"--layers {','.join(options.layers)}: give whole numbers, as in 2,4,8")
    if options.memory not in ("devices", "unlimited"):
        try:
            float(options.memory)
        except ValueError:
            command.error(f"--memory {options.memory}: give {memory}")
    return options


def main() -> int:
    options = arguments()
    if options.row:
        print(json.dumps(one(options.row, options)))
        return 0
    table = Table(COLUMNS)
    print(table.heads)
    depth = {} if options.depth is None else {"layers": options.depth}
    rows = [{"model": m, "cluster": c, **depth} for m in options.only for c in options.clusters]
    deeper = [{"model": "bert", "cluster": "mixed8", "layers": int(n), "memory": "unlimited"} for n in options.layers]
    report: dict[str, Any] = {
        "machine": machine(),
        "options": {k: options.__dict__[k] for k in ("budget", "memory", "without")},
    }
    for kind, wanted in (("table", rows), ("growth", deeper)):
        report[kind] = []
        for row in wanted:
            report[kind].append(planned(row, options.timeout))
            table.show(cells(report[kind][-1]))
    growth(report["growth"])
    write_json(options.json, report)
    return int(any(row["status"].startswith("error") for row in report["table"] + report["growth"]))


if __name__ == "__main__":
    sys.exit(main())
