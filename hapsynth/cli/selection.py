"""The one of several functions, or of several plans in a file, that a command is about."""

from __future__ import annotations

import difflib

from hapsynth._errors import UsageError
from hapsynth.cli.model_file import Target, Targets, load_target
from hapsynth.plan import Plan, load
from hapsynth.running.plan_file import holds_several
from hapsynth.several.plans import load_plans


def picked(found: Target | Targets, function: str | None) -> Target:
    """The one function that a command is about; UsageError where that is open, or there is none of the name."""
    if isinstance(found, Target):
        if function is not None:
            where = f"{found.path}: {found.name}()"
            raise UsageError(f"--function picks one of several, but {where} returns one: leave it out")
        return found
    if function is None:
        raise UsageError(f"{found}: this is about one of them, pick it, e.g. --function {next(iter(found.each))}")
    if function not in found.each:
        near = difflib.get_close_matches(function, found.each, n=1)
        raise UsageError(f"--function {function}: {found}" + (f"; did you mean {near[0]}?" if near else ""))
    return found.each[function]


def loaded(path: str, file: str, function: str | None) -> tuple[Plan, Target]:
    """A saved plan, which may be one of several in its file, and its function."""
    found = load_target(file)
    target = picked(found, function)
    if function is None or not isinstance(found, Targets) or not holds_several(path):
        return load(path, target.fn, target.args, example_kwargs=target.kwargs), target
    return load_plans(path, found.functions, found.args, example_kwargs=found.kwargs)[function], target
