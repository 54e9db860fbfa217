"""The table of plans compiled for GPUs: its models, and a line of it from rows of cards."""

from typing import Any

import compile_targets
import jax
import pytest


@pytest.mark.parametrize("name", compile_targets.MODELS)
def test_models_are_shapes(name: str) -> None:
    fn, args, kwargs = compile_targets.built(name)
    assert callable(fn)
    leaves: list[Any] = jax.tree.leaves((args, kwargs))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)


def row(card: str, **values: Any) -> dict[str, Any]:
    return {
        "target": card,
        "fingerprint": "a",
        "asynchronous": 1,
        "collectives": 2,
        "hidden": 0.25,
        "exposed_s": 0.001,
        "hidden_of_time": 0.5,
        "products": 3.0,
        "kernels": 7.0,
        "computing_s": 0.002,
        "compile_s": 4.4,
        "peak_bytes": 9,
        "predicted_bytes": 10.0,
        "predicted": {"products": 3.0, "kernels": 8.0, "computing_s": 0.004},
        **values,
    }


def test_a_line_has_all_cards() -> None:
    cards = [row("V100-16GB"), row("H100-80GB", hidden=1.0, peak_bytes=5), {"target": "P4-8GB", "error": "no"}]
    cells = compile_targets.line("m", "switch", cards)
    assert len(cells) == len(compile_targets.HEADS)
    assert cells[:6] == ["m", "switch", "V100, H100, P4 refused", "yes", "1 of 2; 1 of 2", "25 %; 100 %"]
    assert cells[6:] == [
        *("50 %; 50 %", "1.000; 1.000", "1.000; 1.000", "0.90; 0.50", "7 (8); 7 (8)", "2.00 (4.00); 2.00 (4.00)"),
        "4; 4",
    ]
    cards[1]["fingerprint"] = "b"
    assert compile_targets.line("m", "switch", cards)[3] == "2 of 2"
    plain = {"target": "V100-16GB", "error": "refused"}
    assert compile_targets.line("m", "jit", [plain])[3:5] == ["-", "-"]
