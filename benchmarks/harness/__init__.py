"""Shared by the benchmarks: their command line, rows made in processes of their own, tables, timing, emulated jobs."""
