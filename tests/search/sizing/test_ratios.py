"""Ratios asked for by hand: plans at just these, and errors that say why not and what would do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_model import MODEL
from slow_devices import first_devices, slow_cluster
from two_axes import cut_again

import hapsynth
from hapsynth.cli.main import main
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.search.memory.profile import peak
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.search.sizing.fixed_ratios import FixedRatios, RatioError, check_granule

CLUSTER = slow_cluster((3.0, 3.0, 1.0, 1.0))


def step(state: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"]))(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss


RNG = np.random.default_rng(0)
STATE = {"a": RNG.normal(size=(16, 32)).astype(np.float32), "b": RNG.normal(size=(32, 8)).astype(np.float32)}
X = RNG.normal(size=(640, 16)).astype(np.float32)


def planned(ratios: Any, mesh: Any = CLUSTER, **options: Any) -> hapsynth.Plan:
    return hapsynth.synthesize(step, (STATE, X), mesh, ratios=ratios, **options)


def test_every_class_is_cut_by_the_ratios_asked_for(tmp_path: Path) -> None:
    free = hapsynth.synthesize(step, (STATE, X), CLUSTER, leave_out=False)
    for asked in ((0.5, 0.25, 0.125, 0.125), (0.0, 0.5, 0.5, 0.0)):
        plan = planned(asked, first_devices(4), cluster=CLUSTER)
        assert plan.ratios
        assert set(plan.ratios.values()) == {asked}
        assert plan.cost >= free.cost
        assert plan.lower_bound == pytest.approx(plan.cost)
        assert plan.joint_lower_bound <= free.cost
        assert plan.check().ok
    plan.save(tmp_path / "p.json")
    assert hapsynth.load(tmp_path / "p.json", step, (STATE, X)).ratios == plan.ratios


def test_ratios_written_with_six_digits_are_whole() -> None:
    check_granule("x.0", np.array([0.333333, 0.666667]), 600)
    with pytest.raises(RatioError, match="the granule of x"):
        check_granule("x.0", np.array([0.3333, 0.6667]), 600)


def test_ratios_of_dimensions_without_a_common_granule() -> None:
    args = (jax.ShapeDtypeStruct((640, 16), jnp.float32), jax.ShapeDtypeStruct((16, 7), jnp.float32))
    fixed = {"[0]": "S(0)", "[1]": "S(1)"}
    with pytest.raises(
        RatioError, match=r"in \d+ units: the only ones that break none give all to one position; give ratios by name"
    ):
        hapsynth.synthesize(lambda x, w: (x + 1, w * 2), args, CLUSTER, ratios=(0.4, 0.4, 0.1, 0.1), fixed=fixed)


def test_named_classes_keep_theirs_and_the_others_find_their_own() -> None:
    free = hapsynth.synthesize(step, (STATE, X), CLUSTER, leave_out=False)
    batch = next(name for name, cls in zip(free.ratios, free.sizes.classes.all) if (2, 0, (0,), 0) in cls.members)
    asked = (0.25, 0.25, 0.25, 0.25)
    plan, by_path = planned({batch: asked}, fixed={"[1]": "S(0)"}), planned({"[1].0": asked}, fixed={"[1]": "S(0)"})
    assert plan.ratios == by_path.ratios
    cls = plan.sizes.classes.of[(2, 0, (0,), 0)]
    assert list(plan.ratios.values())[cls] == asked
    # At its own best ratios a plan costs what it costs without.
    again = planned(free.ratios)
    assert again.cost == pytest.approx(free.cost)
    # What is cut without changing the cost may differ.
    assert free.ratios.items() <= again.ratios.items()


def test_along_two_axes() -> None:
    cluster = hapsynth.Cluster(
        CLUSTER.name, CLUSTER.devices, CLUSTER.hosts, CLUSTER.network, axes=(("data", 2), ("model", 2))
    )
    plan = planned((0.375, 0.375, 0.125, 0.125), cluster)
    wanted = {"data,model": (0.375, 0.375, 0.125, 0.125), "data": (0.75, 0.25), "model": (0.5, 0.5)}
    wanted["model,data"] = (0.375, 0.125, 0.375, 0.125)
    assert plan.ratios
    for name, vector in plan.ratios.items():
        assert wanted[name.partition("@")[2]] == pytest.approx(vector)
    with pytest.raises(RatioError, match=r"ratios name '\[1\]\.0' on a mesh of the axes data, model; .* \[1\]\.0@data"):
        planned({"[1].0": (0.5, 0.5)}, cluster)


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "sum": ((0.5, 0.5, 0.5, 0.5), RatioError, r"ratios sum to 2, not to 1; divided by their sum .* \[0.25, 0.25, "),
    "length": ((0.5, 0.5), RatioError, "ratios holds 2 fractions; give 4, one for each device, in mesh order"),
    "negative": ((0.5, 0.75, -0.25, 0.0), RatioError, "ratios is -0.25 at position 2; give fractions of at least 0"),
    "not finite": ((0.5, float("nan"), 0.5, 0.0), RatioError, "ratios is nan at position 1"),
    "words": ("even", TypeError, "ratios is 'even'; give 4 fractions that sum to 1"),
    "no numbers": (("a", 1, 0, 0), TypeError, "ratios holds something that is no number"),
    "none": ({}, RatioError, "ratios name no class"),
    "unknown": ({"[2].0": (1, 0, 0, 0)}, RatioError, r"'\[2\]\.0', which is no class; did .*as in Plan.ratios"),
    "dimension": ({"[1].2": (1, 0, 0, 0)}, RatioError, r"name '\[1\]\.2', but .*\[640, 16\].* has no dimension 2"),
    "by name": ({"[1].0": (0.5, 0.4, 0, 0)}, RatioError, r"ratios\['\[1\]\.0'\] sum to 0.9, not to 1"),
    "granule": (
        (0.4001, 0.3999, 0.1, 0.1),
        RatioError,
        r"ratios \(0.4001, .* break the granule of in0\.0, which is cut in 16 units: the nearest that break none are "
        r"\(0.375, 0.375, 0.125, 0.125\); give these, or ratios by name",
    ),
    "granule by name": (
        {"[0]['b'].0": (0.45, 0.45, 0.05, 0.05)},
        RatioError,
        r"break the granule of \[0\]\['b'\]\.0, which is cut in 32 units: .*\(0.4375, 0.4375, 0.0625, 0.0625\)",
    ),
    "uncut": (
        {"[0]['b'].1": (0.5, 0.5, 0.0, 0.0)},
        RatioError,
        r"ratios are given for in1\.1, which the best program at them does not cut so; keep it cut with fixed=.*S\(1\)",
    ),
    "two names of one dimension": (
        {"[1].0": (0.5, 0.5, 0, 0), "in2.0": (0, 0, 0.5, 0.5)},
        RatioError,
        r"ratios name 'in2\.0', whose fractions another of its names gives unlike: name it once",
    ),
    "two names of one class": (
        {"[1].0": (0.375, 0.375, 0.125, 0.125), "v3.0": (0.25, 0.25, 0.25, 0.25)},
        RatioError,
        r"ratios are given for in2\.0 and, unlike these, for v3\.0, .* give those of one of them",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be(case: str) -> None:
    ratios, error, message = BAD[case]
    with pytest.raises(error, match=message):
        planned(ratios)


def test_a_memory_limit_that_ratios_break_is_told_with_the_device() -> None:
    fits = planned((0.25,) * 4, fixed={"[1]": "S(0)"})
    limit = peak(fits.program, fits.sizes, fits.cost_model())
    assert planned((0.25,) * 4, fixed={"[1]": "S(0)"}, memory_limit=limit).cost >= fits.cost
    skewed = (0.875, 0.125, 0.0, 0.0)
    with pytest.raises(InfeasibleError, match=r"was found at these ratios: device \d \(x.*\) has .* and") as e:
        planned(skewed, fixed={"[1]": "S(0)"}, memory_limit=limit)
    needed, over = re.search(r"needs ([\d.]+) MiB, ([\d.]+) MiB too much", str(e.value)).groups()  # pyright: ignore
    assert float(needed) - float(over) == pytest.approx(limit / 2**20, rel=1e-2)
    assert "; other layouts, other ratios, a device" in str(e.value)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    slow_cluster((3.0, 1.0), bandwidth=1e9).save(tmp_path / "c.toml")
    search = ["search", str(tmp_path / "model.py"), "--cluster", str(tmp_path / "c.toml"), "--json", "-"]
    assert main([*search, "--ratios", "0.625,0.375"]) == 0
    assert "0.625,\n" in capsys.readouterr().out
    for options, message in (
        (["0.5,0.6"], "ratios sum to 1.1, not to 1"),
        (["0.5,0.5", "--ratios", "[1]['x'].0=0.5,0.5"], "--ratios: give fractions for every class once"),
        (["0.5,0.5", "--advise"], "--advise is about plans at their own best ratios"),
        (["[1]['x'].0=half"], "is not fractions, as in 0.75,0.25"),
    ):
        assert main([*search, "--ratios", *options]) == 2
        assert message in capsys.readouterr().err


def test_shards_by_name_that_another_axis_cuts_again() -> None:
    """Of a state that several functions share one may cut again what another gave it cut once."""
    traced, program = cut_again()
    (x,) = traced.graph.inputs
    classes = Classes.build(traced.graph, program, FactorTable(traced.graph))
    asked = FixedRatios(named={(x, 1, (0,), 0): np.array([0.25, 0.75])})
    (c,) = {classes.of[x, 1, (0,), 0], classes.of[x, 1, (0, 1), 0]}
    found = asked.shares(classes, np.array([2.0, 1.0, 1.0, 2.0]))
    assert found == {c: (2, 1, 3, 6)}
    shares = tuple(found.get(cls.index, (cls.units, 0)) for cls in classes.all)
    sizes = Sizes(traced.graph, classes, shares)
    assert sizes.lengths(x, 1, (0,), 0) == (3, 9)
    asked.check(sizes)
    with pytest.raises(RatioError, match=r"the nearest that break none are \(0\.333333333, 0\.666666667\)"):
        FixedRatios(named={(x, 1, (0,), 0): np.array([0.3, 0.7])}).check(sizes)
    with pytest.raises(RatioError, match=r"given for in0\.1@b, which .* does not cut so; .* fixed=.*'R,S\(1\)'"):
        FixedRatios(named={(x, 1, (1,), 0): np.array([0.25, 0.75])}).check(sizes)
