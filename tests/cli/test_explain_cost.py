"""`explain --cost`: every line is the sum that it prints, and the lines add up to the plan's cost."""

import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from slow_devices import slow_cluster

from hapsynth.api import synthesize
from hapsynth.cli.main import main
from hapsynth.cluster import _units
from hapsynth.cluster.cluster import Cluster
from hapsynth.plan import Plan
from hapsynth.report.cost_breakdown import Computing, Sending, cost_lines, cost_record, print_costs
from hapsynth.report.tables import console
from hapsynth.whatif.alternatives import Alternatives

MEASURED = """
axes = { data = 2, model = 2 }
[network]
bandwidth = "10 MB/s"
latency = "20 us"
[intra]
bandwidth = "100 MB/s"
latency = "2 us"
[[devices]]
kind = "measured"
per_host = 2
[[devices]]
kind = "half"
per_host = 2
[kinds.measured]
flops = { float32 = "2 GFLOP/s" }
bandwidth = "4 GB/s"
memory = "1 GiB"
overhead = "1 us"
efficiency = 1
source = "hapsynth profile, JAX 0.1, thebox"
measured.matmul.float32 = [["1 kFLOP", "2 us"], ["1 MFLOP", "400 us"]]
[kinds.half]
base = "measured"
speed = 0.5
[collectives.data]
all_reduce = [["0 B", "18 us"], ["64 KiB", "440 us"], ["4 MiB", "16 ms"]]
[profile]
when = "2026-11-21"
machines = "thebox"
"""


def step(w: Any, x: Any) -> Any:
    """One whose loop decides by floats, so that devices must agree."""

    def loss(w: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w["a"]) @ w["b"])

    value, grad = jax.value_and_grad(loss)(w)
    w = jax.tree.map(lambda p, g: p - 1e-3 * g, w, grad)
    scale = jax.lax.while_loop(lambda s: s < 3.0, lambda s: s * 1.5 + jnp.sum(w["a"] @ w["b"]) * 1e-9, value * 0 + 1.0)
    return w, scale


def planned(cluster: Cluster) -> Plan:
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    args = ({"a": struct(64, 48), "b": struct(48, 64)}, struct(100, 64))
    return synthesize(step, args, cluster, leave_out=False)


@pytest.fixture(scope="module", params=["measured", "uneven"])
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    if request.param == "uneven":
        return planned(slow_cluster((3.0, 1.0, 1.0), bandwidth=1e8))
    file = tmp_path_factory.mktemp("cost") / "measured.toml"
    file.write_text(MEASURED)
    return planned(Cluster.load(file))


def test_lines_add_up_to_the_cost(plan: Plan) -> None:
    record = json.loads(json.dumps(cost_record(plan, cost_lines(plan))))
    found: list[float] = []
    for c in record["computing"]:
        assert c["rate"] is None or c["flops"] / c["rate"] == pytest.approx(c["compute_s"], rel=1e-12)
        computing = c["flops"] / c["rate"] if c["rate"] else 0.0
        once = c["launches"] * c["overhead_s"] + max(computing, c["nbytes"] / c["bandwidth"])
        assert c["seconds"] == pytest.approx(c["runs"] * once, rel=1e-12)
        assert plan.cluster.devices[c["device"]].name == c["kind"]
        found.append(c["runs"] * once)
    for s in record["sending"]:
        once = s["latency_s"] + s["wire_bytes"] * s["s_per_byte"] + s["turned_s"]
        assert s["seconds"] == pytest.approx(s["runs"] * once, rel=1e-12)
        assert 0 <= s["padding_bytes"] <= s["wire_bytes"]
        found.append(s["runs"] * once)
    assert math.fsum(found) == pytest.approx(plan.cost, rel=1e-12)
    assert record["cost_s"] == plan.cost
    assert {c["op_class"] for c in record["computing"]} >= {"matmul", "elementwise", "transcendental", "fed"}
    assert any(s["what"].startswith("agreement on ") for s in record["sending"])
    assert any(line["runs"] > 1 for line in (*record["computing"], *record["sending"]))


def test_every_figure_has_a_source(plan: Plan) -> None:
    lines = cost_lines(plan)
    computing = [c for c in lines if isinstance(c, Computing)]
    sending = [s for s in lines if isinstance(s, Sending)]
    if not plan.cluster.profile:
        assert {c.rate_from for c in computing if c.rate} == {"float32 peak, the cluster file"}
        assert {s.link_from for s in sending} == {"[network] of the cluster file"}
        return
    matmuls = {(c.kind, c.rate_from) for c in computing if c.op_class == "matmul"}
    profile = "hapsynth profile, JAX 0.1, thebox"
    assert matmuls <= {
        ("measured", f"measured curve of matmul float32, {profile}, 2026-11-21"),
        ("half", f"measured curve of matmul float32, {profile}, 0.5x as fast, 2026-11-21"),
    }
    assert {s.link_from for s in sending if (s.step, s.axis) == ("all_reduce", "data")} == {
        "measured curve of all_reduce, thebox, 2026-11-21"
    }
    assert {s.link_from for s in sending if s.axis == "model"} <= {"[intra] of the cluster file"}


def test_values_share_all_seconds_where_there_is_a_loop(plan: Plan) -> None:
    assert math.fsum(Alternatives(plan).spent().values()) == pytest.approx(plan.cost, rel=1e-12)


def test_padding_is_what_equal_shards_would_spare() -> None:
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    plan = synthesize(lambda x: jnp.tanh(x @ x).T, (struct(256, 256),), slow_cluster((3.0, 1.0), bandwidth=1e9))
    (gather,) = [line for line in cost_lines(plan) if isinstance(line, Sending)]
    share = max(max(s) / sum(s) for s in plan.sizes.shares)
    whole = 256 * 256 * 4
    assert gather.step == "all_gather"
    assert share > 0.6
    assert gather.wire_bytes == pytest.approx(share * whole)
    assert gather.padding_bytes == pytest.approx((share - 0.5) * whole)


UNITS = {**_units.TIME, **_units.MEMORY, **_units.RATE, **_units.WORK, **_units.BANDWIDTH}


def quantity(text: str) -> float:
    number, _, unit = text.strip().partition(" ")
    return float(number) * float(UNITS[unit])


def test_the_tables_say_the_same(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    print_costs(console(), plan, cost_lines(plan), top=1000)
    text = capsys.readouterr().out
    cut = lambda heading: text[text.index(heading) :].split("\n\n")[0].splitlines()
    rows = [re.split(r"  +", line.strip()) for line in cut("On devices")[2:]]
    spent = []
    for *_, launching, work, speed, seconds, _ in rows:
        launches, _, overhead = launching.partition(" x ")
        once = float(launches) * quantity(overhead) + quantity(work) / quantity(speed)
        # As printed: times of at least 1 ns, four digits of all else.
        assert quantity(seconds) == pytest.approx(once, rel=5e-4, abs=1e-9 + float(launches) * 0.5e-9)
        spent.append(quantity(seconds))
    for *_, count, latency, wire, _, speed, seconds, _ in (
        re.split(r"  +", line.strip()) for line in cut("Between devices")[2:]
    ):
        once = float(count) * quantity(latency) + (quantity(wire) / quantity(speed) if speed != "-" else 0.0)
        assert quantity(seconds) == pytest.approx(once, rel=5e-4, abs=1e-9 + float(count) * 0.5e-9)
        spent.append(quantity(seconds))
    assert sum(spent) == pytest.approx(plan.cost, rel=1e-3)
    for line in cut("The dearest")[1:]:
        formula, seconds = line.rsplit(": ", 1)[1].split(" = ")
        runs, times, terms = formula.rpartition(" x (")
        parts = [p.split(" / ") for p in (terms.rstrip(")") if times else formula).split(" + ")]
        once = math.fsum(_launched(p[0]) / (quantity(p[1]) if len(p) > 1 else 1.0) for p in parts)
        shown, count = quantity(seconds.split(", ")[0]), float(runs if times else 1)
        assert shown == pytest.approx(once * count, rel=1e-3, abs=1e-9 + count * 0.5e-9 * len(parts))


def _launched(text: str) -> float:
    times, _, each = text.rpartition(" x ")
    return float(times or 1) * quantity(each)


def test_the_command(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["explain", str(plan_file), "model.py", "--cost"]
    assert main([*asked, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "hapsynth-cost-1"
    seconds = [line["seconds"] for line in (*data["computing"], *data["sending"])]
    assert math.fsum(seconds) == pytest.approx(data["cost_s"], rel=1e-12)
    assert {c["rate_from"] for c in data["computing"]} == {
        "",
        "float32 peak x 0.5, NVIDIA V100 datasheet (2020), SXM2",
    }
    assert main(asked) == 0
    assert "Where the figures come from" in capsys.readouterr().out
    assert main([*asked[:3], "--json", "x.json"]) == 2
    assert "give both" in capsys.readouterr().err
    assert main([*asked, "--value", "v1"]) == 2
    assert "not allowed with" in capsys.readouterr().err
