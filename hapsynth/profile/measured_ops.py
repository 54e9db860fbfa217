"""The heavy ops of one function, each by itself on the exact shards of one device, at several sizes.

Poplar (arXiv 2408.12596) measures how long a step takes each kind of device by the size of its batch, and goes by these
times in place of a model. Here it is op by op, so that they hold for whatever program the search makes of the function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hapsynth.cluster.cluster import NOMINAL_INTRA, Cluster
from hapsynth.cluster.device_kinds import DeviceKind
from hapsynth.cluster.granularity import DEFAULT_GRANULARITY
from hapsynth.graph.ir import Boundary, Graph, Op
from hapsynth.instructions.factors import Cut, Local, Triple
from hapsynth.instructions.layout import Placement
from hapsynth.instructions.rules import execute
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.profile.op_kernels import Kernel
from hapsynth.search.analysis.dimension_groups import kinship
from hapsynth.search.analysis.op_class import amount_of
from hapsynth.search.analysis.op_signature import described, signature_of
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.work import lanes_of, tiled

PART = 0.95
"""The measured ops' part of the predicted seconds of all ops that can be measured."""
MOST_OPS, MOST_OPS_QUICK = 40, 10
HALVINGS = 3
"""An eighth; the part of one of the devices where these are more."""


class Ops:
    """The ops of a function that can be measured by themselves: those that have a signature, each once."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.table = graph, FactorTable(graph)
        self.kin = kinship(graph, self.table)
        self.by_signature: dict[str, Op] = {}
        self._runs: dict[str, float] = {}
        for op in graph.ops:
            if isinstance(op.primitive, Boundary) or amount_of(op) == 0:
                continue
            if signature := signature_of(op):
                self.by_signature.setdefault(signature, op)
                self._runs[signature] = self._runs.get(signature, 0.0) + graph.runs[op.region]
        first = [(v, 0, (), 0) for v in graph.inputs if v not in graph.state]
        self._batch = {self.kin.find(node) for node in first if node in self.kin.parent}
        """The roots of the dimensions that are cut together with the first of an argument that is new each step."""

    def heaviest(self, kind: DeviceKind, most: int = MOST_OPS) -> list[str]:
        """The signatures of those that a kind of device takes longest over in a step, the heaviest first."""
        costs = CostModel(self.graph, Cluster("one", (kind,), (0,), NOMINAL_INTRA), self.table)
        whole = lambda op: costs.work(op.index, self.table[op.index].joint(1)[0])
        spent = {s: runs * costs.time(whole(self.by_signature[s]), ()) for s, runs in self._runs.items()}
        order = sorted(spent, key=lambda s: (-spent[s], s))
        before = np.cumsum([0.0, *(spent[s] for s in order)])[:-1]
        return order[: min(int((before < PART * sum(spent.values())).sum()), most)]

    def kernels(self, signatures: Sequence[str], n: int, platform: str, quick: bool) -> Iterator[Kernel]:
        """Each op on a half, a quarter, ... of the batch, the smallest part first, and whole; whole alone where it
        can't be halved. `n`: how many devices share it. `platform`: theirs."""
        halvings = max(HALVINGS, (n - 1).bit_length())
        for signature in signatures:
            triple = self.cut(signature)
            for k in range(halvings - halvings % 2, -1, -2) if quick else range(halvings, -1, -1):
                if (k == 0 or triple is not None) and (kernel := self._kernel(signature, triple, 1 << k, platform)):
                    yield kernel

    def cut(self, signature: str) -> Triple | None:
        """How an op is run on a part of the batch; of one without a batch, on a part of what it makes, or sums up."""
        op = self.by_signature[signature]
        factors, tensors = self.table[op.index], (*op.operands, *op.results)

        def fits(t: Triple) -> tuple[bool, bool, int]:
            ((factor, _, places, _),) = factors.cuts((t,))
            nodes = [(v, dim, (), 0) for place, dim in places if isinstance(v := tensors[place], int)]
            of_batch = any(self.kin.find(node) in self._batch for node in nodes)
            return of_batch, t.results[0].is_sharded, factors.sizes[factor]

        return max((t for t in factors.triples if t.factor is not None), key=fits, default=None)

    def _kernel(self, signature: str, triple: Triple | None, parts: int, platform: str) -> Kernel | None:
        """The op on one of so many parts; None where they would be unequal, or come to as many tiles as larger ones."""
        op = self.by_signature[signature]
        factors = self.table[op.index]
        size, share, cuts = 1, 1.0, dict[int, Cut]()
        if triple is not None and triple.factor is not None:
            size, lanes = factors.sizes[triple.factor], lanes_of(op.name, factors, triple.factor)
            share, larger = (float(tiled(np.array(part / parts), lanes, DEFAULT_GRANULARITY.tile)) for part in (1, 2))
            if parts > 1 and (size % parts or share >= min(larger, 1.0)):
                return None
            cuts = {triple.factor: Cut(size // parts, lambda: jnp.int32(0))}
        if triple is None or parts == 1:
            triple, share, cuts = factors.triples[0], 1.0, {}
        shapes, (result,) = _local(op.shapes, triple.operands, parts), _local(op.result_shapes, triple.results, parts)
        local = Local(op, factors, (triple,), shapes, (result,), cuts, lambda _: jnp.int32(0), platform)

        def fn(*arrays: Any) -> Any:
            inputs = iter(arrays)
            (output,) = execute(local, [next(inputs) if isinstance(o, int) else o.value for o in op.operands])
            return output

        operands = tuple((shape, 1.0) for shape, o in zip(shapes, op.operands, strict=True) if isinstance(o, int))
        amount, dtype = amount_of(op) * share, str(op.dtypes[0])
        return Kernel(signature, dtype, size // parts, fn, operands, amount, 1, 1, described(op), result)


def _local(
    shapes: Sequence[tuple[int, ...]], placements: Sequence[Placement], parts: int
) -> tuple[tuple[int, ...], ...]:
    cut = lambda shape, p: tuple(n // parts if p.is_sharded and d == p.dim else n for d, n in enumerate(shape))
    return tuple(cut(shape, p) for shape, p in zip(shapes, placements, strict=True))
