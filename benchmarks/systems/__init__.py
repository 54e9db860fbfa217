"""The systems that hapsynth's plans are compared with."""
