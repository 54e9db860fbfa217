"""Scripts of benchmarks/, run as they are run by hand, but in the test's own process: JAX takes seconds to import."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_script(name: str, *options: str) -> int:
    """The exit status of benchmarks/<name>.py."""
    file = str(BENCHMARKS / f"{name}.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [file, *options])
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0
