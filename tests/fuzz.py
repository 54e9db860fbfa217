"""Random functions, planned where nearly every plan is uneven, run on host devices, compared with plain `jax.jit`.

    python tests/fuzz.py [--count 2000] [--first 0] [--nonfinite 0.5] [-j 2]
    python tests/fuzz.py --first 123 --count 1         # one of them again

Networks are so fast that nearly all that can be cut is cut, by the speeds of unlike devices: on one mesh axis or two,
in switch form or staged, some devices too slow for any share; a quarter are random programs instead. Half of the
functions end in sums that are fewer to add up after products than before (`random_functions.late`). Of a part of them
(`--nonfinite`) the arguments hold NaN, inf, -inf and zeros, and more of the ops are such in which those matter. What
is not finite must be so in the same places, integers the same, floats as close as `hapsynth.running.check` asks. Two
kinds are counted apart, and named: a leaf that is as the function run op by op has it and not as `jit` does, since XLA
simplifies as if numbers were finite (`docs/nonfinite.md`); and a knife edge, a leaf that one device's own run changes
in this way when arguments move by one unit in their last place. Exit status 1 where anything differs or fails. A
seed's case depends on no other option than `--nonfinite`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

FLAGS = "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
OLDER_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""Gone from JAX 0.11 on, as in conftest.py."""
DEVICES = 8
CHUNK = 50
"""Programs of one process: JAX keeps what it compiled."""
RTOL = 1e-3
DELICATE = 0.35
"""The share of ops in which NaN and infinity matter, where there are any."""
LATE = 0.5
"""The share of functions that end in sums which are fewer to add up after products than before, where a collective
takes long enough that this matters."""
PRODUCTS = ("mul", "div", "dot_general", "conv_general_dilated", "ragged_dot_general")
LATENCIES = (-9.5, -7.5)
"""Of those clusters: powers of 10, in seconds."""
SAME, AS_OPS, EDGE, MISMATCH, FAILED = "same", "as op by op", "knife edge", "MISMATCH", "FAILED"


@dataclass(frozen=True)
class Outcome:
    """What became of one seed."""

    seed: int
    axes: tuple[int, ...]
    form: str
    nonfinite: bool
    uneven: bool = False
    """Whether the program cuts something into shards of unlike length."""
    empty: bool = False
    partial: tuple[str, ...] = ()
    """The primitives that take on a partial result, one that is yet to be reduced over devices."""
    verdict: str = FAILED
    note: str = ""
    cpu_s: float = 0.0

    @property
    def multiplied(self) -> bool:
        """Whether a partial result is multiplied, divided or contracted, if only with a number of the function."""
        return any(name in self.partial for name in PRODUCTS)


def tried(seed: int, nonfinite: float = 0.5) -> Outcome:
    """Plan and run one random function. Needs as many devices as DEVICES."""
    import jax
    import numpy as np
    from random_functions import RandomFunction
    from slow_devices import thin_cluster

    import hapsynth

    began = time.process_time()
    rng = np.random.default_rng([seed, 4])
    axes = ((2,), (3,), (4,), (8,), (2, 2), (2, 3))[int(rng.choice(6, p=(0.32, 0.33, 0.15, 0.02, 0.14, 0.04)))]
    n = int(np.prod(axes))
    speeds = 10.0 ** rng.uniform(0, rng.choice([0.3, 1.0]), n)
    speeds[int(rng.integers(n))] *= 2  # Two of nearly one speed would share evenly.
    if rng.random() < 0.3:
        speeds[int(rng.integers(n))] = 1e-4
    drawn = rng.random()
    form = "staged" if drawn < 0.25 else "random" if drawn > 0.75 else "switch"
    outcome = Outcome(seed, axes, form, bool(rng.random() < nonfinite))
    late = bool(rng.random() < LATE)
    fn = RandomFunction(seed, DELICATE if outcome.nonfinite else 0.0, late)
    fn.ops = int(rng.integers(0, 3) if late else rng.integers(1, 5))
    args = fn.params, fn.data
    if outcome.nonfinite:
        args = with_nonfinite(rng, args)
    names = tuple("ab"[: len(axes)])
    cluster = replace(thin_cluster(speeds.tolist(), bandwidth=1e18), axes=tuple(zip(names, axes, strict=True)))
    if late:
        cluster = replace(cluster, network=replace(cluster.network, latency=float(10.0 ** rng.uniform(*LATENCIES))))
    cluster = with_links(cluster, np.random.default_rng([seed, 5]))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]).reshape(axes), names)
    try:
        if form == "random":
            traced, program, sizes, run = random_program(fn, args, cluster.axes, seed)
        else:
            plan = hapsynth.synthesize(fn, args, mesh, cluster=cluster, leave_out=False, form=form)
            traced, program, sizes = plan.traced, plan.program, plan.sizes
            run = lambda: jax.tree.leaves(plan.unshard(plan(*args)))
        shares = sizes.shares
        outcome = replace(outcome, uneven=any(len(set(s)) > 1 for s in shares), empty=any(0 in s for s in shares))
        outcome = replace(outcome, partial=taking_partials(traced.graph, program))
        verdict, note = compared(traced, fn, args, run())
    except Exception as error:
        verdict, note = FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return replace(outcome, verdict=verdict, note=note, cpu_s=time.process_time() - began)


def with_links(cluster: Any, rng: Any) -> Any:
    """In hosts of some devices each, some of which have links of their own, as have some pairs of them; every other
    time as it is."""
    import numpy as np

    from hapsynth.cluster.links import HostLinks, Link

    if rng.random() < 0.5:
        return cluster
    link = lambda: Link(float(10.0 ** rng.uniform(8, 18)), float(10.0 ** rng.uniform(-12, -5)))
    some = lambda: link() if rng.random() < 0.5 else None
    hosts = tuple(np.sort(rng.integers(0, cluster.n, cluster.n)).tolist())
    present = sorted(set(hosts))
    pairs = {(a, b): link() for a in present for b in present if a < b and rng.random() < 0.3}
    own = {host: HostLinks(some(), some()) for host in present}
    return replace(cluster, hosts=hosts, intra=some(), host_links=own, pairs=pairs)


def with_nonfinite(rng: Any, args: Any) -> Any:
    """NaN, infinities and zeros at a few places of some arrays, of one at least."""
    import jax
    import numpy as np

    leaves, tree = jax.tree.flatten(args)
    floats = [i for i, x in enumerate(leaves) if np.asarray(x).dtype == np.float32]
    for i in rng.choice(floats, int(rng.integers(1, len(floats) + 1)), replace=False):
        flat = np.array(leaves[i]).reshape(-1)
        if rng.random() < 0.15:
            flat[:] = 0.0
        for _ in range(int(rng.integers(1, 4))):
            flat[int(rng.integers(flat.size))] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0])
        leaves[i] = flat.reshape(np.shape(leaves[i]))
    return tree.unflatten(leaves)


def taking_partials(graph: Any, program: Any) -> tuple[str, ...]:
    """The primitives that take on a partial result somewhere in a program, as `Outcome.partial`."""
    from hapsynth.instructions.program.program import Compute

    taking = lambda i: isinstance(i, Compute) and any(p.is_partial for t in i.triples for p in t.operands)
    return tuple(sorted({graph.ops[i.op].name for i in program.instructions if taking(i)}))


def random_program(fn: Any, args: Any, axes: tuple[tuple[str, int], ...], seed: int) -> tuple[Any, Any, Any, Any]:
    """A sound program at random, whether or not a search would choose it: the trace, the program, its sizes, and a
    function that runs it."""
    import random

    from lowered_programs import mesh_of, run
    from random_programs import RandomProgram

    from hapsynth.graph.trace import trace
    from hapsynth.instructions.program.checker import check
    from hapsynth.lower import Lowered

    traced = trace(fn, args)
    maker = RandomProgram(traced.graph, axes, random.Random(seed), 0.4, 0.5 if fn.late else 0.0)
    program = maker.build()
    sizes = maker.sizes(program, "zeros" if seed % 3 == 0 else "skewed")
    check(traced.graph, program, sizes)
    lowered = Lowered(traced.graph, program, sizes, mesh_of(math.prod(n for _, n in axes)))
    return traced, program, sizes, lambda: run(lowered, args)


def compared(traced: Any, fn: Any, args: Any, got: Sequence[Any]) -> tuple[str, str]:
    """The verdict on results, and where they differ."""
    import jax
    import numpy as np

    from hapsynth.running.check import Reference

    leaves = jax.tree.leaves(args)
    reference = Reference(fn, traced, leaves, jax.devices()[0])
    wrong = differing(reference, leaves, got)
    if not wrong:
        return SAME, ""
    by_ops = op_by_op(fn, traced, leaves, jax.devices()[0])
    still = set(differing(by_ops, leaves, got))
    unlike = [i for i in wrong if i in still]
    tipping = [tips(reference, leaves), tips(by_ops, leaves)] if unlike else []
    # XLA's all-reduce takes the sign from a zero.
    unsigned = [np.where(x == 0, np.zeros_like(x), x) for x in reference.hosted(leaves)]
    signed = differing(reference, unsigned, got) if unlike else []
    sharp = [i for i in unlike if i in signed and not any(t[i] for t in tipping)]
    path = lambda i: traced.out_paths[i]
    if not sharp:
        return EDGE if unlike else AS_OPS, ", ".join(map(path, unlike or wrong))
    want, stepped = (of(of.hosted(leaves))[sharp[0]] for of in (reference, by_ops))
    note = f"output{path(sharp[0])}: {first_difference(got[sharp[0]], want)}"
    return MISMATCH, f"{note}; op by op, {first_difference(got[sharp[0]], stepped)}"


def differing(reference: Any, leaves: Sequence[Any], got: Sequence[Any]) -> list[int]:
    """The outputs that are not the reference's: integers must be the same, though `Plan.check` allows some to tip."""
    from hapsynth.running.check import WIDENED, compare

    tipped = lambda judged, x: judged.yardstick == WIDENED and x.dtype.kind != "f"
    judged = compare(reference, leaves, got, [RTOL] * len(got))
    return [i for i, (j, x) in enumerate(zip(judged, got, strict=True)) if j.error > RTOL or tipped(j, x)]


def op_by_op(fn: Any, traced: Any, leaves: Sequence[Any], device: Any) -> Any:
    """A reference of which every op is compiled alone."""
    import jax

    from hapsynth.running.check import Reference

    class OpByOp(Reference):
        def __call__(self, arrays: Sequence[Any]) -> list[Any]:
            with jax.disable_jit():
                return super().__call__(arrays)

    return OpByOp(fn, traced, leaves, device)


def tips(reference: Any, leaves: Sequence[Any]) -> list[bool]:
    """By output, whether the function itself gives other integers, or other values that are not finite, when its
    arguments move by one unit in their last place."""
    import numpy as np

    from hapsynth.running.check import nudged

    arrays = reference.hosted(leaves)
    want = reference(arrays)
    tipping = [False] * len(want)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        again = reference([nudged(rng, x, float(np.finfo(np.float32).eps)) for x in arrays])
        for i, (a, b) in enumerate(zip(again, want, strict=True)):
            tipping[i] |= not np.array_equal(kinds_of(a), kinds_of(b))
    return tipping


def kinds_of(x: Any) -> Any:
    """What must be the same exactly: integers and bools; of floats which are NaN, inf or -inf."""
    import numpy as np

    return np.where(np.isfinite(x), 0, np.nan_to_num(x, nan=3.0, posinf=1.0, neginf=2.0)) if x.dtype.kind == "f" else x


def first_difference(got: Any, want: Any) -> str:
    import numpy as np

    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    unlike = ~np.isclose(got, want, rtol=RTOL, atol=1e-6, equal_nan=True) if want.dtype.kind == "f" else got != want
    at = np.argwhere(unlike)
    if not len(at):
        return "close, but not as close as the rest of the array asks"
    place = tuple(at[0].tolist())
    return f"{len(at)} of {want.size} differ, first {list(place)}: {got[place]} instead of {want[place]}"


def start(n: int) -> None:
    """A process of its own: host devices, and XLA that compiles without optimizing."""
    import jax

    jax.config.update("jax_num_cpu_devices", n)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)


def worker(seeds: Sequence[int], nonfinite: float) -> None:
    """Print an outcome a line."""
    start(DEVICES)
    for seed in seeds:
        print(json.dumps(asdict(tried(seed, nonfinite))), flush=True)


def outcomes(seeds: Sequence[int], nonfinite: float) -> Iterator[Outcome]:
    """Of seeds, in a process of their own. One that ends the process is an outcome too, and the rest goes on."""
    left = list(seeds)
    while left:
        command = [sys.executable, __file__, "--worker", ",".join(map(str, left)), "--nonfinite", str(nonfinite)]
        older = OLDER_FLAGS if metadata.version("jax").startswith("0.10.") else ""
        here = Path(__file__).resolve().parent
        path = os.pathsep.join([str(here / "support"), os.environ.get("PYTHONPATH", "")])
        flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS} {older}"
        env = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": flags}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            found = json.loads(line)
            yield Outcome(**{**found, "axes": tuple(found["axes"]), "partial": tuple(found["partial"])})
            left.remove(found["seed"])
        if left:
            died = f"the process ended with {done.returncode}: {done.stderr.strip()[-300:]}"
            yield Outcome(left.pop(0), (), "", False, note=died)


def table(found: Sequence[Outcome]) -> str:
    verdicts = (AS_OPS, EDGE, MISMATCH, FAILED)
    named = ("as op by op", "edges", "mismatches", "failed")
    rows = [("arguments", "axes", "programs", "uneven", "empty shares", "partial multiplied", *named, "CPU s each")]
    some = [(kind, n) for kind in (False, True) for n in (1, 2)]
    for kind, n in (*some, (None, 0)):
        mine = [o for o in found if kind is None or (o.nonfinite == kind and len(o.axes) == n)]
        count = lambda verdict, mine=mine: str(sum(o.verdict == verdict for o in mine))
        if not mine:
            continue
        part = lambda flags, mine=mine: f"{sum(flags)} ({100 * sum(flags) / len(mine):.1f} %)"
        rows.append(
            (
                "all" if kind is None else "with NaN, inf" if kind else "finite",
                str(n or "any"),
                str(len(mine)),
                part([o.uneven for o in mine]),
                part([o.empty for o in mine]),
                part([o.multiplied for o in mine]),
                *map(count, verdicts),
                f"{sum(o.cpu_s for o in mine) / len(mine):.2f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, summary(found)])


def summary(found: Sequence[Outcome]) -> str:
    """What was tried, in shares, and which ops took on partial results in how many programs."""
    of = lambda flags: f"{100 * sum(flags) / max(len(found), 1):.1f} %"
    taking = Counter(name for o in found for name in o.partial)
    shares = (
        f"uneven {of(o.uneven for o in found)}",
        f"with empty shares {of(o.empty for o in found)}",
        f"with arguments that are not finite {of(o.nonfinite for o in found)}",
        f"in which a partial result is multiplied {of(o.multiplied for o in found)}",
        f"mismatches {sum(o.verdict == MISMATCH for o in found)}",
    )
    most = ", ".join(f"{name} {count}" for name, count in taking.most_common(12)) or "none"
    return f"{len(found)} programs: {'; '.join(shares)}\nprograms in which an op takes on a partial result: {most}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="how many programs (default 2000)")
    parser.add_argument("--first", "--seed", type=int, default=0, help="the seed of the first (default 0)")
    parser.add_argument("--nonfinite", type=float, default=0.5, help="which part has NaN and inf (default 0.5)")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(list(map(int, asked.worker.split(","))), asked.nonfinite)
        return 0
    seeds = range(asked.first, asked.first + asked.count)
    chunk = max(1, min(CHUNK, -(-len(seeds) // asked.jobs)))
    chunks = [seeds[i : i + chunk] for i in range(0, len(seeds), chunk)]
    found: list[Outcome] = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for some in pool.map(lambda c: list(outcomes(c, asked.nonfinite)), chunks):
            found += some
            for o in some:
                if o.verdict != SAME:
                    where = "x".join(map(str, o.axes))
                    print(f"seed {o.seed} ({where} devices, {o.form}, {o.verdict}): {o.note}", flush=True)
            print(f"{len(found)} of {len(seeds)} done", file=sys.stderr, flush=True)
    print(table(found))
    bad = [o for o in found if o.verdict in (MISMATCH, FAILED)]
    if bad:
        script = Path(__file__).name
        print(f"again: python tests/{script} --count 1 --nonfinite {asked.nonfinite} --first {bad[0].seed}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
