"""State on disk: restored bit for bit by any plan, whole whatever happens to the process that saves it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_jobs import KILLS, values
from random_plans import floats, make_plan, step, step_args
from slow_devices import first_devices, slow_cluster

import hapsynth
from hapsynth import CheckpointError
from hapsynth.checkpoint import manifest, writer
from hapsynth.checkpoint.manifest import Leaf, Manifest
from hapsynth.checkpoint.reader import Reader
from hapsynth.plan import Form, Plan
from hapsynth.sharded_array import ShardedArray

ROOT = Path(__file__).parents[1]


def in_form(plan: Plan, form: Form) -> Plan:
    return Plan(plan.traced, plan.result, plan.cluster, plan.mesh, plan.fn, form=form)


def logical(plan: Plan, state: Any) -> str:
    """A hash of what a state is: every leaf's path, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_flatten_with_path(plan.unshard(state))[0]:
        said = f"{jax.tree_util.keystr(path)} {getattr(x, 'dtype', x)} {np.shape(x)}"
        x = jax.random.key_data(x) if jnp.issubdtype(getattr(x, "dtype", np.int8), jax.dtypes.prng_key) else x
        digest.update(said.encode() + (x.encode() if isinstance(x, str) else np.asarray(x).tobytes()))
    return digest.hexdigest()


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


def test_training_goes_on_with_other_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tiny contractions are worth cutting too.
    monkeypatch.setattr("hapsynth.search.costs.TILE", 1)
    batches = np.random.default_rng(5).normal(size=(5 * len(ROW), 48, 24)).astype(np.float32)
    want, alone = beginning(), jax.jit(train)
    uneven, saved = dict[str, bool](), ""
    for batch, (name, (speeds, form)) in zip(batches.reshape(len(ROW), 5, 48, 24), ROW.items()):
        fixed = {"[0]['w']['a']": "S(0)", "[0]['half']['b']": "S(0)"}
        plan = hapsynth.synthesize(
            train,
            (beginning(), batch[0]),
            first_devices(len(speeds)),
            cluster=slow_cluster(speeds),
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


def keep(state: Any, x: Any) -> Any:
    """State of every kind, some of which is computed with, so that it is cut."""
    out = {**state, "x": state["x"] * 2, "n": state["n"] + 1, "key": jax.random.split(state["key"])[0]}
    return out, (state["x"] @ x).sum() * state["rate"]


def kinds() -> Any:
    draw = np.random.default_rng(1)
    # All bits, so that there are NaNs with payloads.
    bits = lambda dtype, *shape: draw.integers(0, 1 << 16, shape, np.uint16).view(dtype).reshape(*shape, -1)[..., 0]
    return {
        "x": floats(13, 7),
        "bf16": bits(ml_dtypes.bfloat16, 37, 5),
        "f16": bits(np.float16, 12, 5),
        "f8": bits(ml_dtypes.float8_e4m3fn, 16, 3),
        "i4": np.arange(-8, 8).astype(ml_dtypes.int4).reshape(4, 4),
        "bool": np.array([True, False, True, True, False]),
        "complex": (floats(9, 2) + 1j).astype(np.complex64),
        "none": np.zeros((0, 3), np.float32),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 6),
        "n": np.int32(4),
        "rate": 0.5,
        "name": "run",
    }


BATCH = floats(7, 2)
ON: dict[str, Any] = {
    "4 skewed": {"n": 4, "seed": 0},
    "4 skewed, staged": {"n": 4, "seed": 1},
    "2 even": {"n": 2, "seed": 2, "mode": "even"},
    "1": {"n": 1, "seed": 3},
    "8 skewed": {"n": 8, "seed": 4},
    "8 skewed, staged": {"n": 8, "seed": 5},
}


def plan_on(name: str) -> Plan:
    plan = make_plan(keep, (kinds(), BATCH), **ON[name])
    return in_form(plan, "staged" if "staged" in name else "switch")


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: plan_on(name) for name in ON}


def test_every_kind_of_leaf_comes_back_bit_for_bit(
    plans: dict[str, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From each plan to the next one; each leaf in many pieces."""
    monkeypatch.setattr(writer, "CHUNK", 40)
    first = plans["4 skewed"].shard(kinds(), BATCH)[0]
    want = logical(plans["4 skewed"], first)
    state, cut = first, set[bool]()
    for plan, after in zip(plans.values(), [*list(plans.values())[1:], plans["4 skewed"]]):
        cut |= {isinstance(x, ShardedArray) for x in jax.tree.leaves(state)}
        plan.save_state(tmp_path, state)
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


def test_another_argument_and_a_single_leaf(tmp_path: Path) -> None:
    plan = make_plan(step, step_args())
    state, batch = plan.shard(*step_args())
    plan.save_state(tmp_path / "batch", batch, 1)
    plan.save_state(tmp_path / "leaf", state["m"]["w"], "[0]['m']['w']")
    assert logical(plan, plan.restore_state(tmp_path / "batch", arg=1)) == logical(plan, batch)
    other = make_plan(step, step_args(), n=2, seed=3)
    assert logical(other, other.restore_state(tmp_path / "leaf", arg="[0]['p']['w']")) == logical(plan, state["m"]["w"])


# ---- who writes and reads what


def test_each_element_is_written_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK", 100)
    shapes = [(40, 6), (31,), (), (5, 4, 7), (0, 3)]
    whole = lambda shape: tuple((0, n) for n in shape)
    leaves = [Leaf(str(i), shape, "float32") for i, shape in enumerate(shapes)]
    everywhere = [{whole(s): [0, 1, 2]} if 0 not in s else {} for s in shapes]
    halves = [{((0, 13), (0, 6)): [0], ((13, 40), (0, 6)): [1, 2]}, *everywhere[1:]]
    for holders in (everywhere, halves):
        ends, bytes_of = dict[str, int](), dict[str, int]()
        for leaf, held in zip(writer.shared_out(leaves, holders), holders):
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
    monkeypatch.setattr(writer, "CHUNK", 256)
    x = floats(64, 48)
    boxes = [((a, a + 16), (0, 48)) for a in range(0, 64, 16)]
    made = Manifest("test", "", (Leaf("x", x.shape, "float32"),))
    fetch = lambda _, box: x[tuple(slice(*pair) for pair in box)]
    writer.save(tmp_path, made, [{box: [0] for box in boxes}], fetch, 0, lambda work: [work()])
    read: list[int] = []
    once = Reader._read
    monkeypatch.setattr(
        Reader, "_read", lambda self, leaf, p: (read.append(leaf.nbytes(p.box)), once(self, leaf, p))[1]
    )
    for rows, columns in product(((0, 16), (5, 9), (30, 60)), ((0, 48), (24, 36), (7, 8))):
        read.clear()
        got = Reader(tmp_path).read(0, (rows, columns))
        assert (got == x[slice(*rows), slice(*columns)]).all()
        # Pieces of 8 x 6: at the box's sides they reach beyond it.
        assert sum(read) <= 4 * (rows[1] - rows[0] + 14) * (columns[1] - columns[0] + 10)
    assert Reader(tmp_path).read(0, ((0, 64), (0, 48))).tobytes() == x.tobytes()


def run_jobs(what: str, folder: Path) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    run = [sys.executable, ROOT / "tests" / "checkpoint_jobs.py", what, folder]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_killed_save_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    found = json.loads(run_jobs("kills", tmp_path))
    old, new, broken_off = found["random"]
    assert old + new == KILLS
    # They did fall into saving.
    assert broken_off > KILLS // 4
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


# ---- bad input


def tagged(state: Any, x: Any) -> Any:
    out, value = step({"p": state["p"], "m": state["m"]}, x)
    return {**out, **{k: state[k] for k in state if k not in out}}, value


def tagged_args(tag: Any = "run") -> Any:
    state, batch = step_args()
    return {**state, "tag": tag}, batch


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(tagged, tagged_args())


@pytest.fixture
def saved(plan: Plan, tmp_path: Path) -> Path:
    plan.save_state(tmp_path / "ck", plan.shard(*tagged_args())[0])
    return tmp_path / "ck"


def other(fn: Any = tagged, **changes: Any) -> Plan:
    """A plan of another model."""
    state, batch = tagged_args()
    return make_plan(fn, ({**state, **changes}, batch))


def half(state: Any, x: Any) -> Any:
    return state, x.sum()


OTHER: dict[str, Any] = {
    "shape": (
        {"fn": half, "p": {"w": floats(6, 9), "b": floats(5)}},
        r"\[0\]\['p'\]\['w'\] is float32\[6, 5\], and the plan is for float32\[6, 9\]",
    ),
    "dtype": (
        {"fn": half, "m": {"w": floats(6, 5), "b": np.zeros(5, ml_dtypes.bfloat16)}},
        r"\[0\]\['m'\]\['b'\] is float32\[5\], and the plan is for bfloat16\[5\]",
    ),
    "missing": ({"z": np.float32(0)}, r"\[0\]\['z'\], float32\[\], which the plan has, is missing"),
    "in between": (
        {"a": np.float32(0)},
        r"its leaf \"\['m'\]\['b'\]\" is float32\[5\], and the plan has \"\['a'\]\", float32\[\], in that place",
    ),
    "static": ({"tag": "other"}, r"\[0\]\['tag'\] is no array but 'run', and the plan is for no array but 'other'"),
    "key": (
        {"fn": half, "tag": jax.random.key(0)},
        r"\[0\]\['tag'\] is .* 'run', and the plan is for key<fry>\[\]",
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_the_checkpoint_of_another_model(name: str, saved: Path) -> None:
    changes, text = OTHER[name]
    with pytest.raises(CheckpointError, match=f"{re.escape(str(saved))}: {text}.*read it with hapsynth.load_state"):
        other(**changes).restore_state(saved)


def test_a_leaf_too_many(saved: Path) -> None:
    fewer = make_plan(step, step_args())
    with pytest.raises(CheckpointError, match=r"\"\['tag'\]\" of no array but 'run' is not in the plan's state"):
        fewer.restore_state(saved)


def edited(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Changes the manifest, whose checksum is made right again: what another program may have written."""

    def edit(folder: Path) -> None:
        file = folder / manifest.MANIFEST
        data = json.loads(file.read_text())
        change(data)
        data.pop("crc32")
        file.write_text(json.dumps({**data, "crc32": str(manifest._checksum(data))}))

    return edit


def payload(folder: Path) -> Path:
    return folder / manifest.read_manifest(folder).folder / "0.bin"


def rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "payload cut short": (
        lambda f: rewrite(payload(f), lambda b: b[:-1]),
        r"state-\w+/0.bin: is cut short: it has \d+ bytes, and \d+ are due; copy the checkpoint again",
    ),
    "payload missing": (lambda f: payload(f).unlink(), r"state-\w+/0.bin: No such file or directory; copy"),
    "one bit": (
        lambda f: rewrite(payload(f), lambda b: bytes([b[0] ^ 16]) + b[1:]),
        r"0.bin: bytes 0 to \d+, \[0:\d+\] of \['m'\]\['b'\], do not match their checksum: the file is damaged",
    ),
    "newer": (
        edited(lambda d: d.update(schema="hapsynth-state-2", hapsynth="9.1")),
        r"has format 2, written by hapsynth 9.1, and this version reads format 1: install that hapsynth",
    ),
    "manifest cut short": (
        lambda f: rewrite(f / manifest.MANIFEST, lambda b: b[:-20]),
        "hapsynth-state.json: is cut short or no JSON",
    ),
    "manifest changed": (
        lambda f: rewrite(f / manifest.MANIFEST, lambda b: b.replace(b'"offset": 0', b'"offset": 1')),
        "does not match its own checksum: it was edited or is damaged",
    ),
    "no manifest": (lambda f: (f / manifest.MANIFEST).unlink(), "holds no whole checkpoint: its first save was"),
    "something else": (
        lambda f: (f / manifest.MANIFEST).write_text("[1]"),
        "hapsynth-state.json: is no list of a state's leaves",
    ),
    "a file elsewhere": (
        edited(lambda d: d["leaves"][0]["pieces"][0].update(file="../../0.bin")),
        r"says that \['m'\]\['b'\] of float32\[5\] has \[0:\d+\] in '../../0.bin'",
    ),
    "a folder elsewhere": (edited(lambda d: d.update(folder="/tmp")), "names the folder '/tmp'"),
    "a piece lost": (
        edited(lambda d: d["leaves"][0]["pieces"].pop()),
        r"does not say where all of \['m'\]\['b'\] of float32\[5\] is",
    ),
    "a piece beyond": (
        edited(lambda d: d["leaves"][0]["pieces"][0].update(box=[[0, 9]])),
        r"float32\[5\] has \[0:9\] in '0.bin'",
    ),
    "objects": (edited(lambda d: d["leaves"][0].update(dtype="object")), "which is no array of numbers"),
    "no dtype": (edited(lambda d: d["leaves"][0].update(dtype="float99")), "was edited or is damaged .*float99"),
    "less than nothing": (edited(lambda d: d["leaves"][0].update(shape=[-5])), "has -5 where a number of at least 0"),
    "no pieces": (edited(lambda d: d["leaves"][0].pop("pieces")), "was edited or is damaged .*pieces"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint(name: str, plan: Plan, saved: Path) -> None:
    damage, text = DAMAGE[name]
    damage(saved)
    for read in (plan.restore_state, hapsynth.load_state):
        with pytest.raises(CheckpointError, match=text):
            read(saved)
    # It can be written over.
    plan.save_state(saved, plan.shard(*tagged_args())[0])
    assert len(list(saved.iterdir())) == 2
    hapsynth.load_state(saved)


def test_no_checkpoint(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for path, text in (
        ("none", "there is no checkpoint, nor anything else"),
        ("file", "is a file and no checkpoint"),
        ("", "holds no checkpoint, as it has no hapsynth-state.json"),
    ):
        for read in (plan.restore_state, hapsynth.load_state):
            with pytest.raises(CheckpointError, match=f"{text}; give the folder that plan.save_state wrote"):
                read(tmp_path / path)


def test_another_save_in_between(plan: Plan, saved: Path) -> None:
    read = Reader(saved)
    plan.save_state(saved, plan.shard(*tagged_args())[0])
    with pytest.raises(CheckpointError, match="another save has replaced it meanwhile: restore again"):
        read.whole(0)


def test_what_is_not_of_a_save_is_left_alone(plan: Plan, saved: Path) -> None:
    mine = [saved / "notes.txt", saved / "state-1" / "0.bin", saved / f"state-{'0' * 16}" / "mine.txt"]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    left = [saved / f"state-{'0' * 16}" / "1.bin", saved / f".state-{'0' * 16}.json"]
    for file in left:
        file.write_text("left behind")
    plan.save_state(saved, plan.shard(*tagged_args())[0])
    assert all(file.read_text() == "mine" for file in mine)
    assert not any(file.exists() for file in left)


def refused(error: int, path: Path) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(error, os.strerror(error), str(path))

    return refuse


# Where in a save it fails: the folder of the new one, its second file system call, the list of names.
FAILS = {"mkdir": "Permission denied", "fsync": "No space left on device", "replace": "Read-only file system"}


@pytest.mark.parametrize("call", FAILS)
def test_a_failed_save_leaves_the_old(call: str, plan: Plan, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hapsynth.load_state(saved)
    numbers = {os.strerror(n): n for n in range(1, 40)}
    state = plan(*tagged_args())[0]
    with monkeypatch.context() as patch:
        patch.setattr(Path if call == "mkdir" else os, call, refused(numbers[FAILS[call]], saved / "x"))
        said = f"{re.escape(str(saved))}: cannot be written: {FAILS[call]} .*x.*give a folder"
        with pytest.raises(CheckpointError, match=said):
            plan.save_state(saved, state)
    assert len(list(saved.iterdir())) == 2
    assert all(before[path].tobytes() == x.tobytes() for path, x in hapsynth.load_state(saved).items())
    # Nothing is lost of what was to be saved.
    plan.save_state(saved, state)
    assert logical(plan, plan.restore_state(saved)) == logical(plan, state)


def test_a_disk_too_small(plan: Plan, saved: Path) -> None:
    """A real one: no file of this process may have more than 200 bytes."""
    before, limits = hapsynth.load_state(saved), resource.getrlimit(resource.RLIMIT_FSIZE)
    state = plan(*tagged_args())[0]
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be written: File too large"):
            plan.save_state(saved, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(list(saved.iterdir())) == 2
    assert all(before[path].tobytes() == x.tobytes() for path, x in hapsynth.load_state(saved).items())


def test_a_path_that_is_a_file(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    state = plan.shard(*tagged_args())[0]
    for path, text in (("file", "File exists"), ("file/below", "Not a directory")):
        with pytest.raises(CheckpointError, match=f"{path}: cannot be written: {text}"):
            plan.save_state(tmp_path / path, state)
    assert (tmp_path / "file").read_text() == "text"


def test_a_state_that_is_not_the_plans(plan: Plan, saved: Path) -> None:
    state = plan.shard(*tagged_args())[0]
    gone = {**state, "p": jax.tree.map(lambda x: (x.delete(), x)[1], plan.shard(*tagged_args())[0]["p"])}
    cases: list[tuple[Any, Any, str]] = [
        ({k: state[k] for k in ("m", "p")}, TypeError, r"the plan has \"\[0\]\['tag'\]\", which is missing"),
        ({**state, "tag": "other"}, ValueError, r"\['tag'\] is 'other', and the plan holds for 'run' only"),
        (tagged_args()[0], ValueError, r"does not lie as the plan keeps it: pass what plan.shard or a call returned"),
        (gone, RuntimeError, r"\['p'\]\['b'\], float32\[5\], has been deleted"),
    ]
    for given, error, text in cases:
        with pytest.raises(error, match=text):
            plan.save_state(saved, given)
    assert logical(plan, plan.restore_state(saved)) == logical(plan, state)


def test_a_plan_without_devices(plan: Plan, saved: Path) -> None:
    bare = make_plan(tagged, tagged_args(), with_mesh=False)
    with pytest.raises(RuntimeError, match="without its devices"):
        bare.restore_state(saved)
