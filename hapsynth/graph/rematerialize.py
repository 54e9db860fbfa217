"""A graph in which some ops run twice: their results are not held between uses, but made again for the later ones.

What `jax.checkpoint` has a user say (selective activation recomputation, arXiv 2205.05198), said of a traced graph. The
second runs compute what the first did, of the same operands: the function is the same one.
"""

from __future__ import annotations

from dataclasses import replace

from hapsynth import _jax
from hapsynth.graph.ir import Boundary, Graph, HostCallback, Op, Operand, Rematerialized, Value


def blocks(graph: Graph) -> list[range]:
    """The ops of the program itself, one by one, and each of its loops and conds whole, in order."""
    outermost = [graph.around(op.region)[-2] if op.region else 0 for op in graph.ops]
    starts = [i for i, r in enumerate(outermost) if i == 0 or r == 0 or r != outermost[i - 1]]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(graph.ops)], strict=True)]


def can_run_again(op: Op) -> bool:
    """Whether it is an op of the program itself, and shows nothing."""
    return op.region == 0 and not isinstance(op.primitive, (Boundary, HostCallback))


def recomputed(graph: Graph, again: Rematerialized) -> Graph:
    """The graph with second runs of ops right before the first that needs them.

    Raises ValueError where an op cannot run again, or stands after `again.at`.
    """
    for o in again.ops:
        if not (0 <= o <= again.at < len(graph.ops) and can_run_again(graph.ops[o])):
            raise ValueError(f"op {o} cannot run again after op {again.at}")
    return _Rewriter(graph, again).run() if again.ops else graph


class _Rewriter:
    def __init__(self, graph: Graph, again: Rematerialized) -> None:
        self.graph, self.again = graph, again
        self.repeated = {v: o for o in again.ops for v in graph.ops[o].results}
        sources = len(graph.sources)
        self.values: list[Value] = list(graph.values[:sources])
        self.first: dict[int, int] = {v: v for v in range(sources)}
        """Value of the graph -> of the new one, as it was made first."""
        self.second: dict[int, int] = {}
        """As it was made again."""
        self.apart: dict[int, int] = {}
        """The operands of second runs that were held."""
        self.ops: list[Op] = []
        self.placed: dict[int, int] = {}

    def run(self) -> Graph:
        graph = self.graph
        for block in blocks(graph):
            late = block.start > self.again.at
            for o in block if late else ():
                for _, v in graph.ops[o].value_operands:
                    if v in self.repeated:
                        self.repeat(v)
            for o in block:
                op = graph.ops[o]
                find = lambda v, late=late: self.second.get(v, self.first[v]) if late else self.first[v]
                self.placed[o] = len(self.ops)
                results = self.append(op, [find(x) if isinstance(x, int) else x for x in op.operands], "")
                self.first.update(zip(op.results, results, strict=True))
        return replace(
            graph,
            values=tuple(self.values),
            ops=tuple(self.ops),
            outputs=tuple(self.first[x] if isinstance(x, int) else x for x in graph.outputs),
            ties={self.placed[o]: self.first[v] for o, v in graph.ties.items()},
            again=self.again,
        )

    def repeat(self, value: int) -> None:
        """A value made again, and its operands where their ops run again too."""
        todo = [value]
        while todo:
            v = todo[-1]
            op = self.graph.ops[self.repeated[v]]
            missing = [u for _, u in op.value_operands if u in self.repeated and u not in self.second]
            if v in self.second or not missing:
                todo.pop()
                if v not in self.second:
                    self.second.update(zip(op.results, self.append(op, self.operands(op), "'"), strict=True))
            else:
                todo += missing

    def operands(self, op: Op) -> list[Operand]:
        """The operand of a second run. XLA would merge it with the first, but for a barrier after the held values."""
        computed = [v for _, v in op.value_operands if v in self.graph.producer]
        bar = set(computed or [v for _, v in op.value_operands[:1]])
        operands = list[Operand]()
        for x in op.operands:
            if not isinstance(x, int):
                operands.append(x)
            elif x in self.second:
                operands.append(self.second[x])
            else:
                operands.append(self.held_apart(x, op.source) if x in bar else self.first[x])
        return operands

    def held_apart(self, value: int, source: str) -> int:
        if value not in self.apart:
            like = self.graph.values[value]
            shapes, dtypes = (like.shape,), (like.dtype,)
            barrier = Op(0, _jax.barrier_primitive(), (value,), (value,), {}, shapes, dtypes, shapes, dtypes, source)
            (self.apart[value],) = self.append(barrier, [self.first[value]], "'")
        return self.apart[value]

    def append(self, op: Op, operands: list[Operand], mark: str) -> list[int]:
        """An op like another on other operands; its results."""
        results: list[int] = []
        for v in op.results:
            like = self.graph.values[v]
            results.append(len(self.values))
            name = like.name + mark if mark or not like.name.startswith("v") else f"v{results[-1]}"
            self.values.append(replace(like, index=results[-1], name=name))
        self.ops.append(replace(op, index=len(self.ops), operands=tuple(operands), results=tuple(results)))
        return results
