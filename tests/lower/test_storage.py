"""How arrays that lie somewhere already are stored: what of them is copied, and what the host reads."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from slow_devices import first_devices

from hapsynth.instructions.layout import R, S
from hapsynth.lower import ExactStorage, Shards, Storage, _storage, parts
from hapsynth.lower._lowered_form import _placed

VALUE = np.arange(48, dtype=np.float32).reshape(12, 4)
CUTS: dict[str, Any] = {
    "even": ((S(0),), {0: ((0,), (6, 6))}),
    "uneven": ((S(0),), {0: ((0,), (9, 3))}),
    "columns": ((S(1),), {1: ((0,), (1, 3))}),
    "no rows": ((S(0),), {0: ((0,), (0, 12))}),
    "whole": ((R,), {}),
}


def storage_of(kind: type[Storage], cuts: Any) -> Storage:
    return kind(VALUE.shape, VALUE.dtype, False, *cuts, first_devices(2))


def pointers(stored: Any) -> set[int]:
    return {x.unsafe_buffer_pointer() for x in parts(stored) if x.size}


@pytest.mark.parametrize("kind", [Storage, ExactStorage])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_the_host_looks_at_no_array_of_a_device(
    kind: type[Storage], cuts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for all that was called before."""
    read: list[Any] = []
    monkeypatch.setattr(_storage, "host_array", lambda x: read.append(x) or np.asarray(x))
    storage, x = storage_of(kind, cuts), jax.numpy.asarray(VALUE)
    for copy in (False, True):
        stored = storage.put(x, copy=copy)
        assert not read
        # What is consumed is nobody else's.
        assert not copy or x.unsafe_buffer_pointer() not in pointers(stored)
        np.testing.assert_array_equal(storage.fetch(stored), VALUE)
        read.clear()


@pytest.mark.parametrize("kind", [Storage, ExactStorage])
def test_a_constant_is_no_shard_of_what_may_be_consumed(kind: type[Storage]) -> None:
    x = jax.device_put(VALUE, first_devices(2).devices[1])
    placed = _placed(x, storage_of(kind, CUTS["no rows"]))
    assert x.unsafe_buffer_pointer() not in pointers(placed.stored)


@pytest.mark.parametrize("kind", [Storage, ExactStorage])
def test_a_weak_array_is_stored_as_the_plan_has_it(kind: type[Storage]) -> None:
    weak = jax.numpy.full((4,), 0.5)
    assert weak.weak_type
    for lengths in ((2, 2), (3, 1)):
        for weakly in (False, True):
            storage = kind((4,), weak.dtype, weakly, (S(0),), {0: ((0,), lengths)}, first_devices(2))
            stored = storage.put(weak, copy=True)
            # Shards of unlike length have no weak type.
            found = [x.weak_type for x in stored.arrays] if isinstance(stored, Shards) else [stored.weak_type]
            assert set(found) == {weakly and not isinstance(stored, Shards)}
            np.testing.assert_array_equal(storage.fetch(stored), weak)


def test_host_shards_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    padded: list[Any] = []
    pad = np.pad
    monkeypatch.setattr(np, "pad", lambda x, widths: padded.append(widths) or pad(x, widths))
    for cuts in (CUTS["even"], CUTS["uneven"]):
        storage = storage_of(Storage, cuts)
        stored = storage.put_shards(lambda slices: VALUE[slices])
        np.testing.assert_array_equal(storage.fetch(stored), VALUE)
    assert padded == [[(0, 6), (0, 0)]]


@pytest.mark.parametrize("kind", [Storage, ExactStorage])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_storing_is_an_explicit_transfer(kind: type[Storage], cuts: Any) -> None:
    """However the value is cut, as `jax.device_put` is one: `jax.transfer_guard` is to find what is none."""
    for weak in (False, True):
        storage = kind(VALUE.shape, VALUE.dtype, weak, *cuts, first_devices(2))
        with jax.transfer_guard("disallow"):
            stored = [storage.put_shards(lambda slices: VALUE[slices])]
            stored += [storage.put(VALUE, copy=copy) for copy in (False, True)]
        for each in stored:
            np.testing.assert_array_equal(storage.fetch(each), VALUE)


@pytest.mark.parametrize("kind", [Storage, ExactStorage])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_jax_reads_no_array_of_the_users_later(kind: type[Storage], cuts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do so once `device_put` has returned, when the user writes the next batch to the same memory."""
    read: list[np.ndarray] = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *args, **kwargs: read.append(x) or put(x, *args, **kwargs))
    storage = storage_of(kind, cuts)
    storage.put(VALUE, copy=True)
    storage.put_shards(lambda slices: VALUE[slices])
    assert read
    assert not any(np.may_share_memory(x, VALUE) for x in read)
