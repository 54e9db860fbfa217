"""Plans compiled for GPUs that are not here, and `jax.jit`'s data parallelism beside them.

    pip install -e '.[aot12]' optax flax equinox     # or '.[aot13]', in an environment of its own
    python benchmarks/compile_targets.py [--models mlp,...] [--forms switch,staged,jit] [--targets V100-16GB,...]
                                         [--gbits 400] [--per-host 2] [--rows FILE] [--hlo FOLDER] [--json OUT]

Models: the examples at their own size, planned for `mixed8`; wide ones (width 1024, 4 layers), for two V100 and two
H100 at `--gbits`, each a host by itself or `--per-host` of them joined at 150 GB/s, as a bfloat16 GPT; and six of
tests/zoo, cut 3:3:1:1 as if the devices were so slow that even they are worth dividing, on the same four cards. Forms:
those of `hapsynth compile`; `jit` is `jax.jit` of the same step with batches cut evenly, as JAX compiles it, `jit_lhs`
with XLA's latency-hiding scheduler.

One row for each model, form and card: `fingerprint` of the collectives; how many, and how many are asynchronous; of a
call on the card, replayed by the plan's own times, `hidden`, the share of the bytes on the wire that is hidden behind
computing, `hidden_of_time` and `exposed_s`; `products`, FLOPs of contractions in the compiled program, over those of
the plan's shares (for `jit` of an even share); kernels, collectives and library calls; the
peak over the predicted one; seconds to compile. The table has a line for each model and form. Rows are appended to
--rows as they come, and rows that it has are not made again; --hlo keeps the compiled programs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

from harness.command import RowError, in_own_process, names, parser, write_json
from harness.examples import cluster, example, target

FORMS = ("switch", "staged", "fused", "jit", "jit_lhs")
TARGETS = ("P4-8GB", "V100-16GB", "A100-80GB", "H100-80GB")
ZOO = ("gpt_scanned", "resnet", "experts_einsum", "unet", "gru", "diffusion")
SIZES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mlp": ("mlp", {}),
    "transformer": ("transformer", {}),
    "cnn": ("cnn", {}),
    "mlp_wide": ("mlp", {"features": 1024, "hidden": (1024,) * 4, "classes": 1024}),
    "transformer_wide": ("transformer", {"width": 1024, "layers": 4, "ff": 4096}),
    "cnn_wide": ("cnn", {"batch": 512, "channels": (128, 256, 512, 1024)}),
}
MODELS = (*SIZES, "gpt_bf16", *ZOO)
Row = dict[str, Any]


def built(model: str) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """A model's step and its arguments."""
    if model in ZOO:
        fn, args = target(model)
    elif model == "gpt_bf16":
        from models import Transformer, language_model

        config = Transformer(*(8, 128, 1024, 16, 4096), vocab=8192, causal=True, untied=True, dtype="bfloat16")
        fn, args = language_model(4, 4, config)
    else:
        name, sizes = SIZES[model]
        module = example(name)
        fn, args = module.target_for(module.Config(**sizes))
    return fn, args, {}


def planned(model: str, path: Path, overlap: bool, gbits: float, per_host: int) -> None:
    """A model's plan as a file. `gbits`: of the wide ones' link between hosts of so many cards."""
    import hapsynth
    from hapsynth.cluster.cluster import Cluster, Link
    from hapsynth.cluster.device_kinds import known_kinds
    from hapsynth.running.plan_file import write_plan

    fn, args, _ = built(model)
    kinds = [known_kinds()[name] for name in ("H100-80GB", "V100-16GB") for _ in range(2)]
    hosts, inside = tuple(n // per_host for n in range(4)), Link(150e9, 5e-6) if per_host > 1 else None
    four = Cluster("four", tuple(kinds), hosts, Link(gbits * 1e9 / 8, 10e-6), inside)
    if model in ("mlp", "transformer", "cnn"):
        plan = hapsynth.synthesize(fn, args, cluster("mixed8"), overlap=overlap)
    elif model in ZOO:
        slow = replace(four, devices=tuple(_slow(kind, 3.0 if n < 2 else 1.0) for n, kind in enumerate(kinds)))
        slow = replace(slow, network=Link(1e12, 1e-10), intra=None)
        plan = hapsynth.synthesize(fn, args, slow, leave_out=False, overlap=overlap)
    else:
        plan = hapsynth.synthesize(fn, args, four, leave_out=False, overlap=overlap)
    write_plan(path, plan.traced, plan.result, four if model in ZOO else plan.cluster)


def _slow(kind: Any, speed: float) -> Any:
    """As many GFLOP/s and GB/s, without tiles."""
    granularity = replace(kind.granularity, tile=1)
    rates = {"flops": {"float32": 1e9 * speed}, "bandwidth": 1e9 * speed, "overhead": 1e-10, "efficiency": 1.0}
    return replace(kind, **rates, efficiencies={}, granularity=granularity)


def of_plan(model: str, form: Any, card: str, path: Path, texts: Path | None) -> Row:
    """A plan compiled for a card."""
    from hapsynth.plan import load
    from hapsynth.targets import compile_for

    fn, args, kwargs = built(model)
    plan = load(path, fn, args, example_kwargs=kwargs)
    (found,) = compile_for(plan, [card], form=form, source=partial(built, model), texts=texts)
    if found.error:
        return {"error": found.error}
    return {
        "compile_s": found.seconds,
        "peak_bytes": found.peak_bytes,
        "predicted_bytes": found.predicted_bytes,
        "fingerprint": found.fingerprint,
        "without_triton": found.without_triton,
        "collectives": len(found.collectives),
        "asynchronous": found.asynchronous,
        **_replayed(found.replay, found.predicted._asdict()),
    }


def _replayed(replay: Any, predicted: Mapping[str, float]) -> Row:
    return {
        **asdict(replay),
        "hidden": replay.hidden,
        "hidden_of_time": replay.hidden_of_time,
        "predicted": dict(predicted),
    }


def of_jit(model: str, form: str, card: str, path: Path, texts: Path | None) -> Row:
    """`jax.jit` on the plan's devices, as if all were this card: state on each, the rest cut evenly where it can be."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from hapsynth.cluster.cluster import DEFAULT_AXIS
    from hapsynth.cluster.compiler_target import compiler_target
    from hapsynth.cluster.device_kinds import known_kinds
    from hapsynth.hlo.collectives import collectives_of, fingerprint
    from hapsynth.hlo.replay import replay
    from hapsynth.plan import load
    from hapsynth.search.cost.collective_price import NetworkPrice
    from hapsynth.targets.target_process import compiled_of
    from hapsynth.targets.times import predicted

    fn, args, _ = built(model)
    plan = load(path, fn, args)
    n = plan.used.n
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=compiler_target(card).text(), topology=f"1x{n}x1"
    )
    mesh = Mesh(np.array(topology.devices), ("data",))

    def sharded(x: Any, cut: bool) -> Any:
        cut = cut and len(x.shape) > 0 and x.shape[0] % n == 0
        return NamedSharding(mesh, PartitionSpec("data") if cut else PartitionSpec())

    shardings = [jax.tree.map(lambda x, k=k: sharded(x, k > 0), arg) for k, arg in enumerate(args)]
    began = time.perf_counter()
    with jax.set_mesh(mesh):
        jitted = jax.jit(
            fn,
            in_shardings=tuple(shardings),
            donate_argnums=0,
            compiler_options={"xla_gpu_enable_latency_hiding_scheduler": True} if form == "jit_lhs" else None,
        )
        compiled, without_triton = compiled_of(jitted.lower(*args))
    seconds, text = time.perf_counter() - began, compiled.as_text()
    if texts is not None:
        (texts / f"{card}-{form}-0.txt").write_text(text, encoding="utf-8")
    found = collectives_of(text)
    kind = next((k for k in plan.used.devices if k.name == card), known_kinds()[card])
    price = NetworkPrice(plan.used, ((DEFAULT_AXIS, n),))
    of_plan = predicted(plan.traced.graph, plan.result, plan.cost_model(), 0)
    return {
        "compile_s": seconds,
        "peak_bytes": compiled.memory_analysis().peak_memory_in_bytes,
        "fingerprint": fingerprint(found),
        "without_triton": without_triton,
        "collectives": len(found),
        "asynchronous": sum(c.asynchronous for c in found),
        **_replayed(replay(text, kind, price), {"products": of_plan.whole_products / n}),
    }


def one(model: str, form: str, card: str, plans: Path, hlo: Path | None) -> Row:
    """A row, or what the compiler refuses."""
    path = plans / f"{model}.json"
    texts = None if hlo is None else hlo.resolve() / model
    if texts is not None:
        texts.mkdir(parents=True, exist_ok=True)
    try:
        return (of_jit if form.startswith("jit") else of_plan)(model, form, card, path, texts)
    except Exception as error:  # whatever JAX, XLA or ptxas raises, as a row
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}


def rows_of(model: str, options: Any, plans: Path, known: Iterable[Row]) -> Iterable[Row]:
    path = plans / f"{model}.json"
    done = {(row["form"], row["target"]) for row in known if row["model"] == model}
    wanted = [(form, card) for form in options.forms for card in options.targets if (form, card) not in done]
    if wanted and not path.exists():
        in_own_process({"plan": model, "path": str(path)})
    for form, card in wanted:
        row = {"model": model, "form": form, "target": card, "jax": metadata.version("jax")}
        try:
            yield row | in_own_process(row | {"plans": str(plans)})
        except RowError as failed:
            yield row | {"error": failed.why}


HEADS = (
    *("model", "form", "cards", "same", "asynchronous", "hidden of bytes", "of seconds", "exposed ms"),
    *("FLOPs / share", "peak / predicted", "kernels (plan)", "computing ms (plan)", "compiled in s"),
)


def line(model: str, form: str, rows: Sequence[Row]) -> list[str]:
    """What all cards have to show for a model and a form."""
    good = [row for row in rows if "error" not in row]
    each = lambda text: "; ".join(map(text, good)) or "-"
    same = {row["fingerprint"] for row in good}
    cards = ", ".join(row["target"].split("-")[0] + (" refused" if "error" in row else "") for row in rows)
    return [
        model,
        form,
        cards,
        "yes" if len(same) == 1 else f"{len(same)} of {len(good)}" if good else "-",
        each(lambda row: f"{row['asynchronous']} of {row['collectives']}"),
        each(lambda row: f"{100 * row['hidden']:.0f} %"),
        each(lambda row: f"{100 * row['hidden_of_time']:.0f} %"),
        each(lambda row: f"{1e3 * row['exposed_s']:.3f}"),
        each(lambda row: _over(row["products"], row["predicted"]["products"])),
        each(lambda row: f"{row['peak_bytes'] / row['predicted_bytes']:.2f}" if "predicted_bytes" in row else "-"),
        each(lambda row: f"{row['kernels']:.0f}" + _of(row["predicted"].get("kernels"))),
        each(lambda row: f"{1e3 * row['computing_s']:.2f}" + _of(row["predicted"].get("computing_s"), 1e3)),
        each(lambda row: f"{row['compile_s']:.0f}"),
    ]


def _over(a: float, b: float) -> str:
    return f"{a / b:.3f}" if b else "-"


def _of(predicted: float | None, scale: float = 1.0) -> str:
    return "" if predicted is None else f" ({scale * predicted:.{0 if scale == 1 else 2}f})"


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--models", type=names(MODELS), default=list(MODELS))
    command.add_argument("--forms", type=names(FORMS), default=["switch", "jit", "jit_lhs"])
    command.add_argument("--targets", type=lambda text: text.split(","), default=list(TARGETS))
    command.add_argument(
        "--overlap", action="store_true", help="plans of the least makespan, collectives beside computing"
    )
    command.add_argument("--gbits", type=float, default=400, help="the link of the wide models' cluster, Gbit/s")
    command.add_argument("--per-host", type=int, choices=(1, 2), default=1, help="cards in a host there")
    command.add_argument("--plans", type=Path, help="a folder in which plans are kept")
    command.add_argument("--rows", type=Path, help="a file that has a row a line")
    command.add_argument("--hlo", type=Path, help="a folder for the compiled programs")
    options = command.parse_args()
    if row := options.row:
        if "plan" in row:
            planned(row["plan"], Path(row["path"]), options.overlap, options.gbits, options.per_host)
            print("{}")
        else:
            print(json.dumps(one(row["model"], row["form"], row["target"], Path(row["plans"]), options.hlo)))
        return
    found = [json.loads(text) for text in options.rows.read_text().splitlines()] if _there(options.rows) else []
    with tempfile.TemporaryDirectory() as folder:
        plans = options.plans or Path(folder)
        plans.mkdir(parents=True, exist_ok=True)
        print("| " + " | ".join(HEADS) + " |\n" + "|---" * len(HEADS) + "|")
        for model in options.models:
            for row in rows_of(model, options, plans.resolve(), list(found)):
                found.append(row)
                print(
                    f"{row['model']}, {row['form']}, {row['target']}: {row.get('error', 'compiled')}", file=sys.stderr
                )
                if options.rows:
                    with options.rows.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            for form in options.forms:
                mine = [row for row in found if (row["model"], row["form"]) == (model, form)]
                mine = [row for card in options.targets for row in mine if row["target"] == card]
                print("| " + " | ".join(line(model, form, mine)) + " |", flush=True)
    write_json(options.json, found)


def _there(path: Path | None) -> bool:
    return path is not None and path.exists()


if __name__ == "__main__":
    main()
