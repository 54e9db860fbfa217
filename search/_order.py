"""The order in which the search assigns variables: few of them at a time have unassigned neighbours.

The search's nodes are told apart by the states of those frontier variables only, so the frontier's size is what
an exhaustive search costs. Deterministic: ties go to the lower number.
"""

import heapq
import math

from hapsynth.search._reduce import Network

_SCALE = 2**20  # weights are integers: sums that no order of summation changes


def search_order(network: Network) -> list[int]:
    """The active variables, in the best of a few orders by the sum of frontier sizes."""
    active = network.active()
    weight = {i: round(_SCALE * math.log(network.count(i))) for i in active}
    near = {i: sorted(network.links[i]) for i in active}
    orders = [active, _greedy(active, near, weight), _greedy(active[::-1], near, weight)]
    return min(orders, key=lambda order: _log_work(order, near, weight))


def _greedy(active: list[int], near: dict[int, list[int]], weight: dict[int, int]) -> list[int]:
    """Next the neighbour of the frontier that leaves the smallest frontier; a new start has the fewest links."""
    place = {i: k for k, i in enumerate(active)}
    left = {i: len(near[i]) for i in active}
    starts = sorted(active, key=lambda i: (len(near[i]), place[i]), reverse=True)
    order: list[int] = []
    done: set[int] = set()
    # (growth of the frontier, place, variable); what is out of date stays in until it comes up.
    border: list[tuple[int, int, int]] = []

    def growth(i: int) -> int:
        closed = sum(weight[j] for j in near[i] if j in done and left[j] == 1)
        return (weight[i] if left[i] else 0) - closed

    while len(order) < len(active):
        if not border:
            while starts[-1] in done:
                starts.pop()
            heapq.heappush(border, (growth(starts[-1]), place[starts[-1]], starts[-1]))
        grown, _, i = heapq.heappop(border)
        if i in done or grown != growth(i):
            continue
        done.add(i)
        order.append(i)
        changed: dict[int, None] = {}
        for j in near[i]:
            left[j] -= 1
            if j not in done:
                changed[j] = None
        for j in (i, *near[i]):
            if j in done and left[j] == 1:
                changed.update((k, None) for k in near[j] if k not in done)
        for j in changed:
            heapq.heappush(border, (growth(j), place[j], j))
    return order


def _log_work(order: list[int], near: dict[int, list[int]], weight: dict[int, int]) -> float:
    """log of sum over depths of the product of the frontier's state counts, the new variable's included."""
    left = {i: len(near[i]) for i in order}
    done: set[int] = set()
    size, sizes = 0, list[int]()
    for i in order:
        size += weight[i]
        sizes.append(size)
        done.add(i)
        for j in near[i]:
            left[j] -= 1
            if j in done and not left[j]:
                size -= weight[j]
        if not left[i]:
            size -= weight[i]
    top = max(sizes, default=0)
    return top / _SCALE + math.log(math.fsum(math.exp((s - top) / _SCALE) for s in sizes) or 1.0)
