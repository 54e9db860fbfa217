"""The notation of a user's own rules, and rules that are malformed, do not fit their op or are not sound."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import CompoundFactor, SdyShardingRule
from jax.extend.core import Primitive
from own_rules import numbers, primitive, square_sum
from slow_devices import SPEEDS, slow_cluster

import hapsynth
from hapsynth import RuleError, check_rule, register_rule
from hapsynth.graph.ir import Op
from hapsynth.graph.trace import trace
from hapsynth.instructions.factors import Factors, Local
from hapsynth.instructions.rules import REGISTRY, factors_of
from hapsynth.instructions.rules.registry import flops_of

HERE = "own_rules.py"
"""Where the kernel is."""
pytestmark = pytest.mark.usefixtures("rules_of_this_test_only")


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
    "finite for no reason": ("x", "i -> i", {"finite_only": True}, r"finite_only of .* is True; say in words why"),
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
    cluster = slow_cluster(SPEEDS["3:1"])
    register_rule("pallas_call:square_sum", "i -> i", local=lambda local, x: square_sum(x))
    with pytest.raises(RuleError, match=rf"'i -> i' of pallas_call:square_sum \({HERE}:\d+\): operand 0 has shape"):
        hapsynth.synthesize(square_sum, (numbers(960, 8),), cluster)


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
