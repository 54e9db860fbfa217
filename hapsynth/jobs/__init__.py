"""Jobs of many processes: where they meet, what they check before the first step, and how one command starts them."""

from hapsynth.jobs.preflight import PreflightError, after_call, before_call, before_placing, check_mesh
from hapsynth.rendezvous.address import JobError
from hapsynth.rendezvous.meeting import connect, initialize

__all__ = [
    "JobError",
    "PreflightError",
    "after_call",
    "before_call",
    "before_placing",
    "check_mesh",
    "connect",
    "initialize",
]
