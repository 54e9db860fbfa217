"""A plan as something that runs without hapsynth."""

from hapsynth.export.shardings import in_shardings, out_shardings
from hapsynth.export.source import SourceError, source_of

__all__ = ["SourceError", "in_shardings", "out_shardings", "source_of"]
