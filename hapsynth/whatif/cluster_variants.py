"""`hapsynth search --advise`: what the step would take on other clusters, and what to leave out or to buy.

The function is planned again for every change: without each kind, with another host of it, with twice of it, and with
other networks. The work stays the same: the batch is the model file's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hapsynth._quantities import seconds
from hapsynth.cluster.cluster import Cluster, Link
from hapsynth.plan import Plan
from hapsynth.search.planning.planner import InfeasibleError

_NETWORKS = (0.5, 2.0, 10.0)
_ONE_AXIS = ", on one mesh axis"
"""Of what is left or comes of several axes and makes no mesh of them."""
_SAME = 1e-3
"""Step times that differ by less than this fraction are the same."""


@dataclass(frozen=True)
class Variant:
    """The best plan on one cluster. `dropped`: the kind that it lacks. `cost_s`: None where nothing fits, and why in
    `problem`. `left_out`: kinds that the plan does not use, `with_all_s`: seconds of the best program found that does.
    `modelled_s`: of the cluster as it is by modelled collectives, where those measured on it say nothing of this one:
    what this compares with, as no measured time does with a modelled one."""

    change: str
    cluster: Cluster
    cost_s: float | None
    gap: float | None = None
    dropped: str | None = None
    problem: str = ""
    left_out: frozenset[str] = frozenset()
    with_all_s: float | None = None
    modelled_s: float | None = None

    def comparable_s(self, base: Variant) -> float | None:
        """Seconds of a step, to be compared with those of the cluster as it is."""
        if self.cost_s is None or self.modelled_s is None or base.cost_s is None:
            return self.cost_s
        return self.cost_s * base.cost_s / self.modelled_s

    def price(self, base: Variant) -> float | None:
        """Of a step of those seconds, None where a device has no price."""
        prices, step_s = [device.price_per_hour for device in self.cluster.devices], self.comparable_s(base)
        known = [p for p in prices if p is not None]
        return None if step_s is None or len(known) < len(prices) else sum(known) * step_s / 3600


def changes(cluster: Cluster) -> Iterator[tuple[str, Cluster, str | None]]:
    """(what is changed, the cluster then, the kind that is dropped)"""
    count = Counter(device.name for device in cluster.devices)
    for kind, n in count.items():
        if len(count) > 1:
            less = cluster.without(kind)
            yield _named(f"without the {n} {kind}", cluster, less), less, kind
    for kind, n in count.items():
        placed = zip(cluster.devices, cluster.hosts, strict=True)
        per_host = max(Counter(host for device, host in placed if device.name == kind).values())
        for more in sorted({per_host, n}):
            yield *with_more(cluster, kind, more), None
    for factor in _NETWORKS if cluster.n > 1 else ():
        yield f"with {factor:g}x the network bandwidth", cluster.scaled_network(factor), None


def with_more(cluster: Cluster, kind: str, n: int) -> tuple[str, Cluster]:
    """`Cluster.plus`, in words and the cluster itself."""
    more = cluster.plus(kind, n)
    return _named(f"with {n} more {kind}{' in the same host' if cluster.is_closed else ''}", cluster, more), more


def _named(change: str, cluster: Cluster, changed: Cluster) -> str:
    return change + (_ONE_AXIS if len(changed.axes) < len(cluster.axes) else "")


def advise(plan: Plan, planned: Callable[[Cluster], Plan], tell: Callable[[str], None]) -> list[Variant]:
    """The plan's own cluster and every change of it, fastest first, what fits nowhere last.

    `planned`: the same function on another cluster, as the plan itself was asked for; raises InfeasibleError. Ctrl-C
    ends it with what is known by then.
    """
    left_out = frozenset(k.name for k in plan.cluster.kinds) - {plan.cluster.devices[d].name for d in plan.devices}
    with_all = plan.result.with_all_s
    base = Variant("as it is", plan.cluster, plan.cost, plan.gap, left_out=left_out, with_all_s=with_all)
    found, modelled_s = [base], None
    try:
        for change, cluster, dropped in changes(plan.cluster):
            # Without a kind, what was measured and is not kept is of links that are not left.
            modelled = dropped is None and bool(plan.cluster.collectives) and not cluster.collectives
            if modelled and modelled_s is None:
                tell("as it is, collectives by the model")
                as_it_is = planned(replace(plan.cluster, collectives={}))
                if as_it_is.result.interrupted:
                    break
                modelled_s = as_it_is.cost
            change = f"{change}, collectives by the model" if modelled else change
            tell(change)
            try:
                other = planned(cluster)
            except InfeasibleError as error:
                found.append(Variant(change, cluster, None, None, dropped, str(error)))
                continue
            if other.result.interrupted:
                break
            of_base = modelled_s if modelled else None
            found.append(Variant(change, cluster, other.cost, other.gap, dropped, modelled_s=of_base))
    except KeyboardInterrupt:
        pass
    return sorted(found, key=lambda v: (v.cost_s is None, v.comparable_s(base) or 0.0))


def sentences(variants: Sequence[Variant]) -> list[str]:
    """What follows: which kinds to leave out, and what is cheapest per step."""
    base = base_variant(variants)
    assert base.cost_s is not None
    said: list[str] = []
    for v in variants:
        if v.dropped is None or (cost_s := v.comparable_s(base)) is None:
            continue
        what = v.change.removeprefix("without ").removesuffix(_ONE_AXIS)
        with_all = base.with_all_s if v.dropped in base.left_out and base.with_all_s is not None else base.cost_s
        times = f"{seconds(cost_s)} a step without, {seconds(with_all)} with"
        if v.dropped in base.left_out:
            said.append(f"{what} would make this slower: the plan leaves them out ({times})")
        elif cost_s < base.cost_s * (1 - _SAME):
            said.append(f"{what} make this slower: leave them out ({times})")
        elif cost_s <= base.cost_s * (1 + _SAME):
            said.append(f"{what} don't help: they can be used for something else ({times})")
    priced = [(price, v) for v in variants if (price := v.price(base)) is not None]
    if priced and (now := base.price(base)):
        price, cheapest = min(priced, key=lambda pair: pair[0])
        if price < now * (1 - _SAME):
            said.append(f"a step is cheapest {cheapest.change}: {price:.3g} instead of {now:.3g}")
        else:
            said.append(f"a step is cheapest as it is: {now:.3g}")
    return said


def slower_link(cluster: Cluster) -> Link:
    return cluster.network if len(set(cluster.hosts)) > 1 else cluster.intra or cluster.network


def base_variant(variants: Sequence[Variant]) -> Variant:
    return next(v for v in variants if v.change == "as it is")
