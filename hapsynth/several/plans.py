"""`synthesize_several`: from several functions with one state to a plan of each."""

from __future__ import annotations

import difflib
import math
import numbers
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from hapsynth._options import (
    Ratios,
    fixed_ratios_of,
    hinting,
    layouts_of,
    left_for_planning,
    planning_options,
    tell_without_overlap,
    traced_as_asked,
)
from hapsynth._warn import warn_user
from hapsynth.adapting.resize import best_sizes, resized
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import Traced, check_dict
from hapsynth.graph.trip_counts import Expectation
from hapsynth.instructions.program.program import ProgramError
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.jobs.one_search import PLANNED_ONCE, searched_once
from hapsynth.jobs.preflight import check_mesh
from hapsynth.plan import Plan
from hapsynth.running.form import Form, holds_exact
from hapsynth.running.plan_cache import CachedPlan, found_to_dict, read_found
from hapsynth.running.plan_file import (
    SEVERAL,
    PlanError,
    blamed_on,
    number_of,
    plan_from,
    plan_to_dict,
    read_number,
    read_object,
    write_object,
)
from hapsynth.search.cost.network import mesh_axes
from hapsynth.search.planning.task import PlanningOptions
from hapsynth.search.result import Progress, Result
from hapsynth.search.sizing.fixed_ratios import FixedRatios, RatioError
from hapsynth.several.joint_planner import JointPlanner
from hapsynth.several.placement import StatePlacement, StateRequirements, placements
from hapsynth.several.shared_state import Role, SharedState, shared_state

Functions = Mapping[str, Callable[..., Any]]
RatiosOfEach = Sequence[float] | Mapping[str, Ratios]
"""One fraction per device, in mesh order, for every class of every function; or function -> its ratios."""
_Found = tuple[Traced, Result, Cluster]


class _Searched(NamedTuple):
    """What a search found: of each function the plan, the seconds per call of those that are called, alone, and the
    bound of all."""

    found: Mapping[str, tuple[Traced, Result]]
    alone: Mapping[str, float]
    bound: float


class StateWarning(UserWarning):
    """A call moves the state that several functions share."""


class FunctionsError(ValueError):
    """What is given for several functions is of no use."""


class Plans(Mapping[str, Plan]):
    """A plan for each of several functions; the state of one is that of all, as it lies.

    `frequency`: how often each is called, as weighed. `alone`: seconds per call of each function that is called,
    planned without the others. `lower_bound`: seconds that no plans with one state take less than, weighed. `state`:
    what of the state some functions have, as `synthesize_several` was told.
    """

    def __init__(
        self,
        plans: Mapping[str, Plan],
        named_after: str,
        frequency: Mapping[str, float],
        alone: Mapping[str, float],
        lower_bound: float,
        state: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        self._plans, self._named_after = dict(plans), named_after
        self._said = {name: dict(paths) for name, paths in state.items()}
        self.frequency, self.alone, self.lower_bound = dict(frequency), dict(alone), lower_bound

    def __getitem__(self, name: str) -> Plan:
        return self._plans[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def cost(self) -> float:
        """Predicted seconds of all functions, each as often as it is called."""
        return sum(self.frequency[name] * plan.cost for name, plan in self._plans.items())

    @property
    def gap(self) -> float:
        """(cost - lower bound) / cost."""
        return (self.cost - self.lower_bound) / self.cost if self.cost else 0.0

    @property
    def state_of(self) -> Plan:
        """Of the function after whose arguments the state is named."""
        return self._plans[self._named_after]

    @cached_property
    def layouts(self) -> dict[str, str]:
        """Path of the state, among the arguments of the function of `state_of` -> layout."""
        plan = self.state_of
        paths = (plan.traced.in_paths[source] for source, _ in plan.traced.graph.carry)
        return {path: plan.layouts[path] for path in paths}

    @cached_property
    def _roles(self) -> Mapping[str, Role]:
        return shared_state({name: plan.traced for name, plan in self.items()}, self._said, self._named_after).roles

    def rebalanced(self, name: str, plan: Plan) -> Plans:
        """All plans with the state as `plan` keeps it, which is `self[name]` at other sizes (`Proposal.plan`,
        `Plan.rebalance`): no call has to move the state, once `plan.adopt` has.

        The others keep their programs too, at sizes for the plan's cluster. One whose program can't have the state so
        keeps its sizes, with a warning. `alone` and `lower_bound` are of the old cluster, and gone. In a run of several
        processes all must call. Raises KeyError for a name that none has, ValueError for a plan of something else.
        """
        if plan.traced is not self[name].traced:
            raise ValueError(f"the plan is not that of {name!r} at other sizes: give what rebalancing it gave")
        if plan is self[name]:
            return self
        plans, kept = {name: plan}, dict[int, StatePlacement]()
        # Of what the first one has none, the most used decides.
        for n in sorted(self, key=lambda n: (n != name, -self.frequency[n] * self[n].cost)):
            role = self._roles[n]
            if n != name:
                plans[n] = _with_state(n, self[n], role, kept, plan)
            kept = placements(role, plans[n].program, plans[n].sizes) | kept
        return Plans({n: plans[n] for n in self}, self._named_after, self.frequency, {}, 0.0, self._said)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all plans into one JSON file, whole or not at all; OSError where that cannot be done."""
        data = {
            "schema": SEVERAL,
            "state_of": self._named_after,
            "frequency": self.frequency,
            "alone_s": {name: number_of(seconds) for name, seconds in self.alone.items()},
            "lower_bound_s": number_of(self.lower_bound),
            "state": self._said,
            "plans": {name: plan_to_dict(p.traced, p.result, p.cluster) for name, p in self._plans.items()},
        }
        write_object(path, data)

    def __repr__(self) -> str:
        each = ", ".join(f"{name!r}: {plan!r}" for name, plan in self._plans.items())
        return f"Plans({each}; {self.cost:.4g} s weighed)"


def synthesize_several(
    functions: Functions,
    example_args: Mapping[str, Sequence[Any]],
    mesh: jax.sharding.Mesh | Cluster,
    *,
    example_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    cluster: Cluster | None = None,
    carry: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    state: Mapping[str, Mapping[str, str]] | None = None,
    frequency: Mapping[str, float] | None = None,
    fixed: Mapping[str, str] | None = None,
    ratios: RatiosOfEach | None = None,
    expect: Mapping[str, Mapping[str, Expectation]] | None = None,
    memory_limit: float | None = None,
    leave_out: bool = PlanningOptions.leave_out,
    time_budget_s: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    form: Form = "auto",
    lowering: LoweringOptions = PlanningOptions.lowering,
    overlap: bool = PlanningOptions.overlap,
    joint_gap: float | None = PlanningOptions.joint_gap,
    cache: bool = True,
    donate: bool = True,
) -> Plans:
    """Plan functions with one state, e.g. `{"train": step, "eval": loss, "init": init}`: the plan of one takes it as
    another's leaves it, and the sum of their costs, each as often as it is called, is the least.

    The state is the carried arguments (`carry`) of one function: of those not in `state=` and whose state all others
    have, the one with most arrays, then most bytes. It is found in the others by tree, shapes and dtypes.

    Ctrl-C and meshes of several processes: as with `synthesize`, and so are the arguments and errors but for these.

    Args:
        functions: Name -> any function that `jax.jit` takes.
        example_args: By function name, as `example_kwargs`, `carry` and `expect` are.
        state: Where it is not to be found: function -> path of an argument, or `return` and that of a result -> path of
            the state, e.g. `{"eval": {"[0]": "[0]['params']"}, "init": {"return": "[0]"}}`.
        frequency: How often each is called, by default 1 where the state is returned as well, 0.1 where it is only read
            and 0 where it is made: a function that is never called must fit, and costs nothing.
        fixed: Path of the state -> layout to keep.
        ratios: Fractions, one per device, by which every function cuts everything, or by function name the ratios for
            each.
        time_budget_s: Seconds for all of them.
        overlap: As of `synthesize`, however little it gains; a function that has no room for what is sent meanwhile is
            planned without, as an `OverlapWarning` says.

    Raises:
        TypeError, ValueError: also for names that no function has. RatioError, one of these, also where one function
            can't have the state as the others have it.
    """
    began = time.perf_counter()
    devices, cluster, options = planning_options(
        mesh,
        cluster,
        fixed=fixed,
        memory_limit=memory_limit,
        leave_out=leave_out,
        time_budget_s=time_budget_s,
        progress=progress,
        form=form,
        lowering=lowering,
        overlap=overlap,
        joint_gap=joint_gap,
    )
    # No layouts are none: nothing is restricted.
    fixed = fixed or None
    if devices is not None:
        check_mesh(devices)
    names = _names(functions)
    args = _each("example_args", example_args, names)
    _check_given(args, names)
    asked = {"example_kwargs": example_kwargs, "carry": carry, "expect": expect, "state": state}
    kwargs, carries, expected, said = (_each(what, given or {}, names) for what, given in asked.items())
    for name, of in said.items():
        check_dict("state", of, repr(name))
        if not all(isinstance(path, str) for pair in of.items() for path in pair):
            raise TypeError(f"state of {name!r} is {of!r}; give a dict from path to path")
    traced = {
        name: traced_as_asked(
            fn, args[name], kwargs.get(name), carries.get(name), expected.get(name), names=_called(name)
        )
        for name, fn in functions.items()
    }
    shared = shared_state(traced, said)
    weights = _weights(shared, frequency or {})
    trace_s = time.perf_counter() - began
    axes = mesh_axes(cluster)
    restricted = _fixed(shared, fixed or {}, len(axes)), _pins(shared, ratios, axes)
    requested = {
        "fixed": fixed,
        "ratios": ratios,
        "frequency": frequency,
        "state": state,
        "memory_limit": options.memory_limit,
        "leave_out": options.leave_out,
        "exact": options.exact,
        "lowering": options.lowering.to_dict(),
        "overlap": options.overlap,
        "joint_gap": options.joint_gap,
        "functions": names,
    }

    def search() -> _Searched:
        sought = time.perf_counter()
        kept = CachedPlan.of(functions_traced, cluster, requested) if cache else None
        if kept is not None and (searched := kept.find(read)) is not None:
            timings = {"cache_s": time.perf_counter() - sought}
            return searched._replace(
                found={name: (of, replace(result, timings_s=timings)) for name, (of, result) in searched.found.items()}
            )
        may_leave_out = options.leave_out and not fixed and ratios is None
        left = left_for_planning(options.time_budget_s, trace_s)
        own = replace(options, leave_out=may_leave_out, time_budget_s=left)
        planner = JointPlanner(shared, weights, cluster, *restricted, own)
        with hinting(options, cluster):
            results = planner.run()
        found = {name: (shared.roles[name].traced, result) for name, result in results.items()}
        alone = {name: result.cost_s for name, result in planner.alone.items()}
        searched = _Searched(found, alone, min(planner.bound, planner.cost(results)))
        interrupted = any(result.interrupted for result in results.values())
        if kept is not None and time_budget_s is None and not interrupted:
            kept.keep(to_dict(searched))
        return searched

    def read(where: str, data: Mapping[str, Any]) -> _Searched:
        found = {n: read_found(f"{where}: {n!r}", d, shared.roles[n].traced) for n, d in data["plans"].items()}
        alone = {name: read_number(seconds) for name, seconds in data["alone"].items()}
        return _Searched(found, alone, read_number(data["bound"]))

    def to_dict(searched: _Searched) -> dict[str, Any]:
        return {
            "plans": {name: found_to_dict(*one, cluster) for name, one in searched.found.items()},
            "alone": {name: number_of(seconds) for name, seconds in searched.alone.items()},
            "bound": number_of(searched.bound),
        }

    functions_traced = [role.traced for role in shared.roles.values()]
    told = {**requested, "form": form, "donate": donate}
    searched = searched_once(devices, functions_traced, cluster, told, search, to_dict, partial(read, PLANNED_ONCE))
    total = time.perf_counter() - began
    found: dict[str, _Found] = {}
    for name, (of, result) in searched.found.items():
        timings = {"trace_s": trace_s, **result.timings_s, "total_s": total}
        found[name] = of, replace(result, timings_s=timings), cluster
    plans = _stored_alike(found, shared.roles, functions, devices, donate=donate, form=form)
    for name, plan in plans.items():
        tell_without_overlap(options, plan.result, f" of {name!r}")
    return Plans(plans, shared.named_after, weights, searched.alone, searched.bound, said)


def load_plans(
    path: str | os.PathLike[str],
    functions: Functions,
    example_args: Mapping[str, Sequence[Any]],
    mesh: jax.sharding.Mesh | None = None,
    *,
    example_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    donate: bool = True,
    form: Form = "auto",
    overlap: bool = False,
) -> Plans:
    """Read what `Plans.save` wrote, of the same functions; all else as `hapsynth.load`."""
    if mesh is not None:
        check_mesh(mesh)
    data, where, names = read_object(path, SEVERAL), str(path), _names(functions)
    with blamed_on(where):
        saved = dict(data["plans"])
        if saved.keys() != functions.keys():
            raise PlanError(f"holds plans of {', '.join(saved)}, and not of {', '.join(functions)}")
        named_after = str(data["state_of"])
        weights = {name: read_number(data["frequency"][name]) for name in saved}
        alone = {str(name): read_number(seconds) for name, seconds in data["alone_s"].items()}
        bound = read_number(data["lower_bound_s"])
        said = {
            str(name): {str(path): str(of) for path, of in dict(pair).items()}
            for name, pair in dict(data["state"]).items()
        }
        if not saved.keys() >= {named_after, *alone}:
            raise PlanError(f"it is about the plans of {', '.join(sorted({named_after, *alone}))}, but it was edited")
    args, kwargs = _each("example_args", example_args, names), _each("example_kwargs", example_kwargs or {}, names)
    _check_given(args, names)
    read = {
        n: plan_from(f"{where}: {n!r}", saved[n], functions[n], args[n], kwargs.get(n), names=_called(n)) for n in saved
    }
    roles = shared_state({n: traced for n, (traced, *_) in read.items()}, said, named_after).roles
    plans = _stored_alike(read, roles, functions, mesh, donate=donate, form=form, overlap=overlap)
    return Plans(plans, named_after, weights, alone, bound, said)


def _with_state(name: str, plan: Plan, role: Role, kept: Mapping[int, StatePlacement], like: Plan) -> Plan:
    """A plan at the sizes for the cluster of another, `like`, at which the state lies as `kept` and is stored as there;
    as it is, with a warning, where its program has none."""
    cluster = like.cluster
    asked, costs = StateRequirements.of(role, kept), plan.cost_model(cluster.subset(plan.devices))
    sizes, peak = best_sizes(plan, costs, pinned=asked.named)
    paths = dict(zip(role.traced.graph.inputs, role.traced.in_paths, strict=True))
    why = ", ".join(sorted(paths.get(value, role.traced.graph.values[value].name) for value, _ in asked.broken(sizes)))
    if not why and peak > plan.memory_limit:
        why = "all of it, as it would hold too much then"
    if not why:
        try:
            return resized(plan, sizes, costs, cluster, like=like if _is_uneven(kept) else None)
        except ProgramError as error:
            why = str(error)
    warn_user(
        f"{name!r} keeps its sizes, and each call of it moves the state: its program can't have it as it lies now, "
        f"{why}; plan the functions again for these devices if it is called often",
        StateWarning,
    )
    return plan


def _stored_alike(
    found: Mapping[str, _Found],
    roles: Mapping[str, Role],
    functions: Functions,
    mesh: jax.sharding.Mesh | None,
    *,
    donate: bool,
    form: Form,
    overlap: bool = False,
) -> dict[str, Plan]:
    """The plans, with these options of `Plan`, each in its own form, but that where one stores an unevenly cut state at
    exact size, those that would pad it run staged."""
    plans = {n: Plan(*of, mesh, functions[n], donate=donate, form=form, overlap=overlap) for n, of in found.items()}
    uneven = [n for n, plan in plans.items() if _is_uneven(placements(roles[n], plan.program, plan.sizes))]
    exact = next((n for n in uneven if holds_exact(plans[n].form)), None)
    if exact is None:
        return plans
    reason = f"{exact!r} stores the state that they share at exact size: {plans[exact].form_reason}"
    for name in uneven:
        plan = plans[name]
        if not holds_exact(plan.form):
            plans[name] = plan.with_result(plan.result, plan.cluster, form="staged", reason=reason)
    return plans


def _is_uneven(kept: Mapping[int, StatePlacement]) -> bool:
    return any(len({*lengths}) > 1 for how in kept.values() for lengths in how.lengths.values())


def _names(functions: Any) -> list[str]:
    if not isinstance(functions, Mapping):
        how = "give a dict of functions, e.g. {'train': fn}; one alone is planned by hapsynth.synthesize"
        raise TypeError(f"functions is {functions!r}; {how}")
    if not functions:
        raise FunctionsError("the dict of functions is empty; give one, e.g. {'train': fn}")
    for name in functions:
        if not isinstance(name, str):
            raise TypeError(f"a function is called {name!r}; give a str as its name")
    return list(functions)


def _called(name: str) -> tuple[str, str]:
    """What errors call a function and its arguments."""
    return f"the function {name!r}", f"example_args of {name!r}"


def _check_given(args: Mapping[str, Any], names: Sequence[str]) -> None:
    if missing := ", ".join(repr(n) for n in names if n not in args):
        raise FunctionsError(f"example_args has none for {missing}; give a tuple of the arguments of every function")


def _each(what: str, given: Any, names: Sequence[str]) -> Mapping[str, Any]:
    """An option that is given for each function; TypeError and ValueError where it is not."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} is a {type(given).__name__}; for several functions give a dict, by their names")
    for name in given:  # pyright: ignore[reportUnknownVariableType]
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)  # pyright: ignore[reportUnknownArgumentType]
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise FunctionsError(f"{what} names {name!r}, but the functions are {', '.join(map(repr, names))}{hint}")
    return given  # pyright: ignore[reportUnknownVariableType]


def _weights(shared: SharedState, frequency: Mapping[str, float]) -> dict[str, float]:
    given = _each("frequency", frequency, list(shared.roles))
    for name, often in given.items():
        if isinstance(often, bool) or not isinstance(often, numbers.Real) or not 0 <= float(often) < math.inf:
            how = "give how often it is called, a number of at least 0"
            raise FunctionsError(f"frequency of {name!r} is {often!r}; {how}")
    weights = {name: float(given.get(name, role.frequency)) for name, role in shared.roles.items()}
    if not any(weights.values()):
        raise FunctionsError(f"frequency is 0 of all functions: {', '.join(map(repr, weights))}; one must be called")
    return weights


def _pins(
    shared: SharedState, ratios: RatiosOfEach | None, axes: tuple[tuple[str, int], ...]
) -> dict[str, FixedRatios]:
    if ratios is None:
        return {}
    names = list(shared.roles)
    each = _each("ratios", ratios, names) if isinstance(ratios, Mapping) else dict.fromkeys(names, ratios)
    found: dict[str, FixedRatios] = {}
    for name, asked in each.items():
        try:
            found[name] = fixed_ratios_of(shared.roles[name].traced, asked, axes)
        except RatioError as error:
            raise RatioError(f"{name!r}: {error}") from None
    return found


def _fixed(shared: SharedState, fixed: Mapping[str, str], axes: int) -> dict[int, Any]:
    """Leaf of the state -> the layout that `fixed` asks for."""
    role = shared.roles[shared.named_after]
    graph = role.traced.graph
    values = {leaf: graph.values[graph.inputs[position]] for leaf, position in role.inputs.items()}
    paths = {shared.leaves[leaf].path: value for leaf, value in values.items()}
    asked = layouts_of(paths, fixed, axes, "state array")
    return {leaf: asked[value.index] for leaf, value in values.items() if value.index in asked}
