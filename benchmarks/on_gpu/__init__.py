"""The parts of `benchmarks/gpu.py`. Each has VARIANTS, name -> XLA_FLAGS, each of which runs in a process of its own,
and `rows(settings, variant)`, which yields a row, a dict that JSON holds, for each thing that was measured."""
