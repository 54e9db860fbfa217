"""A plan compiled for several cards, each in a process of its own.

JAX looks for a GPU, and leaves its plugin out where there is none, unless JAX_PLATFORMS says otherwise before JAX is
imported; and a compiler that dies takes its process along. So each card has a new process, which reads the plan, finds
the function as pickle would, and lowers on devices that are only described.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from hapsynth import _jax
from hapsynth.cluster.compiler_target import CompilerTarget, compiler_target
from hapsynth.cluster.device_kinds import card_of
from hapsynth.running.base import Planned
from hapsynth.running.form import Form, check_form
from hapsynth.running.plan_file import write_plan
from hapsynth.targets.compiled_target import CompiledTarget
from hapsynth.targets.cuda_plugin import TargetError, installed_plugin, not_served
from hapsynth.targets.target_process import compile_in_this_process

Source = Callable[[], tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]]
"""Gives the function, its arguments and keyword arguments, in another process too: what pickle takes."""

_TOLD = 400
"""Characters that are told of what a process printed before it died."""
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


@dataclass(frozen=True)
class _Request:
    """What a process compiles. `settings`: of JAX's configuration, as here. `log`: what it prints, as compilers do.
    `texts`: a folder for the compiled programs, or none."""

    plan: str
    log: str
    source: Source
    form: Form
    target: CompilerTarget
    settings: Mapping[str, Any]
    texts: str


def compile_for(
    plan: Planned,
    targets: Sequence[str] = (),
    *,
    form: Form = "auto",
    source: Source | None = None,
    tell: Callable[[str], object] = lambda text: None,
    texts: Path | None = None,
) -> list[CompiledTarget]:
    """Compile a plan for each of the cards `targets`, names of devices.toml; none: those of its own devices.

    Every card is taken to be the only kind that there is: what comes out is what each process of a job of unlike cards
    compiles for itself. `form`: as of `synthesize`. `source`: where the plan's function can't be pickled. `tell`: is
    told of each card before it is compiled for. `texts`: a folder for what XLA makes of it, CARD-FORM-NUMBER.txt.
    Raises TargetError where XLA's compiler for GPUs is not installed, where a new process can't find the function, or
    where it ends as it imports the script that this is called in, ClusterError for a card that is not known, TypeError
    for a name in the place of a sequence.
    """
    check_form(form)
    if isinstance(targets, str):
        raise TypeError(f"targets is {targets!r}; give a sequence of names, e.g. [{targets!r}]")
    cards = [compiler_target(name) for name in targets or _own_kinds(plan)]
    plugin = installed_plugin()
    settings = {name: getattr(jax.config, name) for name in _jax.NUMERICS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        write_plan(path, plan.traced, plan.result, plan.cluster)
        found: list[CompiledTarget] = []
        for card in cards:
            tell(f"compiling for {card.kind}")
            if error := not_served(card, plugin):
                found.append(CompiledTarget(card.kind, error=error))
            else:
                log = Path(folder) / f"{card.kind}.log"
                kept = "" if texts is None else str(texts.resolve())
                request = _Request(str(path), str(log), source or _source_of(plan), form, card, settings, kept)
                found.append(_apart(request))
        return found


def _own_kinds(plan: Planned) -> list[str]:
    kinds = dict.fromkeys(plan.cluster.devices[d] for d in plan.devices)
    return list(dict.fromkeys(card_of(kind) or kind.name for kind in kinds))


def _source_of(plan: Planned) -> Source:
    return partial(_given, plan.function, *plan.traced.example())


def _given(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return fn, args, kwargs


def _apart(request: _Request) -> CompiledTarget:
    """In a new process."""
    context = multiprocessing.get_context("spawn")
    receives, sends = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(request, sends), daemon=True)
    with _environment():
        try:
            process.start()
        except (AttributeError, TypeError, ValueError, ImportError, pickle.PicklingError) as error:
            if isinstance(error, ValueError) and "pickle" not in str(error):
                raise
            raise TargetError(
                f"a new process can't find the plan's function ({error}): define it, with def, and what its arguments "
                "hold at the top level of a module, or use `hapsynth compile FILE`"
            ) from error
    sends.close()
    begun = False
    try:
        begun = receives.recv()
        result = receives.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"the compiler's process {_ended(code)}{'' if begun else ' before it began'}"
        # A signal, as where memory is short, is not the script's fault, nor that of the other cards.
        if not begun and code >= 0:
            raise TargetError(
                f"{how}: it first imports the script that starts it, which is to call compile_for under "
                '`if __name__ == "__main__":` and to define the function at the top level, not under that; or use '
                "`hapsynth compile FILE`"
            ) from None
        return CompiledTarget(request.target.kind, error=f"{how}: {_last_of(request.log)}" if begun else how)
    process.join()
    if isinstance(result, BaseException):
        raise result
    return result


def _ended(code: int) -> str:
    """How a process ended that said nothing."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


def _last_of(log: str) -> str:
    """The end of what a process printed, in one line."""
    try:
        return (
            " ".join(Path(log).read_text(encoding="utf-8", errors="replace")[-_TOLD:].split()) or "it printed nothing"
        )
    except OSError:
        return "it printed nothing"


@contextmanager
def _environment() -> Generator[None]:
    """What a process that is started finds set, before it imports JAX."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(request: _Request, sends: Connection) -> None:
    # The script that asked has been imported, and the function found.
    sends.send(True)
    # XLA writes to the descriptors themselves.
    with open(request.log, "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for name, value in request.settings.items():
        jax.config.update(name, value)
    try:
        result: Any = compile_in_this_process(
            request.plan, *request.source(), request.form, request.target, request.texts
        )
    except Exception as error:  # of the plan or the function, told where it was asked for
        result = error
    sends.send(result)
