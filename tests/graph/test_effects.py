"""Effects, values that are needed too early, and ops that a device lacks: done on one device, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from slow_devices import SPEEDS, first_devices, slow_cluster

import hapsynth
from hapsynth import TraceError, UnsupportedError
from hapsynth.cli.main import main
from hapsynth.instructions.rules import factors_of
from hapsynth.instructions.rules.replicated_ops import named
from hapsynth.lower import _unsupported, unsupported
from hapsynth.plan import Plan

X = np.random.default_rng(0).normal(size=(960, 8)).astype(np.float32)
CLUSTER = slow_cluster(SPEEDS["3:1"])
CODE = Path(__file__).read_text().splitlines()
CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def planned(fn: Callable[..., Any], *args: Any) -> Plan:
    return hapsynth.synthesize(fn, args, first_devices(4), cluster=CLUSTER, leave_out=False)


def line_of(text: str) -> str:
    """The code of this file at the line that a message names."""
    found = re.search(rf"{Path(__file__).name}:(\d+)", text)
    assert found, text
    return CODE[int(found[1]) - 1]


# ---- shown once, by the first device


def test_a_print_is_done_once_with_the_whole_value(capfd: pytest.CaptureFixture[str]) -> None:
    def step(w: Any, x: Any) -> Any:
        h = jax.nn.relu(x @ w)
        jax.debug.print("sum {} of {}", h.sum(), "rows")
        return w - 0.1 * (x.T @ h), h.mean()

    w = np.eye(8, dtype=np.float32)
    plan = planned(step, w, X)
    assert named(plan.traced.graph) == {}
    capfd.readouterr()
    for _ in range(2):
        plan(w, X)
        jax.effects_barrier()
    (shown,) = set(re.findall(r"sum (\S+) of rows", printed := capfd.readouterr().out))
    assert printed.count("sum") == 2
    assert float(shown) == pytest.approx(np.maximum(X, 0).sum(), rel=1e-4)
    assert plan.check(w, X).ok


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_a_callback_is_called_once_also_where_shards_are_unequal(wrap: Callable[..., Any]) -> None:
    seen: list[Any] = []

    def fn(x: Any) -> Any:
        y = jnp.sin(x) * 2
        jax.debug.callback(lambda v, t: seen.append((v, t)), y, 7)
        return y

    plan = planned(wrap(fn), X)
    assert "debug_callback" in plan.program.text(plan.traced.graph)
    out = plan.unshard(plan(X))
    jax.effects_barrier()
    ((value, tag),) = seen
    np.testing.assert_allclose(value, np.sin(X) * 2, rtol=1e-5)
    np.testing.assert_allclose(out, np.sin(X) * 2, rtol=1e-5)
    assert tag == 7


def test_several_are_all_shown_where_the_first_device_has_no_share() -> None:
    """The cut output that they ride on is empty on the first device."""
    seen: list[str] = []

    def fn(x: Any) -> Any:
        jax.debug.callback(lambda: seen.append("none"))
        jax.debug.callback(lambda v: seen.append("some"), x[0])
        return x * 2

    cluster = slow_cluster([1e-6, 1.0, 1.0, 1.0])
    plan = hapsynth.synthesize(fn, (X,), first_devices(4), cluster=cluster, fixed={"[0]": "S(0)"})
    assert plan.sizes.local_shape(plan.traced.graph.inputs[0], plan.program.inputs[0], (0,))[0] == 0
    plan(X)
    jax.effects_barrier()
    assert sorted(seen) == ["none", "some"]


# ---- the host's own functions


def test_a_pure_callback_is_run_whole_and_named() -> None:
    def fn(x: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2

    plan = planned(fn, X)
    assert named(plan.traced.graph) == {"pure_callback": 1}
    (op,) = (op for op in plan.traced.graph.ops if op.name == "pure_callback")
    assert set(factors_of(op).blocked.values()) == {
        "every device calls the host's function, which is given whole arrays"
    }
    assert plan.check(X).ok


# ---- refused


def ordered(x: Any) -> Any:
    jax.debug.print("{}", x, ordered=True)
    return x + 1


def ordered_callback(x: Any) -> Any:
    jax.debug.callback(lambda v: None, x, ordered=True)
    return x + 1


def saving(x: Any, ordered: bool = False) -> Any:
    return x + io_callback(lambda v: v, jax.ShapeDtypeStruct((), np.float32), x[0, 0], ordered=ordered)


def looping(x: Any) -> Any:
    def body(c: Any, row: Any) -> Any:
        jax.debug.print("{}", c)
        return c + row, None

    return jax.lax.scan(body, x[0], x)[0]


def branching(x: Any) -> Any:
    def printing(v: Any) -> Any:
        jax.debug.print("{}", v)
        return v

    return jax.lax.cond(x[0, 0] > 0, jax.jit(printing), jnp.sin, x)


def quiet(x: Any) -> None:
    jax.debug.print("{}", x)


REFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "ordered print": (ordered, r"debug_print \(.*\), which is ordered: without ordered=True", "jax.debug.print("),
    "ordered callback": (ordered_callback, r"debug_callback \(.*\), which is ordered", "jax.debug.callback("),
    "a call with effects": (
        saving,
        r"has effects that cannot be distributed.*io_callback \(.*\); remove them, or keep them outside",
        "io_callback(lambda",
    ),
    "an ordered call": (lambda x: saving(x, True), r"io_callback \(.*\), which is ordered", "io_callback(lambda"),
    "a call in a loop": (
        lambda x: jax.lax.scan(lambda c, row: (saving(c[None])[0], None), x[0], x)[0],
        r"io_callback \(.*\)",
        "io_callback(lambda",
    ),
    "print in a branch": (branching, r"debug_print \(.*\), which is in a loop or branch", "jax.debug.print("),
    "print in a loop": (looping, r"debug_print \(.*\), which is in a loop or branch: print what", "jax.debug.print("),
    "nothing returned": (quiet, r"debug_print \(.*\) is in a function that returns no array", "jax.debug.print("),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_effects_are_refused_with_their_line(name: str) -> None:
    fn, text, code = REFUSED[name]
    with pytest.raises(TraceError, match=text) as caught:
        planned(fn, X)
    assert code in line_of(str(caught.value))


# ---- values needed too early

EARLY: dict[str, tuple[Callable[..., Any], str]] = {
    "nonzero": (lambda x: jnp.nonzero(x)[0], "the shape of its result depends on the data: give size="),
    "unique": (lambda x: jnp.unique(x), "the shape of its result depends on the data: give size="),
    "mask": (lambda x: x[x > 0], r"a mask picks depends on the data: use jnp.where, or jnp.nonzero\(mask, size"),
    "if": (lambda x: x if x.sum() > 0 else -x, "choose with jnp.where or jax.lax.cond"),
    "float": (lambda x: x * float(x.sum()), "compute with jax.numpy, or make it a number that is known before"),
    "range": (lambda x: sum(x[0] for _ in range(x[0, 0].astype(int))), "compute with jax.numpy, or make it a number"),
    "numpy": (lambda x: np.sin(x), "use jax.numpy in the place of numpy"),
    "in jit": (lambda x: jax.jit(lambda v: jnp.nonzero(v)[0])(x), "give size="),
}


@pytest.mark.parametrize("name", EARLY)
def test_values_needed_while_tracing(name: str) -> None:
    fn, text = EARLY[name]
    with pytest.raises(
        TraceError, match=r"needs the value of an array while it is traced \(test_effects.py:\d+\): "
    ) as e:
        planned(fn, X)
    assert f'"{name}": (lambda' in line_of(str(e.value))
    assert re.search(text, str(e.value)), e.value


# ---- what a device lacks

LACKING: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "precision": (
        lambda x: jax.lax.dot_general(x, x, (((1,), (1,)), ((), ())), precision="F16_F16_F32"),
        X[:16],
        r"dot_general \(.*\) of float32\[16, 8\], float32\[16, 8\] can't run on cpu \(cpu\): The precision",
    ),
    "foreign": (
        lambda x: jax.ffi.ffi_call("no_such", jax.ShapeDtypeStruct(x.shape, x.dtype))(jnp.sin(x)),
        X,
        r"ffi_call:no_such \(.*\) of float32\[960, 8\] can't run on cpu",
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_the_devices_lack_is_named(name: str) -> None:
    fn, x, text = LACKING[name]
    plan = planned(fn, x)
    with pytest.raises(UnsupportedError, match=text) as caught:
        plan(x)
    assert "lambda x: jax." in line_of(str(caught.value))


@pytest.mark.parametrize(
    "said",
    [
        "INTERNAL: NCCL operation ncclCommInitRankConfig(...) failed: unhandled system error",
        "INTERNAL: CUDA error: an illegal memory access was encountered",
        "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS",
        "INTERNAL: Rendezvous was not reached by all threads",
        "INTERNAL: the clique has been aborted",
        # Of another kind than what the ops give by themselves, and of a device that compiles nothing any more.
        "UNIMPLEMENTED: this",
        "INTERNAL: broken",
    ],
)
def test_what_failed_in_running_is_no_ops_fault(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    plan = planned(jnp.sin, X)
    monkeypatch.setattr(_unsupported, "_compile", broken)
    assert unsupported(plan.traced.graph, jax.devices()[0], jax.errors.JaxRuntimeError(said)) is None


# ---- on the command line

MODEL = """
import jax, jax.numpy as jnp
def target():
    return (lambda x: {body}), (jax.ShapeDtypeStruct((64, 64), "{dtype}"),)
"""


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("jnp.nonzero(x)[0]", "(model.py:4): "),
        ("(jax.debug.print('{}', x, ordered=True), x)[1]", "debug_print (model.py:4), which is ordered"),
    ],
)
def test_the_command_line_exits_with_2(tmp_path: Path, capsys: Any, body: str, text: str) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL.replace("{body}", body).replace("{dtype}", "float32"))
    assert main(["search", str(model), "--cluster", str(CLUSTERS / "even8.toml")]) == 2
    assert text in capsys.readouterr().err


def test_the_command_line_names_what_the_devices_lack(tmp_path: Path, capsys: Any) -> None:
    model, plan = tmp_path / "model.py", tmp_path / "plan.json"
    model.write_text(MODEL.replace("{body}", "jnp.dot(x, x, precision='F16_F16_F32')").replace("{dtype}", "float32"))
    assert main(["search", str(model), "--cluster", str(CLUSTERS / "even8.toml"), "--plan", str(plan)]) == 0
    assert main(["run", str(model), "--plan", str(plan)]) == 2
    assert "dot_general (model.py:4) of float32[64, 64], float32[64, 64] can't run on cpu" in capsys.readouterr().err
