"""`search --advise`: which clusters are compared, what is said of them, and what the command writes."""

from __future__ import annotations

import io
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import wide_activations
from cli_model import CLUSTER, MODEL
from slow_devices import slow_cluster
from wide_activations import ARGS

from hapsynth._warn import OverlapWarning
from hapsynth.api import synthesize
from hapsynth.cli import commands
from hapsynth.cli.main import main
from hapsynth.cluster.cluster import Cluster, ClusterWarning, DeviceKind, Link
from hapsynth.cluster.curves import Curve
from hapsynth.report.tables import console
from hapsynth.report.what_if import advice_record, print_advice
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.whatif import cluster_variants
from hapsynth.whatif.cluster_variants import Variant, advise, changes, sentences
from hapsynth.whatif.remedies import Shortage, remedies

FAST = DeviceKind("fast", {"float32": 1e13}, 1e12, 1 << 34, overhead=0.0, price_per_hour=3.0)
SLOW = DeviceKind("slow", {"float32": 1e10}, 1e9, 1 << 34, overhead=1e-3, price_per_hour=1.0)
WIRE = Link(1e9, 1e-4)


def cluster(*kinds: DeviceKind) -> Cluster:
    return Cluster("c", kinds, tuple(range(len(kinds))), WIRE)


def test_what_is_compared() -> None:
    found = {change: c for change, c, _ in changes(cluster(FAST, FAST, SLOW))}
    assert list(found) == [
        *("without the 2 fast", "without the 1 slow", "with 1 more fast", "with 2 more fast", "with 1 more slow"),
        *(f"with {x}x the network bandwidth" for x in ("0.5", "2", "10")),
    ]
    assert [c.n for c in found.values()] == [1, 2, 4, 5, 4, 3, 3, 3]
    # One kind can't be left out, and one device has no network.
    assert [c.n for _, c, _ in changes(cluster(FAST))] == [2]


def test_what_joins_a_host_inside_joins_no_others() -> None:
    """More devices are in that host where the file says of no network, and where a profile knows of none."""
    link = {"bandwidth": "100 GB/s", "latency": "2 us"}
    file: dict[str, Any] = {"name": "box", "intra": link, "devices": [{"kind": "T4", "hosts": 1, "per_host": 2}]}
    network = {"network": {"bandwidth": "1 GB/s", "latency": "2 us"}}
    box, joined = Cluster.from_dict(file), Cluster.from_dict({**file, **network})
    measured, single = replace(box, intra=None), box.subset([0])
    more = lambda of: [(change, c.hosts) for change, c, _ in changes(of) if "more" in change]
    assert more(box) == more(measured) == [("with 2 more T4 in the same host", (0,) * 4)]
    assert more(single) == [("with 1 more T4 in the same host", (0, 0))]
    assert more(joined) == [("with 2 more T4", (0, 0, 1, 1))]


def test_a_kind_that_is_in_the_way_is_to_be_left_out() -> None:
    """Devices without a share still hold what is whole and take part in communication: the plan does without them."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    step = lambda w, x: (w - 1e-3 * x.T @ jnp.tanh(x @ w), (x @ w).sum())
    plan = synthesize(step, (f32(512, 512), f32(4096, 512)), cluster(FAST, FAST, SLOW))
    planned = lambda on: synthesize(step, (f32(512, 512), f32(4096, 512)), on)
    variants = advise(plan, planned, lambda _: None)
    known = {v.change: v for v in variants}
    without, base = known["without the 1 slow"], known["as it is"]
    assert base.cost_s == plan.cost
    assert without.cost_s is not None
    assert without.cost_s == pytest.approx(base.cost_s)
    assert base.with_all_s is not None
    assert without.cost_s < 0.9 * base.with_all_s
    # Planned as any other cluster: no more than that, and no less.
    again = synthesize(step, (f32(512, 512), f32(4096, 512)), plan.cluster.without("slow"))
    assert without.cost_s == pytest.approx(again.cost, rel=1e-12)
    assert without.price(base) == pytest.approx(6.0 * again.cost / 3600)
    costs = [v.cost_s for v in variants]
    assert costs == sorted(costs, key=lambda c: c or 0.0)
    assert any(s.startswith("the 1 slow would make this slower: the plan leaves them out") for s in sentences(variants))


def test_no_measured_time_is_compared_with_a_modelled_one() -> None:
    """A measured collective takes ten times as long as modelled; among more devices none was measured."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    step = lambda w, x: (w - 1e-3 * x.T @ jnp.tanh(x @ w), (x @ w).sum())
    planned = lambda on: synthesize(step, (f32(512, 512), f32(4096, 512)), on)
    bare = cluster(SLOW, SLOW)
    slow = {
        step: Curve(((0.0, 0.3), (1e9, 20.0))) for step in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    }
    plan, modelled = planned(replace(bare, collectives={"hap": slow})), planned(bare)
    assert plan.cost > 1.1 * modelled.cost
    variants = advise(plan, planned, lambda _: None)
    found = {row["change"]: row for row in advice_record(variants)["clusters"]}
    more = found["with 2 more slow, collectives by the model"]
    assert (
        more["speedup"]
        == pytest.approx(modelled.cost / more["modelled_s"])
        == pytest.approx(plan.cost / more["cost_s"])
    )
    assert found["as it is"]["modelled_s"] is None
    assert found["with 10x the network bandwidth"]["speedup"] > 1


def test_what_is_left_of_a_measured_cluster_is_compared_as_it_is() -> None:
    """One device has no collectives, and none of its time is the model's where the whole was measured."""
    two = replace(cluster(FAST, SLOW), collectives={"hap": {"all_reduce": Curve(((0.0, 0.3), (1e9, 20.0)))}})
    result = SimpleNamespace(with_all_s=None, interrupted=False)
    of = lambda on: 2.0 if on.n == 1 else 10.0 if on.collectives else 5.0
    planned: Any = lambda on: SimpleNamespace(cluster=on, cost=of(on), gap=0.0, devices=range(on.n), result=result)
    variants = advise(planned(two), planned, lambda _: None)
    found = {row["change"]: row["speedup"] for row in advice_record(variants)["clusters"]}
    assert found["without the 1 slow"] == 5.0
    assert found["with 1 more slow, collectives by the model"] == 1.0
    assert "the 1 slow make this slower: leave them out (2.000 s a step without, 10.000 s with)" in sentences(variants)


def test_times_and_prices_are_compared_as_speedups_are() -> None:
    """A modelled step is half as long as a measured one: of a third device it brings, and costs, as much of that."""
    base = Variant("as it is", cluster(FAST, SLOW), 1.0)
    more = Variant("with 1 more slow", cluster(FAST, SLOW, SLOW), 0.45, modelled_s=0.5)
    row = advice_record([base, more])["clusters"][1]
    assert (row["cost_s"], row["modelled_s"], row["speedup"]) == pytest.approx((0.9, 0.45, 1 / 0.9))
    assert row["price_per_step"] == pytest.approx(5 * 0.9 / 3600)
    out = io.StringIO()
    print_advice(console(out), [base, more])
    text = out.getvalue()
    assert re.search(r"with 1 more slow +3 devices +900.000 ms +1.11x +0.00125", text)
    assert "a step is cheapest as it is: 0.00111" in text


def test_several_mesh_axes_are_kept_or_said_to_be_one() -> None:
    grid = replace(cluster(FAST, FAST, SLOW, SLOW), axes=(("data", 2), ("model", 2)))
    found = {change: c.axes for change, c, _ in changes(grid) if "network" not in change}
    assert found == {
        "without the 2 fast": (("data", 1), ("model", 2)),
        "without the 2 slow": (("data", 1), ("model", 2)),
        "with 1 more fast, on one mesh axis": (("hap", 5),),
        "with 2 more fast": (("data", 3), ("model", 2)),
        "with 1 more slow, on one mesh axis": (("hap", 5),),
        "with 2 more slow": (("data", 3), ("model", 2)),
    }
    # Rows that would be of other devices than before, and what is left of a row.
    uneven = replace(cluster(FAST, SLOW, SLOW, SLOW), axes=(("data", 2), ("model", 2)))
    axes = {change: c.axes for change, c, _ in changes(uneven)}
    assert axes["with 1 more fast, on one mesh axis"] == (("hap", 5),)
    assert uneven.plus("fast", 2).axes == (("hap", 6),)
    assert "without the 1 fast, on one mesh axis" in axes
    slower = Variant("without the 1 fast, on one mesh axis", uneven.without("fast"), 0.5, 0.0, "fast")
    said = sentences([Variant("as it is", uneven, 1.0), slower])
    assert said[0].startswith("the 1 fast make this slower: leave them out")


def test_what_is_said() -> None:
    two, one = cluster(FAST, SLOW), cluster(FAST)
    said = lambda cost: sentences(
        [Variant("as it is", two, 1.0), Variant("without the 1 slow", one, cost, 0.0, "slow")]
    )
    assert said(0.5)[0] == "the 1 slow make this slower: leave them out (500.000 ms a step without, 1.000 s with)"
    assert said(1.0)[0].startswith("the 1 slow don't help")
    # 4 an hour for two, 3 for one: worth it as long as it takes less than 4/3 of the time.
    assert said(1.3) == ["a step is cheapest without the 1 slow: 0.00108 instead of 0.00111"]
    assert said(1.4) == ["a step is cheapest as it is: 0.00111"]
    assert said(None) == ["a step is cheapest as it is: 0.00111"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "mixed.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    asked = [
        "search",
        "model.py",
        "--cluster",
        "mixed.toml",
        "--memory-limit",
        "10 MiB",
        "--advise",
        "--json",
        "a.json",
    ]
    assert main(asked) == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    data = json.loads((tmp_path / "a.json").read_text())
    rows = data["advice"]["clusters"]
    assert [r["cost_s"] for r in rows if r["change"] == "as it is"] == [data["cost_s"]]
    for row in rows:
        assert row["change"] in text
        assert row["speedup"] == data["cost_s"] / row["cost_s"]
        assert row["price_per_step"] is None
    assert {str(r["devices"]) for r in rows} >= {"{'V100-16GB': 4}", "{'P4-8GB': 4}", "{'V100-16GB': 8, 'P4-8GB': 4}"}
    assert "price" not in text
    assert all(sentence in text for sentence in data["advice"]["sentences"])


@pytest.mark.parametrize("asked", ["overlap", "recompute"])
def test_other_clusters_are_planned_for_as_their_own(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the function as it is, with the same options: the figures of unlike plans can't be compared."""
    (tmp_path / "model.py").write_text(
        "from wide_activations import ARGS, step\n\n\ndef target():\n    return step, ARGS\n"
    )
    here = slow_cluster([1.0, 1.0], bandwidth=1e8)
    limit = None if asked == "overlap" else 0.85 * max(synthesize(wide_activations.step, ARGS, here).memory)
    here.save(tmp_path / "c.toml")
    other = here.scaled_network(2.0) if asked == "overlap" else here.plus("x1.0", 2)
    monkeypatch.setattr(cluster_variants, "changes", lambda _: [("another", other, None)])
    options = [] if limit is None else ["--memory-limit", f"{limit} B"]
    file = ["search", str(tmp_path / "model.py"), "--cluster", str(tmp_path / "c.toml"), "-q"]
    assert main([*file, *options, f"--{asked}", "--advise", "--json", str(tmp_path / "a.json")]) == 0
    found = {c["change"]: c["cost_s"] for c in json.loads((tmp_path / "a.json").read_text())["advice"]["clusters"]}
    alike = synthesize(wide_activations.step, ARGS, other, memory_limit=limit, **{asked: True})
    assert found["another"] == pytest.approx(alike.cost, rel=1e-9)
    if asked == "overlap":
        assert alike.cost < 0.995 * synthesize(wide_activations.step, ARGS, other).cost
    else:
        # There nothing has to be made again.
        assert alike.traced.graph.again is None


TINY = """
import jax
import jax.numpy as jnp


def target():
    x = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return (lambda w, x: (w - (x.T @ jnp.tanh(x @ w)) * 1e-3, x.sum())), (w, x)
"""
SMALL = """
[network]
bandwidth = "10 Gbit/s"
latency = "20 us"
[[devices]]
kind = "small"
count = 2
[kinds.small]
base = "T4"
memory = "64 KiB"
"""


def test_what_would_make_it_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(TINY)
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    asked = ["search", "model.py", "--cluster", "small.toml", "--json", "a.json"]
    assert main(asked) == 1
    assert "remedies" not in json.loads((tmp_path / "a.json").read_text())
    assert main([*asked, "--advise"]) == 1
    text, errors = capsys.readouterr()
    assert all(line.startswith("hapsynth search: infeasible: no program fits: ") for line in errors.splitlines())
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["status"] == "infeasible"
    found = {r["change"]: r for r in data["remedies"]}
    memory, *rest = sorted(found, key=lambda change: "on each of" not in change)
    assert re.fullmatch(r"with \d+ KiB on each of the 2 small", memory)
    assert {re.sub(r"\d+", "N", change) for change in rest} == {"with N more small", "with a batch of N instead of N"}
    for change, r in found.items():
        assert change in text
        if r["fits"]:
            # As little as does: what fits on no less.
            assert r["memory_bytes"] <= (64 << 10 if change != memory else 2**30)
    assert found[memory]["fits"]
    assert found[next(c for c in rest if "batch" in c)]["fits"]


def test_what_is_for_a_plan_alone_is_left_out_of_remedies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closer bound, and warnings; and no progress is shown that was not to be."""
    (tmp_path / "model.py").write_text(TINY)
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    gaps, terminal = list[float | None](), io.StringIO()

    def planned(*args: Any, joint_gap: float | None, **options: Any) -> Any:
        gaps.append(joint_gap)
        for kind in (ClusterWarning, OverlapWarning):
            warnings.warn("so it is", kind, stacklevel=1)
        raise InfeasibleError("no program fits", 1e6)

    monkeypatch.setattr(commands, "synthesize", planned)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    assert (
        main(["search", "model.py", "--cluster", "small.toml", "--advise", "--no-progress", "--joint-gap", "3%"]) == 1
    )
    assert (gaps[0], set(gaps[1:])) == (0.03, {None})
    said = ["warning: so it is", "warning: so it is", "infeasible: no program fits"]
    assert terminal.getvalue().splitlines() == [f"hapsynth search: {line}" for line in said]


def test_no_more_is_tried_than_does() -> None:
    """On numbers given: what a program needs is 1000 bytes shared by the devices, and 100 on each."""
    tried: list[int] = []

    def plan(args: Any, kwargs: Any, on: Cluster, limit: float | None) -> Any:
        tried.append(on.n)
        needs = 100 + 1000 / on.n
        if needs > min(k.memory if limit is None else limit for k in on.devices):
            raise InfeasibleError("no", needs)
        return SimpleNamespace(cost=1.0 / on.n, memory=(needs,), result=SimpleNamespace(interrupted=False))

    tiny = replace(FAST, memory=0x100)
    lacking = Shortage(
        lambda x: x, (jax.ShapeDtypeStruct((1,), jnp.float32),), {}, cluster(tiny, tiny), None, 600.0, plan
    )
    more, memory = remedies(lacking, lambda _: None)
    # 7 devices need 243 bytes.
    assert (more.change, more.devices, more.cost_s) == ("with 5 more fast", 7, 1 / 7)
    assert tried == [2, 4, 8, 6, 7]
    assert memory.change == "with 1 KiB on each of the 2 fast"
    hopeless = replace(lacking, cluster=cluster(*[replace(FAST, memory=90)] * 32), needs=131.25)
    tried.clear()
    memory, more = remedies(hopeless, lambda _: None)
    # 64 devices need 116 bytes, 128 need 108: hardly less.
    assert (more.cost_s, more.memory_bytes, tried) == (None, 100 + 1000 / 128, [32, 64, 128])
    assert memory.cost_s == 1 / 32
