"""The command line on bad input: exit status 2, one clear line, nothing written."""

import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import pytest
from cli_model import CLUSTER

from hapsynth.cli import commands
from hapsynth.cli.main import main
from hapsynth.cluster.cluster import Cluster

SEARCH = ["search", "bad.py", "--cluster", "mixed.toml", "--plan", "p.json", "--json", "j.json"]
ARGS = "(jax.ShapeDtypeStruct((8,), 'float32'),)"
MODELS: dict[str, tuple[str, str]] = {
    "not python": ("def target(:\n", r"bad\.py:1: the model file is not valid Python: .*"),
    "binary": ("\0\1\2", r"bad\.py.*: the model file is not valid Python: .*"),
    "raises at import": ("\n\nraise KeyError('weights')", r"bad\.py: importing.*KeyError: 'weights' \(line 3 of .*"),
    "exits at import": ("import sys\nsys.exit(3)", r"bad\.py: importing.*raised SystemExit: 3 \(line 2 of .*"),
    "missing module": ("import no_such_module", r"bad\.py: importing.*ModuleNotFoundError: No module.*\(line 1 .*"),
    "no target": ("x = 1", r"bad\.py: defines no target\(\), which must return \(fn, example_args\)"),
    "misspelt": ("def tragets(): pass", r"bad\.py: defines no target\(\); did you mean tragets\(\)\?"),
    "others": ("def foo(): pass", r"bad\.py: defines no target\(\), .*; it defines foo"),
    "no function": ("target = 3", r"bad\.py: 'target' is not a function; .*"),
    "target raises": (
        "def target():\n    return 1 / 0",
        r"bad\.py: target\(\) raised ZeroDivisionError: .*\(line 2 .*",
    ),
    "needs arguments": ("def target(n): pass", r"bad\.py: target\(\) raised TypeError: .*argument: 'n'.*"),
    "returns None": ("def target(): pass", r".* must return \(fn, example_args\).* but it returned None"),
    "returns a function": ("def target(): return print", r".*, but it returned a builtin_function_or_method"),
    "returns four": ("def target(): return 1, 2, 3, 4", r".*, but it returned a tuple of 4"),
    "fn is no function": (f"import jax\ndef target(): return 1, {ARGS}", r".*a int as fn, which can't be called"),
    "args are no tuple": ("import jax\ndef target(): return abs, {}", r".*a dict as example_args; give a tuple.*"),
    "kwargs are no dict": (f"import jax\ndef target(): return abs, {ARGS}, 3", r".*a int as kwargs; give a dict.*"),
    "no shape": (
        "import jax\nclass A:\n    shape = None\n    dtype = 'float32'\ndef target(): return abs, ({'w': A()},)",
        r"argument \[0\]\['w'\] has shape None .*",
    ),
    "unknown shape": (
        "import jax\nclass A:\n    shape = (None, 3)\n    dtype = 'float32'\ndef target(): return abs, ({'w': A()},)",
        r"argument \[0\]\['w'\] has shape \(None, 3\) .*",
    ),
    "fn raises": (
        f"import jax\ndef fn(x):\n    return x @ x[:3]\ndef target(): return fn, {ARGS}",
        r"bad\.py: fn\(\) raised TypeError: .*\(line 3 of .*: return x @ x\[:3\]\)",
    ),
    "fn needs a value": (
        f"import jax\ndef fn(x):\n    return x if x[0] else -x\ndef target(): return fn, {ARGS}",
        r"the function needs the value of an array while it is traced \(bad\.py:3\): .*",
    ),
    "fn names an axis": (
        f"import jax\ndef fn(x):\n    return jax.lax.pmean(x, 'batch')\ndef target(): return fn, {ARGS}",
        r"the function uses an axis name that nothing around it gives \(bad\.py:3\), .*without its lax\.pmean .*",
    ),
    "fn takes a static argument": (
        "import jax\nfn = jax.jit(lambda x, train: x, static_argnames='train')\n"
        f"def target(): return fn, {ARGS}, {{'train': True}}",
        r"the function is or calls a jitted one with a static argument, .*: give static ones beforehand, .*",
    ),
    "fn needs a mesh": (
        f"import jax\ndef fn(x): return jax.lax.with_sharding_constraint(x, jax.P('d'))\n"
        f"def target(): return fn, {ARGS}",
        r"the function needs the mesh of jax\.set_mesh, .*: remove the constraint, .*",
    ),
    "fn takes others": (
        f"import jax\ndef fn(x, y): return x\ndef target(): return fn, {ARGS}",
        r"bad\.py: fn\(\) raised TypeError: .*argument: 'y'",
    ),
}


def refused(argv: list[str], pattern: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with status 2, says one line that matches, and leaves the folder as it was."""
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert main(argv) == 2
    text, errors = capsys.readouterr()
    assert text == ""
    assert errors.count("\n") == 1, errors
    assert re.fullmatch(rf"hapsynth {argv[0]}: error: {pattern}\n", errors), errors
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("case", MODELS)
def test_bad_models(case: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, pattern = MODELS[case]
    (files / "bad.py").write_text(source)
    refused(SEARCH, pattern, files, capsys)


def test_bad_model_paths(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--cluster", "mixed.toml"]
    refused(["search", "nowhere/m.py", *rest], r"nowhere/m\.py: no such model file", files, capsys)
    refused(["search", ".", *rest], r"\.: the model file can't be read: Is a directory", files, capsys)
    refused(
        ["search", "model.py:othr", *rest], r"model\.py: defines no othr\(\); did you mean other\(\)\?", files, capsys
    )


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (None, r"c\.toml: can't be read: No such file or directory; .*"),
        ("[[devices", r"c\.toml: is not valid TOML: .*"),
        (CLUSTER.replace("P4-8GB", "P4-9GB"), r"c\.toml: .*P4-9GB.*P4-8GB.*"),
        (CLUSTER.replace('"4 us"', "4"), r"c\.toml: .*latency.*has no unit.*"),
        (CLUSTER.replace('"10 Gbit/s"', '"-10 Gbit/s"'), r"c\.toml: .*bandwidth.*"),
        (CLUSTER.partition("[[")[0], r"c\.toml: .*lists no device.*"),
        ("axes = { data = 4 }\n" + CLUSTER, r"c\.toml: .*mesh of 4, but there are 8 devices"),
    ],
)
def test_bad_clusters(text: str | None, pattern: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        (files / "c.toml").write_text(text)
    for command in ("search", "compare"):
        refused([command, "model.py", "--cluster", "c.toml", "--json", "j.json"], pattern, files, capsys)


def _edited(**changes: Any) -> Any:
    def edit(text: str) -> str:
        return json.dumps(json.loads(text) | changes)

    return edit


def _unsound(text: str) -> str:
    data = json.loads(text)
    convert = next(i for i in data["program"]["instructions"] if "value" in i)
    data["program"]["instructions"].remove(convert)
    return json.dumps(data)


def _missized(text: str) -> str:
    data = json.loads(text)
    data["shares"][0][0] += 1
    return json.dumps(data)


@pytest.mark.parametrize(
    ("edit", "pattern"),
    [
        (None, r"plan\.json: cannot be read: No such file.*"),
        (lambda text: text[: len(text) // 2], r"plan\.json: is cut short or no JSON .*"),
        (lambda text: "[]", r"plan\.json: holds no plan.*"),
        (_edited(schema="hapsynth-plan-99"), r"plan\.json: has schema 'hapsynth-plan-99'.*"),
        (_edited(program=None), r"plan\.json: .*"),
        (_unsound, r"plan\.json: was edited, .*"),
        (_missized, r"plan\.json: was edited, .*its sizes are.*"),
    ],
)
def test_bad_plans(edit: Any, pattern: str, plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan_file.read_text()
    plan_file.unlink()
    if edit is not None:
        plan_file.write_text(edit(text))
    refused(["run", "model.py", "--plan", "plan.json", "--json", "j.json"], pattern, plan_file.parent, capsys)
    refused(["explain", "plan.json", "model.py"], pattern, plan_file.parent, capsys)


@pytest.mark.parametrize("name", ["other", "another_function"])
def test_plan_of_another_function(name: str, plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["run", f"model.py:{name}", "--plan", "plan.json"]
    refused(argv, r"plan\.json: this plan is of another function: .*", plan_file.parent, capsys)


def test_too_few_devices(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "nine.toml").write_text(CLUSTER.replace("count = 4", "count = 5", 1))
    assert main(["search", "model.py", "--cluster", "nine.toml", "--plan", "p.json"]) == 0
    pattern = r"the plan is for 9 devices, and here are 8 \(cpu\); .*"
    refused(["run", "model.py", "--plan", "p.json", "--json", "j.json"], pattern, files, capsys)


@pytest.mark.parametrize("command", [["run", "model.py", "--plan", "plan.json"], ["profile", "-o", "c.toml"]])
@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unable to initialize backend 'cpu': no driver")])
def test_devices_that_jax_does_not_find(
    command: list[str],
    error: Exception,
    plan_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """JAX asserts that it has a backend, or says that one can't start."""

    def fails() -> Any:
        raise error

    monkeypatch.setattr(jax, "devices", fails)
    pattern = rf"JAX_PLATFORMS is 'cpu', and JAX finds no such devices here.*{error}"
    refused(command, pattern, plan_file.parent, capsys)


def test_preflight_of_a_plan_that_does_not_fit_the_devices(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HAPSYNTH_PREFLIGHT", "off")
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(Cluster, "misplaced", lambda cluster, kinds: "device 0 of the mesh is another")
    argv = ["preflight", "model.py", "--plan", "plan.json"]
    refused(argv, "device 0 of the mesh is another", plan_file.parent, capsys)
    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda: four)
    pattern = r"the plan is for 8 devices, and the 4 processes of the job have 4 \(cpu\); start 8 .* --devices 2"
    refused(argv, pattern, plan_file.parent, capsys)


def test_unknown_value(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["explain", "plan.json", "model.py", "--value", "[0]['v']"]
    pattern = r"--value \[0\]\['v'\]: the function has no such value; did you mean \[0\].*"
    refused(argv, pattern, plan_file.parent, capsys)


@pytest.mark.parametrize(
    ("option", "name", "pattern"),
    [
        ("--plan", "no/where.json", r"--plan no/where\.json: the folder .* does not exist"),
        ("--json", "no/where.json", r"--json no/where\.json: the folder .* does not exist"),
        ("--json", ".", r"--json \.: is a folder; give a file name"),
        ("--plan", "-", "--plan -: --json alone writes to standard output; give a file name"),
        ("--plan", "model.py/x", r"--plan model\.py/x: the folder .* does not exist"),
    ],
)
def test_unwritable_outputs_are_found_first(
    option: str, name: str, pattern: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "bad.py").write_text("raise AssertionError('loaded before the outputs were tried')")
    argv = ["search", "bad.py", "--cluster", "mixed.toml", option, name]
    refused(argv, pattern, files, capsys)


@pytest.mark.parametrize("name", ["model.py", "model.py/x", "/proc/x"])
def test_a_folder_that_cannot_be_made(name: str, plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compile", "model.py", "--plan", "plan.json", "--hlo", name]
    why = "is a file" if name == "model.py" else "can't be written: .*"
    refused(argv, rf"--hlo {re.escape(name)}: {why}; give a folder .*", plan_file.parent, capsys)


def test_a_file_that_no_command_expects_to_fail(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named, and not taken for standard output."""

    def fails(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", "elsewhere.txt")

    monkeypatch.setattr(commands, "compile_for", fails)
    argv = ["compile", "model.py", "--plan", "plan.json"]
    refused(argv, r"elsewhere\.txt: Permission denied", plan_file.parent, capsys)


@pytest.mark.parametrize("command", ["search", "compare"])
def test_options_that_exclude_each_other(command: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [command, "model.py", "--cluster", "mixed.toml", "--joint-gap", "3%", "--overlap"]
    refused(argv, "joint_gap is given with overlap, .*; leave one of them out", files, capsys)


def test_a_working_directory_that_is_gone(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (gone := files / "gone").mkdir()
    os.chdir(gone)
    gone.rmdir()
    argv = ["search", str(files / "model.py"), "--cluster", str(files / "mixed.toml"), "--plan", "p.json"]
    try:
        refused(argv, "the working directory: No such file or directory", files, capsys)
    finally:
        os.chdir(files)


def test_two_outputs_in_one_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["search", "model.py", "--cluster", "mixed.toml", "--plan", "o.json", "--json", "./o.json"]
    refused(argv, r"--json \./o\.json: another output is written to the same file", files, capsys)


@pytest.mark.parametrize(
    "argv",
    [
        ["search", "model.py:target", "--cluster", "mixed.toml", "--plan", "model.py"],
        ["search", "model.py", "--cluster", "mixed.toml", "--json", "./mixed.toml"],
        ["export", "p.json", "model.py", "-o", "model.py"],
        ["view", "p.json", "model.py", "-o", "p.json"],
        ["view", "p.json", "model.py", "--trace", "link.json"],
        ["profile", "--model", "model.py", "-o", "model.py"],
    ],
    ids=lambda argv: " ".join(argv),
)
def test_an_output_that_is_an_input(argv: list[str], files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "p.json").write_text("{}")
    (files / "link.json").symlink_to(files / "p.json")
    refused(argv, rf"{argv[-2]} \S+: this command reads that file; give another name", files, capsys)


@pytest.mark.parametrize(
    ("argv", "pattern"),
    [
        ([], r"hapsynth: error: .*COMMAND.*"),
        (["serach"], r"hapsynth: error: .*serach.*"),
        (["search", "model.py"], r"hapsynth search: error: .*--cluster.*"),
        (["search", "model.py", "--cluster", "c", "--time-budget", "0"], r".*'0' is not a number of seconds.*"),
        (["search", "model.py", "--cluster", "c", "--time-budget", "nan"], r".*'nan' is not a number of seconds.*"),
        (["search", "model.py", "--cluster", "c", "--joint-gap", "0.03"], r".*'0.03' is no percentage.*"),
        (["search", "model.py", "--cluster", "c", "--memory-limit", "12"], r".*'12' has no unit.*"),
        (["search", "model.py", "--cluster", "c", "--memory-limit", "-1 GiB"], r".*--memory-limit.*"),
        (["search", "model.py", "--cluster", "c", "--memory-limit", "1e1000000 GB"], r".*GB' is not a finite number.*"),
        (["search", "model.py", "--cluster", "c", "--memory-limit", "infinite GB"], r".*GB' is not a number with.*"),
        (["run", "model.py", "--plan", "p", "--steps", "0"], r".*'0' is not a whole number of at least 1.*"),
        (["run", "model.py", "--plan", "p", "--seed", "-1"], r".*'-1' is not a whole number of at least 0.*"),
        (["run", "model.py"], r"hapsynth run: error: .*--plan.*"),
        (["explain", "p", "model.py", "--top", "x"], r".*'x' is not a whole number.*"),
    ],
)
def test_bad_usage(argv: list[str], pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    text, errors = capsys.readouterr()
    assert text == ""
    assert re.fullmatch(pattern + "\n", errors), errors


def test_the_plan_and_the_model_file_in_either_order(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run` has the model first, `explain` and `export` the plan."""
    assert main(["explain", "plan.json", "model.py"]) == 0
    explained = capsys.readouterr().out
    assert main(["explain", "model.py", "plan.json"]) == 0
    assert capsys.readouterr().out == explained
    assert main(["export", "model.py:target", "plan.json", "-o", "a.py"]) == 0
    assert main(["export", "plan.json", "model.py:target", "-o", "b.py"]) == 0
    assert Path("a.py").read_text() == Path("b.py").read_text()
    assert main(["run", "plan.json", "--plan", "model.py"]) == 0
    assert "check passed" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["explain", "plan.json"], ["run", "--plan", "plan.json"], ["search", "--cluster"]])
def test_a_plan_is_no_model_file(command: list[str], plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, *(["mixed.toml"] if command[0] == "search" else []), "plan.json"]) == 2
    assert re.fullmatch(
        rf"hapsynth {command[0]}: error: plan\.json: is JSON, as plans are, and no model file; give a Python file .*\n",
        capsys.readouterr().err,
    )
