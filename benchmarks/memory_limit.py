"""Measured: training within a memory limit that stock JAX is killed at, one process with a third of the others' (root).

    python benchmarks/memory_limit.py [--memory 2400MiB:800MiB] [--layers 8] [--systems plan,fsdp,even] [--keep DIR]
                                      [--json memory_limit.json]

Processes of an emulated cluster train a wide perceptron with AdamW; control groups hold each to its limit, Python, XLA
and all, and the kernel kills one that goes over it. `plan`: hapsynth's, in staged form, for the memory that
`hapsynth profile` finds free there, less `--reserve`. `fsdp` and `even`: stock `jax.jit`, ZeRO-3 and data parallel,
even. Each system has processes of its own, which compile first, then take their part of the state from files.

`predicted`: bytes of arrays that a device holds at its fullest; `peak`: how much the process grew while it trained;
`own`: its memory before it held any of the state. The plan's losses and state must agree with one process's.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import emulated
import jax
import models
import numpy as np
from emulated import Machine, machines
from harness.command import names, parser, write_json
from harness.emulated_job import Worker, add_options, check, environment, in_folder, read_json, run
from systems.planned import chosen
from systems.stepped import AGREE, Alone, Jitted, Planned, begun, differences

import hapsynth
from hapsynth.graph.trace import trace

SYSTEMS = ("plan", "fsdp", "even")
MIB = 1 << 20
STAGES = ("compiling", "placing its state", "training", "saving its state")
_MEMORY_FIRST = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
"""XLA's usual order for CPUs makes all clipped gradients before it uses the first, once more the parameters' size.

Plans ask for this one themselves; stock JAX gets it too, so that it is not killed for that.
"""
_LOSSES = "losses.json"


def target(options: argparse.Namespace) -> models.Target:
    """Large parameters, few rows: memory is the state's. Sizes don't depend on how many processes there are."""
    config = models.Perceptron(batch=options.rows, width=options.width, classes=1024, activation=jax.nn.silu)
    return models.mlp(1, layers=options.layers, config=config)


# In processes of their own: `--role`


def alone(options: argparse.Namespace) -> None:
    """One process without a limit: the state that all begin with, and the trained one."""
    fn, shapes = target(options)
    write(options.join / "begun", begun(fn, trace(fn, shapes)))
    system = Alone(fn)
    system.place(read(options.join / "begun", shapes))
    losses = [system.step() for _ in range(options.steps)]
    (options.join / _LOSSES).write_text(json.dumps(losses))
    write(options.join / "trained", system.state)


def plans(options: argparse.Namespace) -> None:
    """Of hapsynth, and of stock JAX's programs as its baselines, which say how much memory they need."""
    fn, shapes = target(options)
    cluster = hapsynth.Cluster.load(options.join / "cluster.toml")
    kinds = [replace(kind, memory=int(kind.memory * (1 - options.reserve))) for kind in cluster.devices]
    cluster = replace(cluster, devices=tuple(kinds))
    for system, plan in chosen(options.systems, fn, shapes, trace(fn, shapes), cluster, form="staged").items():
        plan.save(options.join / f"{system}.json")


class Trainer(Worker):
    """One process of the emulated cluster."""

    def run(self) -> None:
        name, folder = self.options.systems[0], self.folder
        fn, shapes = target(self.options)
        plan = hapsynth.load(folder / f"{name}.json", fn, shapes, self.mesh, form="staged")
        arguments = read(folder / "begun", shapes)
        system = Planned(plan) if name == "plan" else Jitted(fn, self.mesh, arguments, cut_state=name == "fsdp")
        with emulated.unlimited():
            print(STAGES[0], flush=True)
            if isinstance(system, Planned):
                plan.lower().compile()
            else:
                system.compile(arguments)
            # Memory that compiling took and freed.
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            own = resident("VmRSS")
            self.meet()
            print(STAGES[1], flush=True)
            system.place(arguments)
            del arguments
            gc.collect()
            self.meet()
            print(STAGES[2], flush=True)
            # The pages of the files that this process has read are no part of its peak.
            Path("/proc/self/clear_refs").write_text("5")
            losses = [system.step() for _ in range(self.options.steps)]
            peak = resident("VmHWM") - own
            if isinstance(system, Planned):
                print(STAGES[3], flush=True)
                plan.save_state(folder / "state", system.state)
        record = {"own_bytes": own, "peak_bytes": peak, "predicted_bytes": plan.memory[self.index], "losses": losses}
        (folder / f"{name}.{self.index}.json").write_text(json.dumps(record))


def resident(field: str) -> int:
    """Bytes of memory of this process: now (VmRSS), or at most since this was last reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def write(folder: Path, tree: Any) -> None:
    folder.mkdir()
    for i, x in enumerate(jax.tree.leaves(tree)):
        np.save(folder / f"{i}.npy", np.asarray(x))


def read(folder: Path, like: Any) -> Any:
    """The arrays that `write` wrote of a tree like this, left on disk."""
    numbered = enumerate(jax.tree.leaves(like))
    return jax.tree.structure(like).unflatten([np.load(folder / f"{i}.npy", mmap_mode="r") for i, _ in numbered])


# In the process that starts them


def measure(options: argparse.Namespace, folder: Path) -> int:
    options.join = folder
    print("one process alone", flush=True)
    subprocess.run(command(options, "alone"), check=True, env=ours())
    print("profiling", flush=True)
    module = [sys.executable, "-m", "hapsynth", "profile", "-o", str(folder / "cluster.toml"), "--quick", "--force"]
    job = ["--coordinator", "{coordinator}", "--processes", "{n}", "--process", "{i}"]
    check(run(limited(options), folder, [*module, *job], ours(), options.timeout), "memory_limit: profiling")
    print("planning", flush=True)
    subprocess.run(command(options, "plans"), check=True, env=ours())
    rows = [trained(options, folder, system) for system in options.systems]
    write_json(options.json, rows)
    return 0 if report(rows) else 1


def limited(options: argparse.Namespace) -> list[Machine]:
    return machines(options.quotas, memory=options.memory)


def trained(options: argparse.Namespace, folder: Path, name: str) -> dict[str, Any]:
    """Train with one system; its row."""
    doing: dict[str, str] = {}
    ended: list[str] = []

    def show(machine: str, line: str) -> None:
        print(f"[{name} {machine}] {line}", flush=True)
        if machine == "cluster":
            ended.append(line)
        elif line in STAGES and not ended:
            doing[machine] = line

    where = limited(options)
    codes = run(where, folder, command(options, "train", name), ours(name), options.timeout, show)
    row: dict[str, Any] = {"system": name, "limit_bytes": [m.memory for m in where], "ended": ended}
    row["predicted_bytes"] = read_json(folder / f"{name}.json")["memory_bytes"]
    if any(codes):
        return {**row, "codes": codes, "doing": doing}
    each = [read_json(folder / f"{name}.{i}.json") for i in range(len(codes))]
    for field in ("own_bytes", "peak_bytes", "predicted_bytes"):
        row[field] = [record[field] for record in each]
    wanted = np.array(read_json(folder / _LOSSES))
    row["off"] = float(np.max(np.abs(each[0]["losses"] - wanted) / np.abs(wanted)))
    if name == "plan":
        _, shapes = target(options)
        saved = hapsynth.load_state(folder / "state")
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes[0])]
        got = jax.tree.structure(shapes[0]).unflatten([saved[path] for path in paths])
        row["off"] = max(row["off"], differences(got, read(folder / "trained", shapes[0])))
    return row


def ours(system: str = "plan") -> dict[str, str]:
    """The environment of all processes. What is freed goes back to the system at once, so that a process is as large as
    what it holds. Plans ask for XLA's memory-first scheduler themselves."""
    own = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    if system != "plan":
        own["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_MEMORY_FIRST}"
    return environment(own)


def command(options: argparse.Namespace, role: str, *systems: str) -> list[str]:
    words = [sys.executable, __file__, "--role", role, "--join", str(options.join)]
    words += ["--systems", ",".join(systems or options.systems)]
    for name in ("layers", "width", "rows", "steps", "reserve"):
        words += [f"--{name}", str(getattr(options, name))]
    return words


def report(rows: list[dict[str, Any]]) -> bool:
    """Prints all rows; whether the plan trained to the values of one process."""
    fine = True
    mib = lambda figures: " : ".join(f"{b / MIB:.0f}" for b in figures)
    print(f"\nMiB of each process\n{'system':<8}{'limit':>14}{'own':>12}{'predicted':>14}{'peak':>14}{'off':>10}")
    for r in rows:
        columns = f"{r['system']:<8}{mib(r['limit_bytes']):>14}{mib(r.get('own_bytes', [])):>12}"
        columns += f"{mib(r['predicted_bytes']):>14}{mib(r.get('peak_bytes', [])):>14}"
        if "off" in r:
            print(f"{columns}{r['off']:>10.1e}{'' if r['off'] <= AGREE else '  VALUES DIFFER'}")
        else:
            print(f"{columns}  {'; '.join(r['ended'])} ({', '.join(f'{m} {d}' for m, d in r['doing'].items())})")
        fine &= r["system"] != "plan" or r.get("off", 1.0) <= AGREE
    return fine


def arguments() -> argparse.Namespace:
    command = parser(__doc__, json_file=Path("memory_limit.json"))
    command.add_argument("--memory", default="2400MiB:800MiB", help="limit of each process")
    command.add_argument("--quotas", default="0.9:0.9", help="cores of each while it is profiled")
    command.add_argument("--systems", type=names(SYSTEMS), default=list(SYSTEMS), help=f"of {', '.join(SYSTEMS)}")
    command.add_argument("--layers", type=int, default=8)
    command.add_argument("--width", type=int, default=4096)
    command.add_argument("--rows", type=int, default=32, help="of the batch")
    command.add_argument("--steps", type=int, default=10)
    command.add_argument("--reserve", type=float, default=0.1, help="part of the free memory that is not planned with")
    add_options(command, "a new folder for states, profile and plans", 600, "per system")
    command.add_argument("--role", choices=("alone", "plans", "train"), help=argparse.SUPPRESS)
    options = command.parse_args()
    if options.keep is not None and options.keep.exists() and not _is_empty(options.keep):
        command.error(f"--keep: {options.keep} is no new folder; name one, as all that is kept is made anew")
    return options


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def main() -> int:
    options = arguments()
    match options.role:
        case "alone":
            alone(options)
        case "plans":
            plans(options)
        case "train":
            Trainer(options).run()
        case _:
            return in_folder("memory_limit", options.keep, partial(measure, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
