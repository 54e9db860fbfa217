"""The price of one state for several functions: train, eval and init of the examples planned together, and alone.

    python benchmarks/bench_several.py [--only mlp,cnn] [--cluster mixed8,even8] [--eval 0.1] [--json several.json]

`train`, `eval`: predicted seconds per call of the plans with one state over those of plans alone. `weighed`: the same
of all together, each as often as it is called. `gap`: by which fraction plans with one state take less at most.
Nothing is allocated or run.
"""

from __future__ import annotations

from typing import Any

import jax
from harness import examples
from harness.command import Table, names, parser, write_json
from harness.examples import EXAMPLES

import hapsynth

CLUSTERS = ("even8", "mixed8", "tiny_and_big", "straggler")
COLUMNS = {"model": -13, "cluster": -14, "train": 8, "eval": 8, "weighed": 9, "gap": 9}


def functions(name: str) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """The example's training step, its loss of a batch at the state's parameters, and its initialization."""
    example = examples.example(name)
    train, (state, batch) = example.target()

    def evaluate(state: Any, batch: Any) -> Any:
        # The loss alone: ops that only the gradients and the new state need are not traced.
        return train(state, batch)[1]

    key = jax.random.key(0)
    args = {"train": (state, batch), "eval": (state, batch), "init": (jax.eval_shape(lambda: key),)}
    return {"train": train, "eval": evaluate, "init": example.init}, args


def row(name: str, cluster: str, frequency: float) -> dict[str, Any]:
    fns, args = functions(name)
    where = examples.cluster(cluster)
    plans = hapsynth.synthesize_several(fns, args, where, frequency={"eval": frequency})
    weighed = sum(plans.frequency[f] * alone for f, alone in plans.alone.items())
    return {
        "model": name,
        "cluster": cluster,
        **{f: plans[f].cost / plans.alone[f] for f in ("train", "eval")},
        "weighed": plans.cost / weighed,
        "gap": plans.gap,
    }


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--only", type=names(EXAMPLES), default=list(EXAMPLES), help=f"of {', '.join(EXAMPLES)}")
    where = sorted(file.stem for file in examples.CLUSTERS.glob("*.toml"))
    command.add_argument("--cluster", type=names(where), default=list(CLUSTERS), help="files of examples/clusters")
    command.add_argument("--eval", type=float, default=0.1, help="calls of eval per call of train (default: 0.1)")
    options = command.parse_args()
    table, rows = Table(COLUMNS), list[dict[str, Any]]()
    print(table.heads)
    for name in options.only:
        for cluster in options.cluster:
            rows.append(r := row(name, cluster, options.eval))
            figures = [f"{r['train']:.4f}", f"{r['eval']:.3f}", f"{r['weighed']:.4f}", f"{r['gap']:.1e}"]
            table.show([name, cluster, *figures])
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
