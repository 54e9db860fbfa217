"""Advice for functions that need an array's value while they are traced."""

from __future__ import annotations

import jax

from hapsynth import _jax

NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""The errors that JAX raises for them."""


def needs_value(error: Exception) -> str:
    """Which line needs which value, and the way out."""
    lines = [line.strip() for line in str(error).splitlines()]
    keep = [x for x in lines if x and not x.startswith(("See ", "The error occurred", "This concrete"))]
    reason = " ".join(keep).split("This concrete value")[0].strip().rstrip(".")
    match error:
        case jax.errors.NonConcreteBooleanIndexError():
            way = "how many elements a mask picks depends on the data: use jnp.where, or jnp.nonzero(mask, size=...)"
        case jax.errors.TracerBoolConversionError():
            way = (
                "choose with jnp.where or jax.lax.cond, or close over what is asked: Python's bools and numbers are "
                "traced too where they are arguments"
            )
        case jax.errors.TracerArrayConversionError():
            way = "use jax.numpy in the place of numpy"
        case jax.errors.ConcretizationTypeError() if "size" in reason:
            way = "the shape of its result depends on the data: give size=, the most elements there can be"
        case _:
            way = "compute with jax.numpy, or make it a number that is known before: a shape, or a closure's"
    return f"the function needs the value of an array while it is traced ({_jax.raised_at(error)}): {reason}; {way}"
