"""The fused form as XLA compiles it: for devices of each share another program, in all the same collectives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import CASES, WAYS, Case, arguments, assert_right, planned
from jax import lax
from slow_devices import first_devices, thin_cluster

import hapsynth
from hapsynth import _jax
from hapsynth.hlo.collectives import collectives_of
from hapsynth.instructions.program.program import Convert
from hapsynth.lower import Fused, Lowered, alike
from hapsynth.lower._collective_order import Order
from hapsynth.plan import Plan
from hapsynth.running.form import chosen_form


def compiled(plan: Plan, at: tuple[int, ...] = (), form: Any = Fused) -> Any:
    """The program of the devices at a place of the plan's mesh."""
    assert plan.mesh is not None
    lowered = form(plan.traced.graph, plan.program, plan.sizes, plan.mesh, options=plan.result.lowering, own=(at,))
    return lowered.lower().compile()


def sequences(plan: Plan) -> list[list[str]]:
    """Of the programs of a mesh's first and second device."""
    return [[str(c) for c in collectives_of(compiled(plan, (i,)).as_text())] for i in range(2)]


@pytest.mark.few(9)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.75, 0.25)], ids=["no rows", "few rows"])
def test_the_collectives_are_those_of_the_program(name: str, shares: tuple[float, float]) -> None:
    plan = planned(CASES[name], first_devices(2), "switch", shares)
    first, second = sequences(plan)
    assert first == second
    # None is lost, and those of a loop stay in it.
    sent = [i for i in plan.program.instructions if isinstance(i, Convert) and i.is_collective]
    assert len(first) >= len(sent) > 0
    inside = sum(plan.traced.graph.regions[i.region].kind in ("scan", "while") for i in sent)
    assert sum("in loop" in text for text in first) >= inside


@pytest.mark.parametrize("name", WAYS)
def test_what_is_not_chained_comes_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above can fail."""
    monkeypatch.setattr(Fused, "_order", lambda self: Order(False))
    monkeypatch.setattr(Fused, "sinks", 0)
    first, second = sequences(planned(WAYS[name], first_devices(2), "switch"))
    assert first != second


def whether(w: Any, x: Any) -> Any:
    """Bools are sent, from a loop too."""
    known = lax.scan(lambda c, _: (jnp.any((x @ w > 0) & ~c, 0), None), w[0] > 0, None, length=2)[0]
    return jnp.tanh(x @ w) > 0, known, jnp.any(x > 0, 0)


@pytest.mark.parametrize("form", [Fused, Lowered])
def test_bools_are_sent_where_types_are_not_promoted(form: Any) -> None:
    with jax.numpy_dtype_promotion("strict"):
        plan = planned(Case(whether), first_devices(2), "switch", (0.5, 0.5))
        assert any(isinstance(i, Convert) and i.is_collective for i in plan.program.instructions)
        form(plan.traced.graph, plan.program, plan.sizes, plan.mesh).lower()


def test_each_computes_its_own_part() -> None:
    """FLOPs follow the share: equal sequences by padding would be no answer."""
    plan = planned(CASES["a constant contribution"], first_devices(2), "switch", (0.75, 0.25))
    flops = [compiled(plan, (i,)).cost_analysis()["flops"] for i in range(2)]
    assert flops[0] / flops[1] == pytest.approx(3, rel=0.1)


def test_one_process_of_alike_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = hapsynth.synthesize(
        CASES["branches"].fn, arguments(), first_devices(4), cluster=thin_cluster((1.0,) * 4), form="fused"
    )
    assert isinstance(plan.lowered, Fused)
    with monkeypatch.context() as patch:
        # Nobody reads its text, which of a large program takes seconds to print.
        patch.delattr(jax.stages.Lowered, "as_text")
        plan.lowered.prepare()
    assert_right(CASES["branches"], plan)
    assert plan.result.exact


def test_unlike_shares_in_one_process_are_refused() -> None:
    plan = planned(Case(CASES["branches"].fn), first_devices(2), "auto")
    assert plan.form == "switch"
    with pytest.raises(
        ValueError, match=r"process 0 holds devices of unlike shares.*for each device .*give form='switch'"
    ):
        Plan(plan.traced, plan.result, plan.cluster, plan.mesh, plan.fn, form="fused")


class Processes:
    """A mesh of devices of several processes, as far as a form is chosen by it."""

    def __init__(self, platform: str, processes: tuple[int, ...]) -> None:
        device = lambda i, p: type("Device", (), {"platform": platform, "process_index": p, "id": i})()
        self.devices = np.array([device(i, p) for i, p in enumerate(processes)])
        self.is_multi_process = len({*processes}) > 1


@pytest.mark.parametrize(
    ("platform", "processes", "speedup", "threads", "form"),
    [
        ("gpu", (0, 1), None, 1, "fused"),
        ("gpu", (0, 1), 1.5, 1, "fused"),
        ("cpu", (0, 1), None, 1, "fused"),
        ("cpu", (0, 1), 1.1, 2, "fused"),
        ("cpu", (0, 1), 1.1, 1, "staged"),
        ("cpu", (0, 1), 1.3, 2, "staged"),
        ("cpu", (0, 0), 1.3, 2, "switch"),
        ("gpu", (0, 0), None, 1, "switch"),
    ],
)
def test_several_processes_are_fused(
    platform: str,
    processes: tuple[int, ...],
    speedup: float | None,
    threads: int,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_jax, "runs_beside", lambda: True)
    monkeypatch.setattr(_jax, "cpu_threads", lambda: threads)
    plan = planned(CASES["equal operands"], first_devices(2), "switch")
    mesh: Any = Processes(platform, processes)
    predicted = None if speedup is None else lambda: speedup
    assert chosen_form(plan.traced.graph, plan.result, mesh, "", overlap_speedup=predicted)[0] == form
    even = planned(CASES["equal operands"], first_devices(2), "switch", (0.5, 0.5))
    of_even = "staged" if form == "staged" else "switch"
    assert chosen_form(even.traced.graph, even.result, mesh, "", overlap_speedup=predicted)[0] == of_even


def test_devices_that_are_alike() -> None:
    plan = planned(CASES["equal operands"], first_devices(4), "switch", (0.375, 0.375, 0.125, 0.125))
    assert alike(plan.sizes, [(0,), (1,), (2,), (3,)]) == [[0, 1], [2, 3]]


def test_keys_and_counts_are_carried() -> None:
    """Typed keys, integers and booleans are sent as well, and lie as they did."""

    def step(state: Any, x: Any) -> Any:
        key, n = state
        key, now = jax.random.split(key)
        noisy = x + jax.random.normal(now, x.shape)
        return (key, n + (noisy > 0).sum()), noisy.sum(0)

    args = ((jax.random.key(1), np.int32(3)), arguments()[1])
    cluster = thin_cluster((1.0,) * 4)
    plan = hapsynth.synthesize(step, args, first_devices(4), cluster=cluster, fixed={"[1]": "S(0)"}, form="fused")
    assert plan.check(*args).ok
    assert isinstance(plan.lowered, Lowered)
