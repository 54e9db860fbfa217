"""The tiny model and the cluster of the command line's tests."""

from pathlib import Path

MODEL = """
import jax
import jax.numpy as jnp


def step(state, batch):
    def loss(w):
        return jnp.sum((jax.nn.sigmoid(batch["x"] @ w) - batch["y"]) ** 2)

    value, grad = jax.value_and_grad(loss)(state["w"])
    m = 0.9 * state["m"] + grad
    return {"m": m, "w": state["w"] - 1e-3 * m}, value


def arguments(n=4096):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return {"m": f32(256, 128), "w": f32(256, 128)}, {"x": f32(n, 256), "y": f32(n, 128)}


def target():
    return step, arguments()


def other():
    return step, arguments(2048)


def another_function():
    return lambda state, batch: ({"m": state["w"], "w": state["m"]}, batch["x"].sum()), arguments()


def with_keywords():
    state, batch = arguments()
    return (lambda state, *, batch: step(state, batch)), (state,), {"batch": batch}
"""
CLUSTER = """
[network]
bandwidth = "10 Gbit/s"
latency = "4 us"

[[devices]]
kind = "V100-16GB"
count = 4

[[devices]]
kind = "P4-8GB"
count = 4
"""


def write_model(folder: Path) -> None:
    (folder / "model.py").write_text(MODEL)
    (folder / "mixed.toml").write_text(CLUSTER)
