"""What reports are made of: names, quantities, output files, example data, and the question "what else?"."""

import importlib
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from hapsynth._errors import UsageError
from hapsynth._files import write_text
from hapsynth._quantities import nbytes, percent, plural, seconds
from hapsynth.api import synthesize
from hapsynth.cli.model_file import load_target
from hapsynth.cli.output_files import Outputs
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import Traced, trace
from hapsynth.instructions.layout import S
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.rules.replicated_ops import named, uncovered
from hapsynth.instructions.testing.example_arguments import example_arguments, index_bound, is_not_negative
from hapsynth.plan import Plan
from hapsynth.report import progress as progress_module
from hapsynth.report.json_records import Entry, best_baseline, costs_of
from hapsynth.report.program_listing import brief
from hapsynth.report.progress import Best, activity, progress
from hapsynth.report.summary import print_summary
from hapsynth.report.tables import Table, console, device_groups, span
from hapsynth.running.names import Names
from hapsynth.search.formulation.choice_space import ChoiceSpace, Restriction
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.result import Progress
from hapsynth.search.solver import solve
from hapsynth.whatif.alternatives import Alternatives

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
F32 = jnp.float32


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A two-layer step on four fast and four slow devices."""

    def step(state: Any, x: Any) -> Any:
        def loss(state: Any) -> Any:
            return jnp.sum(jnp.tanh(x @ state["a"]) @ state["b"])

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    struct = lambda *shape: jax.ShapeDtypeStruct(shape, F32)
    args = ({"a": struct(512, 256), "b": struct(256, 512)}, struct(2048, 512))
    return synthesize(step, args, Cluster.load(CLUSTERS / "mixed8.toml"))


def summarized(plan: Plan) -> None:
    print_summary(console(), plan, costs_of(plan))


# Text.


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.5, "1.500 s"), (0.0174746, "17.475 ms"), (1e-3, "1.000 ms"), (2e-5, "20.000 us"), (0, "0.000 us")],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


def test_quantities() -> None:
    assert seconds(math.inf) == "-"
    assert [nbytes(x) for x in (0, 1023, 1024, 3 << 19, 5 << 30, 1 << 50)] == [
        *("0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB", "1048576.0 GiB"),
    ]
    assert [percent(x) for x in (0, -1e-12, 1e-6, 0.0456, -0.1)] == ["0.00 %"] * 3 + ["4.56 %", "-10.00 %"]
    assert [plural(n, "op") for n in (0, 1, 2)] == ["0 ops", "1 op", "2 ops"]
    assert [span(x) for x in ((3, 3), (4, 3))] == ["3", "3..4"]


def test_device_groups() -> None:
    assert device_groups(Cluster.load(CLUSTERS / "mixed8.toml")) == [
        ("0-3 V100-16GB", range(4)),
        ("4-7 P4-8GB", range(4, 8)),
    ]
    assert [len(group) for _, group in device_groups(Cluster.load(CLUSTERS / "paper64.toml"))] == [16, 48]


def test_names(plan: Plan) -> None:
    names = Names(plan.traced)
    a = names.find("[0]['a']")
    assert a is not None
    assert (names.value(a), names.shape(a)) == ("[0]['a']", "f32[512, 256]")
    assert names.find(plan.traced.graph.values[a].name) == a
    assert names.find("[0]['c']") is None
    made = plan.traced.graph.ops[0].results[0]
    assert names.value(made).startswith(f"v{made} dot_general (test_report.py:")
    for cls in plan.sizes.classes.all:
        assert " dim " in names.cut(cls)


def test_brief_listing_leaves_out_the_middle(plan: Plan) -> None:
    costs = costs_of(plan)
    everything = brief(plan, costs, 10_000)
    assert sum(text.startswith("* ") for text in everything) == sum(plan.program.collectives().values())
    short = brief(plan, costs, 3)
    assert len(short) == min(len(everything), 4)
    if len(everything) > 3:
        assert "(--program prints everything)" in short[2]


def test_a_gain_of_next_to_nothing_is_said(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    entry = lambda times, *, fits=True: Entry(times * plan.cost, 1e9, fits, {}, (0,))
    ours = {"hapsynth": entry(1.0)}

    def said(entries: dict[str, Entry]) -> list[str]:
        print_summary(console(), plan, [], ours | entries)
        lines = capsys.readouterr().out.splitlines()
        at = next((n for n, line in enumerate(lines) if line.startswith("gain")), None)
        return [] if at is None else [line for line in lines[at : at + 3] if line.startswith(("gain", "      "))]

    assert said({}) == []
    worth = said({"zero2, on 0-3": entry(1.5), "data_parallel": entry(1.7), "one device": entry(3.0)})
    assert worth == [
        "gain           1.50x over the best baseline (ZeRO-2, even, on 0-3, without overlap), "
        "3.00x over one device (V100-16GB)"
    ]
    small = said({"zero2": entry(1.04), "data_parallel": entry(1.01, fits=False), "one device": entry(9.0, fits=False)})
    assert small == [
        "gain           1.04x over the best baseline (ZeRO-2, even, without overlap), "
        "one device (V100-16GB) is too small",
        "               next to nothing over the best baseline (ZeRO-2, even, without overlap): "
        + seconds(1.04 * plan.cost),
    ]
    assert best_baseline(ours | {"zero2": entry(1.0, fits=False)}) is None


def test_one_device_and_nothing_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.toml").write_text(
        '[intra]\nbandwidth = "1 GB/s"\nlatency = "1 us"\n[[devices]]\nkind = "V100-16GB"\n'
    )
    one = Cluster.load(tmp_path / "one.toml")
    summarized(synthesize(lambda x: x + 1, (jax.ShapeDtypeStruct((), F32),), one))
    text = capsys.readouterr().out
    assert "0 V100-16GB" in text
    assert "no primitive" in text


def test_replicated_primitives_are_counted() -> None:
    unheard = Primitive("unheard")
    unheard.def_abstract_eval(lambda x: x)
    traced = trace(lambda x: jax.lax.cumsum(unheard.bind(unheard.bind(x))), (jax.ShapeDtypeStruct((8, 8), F32),))
    assert named(traced.graph) == {"unheard": 2}


def test_what_cannot_be_divided_is_weighed() -> None:
    """Without a rule, or with one that blocks every dimension; never scalars, nor what some dimension may be cut of."""

    unknown = jex.Primitive("no_such_rule")
    unknown.def_abstract_eval(lambda x: x)

    def step(x: Any, y: Any) -> Any:
        tall = jnp.sort(y)
        return unknown.bind(x), jnp.sort(y.reshape(4, 8), axis=0), tall, tall[3] * 2.0, x @ x

    graph = trace(step, (jax.ShapeDtypeStruct((8, 8), F32), jax.ShapeDtypeStruct((32,), F32))).graph
    rows = {(r.primitive, r.reason): r for r in uncovered(graph)}
    assert {name for name, _ in rows} >= {"no_such_rule", "sort"}
    assert {name for name, _ in rows}.isdisjoint({"mul", "dot_general", "reshape"})
    other = rows["no_such_rule", "no sharding rule for this primitive"]
    assert (other.count, other.nbytes) == (1, 2 * 4 * 64)
    whole = rows["sort", "sorted"]
    assert (whole.count, whole.nbytes) == (1, 2 * 4 * 32)
    assert 0 < whole.bytes_share == other.bytes_share / 2 < 1
    assert list(rows.values()) == sorted(rows.values(), key=lambda r: -r.nbytes)


def test_nothing_is_uncovered_where_all_can_be_cut() -> None:
    graph = trace(lambda x: (x @ x, jnp.sin(x), x.sum(), jnp.ones(())), (jax.ShapeDtypeStruct((8, 8), F32),)).graph
    assert uncovered(graph) == ()


# Progress.


class Terminal:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_what_is_kept_whole_is_named_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    bits = lambda key, x: (jax.lax.rng_bit_generator(key, (4,)), jnp.linalg.cholesky(x))
    args = jax.ShapeDtypeStruct((4,), jnp.uint32), jax.ShapeDtypeStruct((8, 4, 4), F32)
    summarized(synthesize(bits, args, Cluster.load(CLUSTERS / "mixed8.toml")))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    # The factorizations are dealt out by batch.
    assert "replicated     rng_bit_generator x1" in lines
    assert "rng_bit_generator: one stream of random bits, which no device can enter in the middle" in lines


def test_progress_line() -> None:
    assert Best().line(Progress("astar", 4.21, 0.02, 0.0199, 7))[:2] == [
        "astar: best 20.000 ms, gap 0.50 %, 4.2 s, bound 19.900 ms, 7 nodes",
        "astar: best 20.000 ms, gap 0.50 %, 4.2 s, bound 19.900 ms",
    ]
    assert Best().line(Progress("dual", 0.0, math.inf, -math.inf, 0))[0] == "dual: best -, 0.0 s, 0 nodes"


def test_progress_never_tells_of_a_worse_program() -> None:
    """Another set of devices has a worse best program, with a bound and a gap that are not the best one's."""
    best = Best()
    best.line(Progress("search", 1.0, 0.02, 0.0199, 7))
    assert best.line(Progress("search", 2.0, 0.03, 0.0299, 9))[0] == "search: best 20.000 ms, 2.0 s, 9 nodes"
    assert best.line(Progress("search", 3.0, 0.01, 0.009, 9))[0].startswith("search: best 10.000 ms, gap 10.00 %, ")


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(None) as show:
        assert show is None
    with progress(True) as show:
        assert show is not None
        for cost in (0.2, 0.2, 0.1):
            show(Progress("search", 1.0, cost, 0.1, 1))
    text, errors = capsys.readouterr()
    assert text == ""
    assert errors.count("\n") == 2
    for wanted in (None, False, True):
        with activity(wanted) as tell:
            tell("another cluster")
    assert capsys.readouterr() == ("", "another cluster\n")


@pytest.mark.parametrize("columns", [80, 40, 20])
def test_progress_on_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, however narrow the terminal is."""
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    monkeypatch.setattr(progress_module.sys, "stderr", terminal)
    with progress(False) as show:
        assert show is None
    with activity(False) as tell:
        tell("nothing")
    assert terminal.text == ""
    with progress(None) as show:
        assert show is not None
        show(Progress("4 of 8 devices: joint bound", 1234.5, 0.2, 0.1, 123456))
    with activity() as tell:
        tell("searching without the layout of a value with a very long name, which takes more than a line to say")
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.text)
    assert max(map(len, re.split(r"[\r\n]+", drawn))) <= columns
    assert "4 of 8 devices" in drawn


# Tables.


@pytest.mark.parametrize(
    ("columns", "headers", "left_out"),
    [
        (200, ["name", "alike", "seconds", "share"], []),
        (34, ["name", "seconds", "share"], ["alike"]),
        (27, ["name", "seconds"], ["alike", "share"]),
        (10, ["name"], ["alike", "seconds", "share"]),
    ],
)
def test_a_narrow_table_leaves_out_columns(
    columns: int, headers: list[str], left_out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    rows = [["[0]['param / s']", "12", "1.2 s", "99 %"], ["[0]['other']", "1", "0.1 s", "1 %"]]
    console(terminal).print(Table(["name", "alike", "seconds", "share"], rows, minor=["alike"]))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.text).splitlines()
    assert lines[0].split() == headers
    assert lines[1].startswith("[0]['param / s']"), "no word is broken"
    assert lines[3:] == ([f"(not in {columns} columns: {', '.join(left_out)})"] if left_out else [])


# Output files.


def test_outputs_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    target.write_text("old")
    target.chmod(0o600)
    link = tmp_path / "link.json"
    link.symlink_to(target)
    with Outputs() as files:
        files.claim("--json", str(link))
        assert len(list(tmp_path.iterdir())) == 3
    assert len(list(tmp_path.iterdir())) == 2
    assert target.read_text() == "old"

    with Outputs() as files:
        files.claim("--json", str(link))
        files.write_json(str(link), {"a": 1})
    assert link.is_symlink()
    assert target.read_text() == '{\n  "a": 1\n}\n'
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "out.json"]


def test_a_text_goes_behind_links_and_into_pipes(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "plan.json", tmp_path / "link.json", tmp_path / "pipe"
    target.touch(0o600)
    link.symlink_to(target)
    write_text(link, "text")
    assert (link.is_symlink(), target.read_text(), target.stat().st_mode & 0o777) == (True, "text", 0o600)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert (pipe.is_fifo(), os.read(reader, 9)) == (True, b"text")
    os.close(reader)


def test_a_device_is_written_through(tmp_path: Path) -> None:
    with Outputs() as files:
        files.claim("--json", os.devnull)
        files.write_json(os.devnull, {})
    assert not Path(os.devnull).is_file()


def test_a_failing_write_is_a_usage_error(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with Outputs() as files:
        files.claim("--plan", str(tmp_path / "p.json"))
        with pytest.raises(UsageError, match=r"p\.json: can't be written: No space left on device"):
            files.write(str(tmp_path / "p.json"), full)
    assert list(tmp_path.iterdir()) == []


# Model files.


def test_a_model_file_imports_its_neighbours_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_model.py").write_text("def fn(x):\n    return x + 1\n")
    (tmp_path / "m.py").write_text(
        "from dataclasses import dataclass\nfrom neighbour_of_model import fn\n"
        "@dataclass\nclass Config:\n    n: int = 3\n"
        "def target():\n    return fn, [Config().n]\n"
    )
    target = load_target(str(tmp_path / "m.py"))
    assert (target.fn(1), target.args, target.kwargs) == (2, (3,), {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.py", "neighbour_of_model.py"]


# Example data.


def traced_example(name: str) -> tuple[Traced, Any]:
    module = importlib.import_module(name)
    small = {
        "transformer": {"batch": 8, "seq": 16, "vocab": 37, "layers": 1, "width": 32, "heads": 4, "ff": 64},
        "cnn": {"batch": 16, "size": 8, "channels": (8, 16)},
    }
    fn, args = module.target_for(module.Config(**small[name]))
    return trace(fn, args), args


def test_integers_stay_within_what_they_index() -> None:
    traced, args = traced_example("transformer")
    values = dict(zip(traced.in_paths, traced.graph.inputs))
    assert index_bound(traced.graph, values["[1]['tokens']"]) == 37
    assert index_bound(traced.graph, values["[1]['targets']"]) == 37
    (_, batch), _ = example_arguments(traced, args, {})
    assert batch["tokens"].dtype == np.int32
    assert batch["tokens"].min() >= 0
    assert 20 < batch["tokens"].max() < 37


def test_dimensions_taken_whole_bound_no_index() -> None:
    """A row that is read, written or looked up under `vmap` is chosen among the rows, whatever its length."""

    def fn(table: Any, token: Any, row: Any, place: Any, other: Any) -> Any:
        looked_up = jax.vmap(lambda t: jax.lax.dynamic_index_in_dim(table, t))(token)
        written = jax.lax.dynamic_update_slice(table, jnp.ones((3, 4)), (row, 0))
        return looked_up, written, jax.lax.dynamic_slice(table, (place, 0), (7, 4)), other + 1

    one = jax.ShapeDtypeStruct((), jnp.int32)
    graph = trace(fn, (jax.ShapeDtypeStruct((50, 4), F32), jax.ShapeDtypeStruct((20,), jnp.int32), *[one] * 3)).graph
    assert [index_bound(graph, v) for v in graph.inputs[1:]] == [50, 48, 44, None]


def test_what_is_squared_may_be_negative() -> None:
    graph = trace(lambda x, y: jnp.linalg.norm(x) + jnp.sqrt(y.mean()), (jax.ShapeDtypeStruct((9,), F32),) * 2).graph
    assert [is_not_negative(graph, v) for v in graph.inputs] == [False, True]


@pytest.mark.parametrize("name", ["transformer", "cnn"])
def test_second_moments_are_not_negative(name: str) -> None:
    traced, args = traced_example(name)
    roots = {p for p, v in zip(traced.in_paths, traced.graph.inputs) if is_not_negative(traced.graph, v)}
    assert {p for p in traced.in_paths if ".nu[" in p} <= roots
    assert not {p for p in roots if ".mu[" in p or "['kernel']" in p} - {p for p in roots if ".nu[" in p}
    made, _ = example_arguments(traced, args, {})
    assert jax.tree.structure(made) == jax.tree.structure(args)
    for leaf, path in zip(jax.tree.leaves(made), traced.in_paths):
        assert path not in roots or (leaf >= 0).all()


def test_data_that_is_given_is_kept() -> None:
    x = np.arange(4.0, dtype=np.float32)
    struct = jax.ShapeDtypeStruct((4,), F32)
    args = (x, struct, 3, jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((), jax.random.key(0).dtype))

    def fn(x: Any, y: Any, n: Any, raw: Any, key: Any) -> Any:
        return x + y * n, raw, jax.random.uniform(key)

    traced = trace(fn, args)
    made, _ = example_arguments(traced, args, {})
    assert made[0] is x
    assert made[2] == 3
    assert made[3].dtype == np.uint32
    assert made[3].max() > 1000
    assert jax.dtypes.issubdtype(made[4].dtype, jax.dtypes.prng_key)
    again, _ = example_arguments(traced, args, {})
    np.testing.assert_array_equal(made[1], again[1])


# Alternatives.


def test_alternatives_agree_with_a_restricted_search(plan: Plan) -> None:
    known = Alternatives(plan, None)
    graph = plan.traced.graph
    for value in graph.inputs:
        found = {p: known.best_with(value, p) for p in known.others(value)}
        assert found
        best = known.best_other(value)
        assert best is not None
        assert best.proved
        assert best.cost_s == pytest.approx(min(a.cost_s for a in found.values() if a), rel=1e-4)
        for placement, alternative in found.items():
            assert alternative is not None
            assert alternative.layout == placement
            assert alternative.cost_s >= plan.lower_bound * (1 - 1e-4)
            structure = ChoiceSpace(graph, FactorTable(graph), Restriction({value: placement}))
            problem = ProblemBuilder(structure, known.model, known.ratios).problem()
            assert alternative.cost_s == pytest.approx(solve(problem, tolerance=1e-5).cost, rel=1e-4)


def test_alternatives_of_what_is_computed(plan: Plan) -> None:
    known = Alternatives(plan, None)
    spent = known.spent()
    assert sum(spent.values()) == pytest.approx(plan.cost)
    for value in sorted(spent, key=lambda v: -spent[v])[:3]:
        other = known.best_other(value)
        assert other is None or other.cost_s >= plan.lower_bound * (1 - 1e-4)
        assert known.best_with(value, S(17)) is None
