"""Rules of the user's own: registered, tried, planned and run; docs/extending.md, run as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from own_rules import numbers, primitive, square_sum, triples
from slow_devices import SPEEDS, first_devices, slow_cluster

import hapsynth
from hapsynth import RuleError, check_rule, register_rule
from hapsynth.graph.trace import trace
from hapsynth.instructions.factors import ruled
from hapsynth.instructions.layout import P, S
from hapsynth.instructions.rules import factors_of
from hapsynth.instructions.rules.replicated_ops import named
from hapsynth.instructions.testing import simulate
from hapsynth.plan import Plan

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
CLUSTER = slow_cluster(SPEEDS["3:1"])
pytestmark = pytest.mark.usefixtures("rules_of_this_test_only")


def planned(fn: Callable[..., Any], *args: Any, **options: Any) -> Plan:
    return hapsynth.synthesize(fn, args, first_devices(4), cluster=CLUSTER, leave_out=False, **options)


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
    # At whichever of its ratios.
    (plainly,) = ruled((rows,))
    assert (plainly.operands, plainly.results) == ((S(0),), (P("sum"),))
    assert len({plan.sizes.local_shape(op.operands[0], rows.operands, (d,)) for d in range(4)}) > 1
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
    ops = trace(fn, (numbers(6, 4), numbers(4, 2))).graph.ops
    assert [op.name for op in ops] == ["mul", "dot_general", "reduce_sum"]
    register_rule("test_scaled", "i j, j k -> i k", linear=[[0], [1]])
    assert triples(scaled, numbers(6, 4), numbers(4, 2)) == {
        "{S(0), R} -> {S(0)}",
        "{S(1), S(0)} -> {P(sum)}",
        "{R, S(1)} -> {S(1)}",
        "{P(sum), R} -> {P(sum)}",
        "{R, P(sum)} -> {P(sum)}",
    }
    # A part of a sum may be zero where the other factor is infinite.
    with pytest.raises(
        RuleError, match=r"test_scaled is not sound of operands that are not finite: with (?s:.*)`linear`"
    ):
        check_rule(fn, numbers(6, 4), numbers(4, 2))
    given = {"linear": [[0], [1]], "finite_only": "weights and activations are", "replace": True}
    register_rule("test_scaled", "i j, j k -> i k", **given)
    assert len(check_rule(fn, numbers(6, 4), numbers(4, 2)).ops) == 1
    register_rule("test_scaled", "i j, j k -> i k", replace=True)
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
