"""Which arguments and results of several functions are one state, leaf by leaf."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hapsynth.graph.ir import Graph, Value
from hapsynth.graph.trace import Traced, TraceError, by_head, tail_of, under

RESULT = "return"
"""Before the path of a result, where the state of a function is said."""


class Leaf(NamedTuple):
    """An array of the state. `path`: among the arguments of the function that the state is named after."""

    path: str
    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, eq=False)
class Role:
    """What a function has to do with the state. `inputs`, `outputs`: leaf -> position among the graph's."""

    traced: Traced
    inputs: Mapping[int, int]
    outputs: Mapping[int, int]

    @property
    def frequency(self) -> float:
        """How often it is likely called: 1 for a step, which returns the state that it took; 0.1 for what only reads
        the state; 0 for what makes it."""
        if self.outputs.keys() - self.inputs.keys():
            return 0.0
        return 1.0 if self.outputs else 0.1


@dataclass(frozen=True, eq=False)
class SharedState:
    """The state, and every function's role. `named_after`: the function whose carried arguments it is."""

    leaves: tuple[Leaf, ...]
    roles: Mapping[str, Role]
    named_after: str


class _Group(NamedTuple):
    """An argument, or a result, or all results: what follows in the paths of its leaves -> their positions."""

    name: str
    positions: Mapping[str, int]


def shared_state(
    functions: Mapping[str, Traced], said: Mapping[str, Mapping[str, str]], lead: str | None = None
) -> SharedState:
    """The state of `lead`, found in the other functions by its tree, shapes and dtypes; by default of the one that
    carries most of those whose state is found in all others.

    `said`: function -> path of an argument, or of a result with `return` before it, -> path of the state that it is, of
    functions in which it is not looked for. Raises TraceError for a function in which there is none of it.
    """
    errors: list[TraceError] = []
    for name in _leads(functions, said) if lead is None else [lead]:
        try:
            return _state_of(name, functions, said)
        except TraceError as error:
            errors.append(error)
    raise errors[0]


def _leads(functions: Mapping[str, Traced], said: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The functions after which the state may be named, the likeliest first: a batch that is like a result by chance
    has fewer leaves than a state, or is smaller. One leaf, which others have too, is none where another carries more.
    """
    carrying = {name: _carried(traced.graph) for name, traced in functions.items() if traced.graph.carry}
    if not carrying:
        raise TraceError(
            f"none of the functions {', '.join(functions)} returns an argument's successor, so there is no state to "
            "share: say which arguments are carried, e.g. carry={'train': [('[0]', '[0]')]}"
        )
    leads = sorted(carrying, key=lambda name: (name not in said, *carrying[name]), reverse=True)
    if leads[0] in said:
        raise TraceError(f"state names {leads[0]!r}, after which the state is named: give its carry instead")
    return [leads[0], *(name for name in leads[1:] if name not in said and carrying[name][0] > 1)]


def _carried(graph: Graph) -> tuple[int, int]:
    """The number of leaves that a function carries, and their bytes."""
    values = [graph.values[graph.inputs[source]] for source, _ in graph.carry]
    return len(values), sum(v.nbytes for v in values)


def _state_of(lead: str, functions: Mapping[str, Traced], said: Mapping[str, Mapping[str, str]]) -> SharedState:
    graph = functions[lead].graph
    ins = [source for source, _ in graph.carry]
    leaves = tuple(Leaf(functions[lead].in_paths[i], *_described(graph.values[graph.inputs[i]])) for i in ins)
    pairs = range(len(leaves))
    roles = {lead: Role(functions[lead], dict(zip(pairs, ins)), {n: graph.carry[n][1] for n in pairs})}
    for name, traced in functions.items():
        if name != lead:
            found = _said(name, traced, leaves, said[name]) if name in said else _found(name, lead, traced, leaves)
            roles[name] = _role(traced, *found)
    return SharedState(leaves, _agreeing({name: roles[name] for name in functions}), lead)


def _agreeing(roles: Mapping[str, Role]) -> Mapping[str, Role]:
    """The roles with graphs that know what of the state other functions make of floats and leave strongly typed, and by
    what they select."""
    while True:
        graphs = {name: role.traced.graph for name, role in roles.items()}
        inexact = {
            n
            for name, r in roles.items()
            for n, o in r.outputs.items()
            if graphs[name].outputs[o] in graphs[name].inexact
        }
        selecting = {n for name, r in roles.items() for n, i in r.inputs.items() if i in graphs[name].selecting_inputs}
        strong = {
            n
            for r in roles.values()
            for n in r.inputs.keys() & r.outputs.keys()
            if isinstance(v := r.traced.graph.output(r.outputs[n]), Value) and not v.weak_type
        }
        told = {name: _told(role, inexact, selecting, strong) for name, role in roles.items()}
        if all(told[name] is role for name, role in roles.items()):
            return roles
        roles = told


def _told(role: Role, inexact: Collection[int], selecting: Collection[int], strong: Collection[int]) -> Role:
    """`inexact`, `selecting`, `strong`: leaves that some function makes of floats, by which one selects elements, and
    that one takes and leaves strongly typed."""
    graph = role.traced.graph
    ins = tuple(i for leaf, i in role.inputs.items() if leaf in inexact and graph.inputs[i] not in graph.inexact)
    outs = tuple(o for leaf, o in role.outputs.items() if leaf in selecting)
    kept = ((leaf, i) for leaf, i in role.inputs.items() if leaf not in role.outputs)
    strongly = tuple(i for leaf, i in kept if leaf in strong and graph.values[graph.inputs[i]].weak_type)
    if not ins and outs == graph.selecting_outputs and strongly == graph.strong_inputs:
        return role
    ins = (*graph.inexact_inputs, *ins)
    graph = replace(graph, inexact_inputs=ins, selecting_outputs=outs, strong_inputs=strongly)
    return replace(role, traced=replace(role.traced, graph=graph))


def _role(traced: Traced, inputs: Mapping[int, int], outputs: Mapping[int, int]) -> Role:
    """The function with the state carried where it returns what it takes, kept where it does not."""
    ins, outs = set(inputs.values()), set(outputs.values())
    carry = [(inputs[leaf], outputs[leaf]) for leaf in inputs if leaf in outputs]
    others = [(i, o) for i, o in traced.graph.carry if i not in ins and o not in outs]
    kept = tuple(position for leaf, position in inputs.items() if leaf not in outputs)
    graph = replace(traced.graph, carry=(*carry, *others), kept=kept)
    return Role(replace(traced, graph=graph), inputs, outputs)


def _described(value: Any) -> tuple[tuple[int, ...], Any]:
    return value.shape, value.dtype


def _arguments(traced: Traced) -> Iterator[_Group]:
    for head, members in by_head(traced.in_paths).items():
        yield _Group(head, {tail_of(traced.in_paths[i]): i for i in members})


def _results(traced: Traced) -> Iterator[_Group]:
    yield _Group("", {path: i for i, path in enumerate(traced.out_paths)})
    for head, members in by_head(traced.out_paths).items():
        yield _Group(head, {tail_of(traced.out_paths[i]): i for i in members})


def _input(traced: Traced, position: int) -> tuple[tuple[int, ...], Any]:
    return _described(traced.graph.values[traced.graph.inputs[position]])


def _output(traced: Traced, position: int) -> tuple[tuple[int, ...], Any]:
    return _described(traced.graph.output(position))


def _parts(leaves: Sequence[Leaf]) -> list[dict[str, int]]:
    """The state's leaves by the arguments that they are in: what follows in their paths -> their numbers."""
    return [{tail_of(leaves[i].path): i for i in part} for part in by_head([leaf.path for leaf in leaves]).values()]


def _found(name: str, lead: str, traced: Traced, leaves: Sequence[Leaf]) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """Leaf -> position among inputs and among outputs, of the arguments and results that are like a part of the state;
    each part is the first like it that is not another."""
    sides = ((list(_arguments(traced)), _input), (list(_results(traced)), _output))
    found: tuple[dict[int, int], dict[int, int]] = {}, {}
    for part in _parts(leaves):
        for (groups, described), mine in zip(sides, found, strict=True):
            taken = set(mine.values())
            for group in groups:
                if group.positions.keys() != part.keys() or not taken.isdisjoint(group.positions.values()):
                    continue
                pairs = {leaf: group.positions[tail] for tail, leaf in part.items()}
                if all(described(traced, p) == leaves[leaf][1:] for leaf, p in pairs.items()):
                    mine.update(pairs)
                    break
        if len(part) > 1 and not any(leaf in mine for leaf in part.values() for mine in found):
            # One leaf alone may be like anything.
            _compare(name, lead, traced, leaves, part, alike=True)
    if not any(found):
        for part in _parts(leaves):
            _compare(name, lead, traced, leaves, part)
        raise TraceError(
            f"{name!r} neither takes nor returns the state of {lead!r}, which begins with {leaves[0].path} of "
            f"{leaves[0]}: {_way_out(name, lead)}"
        )
    return found


def _way_out(name: str, lead: str) -> str:
    return (
        f"give it that state, or say what it has of it, e.g. state={{{name!r}: {{'[0]': '[0]'}}}}, or what the state "
        f"is, e.g. carry={{{lead!r}: [('[0]', '[0]')]}}, or carry={{{lead!r}: []}} where it is another's"
    )


def _compare(
    name: str, lead: str, traced: Traced, leaves: Sequence[Leaf], part: Mapping[str, int], *, alike: bool = False
) -> None:
    """TraceError for the first leaf in which the argument or result that is nearest to a part of the state differs, if
    one has a leaf in common; `alike`: if one has the same tree."""
    nearest: tuple[int, _Group, Any, str] | None = None
    for groups, described, does in ((_arguments(traced), _input, "takes"), (_results(traced), _output, "returns")):
        for group in groups:
            common = len(group.positions.keys() & part.keys())
            if alike and group.positions.keys() != part.keys():
                continue
            if common and (nearest is None or common > nearest[0]):
                nearest = common, group, described, does
    if nearest is None:
        return
    _, group, described, does = nearest
    for tail in (*part, *(t for t in group.positions if t not in part)):
        there = str(leaves[part[tail]]) if tail in part else "missing"
        here = str(Leaf("", *described(traced, group.positions[tail]))) if tail in group.positions else "missing"
        if here != there:
            raise TraceError(
                f"the state that {name!r} {does} at {group.name or 'its top'} is not that of {lead!r}: the first leaf "
                f"that differs is {tail or group.name}, {there} in {lead!r} and {here} in {name!r}; "
                + _way_out(name, lead)
            )


def _said(
    name: str, traced: Traced, leaves: Sequence[Leaf], said: Mapping[str, str]
) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """As `_found`, as the user says."""
    number = {leaf.path: i for i, leaf in enumerate(leaves)}
    found: tuple[dict[int, int], dict[int, int]] = {}, {}
    for path, state_path in said.items():
        of_result = path.startswith(RESULT)
        prefix = path[len(RESULT) :] if of_result else path
        paths, described = (traced.out_paths, _output) if of_result else (traced.in_paths, _input)
        below = under(prefix, paths)
        if not below:
            known = ", ".join([*traced.in_paths, *(RESULT + p for p in traced.out_paths)])
            raise TraceError(f"state names {path!r} of {name!r}, which has {known}")
        for rest, position in below.items():
            full, of = paths[position], state_path + rest
            if of not in number:
                raise TraceError(f"state has {path!r} of {name!r} be {state_path!r}, but the state has no {of!r}")
            leaf, here = leaves[number[of]], Leaf(full, *described(traced, position))
            if here[1:] != leaf[1:]:
                raise TraceError(f"state has {full} of {name!r} be {of}, but that is {leaf}, and this is {here}")
            if number[of] in found[of_result]:
                raise TraceError(f"state has two {'results' if of_result else 'arguments'} of {name!r} be {of}")
            found[of_result][number[of]] = position
    return found
