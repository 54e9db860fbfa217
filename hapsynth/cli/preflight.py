"""`hapsynth preflight`; and how any command joins a job."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import jax
from rich.console import Console

from hapsynth._errors import UsageError
from hapsynth._quantities import plural
from hapsynth.cli import run
from hapsynth.cli.selection import loaded
from hapsynth.jobs.batch_system import started_by
from hapsynth.jobs.launch import launched
from hapsynth.jobs.preflight import check_mesh, preflight
from hapsynth.rendezvous.address import COORDINATOR, JobError, parse_address
from hapsynth.rendezvous.meeting import initialize
from hapsynth.report.tables import Table


def preflight_command(options: argparse.Namespace, out: Console | None, tell: Callable[[str], None]) -> None:
    """Check this job's processes and report, in process 0. Raises JobError, UsageError, PlanError."""
    if (options.file is None) != (options.plan is None):
        raise UsageError("a plan is checked with both its model file and --plan PLAN.json")
    if options.function is not None and options.file is None:
        raise UsageError("--function picks one of the functions of a model file: give that and --plan PLAN.json too")
    join_job(options)
    if jax.process_count() == 1:
        raise UsageError(
            "this is one process, and preflight compares those of a job: hapsynth launch -n 2 -m hapsynth preflight, "
            "or give --coordinator, --processes and --process"
        )
    tell("comparing the processes")
    mesh, plan = run.first_devices(jax.device_count()), None
    if options.plan is not None:
        saved, _ = loaded(options.plan, options.file, options.function)
        mesh = run.first_devices(saved.cluster.n)
        check_mesh(mesh)
        plan = run.on_mesh(saved, mesh, "auto")
        assert plan.mesh is not None
        mesh = plan.mesh
    report = preflight(mesh, plan)
    if out is not None and not report:
        out.print(f"process {jax.process_index()} has none of the plan's devices: nothing is checked here")
    elif out is not None and jax.process_index() == report[0]["mesh"][0][0]:
        of_gpus = [key for key in ("nccl", "driver") if any(key in f for f in report)]
        rows = [
            [
                f["process"],
                f["hapsynth"],
                f["jax"],
                f["jaxlib"],
                *(f.get(key, "?") for key in of_gpus),
                ", ".join(f["kinds"]),
            ]
            for f in report
        ]
        header = ["process", "hapsynth", "jax", "jaxlib", *of_gpus, "kind of device"]
        out.print(Table(header, rows, left=len(header)))
        checked = "" if plan is None else f"; {options.plan} compiles to the same collectives in all"
        out.print(f"\npreflight passed: {len(report)} processes, {plural(mesh.size, 'device')}{checked}")


def join_job(options: argparse.Namespace) -> None:
    """With as many devices as --devices asks for, the other processes of the job, where there are any: as the options
    say, or whoever started this one. JAX has started then. JobError, UsageError."""
    if options.devices is not None:
        run.ask_for_host_devices(options.devices)
    _join(options)
    run.devices()
    if options.devices is not None and jax.local_device_count() < options.devices:
        raise UsageError(f"--devices {options.devices}: this process has {plural(jax.local_device_count(), 'device')}")


def _join(options: argparse.Namespace) -> None:
    address = (options.coordinator, options.processes, options.process)
    if address == (None, None, None) and not launched() and started_by(os.environ) is None:
        return
    if None in address and address != (None, None, None):
        raise UsageError("a job of many processes needs --coordinator, --processes and --process, all three")
    if options.process is not None and not 0 <= options.process < options.processes:
        raise UsageError(f"--process {options.process}: of {options.processes} processes, give 0 to the last")
    if options.coordinator is not None:
        parse_address(options.coordinator, "--coordinator")
    try:
        with run.starting_backends():
            initialize(*address)
    except JobError:
        raise
    except (RuntimeError, ValueError) as error:
        where = options.coordinator or os.environ.get(COORDINATOR)
        raise JobError(f"the processes did not find each other at {where}: {error}") from None
