"""CPU seconds of compiling a plan on eight unlike devices over those of `jax.jit` for the same function and shapes.

    python benchmarks/bench_compile.py [--clusters eight_kinds] [--rounds 3] [--plans FOLDER] [--json OUT] [gpt ...]

Models are those of tests/zoo (all by default) and the examples. The devices are so slow, and the network so fast, that
all that can be cut is cut unevenly; `kinds` is the number of distinct shares of the class that has most. Both are
traced, lowered and compiled in turn in a process of their own, caches cleared before and none on disk; the least of the
rounds counts. `ratio` is of the three together. --plans keeps the plans there and takes those that it finds: to compare
two versions on one program.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.command import Table, in_own_process, parser, write_json
from harness.examples import target

MODELS = (
    *("vit", "mixer", "resnet", "unet"),
    *("gpt", "gpt_scanned", "gru", "greedy_decoding", "experts_einsum", "experts_scatter"),
    *("mlp_accumulated", "diffusion", "hessian", "jvp"),
)
SPEEDS = {"eight_kinds": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), "three_kinds": (10.0, 3.0, *(1.0,) * 6)}
PARTS = ("trace", "lower", "compile")
COLUMNS = {"": -32, "ops": 6, "kinds": 6, "jit": 7, "plan": 7, "ratio": 7, **dict.fromkeys(PARTS, 16)}


def seconds(traced: Callable[[], Any]) -> dict[str, float]:
    """CPU seconds of all threads for tracing, lowering and compiling, from cleared caches."""
    import jax

    jax.clear_caches()
    marks = [time.process_time()]
    made = traced()
    marks.append(time.process_time())
    for step in ("lower", "compile"):
        made = getattr(made, step)()
        marks.append(time.process_time())
    return {part: end - begin for part, begin, end in zip(PARTS, marks, marks[1:])}


def one(name: str, cluster_name: str, rounds: int, path: Path) -> dict[str, Any]:
    """Plan or load one pair, and compile it beside `jax.jit`."""
    import jax

    import hapsynth
    from hapsynth.cluster.cluster import DeviceKind, Link
    from hapsynth.lower import Lowered

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", None)
    speeds = SPEEDS[cluster_name]
    kinds = {s: DeviceKind(f"x{s}", {"float32": 1e6 * s}, 1e6 * s, 64 << 30, overhead=0.0) for s in speeds}
    devices = tuple(kinds[s] for s in speeds)
    cluster = hapsynth.Cluster(cluster_name, devices, tuple(range(len(devices))), Link(1e15, 1e-12))
    mesh = jax.make_mesh((cluster.n,), ("data",))
    fn, args = target(name)
    if path.exists():
        plan = hapsynth.load(path, fn, args, mesh)
    else:
        plan = hapsynth.synthesize(fn, args, mesh, cluster=cluster, form="switch", leave_out=False)
        plan.save(path)

    def traced() -> Any:
        form = Lowered(plan.traced.graph, plan.program, plan.sizes, mesh)
        with jax.set_mesh(form.mesh):
            return form.function.trace(*(s.struct() for s in (*form.inputs, *form.constants)))

    found: dict[str, list[dict[str, float]]] = {"jit": [], "plan": []}
    for _ in range(rounds):
        found["jit"].append(seconds(lambda: jax.jit(fn).trace(*args)))
        found["plan"].append(seconds(traced))
    least = {who: min(each, key=lambda r: sum(r.values())) for who, each in found.items()}
    shares = plan.sizes.shares
    return {
        "model": name,
        "cluster": cluster_name,
        "ops": len(plan.traced.graph.ops),
        "kinds": max((len(set(s)) for s in shares), default=1),
        **least,
        "ratio": sum(least["plan"].values()) / sum(least["jit"].values()),
    }


def planned(row: dict[str, Any], plans: Path | None) -> dict[str, Any]:
    """`one` in a process of its own, with its plan in that folder or in one that goes."""
    with tempfile.TemporaryDirectory() as folder:
        path = (plans or Path(folder)).resolve() / f"{row['model']}_{row['cluster']}.json"
        return in_own_process(row | {"plan": str(path)})


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table."""
    totals = [sum(row[who].values()) for who in ("jit", "plan")]
    parts = [f"{row['jit'][p]:.2f} /{row['plan'][p]:5.2f}" for p in PARTS]
    counts = [str(row["ops"]), str(row["kinds"])]
    return [f"{row['model']} on {row['cluster']}", *counts, *(f"{x:.2f}" for x in (*totals, row["ratio"])), *parts]


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--clusters", type=lambda text: text.split(","), default=list(SPEEDS))
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--plans", type=Path)
    command.add_argument("models", nargs="*", default=MODELS)
    options = command.parse_args()
    if row := options.row:
        print(json.dumps(one(row["model"], row["cluster"], options.rounds, Path(row["plan"]))))
        return
    if options.plans:
        options.plans.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    table = Table(COLUMNS)
    print(table.heads + "  CPU s, jit / plan")
    for cluster in options.clusters:
        for name in options.models:
            rows.append(planned({"model": name, "cluster": cluster}, options.plans))
            table.show(cells(rows[-1]))
    for cluster in options.clusters:
        here = [row for row in rows if row["cluster"] == cluster]
        worst = max(here, key=lambda row: row["ratio"])
        ratios = [row["ratio"] for row in here]
        median, mean = statistics.median(ratios), math.exp(statistics.fmean(map(math.log, ratios)))
        print(
            f"{cluster}: median {median:.2f}, geometric mean {mean:.2f}, worst {worst['ratio']:.2f} ({worst['model']})"
        )
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
