"""Weak scaling by prediction: how many times as fast as one device a cluster trains, as it grows and its batch with it.

    python benchmarks/scaling.py [--series unlike,even] [--only hap_bert] [--devices 8,16] [--budget 60] [--sum]
                                 [--markdown] [--json OUT]

`unlike`: a quarter V100 and three quarters P100 of HAP's cluster (`examples/clusters/hap64.toml`), 8 to 64 of them.
`even`: V100s, eight to a host, 56 Gbit/s between hosts, 8 to 512 of them, as GradientFlow's larger cluster (Sun et al.
2019, where AlexNet ran 410 times as fast on 512 as on one).

`speed-up`: samples per second over those of one V100 with one device's batch; `linear`: the same if all devices were as
fast as alone, which a plan that cuts the optimizer's update can exceed; `best other`: the best of the systems of
`evaluation.py`'s table but HAP, each on the devices that suit it best. Collectives run beside computing unless `--sum`.
Each row in a process of its own.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

from harness import examples
from harness.command import names, parser, row_or_failure, show_rows
from models import MODELS

import hapsynth
from hapsynth.cluster.cluster import Cluster, Link
from hapsynth.graph.trace import trace
from hapsynth.search.planning.baseline_subsets import BaselinesOnSubsets
from hapsynth.search.planning.baselines import Baselines
from hapsynth.search.planning.task import Task

SERIES = {"unlike": (8, 16, 32, 64), "even": (8, 16, 32, 64, 128, 256, 512)}
HEADS = ("series", "devices", "model", "step s", "speed-up", "linear", "gap", "best other", "its speed-up", "seconds")
_PER_HOST = 8
_FDR = Link(bandwidth=56e9 / 8, latency=5e-6)
"""InfiniBand, nominal."""


def cluster(series: str, devices: int) -> Cluster:
    """A series' cluster of so many devices."""
    full = examples.cluster("hap64")
    fast, slow = full.kinds
    if series == "unlike":
        first = full.devices.index(slow)
        return full.subset((*range(devices // 4), *range(first, first + devices - devices // 4)))
    hosts = tuple(d // _PER_HOST for d in range(devices))
    return replace(full, name=f"even{devices}", devices=(fast,) * devices, hosts=hosts, network=_FDR, axes=())


def one(row: dict[str, Any], budget: float | None, *, overlap: bool) -> dict[str, Any]:
    """Everything about one model on one cluster, as JSON."""
    where, build = cluster(row["series"], row["devices"]), MODELS[row["model"]]
    fn, args = build(where.n)
    began = time.perf_counter()
    plan = hapsynth.synthesize(fn, args, where, time_budget_s=budget, overlap=overlap)
    seconds = time.perf_counter() - began
    found = BaselinesOnSubsets(Task(plan.traced.graph, where)).best(overlap=overlap)
    others = {name: b.cost_s for name, b in found.items() if b.fits}
    best = min(others, key=lambda name: others[name], default=None)
    graph = trace(*build(1)).graph
    alone = [Baselines(Task(graph, where.subset((where.devices.index(k),)))).alone().cost_s for k in where.kinds]
    linear = sum(where.devices.count(kind) * alone[0] / s for kind, s in zip(where.kinds, alone, strict=True))
    return {
        **row,
        "status": plan.result.status,
        "cost_s": plan.cost,
        "gap": plan.gap,
        "alone_s": alone,
        "linear": linear,
        "speed_up": where.n * alone[0] / plan.cost,
        "best": best,
        "best_s": others[best] if best else None,
        "seconds": seconds,
    }


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table; a dash for a missing figure."""
    shown = [row["series"], str(row["devices"]), row["model"]]
    if "cost_s" not in row:
        return [*shown, *["-"] * (len(HEADS) - 4), row["status"]]
    other = f"{row['devices'] * row['alone_s'][0] / row['best_s']:.1f}" if row["best"] else "-"
    shown += [f"{row['cost_s']:.4g}", f"{row['speed_up']:.1f}", f"{row['linear']:.1f}", f"{row['gap']:.1e}"]
    return [*shown, row["best"] or "none fits", other, f"{row['seconds']:.0f}"]


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--series", type=names(SERIES), default=list(SERIES), help=f"of {', '.join(SERIES)}")
    command.add_argument("--only", type=names(MODELS), default=["hap_bert"], help=f"of {', '.join(MODELS)}")
    sizes = sorted({str(n) for counts in SERIES.values() for n in counts}, key=int)
    command.add_argument("--devices", type=names(sizes), default=sizes, help=f"of {', '.join(sizes)}")
    command.add_argument("--budget", type=float, help="seconds per plan (default: until proved)")
    command.add_argument("--timeout", type=float, default=1800, help="seconds per row (default: 1800)")
    command.add_argument("--sum", action="store_true", help="nothing runs beside anything")
    command.add_argument("--markdown", action="store_true", help="the table for the docs")
    options = command.parse_args()
    if options.row:
        print(json.dumps(one(options.row, options.budget, overlap=not options.sum)))
        return 0
    wanted = [
        {"series": series, "devices": devices, "model": model}
        for series in options.series
        for devices in SERIES[series]
        if str(devices) in options.devices
        for model in options.only
    ]
    made = (row_or_failure(row, timeout_s=options.timeout) for row in wanted)
    rows = show_rows(HEADS, made, cells, options.json, markdown=options.markdown)
    return int(any(row["status"].startswith("error") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
