"""Plans compiled for cards that are not here; what needs XLA's CUDA compiler is skipped by name where there is none."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from example_models import example
from fused_cases import APART, CASES, arguments
from jax import lax
from slow_devices import first_devices, thin_cluster

import hapsynth
from hapsynth.cli import commands
from hapsynth.cli.main import main
from hapsynth.cluster.cluster import Cluster, ClusterError, Link
from hapsynth.cluster.compiler_target import compiler_target
from hapsynth.cluster.device_kinds import card_of, known_kinds
from hapsynth.hlo.collectives import Collective
from hapsynth.hlo.replay import Replay
from hapsynth.targets import (
    CompiledTarget,
    TargetError,
    collectives_differ,
    compile_for,
    compiling,
    cuda_plugin,
    target_process,
)
from hapsynth.targets.target_process import compile_in_this_process, compiled_of

CUDA = [name for name in ("jax_cuda12_plugin", "jax_cuda13_plugin") if util.find_spec(name)]
without = pytest.mark.skipif(not CUDA, reason="XLA's CUDA compiler is not installed: hapsynth[aot12] or [aot13]")
CARDS = ["A100-80GB", "H100-80GB"]
W, X = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((4096, 512), jnp.float32)


def needs_wheels(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.optimized(pytest.mark.needs_wheels(without(test)))


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
    return w - 0.1 * gradient, loss


def planned(fn: Callable[..., Any] = step) -> hapsynth.Plan:
    kinds = tuple(known_kinds()[name] for name in CARDS)
    cluster = Cluster("cards", kinds, (0, 1), Link(1e12, 1e-6))
    return hapsynth.synthesize(fn, (W, X), cluster, leave_out=False, fixed={"[1]": "S(0)"})


@pytest.mark.parametrize("kind", known_kinds())
def test_every_known_gpu_has_a_description(kind: str) -> None:
    target, card = compiler_target(kind), known_kinds()[kind]
    text = target.text()
    fields = dict(line.strip().split(": ", 1) for line in text.splitlines() if line.count(": ") == 1)
    assert float(fields["memory_bandwidth"]) == card.bandwidth
    assert int(fields["device_memory_size"]) == card.memory
    assert fields["device_description_str"] == f'"{target.name}"'
    # The rate of the ordinary cores is what units and clock make: two FLOPs a cycle each.
    rate = 2 * target.sms * int(fields["fpus_per_core"]) * target.clock_ghz * 1e9
    assert rate == pytest.approx(card.flops["float32"], rel=0.04)
    assert card.default_contention == pytest.approx(target.sms / (target.sms - 2), abs=6e-4)


def test_unknown_cards_are_refused() -> None:
    with pytest.raises(ClusterError, match="did you mean 'H100-80GB'"):
        compiler_target("H100")


MINE = """
[intra]
bandwidth = "1 GB/s"
latency = "1 us"
[[devices]]
kind = "old"
host = "a"
[[devices]]
kind = "mine"
host = "a"
[kinds.old]
base = "P100-16GB"
memory = "12 GiB"
speed = 0.5
[kinds.mine]
card = "H100-80GB"
flops = { float32 = "1 TFLOP/s" }
bandwidth = "1 GB/s"
memory = "1 GB"
"""


def test_which_card_a_kind_is(tmp_path: Path) -> None:
    named = lambda name: card_of(replace(known_kinds()["T4"], name=name))
    assert [named(name) for name in ("A100-80GB", "Tesla V100-SXM2-16GB", "NVIDIA H100 80GB HBM3-2", "cpu-1")] == [
        *("A100-80GB", "V100-16GB", "H100-80GB", None)
    ]
    (tmp_path / "c.toml").write_text(MINE)
    described = Cluster.load(tmp_path / "c.toml")
    described.save(tmp_path / "again.toml")
    for cluster in (described, Cluster.load(tmp_path / "again.toml")):
        assert [card_of(kind.faster(0.5, "slower")) for kind in cluster.kinds] == ["P100-16GB", "H100-80GB"]
    (tmp_path / "c.toml").write_text(MINE.replace("H100-80GB", "H100"))
    with pytest.raises(ClusterError, match=r"kinds\.mine\.card = 'H100' is no known GPU; did you mean 'H100-80GB'"):
        Cluster.load(tmp_path / "c.toml")


def test_a_measured_kind_is_compiled_for_as_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, and by its own figures; another card stands for all devices."""
    plan = planned()
    names = ("NVIDIA A100 80GB PCIe-1", "NVIDIA H100 80GB HBM3")
    kinds = tuple(replace(k, name=name, bandwidth=1e9) for k, name in zip(plan.cluster.devices, names, strict=True))
    measured = hapsynth.Plan(plan.traced, plan.result, replace(plan.cluster, devices=kinds), fn=step)
    monkeypatch.setattr(compiling, "installed_plugin", lambda: "jax-cuda12-plugin 0")
    monkeypatch.setattr(compiling, "_apart", lambda request: CompiledTarget(request.target.kind))
    assert [t.target for t in measured.compile_for()] == CARDS
    for place, card in enumerate((*CARDS, "T4")):
        saved = target_process._Saved(plan.traced, plan.result, measured.cluster, compiler_target(card))
        here = place < 2
        assert saved.own == ([place] if here else [0, 1])
        assert saved.kind is (kinds[place] if here else known_kinds()["T4"])
        assert saved.costs.cluster.devices == (kinds if here else (saved.kind,) * 2)


def test_missing_wheels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cuda_plugin.metadata, "version", none)
    with pytest.raises(TargetError, match=r"pip install '\.\[aot12\]'"):
        planned().compile_for(CARDS)


def test_cards_that_a_compiler_does_not_serve() -> None:
    assert "V100-16GB has compute capability 7.0, and jax-cuda13-plugin 0.12" in cuda_plugin.not_served(
        compiler_target("V100-16GB"), "jax-cuda13-plugin 0.12"
    )
    assert not cuda_plugin.not_served(compiler_target("V100-16GB"), "jax-cuda12-plugin 0.10.2")


def test_a_program_that_cannot_be_read_is_the_targets_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unread = target_process._Compiled(1, ["unread"], ["unread"], without_triton=False)
    monkeypatch.setattr(target_process._Saved, "fused", lambda plan: unread)
    planned().save(path := tmp_path / "plan.json")
    card = compiler_target(CARDS[0])
    found = compile_in_this_process(str(path), step, (W, X), {}, "fused", card, str(tmp_path))
    assert (found.target, found.form) == (CARDS[0], "fused")
    assert "can't be read" in found.error
    # What was compiled is there to be looked at.
    assert (tmp_path / f"{CARDS[0]}-fused-0.txt").read_text() == "unread"


def test_all_programs_of_a_kind_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their collectives differ above all: they are to be compared."""
    head, line = "HloModule f\n\nENTRY %main () -> f32[8] {", "ROOT %s = f32[8]{0} collective-permute(%x)"
    texts = [
        f"{head}\n  %x = {kind}[8]{{0}} parameter(0)\n  {line}, source_target_pairs={{{{0,1}}}}\n}}\n"
        for kind in ("f32", "s32")
    ]
    unlike = target_process._Compiled(1, texts[:1], texts[:1], without_triton=False, others=texts[1:])
    monkeypatch.setattr(target_process._Saved, "fused", lambda plan: unlike)
    planned().save(path := tmp_path / "plan.json")
    found = compile_in_this_process(str(path), step, (W, X), {}, "fused", compiler_target(CARDS[0]), str(tmp_path))
    assert "unlike shares and another collective 1: collective-permute" in found.error
    assert [(tmp_path / f"{CARDS[0]}-fused-{n}.txt").read_text() for n in range(2)] == texts


def test_a_process_has_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fused form a program is of one device, whatever others have its shares."""
    kinds = tuple(known_kinds()[name] for name in CARDS for _ in range(2))
    plan = hapsynth.synthesize(step, (W, X), Cluster("cards", kinds, (0, 1, 2, 3), Link(1e12, 1e-6)), leave_out=False)
    own: list[Any] = []

    def refused(self: Any, form: Any, processes: bool) -> Any:
        own.append(form.keywords["own"])
        raise NotImplementedError

    monkeypatch.setattr(target_process._Saved, "_lowered", refused)
    for card in CARDS:
        with pytest.raises(NotImplementedError):
            target_process._Saved(plan.traced, plan.result, plan.cluster, compiler_target(card)).fused()
    assert own == [((0,),), ((2,),)]


def dies() -> Any:
    os.write(2, b"a fatal check\n")
    os.abort()


def test_a_compiler_that_dies_takes_nothing_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "installed_plugin", lambda: "jax-cuda12-plugin 0")
    found = compile_for(planned(), CARDS, source=dies)
    assert [t.target for t in found] == CARDS
    assert all("died of SIGABRT" in t.error and "a fatal check" in t.error for t in found)


def test_a_script_that_a_new_process_cannot_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that starts processes, not under `if __name__ == "__main__":`, for which Python raises the same. That
    one is killed is not the script's fault."""
    (script := tmp_path / "script.py").write_text("raise RuntimeError('a process is started while its parent is')")
    monkeypatch.setattr(compiling, "installed_plugin", lambda: "jax-cuda12-plugin 0")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    said = r'ended with status 1 before it began: .* under `if __name__ == "__main__":` and .* at the top level, not'
    with pytest.raises(TargetError, match=said):
        planned().compile_for(CARDS)
    # Where memory is short.
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    found = planned().compile_for(CARDS)
    assert [t.error for t in found] == ["the compiler's process died of SIGKILL before it began"] * 2


def test_one_name_is_no_sequence_of_names() -> None:
    with pytest.raises(TypeError, match=r"targets is 'T4'; give a sequence of names, e.g. \['T4'\]"):
        planned().compile_for("T4")


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return step(w, x)[1]


NO_DEF: dict[str, Any] = {"lambda": lambda w, x: step(w, x), "jax.grad": jax.grad(loss), "inside": None}


@pytest.mark.parametrize("fn", NO_DEF.values(), ids=NO_DEF)
def test_a_function_that_no_other_process_finds(fn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "installed_plugin", lambda: "jax-cuda12-plugin 0")
    with pytest.raises(TargetError, match="top level of a module"):
        planned(fn or (lambda w, x: step(w, x))).compile_for(CARDS)


def test_the_first_collective_that_differs_is_named() -> None:
    one = partial(Collective, detail="", inside="", trips=1, members=((0, 1),))
    a, b, c = (one(op, "add", ("f32[8]",)) for op in ("all-reduce", "all-gather", "reduce-scatter"))
    cards = [
        CompiledTarget("V", collectives=(a, b)),
        CompiledTarget("H", collectives=(a, c)),
        CompiledTarget("A", "", "no"),
    ]
    said = collectives_differ(cards)
    assert said == (
        "collective 2 is not the same: V: all-gather add f32[8] {{0,1}}; H: reduce-scatter add f32[8] {{0,1}}"
    )
    assert not collectives_differ([cards[0], cards[2]])


def test_cards_that_a_program_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a plan's own it is an error."""
    sizes: dict[str, Any] = {"memory_bytes": 16.0 * 2**30, "plan_bytes": 20.0 * 2**30}
    small = CompiledTarget("V100-16GB", "switch", peak_bytes=17 << 30, unknown_loops=1, **sizes)
    staged = CompiledTarget("T4", "staged", peak_bytes=2 << 30, **sizes)
    large = CompiledTarget("A100-80GB", "switch", peak_bytes=17 << 30, memory_bytes=80.0 * 2**30, in_plan=True)
    assert [t.fits for t in (small, staged, large)] == [False, False, True]

    def run(*targets: CompiledTarget) -> tuple[int, str, list[bool]]:
        monkeypatch.setattr(commands, "loaded", lambda *_: (None, None))
        monkeypatch.setattr(commands, "source_of", lambda *_: None)
        monkeypatch.setattr(commands, "compile_for", lambda *_, **__: [*targets])
        status = main(["compile", "model.py", "--plan", "plan.json", "--json", str(tmp_path / "out.json")])
        fits = [t.get("fits", False) for t in json.loads((tmp_path / "out.json").read_text())["targets"]]
        said = capsys.readouterr()
        return status, said.out + said.err, fits

    status, said, fits = run(small, staged, large)
    assert (status, fits) == (0, [False, False, True])
    assert "V100-16GB: needs 17.0 GiB, has 16.0 GiB" in said
    assert "T4: needs 20.0 GiB, has 16.0 GiB" in said
    assert "without what is held between stages" in said
    assert "the same on all, in the same order" in said
    assert "V100-16GB: 1 loop of unknown trips counted once" in said
    status, said, _ = run(replace(small, in_plan=True), large)
    assert status == 1
    assert "the plan does not fit its own devices: V100-16GB\n" in said
    _, said, _ = run(small, large, CompiledTarget("H100-80GB", error="refused"))
    assert "the same on V100-16GB, A100-80GB, in the same order; H100-80GB not compared" in said
    run(small, staged)
    assert json.loads((tmp_path / "out.json").read_text())["compared"] == ["V100-16GB", "T4"]


def test_memory_and_planned_bytes_of_a_card() -> None:
    plan = planned()
    for place, name in enumerate((*CARDS, "V100-16GB")):
        saved = target_process._Saved(plan.traced, plan.result, plan.cluster, compiler_target(name))
        assert saved.has_card == (place < 2)
        assert saved.memory == known_kinds()[name].memory
        assert saved.planned("switch") == max(plan.memory if place == 2 else [plan.memory[place]])


class Refusing:
    """A lowered program that is not compiled unless options are given."""

    def __init__(self, message: str) -> None:
        self.message, self.asked = message, list[Any]()

    def compile(self, compiler_options: Any = None) -> str:
        self.asked.append(compiler_options)
        if compiler_options is None:
            raise jax.errors.JaxRuntimeError(self.message)
        return "compiled"


def test_without_tiles_contractions_are_cublas() -> None:
    lowered = Refusing("INTERNAL: Couldn't find output tile sizes that satisfy dot.1")
    assert compiled_of(lowered) == ("compiled", True)
    assert lowered.asked == [None, {"xla_gpu_enable_triton_gemm": False}]
    with pytest.raises(jax.errors.JaxRuntimeError, match="memory"):
        compiled_of(Refusing("RESOURCE_EXHAUSTED: out of memory"))


@needs_wheels
@pytest.mark.parametrize("form", ["switch", "staged", "fused"])
def test_compiled_for_two_cards(form: Any) -> None:
    found = planned().compile_for(CARDS, form=form)
    assert [(t.target, t.form, t.error) for t in found] == [(card, form, "") for card in CARDS]
    assert found[0].collectives
    assert not collectives_differ(found)
    assert found[0].fingerprint == found[1].fingerprint
    for t in found:
        assert 0 < t.peak_bytes <= t.predicted_bytes
        assert t.replay.products == pytest.approx(t.predicted.products, rel=0.02)
        assert t.replay.seconds == pytest.approx(t.replay.computing_s + t.replay.exposed_s)
        assert t.replay.sending_s > 0
        assert form != "staged" or t.replay.hidden == 0.0


def test_stages_in_a_loop_run_in_every_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    def looped(x: Any) -> Any:
        twice = lambda s, _: (s - jnp.sum(jnp.sin(s)), None)
        return jnp.sum(lax.scan(lambda s, _: lax.scan(twice, s, None, length=3), x, None, length=5)[0])

    kinds = (known_kinds()[CARDS[0]],) * 2
    plan = hapsynth.synthesize(looped, (X,), Cluster("cards", kinds, (0, 1), Link(1e12, 1e-6)), fixed={"[0]": "S(0)"})
    saved = target_process._Saved(plan.traced, plan.result, plan.cluster, compiler_target(CARDS[0]))
    monkeypatch.setattr(target_process._Saved, "mesh", lambda self, processes: first_devices(2))
    monkeypatch.setattr(target_process, "compiled_of", lambda lowered: (lowered.compile(), False))
    monkeypatch.setattr(target_process, "_peak", lambda compiled: 1)
    compiled = saved.staged()
    assert {*compiled.runs} == {1, 5, 15}
    assert sorted(compiled.runs[-len(compiled.sent) :]) == [1, 15]
    assert {c.trips for c in compiled.collectives} == {1, 15}
    monkeypatch.setattr(target_process, "replay", lambda *_: Replay(kernels=1))
    assert saved.replayed(compiled).kernels == sum(compiled.runs)


# Of examples/mlp.py `step` has the ops. Batch and width are those of the examples: else nothing is worth sending.
EXAMPLES: dict[str, dict[str, Any]] = {"cnn": {"channels": (32, 64)}, "transformer": {"layers": 1}}


def smaller(name: str) -> Any:
    module = example(name)
    fn, arguments = module.target_for(module.Config(**EXAMPLES[name]))
    return fn, arguments, {}


@needs_wheels
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_compiled_for_two_cards(name: str) -> None:
    fn, arguments, _ = smaller(name)
    cluster = Cluster.load(Path(__file__).parents[2] / "examples" / "clusters" / "mixed8.toml")
    plan = hapsynth.synthesize(fn, arguments, cluster, leave_out=False)
    found = compile_for(plan, ["V100-16GB", "H100-80GB"], form="switch", source=partial(smaller, name))
    assert [t.error for t in found] == ["", ""]
    assert found[0].collectives
    assert not collectives_differ(found)


@needs_wheels
@pytest.mark.parametrize("name", ["combined as independent", "a while loop"])
def test_each_card_has_a_program_of_its_own_shares(name: str) -> None:
    """The second has no rows: what the first sums is a constant there, and of no use."""
    case, cluster = CASES[name], thin_cluster((1000.0,) * 2, bandwidth=1e8)
    kinds = tuple(replace(kind, name=card) for kind, card in zip(cluster.devices, CARDS, strict=True))
    options: dict[str, Any] = {"ratios": {"[1].0": (1.0, 0.0)}, "fixed": {"[0]": case.weights, "[1]": "S(0)"}}
    on = replace(cluster, devices=kinds)
    plan = hapsynth.synthesize(case.fn, arguments(), on, leave_out=False, form="fused", lowering=APART, **options)
    first, second = plan.compile_for(CARDS, form="fused")
    assert (first.error, second.error) == ("", "")
    assert len(first.collectives) >= sum(plan.program.collectives().values()) > 1
    assert not collectives_differ([first, second])


def sums(x: Any) -> Any:
    """Along the one dimension, and then along the other."""
    return jnp.cumsum(jnp.cumsum(x, axis=1), axis=0).astype(jnp.int32)


@needs_wheels
@pytest.mark.parametrize("form", ["switch", "fused"])
def test_an_all_to_all_in_rounds_is_the_same_on_all_cards(form: Any) -> None:
    kinds = tuple(known_kinds()[name] for name in CARDS for _ in range(2))
    cluster = Cluster("cards", kinds, (0, 1, 2, 3), Link(1e9, 1e-6))
    asked: dict[str, Any] = {"leave_out": False, "fixed": {"[0]": "S(0)"}, "ratios": (0.375, 0.375, 0.125, 0.125)}
    plan = hapsynth.synthesize(sums, (X,), cluster, **asked)
    assert plan.program.collectives() == {"pairwise_all_to_all": 1}
    found = plan.compile_for(CARDS, form=form)
    assert [t.error for t in found] == ["", ""]
    # One place on and back between the two large ones, two places on between a large and a small one, to 1 / 3 as much.
    nbytes = [[c.held_bytes for c in t.collectives] for t in found]
    assert nbytes == [[float(X.size * 4 * share) for share in (9 / 64, 3 / 64, 9 / 64)]] * 2
    assert {c.op for t in found for c in t.collectives} == {"collective-permute"}
    assert not collectives_differ(found)
    assert found[0].fingerprint == found[1].fingerprint


@needs_wheels
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "import jax, jax.numpy as jnp\n"
        "def f(w, x):\n    return w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)\n"
        "def target():\n"
        "    s = lambda *d: jax.ShapeDtypeStruct(d, jnp.float32)\n"
        "    return f, (s(512, 512), s(4096, 512))\n"
    )
    planned_file, out = str(tmp_path / "plan.json"), tmp_path / "out.json"
    cluster = str(Path(__file__).parents[2] / "examples" / "clusters" / "h200_a100.toml")
    assert main(["search", str(model), "--cluster", cluster, "--plan", planned_file]) == 0
    hlo = tmp_path / "hlo"
    asked = ["--targets", ",".join(CARDS), "--json", str(out), "--hlo", str(hlo)]
    assert main(["compile", str(model), "--plan", planned_file, *asked]) == 0
    assert {path.name.rsplit("-", 2)[0] for path in hlo.iterdir()} == {*CARDS}
    record = json.loads(out.read_text())
    assert [t["target"] for t in record["targets"]] == CARDS
    assert len({t["fingerprint"] for t in record["targets"]}) == 1
    assert "the same on all" in capsys.readouterr().out or not record["targets"][0]["collectives"]
