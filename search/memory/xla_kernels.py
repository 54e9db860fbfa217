"""XLA's kernels of a program in switch form and which of them find their operands in memory; collectives that are
bundled (`lower/_bundles.py`) and how many bytes they send and give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from hapsynth.graph.ir import Graph
from hapsynth.instructions.collectives import Block, Exchanged
from hapsynth.instructions.layout import Layout, cut_alone
from hapsynth.instructions.program.bundles import as_planned, family, filled, joined
from hapsynth.instructions.program.program import Compute, Convert, Instruction, Program, Property, reads, writes
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.registry import is_fusible
from hapsynth.instructions.staging.moved_rows import rounds
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.instructions.staging.stages import Stage, split
from hapsynth.search.analysis.fusion import FusionPlan
from hapsynth.search.cost.program_cost import padded_bytes

Reader = Literal["elementwise", "slice", "collective", "own"]
"""How an operand is taken: by an elementwise kernel, by a slice that ends one, to be sent, by a kernel of its own."""


class KernelTensor(NamedTuple):
    """`value | layout`, made by a kernel; -1: an input. Value -1: what a bundle of collectives takes or gives."""

    value: int
    layout: Layout
    maker: int


class XlaKernels:
    """The kernels of a program without control flow, by the step that ends each.

    A step is an instruction as it is lowered: a switch makes some again, what nothing needs is none. Small collectives
    that go as one are two steps more, which join what they send and send it; what each gives is a part of one array,
    as cheap to any elementwise reader as a slice. With `cuts_parts`, as on GPUs, a kernel of its own cuts each part out
    for all its readers, and the array is freed with the last part.

    `positions_last`: whether convolutions of a dtype want their operands with positions as the last dimensions, or with
    channels as the last; None: as they come. What is given or arrives otherwise is copied for them, once, filters for
    both directions; what they make is copied before it is sent.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        sizes: Sizes,
        fusing: FusionPlan,
        nbytes: Callable[[int, Layout], float],
        options: LoweringOptions,
        *,
        switches: bool = True,
        near: bool = True,
        planned: bool = False,
        cuts_parts: bool = False,
        positions_last: Callable[[str], bool] | None = None,
    ) -> None:
        self.graph, self.program, self.fusing, self._switches = graph, program, fusing, switches
        self._nbytes = cache(nbytes)
        self._cuts_parts, self._positions_last = cuts_parts, positions_last
        self._turned: dict[KernelTensor, KernelTensor] = {}
        """What convolutions take or make -> its copy."""
        self.steps: list[Instruction | None] = []
        """None: makes no value of the program's."""
        self.taken: list[list[KernelTensor]] = []
        self.made: list[list[KernelTensor]] = []
        self.switch: list[int] = []
        """The switch that a step is part of, known by its first step; -1: none."""
        self._bundled: dict[int, float] = {}
        """Step that makes no value of the program's -> bytes of what it makes."""
        self._like: dict[int, int] = {}
        """Such a step -> an op that it is of the kind of."""
        self._parts: set[int] = set()
        """Collectives that are part of a bundle, and what else is part of an array."""
        self.sent: list[int] = []
        """The steps that send something, in the program's order."""
        there = {p: KernelTensor(*p, -1) for p in program.inputs.items()}
        self.inputs = list(there.values())
        for item in joined(graph, split(graph, program, sizes, options, switches=switches, near=near)):
            match item:
                case list():
                    for bundle in bundles(graph, program, item, sizes, self._nbytes, options, planned=planned):
                        self._collective(bundle, there)
                case Convert():
                    # Of nothing.
                    self._add(item, there, there)
                case Stage():
                    self._stage(item, there)
                case _:
                    raise AssertionError(f"control flow: {item}")
        ends = zip(graph.outputs, program.outputs, strict=True)
        self.outputs = [there[v, layout] for v, layout in ends if isinstance(v, int) and layout is not None]
        self._found_whole = self._read_as_they_are()

    def nbytes(self, tensor: KernelTensor) -> float:
        return self._nbytes(tensor.value, tensor.layout) if tensor.value >= 0 else self._bundled[tensor.maker]

    def op_of(self, k: int) -> int | None:
        """The op that a step computes, or one that its kernel is of the kind of."""
        step = self.steps[k]
        return step.op if isinstance(step, Compute) else self._like.get(k)

    def reads(self, k: int) -> list[KernelTensor]:
        """What the kernel that ends in a step finds in memory."""
        found: dict[KernelTensor, None] = {}
        seen, waiting = {k}, [k]
        while waiting:
            i = waiting.pop()
            for t in self.taken[i]:
                if t.maker < 0 or self._is_stored(t, i):
                    found[t] = None
                elif t.maker not in seen:
                    seen.add(t.maker)
                    waiting.append(t.maker)
        return list(found)

    def readers(self) -> dict[KernelTensor, list[int]]:
        """The steps that take each tensor."""
        found: dict[KernelTensor, list[int]] = {}
        for k, taken in enumerate(self.taken):
            for t in dict.fromkeys(taken):
                found.setdefault(t, []).append(k)
        return found

    def array(self, taken: Sequence[KernelTensor], nbytes: float, like: int | None = None) -> KernelTensor:
        """What a kernel makes of others, no value of the program's. `like`: an op that it is of the kind of; None: a
        copy."""
        k = len(self.steps)
        self._bundled[k] = nbytes
        if like is not None:
            self._like[k] = like
        self._append(None, taken, [KernelTensor(-1, (), k)])
        return self.made[k][0]

    def lay_into(self, k: int, whole: KernelTensor) -> None:
        """Have a step's result lie in another array: elementwise kernels find it there, others in a copy."""
        self.taken[k] = [whole]
        self._parts.add(k)

    def _stage(self, stage: Stage, there: dict[Property, KernelTensor]) -> None:
        for step in stage.before:
            self._add(step, there, there)
        inside = {p: there[p] for p in stage.reads} if self._switches else there
        first = len(self.steps) if self._switches else -1
        for step in stage.switch:
            self._add(step, inside, inside, first)
        for p in stage.writes:
            there.setdefault(p, inside[p])
        for step in stage.after:
            self._add(step, there, there)

    def _add(
        self,
        step: Instruction,
        given: dict[Property, KernelTensor],
        found: dict[Property, KernelTensor],
        switch: int = -1,
    ) -> None:
        taken = [given[p] for p in reads(self.graph, step)]
        if specs := self._convolved(step):
            taken = [self._as_wanted(t, spec) for t, spec in zip(taken, specs)]
        k = len(self.steps)
        self._append(step, taken, [KernelTensor(*p, k) for p in writes(self.graph, step)])
        self.switch[k] = switch
        for t in self.made[k]:
            found.setdefault((t.value, t.layout), t)

    def _append(self, step: Instruction | None, taken: Sequence[KernelTensor], made: Sequence[KernelTensor]) -> None:
        self.switch.append(-1)
        self.steps.append(step)
        self.taken.append(list(taken))
        self.made.append(list(made))

    def _convolved(self, step: Instruction | None) -> Sequence[Sequence[int]]:
        """Of a convolution, where the dimensions of its operands and its result are."""
        if self._positions_last is None or not isinstance(step, Compute):
            return ()
        op = self.graph.ops[step.op]
        return op.params["dimension_numbers"] if op.name == "conv_general_dilated" else ()

    def _is_wanted(self, value: int, spec: Sequence[int]) -> bool:
        """Whether a convolution takes or makes a tensor as it lies: with the positions where it wants them."""
        assert self._positions_last is not None
        first = 2 if self._positions_last(str(self.graph.values[value].dtype)) else 1
        return sorted(spec[2:]) == [*range(first, first + len(spec) - 2)]

    def _as_wanted(self, t: KernelTensor, spec: Sequence[int]) -> KernelTensor:
        """What a convolution finds in place of an operand. The gradient of its input takes the filter itself, not what
        is turned round in the program."""
        step = self.steps[t.maker] if t.maker >= 0 else None
        if isinstance(step, Compute) and self.graph.ops[step.op].name == "rev":
            (t,) = self.taken[t.maker]
            step = self.steps[t.maker] if t.maker >= 0 else None
        arrives = t.maker < 0 or (isinstance(step, Convert) and step.is_collective and t.maker not in self._parts)
        # What a kernel makes it makes in the form that its readers want.
        return self._copied(t) if arrives and not self._is_wanted(t.value, spec) else t

    def _copied(self, t: KernelTensor) -> KernelTensor:
        if t not in self._turned:
            self._turned[t] = self.array([t], self.nbytes(t))
        return self._turned[t]

    def _is_turned(self, t: KernelTensor) -> bool:
        """Whether a convolution makes it in another form than the program's."""
        specs = self._convolved(self.steps[t.maker]) if t.maker >= 0 else ()
        return bool(specs) and not self._is_wanted(t.value, specs[2])

    def _collective(self, bundle: Bundle, there: dict[Property, KernelTensor]) -> None:
        taken = [there[step.value, step.source] for step in bundle.steps]
        if not bundle.is_packed:
            taken = [self._copied(t) if self._is_turned(t) else t for t in taken]
        if bundle.is_packed:
            for nbytes in (bundle.sent, bundle.given):
                taken = [self.array(taken, nbytes)]
            self.sent.append(len(self.steps) - 1)
        else:
            self.sent.append(len(self.steps))
        for step in bundle.steps:
            k = len(self.steps)
            # The blocks of an all-to-all are joined by a kernel of its own.
            if bundle.is_packed and not (step.collective.splits and step.collective.joins):
                self._parts.add(k)
            self._append(step, taken, [KernelTensor(step.value, step.target, k)])
            there[step.value, step.target] = self.made[k][0]

    def _is_stored(self, tensor: KernelTensor, reader: int) -> bool:
        """Whether a reader finds a tensor in memory rather than makes it again."""
        step, by = self.steps[tensor.maker], self._reader(reader)
        if step is None or by == "collective" or self.switch[tensor.maker] != self.switch[reader]:
            return True
        if tensor.maker in self._parts or (isinstance(step, Convert) and not step.is_collective):
            # A slice, or a part of what a bundle gives, is made by each elementwise kernel that reads it.
            return by == "own" or (self._cuts_parts and isinstance(step, Convert) and step.is_collective)
        if isinstance(step, Convert):
            return True
        if by == "slice" and is_fusible(self.graph.ops[step.op]) and tensor not in self._found_whole:
            return False
        return self.fusing.stored[tensor.value] and not (self.fusing.again[tensor.value] and by != "own")

    def _reader(self, k: int) -> Reader:
        step, op = self.steps[k], self.op_of(k)
        if op is not None:
            return "own" if self.fusing.reads_stored[op] else "elementwise"
        if not isinstance(step, Convert) or k in self._parts:
            return "elementwise"
        return "collective" if step.is_collective else "slice"

    def _read_as_they_are(self) -> set[KernelTensor]:
        """What something finds in memory in its own form: not what dots and reductions read of more than two
        dimensions, which XLA makes two. A slice makes anything else that is elementwise again, though others store
        it."""
        found: set[KernelTensor] = set()
        for k, step in enumerate(self.steps):
            by = self._reader(k)
            flat = isinstance(step, Compute) and not self.graph.ops[step.op].name.startswith("conv")
            for t in self.taken[k] if by in ("own", "collective") else ():
                if not (flat and len(self.graph.values[t.value].shape) > 2):
                    found.add(t)
        return found


NBytes = Callable[[int, Layout], float]


class Bundle(NamedTuple):
    """Collectives that go as one, and the bytes of the arrays that they take and give."""

    steps: tuple[Convert, ...]
    sent: float
    given: float

    @property
    def is_packed(self) -> bool:
        """Whether what is sent is written anew, and what is given is a part of one array: of several; of one whose
        blocks do not lie one after the other, as those of a dimension that is not the first."""
        ends = [p.dim for step in self.steps for p in (step.source[step.axis], step.target[step.axis])]
        return len(self.steps) > 1 or max(ends) > 0


def bundles(
    graph: Graph,
    program: Program,
    run: Sequence[Convert],
    sizes: Sizes,
    nbytes: NBytes,
    options: LoweringOptions,
    *,
    planned: bool = False,
) -> Iterator[Bundle]:
    """Those of a run of collectives that need nothing of one another. `nbytes`: of a tensor on a device, as it is
    stored. `planned`: as the program has them."""
    wires = [_wire(program, step, sizes, nbytes) for step in run]
    sent, given = [wire.sent for wire in wires], [wire.given for wire in wires]
    dtypes = [graph.values[step.value].dtype for step in run]
    families = [
        family(step, dtype) if size <= options.bundled_bytes else None
        for step, size, dtype in zip(run, sent, dtypes, strict=True)
    ]
    # A device of exact shards may send nothing, and takes part.
    groups = as_planned(run) if planned else filled(families, [max(size, 1.0) for size in sent], options.bundle_bytes)
    for group in groups:
        yield Bundle(tuple(run[n] for n in group), sum(sent[n] for n in group), sum(given[n] for n in group))


class _Wire(NamedTuple):
    """Bytes of the arrays that a collective takes and gives."""

    sent: float
    given: float


def _wire(program: Program, step: Convert, sizes: Sizes, nbytes: NBytes) -> _Wire:
    """The same on all devices, whatever they store: whole blocks of the largest shard, or the largest piece of each
    round."""
    collective, traffic, n = step.collective, step.traffic, program.axes[step.axis][1]
    whole = sizes.graph.values[step.value].nbytes
    padded = lambda layout: padded_bytes(sizes, step.value, layout)
    alone = lambda cut: padded(cut_alone(cut, len(step.source)))
    if isinstance(traffic, Exchanged) and whole:
        old, new = (np.array(sizes.lengths(step.value, *cut)) for cut in (traffic.old, traffic.new))
        around = prod(alone(cut) / whole for cut in traffic.around)
        pieces = rounds(old / old.sum(), new / new.sum(), n)
        sent = whole * around * float(pieces.sum())
        # To be joined.
        return _Wire(sent, sent)
    if not isinstance(traffic, Block) or collective.balances:
        return _Wire(nbytes(step.value, step.source), nbytes(step.value, step.target))
    sent = (n if collective.splits else 1) * padded(traffic.layout)
    if traffic.part is not None:
        sent *= alone(traffic.part) / (alone(traffic.of) if traffic.of else whole)
    gathered = collective.joins and not collective.splits
    return _Wire(sent, n * sent if gathered else padded(step.target))
