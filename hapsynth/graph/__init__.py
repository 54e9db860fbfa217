"""A JAX function as a graph: traced, inlined, flat control flow."""
