"""Watches how fast each device computes while a plan runs, and proposes new sizes where one has slowed.

In a synchronous step every process sees the same wall time, that of the slowest, so wall time says nothing of who is
slow. Nor does a process's CPU time: one that is held to a part of a core (a cgroup quota, a busy neighbour) takes as
many CPU seconds for its work as before, only later. The signal is the wall time of work that waits for nobody. Where
the stages of a plan can meet before they send (`hapsynth.lower._compute_timer`), a call now and then measures just
that. Else the monitor stops now and then, and this process's devices do by themselves all that they compute in a step
(`hapsynth.adapting.probe`).
"""

from __future__ import annotations

import logging
import math
import numbers
import statistics
from collections import deque
from functools import cached_property
from typing import Any, Generic

import jax
import numpy as np

from hapsynth._options import check_count, check_gain
from hapsynth.adapting.probe import Probe
from hapsynth.adapting.rebalance import THRESHOLD, Proposal, busy_seconds, propose
from hapsynth.lower import Staged, local_numbers
from hapsynth.lower._compute_timer import ComputeTimer
from hapsynth.running.allgather import gathered
from hapsynth.running.base import P, Planned

logger = logging.getLogger(__name__)

_EVERY, _PROBING = 100, 0.02
"""The calls between two measurements by default, at least, and the largest fraction of the time for which training
stands still to measure."""


class Monitor(Generic[P]):
    """Proposes a plan with other sizes when devices slow down or recover, in a training loop:

        monitor = hapsynth.Monitor(plan)
        for batch in batches:
            state, loss = plan(state, batch)
            if proposal := monitor.step(loss):
                plan, state = proposal.plan, proposal.plan.adopt(state, plan)

    Every `every` calls of `step` each process measures its slowdown, measured over predicted seconds of its own
    computing: in the call just made, where the plan runs in stages on CPUs of several processes, otherwise in at least
    `probe_s` seconds of that alone, on copies, or of its heaviest op where they have no room; or the median of the
    seconds given to `step` since. The median of the last `window` measurements of each counts. A plan is proposed where
    a step is predicted to take at least the fraction `threshold` less, by each of these measurements alone. After that
    the monitor watches the proposed plan, from a new window on. `every` is 100 unless given, and for plans that are not
    measured as they run at least the calls that the plan is predicted to make in 50 times `probe_s`, so that training
    stands still for 2 % of the time.

    `predicted_at_speed_s`: seconds of a step of the watched plan at the medians of the window, proposed or not;
    `plan.cost` until that is full.

    In a run of several processes each has a monitor with the same options and calls `step` equally often.
    Raises TypeError for what is no plan, ValueError for options that are of no use and RuntimeError for a plan without
    devices.
    """

    def __init__(
        self,
        plan: P,
        *,
        every: int | None = None,
        window: int = 3,
        threshold: float = THRESHOLD,
        probe_s: float = 1.0,
    ) -> None:
        given: Any = plan
        if not isinstance(given, Planned):
            raise TypeError(
                f"a monitor watches one plan, and this is {type(given).__name__}; of plans of several functions give "
                "one, such as plans['train']"
            )
        for name, value in (("every", every), ("window", window)):
            if value is not None:
                check_count(name, value)
        if not _is_positive(probe_s):
            raise ValueError(f"probe_s is {probe_s!r}; give the seconds that a measurement may take")
        check_gain("threshold", threshold)
        if plan.mesh is None:
            raise RuntimeError("this plan has no devices to watch: load it where they are, with hapsynth.load")
        self.plan, self.threshold, self.probe_s = plan, threshold, probe_s
        self.every = self._default_every() if every is None else every
        self._measured: deque[float] = deque(maxlen=window)
        self._given: list[float] = []
        self._steps = 0
        self._watch(plan)

    @property
    def scalars(self) -> dict[str, float]:
        """What is known now, for whatever logs a training run (TensorBoard, Weights & Biases): name -> figure.

        `hapsynth/predicted_step_s`: of the plan that is watched. `hapsynth/slowdown`: of this process, as it was last
        measured. Once the window is full, `hapsynth/slowdown/D`: of device D of the cluster, the median of the window;
        `hapsynth/predicted_step_at_speed_s`: of the plan at these.
        """
        known = {"hapsynth/predicted_step_s": self.plan.cost}
        if self._measured:
            known["hapsynth/slowdown"] = self._measured[-1]
        of_devices = dict(zip(self.plan.devices, self._slowdowns))
        if of_devices:
            known["hapsynth/predicted_step_at_speed_s"] = self.predicted_at_speed_s
        return known | {f"hapsynth/slowdown/{device}": s for device, s in of_devices.items()}

    def _watch(self, plan: P) -> None:
        self.plan, self.predicted_at_speed_s = plan, plan.cost
        self._slowdowns: tuple[float, ...] = ()
        self.__dict__.pop("_probe", None)
        self._measured.clear()
        self._ask()

    def _ask(self) -> None:
        """For the next call to be measured, where its results are."""
        if self._meetings is not None and (self._steps + 1) % self.every == 0:
            self._meetings.measured = True

    def _default_every(self) -> int:
        """The calls from one measurement to the next."""
        if self._meetings is not None or not self.plan.cost:
            return _EVERY
        return max(_EVERY, math.ceil(self.probe_s / (_PROBING * self.plan.cost)))

    @property
    def _meetings(self) -> ComputeTimer | None:
        """Of a plan whose calls can be measured."""
        lowered = self.plan.lowered
        return lowered.meetings if isinstance(lowered, Staged) and lowered.meetings.possible else None

    @cached_property
    def _probe(self) -> Probe:
        return Probe(self.plan)

    def step(self, results: Any = None, seconds: float | None = None) -> Proposal[P] | None:
        """Count one step; a proposal where it is time for one.

        `results`: of the step, waited for before anything is measured. `seconds`: what this process measured
        itself of its own computing in this step, communication and waiting left out.
        """
        if seconds is not None:
            if not _is_positive(seconds):
                raise ValueError(f"seconds is {seconds!r}; give the positive seconds that this process computed")
            self._given.append(seconds)
        self._steps += 1
        due = self._steps % self.every == 0
        if due:
            self._measured.append(self._slowdown(results))
            self._given.clear()
        self._ask()
        if not due:
            return None
        if len(self._measured) < (self._measured.maxlen or 1):
            return None
        assert self.plan.mesh is not None
        proposal = propose(self.plan, gathered(self.plan.mesh, np.array(self._measured)), self.threshold)
        self._slowdowns, self.predicted_at_speed_s = proposal.slowdown, proposal.after_s
        logger.info("slowdown of each device: %s", ", ".join(f"{s:.3g}" for s in proposal.slowdown))
        if proposal.plan is self.plan:
            return None
        logger.info("other sizes: %.4g s a step instead of %.4g s", proposal.after_s, proposal.before_s)
        self._watch(proposal.plan)
        return proposal

    def _slowdown(self, results: Any) -> float:
        seconds = self._given
        meetings = self._meetings
        if not seconds and meetings is not None and not meetings.measured and meetings.local_s is not None:
            seconds = [meetings.local_s]
        if not seconds:
            jax.block_until_ready(results)
            return self._probe.slowdown(self.probe_s)
        assert self.plan.mesh is not None
        predicted = float(busy_seconds(self.plan)[local_numbers(self.plan.mesh)].max())
        return statistics.median(seconds) / predicted if predicted else 1.0


def _is_positive(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return 0 < float(value) < math.inf
