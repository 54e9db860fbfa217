"""Every test runs on eight CPU devices: set before any backend starts, asserted, never skipped over.

Programs run once or twice here, and compiling them took most of the time, so XLA generates code without optimizing it;
the HLO stays the same. Tests marked `optimized` take XLA's optimizations, HAPSYNTH_OPTIMIZED=1 has all tests take them.
Bounds of makespans are raised in few rounds, and orders are perturbed few times: of steps this small they took most of
the time of planning. HAPSYNTH_THOROUGH=1 has all rounds, and so have tests of what these find (`all_rounds`).
Generated examples are the same in every run; HAPSYNTH_NEW_EXAMPLES=1 draws new ones. Of many cases a few are gone
through (`support/thoroughness.py`): all with HAPSYNTH_THOROUGH=1, and where tests are asked for by name (FILE::TEST).
Processes that tests start find hapsynth compiled to bytecode, and Python's collector of cyclic garbage, a quarter of
the search's time, runs seldom.

HAPSYNTH_GPU=1 leaves the devices to JAX, for tests/gpu (HAPSYNTH_GPU=cpu tries these tests without a GPU).
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import graphs
import hypothesis
import jax
import pytest
from cli_model import write_model
from thoroughness import THOROUGH, left_out

from hapsynth.cli.main import main
from hapsynth.cluster.cluster import Cluster
from hapsynth.instructions.rules import REGISTRY, extension
from hapsynth.search.planning.makespan import search
from hapsynth.search.scheduling import list_schedule

DEVICES = 8
GPU = os.environ.get("HAPSYNTH_GPU", "")
QUICK = not (os.environ.get("HAPSYNTH_OPTIMIZED") or GPU)

# What fails by chance is found by who looks for it, not in CI; how long an example takes is no fault of the code's.
hypothesis.settings.register_profile(
    "no_chance",
    derandomize=not os.environ.get("HAPSYNTH_NEW_EXAMPLES"),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("no_chance")

jax.config.update("jax_num_cpu_devices", DEVICES)
if GPU in ("", "cpu"):
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_disable_most_optimizations", QUICK)
if QUICK:
    # Compiles in a third of the time. The second is gone from JAX 0.11 on, and XLA ends a process over a flag unknown.
    flags = "--xla_cpu_parallel_codegen_split_count=1"
    if jax.__version_info__ < (0, 11):
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    # Of processes that tests start, too.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

ROUNDS, PERTURBED = search._ROUNDS_OF_BOUND, list_schedule._PERTURBED
if not THOROUGH:
    search._ROUNDS_OF_BOUND, list_schedule._PERTURBED = (4, 4), 10

# Tests of planning plan.
os.environ["HAPSYNTH_CACHE_DIR"] = "off"

# Where it is set, as in containers, every process compiles all of hapsynth's source: 0.4 s of each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Few cases of many. First those that wait, while CI has other work for the cores, then slow ones: one that is
    begun last is waited for by an idle core."""
    if not THOROUGH and not any("::" in asked for asked in config.args):
        beyond = set(left_out(items))
        items[:] = [item for item in items if item not in beyond]
        config.hook.pytest_deselected(items=[*beyond])
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("waits", "slow")])


def pytest_collection_finish() -> None:
    """No collection walks over what was imported, and there is one per 100,000 new objects instead of per 700."""
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


def pytest_sessionfinish() -> None:
    """Nor do those with which Python ends."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> list[jax.Device]:
    """The eight host devices. Fails where there are more or fewer: a test that runs on one proves nothing."""
    devices = jax.devices("cpu")
    assert len(devices) == DEVICES, f"{len(devices)} devices; was a backend started before tests/conftest.py?"
    return devices


@pytest.fixture
def all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of makespans are raised in as many rounds, and orders perturbed as often, as in a user's search."""
    monkeypatch.setattr(search, "_ROUNDS_OF_BOUND", ROUNDS)
    monkeypatch.setattr(list_schedule, "_PERTURBED", PERTURBED)


@pytest.fixture(autouse=True)
def optimizations(request: pytest.FixtureRequest) -> Iterator[None]:
    """XLA's optimizations for a test marked `optimized`, and processes that it starts."""
    if request.node.get_closest_marker("optimized") is None:
        yield
        return
    jax.config.update("jax_disable_most_optimizations", False)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
        yield
    jax.config.update("jax_disable_most_optimizations", QUICK)


@pytest.fixture
def unequal() -> Cluster:
    """Four fast devices and four at a third of their speed, joined well."""
    return graphs.cluster([3.0] * 4 + [1.0] * 4, latency=1e-7)


@pytest.fixture
def rules_of_this_test_only() -> Iterator[None]:
    """Rules hold for the whole process."""
    before, own = dict(REGISTRY), set(extension.OWN)
    yield
    for held, old in ((REGISTRY, before), (extension.OWN, own)):
        held.clear()
        held.update(old)


# ---- of the command line


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with model.py and mixed.toml, which is the working directory."""
    write_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a plan of the tiny model."""
    folder = tmp_path_factory.mktemp("saved")
    write_model(folder)
    plan = folder / "plan.json"
    assert main(["search", f"{folder}/model.py", "--cluster", f"{folder}/mixed.toml", "--plan", str(plan)]) == 0
    return plan.read_text()


@pytest.fixture
def plan_file(files: Path, saved: str) -> Path:
    (files / "plan.json").write_text(saved)
    return files / "plan.json"
