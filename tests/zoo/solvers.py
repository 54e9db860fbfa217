"""Linear systems (lineax), roots, fits and minima (optimistix) and differential equations (diffrax), many at once: what
these libraries solve stands in primitives of their own."""

from __future__ import annotations

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import lineax
import optimistix

from zoo.kinds import Model, f32

MANY, WIDTH = 40, 12


def _definite(w: Any) -> Any:
    """A matrix that no solver finds hard."""
    return w @ w.T / w.shape[-1] + jnp.eye(w.shape[-1])


def _solved(solver: Any, *tags: Any) -> Model:
    """One system each, with the gradient of what comes out."""

    def one(w: Any, b: Any) -> Any:
        return lineax.linear_solve(lineax.MatrixLinearOperator(_definite(w), tags), b, solver, throw=False).value

    def step(w: Any, b: Any) -> Any:
        return jax.value_and_grad(lambda w: jnp.mean(jax.vmap(one)(w, b) ** 2))(w)

    return step, (f32(MANY, WIDTH, WIDTH), f32(MANY, WIDTH))


def lineax_lu() -> Model:
    return _solved(lineax.LU())


def lineax_qr() -> Model:
    return _solved(lineax.QR())


def lineax_auto() -> Model:
    """Cholesky, by the tag."""
    return _solved(lineax.AutoLinearSolver(well_posed=True), lineax.positive_semidefinite_tag)


def lineax_cg() -> Model:
    """One matrix, many right-hand sides."""

    def step(w: Any, b: Any) -> Any:
        operator = lineax.MatrixLinearOperator(_definite(w), lineax.positive_semidefinite_tag)
        solver = lineax.CG(rtol=1e-5, atol=1e-5, max_steps=50)
        return jax.vmap(lambda b: lineax.linear_solve(operator, b, solver, throw=False).value)(b)

    return step, (f32(WIDTH, WIDTH), f32(MANY, WIDTH))


def optimistix_newton() -> Model:
    """The root of y + tanh(W y) / 2 = x."""
    solver = optimistix.Newton(rtol=1e-5, atol=1e-5)

    def step(w: Any, x: Any) -> Any:
        fn = lambda y, x: y + 0.5 * jnp.tanh(w @ y / WIDTH) - x
        one = lambda x: optimistix.root_find(fn, solver, x, args=x, max_steps=16, throw=False).value
        return jax.vmap(one)(x)

    return step, (f32(WIDTH, WIDTH), f32(MANY, WIDTH))


def optimistix_fixed_point() -> Model:
    """An equilibrium, with its gradient by the implicit function theorem."""
    solver = optimistix.FixedPointIteration(rtol=1e-5, atol=1e-5)

    def one(w: Any, x: Any) -> Any:
        fn = lambda y, args: jnp.tanh(args[0] @ y / WIDTH + args[1])
        return optimistix.fixed_point(fn, solver, x, args=(w, x), max_steps=64, throw=False).value

    def step(w: Any, x: Any) -> Any:
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jax.vmap(one, (None, 0))(w, x) ** 2))(w)
        return w - 0.1 * grad, value

    return step, (f32(WIDTH, WIDTH), f32(MANY, WIDTH))


def optimistix_levenberg_marquardt() -> Model:
    """A decay fitted to each row."""
    solver = optimistix.LevenbergMarquardt(rtol=1e-4, atol=1e-4)
    times = jnp.linspace(0.0, 1.0, WIDTH)

    def step(first: Any, y: Any) -> Any:
        fn = lambda p, y: p[0] * jnp.exp(-p[1] * times) + p[2] - y
        one = lambda p, y: optimistix.least_squares(fn, solver, p, args=y, max_steps=8, throw=False).value
        return jax.vmap(one)(first, y)

    return step, (f32(MANY, 3), f32(MANY, WIDTH))


def optimistix_bfgs() -> Model:
    """The least of a bowl that is no quadric."""
    solver = optimistix.BFGS(rtol=1e-4, atol=1e-4)

    def step(w: Any, x: Any) -> Any:
        fn = lambda y, x: jnp.sum((_definite(w) @ y - x) ** 2) + 0.1 * jnp.sum(jnp.cos(y))
        one = lambda x: optimistix.minimise(fn, solver, jnp.zeros_like(x), args=x, max_steps=8, throw=False).value
        return jax.vmap(one)(x)

    return step, (f32(WIDTH, WIDTH), f32(MANY, WIDTH))


def _integrated(solver: Any, rates: Any, x: Any) -> Any:
    """Robertson's reactions, of which one is a thousand times as fast as another."""

    def field(t: Any, y: Any, k: Any) -> Any:
        slow, fast, back = k[0] * y[0], k[1] * y[1] ** 2, k[2] * y[1] * y[2]
        return jnp.stack([-slow + back, slow - back - fast, fast])

    def one(y: Any) -> Any:
        steps = diffrax.PIDController(rtol=1e-3, atol=1e-5)
        times = {"t0": 0.0, "t1": 1.0, "dt0": 1e-2, "max_steps": 64}
        term = diffrax.ODETerm(field)
        found = diffrax.diffeqsolve(term, solver, y0=y, args=rates, stepsize_controller=steps, throw=False, **times)
        return found.ys[-1]

    return jax.vmap(one)(x)


def diffrax_kvaerno3() -> Model:
    """Implicit: a root in each step."""
    return lambda k, x: _integrated(diffrax.Kvaerno3(), jnp.abs(k), jnp.abs(x)), (f32(3), f32(MANY, 3))


def diffrax_tsit5() -> Model:
    """Explicit, with the gradient of the rates through the steps."""

    def step(k: Any, x: Any) -> Any:
        loss = lambda k: jnp.mean(_integrated(diffrax.Tsit5(), jnp.abs(k), jnp.abs(x)) ** 2)
        value, grad = jax.value_and_grad(loss)(k)
        return k - 0.1 * grad, value

    return step, (f32(3), f32(MANY, 3))
