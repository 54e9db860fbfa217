"""CPU seconds of compiling a plan on eight unlike devices over those of `jax.jit` for the same function and shapes.

    python benchmarks/bench_compile.py [--clusters eight_kinds] [--rounds 3] [--plans FOLDER] [--json OUT] [gpt ...]

Models are those of tests/zoo (all by default) and the examples. The devices are so slow, and the network so fast, that
all that can be cut is cut unevenly; `kinds` is the number of distinct shares of the class that has most. Both are
traced, lowered and compiled in turn in a process of their own, caches cleared before and none on disk; the least of the
rounds counts. `ratio` is of the three together. --plans keeps the plans there and takes those that it finds: to compare
two versions on one program.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("mlp", "transformer", "cnn")
ZOO = {
    "vision": ("vit", "mixer", "resnet", "unet"),
    "language": ("gpt", "gpt_scanned", "gru", "greedy_decoding", "experts_einsum", "experts_scatter"),
    "functional": ("mlp_accumulated", "diffusion", "hessian", "jvp"),
}
SPEEDS = {"eight_kinds": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), "three_kinds": (10.0, 3.0, *(1.0,) * 6)}
PARTS = ("trace", "lower", "compile")
HEADS = {"": -32, "ops": 6, "kinds": 6, "jit": 7, "plan": 7, "ratio": 7}


def target(name: str) -> tuple[Any, Any]:
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]
    for module, names in ZOO.items():
        if name in names:
            return getattr(importlib.import_module(f"zoo.{module}"), name)()
    return importlib.import_module(name).target()


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
    from hapsynth.lower import lower

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
        form = lower(plan.traced.graph, plan.program, plan.sizes, mesh)
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


def child(name: str, cluster: str, options: argparse.Namespace) -> dict[str, Any]:
    """`one` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = (options.plans or Path(folder)) / f"{name}_{cluster}.json"
        command = [sys.executable, __file__, "--rounds", str(options.rounds), "--pair", name, cluster, str(path)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=lambda text: text.split(","), default=list(SPEEDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plans", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pair", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("models", nargs="*", default=[name for names in ZOO.values() for name in names])
    options = parser.parse_args()
    if options.pair:
        name, cluster, path = options.pair
        print(json.dumps(one(name, cluster, options.rounds, Path(path))))
        return
    if options.plans:
        options.plans.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    parts = "".join(f"{part:>16}" for part in PARTS)
    print("".join(f"{h:<{-w}}" if w < 0 else f"{h:>{w}}" for h, w in HEADS.items()) + parts + "  CPU s, jit / plan")
    for cluster in options.clusters:
        for name in options.models:
            row = child(name, cluster, options)
            rows.append(row)
            totals = [sum(row[who].values()) for who in ("jit", "plan")]
            parts = "".join(f"{row['jit'][p]:9.2f} /{row['plan'][p]:5.2f}" for p in PARTS)
            cells = f"{row['ops']:6}{row['kinds']:6}{totals[0]:7.2f}{totals[1]:7.2f}{row['ratio']:7.2f}"
            print(f"{name + ' on ' + cluster:<32}{cells}{parts}", flush=True)
    for cluster in options.clusters:
        here = [row for row in rows if row["cluster"] == cluster]
        worst = max(here, key=lambda row: row["ratio"])
        ratios = [row["ratio"] for row in here]
        median, mean = statistics.median(ratios), math.exp(statistics.fmean(map(math.log, ratios)))
        print(
            f"{cluster}: median {median:.2f}, geometric mean {mean:.2f}, worst {worst['ratio']:.2f} ({worst['model']})"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
