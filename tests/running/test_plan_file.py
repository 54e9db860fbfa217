"""A plan survives a file, and a file that was changed is refused."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from lowering_options import SWITCHED_ALONE
from random_plans import N, assert_same, floats, make_plan, mesh_of, step, step_args

import hapsynth
from hapsynth.plan import Plan, PlanError, load


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(step, step_args())


def test_a_plan_survives_a_file(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    args = step_args()
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    again = load(file, step, structs, mesh_of())
    assert again.program.to_dict() == plan.program.to_dict()
    assert again.sizes.shares == plan.sizes.shares
    assert again.result.memory_limit_bytes == (float("inf"),) * N
    assert again.result.replicated_primitives == ("weird",)
    assert again.cluster == plan.cluster
    assert again.traced.graph.carry == plan.traced.graph.carry
    assert_same(again(*args), jax.jit(step)(*args), again)
    unplaced = load(file, step, args)
    assert unplaced.cost == plan.cost
    with pytest.raises(RuntimeError, match=r"hapsynth.load"):
        unplaced(*args)
    with pytest.raises(ValueError, match=r"4 devices.*mesh has 8"):
        load(file, step, args, mesh_of(8))


def test_a_plan_is_lowered_by_what_it_was_planned_with(plan: Plan, tmp_path: Path) -> None:
    """Its file has what is no default, and nothing where all is."""
    file = tmp_path / "plan.json"
    plan.save(file)
    assert "lowering" not in json.loads(file.read_text())
    cluster = hapsynth.Cluster.from_mesh(mesh_of())
    hapsynth.synthesize(step, step_args(), cluster, lowering=SWITCHED_ALONE).save(file)
    assert json.loads(file.read_text())["lowering"] == {
        "bundled_bytes": 0,
        "small_stage_elements": 0,
        "small_op_elements": 0,
        "gathered_bytes": 0,
    }
    again = load(file, step, step_args(), mesh_of())
    assert again.result.lowering == again.lowered.options == again.cost_model().lowering == SWITCHED_ALONE
    with pytest.raises(TypeError, match=r"lowering is 3; give a hapsynth\.LoweringOptions"):
        hapsynth.synthesize(step, step_args(), cluster, lowering=3)  # type: ignore[call-overload]


def edit(data: dict[str, Any], *path: Any, to: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = to


def other_triple(data: dict[str, Any]) -> None:
    """A rule that the op does not have."""
    i = next(i for i in data["program"]["instructions"] if "op" in i and i["triples"][0]["factor"] is not None)
    i["triples"][0]["results"] = ["P(max)"] * len(i["triples"][0]["results"])


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "schema": (lambda d: edit(d, "schema", to="hapsynth-plan-0"), "has schema 'hapsynth-plan-0'"),
    "triple": (other_triple, "has no rule"),
    "sizes": (lambda d: edit(d, "shares", 0, 0, to=d["shares"][0][0] + 1), "its sizes are"),
    "negative": (lambda d: edit(d, "shares", 0, to=[-1, 1, 0, d["classes"] and sum(d["shares"][0])]), "its sizes are"),
    "fraction": (lambda d: edit(d, "shares", 0, 0, to=0.5), "no integer"),
    "dropped step": (lambda d: d["program"]["instructions"].pop(0), "does not hold"),
    "no op": (lambda d: edit(d, "program", "instructions", -1, to={"op": 999, "triples": []}), "no op 999"),
    "missing": (lambda d: d.pop("program"), "has no 'program'"),
    "cost": (lambda d: edit(d, "certificate", "cost_s", to="cheap"), "cheap"),
    "status": (lambda d: edit(d, "certificate", "status", to="perfect"), "'perfect' is no status"),
    "fingerprint": (lambda d: edit(d, "function", "fingerprint", to="0" * 16), "of another function: fingerprint 0000"),
    "cluster": (lambda d: edit(d, "cluster", "devices", to=[]), "device"),
    "devices": (lambda d: edit(d, "program", "axes", to=[["hap", 2]]), "for 2 devices and the cluster has 4"),
    "memory": (lambda d: edit(d, "memory_bytes", to=[]), "memory_bytes has 0 entries"),
    "carry": (lambda d: edit(d, "function", "carry", 0, to=[77, 0]), "names no input"),
    "kept": (lambda d: edit(d, "function", "kept", to=[77]), "its kept names 77, and there are"),
    "classes": (lambda d: d["classes"].pop(), "dimension classes"),
    "lowering": (lambda d: edit(d, "lowering", to={"ring": 3}), "'ring' is no lowering option"),
    "threshold": (lambda d: edit(d, "lowering", to={"bundled_bytes": 0.5}), "is 0.5; give an integer"),
    "least": (lambda d: edit(d, "lowering", to={"products_per_element": 0}), "is 0; give at least 1"),
    "list": (lambda d: edit(d, "program", to=[]), "not a program"),
}


def test_of_another_function_by_another_jax(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    data = json.loads(file.read_text())
    assert data["function"]["jax"] == jax.__version__
    edit(data, "function", "jax", to="0.1.2")
    file.write_text(json.dumps(data))
    assert load(file, step, step_args(), mesh_of()).program.to_dict() == plan.program.to_dict(), "traced alike by both"
    data["function"]["ops"].pop()
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"ops, and this one \d+; the plan was made with JAX 0\.1\.2 and this is JAX"):
        load(file, step, step_args(), mesh_of())


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_file_is_refused(plan: Plan, tmp_path: Path, name: str) -> None:
    change, text = EDITS[name]
    file = tmp_path / "plan.json"
    plan.save(file)
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=re.escape(text)) as caught:
        load(file, step, step_args(), mesh_of())
    assert "plan.json" in str(caught.value)


def test_files_of_versions_that_wrote_times_are_read(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    data = json.loads(file.read_text())
    assert "timings_s" not in data
    file.write_text(json.dumps({**data, "timings_s": {"total_s": 1.5}}))
    again = load(file, step, step_args())
    assert again.sizes.shares == plan.sizes.shares
    again.save(tmp_path / "again.json")
    plan.save(file)
    assert (tmp_path / "again.json").read_bytes() == file.read_bytes()


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a shape": lambda d: edit(d, "function", "inputs", 0, 1, to=[7] * 100_000),
    "a path": lambda d: edit(d, "function", "inputs", 0, 0, to="['w']" * 100_000),
    "outputs": lambda d: edit(d, "function", "outputs", to=["[0]"] * 100_000),
    "a schema": lambda d: edit(d, "schema", to=list(range(100_000))),
    "an integer": lambda d: edit(d, "shares", 0, 0, to=list(range(100_000))),
    "a number": lambda d: edit(d, "certificate", "cost_s", to=["cheap"] * 100_000),
    "a form": lambda d: edit(d, "memory_of", to="x" * 100_000),
    "a kind": lambda d: edit(d, "cluster", "devices", 0, to="k" * 100_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_error_shows_only_the_ends_of_what_is_large(plan: Plan, tmp_path: Path, name: str) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    data = json.loads(file.read_text())
    HOSTILE[name](data)
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"^.*plan\.json: .* \.\.\. \(\d+ characters left out\) \.\.\. ") as caught:
        load(file, step, step_args(), mesh_of())
    assert len(str(caught.value)) < 1000
    assert len(str(caught.value.__cause__)) < 1000


def test_ctrl_c_once_the_file_has_its_name(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is Ctrl-C that comes up, and the file is whole."""
    file, replaced = tmp_path / "plan.json", os.replace

    def interrupted(source: Path, target: Path) -> None:
        replaced(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan.save(file)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert load(file, step, step_args()).cost == plan.cost


def test_errors_name_the_file_and_long_names_are_written(plan: Plan, tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        plan.save(folder)
    assert caught.value.filename == str(folder)
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "no" / "plan.json"))):
        plan.save(tmp_path / "no" / "plan.json")
    plan.save(long := tmp_path / ("n" * 250))
    assert load(long, step, step_args()).cost == plan.cost


def test_files_that_are_no_plans(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with pytest.raises(PlanError, match="cannot be read"):
        load(file, step, step_args())
    plan.save(file)
    file.write_text(file.read_text()[:200])
    with pytest.raises(PlanError, match="cut short"):
        load(file, step, step_args())
    file.write_bytes(b"\xff\x00")
    with pytest.raises(PlanError, match="no JSON"):
        load(file, step, step_args())
    file.write_text("[" * 100_000)
    with pytest.raises(PlanError, match="no JSON"):
        load(file, step, step_args())
    file.write_text("[]")
    with pytest.raises(PlanError, match="holds no plan"):
        load(file, step, step_args())


BAD: dict[str, tuple[tuple[Any, Any, Any], str]] = {
    "no function": ((3, step_args(), None), "fn is 3, which can't be called"),
    "no tuple": ((step, step_args()[1], None), "example_args is a ndarray; give a tuple of the arguments, (x,)"),
    "no names": ((step, step_args(), [1]), "example_kwargs is [1]; give a dict"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_are_checked_as_for_planning(plan: Plan, tmp_path: Path, name: str) -> None:
    (fn, args, kwargs), text = BAD[name]
    plan.save(tmp_path / "plan.json")
    for use in (
        lambda: load(tmp_path / "plan.json", fn, args, example_kwargs=kwargs),
        lambda: hapsynth.synthesize(fn, args, plan.cluster, example_kwargs=kwargs),
    ):
        with pytest.raises(TypeError, match=re.escape(text)):
            use()


def test_a_plan_of_another_function_names_the_difference(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    state, batch = step_args()
    with pytest.raises(PlanError, match=re.escape("it takes [1] of float32[7, 6], and this one [1] of float32[3, 6]")):
        load(file, step, (state, floats(3, 6)))
    with pytest.raises(PlanError, match=r"another function: it has .* ops, and this one"):
        load(file, lambda s, b: (s, jnp.sum(b)), (state, batch))
    with pytest.raises(PlanError, match="another function"):
        load(file, lambda s, b: step(s, jnp.exp(b)), (state, batch))


def test_nothing_is_left_of_a_save_that_failed(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        plan.save(tmp_path / "absent" / "plan.json")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError, match="directory"):
        plan.save(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
