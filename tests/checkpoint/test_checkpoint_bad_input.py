"""Checkpoints that can't be read, and saves that fail: each is told what is wrong and the way out; nothing is lost."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_states import logical, payload
from random_plans import floats, make_plan, step, step_args

import hapsynth
from hapsynth import CheckpointError
from hapsynth.checkpoint import manifest
from hapsynth.checkpoint import state as checkpoint_state
from hapsynth.checkpoint.reader import Reader
from hapsynth.plan import Plan


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


def test_the_others_hear_of_any_failure(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Of one that nobody thought of too: they would wait for this process."""
    told: list[Any] = []
    monkeypatch.setattr(checkpoint_state, "allgather_json", lambda mesh, message, doing: told.append(message) or told)

    def work() -> None:
        raise MemoryError("no more")

    several: Any = SimpleNamespace(is_multi_process=True)
    with pytest.raises(CheckpointError, match=r"x: cannot be read: MemoryError: no more \[process 0 on "):
        checkpoint_state._agreed(several, "x: cannot be read", work)  # pyright: ignore[reportPrivateUsage]
    assert len(told) == 1
    assert plan.mesh is not None
    with pytest.raises(MemoryError):
        checkpoint_state._agreed(plan.mesh, "x", work)  # pyright: ignore[reportPrivateUsage]


def test_a_path_that_is_a_file(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    state = plan.shard(*tagged_args())[0]
    for path, text in (("file", "File exists"), ("file/below", "Not a directory")):
        with pytest.raises(CheckpointError, match=f"{path}: cannot be written: {text}"):
            plan.save_state(tmp_path / path, state)
    assert (tmp_path / "file").read_text() == "text"
    with pytest.raises(CheckpointError, match="the path of the state is empty"):
        plan.save_state("", state)


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
