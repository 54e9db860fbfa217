"""The page about a plan, its trace and what a notebook shows: their figures, and the page in a real browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hapsynth
from hapsynth.cli.main import main
from hapsynth.cluster.cluster import Cluster
from hapsynth.plan import Plan
from hapsynth.view import page
from hapsynth.view.record import difference, plan_record
from hapsynth.view.step import BOTH, COMPUTES, SENDS, Bar, Step, merged

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
F32 = jnp.float32


def step(state: Any, batch: Any) -> Any:
    def loss(state: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ state["a"]) @ state["b"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def arguments() -> Any:
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, F32)
    return {"a": struct(512, 1024), "b": struct(1024, 64)}, {"x": struct(32768, 512), "y": struct(32768, 64)}


def looped(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda w, row: (w + row.mean(), (w * row).sum()), w, x)


@pytest.fixture(scope="module")
def mixed8() -> Cluster:
    return Cluster.load(CLUSTERS / "mixed8.toml")


@pytest.fixture(scope="module")
def plan(mixed8: Cluster) -> Plan:
    return hapsynth.synthesize(step, arguments(), mixed8)


@pytest.fixture(scope="module")
def overlapped(mixed8: Cluster) -> Plan:
    return hapsynth.synthesize(step, arguments(), mixed8, overlap=True, form="staged")


@pytest.fixture(scope="module")
def in_a_loop(mixed8: Cluster) -> Plan:
    args = jax.ShapeDtypeStruct((1 << 16,), F32), jax.ShapeDtypeStruct((16, 1 << 16), F32)
    return hapsynth.synthesize(looped, args, mixed8, leave_out=False)


@pytest.fixture(scope="module")
def overlapped_in_a_loop(mixed8: Cluster) -> Plan:
    """With a collective in the loop."""
    args, cut = (jax.ShapeDtypeStruct(s, F32) for s in ((1 << 16,), (16, 1 << 16))), {"[0]": "S(0)", "[1]": "S(1)"}
    options: dict[str, Any] = {"leave_out": False, "overlap": True, "form": "staged", "fixed": cut}
    return hapsynth.synthesize(looped, tuple(args), mixed8, **options)


# The step


@pytest.mark.parametrize("which", ["plan", "overlapped", "in_a_loop"])
def test_a_step_takes_what_was_predicted(which: str, request: pytest.FixtureRequest) -> None:
    plan: Plan = request.getfixturevalue(which)
    found = Step(plan)
    assert found.makespan_s == pytest.approx(plan.cost, rel=1e-9)
    assert [d for lane in found.lanes for d in lane.devices] == list(plan.devices)
    for lane in found.lanes:
        assert all(a.end <= b.start + 1e-12 for a, b in zip(lane.bars, lane.bars[1:])), "one thing at a time"
    ran = {k for lane in found.lanes for bar in lane.bars for k in bar.instructions}
    assert ran == {k for k, s in enumerate(found.seconds) if s > 0}


@pytest.mark.parametrize("which", ["overlapped", "overlapped_in_a_loop"])
def test_exposed_seconds_are_those_of_the_plan(which: str, request: pytest.FixtureRequest) -> None:
    plan: Plan = request.getfixturevalue(which)
    found = Step(plan)
    for lane in found.lanes:
        for device in lane.devices:
            last = max(bar.end for bar in lane.bars)
            assert last - lane.busy_s <= plan.exposed[device] + 1e-12
    does = {bar.does for lane in found.lanes for bar in lane.bars}
    assert (SENDS if which == "overlapped" else BOTH) in does
    assert found.communication_s == plan.timeline.communication_s > 0
    lane, exposed = found.exposed
    assert exposed == plan.result.exposed_communication_s == plan.exposed[lane.devices[0]]


@pytest.mark.parametrize("which", ["plan", "overlapped"])
def test_memory_begins_and_ends_with_the_step(which: str, request: pytest.FixtureRequest) -> None:
    plan: Plan = request.getfixturevalue(which)
    found = Step(plan)
    at, held = found.memory
    assert held.shape == (len(found.groups), len(at))
    assert at == sorted(at)
    assert at[0] == 0.0
    assert at[-1] <= found.makespan_s
    for group, of in zip(found.groups, held, strict=True):
        # The order of the program is one of those that keep to the peak, give or take what XLA's own order spares.
        peak = plan.memory[plan.devices[group[0]]]
        assert peak <= of.max() * 1.001 or not plan.result.exact
        assert of.max() <= 2 * peak


def test_short_bars_are_drawn_together() -> None:
    bars = [Bar(0.0, 1.0, COMPUTES, (0,)), *(Bar(1 + k / 100, 1 + (k + 1) / 100, COMPUTES, (k,)) for k in range(1, 9))]
    found = merged([*bars, Bar(1.09, 1.1, SENDS, (9,)), Bar(1.5, 1.501, SENDS, (10,))], 0.02)
    assert [(bar.does, bar.instructions) for bar in found] == [
        (COMPUTES, (0,)),
        (COMPUTES, (1, 2, 3, 4, 5, 6, 7, 8)),
        (SENDS, (9,)),
        (SENDS, (10,)),
    ]
    assert merged(bars, 0.0) == bars


# The record and the page


def test_the_record_is_about_the_plan(plan: Plan) -> None:
    record = plan_record(plan, "mine")
    assert record["makespan"] == pytest.approx(plan.cost * 1e6, abs=1e-2)
    assert len(record["program"]) == len(plan.program.instructions)
    assert any("test_view.py:" in line[2] for line in record["program"])
    layouts = {a["path"]: (a["layout"], a["state"]) for a in record["arguments"]}
    assert {path: layout for path, (layout, _) in layouts.items()} == plan.layouts
    assert [state for _, state in layouts.values()] == [True, True, False, False]
    x = next(a for a in record["arguments"] if a["path"] == "[1]['x']")
    ((dim, shards),) = x["cuts"]
    assert (dim, sum(length for length, _ in shards)) == (0, 32768)
    kinds = [plan.cluster.devices[d].name for d in plan.devices]
    of_group = [record["lanes"][g]["name"].split()[-1] for _, g in shards]
    assert of_group == kinds
    names = [name for name, *_ in record["bounds"]]
    assert names[0] == "step time"
    assert "joint bound" in names


def test_two_axes_are_cut_by_their_own_devices(mixed8: Cluster) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    plan = hapsynth.synthesize(step, arguments(), mesh)
    for argument in plan_record(plan, "two axes")["arguments"]:
        for dim, shards in argument["cuts"]:
            assert sum(length for length, _ in shards) == argument["shape"][dim]


def test_a_plan_differs_from_another_in_what_it_does_otherwise(plan: Plan, mixed8: Cluster) -> None:
    assert difference(plan, plan) == []
    fixed = hapsynth.synthesize(step, arguments(), mixed8, fixed={"[1]['x']": "R"})
    everywhere = hapsynth.synthesize(step, arguments(), mixed8, leave_out=False)
    rows = difference(everywhere, fixed)
    assert rows
    texts = [everywhere.program.text(everywhere.traced.graph), fixed.program.text(fixed.traced.graph)]
    for what, _, first, second in rows:
        assert first != second
        if "{" in first + second:
            assert all(not line or line in text for line, text in zip((first, second), texts)), what


@pytest.mark.parametrize("layout", ["R", "S(0)"])
def test_plans_for_unlike_numbers_of_devices_are_set_side_by_side(layout: str, mixed8: Cluster) -> None:
    """Of an argument that must lie otherwise on two devices, what is done with it is listed; of the same, nothing."""
    asked = {"[1]['x']": layout, "[1]['y']": layout, "[0]['a']": "R", "[0]['b']": "R"}
    eight = hapsynth.synthesize(step, arguments(), mixed8, fixed={**asked, "[1]['x']": "R", "[1]['y']": "R"})
    two = hapsynth.synthesize(step, arguments(), mixed8.subset((0, 1)), fixed=asked)
    assert eight.program.axes != two.program.axes
    rows = difference(eight, two)
    cut = ["[1]['x']", "", "slice R → S(0)", ""]
    assert (cut in rows) == (layout == "S(0)")
    assert all(first != second for _, _, first, second in rows)


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.opened: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.opened.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_else(plan: Plan, overlapped: Plan) -> None:
    text = page([("</script>", plan), ("other", overlapped)])
    reader = Reader()
    reader.feed(text)
    assert reader.addresses == []
    assert reader.opened.count("script") == 1
    assert set(re.findall(r"https?://[^\s\"'\\]+", text)) == {"http://www.w3.org/2000/svg"}
    assert len(text) < 2 << 20
    with pytest.raises(ValueError, match="3 plans"):
        page([("a", plan)] * 3)


def test_a_plan_writes_its_page_and_trace(plan: Plan, overlapped: Plan, tmp_path: Path) -> None:
    assert (tmp_path / "p.html").write_text(plan.to_html()) > 10_000
    assert plan.to_html(tmp_path / "q.html", beside=overlapped) == (tmp_path / "q.html").read_text()
    text = overlapped.to_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert json.loads(text)["traceEvents"] == events
    complete = [e for e in events if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in complete) == pytest.approx(overlapped.cost * 1e6)
    assert {e["cat"] for e in complete} == {COMPUTES, SENDS}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in complete} == named
    assert any("test_view.py:" in e["name"] for e in complete)
    assert {e["name"] for e in events if e["ph"] == "C"} == {
        lane.name for lane in Step(overlapped).lanes if lane.devices
    }


def test_a_notebook_shows_the_figures_and_the_step(plan: Plan) -> None:
    text = plan._repr_html_()
    assert "<script" not in text
    assert text.count("<svg") == len(Step(plan).lanes)
    assert "0-3 V100-16GB" in text
    assert len(text) < 100_000


# The command


def test_the_command(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["search", "model.py", "--cluster", "mixed.toml", "--ratios", ",".join(["0.125"] * 8), "--plan", "b.json"])
        == 0
    )
    capsys.readouterr()
    assert main(["view", "plan.json", "model.py", "-o", "one.html", "--trace", "t.json"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^0-3 V100-16GB  #[#.]+$", text, re.M)
    assert text.endswith("page           one.html\ntrace          t.json\n")
    assert main(["view", "plan.json", "b.json", "model.py", "-o", "two.html", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert '"name":"plan.json"' in Path("one.html").read_text()
    assert '"name":"b.json"' in Path("two.html").read_text()
    assert json.loads(Path("t.json").read_text())["traceEvents"]
    Path("old").mkdir()
    Path("b.json").rename("old/plan.json")
    assert main(["view", "old/plan.json", "plan.json", "model.py"]) == 0
    assert re.findall(r"^(\S+): .* a step on", capsys.readouterr().out, re.M) == ["old/plan.json", "plan.json"]
    Path("old/plan.json").rename("b.json")
    for argv, why in (
        (["plan.json", "-o", "x.html"], "1 plan and 0 other files were given"),
        (["plan.json", "no.json", "model.py", "-o", "x.html"], "no.json: no such file"),
        (["plan.json", "b.json", "plan.json", "model.py", "-o", "x.html"], "3 plans and 1 other file were given"),
    ):
        assert main(["view", *argv]) == 2
        assert why in capsys.readouterr().err
    assert not Path("x.html").exists()


# A real browser


@pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium")
@pytest.mark.parametrize("how", ["one", "two"])
def test_a_browser_draws_the_page(how: str, plan: Plan, overlapped: Plan, tmp_path: Path) -> None:
    """Its script runs to the end without an error, without a network, and fills every part."""
    file = tmp_path / "plan.html"
    plan.to_html(file, beside=overlapped if how == "two" else None)
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--window-size=1280,3000"]
    command += [f"--screenshot={tmp_path / 'page.png'}", "--dump-dom", file.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    drawn = ran.stdout.partition("<script>")[0] + ran.stdout.rpartition("</script>")[2]
    assert 'data-ready="yes"' in drawn
    count = 2 if how == "two" else 1
    assert drawn.count("<canvas") == 2 * count
    assert drawn.count('class="bound"') == sum(len(plan_record(p, "")["bounds"]) for p in (plan, overlapped)[:count])
    assert "[0]['a']" in drawn
    assert "test_view.py:" in drawn
