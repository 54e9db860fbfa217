"""The command line: its reports, golden ones of a frozen plan among them, and the JSON documents."""

import argparse
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import jax.numpy as jnp
import pytest
from cli_model import CLUSTER, MODEL
from frozen import GOLDEN, TOP, VALUE, Frozen

from hapsynth._quantities import seconds
from hapsynth.cli import commands
from hapsynth.cli.main import main
from hapsynth.cli.options import DTYPES, FORMS, INTERRUPTED
from hapsynth.cli.run import Trial, first_devices, print_trial
from hapsynth.plan import Plan
from hapsynth.report.comparison import print_comparison
from hapsynth.report.explain import Explainer, find_value
from hapsynth.report.json_records import run_record
from hapsynth.report.summary import print_summary
from hapsynth.report.tables import console
from hapsynth.running.check import CheckReport
from hapsynth.running.form import Form
from hapsynth.search.planning.baselines import NAMES

ROOT = Path(__file__).parents[2]

KEYS = {
    *("schema", "ops", "devices", "mesh", "trace_s", "build_s", "search_s", "ratio_s", "bound_s", "total_s", "cost_s"),
    *("lower_bound_s", "gap", "joint_lower_bound_s", "joint_gap", "expanded", "sweeps", "states", "status"),
    *("interrupted", "collectives", "ratios", "memory_bytes", "memory_limit_bytes", "memory_of"),
    "replicated_primitives",
}


def golden(name: str, text: str) -> None:
    """`text` is what tests/golden/ holds; HAPSYNTH_UPDATE_GOLDEN=1 writes it there. Tables end lines with spaces."""
    file, stripped = GOLDEN / name, re.sub(r" +$", "", text, flags=re.MULTILINE)
    if os.environ.get("HAPSYNTH_UPDATE_GOLDEN"):
        file.write_text(stripped)
    assert stripped == file.read_text(), "review the change, then rerun with HAPSYNTH_UPDATE_GOLDEN=1"


# The text of reports: of figures in tests/golden/, so that a change of cost changes none.


@pytest.fixture
def fixed(files: Path, monkeypatch: pytest.MonkeyPatch) -> Frozen:
    """A plan and its figures, without a cost model."""

    def no_model(plan: Plan) -> None:
        raise AssertionError("a report of frozen figures asks for costs")

    monkeypatch.setattr(Plan, "cost_model", no_model)
    return Frozen()


def test_golden_search(fixed: Frozen, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(console(), fixed.plan, fixed.answers.costs, fixed.entries)
    golden("cli_search.txt", capsys.readouterr().out)


def test_golden_compare(fixed: Frozen, capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(console(), fixed.plan, fixed.entries)
    golden("cli_compare.txt", capsys.readouterr().out)


def test_golden_explain(fixed: Frozen, capsys: pytest.CaptureFixture[str]) -> None:
    explainer = Explainer(console(), fixed.plan, fixed.answers, fixed.fed_s, TOP, lambda text: None)
    explainer.everything()
    golden("cli_explain.txt", capsys.readouterr().out)
    explainer.one(find_value(fixed.plan, VALUE))
    golden("cli_explain_value.txt", capsys.readouterr().out)


# The commands: reports with the same parts, whatever the figures.


def parts(text: str) -> list[list[str]]:
    """The title of each part of a report, with the heads of its table or, of a certificate, the names of its lines."""
    found: list[list[str]] = []
    for part in text.split("\n\n")[1:]:
        title, *lines = part.splitlines()
        match title:
            case "Certificate":
                found.append([title, *(re.split(r" {2,}", line)[0] for line in lines)])
            case "Program":
                found.append([title])
            case _ if title.startswith("Collectives"):
                found.append([title])  # a column for each kind
            case _:
                found.append([title, *re.split(r" {2,}", lines[0].strip())])
    return found


def test_every_device_may_be_asked_for(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "m.py").write_text(
        "import jax\ndef target(): return (lambda x: x @ x), (jax.ShapeDtypeStruct((8, 8), 'float32'),)\n"
    )
    for option, used in (("--no-cache", False), ("--all-devices", True)):
        assert main(["search", "m.py", "--cluster", "mixed.toml", option]) == 0
        assert ("leaves out" not in capsys.readouterr().out) == used


@pytest.mark.parametrize("command", ["search", "compare"])
def test_reports(command: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "model.py", "--cluster", "mixed.toml"]) == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    assert parts(text) == parts((GOLDEN / f"cli_{command}.txt").read_text())
    assert text.startswith("17 ops ")
    assert sorted(p.name for p in files.iterdir()) == ["mixed.toml", "model.py"]


def test_explain(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "plan.json", "model.py", "--top", str(TOP)]) == 0
    assert parts(capsys.readouterr().out) == parts((GOLDEN / "cli_explain.txt").read_text())
    assert main(["explain", "plan.json", "model.py", "--value", VALUE]) == 0
    text = capsys.readouterr().out
    assert parts(text) == parts((GOLDEN / "cli_explain_value.txt").read_text())
    assert text.startswith("[0]['m']  f32[256, 128], 128.0 KiB\n")


def test_figures_of_a_report_are_those_of_the_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "model.py", "--cluster", "mixed.toml", "--json", "out.json"]) == 0
    text, data = capsys.readouterr().out, json.loads((files / "out.json").read_text())
    assert f"step time      {seconds(data['cost_s'])} predicted\n" in text
    assert f"joint bound    {seconds(data['joint_lower_bound_s'])} at any shard sizes" in text


def test_program_in_full(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "model.py", "--cluster", "mixed.toml", "--program"]) == 0
    text = capsys.readouterr().out
    assert "inputs\n  in0:f32[256, 128] | " in text
    assert len([line for line in text.splitlines() if re.match(r" [ *]\{", line)]) == int(
        re.search(r"(\d+) instructions", text)[1]
    )


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
    assert data["joint_lower_bound_s"] <= data["ratio_bound_s"] <= data["cost_s"]
    assert data["rounding_gap"] == (data["cost_s"] - data["ratio_bound_s"]) / data["cost_s"] <= 0.02
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
    names = list(data["plans"])
    assert names[: len(NAMES) + 1] == ["hapsynth", *NAMES]
    assert names[-2:] == ["fast kind, on 0-3", "one device"]
    for name in names[len(NAMES) + 1 : -2]:
        plain, _, devices = name.partition(", on ")
        assert devices in ("0-3", "0-1", "4-7", "4-5"), "half of each kind, or a kind"
        assert data["plans"][name]["cost_s"] < data["plans"][plain]["cost_s"]
    ours = data["plans"]["hapsynth"]
    assert ours["fits"] is True
    assert ours["memory_bytes"] > 0
    for plan in data["plans"].values():
        assert ours["cost_s"] <= plan["cost_s"] * (1 + 1e-9)
        assert plan["speedup"] == pytest.approx(plan["cost_s"] / ours["cost_s"])
        assert all(c["count"] >= 1 and c["wire_bytes"] >= 0 for c in plan["collectives"].values())


def test_run(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "model.py", "--plan", "plan.json", "--steps", "3", "--json", "out.json"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ran 3 steps on 4 of 8 devices (cpu), planned for mixed\nfirst step ")
    assert "check passed: max relative error " in text
    data = json.loads((plan_file.parent / "out.json").read_text())
    assert data["ok"] is True
    assert list(data["outputs"]) == ["[0]['m']", "[0]['w']", "[1]"]
    assert max(data["outputs"].values()) == data["max_relative_error"] <= data["tolerance"] == 1e-4
    assert data["steps"] == len(data["step_s"]) == 3


def test_run_on_another_machine_warns_in_one_line(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(plan_file.read_text())
    data["cluster"]["profile"] = {"machines": "another-machine", "jax": "0.0.1", "when": "2026-11-21"}
    plan_file.write_text(json.dumps(data))
    assert main(["run", "model.py", "--plan", "plan.json"]) == 0
    errors = capsys.readouterr().err
    assert re.fullmatch(r"hapsynth run: warning: .* another-machine with JAX 0\.0\.1 .* has JAX .*\n", errors)


def test_run_of_a_wrong_program_fails(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unshard = Plan.unshard

    def wrong(plan: Plan, out: Any) -> Any:
        state, value = unshard(plan, out)
        return {**state, "m": 0.5 * state["m"]}, value

    monkeypatch.setattr(Plan, "unshard", wrong)
    assert main(["run", "model.py", "--plan", "plan.json", "--json"]) == 1
    text, errors = capsys.readouterr()
    assert json.loads(text)["ok"] is False
    assert errors == "hapsynth run: check failed: output [0]['m'] is off by 5.00e-01\n"


def test_run_of_a_function_that_is_nan_fails(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the arguments that are drawn: both sides are NaN, which shows nothing of the plan."""
    (files / "m.py").write_text(
        "import jax, jax.numpy as jnp\nfn = lambda x: (jnp.log(-1 - x * x), x > 0)\n"
        "def target(): return fn, (jax.ShapeDtypeStruct((8,), 'float32'),)\n"
    )
    assert main(["search", "m.py", "--cluster", "mixed.toml", "--plan", "p.json", "-q"]) == 0
    assert main(["run", "m.py", "--plan", "p.json", "--json", "out.json"]) == 1
    text, errors = capsys.readouterr()
    said = "no float was compared: give arguments at which the function is finite\n"
    assert f"\n1 leaf without a finite number\n{said}" in text
    assert errors == f"hapsynth run: check failed: {said}"
    record = json.loads((files / "out.json").read_text())
    assert (record["ok"], record["max_relative_error"], record["not_finite"]) == (False, 0.0, ["[0]"])


def test_each_error_of_a_run_stands_beside_its_own_tolerance(capsys: pytest.CaptureFixture[str]) -> None:
    report = CheckReport((("[0]", 1e-6), ("[1]", 1e-5), ("[2]", 0.0)), (1e-9, 1e-4, 1e-4))
    on: Any = SimpleNamespace(mesh=first_devices(1), cluster=SimpleNamespace(n=1, name="one"))
    print_trial(console(sys.stdout), on, Trial(report, (0.1,)))
    said = "check FAILED: max relative error 1.00e-05, tolerance 0.0001; 1.00e-06, tolerance 1e-09\n"
    assert capsys.readouterr().out.endswith(said)
    assert run_record(report, [])["tolerances"] == {"[0]": 1e-9, "[1]": 1e-4, "[2]": 1e-4}


def test_keyword_arguments(files: Path) -> None:
    model = "model.py:with_keywords"
    assert main(["search", model, "--cluster", "mixed.toml", "--plan", "p.json"]) == 0
    assert main(["run", model, "--plan", "p.json", "--steps", "2"]) == 0


def test_the_function_imports_what_lies_beside_its_file(files: Path) -> None:
    """When it is called, long after its file was loaded."""
    (files / "models").mkdir()
    (files / "models" / "layers_beside_it.py").write_text("from jax.numpy import tanh\n")
    (files / "models" / "m.py").write_text(
        "import jax\ndef fn(x):\n    from layers_beside_it import tanh\n    return tanh(x)\n"
        "def target(): return fn, (jax.ShapeDtypeStruct((8,), 'float32'),)\n"
    )
    assert main(["search", "models/m.py", "--cluster", "mixed.toml", "-q"]) == 0
    assert not (files / "models" / "__pycache__").exists()


def test_a_function_that_returns_nothing(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is planned, and may well be a step whose return was forgotten."""
    (files / "m.py").write_text(
        "import jax\ndef fn(x):\n    x @ x\ndef target(): return fn, (jax.ShapeDtypeStruct((8, 8), 'float32'),)\n"
    )
    said = "warning: the function returns no array: nothing is computed; is its return missing?\n"
    assert main(["search", "m.py", "--cluster", "mixed.toml", "--plan", "p.json"]) == 0
    assert capsys.readouterr().err == f"hapsynth search: {said}"
    assert main(["run", "m.py", "--plan", "p.json"]) == 0
    assert f"hapsynth run: {said}" in capsys.readouterr().err


def test_what_the_model_prints_stays_out_of_the_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "model.py").write_text(MODEL + "\nprint('hello')\n")
    assert main(["search", "model.py", "--cluster", "mixed.toml", "--json", "-"]) == 0
    text, errors = capsys.readouterr()
    assert json.loads(text)["ops"] > 0
    assert errors == "hello\n"


@pytest.mark.parametrize("form", ["staged", "switch"])
def test_the_form_decides_which_shards_count(form: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "mixed.toml").write_text("axes = { data = 8 }\n" + CLUSTER)
    asked = ["search", "model.py", "--cluster", "mixed.toml", "--form", form]
    assert main([*asked, "--plan", "p.json", "--json", "out.json"]) == 0
    exact = form == "staged"
    assert ("peak, exact shards" in capsys.readouterr().out) == exact
    data = json.loads((files / "out.json").read_text())
    assert data["memory_of"] == ("exact" if exact else "padded")
    assert json.loads((files / "p.json").read_text())["memory_of"] == data["memory_of"]
    assert main([*asked, "--memory-limit", "64 KiB", "--json", "none.json"]) == 1
    none = json.loads((files / "none.json").read_text())
    assert none.keys() == {*data, "message"}
    assert (none["memory_of"], none["mesh"]) == (data["memory_of"], data["mesh"])


def test_infeasible(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["search", "model.py", "--cluster", "mixed.toml", "--memory-limit", "64 KiB"]
    assert main([*asked, "--plan", "p.json", "--json", "out.json"]) == 1
    text, errors = capsys.readouterr()
    assert text == ""
    assert re.fullmatch(
        r"hapsynth search: infeasible: .*device \d+ .*needs .*too much \(.*\); .*would fit; recompute=True .*\n", errors
    )
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
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "argv",
    [
        ["--version"],
        ["--help"],
        ["search", "--help"],
        ["--print-completion", "bash"],
        ["launch", "-n", "2", "echo", "me"],
    ],
)
def test_what_needs_no_jax_does_not_import_it(argv: list[str], tmp_path: Path) -> None:
    code = "import sys; from hapsynth.cli.main import main; main(sys.argv[1:]); sys.exit('jax' in sys.modules)"
    command = [sys.executable, "-c", code, *argv]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout


def test_importing_hapsynth_imports_nothing_else_until_asked() -> None:
    code = (
        "import sys, hapsynth; assert 'jax' not in sys.modules; assert 'synthesize' in dir(hapsynth); "
        "missing = [name for name in hapsynth.__all__ if not hasattr(hapsynth, name)]; assert not missing, missing; "
        "assert all(name in dir(hapsynth.jobs) and getattr(hapsynth.jobs, name) for name in hapsynth.jobs.__all__); "
        "assert hapsynth.jobs.initialize and hapsynth.checkpoint.CheckpointError and hapsynth.targets.TargetError"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_forms_and_dtypes_are_those_of_the_library() -> None:
    assert get_args(Form) == FORMS
    assert [jnp.dtype(name).name for name in DTYPES] == list(DTYPES)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_a_shell_completes_commands_options_and_choices() -> None:
    script = subprocess.run(
        [sys.executable, "-m", "hapsynth", "--print-completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    ask = (
        script
        + """
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_hapsynth; printf '%s\\n' "${COMPREPLY[@]}"
        """
    )

    def completed(*words: str) -> set[str]:
        found = subprocess.run(["bash", "-c", ask, "_", "hapsynth", *words], capture_output=True, text=True, check=True)
        return set(found.stdout.split())

    assert completed("se") == {"search"}
    assert completed("search", "--mem") == {"--memory-limit"}
    assert completed("search", "--form", "s") == {"switch", "staged"}


@pytest.mark.few(1)
@pytest.mark.parametrize("extra", [[], ["--json", "-"]])
def test_whoever_reads_the_report_may_leave(extra: list[str], files: Path) -> None:
    """As `| head` does: what is to be written is, and the exit status is the command's own."""
    argv = ["search", "model.py", "--cluster", "mixed.toml", "--plan", "p.json", *extra]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hapsynth", *argv]
    read, write = os.pipe()
    os.close(read)
    found = subprocess.run(command, cwd=files, env=environment, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (found.returncode, found.stderr) == (0, b"")
    assert (files / "p.json").exists()


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["search", "model.py", "--cluster", "mixed.toml", "--plan", "p.json", "--progress", "--no-cache"], 0),
        (["explain", "nosuch.json", "model.py"], 2),
    ],
)
def test_whoever_reads_errors_may_leave(argv: list[str], status: int, files: Path) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "hapsynth", *argv]
    found = subprocess.run(command, cwd=files, env=environment, stdout=subprocess.PIPE, stderr=write, check=False)
    os.close(write)
    assert (found.returncode, bool(found.stdout)) == (status, not status)
    assert (files / "p.json").exists() is not bool(status)


@pytest.mark.parametrize(
    ("argv", "status", "full"), [(["--help"], 0, 2), (["search"], 2, 2), (["launch", "echo", "1"], 0, 2)]
)
def test_what_python_holds_until_its_exit(argv: list[str], status: int, full: int, tmp_path: Path) -> None:
    """Of what argparse and the processes of a job print."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hapsynth", *argv]
    read, write = os.pipe()
    os.close(read)
    run = lambda to: (
        subprocess.run(command, cwd=tmp_path, env=environment, stdout=to, stderr=to, check=False).returncode
    )
    assert run(write) == status
    os.close(write)
    with open("/dev/full", "wb") as disk:
        assert run(disk) == full


def test_quiet_and_verbose(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = ["search", "model.py", "--cluster", "mixed.toml", "--memory-limit", "10 GiB", "--plan", "p.json"]
    assert main([*search, "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert json.loads((files / "p.json").read_text())
    assert main(search) == 0
    text, errors = capsys.readouterr()
    assert text
    (warning,) = errors.splitlines()
    assert warning.startswith("hapsynth search: warning: memory_limit is ")
    assert main([*search, "-v"]) == 0
    assert [line.split(" in ")[0] for line in capsys.readouterr().err.splitlines() if "warning" not in line] == [
        "hapsynth search: traced",
        "hapsynth search: planned",
    ]
    assert not logging.getLogger("hapsynth").handlers
    assert main(["search", "nowhere.py", "--cluster", "mixed.toml", "-q"]) == 2
    assert capsys.readouterr().err == "hapsynth search: error: nowhere.py: no such model file\n"


def test_a_process_of_its_own_makes_its_devices(plan_file: Path) -> None:
    found = command_line("run", "model.py", "--plan", "plan.json", cwd=plan_file.parent)
    assert (found.returncode, found.stderr) == (0, "")
    assert "ran 1 step on 4 of 8 devices (cpu)" in found.stdout


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


@pytest.mark.parametrize("extra", [["--json", "a.json"], ["--json", "-"], ["--json", "a.json", "--advise"]])
def test_a_full_standard_output(
    extra: list[str], files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What else is to be written is."""
    monkeypatch.setattr(sys, "stdout", Broken(OSError(28, "No space left on device")))
    assert main(["search", "model.py", "--cluster", "mixed.toml", *extra]) == 2
    error = "hapsynth search: standard output: [Errno 28] No space left on device\n"
    assert capsys.readouterr().err == error
    assert (files / "a.json").exists() is (extra[1] == "a.json")
    assert extra[2:] == [] or "advice" in json.loads((files / "a.json").read_text())


def test_names_that_standard_output_has_no_characters_for(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", "strict"))
    (files / "mixed.toml").write_text('name = "größe"\n' + CLUSTER, encoding="utf-8")
    assert main(["search", "model.py", "--cluster", "mixed.toml"]) == 0
    sys.stdout.flush()
    assert rb"gr\xf6\xdfe" in written.getvalue()


@pytest.mark.parametrize("interrupts", [signal.default_int_handler, signal.SIG_IGN])
def test_a_ctrl_c_that_python_drops_is_raised_again(
    interrupts: Any, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a job in the background, which ignores it, SIGTERM is."""
    before = signal.signal(signal.SIGINT, interrupts), signal.signal(signal.SIGTERM, signal.default_int_handler)

    class Dropping:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    def dropped(options: argparse.Namespace) -> int:
        Dropping()
        for _ in range(3000):
            time.sleep(0.01)
        pytest.fail("nothing is raised")

    monkeypatch.setattr(commands, "run_command", dropped)
    try:
        assert main(["search", "model.py", "--cluster", "mixed.toml"]) == INTERRUPTED
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before):
            signal.signal(number, handler)
    assert capsys.readouterr().err == "hapsynth search: interrupted: nothing written\n"


def test_a_ctrl_c_after_the_first_file(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is in place is told."""

    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.Outputs, "write_json", pressed)
    argv = ["search", "model.py", "--cluster", "mixed.toml", "--plan", "p.json", "--json", "j.json", "-q"]
    assert main(argv) == INTERRUPTED
    assert capsys.readouterr().err == "hapsynth search: interrupted: only p.json written\n"
    assert (files / "p.json").exists()
    assert not (files / "j.json").exists()


def test_sigterm_is_ctrl_c_but_in_processes_of_a_launcher(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = list[Any]()

    def ended(*_: object, **__: object) -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        if handlers[-1] is signal.SIG_DFL:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(commands, "synthesize", ended)
    argv = ["search", "model.py", "--cluster", "mixed.toml", "--plan", "p.json"]
    before = sorted(files.iterdir())
    assert main(argv) == INTERRUPTED
    assert capsys.readouterr().err == "hapsynth search: interrupted: nothing written\n"
    assert sorted(files.iterdir()) == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "hapsynth-launch")
    assert main(argv) == INTERRUPTED
    assert handlers == [signal.default_int_handler, signal.SIG_DFL]


def test_streams_that_a_caller_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, io.TextIOWrapper(io.BytesIO()))
        getattr(sys, stream).close()
    assert main(["explain", "nosuch.json", "model.py"]) == 2


def test_a_record_that_has_no_text_ends_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with commands._told("hapsynth search", argparse.Namespace(quiet=False, verbose=0)):
        logging.getLogger("hapsynth").warning("%d devices", "two")
    assert "'%d devices'" in capsys.readouterr().err


@pytest.mark.few(2)
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_written_to_in_vain(closed: str, files: Path) -> None:
    command = f"{sys.executable} -m hapsynth search model.py --cluster mixed.toml --plan p.json {closed}"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (files / "p.json").stat().st_size > 1000


def test_a_ctrl_c_while_modules_are_imported(files: Path) -> None:
    """It is raised after the last import: raised in this one it would print a traceback."""
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'hapsynth.cli.commands':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from hapsynth.cli.main import main\n"
        "sys.exit(main(['search', 'model.py', '--cluster', 'mixed.toml']))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (INTERRUPTED, "")
    assert ended.stderr == "hapsynth search: interrupted: nothing written\n"
