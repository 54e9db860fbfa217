"""`hapsynth profile` on the device of this machine, and the examples' predicted beside their measured step times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from harness.breakdown import where
from harness.timing import Stepper, interleaved

import hapsynth
from hapsynth.profile.job import Job
from hapsynth.profile.run import Options, profile
from hapsynth.search.cost.program_cost import program_cost
from on_gpu.settings import Example, Row, Settings, fitting

VARIANTS = {"": ""}
_TINY = Options(dtypes=("float32",), quick=True, tolerance=1.0, limit_s=0.0, window_s=0.0, longest_s=0.05)


def rows(settings: Settings, variant: str) -> Iterator[Row]:
    notes: list[str] = []
    began = time.perf_counter()
    options = _TINY if settings.is_tiny else Options(dtypes=("float32", "bfloat16"))
    # Doubtful figures are kept too: the notes name them.
    cluster = profile(Job(1), options, None, force=True, note=notes.append)
    seconds = time.perf_counter() - began
    if settings.cluster is not None:
        cluster.save(settings.cluster)
    yield {"what": "profile", "seconds": seconds, "notes": notes, **told(cluster)}
    predictions: dict[Example, Prediction] = {}
    for name in settings.examples:
        for factor in settings.batches:
            example = settings.shallow(name).times(factor)
            predictions[example] = found = Prediction.of(example, cluster)
            # Predictions come before any measurement.
            said = {"predicted_s": found.seconds, "where": where(found.plan, found.plan.cost_model(cluster))}
            yield {"what": "predicted", **example.told(), **said}
    for example in predictions:
        yield from fitting(example, partial(measured, settings, cluster, predictions))


class Prediction(NamedTuple):
    """A plan of one step on the device of this machine, and its predicted seconds."""

    plan: hapsynth.Plan
    seconds: float

    @staticmethod
    def of(example: Example, cluster: hapsynth.Cluster) -> Prediction:
        plan = example.planned(jax.devices()[0])
        return Prediction(plan, program_cost(plan.program, plan.sizes, plan.cost_model(cluster)))


def told(cluster: hapsynth.Cluster) -> Row:
    """The measured figures of the device: rates at the largest sizes, and the whole curves."""
    kind = cluster.devices[0]
    rates: dict[str, dict[str, float]] = {}
    curves: dict[str, Any] = {}
    for family, by_dtype in kind.measured.items():
        rates[family] = {dtype: curve.points[-1][0] / curve.points[-1][1] for dtype, curve in by_dtype.items()}
        curves[family] = {dtype: [*map(list, curve.points)] for dtype, curve in by_dtype.items()}
    return {
        "kind": kind.name,
        "flops": dict(kind.flops),
        "bandwidth": kind.bandwidth,
        "memory": kind.memory,
        "overhead_s": kind.overhead,
        "dispatch": cluster.profile.get("dispatch"),
        "rates": rates,
        "curves": curves,
    }


def measured(
    settings: Settings, cluster: hapsynth.Cluster, predictions: dict[Example, Prediction], example: Example
) -> Iterator[Row]:
    plan, predicted = predictions.get(example) or Prediction.of(example, cluster)
    stepper = Stepper(plan, *plan.shard(*example.arguments(jax.devices()[0])))
    (times,) = interleaved({"plan": stepper}, settings.rounds).values()
    seconds = statistics.median(times)
    low, high = np.quantile(times, [0.25, 0.75]).tolist()
    yield {
        "what": "measured",
        **example.told(),
        "predicted_s": predicted,
        "measured_s": seconds,
        "quartiles": [low, high],
        "ratio": predicted / seconds,
    }
