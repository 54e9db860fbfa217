"""Jobs of many processes: where they meet, what they check before the first step, and how one command starts them."""

from hapsynth.jobs._address import JobError
from hapsynth.jobs.preflight import PreflightError, after_call, before_call, connect, exchanged, met

__all__ = ["JobError", "PreflightError", "after_call", "before_call", "connect", "exchanged", "met"]
