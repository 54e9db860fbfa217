"""Shared by the benchmarks: their command line, rows made in processes of their own, tables, timing, emulated jobs."""

import os

# A plan that is kept would be read where planning is measured.
os.environ.setdefault("HAPSYNTH_CACHE_DIR", "off")
