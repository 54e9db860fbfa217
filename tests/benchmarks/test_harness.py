"""The benchmarks' command: rows in processes of their own, also those that fail; tables; names in options."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from harness.command import RowError, Table, again, in_own_process, names, parser, write_json

SCRIPT = """
import sys, time
from harness.command import parser
import json
command = parser(None)
command.add_argument("--times", type=int, default=1)
options = command.parse_args()
row = options.row
if "partly" in row:
    print(json.dumps(row | {"status": "planned"}))
if "fails" in row:
    sys.exit("no room left")
if "waits" in row:
    time.sleep(60)
print("a library says something")
print(json.dumps({**row, "made": 2 * options.times}))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A benchmark that is run with `--times 3`."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    folder = str(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", folder)
    monkeypatch.setattr("sys.argv", [str(file), "--times", "3"])
    return file


def test_a_row_is_made_with_the_same_options(script: Path) -> None:
    assert in_own_process({"model": "mlp"}) == {"model": "mlp", "made": 6}
    assert again("--times", "4") == [sys.executable, str(script), "--times", "3", "--times", "4"]


def test_a_row_that_fails_says_why(script: Path) -> None:
    with pytest.raises(RowError, match="error: no room left") as failed:
        in_own_process({"model": "mlp", "fails": 1})
    error = failed.value
    assert (error.exit_code, error.printed) == (1, None)
    row = {"model": "mlp", "fails": 1, "status": "error: no room left", "error": "no room left\n"}
    assert error.as_row() == row
    with pytest.raises(RowError) as failed:
        in_own_process({"partly": 1, "fails": 1})
    assert failed.value.printed == {"partly": 1, "fails": 1, "status": "planned"}


def test_a_row_that_takes_too_long_is_stopped(script: Path) -> None:
    with pytest.raises(RowError) as failed:
        in_own_process({"waits": 1}, timeout_s=0.5)
    assert failed.value.as_row() == {"waits": 1, "status": "stopped after 0.5 s"}


def test_a_table_is_as_wide_as_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table({"model": -8, "ms": 6})
    assert table.heads == "model       ms"
    table.show(["mlp", "1.25"])
    assert capsys.readouterr().out == "mlp       1.25\n"
    with pytest.raises(ValueError, match="argument"):
        table.line(["mlp"])


def test_names_must_be_known() -> None:
    parsed = names(("mlp", "cnn"))
    assert parsed("cnn,mlp") == ["cnn", "mlp"]
    assert parsed("") == []
    with pytest.raises(argparse.ArgumentTypeError, match="'vgg' is none of mlp, cnn"):
        parsed("mlp,vgg")


def test_rows_go_to_the_file_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert parser(None).parse_args([]).json is None
    assert parser(None, json_file=file).parse_args([]).json == file
    write_json(None, [1])
    write_json(file, [1])
    assert json.loads(file.read_text()) == [1]
