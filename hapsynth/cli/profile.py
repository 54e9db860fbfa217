"""`hapsynth profile`: its files and report."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import jax
from rich.console import Console

from hapsynth._errors import UsageError
from hapsynth._files import say
from hapsynth._quantities import nbytes, plural, seconds
from hapsynth.cli.model_file import load_target
from hapsynth.cli.output_files import Outputs
from hapsynth.cli.preflight import join_job
from hapsynth.cli.selection import picked
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import trace
from hapsynth.profile.job import Job
from hapsynth.profile.run import Options, profile
from hapsynth.report.tables import Table, heading


def profile_command(
    options: argparse.Namespace, files: Outputs, out: Console | None, tell: Callable[[str], None]
) -> None:
    """Measure, write and report. Raises ProfileError, TraceError, UsageError; KeyboardInterrupt names the file."""
    if options.function is not None and options.model is None:
        raise UsageError("--function picks one of the functions of --model: give that too")
    if "float64" in options.dtypes and not getattr(jax.config, "jax_enable_x64", False):
        raise UsageError("--dtypes: float64 needs JAX_ENABLE_X64=1")
    join_job(options)
    graph = _graph(options)
    partial = Path(options.output + ".partial")
    requested = Options(axes=options.mesh, dtypes=options.dtypes, quick=options.quick)
    if options.quick:
        requested = Options(requested.axes, requested.dtypes, quick=True, limit_s=0.1, window_s=0.02, longest_s=0.1)
    job = Job(options.devices)
    note = lambda text: say(f"hapsynth profile: {text}") if job.first else None
    try:
        cluster = profile(job, requested, partial, graph=graph, force=options.force, tell=tell, note=note)
    except KeyboardInterrupt:
        remains = f"{partial} keeps what was measured; run it again to go on" if partial.exists() else "nothing written"
        raise KeyboardInterrupt(remains) from None
    if job.first:
        files.write(options.output, cluster.save)
        partial.unlink(missing_ok=True)
        if out is not None:
            _print(out, cluster, options.output)


def _graph(options: argparse.Namespace) -> Graph | None:
    """Of the function whose ops are asked for."""
    if options.model is None:
        return None
    target = picked(load_target(options.model), options.function)
    return trace(target.fn, target.args, dict(target.kwargs)).graph


def _print(out: Console, cluster: Cluster, name: str) -> None:
    out.print(f"{plural(cluster.n, 'device')}, {plural(len(set(cluster.hosts)), 'host')}: {cluster.name}")
    out.print(heading("Devices"))
    rows = [
        [
            kind.name,
            str(cluster.devices.count(kind)),
            ", ".join(f"{dtype} {rate / 1e9:.4g}" for dtype, rate in kind.flops.items()),
            f"{kind.bandwidth / 1e9:.4g} GB/s",
            seconds(kind.overhead),
            nbytes(kind.memory),
        ]
        for kind in cluster.kinds
    ]
    out.print(Table(["kind", "devices", "matmul GFLOP/s", "memory bandwidth", "per op", "memory"], rows))
    ops = [(kind, op) for kind in cluster.kinds for op in kind.ops.values()]
    if ops:
        out.print(heading("Ops of the function"))
        measured = [
            [op.op, kind.name, seconds(op.curve.points[-1][1]), f"{amount / took / 1e9:.4g} GFLOP/s"]
            for kind, op in ops
            for amount, took in op.curve.points[-1:]
        ]
        out.print(Table(["op", "kind", "at the largest size", ""], measured, left=2))
    if cluster.collectives:
        out.print(heading("Collectives"))
        found = [
            [axis, step, seconds(curve.points[0][1]), f"{curve.points[-1][0] / curve.points[-1][1] / 1e9:.4g} GB/s"]
            for axis, curves in cluster.collectives.items()
            for step, curve in curves.items()
        ]
        out.print(Table(["axis", "collective", "latency", "at the largest size"], found, left=2))
    out.print(f"\ncluster        {name}")
