"""Two processes of one CPU device each, as a test starts them. How long they take says nothing: pytest's timeout is the
only one, and ends them too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from hapsynth.rendezvous.address import COORDINATOR, free_ports

ROOT = Path(__file__).parents[2]

# JAX takes seconds to import, so it is imported once and the two are forked, before any backend starts.
FORK = """
import json, os, sys
import jax, hapsynth.plan
code, arguments, outputs = json.loads(sys.argv[1])
pids = []
for given, output in zip(arguments, outputs):
    pids.append(os.fork())
    if not pids[-1]:
        file = os.open(output, os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.argv[1:] = given
        break
if pids[-1]:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))
else:
    exec(code)
"""


def run_two(
    code: str, arguments: Callable[[str, int], list[str]], environment: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """The output of each, which ran `code` with `arguments(coordinator, number)`; both have to end well."""
    address = f"localhost:{free_ports(2)[0]}"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests")])
    # As in the tests' own process, to compile in less time.
    quick = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    env = {**os.environ, **quick, COORDINATOR: address, "PYTHONPATH": paths, **environment}
    with tempfile.NamedTemporaryFile("r") as first, tempfile.NamedTemporaryFile("r") as second:
        outputs = first, second
        told = textwrap.dedent(code), [arguments(address, i) for i in range(2)], [file.name for file in outputs]
        run = [sys.executable, "-c", FORK, json.dumps(told)]
        process = subprocess.Popen(run, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
        try:
            statuses = process.communicate()[0]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said = [file.read() for file in outputs]
    assert json.loads(statuses) == [0, 0], said
    return said
