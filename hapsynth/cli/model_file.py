"""Model files: a Python file whose `target()` returns the function to plan and its example arguments, or dicts of both.

Whatever is wrong with the file, or raised by it, becomes one `UsageError` that names the user's line.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import hapsynth
from hapsynth._errors import UsageError
from hapsynth.graph.tracing_advice import advice


@dataclass(frozen=True, eq=False)
class Target:
    """The function of a model file, and its arguments."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    path: Path
    name: str


@dataclass(frozen=True, eq=False)
class Targets:
    """Several functions of a model file, by name, to be planned for one state."""

    each: Mapping[str, Target]
    path: Path
    name: str

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        return {name: target.fn for name, target in self.each.items()}

    @property
    def args(self) -> dict[str, tuple[Any, ...]]:
        return {name: target.args for name, target in self.each.items()}

    @property
    def kwargs(self) -> dict[str, Mapping[str, Any]]:
        return {name: target.kwargs for name, target in self.each.items()}

    def __str__(self) -> str:
        return f"{self.path}: {self.name}() returns the functions {', '.join(self.each)}"


def load_target(text: str) -> Target | Targets:
    """The target of `FILE` or `FILE:name`; UsageError for whatever is wrong with either."""
    path, name = _split(text)
    with _importing_from(path.parent):
        module = _load(path)
        maker = getattr(module, name, None)
        if not callable(maker):
            raise UsageError(_no_target(module, path, name, exists=hasattr(module, name)))
        with blamed_on_user(f"{path}: {name}()"):
            returned = maker()
    return _target(returned, path, name)


def model_path(text: str) -> Path:
    """The file of `FILE` or `FILE:name`."""
    return _split(text)[0]


def _split(text: str) -> tuple[Path, str]:
    head, colon, tail = text.rpartition(":")
    if colon and head and tail.isidentifier() and not Path(text).exists():
        return Path(head), tail
    return Path(text), "target"


def holds_json(path: str | Path) -> bool:
    """Whether a file holds a JSON object, as plan files do and no model file does."""
    try:
        text = Path(path).read_bytes()
        return text.lstrip()[:1] == b"{" and isinstance(json.loads(text), dict)
    except (OSError, ValueError):
        return False


def _load(path: Path) -> ModuleType:
    if holds_json(path):
        what = "is JSON, as plans are, and no model file"
        raise UsageError(f"{path}: {what}; give a Python file that defines target() -> (fn, example_args)")
    try:
        # Compiled here and not imported, so that no bytecode is left beside the file and a second load is fresh.
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such model file{_similar_file(path)}") from None
    except OSError as error:
        raise UsageError(f"{path}: the model file can't be read: {error.strerror}") from None
    except SyntaxError as error:
        line = f"{path}:{error.lineno}" if error.lineno else f"{path}"
        raise UsageError(f"{line}: the model file is not valid Python: {error.msg}") from None
    except ValueError as error:
        raise UsageError(f"{path}: the model file is not valid Python: {one_line(error)}") from None
    module = ModuleType(f"hapsynth_model_{path.stem}")
    module.__file__ = str(path)
    # Dataclasses and the like look their module up.
    sys.modules[module.__name__] = module
    with blamed_on_user(f"{path}: importing the model file"):
        exec(code, module.__dict__)
    return module


def _similar_file(path: Path) -> str:
    folder = path.parent
    names = sorted(p.name for p in folder.glob("*.py")) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {folder / near[0]}?" if near else ""


def _no_target(module: ModuleType, path: Path, name: str, *, exists: bool) -> str:
    if exists:
        return f"{path}: {name!r} is not a function; it must return (fn, example_args)"
    functions = [
        key
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    near = difflib.get_close_matches(name, functions, n=3)
    if near:
        return f"{path}: defines no {name}(); did you mean {' or '.join(f'{n}()' for n in near)}?"
    there = f"; it defines {', '.join(functions[:8])}" if functions else ""
    return f"{path}: defines no {name}(), which must return (fn, example_args){there}"


def _target(returned: Any, path: Path, name: str) -> Target | Targets:
    where = f"{path}: {name}() must return (fn, example_args) or (fn, example_args, kwargs), but it returned"
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        what = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else _article(returned)
        raise UsageError(f"{where} {what}")
    fn, args, *rest = returned
    kwargs = rest[0] if rest else {}
    if not isinstance(fn, Mapping):
        return _one(where, fn, args, kwargs, path, name)
    for what, given in (("example_args", args), ("kwargs", kwargs)):
        if not isinstance(given, Mapping):
            raise UsageError(f"{where} a dict as fn and {_article(given)} as {what}; give dicts, by the same names")
    functions = dict[str, Any](fn)
    for what, names, known in (("fn", args, functions), ("example_args", functions, args), ("fn", kwargs, functions)):
        for key in names:
            if not isinstance(key, str) or key not in known:
                raise UsageError(f"{where} dicts of which {what} has no {key!r}; give dicts, by the same names")
    if not functions:
        raise UsageError(f"{where} a dict of no functions")
    of = lambda key: f"{where} for {key!r}"
    each = {key: _one(of(key), f, args[key], kwargs.get(key, {}), path, name) for key, f in functions.items()}
    return Targets(each, path, name)


def _one(where: str, fn: Any, args: Any, kwargs: Any, path: Path, name: str) -> Target:
    if not callable(fn):
        raise UsageError(f"{where} {_article(fn)} as fn, which can't be called")
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"{where} {_article(args)} as example_args; give a tuple, even of one argument")
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise UsageError(f"{where} {_article(kwargs)} as kwargs; give a dict of keyword arguments")
    guarded = _guarded(fn, f"{path}: {getattr(fn, '__name__', 'fn')}()", path.parent)
    return Target(guarded, tuple(args), dict(kwargs), path, name)


def _article(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _guarded(fn: Callable[..., Any], what: str, folder: Path) -> Callable[..., Any]:
    """`fn`, which imports from `folder` as its file does, and whose own exceptions become UsageErrors: a bug of
    hapsynth's is never mistaken for one of the user's."""

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        with _importing_from(folder), blamed_on_user(what, but=lambda error: advice(error) is not None):
            return fn(*args, **kwargs)

    return call


@contextlib.contextmanager
def blamed_on_user(what: str, but: Callable[[BaseException], bool] = lambda error: False) -> Generator[None]:
    """Exceptions of the user's code as UsageErrors that show the exception and the user's line.

    Those that `but` is true of are left as they are: the trace says more of them.
    """
    try:
        yield
    except (UsageError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        if but(error):
            raise
        if isinstance(error, SyntaxError) and error.filename:
            where = f" (line {error.lineno} of {error.filename})"
        else:
            where = _user_line(error)
        raise UsageError(f"{what} raised {type(error).__name__}: {one_line(error)}{where}") from error


def one_line(error: BaseException) -> str:
    """An exception's message, its first line only."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "(no message)"


def _user_line(error: BaseException) -> str:
    """The innermost line that is no library's."""
    own = str(Path(hapsynth.__file__).parent)
    line = ""
    for frame in traceback.extract_tb(error.__traceback__):
        name = frame.filename
        if name.startswith(("<", own, sys.base_prefix)) or "site-packages" in name:
            continue
        line = f" (line {frame.lineno} of {name}: {frame.line})"
    return line


@contextlib.contextmanager
def _importing_from(folder: Path) -> Generator[None]:
    """`folder` at the head of sys.path, and no bytecode written, while a model file loads or its function is called."""
    before, bytecode = list(sys.path), sys.dont_write_bytecode
    sys.path.insert(0, str(folder.resolve()))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.path[:], sys.dont_write_bytecode = before, bytecode
