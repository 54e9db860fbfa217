"""The algorithms by which collectives run over gloo, the network of CPUs of several processes, and how many exchanges
each takes.

By its size a collective is lowered to one of gloo's own or to several: `lower/_gloo.py` asks here for the algorithm. An
exchange is what all of a group have to end before the next begins: so often a process's thread may wait for a core,
which a schedule counts (`search/scheduling/tasks.py`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from hapsynth.instructions.collectives import Hosts, are_equal, over_parts, tree_rounds
from hapsynth.instructions.staging.options import LoweringOptions


class Algorithm(NamedTuple):
    """Of one collective. `name`: one of gloo's own, an all-gather of all in place of a sum, all to all at once, the sum
    of what two devices have for one another, or a message to one device at a time, in rounds. `exchanges`: that wait
    for one another."""

    name: Literal["gloo's", "gather", "at once", "swap", "rounds"]
    exchanges: int


def all_reduce(nbytes: float, n: int, options: LoweringOptions, *, one_axis: bool = True) -> Algorithm:
    """Of so many bytes on each of `n` devices. `one_axis`: whether they are along a single one: JAX has no all-to-all
    along several."""
    if nbytes * n <= options.gloo_gathered_bytes:
        return Algorithm("gather", all_gather(nbytes, n, options, one_axis=one_axis).exchanges)
    if _go_at_once(nbytes / n, n, options, one_axis=one_axis):
        return Algorithm("at once", 2)
    return Algorithm("gloo's", ring_all_reduce(n))


def ring_all_reduce(n: int) -> int:
    """The exchanges of gloo's own all-reduce that wait for one another: of its 2 (n - 1) steps, which run two at a
    time, the first, and then half."""
    return n


def reduce_scatter(nbytes: float, n: int, options: LoweringOptions) -> Algorithm:
    """Of so many bytes on each device, before."""
    if nbytes <= options.gloo_at_once_bytes * n:
        return Algorithm("at once", all_to_all(nbytes, n, options).exchanges)
    return Algorithm("rounds", (n - 1) * _of_message(nbytes / n, n, 1, options))


def all_gather(nbytes: float, n: int, options: LoweringOptions, *, one_axis: bool = True) -> Algorithm:
    """Of so many bytes on each device, before."""
    if _go_at_once(nbytes, n, options, one_axis=one_axis):
        return Algorithm("at once", 1)
    if n == 2 and swaps(nbytes, n, 1, options):
        return Algorithm("swap", _of_message(nbytes, n, 1, options))
    return Algorithm("gloo's", n - 1)


def all_to_all(nbytes: float, n: int, options: LoweringOptions) -> Algorithm:
    """Of so many bytes on each device."""
    if nbytes <= options.gloo_at_once_bytes * n:
        return Algorithm("at once", 1)
    return Algorithm("rounds", sum(_of_message(nbytes / n, n, away, options) for away in range(1, n)))


def swaps(nbytes: float, n: int, away: int, options: LoweringOptions) -> bool:
    """Whether two devices swap blocks by their sum, where each sends so many bytes to the one that is `away` places
    further on of `n`."""
    return 2 * away % n == 0 and nbytes > options.gloo_at_once_bytes


def _of_message(nbytes: float, n: int, away: int, options: LoweringOptions) -> int:
    """The exchanges of a message of each device, as `swaps` has it."""
    return ring_all_reduce(2) if swaps(nbytes, n, away, options) else 1


def exchanges(step: str, nbytes: float, n: int, hosts: Hosts, options: LoweringOptions) -> int:
    """Of a collective of `instructions.collectives.STEPS` that sends blocks, of so many bytes on each of `n` devices
    before. `hosts`: those along its axis."""
    if step in ("reduce", "broadcast"):
        return tree_rounds(n)
    if step.startswith("hierarchical_"):
        return _over_hosts(step, nbytes, hosts, options)
    return _FLAT[step](nbytes, n, options).exchanges


def _over_hosts(step: str, nbytes: float, hosts: Hosts, options: LoweringOptions) -> int:
    """As `lower/_hierarchical.py` has them."""
    if step == "hierarchical_all_reduce" and not are_equal(hosts):
        # Groups that are unlike are gloo's own: to the first of each host, between these, and back.
        return 2 * ring_all_reduce(max(map(len, hosts))) + ring_all_reduce(len(hosts))
    parts = over_parts(hosts, "equal hosts")
    inside, between = len(parts[0]), len(parts)
    match step:
        case "hierarchical_all_reduce":
            part = nbytes / inside
            algorithms = (
                reduce_scatter(nbytes, inside, options),
                all_reduce(part, between, options),
                all_gather(part, inside, options),
            )
        case "hierarchical_reduce_scatter":
            algorithms = reduce_scatter(nbytes, inside, options), reduce_scatter(nbytes / inside, between, options)
        case _:
            algorithms = all_gather(nbytes, between, options), all_gather(nbytes * between, inside, options)
    return sum(algorithm.exchanges for algorithm in algorithms)


def _go_at_once(nbytes: float, n: int, options: LoweringOptions, *, one_axis: bool) -> bool:
    """Whether blocks of so many bytes go to all of `n` devices at once."""
    return n > 2 and nbytes <= options.gloo_at_once_bytes and one_axis


_FLAT = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
}
