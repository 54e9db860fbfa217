"""The predicted peak of memory per device against XLA's allocation for the compiled plan, on eight host devices.

    python benchmarks/bench_memory.py [--clusters even8,mixed8] [--json OUT] [--tensors 8] [mlp cnn gpt ...]

Models are the examples (all three by default) and those of tests/zoo. `xla` is arguments + results + temporaries, less
what is aliased (donated state), of `compiled.memory_analysis()`; `live` is what XLA's own schedule holds at its fullest
point, so xla / live is what its allocator loses. --tensors lists the largest of them, and of what is predicted at the
fullest point: in the order in which XLA runs it or, with loops or branches, in the program's own.
"""

from __future__ import annotations

import collections
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
from harness import examples
from harness.command import Table, in_own_process, parser, write_json
from harness.examples import EXAMPLES

import hapsynth
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.search.cost.model import CostModel
from hapsynth.search.memory.profile import held_at_peak

MIB = 2**20
COLUMNS = {"": -28, "predicted": 10, "xla": 10, "ratio": 7, "arguments": 10, "temporary": 10, "live": 10, "ratio ": 7}


def one(name: str, cluster_name: str, dump: str) -> dict[str, Any]:
    """Plan and compile one pair; MiB per device. XLA's live ranges are in `dump`, by XLA_FLAGS of this process."""
    jax.config.update("jax_num_cpu_devices", 8)
    cluster = examples.cluster(cluster_name)
    fn, args = examples.target(name)
    plan = hapsynth.synthesize(fn, args, jax.make_mesh((cluster.n,), ("data",)), cluster=cluster)
    xla = plan.lower().compile().memory_analysis()
    results = xla.output_size_in_bytes - xla.alias_size_in_bytes
    (ranges,) = Path(dump).glob("*hapsynth_plan*live-range.txt")
    live = re.findall(r"^    (\S+?)\{[\d,]*\}: (\d+) bytes", ranges.read_text().partition("(peak):")[2], re.MULTILINE)

    graph, sizes = plan.traced.graph, plan.sizes
    at_peak = held_at_peak(plan.program, sizes, CostModel(graph, plan.used, FactorTable(graph)))
    maker = lambda v: "bundle" if v < 0 else graph.ops[graph.producer[v]].name if v in graph.producer else "argument"
    return {
        "model": name,
        "cluster": cluster_name,
        "predicted": max(plan.memory) / MIB,
        "xla": (xla.argument_size_in_bytes + results + xla.temp_size_in_bytes) / MIB,
        "arguments": xla.argument_size_in_bytes / MIB,
        "temporary": xla.temp_size_in_bytes / MIB,
        "live": sum(int(size) for _, size in live) / MIB,
        "predicted_tensors": [(maker(value), nbytes / MIB) for value, nbytes in at_peak],
        "xla_tensors": [(re.sub(r"[.\d]+$", "", tensor), int(size) / MIB) for tensor, size in live],
    }


def dumped(name: str, cluster: str) -> dict[str, Any]:
    """`one` in a process of its own, which XLA reads its flags for."""
    with tempfile.TemporaryDirectory() as dump:
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=hapsynth_plan"
        env = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
        return in_own_process({"name": name, "cluster_name": cluster, "dump": dump}, env=env)


def largest(tensors: list[tuple[str, float]], count: int) -> str:
    """The largest tensors, those of one size together: `3.00 x 4 (exp, mul 2, tanh)`."""
    sizes: dict[float, collections.Counter[str]] = {}
    for name, size in tensors:
        sizes.setdefault(size, collections.Counter())[name] += 1
    listed: list[str] = []
    for size in sorted(sizes, reverse=True)[:count]:
        names = ", ".join(f"{n}{f' {k}' if k > 1 else ''}" for n, k in sorted(sizes[size].items()))
        listed.append(f"{size:9.3f} x {sizes[size].total()} ({names})")
    return "\n    ".join(listed)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--clusters", type=lambda text: text.split(","), default=["even8", "mixed8"])
    command.add_argument("--tensors", type=int, default=0, metavar="N", help="list the N largest sizes of tensors")
    command.add_argument("models", nargs="*", default=EXAMPLES)
    options = command.parse_args()
    if options.row:
        print(json.dumps(one(**options.row)))
        return
    table, rows = Table(COLUMNS), list[dict[str, Any]]()
    print(table.heads, " MiB per device")
    for name in options.models:
        for cluster in options.clusters:
            row = dumped(name, cluster)
            rows.append(row)
            figures = [row["predicted"], row["xla"], row["predicted"] / row["xla"], row["arguments"], row["temporary"]]
            figures += [row["live"], row["predicted"] / row["live"]]
            table.show([f"{name} on {cluster}", *(f"{x:.2f}" for x in figures)])
            if options.tensors:
                print("  predicted:\n    " + largest(row["predicted_tensors"], options.tensors))
                print("  XLA:\n    " + largest(row["xla_tensors"], options.tensors))
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
