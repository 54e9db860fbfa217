"""The evaluation by prediction: HAP's four models on clusters of the literature, against today's usual systems.

    python benchmarks/evaluation.py [--only bert,vgg19] [--cluster poplar_b] [--layers 2] [--budget 60]
                                    [--joint-gap 0.03] [--overlap] [--plan-ms 547.8] [--markdown] [--json OUT]

Every system's program is judged by one cost model, hapsynth's; nothing is allocated or run. Systems: data parallel and
ZeRO-1, -2, -3, each even and by speed (Poplar), tensor parallelism (Megatron's cuts), expert parallelism (GShard and
DeepSpeed-MoE) where there are experts, HAP (`systems/hap.py`), each on all devices and on the set of them that suits it
best; one device (`search/planning/baselines.py`, `baseline_subsets.py`); and the plan. Searches for sums begin from no
baseline, those for makespans also from data parallelism, ZeRO-2 and ZeRO-3.

Time is the sum of a program's instructions. `speedup`: of the plan over the best system that fits the memory. `one
ratio`: the best program that is cut by one ratio throughout (the plan's, a baseline or HAP) over the plan; `even`: the
same where all is cut evenly. Neither looks at memory. `rounding`: by which fraction the best fractions of the plan's
program take less than its whole units at most (`Result.rounding_gap`).

With `--overlap` time is the makespan, collectives beside computing, in the best order found (`search/scheduling`), of
the plan (`synthesize(overlap=True)`) and of all others. `of the sum`: the plan that minimizes the sum, its order chosen
by the same scheduler; what the plan gains on it is the program's. `over`: the best baseline over the plan. With
`--plan-ms` baselines alone are made, beside a plan that took so long: for a row whose plan was found before.

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
from hapsynth._quantities import indices
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import trace
from hapsynth.plan import Plan
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.planning.baseline_subsets import BaselinesOnSubsets, label
from hapsynth.search.planning.baselines import Baseline, Baselines
from hapsynth.search.planning.makespan import TOLERANCE
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.search.planning.task import Task
from hapsynth.search.scheduling.list_schedule import schedule
from hapsynth.search.scheduling.tasks import tasks_of
from hapsynth.search.sizing.ratios import own_weights, proportional
from hapsynth.search.sizing.sizer import Sizer

_EXACT = 1e-9
MODEL_NAMES = ("vgg19", "vit_b", "bert", "bert_moe")
CLUSTERS = ("paper64", "poplar_a", "poplar_b", "poplar_c", "lab4", "h200_a100")
HEADS = (
    *("cluster", "model", "plan", "its devices", "gap", "joint gap", "rounding", "best baseline on its best devices"),
    *("over", "over HAP", "one ratio", "even", "CPU s: plan", "strategy"),
)
OVERLAP_HEADS = (
    *("cluster", "model", "plan", "its devices", "gap", "joint gap", "of the sum", "best baseline on all devices"),
    *("best baseline on its best devices", "over", "CPU s: plan", "baselines", "strategy"),
)


def one(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one model on one cluster, as JSON."""
    where = examples.cluster(row["cluster"])
    build = MODELS[row["model"]]
    deep = {"layers": row["layers"]} if row["layers"] and "layers" in inspect.signature(build).parameters else {}
    row["layers"] = deep.get("layers")
    fn, args = build(where.n, **deep)
    if options.plan_ms is not None:
        found = overlapped_baselines(trace(fn, args).graph, where, options.plan_ms / 1e3)
        return {**row, "status": "baselines alone", **found}
    if options.overlap:
        return overlapped_row(row, fn, args, where, options.budget)
    return summed_row(row, fn, args, where, options.budget, options.joint_gap)


def overlapped_baselines(graph: Graph, where: Cluster, plan_s: float) -> dict[str, Any]:
    """The baselines' makespans beside that of a plan, and it."""
    began = time.process_time()
    systems = systems_of(graph, where).best(overlap=True, each=False)
    fitting = {name: b for name, b in systems.items() if b.fits}
    everywhere = {name: b for name, b in fitting.items() if b.devices is None}
    least = lambda among: min(among, key=lambda name: among[name].cost_s, default=None)
    return {
        "cost_s": plan_s,
        "of": where.n,
        "systems": {name: judgement(b) for name, b in systems.items()},
        "best_everywhere": least(everywhere),
        "best": least(fitting),
        "worse_than": [name for name, b in fitting.items() if plan_s > b.cost_s * (1 + TOLERANCE)],
        "baselines_cpu_s": time.process_time() - began,
    }


def overlapped_row(row: dict[str, Any], fn: Any, args: Any, where: Cluster, budget: float | None) -> dict[str, Any]:
    began = time.process_time()
    try:
        plan = hapsynth.synthesize(fn, args, where, time_budget_s=budget, overlap=True)
        planned = time.process_time()
        row["plan_cpu_s"] = planned - began
        summed = hapsynth.synthesize(fn, args, where, time_budget_s=budget)
    except InfeasibleError as error:
        return {**row, "status": "infeasible", "error": str(error)}
    costs = summed.cost_model()
    row["of_the_sum"] = {
        "cost_s": summed.cost,
        "makespan_s": schedule(tasks_of(summed.program, summed.sizes, costs, dominated=False)).makespan_s,
        "devices": list(summed.devices),
        "cpu_s": time.process_time() - planned,
        "strategy": in_words(summed, where),
    }
    return {
        **row,
        "status": plan.result.status,
        "gap": plan.gap,
        "joint_gap": plan.result.joint_gap,
        "exposed_s": plan.result.exposed_communication_s,
        "clocks_s": dict(plan.result.clocks_s),
        "devices": list(plan.devices),
        "strategy": in_words(plan, where),
        **overlapped_baselines(plan.traced.graph, where, plan.cost),
    }


def summed_row(
    row: dict[str, Any], fn: Any, args: Any, where: Cluster, budget: float | None, joint_gap: float | None
) -> dict[str, Any]:
    try:
        began = time.process_time()
        plan = hapsynth.synthesize(fn, args, where, time_budget_s=budget, joint_gap=joint_gap)
        row["plan_cpu_s"] = time.process_time() - began
        graph = plan.traced.graph
    except InfeasibleError as error:
        plan, row["error"] = None, str(error)
        graph = trace(fn, args).graph
    baselines = systems_of(graph, where)
    systems = baselines.best(each=False)
    judged = {name: judgement(b) for name, b in systems.items()}
    judged["hap"]["found"] = str(strategy(baselines.everywhere, systems["hap"].program, systems["hap"].sizes))
    row |= {"systems": judged, "ops": len(graph.ops), "of": where.n}
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
    return {
        **row,
        "status": plan.result.status,
        "cost_s": plan.cost,
        "gap": plan.gap,
        "joint_gap": plan.result.joint_gap,
        "rounding_gap": plan.result.rounding_gap,
        "devices": list(plan.devices),
        "memory_bytes": max(plan.memory),
        "best": min(fitting, key=lambda name: fitting[name], default=None),
        "worse_than": [name for name, cost in fitting.items() if plan.cost > cost * (1 + _EXACT)],
        "one_ratio": one_ratio / plan.cost,
        "even": even / plan.cost,
        "strategy": in_words(plan, where),
    }


def in_words(plan: Plan, where: Cluster) -> str:
    """What a plan does, and what it leaves out."""
    used = Task(plan.traced.graph, plan.used if plan.used.n < where.n else where)
    idle = Counter(where.devices[d].name for d in range(where.n) if d not in plan.devices)
    words = strategy(Baselines(used), plan.program, plan.sizes)
    return "; ".join([str(words), *(f"{n} {name} left out" for name, n in idle.items())])


def systems_of(graph: Graph, where: Cluster) -> BaselinesOnSubsets:
    """The baselines and HAP."""
    task = Task(graph, where)
    return BaselinesOnSubsets(task, made, names=(*Baselines(task).names, "hap"))


def made(baselines: Baselines, names: Sequence[str]) -> dict[str, Baseline]:
    """Some of the baselines, or HAP."""
    found = baselines.all([name for name in names if name != "hap"])
    return {**found, "hap": Hap(baselines).baseline()} if "hap" in names else found


def judgement(b: Baseline) -> dict[str, Any]:
    """A system as JSON."""
    devices = None if b.devices is None else list(b.devices)
    found = b.program.collectives()
    return {"cost_s": b.cost_s, "fits": b.fits, "devices": devices, "found": found}


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table; a dash for a missing figure."""
    shown, systems, best = named(row), row.get("systems", {}), row.get("best")
    if "cost_s" not in row:
        fits = ", ".join(name for name, s in systems.items() if s["fits"])
        words = f"{row['status']}; fit: {fits or 'no baseline'}" if systems else row["status"]
        return [*shown, *["-"] * (len(HEADS) - 3), words]
    cost = row["cost_s"]
    over = lambda s: f"{s['cost_s'] / cost:.3f}x" + ("" if s["fits"] else ", does not fit")
    shown += [
        ms(cost),
        on(row["devices"], row["of"]),
        *(f"{row[gap]:.1%}" for gap in ("gap", "joint_gap", "rounding_gap")),
    ]
    shown += [of_system(row, best), over(systems[best]) if best else "-", over(systems["hap"])]
    shown += [f"{row['one_ratio']:.2f}x", f"{row['even']:.2f}x", f"{row['plan_cpu_s']:.0f}"]
    return [*shown, row["strategy"] + worse(row)]


def overlap_cells(row: dict[str, Any]) -> list[str]:
    """One row of the table of makespans; a dash for a missing figure."""
    shown = named(row)
    if "cost_s" not in row:
        return [*shown, *["-"] * (len(OVERLAP_HEADS) - 3), row["status"]]
    cost, summed = row["cost_s"], row.get("of_the_sum")
    shown.append(ms(cost))
    if summed is None:
        shown += ["-"] * 4
    else:
        shown += [on(row["devices"], row["of"]), f"{row['gap']:.2%}", f"{row['joint_gap']:.1%}"]
        shown.append(f"{ms(summed['makespan_s'])} on {on(summed['devices'], row['of'])}")
    shown += [of_system(row, row["best_everywhere"]), of_system(row, row["best"])]
    shown.append(f"{row['systems'][row['best']]['cost_s'] / cost:.3f}x" if row["best"] else "-")
    shown += ["-" if summed is None else f"{row['plan_cpu_s']:.0f}", f"{row['baselines_cpu_s']:.0f}"]
    return [*shown, row.get("strategy", row["status"]) + worse(row)]


def named(row: dict[str, Any]) -> list[str]:
    return [row["cluster"], row["model"] + (f" {row['layers']}" if row["layers"] else "")]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def on(devices: Sequence[int], of: int) -> str:
    """The devices of a plan, of so many."""
    return "all" if len(devices) in (0, of) else indices(devices)


def of_system(row: dict[str, Any], name: str | None) -> str:
    if name is None:
        return "none fits"
    return f"{ms(row['systems'][name]['cost_s'])} {label(name).replace('hap', 'HAP')}"


def worse(row: dict[str, Any]) -> str:
    return f" WORSE THAN {', '.join(row['worse_than'])}" if row["worse_than"] else ""


def arguments() -> argparse.Namespace:
    where = sorted(file.stem for file in examples.CLUSTERS.glob("*.toml"))
    command = parser(__doc__)
    command.add_argument("--only", type=names(MODELS), default=list(MODEL_NAMES), help=f"of {', '.join(MODELS)}")
    command.add_argument("--cluster", type=names(where), default=list(CLUSTERS), help="files of examples/clusters")
    command.add_argument("--layers", type=int, help="of the transformers (default: 12)")
    command.add_argument("--budget", type=float, help="seconds per plan (default: until proved)")
    command.add_argument("--timeout", type=float, default=1800, help="seconds per row (default: 1800)")
    command.add_argument("--overlap", action="store_true", help="makespans, collectives beside computing")
    command.add_argument("--plan-ms", type=float, help="a plan's makespan, found before: baselines alone, of one row")
    command.add_argument("--joint-gap", type=float, help="how close bounds of sums at any ratios have to come")
    command.add_argument("--markdown", action="store_true", help="the table for the docs")
    options = command.parse_args()
    if options.layers is not None and options.layers < 1:
        command.error(f"--layers {options.layers}: give a whole number of at least 1")
    if options.plan_ms is not None and not (options.overlap and len(options.cluster) == len(options.only) == 1):
        command.error("--plan-ms is the makespan of one plan: give --overlap, one --cluster and one model with --only")
    return options


def main() -> int:
    options = arguments()
    if options.row:
        print(json.dumps(one(options.row, options)))
        return 0
    pairs = [(where, model) for where in options.cluster for model in options.only]
    made = (
        row_or_failure({"model": m, "cluster": c, "layers": options.layers}, timeout_s=options.timeout)
        for c, m in pairs
    )
    heads, shown = (OVERLAP_HEADS, overlap_cells) if options.overlap else (HEADS, cells)
    rows = show_rows(heads, made, shown, options.json, markdown=options.markdown)
    return int(any(row["status"].startswith("error") or row.get("worse_than") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
