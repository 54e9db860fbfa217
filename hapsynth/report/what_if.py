"""What-if questions as a person and as a program reads the answers: other clusters, remedies for memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from hapsynth._quantities import finite, nbytes, plural, seconds
from hapsynth.report.tables import Table, heading
from hapsynth.whatif.cluster_variants import Variant, base_variant, sentences, slower_link
from hapsynth.whatif.remedies import Remedy


def advice_record(variants: Sequence[Variant]) -> dict[str, Any]:
    """The field "advice" of `search --advise --json`. `speedup`: over the cluster as it is, by the same model.
    `cost_s`: at that speedup; `modelled_s`: as planned, where collectives are modelled and those as it is measured."""
    base = base_variant(variants)
    return {
        "clusters": [
            {
                "change": v.change,
                "devices": dict(Counter(device.name for device in v.cluster.devices)),
                "network_bytes_per_s": slower_link(v.cluster).bandwidth,
                "cost_s": None if (step_s := v.comparable_s(base)) is None else finite(step_s),
                "modelled_s": None if v.cost_s is None or v.modelled_s is None else finite(v.cost_s),
                "gap": v.gap,
                "speedup": _speedup(v, base),
                "price_per_step": v.price(base),
                **({"message": v.problem} if v.problem else {}),
            }
            for v in variants
        ],
        "sentences": sentences(variants),
    }


def print_advice(out: Console, variants: Sequence[Variant]) -> None:
    """The clusters as a table, fastest first, and the conclusion in words."""
    base = base_variant(variants)
    out.print(heading("Other clusters, the same work"))
    prices = [v.price(base) for v in variants]
    priced = any(price is not None for price in prices)
    rows: list[list[str]] = []
    for v, price in zip(variants, prices, strict=True):
        time = "nothing fits" if (step_s := v.comparable_s(base)) is None else seconds(step_s)
        times = _speedup(v, base)
        speedup = "-" if times is None else f"{times:.2f}x"
        cell = [] if not priced else ["-" if price is None else f"{price:.3g}"]
        rows.append([v.change, plural(v.cluster.n, "device"), time, speedup, *cell])
    out.print(Table(["cluster", "devices", "step time", "speedup", *(["price of a step"] if priced else [])], rows))
    for sentence in sentences(variants):
        out.print(sentence)


def _speedup(variant: Variant, base: Variant) -> float | None:
    own = variant.comparable_s(base)
    return base.cost_s / own if base.cost_s and own else None


def remedies_record(remedies: Sequence[Remedy]) -> list[dict[str, Any]]:
    """The field "remedies" of `search --advise --json` where nothing fits."""
    return [
        {
            "change": r.change,
            "devices": r.devices,
            "fits": r.cost_s is not None,
            "cost_s": None if r.cost_s is None else finite(r.cost_s),
            "memory_bytes": r.memory_bytes,
            **({"message": r.problem} if r.problem else {}),
        }
        for r in remedies
    ]


def print_remedies(out: Console, remedies: Sequence[Remedy]) -> None:
    """The changes that would make it fit, as a table."""
    out.print(heading("Nothing fits; what would"))
    rows: list[list[str]] = []
    for r in remedies:
        time = "nothing fits" if r.cost_s is None else seconds(r.cost_s)
        memory = "-" if r.memory_bytes is None else f"{'' if r.cost_s else 'needs '}{nbytes(r.memory_bytes)}"
        rows.append([r.change, plural(r.devices, "device"), time, memory])
    out.print(Table(["change", "devices", "step time", "memory"], rows))
