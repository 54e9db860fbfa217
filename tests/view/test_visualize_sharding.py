"""The picture of an array's shards: boxes in proportion, of any sizes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import hapsynth
from hapsynth.instructions.layout import R, S
from hapsynth.lower import Storage
from hapsynth.running.sharded_array import ShardedArray


def uneven(shape: tuple[int, ...], layout: Any, cuts: Any, mesh: tuple[int, ...] = (4,)) -> ShardedArray:
    devices = np.array(jax.devices()[: int(np.prod(mesh))]).reshape(mesh)
    names = ("a", "b")[: len(mesh)]
    made = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(mesh))
    storage = Storage(shape, np.dtype(np.float32), False, layout, cuts, made)
    return ShardedArray(storage, storage.put(np.zeros(shape, np.float32), copy=True))


def drawn(array: Any, capsys: pytest.CaptureFixture[str], width: int = 40) -> list[str]:
    hapsynth.visualize_sharding(array, width=width)
    return capsys.readouterr().out.splitlines()


def test_rows_downwards(capsys: pytest.CaptureFixture[str]) -> None:
    lines = drawn(uneven((16, 2), (S(0),), {0: ((0,), (10, 0, 4, 2))}), capsys)
    assert lines[0] == "float32[16, 2], dimension 0 downwards"
    assert lines[-1] == "nothing on CPU 1"
    assert all(len(line) == 40 for line in lines[1:-1])
    borders = [i for i, line in enumerate(lines) if line[0] in "┌├└"]
    assert np.diff(borders).tolist() == [11, 5, 3]
    texts = [line.strip("│ ") for line in lines if line.strip("│ ") and line[0] == "│"]
    assert texts == ["CPU 0", "10", "CPU 2", "4", "CPU 3", "2"]


def test_the_last_of_several_dimensions_is_drawn_along(capsys: pytest.CaptureFixture[str]) -> None:
    lines = drawn(uneven((3, 12), (S(1),), {1: ((0,), (8, 2, 1, 1))}), capsys, 60)
    assert lines[0] == "float32[3, 12], dimension 1 along"
    (names,) = [line for line in lines if "CPU 0" in line]
    assert [part.strip() for part in names.strip("│").split("│")] == ["CPU 0", "CPU 1", "CPU 2", "CPU 3"]
    first, *others = map(len, names.strip("│").split("│"))
    assert first > 2 * max(others)


def test_two_axes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = drawn(uneven((6, 8), (S(0), S(1)), {0: ((0,), (4, 2)), 1: ((1,), (7, 1))}, (2, 2)), capsys)
    assert lines[0] == "float32[6, 8], dimension 0 downwards, dimension 1 along"
    texts = [text.strip() for line in lines for text in line.split("│") if text.strip(" ─┌┐├┼┤└┴┬┘")]
    assert texts[1:] == ["CPU 0", "CPU 1", "4 x 7", "4 x 1", "CPU 2", "CPU 3", "2 x 7", "2 x 1"]


@pytest.mark.parametrize("lengths", [(97, 1, 1, 1), (8, 2, 1, 1), (1, 1, 1, 97), (25, 25, 25, 25)])
@pytest.mark.parametrize("width", [40, 80])
def test_no_picture_is_wider_than_asked_for(
    lengths: tuple[int, ...], width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = drawn(uneven((3, sum(lengths)), (S(1),), {1: ((0,), lengths)}), capsys, width)
    assert {len(line) for line in lines[1:]} == {width}


def test_what_is_too_wide_along_is_drawn_downwards(capsys: pytest.CaptureFixture[str]) -> None:
    lines = drawn(uneven((3, 64), (S(1),), {1: ((0,), (8,) * 8)}, (8,)), capsys)
    assert lines[0] == "float32[3, 64], dimension 1 downwards"
    assert {len(line) for line in lines[1:]} == {40}
    lines = drawn(uneven((4, 40000), (S(0), S(1)), {0: ((0,), (2, 2)), 1: ((1,), (10000,) * 4)}, (2, 4)), capsys)
    assert lines[0] == "float32[4, 40000], dimension 1 downwards, dimension 0 along"
    assert {len(line) for line in lines[1:]} == {40}
    texts = [text.strip() for line in lines for text in line.split("│") if text.strip(" ─┌┐├┼┤└┴┬┘")]
    assert texts[1:5] == ["CPU 0", "CPU 4", "2 x 10000", "2 x 10000"]


def test_copies_share_a_box(capsys: pytest.CaptureFixture[str]) -> None:
    lines = drawn(uneven((6,), (R, S(0)), {0: ((1,), (5, 1))}, (2, 2)), capsys)
    assert any("CPU 0,2" in line and "CPU 1,3" in line for line in lines)


def test_even_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    x = np.zeros((4, 6), np.float32)
    assert drawn(jax.device_put(x, NamedSharding(mesh, PartitionSpec("a"))), capsys)[0].endswith(
        "dimension 0 downwards"
    )
    whole = drawn(jax.device_put(x, NamedSharding(mesh, PartitionSpec())), capsys)
    assert whole[0] == "float32[4, 6]"
    assert any("CPU 0-1" in line for line in whole)
    assert any("CPU 0" in line for line in drawn(jax.numpy.float32(1), capsys))


def test_what_has_no_picture() -> None:
    with pytest.raises(TypeError, match="ndarray lies on no devices"):
        hapsynth.visualize_sharding(np.zeros(3))  # pyright: ignore[reportArgumentType]
