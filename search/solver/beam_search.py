"""Layered search over a `Space`: all nodes of one depth at a time, in array operations.

With a width it is a beam search that knows what it gave up (the least f dropped bounds what it missed); where
nothing is dropped it is dynamic programming over the frontier, cut off by the incumbent, and exact.
"""

from collections.abc import Callable

import numpy as np

from hapsynth.search.solver.options import DEFAULT, SolverOptions
from hapsynth.search.solver.problem import Floats, Ints
from hapsynth.search.solver.search_space import Depth, Found, Space

_CHUNK = 2_000_000


def beam_search(
    space: Space, threshold: float, width: int, stop: Callable[[], bool], options: SolverOptions = DEFAULT
) -> Found:
    """The cheapest assignment below `threshold` seen while keeping the `width` nodes of least f per depth."""
    f = np.array([space.root])
    keys = np.zeros((1, 0), dtype=np.int64)
    usage = np.zeros((1, space.limits.size))
    back: list[tuple[Ints, Ints]] = []
    lost = np.inf
    expanded = 0
    for depth, stage in enumerate(space.stages):
        if stop():
            return Found(None, min(lost, float(f.min())), expanded)
        expanded += f.size
        row, state, cost = _children(stage, f, keys, threshold)
        used = usage[row] + stage.usage.T[state]
        if used.size:
            fits = np.all(used <= space.limits, axis=1)
            row, state, cost, used = row[fits], state[fits], cost[fits], used[fits]
        rest = _advanced(stage, keys)
        code = _codes(rest, stage.radix)[row] * max(stage.classes, 1) + stage.state_class[state]
        best = _undominated(code, cost - used @ space.multipliers, used, options.pareto_rounds)
        if depth + 1 == len(space.stages):
            cost = np.maximum(cost, cost + (space.limits - used) @ space.multipliers)
            best = best[cost[best] < threshold]
        if best.size > width:
            best, dropped = _widest(best, cost, used, space.limits, width)
            lost = min(lost, float(cost[dropped].min()))
        if not best.size:
            return Found(None, lost, expanded)
        back.append((row[best], state[best]))
        f, usage = cost[best], used[best]
        keys = rest[row[best]]
        if stage.classes:
            keys = np.concatenate([keys, stage.state_class[state[best], None]], axis=1)
    at = int(np.argmin(f)) if space.stages else 0
    least = float(f[at])
    states: list[int] = []
    for parent, state in reversed(back):
        states.append(int(state[at]))
        at = int(parent[at])
    return Found(space.chosen(states[::-1]), min(lost, least), expanded)


def _children(stage: Depth, f: Floats, keys: Ints, threshold: float) -> tuple[Ints, Ints, Floats]:
    """(row, state, f) of every child below the threshold."""
    parts: list[tuple[Ints, Ints, Floats]] = []
    chunk = max(1, _CHUNK // stage.base.size)
    for at in range(0, f.size, chunk):
        cost = f[at : at + chunk, None] + stage.base[None, :]
        for touch in stage.touches:
            cost += touch.cost[touch.group_of_class[keys[at : at + chunk, touch.slot]]]
        row, state = np.nonzero(cost < threshold)
        parts.append((row + at, state, cost[row, state]))
    rows, states, costs = zip(*parts, strict=True)
    return np.concatenate(rows), np.concatenate(states), np.concatenate(costs)


def _advanced(stage: Depth, keys: Ints) -> Ints:
    moved = keys.copy()
    for touch in stage.touches:
        if touch.next_class is not None:
            moved[:, touch.slot] = touch.next_class[keys[:, touch.slot]]
    return moved[:, stage.kept]


def _codes(keys: Ints, radix: list[int]) -> Ints:
    """One number per row, equal only for equal rows, small enough to be multiplied by a class count."""
    code = np.zeros(keys.shape[0], dtype=np.int64)
    span = 1
    for column, count in zip(keys.T, radix, strict=False):
        if span * count > 2**40:
            code = np.unique(code, return_inverse=True)[1].astype(np.int64)
            span = keys.shape[0]
        code = code * count + column
        span *= count
    return np.unique(code, return_inverse=True)[1].astype(np.int64)


def _undominated(code: Ints, cost: Floats, used: Floats, rounds: int) -> Ints:
    """Indices of the cheapest of each code; with resources, of all that no cheaper one beats in every resource
    (a few dominated ones may be left in)."""
    order = np.lexsort((cost, code))
    if not used.shape[1]:
        return order[np.flatnonzero(np.diff(code[order], prepend=-1))]
    kept: list[Ints] = []
    for _ in range(rounds):
        if not order.size:
            break
        new = np.diff(code[order], prepend=-1) != 0
        leader = order[np.flatnonzero(new)][np.cumsum(new) - 1]
        kept.append(order[new])
        order = order[~new & ~np.all(used[leader] <= used[order], axis=1)]
    return np.concatenate([*kept, order])


def _widest(best: Ints, cost: Floats, used: Floats, limits: Floats, width: int) -> tuple[Ints, Ints]:
    """The `width` nodes to keep and the others. With resources a quarter goes to those that use least."""
    best = best[np.argsort(cost[best], kind="stable")]
    if not limits.size:
        return best[:width], best[width:]
    head, tail = best[: width - width // 4], best[width - width // 4 :]
    pressure = np.max(used[tail] / np.maximum(limits, 1e-300), axis=1)
    tail = tail[np.argsort(pressure, kind="stable")]
    return np.concatenate([head, tail[: width // 4]]), tail[width // 4 :]
