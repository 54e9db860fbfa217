"""On equal devices: the plan against hand-written `jax.jit` data parallelism with NamedSharding.

    python benchmarks/bench_even.py [--rounds 20] [mlp transformer cnn]

Same functions, same arguments, same donation, eight host devices, cluster even8. The plan must not be slower (D7).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

from _timing import Stepper, interleaved, report  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import hapsynth  # noqa: E402

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def arguments(example: ModuleType) -> tuple[Any, Any]:
    """Real arguments of an example: (state, batch)."""
    return example.init(jax.random.key(0)), example.make_batch(jax.random.key(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("examples", nargs="*", default=["mlp", "transformer", "cnn"])
    options = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    cluster = hapsynth.Cluster.load(EXAMPLES / "clusters" / "even8.toml")
    for name in options.examples:
        example = importlib.import_module(name)
        fn, args = example.target()
        plan = hapsynth.synthesize(fn, args, mesh, cluster=cluster)
        state, batch = arguments(example)
        whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
        by_hand = jax.jit(fn, in_shardings=(whole, rows), out_shardings=(whole, whole), donate_argnums=0)
        steps = {
            "plan": Stepper(plan, *plan.shard(state, batch)),
            "jax.jit data parallel": Stepper(by_hand, jax.device_put(state, whole), jax.device_put(batch, rows)),
        }
        report(f"{name} on even8", interleaved(steps, options.rounds), "jax.jit data parallel")


if __name__ == "__main__":
    main()
