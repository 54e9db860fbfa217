"""Plans that are kept on disk: found again for the same task alone, never wrong, safe among processes."""

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import graphs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from two_processes import run

import hapsynth
from hapsynth.cli.main import main
from hapsynth.cluster.cluster import Cluster
from hapsynth.running import plan_cache
from hapsynth.running.plan_cache import CACHE_DIR, cache_folder
from hapsynth.search.planning.device_subsets import ClusterPlanner


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def arguments(rows: int = 4096) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((rows, 64), jnp.float32)


@pytest.fixture
def unequal() -> Cluster:
    """So few devices that a search takes next to no time."""
    return graphs.cluster([3.0, 1.0, 1.0], latency=1e-7)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each search."""
    made: list[int] = []
    run = ClusterPlanner.run

    def counted(self: ClusterPlanner) -> Any:
        made.append(1)
        return run(self)

    monkeypatch.setattr(ClusterPlanner, "run", counted)
    return made


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*")) if folder.is_dir() else []


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        (jnp.array([0.5, 0.25, 0.25]), "ratios is .* give 3 fractions that sum to 1"),
        ({"[0].0": [0.5, 0.25, 0.25], 1: [0.5, 0.25, 0.25]}, "ratios name 1, which is no class"),
    ],
    ids=["array", "names"],
)
def test_ratios_of_no_use_are_named(ratios: Any, says: str, folder: Path, unequal: Cluster) -> None:
    """Before they are part of what the plan is looked for by."""
    with pytest.raises((TypeError, ValueError), match=says):
        hapsynth.synthesize(step, arguments(), unequal, ratios=ratios)
    assert not entries(folder)


def test_the_same_takes_no_search(folder: Path, searches: list[int], unequal: Cluster, tmp_path: Path) -> None:
    first = hapsynth.synthesize(step, arguments(), unequal)
    again = hapsynth.synthesize(step, arguments(), unequal)
    assert len(searches) == len(entries(folder)) == 1
    first.save(tmp_path / "first.json")
    again.save(tmp_path / "again.json")
    assert (tmp_path / "first.json").read_text() == (tmp_path / "again.json").read_text()
    of = lambda plan: replace(plan.result, program=None, sizes=None, timings_s={})
    for field in ("bounds", "sweeps", "states", "expanded", "status", "memory_bytes", "devices"):
        assert getattr(of(again), field) == getattr(of(first), field), field
    assert set(again.result.timings_s) == {"trace_s", "cache_s", "total_s"}


def test_numbers_of_other_types(folder: Path, searches: list[int], unequal: Cluster) -> None:
    for half in (Fraction(1, 2), 0.5, np.float32(0.5)):
        hapsynth.synthesize(step, arguments(), unequal, ratios=[half, Fraction(1, 4), np.float64(0.25)])
    assert len(searches) == len(entries(folder)) == 1


def test_a_found_plan_runs(folder: Path, searches: list[int], unequal: Cluster) -> None:
    mesh = jax.make_mesh((3,), ("data",))
    for _ in range(2):
        plan = hapsynth.synthesize(step, arguments(), mesh, cluster=unequal)
        assert plan.check().ok
    assert len(searches) == 1


def tied(w: Any, x: Any) -> Any:
    return w + step(w, x)


def looped(w: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda s: s[1] < 9, lambda s: (step(s[0], x), s[1] + 1), (w, 0))[0]


OTHERS: dict[str, dict[str, Any]] = {
    "another function": {"fn": tied},
    "another constant of the code": {"fn": lambda w, x: 2.0 * step(w, x)},
    "other shapes": {"args": arguments(2048)},
    "another dtype": {"args": (arguments()[0], jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16))},
    "another cluster": {"mesh": graphs.cluster([3.0, 2.0, 2.0])},
    "fewer devices": {"mesh": graphs.cluster([3.0, 1.0])},
    "no carry": {"carry": []},
    "a memory limit": {"memory_limit": 4e6},
    "all devices": {"leave_out": False},
    "fixed layouts": {"fixed": {"[1]": "S(0)"}},
    "ratios": {"ratios": [0.5, 0.25, 0.25]},
    "exact shards": {"form": "staged"},
    "recomputing": {"recompute": True},
    "overlap": {"overlap": True},
    "lowering": {"lowering": hapsynth.LoweringOptions(bundled_bytes=0)},
}


def test_anything_that_decides_a_plan_is_in_its_key(folder: Path, searches: list[int], unequal: Cluster) -> None:
    asked: dict[str, Any] = {"fn": step, "args": arguments(), "mesh": unequal}
    plan = lambda given: hapsynth.synthesize(given.pop("fn"), given.pop("args"), given.pop("mesh"), **given)
    plan(dict(asked))
    for known, (what, other) in enumerate(OTHERS.items(), 1):
        plan(asked | other)
        assert len(entries(folder)) == known + 1, what
        before = len(searches)
        plan(asked | other)
        assert len(searches) == before > known, what


def test_how_often_a_loop_runs_is_in_the_key(folder: Path, searches: list[int], unequal: Cluster) -> None:
    line = f"test_plan_cache.py:{looped.__code__.co_firstlineno + 1}"
    for trips in (3.0, 30.0, 3.0):
        hapsynth.synthesize(looped, arguments(), unequal, expect={line: trips})
    assert len(searches) == len(entries(folder)) == 2


def test_so_is_what_it_computes_with(folder: Path, searches: list[int], unequal: Cluster) -> None:
    """What numbers are, the version of JAX, hapsynth's source."""
    others = (jax.numpy_rank_promotion("raise"), patched(jax, "__version__", "0.0.1"))
    for known, other in enumerate((nullcontext(), *others, patched(plan_cache, "_source", lambda: "edited")), 1):
        with other:
            hapsynth.synthesize(step, arguments(), unequal)
        assert len(searches) == len(entries(folder)) == known


@contextmanager
def patched(where: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, value)
        yield


def flipped(text: str) -> str:
    """A digit of the cost is another."""
    at = text.index('"cost_s": ') + len('"cost_s": 0.00')
    return text[:at] + ("1" if text[at] != "1" else "2") + text[at + 1 :]


def edited(text: str) -> str:
    """Contents and digest that fit together, of a program that does not pass the checker."""
    entry = json.loads(text.partition("\n")[2])
    entry["plan"]["program"]["instructions"].pop()
    return signed(entry)


def of_another_task(text: str) -> str:
    entry = json.loads(text.partition("\n")[2])
    entry["key"] = "{}"
    return signed(entry)


def signed(entry: Any) -> str:
    content = json.dumps(entry)
    return f"{plan_cache.hashlib.sha256(content.encode()).hexdigest()}\n{content}"


def test_a_damaged_entry_is_named_and_replaced(
    folder: Path, searches: list[int], unequal: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cost = hapsynth.synthesize(step, arguments(), unequal).cost
    (entry,) = entries(folder)
    whole = entry.read_bytes()
    cut_short: Any = (lambda text: "", lambda text: text[:-9])
    damaged = [damage(whole.decode()).encode() for damage in (*cut_short, flipped, edited, of_another_task)]
    for known, content in enumerate((*damaged, b"\xff\xfe\x00"), 2):
        entry.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert hapsynth.synthesize(step, arguments(), unequal).cost == cost
        assert str(entry) in caplog.text
        assert "searched for anew" in caplog.text
        assert entry.read_bytes() == whole
        hapsynth.synthesize(step, arguments(), unequal)
        assert len(searches) == known


def test_writers_at_the_same_time(folder: Path, searches: list[int], unequal: Cluster) -> None:
    """Whoever reads meanwhile finds nothing or a whole entry."""
    with ThreadPoolExecutor(4) as pool:
        plans = list(pool.map(lambda _: hapsynth.synthesize(step, arguments(), unequal), range(8)))
    assert len({plan.cost for plan in plans}) == len(entries(folder)) == 1
    before = len(searches)
    hapsynth.synthesize(step, arguments(), unequal)
    assert len(searches) == before


def test_what_more_decides_is_not_kept(folder: Path, searches: list[int], unequal: Cluster) -> None:
    """A plan of a time budget; one that was asked for without the cache. What is kept does for a budget."""
    hapsynth.synthesize(step, arguments(), unequal, time_budget_s=30.0)
    hapsynth.synthesize(step, arguments(), unequal, cache=False)
    assert not entries(folder)
    hapsynth.synthesize(step, arguments(), unequal)
    assert len(searches) == 3
    hapsynth.synthesize(step, arguments(), unequal, time_budget_s=30.0)
    assert len(searches) == 3


@pytest.mark.usefixtures("rules_of_this_test_only")
def test_rules_of_the_users_own_are_not_known_by_a_key(folder: Path, unequal: Cluster) -> None:
    hapsynth.register_rule("tanh", "... -> ...", replace=True)
    hapsynth.synthesize(step, arguments(), unequal)
    assert not entries(folder)


def test_a_folder_that_cant_be_written(
    tmp_path: Path, unequal: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "file" / "plans"))
    assert hapsynth.synthesize(step, arguments(), unequal).cost > 0
    assert "can't be kept" in caplog.text
    assert "HAPSYNTH_CACHE_DIR=off" in caplog.text


def test_those_used_last_stay(folder: Path, unequal: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_ENTRIES", 2)
    plan = lambda rows: hapsynth.synthesize(step, arguments(rows), unequal)
    plan(1024)
    (first,) = entries(folder)
    plan(2048)
    (second,) = [e for e in entries(folder) if e != first]
    for entry, age in ((first, 100), (second, 50)):
        plan_cache.os.utime(entry, (age, age))
    plan(1024)
    others = folder / "annotations.json"
    others.write_text("")
    plan_cache.os.utime(others, (1, 1))
    plan(4096)
    assert {first, others} < {*entries(folder)}
    assert second not in entries(folder)


@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({CACHE_DIR: "/x/y"}, Path("/x/y")),
        ({CACHE_DIR: "off", "XDG_CACHE_HOME": "/c"}, None),
        *(({CACHE_DIR: off}, None) for off in ("", "OFF", "none", "0")),
        ({CACHE_DIR: "~/plans"}, Path("~/plans").expanduser()),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/hapsynth/plans")),
        ({}, Path("~/.cache/hapsynth/plans").expanduser()),
    ],
)
def test_where_plans_are_kept(environment: dict[str, str], where: Path | None) -> None:
    assert cache_folder(environment) == where


@pytest.mark.usefixtures("all_rounds")
def test_the_command_line(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second search finds what the first has kept, which ran in a process of its own."""
    search = ["search", "model.py", "--cluster", "mixed.toml", "-v"]
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "plans"))
    (first,) = run("import sys; from hapsynth.cli.main import main; sys.exit(main(sys.argv[1:]))", [search])
    assert main(search) == 0
    second = capsys.readouterr()
    assert main([*search, "--no-cache"]) == 0
    third = capsys.readouterr()
    assert "hapsynth search: not in the plan cache: " in first
    assert "hapsynth search: found in the plan cache: " in second.err
    assert "cache" not in third.err
    # How long it took, and what a search says besides of baselines.
    only = ("planned in", "gain", "        ", "hapsynth search: ")
    certificate = lambda text: [line for line in text.splitlines() if not line.startswith(only)]
    assert certificate(first) == certificate(second.out) == certificate(third.out)


FUNCTIONS: dict[str, Any] = {"train": step, "eval": lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)}
OTHERS_OF_SEVERAL: dict[str, dict[str, Any]] = {
    "another of the functions": {"functions": {**FUNCTIONS, "eval": lambda w, x: jnp.sum(x @ w)}},
    "another name": {"functions": {"train": FUNCTIONS["train"], "loss": FUNCTIONS["eval"]}},
    "another frequency": {"frequency": {"eval": 0.5}},
    "a state that is said": {"state": {"eval": {"[0]": "[0]"}}},
}


def test_plans_of_several_functions(folder: Path, searches: list[int], unequal: Cluster, tmp_path: Path) -> None:
    def planned(functions: Any = FUNCTIONS, **options: Any) -> hapsynth.Plans:
        args = dict.fromkeys(functions, arguments())
        return hapsynth.synthesize_several(functions, args, unequal, leave_out=False, **options)

    planned(cache=False)
    planned(time_budget_s=60.0)
    assert not entries(folder)
    planned().save(tmp_path / "first.json")
    before = len(searches)
    again = planned(time_budget_s=60.0)
    assert len(searches) == before
    assert {*again["eval"].result.timings_s} == {"trace_s", "cache_s", "total_s"}
    again.save(tmp_path / "again.json")
    assert (tmp_path / "first.json").read_text() == (tmp_path / "again.json").read_text()
    for known, (what, other) in enumerate(OTHERS_OF_SEVERAL.items(), 2):
        planned(**other)
        assert len(entries(folder)) == known, what
