"""benchmarks/gpu.py without a GPU: every part runs to its end at tiny sizes, and its rows hold what it is for."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu
import jax
import modelled_profile
import numpy as np
import pytest
from on_gpu import flags, switch
from on_gpu.one_device import OneStaged, OneSwitch, Steps, one_of, with_shares
from on_gpu.settings import Row, Settings, fitting, parsed
from on_gpu.shares import for_two

TINY = Settings("tiny", examples=("mlp",), rounds=2)


def rows(part: str, variant: str = "", settings: Settings = TINY) -> list[Row]:
    found = list(gpu.module_of(part).rows(settings, variant))
    assert json.loads(json.dumps(found)) == found
    assert all(gpu.line({"part": part, "variant": variant, **row}) for row in found)
    return found


def test_overhead() -> None:
    (row,) = rows("overhead", "times")
    assert (row["example"], row["sizes"], row["dtype"]) == ("mlp", "tiny", "float32")
    assert row["plan_bytes"] == row["jit_bytes"]
    assert row["losses"]["plan"] == pytest.approx(row["losses"]["jit"], rel=1e-4)
    assert row["plan_loss_error"] < 1e-5
    assert row["plan_over_jit"] < 2
    low, high = row["step_ratio_quartiles"]
    assert low <= row["step_ratio"] <= high
    (row,) = rows("overhead", "allocated by plan")
    assert row["skipped"] == "the cpu backend does not tell what was allocated"


def test_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modelled_profile.install(monkeypatch.setattr)
    settings = Settings("tiny", examples=("mlp",), rounds=2, cluster=tmp_path / "cluster.toml", batches=(0.5,))
    found, *others = rows("profile", settings=settings)
    assert found["kind"] == "cpu"
    assert found["bandwidth"] > 0
    assert found["rates"]["matmul"]["float32"] > 0
    assert [row["what"] for row in others] == ["predicted", "measured"]
    assert [row["batch"] for row in others] == [16, 16]
    assert others[1]["ratio"] == pytest.approx(others[0]["predicted_s"] / others[1]["measured_s"])
    assert settings.kind().bandwidth == found["bandwidth"]


def test_shares_are_what_they_say() -> None:
    *found, line = rows("shares", settings=replace(TINY, shares=(1 / 4, 1 / 2)))
    assert [row["share"] for row in found] == [1 / 4, 1 / 2]
    assert len(line["ratios"]) == 2
    assert (line["what"], line["kind"]) == ("line", "slow1")
    for row in found:
        assert row["measured_s"] == pytest.approx(row["step_s"] - row["copies_s"])
        assert row["shares_of_classes"] == [row["share"]]
        assert row["collective_stages"] == row["local_stages"] - 1 > 0
    for field in ("held_bytes", "predicted_s"):
        assert sorted(row[field] for row in found) == [row[field] for row in found]
    assert line["predicted_start_s"] + line["predicted_slope_s"] / 4 == pytest.approx(found[0]["predicted_s"])


@pytest.mark.parametrize("form", [OneStaged, OneSwitch])
def test_a_device_that_holds_everything_computes_the_step(form: Any) -> None:
    example = TINY.example("mlp")
    plan = for_two(TINY, example)
    device = jax.devices()[-1]
    one = one_of(form, plan, with_shares(plan, (1, 0)), device)
    steps = Steps(one, jax.tree.leaves(example.arguments(device)))
    made = steps()
    assert all(x.devices() == {device} for x in made)
    fn, _ = example.target()
    for a, b in zip(made, jax.tree.leaves(jax.jit(fn)(*example.arguments(device))), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)
    again = steps()  # on the state that it left
    assert [x.shape for x in again] == [x.shape for x in made]
    assert float(again[-1]) != float(made[-1])


def test_switch_counts_what_it_prices() -> None:
    found = rows("switch", switch.DEFAULT)
    by_chain = {row["chain"] for row in found}
    assert by_chain == {1, 2}
    for row in found:
        if row["what"] == "none":
            assert row["stages"] == 0, "even shares need no switch"
        else:
            assert row["stages"] >= row["chain"]
            assert row["stages_for_a_hundredth"].keys() == {"0.01", "0.1", "1"}
    assert [row["branches"] for row in found if row["what"] == "switch"] == [2, 8]
    (row,) = rows("switch", "no command buffers")
    assert row["skipped"] == "command buffers are of XLA's GPU backend"


@pytest.mark.parametrize("branches", [1, 2, 4, 8])
def test_chains_hold_the_most_on_the_first_device(branches: int) -> None:
    lengths = switch.Chain("elementwise", 512, 8, 1).shares(branches)
    assert len(lengths) == switch.DEVICES
    assert len(set(lengths)) == branches
    assert lengths[0] == max(lengths) == 512
    assert min(lengths) > 0


def test_flags() -> None:
    ran, described = rows("flags", "none")
    assert ran["compile_s"] > 0
    assert len(ran["hlo"]) == 16
    assert described["skipped"] == "the compiler takes descriptions of GPUs only where one is"
    (row,) = rows("flags", "combines nothing")
    assert row["skipped"] == "the flags are of XLA's GPU backend"
    assert row["flags"].count("_combine_threshold_bytes=0") == 3


def test_collectives_of_other_groups_are_told_apart() -> None:
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    example: Any = Namespace(target=lambda: (lambda w, x: w - x.sum(0), (struct(8), struct(8, 8))))
    two, four = (flags.collectives(example, jax.devices()[:n]) for n in (2, 4))
    assert two["collectives"] == four["collectives"] == {"all-reduce": 1}
    assert two["collectives_digest"] != four["collectives_digest"]


def test_half_the_batch_where_there_is_no_room() -> None:
    def run(example: Any) -> Any:
        if example.config.batch > 8:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        yield {"batch": example.config.batch}

    found = list(fitting(TINY.example("mlp"), run))
    assert [row["batch"] for row in found] == [32, 16, 8]
    assert ["skipped" in row for row in found] == [True, True, False]


def test_sizes_are_options() -> None:
    given = (parsed("mlp.hidden=8,4"), parsed("mlp.batch=6"))
    config = Settings("tiny", given=given).example("mlp", batch=7).config
    assert (config.hidden, config.batch, config.features) == ((8, 4), 6, 8)
    for text, said in (
        ("gpt.batch=1", "names no example; use mlp, transformer, cnn"),
        ("mlp.depth=1", "mlp has no field 'depth'; it has batch, "),
        ("mlp.batch=many", "'many' is no number"),
        ("mlp.batch=1,2", "batch of mlp is one number"),
    ):
        with pytest.raises(ValueError, match=said):
            parsed(text)


def test_padding_by_the_script(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    options = ("--sizes", "tiny", "--rounds", "1", "--json", str(file), "--only", "padding")
    done = subprocess.run([sys.executable, gpu.__file__, *options], check=True, capture_output=True, text=True)
    report = json.loads(file.read_text())
    assert report["packages"]["jax"] == jax.__version__
    assert "padding copy: bytes_per_s" in done.stdout
    copy, *found, process = report["rows"]
    assert (process["what"], process["status"]) == ("process", 0)
    assert copy["bytes_per_s"] > 0
    by_name = {(row["what"], row["dtype"], row["fused"]): row for row in found}
    assert len(by_name) == len(found)
    sent = by_name["all_gather sends rows", "bfloat16", False]
    assert sent["floor_bytes"] == 2 * 8 * (4 * 1 + 4 * 5), "one part of 4 rows is read, five are written"
    assert sent["one_kernel"]
    blocks = by_name["reduce_scatter sends rows", "bfloat16", False]
    assert blocks["floor_bytes"] == 2 * 8 * 4 * (11 + 20)
    assert all(row["hlo_bytes"] > 0 and row["kernels"] for row in found)


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    file = tmp_path / "gpu.rows"
    gpu.start(Namespace(only=["padding", "flags"], limit=0.0, each=1.0), file)
    left = [json.loads(text) for text in file.read_text().splitlines()]
    assert {row["skipped"] for row in left} == {"no time left of --limit 0"}
    assert [row["variant"] for row in left] == ["", *gpu.module_of("flags").VARIANTS]
