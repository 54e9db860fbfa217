"""The examples on the example clusters: planned, never above a baseline, and right where they run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import cnn
import jax
import mlp
import numpy as np
import pytest
import train
import transformer
from slow_devices import SPEEDS, slow_cluster

import hapsynth
from hapsynth.graph.trace import trace
from hapsynth.search.planning.baselines import Baselines
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.task import Task

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
SMALL = {
    "mlp": mlp.target_for(mlp.Config(batch=16384, features=128, hidden=(256,))),
    "transformer": transformer.target_for(
        transformer.Config(batch=192, seq=32, vocab=512, layers=1, width=128, heads=4, ff=512)
    ),
    "cnn": cnn.target_for(cnn.Config(batch=256)),
}


@cache
def graph_of(example):
    return trace(*SMALL[example]).graph


# Every example on some, on every cluster several.
ON = {
    "mlp": ("even8", "mixed8", "tiny_and_big", "paper64", "straggler"),
    "transformer": ("mixed8", "tiny_and_big"),
    "cnn": ("even8", "paper64", "straggler"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize(("example", "cluster"), [(example, cluster) for example in ON for cluster in ON[example]])
def test_no_baseline_is_cheaper(example, cluster):
    """No baseline is given to the search as a start."""
    graph = graph_of(example)
    task = Task(graph, hapsynth.Cluster.load(CLUSTERS / f"{cluster}.toml"))
    result = Planner(task).run()
    assert result.gap <= 1e-4
    assert result.joint_lower_bound_s <= result.lower_bound_s <= result.cost_s
    assert not result.replicated_primitives
    baselines = Baselines(task).all()
    for name, baseline in baselines.items():
        assert result.joint_lower_bound_s <= baseline.cost_s, name
        assert result.cost_s <= baseline.cost_s or not baseline.fits, name
    if cluster in ("mixed8", "straggler"):
        assert any(len(set(s)) > 1 for s in result.sizes.shares)


@pytest.mark.optimized
@pytest.mark.few(1)
@pytest.mark.parametrize("example", ["mlp", "cnn"])
def test_uneven_plans_compute_the_step(example):
    """The transformer is trained below."""
    fn, args = {"mlp": SMALL["mlp"], "cnn": cnn.target_for(cnn.Config(batch=64, size=16, channels=(16, 32)))}[example]
    cluster = hapsynth.Cluster.load(CLUSTERS / "mixed8.toml")
    plan = hapsynth.synthesize(fn, args, jax.make_mesh((8,), ("data",)), cluster=cluster, leave_out=False)
    assert any(len(set(s)) > 1 for s in plan.sizes.shares)
    report = plan.check()
    assert report.ok
    assert report.max_relative_error <= 1e-4


def test_training_follows_one_device(tmp_path, monkeypatch):
    config = transformer.Config(batch=48, seq=16, vocab=256, layers=1, width=32, heads=4, ff=64, learning_rate=3e-3)
    slow_cluster(SPEEDS["3:1"], bandwidth=1e8).save(tmp_path / "slow.toml")
    plans = []
    synthesize = hapsynth.synthesize
    noted = lambda *args, **options: (plans.append(synthesize(*args, **options)), plans[-1])[1]
    monkeypatch.setattr(hapsynth, "synthesize", noted)
    planned = train.run(8, tmp_path / "slow.toml", config)
    (plan,) = plans
    assert any(len(set(s)) > 1 for s in plan.sizes.shares)
    np.testing.assert_allclose(planned, train.reference(8, config=config), rtol=1e-3)
    assert planned[-1] < planned[0]
