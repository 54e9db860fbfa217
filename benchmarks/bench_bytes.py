"""The bytes that the cost model counts as moved on one device against those of XLA's compiled HLO.

    python benchmarks/bench_bytes.py [--json OUT] [--ops 8] [mlp transformer cnn gpt ...]

Models as in bench_memory.py. `model`: tensors that ops read or write, fused chains only at their ends
(`CostModel.is_materialized`), fed arguments not counted. `xla`: operands and results of the instructions of the
optimized HLO, a fusion being one; `analysis`: `compiled.cost_analysis()["bytes accessed"]`, which takes less of an
operand that is only sliced. --ops lists the bytes of each primitive; a fusion counts as its root.
"""

from __future__ import annotations

import collections
import re
from typing import Any

import jax
from harness.command import Table, parser, write_json
from harness.examples import EXAMPLES, target

from hapsynth.cluster.cluster import Cluster, DeviceKind, Link
from hapsynth.graph.trace import trace
from hapsynth.hlo.text import parse
from hapsynth.hlo.work import FREE, Computation, nbytes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.search.cost.model import CostModel

MB = 1e6
COLUMNS = {"example": -14, "model": 11, "xla": 11, "ratio": 7, "analysis": 11, " ratio": 7}


def hlo_bytes(text: str) -> dict[str, float]:
    """Bytes that the entry computation of an optimized HLO text moves, by JAX's primitive, or the HLO's own name."""
    module = parse(text)
    entry = Computation(module, module.entry)
    moved: dict[str, float] = collections.defaultdict(float)
    for i in entry.instructions:
        if i.opcode in FREE:
            continue
        scope = re.search(r'op_name="([^"]*)"', i.attributes)
        primitive = scope[1].rpartition("/")[2] if scope else i.opcode
        moved[primitive] += sum(map(nbytes, (i.type, *map(entry.type, i.operands))))
    return moved


def model_bytes(fn: Any, args: Any) -> dict[str, float]:
    """Bytes that the cost model has one device move, by primitive."""
    graph = trace(fn, args).graph
    kind = DeviceKind("one", {"float32": 1e12}, 1e11, 1 << 40)
    model = CostModel(graph, Cluster("one", (kind,), (0,), Link(1e9, 0.0)), FactorTable(graph))
    moved: dict[str, float] = collections.defaultdict(float)
    for op in graph.ops:
        work = model.work(op.index, ())
        moved[op.name] += graph.runs[op.region] * sum(size for _, size in work.moved)
    return moved


def one(name: str) -> dict[str, Any]:
    """MB of one example."""
    fn, args = target(name)
    compiled = jax.jit(fn).lower(*args).compile()
    analysis: Any = compiled.cost_analysis()
    model, xla = model_bytes(fn, args), hlo_bytes(compiled.as_text() or "")
    return {
        "example": name,
        "model": sum(model.values()) / MB,
        "xla": sum(xla.values()) / MB,
        "analysis": float(analysis["bytes accessed"]) / MB,
        "ops": {
            p: [model.get(p, 0.0) / MB, xla.get(p, 0.0) / MB]
            for p in sorted({*model, *xla}, key=lambda p: -model.get(p, 0.0) - xla.get(p, 0.0))
        },
    }


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--ops", type=int, default=0, metavar="N", help="list the N primitives that move most")
    command.add_argument("models", nargs="*", default=EXAMPLES)
    options = command.parse_args()
    table, rows = Table(COLUMNS), list[dict[str, Any]]()
    print(table.heads, " MB")
    for name in options.models:
        row = one(name)
        rows.append(row)
        figures = (row["model"], row["xla"], row["model"] / row["xla"], row["analysis"], row["model"] / row["analysis"])
        table.show([name, *(f"{x:.2f}" for x in figures)])
        for primitive, (model, xla) in list(row["ops"].items())[: options.ops]:
            print(f"  {primitive:<40}{model:11.2f}{xla:11.2f}")
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
