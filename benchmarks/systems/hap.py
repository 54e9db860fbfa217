"""HAP itself (EuroSys'24), emulated: the decisions of its released code, as a program that our cost model judges.

Its rules: an op cuts the batch, an output dimension of its weights, or experts; nothing is cut along a contracted
weight dimension, by heads or by vocabulary; no sufficient factors. Parameters lie as they are used, their optimizer
state like them. Its cost, for deciding: flops over speed plus volume over bandwidth, where volume counts elements for
bytes (float32's are four times as many); no latency, no launches, no memory bandwidth, no tiles, no memory limit. One
ratio for everything: the programs are searched at the speeds' and at the ratio that then suits the program best, in
turn, as HAP alternates between A* and its linear program.

More generous than HAP: the backward pass is searched too, a value may be communicated for several uses, and what costs
the same to HAP is decided by our model. The ratio is the best in our model's terms, padding and bytes and all: in HAP's
own, communication is so cheap that it stays with the speeds'. It is sought between even and beyond the speeds', as a
power of these: with two kinds of devices that is every ratio that gives the fast kind no less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from hapsynth.instructions.collectives import Collective
from hapsynth.instructions.factors import Triples
from hapsynth.instructions.layout import Layout, Placement
from hapsynth.instructions.program.sizes import Node
from hapsynth.instructions.rules.contraction import CONTRACTIONS
from hapsynth.instructions.rules.factor_table import cut_nodes
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import Largest, Shares
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.choice_space import ChoiceSpace, Interned, Restriction
from hapsynth.search.formulation.emission import Emitter
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.planning.baselines import Baseline, Baselines, Solved
from hapsynth.search.sizing.ratios import Ratios, proportional
from hapsynth.search.solver import solve

_TIE = 1e-3
"""Weight of our model's seconds, which decide between choices of the same cost to HAP."""
_ITEM = 4.0
_TURNS = 2
_MOST_POWER = 2.0
_TRIES = 8


class HapCosts(CostModel):
    """HAP's own terms."""

    def device_times(self, work: Work, fractions: Sequence[Floats]) -> Floats:
        share = np.prod([np.ones(self.n), *fractions], axis=0)
        return work.flops * share / self.rate(work.dtype) + _TIE * super().device_times(work, fractions)

    def conversion(
        self,
        value: int,
        source: Layout,
        target: Layout,
        axis: int,
        shares: Shares | Largest,
        step: Collective | None = None,
    ) -> tuple[float, float]:
        seconds, wire = super().conversion(value, source, target, axis, shares, step)
        return wire * self.links[axis].beta / _ITEM + _TIE * seconds, wire


class _HapStructure(ChoiceSpace):
    """Only HAP's triples. `batch`, `experts`, `outputs`: classes of dimensions."""

    def __init__(self, of: Hap, restriction: Restriction) -> None:
        self.of = of
        super().__init__(of.baselines.graph, of.baselines.table, restriction)

    def _triples(self, op: int) -> Interned[Triples]:
        every = super()._triples(op)
        kept = [self.of.may(op, t) for t in every]
        make = lambda: Interned(t for t, keep in zip(every, kept, strict=True) if keep)
        return self.once(("hap", every, *kept), make)


class Hap:
    """HAP's choice for one graph on one cluster."""

    def __init__(self, baselines: Baselines) -> None:
        self.baselines, self.graph, self.table = baselines, baselines.graph, baselines.table
        self.weights = {v for v in baselines.state if v not in baselines.costs.bucketing.updates}
        self.batch = baselines.batch_roots
        self.experts: set[Node] = set()
        self.outputs: set[Node] = set()
        self.free = {v: self._outputs_of(v) for v in self.weights}
        """Weight -> the dimensions that may be cut."""

    def _outputs_of(self, weight: int) -> set[int]:
        """The dimensions that the forward pass neither contracts nor looks up; those of a bias and the like: all."""
        dims = set(range(len(self.graph.values[weight].shape)))
        seen: set[str] = set()
        for op, position in sorted(self.graph.uses[weight]):
            name, factors = self.graph.ops[op].name, self.table[op]
            # The first use of each kind is the forward pass.
            if name in seen or name not in (*CONTRACTIONS, "gather"):
                continue
            seen.add(name)
            weight_dims = factors.operands[position]
            output_factors = {f for dim in factors.results[0] for f in dim}
            dims &= {d for d, dim in enumerate(weight_dims) if output_factors.intersection(dim)}
            others = {f for i, t in enumerate(factors.operands) if i != position for dim in t for f in dim}
            for d in dims if name in CONTRACTIONS else ():
                root = self.baselines.kin.root(weight, d)
                if root is not None:
                    (self.experts if others.intersection(weight_dims[d]) else self.outputs).add(root)
        return dims

    def may(self, op: int, triples: Triples) -> bool:
        """Whether HAP has a rule for this."""
        source, factors = self.graph.ops[op], self.table[op]
        weighted = any(v in self.weights for _, v in source.value_operands)
        for factor, nodes in cut_nodes(self.graph, op, factors, triples):
            roots = {self.baselines.kin.root(v, d) for v, d, *_ in nodes}
            if any(v in self.weights and d not in self.free[v] for v, d, *_ in nodes):
                return False
            if roots & (self.batch | self.experts):
                continue
            if not roots & self.outputs:
                return False
            tensors = [*factors.operands, *factors.results]
            cut = [any(factor in dim for dim in dims) for dims in tensors]
            # Of two activations: a weight's gradient, where an output dimension is in one of them and in the result.
            if source.name in CONTRACTIONS and not weighted and (all(cut) or not cut[-1]):
                return False
        return True

    def convertible(self, value: int, source: Placement, target: Placement) -> bool:
        """The update has no communication but the reduction of gradients, and weights are not moved."""
        return not source.is_sharded or value not in self._fixed

    def baseline(self) -> Baseline:
        """The best of its programs at its ratio and at the devices' speeds, as our model judges it."""
        baselines = self.baselines
        best: Baseline | None = None
        weights = baselines.speed
        for _ in range(_TURNS):
            solved = self._solved(weights)
            tried = [baselines.speed, self._suited(solved)]
            for each in tried:
                found = baselines.sized(solved, each, each)
                if best is None or (not found.fits, found.cost_s) < (not best.fits, best.cost_s):
                    best = found
            if np.allclose(weights, tried[-1], atol=1e-3):
                break
            weights = tried[-1]
        assert best is not None
        return best

    def _suited(self, solved: Solved) -> Floats:
        """The ratio at which a program takes the least."""
        speed, sizer = self.baselines.speed, solved.staged
        at = lambda power: proportional(speed**power)
        took = lambda power: program_cost(sizer.program, sizer.fixed(at(power)), sizer.costs)
        found = minimize_scalar(took, bounds=(0.0, _MOST_POWER), method="bounded", options={"maxiter": _TRIES})
        return at(min((0.0, 1.0, float(found.x)), key=took))

    def _solved(self, weights: Floats) -> Solved:
        """The program that HAP would choose at a ratio."""
        baselines, graph = self.baselines, self.graph
        renewed = {v for _, target in graph.carry if isinstance(v := graph.outputs[target], int)}
        self._fixed = baselines.costs.bucketing.updates | renewed | set(baselines.state)
        restriction = Restriction(convertible=self.convertible, role=self._fixed.__contains__)
        costs = HapCosts(graph, baselines.costs.cluster, self.table, baselines.costs.axes)
        structure: Any = _HapStructure(self, restriction)
        formulator = ProblemBuilder(structure, costs, Ratios(graph, self.table, weights))
        solution = solve(formulator.problem(), tolerance=1e-4)
        assert solution.assignment is not None, "the replicated program is always there"
        return Solved(Emitter(formulator, solution.assignment.tolist()), baselines.costs)
