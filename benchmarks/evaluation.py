"""The evaluation by prediction: HAP's four models on clusters of the literature, against today's usual systems.

    python benchmarks/evaluation.py [--only bert,vgg19] [--cluster poplar_b] [--layers 2] [--budget 60]
                                    [--markdown] [--json OUT]

Every system's program is judged by one cost model, hapsynth's; nothing is allocated or run. Systems: data parallel and
ZeRO-1, -2, -3, each even and by speed (Poplar), Megatron's tensor parallelism, expert parallelism (GShard and
DeepSpeed-MoE) where there are experts, HAP (`systems/hap.py`), each on all devices and on the set of them that suits it
best; one device (`search/planning/baselines.py`, `baseline_subsets.py`); and the plan, whose search began from none.

`speedup`: of the plan over the best system that fits the memory. `one ratio`: the best program that is cut by one ratio
throughout (the plan's, a baseline or HAP) over the plan; `even`: the same where all is cut evenly. Neither looks at
memory. `rounding`: how far the plan's whole units are at most above the best fractions of its program
(`Result.rounding_gap`). `makespan`: the step of the plan that minimizes it with overlap (`synthesize(overlap=True)`),
its gap, and `over it`: the best system whose collectives run beside computing too, in the best order found
(`search/scheduling`). `scheduled`: the plan of the sum, its order chosen afterwards.
Models at HAP's sizes: batch 32 x devices, 768 wide, 12 layers, sequence 128, experts 2 x devices. Each row in a process
of its own.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from harness import examples
from harness.command import names, parser, row_or_failure, show_rows
from models import MODELS
from systems.hap import Hap
from systems.strategy import strategy

import hapsynth
from hapsynth.graph.trace import trace
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.planning.baseline_subsets import BaselinesOnSubsets
from hapsynth.search.planning.baselines import Baseline, Baselines
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.search.planning.task import Task
from hapsynth.search.scheduling.list_schedule import least_makespan, schedule
from hapsynth.search.scheduling.tasks import tasks_of
from hapsynth.search.sizing.ratios import own_weights, proportional
from hapsynth.search.sizing.sizer import Sizer

_EXACT = 1e-9
MODEL_NAMES = ("vgg19", "vit_b", "bert", "bert_moe")
CLUSTERS = ("paper64", "poplar_a", "poplar_b", "poplar_c", "lab4", "h200_a100")
HEADS = (
    *("model", "cluster", "step s", "GiB", "gap", "joint gap", "rounding", "best baseline", "its s", "speedup"),
    *(
        "over HAP",
        "one ratio",
        "even",
        "scheduled",
        "makespan",
        "its gap",
        "its joint gap",
        "best overlapped",
        "its s",
        "over it",
        "seconds",
        "strategy",
    ),
)


def one(row: dict[str, Any], budget: float | None) -> dict[str, Any]:
    """Everything about one model on one cluster, as JSON."""
    where = examples.cluster(row["cluster"])
    build = MODELS[row["model"]]
    deep = {"layers": row["layers"]} if row["layers"] and "layers" in inspect.signature(build).parameters else {}
    row["layers"] = deep.get("layers")
    fn, args = build(where.n, **deep)
    try:
        began = time.perf_counter()
        plan = hapsynth.synthesize(fn, args, where, time_budget_s=budget)
        row["seconds"] = time.perf_counter() - began
        graph = plan.traced.graph
        began = time.perf_counter()
        overlapped = hapsynth.synthesize(fn, args, where, time_budget_s=budget, overlap=True).result
        row["overlap"] = {
            "makespan_s": overlapped.cost_s,
            "gap": overlapped.gap,
            "joint_gap": overlapped.joint_gap,
            "exposed_s": overlapped.exposed_communication_s,
            "devices": overlapped.devices,
            "seconds": time.perf_counter() - began,
        }
    except InfeasibleError as error:
        plan, row["error"] = None, str(error)
        graph = trace(fn, args).graph
    baselines = BaselinesOnSubsets(Task(graph, where), made, names=(*Baselines(Task(graph, where)).names, "hap"))
    systems = baselines.best()
    judged = {name: judgement(b) for name, b in systems.items()}
    judged["hap"]["found"] = str(strategy(baselines.everywhere, systems["hap"].program, systems["hap"].sizes))
    overlapping = {name: judgement(b) for name, b in baselines.best(overlap=True).items()}
    row |= {"systems": judged, "overlapping": overlapping, "ops": len(graph.ops), "devices": where.n}
    row["status"] = "infeasible"
    if plan is None:
        return row
    # The plan may leave devices out.
    task = Task(graph, plan.used if plan.used.n < where.n else where)
    costs = task.costs
    weights = {"even": np.ones(costs.n), "speed": proportional(costs.rate("float32"))}
    weights["own"] = own_weights(costs, plan.sizes)
    sizer = Sizer(plan.program, plan.sizes.classes, costs)
    at = {name: program_cost(plan.program, sizer.fixed(w), costs) for name, w in weights.items()}
    cut_evenly = lambda name: "_speed" not in name and not name.startswith("hap")
    even = min(at["even"], *(b.cost_s for name, b in systems.items() if cut_evenly(name)))
    expert = lambda name: name.startswith("expert") and not cut_evenly(name)
    one_ratio = min(*at.values(), *(b.cost_s for name, b in systems.items() if not expert(name)))
    fitting = {name: b.cost_s for name, b in systems.items() if b.fits}
    beside = {name: s["cost_s"] for name, s in overlapping.items() if s["fits"]}
    tasks = tasks_of(plan.program, plan.sizes, costs)
    timeline = schedule(tasks)
    words = strategy(Baselines(task), plan.program, plan.sizes)
    idle = [where.devices[d].name for d in range(where.n) if d not in plan.devices]
    return {
        **row,
        "status": plan.result.status,
        "cost_s": plan.cost,
        "gap": plan.gap,
        "joint_gap": plan.result.joint_gap,
        "rounding_gap": plan.result.rounding_gap,
        "memory_bytes": max(plan.memory),
        "best": min(fitting, key=lambda name: fitting[name], default=None),
        "worse_than": [
            *(name for name, cost in fitting.items() if plan.cost > cost * (1 + _EXACT)),
            *(
                f"{name}, overlapped"
                for name, cost in beside.items()
                if row["overlap"]["makespan_s"] > cost * (1 + _EXACT)
            ),
        ],
        "makespan_s": timeline.makespan_s,
        "exposed_s": timeline.exposed_s,
        "least_makespan_s": least_makespan(tasks),
        "best_overlapped": min(beside, key=lambda name: beside[name], default=None),
        "one_ratio": one_ratio / plan.cost,
        "even": even / plan.cost,
        "strategy": "; ".join([str(words), *(f"{n} {name} left out" for name, n in Counter(idle).items())]),
        "left_out": sorted({*idle, *words.without}),
    }


def made(baselines: Baselines, names: Sequence[str]) -> dict[str, Baseline]:
    """Some of the baselines, or HAP."""
    found = baselines.all([name for name in names if name != "hap"])
    return {**found, "hap": Hap(baselines).baseline()} if "hap" in names else found


def judgement(b: Baseline) -> dict[str, Any]:
    """A system as JSON."""
    devices = None if b.devices is None else list(b.devices)
    found = b.program.collectives()
    return {"cost_s": b.cost_s, "memory_bytes": b.memory_bytes, "fits": b.fits, "devices": devices, "found": found}


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table; a dash for a missing figure."""
    name = row["model"] + (f" {row['layers']}" if row["layers"] else "")
    systems, best, hap = row.get("systems", {}), row.get("best"), row.get("systems", {}).get("hap")
    if "cost_s" not in row:
        fits = ", ".join(name for name, s in systems.items() if s["fits"])
        words = f"{row['status']}; fit: {fits or 'no baseline'}" if systems else row["status"]
        return [name, row["cluster"], *["-"] * (len(HEADS) - 3), words]
    cost = row["cost_s"]
    over = lambda s: f"{s['cost_s'] / cost:.2f}x" + ("" if s["fits"] else " (does not fit)")
    shown = [f"{cost:.4g}", f"{row['memory_bytes'] / 2**30:.1f}", f"{row['gap']:.1e}", f"{row['joint_gap']:.1e}"]
    shown.append(f"{row['rounding_gap']:.1e}")
    if best:
        shown += [best, f"{systems[best]['cost_s']:.4g}", over(systems[best])]
    else:
        shown += ["none fits", "-", "-"]
    shown += [over(hap), f"{row['one_ratio']:.2f}x", f"{row['even']:.2f}x", f"{row['makespan_s']:.4g}"]
    found = row["overlap"]
    shown += [f"{found['makespan_s']:.4g}", f"{found['gap']:.1e}", f"{found['joint_gap']:.1e}"]
    if ahead := row["best_overlapped"]:
        other = row["overlapping"][ahead]["cost_s"]
        shown += [ahead, f"{other:.4g}", f"{other / found['makespan_s']:.2f}x"]
    else:
        shown += ["none fits", "-", "-"]
    shown.append(f"{row['seconds']:.0f}")
    worse = f" WORSE THAN {', '.join(row['worse_than'])}" if row["worse_than"] else ""
    return [name, row["cluster"], *shown, f"{row['status']}: {row['strategy']}{worse}"]


def arguments() -> argparse.Namespace:
    where = sorted(file.stem for file in examples.CLUSTERS.glob("*.toml"))
    command = parser(__doc__)
    command.add_argument("--only", type=names(MODELS), default=list(MODEL_NAMES), help=f"of {', '.join(MODELS)}")
    command.add_argument("--cluster", type=names(where), default=list(CLUSTERS), help="files of examples/clusters")
    command.add_argument("--layers", type=int, help="of the transformers (default: 12)")
    command.add_argument("--budget", type=float, help="seconds per plan (default: until proved)")
    command.add_argument("--timeout", type=float, default=1800, help="seconds per row (default: 1800)")
    command.add_argument("--markdown", action="store_true", help="the table for the docs")
    options = command.parse_args()
    if options.layers is not None and options.layers < 1:
        command.error(f"--layers {options.layers}: give a whole number of at least 1")
    return options


def main() -> int:
    options = arguments()
    if options.row:
        print(json.dumps(one(options.row, options.budget)))
        return 0
    pairs = [(where, model) for where in options.cluster for model in options.only]
    made = (
        row_or_failure({"model": m, "cluster": c, "layers": options.layers}, timeout_s=options.timeout)
        for c, m in pairs
    )
    rows = show_rows(HEADS, made, cells, options.json, markdown=options.markdown)
    return int(any(row["status"].startswith("error") or row.get("worse_than") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
