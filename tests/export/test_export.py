"""A plan's program as a module: it runs where hapsynth cannot be imported, and gives the same bits."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import cnn
import jax
import jax.numpy as jnp
import mlp
import numpy as np
import pytest
import transformer
from cli_model import write_model
from control_cases import CASES
from exported import assert_exports, assert_same_bits, module
from jax import lax
from jax.sharding import Mesh
from random_draws import dropout_step, large_draws
from slow_devices import SPEEDS, first_devices, slow_cluster, thin_cluster
from thoroughness import THOROUGH
from zoo import functional, language

import hapsynth
from hapsynth import Plan
from hapsynth.cli.main import main
from hapsynth.export import SourceError
from hapsynth.export._function_printer import _wrapped  # pyright: ignore[reportPrivateUsage]
from hapsynth.instructions.testing.example_arguments import random_arguments

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
MORE = ("mlp", "even8"), ("transformer", "mixed8"), ("cnn", "mixed8")
"""With HAPSYNTH_THOROUGH=1."""
EXAMPLES = {
    "mlp": mlp.target_for(mlp.Config(batch=16384, features=128, hidden=(256,))),
    "transformer": transformer.target_for(
        transformer.Config(batch=192, seq=32, vocab=128, layers=1, width=64, heads=4, ff=256)
    ),
    "cnn": cnn.target_for(cnn.Config(batch=256, size=16, channels=(16, 32))),
}


class Point(NamedTuple):
    x: Any
    y: Any


# The tree of a training step holds optax's own containers.
ALONE = """
import importlib.util, pickle, sys
sys.modules["hapsynth"] = None  # an import raises
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_disable_most_optimizations", True)
for folder in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("program", folder + "/program.py")
    program = importlib.util.module_from_spec(spec)
    sys.modules["program"] = program
    spec.loader.exec_module(program)
    mesh = program.make_mesh()
    step = program.make_step(mesh)
    state, batch = program.shard(mesh, *pickle.load(open(folder + "/arguments", "rb")))
    state, first = step(state, batch)
    state, second = step(state, batch)
    losses = [program.unshard(loss, at="[1]") for loss in (first, second)]
    pickle.dump((program.unshard(state, at="[0]"), losses), open(folder + "/results", "wb"))
assert not any(name.startswith("hapsynth.") for name in sys.modules)
"""


CALLBACK = """
import jax, numpy as np
x = jax.ShapeDtypeStruct((8, 8), np.float32)
def target():
    return lambda x: jax.pure_callback(np.sin, x, x), (x,)
"""


def planned(fn: Callable[..., Any], args: Any, on: str = "3:1") -> Plan:
    cluster, mesh = thin_cluster(SPEEDS[on]), first_devices(len(SPEEDS[on]))
    return hapsynth.synthesize(fn, args, mesh, cluster=cluster, leave_out=False)


def test_draws_in_blocks() -> None:
    plan = planned(large_draws, (jax.random.key(5),))
    assert "dynamic_update_slice" in assert_exports(plan, jax.random.key(5))
    made = module(plan)
    with jax.threefry_partitionable(False), pytest.raises(TypeError, match="jax_threefry_partitionable=True: set it"):
        made.make_step(made.make_mesh())


@pytest.mark.slow
def test_examples_run_without_hapsynth(tmp_path: Path) -> None:
    """Two steps of each, in a process of its own, which takes the first's state on."""
    expected: dict[str, Any] = {}
    for name, cluster in (("mlp", "mixed8"), *(MORE if THOROUGH else ())):
        fn, structs = EXAMPLES[name]
        on = hapsynth.Cluster.load(CLUSTERS / f"{cluster}.toml")
        plan = hapsynth.synthesize(fn, structs, first_devices(8), cluster=on, leave_out=False)
        assert cluster == "even8" or any(len(set(s)) > 1 for s in plan.sizes.shares)
        folder = tmp_path / f"{name}-{cluster}"
        folder.mkdir()
        plan.to_source(folder / "program.py")
        args, _ = random_arguments(plan.traced)
        (folder / "arguments").write_bytes(pickle.dumps(args))
        state, batch = plan.shard(*args)
        state, first = plan(state, batch)
        state, second = plan(state, batch)
        expected[str(folder)] = plan.unshard((state, [first, second]))
    run = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, *expected], env=os.environ, capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    for folder, want in expected.items():
        assert_same_bits(pickle.loads((Path(folder) / "results").read_bytes()), want)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", CASES)
def test_loops_and_branches(name: str) -> None:
    assert_exports(planned(*CASES[name]), *CASES[name][1])


@pytest.mark.few(2)
@pytest.mark.parametrize("model", [language.greedy_decoding, functional.hessian, functional.jvp])
def test_models(model: Callable[[], Any]) -> None:
    assert_exports(planned(*model()))


def test_keys() -> None:
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(16, 32)).astype(np.float32), rng.normal(size=(32, 8)).astype(np.float32)]
    args = (params, jax.random.key(5), rng.normal(size=(240, 16)).astype(np.float32))
    assert "random" in assert_exports(planned(dropout_step, args), *args)


def test_two_axes() -> None:
    """Both axes cut unevenly, and one dimension along both."""

    def fn(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w), jnp.cumsum(x, 0)

    cluster = replace(thin_cluster((3.0,) * 4 + (1.0,) * 4), axes=(("data", 2), ("model", 4)))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((96, 80), (80, 112))]
    plan = hapsynth.synthesize(fn, args, mesh, cluster=cluster, leave_out=False)
    assert len(plan.program.axes) == 2
    assert any(len(set(shares)) > 1 for shares in plan.sizes.shares)
    assert_exports(plan)


def test_what_the_configuration_decides_is_in_the_program() -> None:
    x = np.random.default_rng(0).normal(size=(48, 8))
    with jax.enable_x64(True), jax.default_matmul_precision("high"):
        plan = planned(lambda x: x @ (x.T @ x), (x,))
        assert "lax.Precision.HIGH" in assert_exports(plan, x)
        made = module(plan)
        mesh = made.make_mesh()
        with pytest.raises(TypeError, match=r"argument \[0\] is float32, and the program is for float64"):
            made.shard(mesh, x.astype(np.float32))
    for use in (lambda: made.shard(mesh, x), lambda: made.make_step(mesh), plan.to_source):
        with pytest.raises((TypeError, hapsynth.SourceError), match="computes in 64 bits: set jax_enable_x64"):
            use()


@pytest.mark.usefixtures("rules_of_this_test_only")
def test_calls_of_the_users_own() -> None:
    def factor(x: Any) -> Any:
        out = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], np.int32))
        call = jax.ffi.ffi_call("lapack_spotrf_ffi", out, input_layouts=[(0, 2, 1)], output_layouts=[(0, 2, 1), (0,)])
        return jnp.tril(call(x, uplo=np.uint8(ord("L")))[0])

    jnp.linalg.cholesky(np.eye(2, dtype=np.float32))  # JAX loads LAPACK when it first calls it
    hapsynth.register_rule("ffi_call:lapack_spotrf_ffi", "b i j -> b i j, b", need_replication=["i", "j"])
    rows = np.random.default_rng(0).normal(size=(240, 3, 3)).astype(np.float32)
    x = rows @ rows.transpose(0, 2, 1) + 3 * np.eye(3, dtype=np.float32)
    plan = planned(factor, (x,))
    assert any(len(set(shares)) > 1 for shares in plan.sizes.shares)
    assert "uplo=np.uint8(76)" in assert_exports(plan, x)


def test_what_has_no_text_is_named() -> None:
    def fn(x: Any) -> Any:
        return jax.pure_callback(np.sin, x, x) + 1

    with pytest.raises(
        ValueError, match=r"to_source: pure_callback \(test_export.py:\d+\) cannot be written as source"
    ):
        planned(fn, (np.ones((8, 8), np.float32),)).to_source()


def test_a_scatter_that_applies_a_function_has_no_text() -> None:
    """Its parameters are those of one that sets values."""
    applied = lambda x: x.at[jnp.array([1, 3])].apply(jnp.sin)
    with pytest.raises(hapsynth.SourceError, match=r"scatter .*applies a function.*x\.at\[i\]\.set\(f\(x\[i\]\)\)"):
        planned(applied, (np.ones(8, np.float32),)).to_source()
    assert_exports(planned(lambda x: x.at[jnp.array([1, 3])].set(jnp.sin(x[1])), (np.ones(8, np.float32),)))


def test_complex_constants() -> None:
    odd = np.array([complex(-0.0, np.inf), complex(np.nan, -0.0), 2 - 3j], np.complex64)
    plan = planned(lambda x: (x * odd, x + odd), (np.ones((12, 3), np.complex64),))
    assert_exports(plan, np.full((12, 3), 1 + 0j, np.complex64))


def test_names_are_text_and_no_code() -> None:
    """Of the cluster, in the module's docstring, and of arguments, in comments."""
    name = '"""; raise SystemExit  # \\\n"""'
    cluster = replace(thin_cluster(SPEEDS["3:1"]), name=name)
    fn = lambda tree: tree["a\nraise SystemExit"] * 2
    tree = {"a\nraise SystemExit": np.ones((12, 4), np.float32)}
    plan = hapsynth.synthesize(fn, (tree,), first_devices(len(SPEEDS["3:1"])), cluster=cluster, leave_out=False)
    assert name in (module(plan).__doc__ or "")
    assert_exports(plan, tree)


def test_any_reduction() -> None:
    def fn(x: Any) -> Any:
        most = lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1])
        largest = lax.reduce((x, x), (-np.float32(np.inf), np.float32(0)), most, (1,))
        return largest, lax.reduce_window(x, np.float32(1), lambda a, b: a * b + a, (1, 2), (1, 2), "VALID")

    assert_exports(planned(fn, (np.random.default_rng(0).normal(size=(48, 8)).astype(np.float32),)))


def test_a_file_whose_name_is_no_text() -> None:
    found: dict[str, Any] = {"jnp": jnp}
    exec(compile("def fn(x):\n    return jnp.tanh(x)", "mod\udce9l.py", "exec"), found)
    assert r"mod\udce9l.py:2" in planned(found["fn"], (np.ones((8, 8), np.float32),)).to_source()


def test_texts_with_quotes_brackets_and_commas_are_left_whole() -> None:
    """Lines are broken outside of them, and within the brackets of the statement."""

    def fn(x: Any) -> Any:
        y = jnp.sum(x * x)
        for said in ("it's the loss, {}, ", "a \\' of (it, ", 'its "last" ], '):
            jax.debug.print(said * 12 + "{}", *(y,) * (1 + 12 * said.count("{}")))
        return y

    assert_exports(planned(fn, (np.ones(64, np.float32),)))


@pytest.mark.parametrize("n", range(20, 50, 3))
def test_a_line_is_broken_within_its_brackets_alone(n: int) -> None:
    members = ", ".join(f"t{i}" for i in range(n))
    lines = _wrapped(f"    return ({members}), ({members})")
    assert len(lines) > 1
    assert compile("\n".join(["def trip():", *lines]), "program.py", "exec")


def test_what_is_no_python_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapsynth.export.source._imports", lambda: ["import"])
    with pytest.raises(SourceError, match=r"no Python, by a fault of hapsynth: .* line \d+, 'import'"):
        planned(*functional.jvp()).to_source()


def test_constants_and_trees() -> None:
    """Large constants, static leaves, results that are known before or of the arguments' own kinds."""
    table = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)

    def fn(state: Any, x: Any, how: Any) -> Any:
        new = Point(state.x + x.sum(), state.y * 2)
        return {"state": new, "how": how, "out": [x @ jnp.asarray(table).T, None, (jnp.float32(3.0),)]}, 7

    args = (Point(np.ones(16, np.float32), np.ones((), jnp.bfloat16)), np.ones((96, 16), np.float32), "mean")
    plan = planned(fn, args)
    made = module(plan)
    mesh = made.make_mesh()
    step = made.make_step(mesh)
    given = made.shard(mesh, *args)
    out = made.unshard(step(*given))
    assert_same_bits(out, plan.unshard(plan(*args)))
    assert_same_bits(made.shard(mesh, args[0], args[1].astype(np.float64))[1], given[1])
    with pytest.raises(TypeError, match=r"argument \[1\] is int32, and the program is for float32"):
        made.shard(mesh, args[0], args[1].astype(int))
    with pytest.raises(ValueError, match=r"argument \[2\] is 'sum', and the program is for 'mean' only"):
        step(*given[:2], "sum")
    with pytest.raises(ValueError, match=r"argument \[1\] has shape \(95, 16\), and the program is for \(96, 16\)"):
        made.shard(mesh, args[0], args[1][1:])


def test_planned_without_devices(tmp_path: Path) -> None:
    fn, args = functional.jvp()
    with_devices = planned(fn, args)
    with_devices.save(tmp_path / "plan.json")
    without = hapsynth.load(tmp_path / "plan.json", fn, args)
    assert without.to_source(tmp_path / "program.py") == (tmp_path / "program.py").read_text()
    assert "def body(" in without.to_source()


def test_devices_that_take_no_part() -> None:
    fn, args = lambda x: jnp.tanh(x @ x.T), (np.ones((24, 24), np.float32),)
    plan = hapsynth.synthesize(fn, args, slow_cluster(SPEEDS["hopeless"], bandwidth=1e9))
    assert plan.devices == (0, 2, 3)
    made, every = module(plan), jax.devices()
    taking_part = [every[i] for i in plan.devices]
    for given in (None, every, every[:4], taking_part):
        assert made.make_mesh(given).devices.tolist() == taking_part
    for few in (every[:2], []):
        with pytest.raises(ValueError, match=rf"3 devices of the 4 .* \(0, 2, 3\), and there are {len(few)}"):
            made.make_mesh(few)


def test_from_the_command_line(plan_file: Path) -> None:
    assert main(["export", "plan.json", "model.py", "-o", "program.py"]) == 0
    assert "def body(" in (plan_file.parent / "program.py").read_text()


def test_what_has_no_text_on_the_command_line(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path)
    (tmp_path / "model.py").write_text(CALLBACK)
    assert main(["search", "model.py", "--cluster", "mixed.toml", "--plan", "plan.json"]) == 0
    capsys.readouterr()
    assert main(["export", "plan.json", "model.py", "-o", "program.py"]) == 2
    assert "hapsynth export: error: to_source: pure_callback (model.py:5) cannot" in capsys.readouterr().err
    assert not (tmp_path / "program.py").exists()


# ---- shardings for plain jax.jit


def test_even_plans_as_shardings() -> None:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch["x"] @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grads}, loss, 3.0

    rng = np.random.default_rng(0)
    args = (
        {"w": rng.normal(size=(16, 16)).astype(np.float32)},
        {"x": rng.normal(size=(512, 16)).astype(np.float32)},
    )
    plan = planned(step, args, "equal")
    assert plan.layouts["[1]['x']"] == "S(0)"
    alone = jax.jit(step, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    placed = jax.tree.map(jax.device_put, args, plan.in_shardings)
    assert placed[1]["x"].addressable_shards[0].data.shape == (128, 16)
    out = alone(*placed)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, out, plan.out_shardings))
    state, loss, _ = plan.unshard(plan(*args))
    np.testing.assert_allclose(out[0]["w"], state["w"], rtol=1e-5)
    np.testing.assert_allclose(out[1], loss, rtol=1e-5)
    uneven = planned(step, args)
    lengths = r"dimension 0 in shards of \d+/\d+/\d+/\d+"
    with pytest.raises(ValueError, match=rf"argument \[1\]\['x'\], float32\[512, 16\], is kept as S\(0\), {lengths}"):
        _ = uneven.in_shardings
    options = {"cluster": thin_cluster(SPEEDS["equal"]), "example_kwargs": {"x": args[1]["x"]}}
    with pytest.raises(ValueError, match="x by keyword"):
        _ = hapsynth.synthesize(lambda *, x: x + 1, (), first_devices(4), **options).in_shardings
