"""Measured: hapsynth's plan against today's usual systems, on emulated clusters of unlike machines (needs root).

    python benchmarks/runtime.py [--only mlp,lm] [--cluster 2] [--rounds 10] [--keep DIR] [--json runtime.json]
                                 [--systems plan,even] [--torch PYTHON]

Same function, global batch, first state and arguments for all; float32, two threads of XLA's per process, so that one
may wait for a collective (stock JAX overlaps so too), donation, and memory that is kept. `plan`: hapsynth's, on
the cluster that `hapsynth profile` measures here, at the sizes that a `hapsynth.Monitor` proposes in its first steps.
`even`: stock `jax.jit`, data parallel. `by_speed`: uneven batch by hand, by the speeds at which the processes do this
very step alone. `fsdp`: stock `jax.jit`, ZeRO-3. `hap`: what HAP's rules and costs would choose, at its one ratio.
`fastest`: of the plan and what people run today as plans, the one that is the fastest in a short contest before
(`hapsynth.autotune`). `ddp`: PyTorch's DistributedDataParallel over gloo, batch cut evenly, where an interpreter with
PyTorch is named (`--torch`, HAPSYNTH_TORCH). To `--systems` may be added `switch`, `staged` and `fused`, the plan in
that form, `overlap`, planned with collectives beside computing where that gains enough, `overlap_staged` and
`overlap_fused`, planned so however little it gains, in that form (the JSON of these has what is exposed on each
process, measured and predicted), `serial`, the program of these two with one instruction after another, and any name of
`hapsynth.search.planning.baselines`. All but the last are watched by a `Monitor` as `plan` is.

All systems are stepped in rounds, in random order, in the same processes, but `ddp` in children of these that sleep
until it is their turn (`systems/ddp.py`); a step takes until its last process has its results. Predictions (of all but
`ddp`) are in the JSON file before anything is measured: `predicted_s` on the cluster as it was profiled, minutes ago
and by other ops, and `predicted_at_speed_s` at the speeds of right before, by the `Monitor` of systems that are
watched, at the sizes that it proposed if it did, and else by the steps that each process does by itself. After the last
round each system's state and losses must agree with those of as many steps in one process. `ideal`: all work at the
speed of all processes together, at no cost; each process's speed is that at which it does whole steps by itself while
the others do too. `by quota`: the same of what the quotas promise, by the speed of the first (a process that is stopped
every few milliseconds has a little less).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from harness.timing import KEEPS_MEMORY, together
from systems import ddp
from systems.planned import alone_seconds, at_rows, chosen, seconds_at_speeds
from systems.stepped import (
    AGREE,
    Alone,
    Arguments,
    BySpeed,
    Jitted,
    Planned,
    System,
    begun,
    differences,
    rows_by_speed,
)

import hapsynth
from hapsynth.graph.trace import trace
from hapsynth.profile.sampling import Floats
from hapsynth.search.planning.baselines import NAMES

CLUSTERS = {
    "2": {"quotas": "1.0:0.3"},
    "4-1gbit": {"quotas": "0.6:0.6:0.2:0.2", "rate": "1Gbit"},
    "4-100mbit": {"quotas": "0.6:0.6:0.2:0.2", "rate": "100Mbit"},
    "even4": {"quotas": "0.4:0.4:0.4:0.4"},
}
SYSTEMS = ("plan", "fastest", "even", "by_speed", "fsdp", "hap")
FORMS = ("switch", "staged", "fused")
ALWAYS_OVERLAP = ("overlap_staged", "overlap_fused", "serial")
"""One plan, whose collectives run beside computing, little as that may gain: in some form, or one after another."""
_WITHIN, _TRIED = 1.1, 5
"""Programs predicted to take at most so many times as long as the plan take part in the contest; steps of each turn."""
_WARM_UP = 2
_RECORDED = 5
"""Steps with overlap in which is recorded what is exposed."""
_WATCHED, _GAIN = 3, 0.02
"""Steps in which a monitor looks at the plan, and the least gain of new sizes."""
_ALONE, _ALONE_S = 3, 20.0
"""Steps of every process by itself, after the first ones, in which memory is new, and seconds in which it makes more:
the fastest tells how fast it is, as this machine is not always as fast."""
SMALL = replace(models.BERT, batch=1, width=256, heads=8, ff=1024, vocab=2048, post_norm=False, causal=True)


def mlp(n: int) -> models.Target:
    """1.3e6 parameters, 16384 rows: bound by compute."""
    config = models.Perceptron(batch=16384 // n, width=512, classes=512, activation=jax.nn.silu)
    return models.mlp(n, layers=4, config=config)


def lm(n: int) -> models.Target:
    """A causal transformer of 2e6 parameters, 48 sequences of 128."""
    return models.language_model(n, 2, replace(SMALL, batch=48 // n))


def cnn(n: int) -> models.Target:
    """VGG-like, 9e6 parameters, nearly all in its dense layers; 128 images of 32 x 32."""
    stages = ((1, 32), (1, 64), (2, 128))
    config = models.ConvNet(128 // n, size=32, stages=stages, hidden=2048, classes=100)
    return models.vgg19(n, config=replace(config, activation=jax.nn.silu, pooled=models.mean_pooled))


def moe(n: int) -> models.Target:
    """The transformer with 8 experts in its second layer, 6e6 parameters."""
    return models.language_model(n, 2, replace(SMALL, batch=32 // n, experts=8 // n))


# Smooth throughout: rounding that moves a value across relu's kink, or another element to the maximum of a window,
# changes gradients by a whole row's part.
MODELS: dict[str, Callable[[int], Any]] = {"mlp": mlp, "lm": lm, "cnn": cnn, "moe": moe}


@dataclass
class Row:
    """One system on one model, and its record."""

    record: dict[str, Any]
    system: System
    predicted: Callable[[Floats], float] | None = None
    """Seconds of a step where devices take so many times as long as they were profiled to [devices]."""


class Measuring(Worker):
    """One process of the emulated cluster."""

    def run(self) -> None:
        cluster = self.profiled()
        rates = ", ".join(f"{k.flops['float32'] / 1e9:.4g}" for k in cluster.devices)
        self.tell(f"profiled: {rates} GFLOP/s")
        for name in self.options.only:
            self.model(name, cluster)

    def model(self, name: str, cluster: hapsynth.Cluster) -> None:
        """Predict, compile, measure and compare all systems on one model; the first process writes the rows."""
        fn, shapes = MODELS[name](self.count)
        traced = trace(fn, shapes)
        arguments = begun(fn, traced)
        with emulated.unlimited():
            self.tell(f"{name}: planning")
            planned = dict.fromkeys(_planned_as(system) for system in self.options.systems if system != "ddp")
            if self.job.first:
                apart = [system for system in planned if system != "overlap"]
                for system, plan in chosen(apart, fn, shapes, traced, cluster).items():
                    plan.save(self.folder / f"{name}-{system}.json")
            self.meet()
            if "overlap" in planned:
                # For the devices here, by one of their processes while the others wait.
                plan = hapsynth.synthesize(fn, shapes, self.mesh, cluster=cluster, overlap=True)
                if self.job.first:
                    plan.save(self.folder / f"{name}-overlap.json")
                self.meet()
        each, losses, wanted = self.alone(name, fn, arguments)
        rows = [self.row(s, name, fn, shapes, arguments, 1 / each) for s in self.options.systems]
        with emulated.unlimited():
            self.tell(f"{name}: compiling")
            for row in rows:
                self.ready(row.system, arguments)
        self.tell(f"{name}: watching")
        for row in rows:
            if _is_watched(row.record["system"]) and isinstance(row.system, Planned) and not row.system.idle:
                self.watched(row, arguments)
        self.meet()
        if self.job.first:
            quotas = [float(q) for q in CLUSTERS[self.options.cluster]["quotas"].split(":")]
            by_quota = float(each[0]) * quotas[0] / sum(quotas)
            with emulated.unlimited():
                slowdown = each / alone_seconds(fn, shapes, traced, cluster)
            for row in rows:
                row.record |= {"ideal_s": 1 / float((1 / each).sum()), "by_quota_s": by_quota, "alone_s": each.tolist()}
                if row.predicted and not _is_watched(row.record["system"]):
                    row.record["predicted_at_speed_s"] = row.predicted(slowdown)
            self.write(rows)
        self.meet()
        self.tell(f"{name}: measuring")
        self.measure(rows, losses, wanted)
        if self.job.first:
            self.write(rows)
        self.meet()
        for row in rows:
            if isinstance(row.system, ddp.Ddp):
                row.system.close()

    def alone(self, name: str, fn: Any, arguments: Arguments) -> tuple[Floats, list[float], Any]:
        """Seconds in which each process does a whole step by itself; the losses and the last state, where this is the
        first one."""
        self.tell(f"{name}: each process alone")
        alone = Alone(fn)
        with emulated.unlimited():
            self.ready(alone, arguments)
        took: list[float] = []
        losses: list[float] = []
        values = None
        least = self.options.rounds if self.job.first else _WARM_UP + _ALONE
        while len(took) < least or sum(took) < _ALONE_S:
            began = time.perf_counter()
            losses.append(alone.step())
            took.append(time.perf_counter() - began)
            if self.job.first and len(took) == self.options.rounds:
                values = alone.values()
        self.meet()
        each = self.job.gather(np.array([[min(took[_WARM_UP:])]]))[:, 0]
        return each, losses, values

    def ready(self, system: System, arguments: Arguments) -> None:
        """Compiled, with its arguments in place; called by all."""
        system.place(arguments)
        system.step()
        system.place(arguments)
        self.meet()

    def watched(self, row: Row, arguments: Arguments) -> None:
        """The plan at the sizes that a monitor proposes in its first steps, if it does: a profile is some minutes old,
        and not of these ops."""
        assert isinstance(row.system, Planned)
        monitor = hapsynth.Monitor(row.system.plan, every=1, window=_WATCHED, threshold=_GAIN, probe_s=0.5)
        for _ in range(_WATCHED):
            row.system.step()
            if proposal := monitor.step():
                row.record["proposed"] = proposal.slowdown
                row.system = Planned(proposal.plan)
                with emulated.unlimited():
                    proposal.plan.lower().compile()
        row.record["predicted_at_speed_s"] = monitor.predicted_at_speed_s
        row.system.place(arguments)
        row.system.step()
        row.system.place(arguments)

    def row(self, system: str, model: str, fn: Any, shapes: Any, arguments: Arguments, speeds: Floats) -> Row:
        """A system, ready to be given its arguments. Stock JAX is predicted as the same program of hapsynth's.

        `speeds`: of the processes, as they were just measured with this model.
        """
        record: dict[str, Any] = {"model": model, "cluster": self.options.cluster, "system": system}
        if system == "ddp":
            number = self.options.only.index(model)
            in_torch = ddp.Ddp.on_cluster(self.options.torch, self.index, self.count, number)
            return Row({**record, "predicted_s": None}, in_torch)
        file = self.folder / f"{model}-{_planned_as(system)}.json"
        form = system.removeprefix("overlap_")
        form = form if form in FORMS else self.options.form
        plan = hapsynth.load(file, fn, shapes, self.mesh, form=form)
        if system == "serial":
            plan = plan.without_overlap()
        contest = self.contest(model, plan, arguments) if system == "fastest" else None
        plan = contest.plan if contest else plan
        predicted_s, predicted = plan.cost, partial(seconds_at_speeds, plan)
        runner: System
        match system:
            case "even" | "fsdp":
                runner = Jitted(fn, self.mesh, arguments, cut_state=system == "fsdp")
            case "by_speed":
                rows = jax.tree.leaves(arguments[1])[0].shape[0]
                each = rows_by_speed(rows, speeds.tolist())
                predicted_s, predicted = at_rows(plan, each), partial(at_rows, plan, each)
                runner = BySpeed(fn, self.mesh, each)
            case _:
                runner = Planned(plan)
        record["predicted_s"] = predicted_s
        if isinstance(runner, Planned):
            record["form"] = plan.form
        if contest:
            record |= {"contest": contest.name, "contest_s": dict(contest.seconds)}
        return Row(record, runner, predicted)

    def contest(self, model: str, plan: hapsynth.Plan, arguments: Arguments) -> hapsynth.AutotuneResult | None:
        plans = hapsynth.autotune_candidates(plan, self.mesh, within=_WITHIN)
        if not any(len(each.devices) == self.count for each in plans.values()):
            return None  # nothing else is near a plan that leaves processes out
        with emulated.unlimited():
            for each in plans.values():
                if each.mesh is not None and each.mesh.local_devices:
                    each.lower().compile()
            self.meet()
        contest = hapsynth.autotune(plans, *arguments, steps=_TRIED)
        self.tell(f"{model}: {', '.join(f'{name} {s:.3f} s' for name, s in contest.seconds.items())}: {contest.name}")
        return contest

    def measure(self, rows: list[Row], losses: list[float], wanted: Any) -> None:
        """Adds the times, and how far off the values are, to the record of each row."""
        found: list[list[float]] = [[] for _ in rows]
        steps = [lambda row=row, mine=mine: mine.append(row.system.step()) for row, mine in zip(rows, found)]
        longest = together(self.job, steps, self.options.rounds, self.options.seed)
        apart = lambda mine: [abs(a - b) / abs(b) for a, b in zip(mine, losses) if not np.isnan(a)]
        off = [max(apart(mine), default=0.0) if self.job.first else 0.0 for mine in found]
        with emulated.unlimited():
            for row, of_row, of_loss in zip(rows, longest, off, strict=True):
                got = row.system.values()
                if self.job.first and got is not None:
                    row.record["off"] = max(of_loss, differences(got, wanted))
                low, middle, high = np.quantile(of_row[_WARM_UP:], [0.25, 0.5, 0.75]).tolist()
                row.record |= {"median_s": middle, "spread": (high - low) / middle, "times_s": of_row.tolist()}
                self.meet()
        self.record_exposed([row for row in rows if isinstance(row.system, Planned) and row.system.plan.overlap])

    def record_exposed(self, rows: Sequence[Row]) -> None:
        """Adds to rows with overlap what is exposed in steps after those that are timed, and what is predicted, each of
        every process."""
        for row in rows:
            assert isinstance(row.system, Planned)
            found = np.zeros(_RECORDED)
            for n in range(_RECORDED):
                self.job.agree(True)
                found[n] = row.system.exposed()
            measured = self.job.gather(found[None])
            row.record |= {
                "exposed_s": np.median(measured, axis=1).tolist(),
                "predicted_exposed_s": list(row.system.plan.exposed),
            }

    def write(self, rows: Sequence[Row]) -> None:
        file = self.folder / "rows.json"
        before = read_json(file) if file.exists() else []
        records = [row.record for row in rows]
        others = [r for r in before if r["model"] != records[0]["model"]]
        write_json(file, [*others, *records])


def _is_watched(system: str) -> bool:
    """Whether it is hapsynth's plan, at the sizes that a monitor proposes."""
    return _planned_as(system) in ("plan", "overlap", "always_overlap")


def _planned_as(system: str) -> str:
    return "plan" if system in FORMS else "always_overlap" if system in ALWAYS_OVERLAP else system


def report(rows: Sequence[dict[str, Any]]) -> bool:
    """Prints a table per model and cluster of what was measured; whether all values that were compared agree."""
    fine = True
    # A process that fails leaves rows with predictions alone.
    rows = [r for r in rows if "times_s" in r]
    for model, where in dict.fromkeys((r["model"], r["cluster"]) for r in rows):
        these = {r["system"]: r for r in rows if (r["model"], r["cluster"]) == (model, where)}
        base = "even" if "even" in these else next(iter(these))
        ideal = next(iter(these.values()))["ideal_s"]
        by_quota = next(iter(these.values()))["by_quota_s"]
        print(f"\n{model} on {where} ({CLUSTERS[where]['quotas']}): ideal {ideal:.3f} s, by quota {by_quota:.3f} s")
        print(f"{'system':<20}{'median':>10}{'spread':>8}{f'{base} / it':>12}{'middle half':>16}{'predicted':>12}"
              f"{'pred/meas':>10}{'at speed':>12}{'at/meas':>10}{'ideal/it':>10}{'off':>10}")  # fmt: skip
        for name, r in these.items():
            ratios = np.array(these[base]["times_s"][_WARM_UP:]) / np.array(r["times_s"][_WARM_UP:])
            low, high = np.quantile(ratios, [0.25, 0.75])
            # The first process, which compares, has no values of a plan that leaves it out.
            median, off = r["median_s"], r.get("off")
            wrong = off is not None and off > AGREE
            fine &= not wrong
            compared = "-" if off is None else f"{off:.1e}"
            told = ""
            for seconds in (r["predicted_s"], r.get("predicted_at_speed_s")):
                told += f"{'-':>12}{'-':>10}" if seconds is None else f"{seconds:>10.3f} s{seconds / median:>10.2f}"
            print(f"{name:<20}{median:>8.3f} s{r['spread']:>8.0%}{these[base]['median_s'] / median:>12.2f}"
                  f"{f'{low:.2f} .. {high:.2f}':>16}{told}"
                  f"{r['ideal_s'] / median:>10.2f}{compared:>10}{'  VALUES DIFFER' if wrong else ''}")  # fmt: skip
    return fine


def start(options: argparse.Namespace, where: str, folder: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """All models on one cluster; the rows, where a process failed those of the models before, and the exit codes."""
    systems = ["--systems", ",".join(options.systems), "--torch", options.torch]
    command = again("--join", str(folder), "--cluster", where, *systems)
    file = folder / "rows.json"
    file.unlink(missing_ok=True)
    codes = run(machines(**CLUSTERS[where]), folder, command, environment(KEEPS_MEMORY), options.timeout)
    return read_json(file) if file.exists() else [], codes


def arguments() -> argparse.Namespace:
    command = parser(__doc__, json_file=Path("runtime.json"))
    command.add_argument("--only", type=names(MODELS), default=list(MODELS), help=f"of {', '.join(MODELS)}")
    command.add_argument("--cluster", type=names(CLUSTERS), default=list(CLUSTERS), help=f"of {', '.join(CLUSTERS)}")
    systems = (*SYSTEMS, "ddp", "overlap", *ALWAYS_OVERLAP, *FORMS, *NAMES)
    command.add_argument("--systems", type=names(systems), help=f"of {', '.join(systems)}")
    command.add_argument("--torch", metavar="PYTHON", help=f"an interpreter with PyTorch, for ddp ({ddp.VARIABLE})")
    command.add_argument("--rounds", type=int, default=10, help="steps of each system, 2 of them not counted")
    command.add_argument("--form", choices=("auto", *FORMS), default="auto", help="how plans run")
    command.add_argument("--seed", type=int, default=0, help="of the order in each round")
    add_options(command, "where profiles and plans are kept, and profiles taken from", 1800, "per cluster")
    options = command.parse_args()
    if not options.join:
        _with_torch(command, options)
    if options.rounds <= _WARM_UP:
        command.error(f"--rounds {options.rounds}: give more than the {_WARM_UP} that are not counted")
    return options


def _with_torch(command: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """`ddp` among the default systems where there is PyTorch. Ends the command where it was asked for in vain."""
    required = options.torch is not None or "ddp" in (options.systems or ())
    options.torch = options.torch or os.environ.get(ddp.VARIABLE, "")
    if options.systems is not None and "ddp" not in options.systems:
        return
    try:
        note = f"ddp: PyTorch {ddp.version(options.torch)} of {options.torch}"
        options.systems = options.systems or [*SYSTEMS, "ddp"]
    except ddp.TorchError as error:
        if required:
            command.error(str(error))
        note = f"ddp is left out: {error}"
        options.systems = list(SYSTEMS)
    print(note)


def measure(options: argparse.Namespace, folder: Path) -> int:
    rows: list[dict[str, Any]] = []
    for where in options.cluster:
        (folder / where).mkdir(exist_ok=True)
        found, codes = start(options, where, folder / where)
        rows += found
        write_json(options.json, rows)
        if any(codes):
            report(rows)
        check(codes, f"runtime: the processes on {where}")
    return 0 if report(rows) else 1


def main() -> int:
    options = arguments()
    if options.join:
        options.cluster = options.cluster[0]
        Measuring(options).run()
        return 0
    return in_folder("runtime", options.keep, partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
