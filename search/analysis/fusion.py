"""Which values lie in memory: elementwise ops between others form one kernel with them (decisions.md D5).

Twice: `materialized` says what step times count as moved and searches as held, whatever XLA does; `FusionPlan` what
XLA's kernels are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from hapsynth.graph.ir import Graph, Op
from hapsynth.instructions.rules.contraction import CONTRACTIONS
from hapsynth.instructions.rules.registry import is_costly, is_fusible
from hapsynth.instructions.rules.window import is_written_out
from hapsynth.instructions.staging.fusion import SMALL, made_again
from hapsynth.search.analysis.buffer_aliasing import overwritten
from hapsynth.search.analysis.reachability import Reachability


def materialized(graph: Graph) -> list[bool]:
    """Whether a value lies in memory: sources, outputs, and whatever an op that is no part of a fused chain makes or
    takes. What several ops take is stored too, as what autodiff saves for the backward pass is, unless each can make
    it again: out of something small, or cheaply out of one tensor that is stored.

    Chosen by `benchmarks/bench_memory.py`: predicted peak over `memory_analysis()` of XLA's CPU backend.
    """
    stored = [True] * len(graph.values)
    outputs = {v for v in graph.outputs if isinstance(v, int)}.union(graph.ties.values())
    nbytes = lambda v: graph.values[v].nbytes
    for op in graph.ops:
        if not is_fusible(op):
            continue
        for value in op.results:
            takers = {o for o, _ in graph.uses[value]}
            if value in outputs or not all(is_fusible(graph.ops[o]) for o in takers):
                continue
            large = [v for _, v in op.value_operands if nbytes(v) * SMALL > nbytes(value)]
            again = not large or (not is_costly(op) and len(large) == 1 and stored[large[0]])
            stored[value] = len(takers) > 1 and not again
    return stored


def launches(graph: Graph, stored: Sequence[bool], outputs: int) -> list[bool]:
    """Whether each op is launched by itself, as what ends a kernel. `stored`: what lies in memory (`materialized`).

    Where a kernel may write several results (`outputs` at most; XLA's GPU backend), elementwise chains are part of the
    reductions that read them, and what is stored is one more result of an elementwise kernel or reduction of its size
    that reads it, unless something else that reads it leads there: of Adam's update both moments and the parameter.
    """
    if outputs == 1:
        return _storing(graph, stored)
    storing = _storing(graph, _stored(graph, True, False)[0])
    ends = _ends(graph, storing, outputs)
    return [each and ends[n] == n for n, each in enumerate(storing)]


def _storing(graph: Graph, stored: Sequence[bool]) -> list[bool]:
    """Per op, whether a kernel writes its result."""
    return [not is_fusible(op) or any(stored[v] for v in op.results) for op in graph.ops]


def _ends(graph: Graph, storing: Sequence[bool], outputs: int) -> list[int]:
    """Of each op the one that ends its kernel, which may write `outputs` results. `storing`: as `_storing` has it."""
    reach = Reachability(graph)
    ends, written = list(range(len(graph.ops))), [0] * len(graph.ops)
    for op in reversed(graph.ops):
        here, takers = op.index, {o for v in op.results for o, _ in graph.uses[v]}
        if storing[here]:
            written[here] = len(op.results)
            joined = _reader_that_stores(graph, op, takers, ends, reach) if is_fusible(op) else None
            if joined is not None and written[joined] < outputs:
                ends[here] = joined
                written[joined] += 1
        elif takers:
            ends[here] = ends[min(takers)]
    return ends


def _reader_that_stores(
    graph: Graph, op: Op, takers: Collection[int], ends: Sequence[int], reach: Reachability
) -> int | None:
    """The end of a kernel that may write an elementwise op's result besides its own."""
    for taker in sorted(takers):
        last = graph.ops[ends[taker]]
        # A reduction goes over what it takes, an elementwise kernel over what it gives.
        extents = last.result_shapes[:1] if is_fusible(last) else last.shapes if last.name in _REDUCTIONS else ()
        chained = taker == last.index or is_fusible(graph.ops[taker])
        if not chained or last.region != op.region or op.result_shapes[0] not in extents:
            continue
        if not any(ends[other] != last.index and reach.descendants(other)[last.index] for other in takers):
            return last.index
    return None


_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor")
_PRODUCTS = ("mul", "square")
_TOLERATED = 1024
"""Bytes (`kIoToleranceBytes` there)."""
_WINDOWED = ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add")


class FusionPlan(NamedTuple):
    """What XLA's kernels find in memory and what they make themselves (`InstructionFusion`)."""

    stored: list[bool]
    """Whether a value is held: an elementwise op is part of the kernel that reads it, where that is one; of several
    each makes it again, if it is cheap."""
    again: list[bool]
    """Whether elementwise kernels make a stored value again."""
    reads_stored: list[bool]
    """Whether an op finds its operands in memory: what is no part of an elementwise kernel. A reduction does, and of a
    product that it sums up both factors; on GPUs whole chains are part of reductions."""
    overwritten: list[tuple[int, ...]]
    """Per op, the stored values in whose place its result may be written."""

    @staticmethod
    def of(graph: Graph, *, on_gpu: bool = False, triton: bool = False) -> FusionPlan:
        """`triton`: of GPUs whose contractions are kernels of XLA's, of which elementwise operands are part."""
        stored, reads_stored = _stored(graph, on_gpu, triton)
        again = [False] * len(graph.values)
        outputs = {v for v in graph.outputs if isinstance(v, int)}
        for op in filter(is_fusible, graph.ops):
            for v in op.results:
                again[v] = stored[v] and v not in outputs and _made_again(graph, op, v, triton)
        over = overwritten(graph, stored)
        if on_gpu:
            # A kernel that reduces goes through its operands in another order than it writes.
            ends = _ends(graph, _storing(graph, stored), len(graph.ops))
            over = [() if graph.ops[end].name in _REDUCTIONS else vs for end, vs in zip(ends, over, strict=True)]
        return FusionPlan(stored, again, reads_stored, over)


def _stored(graph: Graph, on_gpu: bool, triton: bool) -> tuple[list[bool], list[bool]]:
    """Per value, whether it is held; per op, whether it finds its operands in memory."""
    found = [True] * len(graph.values)
    outputs = {v for v in graph.outputs if isinstance(v, int)}.union(graph.ties.values())
    # The kernels that an op is part of: one, or two of several.
    kernels: list[frozenset[int]] = [frozenset((op.index,)) for op in graph.ops]
    reduces = [op.name in _REDUCTIONS for op in graph.ops]
    joins = (*(_REDUCTIONS if on_gpu else ()), *(("dot_general",) if triton else ()))
    reads_stored = [
        not (is_fusible(op) or op.name in joins or (on_gpu and _reads_windows_apart(op))) for op in graph.ops
    ]
    for op in reversed(graph.ops):
        if not (is_fusible(op) or (on_gpu and _scatters_apart(op))):
            continue
        for value in op.results:
            takers = {o for o, _ in graph.uses[value]}
            if value in outputs:
                continue
            if not on_gpu and takers and all(reduces[o] for o in takers) and _is_reduced_with(op):
                found[value] = False
                reads_stored[op.index], reduces[op.index] = True, op.name == "neg"
            elif not any(reads_stored[o] for o in takers):
                reach = frozenset[int]().union(*(kernels[o] for o in takers))
                found[value] = len(reach) > 1 and not _made_again(graph, op, value, triton)
                if len(op.results) == 1 and not found[value]:
                    kernels[op.index] = frozenset(sorted(reach)[:2])
    return found, reads_stored


def _reads_windows_apart(op: Op) -> bool:
    """Whether an op goes over windows of which none has an element of another: pooling, and its gradient."""
    windows = op.params.get("window_dimensions", ()) if op.name in _WINDOWED else ()
    return bool(windows) and all(n <= step for n, step in zip(windows, op.params["window_strides"], strict=True))


def _scatters_apart(op: Op) -> bool:
    """Whether an op gives each window's element to where it was from, which each position can tell by itself."""
    chooses = op.name == "select_and_scatter_add" and is_written_out(op.params, op.dtypes[1])
    return chooses and _reads_windows_apart(op)


def _made_again(graph: Graph, op: Op, value: int, triton: bool) -> bool:
    """Whether each kernel that reads the result of a fusible op makes it itself. A contraction of Triton's that others
    read beside does not where the op reads more than it gives (`IsInputWorthFusing` in XLA's
    triton_tiling_propagation.cc)."""
    if not made_again(graph, op, value):
        return False
    takers = {o for o, _ in graph.uses[value]}
    taken = sum(graph.values[v].nbytes for _, v in op.value_operands)
    contracted = triton and len(takers) > 1 and any(graph.ops[o].name == "dot_general" for o in takers)
    return not (contracted and taken > graph.values[value].nbytes + _TOLERATED)


def _is_reduced_with(op: Op) -> bool:
    """Whether an op is part of the reduction that reads it: a product of two that are whole, and a sign."""
    whole = all(shape == op.result_shapes[0] for shape in op.shapes) and len(op.value_operands) == len(op.operands)
    return op.name == "neg" or (op.name in _PRODUCTS and whole)


def turned(graph: Graph) -> frozenset[int]:
    """What a contraction makes and only transposes of its minor dimension read: XLA makes it as they want it, where
    nothing lies between."""
    found = set[int]()
    for op in graph.ops:
        if op.name not in CONTRACTIONS:
            continue
        (value,) = op.results
        takers = [graph.ops[o] for o, _ in graph.uses[value]]
        if takers and value not in graph.outputs and all(map(_turns, takers)):
            found.add(value)
    return frozenset(found)


def _turns(op: Op) -> bool:
    """Whether an op moves the minor dimension."""
    return op.name == "transpose" and op.params["permutation"][-1] != len(op.params["permutation"]) - 1
