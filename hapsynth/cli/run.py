"""`hapsynth run`: a saved plan on real devices, every output beside the function's on one device."""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from hapsynth._errors import UsageError
from hapsynth._quantities import plural, seconds
from hapsynth.plan import Plan
from hapsynth.report.tables import Table, heading
from hapsynth.running.check import (
    PLAIN,
    CheckReport,
    Judged,
    Reference,
    compare,
    default_rtols,
    severity,
    without_numbers,
)
from hapsynth.running.form import Form


@dataclass(frozen=True)
class Trial:
    """The largest relative error of each output leaf over all steps, and the seconds of each step.

    A leaf that needed another yardstick than `plain` in any step is named with it, and its error is the largest by
    such; one without a finite number had none in any step.
    """

    report: CheckReport
    step_s: tuple[float, ...]


def devices_of(path: str) -> int | None:
    """How many devices a plan file's cluster has; None where that can't be read, which loading it will explain."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        # All plans of a file are for one cluster.
        return len(next(iter(data["plans"].values()) if "plans" in data else iter([data]))["memory_bytes"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return None


def ask_for_host_devices(n: int) -> None:
    """Let JAX's CPU backend have `n` devices, if it has not started yet. An accelerator is still preferred."""
    if getattr(jax.config, "jax_num_cpu_devices", -1) >= n:
        return
    # RuntimeError: a backend has started already, and `first_devices` counts its devices.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", n)


@contextlib.contextmanager
def starting_backends() -> Generator[None]:
    """Around what may start JAX's backends: UsageError where those of JAX_PLATFORMS can't start here."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        # JAX leaves CUDA out where there is no GPU, and then asserts that there is a backend.
        asked = getattr(jax.config, "jax_platforms", None)
        if not asked or not (isinstance(error, AssertionError) or "Unable to initialize backend" in str(error)):
            raise
        why = f": {error}" if str(error) else ""
        raise UsageError(f"JAX_PLATFORMS is {asked!r}, and JAX finds no such devices here{why}") from error


def devices() -> list[Any]:
    """All that JAX has; UsageError where it has none of JAX_PLATFORMS."""
    with starting_backends():
        return jax.devices()


def first_devices(n: int) -> Mesh:
    """A mesh over the first `n` devices, here or of the job; UsageError where there are fewer."""
    found = devices()
    if len(found) < n:
        platform, count = found[0].platform, jax.process_count()
        here = "here are" if count == 1 else f"the {count} processes of the job have"
        if count > 1:
            more = -(-n * count // len(found))
            way_out = f"start {more} such processes, or give each more: on CPUs --devices {-(-n // count)}"
        elif platform == "cpu":
            way_out = "JAX started with these before hapsynth could ask for more: run it in a process of its own"
        else:
            way_out = "set JAX_PLATFORMS=cpu to run it on host devices"
        raise UsageError(f"the plan is for {n} devices, and {here} {len(found)} ({platform}); {way_out}")
    return Mesh(np.array(found[:n]), ("hap",))


def on_mesh(saved: Plan, mesh: Mesh, form: Form) -> Plan:
    """A plan without devices, with them; UsageError where it can't run so on them."""
    try:
        return Plan(saved.traced, saved.result, saved.cluster, mesh, saved.fn, form=form)
    except ValueError as error:
        raise UsageError(str(error)) from error


def run_trial(
    plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], steps: int, tell: Callable[[str], None]
) -> Trial:
    """Run `steps` steps, carried state fed back, and compare each step with the function on the same values.

    Every step of the reference starts from the plan's own state, so that errors do not accumulate. `tell` is
    called with each activity.
    """
    assert plan.mesh is not None
    traced = plan.traced
    leaves, tree = jax.tree_util.tree_flatten((tuple(args), dict(kwargs)))
    assert plan.fn is not None
    reference = Reference(plan.fn, traced, leaves, plan.mesh.devices.flat[0])
    rtols = default_rtols(traced)
    worst = [Judged(0.0, PLAIN)] * len(rtols)
    not_finite = set(range(len(rtols)))
    times: list[float] = []
    for step in range(steps):
        tell(f"step {step + 1} of {steps}" + (", compiling" if step == 0 else ""))
        now_args, now_kwargs = jax.tree_util.tree_unflatten(tree, leaves)
        placed = plan.shard(*now_args, **now_kwargs)
        items = [placed] if len(now_args) + bool(now_kwargs) == 1 else list(placed)
        jax.block_until_ready(items)
        began = time.perf_counter()
        out = plan(*items[: len(now_args)], **(items[-1] if now_kwargs else {}))
        jax.block_until_ready(out)
        times.append(time.perf_counter() - began)
        whole = jax.tree_util.tree_leaves(plan.unshard(out))
        got = [whole[i] for i in traced.out_array_leaves]
        judged = compare(reference, [leaves[i] for i in traced.array_leaves], got, rtols, plan.mesh.size)
        # A leaf that fails in any step has failed; one that needed another yardstick in any step says so.
        worst = [max(of, key=partial(severity, rtol=rtol)) for *of, rtol in zip(worst, judged, rtols, strict=True)]
        not_finite &= without_numbers(got)
        for source, target in traced.graph.carry:
            leaves[traced.array_leaves[source]] = got[target]
    report = CheckReport.of(traced, worst, rtols, not_finite, reference.as_is, reference.not_widened)
    return Trial(report, tuple(times))


def print_trial(out: Console, plan: Plan, trial: Trial) -> None:
    """The largest error of each group of outputs and of all, and how long the steps took."""
    assert plan.mesh is not None
    device = plan.mesh.devices.flat[0]
    count = plural(plan.cluster.n, "device")
    count = count if plan.mesh.size == plan.cluster.n else f"{plan.mesh.size} of {count}"
    out.print(
        f"ran {plural(len(trial.step_s), 'step')} on {count} ({device.platform}), planned for {plan.cluster.name}"
    )
    first, *rest = trial.step_s
    later = f", then {seconds(statistics.median(rest))} a step (median)" if rest else ""
    out.print(f"first step     {seconds(first)} with compilation{later}")
    groups: dict[str, list[float]] = {}
    for path, error in trial.report.leaves:
        groups.setdefault(_group(path), []).append(error)
    out.print(heading("Outputs beside the function on one device"))
    rows = [[name, str(len(errors)), f"{max(errors):.2e}"] for name, errors in groups.items()]
    out.print(Table(["output", "leaves", "max relative error"], rows))
    for line in trial.report.explained:
        out.print(line)
    verdict = "passed" if trial.report.ok else "FAILED"
    errors: dict[float, float] = {}
    for (_, error), tolerance in zip(trial.report.leaves, trial.report.rtols, strict=True):
        errors[tolerance] = max(errors.get(tolerance, 0.0), error)
    of_each = [f"{errors[tolerance]:.2e}, tolerance {tolerance:g}" for tolerance in sorted(errors, reverse=True)]
    out.print(f"\ncheck {verdict}: max relative error {'; '.join(of_each) or 0}")


def _group(path: str) -> str:
    """The first two steps of an output's path: `[0]['params']`."""
    steps = re.findall(r"\[[^\]]*\]|\.\w+", path)
    return "".join(steps[:2]) or "the result"
