"""The parts of `benchmarks/gpu.py`, a module each. `VARIANTS` maps the name of a variant to its XLA_FLAGS: each variant
runs in a process of its own. `rows(settings, variant)` yields a row, a dict that JSON holds, for each measurement."""
