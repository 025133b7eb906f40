"""The page about the architecture names modules that exist, and every room there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "reshard_ckpt"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = set(re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|md))?)", PAGE)) | set(re.findall(r"`([a-z_]+\.py)`", PAGE))


def rooms() -> set[str]:
    """The folders of the package that hold modules, but those inside `formats`."""
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    return {f"{folder}/" for folder in folders if folder not in (".", "core") and not folder.startswith("formats/")}


def test_each_path_that_the_page_names_exists():
    assert len(NAMED) > 40
    assert [name for name in sorted(NAMED) if not (PACKAGE / name).exists() and not (ROOT / name).exists()] == []


def test_the_page_lists_each_module_with_the_first_line_of_its_docstring(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from list_modules import page

    assert page() == PAGE, "run python docs/list_modules.py"


def test_each_room_is_on_the_page():
    assert sorted(rooms() - NAMED) == []


def test_the_page_names_functions_that_are_where_it_says():
    for module, name in re.findall(r"`([a-z_/]+\.py)` \(`([A-Za-z_]+)`\)", PAGE):
        text = (PACKAGE / module).read_text()
        assert re.search(rf"^(def|class) {name}\b|^    def {name}\b|^{name} = ", text, re.M), (module, name)
