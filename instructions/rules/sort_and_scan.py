"""Along one whole dimension: sorts, top-k and running reductions."""

from __future__ import annotations

from hapsynth.instructions.factors import Factors
from hapsynth.instructions.rules.reduce import extreme, keeps
from hapsynth.instructions.rules.registry import register


def _running(f: Factors) -> None:
    x = f.operand(0)
    f.block([x[f.op.params["axis"]]], "each element needs all before it")
    f.results.append(x)


@register("cumsum")
def _cumsum(f: Factors) -> None:
    _running(f)
    f.linear = ((0,),)


@register("cummax", "cummin")
def _running_extreme(f: Factors) -> None:
    _running(f)
    keeps(f, extreme(f))


@register("cumprod", "cumlogsumexp")
def _cumulative(f: Factors) -> None:
    _running(f)


@register("sort")
def _sort(f: Factors) -> None:
    x = f.operand(0)
    f.block([x[f.op.params["dimension"]]], "sorted")
    f.operands += [x] * (len(f.op.operands) - 1)
    f.results += [x] * len(f.op.results)


@register("top_k", "approx_top_k")
def _top_k(f: Factors) -> None:
    x = f.operand(0)
    axis = f.op.params.get("axis", f.op.params.get("reduction_dimension", -1)) % len(x)
    f.block([x[axis]], "the largest are sought in the whole dimension")
    named = [None if d == axis or not dim else dim[0] for d, dim in enumerate(x)]
    result = f.dims(f.op.result_shapes[0], named)
    f.block([result[axis]], "the largest are sought in the whole dimension")
    f.results += [result] * 2
