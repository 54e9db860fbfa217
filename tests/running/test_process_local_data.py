"""What a process holds of an argument, and arguments placed from just that."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from random_plans import assert_same, floats, make_plan, step, step_args
from slow_devices import first_devices

from hapsynth.instructions.layout import R, S
from hapsynth.lower import Storage
from hapsynth.lower._exact_storage import ExactStorage
from hapsynth.plan import Plan
from hapsynth.running.process_local_data import ProcessLocalLoader, local_slices
from hapsynth.running.sharded_array import ShardedArray


def storage_of(lengths: tuple[int, ...], layout: Any, cuts: Any, shape: tuple[int, ...] = (6, 2)) -> Storage:
    devices = np.array(jax.devices()[: np.prod(lengths)]).reshape(lengths)
    mesh = Mesh(devices, tuple("ab"[: len(lengths)]), axis_types=(AxisType.Auto,) * len(lengths))
    return Storage(shape, np.dtype(np.float32), False, layout, cuts, mesh)


# ---- local_slices

# Where each device's rows and columns begin and end.
CASES: dict[str, Any] = {
    "even": (((2,), (S(0),), {0: ((0,), (3, 3))}), [(0, 3, 0, 2), (3, 6, 0, 2)]),
    "uneven, one empty": (((3,), (S(0),), {0: ((0,), (4, 0, 2))}), [(0, 4, 0, 2), (4, 4, 0, 2), (4, 6, 0, 2)]),
    "replicated": (((2,), (R,), {}), [(0, 6, 0, 2), (0, 6, 0, 2)]),
    "replicated along one of two axes": (
        ((2, 2), (R, S(1)), {1: ((1,), (0, 2))}),
        [(0, 6, 0, 0), (0, 6, 0, 2)] * 2,
    ),
    "rows by one axis, columns by the other": (
        ((2, 2), (S(1), S(0)), {0: ((1,), (5, 1)), 1: ((0,), (1, 1))}),
        [(0, 5, 0, 1), (5, 6, 0, 1), (0, 5, 1, 2), (5, 6, 1, 2)],
    ),
    "rows by both axes": (
        ((2, 2), (S(0, 1), S(0)), {0: ((1, 0), (2, 1, 0, 3))}),
        [(0, 2, 0, 2), (3, 3, 0, 2), (2, 3, 0, 2), (3, 6, 0, 2)],
    ),
}


@pytest.mark.parametrize(("storage", "bounds"), CASES.values(), ids=CASES)
def test_slices_of_every_device(storage: Any, bounds: list[tuple[int, ...]]) -> None:
    made = storage_of(*storage)
    found = local_slices("[0]", made)
    assert list(found.devices) == list(made.mesh.devices.flat)
    assert [(r.start, r.stop, c.start, c.stop) for r, c in found.devices.values()] == bounds
    # One process has all devices.
    assert found.process == (slice(0, 6), slice(0, 2))


def test_a_process_whose_devices_are_no_neighbours_is_told_so() -> None:
    found = local_slices("[1]['x']", storage_of((4,), (S(0),), {0: ((0,), (2, 1, 1, 2))}))
    devices = list(found.devices)
    some = lambda *chosen: type(found)(found.path, found.shape, {devices[i]: found.devices[devices[i]] for i in chosen})
    assert some(1, 2).process == (slice(2, 4), slice(0, 2))
    with pytest.raises(ValueError, match=re.escape("[0:2, 0:2], [3:4, 0:2] of [1]['x']")):
        _ = some(0, 2).process


# ---- feeding

BATCH = floats(7, 6)


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = make_plan(step, step_args())
    assert any(not s.is_even for s in made.lowered.inputs)
    return made


def test_an_argument_is_named_by_position_keyword_or_path(plan: Plan) -> None:
    state = plan.local_slices(0)
    assert jax.tree.structure(state) == jax.tree.structure(step_args()[0])
    assert plan.local_slices("[0]['m']['w']") == state["m"]["w"]
    assert plan.local_slices(1).shape == (7, 6)
    with pytest.raises(ValueError, match=re.escape("'batch' is no argument of the function and no leaf of one")):
        plan.local_slices("batch")
    wanted: Any = [0]
    with pytest.raises(TypeError, match="give a position"):
        plan.local_slices(wanted)
    named = make_plan(lambda x, *, scale: x * scale, (BATCH,), {"scale": floats(6)}, seed=1)
    assert named.local_slices("scale").path == "['scale']"


@pytest.mark.parametrize("seed", range(2))
def test_a_callback_gives_each_part_once(seed: int) -> None:
    args = step_args()
    plan = make_plan(step, args, seed=seed)
    whole = dict(zip(plan.layouts, jax.tree.leaves(args)))
    asked: list[tuple[str, str]] = []

    def read(path: str, slices: tuple[slice, ...]) -> Any:
        asked.append((path, str(slices)))
        assert all(s.start < s.stop for s in slices)
        return whole[path][slices]

    placed = plan.shard_from_callback(read, 0), plan.shard_from_callback(read, 1)
    assert len(set(asked)) == len(asked)
    assert {path for path, _ in asked} == set(plan.layouts)
    for got, want in zip(jax.tree.leaves(placed), jax.tree.leaves(plan.shard(*args))):
        assert type(got) is type(want)
        assert got.sharding == want.sharding
    assert_same(plan(*placed), jax.jit(step)(*args), plan)
    assert plan.lowered.traces == 1


def test_process_local_data(plan: Plan) -> None:
    state, batch = plan.shard_from_process_local_data(step_args()[0], 0), plan.shard_from_process_local_data(BATCH, 1)
    assert_same(plan(state, batch), jax.jit(step)(*step_args()), plan)


def test_a_part_of_a_larger_whole(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has only the devices 1 and 2."""
    storage = storage_of((4,), (S(0),), {0: ((0,), (2, 1, 1, 2))})
    due = slice(2, 4), slice(0, 2)
    found = local_slices("[1]", storage)
    mine = type(found)(found.path, found.shape, {d: found.devices[d] for d in list(found.devices)[1:3]})
    monkeypatch.setattr("hapsynth.running.process_local_data.local_slices", lambda path, storage: mine)
    read: list[Any] = []

    class Here(Storage):
        def put_shards(self, read_shard: Any) -> Any:
            read.extend(read_shard(s).tolist() for s in mine.devices.values())
            return super().put_shards(lambda s: np.zeros([p.stop - p.start for p in s], np.float32))

    here = Here(storage.shape, storage.dtype, False, storage.layout, storage.cuts, storage.mesh)
    one = make_plan(lambda x, y: y * 2, (floats(1), floats(6, 2)))
    feeder = ProcessLocalLoader(one.arguments, one.lowered, 1)
    monkeypatch.setattr(one.lowered, "inputs", (one.lowered.inputs[0], here))
    value = np.arange(12, dtype=np.float32).reshape(6, 2)
    feeder.from_process(value[due])
    assert read == [value[2:3].tolist(), value[3:4].tolist()]
    with pytest.raises(ValueError, match=re.escape("shape (6, 2) was given for [2:4, 0:2] of [1], float32[6, 2]")):
        feeder.from_process(value)


def test_keys_static_leaves_and_weak_types() -> None:
    def fn(state: Any) -> Any:
        return state["x"] * state["rate"] + jax.random.normal(state["key"], (5, 3)), state["name"]

    state = {"x": floats(5, 3), "rate": 0.5, "key": jax.random.key(3), "name": "run"}
    plan = make_plan(fn, (state,), seed=1)
    whole = {f"[0][{name!r}]": x for name, x in state.items()}
    # An array has no weak type; a number is one.
    cut = lambda path, s: whole[path] if path == "[0]['rate']" else whole[path][s]
    want = plan(plan.shard(state))[0]
    for placed in (plan.shard_from_callback(cut, 0), plan.shard_from_process_local_data(state, 0)):
        assert placed["name"] == "run"
        np.testing.assert_array_equal(plan.unshard(plan(placed)[0]), plan.unshard(want))
    with pytest.raises(ValueError, match=re.escape("[0]['name'] is 'other'")):
        plan.shard_from_process_local_data({**state, "name": "other"}, 0)


BAD: dict[str, Any] = {
    "shape": (
        lambda p, s: np.zeros((9, 6), np.float32),
        ValueError,
        r"\(9, 6\) was given for \[0:.* of \[1\]",
    ),
    "dtype": (lambda p, s: BATCH[s].astype(np.int32), TypeError, r"int32 was given for \[0:.* of \[1\]"),
    "no array": (lambda p, s: "rows", TypeError, r"\[1\] is 'rows'"),
    "its own error": (lambda p, s: {}[p], KeyError, r"\[1\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_callback_that_gives_something_else(plan: Plan, name: str) -> None:
    callback, error, text = BAD[name]
    with pytest.raises(error, match=text):
        plan.shard_from_callback(callback, 1)


def test_another_structure_is_refused_before_anything_is_placed(plan: Plan) -> None:
    with pytest.raises(TypeError, match=re.escape("the plan has \"[0]['m']['b']\", which is missing")):
        plan.shard_from_process_local_data({"p": step_args()[0]["p"], "m": {"w": floats(6, 5)}}, 0)
    with pytest.raises(TypeError, match="int32 was given for"):
        plan.shard_from_process_local_data(jnp.zeros((7, 6), jnp.int32), 1)


def test_uneven_leaves_are_sharded_arrays(plan: Plan) -> None:
    placed = plan.shard_from_process_local_data(step_args()[0], 0)
    kinds = [isinstance(x, ShardedArray) for x in jax.tree.leaves(placed)]
    assert kinds == [isinstance(x, ShardedArray) for x in jax.tree.leaves(plan.shard(step_args()[0]))]


@pytest.mark.parametrize("kind", [Storage, ExactStorage])
@pytest.mark.parametrize("lengths", [(8, 8), (12, 4)])
def test_what_is_stored_shares_no_memory_with_an_aligned_array(kind: type[Storage], lengths: tuple[int, ...]) -> None:
    held = np.zeros(16 * 16 * 4 + 64, np.uint8)
    start = -held.ctypes.data % 64
    x = held[start : start + 1024].view(np.float32).reshape(16, 16)
    storage = kind((16, 16), np.dtype("float32"), False, (S(0),), {0: ((0,), lengths)}, first_devices(2))
    stored = storage.put(x, copy=True)
    x[:] = 1
    assert not np.asarray(storage.fetch(stored)).any()
