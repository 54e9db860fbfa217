"""A plan's program as a module: it runs where hapsynth cannot be imported, and gives the same bits."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cnn
import jax
import jax.numpy as jnp
import mlp
import numpy as np
import pytest
import test_extension
import transformer
from control_cases import CASES
from jax import lax
from jax.sharding import Mesh
from slow_devices import SPEEDS, first_devices, slow_cluster
from test_random import dropout_step
from zoo import functional, language

import hapsynth
from hapsynth import Plan
from hapsynth.example_data import random_arguments
from hapsynth.report import reach

CLUSTERS = Path(__file__).resolve().parent.parent / "examples" / "clusters"
EXAMPLES = {
    "mlp": mlp.target_for(mlp.Config(batch=16384, features=128, hidden=(256,))),
    "transformer": transformer.target_for(
        transformer.Config(batch=192, seq=32, vocab=512, layers=1, width=128, heads=4, ff=512)
    ),
    "cnn": cnn.target_for(cnn.Config(batch=256)),
}
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
    results = program.unshard(step(state, batch))
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), program.unshard(results[0], at="[0]"), results[0]))
    pickle.dump((program.unshard(first, at="[1]"), results), open(folder + "/results", "wb"))
assert not any(name.startswith("hapsynth.") for name in sys.modules)
"""


@pytest.fixture(autouse=True)
def thin_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapsynth.search.costs.TILE", 1)


def planned(fn: Callable[..., Any], args: Any, on: str = "3:1") -> Plan:
    cluster, mesh = slow_cluster(SPEEDS[on]), first_devices(len(SPEEDS[on]))
    return hapsynth.synthesize(fn, args, mesh, cluster=cluster, leave_out=False)


def module(plan: Plan) -> Any:
    made = types.ModuleType("program")
    sys.modules["program"] = made
    exec(compile(plan.to_source(), "program.py", "exec"), made.__dict__)
    return made


def bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same_bits(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = bits(a), bits(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_exports(plan: Plan, *args: Any) -> str:
    """The module gives what the plan gives; its text."""
    args = args or random_arguments(plan.traced)[0]
    made = module(plan)
    mesh = made.make_mesh()
    alone = [made.shard(mesh, *args[:1]), *args[1:]] if len(args) == 1 else made.shard(mesh, *args)
    got = made.unshard(made.make_step(mesh)(*alone))
    given = plan.shard(*args)
    assert_same_bits(got, plan.unshard(plan(*([given] if len(args) == 1 else given))))
    return plan.to_source()


def test_examples_run_without_hapsynth(tmp_path: Path) -> None:
    """Two steps of each, in a process of its own, which takes the first's state on."""
    expected: dict[str, Any] = {}
    for name, cluster in (("mlp", "mixed8"), ("transformer", "mixed8"), ("cnn", "mixed8"), ("cnn", "even8")):
        fn, structs = EXAMPLES[name]
        on = hapsynth.Cluster.load(CLUSTERS / f"{cluster}.toml")
        plan = hapsynth.synthesize(fn, structs, first_devices(8), cluster=on, leave_out=False)
        assert (cluster == "even8") == all(len(set(s)) == 1 for s in plan.sizes.shares)
        folder = tmp_path / f"{name}-{cluster}"
        folder.mkdir()
        plan.to_source(folder / "program.py")
        args, _ = random_arguments(plan.traced)
        (folder / "arguments").write_bytes(pickle.dumps(args))
        state, batch = plan.shard(*args)
        state, first = plan(state, batch)
        expected[str(folder)] = plan.unshard(first), plan.unshard(plan(state, batch))
    run = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, *expected], env=os.environ, capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    for folder, want in expected.items():
        assert_same_bits(pickle.loads((Path(folder) / "results").read_bytes()), want)


@pytest.mark.parametrize("name", CASES)
def test_loops_and_branches(name: str) -> None:
    assert_exports(planned(*CASES[name]), *CASES[name][1])


@pytest.mark.parametrize("model", [language.greedy_decoding, functional.hessian, functional.jvp])
def test_models(model: Callable[[], Any]) -> None:
    assert_exports(planned(*model()))


def test_keys() -> None:
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(16, 32)).astype(np.float32), rng.normal(size=(32, 8)).astype(np.float32)]
    args = (params, jax.random.key(5), rng.normal(size=(240, 16)).astype(np.float32))
    assert "random" in assert_exports(planned(dropout_step, args, "odd"), *args)


def test_two_axes() -> None:
    fn, args = language.experts_scatter()
    cluster = slow_cluster((3.0,) * 4 + (1.0,) * 4)
    from dataclasses import replace

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    plan = hapsynth.synthesize(
        fn, args, mesh, cluster=replace(cluster, axes=(("data", 2), ("model", 4))), leave_out=False, time_budget_s=20
    )
    assert len(plan.program.axes) == 2
    assert_exports(plan)
