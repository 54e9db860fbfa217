"""The predicted peak of memory per device against what XLA allocates for the compiled plan, on eight host devices.

    python benchmarks/bench_memory.py [--clusters even8,mixed8] [--json OUT] [--tensors 8] [mlp cnn gpt ...]

Models are the examples (all three by default) and those of tests/zoo. `xla` is arguments + results + temporaries, less
what is aliased (donated state), of `compiled.memory_analysis()`; `live` is what XLA's own schedule holds at its fullest
point, so xla / live is what its allocator loses. --tensors lists the largest of them, and of what is predicted at the
fullest point: in the order in which XLA runs it or, with loops or branches, in the program's own.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("mlp", "transformer", "cnn")
ZOO = {"vision": ("vit", "mixer", "resnet", "unet"), "language": ("gpt", "gpt_scanned", "gru", "experts_einsum")}
MIB = 2**20
HEADS = {"": -28, "predicted": 10, "xla": 10, "ratio": 7, "arguments": 10, "temporary": 10, "live": 10, "ratio ": 7}


def target(name: str) -> tuple[Any, Any]:
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]
    for module, names in ZOO.items():
        if name in names:
            return getattr(importlib.import_module(f"zoo.{module}"), name)()
    return importlib.import_module(name).target()


def one(name: str, cluster_name: str, dump: Path) -> dict[str, Any]:
    """Plan and compile one pair; MiB per device. XLA's live ranges are in `dump`, by XLA_FLAGS of this process."""
    import jax

    import hapsynth
    from hapsynth.instructions.rules.factor_table import FactorTable
    from hapsynth.search.cost.model import CostModel
    from hapsynth.search.memory.profile import held_at_peak

    jax.config.update("jax_num_cpu_devices", 8)
    cluster = hapsynth.Cluster.load(ROOT / "examples" / "clusters" / f"{cluster_name}.toml")
    fn, args = target(name)
    plan = hapsynth.synthesize(fn, args, jax.make_mesh((cluster.n,), ("data",)), cluster=cluster)
    xla = plan.lower().compile().memory_analysis()
    made = xla.output_size_in_bytes - xla.alias_size_in_bytes
    (ranges,) = dump.glob("*hapsynth_plan*live-range.txt")
    live = re.findall(r"^    (\S+?)\{[\d,]*\}: (\d+) bytes", ranges.read_text().partition("(peak):")[2], re.MULTILINE)

    graph, sizes = plan.traced.graph, plan.sizes
    held = held_at_peak(plan.program, sizes, CostModel(graph, plan.used, FactorTable(graph)))
    maker = lambda v: "bundle" if v < 0 else graph.ops[graph.producer[v]].name if v in graph.producer else "argument"
    return {
        "model": name,
        "cluster": cluster_name,
        "predicted": max(plan.memory) / MIB,
        "xla": (xla.argument_size_in_bytes + made + xla.temp_size_in_bytes) / MIB,
        "arguments": xla.argument_size_in_bytes / MIB,
        "temporary": xla.temp_size_in_bytes / MIB,
        "live": sum(int(size) for _, size in live) / MIB,
        "predicted_tensors": [(maker(value), nbytes / MIB) for value, nbytes in held],
        "xla_tensors": [(re.sub(r"[.\d]+$", "", tensor), int(size) / MIB) for tensor, size in live],
    }


def child(name: str, cluster: str) -> dict[str, Any]:
    """`one` in a process of its own, which XLA reads its flags for."""
    with tempfile.TemporaryDirectory() as dump:
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=hapsynth_plan"
        env = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
        command = [sys.executable, __file__, "--pair", name, cluster, dump]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
        return json.loads(done.stdout.splitlines()[-1])


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=lambda text: text.split(","), default=["even8", "mixed8"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tensors", type=int, default=0, metavar="N", help="list the N largest sizes of tensors")
    parser.add_argument("--pair", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("models", nargs="*", default=EXAMPLES)
    options = parser.parse_args()
    if options.pair:
        name, cluster, dump = options.pair
        print(json.dumps(one(name, cluster, Path(dump))))
        return
    rows: list[dict[str, Any]] = []
    print("".join(f"{h:<{-w}}" if w < 0 else f"{h:>{w}}" for h, w in HEADS.items()), " MiB per device")
    for name in options.models:
        for cluster in options.clusters:
            row = child(name, cluster)
            rows.append(row)
            cells = [row["predicted"], row["xla"], row["predicted"] / row["xla"], row["arguments"], row["temporary"]]
            cells += [row["live"], row["predicted"] / row["live"]]
            widths = list(HEADS.values())[1:]
            print(f"{name + ' on ' + cluster:<28}" + "".join(f"{x:{w}.2f}" for x, w in zip(cells, widths)), flush=True)
            if options.tensors:
                print("  predicted:\n    " + largest(row["predicted_tensors"], options.tensors))
                print("  XLA:\n    " + largest(row["xla_tensors"], options.tensors))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
