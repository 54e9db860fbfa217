"""On equal devices: the plan against hand-written `jax.jit` data parallelism with NamedSharding.

    python benchmarks/bench_even.py [--rounds 20] [--json OUT] [mlp transformer cnn]

Same functions, same arguments, same donation, eight host devices, cluster even8. The plan must not be slower (D7).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

from harness.command import parser, write_json  # noqa: E402
from harness.examples import EXAMPLES, cluster, example  # noqa: E402
from harness.timing import Stepper, interleaved, report  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import hapsynth  # noqa: E402


def arguments(module: ModuleType) -> tuple[Any, Any]:
    """Real arguments of an example: (state, batch)."""
    return module.init(jax.random.key(0)), module.make_batch(jax.random.key(1))


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=20)
    command.add_argument("examples", nargs="*", default=EXAMPLES)
    options = command.parse_args()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    medians: dict[str, dict[str, float]] = {}
    for name in options.examples:
        module = example(name)
        fn, args = module.target()
        plan = hapsynth.synthesize(fn, args, mesh, cluster=cluster("even8"))
        state, batch = arguments(module)
        whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
        by_hand = jax.jit(fn, in_shardings=(whole, rows), out_shardings=(whole, whole), donate_argnums=0)
        steps = {
            "plan": Stepper(plan, *plan.shard(state, batch)),
            "jax.jit data parallel": Stepper(by_hand, jax.device_put(state, whole), jax.device_put(batch, rows)),
        }
        times = interleaved(steps, options.rounds)
        medians[name] = report(f"{name} on even8", times, "jax.jit data parallel")
    write_json(options.json, medians)


if __name__ == "__main__":
    main()
