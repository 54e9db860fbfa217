"""How benchmarks on emulated clusters start and end."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from emulated import SpecError, machines
from harness import emulated_job
from scripts import run_script


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def test_a_folder_goes_unless_it_is_kept(tmp_path: Path) -> None:
    def measure(folder: Path) -> int:
        (folder / "plan.json").touch()
        return 1

    assert emulated_job.in_folder("it", None, measure) == 1
    assert list(tmp_path.iterdir()) == []
    assert emulated_job.in_folder("it", tmp_path / "new" / "kept", measure) == 1
    assert (tmp_path / "new" / "kept" / "plan.json").exists()


def test_a_terminated_benchmark_leaves_nothing(tmp_path: Path) -> None:
    def measure(folder: Path) -> int:
        (folder / "plan.json").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    with pytest.raises(SystemExit) as stop:
        emulated_job.in_folder("it", None, measure)
    assert stop.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_what_can_not_be_emulated_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert emulated_job.in_folder("it", None, lambda _: len(machines("none"))) == 2
    with pytest.raises(SpecError) as error:
        machines("none")
    assert capsys.readouterr().err == f"it: {error.value}\n"
    assert list(tmp_path.iterdir()) == []


def test_every_process_finds_the_modules_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    env = emulated_job.environment({"OWN": "1"})
    assert env["PYTHONPATH"].split(os.pathsep) == [str(Path(emulated_job.__file__).parents[1]), "/theirs"]
    assert (env["OWN"], env["NPROC"], env["JAX_PLATFORMS"]) == ("1", "2", "cpu")


def test_a_failed_process_ends_it() -> None:
    emulated_job.check([0, 0], "the processes")
    with pytest.raises(SystemExit, match=r"the processes ended with \[0, 3\]"):
        emulated_job.check([0, 3], "the processes")


def test_what_is_limited_is_kept_in_a_new_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state").mkdir()
    for used in (tmp_path, Path(__file__)):
        assert run_script("memory_limit", "--keep", str(used)) == 2
        assert f"--keep: {used} is no new folder; name one" in capsys.readouterr().err
