"""The coverage list: nothing that JAX's public functions reach is unknown."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import linalg_cases
import pytest
import rule_cases
from jax import lax

from hapsynth.graph.trace import TraceError, trace
from hapsynth.instructions.rules import REGISTRY, factors_of
from hapsynth.report.tables import console
from tests.coverage import report
from tests.coverage.calls import CALLS, NO_OPS
from tests.coverage.reach import MODULES, Reached, public_functions, reached


@pytest.mark.few(0)
@pytest.mark.slow
def test_nothing_is_unknown():
    found = reached()
    unknown = {r.name: r.where for r in report.rows(found) if r.status == "unknown"}
    assert not unknown
    assert not found.untraced
    # The survey sees what is known to be there: by name, by call, by derivative and by transpose.
    assert {"tan", "fft", "cumsum", "select_and_gather_add", "scatter-add", "triangular_solve"} <= set(found.primitives)
    assert found.functions > 700


def test_a_survey_of_one_module():
    found = reached(["jax.numpy.fft"])
    assert found.functions == len(list(public_functions(["jax.numpy.fft"])))
    assert not found.untraced
    assert report.row("fft").status == "covered"


def test_what_cannot_be_traced_is_listed(monkeypatch, capsys):
    def refuses(*args):
        raise TypeError("not these arguments")

    monkeypatch.setattr(jax.numpy.fft, "refuses", refuses, raising=False)
    found = reached(["jax.numpy.fft"])
    assert found.untraced == {"jax.numpy.fft.refuses": "TypeError: not these arguments"}
    assert report.print_coverage(console(), Reached({}, 1, found.untraced)) == 1
    assert "jax.numpy.fft.refuses" in capsys.readouterr().out


def test_an_unknown_primitive_is_listed_and_counted(capsys):
    found = Reached({"frobnicate": "jax.lax.frobnicate_p", "add": "jax.lax.add_p"})
    assert report.print_coverage(console(), found) == 1
    assert "no sharding rule for this primitive" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("add", "covered", ""),
        ("cholesky", "needs replication", "batch dimensions are cut"),
        ("rng_bit_generator", "needs replication", "one stream"),
        ("while", "region", ""),
        ("jit", "covered", "replaced by what it calls"),
        ("psum", "covered", "vmap"),
        ("psum_invariant", "refused", "shard_map"),
        ("rng_uniform", "refused", "no two agree"),
    ],
)
def test_status(name, status, why):
    row = report.row(name)
    assert row.status == status
    assert why in row.why


def test_what_needs_replication_says_whether_batches_are_cut():
    """The list `BATCHED` agrees with the rules, on every case that has the primitive."""
    cut: dict[str, bool] = {}
    for case in rule_cases.CASES:
        for op in case.graph.ops:
            if op.name in REGISTRY and REGISTRY[op.name].replicated:
                cut[op.name] = cut.get(op.name, False) or bool(factors_of(op).shardable)
    assert cut == {name: name in report.BATCHED for name, entry in REGISTRY.items() if entry.replicated}
    assert linalg_cases.NEWER == () or jax.__version_info__ < (0, 11)


def test_functions_named_in_the_tables_are_functions():
    """A misspelt name would leave a function to the generic calls; those of other versions are few."""
    known = {name.removeprefix("jax.") for name, _ in public_functions(MODULES)}
    assert len([n for n in CALLS if n not in known]) < 10


REFUSED = {
    "rng_uniform": lambda x: x + lax.rng_uniform(0.0, 1.0, (4,)),
    "create_token": lambda x: (lax.create_token(x), x)[1],
    "get": lambda x: jax.new_ref(x)[...],
    "dce_sink": lambda x: (lax.dce_sink(x), x)[1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_trace_refuses_by_name(name):
    assert report.row(name).status == "refused"
    with pytest.raises(TraceError, match=name):
        trace(REFUSED[name], (jnp.ones(4),))


def test_every_function_without_a_call_has_a_reason():
    assert all(NO_OPS.values())
    assert not set(NO_OPS) & set(CALLS)
