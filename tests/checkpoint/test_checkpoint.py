"""State on disk: restored bit for bit by any plan, whole whatever happens to the process that saves it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_jobs import KILLS, values
from checkpoint_states import BATCH, ON, kinds, logical, payload, plan_on
from random_plans import floats, make_plan, step, step_args
from slow_devices import first_devices, thin_cluster

import hapsynth
from hapsynth import checkpoint
from hapsynth.checkpoint import manifest, writer
from hapsynth.checkpoint.manifest import Leaf, Manifest
from hapsynth.checkpoint.reader import Reader
from hapsynth.plan import Plan
from hapsynth.running.sharded_array import ShardedArray

ROOT = Path(__file__).parents[2]


# ---- from one cluster to another


def train(state: Any, x: Any) -> Any:
    """Its input is noisy, its momentum in bfloat16 besides."""
    key, now = jax.random.split(state["key"])
    noisy = x + 0.01 * jax.random.normal(now, x.shape)
    value, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(noisy @ w["a"]) @ w["b"] - 1) ** 2))(state["w"])
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    w = jax.tree.map(lambda w, m: w - 0.05 * m, state["w"], m)
    half = jax.tree.map(lambda m: m.astype(jnp.bfloat16), m)
    return {"w": w, "m": m, "half": half, "key": key, "n": state["n"] + 1}, value


def beginning() -> Any:
    w = {"a": floats(24, 36) / 5, "b": floats(36, 7) / 6}
    m = jax.tree.map(np.zeros_like, w)
    half = jax.tree.map(lambda m: m.astype(ml_dtypes.bfloat16), m)
    return {"w": w, "m": m, "half": half, "key": jax.random.key(1), "n": np.int32(0)}


ROW: dict[str, Any] = {
    "uneven 4": ((3.0, 2.0, 1.0, 1.0), "staged"),
    "even 2": ((1.0, 1.0), "switch"),
    "one device": ((1.0,), "switch"),
    "uneven 8": ((3.0, 1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 1.0), "switch"),
}


def test_training_goes_on_with_other_devices(tmp_path: Path) -> None:
    batches = np.random.default_rng(5).normal(size=(5 * len(ROW), 48, 24)).astype(np.float32)
    want, alone = beginning(), jax.jit(train)
    uneven, saved = dict[str, bool](), ""
    for batch, (name, (speeds, form)) in zip(batches.reshape(len(ROW), 5, 48, 24), ROW.items()):
        fixed = {"[0]['w']['a']": "S(0)", "[0]['half']['b']": "S(0)"}
        plan = hapsynth.synthesize(
            train,
            (beginning(), batch[0]),
            first_devices(len(speeds)),
            cluster=thin_cluster(speeds),
            fixed=fixed,
            leave_out=False,
            form=form,
        )
        state = plan.restore_state(tmp_path) if saved else plan.shard(beginning())
        assert not saved or logical(plan, state) == saved
        uneven[name] = any(isinstance(x, ShardedArray) for x in jax.tree.leaves(state))
        for x in batch:
            state, loss = plan(state, plan.shard_from_callback(lambda _, s, x=x: x[s], 1))
            want, due = alone(want, x)
            assert abs(float(loss) - float(due)) < 1e-4
        plan.save_state(tmp_path, state)
        saved = logical(plan, state)
    assert uneven == {name: name.startswith("uneven") for name in ROW}
    assert int(plan.unshard(state)["n"]) == 20


# ---- what is on disk


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: plan_on(name) for name in ON}


def test_every_kind_of_leaf_comes_back_bit_for_bit(plans: dict[str, Plan], tmp_path: Path) -> None:
    """From each plan to the next one; each leaf in many pieces."""
    first = plans["4 skewed"].shard(kinds(), BATCH)[0]
    want = logical(plans["4 skewed"], first)
    state, cut = first, set[bool]()
    for plan, after in zip(plans.values(), [*list(plans.values())[1:], plans["4 skewed"]]):
        cut |= {isinstance(x, ShardedArray) for x in jax.tree.leaves(state)}
        checkpoint.save_state(tmp_path, plan.arguments, plan.lowered, state, 0, chunk_bytes=40)
        state = after.restore_state(tmp_path)
        assert logical(after, state) == want
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(after.shard(kinds(), BATCH)[0])):
            assert type(x) is type(y)
            assert x is y or x.sharding.is_equivalent_to(y.sharding, x.ndim)
            assert getattr(x, "weak_type", False) == getattr(y, "weak_type", False)
        if after.form == "switch":  # a compiled stage takes no int4 from the host (JAX 0.10)
            after(after.restore_state(tmp_path), BATCH)
            assert after.lowered.traces == 1
    assert cut == {True, False}


def test_what_is_saved_is_the_same_whatever_plan_saved_it(plans: dict[str, Plan], tmp_path: Path) -> None:
    """Byte for byte, but for the folder's name, which no two saves share."""
    for i, plan in enumerate(plans.values()):
        plan.save_state(tmp_path / str(i), plan.shard(kinds(), BATCH)[0])
    first, *others = map(Reader, sorted(tmp_path.iterdir()))
    for other in others:
        assert other.leaves == first.leaves
        assert payload(other.path).read_bytes() == payload(first.path).read_bytes()


def test_a_checkpoint_is_read_without_a_plan(plans: dict[str, Plan], tmp_path: Path) -> None:
    state, plan = kinds(), plans["8 skewed"]
    plan.save_state(tmp_path, plan.shard(state, BATCH)[0])
    found = hapsynth.load_state(tmp_path)
    want = {f"[{k!r}]": x for k, x in state.items() if k != "name"}
    assert found.keys() == want.keys()
    for path, x in want.items():
        x = jax.random.key_data(x) if path in ("['key']", "['keys']") else x
        assert type(found[path]) is np.ndarray
        assert found[path].tobytes() == np.asarray(x, found[path].dtype).tobytes()
        assert found[path].shape == np.shape(x)
    # Nor with hapsynth: the files are what their list says.
    listed = json.loads((tmp_path / "hapsynth-state.json").read_text())
    leaf = next(x for x in listed["leaves"] if x["path"] == "['x']")
    whole = np.zeros(leaf["shape"], leaf["dtype"])
    for p in leaf["pieces"]:
        cut = tuple(slice(*pair) for pair in p["box"])
        data = np.fromfile(tmp_path / listed["folder"] / p["file"], leaf["dtype"], whole[cut].size, offset=p["offset"])
        whole[cut] = data.reshape(whole[cut].shape)
    assert whole.tobytes() == state["x"].tobytes()
    assert {"path": "['name']", "type": "str", "value": "run"} in listed["leaves"]


def test_no_elements_and_no_arrays(tmp_path: Path) -> None:
    """Not run: XLA of JAX 0.11.2 crashes on arrays without elements."""
    state = {"none": np.zeros((0, 3), np.float32), "keys": jax.random.split(jax.random.key(0), 0), "tag": "run"}
    for i, given in enumerate((state, {"tag": "run"}, {})):
        plan = make_plan(lambda s, x: (s, x * 2), (given, BATCH))
        plan.save_state(tmp_path / str(i), plan.shard(given, BATCH)[0])
        back = plan.restore_state(tmp_path / str(i))
        assert logical(plan, back) == logical(plan, given)
        found = hapsynth.load_state(tmp_path / str(i))
        assert [x.shape for x in found.values()] == [(0, 2), (0, 3)][: len(given) - 1 if given else 0]


def test_another_argument_and_a_single_leaf(tmp_path: Path) -> None:
    plan = make_plan(step, step_args())
    state, batch = plan.shard(*step_args())
    plan.save_state(tmp_path / "batch", batch, 1)
    plan.save_state(tmp_path / "leaf", state["m"]["w"], "[0]['m']['w']")
    assert logical(plan, plan.restore_state(tmp_path / "batch", arg=1)) == logical(plan, batch)
    other = make_plan(step, step_args(), n=2, seed=3)
    assert logical(other, other.restore_state(tmp_path / "leaf", arg="[0]['p']['w']")) == logical(plan, state["m"]["w"])


# ---- who writes and reads what


def test_each_element_is_written_by_one_process() -> None:
    shapes = [(40, 6), (31,), (), (5, 4, 7), (0, 3)]
    whole = lambda shape: tuple((0, n) for n in shape)
    leaves = [Leaf(str(i), shape, "float32") for i, shape in enumerate(shapes)]
    everywhere = [{whole(s): [0, 1, 2]} if 0 not in s else {} for s in shapes]
    halves = [{((0, 13), (0, 6)): [0], ((13, 40), (0, 6)): [1, 2]}, *everywhere[1:]]
    for holders in (everywhere, halves):
        ends, bytes_of = dict[str, int](), dict[str, int]()
        for leaf, held in zip(writer.shared_out(leaves, holders, 100), holders):
            times = np.zeros(leaf.shape, int)
            for p in leaf.pieces:
                times[tuple(slice(*pair) for pair in p.box)] += 1
                assert leaf.nbytes(p.box) <= 100
                # Nothing but its own, one after the other.
                assert all(int(p.file[0]) in ranks for box, ranks in held.items() if manifest.common(p.box, box))
                assert p.offset == ends.get(p.file, 0)
                ends[p.file] = p.offset + leaf.nbytes(p.box)
                bytes_of[p.file] = bytes_of.get(p.file, 0) + leaf.nbytes(p.box)
            assert (times == 1).all()
        assert max(bytes_of.values()) - min(bytes_of.values()) <= 100


def test_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = floats(64, 48)
    boxes = [((a, a + 16), (0, 48)) for a in range(0, 64, 16)]
    made = Manifest("test", "", (Leaf("x", x.shape, "float32"),))
    fetch = lambda _, box: x[tuple(slice(*pair) for pair in box)]
    writer.save(tmp_path, made, [{box: [0] for box in boxes}], fetch, 0, lambda work: [work()], 256)
    read: list[int] = []
    once = Reader._read

    def counted(self: Reader, number: int, n: int) -> np.ndarray:
        read.append((made := once(self, number, n)).nbytes)
        return made

    monkeypatch.setattr(Reader, "_read", counted)
    for rows, columns in product(((0, 16), (5, 9), (30, 60)), ((0, 48), (24, 36), (7, 8))):
        read.clear()
        got = Reader(tmp_path).read(0, (rows, columns))
        assert (got == x[slice(*rows), slice(*columns)]).all()
        # Pieces of 8 x 6: at the box's sides they reach beyond it.
        assert sum(read) <= 4 * (rows[1] - rows[0] + 14) * (columns[1] - columns[0] + 10)
    assert Reader(tmp_path).read(0, ((0, 64), (0, 48))).tobytes() == x.tobytes()


def run_jobs(what: str, folder: Path) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    run = [sys.executable, ROOT / "tests" / "support" / "checkpoint_jobs.py", what, folder]
    done = subprocess.run(run, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_killed_save_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    found = json.loads(run_jobs("kills", tmp_path))
    old, new, broken_off = found["random"]
    assert broken_off == KILLS <= old + new
    steps = found["steps"]
    rename = [event for event, _ in steps].index("os.rename")
    assert [is_new for _, is_new in steps] == [0] * (rename + 1) + [1] * (len(steps) - rename - 1)
    before, after = ([event for event, _ in part] for part in (steps[:rename], steps[rename + 1 :]))
    assert before.count("fsync") == 5
    assert {"os.remove", "os.rmdir"} <= set(after)
    assert "its first save was broken off" in found["first"]


@pytest.mark.slow
def test_two_processes_write_and_read_their_parts(tmp_path: Path) -> None:
    said = run_jobs("processes", tmp_path)
    assert said.count("right") == 2, said
    # Of 2372 bytes each writes its rows, 3 : 1, and of what both hold the one that has less.
    assert "wrote 1776 596" in said
    refused = re.findall(r"refused \d (.*)", said)
    assert len(refused) == 2
    assert len(set(refused)) == 1
    assert re.search(
        r"elsewhere/state-\w+ is not there, .*on a file system that all of them share.*process 1", refused[0]
    )
    for folder in ("two", "again", "off"):
        found = hapsynth.load_state(tmp_path / folder)
        assert len(list((tmp_path / folder).iterdir())) == 2
        for name, x in values().items():
            x = jax.random.key_data(x) if name == "key" else x
            assert found[f"[{name!r}]"].tobytes() == np.asarray(x).tobytes()
