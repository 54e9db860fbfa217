"""The plan files of a fixed set of searches, and whether they are those of another commit, byte for byte.

    python benchmarks/plan_files.py OUT [--against DIR] [--only REGEX]

Each of the three examples on five clusters, the transformer on a mesh of 2 x 4, and BERT of 12 layers on mixed8: OUT
gets a plan file of each. `--against`: a folder that this command wrote at another commit; the exit status is 1 where a
file differs, and the first line that does is printed. One process per plan; only what is public is used, so that the
script runs at any commit (copy it there).
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("mlp", "transformer", "cnn")
CLUSTERS = ("even8", "mixed8", "tiny_and_big", "paper64", "straggler")
CASES = [*(f"{e}-{c}" for e in EXAMPLES for c in CLUSTERS), "transformer-mixed8-2x4", "bert-mixed8"]


def write(case: str, to: Path) -> None:
    """The plan file of `case`, searched in this process."""
    import jax

    import hapsynth

    model, cluster_name, *mesh = case.split("-")
    cluster = hapsynth.Cluster.load(ROOT / "examples" / "clusters" / f"{cluster_name}.toml")
    jax.config.update("jax_num_cpu_devices", cluster.n)
    folder = "benchmarks" if model == "bert" else "examples"
    sys.path.insert(0, str(ROOT / folder))
    if model == "bert":
        fn, args = importlib.import_module("models").bert(cluster.n, layers=12)
    else:
        fn, args = importlib.import_module(model).target()
    if not mesh:
        hapsynth.synthesize(fn, args, cluster, cache=False).save(to)
        return
    sizes = tuple(int(n) for n in mesh[0].split("x"))
    hapsynth.synthesize(fn, args, jax.make_mesh(sizes, ("x", "y")), cluster=cluster, cache=False).save(to)


def first_difference(a: str, b: str) -> str | None:
    """The first line of `a` and `b` that differs, as `line: a | b`; None where the texts are equal."""
    if a == b:
        return None
    one, other = a.splitlines(), b.splitlines()
    at = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    said = [lines[at].strip()[:120] if at < len(lines) else "(ends)" for lines in (one, other)]
    return f"line {at + 1}: {said[0]} | {said[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        write(options.case, options.out)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    differ = 0
    for case in (case for case in CASES if re.search(options.only, case)):
        file = options.out / f"{case}.json"
        subprocess.run([sys.executable, __file__, str(file), "--case", case], check=True)
        said = ""
        if options.against:
            difference = first_difference(file.read_text(), (options.against / file.name).read_text())
            differ += difference is not None
            said = "the same" if difference is None else f"DIFFERS {difference}"
        print(f"{case:<28}{said}", flush=True)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
