"""Writes the files of a checkpoint. The folder holds the old checkpoint until one rename makes it the new one."""

from __future__ import annotations

import errno
import os
import re
import secrets
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hapsynth.checkpoint.manifest import (
    FILE,
    FOLDER,
    MANIFEST,
    Box,
    CheckpointError,
    Leaf,
    Manifest,
    Piece,
    common,
    read_manifest,
    size_of,
)

CHUNK_BYTES = 4 << 20
"""Most bytes of a piece, which is read and checked as one."""
_TEMPORARY = re.compile(rf"\.{FOLDER.pattern}\.json")

Holders = Mapping[Box, Sequence[int]]
"""The disjoint boxes into which a leaf is cut -> the processes that hold each."""


def chunks(box: Box, itemsize: int, most: int) -> Iterator[Box]:
    """A box in parts of at most `most` bytes: its longest dimension halved, as often as needed."""
    if size_of(box) * itemsize <= most or size_of(box) == 1:
        yield box
        return
    dim = max(range(len(box)), key=lambda d: box[d][1] - box[d][0])
    start, stop = box[dim]
    middle = (start + stop) // 2
    for half in ((start, middle), (middle, stop)):
        yield from chunks((*box[:dim], half, *box[dim + 1 :]), itemsize, most)


def shared_out(leaves: Sequence[Leaf], holders: Sequence[Holders], chunk_bytes: int = CHUNK_BYTES) -> list[Leaf]:
    """The leaves with their pieces: the process that writes each, and where. The same in every process.

    A box that several hold goes to who writes least so far. A chunk that none holds whole is cut as they hold it.
    """
    total, out = Counter[int](), list[Leaf]()
    for leaf, held in zip(leaves, holders, strict=True):
        pieces: list[Piece] = []
        whole = tuple((0, n) for n in leaf.stored_shape)
        for chunk in chunks(whole, leaf.stored_dtype.itemsize, chunk_bytes) if held else ():
            cut = [(part, ranks) for box, ranks in held.items() if (part := common(chunk, box)) is not None]
            alone = set.intersection(*(set(ranks) for _, ranks in cut))
            for part, ranks in [(chunk, alone)] if alone else cut:
                writer = min(ranks, key=lambda p: (total[p], p))
                pieces.append(Piece(part, f"{writer}.bin", total[writer]))
                total[writer] += leaf.nbytes(part)
        out.append(replace(leaf, pieces=tuple(pieces)))
    return out


def save(
    path: Path,
    manifest: Manifest,
    holders: Sequence[Holders],
    fetch: Callable[[int, Box], np.ndarray],
    process: int,
    agreed: Callable[[Callable[[], Any]], list[Any]],
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Write a checkpoint to the folder at `path`, all its processes at once; until `commit` the old one stays.

    `manifest`: the leaves, without folder and pieces. `fetch(number, box)`: of the number-th array, of which it never
    goes back to an earlier one, a box that this process holds, in its host's memory. `agreed`: runs something and gives
    what it returned in each process that holds a part, in their order; a barrier, and where it fails in one it raises
    in all.
    """
    arrays = iter(pieces := shared_out([x for x in manifest.leaves if isinstance(x, Leaf)], holders, chunk_bytes))
    leaves = tuple(next(arrays) if isinstance(x, Leaf) else x for x in manifest.leaves)
    writers = agreed(lambda: process)
    first = process == writers[0]
    try:
        folder = agreed(lambda: begin(path) if first else "")[0]
        checksums = agreed(lambda: write_part(path / folder / f"{process}.bin", pieces, fetch))
        due = {f"{writer}.bin": sums for writer, sums in zip(writers, checksums, strict=True)}
        agreed(lambda: commit(path, replace(manifest, folder=folder, leaves=leaves), due) if first else None)
    finally:
        # The old checkpoint, or the files of a failed save. A later save cleans up those that this one can't.
        if first:
            with suppress(OSError, CheckpointError):
                clean(path)


def begin(path: Path) -> str:
    """Make a folder for the files of a new checkpoint in the one at `path`; returns its name."""
    folder = f"state-{secrets.token_hex(8)}"
    path.mkdir(parents=True, exist_ok=True)
    # Leftovers of crashes may be what fills the disk; where they can't be removed there may be space nevertheless.
    with suppress(OSError, CheckpointError):
        clean(path)
    (path / folder).mkdir()
    return folder


def write_part(file: Path, leaves: Sequence[Leaf], fetch: Callable[[int, Box], np.ndarray]) -> list[int]:
    """Write the pieces of one file; returns their checksums. `fetch(number, box)`: a leaf's box, in host memory."""
    checksums: list[int] = []
    if not file.parent.is_dir():
        raise CheckpointError(f"{file.parent} is not there, though it was made by another process; {_SHARE}")
    with open(file, "xb") as out:
        for number, leaf in enumerate(leaves):
            for piece in (p for p in leaf.pieces if p.file == file.name):
                part = np.ascontiguousarray(fetch(number, piece.box))
                # Bytes of their own type, as a buffer can't be of bfloat16 and its like.
                data = part.reshape(-1).view(np.uint8).data
                assert (out.tell(), data.nbytes) == (piece.offset, leaf.nbytes(piece.box))
                checksums.append(zlib.crc32(data))
                out.write(data)
        out.flush()
        os.fsync(out.fileno())
    return checksums


def commit(path: Path, manifest: Manifest, checksums: Mapping[str, Sequence[int]]) -> None:
    """Make the files that all have written the checkpoint at `path`. `checksums`: of each file, as it was written."""
    due = {file: iter(sums) for file, sums in checksums.items()}
    leaves = tuple(
        replace(leaf, pieces=tuple(replace(p, crc32=next(due[p.file])) for p in leaf.pieces))
        if isinstance(leaf, Leaf)
        else leaf
        for leaf in manifest.leaves
    )
    folder = path / manifest.folder
    lost = [file for file in checksums if not (folder / file).exists()]
    if lost:
        raise CheckpointError(f"{folder / lost[0]}, which another process wrote, is not there; {_SHARE}")
    temporary = path / f".{manifest.folder}.json"
    with open(temporary, "x", encoding="utf-8") as out:
        out.write(replace(manifest, leaves=leaves).dumps())
        out.flush()
        os.fsync(out.fileno())
    for folder_or_parent in (folder, path, path.parent):
        _sync(folder_or_parent)
    os.replace(temporary, path / MANIFEST)
    _sync(path)


_SHARE = "several processes save into one folder, on a file system that all of them share: give such a path"


def clean(path: Path) -> None:
    """Remove all files of no whole checkpoint: of earlier ones, and of broken-off saves.

    Only files and folders that have the names that a save gives. CheckpointError where the manifest can't be read.
    """
    current = read_manifest(path).folder if (path / MANIFEST).exists() else ""
    for entry in list(path.iterdir()):
        if _TEMPORARY.fullmatch(entry.name):
            entry.unlink(missing_ok=True)
        if FOLDER.fullmatch(entry.name) and entry.name != current and entry.is_dir() and not entry.is_symlink():
            for file in list(entry.iterdir()):
                if FILE.fullmatch(file.name):
                    file.unlink(missing_ok=True)
            # Not where there is something else in it.
            with suppress(OSError):
                entry.rmdir()


def _sync(folder: Path) -> None:
    """Write a folder's list of names to the disk, where that is allowed and its file system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
