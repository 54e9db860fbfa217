"""Measured: one of several processes is slowed down while they train; the plan gets new sizes and goes on (needs root).

    python benchmarks/rebalance.py [--quotas 0.8:0.8] [--to 0.5] [--model mlp] [--steps 12] [--keep DIR]
                                   [--json rebalance.json]

Processes of an emulated cluster train with hapsynth's plan for the speeds that `hapsynth profile` measures there, and a
`hapsynth.Monitor` watches. Then the last one's quota falls to `--to` of it. The step time is measured before
that, after it until the monitor proposes other sizes, and with these; the state has to have the same bits before and
after the move. `gain`: the step time after the slowing over that after the move; `limit`: what it would be if the work
were all that takes time and could be cut at will.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import emulated
import jax
import numpy as np
from emulated import machines
from harness.command import again, parser, write_json
from harness.emulated_job import Worker, add_options, check, environment, in_folder, read_json, run
from harness.timing import KEEPS_MEMORY
from runtime import MODELS
from systems.stepped import Planned, begun

import hapsynth
from hapsynth.graph.trace import trace

_EVERY, _WINDOW, _PATIENCE = 4, 3, 60
"""Steps between the monitor's measurements, of which the median counts; steps within which it must propose."""


class Watched(Worker):
    """One process of the emulated cluster."""

    def run(self) -> None:
        cluster = self.profiled()
        fn, shapes = MODELS[self.options.model](self.count)
        file = self.folder / "plan.json"
        with emulated.unlimited():
            if self.job.first:
                hapsynth.synthesize(fn, shapes, cluster, leave_out=False).save(file)
            self.meet()
            system = self.ready(hapsynth.load(file, fn, shapes, self.mesh))
            system.place(begun(fn, trace(fn, shapes)))
            system.step()
        # The profile's errors are mended first.
        monitor = hapsynth.Monitor(system.plan, every=_EVERY, window=_WINDOW, probe_s=0.5)
        _, proposal = self.train(system, monitor, _EVERY * _WINDOW)
        if proposal is not None:
            self.tell(f"{proposal.gain:.2f} x as fast, it says, before anything was slowed")
            system, *_ = self.moved(system, proposal)
        self.tell("measuring")
        before, proposal = self.train(system, monitor, self.options.steps)
        if proposal is not None:
            raise SystemExit("the monitor proposed other sizes before anything was slowed: does other work run?")
        quotas = [float(q) for q in self.options.quotas.split(":")]
        if self.index == self.count - 1:
            emulated.hold_to(quotas[-1] * self.options.to)
        slowed, proposal = self.train(system, monitor, _PATIENCE)
        if proposal is None:
            raise SystemExit(f"the monitor proposed nothing within {_PATIENCE} steps")
        system, move_s, identical = self.moved(system, proposal)
        rebalanced, _ = self.train(system, None, self.options.steps)
        if not self.job.first:
            return
        shares = np.array(quotas) / sum(quotas)
        quotas[-1] *= self.options.to
        record: dict[str, Any] = {
            "model": self.options.model,
            "quotas": self.options.quotas,
            "to": self.options.to,
            **{f"{name}_s": float(np.median(t)) for name, t in (("before", before), ("slowed", slowed))},
            "rebalanced_s": float(np.median(rebalanced)),
            "gain": float(np.median(slowed) / np.median(rebalanced)),
            "limit": float(max(shares / quotas) * sum(quotas)),
            "predicted_gain": proposal.gain,
            "slowdown": proposal.slowdown,
            "steps_until_proposal": len(slowed),
            "move_s": move_s,
            "identical": identical,
            "times_s": {"before": before, "slowed": slowed, "rebalanced": rebalanced},
        }
        write_json(self.folder / "record.json", record)

    def ready(self, plan: hapsynth.Plan) -> Planned:
        plan.lower().compile()
        self.meet()
        return Planned(plan)

    def train(
        self, system: Planned, monitor: hapsynth.Monitor | None, steps: int
    ) -> tuple[list[float], hapsynth.Proposal | None]:
        """At most so many steps, until there is a proposal: the seconds that each took the slowest process."""
        times: list[float] = []
        proposal = None
        while len(times) < steps and proposal is None:
            # All begin together.
            self.job.agree(True)
            began = time.perf_counter()
            system.step()
            times.append(time.perf_counter() - began)
            proposal = monitor.step() if monitor is not None else None
        return self.job.gather(np.array([times])).max(axis=0).tolist(), proposal

    def moved(self, system: Planned, proposal: hapsynth.Proposal) -> tuple[Planned, float, bool]:
        """The proposed plan with the state and the batch; seconds that moving took; whether all bits are the same."""
        with emulated.unlimited():
            digest = self.digest(system)
            ready = self.ready(proposal.plan)
        began = time.perf_counter()
        ready.state = proposal.plan.adopt(system.state, system.plan)
        ready.batch = proposal.plan.adopt(system.batch, system.plan, 1)
        jax.block_until_ready(jax.tree.leaves(ready.state))
        passed = time.perf_counter() - began
        with emulated.unlimited():
            identical = self.digest(ready) == digest
            ready.step()
        return ready, passed, identical

    def digest(self, system: Planned) -> str:
        """Of all bits of the state and the batch, whole."""
        digest = hashlib.sha256()
        for x in jax.tree.leaves(system.plan.unshard((system.state, system.batch))):
            digest.update(np.ascontiguousarray(x).tobytes())
        return digest.hexdigest()


def start(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run it all; the record."""
    (folder / "record.json").unlink(missing_ok=True)
    command = again("--join", str(folder))
    codes = run(machines(options.quotas), folder, command, environment(KEEPS_MEMORY), options.timeout)
    check(codes, "rebalance: the processes")
    return read_json(folder / "record.json")


def arguments() -> argparse.Namespace:
    command = parser(__doc__, json_file=Path("rebalance.json"))
    command.add_argument("--quotas", default="0.8:0.8", help="cores of each process at first")
    command.add_argument("--to", type=float, default=0.5, help="part of its quota that the last one falls to")
    command.add_argument("--model", choices=MODELS, default="mlp")
    command.add_argument("--steps", type=int, default=12, help="that are measured before it and after the move")
    add_options(command, "where profile and plan are kept, and the profile taken from", 900, "in all")
    return command.parse_args()


def measure(options: argparse.Namespace, folder: Path) -> int:
    record = start(options, folder)
    write_json(options.json, record)
    say = lambda text: print(text.format(**record))
    say("{model} on {quotas}, the last one slowed to {to:g}")
    say("seconds a step: {before_s:.3f} before, {slowed_s:.3f} slowed, {rebalanced_s:.3f} with new sizes")
    say("gain {gain:.2f} (limit {limit:.2f}, predicted {predicted_gain:.2f})")
    say("proposed after {steps_until_proposal} steps, moved in {move_s:.3f} s")
    print("the state's bits are the same" if record["identical"] else "BITS DIFFER")
    return 0 if record["identical"] else 1


def main() -> int:
    options = arguments()
    if options.join:
        Watched(options).run()
        return 0
    return in_folder("rebalance", options.keep, partial(measure, options))


if __name__ == "__main__":
    sys.exit(main())
