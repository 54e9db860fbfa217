"""Two processes of one CPU device each, as a test starts them. How long they take says nothing: pytest's timeout is the
only one, and ends them too."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from hapsynth.rendezvous.address import COORDINATOR, free_ports

ROOT = Path(__file__).parents[2]


def run_two(
    code: str, arguments: Callable[[str, int], list[str]], environment: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """The output of each, which ran `code` with `arguments(coordinator, number)`; both have to end well."""
    address = f"localhost:{free_ports(2)[0]}"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests")])
    # As in the tests' own process, to compile in less time.
    quick = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    env = {**os.environ, **quick, COORDINATOR: address, "PYTHONPATH": paths, **environment}
    run = [sys.executable, "-c", textwrap.dedent(code)]
    processes: list[subprocess.Popen[str]] = []
    try:
        for i in range(2):
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env}
            processes.append(subprocess.Popen([*run, *arguments(address, i)], **pipes))
        said = [p.communicate()[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], said
    return said
