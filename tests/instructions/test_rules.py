"""Every triple of every rule, tried on simulated devices against the plain op."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rule_case import CASES, Case
from rule_cases import NEWER, primitives
from thoroughness import THOROUGH

from hapsynth.graph.ir import Literal, Op
from hapsynth.instructions.factors import Cut, Factors, Triple
from hapsynth.instructions.layout import P, R, Reduction, S
from hapsynth.instructions.rules import REGISTRY, factors_of
from hapsynth.instructions.rules.registry import flops_of
from hapsynth.instructions.testing import simulate

SOME = jax.__version_info__ >= (0, 12) and not THOROUGH
"""On a JAX newer than that of the whole run, which tries what its primitives' parameters are: a few triples of each."""
_FEW = 3
SEEN: set[str] = set()
SEEN_JOINT: set[str] = set()
"""Ops that an earlier case has tried already, on one axis and on two."""


def key(op: Op) -> str:
    """What the op's rule may depend on; for an elementwise one and a broadcast that is not the sizes. What is new in a
    newer JAX is parameters."""
    literals = [o.is_zero if isinstance(o, Literal) else None for o in op.operands]
    shapes, params = (op.shapes, op.result_shapes), dict(op.params)
    if REGISTRY[op.name].factors.__module__.endswith("pointwise") or op.name == "broadcast_in_dim":
        shapes = [[n == 1 for n in s] for s in (*op.shapes, *op.result_shapes)]
        params.pop("shape", None)
    if SOME:
        return f"{op.name} {params}"
    return f"{op.name} {shapes} {op.dtypes} {op.result_dtypes} {params} {literals}"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_triple_is_sound(case: Case):
    tried: list[simulate.Trial] = []
    for op, operands in case.ops():
        # Indices matter to gather and scatter, so those are tried each time.
        if op.name not in REGISTRY:
            continue
        if key(op) not in SEEN or (not SOME and (op.name == "gather" or op.name.startswith("scatter"))):
            SEEN.add(key(op))
            tried += some(filter(is_tried, simulate.trials(op, factors_of(op), operands, owned=True)))
    simulate.check(tried)


def test_groups_are_counted_where_types_are_not_promoted() -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        for op, operands in next(c for c in CASES if c.name == "ragged_dot").ops():
            for trial in simulate.trials(op, factors_of(op), operands):
                jax.eval_shape(trial.run, trial.held())


def some(trials: Iterable[simulate.Trial]) -> list[simulate.Trial]:
    every = [*trials]
    return every if not SOME else random.Random(0).sample(every, min(_FEW, len(every)))


def is_tried(trial: simulate.Trial) -> bool:
    """Of the ways to deal a factor the skewed one with an idle device, and of owners the second, for some ops, as no
    rule has a say in that: what is compiled takes the time. A thorough run has all, and triples on two axes have equal
    shares and several idle devices as well."""
    f, (triple,) = trial.factors, trial.triples
    if not THOROUGH and (f.is_whole(triple) or triple == f.one_to_all) and crc32(trial.op.name.encode()) % 4:
        return False
    if THOROUGH or not trial.shares:
        return True
    (shares,) = trial.shares.values()
    return shares == (0, 1, 0) if f.is_whole(triple) else len(shares) == 3


JOINT = int(os.environ.get("HAPSYNTH_JOINT_TRIALS", "1"))
"""How many of an op's triples on two mesh axes are tried."""


@pytest.mark.few(50)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_triples_of_two_axes_are_sound(case: Case):
    tried: list[simulate.Trial] = []
    for seed, (op, operands) in enumerate(case.ops()):
        if op.name in REGISTRY and (key(op) not in SEEN_JOINT or op.name in ("gather", "scatter-add")):
            SEEN_JOINT.add(key(op))
            tried += simulate.joint_trials(op, factors_of(op), operands, JOINT, seed, owned=True)
    simulate.check(tried, samples=2)


def test_every_registered_primitive_has_a_case():
    missing = sorted(set(REGISTRY) - set(primitives()) - NEWER)
    assert not missing, f"add cases for {missing} to those in tests/support/rule_cases.py"


# ---- what a rule says, as text

GOLDEN = Path(__file__).parents[1] / "golden" / "rules.txt"
SHOWN = {
    "dot": "dot_general",
    "einsum": "dot_general",
    "conv": "conv_general_dilated",
    "conv groups grad": "conv_general_dilated",
    "conv batch groups": "conv_general_dilated",
    "reduce_sum all": "reduce_sum",
    "reduce_max all": "reduce_max",
    "argmax": "argmax",
    "broadcast new and expanded": "broadcast_in_dim",
    "broadcast zeros": "broadcast_in_dim",
    "reshape merge and split": "reshape",
    "reshape gcd": "reshape",
    "reshape shifted": "reshape",
    "reshape permuted": "reshape",
    "heads": "reshape",
    "transpose": "transpose",
    "tile": "tile",
    "iota int32": "iota",
    "bitcast narrower": "bitcast_convert_type",
    "slice": "slice",
    "dynamic_slice": "dynamic_slice",
    "dynamic_update_slice": "dynamic_update_slice",
    "concatenate": "concatenate",
    "stack": "stack",
    "split": "split",
    "pad zero": "pad",
    "cumsum": "cumsum",
    "sort two": "sort",
    "top_k": "top_k",
    "max pool grad": "select_and_scatter_add",
    "embedding FILL_OR_DROP": "gather",
    "gather of bool": "gather",
    "take_along_axis grad": "scatter-add",
    "scatter-add FILL_OR_DROP": "scatter-add",
    "scatter-max": "scatter-max",
    "scatter FILL_OR_DROP": "scatter",
    "add broadcast": "add",
    "mul bf16": "mul",
    "convert bfloat16 float32": "convert_element_type",
    "convert float32 bfloat16": "convert_element_type",
    "select_n scalar predicate": "select_n",
    "clamp scalar bounds": "clamp",
}
"""Case -> the primitive in it that is shown."""


def described(case: Case, primitive: str) -> str:
    """Each op in Shardy's notation, then its triples."""
    lines = [f"# {case.name}"]
    for op in case.graph.ops:
        if op.name == primitive:
            f = factors_of(op)
            lines += [f"{op.name}: {f}", *(f"    {t}" for t in f.triples[1:])]
    return "\n".join([*lines, ""])


def test_rules_read_as_they_should():
    by_name = {c.name: c for c in CASES}
    text = "\n".join(described(by_name[name], primitive) for name, primitive in SHOWN.items())
    if os.environ.get("HAPSYNTH_UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "review the change, then rerun with HAPSYNTH_UPDATE_GOLDEN=1"


def test_flops():
    def of(name: str, primitive: str) -> list[float]:
        case = next(c for c in CASES if c.name == name)
        return [flops_of(op) for op in case.graph.ops if op.name == primitive]

    assert of("dot", "dot_general") == [2 * 4 * 3 * 2]
    assert of("einsum", "dot_general") == [2 * 2 * 4 * 3 * 3 * 2]
    # Five positions by three taps, less the two that lie outside.
    assert of("conv", "conv_general_dilated") == [2 * 4 * (5 * 3 - 2) * 2 * 3]
    # Each of three groups: two features in and two out; forward, and its gradients cost the same.
    assert of("conv groups grad", "conv_general_dilated") == [2 * 2 * (4 * 3 - 2) * 2 * 6] * 3
    assert of("conv batch groups", "conv_general_dilated") == [2 * 3 * (4 * 3 - 2) * 3 * 4]
    # Every second position of the dilated input is a hole.
    assert of("conv transpose", "conv_general_dilated") == [2 * 2 * (8 * 3 // 2 - 1) * 3 * 2]
    assert of("transpose", "transpose") == [0]


FINITE_ONLY = {
    *("conv_general_dilated", "ragged_dot_general", "triangular_solve", "tridiagonal_solve", "ormqr", "fft"),
}
"""Rules that are not tried with NaN and infinities; each for a reason that the documentation gives."""


def test_rules_of_finite_operands_are_named() -> None:
    ops = [op for case in CASES for op in case.graph.ops if op.name in REGISTRY]
    text = (Path(__file__).parents[2] / "docs" / "nonfinite.md").read_text()
    reasons = {op.name: why for op in ops if (why := factors_of(op).finite_only)}
    assert set(reasons) == FINITE_ONLY
    assert not [name for name in reasons if f"`{name}`" not in text]
    # Convolutions only in groups.
    whole, grouped = op_of("conv", "conv_general_dilated"), op_of("conv groups grad", "conv_general_dilated")
    assert not factors_of(whole[0]).finite_only
    assert factors_of(grouped[0]).finite_only


@pytest.mark.parametrize(
    ("case", "primitive", "passes"),
    [
        ("mul literal", "mul", True),
        ("mul inf literal", "mul", False),
        ("mul broadcast", "mul", False),
        ("mul int", "mul", True),
        ("div literal", "div", True),
        ("div zero literal", "div", False),
        ("div tiny literal", "div", False),
        ("div int", "div", False),
    ],
)
def test_a_sum_passes_what_is_known(case: str, primitive: str, passes: bool) -> None:
    triples = factors_of(op_of(case, primitive)[0]).triples
    assert any(P("sum") in t.operands for t in triples) == passes


@pytest.mark.parametrize("poison", simulate.POISONS)
def test_operands_are_poisoned(poison: str) -> None:
    """Floats of every width, and nothing else."""
    given = [np.ones((20, 20), d) for d in (np.float32, jnp.bfloat16, np.complex64, np.int32, np.bool_)]
    made = simulate.poisoned(given, poison)
    kinds = [k for k in ("NaN", "inf") if k in poison or poison == "all"]
    for x, y in zip(given, made, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        floats = jnp.issubdtype(x.dtype, jnp.inexact)
        assert np.array_equal(x, y) != floats
        for kind in kinds if floats else ():
            assert (np.isnan if kind == "NaN" else np.isinf)(y).any(), kind


# ---- wrong rules are caught


def op_of(name: str, primitive: str) -> tuple[Op, list]:
    case = next(c for c in CASES if c.name == name)
    return next((op, x) for op, x in case.ops() if op.name == primitive)


def forget_partial(f: Factors) -> None:
    f.reductions.clear()


def take(kind: Reduction):
    def mutate(f: Factors) -> None:
        f.reductions = dict.fromkeys(f.reductions, kind)

    return mutate


def unblock(f: Factors) -> None:
    f.blocked.clear()


def linear(*groups: tuple[int, ...]):
    def mutate(f: Factors) -> None:
        f.linear = groups

    return mutate


def passes(f: Factors) -> None:
    f.passes = ((0,),)


def keeps(kind: Reduction):
    def mutate(f: Factors) -> None:
        f.extra.append(Triple((P(kind),) + (R,) * (len(f.operands) - 1), (P(kind),)))

    return mutate


def swap_result(f: Factors) -> None:
    a, b, *rest = f.results[0]
    f.results[0] = (b, a, *rest)


def minor_first(f: Factors) -> None:
    """The granule forgotten: a merged dimension is cut along its minor factor."""
    f.results = [tuple(dim[::-1] for dim in t) for t in f.results]


def rows_as_result(f: Factors) -> None:
    """The join is taken for a dimension that operand and result share."""
    f.blocked.clear()
    axis = f.op.params.get("dimension", f.op.params.get("axis"))
    shared = f.results[0][axis]
    f.operands = [tuple(shared if d == axis else dim for d, dim in enumerate(t)) for t in f.operands]


def no_accumulator(f: Factors) -> None:
    f.accumulators.clear()


def groups_for_channels(f: Factors) -> None:
    f.operands[0] = tuple(dim[::-1] for dim in f.operands[0])
    f.operands[1] = tuple(dim[::-1] for dim in f.operands[1])
    f.results[0] = tuple(dim[::-1] for dim in f.results[0])


def plain_local(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The primitive run on the shard as it is, without its offset or its mask."""
    monkeypatch.setitem(REGISTRY, name, dataclasses.replace(REGISTRY[name], local=None))


def plain_params(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The global parameters on a shard."""
    monkeypatch.setitem(REGISTRY, name, dataclasses.replace(REGISTRY[name], local=None, params=None))


MUTATIONS = {
    "a contracted factor forgets its partial": ("dot", "dot_general", forget_partial),
    "a maximum for a sum": ("reduce_sum all", "reduce_sum", take("max")),
    "a sum for a maximum": ("reduce_max all", "reduce_max", take("sum")),
    "a minimum for a maximum": ("reduce_max all", "reduce_max", take("min")),
    "and for or": ("reduce bool", "reduce_or", take("min")),
    "a sum through exp": ("unary", "exp", linear((0,))),
    "a sum through a square": ("unary", "square", linear((0,))),
    "a sum through integer division": ("div int", "div", linear((0,))),
    "a sum through a divisor": ("binary", "div", linear((1,))),
    "a sum through a product": ("binary", "mul", linear((0,))),
    "a sum through a quotient": ("binary", "div", linear((0,))),
    "a sum through a contraction": ("dot", "dot_general", linear((1,))),
    "a sum through a convolution": ("conv", "conv_general_dilated", linear((0,))),
    "a sum through updates that multiply": ("scatter-mul", "scatter-mul", linear((0,))),
    "a sum through an infinite literal": ("mul inf literal", "mul", linear((0,))),
    "a sum through a divisor of zero": ("div zero literal", "div", linear((0,))),
    "partial plus replicated": ("binary", "add", linear((0,), (1,))),
    "partial times partial": ("binary", "mul", linear((0, 1))),
    "a sum through one case of select": ("select_n", "select_n", linear((1,))),
    "a sum through a narrowing": ("convert int32 int8", "convert_element_type", passes),
    "a sum through a float-to-int conversion": ("convert float32 int32", "convert_element_type", linear((0,))),
    "a minimum through reduce_max": ("reduce_max all", "reduce_max", keeps("min")),
    "a maximum through a negation": ("neg int", "neg", passes),
    "a maximum through abs": ("unary", "abs", passes),
    "swapped dimensions of transpose": ("tril", "select_n", swap_result),
    "swapped rows of a batched product": ("einsum", "dot_general", swap_result),
    "a wrong granule in reshape": ("reshape merge", "reshape", minor_first),
    "a cut across reshape": ("reshape coprime", "reshape", unblock),
    "a cut along cumsum": ("cumsum", "cumsum", unblock),
    "a cut along sort": ("sort", "sort", unblock),
    "a cut along rev": ("rev", "rev", unblock),
    "a cut along concatenate": ("concatenate", "concatenate", rows_as_result),
    "a filling counted on every device": ("gather fill 7", "gather", linear((0,))),
    "a gather without accumulating": ("embedding CLIP", "gather", forget_partial),
    "replicated start of an accumulation": ("scatter-add CLIP", "scatter-add", no_accumulator),
    "a maximum into a sum's accumulator": ("scatter-add CLIP", "scatter-add", take("max")),
    "updates of scatter-mul as partials": ("scatter-mul", "scatter-mul", linear((2,))),
    "channels for groups": ("conv depthwise wide", "conv_general_dilated", groups_for_channels),
    "a cut along a transform": ("fft", "fft", unblock),
    "a cut across a factorization": ("lu", "lu", unblock),
    "a cut along substituted unknowns": ("triangular_solve left", "triangular_solve", unblock),
    "a summand counted on every device": ("symmetric_product 1.0", "symmetric_product", no_accumulator),
    "groups that forget their partial": ("ragged_dot", "ragged_dot_general", forget_partial),
    "a cut along the window": ("max pool tangent", "select_and_gather_add", unblock),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_wrong_rule_is_caught(mutation):
    case, primitive, mutate = mutation
    op, operands = op_of(case, primitive)
    f = factors_of(op)
    before = str(f), f.linear, f.passes, list(f.extra), dict(f.accumulators)
    mutate(f)
    vars(f).pop("shardable")  # computed from what was before
    assert before != (str(f), f.linear, f.passes, list(f.extra), dict(f.accumulators)), "the mutation changes nothing"
    with pytest.raises((simulate.Unsound, TypeError, ValueError)):
        simulate.check(simulate.trials(op, f, operands))


@pytest.mark.parametrize(
    ("case", "primitive", "damage"),
    [
        ("iota int32", "iota", plain_local),
        ("embedding CLIP", "gather", plain_local),
        ("embedding FILL_OR_DROP", "gather", plain_local),
        ("gather whole CLIP", "gather", plain_params),
        ("scatter-add CLIP", "scatter-add", plain_local),
        ("scatter points FILL_OR_DROP", "scatter-add", plain_local),
        ("broadcast", "broadcast_in_dim", plain_params),
        ("conv groups grad", "conv_general_dilated", plain_params),
        ("tile", "tile", plain_params),
        ("ragged_dot", "ragged_dot_general", plain_local),
        ("ragged_dot batched", "ragged_dot_general", plain_local),
    ],
)
def test_a_wrong_local_execution_is_caught(monkeypatch, case, primitive, damage):
    op, operands = op_of(case, primitive)
    tried = simulate.trials(op, factors_of(op), operands)
    simulate.check(tried)
    damage(monkeypatch, primitive)
    with pytest.raises((simulate.Unsound, TypeError, ValueError)):
        simulate.check(tried)


# ---- what an op can do on several axes


@pytest.mark.parametrize("primitive", ["dot_general", "transpose", "reduce_max", "reshape", "gather", "add", "sort"])
def test_what_is_allowed_is_what_is_listed(primitive):
    """On one axis and on two: all that is listed, and of other orders of a factor's axes none."""
    ops = [op for case in CASES for op in case.graph.ops if op.name == primitive][:8]
    assert ops
    for f in map(factors_of, ops):
        some = [t.at(k) for t in f.triples[:6] for k in range(2)]
        for axes in (1, 2):
            listed = set(f.joint(axes))
            assert all(map(f.allows, listed))
            assert all(f.allows(ts) == (ts in listed) for ts in itertools.product(some, repeat=axes))
        assert not f.allows((Triple((), ()),))


# ---- wrong executions on two axes


def cut_twice(name: str, primitive: str, factor: int, shares: tuple[int, ...]) -> simulate.Trial:
    """An op of which two axes of two devices cut one factor, the first axis major."""
    op, operands = op_of(name, primitive)
    f = factors_of(op)
    triple = f.triple(factor)
    assert f.allows((triple, triple.at(1)))
    return simulate.Trial(op, f, (triple, triple.at(1)), (2, 2), {factor: shares}, operands)


def test_swapped_orders_are_caught():
    tried = cut_twice("unary", "exp", 0, (0, 1, 1, 0))
    major, minor = tried.triples
    swapped = tuple(t._replace(results=(S(0, k),)) for k, t in ((1, major), (0, minor)))
    results = tried.run(tried.held())
    tried.judge(results, tried.plain(tried.values))
    with pytest.raises(simulate.Unsound):
        dataclasses.replace(tried, triples=swapped).judge(results, tried.plain(tried.values))


@pytest.mark.parametrize(
    ("case", "primitive", "factor"),
    [("iota int32", "iota", 0), ("embedding CLIP", "gather", 0), ("scatter-add CLIP", "scatter-add", 0)],
)
def test_an_offset_without_the_minor_axis_is_caught(monkeypatch, case, primitive, factor):
    size = factors_of(op_of(case, primitive)[0]).sizes[factor]
    tried = cut_twice(case, primitive, factor, (1, size - 1, 0, 0))
    simulate.check([tried])
    whole = simulate.Trial.local

    def wrong(self, device):
        local = whole(self, device)
        share = local.cuts[factor].share
        start = sum(self.shares[factor][: device - device % 2])
        return dataclasses.replace(local, cuts={factor: Cut(share, lambda: jnp.int32(start))})

    monkeypatch.setattr(simulate.Trial, "local", wrong)
    with pytest.raises(simulate.Unsound):
        simulate.check([tried])


@pytest.mark.parametrize("case", ["gather points CLIP", "scatter points FILL_OR_DROP"])
def test_an_offset_of_one_of_two_factors_is_caught(monkeypatch, case):
    """Two axes cut two indexed dimensions, and the device takes its shard of one for the first."""
    op, operands = op_of(case, "gather" if case.startswith("gather") else "scatter-add")
    f = factors_of(op)
    (a,), (b,) = f.operands[0]
    shares = {factor: (1, f.sizes[factor] - 1) for factor in (a, b)}
    tried = simulate.Trial(op, f, (f.triple(a), f.triple(b)), (2, 2), shares, operands)
    simulate.check([tried])
    whole = simulate.Trial.local

    def wrong(self, device):
        local = whole(self, device)
        return dataclasses.replace(local, cuts={**local.cuts, b: Cut(local.cuts[b].share, lambda: jnp.int32(0))})

    monkeypatch.setattr(simulate.Trial, "local", wrong)
    with pytest.raises(simulate.Unsound):
        simulate.check([tried])


def test_a_lost_factor_is_refused(monkeypatch):
    op, _ = op_of("sort", "sort")

    def drops(f: Factors) -> None:
        f.operand(0)
        f.results.append(f.dims(op.result_shapes[0]))

    monkeypatch.setitem(REGISTRY, "sort", dataclasses.replace(REGISTRY["sort"], factors=drops))
    with pytest.raises(ValueError, match="loses the factors"):
        factors_of(op)
