"""Names of XLA's flags, for a launcher too, which does without JAX."""

AUTOTUNING = "xla_gpu_shard_autotuning"
