"""Preflight's verdicts, and the launcher with processes that need no JAX."""

import dataclasses
import importlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from slow_devices import slow_cluster

import hapsynth
from hapsynth import _device_memory
from hapsynth._errors import UsageError
from hapsynth._nvidia import cuda_plugin, listed_gpus
from hapsynth.cli import commands
from hapsynth.cli import launch as cli_launch
from hapsynth.cli.launch import place
from hapsynth.cli.main import main
from hapsynth.cli.options import parser
from hapsynth.cluster.compiler_target import compiler_target
from hapsynth.jobs import preflight, process_facts
from hapsynth.jobs.batch_system import Task, started_by
from hapsynth.jobs.launch import Launch, _label, _signals, launch, launched
from hapsynth.jobs.process_facts import _decoded, left_out, notices, of_function, plan_fingerprint, problems, software
from hapsynth.jobs.supervisor import Supervisor
from hapsynth.lower import parts
from hapsynth.rendezvous import meeting
from hapsynth.rendezvous.address import JobError, Timeouts, free_ports, parse_address
from hapsynth.rendezvous.client import Client
from hapsynth.running import allgather
from hapsynth.search.memory.profile import held_by
from hapsynth.targets.target_process import _Saved

ROOT = Path(__file__).parents[2]


def _sample(x: Any) -> list[str]:
    return process_facts._sample(jnp.asarray(x))


FACTS: dict[str, Any] = {
    "process": "p0",
    "host": "a",
    "hapsynth": "1",
    "jax": "1",
    "jaxlib": "1",
    "mesh": [[0, 0, "G"], [1, 1, "G"]],
    "platform": "gpu",
    "kinds": ["G"],
    "shards_autotuning": True,
    "cache": {"a folder": True},
    "numerics": {"jax_default_prng_impl": "threefry", "jax_enable_x64": False},
    "arguments": {"count": 2, "types": {"float32[8]": 1, "float32[4]": 1}},
    "code": {"ops": {"dot_general": 2}, "digest": "a"},
    "constants": "c",
    "cluster": "m",
    "plan": "f",
    "form": "fused",
    "values": {
        "[0]['w']": _sample(np.float32([1, 2])),
        "[0]['half']": _sample(jnp.bfloat16([1, 2])),
        "[0]['n']": _sample(np.complex64([np.nan])),
        "[0]['key']": _sample(np.uint32([0, 1234])),
    },
    "lowered": "e",
    "links": {"rank": 0, "never": [1]},
    "memory": [["G:0", 5 << 20, 6 << 20]],
    "machine": [0, -1],
}
OTHER = {**FACTS, "process": "p1", "host": "b", "links": {"rank": 1, "never": []}}


def test_processes_that_fit_together() -> None:
    assert not problems([FACTS, OTHER])
    # The next number of bfloat16 is a 128th further.
    rounded = {
        **FACTS["values"],
        "[0]['w']": _sample(np.float32([1.0001, 2])),
        "[0]['half']": _sample(jnp.bfloat16([1, 2.015625])),
        "[0]['n']": _sample(np.complex64([-np.nan * 1j])),
    }
    assert not problems([FACTS, {**OTHER, "values": rounded}])
    assert not problems([FACTS, {**OTHER, "kinds": ["H"]}])
    on_cpu = [{**FACTS, "platform": "cpu", "kinds": ["x86"]}, {**OTHER, "platform": "cpu", "kinds": ["arm"]}]
    assert not problems(on_cpu)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hapsynth": "2"}, "p0 has hapsynth 1, and p1 has hapsynth 2: install the same hapsynth everywhere"),
        ({"jax": "2"}, "p1 has jax 2: install the same jax"),
        ({"jaxlib": "2"}, "p1 has jaxlib 2: install the same jaxlib"),
        ({"plan": "g"}, "p1 has plan g: load one plan file in all (`hapsynth.load`)"),
        (
            {"plan": "g", "numerics": {"jax_default_prng_impl": "rbg", "jax_enable_x64": False}},
            "p0 has jax_default_prng_impl threefry, and p1 has jax_default_prng_impl rbg: set the same in every",
        ),
        (
            {"plan": "g", "arguments": {"count": 2, "types": {"float32[8]": 1, "float16[4]": 1}}},
            "p0 has arguments float32[4] x1, and p1 has arguments float16[4] x1: call the plan with arguments of the",
        ),
        (
            {"plan": "g", "code": {"ops": {"dot_general": 2, "sin": 1}, "digest": "b"}, "constants": "d"},
            "p0 has a function of no sin, and p1 has a function of 1 sin: run the same source",
        ),
        ({"plan": "g", "constants": "d"}, "p1 has parameters or constants of ops d: run the same source"),
        ({"plan": "g", "cluster": "o"}, "p1 has cluster o: plan for the same cluster everywhere"),
        (
            {"form": "staged", "lowered": "h"},
            "p0 has a plan in fused form, and p1 has a plan in staged form: give form=",
        ),
        ({"form": "staged", "threads": 1}, "has one in p1: begin with the environment variable NPROC=2 there"),
        ({"plan": "g", "threads": 1}, "has one in p1: begin with the environment variable NPROC=2 there"),
        ({"values": {"[0]['w']": _sample(np.float32([1, 3]))}}, "p0 and p1 have other values in [0]['w'], which"),
        ({"values": {"[0]['w']": _sample(np.float32([1, 2.015625]))}}, "the same by plan.resync"),
        ({"values": {"[0]['w']": _sample(np.float32([1]))}}, "p0 and p1 have other values in [0]['w'], which"),
        ({"values": {"[0]['half']": _sample(jnp.bfloat16([1, 2.1]))}}, "have other values in [0]['half']"),
        ({"values": {"[0]['n']": _sample(np.complex64([0]))}}, "have other values in [0]['n']"),
        ({"values": {"[0]['key']": _sample(np.uint32([0, 1235]))}}, "p0 and p1 have other values in [0]['key']"),
        ({"mesh": [[1, 1, "G"], [0, 0, "G"]]}, "a mesh of devices 0:0, 1:1, and p1 has a mesh of devices 1:1, 0:0"),
        ({"cache": {"a folder": False}}, "p1 has compilation cache settings a folder False"),
        ({"lowered": "h"}, "p1 has collectives h in the lowered program"),
        ({"links": {"rank": 1, "never": [0]}}, "p0 and p1 do not reach each other, and both reach the rendezvous"),
        ({"kinds": ["G", "H"]}, "p1 holds devices of several kinds (G, H): start one process for each kind"),
        (
            {"memory": [["G:1", 3 << 30, 1 << 30]]},
            "p1: the plan needs 3.0 GiB more on G:1, where 1.0 GiB are free: end",
        ),
        (
            {"memory": [["G:1", 14 << 30, 12 << 30, 12 << 30, 16 << 30]]},
            "12.0 GiB are free of the 12.0 GiB that JAX has taken of the 16.0 GiB planned for: this process",
        ),
        (
            {"memory": [["G:1", 3 << 30, 1 << 30, 16 << 30, 16 << 30]]},
            "are free of the 16.0 GiB that JAX has taken: this process's own arrays hold 15.0 GiB; delete",
        ),
        (
            {"compiled_memory": [["G:1", 3 << 30, 1 << 30]]},
            "p1: what XLA compiled of the plan needs 3.0 GiB more on G:1, where 1.0 GiB are free: end",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], says: str) -> None:
    assert any(says in problem for problem in problems([FACTS, {**OTHER, **change}]))


def test_an_older_hapsynth_is_named() -> None:
    """Whose facts say the same otherwise, or lack what it did not know yet."""
    older = FACTS | {"hapsynth": "0", "values": {"[0]['w']": "1, 2"}}
    assert "p0 has hapsynth 0, and p1 has hapsynth 1" in problems([older, OTHER])[0]


@pytest.mark.parametrize(
    ("key", "one", "other", "says"),
    [
        (
            "cuda",
            "cuda 12090",
            "cuda 13000",
            "p0 has plugin for CUDA cuda 12090, and p1 has plugin for CUDA cuda 13000",
        ),
        ("nccl", "2.27.3", "2.26.2", "p0 has NCCL 2.27.3, and p1 has NCCL 2.26.2: install the same NCCL everywhere"),
    ],
)
def test_unlike_software_of_gpus_is_refused(key: str, one: str, other: str, says: str) -> None:
    assert problems([FACTS | {key: one}, OTHER | {key: one}]) == []
    assert says in problems([FACTS | {key: one}, OTHER | {key: other}])[0]
    # What is not known differs from nothing.
    assert problems([FACTS | {key: one}, OTHER]) == []


def test_what_programs_of_others_would_share_out_is_said() -> None:
    unlike = {**OTHER, "kinds": ["H"]}
    assert "several kinds (G, H), and p0, p1 would share out the autotuning" in notices([FACTS, unlike])[0]
    assert notices([{**f, "shards_autotuning": False} for f in (FACTS, unlike)]) == []
    assert notices([{**f, "platform": "cpu"} for f in (FACTS, unlike)]) == []


def test_unlike_drivers_are_said() -> None:
    facts = [FACTS | {"driver": "535.104.05"}, OTHER | {"driver": "570.86"}]
    assert problems(facts) == []
    assert notices(facts)[0].startswith("p0 has NVIDIA's driver 535.104.05, and p1 has NVIDIA's driver 570.86: where")
    assert notices([FACTS, OTHER]) == []


@pytest.mark.parametrize(
    "module", ["Kernel Module  535.104.05  Sat", "Open Kernel Module for x86_64  570.86.15  Release"]
)
def test_the_software_of_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str) -> None:
    (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 {module} Build\nGCC version: gcc 12.2.0\n")
    monkeypatch.setattr(process_facts, "_DRIVER", tmp_path / "version")
    backend = SimpleNamespace(platform_version="PJRT C API\ncuda 12090")
    monkeypatch.setattr(jax.extend.backend, "get_backend", lambda platform: backend)

    def version(package: str) -> str:
        if package == "nvidia-nccl-cu12":
            return "2.27.3"
        raise process_facts.metadata.PackageNotFoundError

    monkeypatch.setattr(process_facts.metadata, "version", version)
    said = process_facts.gpu_software("gpu")
    assert (said["cuda"], said["nccl"]) == ("PJRT C API cuda 12090", "2.27.3")
    assert said["driver"] in ("535.104.05", "570.86.15")
    assert process_facts.gpu_software("cpu") == {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": 16}, "p0 has arguments float32[8] x2, and p1 has arguments float32[16] x2"),
        ({"dtype": "bfloat16"}, "p0 has arguments float32[8] x2, and p1 has arguments bfloat16[8] x2"),
        ({"op": jax.numpy.cos}, "p0 has a function of no cos, 1 sin, and p1 has a function of 1 cos, no sin"),
        ({"times": 3.0}, "parameters or constants of ops"),
        ({"precision": "highest"}, "p0 has jax_default_matmul_precision None, and p1 has jax_default_matmul_precision"),
        ({"impl": "rbg"}, "p1 has jax_default_prng_impl rbg"),
        ({"key": "rbg"}, "p0 has arguments key<fry>[] x1, and p1 has arguments key<rbg>[] x1"),
        ({"speed": 2.0}, "cluster"),
    ],
)
def test_what_two_plans_differ_in_is_named(change: dict[str, Any], says: str) -> None:
    """And not that plans differ, which comes of it."""

    def said(name: str, **given: Any) -> dict[str, Any]:
        o = {"shape": 8, "dtype": "float32", "op": jax.numpy.sin, "times": 2.0, "speed": 1.0, **given}
        prng = jax.default_prng_impl(o.get("impl", "threefry2x32"))
        with jax.default_matmul_precision(o.get("precision")), prng:
            f = lambda x, y, k: (o["op"](x * o["times"]) @ y, jax.random.key_data(k))
            xs = (jax.ShapeDtypeStruct((o["shape"],), o["dtype"]),) * 2
            key = jax.eval_shape(lambda: jax.random.key(0, impl=o.get("key", "threefry2x32")))
            plan = hapsynth.synthesize(f, (*xs, key), slow_cluster((o["speed"], 1.0)))
            mesh = Mesh(jax.devices(), ("d",))
            return software(name, "h", mesh) | {"plan": plan_fingerprint(plan), **of_function(plan)}

    found = problems([said("p0"), said("p1", **change)])
    assert len(found) == 1
    assert says in found[0], found
    assert "save the plan" not in found[0]


def test_a_clusters_name_is_no_difference() -> None:
    """It may be that of a file, which processes each have of their own."""
    cluster = slow_cluster((2.0, 1.0))
    xs = (jax.ShapeDtypeStruct((8,), "float32"),)
    facts = [
        {"plan": plan_fingerprint(plan), **of_function(plan)}
        for name in ("here", "there")
        for plan in [hapsynth.synthesize(jax.numpy.sin, xs, dataclasses.replace(cluster, name=name))]
    ]
    assert facts[0] == facts[1]


@pytest.mark.parametrize(
    ("mesh", "devices", "says"),
    [
        # (process, device) each.
        ([(0, 0), (1, 1), (2, 2)], [(0, 0), (1, 1), (2, 2)], ""),
        (
            [(0, 0), (1, 1), (1, 2)],
            [(0, 0), (1, 1), (1, 2), (2, 3)],
            "process 1 has 2, process 2 has 1.* none of process 2:",
        ),
        (
            [(0, 0), (0, 1), (1, 2)],
            [(0, 0), (0, 1), (1, 2), (2, 3)],
            "has 2 of process 0 and none of process 2: give each",
        ),
        # All devices; as many in each process; chosen ones.
        ([(0, 0), (1, 1), (1, 2), (2, 3)], [(0, 0), (1, 1), (1, 2), (2, 3)], ""),
        ([(0, 0), (0, 1)], [(0, 0), (0, 1), (1, 2), (1, 3)], ""),
        ([(0, 0), (1, 1), (2, 3)], [(0, 0), (1, 1), (1, 2), (2, 3)], ""),
        ([(1, 1), (1, 2)], [(0, 0), (1, 1), (1, 2)], ""),
    ],
)
def test_a_mesh_that_leaves_out_a_process_for_anothers_second_device(
    mesh: list[tuple[int, int]], devices: list[tuple[int, int]], says: str
) -> None:
    found = left_out(mesh, devices)
    assert re.search(says, found) if says else not found


def test_a_form_of_exact_shards_needs_no_room_for_padded_ones() -> None:
    """A plan that was made without its form, as `hapsynth search` does."""
    fn, x = lambda x: (jnp.sin(x) * x).sum(), np.ones((4096, 64), np.float32)
    cluster, mesh = slow_cluster((3.0, 1.0)), Mesh(np.array(jax.devices()[:2]), ("d",))
    padded = hapsynth.synthesize(fn, (x,), mesh, cluster=cluster, fixed={"[0]": "S(0)"})
    with_result = lambda result: hapsynth.Plan(padded.traced, result, cluster, mesh, fn, form="staged")
    exact = with_result(dataclasses.replace(padded.result, exact=True))
    held = held_by(padded.program, padded.sizes, exact.cost_model())
    assert sum(held) < sum(padded.memory)
    needed = lambda plan: process_facts.of_plan(plan, [])["machine"][0]
    assert needed(padded) == sum(map(int, padded.memory))
    assert needed(with_result(padded.result)) == sum(map(int, held))
    at_exact = dataclasses.replace(exact.result, memory_bytes=held)
    saved = (_Saved(padded.traced, r, cluster, compiler_target("T4")) for r in (padded.result, at_exact))
    assert len({one.held("staged", without_triton=True) for one in saved}) == 1


def test_processes_of_one_machine_share_its_memory() -> None:
    of = lambda name, host: {**FACTS, "process": name, "host": host, "memory": [], "machine": [3 << 30, 4 << 30]}
    assert not problems([of("p0", "a"), of("p1", "b")])
    assert "p0, p1 need 6.0 GiB more together, and a has 4.0 GiB free" in problems([of("p0", "a"), of("p1", "a")])[0]


def test_what_a_program_that_has_just_ended_held_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporaries are given back after its results are there."""
    fn, x = lambda x: x * 2, np.ones((4096, 64), np.float32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    plan = hapsynth.synthesize(fn, (x,), mesh, cluster=slow_cluster((1.0, 1.0)), leave_out=False)
    given, waited = [plan.shard(x)], list[Any]()
    seen = iter([1 << 30, 2 << 30, 3 << 30, 3 << 30, 4 << 30])
    monkeypatch.setattr(process_facts._device_memory, "free", lambda _: next(seen))
    monkeypatch.setattr(process_facts, "_GIVES_BACK_S", 0.0)
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    assert process_facts.of_plan(plan, given)["memory"][0][2] == 3 << 30
    assert any(x is given[0] for arguments in waited for x in arguments)


def test_constants_that_are_placed_need_no_room() -> None:
    """As arguments: a call places both before its processes are compared."""
    x, table = np.ones((64, 64), np.float32), np.ones((64, 64), np.float32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    fn = lambda x: (x * table).sum(0)
    plan = hapsynth.synthesize(fn, (x,), mesh, cluster=slow_cluster((1.0, 1.0)), fixed={"[0]": "S(0)"})
    needed = lambda arguments: process_facts.of_plan(plan, arguments)["machine"][0]
    before = needed([])
    assert before == sum(map(int, plan.held_bytes))
    given = plan.arguments.place(plan.lowered, [x])
    nbytes = [sum(part.nbytes for part in parts(a)) for a in (*given, *plan.lowered.placed_constants)]
    assert nbytes == [x.nbytes, 2 * table.nbytes]
    assert needed(given) == before - sum(nbytes) > 0


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_what_xla_compiled_is_compared_with_what_is_free(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a call consumes anything, in all processes."""
    gather, part = lambda said, ranks: [said], lambda: None
    client = SimpleNamespace(rank=0, host="h", unreachable=lambda ranks: [])
    meets = SimpleNamespace(client=client, gather=gather, part=part, doing=lambda _: nullcontext())
    monkeypatch.setattr(preflight, "meeting", meets)
    x, table = np.ones((64, 64), np.float32), np.ones((64, 64), np.float32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    fn = lambda x: ((x * table) @ table).sum(0)
    plan = hapsynth.synthesize(fn, (x,), mesh, cluster=slow_cluster((1.0, 1.0)), fixed={"[0]": "S(0)"}, form=form)
    given = [*plan.arguments.place(plan.lowered, [x])]
    needed = lambda: process_facts.compiled_facts(plan, plan.donate, given)["compiled_memory"][0][1]
    held = sum(part.nbytes for a in (*given, *plan.lowered.placed_constants) for part in parts(a))
    assert needed() == sum(plan.lowered.compiled_bytes.values()) - held > 0
    # As if the plan had reckoned with less.
    monkeypatch.setattr(type(plan), "held_bytes", (0.0, 0.0))
    for short in (0, 1):
        limited = needed() - short
        monkeypatch.setattr(_device_memory, "_limits", lambda limited=limited: iter([(1 << 62, 0), (limited, 0)]))
        says = r"what XLA compiled of the plan needs .* more on its CPU"
        with pytest.raises(preflight.PreflightError, match=says) if short else nullcontext():
            preflight.preflight(mesh, plan, given)
    # Without a limit the system may have more than it says.
    monkeypatch.setattr(_device_memory, "_limits", lambda: iter(()))
    monkeypatch.setattr(_device_memory, "_of_machine", lambda: [1 << 50])
    preflight.preflight(mesh, plan, given)


def test_values_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[dict[str, Any]]()
    client = SimpleNamespace(rank=0, host="h", unreachable=lambda ranks: [])
    gather = lambda said, ranks: told.append({**said}) or [said]
    monkeypatch.setattr(
        preflight, "meeting", SimpleNamespace(client=client, gather=gather, doing=lambda _: nullcontext())
    )
    mesh, x = Mesh(np.array(jax.devices()[:1]), ("d",)), np.ones(4, np.float32)
    plan = hapsynth.synthesize(jnp.sin, (x,), mesh, cluster=slow_cluster((1.0,)))
    preflight.preflight(mesh, plan, [plan.shard(x)])
    assert ["values" in said for said in told] == [True, False]


def test_what_a_process_says_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(jax.devices(), ("d",))
    (tmp_path / "flags").write_text("--xla_gpu_shard_autotuning=false\n--xla_dump_to=x\n")
    for flags, shards in (
        ("", True),
        ("--xla_gpu_shard_autotuning=false --xla_dump_to=x", False),
        (f"{tmp_path}/flags", False),
    ):
        monkeypatch.setenv("XLA_FLAGS", flags)
        said = software("p", "h", mesh)
        assert said["shards_autotuning"] == shards
    assert said["mesh"] == [[0, d.id, d.device_kind] for d in jax.devices()]
    assert said["kinds"] == ["cpu"]


def test_memory_is_bounded_by_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = jax.devices()[0]
    group = tmp_path / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("1000\n")
    (group / "memory.usage_in_bytes").write_text("700\n")
    (group / "memory.stat").write_text("cache 5\ntotal_inactive_file 60\ntotal_active_file 40\n")
    text = _device_memory._text
    groups = Path("/sys/fs/cgroup")
    here = lambda file: tmp_path / file.relative_to(groups) if file.is_relative_to(groups) else file
    own = lambda file: ["4:memory:/job"] if file == Path("/proc/self/cgroup") else text(here(file))
    monkeypatch.setattr(_device_memory, "_text", own)
    assert _device_memory.free(device) == 400
    assert _device_memory.free_on_machine() > 1000
    (group / "memory.limit_in_bytes").write_text("max\n")
    assert _device_memory.free(device) > 1000


def test_preflight_can_only_be_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAPSYNTH_PREFLIGHT", "no")
    with pytest.raises(JobError, match="HAPSYNTH_PREFLIGHT is 'no'; give on or off"):
        meeting.wanted()


def test_a_process_that_a_plan_leaves_out_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "meeting", SimpleNamespace(client=SimpleNamespace(rank=1)))
    assert preflight.preflight(Mesh(jax.devices()[:2], ("d",))) == []


@pytest.mark.parametrize(
    ("rank", "coordinator", "address", "joins"),
    [
        (0, "a:1", None, True),
        (2, "a:1", None, False),
        (2, "", ("a", 2), False),
        # As under srun.
        (2, "", None, True),
    ],
)
def test_all_agree_where_they_meet_those_that_a_mesh_leaves_out_too(
    rank: int, coordinator: str, address: tuple[str, int] | None, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, joined = cast(Any, meeting.Meeting()), list[int]()
    one._address = address
    monkeypatch.delenv("HAPSYNTH_RENDEZVOUS", raising=False)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", coordinator)
    monkeypatch.setattr(preflight, "meeting", one)
    monkeypatch.setattr(preflight, "connect", lambda: joined.append(rank))
    monkeypatch.setattr(preflight, "ranks_of", lambda mesh: (0, 1))
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: rank)
    preflight.check_mesh(Mesh(jax.devices(), ("d",)))
    assert joined == [rank] * joins


# The launcher.


@pytest.mark.parametrize(
    ("visible", "gpus"), [("-1", 0), ("NoDevFiles", 0), ("", 0), ("1,-1,0", 1), ("0, 1", 2), ("GPU-8f,MIG-8f", 2)]
)
def test_gpus_that_are_visible(visible: str, gpus: int) -> None:
    assert listed_gpus(visible) == gpus


@pytest.mark.parametrize("version", [12, 13])
def test_the_plugin_for_cuda(version: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    assert cuda_plugin() == ""
    (tmp_path / "jax_plugins" / f"xla_cuda{version}").mkdir(parents=True)
    importlib.invalidate_caches()
    assert cuda_plugin() == f"jax-cuda{version}-plugin"


def test_the_environment_of_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_LOCAL_DEVICE_IDS", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    first, second = Launch(here=2).environments()
    assert first["JAX_COORDINATOR_ADDRESS"] == second["JAX_COORDINATOR_ADDRESS"]
    assert first["HAPSYNTH_RENDEZVOUS"] == second["HAPSYNTH_RENDEZVOUS"] != first["JAX_COORDINATOR_ADDRESS"]
    assert [e["JAX_LOCAL_DEVICE_IDS"] for e in (first, second)] == ["0,1", "2,3"]
    assert launched(first)
    assert not launched({})
    (third,) = Launch(here=1, processes=3, rank=2, coordinator="far:1").environments()
    assert third["JAX_COORDINATOR_ADDRESS"] == "far:1"
    assert "HAPSYNTH_RENDEZVOUS" not in third
    assert (third["OMPI_COMM_WORLD_RANK"], third["OMPI_COMM_WORLD_SIZE"]) == ("2", "3")
    assert third["JAX_LOCAL_DEVICE_IDS"] == "0,1,2,3"
    off = "--xla_gpu_shard_autotuning=false"
    others = "--xla_dump_to=x"
    for flags, given in (("", off), (others, f"{others} {off}"), (f"{off[:-5]}true", None), ("a_file", None)):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert [e.get("XLA_FLAGS") for e in Launch(here=2).environments()] == [given, given]
    with pytest.raises(JobError, match="4 GPUs can't be shared evenly by 3 processes"):
        Launch(here=3).environments()
    # CPUs are nothing to share out.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not any({"JAX_LOCAL_DEVICE_IDS", "XLA_FLAGS"} & {*e} for e in Launch(here=3).environments())
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert [e["JAX_LOCAL_DEVICE_IDS"] for e in Launch(here=2).environments()] == ["0,1", "2,3"]


def test_gpus_that_the_user_lists_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "3, 1")
    assert [e["JAX_LOCAL_DEVICE_IDS"] for e in Launch(here=2).environments()] == ["3", "1"]
    # One process has them as they are.
    assert "JAX_LOCAL_DEVICE_IDS" not in Launch(here=1).environments()[0]
    with pytest.raises(JobError, match="the 2 GPUs of JAX_LOCAL_DEVICE_IDS=3, 1 can't be shared evenly by 4 processes"):
        Launch(here=4).environments()
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "1,1")
    with pytest.raises(JobError, match="JAX_LOCAL_DEVICE_IDS is '1,1', and processes would share a GPU"):
        Launch(here=2).environments()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "JAX_LOCAL_DEVICE_IDS" not in Launch(here=4).environments()[0]


SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "gpu[001-004,9],far",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
}
MPIRUN = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
}


@pytest.mark.parametrize(
    ("environment", "task"),
    [
        (SRUN, Task(4, 3, "gpu001", 31 * 77)),
        (SRUN | {"SLURM_STEP_NODELIST": "a1,b2", "SLURM_STEP_ID": "2"}, Task(4, 3, "a1", 31 * 77 + 2)),
        (SRUN | {"SLURM_NTASKS": "1"}, None),
        # A batch script itself, outside of srun.
        ({name: SRUN[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID")}, None),
        (MPIRUN, Task(2, 1, "10.96.0.1", 1531576320 >> 12)),
        (MPIRUN | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::b9b,2620::2]:43370"}, Task(2, 1, "[fe80::b9b]", 1)),
        # Of `hapsynth launch`.
        (MPIRUN | {"OMPI_MCA_orte_hnp_uri": "hapsynth-launch"}, None),
        ({}, None),
    ],
)
def test_what_a_batch_system_says(environment: dict[str, str], task: Task | None) -> None:
    assert started_by(environment) == task
    if task is not None:
        host, port = parse_address(task.coordinator, "it")
        assert host == task.host.strip("[]")
        assert port in range(20_000, 30_000, 2)


@pytest.mark.parametrize(
    ("argv", "environment", "stands"),
    [
        ("-n 4", {}, Launch(4)),
        ("--nproc-per-node 4 --nnodes 3 --node-rank 2 --coordinator a:1", {}, Launch(4, 12, 8, "a:1")),
        ("-n 2 --processes 6 --process 1 --coordinator a:1", {}, Launch(2, 6, 1, "a:1")),
        # Of a launcher on each host, which a batch system started.
        ("-n 8", SRUN, Launch(8, 32, 24, f"gpu001:{20_000 + 2 * 2387}")),
        ("-n 8 --coordinator a:1", MPIRUN, Launch(8, 16, 8, "a:1")),
        ("--nnodes 2 --node-rank 0 --coordinator a:1", SRUN, Launch(1, 2, 0, "a:1")),
        # Of hosts with unlike numbers of processes.
        ("-n 2 --processes 6 --process 4", SRUN, Launch(2, 6, 4, f"gpu001:{20_000 + 2 * 2387}")),
        ("-n 2 --processes 6 --process 4 --coordinator a:1", SRUN, Launch(2, 6, 4, "a:1")),
        ("-n 2 --processes 2", SRUN, Launch(2)),
    ],
)
def test_where_a_launcher_stands(argv: str, environment: dict[str, str], stands: Launch) -> None:
    assert place(parser().parse_args(["launch", *argv.split(), "train.py"]), environment) == stands


def test_process_0_is_where_the_batch_system_says() -> None:
    says = r"launcher is number 3 of .* process 0 \(--process\): process 0 must be with its launcher 0; or give --coord"
    with pytest.raises(UsageError, match=says):
        place(parser().parse_args(["launch", "-n", "4", "--processes", "6", "train.py"]), SRUN)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["-n", "2"], "give what to start"),
        (["--nnodes", "2", "--coordinator", "a:1", "true"], "--nnodes 2, --node-rank None: give both"),
        (["--nnodes", "2", "--node-rank", "2", "--coordinator", "a:1", "true"], "the second below the first"),
        (["--nnodes", "2", "--node-rank", "0", "true"], "needs --coordinator HOST:PORT"),
        (["--nnodes", "2", "--process", "1", "true"], "say which host this is"),
        (["-n", "2", "--process", "1", "true"], "processes 1 to 2 are to run here, and the job has 0 to 1"),
        (["-n", "2", "--processes", "4", "true"], "needs --coordinator HOST:PORT"),
        (["--coordinator", "node1", "true"], "--coordinator is 'node1'; give HOST:PORT"),
        (["-n", "none", "true"], "'none' is not a whole number"),
        (["no-such-program"], "no-such-program can't be started: No such file or directory"),
    ],
)
def test_bad_usage(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *argv]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_two_dashes_end_the_launchers_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Any]()
    monkeypatch.setattr(cli_launch, "launch", lambda plan, command: started.append(command) or 0)
    for command in (["prog", "-n", "3", "--", "x"], ["train.py", "--lr", "1"]):
        assert main(["launch", "-n", "2", "--", *command]) == 0
    assert started == [["prog", "-n", "3", "--", "x"], [sys.executable, "train.py", "--lr", "1"]]
    assert main(["launch", "--"]) == 2


def test_preflight_is_for_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight"]) == 2
    assert "this is one process" in capsys.readouterr().err
    assert main(["preflight", "model.py"]) == 2
    assert "both its model file and --plan" in capsys.readouterr().err
    assert main(["preflight", "--function", "f"]) == 2
    assert "--function picks one of the functions of a model file" in capsys.readouterr().err
    assert main(["preflight", "--devices", "9"]) == 2
    assert "--devices 9: this process has 8 devices" in capsys.readouterr().err


def script(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "script.py"
    file.write_text("import os, signal, sys, time\nrank = os.environ['OMPI_COMM_WORLD_RANK']\n" + textwrap.dedent(text))
    return [sys.executable, "-S", "-E", str(file)]


def test_samples_are_exact_and_short() -> None:
    """Each process is told those of all."""
    for x in (np.uint32([0, 1234]), np.array([True, False]), np.int32(-7), jnp.bfloat16([1, -2]), np.complex64([1j])):
        kept = _decoded(_sample(x))
        assert (kept.dtype, kept.tolist()) == (x.dtype, x.reshape(-1).tolist())
    assert _decoded(_sample(jax.random.key(1234))).tolist() == [0, 1234]
    assert len(json.dumps(_sample(np.pi * np.arange(1e4, dtype=np.float32)))) < 200


@pytest.mark.parametrize("x", [np.arange(1000.0, dtype=np.float32).reshape(10, 4, 25), np.arange(70) % 3 == 0])
def test_of_large_arguments_the_sample_alone_is_fetched(x: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _sample(jnp.asarray(x))
    fetched: list[int] = []

    def asarray(a: Any, *args: Any) -> np.ndarray:
        fetched.extend([a.size] * isinstance(a, jax.Array))
        return np.array(a, *args)

    monkeypatch.setattr(process_facts, "_FETCHED_BYTES", 0)
    monkeypatch.setattr(process_facts, "np", SimpleNamespace(**{**vars(np), "asarray": asarray}))
    assert _sample(jnp.asarray(x)) == whole
    assert fetched == [32]


def test_samples_of_arguments_may_be_nan_or_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mask is, which a function makes finite: `jax_debug_infs` is for its results."""
    monkeypatch.setattr(process_facts, "_FETCHED_BYTES", 0)
    x = jnp.where(jnp.arange(64) % 2 == 0, jnp.array([[-jnp.inf], [jnp.nan]]), 0.0)
    with jax.debug_nans(True), jax.debug_infs(True):
        sample = _sample(x)
    assert {"-inf", "nan"} <= {*map(str, _decoded(sample))}


def test_an_error_that_ends_the_job_is_printed_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever raised it is not heard of any more: the end of the job ends the process."""
    said: list[str] = []
    one: Any = meeting.Meeting()
    one._client = SimpleNamespace(rank=0, processes=1, leave=lambda error: said.append(capsys.readouterr().err + error))
    one.fail(ValueError("RESOURCE_EXHAUSTED: no room"), "compiling the plan")
    assert said == [
        "ValueError: RESOURCE_EXHAUSTED: no room\nValueError: RESOURCE_EXHAUSTED: no room, in compiling the plan"
    ]


def test_each_program_of_a_plan_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `jax_debug_nans` a call consumes nothing, and runs another one."""
    compared: list[bool] = []
    monkeypatch.setattr(preflight, "preflight", lambda mesh, plan, arguments, donate: compared.append(donate))
    monkeypatch.setattr(preflight, "as_batch_work", lambda: None)
    monkeypatch.setattr(preflight, "meeting", SimpleNamespace(join=lambda: None, begin_call=lambda ranks: None))

    class Several:
        form, mesh = "fused", SimpleNamespace(is_multi_process=True, devices=np.array([], object))

    plan: Any = Several()
    for donate in (True, True, False, True, False):
        preflight.before_call(plan, [], donate)
    assert compared == [True, False]


def test_processes_meet_before_the_arguments_of_a_first_call_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[int, ...]] = []
    gather = lambda said, ranks: met.append(ranks)
    monkeypatch.setattr(preflight, "as_batch_work", lambda: None)
    monkeypatch.setattr(preflight, "meeting", SimpleNamespace(gather=gather, doing=nullcontext))
    plan: Any = type("", (), {"mesh": of_processes(0, 1)})()
    preflight.before_placing(plan, donate=True)
    preflight._checked.setdefault(plan, set()).add(True)
    for donate in (True, False):
        preflight.before_placing(plan, donate)
    assert met == [(0, 1)] * 2


def of_processes(*ranks: int) -> Any:
    devices = np.array([SimpleNamespace(process_index=rank) for rank in ranks])
    return SimpleNamespace(devices=devices, size=len(ranks), is_multi_process=len({*ranks}) > 1)


def test_numbers_are_told_at_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits as long as all live, and a first collective for 30 s."""
    monkeypatch.setattr(allgather, "exchanged", lambda mesh, said, doing: [said, [np.inf, -1e-300]])
    found = allgather.gathered(of_processes(1, 0, 0), np.array([0.1, 2.0]))
    np.testing.assert_array_equal(found, [[np.inf, -1e-300], [0.1, 2.0], [0.1, 2.0]])


def test_a_meeting_says_which_calls_have_begun_before_it_in_the_same_thread() -> None:
    one, said = meeting.Meeting(), list[tuple[str, bool]]()
    gather = lambda name, value, ranks, patient, aside: said.append((name, aside))
    client = one._client = SimpleNamespace(rank=0, processes=1, doing="at work", calls=one._calls, gather=gather)
    one.gather(None, (0, 1))
    one.begin_call((0, 1))
    client.doing = "saving"
    one.gather(None, (0, 1))
    saver = threading.Thread(target=one.gather, args=(None, (0, 1)))
    saver.start()
    saver.join()
    assert said == [("meeting 1", False), ("meeting 2 (saving)", False), ("meeting 3 (saving)", True)]


def test_a_call_that_raised_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who catches it and saves would wait for ever for those that wait in the call."""
    one: Any = meeting.Meeting()
    monkeypatch.setattr(preflight, "meeting", one)
    several, alone = (SimpleNamespace(mesh=of_processes(*ranks)) for ranks in ((0, 1), (0,)))
    counts: list[int] = []
    for plan, returned in ((several, True), (several, False), (alone, False), (several, True)):
        if plan is several:
            one.begin_call((0, 1))
        preflight.after_call(cast(Any, plan), returned)
        counts.append(one._calls[0, 1])
    assert counts == [1, 1, 1, 2]
    # In a call, a plan of this process alone may raise in another thread.
    one.begin_call((0, 1))
    preflight.after_call(cast(Any, alone), returned=False)
    assert one._calls[0, 1] == 3
    monkeypatch.delattr(sys, "last_value", raising=False)
    one._client = SimpleNamespace(leave=lambda _: counts.append(one._calls[0, 1]))
    one.leave()
    assert counts[-1] == 2


def test_process_0_says_that_the_rendezvous_goes_with_it_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    one, said = cast(Any, meeting.Meeting()), list[str]()
    one._client = SimpleNamespace(leave=lambda error: said.append(f"leave {error}"))
    one._server = SimpleNamespace(closes=lambda seconds: said.append("closes"))
    monkeypatch.setattr(one, "exit", lambda: said.append("exit"))
    monkeypatch.delattr(sys, "last_value", raising=False)
    one.leave()
    monkeypatch.setattr(sys, "last_value", ValueError("a bad batch"), raising=False)
    one.leave()
    assert said == ["leave ", "closes", "leave ValueError: a bad batch", "exit"]


def test_a_command_that_fails_alone_tells_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which wait for it in a collective; it ends with its own status, without JAX's exit, which would wait for them."""
    one, said = cast(Any, meeting.Meeting()), list[Any]()
    one._client = SimpleNamespace(leave=lambda error: said.append(error or "in peace"))
    monkeypatch.setattr(commands, "meeting", one)
    monkeypatch.setattr(meeting, "os", SimpleNamespace(**{**vars(os), "_exit": said.append}))
    monkeypatch.delattr(sys, "last_value", raising=False)
    assert main(["preflight", "--function", "f"]) == 2
    assert said == [f"UsageError: {capsys.readouterr().err.removeprefix('hapsynth preflight: error: ').strip()}"]
    one.leave()
    assert said[1:] == ["in peace", 2]


def test_what_nohup_has_it_ignore_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _signals() as received:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_output_that_the_terminal_cannot_show() -> None:
    shown = io.BytesIO()
    target = io.TextIOWrapper(shown, "ascii")
    _label("[0] ", io.StringIO("loss \u2264 1\nend\n"), target, deque())
    assert shown.getvalue() == b"[0] loss \\u2264 1\n[0] end\n"


def test_output_that_nobody_takes_is_still_taken_from_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as target:
        last = deque[str]()
        _label("[0] ", io.StringIO("one\ntwo\n"), target, last)
        assert list(last) == ["one", "two"]
        monkeypatch.setattr(cli_launch, "launch", lambda *_: 3)
        monkeypatch.setattr(sys, "stdout", target)
        assert main(["launch", "train.py"]) == 3


def test_output_is_labelled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = script(tmp_path, "print('here is', rank); print('and its error', file=sys.stderr, end='')")
    assert launch(Launch(here=2), run) == 0
    out, error = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] here is 0", "[1] here is 1"]
    assert sorted(error.splitlines()) == ["[0] and its error", "[1] and its error"]


def test_what_is_still_to_be_shown_when_all_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[str]()

    def write(text: str) -> None:
        time.sleep(0.2)
        shown.append(text)

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=write, flush=lambda: None))
    # What is left behind holds the output open, and is not waited for.
    text = "print('step 1'); print('step 2'); print('the end' if os.fork() else time.sleep(10) or 'too late')"
    assert launch(Launch(grace_s=300.0), script(tmp_path, text)) == 0
    assert shown == ["[0] step 1\n", "[0] step 2\n", "[0] the end\n"]


def test_what_another_user_runs_is_left_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As under sudo: whoever may not signal it can't end it."""

    def refused(pid: int, number: int) -> None:
        sent.append(number)
        raise PermissionError

    sent, made, popen = list[int](), list[Any](), subprocess.Popen
    monkeypatch.setattr(os, "killpg", refused)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: made.append(popen(*a, **k)) or made[-1])
    plan = Launch(here=2, tell_s=0.1, grace_s=0.1)
    assert launch(plan, script(tmp_path, "sys.exit(3) if rank == '1' else time.sleep(0.7)")) == 3
    error = capfd.readouterr().err
    assert re.search(r"process 0 on .* still runs: this user may not signal it", error)
    assert re.search(r"launch: process 0 on .*, or what it started, may still run: end it as the user who", error)
    # It is waited for once.
    assert sent.count(signal.SIGTERM) == 2
    for process in made:
        process.wait()


@pytest.mark.waits
def test_one_that_fails_ends_all_and_what_they_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        if rank == "0":
            while not os.path.exists("pids"): time.sleep(0.02)
            sys.exit(3)
        # As JAX does, and with a process of its own.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = os.fork()
        if child:
            open("new", "w").write(f"{os.getpid()} {child}")
            os.rename("new", "pids")
        time.sleep(600)
    """
    monkeypatch.chdir(tmp_path)
    assert launch(Launch(here=2, tell_s=0.1, grace_s=0.5), script(tmp_path, text)) == 3
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        # The grandchild is waited for by whoever took it over.
        while alive(pid):
            time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("does", "status", "says"),
    [
        ("sys.exit(3)", 3, "ended with exit code 3: what it printed last says why: mend that and start the job again"),
        ("os.kill(os.getpid(), 9)", 137, r"signal 9 \(SIGKILL\): a person .* for want of memory.*lower memory_limit"),
        # As a shell does whose command was killed.
        ("sys.exit(137)", 137, "ended with exit code 137: a person .* for want of memory.*lower memory_limit"),
        ("os.kill(os.getpid(), 6)", 134, r"signal 6 \(SIGABRT\): native code crashed.*PYTHONFAULTHANDLER=1"),
        ("os.kill(os.getpid(), 1)", 129, r"signal 1 \(SIGHUP\): a person or a batch system.* start the job again"),
    ],
)
def test_who_fails_is_named_with_a_way_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], does: str, status: int, says: str
) -> None:
    assert launch(Launch(), script(tmp_path, does)) == status
    assert re.search(rf"over after .* process 0 on .* \(pid \d+\) .*{says}", capfd.readouterr().err)


def test_a_signal_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = """
        def ended(number, frame):
            open(f"got.{rank}", "w").write(str(number))
            sys.exit(0)
        signal.signal(signal.SIGINT, ended)
        open(f"ready.{rank}", "w")
        time.sleep(600)
    """
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        while len(list(tmp_path.glob("ready.*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert launch(Launch(here=2, grace_s=300.0), script(tmp_path, text)) == 128 + signal.SIGINT
    assert [(tmp_path / f"got.{rank}").read_text() for rank in range(2)] == [str(int(signal.SIGINT))] * 2
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.waits
def test_one_that_fails_is_seen_while_those_before_it_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And named, with its host, pid, exit code and last lines."""
    text = """
        if rank == "1":
            print("my pid is", os.getpid())
            print("\\x1b[2Jgone", file=sys.stderr)
            sys.exit(3)
        time.sleep(600)
    """
    assert launch(Launch(here=3, tell_s=0.1), script(tmp_path, text)) == 3
    out, error = capfd.readouterr()
    pid = re.findall(r"my pid is (\d+)", out)[0]
    who = rf"process 1 on {re.escape(socket.gethostname())} \(pid {pid}\)"
    assert re.search(rf"hapsynth launch: the job is over after [\d.]+ s: {who} ended with exit code 3", error)
    assert re.search(r"process 0 on .* was killed by signal 15 \(SIGTERM\)", error)
    last = error.partition("root cause: process 1, its last lines:\n")[2].splitlines()
    # As a terminal would not take it for its own.
    assert sorted(last) == [r"hapsynth launch:   \x1b[2Jgone", f"hapsynth launch:   my pid is {pid}"]


def test_a_signal_to_the_launcher_is_nobodys_fault(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "open(f'{sys.path[0]}/ready.{rank}', 'w'); time.sleep(600)"

    def interrupt() -> None:
        while len(list(tmp_path.glob("ready.*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    assert launch(Launch(here=2), script(tmp_path, text)) == 128 + signal.SIGTERM
    error = capfd.readouterr().err
    assert re.search(
        r"over after .* interrupted: SIGTERM came to the launcher on .* \(pid \d+\): .* start the job again", error
    )


def test_a_signal_to_a_launcher_that_waits_for_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own processes have ended in peace, and the others hear of the signal, not that it has died."""
    where, other, wait = f"localhost:{free_ports(2)[0]}", list[Client](), Supervisor.wait_for_others
    reasons, timeouts = list[str](), Timeouts(join=30.0)

    def over(reason: str) -> None:
        reasons.append(reason)
        other[0].close()

    def interrupted(self: Supervisor, given_up: Any) -> None:
        if not other:
            address = parse_address(self.environment["HAPSYNTH_RENDEZVOUS"], "it")
            other.append(Client(address, 1, 2, timeouts, over, print, here=1, token=""))
            os.kill(os.getpid(), signal.SIGTERM)
        wait(self, given_up)

    monkeypatch.setattr(Supervisor, "wait_for_others", interrupted)
    assert launch(Launch(here=1, processes=2, coordinator=where), ["true"]) == 128 + signal.SIGTERM
    assert [text.partition(" on ")[0] for text in reasons] == ["SIGTERM came to the launcher"]


@pytest.mark.waits
def test_one_that_is_stopped_ends_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it never came to say hello."""
    monkeypatch.setenv("HAPSYNTH_SILENCE_S", "2")
    text = "os.kill(os.getpid(), signal.SIGSTOP) if rank == '1' else time.sleep(600)"
    assert launch(Launch(here=2, tell_s=0.1), script(tmp_path, text)) == 1
    assert re.search(r"over .* process 1 on .* was stopped by a signal and has not .* for 2 s", capfd.readouterr().err)


@pytest.mark.waits
def test_who_goes_on_again_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that says nothing for longer: a launcher sees that it lives."""
    monkeypatch.setenv("HAPSYNTH_SILENCE_S", "2")
    text = """
        if rank == "1":
            if not os.fork():
                time.sleep(0.3)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3)
    """
    assert launch(Launch(here=2), script(tmp_path, text)) == 0


@pytest.mark.waits
def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from hapsynth.jobs.launch import Launch, launch; launch(Launch(here=2, grace_s=0.5), sys.argv[1:])"
    )
    run = [sys.executable, "-c", code, *script(tmp_path, HEEDLESS)]
    launcher = subprocess.Popen(run, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
    while len(list(tmp_path.glob("pids.*"))) < 2:
        time.sleep(0.02)
    launcher.kill()
    # Until the last process that has it ends.
    said = launcher.communicate()[1].decode()
    pids = [pid for f in tmp_path.glob("pids.*") for pid in map(int, f.read_text().split())]
    assert len(pids) == 4
    while any(map(alive, pids)):
        time.sleep(0.02)
    assert re.search(rf"launcher on .* \(pid {launcher.pid}\) has died: .* process 0 on .*, process 1 on", said)


HEEDLESS = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child:
        open(f"new.{rank}", "w").write(f"{os.getpid()} {child}")
        os.rename(f"new.{rank}", f"pids.{rank}")
    time.sleep(600)
"""


def test_the_secret_of_a_job_is_of_the_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = """
        token = os.environ["HAPSYNTH_TOKEN"]
        shown = [open(f"/proc/{p}/cmdline").read() for p in (os.getpid(), os.getppid())]
        print(token, any(token in text for text in shown), os.environ["JAX_COORDINATOR_BIND_ADDRESS"])
    """
    assert launch(Launch(here=2), script(tmp_path, text)) == 0
    assert launch(Launch(here=2), script(tmp_path, text)) == 0
    said = re.findall(r"\[\d\] (\w{32}) False 127.0.0.1:\d+", capfd.readouterr().out)
    # One of each job.
    assert len(said) == 4
    assert len(set(said)) == 2


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    first = free_ports(2)[0]
    for port, says in ((first, f"JAX's coordinator at localhost:{first}: port {first}"), (first + 1, "rendezvous")):
        with socket.create_server(("127.0.0.1", port)), pytest.raises(JobError, match=f"process 0 on .*{says}.*free"):
            launch(Launch(here=1, processes=2, coordinator=f"localhost:{first}"), ["true"])


@pytest.mark.waits
def test_a_job_of_several_hosts_without_a_secret_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for token in ("", "a secret"):
        monkeypatch.setenv("HAPSYNTH_TOKEN", token)
        where = f"localhost:{free_ports(2)[0]}"
        # The other host's.
        other = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "hapsynth",
                "launch",
                "--coordinator",
                where,
                "--processes",
                "2",
                "--process",
                "1",
                "true",
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert launch(Launch(here=1, processes=2, coordinator=where), ["true"]) == 0
        assert other.wait() == 0
        assert ("HAPSYNTH_TOKEN is not set: whoever reaches" in capfd.readouterr().err) == (not token)


@pytest.mark.waits
def test_a_process_that_fails_on_one_host_ends_those_of_another(capfd: pytest.CaptureFixture[str]) -> None:
    where = f"localhost:{free_ports(2)[0]}"
    run = [sys.executable, "-m", "hapsynth", "launch", "--coordinator", where, "--processes", "2", "--process", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    other = subprocess.Popen([*run, "sh", "-c", "exit 7"], env=env, stderr=subprocess.DEVNULL)
    assert launch(Launch(here=1, processes=2, coordinator=where, tell_s=0.1), ["sleep", "600"]) == 1
    assert other.wait() == 7
    error = capfd.readouterr().err
    assert re.search(
        r"the job is over after .*: process 1 on .* \(pid \d+\) ended with exit code 7: what it printed .*\n", error
    )


@pytest.mark.slow
@pytest.mark.waits
def test_a_crash_at_import_ends_launchers_of_srun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of `srun hapsynth launch`, with srun's variables alone: both say what failed, and where."""
    train = tmp_path / "train.py"
    train.write_text(
        "import os\n"
        "if os.environ['SLURM_PROCID'] == '1':\n"
        "    import no_such_module\n"
        "import jax, hapsynth\n"
        "jax.distributed.initialize()\n"
    )
    job = next(n for n in range(os.getpid(), 1 << 30) if is_free(Task(2, 0, "localhost", 31 * n).coordinator))
    step = SRUN | {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost"}
    run = [sys.executable, "-m", "hapsynth", "launch", str(train)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **step}
    both = [subprocess.Popen(run, env=env | {"SLURM_PROCID": str(i)}) for i in range(2)]
    assert [launcher.wait() for launcher in both] == [1, 1]
    error = capfd.readouterr().err
    why = r"process 1 on .* exit code 1, ModuleNotFoundError: No module named 'no_such_module' \(train.py:3\)"
    assert len(re.findall(rf"hapsynth launch: the job is over after .*{why}", error)) == 2, error
    assert "hapsynth launch: root cause: process 1, its traceback:\nhapsynth launch:   Traceback (most" in error


def is_free(address: str) -> bool:
    """Whether a coordinator and a rendezvous can be served there."""
    _, port = parse_address(address, "it")
    try:
        for number in (port, port + 1):
            socket.create_server(("", number)).close()
    except OSError:
        return False
    return True


def test_the_port_of_jaxs_coordinator_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """From when it is chosen to when JAX comes to it, and another is chosen where it has been taken by then."""
    first = free_ports(1)[0]
    with socket.create_server(("127.0.0.1", first)):
        meet = {"JAX_COORDINATOR_ADDRESS": f"localhost:{first}"}
        with Supervisor(0, 2, 2, meet, local=True) as supervisor:
            port = int(supervisor.environment["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2])
            assert port != first
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", port))


def test_what_a_lost_job_says_asks_jax_for_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which starts its backend again where it has been shut, and waits."""
    monkeypatch.setattr(jax, "process_index", lambda: pytest.fail("asked"))
    monkeypatch.setattr(meeting.Meeting, "exit", lambda _: None)
    over: list[Any] = []
    monkeypatch.setattr(meeting, "Client", lambda *a, **k: over.append(a[4]))
    meeting._client(("h", 1), 3, 4, Timeouts(), "")
    over[0]("it rains")
    assert re.search(r"process 3 on .* \(pid \d+\): the job is over: it rains", capsys.readouterr().err)


@pytest.mark.slow
def test_the_example_trains_in_two_unlike_processes() -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", "hapsynth", "launch", "-n", "2", "examples/multi_process.py"]
    done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^\[0\] step \d+  loss (\S+)  rows \((\d+), (\d+)\)$", done.stdout, re.MULTILINE)
    losses = [float(loss) for loss, _, _ in steps]
    assert len(losses) == 10
    assert losses == sorted(losses, reverse=True)
    assert all(int(fast) > int(slow) > 0 for _, fast, slow in steps)


@pytest.mark.slow
def test_preflight_of_a_launched_job(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert main(["launch", "-n", "2", "-m", "hapsynth", "preflight", "--devices", "1"]) == 0
    assert "[0] preflight passed: 2 processes, 2 devices" in capfd.readouterr().out
