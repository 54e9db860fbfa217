"""Every triple of every rule, tried on simulated devices against the plain op."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import jax
import pytest
from rule_cases import CASES, Case, primitives

from hapsynth.instructions import simulate
from hapsynth.instructions.rules import REGISTRY, factors_of

TRIED: Counter[str] = Counter()


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Thousands of tiny ops are compiled and run once: optimising them would take most of the time."""
    old = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", old)


def try_op(op, operands, f) -> int:
    count = 0
    expected = simulate.plain(op, operands)
    for t, triple in enumerate(f.triples):
        patterns = simulate.share_patterns(f.sizes[triple.factor]) if triple.factor is not None else ((1, 1, 1), (1,))
        for shares in patterns:
            simulate.check_triple(op, f, triple, shares, operands, expected=expected, seed=t)
            count += 1
    return count


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_triple_is_sound(case: Case):
    for op, operands in case.ops():
        if op.name in REGISTRY:
            TRIED[op.name] += try_op(op, operands, factors_of(op))


def test_every_registered_primitive_has_a_case():
    missing = sorted(set(REGISTRY) - set(primitives()))
    assert not missing, f"add cases for {missing} to tests/rule_cases.py"
