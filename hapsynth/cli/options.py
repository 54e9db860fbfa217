"""The options of the command line, and how their texts are read. Importing this does not import JAX."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import shtab

from hapsynth._errors import UsageError
from hapsynth._version import __version__
from hapsynth.cluster import _units

if TYPE_CHECKING:
    from hapsynth._options import Ratios
    from hapsynth.profile.collectives import Axes
    from hapsynth.several.plans import RatiosOfEach

_T = TypeVar("_T")

STDOUT = "-"
"""In place of a file's name."""
MISUSED, INTERRUPTED = 2, 130
"""Exit status of bad usage or input, and of a Ctrl-C before there was anything to keep."""
FORMS = ("auto", "switch", "staged", "fused")
"""Those of `hapsynth.running.form.Form`."""
DTYPES = ("float32", "bfloat16", "float16", "float64")
"""That `profile` measures."""


class _Parser(argparse.ArgumentParser):
    """Errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISUSED, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """Of the whole command line; it exits with MISUSED."""
    command = _Parser(
        prog="hapsynth", description="Finds the distributed program for a JAX function on heterogeneous devices."
    )
    command.add_argument("--version", action="version", version=f"hapsynth {__version__}")
    shtab.add_argument_to(command, ["--print-completion"], help="print the completion script of a shell")
    commands = command.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = _Parser(add_help=False)
    common.add_argument("-q", "--quiet", action="store_true", help="no report and no progress; files are written")
    common.add_argument(
        "-v", "--verbose", action="count", default=0, help="say on standard error what is done; -vv says more"
    )

    def add(name: str, text: str) -> argparse.ArgumentParser:
        about = f"{text[0].upper()}{text[1:]}."
        return commands.add_parser(name, help=text, description=about, parents=[common])

    search = add("search", "find the cheapest program and its shard sizes")
    _add_file(search)
    _add_planning(search)
    _add_together(search)
    _path(search, "--plan", metavar="OUT.json", help="write the plan, for `run`, `explain` and hapsynth.load")
    _add_json(search)
    search.add_argument("--program", action="store_true", help="print every instruction, not the program in brief")
    search.add_argument(
        "--advise",
        action="store_true",
        help="plan for other clusters too: without each kind, with more of it, other networks; which is worth it",
    )

    run = add("run", "run a plan and check it against the function on one device")
    _add_file(run)
    _add_plan(run)
    run.add_argument("--steps", metavar="N", type=whole_number, default=1, help="steps to run and check (default 1)")
    run.add_argument("--form", choices=FORMS, default="auto", help="how the plan runs (default auto)")
    seed = partial(whole_number, least=0)
    run.add_argument("--seed", metavar="N", type=seed, default=0, help="of the random arguments (default 0)")
    _path(run, "--json", metavar="OUT|-", nargs="?", const=STDOUT, help="write the errors and times as JSON")

    compare = add("compare", "predicted step time beside data parallel, ZeRO-1 to -3, tensor and expert parallel")
    _add_file(compare)
    _add_planning(compare)
    _add_json(compare)

    compile_ = add("compile", "compile a plan for GPUs that need not be here, and compare them")
    _add_file(compile_)
    _add_plan(compile_)
    compile_.add_argument(
        "--targets",
        metavar="KIND,...",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        default=[],
        help="GPUs as cluster files name them, like V100-16GB,H100-80GB; by default those of the plan's cluster",
    )
    compile_.add_argument("--form", choices=FORMS, default="auto", help="how the plan runs (default auto)")
    _path(compile_, "--hlo", type=Path, metavar="DIR", help="a folder for the programs as XLA schedules them")
    _add_json(compile_)

    explain = add("explain", "where the seconds go, and why each value lies as it does")
    _path(explain, "plan", metavar="PLAN.json", help="a plan that `search --plan` wrote")
    _add_file(explain)
    subject = explain.add_mutually_exclusive_group()
    subject.add_argument("--value", metavar="NAME", help="one value: an argument path such as [0]['w'], or v80")
    subject.add_argument("--cost", action="store_true", help="every second as FLOPs / rate, bytes / bandwidth, latency")
    explain.add_argument("--top", metavar="N", type=whole_number, default=5, help="how many of each (default 5)")
    _add_json(explain)

    view = add("view", "write a page about a plan, or about two side by side, and a trace of the predicted step")
    _path(
        view,
        "files",
        metavar="PLAN.json [OTHER.json] FILE",
        nargs="+",
        help="plans that `search --plan` wrote, and the model file of their function",
    )
    view.add_argument("--function", metavar="NAME", help="only this one, where target() returns a dict of functions")
    _path(view, "-o", "--output", metavar="OUT.html", help="the page: one file, which needs no network")
    _path(view, "--trace", metavar="OUT.json", help="of the first plan, for ui.perfetto.dev or chrome://tracing")

    export = add("export", "write a plan's program as a Python module that needs JAX alone")
    _path(export, "plan", metavar="PLAN.json", help="a plan that `search --plan` wrote")
    _add_file(export)
    _path(export, "-o", "--output", metavar="OUT.py", required=True, help="the module")

    _add_profile(add("profile", "measure the devices of this job and write a cluster file"))
    _add_launch(add("launch", "start the processes of a job, and end them together"))
    _add_preflight(add("preflight", "check that the processes of a job fit together"))
    return command


def _path(parser: argparse.ArgumentParser, *names: str, **options: Any) -> None:
    """An argument that a shell completes as a file's name."""
    cast(Any, parser.add_argument(*names, **options)).complete = shtab.FILE


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _path(parser, "--plan", metavar="PLAN.json", required=True, help="a plan that `search --plan` wrote")


def _add_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", "--nproc-per-node", dest="n", metavar="N", type=whole_number, default=1, help="processes here (default 1)"
    )
    parser.add_argument("--nnodes", metavar="N", type=whole_number, help="hosts that run this command, each with -n")
    parser.add_argument("--node-rank", metavar="I", type=int, help="which of these hosts this is, from 0")
    parser.add_argument(
        "--processes", metavar="N", type=whole_number, help="of the whole job, where hosts have unlike numbers"
    )
    parser.add_argument("--process", metavar="I", type=int, help="with --processes: number of the first process here")
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of a job on several hosts, where process 0 is to listen"
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a Python module and its arguments")
    _path(parser, "script", nargs=argparse.REMAINDER, help="SCRIPT.py, or a program, and its arguments")


def _add_preflight(parser: argparse.ArgumentParser) -> None:
    text = "a model file that defines target() -> (fn, example_args); with --plan"
    _path(parser, "file", metavar="FILE", nargs="?", help=text)
    _path(parser, "--plan", metavar="PLAN.json", help="a plan that the job is to run: compared, compiled, not run")
    parser.add_argument("--function", metavar="NAME", help="only this one, where target() returns a dict of functions")
    _add_job(parser)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    _path(parser, "-o", dest="output", metavar="C.toml", required=True, help="the cluster file to write")
    parser.add_argument(
        "--mesh", metavar="SHAPE", type=_mesh, default=(), help="data=2,model=4 or 2x4 (default: one axis over all)"
    )
    parser.add_argument(
        "--dtypes",
        metavar="A,B",
        type=_dtypes,
        default=(),
        help=f"of {', '.join(DTYPES)} (default: float32, on GPUs bfloat16 and float16 too, with JAX_ENABLE_X64=1 "
        "float64)",
    )
    _path(
        parser,
        "--model",
        metavar="FILE",
        help="measure the heavy ops of a function too, the one of a model file that defines target() -> (fn, "
        "example_args), or dicts of both; FILE:name picks another",
    )
    parser.add_argument("--function", metavar="NAME", help="of --model, where target() returns a dict of functions")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and less time for each: a rough picture")
    parser.add_argument("--force", action="store_true", help="save figures that can't be relied on too")
    _add_job(parser)


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices", metavar="N", type=whole_number, help="of each process; so many CPU devices are made"
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of a job of many processes, where the first listens"
    )
    parser.add_argument("--processes", metavar="N", type=whole_number, help="how many processes the job has")
    parser.add_argument("--process", metavar="I", type=int, help="which of them this is, from 0, which reports")


def _add_file(parser: argparse.ArgumentParser) -> None:
    text = "a model file that defines target() -> (fn, example_args), or dicts of both; FILE:name picks another"
    _path(parser, "file", metavar="FILE", help=text)
    parser.add_argument("--function", metavar="NAME", help="only this one, where target() returns a dict of functions")


def _add_together(parser: argparse.ArgumentParser) -> None:
    """How several functions have one state."""
    parser.add_argument(
        "--frequency",
        metavar="FUNCTION=F",
        action="append",
        default=[],
        type=_frequency,
        help="of several functions: how often one is called (by default 1 if it takes and returns the state, 0.1 if it "
        "takes it, 0 if it makes it)",
    )
    parser.add_argument(
        "--state",
        metavar="FUNCTION:PATH=PATH",
        action="append",
        default=[],
        type=_checked(_state),
        help="of several functions: which part of the state an argument of one, or with `return` a result, is, as in "
        "\"eval:[0]=[0]['params']\"",
    )


def _add_planning(parser: argparse.ArgumentParser) -> None:
    _path(parser, "--cluster", metavar="C.toml", required=True, help="the devices and links to plan for")
    parser.add_argument("--time-budget", metavar="S", type=_seconds, help="seconds; then the best so far, with its gap")
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        type=_memory,
        help='bytes that each device may hold, e.g. "12 GiB"; one that has less keeps to what it has',
    )
    parser.add_argument(
        "--form",
        choices=FORMS,
        default="auto",
        help="staged, fused (for several processes): shards of exact size, each device within its own memory; switch, "
        "auto: padded to the largest, within the smallest device's memory",
    )
    parser.add_argument(
        "--all-devices",
        dest="leave_out",
        action="store_false",
        help="leave out no device, not even one that makes the step slower",
    )
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="where memory is short, make values again later rather than hold them, as jax.checkpoint does",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="plan for a step in which collectives run beside computing: the least makespan, in its order",
    )
    parser.add_argument(
        "--joint-gap",
        metavar="P%",
        type=_percent,
        help="bound programs of any ratios so close to the plan's cost if that can be done, e.g. 3%%: planning takes "
        "about twice as long, with experts several times",
    )
    parser.add_argument(
        "--ratios",
        metavar="[FUNCTION:][CLASS=]R,R,...",
        action="append",
        default=[],
        type=_checked(lambda text: _ratio(text.rpartition(":")[2])),
        help="fractions to cut by, one per device in mesh order, or those of one class (may be repeated), as in "
        "0.75,0.25 or \"[1]['x'].0=0.75,0.25\"",
    )
    parser.add_argument(
        "--expect",
        metavar="[FUNCTION:]FILE:LINE=HOW",
        action="append",
        default=[],
        type=_checked(_expectation),
        help="trips of the while loop at a source line, or how often the predicate of the cond there is true "
        "(of a switch: train.py:40=0.7,0.2,0.1)",
    )
    parser.add_argument(
        "--no-cache",
        dest="cache",
        action="store_false",
        help="search even if the same was planned before, and do not keep the plan for the next time",
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="on standard error; by default where that is a terminal",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    _path(parser, "--json", metavar="OUT|-", help="write the figures as JSON; - for standard output, alone")


def _frequency(text: str) -> tuple[str, float]:
    name, _, often = text.rpartition("=")
    try:
        value = float(often)
    except ValueError:
        value = math.nan
    if not name or not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no function and a number of at least 0, as in eval=0.02")
    return name, value


def _state(text: str) -> tuple[str, str]:
    path, _, of = text.rpartition("=")
    if not (path and of):
        raise argparse.ArgumentTypeError(f"{text!r} is no path and path of the state, as in \"[0]=[0]['params']\"")
    return path, of


def _expectation(text: str) -> tuple[str, float | tuple[float, ...]]:
    line, _, how = text.rpartition("=")
    try:
        first, *others = map(float, how.split(","))
    except ValueError:
        first, others, line = 0.0, list[float](), ""
    if not line:
        raise argparse.ArgumentTypeError(f"{text!r} is not a source line and numbers, as in train.py:40=0.125")
    return line, (first, *others) if others else first


def _ratio(text: str) -> tuple[str, tuple[float, ...]]:
    name, _, fractions = text.rpartition("=")
    try:
        return name, tuple(map(float, fractions.split(",")))
    except ValueError:
        why = f"{text!r} is not fractions, as in 0.75,0.25, with a class before them or none: [0].0=0.75,0.25"
        raise argparse.ArgumentTypeError(why) from None


def _checked(read: Callable[[str], object]) -> Callable[[str], str]:
    """For `type=`: a text that can be read, as it is. Only the model file says which functions may be named in it."""

    def checked(text: str) -> str:
        read(text)
        return text

    return checked


def _of_functions(
    option: str, given: Sequence[str], names: Sequence[str], read: Callable[[str], _T]
) -> list[tuple[str, _T]]:
    """Of each text the name of a function before a colon, or none, and the rest, read. The name is one of `names`, the
    longest that fits, or else what looks like one. UsageError for a rest that can't be read."""
    found: list[tuple[str, _T]] = []
    for text in given:
        head, colon, _ = text.partition(":")
        fitting = [name for name in names if text.startswith(f"{name}:")]
        name = max(fitting, key=len) if fitting else head if colon and head.isidentifier() else None
        try:
            found.append(("", read(text)) if name is None else (name, read(text[len(name) + 1 :])))
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{option}: {error}") from None
    return found


def _once(option: str, given: Sequence[tuple[str, _T]]) -> dict[str, _T]:
    """By name; UsageError for one that is given twice."""
    for name, count in Counter(name for name, _ in given).items():
        if count > 1:
            raise UsageError(f"{option} is given {count} times for {name}: give it once")
    return dict(given)


def asked(options: argparse.Namespace, functions: Sequence[str] | None = None) -> dict[str, Any]:
    """Keyword arguments of `synthesize` for the only function, or of `synthesize_several` for several, by their names;
    UsageError for what is given for others, or can't be read."""
    alike = {
        "time_budget_s": options.time_budget,
        "form": options.form,
        "leave_out": options.leave_out,
        "overlap": options.overlap,
        "joint_gap": options.joint_gap,
        "cache": options.cache,
    }
    names = functions or ([options.function] if options.function else [])
    expect = _of_functions("--expect", options.expect, names, _expectation)
    ratios = _of_functions("--ratios", options.ratios, names, _ratio)
    if functions is None:
        expect_of_one = _once("--expect", _of_one("--expect", expect))
        ratios_of_one = _ratios_of(_of_one("--ratios", ratios))
        return {**alike, "recompute": options.recompute, "expect": expect_of_one, "ratios": ratios_of_one}
    if options.recompute:
        raise UsageError("--recompute is for one function: pick it with --function, or use jax.checkpoint in these")
    state = _of_functions("--state", options.state, names, _state)
    return {
        **alike,
        "expect": {name: _once("--expect", of) for name, of in _of_each("--expect", expect, functions).items()},
        "ratios": _ratios_of_each(ratios, functions),
        "frequency": _once("--frequency", options.frequency),
        "state": {name: _once("--state", of) for name, of in _of_each("--state", state, functions).items()},
    }


def _of_one(option: str, given: Sequence[tuple[str, _T]]) -> list[_T]:
    """The option's value for the only function; UsageError where one is named."""
    for name, _ in given:
        if name:
            raise UsageError(f"{option} names the function {name!r}, but there is one alone: leave the name out")
    return [rest for _, rest in given]


def _of_each(option: str, given: Sequence[tuple[str, _T]], functions: Sequence[str]) -> dict[str, list[_T]]:
    """The option's value for each of several functions; UsageError where none is named, or an unknown one."""
    values: dict[str, list[_T]] = {}
    for name, rest in given:
        if name not in functions:
            what = f"names {name!r}" if name else "names no function"
            raise UsageError(f"{option} {what}; put one of {', '.join(functions)} first, e.g. {functions[0]}:")
        values.setdefault(name, []).append(rest)
    return values


def _ratios_of(given: Sequence[tuple[str, tuple[float, ...]]]) -> Ratios | None:
    """Those of every class, or by class; UsageError for both, or for one twice."""
    names = [name for name, _ in given]
    if len(set(names)) < len(names) or ("" in names and len(names) > 1):
        raise UsageError("--ratios: give fractions for every class once, or once for each class by name")
    return dict(given) if names and "" not in names else given[0][1] if given else None


def _ratios_of_each(
    given: Sequence[tuple[str, tuple[str, tuple[float, ...]]]], functions: Sequence[str]
) -> RatiosOfEach | None:
    """Of several functions: those of every class of all, or by function; UsageError as `_ratios_of`."""
    if not given:
        return None
    if len(given) == 1 and given[0][0] == given[0][1][0] == "":
        return given[0][1][1]
    return {name: r for name, rest in _of_each("--ratios", given, functions).items() if (r := _ratios_of(rest))}


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = math.nan
    if not (text.endswith("%") and 0 < value < 1):
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage between 0% and 100%, as in 3%")
    return value


def _memory(text: str) -> float:
    try:
        return _units.parse(text, _units.MEMORY)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def whole_number(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def _mesh(text: str) -> Axes:
    parts = text.split(",") if "=" in text else [f"{'xyzuvw'[i : i + 1]}={n}" for i, n in enumerate(text.split("x"))]
    axes: list[tuple[str, int]] = []
    for part in parts:
        name, _, size = part.partition("=")
        if not name.strip() or not size.isdecimal() or int(size) < 1 or name in dict(axes):
            raise argparse.ArgumentTypeError(f"{text!r} is not a mesh, as data=2,model=4 or 2x4")
        axes.append((name.strip(), int(size)))
    return tuple(axes)


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(DTYPES)}")
    return names
