"""The thread of a process that runs its collectives one after another, while the main thread computes.

It alone starts collectives during a call that overlaps, in the order in which the main thread hands them over, which is
the program's: so all processes start them in one order, however long each computes between them. XLA runs a program on
the thread that calls it or on a pool's, and a collective keeps its thread until it has ended (`runs_beside`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import jax

from hapsynth import _jax


class Transfer:
    """A collective that was handed over. `began`, `ended`: by `time.perf_counter`, once it was waited for."""

    def __init__(self, call: OverlappedCall, run: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> None:
        self._call, self._run, self._operands = call, run, operands
        self._results: Sequence[Any] = ()
        self._done = threading.Event()
        self.began = self.ended = 0.0

    def wait(self) -> Sequence[Any]:
        """What arrives. Raises what the collective raised, or the first one before it that did."""
        self._done.wait()
        if self._call.error is not None:
            raise self._call.error
        results, self._results = self._results, ()
        return results

    def ends(self) -> None:
        """Waits for its end, whatever that is."""
        self._done.wait()

    def serve(self) -> None:
        """Called by the thread."""
        operands, self._operands = self._operands, ()
        try:
            if not self._call.is_over:
                with _jax.no_mesh(), _jax.unlooked(), jax.disable_jit(False):
                    jax.block_until_ready(operands)
                    self.began = time.perf_counter()
                    self._results = self._run(*operands)
                    jax.block_until_ready(self._results)
                    self.ended = time.perf_counter()
        except BaseException as error:
            self._call.error, self._call.is_over = error, True
        finally:
            self._done.set()


class OverlappedCall:
    """The collectives of one call of a program: none starts after one that failed, or after `abandon`."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.is_over = False

    def start(self, run: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> Transfer:
        """Hand a collective over. It consumes its operands, of which nobody else may hold any."""
        transfer = Transfer(self, run, operands)
        _hand_over(transfer)
        return transfer

    def abandon(self) -> None:
        """Start none of the others, and wait for the end of the one that runs: another collective beside it, of
        whatever comes after an error, would be another order than that of other processes."""
        self.is_over = True
        # What is handed over last ends last; it does nothing.
        self.start(tuple, ()).ends()


_queue: SimpleQueue[Transfer] = SimpleQueue()
_lock = threading.Lock()
_threads: list[threading.Thread] = []


def _hand_over(transfer: Transfer) -> None:
    with _lock:
        if not _threads:
            # A process must be able to end while a collective waits for one that is gone.
            _threads.append(threading.Thread(target=_serve, name="hapsynth-collectives", daemon=True))
            _threads[0].start()
    _queue.put(transfer)


def _serve() -> None:
    while True:
        _queue.get().serve()
