"""`hapsynth profile --model`: the ops of a function that are measured by themselves. Every time here is given."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import graphs
import jax
import jax.numpy as jnp
import modelled_profile
import numpy as np
import pytest
from jax import lax
from measured_ops import F32, STEP, named, only, step, struct
from modelled_profile import ITSELF, OVERHEAD, RATE

from hapsynth.cli.main import main
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import trace
from hapsynth.profile.kind_fit import KindFit
from hapsynth.profile.measured_ops import Ops
from hapsynth.profile.op_kernels import Kernel, kernels
from hapsynth.profile.plausibility import ProfileError, unlikely
from hapsynth.profile.run import Options, _heavy
from hapsynth.search.analysis.op_class import amount_of
from hapsynth.search.analysis.op_signature import described, signature_of
from hapsynth.search.cost.model import CostModel

DOT = "matmul:f86c86571045"
CONV = "convolution:2445cf94a2d9"


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(step, STEP).graph


def convolved(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_a_signature_is_the_same_everywhere() -> None:
    """Cluster files hold them: in every process and with every version of Python and JAX they must be these."""
    dot = only(jnp.matmul, struct(64, 32), struct(32, 16))
    assert (signature_of(dot), described(dot)) == (DOT, "dot_general f32[64,32] f32[32,16]")
    assert signature_of(only(convolved, struct(8, 16, 16, 3), struct(3, 3, 3, 4))) == CONV


def test_signatures_tell_apart_what_takes_unlike_time() -> None:
    dot = lambda dims, x=(32, 32), **more: signature_of(
        only(lambda x, y: lax.dot_general(x, y, dims, **more), struct(*x), struct(32, 32))
    )
    plain = (((1,), (0,)), ((), ()))
    found = {
        dot(plain),
        dot((((0,), (0,)), ((), ()))),
        dot(plain, (16, 32)),
        dot(plain, precision=lax.Precision.HIGHEST),
        signature_of(only(jnp.matmul, struct(32, 32, dtype=jnp.bfloat16), struct(32, 32, dtype=jnp.bfloat16))),
    }
    assert len(found) == 5
    assert all(f.startswith("matmul:") for f in found)
    # A batch dimension makes another class.
    assert signature_of(only(jnp.matmul, struct(4, 8, 8), struct(4, 8, 8))).startswith("batch_matmul:")


UNMEASURED: dict[str, tuple[Any, ...]] = {
    "fuses": (jnp.tanh, struct(8)),
    "of no class": (lambda x: lax.reshape(x, (64,)), struct(8, 8)),
    "integers": (lambda x: jnp.sum(x, axis=0), struct(8, 8, dtype=jnp.int32)),
    "two dtypes": (
        lambda x, y: lax.dot(x, y, preferred_element_type=F32),
        *(struct(8, 8, dtype=jnp.bfloat16), struct(8, 8)),
    ),
    "two results": (lambda x, y: lax.sort((x, y), num_keys=1), struct(8), struct(8)),
}


@pytest.mark.parametrize("case", UNMEASURED.values(), ids=UNMEASURED)
def test_what_is_not_measured_by_itself_has_no_signature(case: tuple[Any, ...]) -> None:
    assert signature_of(only(*case)) == ""


def test_ops_are_measured_on_parts_of_the_batch(graph: Graph) -> None:
    """The gradient of weights has no batch in its result: it sums over a part of it."""
    ops, names = Ops(graph), named(graph)
    shapes = lambda name: [
        ([s for s, _ in k.operands], k.result, k.size) for k in ops.kernels([names[name]], 2, "cpu", quick=False)
    ]
    sizes = (512, 1024, 2048, 4096)
    assert shapes("dot_general f32[4096,256] f32[256,128]") == [([(n, 256), (256, 128)], (n, 128), n) for n in sizes]
    ((gradient, _),) = [(d, s) for d, s in names.items() if d.count("4096") == 2 and "256" in d]
    for (parts, result, size), n in zip(shapes(gradient), sizes, strict=True):
        assert [max(shape) for shape in parts] == [n, n]
        assert sorted(result) == [128, 256]
        assert size == n
    quick = ops.kernels([names["dot_general f32[4096,256] f32[256,128]"]], 2, "cpu", quick=True)
    assert [k.size for k in quick] == [1024, 4096]
    many = ops.kernels([names["dot_general f32[4096,256] f32[256,128]"]], 24, "cpu", quick=False)
    assert [k.size for k in many] == [128, 256, *sizes]


@pytest.mark.parametrize("rows", [4096, 72])
def test_amounts_are_those_that_plans_ask_for(rows: int) -> None:
    """What an op comes to on a part of the batch is what it was measured as there, in whole tiles."""
    graph = trace(step, (STEP[0], struct(rows, 256))).graph
    ops = Ops(graph)
    costs = CostModel(graph, graphs.cluster([1.0] * 4), ops.table)
    for signature, op in ops.by_signature.items():
        triple = ops.cut(signature)
        assert triple is not None
        assert triple.factor is not None
        *parts, whole = ops.kernels([signature], 4, "cpu", quick=False)
        assert [len(parts), whole.amount] == [3, amount_of(op)]
        work = costs.work(op.index, (triple,))
        for kernel in parts:
            fraction = kernel.size / ops.table[op.index].sizes[triple.factor]
            flops, _, _ = costs.loads(work, [np.full(4, fraction)])
            assert flops[0] == pytest.approx(kernel.amount, rel=1e-12)


@pytest.mark.parametrize(("rows", "sizes"), [(36, [9, 18, 36]), (37, [37]), (24, [12, 24]), (2, [2])])
def test_parts_are_equal_and_of_unlike_tiles(rows: int, sizes: list[int]) -> None:
    """36 has no eighth, 37 no half; 3, 6 and 12 of 24 rows are one tile of a contraction each, as 2 rows are."""
    ops = Ops(trace(lambda x, w: x @ w, (struct(rows, 64), struct(64, 64)), carry=[]).graph)
    (signature,) = ops.by_signature
    assert [k.size for k in ops.kernels([signature], 2, "cpu", quick=False)] == sizes


def test_what_cannot_be_cut_is_measured_whole() -> None:
    ops = Ops(trace(lambda x: lax.cumsum(x), (struct(64),)).graph)
    (signature,) = ops.by_signature
    assert [(k.size, k.result) for k in ops.kernels([signature], 8, "cpu", quick=False)] == [(1, (64,))]


@pytest.mark.parametrize("fn", ["dot", "conv", "sum"])
def test_a_kernel_runs_the_op_as_the_lowering_does(fn: str) -> None:
    functions: dict[str, tuple[Any, ...]] = {
        "dot": (lambda x, w: jnp.einsum("btk,btn->kn", x, w), struct(16, 4, 8), struct(16, 4, 8)),
        "conv": (convolved, struct(16, 6, 6, 4), struct(3, 3, 4, 8)),
        "sum": (lambda x: jnp.sum(x, axis=1), struct(16, 8)),
    }
    function, *args = functions[fn]
    ops = Ops(trace(function, args).graph)
    whole = function(*(jnp.ones(a.shape) for a in args))
    for kernel in ops.kernels(list(ops.by_signature), 2, "cpu", quick=False):
        made = jax.jit(kernel.fn)(*(jnp.full(shape, value, kernel.dtype) for shape, value in kernel.operands))
        assert made.shape == kernel.result
        part = kernel.size / 16
        # Of ones a part of a sum is that part, and a part of the rows is as the rest.
        expected = whole * part if fn == "dot" else whole[: kernel.size]
        np.testing.assert_allclose(made, expected)
        assert kernel.nbytes == 4 * (sum(np.prod(shape) for shape, _ in kernel.operands) + made.size)


def test_the_heaviest_make_most_of_the_time(graph: Graph) -> None:
    ops = Ops(graph)
    (kind,) = graphs.cluster([1.0]).kinds
    chosen = ops.heaviest(kind)
    costs = CostModel(graph, Cluster("one", (kind,), (0,), graphs.cluster([1.0]).network), ops.table)
    spent = {
        s: costs.time(costs.work(op.index, ops.table[op.index].joint(1)[0]), ()) for s, op in ops.by_signature.items()
    }
    assert [spent[s] for s in chosen] == sorted(spent.values(), reverse=True)[: len(chosen)]
    whole = sum(spent.values())
    assert sum(spent[s] for s in chosen) >= 0.95 * whole > sum(spent[s] for s in chosen[:-1])
    assert ops.heaviest(kind, most=2) == chosen[:2]


def test_a_loop_counts_as_often_as_it_runs() -> None:
    def fn(x: Any, w: Any, v: Any) -> Any:
        y, _ = lax.scan(lambda c, _: (c @ w, None), x, None, length=50)
        return y, x @ v

    ops = Ops(trace(fn, (struct(64, 64), struct(64, 64), struct(64, 640)), carry=[]).graph)
    (kind,) = graphs.cluster([1.0]).kinds
    assert described(ops.by_signature[ops.heaviest(kind)[0]]) == "dot_general f32[64,64] f32[64,64]"


# ---- the measuring


class FakeJob:
    """One process's view of a job."""

    n, local = 2, (0, 1)
    devices = (SimpleNamespace(platform="cpu"),) * 2

    def __init__(self, other: list[str] | None = None) -> None:
        self.other = other

    def shared(self, text: str) -> str:
        return text if self.other is None else json.dumps(self.other)

    agree = staticmethod(bool)


def figures(ran: list[Kernel], spread: float = 0.01) -> dict[str, Any]:
    return {k.key: np.tile([modelled_profile.kernel_seconds(k), spread], (2, 1)) for k in ran}


def test_one_process_chooses_what_all_measure(graph: Graph) -> None:
    ran = list(kernels(("float32",), quick=True))
    job: Any = FakeJob()
    mine = _heavy(job, Options(), graph, ran, figures(ran))
    assert list(dict.fromkeys(k.family for k in mine)) == Ops(graph).heaviest(_kind(ran))
    chosen = list(named(graph).values())[:1]
    job = FakeJob(chosen)
    assert {k.family for k in _heavy(job, Options(), graph, ran, figures(ran))} == set(chosen)
    job = FakeJob(["matmul:0123456789ab"])
    with pytest.raises(ProfileError, match="unlike functions"):
        _heavy(job, Options(), graph, ran, figures(ran))


def _kind(ran: list[Kernel]) -> Any:
    times = {k.key: (float(modelled_profile.kernel_seconds(k)), 0.01) for k in ran}
    return KindFit(ran, times).kind("x", ["float32"], 1 << 30, "")


def test_what_takes_no_longer_than_figures_vary_is_no_curve(graph: Graph) -> None:
    ran, ops = list(kernels(("float32",), quick=True)), Ops(graph)
    mine = list(ops.kernels([named(graph)["dot_general f32[4096,256] f32[256,128]"]], 2, "cpu", quick=False))
    seconds = {k.key: float(modelled_profile.kernel_seconds(k)) for k in [*ran, *mine]}
    points = lambda spread: {
        s: [a for a, _ in op.curve.points]
        for s, op in KindFit([*ran, *mine], {k: (t, spread) for k, t in seconds.items()}).ops().items()
    }
    amounts = [k.amount for k in mine]
    assert points(0.01) == {mine[0].family: amounts}
    # 2 ms and the start of 0.1 ms for an eighth, 16 ms for all; the start varies too.
    assert points(0.95) == {mine[0].family: amounts[1:]}
    assert points(1.0) == {}


def test_rates_that_no_device_has_are_doubted(graph: Graph) -> None:
    ran, ops = list(kernels(("float32",), quick=True)), Ops(graph)
    mine = list(ops.kernels(list(ops.by_signature)[:1], 2, "cpu", quick=False))
    times = {k.key: (float(modelled_profile.kernel_seconds(k)), 0.0) for k in [*ran, *mine]}
    assert not list(unlikely("x", KindFit([*ran, *mine], times)))
    fast = {k.key: (modelled_profile.START + OVERHEAD + k.amount / 1e17, 0.0) for k in mine}
    (doubt,) = unlikely("x", KindFit([*ran, *mine], {**times, **fast}))
    assert "dot_general f32[4096,256] f32[256,128]" in doubt.text
    assert doubt.keys == tuple(k.key for k in mine)


MODEL = """
import jax, jax.numpy as jnp

def step(w, x):
    value, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    return w - grad, value

def arguments(n):
    return jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((n, 64), jnp.float32)

def target():
    return step, arguments(512)

def several():
    return {"train": step, "small": step}, {"train": arguments(512), "small": arguments(128)}
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hapsynth.profile.run.kernels", lambda *_: list(kernels(("float32",), quick=True))[:6])
    modelled_profile.install(monkeypatch.setattr)
    asked = ["profile", "--devices", "2", "--quick", "--model"]
    assert main([*asked, "model.py", "-o", "c.toml"]) == 0
    assert "dot_general f32[512,64] f32[64,32]" in capsys.readouterr().out
    cluster = Cluster.load("c.toml")
    (kind,) = cluster.kinds
    assert {op.op.split()[0] for op in kind.ops.values()} == {"dot_general", "reduce_sum"}
    for op in kind.ops.values():
        assert [float(op.curve.seconds(a)) for a, _ in op.curve.points] == pytest.approx(
            [ITSELF * a / RATE for a, _ in op.curve.points], rel=1e-3
        )
    # One of several functions.
    assert main([*asked, "model.py:several", "--function", "small", "-o", "d.toml"]) == 0
    assert any("f32[128,64]" in op.op for op in Cluster.load("d.toml").kinds[0].ops.values())
    # Costed so in the plan of that function.
    assert main(["search", "model.py", "--cluster", "c.toml", "--plan", "p.json"]) == 0
    capsys.readouterr()
    assert main(["explain", "p.json", "model.py", "--cost", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    matmuls = [line for line in data["computing"] if line["op_class"] == "matmul"]
    assert len(matmuls) == 2
    for line in matmuls:
        assert line["rate"] == pytest.approx(RATE / ITSELF, rel=1e-3)
        assert line["rate_from"].startswith("measured curve of the op itself, hapsynth profile")
    assert main(["explain", "p.json", "model.py", "--cost"]) == 0
    assert "measured curve of the op itself" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "none.py"], "none.py: no such model file"),
        (["--model", "model.py:arguments"], "arguments() raised TypeError"),
        (["--model", "model.py:step"], "step() raised TypeError"),
        (["--model", "empty.py"], "defines no target()"),
        (["--model", "model.py", "--function", "train"], "leave it out"),
        (["--model", "model.py:several"], "pick it, e.g. --function train"),
        (["--model", "model.py:several", "--function", "trian"], "did you mean train?"),
        (["--function", "train"], "--function picks one of the functions of --model"),
        (["--model", "shapeless.py"], "argument [0]"),
    ],
)
def test_bad_usage(
    argv: list[str], says: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "empty.py").write_text("")
    (model / "shapeless.py").write_text(
        "class Shapeless:\n    shape, dtype = (None,), 'float32'\n"
        "def target():\n    return (lambda x: x), (Shapeless(),)\n"
    )
    # Nothing is measured.
    monkeypatch.delattr("hapsynth.cli.profile.profile")
    assert main(["profile", "-o", "c.toml", *argv]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not list(model.glob("c.toml*"))
