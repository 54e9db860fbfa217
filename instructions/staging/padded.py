"""What one program computes on padded shards, alike on all devices, rather than on exact ones in a branch per share.

Exact shapes are for what takes time (decisions.md D1). A branch costs the same compile time however little it
computes, and a switch more than a small stage: there all devices compute the shape of the largest shard. What lies
behind a shard's own end is arbitrary then. An op that is cut along an index of its result computes nothing else from
it; where it sums over the index, what lies behind is made the identity first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from hapsynth._jax import is_extended
from hapsynth.graph.ir import Graph
from hapsynth.instructions.factors import Factors
from hapsynth.instructions.layout import Reduction
from hapsynth.instructions.program.program import Compute, Convert, Instruction, reads, writes
from hapsynth.instructions.program.sizes import Node, Sizes, layout_nodes
from hapsynth.instructions.rules.contraction import CONTRACTIONS
from hapsynth.instructions.rules.factor_table import FactorTable, cut_nodes
from hapsynth.instructions.rules.registry import flops_of, is_fusible
from hapsynth.instructions.staging.options import LoweringOptions

MASKED = frozenset(
    (
        *("dot_general", "conv_general_dilated", "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"),
        *("scatter-add", "scatter-sub"),
    )
)
"""Ops that an identity in all operands leaves as they are, where they reduce the index."""
_ALONG_AN_INDEX = frozenset(
    (
        *MASKED,
        *("reduce_prod", "argmax", "argmin", "cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp", "sort", "top_k"),
        *("reduce_window_sum", "reduce_window_max", "reduce_window_min", "gather", "scatter"),
    )
)
"""Ops that are no part of elementwise kernels and compute each index of a result from that index of the operands."""


class Behind(NamedTuple):
    """A dimension of an operand that is reduced: what lies behind the shard's own end must be an identity."""

    operand: int
    node: Node
    reduction: Reduction


def is_uneven(sizes: Sizes, node: Node) -> bool:
    return len(set(sizes.lengths(*node))) > 1


def behind(graph: Graph, sizes: Sizes, factors: Factors, i: Compute) -> Iterator[Behind]:
    """What an op that is computed on padded shards needs of what lies behind its operands' own ends."""
    op = graph.ops[i.op]
    for factor, axes, places, ways in factors.cuts(i.triples) if op.name in MASKED else ():
        for (place, dim), way in zip(places, ways, strict=True) if factor in factors.reductions else ():
            v = op.operands[place] if place < len(op.operands) else None
            if isinstance(v, int) and is_uneven(sizes, (v, dim, axes, way)):
                yield Behind(place, (v, dim, axes, way), factors.reductions[factor])


def _can_be(graph: Graph, sizes: Sizes, table: FactorTable, i: Instruction) -> bool:
    """Whether an instruction can be computed on padded shards."""
    held = (*reads(graph, i), *writes(graph, i))
    if any(layout_nodes(v, layout) and is_extended(graph.values[v].dtype) for v, layout in held):
        return False
    if isinstance(i, Convert):
        return True
    op, factors = graph.ops[i.op], table[i.op]
    if any(map(factors.is_whole, i.triples)):
        # All devices would run what one is to.
        return False
    if not (is_fusible(op) or op.name in _ALONG_AN_INDEX):
        return False
    # The batch of keys is sliced, and a slice that went over the end would begin elsewhere.
    batch = factors.results[0][: len(op.shapes[0])] if op.name == "random_bits" else ()
    for factor, nodes in cut_nodes(graph, i.op, factors, i.triples):
        if nodes and is_uneven(sizes, nodes[0]):
            if factor in factors.reductions and op.name not in (*MASKED, "gather"):
                return False
            if factor not in factors.reductions and factors.finite_only:
                # What lies behind may be NaN.
                return False
            if any(factor in dim for dim in batch):
                return False
    return True


def _touched(graph: Graph, sizes: Sizes, table: FactorTable, i: Instruction, products_per_element: int) -> float:
    """Elements of an elementwise op that takes as long as the instruction on the largest shards."""
    elements = float(max(prod(sizes.padded_shape(*p)) for p in (*reads(graph, i), *writes(graph, i))))
    if isinstance(i, Convert):
        return elements
    op = graph.ops[i.op]
    done = flops_of(op) / (2 * products_per_element if op.name in CONTRACTIONS else 1)
    for _, nodes in cut_nodes(graph, i.op, table[i.op], i.triples):
        if nodes:
            lengths = sizes.lengths(*nodes[0])
            done *= max(lengths) / sum(lengths)
    return max(elements, done)


def padded(
    graph: Graph, sizes: Sizes, table: FactorTable, stage: Sequence[Instruction], options: LoweringOptions
) -> list[bool]:
    """Which instructions of a stage are computed on padded shards."""
    able = [_can_be(graph, sizes, table, i) for i in stage]
    per_element = options.products_per_element
    touched = [_touched(graph, sizes, table, i, per_element) for i, can in zip(stage, able) if can]
    most = options.small_stage_elements + options.small_op_elements * len(touched)
    return able if sum(touched) <= most else [False] * len(stage)
