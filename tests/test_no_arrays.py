"""Functions without an array in their results, or anywhere, and functions without ops: what `jax.jit` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_devices import SPEEDS, first_devices, slow_cluster

import hapsynth
from hapsynth.graph.trace import TraceError

X = np.arange(78, dtype=np.float32).reshape(13, 6)
SOME = slow_cluster(SPEEDS["odd"])
GRID = replace(slow_cluster((3.0, 1.0, 2.0, 1.0)), axes=(("a", 2), ("b", 2)))

FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "None": (lambda x: None, (X,)),
    "an empty tuple": (lambda x: (), (X,)),
    "a number": (lambda x: 3.5, (X,)),
    "numbers and None": (lambda x: {"a": 1, "b": (True, None)}, (X,)),
    "a text": (lambda x: "mean", (X,)),
    "work for nothing": (lambda x: (jnp.sin(x) @ x.T, None)[1], (X,)),
    "no arrays at all": (lambda: 5, ()),
    "nothing at all": (lambda: None, ()),
    "an empty dict": (lambda d: d, ({},)),
    "only what is no array": (lambda name: name, ("relu",)),
    "the argument": (lambda x: x, (X,)),
    "arguments changed about": (lambda x, y: (y, x), (X, X + 1)),
}


def mesh_of(cluster: hapsynth.Cluster) -> jax.sharding.Mesh:
    names, lengths = zip(*cluster.axes, strict=True)
    return jax.sharding.Mesh(np.array(jax.devices()[: cluster.n]).reshape(lengths), names)


@pytest.mark.parametrize("cluster", [SOME, GRID], ids=["one axis", "two axes"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_jit(name: str, cluster: hapsynth.Cluster, tmp_path: Path) -> None:
    fn, args = FUNCTIONS[name]
    plan = hapsynth.synthesize(fn, args, mesh_of(cluster), cluster=cluster)
    text = any(isinstance(x, str) for x in jax.tree.leaves(fn(*args)))
    want = fn(*args) if text else jax.jit(fn)(*args)
    got = plan.unshard(plan(*args))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert text or (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.array_equal(a, b)
    assert plan.gap < 1e-3, "nothing is left to compute but what arguments cost their way into memory"
    assert plan.check().ok
    plan.save(tmp_path / "plan.json")
    again = hapsynth.load(tmp_path / "plan.json", fn, args, plan.mesh)
    assert jax.tree.structure(again(*args)) == jax.tree.structure(want)


def test_arguments_without_an_op_are_cut_to_fit() -> None:
    """Limits count what is held at an op, and there is none."""
    args = (X, X + 1)
    swap = lambda x, y: (y, x)
    plan = hapsynth.synthesize(swap, args, first_devices(5), cluster=SOME, memory_limit=X.nbytes)
    assert max(plan.memory) <= X.nbytes
    for a, b in zip(plan.unshard(plan(*args)), swap(*args), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("fn", [lambda x: x, lambda x: None], ids=["returned", "dropped"])
def test_arguments_without_an_op_that_do_not_fit(fn: Callable[..., Any]) -> None:
    with pytest.raises(hapsynth.InfeasibleError, match="no program fits: device 0"):
        hapsynth.synthesize(fn, (X,), SOME, memory_limit=X.nbytes / 8)


@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
def test_generators() -> None:
    def pieces(x: Any) -> Any:
        yield x
        yield x + 1

    for fn, place in (
        (pieces, "the function returns"),
        (lambda x: {"sum": x.sum(), "rows": (row for row in x)}, r"output \['rows'\] is"),
        (lambda x: [map(jnp.sin, [x])], r"output \[0\] is"),
    ):
        with pytest.raises(TypeError):
            jax.jit(fn)(X)
        with pytest.raises(TraceError, match=rf"^{place} a (generator|map), .*return a list or tuple"):
            hapsynth.synthesize(fn, (X,), SOME)
