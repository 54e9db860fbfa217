"""Processes as a test starts them: forked of one that has imported JAX and hapsynth, before any backend starts. How
long they take says nothing: pytest's timeout is the only one, and ends them too."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import MappingProxyType

from hapsynth.rendezvous.address import COORDINATOR, free_ports

ROOT = Path(__file__).parents[2]
NOTHING: Mapping[str, str] = MappingProxyType({})

# JAX takes seconds to import: once for all that a test run starts.
FORK = """
import gc, json, os, sys
import jax, hapsynth.plan
gc.freeze()

def of_next():
    for line in sys.stdin:
        code, folder, environment, arguments, outputs = json.loads(line)
        pids = []
        for given, output in zip(arguments, outputs):
            pids.append(os.fork())
            if not pids[-1]:
                file = os.open(output, os.O_WRONLY)
                for stream, held in ((0, os.open(os.devnull, os.O_RDONLY)), (1, file), (2, file)):
                    os.dup2(held, stream)
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(environment)
                sys.argv[1:] = given
                return code
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)

code = of_next()
if code is not None:
    exec(code)
"""
# As in the tests' own process, to compile in less time.
QUICK = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@cache
def forking() -> subprocess.Popen[str]:
    """The process that forks others, each time that it reads a line."""
    env = {**os.environ, **QUICK, "PYTHONPATH": paths()}
    made = subprocess.Popen(
        [sys.executable, "-c", FORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    atexit.register(ended, made)
    return made


def ended(process: subprocess.Popen[str]) -> None:
    """With all that it has forked."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def paths() -> str:
    return os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests")])


def run(code: str, arguments: list[list[str]], environment: Mapping[str, str] = NOTHING) -> list[str]:
    """The outputs of processes that ran `code`, one for each of `arguments`; all have to end well. In `environment`
    there is nothing that JAX reads when it is imported."""
    env = {**os.environ, **QUICK, "PYTHONPATH": paths(), **environment}
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.NamedTemporaryFile("r")) for _ in arguments]
        told = textwrap.dedent(code), os.getcwd(), env, arguments, [file.name for file in outputs]
        process = forking()
        assert process.stdin is not None
        assert process.stdout is not None
        statuses = ""
        try:
            print(json.dumps(told), file=process.stdin, flush=True)
            statuses = process.stdout.readline()
        finally:
            if not statuses:
                ended(process)
                forking.cache_clear()
        said = [file.read() for file in outputs]
    assert json.loads(statuses) == [0] * len(arguments), said
    return said


def run_two(
    code: str, arguments: Callable[[str, int], list[str]], environment: Mapping[str, str] = NOTHING
) -> list[str]:
    """The output of each of two processes of one CPU device, which ran `code` with `arguments(coordinator, number)`."""
    address = f"localhost:{free_ports(2)[0]}"
    return run(code, [arguments(address, i) for i in range(2)], {COORDINATOR: address, **environment})
