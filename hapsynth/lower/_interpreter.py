"""What one device does between collectives: instructions on exact shards, whichever form they are part of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from hapsynth._jax import is_extended
from hapsynth.graph.ir import Graph, Literal
from hapsynth.instructions.factors import Cut, Local, ruled
from hapsynth.instructions.layout import cut_axes, way_of
from hapsynth.instructions.program.program import Compute, Convert, Instruction, Property, reads, writes
from hapsynth.instructions.program.sizes import Node, Sizes, layout_nodes
from hapsynth.instructions.rules import execute
from hapsynth.instructions.rules.factor_table import FactorTable, cut_nodes
from hapsynth.instructions.rules.registry import identity
from hapsynth.instructions.staging.padded import behind, is_uneven
from hapsynth.instructions.staging.stages import factor_shares
from hapsynth.lower._control_flow import Env
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.lower._scopes import scope_of, scope_of_step
from hapsynth.lower._storage import pad_to, with_length


@dataclass(eq=False)
class Interpreter:
    """Runs local instructions of a program on devices of one platform."""

    graph: Graph
    sizes: Sizes
    platform: str
    named: Callable[[Property, Any], Any] = lambda p, x: x
    """What is made of a property and its tensor, where one begins to hold: for who reads the trace."""
    table: FactorTable = field(init=False)
    loose: set[Property] = field(default_factory=set)
    """What was computed on padded shards: anything may lie behind a shard's own end."""

    def __post_init__(self) -> None:
        self.table = FactorTable(self.graph)

    def run(self, instructions: Sequence[Instruction], env: Env, here: MeshPosition) -> None:
        """Run local instructions in order on exact shards, adding their results to `env`."""
        for i in instructions:
            due = [self.shape(p, here) for p in writes(self.graph, i)]
            dtypes = [self.graph.values[v].dtype for v, _ in writes(self.graph, i)]
            if due and not any(map(prod, due)) and not any(map(is_extended, dtypes)):
                # Nothing to compute; XLA's CPU compiler of JAX 0.11.2 dies of reducing a dynamic slice of nothing.
                made = [jnp.zeros(shape, dtype) for shape, dtype in zip(due, dtypes)]
            else:
                made = self._local_step(i, env, here) if isinstance(i, Convert) else self._compute(i, env, here)
            for (v, layout), x, expected in zip(writes(self.graph, i), made, due, strict=True):
                assert x.shape == expected, f"{i} made {x.shape} on {here.coords}, where {expected} was due"
                env.setdefault((v, layout), self.named((v, layout), x))
                if here.padded and not self.sizes.is_even(v, layout):
                    self.loose.add((v, layout))

    def shape(self, p: Property, here: MeshPosition) -> tuple[int, ...]:
        """Of a property's tensor on the devices there."""
        return self.sizes.padded_shape(*p) if here.padded else self.sizes.local_shape(*p, here.coords)

    def _local_step(self, i: Convert, env: Env, here: MeshPosition) -> list[Any]:
        return [_LOCAL_STEPS[i.step](self, i, env[i.value, i.source], here)]

    def _partial(self, i: Convert, x: Any, here: MeshPosition) -> Any:
        return jnp.where(here.index[i.axis] == 0, x, jnp.zeros_like(x))

    def _slice(self, i: Convert, whole: Any, here: MeshPosition) -> Any:
        dim = i.target[i.axis].dim
        axes, way = cut_axes(i.target, dim), way_of(i.target, dim)
        lengths, starts = self.sizes.lengths(i.value, dim, axes, way), self.sizes.starts(i.value, dim, axes, way)
        # The start within what the other axes leave of the dimension.
        n = here.lengths[i.axis]
        start = here.lookup(axes, [start - starts[at - at % n] for at, start in enumerate(starts)])
        length = max(lengths) if here.padded else lengths[self.sizes.position(axes, here.coords)]
        with scope_of_step(self.graph, i):
            if here.padded:
                # A slice that went over the end would begin elsewhere.
                end = max(start - starts[at - at % n] for at, start in enumerate(starts)) + length
                whole = pad_to(whole, with_length(whole, dim, max(end, whole.shape[dim])))
            return lax.dynamic_slice_in_dim(whole, start, length, dim, allow_negative_indices=False)

    def _compute(self, i: Compute, env: Env, here: MeshPosition) -> list[Any]:
        graph, sizes = self.graph, self.sizes
        op, factors = graph.ops[i.op], self.table[i.op]
        given = dict(zip((position for position, _ in op.value_operands), reads(graph, i)))
        operands = [o.value if isinstance(o, Literal) else env[given[n]] for n, o in enumerate(op.operands)]
        shapes = tuple(
            o.shape if isinstance(o, Literal) else self.shape(given[n], here) for n, o in enumerate(op.operands)
        )
        cuts: dict[int, Cut] = {}
        for factor, (node, *_) in cut_nodes(graph, i.op, factors, i.triples):
            lengths, starts = factor_shares(sizes, factors, factor, node)
            offset = partial(here.lookup, node[2], starts)
            if here.padded:
                cuts[factor] = Cut(max(lengths), offset, partial(here.lookup, node[2], lengths))
            else:
                cuts[factor] = Cut(lengths[sizes.position(node[2], here.coords)], offset)
        local = Local(
            op=op,
            factors=factors,
            triples=ruled(i.triples),
            shapes=shapes,
            result_shapes=tuple(self.shape(p, here) for p in writes(graph, i)),
            cuts=cuts,
            axis_index=lambda axis: here.index[axis],
            platform=self.platform,
        )
        with scope_of(op, f"{op.name}_{op.index}"):
            for b in behind(graph, sizes, factors, i) if here.padded else ():
                nothing = identity(b.reduction, operands[b.operand].dtype)
                operands[b.operand] = self._fill(operands[b.operand], b.node, nothing, here)
            return execute(local, operands)

    def closed(self, p: Property, x: Any, here: MeshPosition) -> Any:
        """A padded shard with zeros behind its own end."""
        for node in layout_nodes(*p):
            if is_uneven(self.sizes, node):
                x = self._fill(x, node, 0, here)
        return x

    def _fill(self, x: Any, node: Node, value: Any, here: MeshPosition) -> Any:
        """A padded shard with `value` behind its own end of a dimension."""
        _, dim, axes, _ = node
        own = lax.iota(jnp.int32, x.shape[dim]) < here.lookup(axes, self.sizes.lengths(*node))
        return jnp.where(lax.broadcast_in_dim(own, x.shape, (dim,)), x, jnp.asarray(value, x.dtype))


_LOCAL_STEPS: dict[str, Callable[[Interpreter, Convert, Any, MeshPosition], Any]] = {
    "slice": Interpreter._slice,
    "partial": Interpreter._partial,
}
"""What each step that communicates nothing makes of a value's tensor."""
