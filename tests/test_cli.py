"""The command line: golden reports of a tiny model, the JSON documents, and one clear line for every bad input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hapsynth.cli import main
from hapsynth.search.baselines import NAMES

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"

MODEL = """
import jax
import jax.numpy as jnp


def step(state, batch):
    def loss(w):
        return jnp.sum((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2)

    value, grad = jax.value_and_grad(loss)(state["w"])
    m = 0.9 * state["m"] + grad
    return {"m": m, "w": state["w"] - 1e-3 * m}, value


def arguments(n=4096):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return {"m": f32(256, 128), "w": f32(256, 128)}, {"x": f32(n, 256), "y": f32(n, 128)}


def target():
    return step, arguments()


def other():
    return step, arguments(2048)


def another_function():
    return lambda state, batch: ({"m": state["w"], "w": state["m"]}, batch["x"].sum()), arguments()


def with_keywords():
    state, batch = arguments()
    return (lambda state, *, batch: step(state, batch)), (state,), {"batch": batch}
"""
CLUSTER = """
[network]
bandwidth = "10 Gbit/s"
latency = "20 us"

[[devices]]
kind = "V100-16GB"
count = 4

[[devices]]
kind = "P4-8GB"
count = 4
"""
KEYS = {
    *("schema", "ops", "devices", "mesh", "trace_s", "build_s", "search_s", "ratio_s", "bound_s", "total_s", "cost_s"),
    *("lower_bound_s", "gap", "joint_lower_bound_s", "joint_gap", "expanded", "sweeps", "states", "status"),
    *("interrupted", "collectives", "ratios", "memory_bytes", "memory_limit_bytes", "replicated_primitives"),
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with model.py and mixed.toml, which is the working directory."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "mixed.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a plan of the tiny model."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "model.py").write_text(MODEL)
    (folder / "mixed.toml").write_text(CLUSTER)
    plan = folder / "plan.json"
    assert main(["search", f"{folder}/model.py", "--cluster", f"{folder}/mixed.toml", "--plan", str(plan)]) == 0
    return plan.read_text()


@pytest.fixture
def plan(files: Path, saved: str) -> Path:
    (files / "plan.json").write_text(saved)
    return files / "plan.json"


def masked(text: str) -> str:
    """Without times that were measured and not predicted, and without the spaces that end a table's lines."""
    text = re.sub(r" +$", "", text, flags=re.MULTILINE)
    return re.sub(r"planned in .*", "planned in     <time>", text)


def golden(name: str, text: str) -> None:
    """`text` is what tests/golden/ holds; HAPSYNTH_UPDATE_GOLDEN=1 writes it there."""
    file = GOLDEN / name
    if os.environ.get("HAPSYNTH_UPDATE_GOLDEN"):
        file.write_text(masked(text))
    assert masked(text) == file.read_text(), "review the change, then rerun with HAPSYNTH_UPDATE_GOLDEN=1"


# What it prints and writes.


@pytest.mark.parametrize("command", ["search", "compare"])
def test_reports(command: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "model.py", "--cluster", "mixed.toml"]) == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    golden(f"cli_{command}.txt", text)
    assert sorted(p.name for p in files.iterdir()) == ["mixed.toml", "model.py"]


def test_program_in_full(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "model.py", "--cluster", "mixed.toml", "--program"]) == 0
    text = capsys.readouterr().out
    assert "inputs\n  in0:f32[256, 128] | " in text
    assert len([line for line in text.splitlines() if re.match(r" [ *]\{", line)]) == int(
        re.search(r"(\d+) instructions", text)[1]
    )


def test_explain(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "plan.json", "model.py", "--top", "3"]) == 0
    golden("cli_explain.txt", capsys.readouterr().out)
    assert main(["explain", "plan.json", "model.py", "--value", "[0]['m']"]) == 0
    golden("cli_explain_value.txt", capsys.readouterr().out)


def test_search_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "model.py", "--cluster", "mixed.toml", "--json", "-", "--plan", "p.json"]) == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    data = json.loads(text)
    assert data.keys() >= KEYS
    assert (data["schema"], data["devices"], data["mesh"]) == ("hapsynth-search-1", 8, {"hap": 8})
    assert data["ops"] > 5
    assert data["status"] in ("optimal", "optimal_at_ratios")
    assert data["gap"] == (data["cost_s"] - data["lower_bound_s"]) / data["cost_s"] <= 1e-4
    assert data["joint_gap"] >= data["gap"]
    assert all(sum(shares) == pytest.approx(1) and len(shares) == 8 for shares in data["ratios"].values())
    assert len(data["memory_bytes"]) == len(data["memory_limit_bytes"]) == 8
    assert max(data["memory_bytes"]) <= min(data["memory_limit_bytes"]) == 8e9
    assert data["replicated_primitives"] == []
    saved = json.loads((files / "p.json").read_text())
    assert saved["certificate"]["cost_s"] == data["cost_s"]
    assert (files / "p.json").stat().st_mode & 0o777 == 0o666 & ~_mask()


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_compare_json(files: Path) -> None:
    assert main(["compare", "model.py", "--cluster", "mixed.toml", "--json", "out.json"]) == 0
    data = json.loads((files / "out.json").read_text())
    assert list(data["plans"]) == ["hapsynth", *NAMES]
    ours = data["plans"]["hapsynth"]
    assert ours["fits"] is True
    assert ours["memory_bytes"] > 0
    for plan in data["plans"].values():
        assert ours["cost_s"] <= plan["cost_s"] * (1 + 1e-9)
        assert plan["speedup"] == pytest.approx(plan["cost_s"] / ours["cost_s"])
        assert all(c["count"] >= 1 and c["wire_bytes"] >= 0 for c in plan["collectives"].values())


def test_run(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "model.py", "--plan", "plan.json", "--steps", "3", "--json", "out.json"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ran 3 steps on 8 devices (cpu), planned for mixed\nfirst step ")
    assert "check passed: max relative error " in text
    data = json.loads((plan.parent / "out.json").read_text())
    assert data["ok"] is True
    assert list(data["outputs"]) == ["[0]['m']", "[0]['w']", "[1]"]
    assert max(data["outputs"].values()) == data["max_relative_error"] <= data["tolerance"] == 1e-4
    assert data["steps"] == len(data["step_s"]) == 3


def test_run_of_a_wrong_program_fails(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hapsynth.check.relative_error", lambda a, b, *floor: 0.5 if a.ndim else 0.0)
    assert main(["run", "model.py", "--plan", "plan.json", "--json"]) == 1
    text, errors = capsys.readouterr()
    assert json.loads(text)["ok"] is False
    assert errors == "hapsynth run: check failed: output [0]['m'] is off by 5.00e-01\n"


def test_keyword_arguments(files: Path) -> None:
    model = "model.py:with_keywords"
    assert main(["search", model, "--cluster", "mixed.toml", "--plan", "p.json"]) == 0
    assert main(["run", model, "--plan", "p.json", "--steps", "2"]) == 0


def test_what_the_model_prints_stays_out_of_the_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "model.py").write_text(MODEL + "\nprint('hello')\n")
    assert main(["search", "model.py", "--cluster", "mixed.toml", "--json", "-"]) == 0
    text, errors = capsys.readouterr()
    assert json.loads(text)["ops"] > 0
    assert errors == "hello\n"


def test_infeasible(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["search", "model.py", "--cluster", "mixed.toml", "--memory-limit", "64 KiB"]
    assert main([*asked, "--plan", "p.json", "--json", "out.json"]) == 1
    text, errors = capsys.readouterr()
    assert text == ""
    assert re.fullmatch(r"hapsynth search: infeasible: .*device \d+ .*needs .*too much; .*would fit\n", errors)
    data = json.loads((files / "out.json").read_text())
    assert data.keys() >= KEYS
    assert (data["status"], data["cost_s"], data["memory_limit_bytes"]) == ("infeasible", None, [65536.0] * 8)
    assert not (files / "p.json").exists()
    assert main(["compare", *asked[1:]]) == 1


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "hapsynth 0.1.0\n"
    assert main(["search", "--help"]) == 0
    assert "--cluster C.toml" in capsys.readouterr().out


def command_line(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-m", "hapsynth", *argv]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_process_of_its_own_makes_its_devices(plan: Path) -> None:
    found = command_line("run", "model.py", "--plan", "plan.json", cwd=plan.parent)
    assert (found.returncode, found.stderr) == (0, "")
    assert "ran 1 step on 8 devices (cpu)" in found.stdout


def test_a_process_reports_in_one_line(files: Path) -> None:
    found = command_line("search", "modle.py", "--cluster", "mixed.toml", cwd=files)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "hapsynth search: error: modle.py: no such model file; did you mean model.py?\n"


class Broken:
    """A standard output that takes nothing."""

    def __init__(self, error: OSError) -> None:
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise OSError("no file")


@pytest.mark.parametrize("extra", [[], ["--json", "-"]])
def test_a_full_standard_output(
    extra: list[str], files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Broken(OSError(28, "No space left on device")))
    assert main(["search", "model.py", "--cluster", "mixed.toml", *extra]) == 2
    error = "hapsynth search: standard output: [Errno 28] No space left on device\n"
    assert capsys.readouterr().err == error


# Bad input: exit status 2, one line, nothing written.

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
        (CLUSTER.replace('"20 us"', "20"), r"c\.toml: .*latency.*has no unit.*"),
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
def test_bad_plans(edit: Any, pattern: str, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan.read_text()
    plan.unlink()
    if edit is not None:
        plan.write_text(edit(text))
    refused(["run", "model.py", "--plan", "plan.json", "--json", "j.json"], pattern, plan.parent, capsys)
    refused(["explain", "plan.json", "model.py"], pattern, plan.parent, capsys)


@pytest.mark.parametrize("name", ["other", "another_function"])
def test_plan_of_another_function(name: str, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["run", f"model.py:{name}", "--plan", "plan.json"]
    refused(argv, r"plan\.json: this plan is of another function: .*", plan.parent, capsys)


def test_too_few_devices(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "nine.toml").write_text(CLUSTER.replace("count = 4", "count = 5", 1))
    assert main(["search", "model.py", "--cluster", "nine.toml", "--plan", "p.json"]) == 0
    pattern = r"the plan is for 9 devices, and here are 8 \(cpu\); .*"
    refused(["run", "model.py", "--plan", "p.json", "--json", "j.json"], pattern, files, capsys)


def test_unknown_value(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["explain", "plan.json", "model.py", "--value", "[0]['v']"]
    refused(argv, r"--value \[0\]\['v'\]: the function has no such value; did you mean \[0\].*", plan.parent, capsys)


@pytest.mark.parametrize(
    ("option", "name", "pattern"),
    [
        ("--plan", "no/where.json", r"--plan no/where\.json: the folder .* does not exist"),
        ("--json", "no/where.json", r"--json no/where\.json: the folder .* does not exist"),
        ("--json", ".", r"--json \.: is a folder; give a file name"),
        ("--plan", "model.py/x", r"--plan model\.py/x: the folder .* does not exist"),
    ],
)
def test_unwritable_outputs_are_found_first(
    option: str, name: str, pattern: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "bad.py").write_text("raise AssertionError('loaded before the outputs were tried')")
    argv = ["search", "bad.py", "--cluster", "mixed.toml", option, name]
    refused(argv, pattern, files, capsys)


def test_two_outputs_in_one_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["search", "model.py", "--cluster", "mixed.toml", "--plan", "o.json", "--json", "./o.json"]
    refused(argv, r"--json \./o\.json: another output is written to the same file", files, capsys)


@pytest.mark.parametrize(
    ("argv", "pattern"),
    [
        ([], r"hapsynth: error: .*COMMAND.*"),
        (["serach"], r"hapsynth: error: .*serach.*"),
        (["search", "model.py"], r"hapsynth search: error: .*--cluster.*"),
        (["search", "model.py", "--cluster", "c", "--time-budget", "0"], r".*'0' is not a number of seconds.*"),
        (["search", "model.py", "--cluster", "c", "--time-budget", "nan"], r".*'nan' is not a number of seconds.*"),
        (["search", "model.py", "--cluster", "c", "--memory-limit", "12"], r".*'12' has no unit.*"),
        (["search", "model.py", "--cluster", "c", "--memory-limit", "-1 GiB"], r".*--memory-limit.*"),
        (["run", "model.py", "--plan", "p", "--steps", "0"], r".*'0' is not a whole number of at least 1.*"),
        (["run", "model.py"], r"hapsynth run: error: .*--plan.*"),
        (["explain", "p", "model.py", "--top", "x"], r".*'x' is not a whole number.*"),
    ],
)
def test_bad_usage(argv: list[str], pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    text, errors = capsys.readouterr()
    assert text == ""
    assert re.fullmatch(pattern + "\n", errors), errors
