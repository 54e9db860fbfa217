"""Right plans of mixed-precision steps pass the check, and wrong programs of the same steps fail it.

A wrong program is a planned one in which one collective does something else.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from lowering_options import SWITCHED, SWITCHED_ALONE, lowered_by
from mixed_cases import CASES
from slow_devices import SPEEDS, first_devices, slow_cluster
from thoroughness import THOROUGH

import hapsynth
from hapsynth.cli.main import main
from hapsynth.graph.trace import Traced
from hapsynth.instructions.program.program import Convert
from hapsynth.lower import _bundles
from hapsynth.plan import Plan
from hapsynth.running import check
from hapsynth.running.check import WIDENED, Reference

exchange = _bundles.exchange
Exchange = Callable[..., Any]

# ---- mutations of a collective


def own_part(sizes: Any, name: str, step: Convert, x: Any, *how: Any) -> Any:
    """A partial sum taken for the sum."""
    if step.step == "all_reduce":
        return x
    dim = step.target[step.axis].dim
    length = x.shape[dim] // lax.axis_size(name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(name) * length, length, dim)


def one_missing(sizes: Any, name: str, step: Convert, x: Any, *how: Any) -> Any:
    """The first device's part is left out of a sum."""
    return exchange(sizes, name, step, jnp.where(lax.axis_index(name) == 0, jnp.zeros_like(x), x), *how)


def scaled(sizes: Any, name: str, step: Convert, x: Any, *how: Any) -> Any:
    """The sum over four devices as if there were five."""
    return exchange(sizes, name, step, x, *how) * jnp.asarray(0.8, x.dtype)


def swapped(sizes: Any, name: str, step: Convert, x: Any, *how: Any) -> Any:
    """Every device sends its neighbour's slice."""
    n = lax.axis_size(name)
    return exchange(sizes, name, step, lax.ppermute(x, name, [(i, (i + 1) % n) for i in range(n)]), *how)


def off_by_one(sizes: Any, name: str, step: Convert, x: Any, *how: Any) -> Any:
    """What arrives lies one further along the dimension that is joined."""
    return jnp.roll(exchange(sizes, name, step, x, *how), 1, step.source[step.axis].dim)


SUMS, MOVES = ("reduce_scatter", "all_reduce"), ("all_to_all", "all_gather")
MUTATIONS: dict[Exchange, tuple[str, ...]] = {
    own_part: SUMS,
    one_missing: SUMS,
    scaled: SUMS,
    swapped: MOVES,
    off_by_one: MOVES,
}


def mutate(monkeypatch: pytest.MonkeyPatch, plan: Plan, mutation: Exchange) -> list[Convert]:
    """Make a mutation of one of its collectives of floats, which one differs from mutation to mutation.

    What is lowered from now on has it. Returns what has been changed, once it has.
    """
    kinds, changed = MUTATIONS[mutation], list[Convert]()
    dtype = lambda step: plan.traced.graph.values[step.value].dtype
    found = [i for i in plan.program.instructions if isinstance(i, Convert) and i.step in kinds]
    found = [i for i in found if jnp.issubdtype(dtype(i), jnp.floating)]
    chosen = found[(7 * list(MUTATIONS).index(mutation)) % len(found)]

    def mutated(sizes: Any, name: str, step: Convert, x: Any, *how: Any) -> Any:
        if step != chosen:
            return exchange(sizes, name, step, x, *how)
        changed.append(step)
        return mutation(sizes, name, step, x, *how)

    monkeypatch.setattr(_bundles, "exchange", mutated)
    return changed


@functools.cache
def planned(name: str) -> tuple[Plan, Any]:
    fn, args = CASES[name]()
    cluster = slow_cluster(SPEEDS["3:1"])
    plan = hapsynth.synthesize(fn, args, first_devices(4), cluster=cluster, leave_out=False, form="switch")
    return lowered_by(plan, SWITCHED, "switch"), args


REFERENCES: dict[int, Reference] = {}


@pytest.fixture
def one_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function on one device, and widened, is compiled once for all programs of the same traced function."""

    def made(fn: Any, traced: Traced, leaves: Any, device: Any) -> Reference:
        return REFERENCES.setdefault(id(traced), Reference(fn, traced, leaves, device))

    monkeypatch.setattr(check, "Reference", made)


# A GPT takes as long as all others together.
TRIED = [name for name in CASES if THOROUGH or name != "gpt"]


@pytest.mark.few(2)
@pytest.mark.usefixtures("one_reference")
@pytest.mark.parametrize("name", TRIED)
def test_a_right_plan_passes(name: str) -> None:
    plan, args = planned(name)
    assert any(len(set(shares)) > 1 for shares in plan.result.sizes.shares)
    report = plan.check(*args)
    assert report.ok, report
    # By the plain yardstick alone it would fail.
    assert report.yardsticks
    assert "judged by the function" in str(report)
    assert not report.as_is
    assert not report.not_widened


@pytest.mark.usefixtures("one_reference")
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "mutation"), [*product(TRIED, MUTATIONS)], ids=lambda x: x if isinstance(x, str) else x.__name__
)
def test_a_wrong_program_fails(name: str, mutation: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    right, args = planned(name)
    changed = mutate(monkeypatch, right, mutation)
    plan = lowered_by(right, SWITCHED_ALONE, "switch")
    report = plan.check(*args)
    assert changed
    assert not report.ok, f"{changed}: {report}"


MODEL = """
from mixed_cases import CASES

def step():
    return CASES["{name}"]()
"""
CLUSTER = """
[network]
bandwidth = "1000 Tbit/s"
latency = "0.1 ns"
""" + "".join(
    f"""
[[devices]]
kind = "x{speed}"
count = 2
[kinds.x{speed}]
flops = {{ float32 = "{speed} GFLOP/s" }}
bandwidth = "{speed} GB/s"
memory = "16 GB"
overhead = "0.1 ns"
"""
    for speed in (3, 1)
)


# All of them are checked above, by the same function.
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["scan", "loss_scaling"])
def test_of_the_command_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 0 for the plan, over several steps, and 1 for a wrong program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL.format(name=name))
    (tmp_path / "slow.toml").write_text(CLUSTER)
    model = "model.py:step"
    assert main(["search", model, "--cluster", "slow.toml", "--plan", "plan.json", "--form", "switch"]) == 0
    found = hapsynth.load("plan.json", *CASES[name]())
    lowered_by(found, SWITCHED_ALONE).save("plan.json")
    assert main(["run", model, "--plan", "plan.json", "--steps", "2", "--json", "run.json"]) == 0
    assert "judged by the function with its floats widened" in capsys.readouterr().out
    assert WIDENED in json.loads((tmp_path / "run.json").read_text())["yardsticks"].values()
    changed = mutate(monkeypatch, found, scaled)
    assert main(["run", model, "--plan", "plan.json", "--steps", "2"]) == 1
    assert changed
    assert "check failed" in capsys.readouterr().err
