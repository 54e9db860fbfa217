"""The gallery's scripts, run as they stand: each asserts that its plan follows one device."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
PAGE = Path(__file__).parents[2] / "docs" / "gallery.md"
SCRIPTS = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "unlike")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SCRIPTS)
def test_follows_one_device(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(GALLERY)
    runpy.run_path(str(GALLERY / f"{name}.py"), run_name="__main__")
    assert "rows of the batch on each device" in capsys.readouterr().out


def test_the_page_lists_every_script() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in SCRIPTS if f"`{name}.py`" not in text] == []
