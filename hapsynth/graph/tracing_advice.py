"""Advice for functions that can't be traced as they are: what JAX's error means here, and the way out."""

from __future__ import annotations

import jax

from hapsynth import _jax

_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def advice(error: BaseException) -> str | None:
    """What is said in the place of an exception that the function raised; None of any but these of JAX's."""
    if isinstance(error, _NEEDS_VALUE):
        return _needs_value(error)
    text = str(error)
    match error:
        case NameError() if "axis name" in text:
            return (
                f"the function uses an axis name that nothing around it gives ({_jax.raised_at(error)}), as in a step "
                "for jax.pmap or jax.shard_map: give the step for one device and the whole batch, without its "
                "lax.pmean and lax.psum (flax: BatchNorm(axis_name=None)), or name the axis by "
                f"jax.vmap(..., axis_name=...); hapsynth distributes it itself ({text.partition('. ')[0]})"
            )
        case ValueError() if "Non-hashable static argument" in text:
            return (
                "the function is or calls a jitted one with a static argument, and numbers and bools among the example "
                "arguments are traced as arrays: give static ones beforehand, as in functools.partial(step, "
                "train=True), and leave them out of the example arguments"
            )
        case RuntimeError() if "mesh in context" in text:
            return (
                "the function needs the mesh of jax.set_mesh, and hapsynth traces it without one, since it chooses all "
                f"shardings itself: remove the constraint, or give it a NamedSharding ({text})"
            )
        case _:
            return None


def _needs_value(error: Exception) -> str:
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
