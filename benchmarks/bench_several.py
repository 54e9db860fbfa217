"""What does one state for all cost? Train, eval and init of the examples planned together, over each planned alone.

    python benchmarks/bench_several.py [--only mlp,cnn] [--cluster mixed8,even8] [--eval 0.1] [--json several.json]

`train`, `eval`: predicted seconds per call of the plans with one state over those of plans alone. `weighed`: the same
of all together, each as often as it is called. `gap`: how far at most that is above the best plans with one state.
Nothing is allocated or run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import hapsynth

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "clusters"
EXAMPLES = ("mlp", "transformer", "cnn")
CLUSTERS = ("even8", "mixed8", "tiny_and_big", "straggler")


def functions(name: str) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """The example's training step, its loss of a batch at the state's parameters, and what makes the state."""
    example = importlib.import_module(name)
    train, (state, batch) = example.target()

    def evaluate(state: Any, batch: Any) -> Any:
        # The loss alone: what only the gradients and the new state need is not traced.
        return train(state, batch)[1]

    key = jax.random.key(0)
    given = {"train": (state, batch), "eval": (state, batch), "init": (jax.eval_shape(lambda: key),)}
    return {"train": train, "eval": evaluate, "init": example.init}, given


def row(name: str, cluster: str, frequency: float) -> dict[str, Any]:
    fns, args = functions(name)
    where = hapsynth.Cluster.load(FOLDER / f"{cluster}.toml")
    plans = hapsynth.synthesize(fns, args, where, frequency={"eval": frequency})
    weighed = sum(plans.frequency[f] * alone for f, alone in plans.alone.items())
    return {
        "model": name,
        "cluster": cluster,
        **{f: plans[f].cost / plans.alone[f] for f in ("train", "eval")},
        "weighed": plans.cost / weighed,
        "gap": plans.gap,
    }


def main() -> None:
    names = lambda text: text.split(",")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names, default=list(EXAMPLES), help=f"of {', '.join(EXAMPLES)}")
    parser.add_argument("--cluster", type=names, default=list(CLUSTERS), help="names of files in examples/clusters")
    parser.add_argument("--eval", type=float, default=0.1, help="calls of eval per call of train (default: 0.1)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'model':<13}{'cluster':<14}{'train':>8}{'eval':>8}{'weighed':>9}{'gap':>9}")
    for name in options.only:
        for cluster in options.cluster:
            rows.append(r := row(name, cluster, options.eval))
            figures = f"{r['train']:>8.4f}{r['eval']:>8.3f}{r['weighed']:>9.4f}{r['gap']:>9.1e}"
            print(f"{name:<13}{cluster:<14}{figures}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
