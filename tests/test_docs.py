"""The manual: its code runs, its commands and links exist, and README's listing runs as it stands."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser

from hapsynth.cli.options import parser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.glob("*.md"))
RUN = ("training", "checkpoints", "memory", "reading_a_plan")
"""Pages whose code goes on from the quickstart's."""
SKETCHES = ("extending", "gpu", "nonfinite", "gallery", "evaluation", "measurements", "clusters", "several_processes")
"""Pages whose code is tested elsewhere, or is of machines that are not here."""


def run(page: str, names: dict[str, Any]) -> int:
    """Run the Python blocks of a page, in order; how many there are."""
    document = Document.parse(str(DOCS / f"{page}.md"), PythonCodeBlockParser())
    document.namespace.update(names)
    count = 0
    for example in document.examples():
        example.evaluate()
        count += 1
    names.update(document.namespace)
    return count


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to write in, with the repository's examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_code_of_the_manual_runs(here: Path) -> None:
    names: dict[str, Any] = {}
    assert run("quickstart", names) >= 5
    for page in RUN:
        # What one page makes is not there on the next.
        assert run(page, dict(names)) >= 1, page


def test_every_page_with_code_is_run_or_is_named_as_a_sketch() -> None:
    with_code = {page.stem for page in PAGES if "```python" in page.read_text()}
    assert with_code <= {"quickstart", *RUN, *SKETCHES}


@pytest.mark.optimized
@pytest.mark.slow
def test_the_listing_of_the_readme_runs(here: Path) -> None:
    (listing,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert sum(bool(line.strip()) for line in listing.splitlines()) <= 22
    if "HAPSYNTH_LISTING_RUNS" in os.environ:
        pytest.skip(".ci/run has it run with the wheel")
    (here / "listing.py").write_text(listing + "\nassert np.isfinite(value), value\n")
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "listing.py"], cwd=here, env=environment, check=True)


def commands() -> list[str]:
    """The lines of README and manual that call hapsynth."""
    found: dict[str, None] = {}
    for page in (ROOT / "README.md", *PAGES):
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.splitlines() if not language else ():
                if line.startswith("hapsynth ") and "[" not in line and "..." not in line:
                    found[line.partition("  #")[0].strip()] = None
    return list(found)


@pytest.mark.parametrize("line", commands())
def test_commands_of_the_manual_exist(line: str) -> None:
    """Their options are those of the command line, and so are those of a command that the launcher starts."""
    options = parser().parse_args(shlex.split(line)[1:])
    if options.command == "launch" and options.module:
        assert options.module[0] == "hapsynth"
        parser().parse_args(options.module[1:])


def test_known_gpus_are_those_of_the_table() -> None:
    section = (DOCS / "clusters.md").read_text().partition("## Known GPUs")[2].partition("\n\n`hapsynth/cluster/")[0]
    table = tomllib.loads((ROOT / "hapsynth" / "cluster" / "devices.toml").read_text())
    assert re.findall(r"`([A-Z][\w-]+)`", section) == list(table)


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if not target.startswith(("http", "mailto")):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_navigation_has_every_page() -> None:
    nav = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert nav == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
