"""`hapsynth search --advise` where nothing fits: what would make it fit.

Tried are more memory on the devices that have too little, more devices of each kind, and a smaller batch, each as
little as does; all are planned for in earnest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from hapsynth.cluster import _units
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import trace
from hapsynth.plan import Plan
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.whatif.cluster_variants import with_more

_MOST = 8
"""Times as many devices of a kind as there are, at most."""
_HARDLY = 0.9
"""What less of is hardly less: the next step won't fit either."""
_KIB = 1 << 10


@dataclass(frozen=True)
class Remedy:
    """`change`: in words. `cost_s`: step time, None where nothing fits even so, and why in `problem`. `memory_bytes`:
    largest peak of the plan or, where nothing fits, what the smallest program found `needs` (`InfeasibleError`)."""

    change: str
    devices: int
    cost_s: float | None
    memory_bytes: float | None
    problem: str = ""

    def hardly_helps(self, before: float | None) -> bool:
        """Whether nothing fits and the smallest program is about as large as one that held `before` bytes."""
        if before is None or self.memory_bytes is None:
            return False
        return self.cost_s is None and self.memory_bytes > _HARDLY * before


@dataclass(frozen=True)
class Shortage:
    """What did not fit.

    `plan`: the plan of other arguments, on another cluster, within another limit of bytes per device (None: what the
    devices have), in which all devices take part; raises InfeasibleError. `needs`: as of that.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    cluster: Cluster
    memory_limit: float | None
    needs: float | None
    plan: Callable[[tuple[Any, ...], Mapping[str, Any], Cluster, float | None], Plan]

    def tried(
        self,
        change: str,
        *,
        cluster: Cluster | None = None,
        limit: float | None = None,
        given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None,
    ) -> Remedy:
        """The plan with some of it changed."""
        cluster = cluster or self.cluster
        try:
            plan = self.plan(*(given or (self.args, self.kwargs)), cluster, limit or self.memory_limit)
        except InfeasibleError as error:
            return Remedy(change, cluster.n, None, error.needs, str(error))
        if plan.result.interrupted:
            raise KeyboardInterrupt
        return Remedy(change, cluster.n, plan.cost, max(plan.memory))


def remedies(lacking: Shortage, tell: Callable[[str], None]) -> list[Remedy]:
    """What fits, fastest first, then what does not either. `tell` is called with what is being tried; Ctrl-C ends it
    with what is known by then."""
    found: list[Remedy] = []
    try:
        for remedy in _tried(lacking, tell):
            found.append(remedy)
    except KeyboardInterrupt:
        pass
    return sorted(found, key=lambda r: (r.cost_s is None, r.cost_s or 0.0))


def _tried(lacking: Shortage, tell: Callable[[str], None]) -> Iterator[Remedy]:
    if lacking.needs is not None:
        tell("more memory")
        yield _more_memory(lacking, lacking.needs)
    for kind in lacking.cluster.kinds:
        yield _more_devices(lacking, kind.name, tell)
    yield from _smaller_batch(lacking, tell)


def _more_memory(lacking: Shortage, needs: float) -> Remedy:
    """On the devices that have less than the smallest program found needs."""
    enough = -(-int(needs + 1) // _KIB) * _KIB
    amount = _units.format(float(enough), _units.MEMORY)
    limit = None if lacking.memory_limit is None or lacking.memory_limit >= enough else float(enough)
    cluster = lacking.cluster
    count = Counter(k.name for k in cluster.devices if k.memory < enough)
    larger = tuple(replace(k, memory=max(k.memory, enough)) for k in cluster.devices)
    what = ", ".join(f"the {n} {name}" for name, n in count.items())
    if limit is not None:
        change = f"with a memory limit of {amount}" + (f", and as much on each of {what}" if what else "")
    else:
        change = f"with {amount} on each of {what}"
    return lacking.tried(change, cluster=replace(cluster, devices=larger), limit=limit)


def _more_devices(lacking: Shortage, kind: str, tell: Callable[[str], None]) -> Remedy:
    """The fewest more of a kind that do, a host's at a time: doubled until they do, then halved in between."""
    here = [
        host for device, host in zip(lacking.cluster.devices, lacking.cluster.hosts, strict=True) if device.name == kind
    ]
    per_host = max(Counter(here).values())

    def attempt(hosts: int) -> Remedy:
        change, cluster = with_more(lacking.cluster, kind, hosts * per_host)
        tell(change)
        return lacking.tried(change, cluster=cluster)

    there = max(len(here) // per_host, 1)
    short, hosts, needs = 0, there, lacking.needs
    best = attempt(hosts)
    while best.cost_s is None and hosts + there < _MOST * there and not best.hardly_helps(needs):
        short, hosts, needs = hosts, 2 * hosts + there, best.memory_bytes
        best = attempt(hosts)
    while best.cost_s is not None and hosts - short > 1:
        middle = (short + hosts) // 2
        found = attempt(middle)
        if found.cost_s is None:
            short = middle
        else:
            hosts, best = middle, found
    return best


def _smaller_batch(lacking: Shortage, tell: Callable[[str], None]) -> Iterator[Remedy]:
    """The batch halved until it does. What the batch is nobody says: a leading size of arguments that are new at every
    step, half of which the function takes too."""
    leaves, tree = jax.tree_util.tree_flatten((lacking.args, dict(lacking.kwargs)))
    traced = trace(lacking.fn, lacking.args, dict(lacking.kwargs))
    carried = {source for source, _ in traced.graph.carry}
    fed = [
        leaf for i, leaf in enumerate(traced.array_leaves) if i not in carried and getattr(leaves[leaf], "shape", ())
    ]
    sizes: Counter[int] = Counter()
    for leaf, value in zip(traced.array_leaves, traced.graph.inputs, strict=True):
        if leaf in fed:
            sizes[leaves[leaf].shape[0]] += traced.graph.values[value].nbytes

    def resized(size: int, new: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        change = lambda x: jax.ShapeDtypeStruct((new, *x.shape[1:]), x.dtype)
        mine = [change(x) if i in fed and x.shape[0] == size else x for i, x in enumerate(leaves)]
        return jax.tree_util.tree_unflatten(tree, mine)

    for size, _ in sizes.most_common():
        if size % 2 or not _traces(lacking.fn, *resized(size, size // 2)):
            continue
        new, needs = size // 2, lacking.needs

        def attempt(new: int, size: int = size) -> Remedy:
            change = f"with a batch of {new} instead of {size}"
            tell(change)
            return lacking.tried(change, given=resized(size, new))

        remedy = attempt(new)
        while remedy.cost_s is None and new % 2 == 0 and not remedy.hardly_helps(needs):
            new, needs = new // 2, remedy.memory_bytes
            remedy = attempt(new)
        yield remedy
        return


def _traces(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        trace(fn, args, kwargs)
    except Exception:
        # Whatever the function raises: it is not made for these shapes.
        return False
    return True
