"""A program's strategy in a sentence: the cuts of its contractions and of its state, and each device's share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum

from hapsynth._quantities import counted, percent
from hapsynth.instructions.program.program import Compute, Program
from hapsynth.instructions.program.sizes import Sizes, cut_nodes
from hapsynth.instructions.rules.contraction import CONTRACTIONS
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


def strategy(known: Baselines, program: Program, sizes: Sizes) -> Strategy:
    """The strategy of a program of the baselines' graph."""
    groups = device_groups(known.costs.cluster)
    given = [sizes.of_devices(c.index) for c in sizes.classes.all]
    of_batch = (c for c in sizes.classes.all if any(known.root(v, d) in known.batch_roots for v, d, *_ in c.members))
    batch = max(of_batch, key=lambda c: len(c.members), default=None)
    shares = {} if batch is None else {n: span([given[batch.index][d] for d in devices]) for n, devices in groups}
    idle = [name for name, devices in groups if given and not any(units[d] for units in given for d in devices)]
    return Strategy(_work(known, program), _state(known, program), shares, tuple(idle), program.collectives())


def _state(known: Baselines, program: Program) -> float:
    nbytes = {v: known.graph.values[v].nbytes for v in known.state}
    cut = sum(n for v, n in nbytes.items() if any(p.is_sharded for p in program.inputs[v]))
    return cut / max(sum(nbytes.values()), 1)


def _work(known: Baselines, program: Program) -> dict[str, float]:
    graph = known.graph
    of_weights = {known.root(v, d) for v in known.state for d in range(len(graph.values[v].shape))}
    found: dict[str, float] = {}
    for i in program.instructions:
        if not isinstance(i, Compute) or graph.ops[i.op].name not in CONTRACTIONS:
            continue
        op, factors = graph.ops[i.op], known.table[i.op]
        words: list[str] = []
        for factor, nodes in cut_nodes(graph, i.op, factors, i.triples):
            roots = {known.root(v, d) for v, d, *_ in nodes}
            size = factors.sizes[factor]
            if roots & known.batch_roots:
                words.append("batch")
            elif roots & of_weights:
                words.append(f"a weight dimension of {size}")
            else:
                words.append(f"an activation dimension of {size}")
        what = " and ".join(sorted(set(words))) or "nothing (whole on every device)"
        found[what] = found.get(what, 0.0) + graph.runs[op.region] * flops_of(op)
    total = fsum(found.values())
    largest = sorted(found.items(), key=lambda item: -item[1])
    return {what: flops / total for what, flops in largest if total}
