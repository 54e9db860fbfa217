"""`hapsynth profile`: fits, groups, refusals and resuming on numbers given; whole runs whose times are given."""

import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import modelled_profile
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from modelled_profile import BANDWIDTH, BETA, LATENCY, OVERHEAD, RATE, START, exchange_seconds, kernel_seconds
from two_processes import run_two

from hapsynth import _device_memory
from hapsynth.cli.main import main
from hapsynth.cluster.cluster import COLLECTIVES, Cluster
from hapsynth.cluster.device_kinds import kind_of
from hapsynth.cluster.op_classes import OP_CLASSES
from hapsynth.graph.trace import trace
from hapsynth.instructions.collectives import STEPS
from hapsynth.instructions.rules.contraction import CONTRACTIONS, is_precise
from hapsynth.profile import run
from hapsynth.profile.cluster_builder import Builder
from hapsynth.profile.collectives import BASE, _step, exchanges, fitted, link_of, rings, runner
from hapsynth.profile.contention import BESIDE, beside, delayed, delayed_by, small_gather
from hapsynth.profile.job import Job
from hapsynth.profile.kind_fit import KindFit, groups, smooth, typical, typical_kind
from hapsynth.profile.op_kernels import DISPATCH, LAUNCH, STREAM, kernels
from hapsynth.profile.plausibility import ProfileError, lacking, refusal, unlikely
from hapsynth.profile.resume import State
from hapsynth.profile.run import Options, _dtypes, _Measuring
from hapsynth.profile.sampling import sampled
from hapsynth.search.cost.network import axis_links


class FakeJob:
    """Devices with the times that a model gives: `speeds` of each, `hosts` they sit in."""

    def __init__(self, speeds: list[float], hosts: tuple[int, ...] | None = None) -> None:
        self.speeds = np.array(speeds)
        self.n, self.local, self.first, self.lone = len(speeds), list(range(len(speeds))), True, True
        self.hosts = hosts or (0,) * self.n
        self.devices: list[Any] = [SimpleNamespace(platform="cpu", device_kind="cpu")] * self.n
        self.machines = ["m"] * self.n
        self.ran: list[str] = []

    agree, least, shared = staticmethod(bool), staticmethod(float), staticmethod(str)
    gather = staticmethod(np.asarray)
    texts = staticmethod(lambda text: [text])

    def runner(self, kernel: Any, only: Any = None) -> Any:
        self.ran.append(kernel.key)
        seconds = np.broadcast_to(kernel_seconds(kernel, self.speeds), self.n)
        return lambda: seconds if only is None else seconds[only]


OVER_HOSTS = {f"hierarchical_{step}" for step in ("all_reduce", "reduce_scatter", "all_gather")}


@pytest.mark.parametrize(
    ("axes", "hosts", "over"),
    [
        ({"hap": 4}, (0, 0, 0, 1), {"hap": {"hierarchical_all_reduce"}}),
        ({"hap": 4}, (0, 1, 0, 1), {"hap": OVER_HOSTS}),
        ({"hap": 4}, (0, 0, 0, 0), {}),
        ({"hap": 4}, (0, 1, 2, 3), {}),
        # Neither axis of two goes over several hosts with several devices in one; both as one do.
        ({"a": 2, "b": 2}, (0, 0, 1, 1), {"hap": OVER_HOSTS}),
        ({"a": 2, "b": 4}, (0, 0, 1, 1, 2, 2, 3, 3), {"b": OVER_HOSTS, "hap": OVER_HOSTS}),
    ],
)
def test_what_goes_over_hosts_is_measured_where_it_can_be_run(
    axes: dict[str, int], hosts: tuple[int, ...], over: dict[str, set[str]]
) -> None:
    found: dict[str, set[str]] = {}
    for e in exchanges(tuple(axes.items()), hosts, quick=True):
        if e.step.startswith("hierarchical"):
            found.setdefault(e.axis, set()).add(e.step)
    assert found == over


def test_a_cluster_of_several_hosts_has_curves_of_what_goes_over_them(tmp_path: Path) -> None:
    """By the bytes that leave a host: of 3 + 1 devices those of all, and in modelled figures they take what one of four
    alone does."""
    builder = built(FakeJob([1.0] * 4, (0, 0, 0, 1)))
    assert builder.doubts() == []
    cluster = builder.cluster()
    (link,) = axis_links(cluster, (("hap", 4),))
    (e,) = [e for e in builder.sent if e.key == f"hierarchical_all_reduce/hap/{1 << 20}"]
    alone = (exchange_seconds(e) - START) / e.repeats
    assert link.offers(STEPS["hierarchical_all_reduce"])
    wire = link.wire_bytes("hierarchical_all_reduce", 4.0 * e.words)
    assert wire == 4.0 * e.words
    assert link.seconds("hierarchical_all_reduce", wire) == pytest.approx(alone, rel=1e-4)
    # Whatever the axis is called, of what goes round within a host the program around it counts for nothing.
    assert built(FakeJob([1.0] * 4, (0, 0, 0, 1)), axis="data").cluster().intra == cluster.intra
    # The links are told by what goes round all devices alone.
    assert cluster.network == built(FakeJob([1.0] * 4, (0, 1, 2, 3))).cluster().network
    cluster.save(tmp_path / "c.toml")
    assert Cluster.load(tmp_path / "c.toml") == cluster
    # Of equally many in each host they go otherwise.
    assert "hierarchical_all_reduce" in cluster.subset([0, 1, 3]).collectives["hap"]
    assert set(cluster.subset([0, 3]).collectives["hap"]) == set(cluster.collectives["hap"]) - OVER_HOSTS


@pytest.mark.parametrize("hosts", [(0, 0, 0, 1), (0, 1, 0, 1)])
def test_what_goes_over_hosts_runs(hosts: tuple[int, ...]) -> None:
    job = Job(4)
    job.hosts = hosts
    over = [e for e in exchanges((("hap", 4),), hosts, quick=True) if e.step.startswith("hierarchical")]
    assert over
    for e in over:
        assert (runner(job, e)() > 0).all()


def test_what_is_scattered_is_not_made_anew() -> None:
    """Else making it counts for sending it, in each of the collectives that are measured in a row."""
    job = Job(2)
    (e,) = [e for e in exchanges((("hap", 2),), (0, 0), quick=True) if e.key == f"reduce_scatter/hap/{1 << 20}"]
    spec, one = PartitionSpec("hap"), _step(e, job.hosts, None)
    mapped = jax.shard_map(one, mesh=Mesh(np.array(job.devices), ("hap",)), in_specs=spec, out_specs=spec)
    inner = jax.make_jaxpr(mapped)(np.ones(4 * e.words, np.float32)).eqns[0].params["jaxpr"]
    assert "reduce_scatter" in str(inner)
    assert all(x.aval.size <= e.words for eqn in inner.eqns for x in eqn.outvars)
    once = runner(job, e)
    assert all((once() > 0).all() for _ in range(2))


def figures_of(job: FakeJob, axis: str = "hap") -> tuple[list[Any], list[Any], dict[str, Any]]:
    ran = list(kernels(("float32",), quick=True))
    sent = list(exchanges(((axis, job.n),), job.hosts, quick=True)) if job.n > 1 else []
    found = {k.key: np.stack([job.runner(k)(), np.full(job.n, 0.01)], axis=1) for k in ran}
    for e in sent:
        found[e.key] = np.tile([exchange_seconds(e), 0.01], (job.n, 1))
    return ran, sent, found


def built(
    job: FakeJob, figures: dict[str, Any] | None = None, memory: list[int] | None = None, axis: str = "hap"
) -> Builder:
    ran, sent, found = figures_of(job, axis)
    memory = memory or [1 << 30] * job.n
    return Builder(job, ((axis, job.n),), ran, sent, {**found, **(figures or {})}, memory, {})  # type: ignore[arg-type]


def test_what_is_given_is_found_again(tmp_path: Path) -> None:
    builder = built(FakeJob([1.0] * 4))
    assert builder.doubts() == []
    cluster = builder.cluster()
    (kind,) = cluster.kinds
    assert kind.bandwidth == pytest.approx(BANDWIDTH, rel=1e-4)
    assert kind.rate("float32") == pytest.approx(RATE, rel=1e-4)
    assert kind.overhead == pytest.approx(OVERHEAD, rel=1e-4)
    for op_class in OP_CLASSES:
        curve = kind.curve(op_class, "float32")
        assert curve is not None
        assert float(curve.seconds(1e9)) == pytest.approx(1e9 / RATE, rel=1e-3)
    assert cluster.network.bandwidth == pytest.approx(1 / BETA, rel=1e-3)
    assert cluster.network.latency == pytest.approx(LATENCY, rel=1e-2)
    along = cluster.collectives_along("hap", 4)
    assert set(along) == set(COLLECTIVES) - OVER_HOSTS
    assert all(c.points[0][0] == 0 for c in along.values())
    assert float(along["all_reduce"].seconds(1e6)) == pytest.approx(7 * LATENCY + 1e-3, rel=1e-2)
    cluster.save(tmp_path / "c.toml")
    assert Cluster.load(tmp_path / "c.toml") == cluster
    assert Cluster.load(tmp_path / "c.toml").profile == cluster.profile
    # Of one host, or one device, nothing is known of other hosts.
    assert cluster.is_closed
    assert built(FakeJob([1.0])).cluster().is_closed


def test_gpus_are_measured_at_full_precision_too() -> None:
    job: Any = FakeJob([1.0])
    job.devices = [SimpleNamespace(platform="gpu", device_kind="gpu")]
    dtypes = _dtypes(job, Options(dtypes=("float16",)))
    assert dtypes == ("float32", "tf32", "float16")
    for kernel in kernels(dtypes, quick=True):
        args = [jax.ShapeDtypeStruct(shape, kernel.held_as) for shape, _ in kernel.operands]
        graph = trace(kernel.fn, args).graph
        products = {is_precise(op) for op in graph.ops if op.name in CONTRACTIONS and kernel.family != LAUNCH}
        assert products <= {kernel.dtype == "float32"}
        assert products or kernel.dtype != "tf32"
    # What is fast at one of them is not at the other.
    ran = list(kernels(dtypes, quick=True))
    figures = {k.key: np.array([[kernel_seconds(k, 4.0 if k.dtype == "tf32" else 1.0), 0.01]]) for k in ran}
    kind = typical_kind(ran, figures)
    assert kind is not None
    assert kind.rate("float32") == pytest.approx(4 * RATE, rel=1e-3)
    assert kind.rate("float32", ordinary=True) == pytest.approx(RATE, rel=1e-3)
    curves = (kind.curve("convolution", "float32", ordinary=precise) for precise in (False, True))
    fast, slow = (float(curve.seconds(1e9)) for curve in curves if curve)
    assert slow == pytest.approx(4 * fast, rel=1e-3)


def test_what_is_streamed_is_not_copied_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy takes as long as one of the passes that bandwidth is told by."""
    texts: list[str] = []
    compiled = jax.stages.Lowered.compile
    read = lambda lowered: (made := compiled(lowered), texts.append(made.as_text() or ""))[0]
    monkeypatch.setattr(jax.stages.Lowered, "compile", read)
    small = next(k for k in kernels(("float32",), quick=True) if k.family == STREAM)
    small = replace(small, size=1024, operands=(((1024,), 1.0), ((), 1.0)))
    once = Job(2).runner(small)
    assert all((once() > 0).all() for _ in range(2))
    (text,) = (text for text in texts if "while" in text)
    assert "f32[1024]" in text
    assert [line for line in text.splitlines() if " copy(" in line and "1024" in line] == []


def test_wide_kernels_run() -> None:
    with jax.enable_x64(True):
        for kernel in kernels(("float64",), quick=True):
            structs = [jax.ShapeDtypeStruct(shape, kernel.held_as) for shape, _ in kernel.operands]
            assert jax.eval_shape(kernel.fn, *structs).dtype == kernel.held_as


def test_a_device_of_little_memory_is_measured() -> None:
    smallest = next(k for k in kernels(("float32",), quick=False) if k.family == STREAM)
    job: Any = FakeJob([1.0])
    measuring = _Measuring(job, Options(), State(None, ""), print, 512 << 20)
    assert measuring._fits(None, 1.0, 2 * smallest.nbytes)
    # One of less says why it can't be.
    ran, sent, found = figures_of(job)
    without = [k for k in ran if k.family != STREAM]
    with pytest.raises(ProfileError, match=r"cpu has 64.0 MiB of memory, too little for"):
        Builder(job, (("hap", 1),), without, sent, found, [64 << 20], {}).cluster()
    # One that fails does.
    failed = {"stream/float32/4194304": "stream/float32/4194304 fails on cpu (process 0): TypeError: no loops"}
    with pytest.raises(ProfileError, match=r"cpu can't be priced: .* no figure of stream .* TypeError: no loops"):
        Builder(job, (("hap", 1),), without, sent, found, [64 << 20], failed).cluster()


def test_contention_is_what_a_matmul_takes_longer_beside_a_collective() -> None:
    job = FakeJob([1.0, 3.0, 1.05, 3.0])
    ran, _, figures = figures_of(job)
    matmul = [k for k in ran if k.family == "matmul"][-1]
    beside = figures[matmul.key] * [[1.5, 1.0], [1.1, 1.0], [1.3, 1.0], [0.9, 1.0]]
    cluster = built(job, {BESIDE: beside}).cluster()
    assert [kind.contention for kind in cluster.devices] == [1.4, 1.0, 1.4, 1.0]
    assert [kind.contention for kind in built(job).cluster().kinds] == [None, None]
    for key in (BESIDE, delayed_by([1, 3])):
        doubts = built(job, {key: np.array([[1.0, 0.9]] * 4)}).doubts()
        assert [doubt.keys for doubt in doubts] == [(key,)]


def test_a_known_gpu_keeps_its_default_contention(tmp_path: Path) -> None:
    """For where none was measured."""
    job = FakeJob([1.0] * 2)
    job.devices = [SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")] * 2
    built(job).cluster().save(tmp_path / "c.toml")
    (kind,) = Cluster.load(tmp_path / "c.toml").kinds
    assert kind.contention is None
    assert kind.slowdown == kind_of("NVIDIA H200").default_contention > 1.0


def test_contention_delay_is_what_a_small_collective_takes_longer(tmp_path: Path) -> None:
    """It is an eighth of what eight in a row take longer beside computing, on the device where that is most."""
    job: Any = FakeJob([1.0, 3.0, 1.0, 3.0])
    _, sent, _ = figures_of(job)
    small = small_gather(job, sent)
    assert small is not None
    assert (small.key, small.repeats) == (f"all_gather/hap/{1 << 12}", 8)
    longer = {delayed_by([0, 2]): [0.0, 0.08, -0.1, 0.07], delayed_by([1, 3]): [-0.01] * 4}
    seconds = {key: np.array([[exchange_seconds(small) + x, 0.01] for x in more]) for key, more in longer.items()}
    cluster = built(job, seconds).cluster()
    assert [kind.contention_delay for kind in cluster.devices] == pytest.approx([0.01, 0.0] * 2)
    assert [kind.contention_delay for kind in built(job).cluster().kinds] == [0.0, 0.0]
    cluster.save(tmp_path / "c.toml")
    assert Cluster.load(tmp_path / "c.toml") == cluster


def test_a_delayed_collective_runs_while_all_devices_compute() -> None:
    computed, sent = threading.Event(), list[bool]()
    job: Any = FakeJob([1.0])

    def send() -> np.ndarray:
        # Each waits for what is computed beside it.
        computed.clear()
        sent.append(computed.wait(60))
        return np.array([0.01 * len(sent)])

    once = delayed(job, lambda: (computed.set(), np.array([0.0]))[1], send, 3)
    assert once() == pytest.approx([0.02])
    assert sent == [True] * 3
    # A process that computes nothing only sends.
    assert delayed(job, None, lambda: np.array([0.5]), 2)() == pytest.approx([0.5])


@pytest.mark.parametrize(("sends_s", "lost"), [(0.0, 0.25), (0.5, 1.0)])
def test_contention_is_of_what_both_take_together(monkeypatch: pytest.MonkeyPatch, sends_s: float, lost: float) -> None:
    """Sixteen products of 0.011 s beside eight collectives of 0.01 s take 0.02 s longer than right before, and others
    that go on after that; when they were measured they took less."""
    calls: list[str] = []

    def compute() -> np.ndarray:
        calls.append("compute")
        return np.array([0.011, 0.022]) + (0.02 / 16 if len(calls) > 16 else 0.0)

    clock = iter([0.0, sends_s])
    monkeypatch.setattr("hapsynth.profile.contention.perf_counter", lambda: next(clock))
    alone = np.array([0.01, 0.02])
    seconds = beside(FakeJob([2.0, 1.0]), compute, lambda: calls.append("send"), alone, 0.01, 0.08)()  # type: ignore[arg-type]
    assert (calls.count("send"), calls.count("compute")) == (8, 32)
    # What is lost beyond nine tenths is not told apart.
    assert seconds == pytest.approx(alone / (1 - min(lost, 0.9)))


@pytest.mark.parametrize(
    ("platform", "asked", "measured", "x64"),
    [
        ("cpu", (), {"float32"}, False),
        ("cpu", (), {"float32", "float64"}, True),
        ("cpu", ("float16",), {"float32", "float16"}, True),
        # Each by itself: a card without bfloat16 units computes it in float32, and float16 eight times as fast.
        ("gpu", (), {"float32", "tf32", "bfloat16", "float16"}, False),
        ("gpu", ("bfloat16",), {"float32", "tf32", "bfloat16"}, False),
    ],
)
def test_dtypes_whose_rates_are_measured(
    platform: str,
    asked: tuple[str, ...],
    measured: set[str],
    x64: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def kernels_of(dtypes: Any, quick: bool) -> list[Any]:
        seen.extend(dtypes)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "kernels", kernels_of)
    job: Any = FakeJob([1.0])
    job.devices = [SimpleNamespace(platform=platform)]
    job.memory, job.fingerprint, job.shared = lambda: [1 << 30], lambda _: "", str
    with pytest.raises(KeyboardInterrupt), jax.enable_x64(x64):
        run.profile(job, Options(dtypes=asked), tmp_path / "partial")
    assert set(seen) == measured


def test_unlike_devices_become_kinds() -> None:
    cluster = built(FakeJob([1.0, 3.0, 1.05, 3.0])).cluster()
    assert [d.name for d in cluster.devices] == ["cpu-2", "cpu-1", "cpu-2", "cpu-1"]
    assert cluster.devices[1].rate("float32") == pytest.approx(3 * RATE, rel=1e-3)
    assert len(built(FakeJob([1.0, 1.05, 1.0])).cluster().kinds) == 1


def test_devices_of_unlike_memory_become_kinds_of_one_speed() -> None:
    memory = [n << 20 for n in (400, 1200, 1190, 1100)]
    cluster = built(FakeJob([1.0, 1.05, 1.0, 1.0]), memory=memory).cluster()
    assert [(d.name, d.memory >> 20) for d in cluster.devices] == [("cpu-2", 400), *[("cpu-1", 1100)] * 3]
    assert cluster.devices[0].measured == cluster.devices[1].measured


def test_devices_of_unknown_memory_are_one_kind() -> None:
    assert built(FakeJob([1.0] * 3), memory=[-1 << 20] * 3).groups == [[0, 1, 2]]


def test_groups() -> None:
    seconds = np.array([[1.0, 2.0], [1.05, 2.1], [1.5, 3.0], [1.0, 2.0]])
    assert groups(["a", "a", "a", "b"], seconds) == [[0, 1], [2], [3]]
    assert groups(["a", "a", "a", "b"], np.where(seconds == 3.0, np.nan, seconds)) == [[0, 1], [2], [3]]
    # A slow drift from one to the next does not make the ends alike.
    assert groups(["a"] * 4, np.array([[1.0], [1.08], [1.16], [1.24]])) == [[0, 1], [2, 3]]
    assert groups(["a"] * 2, np.array([[1.0], [1.3]]), spread=0.3) == [[0, 1]]
    assert typical([{"k": (1.0, 0.1), "l": (1.0, 0.1)}, {"k": (3.0, 0.3)}]) == {"k": (2.0, 0.3)}


def test_a_wild_point_does_not_move_the_line() -> None:
    points = [(m, float(x), m * 1e-5 + x * 1e-9) for m, x in ((3, 1e3), (6, 1e4), (3, 1e5), (3, 1e6), (6, 1e7))]
    assert fitted(points) == pytest.approx((1e-5, 1e-9), rel=1e-6)
    points[3] = (3, 1e6, 5e-2)
    assert fitted(points) == pytest.approx((1e-5, 1e-9), rel=1e-6)
    link = link_of([(1, 1e3, 2.0), (1, 1e6, 1.0)])
    assert (link.bandwidth, link.latency) == (1e6, 1.0)
    assert rings((0, 1, 0, 1, 0)) == [(0, 2), (2, 4), (4, 0), (1, 3), (3, 1)]


def test_times_are_made_to_rise() -> None:
    curve = smooth([(1.0, 1.0), (2.0, 3.0), (4.0, 2.0), (8.0, 5.0)])
    assert curve is not None
    times = [t for _, t in curve.points]
    assert times == pytest.approx([1.0, 6**0.5, 6**0.5, 5.0], rel=2e-3)
    assert all(s < t for s, t in itertools.pairwise(times))
    assert smooth([]) is None


DOUBTS: dict[str, tuple[str, float, float, str]] = {
    "spread": ("matmul/float32/16777216", 1.0, 0.9, "matmul/float32/16777216 on cpu varies by 90%"),
    "no time": ("stream/float32/16777216", 0.0, 0.01, "takes no longer than starting it"),
    "to nothing": ("convolution/float32/4", START + 3 * OVERHEAD + 1e-8, 0.01, "convolution/float32/4 on cpu takes"),
    "too fast": ("stream/float32/16777216", START + 17 * OVERHEAD + 5e-6, 0.0, "bytes/s"),
    "falls": ("batch_matmul/float32/32", 1.5e-4, 0.01, "batch_matmul/float32/32 on cpu takes"),
    "wires": ("all_gather/hap/1048576", 1e-5, 0.01, "takes no longer than a program without it"),
}


@pytest.mark.parametrize(("key", "seconds", "spread", "says"), DOUBTS.values(), ids=DOUBTS)
def test_nonsense_is_doubted(key: str, seconds: float, spread: float, says: str) -> None:
    doubts = built(FakeJob([1.0, 1.0]), {key: np.array([[seconds, spread]] * 2)}).doubts()
    assert doubts
    assert all(key in doubt.keys for doubt in doubts)
    assert any(says in doubt.text for doubt in doubts)
    assert "run it again" in str(refusal(doubts, "c.partial"))
    assert "--force" in str(refusal(doubts, "c.partial"))


def test_what_a_collective_is_told_from_is_measured_again_with_it() -> None:
    job = FakeJob([1.0, 1.0])
    (base,) = [e.key for e in figures_of(job)[1] if e.step == BASE]
    doubts = built(job, {base: np.array([[1.0, 0.01]] * 2)}).doubts()
    assert doubts
    assert all(base in doubt.keys for doubt in doubts)


def test_ops_that_take_no_time_are_named() -> None:
    ran, _, figures = figures_of(FakeJob([1.0]))
    (chain,) = [k.key for k in ran if k.family == "elementwise"]
    assert built(FakeJob([1.0])).unmeasured() == []
    (said,) = built(FakeJob([1.0]), {chain: figures["dispatch/float32/8"]}).unmeasured()
    assert said.startswith("elementwise in float32 on cpu takes no longer than it varies")


def test_what_varies_more_than_it_takes_is_neither_doubted_nor_a_figure() -> None:
    """A program of 100 us that varies by 1 %, as one of no work does, says nothing of an op of 1 us."""
    ran, _, figures = figures_of(FakeJob([1.0]))
    (chain,) = [k for k in ran if k.family == "elementwise"]
    times = {key: (float(seconds), 0.01) for key, ((seconds, _),) in figures.items()}
    took = lambda seconds: KindFit(ran, {**times, chain.key: (START + OVERHEAD + seconds, 0.01)})
    for seconds in (-1e-6, 0.0, 1e-6):
        fit = took(seconds)
        assert list(unlikely("x", fit)) == []
        assert fit.curve("elementwise", "float32") is None
    (doubt,) = unlikely("x", took(-3e-6))
    assert doubt.text == f"{chain.key} on x takes no longer than starting it"
    curve = took(64e-6).curve("elementwise", "float32")
    assert curve is not None
    assert float(curve.seconds(chain.amount)) == pytest.approx(1e-6, rel=1e-5)
    # Nor does a smaller size that varies so tell that times fall.
    ran = [k for k in kernels(("float32",), quick=False) if k.family in ("dispatch", "launch", "elementwise")]
    times = {k.key: (float(kernel_seconds(k)), 0.01) for k in ran}
    smallest, second = [k.key for k in ran if k.family == "elementwise"][:2]
    low, high = (START + OVERHEAD + seconds for seconds in (0.5e-6, 1.9e-6))
    assert list(unlikely("x", KindFit(ran, {**times, smallest: (high, 0.01), second: (low, 0.01)}))) == []


def test_quick_profiles_give_accelerators_enough_to_do() -> None:
    """At 50 TFLOP/s and 1 TB/s every op takes longer than a program of 80 us varies, by 3 %."""
    ran = list(kernels(("float32", "tf32"), quick=True))
    working = [k for k in ran if k.family not in (DISPATCH, LAUNCH)]
    times = {k.key: 80e-6 + 2e-6 * k.launches for k in ran}
    for k in working:
        # A chain reads and writes once.
        read = k.nbytes / 1e12 * (1 if k.launches == 1 else k.repeats)
        times[k.key] += read if k.family == STREAM else max(read, k.repeats * k.amount / 5e13)
    fit = KindFit(ran, {key: (seconds, 0.03) for key, seconds in times.items()})
    assert list(unlikely("x", fit)) == []
    assert all(fit.measurable(k.family, k.dtype) for k in working)


def test_sampling_goes_on_until_it_is_stable_or_out_of_time() -> None:
    clock = itertools.count(0.0, 0.1).__next__
    wild = itertools.cycle([1.0, 9.0, 9.0])
    seconds, spread = sampled(lambda: np.array([next(wild)]), float, 0.05, 1.0, 0.0, clock)
    assert (seconds[0], spread[0]) == (1.0, pytest.approx(8.0))
    assert clock() > 1.0
    calm, count = itertools.chain([9.0, 5.0], itertools.repeat(2.0)), itertools.count()
    one = lambda: (next(count), np.array([next(calm), 2.0]))[1]
    seconds, spread = sampled(one, float, 0.05, 1e9, 0.0, lambda: 0.0)
    assert seconds.tolist() == [2.0, 2.0]
    assert (spread <= 0.05).all()
    assert next(count) in (6, 9, 12)


def test_a_process_held_to_a_part_of_a_core_is_slow() -> None:
    # 3 ms of every 10 ms: calls of 1 ms, then a wait of 7 ms in one of them.
    held = itertools.cycle([0.001, 0.001, 0.008])
    seconds, spread = sampled(lambda: np.array([next(held)]), float, 0.05, 1.0, 0.1)
    assert seconds[0] == pytest.approx(0.0033, rel=0.1)
    assert spread[0] < 0.1


def test_an_interrupted_profile_goes_on(tmp_path: Path) -> None:
    file, job = tmp_path / "c.partial", FakeJob([1.0, 2.0])
    wanted = list(kernels(("float32",), quick=True))
    tell = lambda _: None

    class Interrupting(FakeJob):
        def runner(self, kernel: Any, only: Any = None) -> Any:
            if len(self.ran) == 5:
                raise KeyboardInterrupt
            return super().runner(kernel, only)

    first = Interrupting([1.0, 2.0])
    with pytest.raises(KeyboardInterrupt):
        _Measuring(first, Options(), State(file, "me"), tell, 1 << 40).kernels(wanted)  # type: ignore[arg-type]
    state = State(file, "me")
    assert "going on after 5 figures" in state.load()
    ran = _Measuring(job, Options(), state, tell, 1 << 40).kernels(wanted)  # type: ignore[arg-type]
    assert first.ran + job.ran == [k.key for k in ran]
    assert State(file, "me").load()
    # Of other devices, or unreadable: begun anew.
    other = State(file, "you")
    assert "starting anew" in other.load()
    assert not other.figures
    text = file.read_text()
    # Before figures that mean something else were told apart.
    file.write_text(text.replace(state.fingerprint, "me"))
    assert "starting anew" in State(file, "me").load()
    file.write_text(text)
    state.drop([wanted[0].key])
    assert len(json.loads(file.read_text())["figures"]) == len(wanted) - 1
    file.write_text("{")
    assert "can't be read" in State(file, "me").load()


def test_sizes_that_take_too_long_are_left_out() -> None:
    job, wanted = FakeJob([0.1]), list(kernels(("float32",), quick=False))
    ran = _Measuring(job, Options(), State(None, ""), lambda _: None, 1 << 40).kernels(wanted)  # type: ignore[arg-type]
    matmuls = [k for k in ran if k.family == "matmul"]
    assert 2 <= len(matmuls) < 8
    assert matmuls == [k for k in wanted if k.family == "matmul"][: len(matmuls)]
    assert not _Measuring(job, Options(), State(None, ""), lambda _: None, 64).kernels(wanted[3:])  # type: ignore[arg-type]


def test_a_slow_start_leaves_out_no_sizes() -> None:
    """Of a network whose latency alone takes longer than a figure may."""
    job, wanted = FakeJob([1.0, 1.0], (0, 1)), list(exchanges((("hap", 2),), (0, 1), quick=False))
    state = State(None, "")
    state.figures = {e.key: np.full((2, 2), 0.3 + e.nbytes * 1e-8) for e in wanted}
    ran = _Measuring(job, Options(), state, lambda _: None, 1 << 40).exchanges(wanted)  # type: ignore[arg-type]
    sizes = [e.nbytes for e in ran if e.step == "all_reduce"]
    # The first that tells of bandwidth is too slow for a larger one.
    assert sizes == [1 << 10, 1 << 13, 1 << 16, 1 << 19]


def test_what_one_device_cannot_run_is_no_figure() -> None:
    class Refusing(FakeJob):
        def runner(self, kernel: Any, only: Any = None) -> Any:
            if kernel.family == "convolution":
                raise NotImplementedError("no cuDNN\nat all")
            return super().runner(kernel, only)

    wanted = list(kernels(("float32",), quick=True))
    measuring = _Measuring(Refusing([1.0]), Options(), State(None, ""), lambda _: None, 1 << 40)  # type: ignore[arg-type]
    ran = measuring.kernels(wanted)
    assert {k.family for k in wanted} - {k.family for k in ran} == {"convolution"}
    said = "convolution/float32/1 fails on cpu (process 0): NotImplementedError: no cuDNN"
    assert measuring.failed == {"convolution/float32/1": said}
    (doubt,) = lacking(measuring.failed, ran)
    assert doubt == (f"there is no figure of convolution in float32, as {said}", ("convolution/float32/1",))
    # Larger ones may fail, and other dtypes.
    smaller = [k for k in wanted if k.key == "convolution/float32/1"]
    assert not [*lacking({"convolution/float32/4": "x"}, smaller), *lacking({"convolution/float16/1": "x"}, ran)]
    fit = KindFit(ran, {k.key: (1.0 + k.amount / 1e9, 0.0) for k in ran})
    kind = fit.kind("x", ["float32"], 1 << 30, "")
    assert kind is not None
    assert kind.curve("convolution", "float32") is None


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--mesh", "3x5"], "the mesh x=3 x y=5 does not fit the 8 devices"),
        (["--mesh", "hap=2,b=4"], "the mesh hap=2 x b=4 has an axis called 'hap', as all devices together are"),
        (["--mesh", "2xtwo"], "'2xtwo' is not a mesh"),
        (["--mesh", "a=2,a=4"], "not a mesh"),
        (["--dtypes", "int8"], "'int8' is not one of float32"),
        (["--devices", "0"], "'0' is not a whole number"),
        (["--devices", "9"], "--devices 9: this process has 8 devices"),
        (["--coordinator", "localhost:1"], "all three"),
        (["--coordinator", "localhost:1", "--processes", "2", "--process", "2"], "--process 2"),
        (["--coordinator", "localhost", "--processes", "2", "--process", "0"], "--coordinator is 'localhost'; give"),
    ],
)
def test_bad_usage(argv: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "-o", str(tmp_path / "c.toml"), *argv]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "-o", str(tmp_path / "none" / "c.toml")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_profile_each_other(tmp_path: Path) -> None:
    """A real job, gloo between a process of one CPU device and one of two, of which the second has half the speed."""
    code = """
        import sys
        import jax
        import modelled_profile
        from hapsynth.profile import run
        from hapsynth.cli.main import main
        every = run.kernels
        # Few figures: the rest is the same work again.
        run.kernels = lambda dtypes, quick: [k for k in every(dtypes, quick)][:6]
        modelled_profile.install(setattr, (1.0, 0.5))
        jax.config.update("jax_num_cpu_devices", 1 + int(sys.argv[-1]))
        sys.exit(main(sys.argv[1:]))
    """
    model = tmp_path / "model.py"
    model.write_text(
        "import jax, jax.numpy as jnp\n"
        "def target():\n"
        "    args = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 2\n"
        "    return (lambda x, w: jnp.tanh(x @ w)), args\n"
    )
    common = ["profile", "-o", str(tmp_path / "c.toml"), "--quick", "--processes", "2", "--model", str(model)]
    said = run_two(code, lambda address, i: [*common, "--coordinator", address, "--process", str(i)])
    assert "3 devices, 1 host" in said[0]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["c.toml", "model.py"]
    cluster = Cluster.load(tmp_path / "c.toml")
    assert cluster.n == 3
    assert cluster.hosts == (0, 0, 0), "what they share is the machine, not the process"
    assert set(cluster.collectives_along("hap", 3)) == set(COLLECTIVES) - OVER_HOSTS
    fast, slow, slow_too = cluster.devices
    assert (fast.name, slow.name, slow_too.name) == ("cpu-1", "cpu-2", "cpu-2")
    # Measured, in as long as alone: the model's times know no contention.
    assert [(kind.contention, kind.contention_delay) for kind in (fast, slow)] == [(1.0, 0.0)] * 2
    assert fast.bandwidth == pytest.approx(2 * slow.bandwidth, rel=1e-3)
    assert all(kind.curve("matmul", "float32") and kind.memory > 1 << 20 for kind in cluster.kinds)
    ((signature, op),) = fast.ops.items()
    assert op.op == "dot_general f32[512,512] f32[512,512]"
    assert float(op.curve.seconds(1e8)) == pytest.approx(float(slow.ops[signature].curve.seconds(1e8)) / 2, rel=1e-3)


def test_a_profile_of_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(kernels(("float32",), quick=True))
    monkeypatch.setattr("hapsynth.profile.run.kernels", lambda *_: every[:6])
    modelled_profile.install(monkeypatch.setattr)
    file = tmp_path / "c.toml"
    assert main(["profile", "-o", str(file), "--quick", "--devices", "2", "--mesh", "data=2"]) == 0
    cluster = Cluster.load(file)
    assert (cluster.n, cluster.axes, cluster.hosts) == (2, (("data", 2),), (0, 0))
    assert "all_to_all" in cluster.collectives["data"]
    assert cluster.profile["jax"]
    assert not file.with_name("c.toml.partial").exists()


def test_refused_figures_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hapsynth.profile.run.kernels", lambda *_: list(kernels(("float32",), True))[:6:2])
    monkeypatch.setattr("hapsynth.profile.run.exchanges", lambda *_: [])
    modelled_profile.install(monkeypatch.setattr)
    steady, spreads = run.sampled, itertools.chain([0.9], itertools.repeat(0.0))
    monkeypatch.setattr(run, "sampled", lambda *args: tuple(map(np.add, steady(*args), (0.0, next(spreads)))))
    compared = {key: np.full((1, 2), 1e-3) for key in (BESIDE, delayed_by([0]))}
    monkeypatch.setattr(_Measuring, "beside", lambda self, *_: self.state.figures.update(compared) or True)
    file = tmp_path / "c.toml"
    assert main(["profile", "-o", str(file), "--quick", "--devices", "1"]) == 2
    error = capsys.readouterr().err
    assert "not saved" in error
    assert "dispatch/float32/8 on cpu varies by 90%" in error
    assert [f.name for f in tmp_path.iterdir()] == ["c.toml.partial"]
    left = json.loads((tmp_path / "c.toml.partial").read_text())["figures"]
    # Nor is what may have been measured otherwise by another figure.
    assert list(left) == [k.key for k in list(kernels(("float32",), True))[2:6:2]]


@pytest.mark.parametrize("given", [[], ["--force"]])
def test_what_varies_too_much_to_measure_anything_is_measured_again(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each takes longer than starting, by less than that varies: none is absurd by itself."""
    first = list(kernels(("float32",), True))[:6]
    monkeypatch.setattr("hapsynth.profile.run.kernels", lambda *_: first)
    modelled_profile.install(monkeypatch.setattr)
    steady, busy = run.sampled, iter([1e-3, *[1.2e-3] * 5])
    took = lambda seconds: (np.array([seconds]), np.array([0.4]))
    monkeypatch.setattr(run, "sampled", lambda *args: took(s) if (s := next(busy, None)) else steady(*args))
    file = tmp_path / "c.toml"
    asked = ["profile", "-o", str(file), "--quick", "--devices", "1"]
    assert main([*asked, *given]) == 2
    assert ("not saved" in capsys.readouterr().err) is not bool(given)
    assert json.loads((tmp_path / "c.toml.partial").read_text())["figures"] == {}
    assert main([*asked, *given]) == 0
    assert Cluster.load(file).n == 1


def test_what_fails_is_told_and_saved_only_if_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = {k.key: k for k in kernels(("float32",), True)}
    few = (
        "dispatch/float32/8",
        "launch/float32/8",
        "stream/float32/4194304",
        "matmul/float32/16777216",
        "pooling/float32/1",
    )
    monkeypatch.setattr("hapsynth.profile.run.kernels", lambda *_: [every[key] for key in few])
    modelled_profile.install(monkeypatch.setattr)
    modelled = Job.runner

    def runner(job: Job, kernel: Any, only: Any = None) -> Any:
        if kernel.family == "pooling":
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such op\nat 0x0")
        return modelled(job, kernel, only)

    monkeypatch.setattr(Job, "runner", runner)
    asked = ["profile", "-o", str(tmp_path / "c.toml"), "--quick", "--devices", "1"]
    failure = "pooling/float32/1 fails on cpu (process 0): JaxRuntimeError: UNIMPLEMENTED: no such op"
    for given, code in (([], 2), (["--force"], 0)):
        assert main([*asked, *given]) == code
        said = capsys.readouterr().err
        assert f"{failure}; not measured anywhere" in said
        assert f"there is no figure of pooling in float32, as {failure}" in said
        assert (tmp_path / "c.toml").exists() == (code == 0)
    assert "pooling" not in Cluster.load(tmp_path / "c.toml").kinds[0].measured


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("/sys/fs/cgroup/c/memory.max", 3),
        ("/sys/fs/cgroup/c/d/memory.max", 3),
        ("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", 3),
        ("/sys/fs/cgroup/memory.max", 3),
        ("/sys/fs/cgroup/other/memory.max", 8),
    ],
)
def test_memory_is_limited_by_the_control_groups_above(monkeypatch: pytest.MonkeyPatch, file: str, found: int) -> None:
    texts = {
        "/proc/self/cgroup": "4:memory:/a/b\n1:cpu:/other\n0::/c/d",
        "/proc/meminfo": f"MemAvailable: {8 << 20} kB",
        file: str(3 << 30),
    }
    monkeypatch.setattr(_device_memory, "_text", lambda path: texts.get(str(path), "").splitlines())
    device = SimpleNamespace(platform="cpu", memory_stats=lambda: None)
    assert _device_memory.free(device) == found << 30
