"""The commands, with all that they need: JAX first."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import jax
from rich.console import Console

from hapsynth._errors import UsageError
from hapsynth._files import say
from hapsynth._gc import gc_paused
from hapsynth._options import check_joint_gap
from hapsynth._quantities import percent, plural, seconds
from hapsynth._warn import OverlapWarning
from hapsynth.api import synthesize
from hapsynth.cli import run
from hapsynth.cli.failures import fail, fail_of_system
from hapsynth.cli.model_file import Target, Targets, holds_json, load_target, model_path
from hapsynth.cli.options import INTERRUPTED, MISUSED, STDOUT, asked
from hapsynth.cli.output_files import Outputs
from hapsynth.cli.preflight import preflight_command
from hapsynth.cli.profile import profile_command
from hapsynth.cli.selection import loaded, picked, source_of
from hapsynth.cluster.cluster import Cluster, ClusterError, ClusterWarning
from hapsynth.export import SourceError
from hapsynth.graph.trace import TraceError, trace
from hapsynth.instructions.rules.notation import RuleError
from hapsynth.instructions.testing.example_arguments import example_arguments
from hapsynth.jobs.launch import launched
from hapsynth.jobs.preflight import PreflightError
from hapsynth.lower import UnsupportedError
from hapsynth.plan import Plan, PlanError
from hapsynth.profile.plausibility import ProfileError
from hapsynth.rendezvous.address import JobError
from hapsynth.rendezvous.meeting import meeting
from hapsynth.report import json_records
from hapsynth.report.comparison import print_comparison
from hapsynth.report.cost_breakdown import cost_lines, cost_record, print_costs
from hapsynth.report.explain import Explainer, find_value
from hapsynth.report.progress import activity, progress
from hapsynth.report.several import print_several, several_infeasible_record, several_record
from hapsynth.report.summary import print_summary
from hapsynth.report.tables import console
from hapsynth.report.targets import print_targets, targets_record
from hapsynth.report.timeline import print_step
from hapsynth.report.what_if import advice_record, print_advice, print_remedies, remedies_record
from hapsynth.running.form import holds_exact
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.search.sizing.fixed_ratios import RatioError
from hapsynth.several.plans import FunctionsError, synthesize_several
from hapsynth.targets import TargetError, collectives_differ, compile_for
from hapsynth.view import page
from hapsynth.view.step import Step
from hapsynth.whatif.cluster_variants import advise
from hapsynth.whatif.remedies import Shortage, remedies

DONE, FAILED = 0, 1
_GROUPS = 12
"""Of devices, that the picture of a step shows."""
_MISUSES = (
    *(UsageError, JobError, ClusterError, PlanError, ProfileError, RatioError, SourceError),
    *(FunctionsError, TargetError, TraceError, RuleError, UnsupportedError),
)


def run_command(options: argparse.Namespace) -> int:
    """Run one command and return its exit status."""
    name, session = f"hapsynth {options.command}", _Session(options)
    try:
        with gc_paused(), _told(name, options), _terminated_as_interrupted(), session:
            session.claim(options)
            _in_order(options)
            return _COMMANDS[options.command](options, session)
    except InfeasibleError as error:
        return _fail(name, "infeasible", error, FAILED)
    except PreflightError as error:
        return _fail(name, "failed", error, FAILED)
    except _MISUSES as error:
        return _fail(name, "error", error, MISUSED)
    except OSError as error:
        return _given_up(error, fail_of_system(name, error))
    except KeyboardInterrupt as stop:
        written = f"only {', '.join(session.files.written)} written" if session.files.written else "nothing written"
        return _fail(name, "interrupted", KeyboardInterrupt(str(stop) or written), INTERRUPTED)


@contextmanager
def _terminated_as_interrupted() -> Generator[None]:
    """SIGTERM, as batch systems send it at the end of a job's time, is what Ctrl-C is. Left alone are processes that a
    launcher started, which passes it on, and whoever has a handler of its own."""
    own = launched() or threading.current_thread() is not threading.main_thread()
    if own or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _StandardError(logging.Handler):
    """Of this moment: a progress line that is shown there has put itself in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record))
        except Exception:  # as `logging`'s own handlers do: a record that has no text ends no command
            self.handleError(record)


@contextmanager
def _told(name: str, options: argparse.Namespace) -> Generator[None]:
    """What hapsynth logs, and its warnings about the cluster and that nothing can overlap, on standard error, a line
    each: warnings, with -v what is done, with -q neither."""
    handler, logger = _StandardError(), logging.getLogger("hapsynth")
    handler.setFormatter(_Formatter(f"{name}: %(message)s"))
    before = logger.level, logger.propagate
    logger.setLevel(logging.ERROR if options.quiet else max(logging.WARNING - 10 * options.verbose, logging.DEBUG))
    logger.addHandler(handler)
    logger.propagate = False
    told = ClusterWarning, OverlapWarning
    try:
        with warnings.catch_warnings():
            for kind in told:
                warnings.simplefilter("always", kind)
            show = warnings.showwarning

            def tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
                if issubclass(category, told):
                    logger.warning("%s", message)
                else:
                    show(message, category, *where, **more)

            warnings.showwarning = tell
            yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _Formatter(logging.Formatter):
    """Warnings say that they are."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message}"
        return super().formatMessage(record)


def _fail(name: str, what: str, error: BaseException, status: int) -> int:
    return _given_up(error, fail(name, what, error, status))


def _given_up(error: BaseException, status: int) -> int:
    """The exit status, of which the other processes of a job hear."""
    meeting.give_up(error, status)
    return status


class _Session(ExitStack):
    """The outputs of a command: its files, standard output, and the report for a person."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.stdout: IO[str] = sys.stdout
        self.json = getattr(options, "json", None) == STDOUT
        """Standard output is for JSON: no report, and output of the model file goes to standard error."""
        self.quiet: bool = options.quiet
        self.files = Outputs(self.stdout, _inputs(options))

    def claim(self, options: argparse.Namespace) -> None:
        """Make sure, before any work, that every output can be written."""
        if self.json:
            self.enter_context(redirect_stdout(sys.stderr))
        self.enter_context(self.files)
        if options.command == "search":
            self.files.claim("--plan", options.plan)
        if options.command in ("export", "profile", "view"):
            self.files.claim("-o", options.output)
        self.files.claim("--trace", getattr(options, "trace", None))
        self.files.claim("--json", getattr(options, "json", None))

    @property
    def reports(self) -> bool:
        """Whether anything is written about a plan."""
        return self.json or not self.quiet

    @property
    def out(self) -> Console | None:
        return None if self.json or self.quiet else console(self.stdout)


def _inputs(options: argparse.Namespace) -> list[Path]:
    """The files that a command reads."""
    named = ["file", "cluster", "model", *([] if options.command == "search" else ["plan"])]
    given = [getattr(options, name, None) for name in named] + getattr(options, "files", [])
    return [model_path(file) for file in given if isinstance(file, str)]


def _in_order(options: argparse.Namespace) -> None:
    """Some commands have the plan first, some the model file: either order does."""
    if (
        options.command in ("compile", "run", "explain", "export")
        and holds_json(options.file)
        and not holds_json(options.plan)
    ):
        options.plan, options.file = options.file, options.plan


def _search(options: argparse.Namespace, session: _Session) -> int:
    if options.advise and options.ratios:
        raise UsageError("--advise is about plans at their own best ratios: leave out --ratios, or --advise")
    cluster, functions = Cluster.load(options.cluster), load_target(options.file)
    if options.function is None and isinstance(functions, Targets):
        return _search_several(options, session, functions, cluster)
    target = picked(functions, options.function)
    for option in ("frequency", "state"):
        if getattr(options, option):
            raise UsageError(f"--{option} is about several functions: leave it out, or --function")
    try:
        plan = _planned(options, target, cluster)
    except InfeasibleError as error:
        record, helps = _infeasible(options, target, cluster, error), None
        if options.advise:
            with activity(_shown(options)) as tell:
                helps = remedies(_shortage(options, target, cluster, error), tell)
            record["remedies"] = remedies_record(helps)
        session.files.write_json(options.json, record)
        if helps is not None and session.out is not None:
            print_remedies(session.out, helps)
        raise
    session.files.write(options.plan, plan.save)
    baselines = None
    timings = plan.result.timings_s
    # Whoever limits the time, ends the search or has planned this before does not wait for more: `compare` says it.
    if options.time_budget is None and not plan.result.interrupted and "cache_s" not in timings and session.reports:
        with activity(_shown(options)) as tell:
            tell("planned; beside it data parallel, ZeRO-2, ZeRO-3, one device")
            baselines = json_records.comparison(plan, json_records.COMMON, each=False)
    record, variants = json_records.search_record(plan, baselines), None
    if options.advise and not plan.result.interrupted:
        with activity(_shown(options)) as tell:
            variants = advise(plan, lambda on: _replanned(options, target, on), tell)
        record["advice"] = advice_record(variants)
    session.files.write_json(options.json, record)
    if session.out is not None:
        print_summary(session.out, plan, json_records.costs_of(plan), baselines, listing=options.program)
        if options.plan:
            session.out.print(f"plan           {options.plan}")
        if variants is not None:
            print_advice(session.out, variants)
    return DONE


def _search_several(options: argparse.Namespace, session: _Session, targets: Targets, cluster: Cluster) -> int:
    if options.advise:
        raise UsageError(f"--advise is about one function: leave it out, or pick one with --function; {targets}")
    try:
        with _requested(options, list(targets.each)) as requested:
            plans = synthesize_several(
                targets.functions, targets.args, cluster, example_kwargs=targets.kwargs, **requested
            )
    except InfeasibleError as error:
        session.files.write_json(options.json, several_infeasible_record(dict(options.frequency), str(error)))
        raise
    _tell_interrupted(options, any(p.result.interrupted for p in plans.values()), plans.gap, plans.lower_bound)
    session.files.write(options.plan, plans.save)
    session.files.write_json(options.json, several_record(plans))
    if session.out is not None:
        print_several(session.out, plans, listing=options.program)
        if options.plan:
            session.out.print(f"plans          {options.plan}")
    return DONE


def _infeasible(
    options: argparse.Namespace, target: Target, cluster: Cluster, error: InfeasibleError
) -> dict[str, object]:
    began = time.perf_counter()
    traced = trace(target.fn, target.args, dict(target.kwargs))
    timings = {"trace_s": time.perf_counter() - began}
    exact = holds_exact(options.form)
    return json_records.infeasible_record(traced, cluster, options.memory_limit, str(error), timings, exact=exact)


def _shortage(options: argparse.Namespace, target: Target, cluster: Cluster, error: InfeasibleError) -> Shortage:
    def plan(args: tuple[Any, ...], kwargs: Mapping[str, Any], on: Cluster, limit: float | None) -> Plan:
        # With devices left out as well, many more searches would have to fail before one is known to.
        return _replanned(options, replace(target, args=args, kwargs=kwargs), on, memory_limit=limit, leave_out=False)

    return Shortage(target.fn, target.args, target.kwargs, cluster, options.memory_limit, error.needs, plan)


def _replanned(options: argparse.Namespace, target: Target, on: Cluster, **changed: Any) -> Plan:
    """The same on another cluster, or with other options, without what is for its own plan alone: warnings, and a
    closer bound."""
    requested: dict[str, Any] = asked(options) | {"joint_gap": None, "memory_limit": options.memory_limit} | changed
    with warnings.catch_warnings():
        for said in (ClusterWarning, OverlapWarning):
            warnings.simplefilter("ignore", said)
        return synthesize(target.fn, target.args, on, example_kwargs=dict(target.kwargs), **requested)


def _compare(options: argparse.Namespace, session: _Session) -> int:
    cluster, target = Cluster.load(options.cluster), picked(load_target(options.file), options.function)
    plan = _planned(options, target, cluster)
    entries = json_records.comparison(plan)
    session.files.write_json(options.json, json_records.compare_record(entries))
    if session.out is not None:
        print_comparison(session.out, plan, entries)
    return DONE


def _compile(options: argparse.Namespace, session: _Session) -> int:
    # Tracing needs no device, and looking for a GPU that is not there is told of on standard error.
    jax.config.update("jax_platforms", "cpu")
    plan, _ = loaded(options.plan, options.file, options.function)
    source = source_of(options.file, options.function)
    if options.hlo is not None:
        session.files.make_folder("--hlo", options.hlo)
    with activity(_shown(options)) as tell:
        targets = compile_for(plan, options.targets, form=options.form, source=source, tell=tell, texts=options.hlo)
    session.files.write_json(options.json, targets_record(targets))
    if session.out is not None:
        print_targets(session.out, targets)
    difference = collectives_differ(targets)
    if difference:
        say(f"hapsynth compile: these cards can't run together: {difference}")
    # A card that the plan was not made for may be too small: that is reported, but is no error.
    short = [t for t in targets if t.in_plan and not t.error and not t.fits]
    if short:
        say("hapsynth compile: the plan does not fit its own devices: " + ", ".join(t.target for t in short))
    return FAILED if difference or short or any(t.error for t in targets) else DONE


def _run(options: argparse.Namespace, session: _Session) -> int:
    devices = run.devices_of(options.plan)
    if devices is not None:
        run.ask_for_host_devices(devices)
    # Read and checked before any device is asked for.
    saved, target = loaded(options.plan, options.file, options.function)
    mesh = run.first_devices(saved.cluster.n)
    plan = run.on_mesh(saved, mesh, options.form)
    args, kwargs = example_arguments(plan.traced, target.args, target.kwargs, options.seed)
    try:
        with activity(_shown(options)) as tell:
            trial = run.run_trial(plan, args, kwargs, options.steps, tell)
    except jax.errors.JaxRuntimeError as error:
        return _fail("hapsynth run", "the run failed", error, FAILED)
    report = trial.report
    session.files.write_json(options.json, json_records.run_record(report, trial.step_s))
    if session.out is not None:
        run.print_trial(session.out, plan, trial)
    if not report.ok:
        what = next((f"output {path or 'of the function'} is off by {e:.2e}" for path, e in report.worst), "")
        say(f"hapsynth run: check failed: {what or report.explained[-1]}")
    return DONE if report.ok else FAILED


def _explain(options: argparse.Namespace, session: _Session) -> int:
    if options.json is not None and not options.cost:
        raise UsageError("--json writes what --cost explains: give both")
    plan, _ = loaded(options.plan, options.file, options.function)
    if options.cost:
        lines = cost_lines(plan)
        session.files.write_json(options.json, cost_record(plan, lines))
        if session.out is not None:
            print_costs(session.out, plan, lines, options.top)
        return DONE
    value = None if options.value is None else find_value(plan, options.value)
    if session.out is None:
        return DONE
    with activity(_shown(options)) as tell:
        explainer = Explainer.of(session.out, plan, options.top, tell)
        if value is None:
            explainer.everything()
        else:
            explainer.one(value)
    return DONE


def _view(options: argparse.Namespace, session: _Session) -> int:
    plans = [name for name in options.files if holds_json(name)]
    models = [name for name in options.files if name not in plans]
    if len(models) != 1 or len(plans) not in (1, 2):
        for name in models:
            if not model_path(name).exists():
                raise UsageError(f"{name}: no such file")
        given = f"{plural(len(plans), 'plan')} and {plural(len(models), 'other file')}"
        raise UsageError(f"give one plan, or two to compare, and the model file of their function; {given} were given")
    found = [loaded(name, models[0], options.function)[0] for name in plans]
    names = list(map(os.path.basename, plans))
    if len({*names}) < len(names):
        names = plans
    session.files.write(options.trace, found[0].to_trace)
    if options.output is not None:
        text = page(list(zip(names, found, strict=True)))
        session.files.write(options.output, lambda path: path.write_text(text, encoding="utf-8"))
    if session.out is not None:
        for name, plan in zip(names, found, strict=True):
            session.out.print(f"{name}: {seconds(plan.cost)} a step on {plan.cluster.name}, predicted")
            print_step(session.out, Step(plan), _GROUPS)
            session.out.print("")
        for what, file in (("page", options.output), ("trace", options.trace)):
            if file is not None:
                session.out.print(f"{what:14} {file}")
    return DONE


def _export(options: argparse.Namespace, session: _Session) -> int:
    plan, _ = loaded(options.plan, options.file, options.function)
    session.files.write(options.output, plan.to_source)
    return DONE


def _profile(options: argparse.Namespace, session: _Session) -> int:
    with activity(_shown(options)) as tell:
        profile_command(options, session.files, session.out, tell)
    return DONE


def _preflight(options: argparse.Namespace, session: _Session) -> int:
    with activity(_shown(options)) as tell:
        preflight_command(options, session.out, tell)
    return DONE


_COMMANDS = {
    "search": _search,
    "run": _run,
    "compare": _compare,
    "compile": _compile,
    "explain": _explain,
    "view": _view,
    "export": _export,
    "profile": _profile,
    "preflight": _preflight,
}


def _shown(options: argparse.Namespace) -> bool | None:
    """Whether progress is; None: where standard error is a terminal."""
    return False if options.quiet else getattr(options, "progress", None)


def _planned(options: argparse.Namespace, target: Target, cluster: Cluster) -> Plan:
    with _requested(options) as requested:
        plan = synthesize(target.fn, target.args, cluster, example_kwargs=target.kwargs, **requested)
    _tell_interrupted(options, plan.result.interrupted, plan.gap, plan.lower_bound)
    return plan


@contextmanager
def _requested(options: argparse.Namespace, functions: Sequence[str] | None = None) -> Generator[dict[str, Any]]:
    """What is asked of the plan of the only function, or of those of several, by their names; shows the progress."""
    requested = asked(options, functions)
    try:
        check_joint_gap(options.joint_gap, overlap=options.overlap)
    except ValueError as error:
        raise UsageError(str(error)) from None
    with progress(_shown(options)) as show:
        yield {**requested, "memory_limit": options.memory_limit, "progress": show}


def _tell_interrupted(options: argparse.Namespace, interrupted: bool, gap: float, bound: float) -> None:
    if interrupted:
        gap_text = percent(gap) if bound > 0 else "unknown"
        say(f"hapsynth {options.command}: interrupted: this is the best plan so far, gap {gap_text}")
