"""State moves between cuts bit for bit, and only what changes its owner is sent."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from storages import storages

from hapsynth.instructions.layout import R, S
from hapsynth.running.transfer import Change, exchange, exchanger

MOVES: dict[str, Any] = {
    "to a neighbour": ((4,), (S(0),), {0: ((0,), (3, 3, 3, 3))}, {0: ((0,), (4, 2, 3, 3))}),
    "far": ((4,), (S(0),), {0: ((0,), (12, 0, 0, 0))}, {0: ((0,), (0, 1, 0, 11))}),
    "all shift": ((4,), (S(0),), {0: ((0,), (1, 5, 1, 5))}, {0: ((0,), (5, 1, 5, 1))}),
    "both axes cut": ((2, 2), (S(0, 1), S(0)), {0: ((1, 0), (6, 2, 4, 0))}, {0: ((1, 0), (1, 3, 0, 8))}),
    "two dimensions": (
        (2, 2),
        (S(1), S(0)),
        {0: ((1,), (9, 3)), 1: ((0,), (2, 3))},
        {0: ((1,), (4, 8)), 1: ((0,), (5, 0))},
    ),
    "one of two dimensions": (
        (2, 2),
        (S(1), S(0)),
        {0: ((1,), (6, 6)), 1: ((0,), (2, 3))},
        {0: ((1,), (6, 6)), 1: ((0,), (4, 1))},
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in MOVES), *(("all shift", dtype) for dtype in ("bfloat16", "bool", "int2"))],
)
def test_values_move_bit_for_bit(name: str, dtype: str) -> None:
    source, target = storages(*MOVES[name], dtype, (12, 5))
    bits = np.random.default_rng(0).integers(0, 256, (12, 5, source.dtype.itemsize), dtype=np.uint8)
    value = bits.view(source.dtype)[..., 0] if dtype not in ("bool", "int2") else (bits[..., 0] % 2).astype(dtype)
    moved = exchange(source, target, source.put(value, copy=True))
    assert moved is not None
    assert moved.sharding == target.sharding
    assert target.fetch(moved).tobytes() == value.tobytes()


def test_only_rows_that_change_owner_are_sent() -> None:
    step = Change(0, ("a",), (10, 2, 4, 4), (7, 5, 4, 4))
    source = storages((4,), (S(0),), {0: ((0,), step.old)}, {}, "float32", (20, 3))[0]
    stored = source.put(np.zeros((20, 3), np.float32), copy=True)
    text = exchanger(source.mesh, source.spec, (step,), False).lower(stored).as_text()
    sent = re.findall(r"collective_permute.*?source_target_pairs = dense<(.*?)>.*?: \(tensor<(.*?)>\)", text)
    # Three rows of three, flat.
    assert sent == [("[[0, 1]]", "9xui32")]
    assert "all_gather" not in text
    assert exchange(source, source, stored) is stored


def test_another_layout_or_mesh_is_not_exchanged() -> None:
    cuts = {0: ((0,), (3, 3, 3, 3))}
    source, _ = storages((4,), (S(0),), cuts, cuts, "float32", (12, 5))
    other, _ = storages((4,), (R,), {}, {}, "float32", (12, 5))
    smaller, _ = storages((2,), (S(0),), {0: ((0,), (6, 6))}, {}, "float32", (12, 5))
    stored = source.put(np.zeros((12, 5), np.float32), copy=True)
    assert exchange(source, other, stored) is None
    assert exchange(source, smaller, stored) is None
