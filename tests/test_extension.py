"""Rules of the user's own: registered, fitted, tried, planned and run; docs/extending.md, run as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import CompoundFactor, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from slow_devices import SPEEDS, first_devices, slow_cluster

import hapsynth
from hapsynth import RuleError, check_rule, register_rule
from hapsynth.graph import Op
from hapsynth.instructions import simulate
from hapsynth.instructions.factors import Factors, Local
from hapsynth.instructions.layout import P, S
from hapsynth.instructions.rules import REGISTRY, extension, factors_of
from hapsynth.instructions.rules.registry import flops_of
from hapsynth.instructions.uncovered import named
from hapsynth.plan import Plan
from hapsynth.trace import trace

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
CLUSTER = slow_cluster(SPEEDS["3:1"])
HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def rules_of_this_test_only():
    """Rules hold for the whole process."""
    before, own = dict(REGISTRY), set(extension.OWN)
    yield
    for held, old in ((REGISTRY, before), (extension.OWN, own)):
        held.clear()
        held.update(old)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def planned(fn: Callable[..., Any], *args: Any, **options: Any) -> Plan:
    return hapsynth.synthesize(fn, args, first_devices(4), cluster=CLUSTER, **options)


def triples(fn: Callable[..., Any], *args: Any) -> set[str]:
    (op,) = trace(fn, args).graph.ops
    return set(map(str, factors_of(op).triples[1:]))


# ---- kernels


def square_sum(x: Any, name: str = "square_sum") -> Any:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.sum(x_ref[...] ** 2, axis=0)

    out = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    return pl.pallas_call(kernel, out_shape=out, interpret=True, name=name)(x)


def primitive(name: str, fn: Callable[..., Any], **params: Any) -> Callable[..., Any]:
    """A primitive of the user's own with one result."""

    def shaped(*operands: Any, **params: Any) -> Any:
        out = jax.eval_shape(lambda *xs: fn(*xs, **params), *operands)
        return jax.core.ShapedArray(out.shape, out.dtype)

    p = Primitive(name)
    p.def_impl(fn)
    p.def_abstract_eval(shaped)
    mlir.register_lowering(p, mlir.lower_fun(fn, multiple_results=False))
    return lambda *xs: p.bind(*xs, **params)


def partitioned(fn: Callable[..., Any], rule: Any, partition: Any = None, **options: Any) -> Any:
    """`fn` with a sharding rule of Shardy's, run on shards as it is."""

    def as_it_is(mesh: Any, arguments: Any, result: Any) -> Any:
        shardings = lambda tree: jax.tree.map(lambda s: s.sharding, tree)
        return mesh, fn, shardings(result), shardings(arguments)

    made = custom_partitioning(fn)
    made.def_partition(partition=partition or as_it_is, sharding_rule=rule, **options)
    return made


def softmax(x: Any) -> Any:
    return jax.nn.softmax(x, axis=-1)


# ---- planned and run on unlike devices


def test_a_kernel_is_cut_in_unequal_shards_and_gives_what_it_should() -> None:
    register_rule("pallas_call:square_sum", "i j -> j", need_replication="j", local=lambda local, x: square_sum(x))
    plan = planned(lambda w, x: square_sum(x @ w), numbers(16, 8), numbers(960, 16))
    (op,) = (o for o in plan.traced.graph.ops if o.name == "pallas_call")
    (rows,) = {i.triples[0] for i in plan.program.instructions if getattr(i, "op", None) == op.index}
    assert (rows.operands, rows.results) == ((S(0),), (P("sum"),))
    assert len({plan.sizes.local_shape(op.operands[0], (S(0),), (d,)) for d in range(4)}) > 1
    assert plan.check().ok
    assert named(plan.traced.graph) == {}


def test_without_a_rule_a_kernel_is_whole_everywhere_and_named_with_the_reason() -> None:
    plan = planned(square_sum, numbers(960, 8))
    assert named(plan.traced.graph) == {"pallas_call:square_sum": 1}
    assert plan.result.replicated_primitives == ("pallas_call:square_sum",)
    f = factors_of(plan.traced.graph.ops[0])
    assert [str(t) for t in f.triples] == ["{R} -> {R}"]
    why = set(f.blocked.values())
    assert why == {
        "no rule for pallas_call:square_sum, and its grid is made for the whole operands: hapsynth.register_rule "
        "gives it one"
    }
    assert plan.check().ok


def test_a_rule_is_for_the_kernel_of_its_name_only() -> None:
    register_rule("pallas_call:square_sum", "i j -> j", local=lambda local, x: square_sum(x))
    traced = trace(lambda x: (square_sum(x), square_sum(x, "other")), (numbers(6, 4),))
    assert [len(factors_of(op).triples) for op in traced.graph.ops] == [3, 1]
    assert named(traced.graph) == {"pallas_call:other": 1}


def test_a_primitive_runs_with_its_parameters() -> None:
    scaled = primitive("test_scaled", lambda x, y, *, by: by * x @ y, by=3.0)
    fn = lambda x, y: scaled(x, y).sum(0)
    assert named(trace(fn, (numbers(6, 4), numbers(4, 2))).graph) == {"test_scaled": 1}
    register_rule("test_scaled", "i j, j k -> i k", linear=[[0], [1]])
    assert triples(scaled, numbers(6, 4), numbers(4, 2)) == {
        "{S(0), R} -> {S(0)}",
        "{S(1), S(0)} -> {P(sum)}",
        "{R, S(1)} -> {S(1)}",
        "{P(sum), R} -> {P(sum)}",
        "{R, P(sum)} -> {P(sum)}",
    }
    assert len(check_rule(fn, numbers(6, 4), numbers(4, 2)).ops) == 1
    plan = planned(fn, numbers(960, 64), numbers(64, 32))
    assert "{in0|S(0), in1|R} test_scaled {v2|S(0)}" in plan.program.text(plan.traced.graph)
    assert plan.check().ok


def test_parameters_that_hold_sizes_are_adapted() -> None:
    def spread(x: Any, *, shape: Any) -> Any:
        return jnp.broadcast_to(x[:, None], shape)

    fn = primitive("test_spread", spread, shape=(6, 5))
    register_rule("test_spread", "i -> i j")
    with pytest.raises(RuleError, match=r"rule of test_spread, .* does not run: "):
        check_rule(fn, numbers(6))
    adapted = lambda local: {"shape": local.result_shapes[0]}
    register_rule("test_spread", "i -> i j", params=adapted, replace=True)
    assert triples(fn, numbers(6)) == {"{S(0)} -> {S(0)}"}
    check_rule(fn, numbers(6))


def test_a_foreign_call_is_made_on_the_shard() -> None:
    """A batched Cholesky factorization, by the call that jax.numpy makes on the CPU."""

    def factor(x: Any) -> Any:
        out = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], np.int32))
        call = jax.ffi.ffi_call("lapack_spotrf_ffi", out, input_layouts=[(0, 2, 1)], output_layouts=[(0, 2, 1), (0,)])
        return call(x, uplo=np.uint8(ord("L")))

    jnp.linalg.cholesky(np.eye(2, dtype=np.float32))  # JAX loads LAPACK when it first calls it
    rows = numbers(6, 3, 3)
    x = rows @ rows.transpose(0, 2, 1) + 3 * np.eye(3, dtype=np.float32)
    register_rule("ffi_call:lapack_spotrf_ffi", "b i j -> b i j, b", need_replication=["i", "j"])
    report = check_rule(factor, x)
    assert [name for name, _, _ in report.ops] == ["ffi_call:lapack_spotrf_ffi"]
    assert triples(factor, x) == {"{S(0)} -> {S(0), S(0)}"}
    plan = planned(lambda x: jnp.tril(factor(x)[0]), np.tile(x, (40, 1, 1)))
    report = plan.check(np.tile(x, (40, 1, 1)))
    assert report.ok, report


# ---- functions with a rule of Shardy's


def test_the_rule_of_a_partitioned_function_is_read_and_its_partition_runs() -> None:
    calls: list[tuple[int, ...]] = []

    def on_shard(x: Any) -> Any:
        calls.append(x.shape)
        return softmax(x)

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        return mesh, on_shard, result.sharding, (arguments[0].sharding,)

    fn = partitioned(softmax, "... i j -> ... i j", partition, need_replication_factors=("j",))
    assert triples(fn, numbers(6, 4)) == {"{S(0)} -> {S(0)}"}
    assert triples(fn, numbers(2, 6, 4)) == {"{S(0)} -> {S(0)}", "{S(1)} -> {S(1)}"}
    report = check_rule(fn, numbers(6, 4))
    assert "custom_partitioning:softmax: 8 runs agree" in str(report)
    calls.clear()
    plan = planned(lambda w, x: fn(x @ w).sum(), numbers(16, 8), numbers(960, 16))
    assert "custom_partitioning {v3|S(0)}" in plan.program.text(plan.traced.graph)
    assert plan.check().ok
    assert {shape[1] for shape in calls} == {8}
    assert len({shape[0] for shape in calls}) > 1


def test_what_a_partition_refuses_stays_whole() -> None:
    def rows_only(mesh: Any, arguments: Any, result: Any) -> Any:
        rows = jax.sharding.NamedSharding(arguments[0].sharding.mesh, jax.P(arguments[0].sharding.spec[0], None))
        return mesh, softmax, rows, (rows,)

    fn = partitioned(softmax, "i j -> i j", rows_only)
    (op,) = trace(fn, (numbers(6, 4),)).graph.ops
    f = factors_of(op)
    assert [str(t) for t in f.triples[1:]] == ["{S(0)} -> {S(0)}"]
    assert f.blocked == {
        1: "its own partition refuses: RuleError: of the arguments it wants P(None, None), and the rule {S(1)} -> "
        "{S(1)}"
    }


def test_a_partition_is_asked_about_two_cuts_at_once() -> None:
    asked: set[tuple[Any, ...]] = set()

    def either(mesh: Any, arguments: Any, result: Any) -> Any:
        spec = tuple(arguments[0].sharding.spec)
        asked.add(spec)
        if None not in spec and len(arguments[0].shape) > 1 and arguments[0].shape[0] < 20:
            raise NotImplementedError("one at a time")
        return mesh, jnp.tanh, result.sharding, (arguments[0].sharding,)

    fn = partitioned(jnp.tanh, "i j -> i j", either)
    for size, both in ((6, False), (32, True)):
        (op,) = trace(fn, (numbers(size, 4),)).graph.ops
        f = factors_of(op)
        assert f.alone == (set() if both else {0, 1})
        assert any(a.factor is not None and b.factor not in (None, a.factor) for a, b in f.joint(2)) == both
        simulate.check(simulate.joint_trials(op, f, [numbers(size, 4)], 10), samples=1)
    # A dimension that two axes cut is cut once, as far as the function can tell.
    assert all(isinstance(name, str | None) for spec in asked for name in spec)


def test_a_partitioned_sum_is_not_cut() -> None:
    total = partitioned(lambda x: {"sum": x.sum(1)}, "i j -> i")
    (op,) = trace(total, (numbers(6, 4),)).graph.ops
    f = factors_of(op)
    assert [str(t) for t in f.triples[1:]] == ["{S(0)} -> {S(0)}"]
    assert f.blocked == {1: "its own partition may add up over the devices"}


def test_a_partitioned_function_without_a_rule_that_can_be_read() -> None:
    made = partitioned(softmax, lambda mesh, arguments, result: "i j -> i j")
    traced = trace(made, (numbers(6, 4),))
    assert named(traced.graph) == {"custom_partitioning:softmax": 1}
    assert "it has no sharding rule that can be read" in factors_of(traced.graph.ops[0]).blocked[0]
    register_rule("custom_partitioning:softmax", "i j -> i j", need_replication="j", local=lambda local, x: softmax(x))
    check_rule(made, numbers(6, 4))
    plan = planned(made, numbers(960, 8))
    assert "custom_partitioning {v1|S(0)}" in plan.program.text(plan.traced.graph)
    assert plan.check().ok


def test_a_rule_that_the_partition_of_a_function_belies_is_caught() -> None:
    fn = partitioned(softmax, "i j -> i j")
    with pytest.raises(RuleError, match=r"rule of custom_partitioning:softmax is not sound: .*{S\(1\)} -> {S\(1\)}"):
        check_rule(fn, numbers(6, 4))


# ---- the notation

NOTATION: dict[str, tuple[str, dict[str, Any], tuple[Any, ...], set[str]]] = {
    "reduced": ("i j -> j", {}, (numbers(4, 3), (3,)), {"{S(0)} -> {P(sum)}", "{S(1)} -> {S(0)}"}),
    "reduced by max": (
        "i j -> j",
        {"reduction": "max"},
        (numbers(4, 3), (3,)),
        {"{S(0)} -> {P(max)}", "{S(1)} -> {S(0)}"},
    ),
    "reduced in one result": (
        "i j -> i j, i",
        {"reduction": {"j": "min"}},
        (numbers(4, 3), (4, 3), (4,)),
        {"{S(0)} -> {S(0), S(0)}", "{S(1)} -> {S(1), P(min)}"},
    ),
    "split": ("(i j) -> i j", {"sizes": {"j": 3}}, (numbers(6), (2, 3)), {"{S(0)} -> {S(0)}"}),
    "merged": ("i j -> (i j)", {}, (numbers(2, 3), (6,)), {"{S(0)} -> {S(0)}"}),
    "minor in one": ("i j -> j i", {}, (numbers(2, 3), (3, 2)), {"{S(0)} -> {S(1)}", "{S(1)} -> {S(0)}"}),
    "ellipsis of two": ("... -> ...", {}, (numbers(2, 3), (2, 3)), {"{S(0)} -> {S(0)}", "{S(1)} -> {S(1)}"}),
    "reduced ellipsis": ("... i -> i", {}, (numbers(2, 3), (3,)), {"{S(0)} -> {P(sum)}", "{S(1)} -> {S(0)}"}),
    "size one": ("i j -> i", {}, (numbers(2, 1), (2,)), {"{S(0)} -> {S(0)}"}),
    "no size": ("i j -> i", {}, (numbers(2, 0), (2,)), {"{S(0)} -> {S(0)}"}),
    "only the result's": ("i -> i j", {}, (numbers(2), (2, 3)), {"{S(0)} -> {S(0)}"}),
    "held": ("i j -> i j", {"need_replication": "j"}, (numbers(2, 3), (2, 3)), {"{S(0)} -> {S(0)}"}),
    "a long name": ("rows_0 -> rows_0", {}, (numbers(2), (2,)), {"{S(0)} -> {S(0)}"}),
}


def op_of(x: np.ndarray, *results: tuple[int, ...]) -> Op:
    n = len(results)
    made = tuple(range(1, n + 1))
    return Op(0, Primitive("test_op"), (0,), made, {}, (x.shape,), (x.dtype,), results, (x.dtype,) * n, "model.py:3")


@pytest.mark.parametrize("name", NOTATION)
def test_the_notation(name: str) -> None:
    rule, options, (x, *results), expected = NOTATION[name]
    register_rule("test_op", rule, **options)
    assert set(map(str, factors_of(op_of(x, *results)).triples[1:])) == expected


def test_a_rule_object_of_shardy() -> None:
    held = SdyShardingRule((("…0", "i", "j"),), (("…0", "i", "j"),), need_replication_factors=("j",))
    register_rule("test_op", held)
    x = numbers(2, 3, 4)
    assert set(map(str, factors_of(op_of(x, x.shape)).triples[1:])) == {"{S(0)} -> {S(0)}", "{S(1)} -> {S(1)}"}
    pair = (CompoundFactor("i", "j"),)
    register_rule("test_op", SdyShardingRule((pair,), (pair,), i=2, j=3), replace=True)
    assert [str(t) for t in factors_of(op_of(numbers(6), (6,))).triples[1:]] == ["{S(0)} -> {S(0)}"]


def test_operations_of_a_rule() -> None:
    x = numbers(4, 3)
    register_rule("test_op", "i j -> i")
    assert flops_of(op_of(x, (4,))) == 12
    register_rule("test_op", "i j -> i", flops=lambda op: 7.0, replace=True)
    assert flops_of(op_of(x, (4,))) == 7
    op = trace(primitive("test_product", lambda x, y: x @ y), (x, numbers(3, 5))).graph.ops[0]
    register_rule("test_product", "i j, j k -> i k")
    assert flops_of(op) == 2 * 4 * 3 * 5


# ---- rules of no use

RULES: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "no arrow": ("x", "i j", {}, r"the rule 'i j' has 0 arrows; write 'operands -> results'"),
    "a number": ("x", "i 1 -> i", {}, r"the rule 'i 1 -> i' can't be read at '1' of 'i 1'"),
    "an open bracket": ("x", "(i j -> i j", {}, r"does not close the bracket of '\(i j'"),
    "a bracket in a bracket": ("x", "((i j) k) -> i", {}, r"can't be read at '\('"),
    "an empty bracket": ("x", "() -> i", {}, r"can't be read at '\)'"),
    "a diagonal": ("x", "i i -> i", {}, r"operand 0 has 'i' twice"),
    "an ellipsis behind": ("x", "i ... -> i", {}, r"in operand 0 an ellipsis stands behind a dimension"),
    "an unknown factor": ("x", "i j -> i j", {"need_replication": ["k"]}, r"names 'k', but the factors are i, j"),
    "a size of none": ("x", "i -> i", {"sizes": {"k": 2}}, r"sizes names 'k', but the factors are i"),
    "no size": ("x", "i -> i", {"sizes": {"i": 0}}, r"sizes gives 'i' the size 0; give a positive integer"),
    "an unknown reduction": ("x", "i -> ", {"reduction": "mean"}, r"reduction is 'mean'; it is one of sum, max, min"),
    "nothing reduced": ("x", "i -> i", {"reduction": {"i": "max"}}, r"'i' is in every result, so nothing of it is re"),
    "linear in none": ("x", "i -> i", {"linear": [[1]]}, r"linear names operand 1 of 1"),
    "no rule": ("x", 3, {}, r"rule of 'x' is 3; give a text such as 'i j, j k -> i k', or a function of Factors"),
    "no name": (3, "i -> i", {}, "3 is neither a JAX primitive nor the name of one"),
    "a kernel of no name": ("pallas_call", "i -> i", {}, "name the one that the rule is for, 'pallas_call:<name>'"),
    "a function of add": ("add:mine", "i -> i", {}, "leave out ':mine'"),
    "a jitted function": ("jit:f", "i -> i", {}, "'jit:f': a jitted function is planned op by op, and its gradient"),
    "a kernel without local": ("pallas_call:f", "i -> i", {}, "local=lambda local, .shards: my_op"),
    "local of no use": ("x", "i -> i", {"local": 3}, "local of the rule of 'x' is 3, which can't be called"),
    "options of a function": ("x", lambda f: None, {"reduction": "max"}, "says itself what reduction, need_"),
    "a second rule": ("dot_general", "i j, j k -> i k", {}, "'dot_general' has a rule already; replace=True puts"),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_no_use(name: str) -> None:
    primitive, rule, options, text = RULES[name]
    before = dict(REGISTRY)
    with pytest.raises(RuleError, match=text):
        register_rule(primitive, rule, **options)
    assert before == REGISTRY


def unlike(f: Factors) -> None:
    f.operands.append(((f.new(2),), (f.new(7),)))
    f.results.append(f.operands[0])


def unmade(f: Factors) -> None:
    f.operands.append(((f.new(2),), (9,)))
    f.results.append(f.operands[0])


def forgetful(f: Factors) -> None:
    f.operand(0)
    f.results.append(f.dims(f.op.result_shapes[0]))


MISFITS: dict[str, tuple[Any, dict[str, Any], tuple[int, ...], str]] = {
    "operands": ("i j, j -> i j", {}, (2, 6), r"has 2 operands, and the op 1, of shapes \(2, 6\)"),
    "results": ("i j -> i j, i", {}, (2, 6), r"has 2 results, and the op 1, of shapes \(2, 6\)"),
    "rank": ("i -> i", {}, (2, 6), r"operand 0 has shape \(2, 6\), and the rule gives it 1 dimensions"),
    "least rank": ("... i j k -> ... i j k", {}, (2, 6), r"the rule gives it at least 3 dimensions"),
    "ellipses": ("... i -> ...", {}, (2, 6), r"\.\.\. is 2 dimensions in result 0 and 1 before it"),
    "sizes": ("i j -> j i", {}, (2, 6), r"dimension 0 of result 0 has 2 elements, which does not fit j=6"),
    "given size": ("i j -> i j", {"sizes": {"j": 4}}, (2, 6), r"1 of operand 0 has 6 elements, .* not fit j=4"),
    "product": ("i (j k) -> i (j k)", {"sizes": {"j": 4}}, (2, 6), r"has 6 elements, which does not fit j=4"),
    "unknown size": ("i (j k) -> i (j k)", {}, (2, 6), r"size of factor 'j' in \(j k\), of 6 .*give sizes={'j': ...}"),
    "lengths": (unlike, {}, (2, 6), r"operand 0 has shape \(2, 6\), and its factors \(2, 7\)"),
    "unmade": (unmade, {}, (2, 6), r"operand 0 has the factor 9, which f.new did not make"),
    "nothing": (lambda f: None, {}, (2, 6), r"gives factors for 0 operands, and the op has 1"),
    "lost": (forgetful, {}, (2, 6), r"no result has the factors \(0, 1\) of .*: block or reduce them"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_rules_that_do_not_fit_their_op(name: str) -> None:
    rule, options, shape, text = MISFITS[name]
    register_rule("test_op", rule, **options)
    with pytest.raises(RuleError, match=rf"rule .*of test_op \(model.py:3\).*{text}"):
        factors_of(op_of(numbers(*shape), shape))


def test_synthesize_says_which_rule_does_not_fit_and_where_its_op_is() -> None:
    register_rule("pallas_call:square_sum", "i -> i", local=lambda local, x: square_sum(x))
    with pytest.raises(RuleError, match=rf"'i -> i' of pallas_call:square_sum \({HERE}:\d+\): operand 0 has shape"):
        planned(square_sum, numbers(960, 8))


def test_a_shard_of_the_wrong_shape_is_refused() -> None:
    whole = numbers(6, 4)
    register_rule("pallas_call:square_sum", "i j -> j", local=lambda local, x: x)
    with pytest.raises(RuleError, match=r"on shards of \(\(3, 4\),\) made float32\[3, 4\], not float32\[4\]"):
        check_rule(square_sum, whole)


def test_what_a_local_execution_raises_says_where() -> None:
    def fails(local: Local, x: Any) -> Any:
        raise KeyError("weights")

    register_rule("pallas_call:square_sum", "i j -> j", local=fails)
    with pytest.raises(RuleError, match="does not run: KeyError: 'weights'") as caught:
        check_rule(square_sum, numbers(6, 4))
    note = caught.value.__cause__.__notes__[0]
    assert re.match(rf"hapsynth: in the local execution of pallas_call:square_sum \({HERE}:\d+\) on shards of", note)


def test_a_local_execution_that_knows_of_one_factor_only() -> None:
    """Two mesh axes may cut two factors at once, and then the share is that of neither."""
    x = numbers(6, 4)
    options: dict[str, Any] = {"need_replication": [], "replace": "pallas_call:square_sum" in REGISTRY}
    rule: Any = ("pallas_call:square_sum", "i j -> j")
    counted = lambda local, x: square_sum(x) + 0 * local.share
    register_rule(*rule, local=counted, **options)
    with pytest.raises(RuleError, match=r"does not run: ValueError: the factors \[0, 1\] of .*name them in `alone`"):
        check_rule(square_sum, x)
    options["replace"] = True
    register_rule(*rule, local=counted, alone=["i", "j"], **options)
    alone = check_rule(square_sum, x)
    register_rule(*rule, local=lambda local, x: square_sum(x), **options)
    assert check_rule(square_sum, x).ops[0][2] > alone.ops[0][2]
    with pytest.raises(RuleError, match="alone names 'k', but the factors are i, j"):
        register_rule(*rule, local=counted, alone="k", **options)


UNSOUND: dict[str, tuple[str, dict[str, Any]]] = {
    "a maximum for a sum": ("i j -> j", {"reduction": "max"}),
    "linear": ("i j -> j", {"linear": [[0]]}),
    "nothing reduced": ("i j -> i", {}),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_unsound_rules_are_caught(name: str) -> None:
    rule, options = UNSOUND[name]
    register_rule("pallas_call:square_sum", rule, local=lambda local, x: square_sum(x), **options)
    with pytest.raises(RuleError, match=r"pallas_call:square_sum"):
        check_rule(square_sum, jax.ShapeDtypeStruct((4, 4), np.float32))
    register_rule("pallas_call:square_sum", "i j -> j", local=lambda local, x: square_sum(x), replace=True)
    assert check_rule(square_sum, jax.ShapeDtypeStruct((4, 4), np.float32)).ops[0][2] > 4


def test_nothing_to_check() -> None:
    with pytest.raises(RuleError, match=r"no op has a rule registered by register_rule; .* ops are mul, sin"):
        check_rule(lambda x: jnp.sin(x) * 2, numbers(3))


# ---- the page


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text()
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(blocks) >= 5
    scope: dict[str, Any] = {}
    for block in blocks:
        # As many empty lines as the page has before it, so that an error names the page's line.
        above = "\n" * text.count("\n", 0, block.start(1))
        exec(compile(above + block[1], str(PAGE), "exec"), scope)
    printed = capsys.readouterr().out
    assert "pallas_call:row_norms is not sound" in printed
    assert "check passed" in printed
    program = scope["plan"].program.text(scope["plan"].traced.graph)
    line = next(n for n, x in enumerate(text.splitlines(), 1) if 'name="row_norms"' in x)
    assert re.search(rf"pallas_call {{v\d+\|S\(0\)}}  # extending.md:{line}\b", program), program
