"""What a plan says of one device's call, to stand beside what XLA has made of it."""

from __future__ import annotations

from collections.abc import Iterable
from math import fsum, prod
from typing import NamedTuple

from hapsynth.graph.ir import Graph
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.rules.contraction import CONTRACTIONS
from hapsynth.instructions.rules.registry import flops_of
from hapsynth.instructions.staging.stages import Cond, Loop, Stage, Step
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.program_cost import conversion_cost, load_seconds, shares
from hapsynth.search.cost.program_index import ProgramIndex
from hapsynth.search.result import Result
from hapsynth.search.scheduling.tasks import Machine, tasks_of


class Predicted(NamedTuple):
    """What a plan says of one device's call, beside a `Replay`. `products`: FLOPs of contractions, of its shares alone;
    `whole_products`: of all devices' together, as one would do them. `kernels`: launched, without collectives."""

    products: float = 0.0
    whole_products: float = 0.0
    kernels: float = 0.0
    computing_s: float = 0.0
    sending_s: float = 0.0


def predicted(graph: Graph, result: Result, costs: CostModel, device: int) -> Predicted:
    """Of a device, by its place among those that take part."""
    program, sizes = result.program, result.sizes
    index = ProgramIndex.of(program, sizes.classes, costs)
    seconds = [float(of_all[device]) for of_all in load_seconds(index, sizes)]
    found = Predicted()
    for i, number, runs in zip(program.instructions, index.load_of, index.runs, strict=True):
        if isinstance(i, Convert):
            found = found._replace(sending_s=found.sending_s + runs * conversion_cost(costs, sizes, i)[0])
            continue
        work, nodes, _ = index.loads[number]
        op = graph.ops[i.op]
        flops = runs * flops_of(op) if op.name in CONTRACTIONS else 0.0
        held = [float(share[device]) for share in shares(costs, sizes, nodes)]
        found = Predicted(
            found.products + flops * prod(held),
            found.whole_products + flops,
            found.kernels + runs * work.launches * all(held),
            found.computing_s + runs * seconds[number],
            found.sending_s,
        )
    if result.overlap:
        # Bundles have one latency.
        tasks = tasks_of(program, sizes, costs)
        sent = (s for s, machine in zip(tasks.longest, tasks.machine, strict=True) if machine is Machine.LINK)
        found = found._replace(sending_s=fsum([*sent, *tasks.sent_in.values()]))
    return found


def branches_of(steps: Iterable[Step], device: int) -> dict[int, int]:
    """Which branch a device takes of the switches of so many, where it is the same in all of them, and no cond of the
    function's has as many: what XLA makes of these is told apart by that alone."""
    found: dict[int, set[int]] = {}
    waiting = [*steps]
    while waiting:
        match waiting.pop():
            case Stage() as stage if stage.switch:
                found.setdefault(len(stage.members), set()).add(stage.branch_of[device])
            case Loop() as loop:
                waiting += [*loop.body, *loop.test]
            case Cond() as cond:
                found.setdefault(len(cond.branches), set()).update(range(len(cond.branches)))
                waiting += [step for branch in cond.branches for step in branch]
            case _:
                pass
    return {count: taken.pop() for count, taken in found.items() if len(taken) == 1}
