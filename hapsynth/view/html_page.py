"""One page of HTML about a plan, or about two and how they differ, that needs no network and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from hapsynth._version import __version__
from hapsynth.running.base import Planned
from hapsynth.view.record import difference, plan_record

_DATA = "/*DATA*/"


def page(plans: Sequence[tuple[str, Planned]]) -> str:
    """The text of the page about one plan or two of one function, each with a name. ValueError for another number."""
    if len(plans) not in (1, 2):
        raise ValueError(f"{len(plans)} plans; a page is about one, or about two beside each other")
    data: dict[str, Any] = {
        "version": __version__,
        "plans": [plan_record(plan, name) for name, plan in plans],
        "difference": difference(plans[0][1], plans[1][1]) if len(plans) == 2 else [],
        "sameFunction": len({plan.traced.graph.fingerprint for _, plan in plans}) == 1,
        "sameAxes": len({len(plan.program.axes) for _, plan in plans}) == 1,
    }
    # So that no text of the user's ends the script.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = (resources.files("hapsynth.view") / "page.html").read_text(encoding="utf-8")
    return template.replace(_DATA, text)
