"""Measured: hapsynth's plan against today's usual systems, on emulated clusters of unlike machines (needs root).

    python benchmarks/runtime.py [--only mlp,lm] [--cluster 2] [--rounds 10] [--keep DIR] [--json runtime.json]
                                 [--systems plan,even] [--torch PYTHON]

Same function, global batch, first state and arguments for all; float32, two threads of XLA's per process, so that one
may wait for a collective, donation, and memory that is kept. XLA's CPU compiler joins all gradients into one
all-reduce, so `even` and `by_speed` overlap nothing. `plan`: hapsynth's, on the cluster that `hapsynth profile`
measures here, at the sizes that a `hapsynth.Monitor` proposes in its first steps. `even`: stock `jax.jit`, data
parallel. `by_speed`: uneven batch by hand, by the speeds at which the processes do this very step alone. `hap`: what
HAP's rules and costs would choose, at its one ratio. `fastest`: of the plan and what people run today as plans, the one
that is the fastest in a short contest before (`hapsynth.autotune`). Any name of `hapsynth.search.planning.baselines`:
that program, as `zero3_speed`, ZeRO-3 with the batch by speed. `one_process`: the step by the first process alone, one
of the fastest. Where an interpreter with PyTorch is named (`--torch`, HAPSYNTH_TORCH) `ddp`: its
DistributedDataParallel over gloo as it comes, batch cut evenly; and `ddp_speed`: batch as of `by_speed`, buckets of the
size that is the fastest in steps before. `even_fast`, `by_speed_fast`, `ddp_fast`: `even`, `by_speed` and `ddp_speed`
by the processes of the fastest kind alone, while the others do nothing; left out where all are of one kind.

To `--systems` may be added `switch`, `staged` and `fused`, the plan in that form, `overlap`, planned with collectives
beside computing where that gains enough, `overlap_staged` and `overlap_fused`, planned so however little it gains, in
that form (the JSON of these has what is exposed on each process, measured and predicted), `serial`, the program of
these two with one instruction after another; all are watched by a `Monitor` as `plan` is. And `jit_cut_state`: stock
`jax.jit` with the state cut, of which XLA's CPU compiler makes no ZeRO-3: it all-reduces gradients.

Each system has the median of its seconds, and the median, over like rounds, of their ratio to those of the first of the
systems that is hapsynth's, with an interval of 95 % from order statistics (so none where fewer than 6 rounds are
counted). After the tables is named the fastest of the systems that are not hapsynth's, and the processes it ran on.

All systems are stepped in rounds, in random order, in the same processes, but DDP in children of these that sleep until
it is their turn (`systems/ddp.py`); a step takes until its last process has its results. Predictions (of all but DDP
and `jit_cut_state`) are in the JSON file before anything is measured: `predicted_s` on the cluster as it was profiled,
minutes ago and by other ops, and `predicted_at_speed_s` at the speeds of right before, by the `Monitor` of systems that
are watched, at the sizes that it proposed if it did, and else by the steps that each process does by itself. After the
last round each system's state and losses must agree with those of as many steps in one process. `ideal`: all work at
the speed of all processes together, at no cost; each process's speed is that at which it does whole steps by itself
while the others do too. `by quota`: the same of what the quotas promise, by the speed of the first (a process that is
stopped every few milliseconds has a little less).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
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
from harness.timing import KEEPS_MEMORY, gain, interval_text, together
from jax.sharding import Mesh
from systems import ddp
from systems.planned import alone_seconds, at_rows, chosen, seconds_at_speeds
from systems.stepped import (
    AGREE,
    Alone,
    Arguments,
    BySpeed,
    Idle,
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

CLUSTERS: dict[str, dict[str, str]] = {
    "2": {"quotas": "1.0:0.3"},
    "4-1gbit": {"quotas": "0.6:0.6:0.2:0.2", "rate": "1Gbit"},
    "4-100mbit": {"quotas": "0.6:0.6:0.2:0.2", "rate": "100Mbit"},
    "even4": {"quotas": "0.4:0.4:0.4:0.4"},
}
"""The fastest processes first."""
SYSTEMS = ("plan", "fastest", "even", "by_speed", "by_speed_fast", "zero3_speed", "one_process", "hap")
DDP = ("ddp", "ddp_speed", "ddp_fast")
ON_FAST = ("even_fast", "by_speed_fast", "ddp_fast")
BY_HAND = ("even", "by_speed", "one_process", "jit_cut_state", *DDP, *ON_FAST)
UNPREDICTED = (*DDP, "jit_cut_state")
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
            planned = dict.fromkeys(_planned_as(s) for s in self.options.systems if s not in UNPREDICTED)
            if self.job.first:
                apart: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
                for system in planned:
                    if system != "overlap":
                        apart[self.processes(system)].append(system)
                for processes, systems in apart.items():
                    for system, plan in chosen(systems, fn, shapes, traced, cluster.subset(processes)).items():
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
            if isinstance(row.system, ddp.Ddp) and row.system.rows:
                row.record["bucket_mb"] = row.system.tune()
        self.meet()
        if self.job.first:
            quotas = _quotas(self.options.cluster)
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
        record["processes"] = list(self.processes(system))
        rows = rows_by_speed(jax.tree.leaves(arguments[1])[0].shape[0], speeds[record["processes"]].tolist())
        by_hand = self.by_hand(system, model, fn, arguments, rows)
        if system in UNPREDICTED:
            assert by_hand is not None
            return Row({**record, "predicted_s": None}, by_hand)
        file = self.folder / f"{model}-{_planned_as(system)}.json"
        form = system.removeprefix("overlap_")
        form = form if form in FORMS else self.options.form
        plan = hapsynth.load(file, fn, shapes, None if by_hand else self.mesh, form=form)
        if system == "serial":
            plan = plan.without_overlap()
        contest = self.contest(model, plan, arguments) if system == "fastest" else None
        plan = contest.plan if contest else plan
        predicted_s, predicted = plan.cost, partial(seconds_at_speeds, plan)
        if system in ("by_speed", "by_speed_fast"):
            predicted_s, predicted = at_rows(plan, rows), partial(at_rows, plan, rows)
        record["predicted_s"] = predicted_s
        if by_hand is None:
            record["form"] = plan.form
        if contest:
            record |= {"contest": contest.name, "contest_s": dict(contest.seconds)}
        here = list(self.processes(system))
        return Row(record, by_hand or Planned(plan), lambda slowdown: predicted(slowdown=slowdown[here]))

    def processes(self, system: str) -> tuple[int, ...]:
        """Those that are asked to take part; a plan may leave some of them out."""
        if system == "one_process":
            return (0,)
        return fastest(self.options.cluster) if system in ON_FAST else tuple(range(self.count))

    def by_hand(self, system: str, model: str, fn: Any, arguments: Arguments, rows: list[int]) -> System | None:
        """A system that knows nothing of hapsynth; None for any other. `rows`: by speed, of its processes."""
        processes = self.processes(system)
        if system not in BY_HAND or self.index not in processes:
            return Idle() if system in BY_HAND else None
        mesh = Mesh(self.mesh.devices[list(processes)], self.mesh.axis_names)
        match system:
            case "even" | "even_fast" | "jit_cut_state":
                return Jitted(fn, mesh, arguments, cut_state=system == "jit_cut_state")
            case "by_speed" | "by_speed_fast":
                return BySpeed(fn, mesh, rows)
            case "one_process":
                return Alone(fn)
            case _:
                number = self.options.only.index(model) * len(DDP) + DDP.index(system)
                given = None if system == "ddp" else rows
                return ddp.Ddp.on_cluster(self.options.torch, self.index, len(processes), number, given)

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
                if isinstance(row.system, Planned):
                    row.record["processes"] = list(row.system.plan.devices)
                self.meet()
        compare([row.record for row in rows])
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


def _quotas(where: str) -> list[float]:
    return [float(quota) for quota in CLUSTERS[where]["quotas"].split(":")]


def fastest(where: str) -> tuple[int, ...]:
    """The processes of the fastest kind on a cluster."""
    quotas = _quotas(where)
    return tuple(i for i, quota in enumerate(quotas) if quota == max(quotas))


def compare(records: Sequence[dict[str, Any]]) -> None:
    """Adds `over` to the records of a model on a cluster: the first `system` of them that is hapsynth's, or the first
    of all, the median `ratio` of this one's seconds over that one's, and its `interval` of 95 %, or None."""
    base = next((r for r in records if _is_own(r["system"])), records[0])
    for r in records:
        ratio, interval = gain(r["times_s"][_WARM_UP:], base["times_s"][_WARM_UP:])
        r["over"] = {"system": base["system"], "ratio": ratio, "interval": interval}


def _is_own(system: str) -> bool:
    return _is_watched(system) or system == "fastest"


def best_peer(records: Sequence[dict[str, Any]]) -> str | None:
    """The fastest of the systems that are not hapsynth's, of a model on a cluster, in a line."""
    best = min((r for r in records if not _is_own(r["system"])), key=lambda r: r["median_s"], default=None)
    if best is None:
        return None
    over, count = best["over"], len(_quotas(best["cluster"]))
    ran = f"on {', '.join(map(str, best['processes']))} of {count} processes"
    ratio = f"{over['ratio']:.2f} times the seconds of {over['system']} (95 %: {interval_text(over['interval'])})"
    return f"{best['model']} on {best['cluster']}: {best['system']} {ran}, {best['median_s']:.3f} s, {ratio}"


def report(rows: Sequence[dict[str, Any]]) -> bool:
    """Prints a table per model and cluster of what was measured, and the best peers; whether all values that were
    compared agree."""
    fine = True
    # A process that fails leaves rows with predictions alone.
    rows = [r for r in rows if "times_s" in r]
    peers: list[str] = []
    for model, where in dict.fromkeys((r["model"], r["cluster"]) for r in rows):
        these = {r["system"]: r for r in rows if (r["model"], r["cluster"]) == (model, where)}
        if peer := best_peer(list(these.values())):
            peers.append(peer)
        base = next(iter(these.values()))["over"]["system"]
        ideal = next(iter(these.values()))["ideal_s"]
        by_quota = next(iter(these.values()))["by_quota_s"]
        print(f"\n{model} on {where} ({CLUSTERS[where]['quotas']}): ideal {ideal:.3f} s, by quota {by_quota:.3f} s")
        print(f"{'system':<20}{'median':>10}{'spread':>8}{f'/ {base}':>17}{'95 %':>14}{'predicted':>12}"
              f"{'pred/meas':>10}{'at speed':>12}{'at/meas':>10}{'ideal/it':>10}{'off':>10}")  # fmt: skip
        for name, r in these.items():
            # The first process, which compares, has no values of a plan that leaves it out.
            median, off = r["median_s"], r.get("off")
            wrong = off is not None and off > AGREE
            fine &= not wrong
            compared = "-" if off is None else f"{off:.1e}"
            told = ""
            for seconds in (r["predicted_s"], r.get("predicted_at_speed_s")):
                told += f"{'-':>12}{'-':>10}" if seconds is None else f"{seconds:>10.3f} s{seconds / median:>10.2f}"
            print(f"{name:<20}{median:>8.3f} s{r['spread']:>8.0%}{r['over']['ratio']:>17.2f}"
                  f"{interval_text(r['over']['interval']):>14}{told}"
                  f"{r['ideal_s'] / median:>10.2f}{compared:>10}{'  VALUES DIFFER' if wrong else ''}")  # fmt: skip
    if peers:
        print("\nbest peers:", *peers, sep="\n")
    return fine


def applicable(systems: Sequence[str], where: str) -> list[str]:
    """Without those on the fastest kind where there is no other."""
    one_kind = len(fastest(where)) == len(_quotas(where))
    return [system for system in systems if not (one_kind and system in ON_FAST)]


def start(options: argparse.Namespace, where: str, folder: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """All models on one cluster; the rows, where a process failed those of the models before, and the exit codes."""
    systems = ["--systems", ",".join(applicable(options.systems, where)), "--torch", options.torch]
    command = again("--join", str(folder), "--cluster", where, *systems)
    file = folder / "rows.json"
    file.unlink(missing_ok=True)
    codes = run(machines(**CLUSTERS[where]), folder, command, environment(KEEPS_MEMORY), options.timeout)
    return read_json(file) if file.exists() else [], codes


def arguments() -> argparse.Namespace:
    command = parser(__doc__, json_file=Path("runtime.json"))
    command.add_argument("--only", type=names(MODELS), default=list(MODELS), help=f"of {', '.join(MODELS)}")
    command.add_argument("--cluster", type=names(CLUSTERS), default=list(CLUSTERS), help=f"of {', '.join(CLUSTERS)}")
    systems = dict.fromkeys((*SYSTEMS, *BY_HAND, "overlap", *ALWAYS_OVERLAP, *FORMS, *NAMES))
    command.add_argument("--systems", type=names(systems), help=f"of {', '.join(systems)}")
    command.add_argument("--torch", metavar="PYTHON", help=f"an interpreter with PyTorch, for DDP ({ddp.VARIABLE})")
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
    """DDP among the default systems where there is PyTorch. Ends the command where it was asked for in vain."""
    asked = any(system in DDP for system in options.systems or ())
    required = options.torch is not None or asked
    options.torch = options.torch or os.environ.get(ddp.VARIABLE, "")
    if options.systems is not None and not asked:
        return
    try:
        note = f"ddp: PyTorch {ddp.version(options.torch)} of {options.torch}"
        options.systems = options.systems or [*SYSTEMS, *DDP]
    except ddp.TorchError as error:
        if required:
            command.error(str(error))
        note = f"ddp is left out: {error}"
        options.systems = list(SYSTEMS)
    print(note)


def measure(options: argparse.Namespace, folder: Path) -> int:
    rows: list[dict[str, Any]] = []
    for where in options.cluster:
        systems = applicable(options.systems, where)
        if left_out := [system for system in options.systems if system not in systems]:
            print(f"{where}: {', '.join(left_out)} left out, as all processes are of one kind", flush=True)
        if not systems:
            continue
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
