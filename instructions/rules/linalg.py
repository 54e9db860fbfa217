"""Linear algebra and Fourier transforms: a matrix, or a line, is never cut; batches of them are.

Where a right-hand side is solved or multiplied column by column (or row by row), those are cut too.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2, prod

from hapsynth.graph.ir import Op
from hapsynth.instructions.factors import Dim, Factors
from hapsynth.instructions.rules.registry import FactorsOf, FlopsOf, register

_FACTORED = "each step of the factorization needs the whole matrix as the step before left it"
_ITERATED = "every iteration transforms the whole matrix"
_SUBSTITUTED = "each unknown needs those before it; right-hand sides are solved one by one"
_REFLECTED = "each reflection runs over the whole of a column"


def _lead(f: Factors, core: int) -> tuple[Dim, ...]:
    """The batch dimensions, which all operands and results share; the first operand has `core` dimensions more."""
    shape = f.op.shapes[0]
    return f.dims(shape[: len(shape) - core])


def _whole(f: Factors, batch: tuple[Dim, ...], shape: tuple[int, ...], why: str) -> tuple[Dim, ...]:
    own = f.dims(shape[len(batch) :])
    f.block(own, why)
    return (*batch, *own)


def _batches(core: int, why: str) -> FactorsOf:
    """Batches of what is taken whole: `b [m n] -> b [m n], b [m]`."""

    def factors(f: Factors) -> None:
        batch = _lead(f, core)
        f.operands += [_whole(f, batch, shape, why) for shape in f.op.shapes]
        f.results += [_whole(f, batch, shape, why) for shape in f.op.result_shapes]

    return factors


def _right_hand_sides(core: int, why: str, axis: Callable[[Op], int]) -> FactorsOf:
    """`b [n n], b [n] k -> b [n] k`: linear in the last operand, whose dimension `axis` (negative) is free."""

    def factors(f: Factors) -> None:
        *others, shape = f.op.shapes
        batch = _lead(f, core)
        f.operands += [_whole(f, batch, other, why) for other in others]
        own = list(f.dims(shape[len(batch) :]))
        free = len(own) + axis(f.op)
        f.block((dim for d, dim in enumerate(own) if d != free), why)
        f.operands.append((*batch, *own))
        f.results.append((*batch, *own))
        f.multiplies((len(others),))
        f.finite_only = "which of NaN and infinity a solver gives depends on how many columns it takes at once"

    return factors


def _cubic(scale: float) -> FlopsOf:
    """`scale * m n min(m, n)` per matrix; the scales are those of Golub and Van Loan, Matrix Computations."""

    def flops(op: Op) -> float:
        *batch, m, n = op.shapes[0]
        return scale * prod(batch) * m * n * min(m, n)

    return flops


def _solve_flops(op: Op) -> float:
    """Each right-hand side multiplies and adds with half the matrix."""
    n = op.shapes[0][-1]
    return float(n * prod(op.shapes[-1]))


def _product_flops(op: Op) -> float:
    *batch, n, k = op.shapes[0]
    return 2.0 * prod(batch) * n * n * k


def _fft_flops(op: Op) -> float:
    """The usual count of a split into halves: `5 n log2 n` per transform."""
    n = prod(op.params["fft_lengths"])
    lines = max(prod(op.shapes[0]), prod(op.result_shapes[0])) / max(n, 1)
    return 5.0 * lines * n * log2(max(n, 2))


def _add(name: str, scale: float, why: str, core: int = 2) -> None:
    register(name, flops=_cubic(scale), replicated=why)(_batches(core, why))


_add("cholesky", 1 / 3, _FACTORED)
_add("lu", 2 / 3, _FACTORED)
_add("qr", 4.0, _FACTORED)
_add("geqrf", 2.0, _FACTORED)
_add("householder_product", 4.0, _REFLECTED)
_add("eig", 25.0, _ITERATED)
_add("eigh", 9.0, _ITERATED)
_add("svd", 22.0, _ITERATED)
_add("schur", 25.0, _ITERATED)
_add("hessenberg", 10 / 3, _FACTORED)
_add("tridiagonal", 4 / 3, _FACTORED)

register("cholesky_update", replicated="each rotation changes the rows after it; JAX has no batched form")(
    _batches(2, "each rotation changes the rows after it")
)
register("lu_pivots_to_permutation", replicated="the swaps are made one after another")(
    _batches(1, "the swaps are made one after another")
)
register("tridiagonal_solve")(_right_hand_sides(1, _SUBSTITUTED, lambda op: -1))
register("triangular_solve", flops=_solve_flops)(
    _right_hand_sides(2, _SUBSTITUTED, lambda op: -1 if op.params["left_side"] else -2)
)
register("ormqr", flops=lambda op: 4 * _solve_flops(op))(
    _right_hand_sides(2, _REFLECTED, lambda op: -1 if op.params["left"] else -2)
)


@register("symmetric_product", flops=_product_flops)
def _symmetric_product(f: Factors) -> None:
    """`alpha a a^T + beta c`: `b n k, b n n -> b n n`; the terms `k` are summed, into `c` where `beta` is 1."""
    beta = f.op.params["beta"]
    batch = _lead(f, 2)
    k = f.dims(f.op.shapes[0][-1:])
    rows = f.dims(f.op.shapes[0][-2:-1])
    f.block(rows, "each row meets every other")
    f.operands += [(*batch, *rows, *k), (*batch, *rows, *rows)]
    f.results.append((*batch, *rows, *rows))
    if beta not in (0, 1):
        f.block(k, "the summand would be scaled once per device")
        return
    f.reduce(k, "sum")
    for factor in k[0] if beta == 1 else ():
        f.accumulators[factor] = 1


@register("fft", flops=_fft_flops)
def _fft(f: Factors) -> None:
    """Real or complex, one way or the other: a sum of transforms is the transform of the sum."""
    _batches(len(f.op.params["fft_lengths"]), "every frequency needs the whole line")(f)
    f.linear = ((0,),)
    f.finite_only = "a line with an infinity has no transform: whether NaN or infinity stands for it is the kernel's"
