"""Candidates of a search: assignments as programs, in the order and at the sizes that suit them best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from hapsynth.instructions.program.program import Compute, Program
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.program_cost import by_cheapest_steps, in_fewest_collectives, program_cost
from hapsynth.search.formulation.emission import Emitter
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.sizing.fixed_ratios import FixedRatios
from hapsynth.search.sizing.sizer import KnownShares, Sizer
from hapsynth.search.solver import Ints, Messages, Solution

_POINTS = 3
"""The number of ops at which a round limits memory."""


SAME = 1e-6
"""The relative gain that other sizes must exceed, as the bound at the assumed sizes does not hold for them."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A program with its sizes, and the choices that made it."""

    sizer: Sizer
    sizes: Sizes
    known_cost: float | None
    """The sum of seconds over all instructions; None until it is computed."""
    memory: float
    """Bytes as counted (`MemoryBudget`) on the device that is nearest to its limit."""
    choices: Ints | None
    """The assignment in the current choice space; None once that has been replaced."""
    bound: float | None
    """The search's lower bound where its sizes turned out to be those that the search assumed."""
    over: Sizes | None = None
    """Sizes at which it holds too much: those that the search assumed, or its own if no others fit."""

    @property
    def program(self) -> Program:
        return self.sizer.program

    @cached_property
    def cost(self) -> float:
        """Seconds of all instructions together."""
        known = self.known_cost
        return program_cost(self.program, self.sizes, self.sizer.costs) if known is None else known

    def at(self, sizes: Sizes) -> Candidate:
        """The same program at other sizes."""
        memory = self.sizer.memory.peak(sizes)
        over = sizes if memory > self.sizer.limit else None
        return replace(self, sizes=sizes, known_cost=None, memory=memory, bound=None, over=over)

    def is_like(self, other: Candidate) -> bool:
        """Whether it is the same program at the same sizes."""
        same = self.program.instructions == other.program.instructions and self.program.inputs == other.program.inputs
        return same and self.sizes.shares == other.sizes.shares

    def held(self) -> tuple[float, ...]:
        """Bytes of each device at its fullest point."""
        return self.sizer.memory.peaks(self.sizes)


class Incumbent:
    """The best candidate within `limit` bytes so far, and the one that holds the least. `messages`: of the dual of the
    search that came to the best one, from which the next one's begins."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.best: Candidate | None = None
        self.least: Candidate | None = None
        self.messages: Messages = {}

    @property
    def cost(self) -> float:
        """Of the best; inf where there is none."""
        return self.best.cost if self.best else np.inf

    @property
    def choices(self) -> Ints | None:
        """Of the best."""
        return self.best.choices if self.best else None

    def offer(self, candidate: Candidate, messages: Messages) -> None:
        """Take a candidate where it is better; at no more cost, where it has a bound and the best has none."""
        if self.least is None or candidate.memory < self.least.memory:
            self.least = candidate
        best = self.best
        least_gain = 1e-12 if best is None or best.bound is None or candidate.bound is not None else SAME
        if candidate.memory <= self.limit and (
            best is None
            or candidate.cost < best.cost * (1 - least_gain)
            or (best.bound is None and candidate.bound is not None and candidate.cost <= best.cost * (1 + 1e-12))
        ):
            self.best, self.messages = candidate, messages

    def forget_choices(self) -> None:
        """Where the choices that it was made by are replaced by others."""
        self.best = replace(self.best, choices=None) if self.best else None
        self.messages = {}


def bound_at(cost: float, solution: Solution) -> float | None:
    """A search's lower bound for its program at sizes of this cost: where they are those that the search assumed."""
    known = np.isfinite(solution.lower_bound) and abs(cost - solution.cost) <= 1e-9 * cost
    return solution.lower_bound if known else None


def _unproved(choices: Ints) -> Solution:
    return Solution(choices, np.inf, 0.0, 0, 0, "gap")


@dataclass(frozen=True, eq=False)
class CandidateBuilder:
    """Makes candidates that fit into the devices' memory, with classes cut by `fixed_ratios`. `left`: the remaining
    seconds for finding sizes."""

    costs: CostModel
    fixed_ratios: FixedRatios | None = None
    left: Callable[[], float] = lambda: np.inf
    known: KnownShares = field(default_factory=KnownShares)

    @property
    def limit(self) -> float:
        return self.costs.memory_budget.limit

    def make(self, builder: ProblemBuilder, solution: Solution, *, as_assumed: bool = False) -> Candidate:
        """An assignment as a program at its best sizes, or `as_assumed` at the builder's; in the order that spares
        memory if no other fits."""
        assert solution.assignment is not None
        emitter = Emitter(builder, solution.assignment.tolist())
        program = emitter.ordered(self.costs.axes)
        classes = Classes.build(self.costs.graph, program, self.costs.table)
        staged = self._sized(program, classes, builder, solution, as_assumed)
        if staged.over is None:
            return staged
        # The same instructions, so the same classes.
        program = emitter.ordered(self.costs.axes, sparing=True)
        sparing = self._sized(program, classes, builder, solution, as_assumed)
        if sparing.over is None:
            return sparing
        fitting = [c for c in (staged, sparing) if c.memory <= self.limit]
        return min(fitting, key=lambda c: c.cost) if fitting else min(staged, sparing, key=lambda c: c.memory)

    def chosen(self, builder: ProblemBuilder, choices: Ints) -> Candidate:
        """Choices as a program at the ratios that a builder assumes."""
        return self.make(builder, _unproved(choices), as_assumed=True)

    def in_fewest_collectives(self, builder: ProblemBuilder, candidate: Candidate) -> Candidate | None:
        """The program that choices are at a builder's ratios, with collectives in a row as one; None where it has
        none."""
        if len(self.costs.axes) > 1:
            # Bounds are of programs whose conversions go the cheapest ways then.
            return None
        program = in_fewest_collectives(candidate.program, self.costs)
        if program is candidate.program or candidate.choices is None:
            return None
        program = by_cheapest_steps(program, candidate.sizes, self.costs)
        classes = Classes.build(self.costs.graph, program, self.costs.table)
        return self._sized(program, classes, builder, _unproved(candidate.choices), as_assumed=True)

    def _sized(
        self, program: Program, classes: Classes, builder: ProblemBuilder, solution: Solution, as_assumed: bool
    ) -> Candidate:
        assert solution.assignment is not None
        assert builder.ratios is not None
        sizer = Sizer(program, classes, self.costs, self.fixed_ratios, self.left, self.known)
        # The sizes that the search assumed are a candidate too, and they are what its bound holds for.
        assumed = builder.ratios.sizes_of(classes)
        if assumed is not None and any(assumed.shares[c] != held for c, held in sizer.pinned.items()):
            assumed = None
        needed = sizer.memory.peak(assumed) if assumed is not None else 0.0
        over = assumed if needed > self.limit else None
        if as_assumed and assumed is not None and over is None:
            sizes, memory = assumed, needed
        else:
            weights = builder.ratios.weights
            sizes = sizer.fixed(weights) if as_assumed else sizer.best(weights)
            memory = sizer.memory.peak(sizes)
            if assumed is not None and over is None:
                better = sizer.variable_cost(assumed) <= sizer.variable_cost(sizes) * (1 + SAME)
                if better or memory > self.limit:
                    sizes, memory = assumed, needed
        cheapest = program if as_assumed else by_cheapest_steps(program, sizes, self.costs)
        if cheapest is not program:
            by_these = Sizer(cheapest, classes, self.costs, self.fixed_ratios, self.left, self.known)
            held = by_these.memory.peak(sizes)
            if held <= max(memory, self.limit):
                program, sizer, memory = cheapest, by_these, held
        over = over or (sizes if memory > self.limit else None)
        if as_assumed:
            # What is chosen for its makespan need not have its sum counted.
            return Candidate(sizer, sizes, None, memory, solution.assignment, None, over)
        cost = program_cost(program, sizes, self.costs)
        return Candidate(sizer, sizes, cost, memory, solution.assignment, bound_at(cost, solution), over)

    def bound(self, candidate: Candidate) -> float:
        """A lower bound on the seconds of a candidate's program over all sizes that fit."""
        sizer = candidate.sizer
        rest = candidate.cost - sizer.variable_cost(candidate.sizes)
        return rest + sizer.bound(candidate.sizes)

    def full_ops(self, candidate: Candidate) -> dict[int, float]:
        """The op at which a program holds the most and others far from it at which it holds too much -> bytes held. Of
        a program without ops it is the end (`liveness.py`)."""
        profile = candidate.sizer.memory
        alive = profile.at(candidate.over or candidate.sizes).reshape(-1, profile.phases).max(axis=1)
        ops = [i.op if isinstance(i, Compute) else -1 for i in candidate.program.instructions]
        apart = max(1, len(ops) // 8)
        found: dict[int, float] = {}
        while len(found) < _POINTS and (not found or alive.max() > self.limit):
            point = int(alive.argmax())
            near = (op for op in (*ops[max(0, point - 1) :], *ops[:point][::-1]) if op >= 0)
            found.setdefault(next(near, len(self.costs.graph.ops)), float(alive[point]))
            alive[max(0, point - apart) : point + apart] = -np.inf
        return found
