"""The repository's shape: packages, links, and imports that run one way."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("hapsynth", "instructions", "search")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
LINKED = SETUPTOOLS["package-dir"]


def sources(*rooms: str) -> list[Path]:
    """Python files of the rooms, once each: the links inside hapsynth/ are other names of the rooms."""
    links = [ROOT / "hapsynth" / name for name in ("instructions", "search")]
    files = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    return sorted(f for f in files if not any(f.is_relative_to(link) for link in links))


@cache
def imports(file: Path) -> list[str]:
    """The modules that a file imports, whole names, wherever in the file."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.append("." * node.level + (node.module or ""))
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return found


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_pyproject_lists_every_package_on_disk() -> None:
    folders = {file.parent for file in sources(*ROOMS)}
    dotted = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    on_disk = {name if within(name, "hapsynth") else f"hapsynth.{name}" for name in dotted}
    assert sorted(SETUPTOOLS["packages"]) == sorted(on_disk)
    assert LINKED == {"hapsynth.instructions": "instructions", "hapsynth.search": "search"}
    for folder in folders:
        assert (folder / "__init__.py").exists(), f"{folder} has no __init__.py"


def test_paths_named_in_the_docs_exist() -> None:
    """`search/cost/model.py`, `lower/_gloo.py`: from the root, or from hapsynth/."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        path for page in pages for path in re.findall(r"`((?:[\w-]+/)+[\w.-]*\.(?:py|toml|md|txt))\b", page.read_text())
    }
    assert len(named) > 40
    assert not [path for path in sorted(named) if not ((ROOT / path).exists() or (ROOT / "hapsynth" / path).exists())]


def test_package_data_exists() -> None:
    files = SETUPTOOLS["package-data"]["hapsynth"]
    assert set(files) >= {"py.typed", "cluster/devices.toml"}
    assert all((ROOT / "hapsynth" / file).is_file() for file in files)


def test_links() -> None:
    names = ("instructions", "search")
    for name in names:
        link = ROOT / "hapsynth" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"
    # The link is for tools that read no build configuration. Imports must not go by both ways: one module, once.
    code = "from hapsynth import instructions, search; print(instructions.__file__, search.__file__, sep='\\n')"
    out = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True).stdout
    assert [Path(line).resolve() for line in out.splitlines()] == [ROOT / name / "__init__.py" for name in names]


def test_no_private_jax_and_no_bare_rooms() -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in sources(*ROOMS, "examples", "tests", "benchmarks")
        for module in imports(file)
        if within(module, "jax._src", "jaxlib", "search", "instructions") or module.startswith(".")
    ]
    assert not wrong


def test_imports_run_one_way() -> None:
    """graph <- instructions <- search <- (lower, plan, report) <- profile <- cli (docs/design/overview.md)."""
    above = {
        "instructions": ("search", "lower", "plan", "profile", "report", "cli"),
        "search": ("lower", "plan", "profile", "report", "cli"),
        "hapsynth/lower": ("cli",),
        "hapsynth/report": ("profile", "cli"),
        "hapsynth/profile": ("cli",),
    }
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for room, rooms in above.items()
        for file in sources(room)
        for module in imports(file)
        if within(module, *(f"hapsynth.{name}" for name in rooms))
    ]
    assert not wrong


@pytest.mark.slow
def test_wheel_holds_everything(tmp_path: Path) -> None:
    """A wheel, built as an installer would, has each source file of the rooms and the data; where .ci/run has built
    one, it is that."""
    built = Path(os.environ.get("HAPSYNTH_WHEEL", tmp_path))
    if built == tmp_path:
        # From a copy: setuptools leaves build/ behind, and other tests read the tree at the same time.
        tree = tmp_path / "tree"
        for room in ROOMS:
            shutil.copytree(ROOT / room, tree / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, tree)
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(tree)]
        subprocess.run(build, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    relative = {str(file.relative_to(ROOT)) for file in sources(*ROOMS)}
    expected = {name if name.startswith("hapsynth/") else f"hapsynth/{name}" for name in relative}
    missing = (expected | {"hapsynth/cluster/devices.toml", "hapsynth/py.typed"}) - names
    assert not missing
