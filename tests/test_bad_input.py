"""Input of no use: an error that names the thing and the way out. (test_plan.py: files. test_cli.py: commands.)"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_devices import SPEEDS, first_devices, slow_cluster

import hapsynth
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import TraceError
from hapsynth.plan import Plan
from hapsynth.search.planning.planner import InfeasibleError

X = np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)
STATE = {"w": X, "m": {"v": X}}
CLUSTER = slow_cluster(SPEEDS["3:1"])
AXES = replace(Cluster.from_mesh(jax.make_mesh((2, 4), ("data", "model"))), name="host")
LINE = __file__.rsplit("/", 1)[-1] + ":"


def step(state: Any, batch: Any) -> Any:
    return jax.tree.map(lambda w: w * 2 + batch.sum(), state), batch.mean()


def planned(*args: Any, fn: Any = step, mesh: Any = CLUSTER, **options: Any) -> Plan:
    return hapsynth.synthesize(fn, args or (STATE, X), mesh, leave_out=False, **options)


def unlike_memory(*nbytes: int) -> Cluster:
    """A cluster of as many devices."""
    cluster = slow_cluster(range(1, len(nbytes) + 1))
    return replace(cluster, devices=tuple(replace(k, memory=n) for k, n in zip(cluster.devices, nbytes, strict=True)))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(mesh=first_devices(4), cluster=CLUSTER)


class NoShape:
    shape = None
    dtype = np.float32


class NoDtype:
    shape = (3,)


class Module:
    dtype = np.float32

    def shape(self) -> tuple[int, ...]:
        return ()


class ForeignType:
    def __str__(self) -> str:
        return "torch.float32"


class Foreign:
    shape = (3,)
    dtype = ForeignType()


OPTIONS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "more devices than the cluster": (
        lambda: planned(mesh=first_devices(8), cluster=CLUSTER),
        ValueError,
        "the mesh has 8 devices and cluster 'slow' 4; give a mesh over 4 devices, or a cluster that describes these 8",
    ),
    "devices for a mesh": (
        lambda: planned(mesh=jax.devices()),
        TypeError,
        "mesh is a list; give a jax.sharding.Mesh, or a hapsynth.Cluster",
    ),
    "a mesh of other axes": (
        lambda: planned(mesh=jax.make_mesh((2, 2, 2), ("a", "b", "c")), cluster=AXES),
        ValueError,
        r"mesh has axes {'a': 2, 'b': 2, 'c': 2}, and cluster 'host' {'data': 2, 'model': 4}; give a mesh of the",
    ),
    "a path for a cluster": (
        lambda: planned(mesh=first_devices(4), cluster="c.toml"),
        TypeError,
        r"cluster is a str; give a hapsynth.Cluster, e.g. Cluster.load\(path\)",
    ),
    "two clusters": (lambda: planned(cluster=CLUSTER), TypeError, "two clusters are given"),
    "no function": (lambda: planned(fn=3), TypeError, "fn is 3, which can't be called"),
    "no tuple": (
        lambda: hapsynth.synthesize(jnp.sin, X, CLUSTER),  # pyright: ignore
        TypeError,
        r"example_args is a ndarray; give a tuple of the arguments, \(x,\) where there is one",
    ),
    "a leaf without shape": (
        lambda: planned({"w": [NoShape()]}, X),
        TraceError,
        r"argument \[0\]\['w'\]\[0\] has shape None and dtype .*; every array leaf needs both .* jax.ShapeDtypeStruct",
    ),
    "a module with a dtype": (
        lambda: planned(X, Module()),
        TraceError,
        r"argument \[1\] has shape <bound method .*, or close over this Module if it is no array",
    ),
    "a leaf without dtype": (
        lambda: planned(X, {"b": NoDtype()}),
        TraceError,
        r"argument \[1\]\['b'\] has shape .*None",
    ),
    "words": (
        lambda: planned(X, {"b": np.array(["a", "b"])}),
        TraceError,
        r"argument \[1\]\['b'\] has dtype <U1, which JAX does not have; pass numbers or bools",
    ),
    "a masked array": (
        lambda: planned(X, np.ma.masked_array(X, X > 0)),
        TraceError,
        r"argument \[1\] is a masked array, and JAX has no masks: pass its filled\(\)",
    ),
    "an array of another library": (
        lambda: planned(X, {"b": Foreign()}),
        TraceError,
        r"argument \[1\]\['b'\] is a test_bad_input.Foreign of dtype torch.float32, .*; pass it as a NumPy",
    ),
    "a number too large": (
        lambda: planned(X, 1 << 40),
        TraceError,
        r"argument \[1\] is 1099511627776: .*int32; enable jax_enable_x64, or pass a float",
    ),
    "fixed no dict": (lambda: planned(fixed=[]), TypeError, r"fixed is \[\]; give a dict"),
    "fixed names nothing": (
        lambda: planned(fixed={"[2]": "R"}),
        ValueError,
        r"fixed names argument '\[2\]', but the arguments are \[0\]\['m'\]\['v'\], \[0\]\['w'\], \[1\]",
    ),
    "fixed partial": (lambda: planned(fixed={"[1]": "P(sum)"}), ValueError, r"'P\(sum\)' of \[1\], .* expected R or S"),
    "fixed beyond": (
        lambda: planned(fixed={"[1]": "S(2)"}),
        ValueError,
        r"'S\(2\)' of \[1\], whose shape is \(24, 8\)",
    ),
    "fixed of two axes": (
        lambda: planned(fixed={"[1]": "S(0)/1"}),
        ValueError,
        r"'S\(0\)/1' of \[1\], .* expected R or S",
    ),
    "fixed nonsense": (lambda: planned(fixed={"[1]": 0}), ValueError, r"fixed asks for 0 of \[1\], .* expected R or S"),
    "fixed empty": (
        lambda: planned(np.zeros((0, 3)), fn=jnp.sin, fixed={"[0]": "S(0)"}),
        ValueError,
        r"'S\(0\)' of \[0\], but .*\[0, 3\] cannot be cut there; expected R",
    ),
    "fixed keys": (
        lambda: planned(jax.random.split(jax.random.key(0), 4), fn=jax.random.key_data, fixed={"[0]": "S(0)"}),
        ValueError,
        r"'S\(0\)' of \[0\], but .*key<fry>\[4\] cannot be cut there; expected R",
    ),
    "carry of nothing": (
        lambda: planned(carry=[("[7]", "[0]")]),
        TraceError,
        r"carry names argument '\[7\]', but the arguments are \[0\]\['m'\]\['v'\], ",
    ),
    "carry to nothing": (
        lambda: planned(carry=[("[0]", "[1]")]),
        TraceError,
        r"carry ties '\[0\]' to '\[1\]', but no output is at .*\[1\]\['m'\]\['v'\]",
    ),
    "carry of another shape": (
        lambda: planned(carry=[("[1]", "[1]")]),
        TraceError,
        r"carry ties \[1\] of float32 and shape \(24, 8\) to an output of shape \(\) and float32",
    ),
    "carry of another dtype": (
        lambda: planned(X, fn=lambda x: x.astype(jnp.bfloat16), carry=[("[0]", "")]),
        TraceError,
        r"carry ties \[0\] of float32 and shape \(24, 8\) to an output of shape \(24, 8\) and bfloat16",
    ),
    "carry twice": (
        lambda: planned(X, X, fn=lambda a, b: a + b, carry=[("[0]", ""), ("[1]", "")]),
        TraceError,
        r"carry ties \[1\] to the output '', and one of them again",
    ),
    "carry of no pairs": (lambda: planned(carry="[0]"), TraceError, "it is a list of pairs such as"),
    "no memory": (lambda: planned(memory_limit=0), ValueError, "memory_limit is 0; give a positive number of bytes"),
    "memory in words": (lambda: planned(memory_limit="1 GiB"), TypeError, "memory_limit is '1 GiB'; give a number of"),
    "progress that is none": (lambda: planned(progress=True), TypeError, "progress is True; give a function that is"),
    "no time": (
        lambda: planned(time_budget_s=float("nan")),
        ValueError,
        "time_budget_s is nan; give a positive number",
    ),
    "distributed already": (
        lambda: planned(
            X,
            fn=lambda x: jax.shard_map(jnp.sin, mesh=first_devices(4), in_specs=jax.P("d"), out_specs=jax.P("d"))(x),
        ),
        TraceError,
        rf"by shard_map \({LINE}\d+\): hapsynth chooses how; give it the function for one device",
    ),
    "too little memory": (
        lambda: planned(mesh=slow_cluster([2.0, 1.0], memory=100)),
        InfeasibleError,
        r"no program fits: device 0 \(x2.0\) has 9.537e-05 MiB and the smallest program found needs [\d.]+ MiB, "
        r"[\d.e-]+ MiB too much \(every program needs [\d.]+ MiB or more\); a device with that much memory, more "
        r"devices, or a smaller batch would fit; recompute=True \(--recompute\) may, [^;]*$",
    ),
    "too little memory on one device": (
        lambda: planned(mesh=unlike_memory(100, 10**9)),
        InfeasibleError,
        r"would fit; form='fused' \(--form fused\) for a job of several processes, or 'staged', may, .*; recompute",
    ),
    "too little memory in exact shards": (
        lambda: planned(mesh=unlike_memory(100, 200), form="fused"),
        InfeasibleError,
        r"would fit; recompute=True",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_cannot_be_planned(name: str) -> None:
    make, error, text = OPTIONS[name]
    with pytest.raises(error, match=text):
        make()


def test_a_constraint_that_needs_the_mesh_of_the_caller() -> None:
    fn = lambda x: jax.lax.with_sharding_constraint(x, jax.P("d"))
    with jax.set_mesh(first_devices(4)), pytest.raises(TraceError, match=r"needs the mesh of jax.set_mesh.*remove the"):
        planned(X, fn=fn)


def test_a_step_for_an_axis_that_nothing_names() -> None:
    mean = lambda x: jax.lax.pmean(x, "batch")
    with pytest.raises(
        TraceError, match=r"\(test_bad_input\.py:\d+\), as in a step for jax.pmap .*without its lax.pmean"
    ):
        planned(X, fn=mean)
    assert planned(X, fn=jax.vmap(mean, axis_name="batch"))


@pytest.mark.parametrize("kwargs", [{}, {"train": True}])
def test_static_arguments_are_to_be_given_beforehand(kwargs: dict[str, bool]) -> None:
    fn = jax.jit(lambda x, train: 2 * x if train else x, static_argnames="train")
    with pytest.raises(TraceError, match=r"static argument.*beforehand, as in functools.partial\(step, train=True\)"):
        hapsynth.synthesize(fn, (X,) if kwargs else (X, True), CLUSTER, example_kwargs=kwargs)
    hapsynth.synthesize(functools.partial(fn, train=True), (X,), CLUSTER)


def test_a_process_whose_devices_a_plan_leaves_out_is_told_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(mesh=first_devices(4), cluster=CLUSTER)
    monkeypatch.setattr(made, "mesh", SimpleNamespace(local_devices=[], is_multi_process=True))
    with pytest.raises(RuntimeError, match=r"these devices alone .*\(hapsynth.load\), or .*leave_out=False, --all-dev"):
        made.shard(STATE, X)


def test_without_devices_a_plan_says_how_to_get_them() -> None:
    made = planned()
    for use in (lambda: made(STATE, X), lambda: made.shard(STATE), made.check, made.lower):
        with pytest.raises(RuntimeError, match=r"cluster 'slow' without its devices: .*hapsynth.load\(path, fn, "):
            use()


def test_consumed_state_is_named_wherever_it_is_used(plan: Plan) -> None:
    state, batch = plan.shard(STATE, X)
    plan(state, batch)
    for use in (lambda: plan(state, batch), lambda: plan.shard(state), lambda: plan.check(state, batch)):
        with pytest.raises(
            RuntimeError, match=r"argument \[0\]\['m'\]\['v'\], float32\[24, 8\], has been deleted: a call"
        ):
            use()
    for use in (lambda: plan.unshard(state), lambda: plan.map(lambda x: x, state)):
        with pytest.raises(RuntimeError, match=r"float32\[24, 8\] has been deleted: a plan consumed it and returned"):
            use()
    assert not batch.is_deleted()


def test_a_plan_of_wide_numbers_says_how_they_are_had(plan: Plan) -> None:
    x = np.ones((24, 8))
    with jax.enable_x64(True):
        wide = planned(x, fn=jnp.sin, mesh=plan.mesh, cluster=CLUSTER)
        inside = planned(X, fn=lambda x: (x.astype(np.float64) + 1).astype(x.dtype), mesh=plan.mesh, cluster=CLUSTER)
    with pytest.raises(TypeError, match=r"float32\[24, 8\], and the plan is for in0:f64\[24, 8\]: set jax_enable_x64"):
        wide(x)
    for use in (inside, inside.lower, inside.check):
        with pytest.raises(TypeError, match="the plan computes in 64 bits: set jax_enable_x64, as it was when it"):
            use(X)


CALLS: dict[str, tuple[Callable[[Plan], Any], type[Exception], str]] = {
    "a value of another shape": (
        lambda p: p(STATE, planned(X[:12], fn=jnp.sin, mesh=p.mesh, cluster=CLUSTER).shard(X[:12])),
        ValueError,
        r"argument \[1\] has shape \(12, 8\), and the plan is for \(24, 8\): pass that shape, or synthesize again",
    ),
    "a masked array": (
        lambda p: p(STATE, np.ma.masked_array(X, X > 0)),
        TypeError,
        r"argument \[1\] is a masked array, and JAX has no masks: pass its filled\(\)",
    ),
    "a scalar": (lambda p: p(STATE, 3.0), ValueError, r"argument \[1\] has shape \(\), and the plan is for \(24, 8\)"),
    "complex numbers": (
        lambda p: p({"w": X + 1j, "m": {"v": X}}, X),
        TypeError,
        r"argument \[0\]\['w'\] is complex64\[24, 8\], .*: convert it, or synthesize again for this dtype",
    ),
    "None": (lambda p: p(STATE, None), TypeError, r"the plan has '\[1\]', which is missing"),
    "a list": (lambda p: p(STATE, [X]), TypeError, r"the plan has '\[1\]', which is missing; '\[1\]\[0\]' is not in"),
    "another name": (
        lambda p: p(state=STATE, batch=X),
        TypeError,
        "was given 0 positional arguments and batch, state by",
    ),
    "check of another shape": (lambda p: p.check(STATE, X[:3]), ValueError, r"argument \[1\] has shape \(3, 8\)"),
    "shard of another shape": (
        lambda p: p.shard({"w": X[:1], "m": {"v": X}}),
        ValueError,
        r"\[0\]\['w'\] has shape \(1, 8",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_do_not_fit(plan: Plan, name: str) -> None:
    use, error, text = CALLS[name]
    with pytest.raises(error, match=text):
        use(plan)


def test_a_plan_file_for_other_devices(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"for 4 devices, .* the mesh has 8, .*: give a mesh of as many devices"):
        hapsynth.load(tmp_path / "plan.json", step, (STATE, X), first_devices(8))
    with pytest.raises(ValueError, match="another function"):
        hapsynth.load(tmp_path / "plan.json", step, (STATE, X[:12]), first_devices(4))
    with pytest.raises(TypeError, match=r"mesh is a Cluster; give a jax\.sharding\.Mesh, or None"):
        hapsynth.load(tmp_path / "plan.json", step, (STATE, X), CLUSTER)  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
