"""Checkpoints: carried state as logical arrays on disk, whatever plan, cluster or number of devices made them."""

from hapsynth.checkpoint.manifest import CheckpointError
from hapsynth.checkpoint.reader import load_state
from hapsynth.checkpoint.state import restore_state, save_state

__all__ = ["CheckpointError", "load_state", "restore_state", "save_state"]
