"""`Plan.explain` says what the command `hapsynth explain` prints."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import hapsynth
from hapsynth.cli.main import main


@pytest.mark.parametrize("about", ["everything", "costs", "one value"])
def test_as_the_command(plan_file: Path, capsys: pytest.CaptureFixture[str], about: str) -> None:
    fn, args = runpy.run_path("model.py")["target"]()
    plan = hapsynth.load("plan.json", fn, args)
    path, cost = plan.traced.in_paths[0] if about == "one value" else None, about == "costs"
    options = (["--cost"] if cost else []) + (["--value", path] if path else [])
    assert main(["explain", "plan.json", "model.py", *options]) == 0
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert plan.explain(path, cost=cost).splitlines() == said


def test_an_unknown_value(plan_file: Path) -> None:
    fn, args = runpy.run_path("model.py")["target"]()
    with pytest.raises(ValueError, match=r"^nothing: the function has no such value"):
        hapsynth.load("plan.json", fn, args).explain("nothing")


def test_one_value_and_all_costs(plan_file: Path) -> None:
    fn, args = runpy.run_path("model.py")["target"]()
    with pytest.raises(ValueError, match=r"value is 'w' and cost is True, .*; leave one of them out"):
        hapsynth.load("plan.json", fn, args).explain("w", cost=True)
