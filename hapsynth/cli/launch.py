"""`hapsynth launch`. It does without JAX, which takes seconds to import."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from hapsynth._errors import UsageError
from hapsynth.cli.failures import fail, fail_of_system
from hapsynth.cli.options import MISUSED
from hapsynth.jobs.batch_system import started_by
from hapsynth.jobs.launch import Launch, launch
from hapsynth.rendezvous.address import JobError


def run_launch(options: argparse.Namespace) -> int:
    """Start the processes and wait for them; the exit status."""
    name = "hapsynth launch"
    try:
        return _launch(options)
    except (UsageError, JobError) as error:
        return fail(name, "error", error, MISUSED)
    except OSError as error:
        return fail_of_system(name, error)


def _launch(options: argparse.Namespace) -> int:
    # argparse leaves the one that ends this command's own options.
    command: list[str] = options.script[1:] if options.script[:1] == ["--"] else list(options.script)
    if bool(options.module) == bool(command):
        raise UsageError("give what to start: a script and its arguments, or -m and a module")
    if options.module:
        command = [sys.executable, "-m", *options.module]
    elif command[0].endswith(".py"):
        command = [sys.executable, *command]
    return launch(place(options, os.environ), command)


def place(options: argparse.Namespace, environment: Mapping[str, str]) -> Launch:
    """Where this launcher stands among those of the job: as its options say, or the batch system that started it.
    UsageError, JobError."""
    here, coordinator = options.n, options.coordinator or ""
    hosts, processes = (options.nnodes, options.node_rank), (options.processes, options.process)
    if hosts != (None, None) and processes != (None, None):
        raise UsageError("say which host this is (--nnodes, --node-rank) or which processes (--processes, --process)")
    task = started_by(environment)
    if processes != (None, None):
        count, first = processes[0] or 0, processes[1] or 0
        if not coordinator and task is not None and here < count:
            if (first == 0) != (task.index == 0):
                raise UsageError(
                    f"this launcher is number {task.index} of the batch system's and begins with process {first} "
                    "(--process): process 0 must be with its launcher 0; or give --coordinator HOST:PORT of the host "
                    "that has it"
                )
            coordinator = task.coordinator
        return Launch(here, count, first, coordinator)
    if hosts == (None, None) and task is not None:
        hosts, coordinator = (task.count, task.index), coordinator or task.coordinator
    if hosts == (None, None):
        return Launch(here, coordinator=coordinator)
    if None in hosts or not 0 <= hosts[1] < hosts[0]:
        raise UsageError(f"--nnodes {hosts[0]}, --node-rank {hosts[1]}: give both, the second below the first")
    return Launch(here, hosts[0] * here, hosts[1] * here, coordinator)
