"""A checkpoint's table of contents: a JSON file, only data, trusted as far as its checksums hold.

A checkpoint is a folder with `hapsynth-state.json` and the folder `state-<16 hex digits>` that it names, which holds a
file `<n>.bin` of each process n that wrote. A leaf lies there in pieces: boxes of the logical array, row-major,
little-endian, each with its CRC-32. How a leaf is cut into pieces follows from its shape and dtype, however its devices
held it; only where no process held a piece alone it is in several.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np

FORMAT = 1
_SCHEMA = "hapsynth-state-"
MANIFEST = "hapsynth-state.json"
FOLDER = re.compile(r"state-[0-9a-f]{16}")
FILE = re.compile(r"\d+\.bin")
_ELSE = "restore another checkpoint"

Box = tuple[tuple[int, int], ...]
"""A part of an array: start and stop of every dimension."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written, or is of another state than the plan's."""


@dataclass(frozen=True)
class Piece:
    """A box of a leaf, in `file` from byte `offset` on. `crc32`: of its bytes, once they are written."""

    box: Box
    file: str
    offset: int
    crc32: int = 0


@dataclass(frozen=True)
class Leaf:
    """An array of a state; `path` as `jax.tree_util.keystr` prints it.

    Of typed keys `impl` names the implementation, and their words are stored: uint32[*shape, *words].
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    impl: str = ""
    words: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape + self.words

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        return np.dtype("uint32" if self.impl else self.dtype)

    def nbytes(self, box: Box) -> int:
        """Of a box."""
        return size_of(box) * self.stored_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Static:
    """A leaf that is no array. Its value is kept where it is a string, else only the name of its type."""

    path: str
    type: str
    value: str | None = None

    @classmethod
    def of(cls, path: str, leaf: Any) -> Static:
        return cls(path, type(leaf).__qualname__, leaf if type(leaf) is str else None)

    def __str__(self) -> str:
        return f"no array but {self.type if self.value is None else repr(self.value)}"


@dataclass(frozen=True)
class Manifest:
    """`hapsynth`: the version that wrote. `folder`: where the pieces' files are, within the checkpoint's own."""

    hapsynth: str
    folder: str
    leaves: tuple[Leaf | Static, ...]

    def dumps(self) -> str:
        """As JSON, a leaf per line."""
        head = {"schema": f"{_SCHEMA}{FORMAT}", "hapsynth": self.hapsynth, "folder": self.folder}
        leaves = [_leaf_to_dict(leaf) for leaf in self.leaves]
        head["crc32"] = str(_checksum({**head, "leaves": leaves}))
        lines = ",\n".join(json.dumps(leaf) for leaf in leaves)
        return f'{json.dumps(head)[:-1]}, "leaves": [\n{lines}\n]}}\n'


def size_of(box: Box) -> int:
    """Elements of a box."""
    return prod(stop - start for start, stop in box)


def common(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes, if any."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def within(part: Box, outer: Box) -> tuple[slice, ...]:
    """Where a part lies in an array that holds just `outer`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, outer))


def written(box: Box) -> str:
    """E.g. `[4:8, 0:16]`."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a checkpoint's folder. CheckpointError gives the file's name, the reason and the way out."""
    file = folder / MANIFEST
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(_none_there(folder)) from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}; make it readable, or {_ELSE}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: is cut short or no JSON ({error}); {_ELSE}") from None
    try:
        return _manifest(data)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: was edited or is damaged ({error!r}); {_ELSE}") from error


def _none_there(folder: Path) -> str:
    give = "give the folder that plan.save_state wrote"
    if not folder.exists():
        return f"{folder}: there is no checkpoint, nor anything else; {give}"
    if not folder.is_dir():
        return f"{folder}: is a file and no checkpoint; {give}"
    if any(FOLDER.fullmatch(p.name) for p in folder.iterdir()):
        return f"{folder}: holds no whole checkpoint: its first save was broken off; {_ELSE}"
    return f"{folder}: holds no checkpoint, as it has no {MANIFEST}; {give}"


def _manifest(data: Any) -> Manifest:
    schema = str(cast(dict[str, Any], data)["schema"]) if isinstance(data, dict) and "schema" in data else ""
    number = schema.removeprefix(_SCHEMA)
    if not schema.startswith(_SCHEMA) or not number.isdecimal():
        raise CheckpointError(f"is no list of a state's leaves; {_ELSE}")
    if int(number) != FORMAT:
        raise CheckpointError(
            f"has format {number}, written by hapsynth {data.get('hapsynth')}, and this version reads format {FORMAT}: "
            "install that hapsynth, or load the state there with hapsynth.load_state and save its arrays otherwise"
        )
    checksum = str(data.pop("crc32"))
    if checksum != str(_checksum(data)):
        raise CheckpointError(f"does not match its own checksum: it was edited or is damaged; {_ELSE}")
    if not FOLDER.fullmatch(data["folder"]):
        raise CheckpointError(f"names the folder {data['folder']!r}, which is none of a checkpoint; {_ELSE}")
    return Manifest(str(data["hapsynth"]), data["folder"], tuple(map(_leaf_from_dict, data["leaves"])))


def _checksum(data: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())


def _leaf_to_dict(leaf: Leaf | Static) -> dict[str, Any]:
    if isinstance(leaf, Static):
        return {"path": leaf.path, "type": leaf.type, **({} if leaf.value is None else {"value": leaf.value})}
    return {
        "path": leaf.path,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype,
        **({"impl": leaf.impl, "words": list(leaf.words)} if leaf.impl else {}),
        "pieces": [
            {"file": p.file, "offset": p.offset, "box": [list(pair) for pair in p.box], "crc32": p.crc32}
            for p in leaf.pieces
        ],
    }


def _leaf_from_dict(data: Mapping[str, Any]) -> Leaf | Static:
    if "type" in data:
        return Static(str(data["path"]), str(data["type"]), data.get("value"))
    numbers = lambda entries: tuple(_natural(n) for n in entries)
    shape, words = numbers(data["shape"]), numbers(data.get("words", ()))
    leaf = Leaf(str(data["path"]), shape, str(data["dtype"]), str(data.get("impl", "")), words)
    if leaf.stored_dtype.hasobject:
        raise CheckpointError(f"says that {leaf.path} is {leaf}, which is no array of numbers; {_ELSE}")
    pieces: list[Piece] = []
    for p in data["pieces"]:
        box = tuple((_natural(start), _natural(stop)) for start, stop in p["box"])
        inside = len(box) == len(leaf.stored_shape) and all(a < b <= n for (a, b), n in zip(box, leaf.stored_shape))
        if not (inside and FILE.fullmatch(p["file"])):
            raise CheckpointError(f"says that {leaf.path} of {leaf} has {written(box)} in {p['file']!r}; {_ELSE}")
        pieces.append(Piece(box, p["file"], _natural(p["offset"]), _natural(p["crc32"])))
    if sum(size_of(p.box) for p in pieces) != prod(leaf.stored_shape):
        raise CheckpointError(f"does not say where all of {leaf.path} of {leaf} is; {_ELSE}")
    return replace(leaf, pieces=tuple(pieces))


def _natural(x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, int) or x < 0:
        raise CheckpointError(f"has {x!r} where a number of at least 0 is due; {_ELSE}")
    return x
