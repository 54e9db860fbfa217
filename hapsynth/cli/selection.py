"""The one of several functions, or of several plans in a file, that a command is about."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

from hapsynth._errors import UsageError
from hapsynth.cli.model_file import Target, Targets, load_target
from hapsynth.plan import Plan, load
from hapsynth.running.plan_file import holds_several
from hapsynth.several.plans import load_plans


def picked(target: Target | Targets, function: str | None) -> Target:
    """The one function that a command is about; UsageError where that is open, or there is none of the name."""
    if isinstance(target, Target):
        if function is not None:
            where = f"{target.path}: {target.name}()"
            raise UsageError(f"--function picks one of several, but {where} returns one: leave it out")
        return target
    if function is None:
        raise UsageError(f"{target}: this is about one of them, pick it, e.g. --function {next(iter(target.each))}")
    if function not in target.each:
        near = difflib.get_close_matches(function, target.each, n=1)
        raise UsageError(f"--function {function}: {target}" + (f"; did you mean {near[0]}?" if near else ""))
    return target.each[function]


def loaded(path: str, file: str, function: str | None) -> tuple[Plan, Target]:
    """A saved plan, which may be one of several in its file, and its function."""
    functions = load_target(file)
    target = picked(functions, function)
    if function is None or not isinstance(functions, Targets) or not holds_several(path):
        return load(path, target.fn, target.args, example_kwargs=target.kwargs), target
    return load_plans(path, functions.functions, functions.args, example_kwargs=functions.kwargs)[function], target


def source_of(file: str, function: str | None) -> Callable[[], tuple[Any, Any, Any]]:
    """Gives the function, its arguments and keyword arguments, in another process too."""
    return partial(_function_of, file, function)


def _function_of(file: str, function: str | None) -> tuple[Any, Any, Any]:
    target = picked(load_target(file), function)
    return target.fn, target.args, target.kwargs
