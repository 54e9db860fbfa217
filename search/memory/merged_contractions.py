"""Contractions that XLA's GPU backend makes one (`DotMerger`): those that share an operand, as the query, the key and
the value of attention do, of the others joined. What they give is one array, which lies in memory until the last of its
parts is read; a contraction that reads a part has it copied, in the order of dimensions that it wants."""

from __future__ import annotations

from collections.abc import Iterator

from hapsynth.graph.ir import Op
from hapsynth.search.analysis.reachability import Reachability
from hapsynth.search.memory.xla_kernels import KernelTensor, XlaKernels

_SMALL = 32 << 20
"""Bytes that the lesser of two contractions takes and gives at most (`xla_gpu_dot_merger_threshold_mb`)."""
_OPERANDS = (0, 1)


def merge_contractions(kernels: XlaKernels) -> None:
    """Have contractions that XLA merges make one array, and those that read its parts find copies."""
    wholes: dict[int, KernelTensor] = {}
    for steps in _merged(kernels):
        taken = dict.fromkeys(t for k in steps for t in kernels.taken[k])
        nbytes = sum(kernels.nbytes(kernels.made[k][0]) for k in steps)
        whole = kernels.array([*taken], nbytes, like=kernels.op_of(steps[0]))
        for k in steps:
            kernels.lay_into(k, whole)
            wholes[k] = whole
    readers = kernels.readers()
    for k, whole in wholes.items():
        (part,) = kernels.made[k]
        copies: dict[tuple[int, ...], KernelTensor] = {}
        for reader in readers.get(part, ()):
            op, taken = _contraction(kernels, reader), kernels.taken[reader]
            # A merged contraction takes its whole; that takes the part.
            if op is None or reader in wholes:
                continue
            for n, t in enumerate(taken):
                if t == part:
                    order = _wanted(op, n)
                    if order not in copies:
                        copies[order] = kernels.array([whole], kernels.nbytes(part))
                    taken[n] = copies[order]


def _contraction(kernels: XlaKernels, k: int) -> Op | None:
    op = kernels.op_of(k)
    return kernels.graph.ops[op] if op is not None and kernels.graph.ops[op].name == "dot_general" else None


def _merged(kernels: XlaKernels) -> Iterator[list[int]]:
    """The steps of each merged contraction."""
    reach = Reachability(kernels.graph)
    ops = {k: op for k in range(len(kernels.steps)) if (op := _contraction(kernels, k))}
    alike: dict[object, list[int]] = {}
    for k, op in ops.items():
        contracting, batch = op.params["dimension_numbers"]
        for n in _OPERANDS:
            key = kernels.taken[k][n], n, contracting[n], batch, op.result_dtypes[0]
            alike.setdefault(key, []).append(k)

    def may_merge(a: int, b: int) -> bool:
        """Whether none needs the other, and not both are large."""
        nbytes = (sum(map(kernels.nbytes, [*kernels.taken[k], *kernels.made[k]])) for k in (a, b))
        first, second = ops[a].index, ops[b].index
        needed = reach.descendants(first)[second] or reach.descendants(second)[first]
        return min(nbytes) <= _SMALL and not needed

    done = set[int]()
    for steps in alike.values():
        group: list[int] = []
        for k in steps:
            if k not in done and all(may_merge(k, other) for other in group):
                group.append(k)
        if len(group) > 1:
            done.update(group)
            yield group


def _wanted(op: Op, n: int) -> tuple[int, ...]:
    """The order of an operand's dimensions in which a contraction reads it: those that it contracts last of the first
    operand, first of the second, but for the batch."""
    contracting, batch = (dims[n] for dims in op.params["dimension_numbers"])
    free = [d for d in range(len(op.shapes[n])) if d not in (*contracting, *batch)]
    return (*batch, *free, *contracting) if n == 0 else (*batch, *contracting, *free)
