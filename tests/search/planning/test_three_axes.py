"""Meshes of three axes and more: what each axis is used for, what runs, what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from exported import assert_exports
from jax.sharding import Mesh
from lowered_programs import assert_close
from lowering_options import ALONE
from random_programs import floats
from slow_devices import thin_cluster
from two_processes import run_two

import hapsynth
from hapsynth.cli.main import main
from hapsynth.cluster.cluster import Cluster, ClusterError
from hapsynth.graph.trace import trace
from hapsynth.instructions.layout import orders, parse_layout
from hapsynth.instructions.program.program import Convert, Program, ProgramError
from hapsynth.instructions.program.sizes import Classes
from hapsynth.plan import Form, Plan
from hapsynth.search.cost.network import mesh_axes
from hapsynth.view.record import plan_record

AXES = (("data", 2), ("expert", 2), ("tensor", 2))


def on(cluster: Cluster, axes: Sequence[tuple[str, int]]) -> tuple[Mesh, Cluster]:
    """The first devices of this machine as a mesh of these axes, and the cluster as one."""
    lengths = [size for _, size in axes]
    devices = np.array(jax.devices()[: math.prod(lengths)]).reshape(lengths)
    return Mesh(devices, [name for name, _ in axes]), replace(cluster, axes=tuple(axes))


def planned(fn: Any, args: Any, cluster: Cluster, axes: Sequence[tuple[str, int]] = AXES, **options: Any) -> Plan:
    mesh, grid = on(cluster, axes)
    return hapsynth.synthesize(fn, args, mesh, cluster=grid, lowering=ALONE, **options)


def in_form(plan: Plan, form: Form) -> Plan:
    return Plan(plan.traced, plan.result, plan.cluster, plan.mesh, plan.fn, form=form)


def assert_right(plan: Plan, *args: Any) -> None:
    assert_close(jax.tree.leaves(plan.unshard(plan(*args))), jax.jit(plan.fn)(*args))


# ---- what three axes are for


PRODUCTS = 2


def chained(x: Any) -> Any:
    """Products of the matrices of two experts, two samples, two heads: what is made of one needs all of its rows."""
    for _ in range(PRODUCTS):
        x = x @ x
    return x


def test_each_of_three_axes_cuts_a_dimension_of_its_own() -> None:
    """Along a dimension of two only two devices are busy, and on this network rows are not worth a gather: two axes use
    four of eight devices, and one axis two. Nothing but the products takes time: 2 x 8 matrices x 2 x 256^3 FLOPs."""
    cluster, n = strategies.gpus([1.0] * 8, bandwidth=1e8), 256
    args = (strategies.shape(2, 2, 2, n, n),)
    flops = PRODUCTS * 8 * 2 * n**3
    meshes = {8: AXES, 4: (("data", 2), ("rest", 4)), 2: (("all", 8),)}
    for busy, axes in meshes.items():
        plan = planned(chained, args, cluster, axes)
        assert plan.cost == pytest.approx(flops / busy / 1e13, rel=0.02), axes
        assert plan.gap <= 1e-4
        assert plan.program.collectives() == {}
        if busy == 8:
            (layout,) = plan.layouts.values()
            assert sorted(layout.split(",")) == ["S(0)", "S(1)", "S(2)"]
            assert {c.axes for c in plan.sizes.classes.all} == {(0,), (1,), (2,)}
            x = floats(*args[0].shape[:3], 8, 8) / 3
            small = planned(chained, (x,), cluster, axes, fixed=plan.layouts)
            for form in ("switch", "staged", "fused"):
                assert_right(in_form(small, form), x)


# That each axis cuts a dimension of its own is shown above, in less time; experts on two axes in test_axes.py.
@pytest.mark.few(0)
@pytest.mark.parametrize("fewer", ["data", "tensor", "none"])
def test_data_expert_and_tensor(fewer: str) -> None:
    """Two groups of tokens, two experts, and their hidden width: three axes are used, each for another dimension, and
    every mesh of fewer axes takes longer."""
    args = strategies.experts_args(groups=2, tokens=512, width=256, count=2, hidden=4096)
    cluster = strategies.gpus([0.1] * 8, bandwidth=3e10, latency=1e-7)
    plan = planned(strategies.experts, args, cluster)
    up, down = (parse_layout(plan.layouts[f"[0][{name!r}]"]) for name in ("up", "down"))
    assert {p.dim for p in up if p.is_sharded} >= {0, 2}, "experts and their hidden width"
    assert {p.dim for p in down if p.is_sharded} >= {0, 1}
    axes = {"data": (("data", 2), ("rest", 4)), "tensor": (("rest", 4), ("tensor", 2)), "none": (("all", 8),)}[fewer]
    assert plan.cost < 0.998 * planned(strategies.experts, args, cluster, axes).cost
    small = strategies.experts_args(groups=2, tokens=16, width=8, count=2, hidden=32)
    values = jax.tree.map(lambda s: floats(*s.shape), small)
    assert_right(planned(strategies.experts, values, cluster, fixed=dict(plan.layouts)), *values)


# ---- plans that run


SPEEDS: dict[str, tuple[float, ...]] = {
    "unlike along the first": (3.0,) * 4 + (1.0,) * 4,
    "unlike along each": (4.0, 1.0, 2.5, 0.7, 2.5, 1.0, 0.7, 0.7),
}


def one_layer(params: Any, x: Any) -> Any:
    """A step of few ops, each of which takes long to plan along three axes."""
    loss = lambda p: jnp.mean(jnp.tanh(x @ p["w"]) ** 2)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


@pytest.mark.few(1)
@pytest.mark.parametrize("speeds", SPEEDS)
def test_values_are_those_of_one_device(speeds: str, tmp_path: Path) -> None:
    """In each form, read from a file, and as a module of its own."""
    state = {"w": floats(6, 10)}
    cluster, batch = thin_cluster(SPEEDS[speeds]), floats(27, 6)
    plan = planned(one_layer, (state, batch), cluster, leave_out=False)
    assert plan.program.axes == AXES
    assert {a for c in plan.sizes.classes.all for a in c.axes} == {0, 1, 2}
    assert any(max(shares) > min(shares) + 1 for shares in plan.sizes.shares)
    plan.save(tmp_path / "plan.json")
    loaded = hapsynth.load(tmp_path / "plan.json", one_layer, (state, batch), on(cluster, AXES)[0])
    assert loaded.program.text(loaded.traced.graph) == plan.program.text(plan.traced.graph)
    assert_right(in_form(plan, "switch"), state, batch)
    assert_right(in_form(plan, "staged"), state, batch)
    assert plan.check(state, batch).ok
    if speeds == "unlike along each":
        assert_exports(plan, state, batch)
        for argument in plan_record(plan, "three axes")["arguments"]:
            for dim, shards in argument["cuts"]:
                assert sum(length for length, _ in shards) == argument["shape"][dim]


FUSED = """
    import sys
    import jax
    import numpy as np
    from jax.sharding import Mesh
    import hapsynth
    import jax.numpy as jnp
    from slow_devices import thin_cluster
    from dataclasses import replace

    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "expert", "tensor"))
    cluster = replace(thin_cluster((3.0,) * 4 + (1.0,) * 4), axes=tuple(mesh.shape.items()), hosts=(0,) * 4 + (1,) * 4)
    asked = {"ratios": [3 / 16] * 4 + [1 / 16] * 4, "form": "fused", "cache": False}

    def step(w, x):
        return w - 0.01 * x.T @ jnp.tanh(x @ w)

    draw = np.random.default_rng(0)
    w, x = (draw.normal(size=size).astype(np.float32) / 4 for size in ((16, 16), (480, 16)))
    plan = hapsynth.synthesize(step, (w, x), mesh, cluster=cluster, **asked)
    assert plan.form == "fused" and any(len(set(shares)) > 1 for shares in plan.sizes.shares), plan.sizes.shares
    got = plan.unshard(plan(*plan.shard(w, x)))
    np.testing.assert_allclose(got, jax.jit(step)(w, x), rtol=1e-4, atol=1e-4)
    print("right")
"""


def test_processes_along_one_of_three_axes() -> None:
    """In fused form: the first axis is over two processes, whose devices are alike in each."""
    assert all("right" in said for said in run_two(FUSED, lambda address, i: [address, str(i)]))


def test_the_command_line_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(
        "import jax, jax.numpy as jnp, numpy as np\n"
        "x = np.linspace(-1, 1, 2 * 2 * 2 * 8 * 8, dtype=np.float32).reshape(2, 2, 2, 8, 8)\n"
        "def target():\n    return lambda x: jnp.tanh(x @ x), (x,)\n"
    )
    cluster = on(thin_cluster((1.0,) * 8), AXES)[1]
    cluster.save(tmp_path / "cluster.toml")
    model, plan = str(tmp_path / "model.py"), str(tmp_path / "plan.json")
    assert main(["search", model, "--cluster", str(tmp_path / "cluster.toml"), "--plan", plan]) == 0
    assert main(["run", model, "--plan", plan]) == 0
    assert "check passed" in capsys.readouterr().out
    assert main(["explain", plan, model, "--cost"]) == 0
    assert hapsynth.Cluster.load(tmp_path / "cluster.toml").axes == AXES


# ---- four axes, and more than there can be


def test_four_axes() -> None:
    axes = (("pod", 1), ("a", 2), ("b", 2), ("c", 1), ("d", 2))
    fn = lambda x: jnp.tanh(x)
    plan = planned(fn, (floats(2, 2, 2),), strategies.gpus([1e-6] * 8, bandwidth=1e6), axes)
    assert plan.program.axes == (("a", 2), ("b", 2), ("d", 2)), "those longer than 1"
    mesh = replace(thin_cluster([1.0] * 16), axes=tuple((n, 2) for n in "abcd"))
    small = hapsynth.synthesize(fn, (strategies.shape(2, 2, 2, 2),), mesh)
    assert len(small.program.axes) == 4
    assert sorted(next(iter(small.layouts.values())).split(",")) == ["S(0)", "S(1)", "S(2)", "S(3)"]
    with pytest.raises(ClusterError, match=r"5 mesh axes .* along 4 at most; make one of those"):
        mesh_axes(replace(thin_cluster([1.0] * 32), axes=tuple((n, 2) for n in "abcde")))


# ---- orders of axes


def test_each_axis_has_one_that_cuts_after_it() -> None:
    assert orders((0, 1), 2) == ((0, 1), (1, 0))
    assert [orders(axes, 3) for axes in ((0, 1), (0, 2), (1, 2))] == [((1, 0),), ((0, 2),), ((2, 1),)]
    assert orders((0, 1, 2), 3) == ((0, 2, 1), (1, 0, 2), (2, 1, 0))
    assert orders((0, 2), 4) == ()


def test_a_fixed_layout_in_another_order_is_refused() -> None:
    x = strategies.shape(16, 16)
    mesh = on(thin_cluster((1.0,) * 8), AXES)[1]
    with pytest.raises(ValueError, match=r"give dimension 0 as one of S\(0\)/1,S\(0\),R"):
        hapsynth.synthesize(lambda x: x * 2, (x,), mesh, fixed={"[0]": "S(0),S(0)/1,R"})
    plan = hapsynth.synthesize(lambda x: x * 2, (x,), mesh, fixed={"[0]": "S(0)/1,S(0),R"})
    assert plan.layouts == {"[0]": "S(0)/1,S(0),R"}


def test_a_fixed_layout_that_cuts_twice_alike_is_refused() -> None:
    x, cluster = strategies.shape(16, 16), on(thin_cluster((1.0,) * 8), AXES)[1]
    with pytest.raises(
        ValueError, match=r"S\(<dim>\)/1 for the axis that cuts a dimension again, e\.g\. S\(0\)/1,S\(0\),R"
    ):
        hapsynth.synthesize(lambda x: x * 2, (x,), cluster, fixed={"[0]": "S(0),S(0),R"})


def test_a_fixed_layout_is_along_the_axes_longer_than_one() -> None:
    x, axes = strategies.shape(16, 16), (("data", 2), ("one", 1), ("tensor", 2))
    cluster = on(thin_cluster((1.0,) * 4), axes)[1]
    with pytest.raises(ValueError, match=r"for each of the 2 mesh axes longer than 1, e\.g\. S\(0\),R"):
        hapsynth.synthesize(lambda x: x * 2, (x,), cluster, fixed={"[0]": "S(0),R,S(1)"})
    assert hapsynth.synthesize(lambda x: x * 2, (x,), cluster, fixed={"[0]": "S(0),S(1)"}).layouts["[0]"] == "S(0),S(1)"
    flat = on(thin_cluster((1.0,) * 2), (("one", 1), ("tensor", 2)))[1]
    with pytest.raises(ValueError, match=r"S\(<dim>\); 2 are given for the mesh axes, of which 1 is longer than 1"):
        hapsynth.synthesize(lambda x: x * 2, (x,), flat, fixed={"[0]": "R,S(0)"})


def test_shards_that_do_not_nest_are_refused() -> None:
    """Those of the first axis, cut again by the second here and by the third there."""
    traced = trace(lambda x: x * 2, (floats(8, 8),))
    (x,) = traced.graph.inputs
    steps = [parse_layout(text) for text in ("S(0),S(0)/1,R", "S(0),R,R", "S(0),R,S(0)/1")]
    program = Program(AXES, {x: steps[0]}, (Convert(x, 1, *steps[:2]), Convert(x, 2, *steps[1:])), (None,))
    with pytest.raises(ProgramError, match="is cut alike along the mesh axes"):
        Classes.build(traced.graph, program)
