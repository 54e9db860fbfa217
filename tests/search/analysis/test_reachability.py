"""Paths between ops, against a depth-first search."""

from __future__ import annotations

import control_cases
import graphs
import numpy as np
import pytest

from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import trace
from hapsynth.search.analysis.reachability import Reachability


def found_by_search(graph: Graph, op: int) -> set[int]:
    """An op and all that take what it makes, or what these make."""
    seen, waiting = {op}, [op]
    while waiting:
        results = set(graph.ops[waiting.pop()].results)
        for user in graph.ops:
            if user.index not in seen and results & {v for _, v in user.value_operands}:
                seen.add(user.index)
                waiting.append(user.index)
    return seen


def assert_reached(graph: Graph) -> None:
    reach, count = Reachability(graph), len(graph.ops)
    after = np.zeros((count, count), bool)
    for op in range(count):
        after[op, sorted(found_by_search(graph, op))] = True
    for op in range(count):
        assert reach.descendants(op).tolist() == after[op].tolist()
        assert reach.ancestors(op).tolist() == after[:, op].tolist()


@pytest.mark.parametrize("seed", range(12))
def test_random_functions(seed: int) -> None:
    # 8, 16 and 17 ops lie around a byte's end.
    assert_reached(graphs.random_graph(seed, [4, 8, 15, 16, 17, 30][seed % 6]).graph)


@pytest.mark.parametrize("name", ["scanned layers", "nested", "cond", "swapped"])
def test_loops_and_branches(name: str) -> None:
    fn, args = control_cases.CASES[name]
    assert_reached(trace(fn, args).graph)


def test_without_ops() -> None:
    assert Reachability(trace(lambda x: x, (np.ones(3),)).graph).makers == []
