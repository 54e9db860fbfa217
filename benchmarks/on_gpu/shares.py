"""Compute time of a device by its share of an uneven cluster: the first device of a plan for two, from 1/8 to 1/2.

Stages run on their exact shapes; copies of the arrays on the wire replace collectives (`on_gpu.one_device`), and their
own time is measured too and subtracted. Where the device's time is affine in its share, the line is exact.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
from harness.timing import interleaved

import hapsynth
from hapsynth.instructions.program.program import Compute
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.lower._host_schedule import CollectiveStage, LocalStage
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.program_cost import device_seconds
from on_gpu.one_device import OneStaged, Steps, one_of, with_shares
from on_gpu.settings import Example, Row, Settings, fitting, like_cluster

VARIANTS = {"": ""}


def rows(settings: Settings, variant: str) -> Iterator[Row]:
    for name in settings.examples:
        yield from fitting(settings.shallow(name), partial(of_example, settings))


def of_example(settings: Settings, example: Example) -> Iterator[Row]:
    device = jax.devices()[0]
    plan = for_two(settings, example)
    costs = plan.cost_model()
    found: list[Row] = []
    for share in settings.shares:
        sizes = with_shares(plan, (share, 1 - share))
        one = one_of(OneStaged, plan, sizes, device)
        steps = Steps(one, jax.tree.leaves(example.arguments(device)))
        times = interleaved({"step": steps, "copies": one.copies()}, settings.rounds)
        seconds = {name: statistics.median(ts) for name, ts in times.items()}
        row = {
            "what": "share",
            **example.told(),
            "share": share,
            "shares_of_classes": sorted({round(s[0] / sum(s), 4) for s in sizes.shares}),
            "step_s": seconds["step"],
            "copies_s": seconds["copies"],
            "measured_s": seconds["step"] - seconds["copies"],
            "predicted_s": predicted(plan, sizes, costs),
            "local_stages": one.count(LocalStage),
            "collective_stages": one.count(CollectiveStage),
            "held_bytes": sum(x.nbytes for x in steps.held),
            "temporary_bytes": one.temporary_bytes(),
        }
        found.append(row)
        yield row
    yield {"what": "line", **example.told(), "kind": costs.cluster.devices[0].name, **lines(found)}


def for_two(settings: Settings, example: Example) -> hapsynth.Plan:
    """A plan for two devices like the one that is here, in staged form."""
    fn, args = example.target()
    cluster = like_cluster(settings.kind(), 2)
    return hapsynth.synthesize(fn, args, cluster, leave_out=False, form="staged")


def predicted(plan: hapsynth.Plan, sizes: Sizes, costs: CostModel) -> float:
    """Seconds that the first device computes in a step."""
    graph = plan.traced.graph
    ran = [i for i in plan.program.instructions if isinstance(i, Compute)]
    return sum(graph.runs[graph.ops[i.op].region] * float(device_seconds(costs, sizes, i)[0]) for i in ran)


def lines(found: list[Row]) -> Row:
    """Measured and predicted seconds as start + slope x share, and the largest distance from each line in parts of the
    largest time."""
    told: Row = {}
    shares = [row["share"] for row in found]
    for what in ("measured", "predicted"):
        seconds = np.array([row[f"{what}_s"] for row in found])
        slope, start = np.polyfit(shares, seconds, 1).tolist()
        distance = float(np.max(np.abs(start + slope * np.array(shares) - seconds)))
        told |= {f"{what}_start_s": start, f"{what}_slope_s": slope, f"{what}_bend": distance / float(max(seconds))}
    ratios = [row["predicted_s"] / row["measured_s"] for row in found]
    return {**told, "ratios": ratios}
