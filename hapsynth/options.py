"""The options of the command line, and how their texts are read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn, get_args

from hapsynth import _units
from hapsynth._forms import Form
from hapsynth._ratios import Ratios
from hapsynth.jobs.command import add_launch_arguments, add_preflight_arguments, whole_number
from hapsynth.profile.command import add_arguments
from hapsynth.report.model_file import UsageError
from hapsynth.report.output import STDOUT

MISUSED = 2
"""Exit status of bad usage or input."""


class _Parser(argparse.ArgumentParser):
    """Errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISUSED, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """Of the whole command line; it exits with MISUSED."""
    made = _Parser(prog="hapsynth", description="Finds the distributed program for a JAX function on unlike devices.")
    made.add_argument("--version", action="version", version=f"hapsynth {_version()}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    search = commands.add_parser("search", help="find the cheapest program and its shard sizes")
    _add_file(search)
    _add_planning(search)
    search.add_argument("--plan", metavar="OUT.json", help="write the plan, for `run`, `explain` and hapsynth.load")
    _add_json(search)
    search.add_argument("--program", action="store_true", help="print every instruction, not the program in brief")

    search.add_argument(
        "--form",
        choices=get_args(Form),
        default="auto",
        help="staged: each device within its own memory, of exact shards; else the smallest device's, of padded ones",
    )
    search.add_argument(
        "--advise",
        action="store_true",
        help="plan for other clusters too: without each kind, with more of it, other networks; which is worth it",
    )

    run = commands.add_parser("run", help="run a plan and check it against the function on one device")
    _add_file(run)
    run.add_argument("--plan", metavar="PLAN.json", required=True, help="a plan that `search --plan` wrote")
    run.add_argument("--steps", metavar="N", type=whole_number, default=1, help="steps to run and check (default 1)")
    run.add_argument("--seed", metavar="N", type=int, default=0, help="of the random arguments (default 0)")
    run.add_argument("--json", metavar="OUT|-", nargs="?", const=STDOUT, help="write the errors and times as JSON")

    compare = commands.add_parser("compare", help="predicted step time beside data parallel, ZeRO-3, tensor parallel")
    _add_file(compare)
    _add_planning(compare)
    _add_json(compare)

    explain = commands.add_parser("explain", help="where the seconds go, and why each value lies as it does")
    explain.add_argument("plan", metavar="PLAN.json", help="a plan that `search --plan` wrote")
    _add_file(explain)
    export = commands.add_parser("export", help="write a plan's program as a Python module that needs JAX alone")
    export.add_argument("plan", metavar="PLAN.json", help="a plan that `search --plan` wrote")
    _add_file(export)
    export.add_argument("-o", "--output", metavar="OUT.py", required=True, help="the module")
    asked = explain.add_mutually_exclusive_group()
    asked.add_argument("--value", metavar="NAME", help="one value: an argument path such as [0]['w'], or v80")
    asked.add_argument("--cost", action="store_true", help="every second as FLOPs / rate, bytes / bandwidth, latency")
    explain.add_argument("--top", metavar="N", type=whole_number, default=5, help="how many of each (default 5)")
    _add_json(explain)

    add_arguments(commands.add_parser("profile", help="measure the devices of this job and write a cluster file"))
    add_launch_arguments(commands.add_parser("launch", help="start the processes of a job, and end them together"))
    add_preflight_arguments(commands.add_parser("preflight", help="check that the processes of a job fit together"))
    return made


def _version() -> str:
    try:
        return metadata.version("hapsynth")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _add_file(parser: argparse.ArgumentParser) -> None:
    text = "a model file that defines target() -> (fn, example_args); FILE:name picks another function"
    parser.add_argument("file", metavar="FILE", help=text)


def _add_planning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", metavar="C.toml", required=True, help="the devices and links to plan for")
    parser.add_argument("--time-budget", metavar="S", type=_seconds, help="seconds; then the best so far, with its gap")
    parser.add_argument("--memory-limit", metavar="SIZE", type=_memory, help='per device, e.g. "12 GiB"')
    parser.add_argument(
        "--ratios",
        metavar="[CLASS=]R,R,...",
        action="append",
        default=[],
        type=_ratio,
        help="fractions to cut by, one per device in mesh order, or those of one class (may be repeated), as in "
        "0.75,0.25 or \"[1]['x'].0=0.75,0.25\"",
    )
    parser.add_argument(
        "--expect",
        metavar="FILE:LINE=HOW",
        action="append",
        default=[],
        type=_expectation,
        help="trips of the while loop at a source line, or how often the predicate of the cond there is true "
        "(of a switch: train.py:40=0.7,0.2,0.1)",
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="on standard error; by default where that is a terminal",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="OUT|-", help="write the figures as JSON; - for standard output, alone")


def _expectation(text: str) -> tuple[str, float | tuple[float, ...]]:
    line, _, how = text.rpartition("=")
    try:
        first, *rest = map(float, how.split(","))
    except ValueError:
        first, rest, line = 0.0, list[float](), ""
    if not line:
        raise argparse.ArgumentTypeError(f"{text!r} is not a source line and numbers, as in train.py:40=0.125")
    return line, (first, *rest) if rest else first


def _ratio(text: str) -> tuple[str, tuple[float, ...]]:
    name, _, fractions = text.rpartition("=")
    try:
        return name, tuple(map(float, fractions.split(",")))
    except ValueError:
        why = f"{text!r} is not fractions, as in 0.75,0.25, with a class before them or none: [0].0=0.75,0.25"
        raise argparse.ArgumentTypeError(why) from None


def ratios_of(given: Sequence[tuple[str, tuple[float, ...]]]) -> Ratios | None:
    """Those of every class, or by class; UsageError for both, or for one twice."""
    names = [name for name, _ in given]
    if len(set(names)) < len(names) or ("" in names and len(names) > 1):
        raise UsageError("--ratios: give fractions for every class once, or once for each class by name")
    return dict(given) if names and "" not in names else given[0][1] if given else None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _memory(text: str) -> float:
    try:
        return _units.parse(text, _units.MEMORY)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None
