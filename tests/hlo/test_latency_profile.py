"""What XLA's scheduler is told that kernels and collectives of a compiled program take."""

import re

import pytest

from hapsynth.cluster.device_kinds import DeviceKind
from hapsynth.hlo.latency_profile import latency_profile
from hapsynth.hlo.text import HloError

# A byte takes a microsecond, and computing nothing.
KIND = DeviceKind("x", {"float32": 1e30}, 1e6, 1, overhead=0.0)
LOOP = """HloModule f, is_scheduled=true, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%negated (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}

%body (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %k.1 = f32[8]{0} fusion(%x), kind=kLoop, calls=%negated
  %start = f32[8]{0} all-reduce-start(%k.1), replica_groups={{0,1}}, to_apply=%add
  ROOT %done = f32[8]{0} all-reduce-done(%start)
}

%test (x: f32[8]) -> pred[] {
  %y = f32[8]{0} parameter(0)
  ROOT %t = pred[] constant(true)
}

ENTRY %main (z: f32[8]) -> f32[8] {
  %z = f32[8]{0} parameter(0)
  %k.2 = f32[8]{0} fusion(%z), kind=kLoop, calls=%negated
  ROOT %w = f32[8]{0} while(%k.2), condition=%test, body=%body
}
"""


@pytest.mark.parametrize(
    ("runs", "trips"),
    [
        ("while(%k.2), condition=%test, body=%body", 1),
        ('while(%k.2), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"5"}}', 5),
        ("call(%k.2), to_apply=%body", 1),
        ("conditional(%i, %k.2, %k.2), branch_computations={%test, %body}", 1),
    ],
)
def test_all_that_takes_time_is_named_once(runs: str, trips: int) -> None:
    """A loop, a branch or a call takes what it runs."""
    module = LOOP.replace("while(%k.2), condition=%test, body=%body", runs)
    text = latency_profile(module, KIND, lambda one: 2e-3).decode()
    found = {name: float(cost) for name, cost in re.findall(r'costs \{ name: "(.*?)" cost_us: (\S+) \}', text)}
    # 32 bytes read and 32 written, in hundredths of a microsecond.
    assert found == {"k.1": 6400.0, "k.2": 6400.0, "start": 200000.0, "w": trips * 206400.0}
    assert len(text.splitlines()) == len(found)


def test_short_transfers_are_not_hidden() -> None:
    """Two kernels of 64 us take all of the time: a quarter of one is the least that is worth hiding."""
    for seconds, cost in ((15.9e-6, "0.000"), (16.1e-6, "1610.000")):
        told = latency_profile(LOOP, KIND, lambda _, seconds=seconds: seconds).decode()
        assert f'name: "start" cost_us: {cost} ' in told


def test_what_sends_nothing_needs_none() -> None:
    alone = "HloModule f\n\nENTRY %main (z: f32[8]) -> f32[8] {\n  ROOT %z = f32[8]{0} parameter(0)\n}\n"
    assert latency_profile(alone, KIND, lambda one: 1.0) == b""
    with pytest.raises(HloError):
        latency_profile("nothing", KIND, lambda one: 1.0)
