"""A plan as something that runs without hapsynth."""

from hapsynth.export.source import source_of

__all__ = ["source_of"]
