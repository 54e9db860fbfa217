"""What `jax.jit` accepts, a plan accepts, with the same results: on devices of unlike speed, some of them empty."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from slow_devices import SPEEDS, first_devices, slow_cluster

import hapsynth
from hapsynth.check import relative_error
from hapsynth.plan import Plan
from hapsynth.sharded_array import ShardedArray

rng = np.random.default_rng(0)
floats = lambda *shape: rng.normal(size=shape).astype(np.float32)


@pytest.fixture(autouse=True)
def thin_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny contractions are worth cutting too, as if they had no tiles."""
    monkeypatch.setattr("hapsynth.search.costs.TILE", 1)


def planned(fn: Callable[..., Any], args: Any, kwargs: Any = None, *, on: str = "3:1", **options: Any) -> Plan:
    speeds = SPEEDS[on]
    mesh = options.pop("mesh", None) or first_devices(len(speeds))
    cluster = options.pop("cluster", None) or slow_cluster(speeds)
    return hapsynth.synthesize(fn, args, mesh, example_kwargs=kwargs, cluster=cluster, **options)


def assert_same(got: Any, want: Any, plan: Plan, rtol: float = 1e-5) -> None:
    """Same tree, shapes, dtypes, weak types and values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not isinstance(b, (jax.Array, np.ndarray)):
            assert a is b or a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)
        a, b = plan.unshard(a), plan.unshard(b)
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert relative_error(np.asarray(a), np.asarray(b)) <= rtol


class Point(NamedTuple):
    x: Any
    y: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["inner", "total"], meta_fields=["name"])
@dataclass
class Box:
    inner: Any
    total: Any
    name: str


@jax.custom_jvp
def halved(x: Any) -> Any:
    """Its derivative is not the one that JAX would find."""
    return x / 2


halved.defjvp(lambda primals, tangents: (halved(*primals), 7 * tangents[0]))


@jax.custom_vjp
def squared(x: Any) -> Any:
    return x * x


squared.defvjp(lambda x: (x * x, x), lambda x, g: (5 * x * g,))


def remat_loss(params: Any, x: Any) -> Any:
    layer = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))

    def loss(p: Any) -> Any:
        h = x
        for w in p:
            h = layer(h, w)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def grouped(x: Any, k: Any) -> Any:
    """Each group of channels by itself, and its gradient, a convolution of groups of the batch."""

    def loss(k: Any) -> Any:
        names = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=names, feature_group_count=3)
        return jnp.sum(y**2)

    return jax.value_and_grad(loss)(k)


def custom(x: Any, w: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(halved(x @ w)) + jnp.sum(squared(x * w[0])))(w)


def loops(x: Any, w: Any) -> Any:
    final, trail = lax.scan(lambda c, row: (jnp.tanh(c + row @ w), c.sum()), jnp.zeros(w.shape[1]), x)
    n, _ = lax.while_loop(lambda s: s[1] < 50.0, lambda s: (s[0] + 1, s[1] * 2), (0, 1.0 + jnp.abs(x).sum() * 0))
    return final, trail, n, lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), lax.map(lambda row: row * 2, x)


def loops_gradient(x: Any, w: Any) -> Any:
    def loss(w: Any) -> Any:
        return lax.scan(lambda c, row: (jnp.tanh(c + row @ w), None), jnp.zeros(w.shape[1]), x)[0].sum()

    return jax.value_and_grad(loss)(w)


def random_numbers(key: Any, raw: Any, x: Any) -> Any:
    new, use = jax.random.split(key)
    keep = jax.random.bernoulli(use, 0.5, x.shape)
    noise = jax.random.normal(raw, x.shape)
    return new, jax.random.key_data(key), jax.random.split(raw, 3), jnp.where(keep, x, 0) + noise


TABLE = np.linspace(-1, 1, 300 * 40).reshape(300, 40).astype(np.float32)
SAME = floats(24, 6)

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "gather": (lambda t, i: (t[i], jnp.take_along_axis(t, i[:, None], 1)), (floats(24, 24), np.arange(24)[::-1]), {}),
    "gather and its gradient": (jax.grad(lambda t, i: jnp.sum(t[i] ** 2)), (floats(29, 8), np.arange(40) % 29), {}),
    "argmax": (lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0), x.argmax()), (floats(27, 9),), {}),
    "grouped convolution": (grouped, (floats(13, 5, 5, 6), floats(3, 3, 2, 9)), {}),
    "sort, top-k, cumsum": (lambda x: (jnp.sort(x, 1), lax.top_k(x, 2), jnp.cumsum(x, 1)), (floats(25, 6),), {}),
    "fewer rows than devices": (lambda x, w: jnp.tanh(x @ w), (floats(3, 40), floats(40, 2)), {}),
    "scalars only": (lambda x, y: (x * y + 1, jnp.sin(x)), (np.float32(2), np.float32(3)), {}),
    "zero-dimensional state": (lambda s, x: (s * 0.9 + x.sum(), x * s), (np.float32(2), floats(30)), {}),
    "integers and bools": (
        lambda i, b: (i.sum(0), (i > 2) & b, jnp.where(b, i, -i), b.any(), b.all(1), i.max(), i // 3, ~b, i % 5),
        (rng.integers(-9, 9, (31, 5), np.int32), rng.random((31, 5)) < 0.5),
        {},
    ),
    "small integers": (
        lambda a, b: (a + a, b.sum(), a @ a.T),
        (floats(20, 4).astype(np.int8), np.arange(200, dtype=np.uint8)),
        {},
    ),
    "outputs that are inputs": (lambda a, b: (b, a, a, {"both": (a, b)}), (floats(24, 3), floats(24, 3)), {}),
    "an output twice": (lambda x: (lambda y: (y, y, [y.T]))(jnp.sin(x)), (floats(25, 3),), {}),
    "swapped state": (lambda s: {"a": s["b"] * 2, "b": s["a"]}, ({"a": floats(21, 4), "b": floats(21, 4)},), {}),
    "unused arguments": (lambda a, b, c: b.sum(), (floats(5), floats(26, 4), {"w": floats(3, 3)}), {}),
    "one array, two arguments": (lambda a, b: (a * 2 + b, a @ b.T), (SAME, SAME), {}),
    "one value, two operands": (lambda a: (a @ a.T, a * a, a + a, jnp.concatenate([a, a])), (floats(22, 5),), {}),
    "large constants": (lambda x: x @ TABLE + jnp.asarray(TABLE).sum(0), (floats(23, 300),), {}),
    "None and functions": (
        lambda x, o: {"y": o["f"](x) + (1 if o["none"] is None else 2), "none": None, "f": o["f"], "s": "text"},
        (floats(24, 4), {"f": jnp.tanh, "none": None, "name": "n"}),
        {},
    ),
    "keywords": (lambda x, *, scale, shift: x * scale + shift, (floats(24, 4),), {"shift": floats(4), "scale": 2.0}),
    "weak types": (lambda n, r, z, x: (n + 1, r * x, z * 2, x + n, r), (2, 0.5, 1j, floats(24, 3)), {}),
    "keys": (random_numbers, (jax.random.key(3), jax.random.PRNGKey(5), floats(25, 4)), {}),
    "loops": (loops, (floats(24, 6), floats(6, 6)), {}),
    "gradient of a loop": (loops_gradient, (floats(24, 6), floats(6, 6)), {}),
    "remat": (remat_loss, ([floats(8, 8) for _ in range(3)], floats(33, 8)), {}),
    "custom derivatives": (custom, (floats(26, 5), floats(5, 5)), {}),
    "nested outputs": (
        lambda x: {"p": Point(x + 1, [x.sum(), None]), "box": Box((x * 2, {}), jnp.mean(x), "name"), "empty": ()},
        (floats(24, 5),),
        {},
    ),
    "nested arguments": (
        lambda p, box: (Point(p.x * 2, p.y), Box(box.inner + 1, box.total, box.name)),
        (Point(floats(24), floats(3)), Box(floats(24, 2), np.float32(3), "name")),
        {},
    ),
    "bfloat16": (
        lambda x, w: (x @ w, jnp.sum(x.astype(jnp.float32), 0), x.max(1)),
        (floats(24, 8).astype(jnp.bfloat16), floats(8, 8).astype(jnp.bfloat16)),
        {},
    ),
    "complex": (lambda x: (jnp.abs(x), x @ x.conj().T, x.real.sum(0)), ((floats(24, 3) + 1j * floats(24, 3)),), {}),
    "empty arrays": (
        lambda x, y: (
            x * 2,
            x.sum(0),
            x @ y,
            jnp.concatenate([y, y], 1),
            y.sum(),
            x.reshape(3, 0),
            x.max(0, initial=-1),
        ),
        (np.zeros((0, 3), np.float32), floats(3, 26)),
        {},
    ),
    "an empty contraction": (lambda x: (x @ x.T, x.sum(1), jnp.tanh(x)), (np.zeros((24, 0), np.float32),), {}),
    "nothing but None": (lambda x: None, (floats(24),), {}),
    "literals": (lambda x: (1, 2.5, True, np.float32(3), jnp.zeros((24, 2)), jnp.arange(25), 1j, x), (floats(24),), {}),
    "constants": (lambda: (TABLE, jnp.ones(24) * 2, 3.0), (), {}),
    "fft and linear algebra": (
        lambda x: (jnp.fft.rfft(x).real, jnp.linalg.inv(x @ x.T + 9 * jnp.eye(24)), jnp.linalg.qr(x)[1]),
        (floats(24, 8),),
        {},
    ),
    "vmap of a vmap": (
        jax.vmap(jax.vmap(lambda a, b: jnp.outer(a, b).sum(0), (0, None)), (0, 0)),
        (floats(26, 3, 4), floats(26, 5)),
        {},
    ),
    "hessian": (jax.hessian(lambda x: jnp.sum(jnp.sin(x) * x[::-1])), (floats(24),), {}),
}

# Nothing to divide, or nothing that may be.
WHOLE = ("scalars only", "nothing but None")
# On the cluster with a hopeless device, that one gets an empty shard.
IDLE = ("gather", "gather and its gradient", "argmax", "grouped convolution", "remat", "sort, top-k, cumsum")


def reference(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What `jax.jit` returns; leaves that are no arrays, which it refuses, as the function gives them."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [x for x in leaves if isinstance(x, (np.ndarray, np.generic, jax.Array, int, float, complex))]
    other: dict[int, Any] = {}

    def flat(given: Any) -> Any:
        rest = iter(given)
        full = [next(rest) if any(x is a for a in arrays) else x for x in leaves]
        a, k = jax.tree.unflatten(tree, full)
        out, out_tree = jax.tree.flatten(fn(*a, **k))
        other.update({i: x for i, x in enumerate(out) if isinstance(x, str) or callable(x)})
        other["tree"] = out_tree
        return [None if i in other else x for i, x in enumerate(out)]

    made = jax.jit(flat)(arrays)
    return jax.tree.unflatten(other.pop("tree"), [other.get(i, x) for i, x in enumerate(made)])


@pytest.mark.parametrize("on", ["3:1", "hopeless"])
@pytest.mark.parametrize("name", CASES)
def test_same_as_jit(name: str, on: str) -> None:
    fn, args, kwargs = CASES[name]
    plan = planned(fn, args, kwargs, on=on)
    want = reference(fn, args, kwargs)
    rtol = 2e-2 if name == "bfloat16" else 1e-4 if "algebra" in name else 1e-5
    assert_same(plan(*args, **kwargs), want, plan, rtol)
    assert_same(plan(*args, **kwargs), want, plan, rtol)
    assert plan.lowered.traces == 1
    report = plan.check(*args, rtol=max(rtol, 1e-4), **kwargs)
    assert report.ok, report
    if on == "3:1" and name not in WHOLE:
        assert any(len(set(shares)) > 1 for shares in plan.sizes.shares), plan.sizes.shares
    if name in IDLE and on == "hopeless":
        assert any(shares[1] == 0 and sum(shares) > 3 for shares in plan.sizes.shares), plan.sizes.shares


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    """Planned without devices, loaded where they are: the same bits."""
    for name in ("remat", "keys", "nested arguments", "large constants", "keywords", "grouped convolution"):
        fn, args, kwargs = CASES[name]
        structs, struct_kwargs = jax.eval_shape(lambda *a: a, (args, kwargs))[0]
        speeds = SPEEDS["3:1"]
        abstract = hapsynth.synthesize(fn, structs, slow_cluster(speeds), example_kwargs=struct_kwargs)
        abstract.save(tmp_path / "plan.json")
        here = planned(fn, args, kwargs)
        mesh = first_devices(4)
        there = hapsynth.load(tmp_path / "plan.json", fn, structs, mesh, example_kwargs=struct_kwargs)
        assert there.sizes.shares == here.sizes.shares
        assert_same(there(*args, **kwargs), here.unshard(here(*args, **kwargs)), there, rtol=0.0)


def test_one_device() -> None:
    for name in ("remat", "argmax", "empty arrays", "keys"):
        fn, args, kwargs = CASES[name]
        plan = planned(fn, args, kwargs, on="one")
        out = plan(*args, **kwargs)
        assert not any(isinstance(x, ShardedArray) for x in jax.tree.leaves(out))
        assert_same(out, reference(fn, args, kwargs), plan)
        assert plan.program.collectives() == {}


@pytest.mark.parametrize(
    ("shape", "types", "devices"),
    [
        ((2, 4), (AxisType.Auto, AxisType.Explicit), slice(0, 8)),
        ((2, 4), (AxisType.Explicit, AxisType.Explicit), slice(0, 8)),
        ((8,), (AxisType.Explicit,), slice(0, 8)),
        ((4,), (AxisType.Auto,), slice(4, 8)),
        ((2, 2), (AxisType.Explicit, AxisType.Auto), slice(1, 8, 2)),
    ],
)
def test_meshes(shape: tuple[int, ...], types: tuple[AxisType, ...], devices: slice) -> None:
    chosen = np.array(jax.devices()[devices]).reshape(shape)
    mesh = Mesh(chosen, ("a", "b")[: len(shape)], axis_types=types)
    speeds = [3.0] * (chosen.size // 2) + [1.0] * (chosen.size // 2)
    fn, args, _ = CASES["remat"]
    want = jax.jit(fn)(*args)
    with jax.set_mesh(mesh):
        plan = planned(fn, args, mesh=mesh, cluster=slow_cluster(speeds))
    assert_same(plan(*args), want, plan)
    assert {d for x in jax.tree.leaves(plan(*args)) for d in x.sharding.device_set} <= set(chosen.flat)
    # Whatever the arguments lie on, and whatever mesh is in force.
    other = jax.make_mesh((4, 2), ("u", "v"), axis_types=(AxisType.Explicit,) * 2)
    weights = jax.device_put(args[0], NamedSharding(other, PartitionSpec("v", "u")))
    assert_same(plan(weights, jax.device_put(args[1], jax.devices()[6])), want, plan)
    for ambient in (mesh, other):
        with jax.set_mesh(ambient):
            placed = plan.shard(weights, args[1])
            assert_same(plan(*placed), want, plan)
            assert_same(plan(weights, placed[1]), want, plan)
            assert_same(plan(*plan.shard(*plan.shard(*args))), want, plan)
            assert plan.check(weights, args[1]).ok
    assert plan.lowered.traces == 1


def test_state_goes_round_and_is_consumed() -> None:
    fn, args, _ = CASES["remat"]
    plan = planned(fn, args)
    assert plan.traced.graph.carry == ((0, 0), (1, 1), (2, 2))
    state, batch = plan.shard(*args)
    expected = args[0]
    for _ in range(4):
        before = state
        state, loss = plan(state, batch)
        assert all(x.is_deleted() for x in before)
        expected, wanted = jax.jit(fn)(expected, args[1])
    assert_same((state, loss), (expected, wanted), plan)
    assert plan.lowered.traces == 1
    assert not batch.is_deleted()
    state, _ = plan(plan.unshard(state), batch)
    assert not any(x.is_deleted() for x in state)


def test_carry_by_hand() -> None:
    """The batch goes round, the weights stay: nothing that structure alone tells."""
    fn = lambda weights, batch: {"loss": jnp.sum(batch), "next": jnp.tanh(batch @ weights)}
    args = floats(6, 6), floats(26, 6)
    plan = planned(fn, args, carry=[("[1]", "['next']")])
    assert plan.layouts["[1]"] == plan.output_layouts["['next']"] == "S(0)"
    weights, batch = plan.shard(*args)
    out = plan(weights, batch)
    assert batch.is_deleted()
    assert not weights.is_deleted()
    assert_same(plan(weights, out["next"])["loss"], jnp.sum(jnp.tanh(args[1] @ args[0])), plan, 1e-4)
    free = planned(fn, args, carry=[])
    weights, batch = free.shard(*args)
    free(weights, batch)
    assert not batch.is_deleted()


def test_fixed_layouts() -> None:
    fn, args, _ = CASES["remat"]
    free = planned(fn, args)
    for layout in ("R", "S(0)", "S(1)"):
        plan = planned(fn, args, fixed={"[0][1]": layout, "[1]": "S(0)"})
        assert plan.layouts["[0][1]"] == plan.output_layouts["[0][1]"] == layout
        assert plan.cost >= free.cost * (1 - 1e-9)
        assert_same(plan(*args), jax.jit(fn)(*args), plan)
    same = planned(fn, args, fixed=free.layouts)
    assert same.layouts == free.layouts
    assert same.cost == pytest.approx(free.cost)


def test_memory_limit() -> None:
    fn = lambda x, w: jnp.tanh(x @ w)
    args = floats(40, 300), floats(300, 400)
    slow_network = slow_cluster(SPEEDS["3:1"], bandwidth=1e4)
    free = planned(fn, args, cluster=slow_network)
    limit = 0.5 * max(free.memory)
    plan = planned(fn, args, cluster=slow_network, memory_limit=limit)
    assert max(plan.memory) <= limit
    assert plan.cost >= free.cost * (1 - 1e-9)
    assert_same(plan(*args), jax.jit(fn)(*args), plan)


def test_time_budget_and_progress() -> None:
    fn, args, _ = CASES["remat"]
    told: list[Any] = []
    plan = planned(fn, args, time_budget_s=0.01, progress=told.append)
    assert plan.lower_bound <= plan.cost < np.inf
    assert told
    assert all(p.lower_bound_s <= p.cost_s for p in told)
    assert [p.seconds for p in told] == sorted(p.seconds for p in told)
    assert_same(plan(*args), jax.jit(fn)(*args), plan)


def test_what_has_no_rule_is_replicated_and_named() -> None:
    def report(name: str) -> tuple[str, ...]:
        fn, args, kwargs = CASES[name]
        return planned(fn, args, kwargs).result.replicated_primitives

    assert {"scan", "while", "cond"} <= set(report("loops"))
    assert {"random_bits", "random_wrap", "random_split"} & set(report("keys"))
    assert report("remat") == report("argmax") == ()


def test_x64() -> None:
    """In a process of its own, as the switch is global."""
    code = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
import test_awkward as t
x = np.random.default_rng(0).normal(size=(25, 6))
def fn(x, i, n, s):
    return x[i] * s, jnp.argmax(x, 0), n + 1, x.astype(np.float32) @ x.T, jnp.sum(x * x), i // 2, i.astype(np.int32)
args = x, np.arange(30) % 25, 3, 0.5
for on in ("3:1", "hopeless"):
    plan = t.planned(fn, args, on=on)
    t.assert_same(plan(*args), jax.jit(fn)(*args), plan, 1e-12)
    assert plan.check(*args, rtol=1e-12).ok and plan.check(rtol=1e-12).ok and plan.lowered.traces == 1
    assert plan(*args)[2].dtype == np.int64 and len(set(plan.sizes.shares[0])) > 1
"""
    folder = Path(__file__).parent
    out = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=folder, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
