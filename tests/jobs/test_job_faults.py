"""Jobs of two real processes in which one fails: the other ends too, soon, and says who failed and what to do."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from thoroughness import THOROUGH

ROOT = Path(__file__).parents[2]
SAYS = {
    "killed": {0: "process 1 on .* has died"},
    "stopped": {0: "process 1 on .* has not been heard of for 4 s: it is stopped.*continue or restart it"},
    "other_plan": dict.fromkeys((0, 1), "process 0 on .* has cluster .*, and process 1 on .* has cluster .* load one"),
    "other_versions": dict.fromkeys((0, 1), "has hapsynth 9.9: install the same.* process 1 on .* has jax 0.9"),
    "other_flags": dict.fromkeys(
        (0, 1),
        r"PreflightError: process 0 on .* has compiled its collective (\d) as all-reduce add f32\[\] f32\[\] .*, "
        r"and process 1 on .* has compiled its collective \1 as all-reduce add f32\[\] \{.*set XLA_FLAGS",
    ),
    "raises": dict.fromkeys((0, 1), "process 1 on .* ended with ValueError: a bad batch"),
    "raises_beside_a_collective": dict.fromkeys((0, 1), "process 1 on .* ended with ValueError: a bad stage"),
    "killed_beside_a_collective": {0: "process 1 on .* has died"},
    "raises_early": {0: "process 1 on .* ended with ValueError: a bad file"},
    # Whichever is noticed first: that a call is missing, or that process 0 waits for it in a meeting.
    "fewer_calls": dict.fromkeys((0, 1), "process 1 on .* has ended.*, and process 0 .*must make the same calls"),
    "exits_in_a_call": {0: "process 1 on .* has ended after 0 calls of plans, and process 0 on .* is in call 1"},
    "never_comes": {0: "process 1 did not come to the plan within 2 s, where process 0 waits .*HAPSYNTH_JOIN_S"},
    "port_taken": {0: r"process 0 on .* can't serve the rendezvous .*set HAPSYNTH_RENDEZVOUS=HOST:PORT to a free port"},
    # Neither trains on without the other.
    "two_devices": dict.fromkeys(
        (0, 1),
        r"PreflightError: .*local devices \(process 0 has 2, process 1 has 1\).*2 of process 0 and none of process 1",
    ),
    "walled": dict.fromkeys(
        (0, 1), r"PreflightError: process 0 on .* and process 1 on .* do not reach each other.*open"
    ),
    # Each in seconds, with the file and the line: faulty_jobs.py prints when.
    "srun_loading": dict.fromkeys((0, 1), r"process 1 on .* ended with ValueError: a bad disk \(faulty_jobs.py:\d+\)"),
    "srun_planning": dict.fromkeys((0, 1), r"process 1 on .* ended with .*a bad model.* \(faulty_jobs.py:\d+\)"),
    "srun_first_step": dict.fromkeys((0, 1), r"process 1 .* ended with .*a bad batch in call 0 \(faulty_jobs.py:\d+\)"),
    "srun_tenth_step": dict.fromkeys((0, 1), r"process 1 .* ended with .*a bad batch in call 9 \(faulty_jobs.py:\d+\)"),
    # With process 0 goes JAX's own service, which may be the first to say so.
    "first_killed": {1: "process 0, which serves the rendezvous, has died|JAX distributed service detected fatal"},
}


# The same is said of the same fault at another time: beside a collective, before the first plan, in the tenth step.
LEFT_OUT = () if THOROUGH else ("killed", "raises", "srun_loading", "srun_first_step")
# A process killed and a launcher killed have launched jobs of test_jobs.py too.
SAMPLE = ("exit0:initialize:1",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all the jobs of faulty_jobs.py left."""
    made = tmp_path_factory.mktemp("jobs")
    paths = [ROOT, ROOT / "tests" / "support"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    run = [sys.executable, ROOT / "tests" / "support" / "faulty_jobs.py", made, *LEFT_OUT]
    subprocess.run(run, env=env, check=True)
    return made


def ended(folder: Path, job: str) -> list[int]:
    return json.loads((folder / "statuses.json").read_text())[job]


@pytest.mark.slow
@pytest.mark.parametrize("job", [job for job in SAYS if job not in LEFT_OUT])
def test_a_fault_ends_the_job_with_one_message(folder: Path, job: str) -> None:
    assert 0 not in ended(folder, job)
    for rank, says in SAYS[job].items():
        said = (folder / f"{job}.{rank}").read_text()
        assert re.search(says, said), said
        assert "right" not in said


@pytest.mark.slow
def test_a_process_may_come_and_compile_late(folder: Path) -> None:
    said = [(folder / f"late.{rank}").read_text() for rank in range(2)]
    assert ended(folder, "late") == [0, 0], said
    assert all("right" in text for text in said)
    assert "compiled late" in said[1]


@pytest.mark.slow
def test_the_secret_of_a_job_without_a_launcher_travels_through_jax(folder: Path) -> None:
    said = [(folder / f"drawn.{rank}").read_text() for rank in range(2)]
    assert ended(folder, "drawn") == [0, 0], said
    assert all("right" in text and "HAPSYNTH_TOKEN is not set" not in text for text in said)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["srun_trains", "mpirun_trains"])
def test_a_batch_systems_variables_are_enough(folder: Path, job: str) -> None:
    said = [(folder / f"{job}.{rank}").read_text() for rank in range(2)]
    assert ended(folder, job) == [0, 0], said
    assert all("right" in text and "HAPSYNTH_TOKEN is not set" not in text for text in said)


@pytest.mark.slow
def test_a_sample_of_the_table_of_faults(tmp_path: Path) -> None:
    """benchmarks/faults.py: launched jobs of three processes all end in time, name who failed and leave nothing."""
    table = tmp_path / "faults.json"
    # Ctrl-C and an exception have jobs of this file and of test_jobs.py besides.
    some = ["--sample"] if THOROUGH else ["--only", f"^({'|'.join(SAMPLE)})$"]
    run = [sys.executable, ROOT / "benchmarks" / "faults.py", *some, "--json", table]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    outcomes = json.loads(table.read_text())
    assert len(outcomes) == (5 if THOROUGH else len(SAMPLE)), done.stderr
    assert not [o for o in outcomes if o["wrong"] or o["left"]], done.stdout
    says = {o["trial"]: o["message"] for o in outcomes}
    assert re.search("process 1 .* wait for it in jax.distributed.initialize", says["exit0:initialize:1"])
    if THOROUGH:
        assert re.search("the launcher on .* has died: .* process 0 .* process 2", says["launcher-SIGKILL:planning:0"])
        assert re.search(r"process 1 on .* was killed by signal 9 \(SIGKILL\)", says["SIGKILL:training:1"])
        assert re.search("interrupted: SIGINT came to the launcher on .*", says["launcher-SIGINT:training:0"])
        assert re.search("process 1 .* ended with ValueError: a bad batch", says["exception:planning:1"])
