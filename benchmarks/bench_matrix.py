"""Every example on every example cluster: predicted step time beside the baselines, and the plan's values checked.

    python benchmarks/bench_matrix.py [--no-check] [--json OUT]

One process per (example, cluster), with as many host devices as the cluster has. `plan.check` compares every output
leaf with the function on one device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("mlp", "transformer", "cnn")
CLUSTERS = ("even8", "mixed8", "tiny_and_big", "paper64", "straggler")


def one(example: str, cluster_name: str, check: bool) -> dict[str, object]:
    """Plan, compare and check one pair; what the table shows."""
    import importlib

    import jax

    from hapsynth import Cluster, synthesize
    from hapsynth.search.planning.baselines import Baselines
    from hapsynth.search.planning.task import Task

    sys.path.insert(0, str(ROOT / "examples"))
    cluster = Cluster.load(ROOT / "examples" / "clusters" / f"{cluster_name}.toml")
    jax.config.update("jax_num_cpu_devices", cluster.n)
    fn, args = importlib.import_module(example).target()
    mesh = jax.make_mesh((cluster.n,), ("data",))
    plan = synthesize(fn, args, mesh, cluster=cluster)
    task = Task(plan.traced.graph, cluster)
    baselines = Baselines(task).all()
    result = plan.result
    row: dict[str, object] = {
        "example": example,
        "cluster": cluster_name,
        "ops": len(plan.traced.graph.ops),
        "total_s": result.timings_s["total_s"],
        "cost_s": result.cost_s,
        "gap": result.gap,
        "joint_gap": result.joint_gap,
        "status": result.status,
        "uneven_classes": sum(len(set(s)) > 1 for s in result.sizes.shares),
        "classes": len(result.sizes.shares),
        "baselines": {name: b.cost_s for name, b in baselines.items() if b.fits},
        "collectives": plan.program.collectives(),
    }
    if check:
        report = plan.check()
        row.update(check_ok=report.ok, max_relative_error=report.max_relative_error)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pair", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pair:
        print(json.dumps(one(*options.pair, check=not options.no_check)))
        return
    rows = []
    heads = {"": 26, "plan ms": -9, "best baseline": -28, "win": -7, "gap": -9, "joint": -8, "uneven": -8}
    heads |= {"error": -10, "s": -6}
    print("".join(f"{h:>{-w}}" if w < 0 else f"{h:<{w}}" for h, w in heads.items()))
    for example in EXAMPLES:
        for cluster in CLUSTERS:
            command = [sys.executable, __file__, "--pair", example, cluster, *(["--no-check"] * options.no_check)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            name, best = min(row["baselines"].items(), key=lambda item: item[1])
            error = f"{row['max_relative_error']:.1e}" if "max_relative_error" in row else "-"
            print(
                f"{example + ' on ' + cluster:<26}{row['cost_s'] * 1e3:9.3f}{best * 1e3:9.3f} {name:<18}"
                f"{best / row['cost_s']:7.3f}{row['gap']:9.1e}{row['joint_gap']:8.3f}"
                f"{row['uneven_classes']:>5}/{row['classes']:<2}{error:>10}{row['total_s']:6.1f}",
                flush=True,
            )
            assert row["cost_s"] <= best, f"{example} on {cluster} is costed above {name}"
            assert row.get("check_ok", True), f"{example} on {cluster} computes something else"
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
