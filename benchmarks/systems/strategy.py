"""A program's strategy in a sentence: the cuts of its contractions and of its state, and each device's share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum

from hapsynth._quantities import counted, percent
from hapsynth.instructions.program.program import Compute, Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.contraction import CONTRACTIONS
from hapsynth.instructions.rules.factor_table import cut_nodes
from hapsynth.instructions.rules.registry import flops_of
from hapsynth.report.tables import device_groups, span
from hapsynth.search.planning.baselines import Baselines

_LEAST = 0.005
"""A smaller part of the work is not worth a word."""
_MOST = 3


@dataclass(frozen=True)
class Strategy:
    """The strategy of a program. `work`: a cut of contractions -> the fraction of their FLOP. `state`: fraction of the
    carried bytes that is cut. `shares`: devices, as in a report -> the units of the batch that each of them gets.
    `without`: those that get no share of anything that is cut."""

    work: Mapping[str, float]
    state: float
    shares: Mapping[str, str]
    without: tuple[str, ...]
    collectives: Mapping[str, int]

    def __str__(self) -> str:
        parts = [f"{percent(part)} by {what}" for what, part in list(self.work.items())[:_MOST] if part >= _LEAST]
        words = [f"contractions {', '.join(parts)}" if parts else "no contractions", f"state {percent(self.state)} cut"]
        if self.shares:
            words.append("batch " + ", ".join(f"{units} on each of {name}" for name, units in self.shares.items()))
        words += [f"nothing for {name}" for name in self.without]
        return "; ".join([*words, counted(dict(self.collectives))])


def strategy(baselines: Baselines, program: Program, sizes: Sizes) -> Strategy:
    """The strategy of a program of the baselines' graph."""
    groups = device_groups(baselines.costs.cluster)
    of_classes = [sizes.of_devices(c.index) for c in sizes.classes.all]
    in_batch = lambda c: any(baselines.kin.root(v, d) in baselines.batch_roots for v, d, *_ in c.members)
    of_batch = filter(in_batch, sizes.classes.all)
    batch = max(of_batch, key=lambda c: len(c.members), default=None)
    shares = {} if batch is None else {n: span([of_classes[batch.index][d] for d in devices]) for n, devices in groups}
    idle = [name for name, devices in groups if of_classes and not any(u[d] for u in of_classes for d in devices)]
    return Strategy(_work(baselines, program), _state(baselines, program), shares, tuple(idle), program.collectives())


def _state(baselines: Baselines, program: Program) -> float:
    nbytes = {v: baselines.graph.values[v].nbytes for v in baselines.state}
    cut = sum(n for v, n in nbytes.items() if any(p.is_sharded for p in program.inputs[v]))
    return cut / max(sum(nbytes.values()), 1)


def _work(baselines: Baselines, program: Program) -> dict[str, float]:
    graph = baselines.graph
    of_weights = {baselines.kin.root(v, d) for v in baselines.state for d in range(len(graph.values[v].shape))}
    flops_of_cut: dict[str, float] = {}
    for i in program.instructions:
        if not isinstance(i, Compute) or graph.ops[i.op].name not in CONTRACTIONS:
            continue
        op, factors = graph.ops[i.op], baselines.table[i.op]
        words: list[str] = []
        for factor, nodes in cut_nodes(graph, i.op, factors, i.triples):
            roots = {baselines.kin.root(v, d) for v, d, *_ in nodes}
            size = factors.sizes[factor]
            if roots & baselines.batch_roots:
                words.append("batch")
            elif roots & of_weights:
                words.append(f"a weight dimension of {size}")
            else:
                words.append(f"an activation dimension of {size}")
        what = " and ".join(sorted(set(words))) or "nothing (whole on every device)"
        flops_of_cut[what] = flops_of_cut.get(what, 0.0) + graph.runs[op.region] * flops_of(op)
    total = fsum(flops_of_cut.values())
    largest = sorted(flops_of_cut.items(), key=lambda item: -item[1])
    return {what: flops / total for what, flops in largest if total}
