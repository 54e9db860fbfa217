"""Is the cost model right? Predicted against measured step times on this machine's cores.

    python benchmarks/accuracy.py [--devices 2] [--keep DIR] [--batch 1 4] [--sizes even skewed] [--rounds 9]
                                  [--json accuracy.json] [gpt resnet mixer lstm]

A device is a process on a core of its own: XLA's host devices of one process share its threads, so that one works
faster while another waits. They are profiled first, as `hapsynth profile` does, unless `--keep` has that already;
nothing of a profile comes from these models. Two are of tests/zoo, two are new. `even`: planned for the devices as they
are. `skewed`: every second device is described to the search as three times slower, which cuts what it cuts at about
3:1; that program at these sizes is then costed with the devices as they are. All predictions are in the JSON file
before anything is measured; rows are then measured in turn, in random order, on data that already lies on the devices.
Whatever else runs on the machine is measured too, and stretches the waits between processes most: end it first.

As root the processes have a loopback of their own with packets of a network's size. With its usual 64 KiB, two of
which exceed the window that a connection begins with, Linux puts off acknowledgements: an all-to-all of 2.5 MiB took a
second, in waits of 44 ms each, or 1 ms, whichever messages came before it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness.breakdown import where
from harness.command import again, parser, write_json
from harness.timing import KEEPS_MEMORY, together
from jax import lax
from jax.sharding import Mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from models import Batch, Params, Target, cross_entropy, dense, dense_shapes, f32, i32, training_step
from zoo import language, vision

import hapsynth
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.testing.example_arguments import random_arguments
from hapsynth.profile.job import Job
from hapsynth.profile.run import Options, profile
from hapsynth.rendezvous.address import free_ports
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.program_cost import program_cost

_OWN_LOOPBACK = ("unshare", "--net", "sh", "-c", 'ip link set lo up mtu 1500 && exec "$0" "$@"')
SLOWER = 3.0
MEDIAN, WORST = 0.15, 0.30
"""How far off predictions may be."""
_WARM_UP = 2


def gpt(batch: int) -> Any:
    """The zoo's, wide and long enough that a step takes tens of milliseconds."""
    language.VOCAB, language.LENGTH, language.WIDTH = 512, 64, 128
    return larger(language.gpt(layers=2), batch)


def resnet(batch: int) -> Any:
    return larger(vision.resnet(), 16 * batch)


def larger(model: Any, factor: int) -> Any:
    """A model with `factor` times the batch: of all arguments but the state."""
    fn, (state, *rest) = model
    grown = [x if not x.shape else jax.ShapeDtypeStruct((factor * x.shape[0], *x.shape[1:]), x.dtype) for x in rest]
    return fn, (state, *grown)


def mixer(batch: int) -> Target:
    """Classifies sequences of 64 patches: perceptrons over positions and over channels in turn."""
    rows, patches, width, classes, layers = 32 * batch, 64, 192, 100, 3
    params: Params = {"head": dense_shapes(width, classes, bias=(classes,))}
    for i in range(layers):
        for name, n in (("tokens", patches), ("channels", width)):
            params[f"{name}{i}"] = {
                "up": dense_shapes(n, 4 * n, bias=(4 * n,)),
                "down": dense_shapes(4 * n, n, bias=(n,)),
                "scale": f32(width),
            }

    def mixed(p: Params, x: jax.Array) -> jax.Array:
        return dense(p["down"], "npf,fc->npc", jax.nn.gelu(dense(p["up"], "npc,cf->npf", x)))

    def normal(p: Params, x: jax.Array) -> jax.Array:
        return x * lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * p["scale"]

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        x = batch["x"]
        for i in range(layers):
            tokens, channels = params[f"tokens{i}"], params[f"channels{i}"]
            x = x + jnp.swapaxes(mixed(tokens, jnp.swapaxes(normal(tokens, x), 1, 2)), 1, 2)
            x = x + mixed(channels, normal(channels, x))
        return cross_entropy(dense(params["head"], "nc,ck->nk", x.mean(axis=1)), batch["y"]).mean()

    return training_step(loss_fn, params, {"x": f32(rows, patches, width), "y": i32(rows)})


def lstm(batch: int) -> Target:
    """Classifies sequences of 32 vectors by the last state of an LSTM."""
    rows, steps, width, classes = 48 * batch, 32, 192, 20
    params: Params = {
        "input": dense_shapes(width, 4 * width, bias=(4 * width,)),
        "hidden": dense_shapes(width, 4 * width),
        "head": dense_shapes(width, classes, bias=(classes,)),
    }

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        def cell(state: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            h, c = state
            gates = dense(params["input"], "nd,de->ne", x) + dense(params["hidden"], "nd,de->ne", h)
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        empty = jnp.zeros((rows, width), jnp.float32)
        (h, _), _ = lax.scan(cell, (empty, empty), jnp.swapaxes(batch["x"], 0, 1))
        return cross_entropy(dense(params["head"], "nd,dk->nk", h), batch["y"]).mean()

    return training_step(loss_fn, params, {"x": f32(rows, steps, width), "y": i32(rows)})


MODELS: dict[str, Callable[[int], Any]] = {"gpt": gpt, "resnet": resnet, "mixer": mixer, "lstm": lstm}


@dataclass
class Row:
    """One model, batch and kind of sizes: its plan, and its record."""

    record: dict[str, Any]
    plan: hapsynth.Plan

    def stepper(self) -> Callable[[], None]:
        """Runs a step on the state that the last one left, and waits for it."""
        state, *rest = self.plan.shard(*random_arguments(self.plan.traced)[0])
        states = [state]

        def step() -> None:
            states[0], *others = self.plan(states[0], *rest)
            jax.block_until_ready((states[0], others))

        return step


def predicted(name: str, batch: int, sizes: str, cluster: hapsynth.Cluster, mesh: Mesh, keep: str | None) -> Row:
    fn, args = MODELS[name](batch)
    described = cluster
    if sizes == "skewed":
        slow = [k if i % 2 == 0 else k.faster(1 / SLOWER, f"slow {k.name}") for i, k in enumerate(cluster.devices)]
        described = replace(cluster, devices=tuple(slow))
    file = keep and Path(keep) / f"{name}-{batch}x-{sizes}.json"
    if file and file.exists():
        plan = hapsynth.load(file, fn, args, mesh)
    else:
        plan = hapsynth.synthesize(fn, args, mesh, cluster=described, leave_out=False)
        if file and jax.process_index() == 0:
            plan.save(file)
    costs = CostModel(plan.traced.graph, cluster, FactorTable(plan.traced.graph))
    record = {
        "model": name,
        "batch": batch,
        "sizes": sizes,
        "ratio": Counter(plan.ratios.values()).most_common(1)[0][0] if plan.ratios else (),
        "predicted": program_cost(plan.program, plan.sizes, costs),
        "where": where(plan, costs),
    }
    return Row(record, plan)


def measured(rows: list[Row], rounds: int, job: Job, seed: int = 0) -> None:
    """Adds the median and the quartiles of `rounds` calls to each row: seconds until the last process had its
    results."""
    steps = [row.stepper() for row in rows]
    longest = together(job, steps, _WARM_UP + rounds, seed)
    for row, of_row in zip(rows, longest[:, _WARM_UP:], strict=True):
        low, middle, high = np.quantile(of_row, [0.25, 0.5, 0.75]).tolist()
        row.record |= {"measured": middle, "quartiles": [low, high], "off": log(row.record["predicted"] / middle)}


def report(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'model':<8}{'batch':>6} {'sizes':<8}{'ratio':<14}{'predicted':>12}{'measured':>12}{'quartiles':>20}  ratio"
    )
    for row in rows:
        ratio = ":".join(f"{r:.2f}" for r in row["ratio"])
        low, high = (f"{q * 1e3:.1f}" for q in row["quartiles"])
        print(
            f"{row['model']:<8}{row['batch']:>5}x {row['sizes']:<8}{ratio:<14}{row['predicted'] * 1e3:>9.2f} ms"
            f"{row['measured'] * 1e3:>9.2f} ms{f'{low} .. {high}':>20}  {exp(row['off']):.3f}"
        )
    off = [abs(row["off"]) for row in rows]
    median, worst = statistics.median(off), max(off)
    print(f"off by a factor of {exp(median):.3f} in the median (aim {1 + MEDIAN:.2f}), {exp(worst):.3f} at worst")
    print(f"(aim {1 + WORST:.2f}); {sum(x <= log(1 + WORST) for x in off)} of {len(off)} rows within {WORST:.0%}")


def start(devices: int) -> int:
    """Runs this script in a process on each of `devices` cores; the worst exit code."""
    cores = sorted(os.sched_getaffinity(0))
    if devices > len(cores):
        raise SystemExit(f"--devices {devices}: this machine has {len(cores)} cores, and each device needs one")
    address = f"localhost:{free_ports(2)[0]}"
    env = {**os.environ, **KEEPS_MEMORY}
    # Where hapsynth's processes meet as well.
    env["JAX_COORDINATOR_ADDRESS"] = address
    processes: list[subprocess.Popen[bytes]] = []
    for i, core in enumerate(cores[:devices]):
        os.sched_setaffinity(0, {core})
        processes.append(subprocess.Popen(again("--join", address, str(i)), env=env))
    os.sched_setaffinity(0, cores)
    return max(p.wait() for p in processes)


def within_own_network() -> int:
    """This script in a network namespace, where there may be one; its exit code."""
    command = again("--within")
    if os.geteuid() == 0:
        command = [*_OWN_LOOPBACK, *command]
    else:
        print("not root: measured over the loopback as it is, which may stall", file=sys.stderr)
    return subprocess.call(command)


def run(options: argparse.Namespace, job: Job) -> None:
    """The work of every process; the first one reports."""
    tell = lambda text: print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True) if job.first else None
    file = Path(options.keep) / "cluster.toml" if options.keep else None
    job.agree(True)
    if file and file.exists():
        cluster = hapsynth.Cluster.load(file)
    else:
        cluster = profile(job, Options(), None, force=True, tell=tell, note=print if job.first else tell)
        job.agree(True)
        if file and job.first:
            cluster.save(file)
    mesh = Mesh(np.array(job.devices), ("hap",))
    rows: list[Row] = []
    for name in options.models:
        for batch in options.batch:
            for sizes in options.sizes:
                tell(f"planning {name} {batch}x {sizes}")
                rows.append(predicted(name, batch, sizes, cluster, mesh, options.keep))

    def write() -> None:
        if job.first:
            write_json(options.json, [row.record for row in rows])

    write()
    tell("measuring")
    measured(rows, options.rounds, job)
    tell("")
    write()
    if job.first:
        report([row.record for row in rows])


def main() -> None:
    command = parser(__doc__, json_file=Path("accuracy.json"))
    command.add_argument("--devices", type=int, default=2)
    command.add_argument("--keep", metavar="DIR", help="where the profile and the plans are kept, and taken from")
    command.add_argument("--batch", type=int, nargs="*", default=[1, 4])
    command.add_argument("--sizes", nargs="*", choices=("even", "skewed"), default=["even", "skewed"])
    command.add_argument("--rounds", type=int, default=9)
    command.add_argument("--join", nargs=2, metavar=("ADDRESS", "I"), help="which of the processes this is")
    command.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    command.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    options = command.parse_args()
    if unknown := set(options.models) - set(MODELS):
        command.error(f"no model {', '.join(sorted(unknown))}; use {', '.join(MODELS)}")
    if options.join is None:
        if options.keep:
            Path(options.keep).mkdir(parents=True, exist_ok=True)
        raise SystemExit(start(options.devices) if options.within else within_own_network())
    address, i = options.join
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(address, options.devices, int(i))
    run(options, Job())


if __name__ == "__main__":
    main()
