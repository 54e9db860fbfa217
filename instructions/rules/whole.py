"""What every device runs as a whole, and why."""

from __future__ import annotations

from hapsynth.instructions.rules.registry import no_flops, register, replicate, unknown

replicate("rng_bit_generator", why="one stream of random bits, which no device can enter in the middle")
replicate("pure_callback", why="every device calls the host's function, which is given whole arrays", flops=unknown)
register("empty2", "platform_index", flops=no_flops, fusible=True)(lambda f: f.results.append(()))
