"""Measured: which collective moves a tensor, on emulated machines whose links or shares are unlike (needs root).

    python benchmarks/collectives.py [--only hosts,mlp,lm,moe] [--rounds 10] [--keep DIR] [--json collectives.json]

`hosts`: machines of 3 and 1 processes with a link of 100 Mbit/s between, an all-reduce of 16 MB, flat and over hosts.
Its ceiling is the ratio of the bytes that have to pass the link: 2 x 3/4 of the tensor around a ring of four, 2 x 1/2
between two hosts. The sums within the host, and what a link carries besides, are what it lacks.

The others: a training step on four processes with 6, 3, 1 and 1 parts of the cores, links of 100 Mbit/s and the last
one's of 20. State and batch lie by these parts, all else is the search's to choose, on the cluster that `hapsynth
profile` measures there: `flat`, by collectives of all devices that are padded to the largest shard, as XLA has them;
`free`, by any.

Both are run in turn, in random order; a step takes until its last process has its results. Ratios are medians of those
of like rounds, with what holds them with 95 %. After the last round states and losses must agree with those of as many
steps in one process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import emulated
import jax
import models
import numpy as np
from emulated import machines
from harness.command import again, names, parser, write_json
from harness.emulated_job import Worker, add_options, check, environment, in_folder, read_json, run
from harness.timing import KEEPS_MEMORY, gain, interval_text, together
from runtime import SMALL
from systems.planned import by_shares
from systems.stepped import AGREE, Alone, Planned, begun, differences

import hapsynth
from hapsynth.cluster.cluster import NOMINAL_NETWORK, Cluster
from hapsynth.graph.trace import trace
from hapsynth.profile.collectives import Exchange, exchanges, runner
from hapsynth.search.cost.network import axis_links

HOSTS = {"quotas": "0.49:0.49", "processes": "3:1", "rate": "100Mbit"}
SHARES = {"quotas": "0.96:0.48:0.16:0.16", "rate": "100Mbit:100Mbit:100Mbit:20Mbit"}
PARTS = (6, 3, 1, 1)
TENSOR = 16_000_000
"""Bytes on each device of the sum over hosts."""
SYSTEMS = {"flat": frozenset[str](), "free": None}
OVER = {"flat": "all_reduce", "free": "hierarchical_all_reduce"}
_WARM_UP = 2


def mlp() -> models.Target:
    """6e5 parameters, 11264 rows."""
    config = models.Perceptron(batch=1024, width=352, classes=352, activation=jax.nn.silu)
    return models.mlp(sum(PARTS), layers=4, config=config)


# Every dimension that is cut divides by the parts.
LM = replace(SMALL, batch=4, seq=66, width=176, heads=11, ff=704, vocab=1408)


def lm() -> models.Target:
    """A causal transformer of 1e6 parameters, 44 sequences of 66."""
    return models.language_model(sum(PARTS), 2, LM)


def moe() -> models.Target:
    """The transformer at half the width with 11 experts in its second layer, 9e5 parameters."""
    config = replace(LM, width=88, ff=352, vocab=704, experts=1)
    return models.language_model(sum(PARTS), 2, config)


MODELS: dict[str, Callable[[], models.Target]] = {"mlp": mlp, "lm": lm, "moe": moe}


class Measuring(Worker):
    """One process of an emulated cluster."""

    def run(self) -> None:
        if self.options.part == "hosts":
            rows = [self.over_hosts()]
        else:
            cluster = self.profiled()
            rows = [self.model(name, cluster) for name in self.options.only if name in MODELS]
        if self.job.first:
            write_json(self.folder / "rows.json", rows)

    def over_hosts(self) -> dict[str, Any]:
        self.tell("hosts: compiling")
        axes, hosts = (("hap", self.count),), self.job.hosts
        (hierarchical, *_) = (e for e in exchanges(axes, hosts, quick=True) if e.step == OVER["free"])
        exchange = lambda step: Exchange(step, axes, "hap", TENSOR, 1, hierarchical.hosts)
        with emulated.unlimited():
            steps = {system: runner(self.job, exchange(step)) for system, step in OVER.items()}
            for step in steps.values():
                step()
            self.meet()
        self.tell("hosts: measuring")
        return {"what": "hosts", "ceiling": ceiling(self.job.hosts), **self.measured(steps)}

    def model(self, name: str, cluster: Cluster) -> dict[str, Any]:
        fn, shapes = MODELS[name]()
        traced = trace(fn, shapes)
        arguments = begun(fn, traced)
        plans: dict[str, hapsynth.Plan] = {}
        with emulated.unlimited():
            self.tell(f"{name}: planning")
            for system, offered in SYSTEMS.items():
                file = self.folder / f"{name}-{system}.json"
                if self.job.first:
                    by_shares(fn, traced, cluster, PARTS, offered).save(file)
                self.meet()
                plans[system] = hapsynth.load(file, fn, shapes, self.mesh)
            self.tell(f"{name}: compiling")
            systems = {system: Planned(plan) for system, plan in plans.items()}
            for system in systems.values():
                system.place(arguments)
                system.step()
                system.place(arguments)
                self.meet()
        self.tell(f"{name}: measuring")
        losses: dict[str, list[float]] = {system: [] for system in systems}
        steps = {system: lambda s=system: losses[s].append(systems[s].step()) for system in systems}
        row = {"what": name, **self.measured(steps)}
        with emulated.unlimited():
            alone = Alone(fn)
            alone.place(arguments)
            wanted = [alone.step() for _ in range(self.options.rounds)]
            off = 0.0
            for system, planned in systems.items():
                apart = np.abs(np.array(losses[system]) / wanted - 1).max()
                off = max(off, float(apart), differences(planned.values(), alone.values()))
            self.meet()
        predicted = {system: plan.cost for system, plan in plans.items()}
        made = {system: plan.program.collectives() for system, plan in plans.items()}
        return {**row, "predicted_s": predicted, "collectives": made, "off": off}

    def measured(self, steps: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Seconds of each round of each until the last process had its results."""
        times = together(self.job, [*steps.values()], self.options.rounds, self.options.seed)
        return {"times_s": dict(zip(steps, times.tolist(), strict=True))}


def ceiling(hosts: tuple[int, ...]) -> float:
    """How many times as fast a sum over hosts can be as one around all devices, where the link between is all."""
    kind = hapsynth.DeviceKind("any", {"float32": 1.0}, 1.0, 1)
    cluster = Cluster("hosts", (kind,) * len(hosts), hosts, NOMINAL_NETWORK)
    (link,) = axis_links(cluster, cluster.axes)
    return link.wire_bytes(OVER["flat"], 1.0) / link.wire_bytes(OVER["free"], 1.0)


def report(rows: list[dict[str, Any]]) -> bool:
    """Prints a line for each; whether all values agree."""
    fine = True
    for row in rows:
        times = {system: t[_WARM_UP:] for system, t in row["times_s"].items()}
        flat, free = (float(np.median(times[system])) for system in SYSTEMS)
        ratio, interval = gain(times["flat"], times["free"])
        faster = f"{ratio:.2f} (95 %: {interval_text(interval)}) times as fast"
        told = f"{row['what']:<6} flat {flat:.3f} s, free {free:.3f} s: {faster}"
        if "ceiling" in row:
            print(f"{told}; ceiling {row['ceiling']:.2f}, of which it reaches {ratio / row['ceiling']:.2f}")
            continue
        predicted, wrong = row["predicted_s"], row["off"] > AGREE
        fine &= not wrong
        said = ", ".join(f"{s} {predicted[s]:.3f} s" for s in SYSTEMS)
        print(f"{told}; predicted {said}: {predicted['flat'] / predicted['free']:.2f}; "
              f"off {row['off']:.1e}{'  VALUES DIFFER' if wrong else ''}")  # fmt: skip
        for system, made in row["collectives"].items():
            print(f"       {system}: {', '.join(f'{count} {step}' for step, count in made.items())}")
    return fine


def start(options: argparse.Namespace, part: str, folder: Path) -> list[dict[str, Any]]:
    """Run a part on its machines; its rows."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.json").unlink(missing_ok=True)
    command = again("--join", str(folder), "--part", part)
    on = machines(**(HOSTS if part == "hosts" else SHARES))
    codes = run(on, folder, command, environment(KEEPS_MEMORY), options.timeout)
    check(codes, f"collectives: the processes of {part}")
    return read_json(folder / "rows.json")


def arguments() -> argparse.Namespace:
    command = parser(__doc__, json_file=Path("collectives.json"))
    known = ("hosts", *MODELS)
    command.add_argument("--only", type=names(known), default=list(known), help=f"of {', '.join(known)}")
    command.add_argument("--rounds", type=int, default=10, help=f"of each, {_WARM_UP} of them not counted")
    command.add_argument("--seed", type=int, default=0, help="of the order in each round")
    command.add_argument("--part", choices=("hosts", "shares"), help=argparse.SUPPRESS)
    add_options(command, "where profile and plans are kept, and the profile taken from", 1200, "for each cluster")
    options = command.parse_args()
    if options.rounds <= _WARM_UP:
        command.error(f"--rounds {options.rounds}: give more than the {_WARM_UP} that are not counted")
    return options


def measure(options: argparse.Namespace, folder: Path) -> int:
    rows: list[dict[str, Any]] = []
    for part, asked in (("hosts", "hosts" in options.only), ("shares", any(name in MODELS for name in options.only))):
        if asked:
            rows += start(options, part, folder / part)
            write_json(options.json, rows)
    return 0 if report(rows) else 1


def main() -> int:
    options = arguments()
    if options.join:
        Measuring(options).run()
        return 0
    return in_folder("collectives", options.keep, partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
