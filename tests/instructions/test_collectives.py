"""The table of collectives: every entry moves values as it says, in every room, and several may do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from graphs import cluster
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from lowering_options import ALONE
from slow_devices import first_devices

import hapsynth
from hapsynth.cluster.cluster import COLLECTIVES, Cluster
from hapsynth.cluster.memory_budget import MemoryBudget
from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import trace
from hapsynth.instructions.collectives import STEPS, Collective, Hosts, axis_between, step_between, steps_between
from hapsynth.instructions.layout import Layout, O, P, Placement, R, S, format_layout
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Convert, Program, ProgramError
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.lower import Lowered, Staged, _interpreter
from hapsynth.lower._collective_order import Each, as_it_is
from hapsynth.lower._collectives import LOWERINGS, BlockLowering
from hapsynth.plan import Form
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.network import PRICES, ROUND, TWICE_ROUND, Price, PriceOfLevels, axis_links
from hapsynth.search.cost.program_cost import conversion_cost, largest_share, padded_bytes, shares_of
from hapsynth.search.memory.collective_buffers import collective_buffers
from hapsynth.search.memory.profile import MemoryProfile
from hapsynth.search.memory.xla_kernels import bundles

SHAPE = (24, 8)
PLACEMENTS = (R, S(0), S(1), S(0)._replace(way=1), O(1), P("sum"))
SHARES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "equal": lambda units, n: (units // n,) * n,
    "skewed": lambda units, n: (units - n + 1, *[1] * (n - 1)),
    "zeros": lambda units, n: (*[0] * (n - 2), units - 1, 1),
}


def test_every_collective_has_a_price_and_a_lowering() -> None:
    sent = {name for name, step in STEPS.items() if step.communicates}
    assert sent == set(LOWERINGS)
    assert {name for name, price in PRICES.items() if isinstance(price, PriceOfLevels)} == {
        name for name, step in STEPS.items() if step.over != "positions"
    }
    made_of = {n: {part for part, _ in STEPS[n].sends(*next(conversions(STEPS[n], 1)), 0)} for n in sent}
    assert set().union(*made_of.values()) == set(PRICES)
    assert {name for name, parts in made_of.items() if parts != {name}} == {n for n in sent if STEPS[n].balances}
    assert set(STEPS) - sent == set(_interpreter._LOCAL_STEPS)
    assert set(COLLECTIVES) <= set(PRICES), "curves are of collectives that have a price"
    assert all(isinstance(LOWERINGS[name], BlockLowering) for name in sent if STEPS[name].bundled)


def layouts(axes: int) -> Iterator[Layout]:
    """Of placements along an axis, beside every other one along a second, which cuts what it cuts too first."""
    if axes == 1:
        yield from ((p,) for p in PLACEMENTS)
        return
    for p, q in product((R, S(0), S(1)), PLACEMENTS):
        yield (p, q._replace(minor=1) if q.is_sharded and p.is_sharded and q.dim == p.dim else q)


def conversions(step: Collective, axes: int) -> Iterator[tuple[Layout, Layout]]:
    """All that it does along the last axis."""
    for source, target in product(layouts(axes), repeat=2):
        if axis_between(source, target) == axes - 1 and step in steps_between(source[-1], target[-1]):
            yield source, target


def path_to(layout: Layout) -> list[Layout]:
    """From an argument's layout, as partial sums are none."""
    whole = tuple(R if p.is_partial else p for p in layout)
    return [whole, layout] if whole != layout else [layout]


def program_of(
    step: Collective, pairs: Sequence[tuple[Layout, Layout]], lengths: tuple[int, ...]
) -> tuple[Graph, Program]:
    """For each pair an argument, which is no state, brought to a layout, by the step to another, and to one in which it
    can be left."""
    structs = (jax.ShapeDtypeStruct(SHAPE, np.float32),) * len(pairs)
    graph = replace(trace(lambda *xs: xs, structs).graph, carry=())
    axes = tuple(zip("ab", lengths, strict=False))
    hosts = tuple(link.hosts for link in axis_links(on_hosts(lengths, step), axes))
    to, by, fro = list[Convert](), list[Convert](), list[Convert]()
    for x, (source, target) in zip(graph.inputs, pairs, strict=True):
        for ways, made in ((path_to(source), to), ([source, target], by), (path_to(target)[::-1], fro)):
            for before, after in pairwise(ways):
                axis = axis_between(before, after)
                assert axis is not None
                made.append(Convert(x, axis, before, after))
    by = [convert.with_step(step) for convert in by]
    inputs = {x: path_to(source)[0] for x, (source, _) in zip(graph.inputs, pairs, strict=True)}
    outputs = tuple(path_to(target)[0] for _, target in pairs)
    return graph, Program(axes, inputs, (*to, *by, *fro), outputs, hosts)


def on_hosts(lengths: tuple[int, ...], step: Collective) -> Cluster:
    """Where the last axis goes over two hosts, whose devices take turns along it, for what goes over hosts; of unlike
    many where it may."""
    on_six = {"hosts": [0, 0, 1, 0, 1, 0], "equal hosts": [0, 1, 0, 0, 1, 0]}
    on_four = {"hosts": [0, 0, 1, 0], "equal hosts": [0, 1, 0, 1]}
    n, along = prod(lengths), {"positions": range(lengths[-1]), **(on_six if lengths[-1] == 6 else on_four)}
    hosts = [n * (d // lengths[-1]) + along[step.over][d % lengths[-1]] for d in range(n)]
    return replace(cluster([1.0] * n), hosts=tuple(hosts))


def along(step: Collective, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Of a mesh for a step: long enough for several devices in a host."""
    return lengths if step.over == "positions" else (*lengths[:-1], 4)


def sized(graph: Graph, program: Program, kind: str) -> Sizes:
    """What is reshared is cut equally once."""
    classes = Classes.build(graph, program)
    shares = [
        classes.owned.get(c.index)
        or SHARES["equal" if any(node[3] for node in c.members) else kind](c.units, classes.positions(c.index))
        for c in classes.all
    ]
    sizes = Sizes(graph, classes, tuple(shares))
    check(graph, program, sizes)
    return sizes


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("name", "lengths", "kind"),
    [*product((name for name, step in STEPS.items() if step.communicates), [(4,), (2, 2)], SHARES)],
)
def test_a_value_is_the_same_after_every_conversion(name: str, lengths: tuple[int, ...], kind: str) -> None:
    assert_the_same(name, along(STEPS[name], lengths), kind)


@pytest.mark.parametrize("kind", ["skewed", "zeros"])
@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if step.over != "positions"])
def test_hosts_of_four_and_two(name: str, kind: str) -> None:
    assert_the_same(name, (6,), kind)


def assert_the_same(name: str, lengths: tuple[int, ...], kind: str) -> None:
    """In both forms, with a price and with room for what is sent, each alone."""
    n = prod(lengths)
    mesh = Mesh(np.array(jax.devices()[:n]).reshape(lengths), tuple("ab"[: len(lengths)]))
    found = list(conversions(STEPS[name], len(lengths)))
    assert found, f"no two of the placements here are {name}'s"
    graph, program = program_of(STEPS[name], found, lengths)
    sizes = sized(graph, program, kind)
    assert Program.from_dict(program.to_dict()).instructions == program.instructions
    model = CostModel(graph, on_hosts(lengths, STEPS[name]), FactorTable(graph), program.axes)
    for step in program.instructions:
        assert isinstance(step, Convert)
        seconds, wire = conversion_cost(model, sizes, step)
        assert (seconds > 0, wire > 0) == (step.is_collective,) * 2 or step.collective.recuts
    _, buffers = collective_buffers(graph, program, [], ALONE.bundled_bytes, {})
    assert all(0 < b.nbytes <= n * 4 * prod(SHAPE) for b in buffers)
    xs = [i + np.arange(prod(SHAPE), dtype=np.float32).reshape(SHAPE) for i in range(len(found))]
    for form in (Lowered, Staged):
        lowered = form(graph, program, sizes, mesh, donate=False, options=ALONE)
        made = lowered([s.put(x, copy=True) for s, x in zip(lowered.inputs, xs, strict=True)])
        for (source, target), storage, x, y in zip(found, lowered.outputs, xs, made, strict=True):
            assert storage is not None
            message = f"{name}: {format_layout(source)} -> {format_layout(target)}"
            np.testing.assert_array_equal(storage.fetch(y), x, err_msg=message)


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("lengths", [(4,), (2, 2)])
@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if step.bundled and step.communicates])
def test_what_is_counted_is_what_is_sent(name: str, lengths: tuple[int, ...], kind: str) -> None:
    """The bytes of the arrays that a stage sends and gets, as both forms' memory counts them."""
    lengths = along(STEPS[name], lengths)
    mesh = Mesh(np.array(jax.devices()[: prod(lengths)]).reshape(lengths), tuple("ab"[: len(lengths)]))
    for source, target in conversions(STEPS[name], len(lengths)):
        graph, program = program_of(STEPS[name], [(source, target)], lengths)
        sizes = sized(graph, program, kind)
        (step,) = (i for i in program.instructions if isinstance(i, Convert) and i.source == source)
        staged = Staged(graph, program, sizes, mesh, donate=False)
        (wire,) = staged.sent((step,))
        nbytes = [4.0 * prod(x.shape) for x in (staged.wire(wire), staged.arrived(wire))]
        (wired,) = step.collective.wired(source, target, step.axis, lengths[-1])
        block = 4.0 * prod(SHAPE) * prod(largest_share(sizes, 0, *cut) for cut in wired.cuts)
        assert [wired.sent * block, wired.given * block] == [pytest.approx(x) for x in nbytes]
        (bundle,) = bundles(graph, program, [step], sizes, partial(padded_bytes, sizes), DEFAULT)
        assert bundle.sent == pytest.approx(nbytes[0]), f"{format_layout(source)} -> {format_layout(target)}"


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("lengths", [(4,), (2, 2)])
@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if step.in_rounds])
def test_what_rounds_send_is_counted(name: str, lengths: tuple[int, ...], kind: str) -> None:
    """As above, by both counts; and as many permutes as rounds in which something moves."""
    mesh = Mesh(np.array(jax.devices()[: prod(lengths)]).reshape(lengths), tuple("ab"[: len(lengths)]))
    where = cluster([1.0] * prod(lengths))
    for source, target in conversions(STEPS[name], len(lengths)):
        graph, program = program_of(STEPS[name], [(source, target)], lengths)
        sizes = sized(graph, program, kind)
        (step,) = (i for i in program.instructions if isinstance(i, Convert) and i.step == name)
        staged = Staged(graph, program, sizes, mesh, donate=False)
        (wire,) = staged.sent((step,))
        nbytes = [4.0 * prod(x.shape) for x in (staged.wire(wire), staged.arrived(wire))]
        (bundle,) = bundles(graph, program, [step], sizes, partial(padded_bytes, sizes), DEFAULT)
        assert [bundle.sent, bundle.given] == [pytest.approx(x) for x in nbytes]
        costs = CostModel(graph, where, FactorTable(graph), program.axes, MemoryBudget.of(where, exact=True))
        profile = MemoryProfile(program, sizes.classes, costs)
        counted = profile.bytes_of(sizes)[0, [k for k, b in enumerate(profile.buffers) if b.moved]]
        assert counted.tolist() == [pytest.approx(x) for x in set(nbytes)], "in place"
        moves = str(jax.make_jaxpr(partial(exchanged, mesh, sizes, step))(np.zeros(staged.wire(wire).shape)))
        latency = costs.sent(step.value, source, target, step.axis, shares_of(sizes, step.value), STEPS[name]).latency_s
        assert moves.count("ppermute") == round(latency / costs.links[step.axis].rounds[0])


def exchanged(mesh: Mesh, sizes: Sizes, step: Convert, x: Any) -> Any:
    """What one collective gives, inside its mesh."""
    axis = mesh.axis_names[step.axis]
    run = lambda x: LOWERINGS[step.step].exchange(sizes, axis, step, x, None, as_it_is)
    return jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(x)


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if step.balances])
def test_a_device_by_itself_gets_what_it_would_of_others(name: str, kind: str) -> None:
    """In shape, as `isolated_runs` times it."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
    for source, target in conversions(STEPS[name], 1):
        graph, program = program_of(STEPS[name], [(source, target)], (4,))
        sizes = sized(graph, program, kind)
        (step,) = (i for i in program.instructions if isinstance(i, Convert) and i.step == name)
        staged = Staged(graph, program, sizes, mesh, donate=False)
        (wire,) = staged.sent((step,))
        alone = jax.eval_shape(partial(LOWERINGS[name].alone, sizes, step), staged.wire(wire))
        assert alone.shape == staged.arrived(wire).shape


# ---- several that do the same


def around(
    x: jax.Array,
    axis: str,
    source: Placement,
    target: Placement,
    hosts: Hosts,
    gloo: LoweringOptions | None,
    each: Each,
) -> jax.Array:
    """Every device's block, passed on from neighbour to neighbour."""
    n, length = lax.axis_size(axis), x.shape[source.dim]
    made, part = lax.concatenate([x] * n, source.dim), x
    for away in range(n):
        at = (lax.axis_index(axis) - away) % n * length
        made = lax.dynamic_update_slice_in_dim(made, part, at, source.dim)
        part = each(lambda part: lax.ppermute(part, axis, [(i, (i + 1) % n) for i in range(n)]), part)
    return made


RING = Collective("ring_all_gather", STEPS["all_gather"].turns, joins=True)


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Price], None]]:
    """Enters another all-gather into the tables, at a price."""

    def enter(price: Price) -> None:
        monkeypatch.setitem(STEPS, RING.name, RING)
        monkeypatch.setitem(PRICES, RING.name, price)
        monkeypatch.setitem(LOWERINGS, RING.name, BlockLowering(around, in_parts=True))
        steps_between.cache_clear()

    yield enter
    monkeypatch.undo()
    steps_between.cache_clear()


def squares(x: Any) -> Any:
    return x @ x.T


X = np.arange(96 * 8, dtype=np.float32).reshape(96, 8) % 7


def planned(form: Form = "switch") -> hapsynth.Plan:
    where = cluster([3.0, 3.0, 1.0, 1.0], bandwidth=1e12, latency=1e-9)
    where = replace(where, devices=tuple(replace(d, overhead=1e-10) for d in where.devices))
    fixed = {"[0]": "S(0)"}
    return hapsynth.synthesize(squares, (X,), first_devices(4), cluster=where, fixed=fixed, leave_out=False, form=form)


CHEAP = Price(lambda link: 0.5 * (link.n - 1), (ROUND,))
DEAR = Price(lambda link: link.n - 1, (TWICE_ROUND,))


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_the_cheaper_of_two_that_do_the_same_is_planned(
    form: Form, priced: Callable[[Price], None], tmp_path: Any
) -> None:
    plain = planned(form)
    assert plain.program.collectives() == {"all_gather": 1}
    priced(DEAR)
    assert planned(form).program.instructions == plain.program.instructions
    priced(CHEAP)
    plan = planned(form)
    assert plan.program.collectives() == {"ring_all_gather": 1}
    assert plan.cost < plain.cost
    assert "ring_all_gather" in plan.program.text(plan.traced.graph)
    assert plan.check()
    np.testing.assert_array_equal(plan.unshard(plan(plan.shard(X))), X @ X.T)
    text = plan.lower().as_text()
    assert "all_gather" not in text.replace("ring_all_gather", "")
    assert "collective_permute" in text
    plan.save(tmp_path / "plan.json")
    again = hapsynth.load(tmp_path / "plan.json", squares, (X,), first_devices(4))
    assert again.program.instructions == plan.program.instructions


def test_a_step_of_another_name_is_none(priced: Callable[[Price], None]) -> None:
    plan = planned()
    (at,) = (n for n, i in enumerate(plan.program.instructions) if isinstance(i, Convert) and i.is_collective)
    data = plan.program.to_dict()
    data["instructions"][at]["step"] = RING.name
    with pytest.raises(ProgramError, match="ring_all_gather does not turn"):
        Program.from_dict(data)
    steps = list(plan.program.instructions)
    steps[at] = steps[at]._replace(by=RING.name)  # type: ignore[call-arg]
    with pytest.raises(ProgramError, match=r"instruction .*: ring_all_gather does not turn"):
        check(plan.traced.graph, replace(plan.program, instructions=tuple(steps)))
    priced(CHEAP)
    assert Program.from_dict(data).collectives() == {"ring_all_gather": 1}


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("lengths", [(4,), (2, 2)])
def test_another_is_tried_like_those_of_the_table(
    lengths: tuple[int, ...], kind: str, priced: Callable[[Price], None]
) -> None:
    priced(DEAR)
    assert step_between(S(0), R) is STEPS["all_gather"]
    assert_the_same(RING.name, lengths, kind)


def test_one_latency_for_each_message() -> None:
    graph = trace(squares, (X,)).graph
    model = CostModel(graph, cluster([1.0] * 4, latency=1e-3), FactorTable(graph))
    link = model.links[0]
    gather = STEPS["all_gather"]
    even = lambda *cut: 0.25
    sent = model.sent(graph.inputs[0], (S(0),), (R,), 0, even, gather)
    assert sent == pytest.approx((3 / 4 * X.nbytes, 4e-3, 3 / 4 * X.nbytes * link.beta, 0.0))
