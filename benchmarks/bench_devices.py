"""How long planning takes with many devices, and how well it keeps to a time budget.

    python benchmarks/bench_devices.py [--tables unlike,kinds,budget,overlap] [--budget 10] [--clock cpu] [--json OUT]

unlike: a 4-layer MLP's training step on 8 to 128 devices, each of a speed of its own, along one mesh axis and along
two, with the exponent fitted to the CPU seconds. kinds: BERT-base's step on 64 to 4,096 devices of two and of four
kinds, whose batch grows with the devices, with and without a budget. budget: the MLP's step on unlike devices within
`time_budget_s`. overlap: BERT-base's step with overlap on `mixed8` of examples/, whose slow devices have little memory,
within ever larger budgets. Nothing is allocated or run; each row is planned in a process of its own. `over` is the
seconds beyond the budget: by the wall clock or, where other work has the processor too, by CPU seconds (`--clock cpu`).
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from harness import examples
from harness.command import Table, in_own_process, names, parser, write_json
from models import MODELS

import hapsynth

UNLIKE = (8, 16, 32, 64, 128)
GRIDS = {8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16)}
COUNTS = (64, 256, 1024, 4096)
KINDS = ("V100-16GB", "P4-8GB", "A100-80GB", "H100-80GB")
TABLES = ("unlike", "budget", "kinds", "overlap")
COLUMNS = {
    "devices": 9,
    "mesh": 8,
    "kinds": 6,
    "budget": 7,
    "wall": 8,
    "over": 7,
    "cpu": 8,
    "used": 6,
    "step ms": 10,
    "gap": 9,
    "joint": 9,
    "  status": -20,
}


def unlike(axes: dict[str, int]) -> hapsynth.Cluster:
    """Devices of 10 to 1000 GFLOP/s and GB/s, no two alike, on hosts of their own."""
    n = int(np.prod([*axes.values()]))
    speeds = [10 * round(1 + 99 * (i * 7919 % n) / n, 3) for i in range(n)]
    figures = {"memory": "16 GB", "efficiency": 1.0}
    kinds = {
        f"k{i}": {"flops": {"float32": f"{s} GFLOP/s"}, "bandwidth": f"{s} GB/s", **figures}
        for i, s in enumerate(speeds)
    }
    network = {"bandwidth": "10 Gbit/s", "latency": "10 us"}
    devices = [{"kind": kind, "count": 1} for kind in kinds]
    return hapsynth.Cluster.from_dict(
        {"name": "unlike", "axes": axes, "network": network, "devices": devices, "kinds": kinds}
    )


def of_kinds(axes: dict[str, int], kinds: int) -> hapsynth.Cluster:
    """As many devices of each kind, on hosts of their own."""
    n = int(np.prod([*axes.values()]))
    devices = [{"kind": kind, "count": n // kinds} for kind in KINDS[:kinds]]
    network = {"bandwidth": "10 Gbit/s", "latency": "20 us"}
    return hapsynth.Cluster.from_dict({"name": "kinds", "axes": axes, "network": network, "devices": devices})


def mlp(layers: int = 4, width: int = 256, rows: int = 8192) -> tuple[Any, tuple[Any, ...]]:
    """A step of gradient descent, and the shapes of its arguments."""

    def step(params: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(params: list[jax.Array]) -> jax.Array:
            hidden = x
            for w in params:
                hidden = jnp.tanh(hidden @ w)
            return ((hidden - y) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return step, ([struct(width, width)] * layers, struct(rows, width), struct(rows, width))


def one(row: dict[str, Any]) -> dict[str, Any]:
    """Plan what a row says."""
    axes = row["axes"]
    n = int(np.prod([*axes.values()]))
    if "cluster" in row:
        cluster = examples.cluster(row["cluster"])
    else:
        cluster = of_kinds(axes, row["kinds"]) if "kinds" in row else unlike(axes)
    fn, args = MODELS["bert"](n) if "kinds" in row else mlp()
    given = {} if row["budget_s"] is None else {"time_budget_s": row["budget_s"]}
    given["overlap"] = row["table"] == "overlap"
    if row["clock"] == "cpu":
        time.perf_counter = time.monotonic = time.process_time
    began, cpu = time.perf_counter(), time.process_time()
    try:
        plan = hapsynth.synthesize(fn, args, cluster, **given)
    except hapsynth.InfeasibleError:
        plan = None
    row |= {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    if plan is None:
        return row | {"used": 0, "step_s": np.inf, "gap": np.inf, "joint": np.inf, "status": "none found"}
    row["used"] = len(plan.devices)
    return row | {"step_s": plan.cost, "gap": plan.gap, "joint": plan.joint_gap, "status": plan.result.status}


def rows(tables: list[str], budget: float, most: int) -> list[dict[str, Any]]:
    """What is planned, in order."""
    found: list[dict[str, Any]] = []
    grids = [("one", {n: {"d": n} for n in UNLIKE}), ("two", {n: {"a": a, "b": b} for n, (a, b) in GRIDS.items()})]
    for axes, meshes in grids:
        if "unlike" in tables:
            found += [{"table": f"unlike, {axes}", "axes": mesh, "budget_s": None} for mesh in meshes.values()]
        if "budget" in tables:
            some = [mesh for n, mesh in meshes.items() if n >= 32]
            found += [{"table": f"budget, {axes}", "axes": mesh, "budget_s": budget} for mesh in some]
    for kinds in (2, 4) if "kinds" in tables else ():
        for n in COUNTS:
            for within in (None, budget):
                found.append({"table": f"{kinds} kinds", "kinds": kinds, "axes": {"d": n}, "budget_s": within})
    if "budget" in tables:
        # None of the first programs fits the memory of the smallest devices.
        for a, b in (GRIDS[64], GRIDS[128]):
            for within in (0.3 * budget, budget):
                row = {"table": "budget, little memory", "kinds": 4, "axes": {"a": a, "b": b}, "budget_s": within}
                found.append(row)
    for within in (0.5 * budget, budget, 2 * budget, 4 * budget) if "overlap" in tables else ():
        found.append({"table": "overlap", "cluster": "mixed8", "axes": {"d": 8}, "kinds": 2, "budget_s": within})
    return [row for row in found if int(np.prod([*row["axes"].values()])) <= most]


def line(row: dict[str, Any]) -> list[str]:
    """What the table shows of a row."""
    sizes, budget = [*row["axes"].values()], row["budget_s"]
    n = int(np.prod(sizes))
    over = "" if budget is None else f"{max(0.0, row['wall_s'] - budget):.1f}"
    gaps = [f"{row[key]:.1e}" for key in ("gap", "joint")]
    seconds = [f"{row['wall_s']:.1f}", over, f"{row['cpu_s']:.1f}"]
    shown = [*seconds, str(row["used"]), f"{1e3 * row['step_s']:.2f}", *gaps, f"  {row['status']}"]
    return [
        str(n),
        "x".join(map(str, sizes)),
        str(row.get("kinds", n)),
        "" if budget is None else f"{budget:g}",
        *shown,
    ]


def exponent(table: list[dict[str, Any]]) -> float:
    """Of the devices, that CPU seconds grow with: fitted to their logarithms."""
    counts = [float(np.prod([*row["axes"].values()])) for row in table]
    return float(np.polyfit(np.log(counts), np.log([row["cpu_s"] for row in table]), 1)[0])


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--tables", type=names(TABLES), default=list(TABLES), help=f"of {', '.join(TABLES)}")
    command.add_argument("--budget", type=float, default=10.0, help="seconds")
    command.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what budgets and `over` count")
    command.add_argument("--most", type=int, default=4096, help="devices")
    options = command.parse_args()
    if options.row:
        print(json.dumps(one(options.row)))
        return
    done: dict[str, list[dict[str, Any]]] = {}
    shown = Table(COLUMNS)
    planned = rows(options.tables, options.budget, options.most)
    for i, row in enumerate(planned):
        if row["table"] not in done:
            print(f"\n{row['table']}")
            shown.show(COLUMNS)
        table = done.setdefault(row["table"], [])
        table.append(in_own_process(row | {"clock": options.clock}))
        shown.show(line(table[-1]))
        ended = i + 1 == len(planned) or planned[i + 1]["table"] != row["table"]
        if ended and row["table"].startswith("unlike") and len(table) > 1:
            print(f"CPU seconds grow with the devices to the power of {exponent(table):.2f}", flush=True)
    write_json(options.json, done)


if __name__ == "__main__":
    main()
