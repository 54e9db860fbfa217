"""Reads a checkpoint, each leaf whole or any box of it: only the pieces that hold it, each checked."""

from __future__ import annotations

import os
import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np

from hapsynth.checkpoint.manifest import (
    Box,
    CheckpointError,
    Leaf,
    common,
    read_manifest,
    size_of,
    within,
    written,
)

_CACHED = 16
"""Pieces that are kept, as the shards of neighbours may begin in one."""


class Reader:
    """The checkpoint in a folder. Raises CheckpointError where there is none, or none of which all bytes are there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.leaves = self.manifest.leaves
        self._piece = lru_cache(maxsize=_CACHED)(self._read)
        due: dict[str, int] = {}
        for leaf in self.leaves:
            if isinstance(leaf, Leaf):
                for p in leaf.pieces:
                    due[p.file] = max(due.get(p.file, 0), p.offset + leaf.nbytes(p.box))
        for name, size in due.items():
            try:
                nbytes = os.stat(self._file(name)).st_size
            except OSError as error:
                raise CheckpointError(f"{self._file(name)}: {error.strerror}; {self._way_out()}") from None
            if nbytes < size:
                raise CheckpointError(
                    f"{self._file(name)}: is cut short: it has {nbytes} bytes, and {size} are due; {self._way_out()}"
                )

    def read(self, number: int, box: Box) -> np.ndarray:
        """A box of a leaf, as it is stored; bit for bit the saved one, or CheckpointError."""
        leaf = self.leaves[number]
        assert isinstance(leaf, Leaf)
        out, filled = np.empty([stop - start for start, stop in box], leaf.stored_dtype), 0
        for n, piece in enumerate(leaf.pieces):
            if (part := common(piece.box, box)) is not None:
                out[within(part, box)] = self._piece(number, n)[within(part, piece.box)]
                filled += size_of(part)
        if filled != out.size:
            raise CheckpointError(f"{self.path}: {written(box)} of {leaf.path} is not in it; {self._way_out()}")
        return out

    def whole(self, number: int) -> np.ndarray:
        """A leaf, as it is stored."""
        leaf = self.leaves[number]
        assert isinstance(leaf, Leaf)
        return self.read(number, tuple((0, n) for n in leaf.stored_shape))

    def _read(self, number: int, n: int) -> np.ndarray:
        leaf = self.leaves[number]
        assert isinstance(leaf, Leaf)
        piece = leaf.pieces[n]
        file, due = self._file(piece.file), leaf.nbytes(piece.box)
        try:
            with open(file, "rb") as source:
                source.seek(piece.offset)
                data = source.read(due)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}; {self._way_out()}") from None
        if len(data) != due or zlib.crc32(data) != piece.crc32:
            raise CheckpointError(
                f"{file}: bytes {piece.offset} to {piece.offset + due}, {written(piece.box)} of {leaf.path}, do not "
                f"match their checksum: the file is damaged; {self._way_out()}"
            )
        return np.frombuffer(data, leaf.stored_dtype).reshape([stop - start for start, stop in piece.box])

    def _file(self, name: str) -> Path:
        return self.path / self.manifest.folder / name

    def _way_out(self) -> str:
        try:
            if read_manifest(self.path).folder != self.manifest.folder:
                return "another save has replaced it meanwhile: restore again"
        except CheckpointError:
            pass
        return "copy the checkpoint again, whole, or restore another one; all processes must see the same files"


def load_state(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint that `Plan.save_state` wrote, whole, by their path in the state.

    Nothing else is needed, no plan and no devices. Typed keys come as their uint32 words, for
    `jax.random.wrap_key_data`; leaves that are no arrays are left out. Raises CheckpointError.
    """
    reader = Reader(path)
    return {leaf.path: reader.whole(i) for i, leaf in enumerate(reader.leaves) if isinstance(leaf, Leaf)}
