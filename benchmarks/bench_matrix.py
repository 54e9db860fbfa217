"""Every example on every example cluster: predicted step time beside the baselines, and the plan's values checked.

    python benchmarks/bench_matrix.py [--no-check] [--markdown] [--json OUT]

Each baseline is also made on the devices that suit it best; `win` is over the best of all of them. One process per
(example, cluster), with as many host devices as the cluster has. `plan.check` compares every output leaf with the
function on one device.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
from harness import examples
from harness.command import Table, in_own_process, parser, write_json
from harness.examples import EXAMPLES

from hapsynth import synthesize
from hapsynth.search.planning.baseline_subsets import BaselinesOnSubsets, label
from hapsynth.search.planning.task import Task

CLUSTERS = ("even8", "mixed8", "tiny_and_big", "paper64", "straggler")
README = (
    ("data_parallel", "data parallel, even"),
    ("data_parallel_speed", "data parallel, by speed"),
    ("zero3", "ZeRO-3"),
    ("tensor_parallel", "tensor parallel"),
)
COLUMNS = {
    "": -26,
    "plan ms": 9,
    "best baseline": 28,
    "win": 7,
    "gap": 9,
    "joint": 8,
    "uneven": 8,
    "error": 10,
    "s": 6,
}


def one(example: str, cluster_name: str, check: bool) -> dict[str, Any]:
    """Plan, compare and check one pair; its row."""
    cluster = examples.cluster(cluster_name)
    jax.config.update("jax_num_cpu_devices", cluster.n)
    fn, args = examples.target(example)
    mesh = jax.make_mesh((cluster.n,), ("data",))
    plan = synthesize(fn, args, mesh, cluster=cluster)
    task = Task(plan.traced.graph, cluster)
    baselines = BaselinesOnSubsets(task)
    costs = {name: b.cost_s for name, b in baselines.best(each=False).items() if b.fits}
    result = plan.result
    row: dict[str, Any] = {
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
        "on_all_devices": {name: costs[name] for name in baselines.names if name in costs},
        "baselines": costs,
        "collectives": plan.program.collectives(),
    }
    if check:
        report = plan.check()
        row.update(check_ok=report.ok, max_relative_error=report.max_relative_error)
    return row


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The README's table: all but the plan's own seconds over these."""
    heads = [label for _, label in README] + ["best on all devices", "best of all", "", "joint gap"]
    lines = ["| model | cluster | hapsynth | " + " | ".join(heads) + " |", "|---|---|" + "--:|" * 7 + "---|--:|"]
    for row in rows:
        everywhere, over = row["on_all_devices"], lambda seconds, row=row: f"{seconds / row['cost_s']:.2f} x"
        cells = [over(everywhere[name]) if name in everywhere else "does not fit" for name, _ in README]
        name, best = min(row["baselines"].items(), key=lambda item: item[1])
        cells += [over(min(everywhere.values())), over(best), label(name), f"{100 * row['joint_gap']:.1f}%"]
        lines.append(f"| {row['example']} | {row['cluster']} | {row['cost_s'] * 1e3:.3f} ms | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--no-check", action="store_true")
    command.add_argument("--markdown", action="store_true", help="a table as well")
    options = command.parse_args()
    if options.row:
        print(json.dumps(one(**options.row, check=not options.no_check)))
        return
    table, rows = Table(COLUMNS), list[dict[str, Any]]()
    print(table.heads)
    for example in EXAMPLES:
        for cluster in CLUSTERS:
            row = in_own_process({"example": example, "cluster_name": cluster})
            rows.append(row)
            name, best = min(row["baselines"].items(), key=lambda item: item[1])
            cells = [f"{row['cost_s'] * 1e3:.3f}", f"{best * 1e3:.3f} {name:<18}", f"{best / row['cost_s']:.3f}"]
            cells += [f"{row['gap']:.1e}", f"{row['joint_gap']:.3f}", f"{row['uneven_classes']}/{row['classes']:<2}"]
            cells += [f"{row['max_relative_error']:.1e}" if "max_relative_error" in row else "-"]
            table.show([f"{example} on {cluster}", *cells, f"{row['total_s']:.1f}"])
            assert row["cost_s"] <= best, f"{example} on {cluster} is costed above {name}"
            assert row.get("check_ok", True), f"{example} on {cluster} computes something else"
    if options.markdown:
        print(markdown(rows))
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
