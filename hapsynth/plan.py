"""`Plan`: a function planned for a cluster, ready to be called, checked and saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh

import hapsynth
from hapsynth import _jax, checkpoint
from hapsynth._files import write_text
from hapsynth._options import check_planned, check_tolerance
from hapsynth.adapting.rebalance import THRESHOLD, propose, slowdowns
from hapsynth.adapting.reshape import Buckets, for_shapes
from hapsynth.export import in_shardings, out_shardings, source_of
from hapsynth.jobs.preflight import after_call, before_call, before_placing, check_mesh
from hapsynth.lower import Lowered, RecordedCall, Shards, Staged, Storage, unsupported
from hapsynth.running.arguments import wrap
from hapsynth.running.base import Planned
from hapsynth.running.check import CheckReport, check_plan
from hapsynth.running.debug_nans import raise_strange, strange_results
from hapsynth.running.drift import DriftReport, copied_along, leaf_drift, resynced
from hapsynth.running.form import Form
from hapsynth.running.plan_file import PlanError, read_plan, write_plan
from hapsynth.running.process_local_data import ProcessLocalLoader
from hapsynth.running.sharded_array import mapped, whole
from hapsynth.targets import CompiledTarget, compile_for
from hapsynth.view import notebook_html, page, trace_events

__all__ = ["CheckReport", "Form", "Plan", "PlanError", "load"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Plan(Planned, Generic[P, R]):
    """A distributed program for one function: call it like the function, with the function's own types.

    Without a mesh the plan cannot run, and everything else works; `load` with a mesh gives a plan that runs. `mesh` is
    of the whole cluster, or of just the `devices` that the plan uses; `Plan.mesh` has just these.
    `fn` is the function itself, for `check`. With `donate` (the default) a call consumes carried state that already
    lies as the plan keeps it, as `jax.jit(..., donate_argnums=...)` would; anything else is copied to the devices and
    left alone. `form`: see `synthesize`; `Plan.form` is the form chosen, `Plan.form_reason` why. `overlap`: between
    processes, collectives run while devices compute, and the instructions are scheduled for the least makespan; where
    the devices cannot, or one of them lacks the memory, the plan warns (`OverlapWarning`) and runs without.
    Raises ValueError where the mesh has another number of devices than the cluster and the program, or for a form that
    is none; warns (`ClusterWarning`) where there is a mesh and the cluster was measured on another machine or with
    another JAX.
    """

    # Running

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The function's results, in its own pytree.

        Arguments are those of the example: same structure, shapes and dtypes; NumPy arrays, Python numbers, arrays
        that lie anywhere, and what `shard` or an earlier call returned. (Weak types are taken as planned.) A result is
        a plain `jax.Array`, or a `ShardedArray` where the shards are unlike.

        Raises TypeError, ValueError or RuntimeError naming the argument's path before anything runs or is consumed,
        UnsupportedError naming the op that the devices can't run, `hapsynth.jobs.JobError` where the processes of a job
        do not find each other or do not fit together.
        An error from the run itself carries a note that names the state it consumed. Under `jax_debug_nans` and
        `jax_debug_infs`: FloatingPointError as `jax.jit` raises it, in all processes, and nothing is consumed.
        """
        return self._called(args, kwargs)

    def _called(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], record: Callable[[RecordedCall], None] | None = None
    ) -> Any:
        asked = _jax.looked_for()
        if asked:
            with _jax.unlooked():
                lowered, made = self._run(args, kwargs, donate=False, record=record)
            found = strange_results(lowered.mesh, self.traced.out_paths, made, asked)
            if found is not None:
                raise_strange(self, found, args, kwargs)
        else:
            lowered, made = self._run(args, kwargs, donate=self._donate, record=record)
        out: list[Any] = [None] * self.traced.out_tree.num_leaves
        for i, leaf in self.traced.out_static_leaves.items():
            out[i] = leaf
        for i, storage, x in zip(self.traced.out_array_leaves, lowered.outputs, made, strict=True):
            out[i] = wrap(storage, x)
        return jax.tree_util.tree_unflatten(self.traced.out_tree, out)

    def recorded(self, *args: P.args, **kwargs: P.kwargs) -> tuple[R, RecordedCall]:
        """A call like any other; returns its results, and when each of its collectives ran on this process and was
        waited for.

        `RecordedCall.exposed_s` is the measured counterpart of `Plan.exposed`: seconds per device in which it computes
        nothing and waits for a collective. In switch and fused form the times come from JAX's profiler; in staged form
        the call waits for each computation before the collective after it, and takes a little longer. Raises ValueError
        for switch and fused form on devices other than CPUs, and RuntimeError where the profiler is in use.
        """
        lowered = self.lowered_for(self._donate and not _jax.looked_for())
        platform = lowered.local.platform
        if not isinstance(lowered, Staged) and platform != "cpu":
            raise ValueError(f"on {platform} a program's collectives are in what jax.profiler.trace writes: use that")
        told: list[RecordedCall] = []
        results = self._called(args, kwargs, told.append)
        (recorded,) = told
        return results, recorded

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        donate: bool,
        record: Callable[[RecordedCall], None] | None,
    ) -> tuple[Lowered | Staged, list[Any]]:
        """The form that ran, and the stored results that it made."""
        lowered = self.lowered_for(donate)
        leaves = self.arguments.flatten(args, kwargs)
        before_placing(self, donate)
        stored = self.arguments.place(lowered, leaves)
        before_call(self, stored, donate)
        # What was found there may have changed the form, not how things are stored.
        returned = False
        try:
            lowered = self.lowered_for(donate)
            made = lowered(stored, record)
            returned = True
        except Exception as error:
            lost = [p for p, x in zip(self.traced.in_paths, stored) if x.is_deleted()]
            named = None if lost else unsupported(self.traced.graph, lowered.mesh.local_devices[0], error)
            if named is not None:
                raise named from error
            if lost:
                error.add_note(f"hapsynth: the call had consumed these arguments, which are lost: {', '.join(lost)}")
            raise
        finally:
            after_call(self, returned)
        return lowered, made

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """JAX's lowered function of the stored arrays, to be read: `.as_text()`, also of `.compile()`. With the
        function's arguments the plan is called; those given here, or their structs, are only checked.

        In staged form those of all stages: `.compile()` compiles them, so that no later call waits for it.
        On CPUs XLA is asked to spare memory, unless XLA_FLAGS or JAX's `.compile(compiler_options=...)` say how.
        """
        if args or kwargs:
            self.arguments.flatten(args, kwargs, structs=True)
        elif wrong := self.arguments.wrong_setting():
            raise TypeError(wrong)
        return self.lowered.lower()

    # Moving values

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """The first arguments of the function, placed on the devices as the plan keeps them.

        One argument gives just that; several give a tuple, with a dict of keyword arguments last where there are any.
        What is returned shares no memory with what is given, so that a plan may consume it. Raises as `__call__` does.
        """
        placed: list[Any] = []
        with _jax.unlooked():
            for _, argument, first in list(self.arguments.split(args, kwargs)):
                leaves, tree = jax.tree_util.tree_flatten(argument)
                placed.append(tree.unflatten(self.arguments.place_copies(self.lowered, leaves, first)))
        out = placed[: len(args)]
        if kwargs:
            out.append(dict(zip(kwargs, placed[len(args) :])))
        return out[0] if len(out) == 1 else tuple(out)

    def local_slices(self, arg: int | str) -> Any:
        """The tree of an argument, with a `LocalSlices` in place of every array: the slices that this process stores,
        for loading only those.

        `arg`: an argument's position, a keyword's name, or the path of a leaf (as in `layouts`). `LocalSlices.process`
        is the part to load, `devices` the part of it that each of the process's devices stores.
        """
        return self._feeder(arg).slices()

    def shard_from_callback(self, callback: Callable[[str, tuple[slice, ...]], Any], arg: int | str) -> Any:
        """An argument, placed as by `shard`, from `callback(path, slices)`, which gives just these elements of a leaf.

        Called once for each different part that a device of this process holds, not for empty ones; for a replicated
        leaf with the whole. Leaves that are no arrays are those that were planned. `arg` as in `local_slices`. Raises
        ValueError or TypeError naming leaf, slices and the shape or dtype that is due.
        """
        return self._feeder(arg).from_callback(callback)

    def shard_from_process_local_data(self, argument: Any, arg: int | str) -> Any:
        """An argument, placed as by `shard`, from this process's own part of every leaf: `LocalSlices.process` of it.

        Replicated leaves are given whole, alike in all processes. Else as `shard_from_callback`.
        """
        return self._feeder(arg).from_process(argument)

    def _feeder(self, arg: int | str) -> ProcessLocalLoader:
        return ProcessLocalLoader(self.arguments, self.lowered, arg)

    def unshard(self, tree: Any) -> Any:
        """`tree` with every array whole, as a NumPy array of its logical shape; typed keys as key arrays.

        Leaves that are no arrays are kept. In a run of several processes all must call. Raises RuntimeError for an
        array that a call has consumed.
        """
        return jax.tree.map(whole, tree)

    def adopt(self, argument: T, old_plan: Plan[..., Any], arg: int | str = 0) -> T:
        """Redistribute carried state, or any argument, from `old_plan`'s layouts to this plan's; no bit of it changes.

        Where only sizes differ (`rebalance`), just the rows that change their device are sent, from device to device;
        a leaf that need not move is returned as it is; any other goes through the host. With `donate` (the default),
        leaves that moved are freed one by one. `arg` as in `local_slices`. In a run of several processes all must call.
        Raises TypeError, ValueError or RuntimeError as `shard` does before anything moves.
        """
        check_planned("old_plan", old_plan)
        leaves, first = self.arguments.leaves_of(arg, argument)
        self.arguments.check(leaves, first, self.arguments.path_from(first))
        old = old_plan.arguments.storages(old_plan.lowered, argument, arg)
        out = self.arguments.move(self.lowered, old, leaves, first, free=self._donate)
        return jax.tree_util.tree_structure(argument).unflatten(out)

    def save_state(self, path: str | os.PathLike[str], state: Any, arg: int | str = 0) -> None:
        """Write carried state, or any argument, as `shard` or a call returned it, to a folder: whole logical arrays,
        which any plan of a function with such state can restore. What is there stays until the new state is whole.

        Each process writes what its devices hold, each element once (of a copied leaf, of which each writes a part: see
        `drift`). `arg` as in `local_slices`. In a run of several processes all must call, with one path on a file
        system that they share. Raises as `__call__` does for the state, and CheckpointError where it can't be written.
        """
        checkpoint.save_state(path, self.arguments, self.lowered, state, arg)

    def restore_state(self, path: str | os.PathLike[str], arg: int | str = 0) -> Any:
        """The argument that `save_state` wrote, of this plan or another, placed as by `shard`, bit for bit.

        Each process reads the pieces of at most 4 MiB that hold what its devices need, and checks each. Leaves that
        are no arrays are those that were planned. `arg`, processes: as for `save_state`. Raises CheckpointError.
        """
        return checkpoint.restore_state(path, self.arguments, self.lowered, arg)

    def map(self, fn: Callable[[Any], Any], tree: Any) -> Any:
        """`fn` applied to every array of `tree`, the results sharded as the arrays were; other leaves are kept.

        `fn` takes a `jax.Array`; an unevenly sharded value is made whole for it, on JAX's default device. The result
        may have another dtype; another shape raises ValueError.
        """
        return jax.tree.map(lambda leaf: mapped(fn, leaf), tree)

    # Trust

    def check(self, *args: Any, rtol: float | None = None, **kwargs: Any) -> CheckReport:
        """Run the plan and the original function, on one device, and compare every output leaf.

        `rtol`: of every leaf; by default 1e-9 of floats of 64 bits, and 1e-4 of others.
        Without arguments random ones are made (`hapsynth.instructions.testing.example_arguments.example_arguments` says
        which; give real ones where the function asks more of them). `CheckReport` says how far a leaf may be off.
        Nothing that is given is consumed. In a run of several processes all must call, and all get the same report.
        Raises RuntimeError for a plan that has no function, or no devices, and where another process can't run the
        function; TypeError or ValueError, before anything runs, for an `rtol` of no use.
        """
        check_tolerance("rtol", rtol)
        return check_plan(self, self.arguments, args, kwargs, rtol)

    def drift(self, argument: Any, arg: int | str = 0) -> DriftReport:
        """Compare the devices' copies of carried state that they compute redundantly, which unlike hardware rounds
        differently. `argument`: the state as `shard` or a call returned it; `arg` as in `local_slices`.

        In a run of several processes all must call. Raises TypeError, ValueError or RuntimeError for a state that is
        not as this plan keeps it.
        """
        copied = self._copied(argument, arg)
        return DriftReport(tuple(leaf_drift(path, storage, x) for _, path, storage, x in copied))

    def resync(self, argument: T, arg: int | str = 0) -> T:
        """The state with the first device's copy of each replicated leaf (see `drift`) on all devices. The other leaves
        are returned as they are, and nothing is consumed. Collective and errors as for `drift`."""
        leaves, first = self.arguments.leaves_of(arg, argument)
        for i, _, storage, x in self._copied(argument, arg):
            leaves[self.traced.array_leaves[i] - first] = wrap(storage, resynced(storage, x))
        return jax.tree_util.tree_structure(argument).unflatten(leaves)

    def _copied(self, argument: Any, arg: int | str) -> list[tuple[int, str, Storage, jax.Array | Shards]]:
        """`Arguments.held` of the leaves of carried state that are replicated along at least one mesh axis."""
        carried = {source for source, _ in self.traced.graph.carry}
        held = self.arguments.held(self.lowered, argument, arg)
        return [leaf for leaf in held if leaf[0] in carried and copied_along(leaf[2])]

    def rebalance(self, measured_times: Sequence[float], *, threshold: float = THRESHOLD) -> Plan[P, R]:
        """A plan of the same program with sizes for devices that are faster or slower than they were taken to be.

        `measured_times`: seconds per step in which each device that takes part computes, in mesh order, or one for each
        process; `hapsynth.Monitor` measures them. Returns this very plan unless a step is predicted to take at least
        the fraction `threshold` less, so that noise moves nothing. There is no search, and so no bound: `lower_bound`
        is 0. Move the state with `adopt`. In a run of several processes all must call; the first one's numbers count.
        Raises ValueError for numbers that are of no use.
        """
        return propose(self, slowdowns(self, measured_times), threshold).plan

    def for_shapes(self, *example_args: Any, **example_kwargs: Any) -> Plan[P, R]:
        """A plan of the same program, without a search, for other sizes: a short last batch, longer sequences.

        Takes the function's arguments, or their structs. The function is traced again and must differ in sizes only;
        the new shard sizes come from the linear program. Arguments of the same shape as before, such as carried state,
        keep their layout, so both plans take them as they are. `lower_bound` is 0: nothing is proven for the new sizes.
        In a run of several processes all must call. Raises ShapeError with what differs or does not fit, TraceError as
        `synthesize` does, RuntimeError for a plan without its function.
        """
        return for_shapes(self, example_args, example_kwargs)

    def bucketed(self, *plans: Plan[P, R]) -> Buckets[Plan[P, R]]:
        """This plan and others that its `for_shapes` made: what a call takes is chosen by its arguments' shapes, and
        any others are refused. Raises TypeError for what is no plan, ShapeError for one of another function,
        or two for the same shapes."""
        for plan in plans:
            check_planned("a bucket", plan)
        return Buckets([self, *plans])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all; OSError where that cannot be done."""
        write_plan(path, self.traced, self.result, self.cluster)

    # Without its devices

    def compile_for(self, targets: Sequence[str] = (), *, form: Form = "auto") -> list[CompiledTarget]:
        """Compile the plan for GPUs that need not be here, names such as "V100-16GB", each as if it were the only kind;
        by default for the plan's own: whether XLA takes it, what it holds, and its collectives, which must be the same
        on all cards of a job (`CompiledTarget.fingerprint`).

        The function is found by a new process for each card: it must be one that pickle takes, and a script has to
        call this under `if __name__ == "__main__":`, as such a process imports the script. `form`: as of `synthesize`.
        Takes seconds per card, and the wheels of `hapsynth[aot12]` or `[aot13]`.
        Raises `hapsynth.targets.TargetError` where these are missing, the function can't be found or the script can't
        be imported, ClusterError for a card that is not known.
        """
        return compile_for(self, targets, form=form)

    # To look at

    def explain(self, value: str | None = None, *, cost: bool = False, top: int = 5) -> str:
        """A text that tells where the seconds go and why values have their layouts. As `hapsynth.explain`, errors
        too."""
        # What reports on plans is made of them, so it is called as users call it.
        return hapsynth.explain(self, value, cost=cost, top=top)

    def to_html(self, path: str | os.PathLike[str] | None = None, *, beside: Plan[..., Any] | None = None) -> str:
        """A page about the plan, or about it and another of the same function and how they differ: what each device
        does when, what is exposed, memory over the step, every argument's layout, bounds, the program with source
        lines. One file that needs no network; written to `path` where there is one. OSError where that can't be."""
        plans = [(self.cluster.name, self)] if beside is None else [("this plan", self), ("the other", beside)]
        return _written(path, page(plans))

    def to_trace(self, path: str | os.PathLike[str] | None = None) -> str:
        """The predicted step in Chrome's trace event format, for ui.perfetto.dev; else as `to_html`."""
        return _written(path, trace_events(self))

    def _repr_html_(self) -> str:
        """The plan's HTML for notebooks."""
        return notebook_html(self)

    # Without hapsynth

    def to_source(self, path: str | os.PathLike[str] | None = None) -> str:
        """The program as a Python module that needs JAX alone and gives the same values; written to `path` where there
        is one. The module's docstring says how to use it.

        It is the switch form, whatever form the plan runs in: `body` is what every device does, one line per
        instruction. SourceError naming the op that cannot be written (a Python callback, a Pallas kernel), or why the
        plan has no such form; OSError where `path` cannot be written.
        """
        return _written(path, source_of(self))

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """The arguments' `NamedSharding`s, for `jax.jit(fn, in_shardings=..., out_shardings=...)` without hapsynth: XLA
        then chooses the rest of the program itself. ValueError naming a leaf whose shards are unlike or the arguments
        that go by keyword, which `jax.jit` has no shardings for; RuntimeError for a plan without devices."""
        return in_shardings(self)

    @property
    def out_shardings(self) -> Any:
        """The results' `NamedSharding`s, as `in_shardings`."""
        return out_shardings(self)

    def __copy__(self) -> Plan[P, R]:
        """Itself: a plan does not change."""
        return self

    def __deepcopy__(self, memo: object) -> Plan[P, R]:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a plan can't be pickled, as it holds devices, a function and what was compiled: write it with "
            "plan.save(path) and read it with hapsynth.load(path, fn, example_args, mesh)"
        )

    def __repr__(self) -> str:
        some = f"{len(self.devices)} of {self.cluster.n} devices of " if len(self.devices) < self.cluster.n else ""
        return f"Plan({len(self.traced.graph.ops)} ops on {some}{self.cluster.name!r}, {self.cost:.4g} s per call)"


def _written(path: str | os.PathLike[str] | None, text: str) -> str:
    if path is not None:
        write_text(path, text)
    return text


def load(
    path: str | os.PathLike[str],
    fn: Callable[P, R],
    example_args: Sequence[Any],
    mesh: Mesh | None = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    donate: bool = True,
    form: Form = "auto",
    overlap: bool = False,
) -> Plan[P, R]:
    """Read a plan of `fn` that `Plan.save` wrote; `mesh` None gives one that cannot run.

    `fn` is traced again and must be the function that was planned; the file is only data and must pass the checker.
    `mesh`: of the cluster's devices, or of those alone that the plan uses. `form`: as of `synthesize`. `overlap`: as of
    `Plan`.
    Raises PlanError with the reason and the way out, TypeError where `fn`, its arguments or `mesh` are none, ValueError
    where the mesh has another number of devices, `hapsynth.jobs.JobError` as `synthesize` does.
    """
    if mesh is not None:
        check_mesh(mesh)
    traced, result, cluster = read_plan(path, fn, example_args, example_kwargs)
    return Plan(traced, result, cluster, mesh, fn, donate=donate, form=form, overlap=overlap)
