"""Primitives of other libraries: replaced by what they do where that can be traced; elsewhere whole, and unpriced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest
from exported import assert_exports
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir
from own_rules import numbers, primitive
from slow_devices import SPEEDS, first_devices, thin_cluster

import hapsynth
from hapsynth import TraceError
from hapsynth.cli.main import main
from hapsynth.graph.trace import trace
from hapsynth.instructions.rules.replicated_ops import named, unpriced
from hapsynth.plan import Plan

CLUSTER = thin_cluster(SPEEDS["3:1"])
MODEL = """
import jax, jax.numpy as jnp, numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

hidden = Primitive("hidden")
hidden.def_abstract_eval(lambda x: x)
mlir.register_lowering(hidden, mlir.lower_fun(jnp.sin, multiple_results=False))

def target():
    return lambda x: hidden.bind(x) * 2, (jax.ShapeDtypeStruct((64, 8), np.float32),)
"""


def planned(fn: Callable[..., Any], *args: Any, **options: Any) -> Plan:
    return hapsynth.synthesize(fn, args, first_devices(4), cluster=CLUSTER, leave_out=False, **options)


def ops(fn: Callable[..., Any], *args: Any) -> list[str]:
    return [op.name for op in trace(fn, args).graph.ops]


def powers(x: Any, *, times: int) -> Any:
    return lax.fori_loop(0, times, lambda _, y: jnp.tanh(y @ y.T @ x), x)


def looked_at(x: Any) -> Any:
    """Runs on values, and never traces."""
    return jnp.sin(x) if float(x[0, 0]) < np.inf else x


def opaque(name: str = "opaque") -> Callable[..., Any]:
    """A primitive that is compiled, and whose function takes no tracers."""
    p = Primitive(name)
    p.def_impl(looked_at)
    p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(p, mlir.lower_fun(jnp.sin, multiple_results=False))
    return p.bind


# ---- replaced by what they do


def test_a_loop_inside_is_cut_and_priced_as_if_it_stood_there() -> None:
    x = numbers(96, 16)
    inside = primitive("test_powers", powers, times=7)
    step = lambda fn: lambda x, y: fn(x * y).sum(0)
    plan, open_plan = planned(step(inside), x, x), planned(step(lambda x: powers(x, times=7)), x, x)
    assert "test_powers" not in ops(step(inside), x, x)
    assert plan.cost == open_plan.cost
    assert plan.result.status == open_plan.result.status
    assert plan.result.unpriced_primitives == ()
    assert any(len(set(shares)) > 1 for shares in plan.sizes.shares)
    assert plan.check(x, x).ok


def test_inside_loops_branches_and_one_another() -> None:
    inner = primitive("test_inner", lambda x: jnp.sin(x) + 1)
    outer = primitive("test_outer", lambda x, *, by: by * inner(x), by=3.0)

    def step(x: Any, n: Any) -> Any:
        y = lax.scan(lambda c, row: (c + outer(row), outer(c)), jnp.zeros(8, x.dtype), x)[1]
        return lax.cond(n > 0, outer, jnp.cos, y)

    x = numbers(48, 8)
    assert not {"test_inner", "test_outer"} & set(ops(step, x, np.int32(1)))
    plan = planned(step, x, np.int32(1))
    assert plan.check(x, np.int32(1)).ok
    assert plan.check(x, np.int32(-1)).ok


def test_weak_types_and_several_results() -> None:
    p = Primitive("test_both")
    p.multiple_results = True
    both = lambda x, y: (x + y, x * y)
    p.def_impl(both)
    p.def_abstract_eval(lambda x, y: [x, x])
    mlir.register_lowering(p, mlir.lower_fun(both, multiple_results=True))
    x = np.ones((8, 8), jnp.bfloat16)
    assert ops(lambda x, y: p.bind(x, y), x, 2.0) == ops(both, x, 2.0)
    plan = planned(lambda x, y: p.bind(x, y), x, 2.0)
    assert [y.dtype for y in plan(x, 2.0)] == [jnp.bfloat16] * 2
    assert plan.check(x, 2.0).ok


def test_where_the_user_called_it() -> None:
    def step(a: Any, b: Any) -> Any:
        return lineax.linear_solve(lineax.MatrixLinearOperator(a), b, lineax.LU(), throw=False).value

    graph = trace(step, (numbers(16, 16), numbers(16))).graph
    assert {op.source.partition(":")[0] for op in graph.ops} == {"test_foreign.py"}
    assert "lu" in [op.name for op in graph.ops]


def test_an_error_of_the_library_is_raised() -> None:
    """By a host callback in a branch: said to be never taken, it costs nothing, and is taken all the same."""

    def step(a: Any, b: Any) -> Any:
        return lineax.linear_solve(lineax.MatrixLinearOperator(a), b, lineax.LU()).value

    a, b = numbers(16, 16), numbers(16)
    plan = planned(step, a, b)
    assert (plan.result.status, plan.result.unpriced_primitives) == ("unpriced", ("pure_callback",))
    (line,) = {r.source for r in plan.traced.graph.regions if r.kind == "cond"}
    told = planned(step, a, b, expect={line: 0.0})
    assert told.result.status in ("optimal", "optimal_at_ratios")
    assert told.check(a, b).ok
    with pytest.raises(jax.errors.JaxRuntimeError, match="non-finite"):
        jax.block_until_ready(told(np.zeros_like(a), b))


@pytest.mark.usefixtures("rules_of_this_test_only")
def test_one_with_a_rule_stays_an_op() -> None:
    fn = primitive("test_ruled", lambda x: jnp.sort(x, axis=1))
    x = numbers(96, 16)
    assert ops(fn, x) == ["sort"]
    hapsynth.register_rule("test_ruled", "i j -> i j", need_replication=["j"])
    assert ops(fn, x) == ["test_ruled"]
    plan = planned(fn, x)
    assert plan.result.unpriced_primitives == ()
    assert any(len(set(shares)) > 1 for shares in plan.sizes.shares)
    assert "lax.sort(" in assert_exports(plan, x)


def test_as_source() -> None:
    x = numbers(96, 16)
    text = assert_exports(planned(primitive("test_powers", powers, times=7), x), x)
    assert "test_powers" not in text
    assert "tanh" in text


def test_a_line_with_a_loop_and_a_branch_is_told_of_both() -> None:
    """One call of a solver: its loop, and the branch in which it raises."""

    def step(a: Any, b: Any) -> Any:
        operator = lineax.MatrixLinearOperator(a @ a.T + jnp.eye(16), lineax.positive_semidefinite_tag)
        return lineax.linear_solve(operator, b, lineax.CG(1e-5, 1e-5, stabilise_every=None)).value

    a, b = numbers(16, 16), numbers(16)
    regions = trace(step, (a, b)).graph.regions
    (line,) = {r.source for r in regions if r.kind in ("while", "cond")}
    few = planned(step, a, b, expect={line: (1.0, 0.0)})
    many = planned(step, a, b, expect={line: 40})
    assert few.result.unpriced_primitives == ()
    trips = lambda plan: [r.count for r in plan.traced.graph.regions if r.kind == "while"]
    assert (trips(few), trips(many)) == ([10.0], [40.0])
    assert many.result.unpriced_primitives == ("pure_callback",)


# ---- effects that the equation does not tell of


def test_what_is_shown_inside_is_shown_once(capfd: pytest.CaptureFixture[str]) -> None:
    def shows(x: Any) -> Any:
        jax.debug.print("first {}", x[0, 0])
        return x * 2

    x = numbers(96, 16)
    plan = planned(primitive("test_shows", shows), x)
    capfd.readouterr()
    plan(x)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("first") == 1


def in_a_loop(x: Any) -> Any:
    shows = primitive("test_shows", lambda x: (jax.debug.print("{}", x[0, 0]), x * 2)[1])
    return lax.fori_loop(0, 3, lambda _, y: shows(y), x)


def on_the_host(x: Any) -> Any:
    return primitive("test_host", lambda x: io_callback(np.sin, x, x))(x)


@pytest.mark.parametrize(
    ("fn", "why"), [(in_a_loop, r"debug_print .*in a loop or branch"), (on_the_host, "io_callback")]
)
def test_effects_inside_are_refused(fn: Callable[..., Any], why: str) -> None:
    with pytest.raises(TraceError, match=f"effects that cannot be distributed: {why}"):
        trace(fn, (numbers(8, 8),))


# ---- what stays whole


def test_one_that_needs_values_stays_whole_and_the_plan_says_that_it_is_unpriced(tmp_path: Path) -> None:
    fn = opaque()
    step = lambda x, w: fn(x @ w) + 1
    x, w = numbers(96, 16), numbers(16, 8)
    plan = planned(step, x, w)
    assert named(plan.traced.graph) == {"opaque": 1}
    assert {name: len(ops) for name, ops in unpriced(plan.traced.graph).items()} == {"opaque": 1}
    assert (plan.result.status, plan.result.unpriced_primitives) == ("unpriced", ("opaque",))
    assert plan.check(x, w).ok
    with pytest.raises(ValueError, match=r"to_source: opaque \(test_foreign.py:\d+\) cannot be written as source"):
        plan.to_source()
    file = tmp_path / "plan.json"
    plan.save(file)
    data = json.loads(file.read_text())
    assert data["certificate"]["status"] == "unpriced"
    assert data["certificate"]["unpriced_primitives"] == ["opaque"]
    # As versions that knew no better wrote it.
    del data["certificate"]["unpriced_primitives"]
    data["certificate"]["status"] = "optimal"
    file.write_text(json.dumps(data))
    again = hapsynth.load(file, step, (x, w))
    assert (again.result.status, again.result.unpriced_primitives) == ("unpriced", ("opaque",))


def test_one_whose_function_makes_something_else_stays_whole() -> None:
    p = Primitive("test_other")
    p.def_impl(lambda x: x.sum())
    p.def_abstract_eval(lambda x: x)
    assert ops(p.bind, numbers(8, 8)) == ["test_other"]


@pytest.mark.usefixtures("rules_of_this_test_only")
def test_a_rule_prices_it() -> None:
    fn, x = opaque(), numbers(96, 16)
    hapsynth.register_rule("opaque", "i j -> i j", flops=lambda op: 5.0 * op.shapes[0][0] * op.shapes[0][1])
    plan = planned(fn, x)
    assert plan.result.status in ("optimal", "optimal_at_ratios")
    assert plan.result.unpriced_primitives == ()


def test_functions_of_the_host_and_kernels_are_unpriced_too() -> None:
    def step(x: Any, n: Any) -> Any:
        host = lambda y: jax.pure_callback(np.sin, y, y)
        return lax.cond(n > 0, host, jnp.cos, x)

    x, n = numbers(8, 8), np.int32(1)
    plan = planned(step, x, n)
    assert plan.result.unpriced_primitives == ("pure_callback",)
    (line,) = {r.source for r in plan.traced.graph.regions if r.kind == "cond"}
    assert planned(step, x, n, expect={line: 0.0}).result.unpriced_primitives == ()
    assert planned(step, x, n, expect={line: 1.0}).result.unpriced_primitives == ("pure_callback",)


def test_on_the_command_line(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "model.py").write_text(MODEL)
    given = ["model.py", "--cluster", "mixed.toml", "--plan", "plan.json"]
    assert main(["search", *given, "--json", "plan-data.json"]) == 0
    told = capsys.readouterr().out
    assert "optimal only as far as costs are known" in told
    assert "unpriced       hidden x1" in told
    data = json.loads((files / "plan-data.json").read_text())
    assert (data["status"], data["unpriced_primitives"]) == ("unpriced", ["hidden"])
    assert main(["explain", "plan.json", "model.py"]) == 0
    assert "unpriced       hidden x1" in capsys.readouterr().out
