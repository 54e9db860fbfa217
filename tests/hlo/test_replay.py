"""Scheduled programs run on paper: FLOPs and bytes of kernels, and how far transfers are hidden behind them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from hapsynth.cluster.device_kinds import DeviceKind
from hapsynth.hlo.collectives import Collective
from hapsynth.hlo.replay import Replay, loops_of_unknown_trips, replay
from hapsynth.hlo.text import Instruction, parse
from hapsynth.hlo.work import Computation, nbytes

# A byte takes a second, and computing nothing.
KIND = DeviceKind("x", {"float32": 1e30}, 1.0, 1, overhead=0.0)
HEAD = """HloModule f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%negated (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}
"""
START = "%start = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add"
DONE = "%done = f32[8]{0} all-reduce-done(%start)"
KERNEL = "%{} = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%negated"
"""32 bytes read, 32 written."""


def program(*lines: str, head: str = HEAD) -> str:
    body = "\n".join(f"  {line}" for line in ("%x = f32[8]{0} parameter(0)", *lines))
    return f"{head}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def run(*lines: str, seconds: float = 100.0, kind: DeviceKind = KIND, **options: Any) -> Replay:
    return replay(program(*lines), kind, lambda one: seconds, **options)


@pytest.mark.parametrize(
    ("kernels", "seconds", "hidden", "exposed"),
    [(0, 100.0, 0.0, 100.0), (1, 100.0, 0.64, 36.0), (2, 100.0, 1.0, 0.0), (1, 64.0, 1.0, 0.0), (1, 0.0, 1.0, 0.0)],
)
def test_a_transfer_is_hidden_as_far_as_what_is_between_takes(
    kernels: int, seconds: float, hidden: float, exposed: float
) -> None:
    found = run(START, *(KERNEL.format(f"k{n}") for n in range(kernels)), DONE, seconds=seconds)
    assert found.hidden == pytest.approx(hidden)
    assert found.hidden_of_time == pytest.approx(hidden)
    assert found.exposed_s == pytest.approx(exposed)
    assert found.seconds == pytest.approx(max(64.0 * kernels, seconds))
    assert (found.kernels, found.computing_s, found.sending_s) == (kernels, 64.0 * kernels, seconds)
    # An all-reduce between two sends as many bytes as there are.
    assert (found.sent_bytes, found.hidden_bytes) == (32.0, pytest.approx(32.0 * hidden))


def test_what_comes_before_the_start_or_after_the_end_hides_nothing() -> None:
    found = run(KERNEL.format("k"), START, DONE, KERNEL.format("j"))
    assert (found.hidden, found.exposed_s, found.seconds) == (0.0, 100.0, 228.0)


def test_a_collective_that_is_synchronous_is_not_hidden() -> None:
    found = run(START + ', backend_config={"collective_backend_config":{"is_sync":true}}', KERNEL.format("k"), DONE)
    assert (found.hidden, found.seconds) == (0.0, 164.0)


def test_transfers_take_the_link_one_after_the_other() -> None:
    second = START.replace("start", "second", 1)
    ends = (DONE, DONE.replace("done", "done2", 1).replace("%start", "%second"))
    found = run(START, second, KERNEL.format("k"), *ends)
    assert found.seconds == 200.0
    assert (found.exposed_s, found.hidden) == (136.0, pytest.approx(0.32))


@pytest.mark.parametrize("swapped", [False, True])
def test_transfers_may_end_in_another_order_than_they_start(*, swapped: bool) -> None:
    second = START.replace("start", "second", 1)
    ends = [DONE, DONE.replace("done", "done2", 1).replace("%start", "%second")]
    found = run(START, second, *(ends[::-1] if swapped else ends))
    assert (found.exposed_s, found.hidden, found.hidden_s) == (200.0, 0.0, 0.0)
    # The kernel stands beside the first alone, and waits for both.
    found = run(START, second, KERNEL.format("k"), *(ends[::-1] if swapped else ends))
    assert (found.exposed_s, found.hidden_s) == (136.0, 64.0)


def test_a_transfer_beside_a_loop_is_hidden_by_all_trips() -> None:
    head = f"""{HEAD}
%body (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT {KERNEL.format("k")}
}}

%test (x: f32[8]) -> pred[] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %t = pred[] constant(true)
}}
"""
    loop = '%w = f32[8]{0} while(%x), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    second = START.replace("start", "second", 1)
    ends = (DONE, DONE.replace("done", "done2", 1).replace("%start", "%second"))
    found = replay(program(START, loop, second, *ends, head=head), KIND, lambda one: 400.0)
    assert (found.seconds, found.exposed_s, found.hidden_s) == (800.0, 480.0, 320.0)


def test_computing_is_slower_while_something_is_sent() -> None:
    slow = DeviceKind("x", {"float32": 1e30}, 1.0, 1, overhead=0.0, contention=2.0)
    # 100 s at half the speed are 50 of the 64.
    found = run(START, KERNEL.format("k"), DONE, kind=slow)
    assert (found.seconds, found.computing_s, found.hidden) == (114.0, 114.0, 1.0)


def test_a_loop_runs_as_often_as_it_has_trips() -> None:
    body = f"""
%body (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  {START}
  {KERNEL.format("k")}
  ROOT {DONE}
}}

%test (x: f32[8]) -> pred[] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %t = pred[] constant(true)
}}
"""
    loop = '%w = f32[8]{0} while(%x), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    found = replay(program(loop, head=HEAD + body), KIND, lambda one: 100.0)
    assert (found.seconds, found.exposed_s, found.kernels) == (500.0, 180.0, 5)
    assert (found.sent_bytes, found.hidden) == (160.0, pytest.approx(0.64))
    once = replay(program(loop.split(", backend")[0], head=HEAD + body), KIND, lambda one: 100.0)
    assert once.seconds == 100.0
    assert [loops_of_unknown_trips(program(line, head=HEAD + body)) for line in (loop, loop.split(", backend")[0])] == [
        *(0, 1)
    ]


def test_the_branch_of_a_switch_that_the_device_takes() -> None:
    kernels = "".join(f"  {KERNEL.format(f'k{n}')}\n" for n in range(2))
    body = f"""
%short (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT {KERNEL.format("k")}
}}

%long (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
{kernels}  ROOT {KERNEL.format("k")}
}}
"""
    switch = "%c = f32[8]{0} conditional(%i, %x, %x), branch_computations={%short, %long}"
    text = program("%i = s32[] constant(0)", switch, head=HEAD + body)
    for branches, seconds in (({}, 192.0), ({2: 0}, 64.0), ({2: 1}, 192.0), ({3: 0}, 192.0)):
        assert replay(text, KIND, lambda one: 0.0, branches).seconds == seconds


def compiled(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Replay:
    text = jax.jit(fn).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile().as_text()
    return replay(text, KIND, lambda one: 0.0)


def test_flops_of_contractions_wherever_they_are() -> None:
    assert compiled(lambda x, y: jnp.tanh(x @ y), (32, 16), (16, 8)).products == 2 * 32 * 16 * 8
    scanned = lambda x, y: lax.scan(lambda c, _: (jnp.tanh(c @ y), None), x, None, length=7)[0]
    assert compiled(scanned, (32, 16), (16, 16)).products == 7 * 2 * 32 * 16 * 16
    conv = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert compiled(conv, (2, 8, 8, 3), (3, 3, 3, 5)).products == 2 * (2 * 8 * 8 * 5) * (3 * 3 * 3)


GEMM = """%g = (f32[32,8]{1,0}, s8[4194304]{0}) custom-call(%u, %v), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}"""
DOT = "%d = c64[32,8]{1,0} dot(%u, %v), lhs_contracting_dims={1}"
CONV = """%g = (f32[2,5,8,8]{3,2,1,0}, u8[64]{0}) custom-call(%u, %v), window={size=3x3 pad=1_1x1_1}, \
dim_labels=bf01_oi01->bf01, custom_call_target="__cudnn$convForward\""""


def work_of(line: str, **types: str) -> Any:
    lines = "\n".join(f"  %{name} = {text} parameter(0)" for name, text in types.items())
    module = parse(f"ENTRY %main () -> f32[] {{\n{lines}\n  {line}\n}}\n")
    instructions: list[Instruction] = module.computations[module.entry]
    return Computation(module, module.entry).work(instructions[-1])


@pytest.mark.parametrize(
    ("line", "precise"),
    [
        (DOT, False),
        (DOT + ", operand_precision={default,highest}", True),
        (DOT + ', metadata={op_name="highest"}', False),
        (DOT + ", algorithm=dot_f32_f32_f32", True),
        (DOT + ", algorithm=dot_tf32_tf32_f32", False),
        (GEMM.replace("}}}", '},"precision_config":{"operand_precision":["DEFAULT","HIGHEST"]}}}'), True),
        (GEMM.replace("}}}", '},"precision_config":{"operand_precision":["HIGH","HIGH"]}}}'), False),
    ],
)
def test_products_of_full_precision(line: str, *, precise: bool) -> None:
    (found,) = work_of(line.replace("f32[", "c64["), u="c64[32,16]{1,0}", v="c64[16,8]{1,0}").contracted
    assert found == (8 * 32 * 8 * 16, "complex64", precise)


def test_narrow_products_are_never_of_full_precision() -> None:
    line = DOT.replace("c64", "bf16") + ", operand_precision={highest,highest}"
    assert not work_of(line, u="bf16[32,16]{1,0}", v="bf16[16,8]{1,0}").contracted[0].precise


def test_calls_of_libraries() -> None:
    gemm = work_of(GEMM, u="bf16[32,16]{1,0}", v="bf16[16,8]{1,0}")
    assert [(c.flops, c.dtype) for c in gemm.contracted] == [(2 * 32 * 8 * 16, "bfloat16")]
    # The workspace is neither read nor written.
    assert gemm.nbytes == 2 * (32 * 16 + 16 * 8) + 4 * 32 * 8
    types = {"u": "f32[2,3,8,8]{3,2,1,0}", "v": "f32[5,3,3,3]{3,2,1,0}"}
    flops = 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    assert work_of(CONV, **types).products == flops
    data = CONV.replace("convForward", "convBackwardInput").replace("f32[2,5,8,8]", "f32[2,3,8,8]")
    assert work_of(data, u="f32[2,5,8,8]{3,2,1,0}", v="f32[5,3,3,3]{3,2,1,0}").products == flops
    weights = CONV.replace("convForward", "convBackwardFilter").replace("f32[2,5,8,8]", "f32[5,3,3,3]")
    assert work_of(weights, u="f32[2,3,8,8]{3,2,1,0}", v="f32[2,5,8,8]{3,2,1,0}").products == flops


def test_of_what_is_only_sliced_or_updated_the_part_is_moved() -> None:
    assert work_of("%s = f32[1,8]{1,0} dynamic-slice(%u, %v)", u="f32[64,8]{1,0}", v="s32[]").nbytes == 2 * 32
    update = "%s = f32[64,8]{1,0} dynamic-update-slice(%u, %v, %w)"
    assert work_of(update, u="f32[64,8]{1,0}", v="f32[1,8]{1,0}", w="s32[]").nbytes == 2 * 32
    head = """%sliced (p: f32[64,8], i: s32[]) -> f32[8] {
  %p = f32[64,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %part = f32[1,8]{1,0} dynamic-slice(%p, %i, %i)
  ROOT %r = f32[8]{0} bitcast(%part)
}
"""
    text = f"{head}\nENTRY %main (p: f32[64,8]) -> f32[8] {{\n  %p = f32[64,8]{{1,0}} parameter(0)\n\
  %i = s32[] constant(0)\n  ROOT %f = f32[8]{{0}} fusion(%p, %i), kind=kLoop, calls=%sliced\n}}\n"
    module = parse(text)
    last = module.computations[module.entry][-1]
    assert Computation(module, module.entry).work(last).nbytes == 32 + 4 + 32
    assert nbytes("(f32[2,3]{1,0}, pred[4], bf16[], u32[2,2]{1,0:T(8)}, f8e4m3fn[7])") == 24 + 4 + 2 + 16 + 7


@pytest.mark.parametrize(
    ("root", "moved"), [("slice(%turned), slice={[0:4], [0:2]}", 32 + 32), ("copy(%turned)", 256 + 256)]
)
def test_a_kernel_reads_what_it_slices_in_whatever_order(root: str, moved: float) -> None:
    shape = "f32[4,2]{1,0}" if "slice" in root else "f32[4,16]{1,0}"
    head = f"""%inner (p: f32[64]) -> {shape} {{
  %p = f32[64]{{0}} parameter(0)
  %apart = f32[2,2,16]{{2,1,0}} bitcast(%p)
  %across = f32[2,2,16]{{2,1,0}} transpose(%apart), dimensions={{1,0,2}}
  %turned = f32[4,16]{{1,0}} bitcast(%across)
  ROOT %r = {shape} {root}
}}
"""
    module = parse(
        f"{head}\nENTRY %main (p: f32[64]) -> {shape} {{\n  %p = f32[64]{{0}} parameter(0)\n\
  ROOT %f = {shape} fusion(%p), kind=kLoop, calls=%inner\n}}\n"
    )
    last = module.computations[module.entry][-1]
    assert Computation(module, module.entry).work(last).nbytes == moved


def test_who_sends_nothing_has_no_bytes_on_the_wire() -> None:
    """It is held up as long, as the next collective waits for those that send."""
    permute = START.replace("all-reduce", "collective-permute").split(", replica")[0]
    lines = (f"{permute}, source_target_pairs={{{{1,3}},{{2,2}}}}", DONE.replace("all-reduce", "collective-permute"))
    found = [run(*lines, device=device) for device in (None, 0, 1, 2, 3)]
    assert [(r.sent_bytes, r.seconds) for r in found] == [(n, 100.0) for n in (32.0, 0.0, 32.0, 0.0, 0.0)]
    apart = START.replace("{{0,1}}", "{{0},{1,2}}")
    assert [run(apart, DONE, device=device).sent_bytes for device in range(4)] == [0.0, 32.0, 32.0, 0.0]


def test_prices_are_asked_for_each_run_of_a_collective() -> None:
    asked: list[Collective] = []

    def price(one: Collective) -> float:
        asked.append(one)
        return one.wire_bytes

    assert replay(program(START, DONE), KIND, price).seconds == 32.0
    assert [(one.op, one.trips, one.group) for one in asked] == [("all-reduce", 1, 2)]
