"""The command line on a model file that returns several functions with one state."""

import json
import re
from pathlib import Path

import pytest
from cli_model import MODEL

import hapsynth
from hapsynth.cli.main import main
from hapsynth.cli.model_file import Targets, load_target
from hapsynth.cli.options import asked, parser

SEVERAL = """

def loss(params, batch):
    return jnp.sum((jnp.tanh(batch["x"] @ params) - batch["y"]) ** 2)


def init(scale):
    return {"m": jnp.zeros((256, 128)), "w": jnp.full((256, 128), scale)}


def train_and_more():
    (state, batch), one = arguments(512), jax.ShapeDtypeStruct((), "float32")
    return {"train": step, "eval": loss, "init": init}, {
        "train": (state, batch),
        "eval": (state["w"],),
        "init": (one,),
    }, {"eval": {"batch": batch}}
"""
FILE = "model.py:train_and_more"
SEARCH = ["search", FILE, "--cluster", "mixed.toml", "--state", "eval:[0]=[0]['w']"]


@pytest.fixture
def model(files: Path) -> Path:
    (files / "model.py").write_text(MODEL + SEVERAL)
    return files


def test_several(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*SEARCH, "--frequency", "eval=0.5", "--plan", "plans.json"]
    assert main([*asked, "--json", "told.json"]) == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    assert text.startswith("3 functions planned with one state: train, eval, init\n")
    assert re.findall(r"^(\w+) +(\S+) +\S+ us", text, re.MULTILINE)[:3] == [
        ("train", "1"),
        ("eval", "0.5"),
        ("init", "0"),
    ]
    assert re.findall(r"^==== (\w+)$", text, re.MULTILINE) == ["train", "eval", "init"]
    assert text.count("\nCertificate\n") == 3
    assert text.endswith("\nplans          plans.json\n")

    data = json.loads((model / "told.json").read_text())
    assert (data["schema"], data["status"]) == ("hapsynth-search-several-1", "planned")
    assert data["frequency"] == {"train": 1.0, "eval": 0.5, "init": 0.0}
    assert data["state"].keys() == {"[0]['m']", "[0]['w']"}
    each = data["functions"]
    assert all(each[name]["schema"] == "hapsynth-search-1" for name in ("train", "eval", "init"))
    assert data["cost_s"] == pytest.approx(each["train"]["cost_s"] + 0.5 * each["eval"]["cost_s"])
    assert 0 < data["lower_bound_s"] <= data["cost_s"]

    targets = load_target(FILE)
    assert isinstance(targets, Targets)
    plans = hapsynth.load_plans("plans.json", targets.functions, targets.args, example_kwargs=targets.kwargs)
    assert [plans.cost, plans.frequency, plans.layouts] == [data["cost_s"], data["frequency"], data["state"]]

    # What is about one plan takes it from the file.
    assert main(["explain", "plans.json", FILE, "--function", "eval"]) == 0
    assert f"{plans['eval'].cost * 1e6:.3f} us predicted step time" in capsys.readouterr().out
    assert main(["export", "plans.json", FILE, "--function", "train", "-o", "train.py"]) == 0
    assert compile((model / "train.py").read_text(), "train.py", "exec")
    assert main(["run", FILE, "--plan", "plans.json", "--function", "train", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_one_of_several_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = [FILE, "--function", "eval"]
    assert main(["search", *one, "--cluster", "mixed.toml", "--plan", "eval.json"]) == 0
    assert main(["explain", "eval.json", *one]) == 0
    assert main(["compare", *one, "--cluster", "mixed.toml"]) == 0


def test_ratios_and_memory(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fractions = [0.125] * 6 + [0.25, 0]
    given = ",".join(map(str, fractions))
    assert main([*SEARCH, "--ratios", given, "--json", "told.json"]) == 0
    told = json.loads((model / "told.json").read_text())
    cut = [shares for each in told["functions"].values() for shares in each["ratios"].values()]
    assert cut == [fractions] * len(cut) != []
    assert main([*SEARCH, "--memory-limit", "64 KiB", "--json", "none.json", "--plan", "p.json"]) == 1
    assert re.search(r"^hapsynth search: infeasible: 'train': .*\n$", capsys.readouterr().err)
    none = json.loads((model / "none.json").read_text())
    assert none.keys() == {*told, "message"}
    assert (none["status"], none["cost_s"]) == ("infeasible", None)
    assert not (model / "p.json").exists()


def test_functions_of_any_names() -> None:
    """One may begin with another's name and a colon."""
    argv = ["search", "m.py", "--cluster", "c.toml"]
    given = {
        "--ratios": ["train-step:0.5,0.5", "a:b:[0]['x:y'].0=1,0", "a:[0]['x'].0=0,1"],
        "--expect": ["a:b:train.py:4=3", "a:train.py:4=0.5,0.5"],
        "--state": ["train-step:[0]=[0]['x']", "a:b:return=[0]"],
        "--frequency": ["train-step=0.5", "a:b=2"],
    }
    texts = [text for option, each in given.items() for one in each for text in (option, one)]
    found = asked(parser().parse_args([*argv, *texts, "--no-cache"]), ["a", "a:b", "train-step"])
    assert not found["cache"]
    assert found["ratios"] == {
        "train-step": (0.5, 0.5),
        "a:b": {"[0]['x:y'].0": (1.0, 0.0)},
        "a": {"[0]['x'].0": (0.0, 1.0)},
    }
    assert found["expect"] == {"a:b": {"train.py:4": 3.0}, "a": {"train.py:4": (0.5, 0.5)}}
    assert found["state"] == {"train-step": {"[0]": "[0]['x']"}, "a:b": {"return": "[0]"}}
    assert found["frequency"] == {"train-step": 0.5, "a:b": 2.0}


ARGS = "(jax.ShapeDtypeStruct((8,), 'float32'),)"
BAD: dict[str, tuple[list[str], str]] = {
    "nothing picked": (
        ["compare", FILE, "--cluster", "mixed.toml"],
        r"model\.py: train_and_more\(\) returns the functions train, eval, init: this is about one of them, pick it, "
        r"e\.g\. --function train",
    ),
    "explain what": (["explain", "plan.json", FILE], r".* pick it, e\.g\. --function train"),
    "no such function": ([*SEARCH, "--function", "evil"], r"--function evil: .*; did you mean eval\?"),
    "picked of one": (
        ["search", "model.py", "--cluster", "mixed.toml", "--function", "train"],
        r"--function picks one of several, but model\.py: target\(\) returns one: leave it out",
    ),
    "frequency of one": (
        ["search", "model.py", "--cluster", "mixed.toml", "--frequency", "eval=1"],
        r"--frequency is about several functions: leave it out, or --function",
    ),
    "frequency of none": (
        [*SEARCH, "--frequency", "evil=1"],
        r"frequency names 'evil', but the functions are 'train', 'eval', 'init'; did you mean 'eval'\?",
    ),
    "advice": ([*SEARCH, "--advise"], r"--advise is about one function: leave it out, or pick one with --function; .*"),
    "expected of none": (
        [*SEARCH, "--expect", "model.py:8=3"],
        r"--expect names no function; put one of train, eval, init first, e\.g\. train:",
    ),
    "ratios of none": (
        [*SEARCH, "--ratios", "[1]['x'].0=1", "--ratios", "0.5,0.5"],
        r"--ratios names no function; .*",
    ),
    "ratios of one by name": (
        ["search", "model.py", "--cluster", "mixed.toml", "--ratios", "train:0.5,0.5"],
        r"--ratios names the function 'train', but there is one alone: leave the name out",
    ),
    "frequency twice": (
        [*SEARCH, "--frequency", "eval=1", "--frequency", "eval=2"],
        r"--frequency is given 2 times for eval: give it once",
    ),
    "expected twice": (
        [*SEARCH, *["--expect", "train:model.py:8=3", "--expect", "train:model.py:8=4"]],
        r"--expect is given 2 times for model\.py:8: give it once",
    ),
    "state twice": ([*SEARCH, "--state", "eval:[0]=[0]['m']"], r"--state is given 2 times for \[0\]: give it once"),
    "ratios of the one that is picked": (
        ["search", FILE, "--cluster", "mixed.toml", "--function", "train", "--ratios", "train:0.5,0.5"],
        r"--ratios names the function 'train', but there is one alone: leave the name out",
    ),
    "no ratios": (
        [*SEARCH, "--ratios", "train:[0]['w'].0=a,b"],
        r"argument --ratios: \"\[0\]\['w'\]\.0=a,b\" is not fractions, as in .*",
    ),
    "no expectation": ([*SEARCH, "--expect", "train:=8"], r"--expect: '=8' is not a source line and numbers, as in .*"),
    "no state": ([*SEARCH, "--state", "train:=[0]"], r"--state: '=\[0\]' is no path and path of the state, as in .*"),
    "state of nothing": ([*SEARCH[:-2], "--state", "eval:[0]=[7]"], r"state has '\[0\]' of 'eval' be '\[7\]', but .*"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_usage(case: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv, pattern = BAD[case]
    assert main(argv) == 2
    text, errors = capsys.readouterr()
    assert text == ""
    assert re.fullmatch(rf"hapsynth {argv[0]}: error: {pattern}\n", errors), errors


@pytest.mark.parametrize(
    ("returned", "pattern"),
    [
        (f"{{'a': abs}}, {ARGS}", r"a dict as fn and a tuple as example_args; give dicts, by the same names"),
        ("{'a': abs}, {}", r"dicts of which example_args has no 'a'; give dicts, by the same names"),
        (f"{{}}, {{'a': {ARGS}}}", r"dicts of which fn has no 'a'; .*"),
        (f"{{'a': 3}}, {{'a': {ARGS}}}", r"for 'a' a int as fn, which can't be called"),
        ("{'a': abs}, {'a': {}}", r"for 'a' a dict as example_args; give a tuple, even of one argument"),
        (f"{{'a': abs}}, {{'a': {ARGS}}}, {{'b': {{}}}}", r"dicts of which fn has no 'b'; .*"),
        ("{}, {}", r"a dict of no functions"),
    ],
)
def test_bad_models(returned: str, pattern: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "bad.py").write_text(f"import jax\ndef target(): return {returned}")
    assert main(["search", "bad.py", "--cluster", "mixed.toml"]) == 2
    errors = capsys.readouterr().err
    assert re.search(rf"bad\.py: target\(\) must return .*, but it returned {pattern}\n$", errors), errors


@pytest.mark.parametrize(
    ("option", "text", "says"),
    [
        ("--ratios", "eval:0.5;0.5", "'0.5;0.5' is not fractions"),
        ("--expect", "m.py:8=often", "'m.py:8=often' is not a source line and numbers"),
        ("--state", "eval:[0]", "'eval:[0]' is no path and path of the state"),
    ],
)
def test_what_cannot_be_read_is_told_before_the_model_file_runs(
    option: str, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", "m.py", "--cluster", "c", option, text]) == 2
    assert f"argument {option}: {says}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["eval", "eval=-1", "=3", "eval=x"])
def test_bad_frequency(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "m.py", "--cluster", "c", "--frequency", text]) == 2
    assert f"{text!r} is no function and a number of at least 0, as in eval=0.02" in capsys.readouterr().err
